"""Common parts of all figures: figures without a display, colours, markers, and literal labels."""

from __future__ import annotations

import base64
import io
import math
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlsim.cluster.cluster import Floats
from ddlsim.errors import ConfigError
from ddlsim.extras import needs
from ddlsim.output_files import replacing
from ddlsim.printable import shown
from ddlsim.runtime.recorder import COMMUNICATION, COMPUTE, INPUT, WAITING

with needs("matplotlib"):
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.patches import Patch
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

if TYPE_CHECKING:
    from ddlsim.run.result import Result

#: kind of time -> (colour, hatch, label)
TIME_STYLES = {
    COMPUTE: ("#4477aa", "", "compute"),
    COMMUNICATION: ("#ee9944", "//", "exposed communication"),
    WAITING: ("#cc6677", "xx", "waiting for others"),
    INPUT: ("#228833", "\\\\", "waiting for input"),
    "idle": ("#dddddd", "..", "idle"),
}
#: approximate width of a character of size 1
_LETTER = 0.6
MARKERS = "osD^vP*X"
STYLES = ("-", "--", "-.", ":")
COLOURS = ("#4477aa", "#ee6677", "#228833", "#aa3377", "#66ccee", "#ccbb44", "#555555", "#994455")


#: styles of series
DOTTED: dict[str, Any] = {"color": "#999999", "linewidth": 1.0, "linestyle": (0, (1, 1))}


def series_style(i: int) -> dict[str, Any]:
    """Return colour, style and marker of series number `i`."""
    style = {"color": COLOURS[i % len(COLOURS)], "linestyle": STYLES[i % len(STYLES)]}
    return {**style, "marker": MARKERS[i % len(MARKERS)], "markersize": 4.5}


def noted(axes: Axes, text: str, place: tuple[float, float], away: tuple[float, float], **style: Any) -> None:
    """Write a text at an offset `away` from a position, in points."""
    axes.annotate(text, place, xytext=away, textcoords="offset points", **{"fontsize": 8, **style})


def time_styles(kinds: Collection[str]) -> dict[str, tuple[str, str, str]]:
    """Return the styles of the kinds of time that every run has, and of input if it is among `kinds`."""
    return {kind: style for kind, style in TIME_STYLES.items() if kind != INPUT or INPUT in kinds}


#: dots per inch of a figure in a notebook; it is rendered with twice as many, for sharp screens
SHOWN_DPI = 75


class Picture(Figure):
    """A figure that notebooks display, even if a function returns its axes and pyplot was never imported."""

    def add_subplot(self, *args: Any, **kwargs: Any) -> Any:
        return super().add_subplot(*args, **{"axes_class": Panel, **kwargs})

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        file = io.BytesIO()
        self.savefig(file, format="png")
        width, height = (round(SHOWN_DPI * inches) for inches in self.get_size_inches())
        return file.getvalue(), {"width": width, "height": height}


class Panel(Axes):
    """Axes of a :class:`Picture`; notebooks display the whole figure for them."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]] | None:
        return self.figure._repr_png_() if isinstance(self.figure, Picture) else None


def figure(width: float, height: float) -> Figure:
    """Return an empty figure for drawing without a display; width and height are in inches."""
    fig = Picture(figsize=(width, height), layout="constrained", dpi=150)
    FigureCanvasAgg(fig)
    return fig


def single(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a :func:`figure` with one pair of axes."""
    fig = figure(width, height)
    return fig, fig.subplots()


def some_of(n: int, most: int) -> list[int]:
    """Return at most `most` of the numbers below `n`, evenly spread."""
    numbers: list[int] = np.unique(np.linspace(0, n - 1, min(most, n)).astype(np.int64)).tolist()
    return numbers


def style_legend(fig: Figure | SubFigure, styles: Iterable[Sequence[str]], ncols: int = 4, *more: Patch) -> None:
    """Add a legend of colours and hatches below a figure."""
    handles = [
        Patch(facecolor=colour, hatch=2 * hatch, edgecolor="white", label=text) for colour, hatch, text in styles
    ]
    fig.legend(handles=[*handles, *more], loc="outside lower center", ncols=ncols, fontsize=8)


def saved(axes: Axes, path: str | Path | None) -> Axes:
    """Write the figure of these axes if a path is given, and return the axes.

    Raises ConfigError if it cannot be written, or for an unknown format.
    """
    if path is not None:
        path, fig = Path(path), axes.get_figure(root=True)
        assert fig is not None
        kind, suffixes = path.suffix[1:].lower(), fig.canvas.get_supported_filetypes()
        if not kind:  # as in matplotlib: without a suffix, a PNG
            kind, path = "png", path.with_name(f"{path.name}.png") if path.is_file() or not path.exists() else path
        if kind not in suffixes:
            formats = ", ".join(f".{suffix}" for suffix in sorted(suffixes))
            raise ConfigError(f"{path}: unknown image format; use one of {formats}")
        with replacing(path) as file:
            fig.savefig(file, format=kind)
    return axes


def svg_uri(axes: Axes) -> str:
    """Return the figure of these axes as the data URI of an SVG picture; equal drawings yield equal texts."""
    fig = axes.get_figure(root=True)
    out = io.BytesIO()
    assert fig is not None
    with mpl.rc_context({"svg.hashsalt": "ddlsim"}):
        fig.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(out.getvalue()).decode('ascii')}"


def titled(fig: Figure, title: str) -> None:
    """Add a title for the whole figure, wrapped to as many lines as necessary, so that it is not cut off."""
    fig.suptitle(drawn(textwrap.fill(title, int(11.0 * fig.get_figwidth()))), fontsize=9)


def described(result: Result) -> str:
    """Return a description of a run for titles."""
    experiment = result.experiment
    return f"{result.workloads[0].model.name}, batch {experiment.batch_size} per worker, on {result.cluster.name}"


def time_bars(axes: Axes, shares: Mapping[str, Floats], width: float, *, upright: bool) -> None:
    """Stack shares of time (kind -> %, one per bar)."""
    before = np.zeros(len(next(iter(shares.values()), ())))
    draw = axes.bar if upright else axes.barh
    for kind, (colour, hatch, label) in time_styles(shares).items():
        look: Any = {"color": colour, "hatch": hatch, "label": label if shares[kind].any() else None}
        draw(range(len(before)), shares[kind], width, before, edgecolor="white", **look)
        before += shares[kind]


def worker_axis(axes: Axes, counts: Sequence[int], inches: float) -> None:
    """Make the horizontal axis the number of workers, with ticks at these `counts`."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, spaced_labels([math.log(n) for n in counts], [str(n) for n in counts], inches))
    axes.minorticks_off()
    axes.set_xlabel("workers")


def named_rows(axes: Axes, names: Sequence[str]) -> None:
    """Label the rows of a figure, which are numbered from the top."""
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(max(len(names), 1) - 0.4, -0.6)


def learning_curve(axes: Axes, number: int, label: str, at: Floats, mean: Floats, half: Floats, **style: Any) -> None:
    """Draw curve number `number` in its style, with a band of half height `half`."""
    every = max(1, len(at) // 8)
    axes.plot(at, mean, label=label, markevery=(number % every, every), **series_style(number), **style)
    if np.isfinite(half).any():
        colour = COLOURS[number % len(COLOURS)]
        axes.fill_between(at, mean - half, mean + half, color=colour, alpha=0.2, linewidth=0.0)


def within_percent(axes: Axes) -> None:
    """Limit the vertical axis to possible accuracies in %, which bands may exceed."""
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, 0.0), min(high, 102.0))


def spaced_labels(places: Sequence[float], texts: Sequence[str], inches: float, *, size: float = 10.0) -> list[str]:
    """Return the tick labels at ascending `places`, "" for labels that would overlap a neighbour on such an axis.

    The first and the last are kept. `size` is the font size in points; places are in units of the axis (for a
    logarithmic one, their logarithms).
    """
    span = max(places[-1] - places[0], 1e-300)
    at = [72.0 * inches * (place - places[0]) / span for place in places]
    half = [_LETTER * size * (len(text) + 1) / 2 for text in texts]
    kept: list[int] = []
    for i in range(len(texts)):
        if not kept or at[i] - half[i] >= at[kept[-1]] + half[kept[-1]]:
            kept.append(i)
    last = len(texts) - 1
    while len(kept) > 1 and kept[-1] != last and at[last] - half[last] < at[kept[-1]] + half[kept[-1]]:
        kept.pop()
    return [text if i in kept or i == last else "" for i, text in enumerate(texts)]


def log_numbers(axis: Axis, low: float, high: float) -> None:
    """Label a few positions of a logarithmic axis between `low` and `high` with plain numbers."""
    if high > 1e3 * low:
        axis.set_major_locator(LogLocator())
    elif high > 6.0 * low:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    else:
        axis.set_major_locator(MaxNLocator(4))
    axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axis.set_minor_formatter(NullFormatter())


def wrapped(text: str, width: int, lines: int = 4) -> str:
    """Return a text wrapped to lines of about `width` characters, as `drawn`, truncated after `lines` lines."""
    return drawn("\n".join(textwrap.wrap(text, max(width, 6), max_lines=lines, placeholder=" ...")))


def drawn(text: str) -> str:
    """Escape `text` for matplotlib: "$" does not start a formula, and a leading "_" does not hide it in legends."""
    text = shown(text).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
