"""*Scaling*: throughput, efficiency and cost over numbers of workers, strategies side by side."""

from __future__ import annotations

import panel as pn

from ddlsim.errors import DdlsimError
from ddlsim.explore.charts import Chart
from ddlsim.explore.exports import Exports, File
from ddlsim.explore.jobs import Jobs
from ddlsim.explore.pieces import html, lines, message, table, without_content
from ddlsim.explore.scaling_runs import SHOWN, Scaled, run_study, series, study_of
from ddlsim.explore.setup import Setup
from ddlsim.run.files import STRATEGIES
from ddlsim.run.metrics import METRICS
from ddlsim.study import Study

NAME = "scaling"
TITLE = "Scaling"
#: seeds of a point where there is jitter
N_SEEDS = 5
COLUMNS = ("workers", "value", "low", "high")
SURE = "no bands: nothing is uncertain here, as there is neither jitter (in the form, under More) nor a calibration"


def screen(setup: Setup, jobs: Jobs) -> pn.viewable.Viewable:
    """Return the screen."""
    return _Screen(setup, jobs).view


class _Screen:
    def __init__(self, setup: Setup, jobs: Jobs) -> None:
        self._setup, self._jobs = setup, jobs
        self._scaled: Scaled | None = None
        wide = {"sizing_mode": "stretch_width"}
        self._workers = pn.widgets.TextInput(label="Numbers of workers", placeholder="1, 2, 4, ... up to 128", **wide)
        self._metric = pn.widgets.Select(
            label="What", options={METRICS[name].heading: name for name in SHOWN}, value="throughput", **wide
        )
        self._seeds = pn.widgets.IntInput(label="Seeds, where there is jitter", value=N_SEEDS, start=2, end=100, **wide)
        self._others = pn.widgets.MultiChoice(
            label="Strategies beside the form's", options=sorted(STRATEGIES), value=[], **wide
        )
        self._chart = Chart(("workers", "workers"), ("value", METRICS["throughput"].axis), COLUMNS)
        self._said, self._about, self._table = message(""), html(css_classes=["about"]), html()
        self._exports = Exports(lambda: files(self._study()))
        for widget in (self._workers, self._seeds, self._others):
            widget.param.watch(lambda _: self._ask(), "value")
        self._metric.param.watch(lambda _: self._draw(), "value")
        self.view = pn.Column(
            pn.FlexBox(*[pn.Column(each, width=220) for each in (self._workers, self._metric, self._seeds)]),
            self._others, self._said, jobs.bar(NAME), self._chart.view, self._about, self._table,
            self._exports.card, sizing_mode="stretch_width",
        )  # fmt: skip
        setup.when_shown(NAME, self._ask)

    def _study(self) -> Study:
        return study_of(self._setup, self._workers.value or "", self._others.value, self._seeds.value or N_SEEDS)

    def _ask(self) -> None:
        self._exports.stale()
        try:
            study = self._study()
        except DdlsimError as error:
            self._failed(str(error))
            return
        self._jobs.start(NAME, lambda progress: run_study(study, progress), self._done, self._failed)

    def _done(self, scaled: Scaled) -> None:
        self._said.object = ""
        self._scaled = scaled
        self._draw()

    def _failed(self, text: str) -> None:
        self._jobs.cancel(NAME)
        self._scaled = None
        self._said.object = message(text).object
        self._about.object = self._table.object = ""
        self._chart.clear()

    def _draw(self) -> None:
        if self._scaled is None:
            return
        metric = METRICS[self._metric.value]
        shown = series(self._scaled, metric.name)
        ticks = sorted({n for points in shown.values() for n in points["workers"]})
        self._chart.clear(ticks, log_y=metric.name == "throughput")
        self._chart.show(("workers", "workers"), ("value", metric.axis))
        for label, points in shown.items():
            self._chart.put(label, points, plain=label == "ideal")
        unknown = "" if shown else lines([f"{metric.heading}: not known here; the cluster has no prices"], "note")
        self._about.object = unknown + lines([self._scaled.bands or SURE], "note")
        self._table.object = described(self._scaled)


def described(scaled: Scaled) -> str:
    """Return all numbers, with their intervals, as an HTML table, and why some are missing."""
    names = ["throughput", "efficiency", "step_time", *(["cost_per_sample"] if _has_costs(scaled) else [])]
    rows = []
    for _, row in scaled.summary.iterrows():
        cells = []
        for name in names:
            write, low, high = METRICS[name].write, row[f"{name}_low"], row[f"{name}_high"]
            sure = not scaled.bands or low != low or name == "step_time"
            cells.append(write(row[name]) if sure else f"{write(row[name])} ({write(low)} to {write(high)})")
        rows.append([str(row["strategy"]), str(int(row["workers"])), *cells])
    heads = ["strategy", "workers", *(METRICS[name].heading for name in names)]
    return table(heads, rows) + lines([without_content(text) for text in scaled.misfits], "warning")


def _has_costs(scaled: Scaled) -> bool:
    return bool(scaled.summary["cost_per_sample"].notna().any())


def files(study: Study) -> list[File]:
    """Return the study as a file for ``ddlsim sweep`` and as a program."""
    return [File("scaling.toml", study.to_toml()), File("scaling.py", study.to_python())]
