"""Building blocks of screens: messages, numbers, tables and figures as HTML, and cards that are built when opened.

Text and lines use the page's colours, so that they are readable in light and dark themes.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import panel as pn
from bokeh import models as bokeh_models
from bokeh import plotting as bokeh_plotting

from ddlsim.bundled import bundled_files
from ddlsim.errors import DdlsimError
from ddlsim.explore.jobs import Jobs, Progress
from ddlsim.printable import shown
from ddlsim.report.drawing import COLOURS, svg_uri
from ddlsim.report.study_figures import tornado
from ddlsim.run.experiment import Experiment
from ddlsim.run.sensitivity import Sensitivity
from ddlsim.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Panel's annotations lack most parameters
models: Any = bokeh_models
plotting: Any = bokeh_plotting

#: dashes of successive lines, which distinguish them without colours
DASHES = ("solid", "dashed", "dotdash", "dotted")
MARKS = ("circle", "square", "triangle", "diamond", "star")


class Chart:
    """Lines in one chart, each a named series; empty until there are points.

    x, y     displayed columns and their axis labels
    columns  columns of each series, including "low" and "high" if there are bands
    """

    def __init__(self, x: tuple[str, str], y: tuple[str, str], columns: Sequence[str]) -> None:
        self._x, self._y, self._columns = x, y, tuple(columns)
        self._ticks: Sequence[float] = ()
        self._log_y = False
        self._sources: dict[str, Any] = {}
        self._glyphs: list[Any] = []
        self._figure: Any = None
        self._hover = models.HoverTool()
        self.view = pn.Column(sizing_mode="stretch_width", margin=(4, 8))

    @property
    def names(self) -> list[str]:
        """The names of the series, in the order in which they were added."""
        return list(self._sources)

    def values(self, name: str) -> Mapping[str, Sequence[float]]:
        """Return the points of a series; empty if it does not exist."""
        if name not in self._sources:
            return {column: [] for column in self._columns}
        return {column: list(self._sources[name].data[column]) for column in self._columns}

    def clear(self, ticks: Sequence[float] = (), *, log_y: bool = False) -> None:
        """Remove all lines. With `ticks`, the x axis is logarithmic and has these numbers."""
        self._sources, self._glyphs, self._figure = {}, [], None
        self._ticks, self._log_y = ticks, log_y
        self.view[:] = []

    def put(self, name: str, points: Mapping[str, Sequence[float]], *, plain: bool = False) -> None:
        """Set the points of a series, adding it if it is new. `plain`: a thin grey line for comparison."""
        columns = {**points, "name": [name] * len(points[self._columns[0]])}
        if name in self._sources:
            self._sources[name].data = columns
        elif columns["name"]:
            self._add(name, models.ColumnDataSource(columns), plain)

    def show(self, x: tuple[str, str], y: tuple[str, str]) -> None:
        """Display other columns, with their axis labels."""
        self._x, self._y = x, y
        if self._figure is not None:
            for renderer in self._glyphs:
                renderer.glyph.update(x=x[0], y=y[0])
            self._figure.xaxis.axis_label, self._figure.yaxis.axis_label = x[1], y[1]
            self._hover.tooltips = self._tips()

    def _add(self, name: str, source: Any, plain: bool) -> None:
        first = self._figure is None
        if first:
            self._figure = self._drawn()
        i = len(self._sources)
        self._sources[name] = source
        colour = "#999999" if plain else COLOURS[i % len(COLOURS)]
        (x, _), (y, _) = self._x, self._y
        look = {"source": source, "color": colour, "legend_label": name}
        dash, width = ("dotted", 1.0) if plain else (DASHES[i % len(DASHES)], 2.0)
        self._glyphs.append(self._figure.line(x, y, line_width=width, line_dash=dash, **look))
        if not plain:
            self._glyphs.append(self._figure.scatter(x, y, size=5, marker=MARKS[i % len(MARKS)], **look))
            self._hover.renderers = [*(self._hover.renderers or []), self._glyphs[-1]]
        if "low" in self._columns and not plain and all(map(math.isfinite, source.data["low"])):
            fill = {"source": source, "fill_color": colour, "fill_alpha": 0.18, "line_alpha": 0.0}
            self._figure.add_layout(models.Band(base=x, lower="low", upper="high", **fill))
        if first:
            self.view[:] = [pn.pane.Bokeh(self._figure, sizing_mode="stretch_width")]

    def _drawn(self) -> Any:
        scales = ["log" if log else "linear" for log in (bool(self._ticks), self._log_y)]
        both = {"x_axis_label": self._x[1], "y_axis_label": self._y[1]}
        both |= {"x_axis_type": scales[0], "y_axis_type": scales[1], "tools": "pan,wheel_zoom,reset,save"}
        figure = plotting.figure(height=420, sizing_mode="stretch_width", active_scroll=None, **both)
        figure.toolbar.logo = None
        figure.toolbar.autohide = True
        figure.xaxis.axis_label_text_font_style = figure.yaxis.axis_label_text_font_style = "normal"
        if self._ticks:
            figure.xaxis.ticker = models.FixedTicker(ticks=[*self._ticks])
            figure.xaxis.major_label_overrides = {tick: f"{tick:g}" for tick in self._ticks}
        self._hover = models.HoverTool(tooltips=self._tips(), renderers=[])
        figure.add_tools(self._hover)
        legend = models.Legend(click_policy="hide", label_text_font_size="12px", location="left", border_line_alpha=0.0)
        figure.add_layout(legend, "below")
        return figure

    def _tips(self) -> list[tuple[str, str]]:
        return [("", "@name"), *((label, "@{" + column + "}") for column, label in (self._x, self._y))]


@dataclass(frozen=True)
class File:
    """A file that a screen is exported as: its name and its text."""

    name: str
    text: str


def files_of(described: Experiment | Study, stem: str = "run") -> list[File]:
    """Return an experiment or a study as a file for the command line, and as a program. Raises ConfigError if it cannot
    be expressed in this way."""
    return [File(f"{stem}.toml", described.to_toml()), File(f"{stem}.py", described.to_python())]


def _file(file: File) -> list[Any]:
    copy = pn.widgets.Button(label=f"Copy {file.name}", css_classes=["copy"])
    text = html(f"<pre tabindex='0'>{plain(file.text)}</pre>", css_classes=["exported"])
    copy.js_on_click(args={"content": file.text}, code="navigator.clipboard.writeText(content)")
    download = pn.widgets.FileDownload(
        io.BytesIO(file.text.encode()), filename=file.name, label=f"Download {file.name}", button_type="default"
    )
    return [html(f"<h3>{plain(file.name)}</h3>"), text, pn.FlexBox(copy, download)]


#: matplotlib's figures are black on white, also on a dark page
FRAME = ":host { background: white; border-radius: 6px; }"


def picture(draw: Callable[[], Any], alternative: str) -> pn.pane.PNG:
    """Return the figure drawn by `draw`, with an alternative text."""
    file = io.BytesIO()
    draw().savefig(file, format="png", dpi=110)
    return pn.pane.PNG(
        file.getvalue(), alt_text=alternative, sizing_mode="scale_width", stylesheets=[FRAME], margin=(4, 8), embed=True
    )


#: prefix of folders of uploaded files
UPLOADED = "ddlsim-explore-"
STYLE = """
:host { font-size: 14px; line-height: 1.45; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 4px 10px 4px 0; vertical-align: top;
         border-bottom: 1px solid color-mix(in srgb, currentColor 20%, transparent); overflow-wrap: break-word; }
th { font-weight: 600; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.scroll { overflow-x: auto; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 10px; }
.tile { border: 1px solid color-mix(in srgb, currentColor 25%, transparent); border-radius: 6px; padding: 8px 12px; }
.tile .v { font-size: 20px; font-weight: 600; overflow-wrap: anywhere; }
.bar { display: flex; height: 30px; border-radius: 4px; overflow: hidden; }
.bar span { display: block; height: 100%; }
.key { display: inline-block; margin: 6px 16px 0 0; }
.key b[style] { display: inline-block; width: 22px; margin: 0 6px 4px 0; }
.key i, td i.s { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 6px; }
.error { border-left: 4px solid #cc3344; background: color-mix(in srgb, #cc3344 12%, transparent); padding: 8px 12px;
         overflow-wrap: anywhere; }
.note { border-left: 4px solid #8899aa; padding: 4px 12px; margin: 6px 0; overflow-wrap: anywhere; }
.warning { border-left: 4px solid #dd9922; padding: 4px 12px; margin: 6px 0; overflow-wrap: anywhere; }
.busy { padding: 4px 0; }
h2 { font-size: 18px; margin: 10px 0 4px; } h3 { font-size: 15px; margin: 8px 0 4px; }
pre { overflow-x: auto; padding: 10px; border-radius: 6px; margin: 4px 0;
      background: color-mix(in srgb, currentColor 8%, transparent); }
"""


def html(text: str = "", **more: Any) -> pn.pane.HTML:
    """Return a pane with HTML in the explorer's style."""
    return pn.pane.HTML(text, stylesheets=[STYLE], sizing_mode="stretch_width", margin=(4, 8), **more)


def plain(text: object) -> str:
    """Escape external text for HTML."""
    return escape(shown(str(text)))


def message(text: str) -> pn.pane.HTML:
    """Return a pane with a one-line error, announced by screen readers; empty without one."""
    return html(f'<div class="error" role="alert">{plain(without_content(text))}</div>' if text else "")


def without_content(text: str) -> str:
    """Return an error, truncated after the name of the file that it concerns, as the rest may quote a private file.

    Errors in bundled and in uploaded files are not truncated.
    """
    ours = {*bundled_files("models").values(), *bundled_files("topologies").values()}
    for part in text.split(": "):
        path = Path(re.sub(r":\d+$", "", part))
        if os.path.isfile(path) and path not in ours and not path.parent.name.startswith(UPLOADED):
            why = "cannot be used here; run the ddlsim command in a terminal to see the reason"
            return f"{text.partition(part)[0]}{path}: {why}"
    return text


def tiles(numbers: Sequence[tuple[str, str]]) -> str:
    """Return labelled numbers in a row."""
    divs = (
        f'<div class="tile"><div>{plain(label)}</div><div class="v">{plain(value)}</div></div>'
        for label, value in numbers
    )
    return f'<div class="tiles">{"".join(divs)}</div>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 1) -> str:
    """Return a table of texts; columns from number `numbers` on are aligned as numbers."""

    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = (' class="n"' if i >= numbers else "" for i in range(len(row)))
        return "".join(f"<{tag}{kind}>{plain(text)}</{tag}>" for text, kind in zip(row, kinds, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = f"<thead><tr>{cells('th', heads)}</tr></thead>" if heads else ""
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def stacked(shares: Mapping[str, float], styles: Mapping[str, tuple[str, str]], write: Callable[[float], str]) -> str:
    """Return shares of 1 as a stacked bar with a legend; `styles` are colours and labels."""
    parts = [(*styles[kind], share) for kind, share in shares.items()]
    words = ", ".join(f"{label} {write(share)}" for _, label, share in parts)
    pieces = "".join(
        f'<span style="width:{100.0 * share:.3f}%;background:{colour}" title="{plain(label)}"></span>'
        for colour, label, share in parts
    )
    keys = (
        f'<span class="key"><i style="background:{colour}"></i>{plain(label)} <b>{write(share)}</b></span>'
        for colour, label, share in parts
    )
    return f'<div class="bar" role="img" aria-label="{plain(words)}">{pieces}</div><div>{"".join(keys)}</div>'


def legend(parts: Sequence[tuple[str, str]]) -> str:
    """Return a legend of (colour, label) pairs."""
    keys = (f'<span class="key"><i style="background:{colour}"></i>{plain(label)}</span>' for colour, label in parts)
    return f"<div>{''.join(keys)}</div>"


def image(axes: Axes, words: str, look: str = "max-width:100%") -> str:
    """Return the figure of these axes, with an alternative text, black on white also on a dark page."""
    style = f"{look};background:white;border-radius:6px"
    return f'<img src="{svg_uri(axes)}" role="img" aria-label="{plain(words)}" style="{style}"/>'


def gains(sensitivities: Sequence[Sensitivity]) -> str:
    """Return the effects of parts that are 10 % better."""
    return image(tornado(sensitivities), "; ".join(map(str, sensitivities)))


def lines(texts: Sequence[str], kind: str) -> str:
    """Return notes or warnings, one per line."""
    return "".join(f'<div class="{kind}">{plain(text)}</div>' for text in texts)


class LazyCard:
    """A card whose content is built when it is open, and rebuilt after `stale` or at its next opening."""

    def __init__(self, title: str, fill: Callable[[], None], *content: Any) -> None:
        self._fill = fill
        self._is_stale = True
        self.card = pn.Card(*content, title=title, collapsed=True, sizing_mode="stretch_width", margin=(6, 4))
        self.card.param.watch(self._look, "collapsed")

    def stale(self) -> None:
        """Mark the content as outdated."""
        self._is_stale = True
        self._look()

    def _look(self, *_: object) -> None:
        if self._is_stale and not self.card.collapsed:
            self._is_stale = False
            self._fill()


class Exports(LazyCard):
    """The panel with a screen's files, which are created by `files` while it is open, after every change."""

    def __init__(self, files: Callable[[], Sequence[File]]) -> None:
        self._files = files
        self._content = pn.Column(sizing_mode="stretch_width")
        super().__init__("Export as TOML and Python", self._show, self._content)

    def _show(self) -> None:
        try:
            self._content[:] = [pane for file in self._files() for pane in _file(file)]
        except DdlsimError as error:
            self._content[:] = [message(str(error))]


class ComputedCard(LazyCard):
    """A card whose content is computed in the background.

    name    name of the job, if different from the title
    wanted  function that returns the work whose result is displayed; None: nothing to display
    """

    def __init__(
        self, title: str, jobs: Jobs, wanted: Callable[[], Callable[[Progress], Any] | None], name: str = ""
    ) -> None:
        self._jobs, self._name, self._wanted = jobs, name or title, wanted
        self._place = pn.Column(sizing_mode="stretch_width")
        super().__init__(title, self._compute, jobs.bar(self._name), self._place)

    def _compute(self) -> None:
        work = self._wanted()
        if work is None:
            self._jobs.cancel(self._name)
            self._place[:] = []
        else:
            self._jobs.start(self._name, work, self._put, lambda text: self._put(message(text)))

    def _put(self, content: Any) -> None:
        self._place[:] = [content]


def side_by_side(widgets: Iterable[Any], width: int) -> pn.FlexBox:
    """Return widgets in a row that wraps; `width` of each, in pixels."""
    return pn.FlexBox(*[pn.Column(widget, width=width) for widget in widgets])
