"""`pocketllm serve`: the OpenAI-compatible HTTP server."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType

from pocketllm.backends.base import LoadProgress, ProgressCallback
from pocketllm.cli.exit import exit_while_loading
from pocketllm.cli.options import flag_of, given_options, spell_options
from pocketllm.cli.progress import ProgressLine
from pocketllm.config import EngineArgs, ServerArgs, SupervisorArgs
from pocketllm.errors import ConfigurationError
from pocketllm.parallel.rank import Rank, names_a_rank
from pocketllm.parallel.rank_link import RankLink

EXAMPLES = """\
examples:
  pocketllm serve                                     the embedded SmolLM2-135M-Instruct, on port 8000
  pocketllm serve --model ./model.gguf --port 8080    a local file
  pocketllm serve --model owner/name --api-key KEY    a Hugging Face repo, for clients that have the key
  pocketllm serve --model DIR --tensor-parallel-size 2    two GPUs share the model

Options of the engine may also be set as POCKETLLM_<OPTION>; a flag wins.
"""
_CLOSING = 15.0  # seconds that ranks get beyond the server's own shutdown_timeout


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal; the exit code.

    Raises:
        PocketLLMError: an option is wrong, the address is taken, the model can't be loaded, or a rank failed.
    """
    engine_args = EngineArgs.from_env(**given_options(arguments, EngineArgs))
    server_args = ServerArgs(**given_options(arguments, ServerArgs))
    supervisor_options = given_options(arguments, SupervisorArgs)
    supervisor_args = SupervisorArgs(**supervisor_options)
    if engine_args.tensor_parallel_size == 1:
        return _serve(engine_args, server_args, None)
    if supervisor_args.tensor_parallel_supervisor:
        return _supervise(engine_args, server_args, supervisor_args)
    for name in sorted(supervisor_options.keys() - {"tensor_parallel_supervisor"}):
        raise ConfigurationError(f"{flag_of(name)} is the supervisor's, and --no-tensor-parallel-supervisor is given: leave one of them out.", param=name)
    rank = Rank.from_environment(engine_args)
    engine_args = replace(engine_args, tensor_parallel_rank=rank.index)
    link = RankLink(rank)
    return _serve(engine_args, server_args, link) if rank.index == 0 else _follow(engine_args, link)


def _supervise(engine_args: EngineArgs, server_args: ServerArgs, supervisor_args: SupervisorArgs) -> int:
    """Start a process for each rank, once the model is known to be one that they can share, and watch them."""
    if names_a_rank():
        raise ConfigurationError(
            "this process is a rank of another launcher already (RANK and WORLD_SIZE are set): add --no-tensor-parallel-supervisor, or unset them.",
            param="tensor_parallel_supervisor",
        )
    if engine_args.tensor_parallel_rank > 0:
        raise ConfigurationError(
            f'"tensor_parallel_rank" = {engine_args.tensor_parallel_rank} is for a manual launcher, and the supervisor numbers its ranks itself: leave it out, '
            "or add --no-tensor-parallel-supervisor.",
            param="tensor_parallel_rank",
        )
    from pocketllm.backends.open import open_backend
    from pocketllm.parallel.supervisor import Supervisor

    with _stoppable():
        with ProgressLine() as line:
            open_backend(engine_args, line)
        options = [*spell_options(engine_args), *spell_options(server_args, leave_out=("api_key",)), "--no-tensor-parallel-supervisor"]
        command = [sys.executable, "-m", "pocketllm", "serve", *options]
        secrets = {} if server_args.api_key is None else {"POCKETLLM_API_KEY": server_args.api_key}  # arguments are everybody's to read
        return Supervisor(supervisor_args, engine_args.tensor_parallel_size, command, server_args.shutdown_timeout + _CLOSING, secrets).run()
    return 0


class _StoppedError(BaseException):
    """A signal came before there were ranks."""


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM end the block; the supervisor has handlers of its own while it runs."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _StoppedError

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with contextlib.suppress(_StoppedError):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _serve(engine_args: EngineArgs, server_args: ServerArgs, link: RankLink | None) -> int:
    # Imported late: `pocketllm --help` and a wrong option need no HTTP server.
    from pocketllm.generation import GenerationService
    from pocketllm.server.run import serve

    loading = threading.Event()

    def load(progress: ProgressCallback) -> GenerationService:
        loading.set()
        with ProgressLine() as line:
            service = GenerationService.open(engine_args, _both(progress, line))
        if link is not None:
            service.backend.on_death = link.failed
            link.on_lost(service.backend.abandon)
            link.ready()
            link.wait_until_started()
        loading.clear()
        return service

    code = serve(server_args, load)  # a load that failed is raised here
    if loading.is_set():
        exit_while_loading(code)
    return code


def _follow(engine_args: EngineArgs, link: RankLink) -> int:
    """Compute what rank 0 orders, until it stops."""
    from pocketllm.backends.open import open_backend

    with ProgressLine() as line:
        _, backend = open_backend(engine_args, line)
        backend.follow(line, link.ready)
    return 0


def _both(first: ProgressCallback, second: ProgressCallback) -> Callable[[LoadProgress], None]:
    def report(now: LoadProgress) -> None:
        first(now)
        second(now)

    return report
