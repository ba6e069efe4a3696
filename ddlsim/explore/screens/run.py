"""*Run*: the breakdown of a step, the activity of workers and links, and possible improvements."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import panel as pn
from bokeh.models import ColumnDataSource, HoverTool, Range1d
from bokeh.plotting import figure

import ddlsim
from ddlsim.explore.components import (
    ComputedCard,
    Exports,
    LazyCard,
    files_of,
    gains,
    html,
    legend,
    lines,
    message,
    picture,
    plain,
    stacked,
    table,
    tiles,
)
from ddlsim.explore.jobs import Jobs, Progress
from ddlsim.explore.setup import Setup
from ddlsim.readable import percent, seconds, size
from ddlsim.report.cluster_plot import cluster_plot
from ddlsim.report.drawing import time_styles
from ddlsim.report.gantt import bars_of, styles_of, tracks, window
from ddlsim.report.summary import busiest_links, summary_rows
from ddlsim.run.experiment import Experiment
from ddlsim.run.metrics import METRICS, record
from ddlsim.run.result import Result

NAME = "run"
TITLE = "Run"
#: metrics that are highlighted, if known
HEADLINES: tuple[str, ...] = ("throughput", "step_time", "speedup", "efficiency", "goodput", "availability")
HEADLINES += ("cost_per_sample", "energy_per_sample")
#: lines of the summary that are shown below them
SUMMARY = ("throughput", "if it fit", "memory", "software", "published")
#: message while the first simulation compiles code
FIRST = "simulating (the first run after an installation compiles for half a minute)"
N_LINKS = 12


def screen(setup: Setup, jobs: Jobs) -> pn.viewable.Viewable:
    """Return the screen."""
    problem, body = html(), html()
    shown: list[Result] = []
    exports = Exports(lambda: files_of(setup.experiment()))

    def card(title: str, make: Callable[[Result], Any]) -> ComputedCard:
        def wanted() -> Callable[[Progress], Any] | None:
            result = next(iter(shown), None)
            return None if result is None else lambda progress: make(result)

        return ComputedCard(title, jobs, wanted)

    panels: list[LazyCard] = [
        card("Timeline of two steps", lambda result: timeline(result.traced)),
        card("Utilisation of the links", _links),
        card("Possible improvements", lambda result: html(gains(result.sensitivities()))),
        card("Output of ddlsim run", lambda result: html(f"<pre tabindex='0'>{plain(result)}</pre>")),
        exports,
    ]

    def done(outcome: tuple[Result, str]) -> None:
        shown[:], problem.object, body.object = outcome[:1], "", outcome[1]
        for panel in panels:
            panel.stale()

    def failed(text: str) -> None:
        shown.clear()
        problem.object, body.object = message(text).object, ""
        exports.stale()

    setup.when_shown(NAME, lambda: jobs.ask(NAME, lambda: partial(simulated, setup.experiment()), done, failed))
    bar = jobs.bar(NAME, lambda: failed("cancelled; change a field to simulate again"))
    return pn.Column(bar, problem, body, *(panel.card for panel in panels), sizing_mode="stretch_width")


def simulated(experiment: Experiment, progress: Progress) -> tuple[Result, str]:
    """Return the run's result and its numbers as HTML."""
    tell_first(progress)
    result = ddlsim.simulate(experiment)
    progress.check()
    return result, described(result)


def tell_first(progress: Progress) -> None:
    """Show a message before the first simulation, because its compilation may keep the page from updating."""
    progress.update(-1.0, FIRST)
    time.sleep(0.02)  # the page's own thread displays it


def described(result: Result) -> str:
    """Return the numbers of a run as HTML."""
    values = record(result)
    headlines = ((METRICS[name], values.get(name)) for name in HEADLINES)
    numbers = [(metric.heading, metric.write(value)) for metric, value in headlines if value is not None]
    styles = {kind: (colour, label) for kind, (colour, _, label) in time_styles(result.shares).items()}
    what = f"{result.n_workers} workers on {result.cluster.name}: {result.experiment.strategy.label}"
    first = SUMMARY if result.fits else set(SUMMARY) - {"memory"}  # which is a warning below
    summary = table((), [row for row in summary_rows(result, simulate=False) if row[0] in first], numbers=2)
    shares = f"<h3>Breakdown of a step</h3>{stacked(result.shares, styles, percent)}"
    remarks = lines(result.warnings, "warning") + lines(result.notes, "note")
    return f"<h2>{plain(what)}</h2>{tiles(numbers)}{summary}{shares}{remarks}"


def _links(result: Result) -> pn.Column:
    links = result.links[result.links["nbytes"] > 0.0]
    kinds = []
    for kind, of in links.groupby("kind", sort=False):
        use = of["utilisation"]
        kinds.append([str(kind), str(len(of)), percent(use.max()), percent(use.mean()), size(of["nbytes"].sum())])
    text = table(("kind", "links in use", "busiest", "on average", "bytes of all"), kinds)
    text += f"<h3>The busiest</h3>{table(('link', 'kind', 'use', 'bytes'), busiest_links(result, N_LINKS), 2)}"
    drawn = picture(lambda: cluster_plot(result).figure, f"Utilisation of the links of {result.cluster.name}")
    return pn.Column(html(text), drawn, sizing_mode="stretch_width")


#: maximum number of evenly spread workers, and of bars of a kind
N_WORKERS, N_BARS = 16, 8000


def timeline(result: Result) -> pn.Column:
    """Return a timeline of two steps of a traced result (``result.traced``)."""
    begin, end = window(result)
    rows = tracks(result, N_WORKERS)[: 2 * N_WORKERS]
    plot = figure(
        height=130 + 22 * len(rows),
        sizing_mode="stretch_width",
        tools="xpan,xwheel_zoom,xbox_zoom,reset",  # type: ignore[call-arg]  # bokeh's stubs lack what it documents
        x_range=Range1d(start=begin, end=end),
        y_range=Range1d(start=len(rows) - 0.4, end=-0.6),
        min_border_left=95,  # space for the names before they are measured
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
            look: Any = {edge: edge for edge in ("top", "bottom", "left", "right")}
            look |= {"color": style.colour, "line_color": "white", "line_width": 0.3}
            plot.quad(source=ColumnDataSource(source), **look)
    plot.add_tools(HoverTool(tooltips=[("", "@kind @name"), ("takes", "@takes")]))
    plot.yaxis.ticker = list(range(len(rows)))
    plot.yaxis.major_label_overrides = dict(enumerate(rows))
    plot.ygrid.grid_line_color = None
    plot.toolbar.logo = None
    used = {bar.kind for bar in bars}
    key = legend([(style.colour, style.label) for kind, style in styles.items() if kind in used])
    return pn.Column(html(key), pn.pane.Bokeh(plot, sizing_mode="stretch_width"), sizing_mode="stretch_width")
