"""The end of the process while a model still loads."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def exit_while_loading(code: int) -> NoReturn:
    """End the process with `code`, at once.

    The thread that loads is inside native code. The interpreter's own way out would unwind it there, which C++ answers with an abort.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
