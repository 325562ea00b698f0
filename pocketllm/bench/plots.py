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
