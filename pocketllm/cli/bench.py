"""`pocketllm bench`: figures of this machine, in a table, as JSON and as a picture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pocketllm.bench.args import CompareBenchArgs, LatencyBenchArgs, ServeBenchArgs, ThroughputBenchArgs
from pocketllm.cli.options import Parser, add_options, given_options
from pocketllm.config import EngineArgs

DESCRIPTION = "Measurements that can be repeated: a table on stdout, the report as JSON with --output, a picture with --plot."
_EXAMPLES: dict[str, str] = {
    "latency": """\
examples:
  pocketllm bench latency                                            the embedded model, after prompts of 128 and 512 tokens
  pocketllm bench latency --model ./model.gguf --input-tokens 512,4096 --output latency.json
""",
    "throughput": """\
examples:
  pocketllm bench throughput                                         the embedded model, batches of 1, 2, 4 and 8
  pocketllm bench throughput --model owner/name --batch-sizes 1,8,64 --plot throughput.png
""",
    "serve": """\
examples:
  pocketllm bench serve                                              the server on port 8000, with one client and with eight
  pocketllm bench serve --request-rate 1,2,4,8 --goodput ttft:500,tpot:50 --plot load.png
  pocketllm bench serve --url http://host:8080/v1 --concurrency 1,16,64 --lengths sharegpt-like --output load.json
""",
    "compare": """\
examples:
  pocketllm bench compare                                            the embedded model, beside every peer that is installed
  pocketllm bench compare --model ./model.gguf --peer llama-cpp-python --peer transformers --plot compare.png
  pocketllm bench compare --model ./model.gguf --peer path/to/llama-bench --peer http://127.0.0.1:8080
""",
}
_HELP = {
    "latency": "one request at a time on an engine here: time to first token, decode rate, the limit of each",
    "throughput": "batches on an engine here: tokens a second by batch size, the limit of each",
    "serve": "a server under load: any that is OpenAI-compatible",
    "compare": "PocketLLM beside other engines on the same checkpoint, in alternating rounds",
}
_OFFLINE: dict[str, type[Any]] = {"latency": LatencyBenchArgs, "throughput": ThroughputBenchArgs, "compare": CompareBenchArgs}


def add_commands(parser: Parser) -> dict[str, Parser]:
    """The commands below `bench`, by "bench NAME"."""
    commands = parser.add_subparsers(dest="measure", metavar="MEASURE", parser_class=Parser, title="measures", prog="pocketllm bench")
    parsers = {name: commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", epilog=_EXAMPLES[name]) for name, text in _HELP.items()}
    add_options(parsers["serve"], ServeBenchArgs, "load")
    for name, cls in _OFFLINE.items():
        add_options(parsers[name], cls, "measure")
        add_options(parsers[name], EngineArgs, "engine", leave_out=("seed",))
    text = "transformers, llama-cpp-python, vllm, the path of a llama-bench, or the URL of a server; may be repeated [all that are installed]"
    parsers["compare"].add_argument("--peer", action="append", default=[], dest="peers", metavar="PEER", help=text)
    return {f"bench {name}": one for name, one in parsers.items()}


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; the exit code.

    Raises:
        PocketLLMError: an option is wrong, or what is to be measured fails.
    """
    if arguments.measure == "serve":
        return _serve(ServeBenchArgs(**given_options(arguments, ServeBenchArgs)))
    args = _OFFLINE[arguments.measure](**given_options(arguments, _OFFLINE[arguments.measure]))
    given = {name: value for name, value in given_options(arguments, EngineArgs).items() if name != "seed"}
    return _offline(args, EngineArgs.from_env(**given), getattr(arguments, "peers", []))


def _serve(args: ServeBenchArgs) -> int:
    from pocketllm.bench.plots import plot_serving
    from pocketllm.bench.serve import measure_serving, serving_table

    with _results(args.output, args.plot, plot_serving, serving_table) as show, _progress() as progress:
        show(measure_serving(args, progress))
    return 0


def _offline(args: Any, engine: EngineArgs, peers: list[str]) -> int:
    from pocketllm.bench.compare import comparison_table, measure_comparison
    from pocketllm.bench.offline import latency_table, measure_latency, measure_throughput, throughput_table
    from pocketllm.bench.plots import plot_comparison, plot_latency, plot_throughput

    draw, tabulate = {
        LatencyBenchArgs: (plot_latency, latency_table),
        ThroughputBenchArgs: (plot_throughput, throughput_table),
        CompareBenchArgs: (plot_comparison, comparison_table),
    }[type(args)]
    with _results(args.output, args.plot, draw, tabulate) as show, _progress() as progress:
        if isinstance(args, LatencyBenchArgs):
            show(measure_latency(args, engine, progress))
        elif isinstance(args, ThroughputBenchArgs):
            show(measure_throughput(args, engine, progress))
        else:
            show(measure_comparison(args, engine, peers, progress))
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
