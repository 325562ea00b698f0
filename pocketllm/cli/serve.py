"""`pocketllm serve`: the OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import threading

from pocketllm.backends.base import LoadProgress, ProgressCallback
from pocketllm.cli.exit import exit_while_loading
from pocketllm.cli.options import given_options
from pocketllm.cli.progress import ProgressLine
from pocketllm.config import EngineArgs, ServerArgs

EXAMPLES = """\
examples:
  pocketllm serve                                     the embedded SmolLM2-135M-Instruct, on port 8000
  pocketllm serve --model ./model.gguf --port 8080    a local file
  pocketllm serve --model owner/name --api-key KEY    a Hugging Face repo, for clients that have the key

Options of the engine may also be set as POCKETLLM_<OPTION>; a flag wins.
"""


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal; the exit code.

    Raises:
        PocketLLMError: an option is wrong, the address is taken, or the model can't be loaded.
    """
    engine_args = EngineArgs.from_env(**given_options(arguments, EngineArgs))
    server_args = ServerArgs(**given_options(arguments, ServerArgs))
    # Imported late: `pocketllm --help` and a wrong option need no HTTP server.
    from pocketllm.generation import GenerationService
    from pocketllm.server.run import serve

    loading = threading.Event()

    def load(progress: ProgressCallback) -> GenerationService:
        loading.set()
        with ProgressLine() as line:

            def report(now: LoadProgress) -> None:
                progress(now)
                line(now)

            service = GenerationService.open(engine_args, report)
        loading.clear()
        return service

    code = serve(server_args, load)  # a load that failed is raised here
    if loading.is_set():
        exit_while_loading(code)
    return code
