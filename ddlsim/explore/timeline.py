"""What workers did when, as a picture that can be moved and enlarged."""

from __future__ import annotations

from typing import Any

import panel as pn
from bokeh.models import ColumnDataSource, HoverTool, Range1d
from bokeh.plotting import figure

from ddlsim.explore.pieces import html, legend
from ddlsim.readable import seconds
from ddlsim.report.gantt import bars_of, styles_of, tracks
from ddlsim.run.result import Result

#: workers that are drawn, spread evenly, and bars of a kind
N_WORKERS, N_BARS = 16, 8000


def timeline(result: Result) -> pn.Column:
    """Return two steps of a result that was recorded (``result.traced``)."""
    begin, end = window(result)
    rows = tracks(result, N_WORKERS)[: 2 * N_WORKERS]
    plot = figure(
        height=130 + 22 * len(rows),
        sizing_mode="stretch_width",
        tools="xpan,xwheel_zoom,xbox_zoom,reset",  # type: ignore[call-arg]  # bokeh's stubs lack what it documents
        x_range=Range1d(start=begin, end=end),
        y_range=Range1d(start=len(rows) - 0.4, end=-0.6),
        min_border_left=95,  # so that there is room for the names before they are measured
    )
    plot.xaxis.axis_label = "simulated time (s)"
    styles = styles_of(result.shares)
    bars = bars_of(result, {track: float(i) for i, track in enumerate(rows)}, begin, end, most=N_BARS)
    for kind, style in styles.items():
        if of_kind := [bar for bar in bars if bar.kind == kind]:
            source: dict[str, Any] = {
                "top": [bar.row + style.low for bar in of_kind],
                "bottom": [bar.row + style.high for bar in of_kind],
                "left": [bar.start for bar in of_kind],
                "right": [bar.end for bar in of_kind],
                "name": [bar.name for bar in of_kind],
                "takes": [seconds(bar.end - bar.start) for bar in of_kind],
                "kind": [style.label] * len(of_kind),
            }
            plot.quad(top="top", bottom="bottom", left="left", right="right", source=ColumnDataSource(source),
                      color=style.colour, line_color="white", line_width=0.3)  # fmt: skip
    plot.add_tools(HoverTool(tooltips=[("", "@kind @name"), ("takes", "@takes")]))
    plot.yaxis.ticker = list(range(len(rows)))
    plot.yaxis.major_label_overrides = dict(enumerate(rows))
    plot.ygrid.grid_line_color = None
    plot.toolbar.logo = None
    key = legend([(style.colour, style.label) for style in styles.values()])
    return pn.Column(html(key), pn.pane.Bokeh(plot, sizing_mode="stretch_width"), sizing_mode="stretch_width")


def window(result: Result) -> tuple[float, float]:
    """Return when the first two steps after the warm-up begin and end, in s."""
    times = [time for time, _ in result.measured_updates]
    return times[0], times[min(2 * max(1, round(result.updates_per_step)), len(times) - 1)]
