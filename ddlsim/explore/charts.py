"""Charts of lines that can grow while they are shown, and bands around them. (Bokeh draws them; nothing is fetched.)"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import panel as pn
from bokeh import models as bokeh_models
from bokeh import plotting as bokeh_plotting

from ddlsim.report.drawing import COLOURS

#: their own annotations leave out most of what they take
models: Any = bokeh_models
plotting: Any = bokeh_plotting

#: of a line, in turns: whoever sees no colours tells them apart by these
DASHES = ("solid", "dashed", "dotdash", "dotted")
MARKS = ("circle", "square", "triangle", "diamond", "star")


class Chart:
    """Lines over one axis, each a series with a name; empty until there is a point.

    x, y     columns that are shown, and what their axes say
    columns  of each series, "low" and "high" among them where there are bands
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
        """Return the points of a series, none for one that there is not."""
        if name not in self._sources:
            return {column: [] for column in self._columns}
        return {column: list(self._sources[name].data[column]) for column in self._columns}

    def clear(self, ticks: Sequence[float] = (), *, log_y: bool = False) -> None:
        """Remove all lines. With `ticks`, the x axis is logarithmic and has these numbers."""
        self._sources, self._glyphs, self._figure = {}, [], None
        self._ticks, self._log_y = ticks, log_y
        self.view[:] = []

    def put(self, name: str, points: Mapping[str, Sequence[float]], *, plain: bool = False) -> None:
        """Give a series these points; a new one is added. `plain`: a thin grey line, to compare with."""
        length = len(points[self._columns[0]])
        if not length:
            return
        before = self.values(name)
        n_before = len(before[self._columns[0]])
        whole = {**points, "name": [name] * length}
        if name not in self._sources:
            self._add(name, models.ColumnDataSource(whole), plain)
        elif all(list(points[column][:n_before]) == list(before[column]) for column in self._columns[:2]):
            self._sources[name].stream({column: values[n_before:] for column, values in whole.items()})
        else:
            self._sources[name].data = whole

    def show(self, x: tuple[str, str], y: tuple[str, str]) -> None:
        """Show other columns, with what their axes say."""
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
        line = self._figure.line(
            x, y, source=source, color=colour, line_width=1.0 if plain else 2.0, legend_label=name,
            line_dash="dotted" if plain else DASHES[i % len(DASHES)],
        )  # fmt: skip
        self._glyphs.append(line)
        if not plain:
            self._glyphs.append(
                self._figure.scatter(
                    x, y, source=source, color=colour, size=5, marker=MARKS[i % len(MARKS)], legend_label=name
                )
            )
            self._hover.renderers = [*(self._hover.renderers or []), self._glyphs[-1]]
        if "low" in self._columns and not plain and all(map(math.isfinite, source.data["low"])):
            self._figure.add_layout(
                models.Band(
                    base=x, lower="low", upper="high", source=source, fill_color=colour, fill_alpha=0.18, line_alpha=0.0
                )
            )
        if first:
            self.view[:] = [pn.pane.Bokeh(self._figure, sizing_mode="stretch_width")]

    def _drawn(self) -> Any:
        """Return an empty figure."""
        scales = ["log" if log else "linear" for log in (bool(self._ticks), self._log_y)]
        made = plotting.figure(
            height=420, sizing_mode="stretch_width", x_axis_label=self._x[1], y_axis_label=self._y[1],
            active_scroll=None, tools="pan,wheel_zoom,reset,save", x_axis_type=scales[0],
            y_axis_type=scales[1],
        )  # fmt: skip
        made.toolbar.logo = None
        made.toolbar.autohide = True
        made.xaxis.axis_label_text_font_style = made.yaxis.axis_label_text_font_style = "normal"
        if self._ticks:
            made.xaxis.ticker = models.FixedTicker(ticks=[*self._ticks])
            made.xaxis.major_label_overrides = {tick: f"{tick:g}" for tick in self._ticks}
        self._hover = models.HoverTool(tooltips=self._tips(), renderers=[])
        made.add_tools(self._hover)
        legend = models.Legend(click_policy="hide", label_text_font_size="12px", location="left", border_line_alpha=0.0)
        made.add_layout(legend, "below")
        return made

    def _tips(self) -> list[tuple[str, str]]:
        return [("", "@name"), *((label, "@{" + column + "}") for column, label in (self._x, self._y))]
