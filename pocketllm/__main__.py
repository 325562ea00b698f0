"""`python -m pocketllm`."""

from __future__ import annotations

import sys

from pocketllm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
