"""The `pocketllm` command."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from pocketllm import __version__
from pocketllm.cli import bench, chat, serve
from pocketllm.cli.options import Parser, add_options, given_options, refuse_unknown
from pocketllm.config import EngineArgs, ServerArgs, SupervisorArgs
from pocketllm.errors import PocketLLMError

_DESCRIPTION = """\
PocketLLM runs language models on the hardware you have.

  pocketllm serve      an OpenAI-compatible HTTP server on port 8000
  pocketllm chat       a conversation in the terminal
  pocketllm inspect    what a checkpoint is, and what would run it
  pocketllm bench      how fast an engine or a server is, with the limit beside it

Each works without any option, on a small embedded model. Add --model for your own: a directory, a file, or a Hugging Face repo id.
"""
_INSPECT_EXAMPLES = """\
examples:
  pocketllm inspect                     the embedded model
  pocketllm inspect ./model.gguf        a local file or directory
  pocketllm inspect owner/name --json   a Hugging Face repo, as JSON
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` [that of the process] and return its exit code; every foreseen failure is one line and 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a terminal that lacks a character still shows the rest
    try:
        parsers = _parsers()
        arguments, unknown = parsers[""].parse_known_args(argv)
        name = " ".join(word for word in (arguments.command, getattr(arguments, "measure", None)) if word)
        refuse_unknown(parsers[name], unknown)
        if name in ("", "bench"):
            parsers[name].print_help()
            return 2
        return {"serve": serve.run, "chat": chat.run, "inspect": _inspect, "bench": bench.run}[arguments.command](arguments)
    except PocketLLMError as error:
        print(f"pocketllm: error: {' '.join(error.message.split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # such as `pocketllm inspect | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains while it flushes
        return 1


def _parsers() -> dict[str, Parser]:
    top = Parser(prog="pocketllm", usage="pocketllm COMMAND [options]", description=_DESCRIPTION)
    top.add_argument("--version", action="version", version=f"pocketllm {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser, title="commands", prog="pocketllm")

    serving = commands.add_parser("serve", help="serve a model over HTTP", description="An OpenAI-compatible HTTP server.", epilog=serve.EXAMPLES)
    add_options(serving, ServerArgs, "server")
    add_options(serving, EngineArgs, "engine")
    add_options(serving, SupervisorArgs, "ranks of a model that several devices share")

    chatting = commands.add_parser("chat", help="talk to a model", description="A conversation in the terminal.", epilog=chat.EXAMPLES)
    chat.add_arguments(chatting)
    add_options(chatting, EngineArgs, "engine", leave_out=("seed",))

    inspecting = commands.add_parser(
        "inspect", usage="pocketllm inspect [options] [MODEL]", help="describe a checkpoint", description="What a checkpoint is.", epilog=_INSPECT_EXAMPLES
    )
    inspecting.add_argument(
        "model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help="local directory or file, or a Hugging Face repo id [the embedded model]"
    )
    inspecting.add_argument("--model", dest="model", default=argparse.SUPPRESS, metavar="MODEL", help="the same, as a flag")
    inspecting.add_argument("--model-format", default=argparse.SUPPRESS, metavar="FORMAT", help="auto, safetensors or gguf [auto]")
    inspecting.add_argument("--json", dest="as_json", action="store_true", help="print JSON")

    benching = commands.add_parser("bench", usage="pocketllm bench MEASURE [options]", help="measure an engine or a server", description=bench.DESCRIPTION)
    return {"": top, "serve": serving, "chat": chatting, "inspect": inspecting, "bench": benching, **bench.add_commands(benching)}


def _inspect(arguments: argparse.Namespace) -> int:
    args = EngineArgs.from_env(**given_options(arguments, EngineArgs))
    from pocketllm.cli import inspect

    return inspect.run(args.model, args.model_format, arguments.as_json)
