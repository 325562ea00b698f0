"""A server process over the fake backend, for the tests of its life: `python fake_server.py '{"server": {...}, "fake": {...}, "load": "ok"}'`."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pocketllm.backends.base import ProgressCallback
from pocketllm.config import ServerArgs
from pocketllm.errors import ConfigurationError, PocketLLMError
from pocketllm.generation import GenerationService
from pocketllm.server.run import serve
from tests.fake_serving import fake, make_service

if __name__ == "__main__":
    options = json.loads(sys.argv[1])

    def load(progress: ProgressCallback) -> GenerationService:
        kind = options.get("load", "ok")
        if kind == "refused":
            raise ConfigurationError("model.gguf is truncated: download it again.")
        if kind == "broken":
            raise KeyError("blk.0.attn_q.weight")
        if kind == "forever":
            threading.Event().wait()
        return make_service(fake(**options.get("fake", {})), progress)

    try:
        sys.exit(serve(ServerArgs(**options.get("server", {})), load))
    except PocketLLMError as error:
        print(f"pocketllm: error: {error}", file=sys.stderr)
        sys.exit(2)
