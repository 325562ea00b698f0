"""Pictures of reports, 800 pixels wide, with type that can be read at that width."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from pocketllm.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT, _DPI = 8.0, 5.0, 100  # inches, inches, pixels an inch
_FONT = 11
_COLOURS = ("#1f5fa8", "#c8511b", "#3a8a3f", "#7b4ea3", "#8a6d3b", "#444444")


def require_matplotlib() -> None:
    """Raises ConfigurationError where there is none to draw with."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError("A picture needs matplotlib: run pip install 'pocketllm[bench]', or leave out --plot.", param="plot")


def plot_serving(report: dict[str, Any], path: str) -> None:
    """Latency against load: the medians of TTFT and of the time between tokens, each with its 99th percentile, over the output that the server carried."""
    figure, (left, right) = _figure(2, report, f"{report['model']}: latency against load")
    points = [point for point in report["points"] if point["ttft_ms"]]
    points.sort(key=lambda point: float(point["output_tokens_per_s"]))
    carried = [point["output_tokens_per_s"] for point in points]
    for axes, name, title in ((left, "ttft_ms", "time to first token, ms"), (right, "itl_ms", "time between tokens, ms")):
        for share, style, colour in (("p50", "o-", _COLOURS[0]), ("p99", "s--", _COLOURS[1])):
            drawn = [(load, point[name][share]) for load, point in zip(carried, points, strict=True) if point[name]]
            axes.plot([load for load, _ in drawn], [value for _, value in drawn], style, color=colour, label=share)
        for load, point in zip(carried, points, strict=True):
            if point[name]:
                axes.annotate(point["load"].replace(" requests", ""), (load, point[name]["p50"]), (4, -13), textcoords="offset points", fontsize=9)
        axes.set_title(title, fontsize=_FONT)
        axes.set_xlabel("output tokens/s")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
    _save(figure, path)


def plot_latency(report: dict[str, Any], path: str) -> None:
    """Prefill and decode rates by prompt length, with their limits."""
    figure, (left, right) = _figure(2, report, f"{report['model']['name']}: one request at a time")
    _rates(left, report["rows"], "input_tokens", "prefill_tokens_per_s", "prefill", "prompt, tokens", "prefill, tokens/s")
    _rates(right, report["rows"], "input_tokens", "decode_tokens_per_s", "decode", "prompt, tokens", "decode, tokens/s")
    _save(figure, path)


def plot_throughput(report: dict[str, Any], path: str) -> None:
    """Tokens a second by batch size, with the limit."""
    figure, (axes,) = _figure(1, report, f"{report['model']['name']}: throughput against batch size")
    _rates(axes, report["rows"], "batch", "decode_tokens_per_s", "decode", "requests at once", "tokens/s", label="decode, all rows")
    sizes = [row["batch"] for row in report["rows"]]
    axes.plot(sizes, [row["output_tokens_per_s"]["median"] for row in report["rows"]], "s-", color=_COLOURS[1], label="output, prompts included")
    axes.legend(frameon=False)
    _save(figure, path)


def plot_comparison(report: dict[str, Any], path: str) -> None:
    """Bars of each side's median, whiskers from its smallest sample to its largest; where there is one, the limit."""
    figure, columns = _figure(len(report["summary"]), report, f"{report['model']['name']}: tokens/s")
    for axes, (name, row) in zip(columns, report["summary"].items(), strict=True):
        sides = {side: found for side, found in row["sides"].items() if found is not None}
        medians = [found["median"] for found in sides.values()]
        whiskers = [[found["median"] - found["min"] for found in sides.values()], [found["max"] - found["median"] for found in sides.values()]]
        names = [side.removeprefix("http://").replace("llama-cpp-python", "llama-cpp-\npython") for side in sides]
        bars = axes.bar(names, medians, yerr=whiskers, capsize=4, color=_COLOURS[: len(sides)], width=0.65)
        for bar, value in zip(bars, medians, strict=True):  # at the foot, which no whisker crosses
            axes.annotate(f"{value:,.0f}", (bar.get_x() + bar.get_width() / 2, 0), (0, 4), textcoords="offset points", ha="center", color="white")
        if row["limit"] is not None and row["limit"] < 3 * max(medians):
            axes.set_ylim(top=1.2 * max(row["limit"], *(found["max"] for found in sides.values())))  # with room for the legend
            axes.axhline(row["limit"], color=_COLOURS[5], linestyle=":", label=f"limit {row['limit']:,.0f}")
            axes.legend(frameon=False, loc="upper right")
        axes.set_title(name, fontsize=_FONT)
        axes.grid(visible=False, axis="x")
        axes.tick_params(axis="x", labelrotation=30)
    _save(figure, path)


def _rates(axes: Axes, rows: list[dict[str, Any]], over: str, rate: str, limit: str, across: str, title: str, label: str = "measured") -> None:
    places = [row[over] for row in rows]
    found = [row[rate] for row in rows]
    axes.plot(places, [one["median"] for one in found], "o-", color=_COLOURS[0], label=label)
    axes.fill_between(places, [one["min"] for one in found], [one["max"] for one in found], color=_COLOURS[0], alpha=0.15)
    axes.plot(places, [row["limits"][limit] for row in rows], ":", color=_COLOURS[5], label="limit")
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:,}" for place in places])
    axes.minorticks_off()
    axes.set_xlabel(across)
    axes.set_title(title, fontsize=_FONT)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def _figure(columns: int, report: dict[str, Any], title: str) -> tuple[Figure, list[Axes]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, columns, number + 1) for number in range(columns)]
    for one in axes:
        one.tick_params(labelsize=_FONT - 1)
        one.grid(visible=True, alpha=0.3)
        one.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=_FONT + 2)
    figure.supxlabel(f"{report['hardware']['cpu']}, {report['date'][:10]}, commit {report['code']['commit']}", fontsize=8, color="#555555")
    return figure, axes


def _save(figure: Figure, path: str) -> None:
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigurationError(f"{path} can't be written ({error.strerror}): choose another file with --plot.", param="plot") from None
