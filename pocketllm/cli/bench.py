"""`pocketllm bench`: figures of this machine, in a table, as JSON and as a picture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pocketllm.bench.args import ServeBenchArgs
from pocketllm.cli.options import Parser, add_options, given_options

DESCRIPTION = "Measurements that can be repeated: a table on stdout, the report as JSON with --output, a picture with --plot."
_EXAMPLES: dict[str, str] = {
    "serve": """\
examples:
  pocketllm bench serve                                              the server on port 8000, with one client and with eight
  pocketllm bench serve --request-rate 1,2,4,8 --goodput ttft:500,tpot:50 --plot load.png
  pocketllm bench serve --url http://host:8080/v1 --concurrency 1,16,64 --lengths sharegpt-like --output load.json
""",
}
_HELP = {"serve": "a server under load: any that is OpenAI-compatible"}


def add_commands(parser: Parser) -> dict[str, Parser]:
    """The commands below `bench`, by "bench NAME"."""
    commands = parser.add_subparsers(dest="measure", metavar="MEASURE", parser_class=Parser, title="measures", prog="pocketllm bench")
    parsers = {name: commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", epilog=_EXAMPLES[name]) for name, text in _HELP.items()}
    add_options(parsers["serve"], ServeBenchArgs, "load")
    return {f"bench {name}": one for name, one in parsers.items()}


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; the exit code.

    Raises:
        PocketLLMError: an option is wrong, or what is to be measured fails.
    """
    return {"serve": _serve}[arguments.measure](arguments)


def _serve(arguments: argparse.Namespace) -> int:
    args = ServeBenchArgs(**given_options(arguments, ServeBenchArgs))
    from pocketllm.bench.plots import plot_serving
    from pocketllm.bench.serve import measure_serving, serving_table

    with _results(args.output, args.plot, plot_serving, serving_table) as show, _progress() as progress:
        report = measure_serving(args, progress)
        show(report)
    return 0


@contextmanager
def _results(
    output: str | None, plot: str | None, draw: Callable[[dict[str, Any], str], None], tabulate: Callable[[dict[str, Any]], str]
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Checks before anything is measured whether its results can be written, and writes the report that it is given, at the end."""
    from pocketllm.bench.plots import require_matplotlib
    from pocketllm.bench.report import check_writable, write_report

    check_writable(output, "output")
    check_writable(plot, "plot")
    if plot is not None:
        require_matplotlib()
    reports: list[dict[str, Any]] = []
    yield reports.append
    for report in reports:
        print(tabulate(report))
        if output is not None:
            write_report(report, output)
        if plot is not None:
            draw(report, plot)
        for path in (output, plot):
            if path is not None:
                print(f"pocketllm: written {path}", file=sys.stderr)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each thing that is measured, on stderr where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as bars:
        tasks: dict[str, Any] = {}

        def report(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done)

        yield report
