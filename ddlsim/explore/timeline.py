"""What workers did when, as a picture that can be moved and enlarged."""

from __future__ import annotations

from typing import Any

import numpy as np
import panel as pn
from bokeh.models import ColumnDataSource, HoverTool, Range1d
from bokeh.plotting import figure

from ddlsim.explore.pieces import html, legend
from ddlsim.readable import seconds
from ddlsim.report.drawing import time_styles
from ddlsim.run.result import Result
from ddlsim.runtime.recorder import TRANSFER

#: workers that are drawn, spread evenly, and bars
N_WORKERS, N_BARS = 16, 8000
_TRANSFER = ("#77aa77", "transfer in the background", 0.42, 0.18)


def timeline(result: Result) -> pn.Column:
    """Return two steps of a result that was recorded (``result.traced``)."""
    begin, end = window(result)
    ranks = np.unique(np.linspace(0, result.n_workers - 1, min(N_WORKERS, result.n_workers)).astype(int)).tolist()
    rows = [f"worker {rank}" for rank in ranks]
    rows += sorted({span.track for span in result.recorder.spans if span.track.startswith("server")})[:N_WORKERS]
    place = {track: float(len(rows) - 1 - i) for i, track in enumerate(rows)}
    plot = figure(
        height=130 + 22 * len(rows),
        sizing_mode="stretch_width",
        tools="xpan,xwheel_zoom,xbox_zoom,reset",  # type: ignore[call-arg]  # bokeh's stubs lack what it documents
        x_range=Range1d(start=begin, end=end),
        min_border_left=95,  # so that there is room for the names before they are measured
    )
    plot.xaxis.axis_label = "simulated time (s)"
    kinds = time_styles(result.shares).items()
    styles = {kind: (colour, label, 0.0, 0.7) for kind, (colour, _, label) in kinds if kind != "idle"}
    styles[TRANSFER] = _TRANSFER
    for kind, (colour, label, offset, height) in styles.items():
        spans = [
            (place[track], span.start, span.end, span.name)
            for span in result.recorder.spans
            if span.kind == kind
            and span.end > begin
            and span.start < end
            and (track := span.track.removesuffix(" network")) in place
        ][:N_BARS]
        if spans:
            columns = list(zip(*spans, strict=True))
            source: dict[str, Any] = {
                "y": [y + offset for y in columns[0]],
                "left": columns[1],
                "right": columns[2],
                "name": columns[3],
                "takes": [seconds(stop - start) for _, start, stop, _ in spans],
                "kind": [label] * len(spans),
            }
            plot.hbar(y="y", left="left", right="right", height=height, source=ColumnDataSource(source), color=colour,
                      line_color="white", line_width=0.3)  # fmt: skip
    plot.add_tools(HoverTool(tooltips=[("", "@kind @name"), ("takes", "@takes")]))
    plot.yaxis.ticker = list(place.values())
    plot.yaxis.major_label_overrides = {int(y): track for track, y in place.items()}
    plot.ygrid.grid_line_color = None
    plot.toolbar.logo = None
    key = legend([(colour, label) for colour, label, _, _ in styles.values()])
    return pn.Column(html(key), pn.pane.Bokeh(plot, sizing_mode="stretch_width"), sizing_mode="stretch_width")


def window(result: Result) -> tuple[float, float]:
    """Return when the first two steps after the warm-up begin and end, in s."""
    times = [time for time, _ in result.measured_updates]
    return times[0], times[min(2 * max(1, round(result.updates_per_step)), len(times) - 1)]
