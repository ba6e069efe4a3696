"""*Run*: one run, where a step's time goes, what the links do, what would help."""

from __future__ import annotations

import panel as pn

import ddlsim
from ddlsim.explore.exports import Exports, experiment_files
from ddlsim.explore.jobs import Jobs, Progress
from ddlsim.explore.pieces import LazyCard, html, lines, message, stacked, table, tiles
from ddlsim.explore.setup import Setup
from ddlsim.readable import percent
from ddlsim.report.drawing import TIME_STYLES
from ddlsim.run.experiment import Experiment
from ddlsim.run.metrics import METRICS
from ddlsim.run.result import Result

NAME = "run"
TITLE = "Run"
#: what is shown in large
HEADLINES = ("throughput", "step_time", "speedup", "efficiency", "cost_per_sample")


def screen(setup: Setup, jobs: Jobs) -> pn.viewable.Viewable:
    """Return the screen."""
    state, body = html(), html()
    exports = Exports(lambda: experiment_files(setup.experiment()))

    def done(result: Result) -> None:
        state.object = ""
        body.object = described(result)
        exports.stale()

    def failed(text: str) -> None:
        state.object, body.object = message(text).object, ""

    def refresh() -> None:
        try:
            experiment = setup.experiment()
        except ddlsim.DdlsimError as error:
            failed(str(error))
            return
        state.object = '<div class="busy" role="status">simulating ...</div>'
        jobs.start("run", lambda progress: simulated(experiment), done, failed)

    setup.when_shown(NAME, refresh)
    return pn.Column(state, body, exports.card, sizing_mode="stretch_width")


def simulated(experiment: Experiment) -> Result:
    """Return the run's result with the numbers read off that take time."""
    result = ddlsim.simulate(experiment)
    described(result)
    return result


def described(result: Result) -> str:
    """Return the numbers of a run as HTML."""
    values = [(METRICS[name], METRICS[name].of(result)) for name in HEADLINES]
    numbers = [(metric.heading, metric.write(value)) for metric, value in values if value is not None]
    styles = {kind: (colour, label) for kind, (colour, _, label) in TIME_STYLES.items()}
    return "".join([
        tiles(numbers), "<h3>Where a step's time goes</h3>", stacked(result.shares, styles, percent),
        lines(result.warnings, "warning"), lines(result.notes, "note"),
    ])  # fmt: skip
