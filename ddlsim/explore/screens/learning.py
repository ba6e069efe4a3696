"""*Learning*: accuracy over simulated time, updates or bytes, while the runs go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import panel as pn

from ddlsim.errors import ConfigError, DdlsimError
from ddlsim.explore.charts import Chart
from ddlsim.explore.compared import at_most
from ddlsim.explore.exports import Exports, File, experiment_files
from ddlsim.explore.jobs import Jobs
from ddlsim.explore.learning_runs import COLUMNS, MODELS, XS, YS, Lesson, columns, learn, lessons
from ddlsim.explore.pieces import html, lines, message, table
from ddlsim.explore.setup import Setup
from ddlsim.learning.monitor import Row
from ddlsim.readable import percent, seconds, size
from ddlsim.run.files import STRATEGIES
from ddlsim.run.result import Result
from ddlsim.study import Study

NAME = "learning"
TITLE = "Learning"
#: beside the form's strategy, at first
OTHERS = ("local-sgd", "async-parameter-server")


def screen(setup: Setup, jobs: Jobs) -> pn.viewable.Viewable:
    """Return the screen."""
    return _Screen(setup, jobs).view


class _Screen:
    def __init__(self, setup: Setup, jobs: Jobs) -> None:
        self._setup, self._jobs = setup, jobs
        first, wide = Lesson(workers=at_most(Lesson.workers, setup)), {"sizing_mode": "stretch_width"}
        self._widgets: dict[str, Any] = {
            "data": pn.widgets.Select(label="Data", options=list(MODELS), value=first.data, **wide),
            "workers": pn.widgets.IntInput(label="Workers", value=first.workers, start=1, end=1024, **wide),
            "batch_size": pn.widgets.IntInput(label="Batch per worker", value=first.batch_size, start=1, **wide),
            "rate": pn.widgets.FloatInput(label="Learning rate", value=first.rate, start=0.0, step=0.05, **wide),
            "epochs": pn.widgets.FloatInput(label="Epochs", value=first.epochs, start=0.1, step=1.0, **wide),
            "evaluate_every": pn.widgets.IntInput(
                label="Updates per point", value=first.evaluate_every, start=1, **wide
            ),
        }
        self._clock = pn.widgets.Checkbox(
            label="Sizes and compute times of the form's model (learning itself is that of the small one)", value=True
        )
        self._others = pn.widgets.MultiChoice(
            label="Strategies beside the form's", options=sorted(STRATEGIES), value=list(OTHERS), **wide
        )
        self._target = pn.widgets.FloatInput(
            label="Target accuracy (%)", value=90.0, start=1.0, end=100.0, step=1.0, **wide
        )
        self._x = pn.widgets.Select(label="Over", options={XS[x][0]: x for x in XS}, value="time", **wide)
        self._y = pn.widgets.Select(label="What", options={YS[y][0]: y for y in YS}, value="accuracy", **wide)
        self._start = pn.widgets.Button(label="Start", width=120)
        self._start.on_click(lambda _: self._begin())
        self._chart = Chart(*self._axes(), COLUMNS)
        self._said, self._state, self._table = message(""), html(css_classes=["state"]), html()
        self._results: Mapping[str, Result] = {}
        self._exports = Exports(self._files)
        for widget in (self._x, self._y):
            widget.param.watch(lambda _: self._chart.show(*self._axes()), "value")
        for widget in (*self._widgets.values(), self._clock, self._others):
            widget.param.watch(lambda _: self._exports.stale(), "value")
        self._target.param.watch(lambda _: self._tell(), "value")
        self.view = pn.Column(
            pn.FlexBox(*[pn.Column(each, width=175) for each in (*self._widgets.values(), self._target)]),
            self._clock, self._others, self._start, self._said,
            jobs.bar(NAME, self._cancelled), self._state,
            pn.FlexBox(*[pn.Column(each, width=220) for each in (self._y, self._x)]), self._chart.view, self._table,
            self._exports.card, sizing_mode="stretch_width",
        )  # fmt: skip
        setup.when_shown(NAME, self._exports.stale, simulates=False)
        self._state.object = _status("Start shows the accuracy while it grows.")

    def _lesson(self) -> Lesson:
        values = {name: widget.value for name, widget in self._widgets.items()}
        empty = [widget.label for widget in self._widgets.values() if widget.value is None]
        if empty:
            raise ConfigError(f"{empty[0]} is empty; give a number")
        return Lesson(**values, clock=bool(self._clock.value))

    def _begin(self) -> None:
        try:
            experiments = lessons(self._setup, self._lesson(), self._others.value)
        except DdlsimError as error:
            self._failed(str(error))
            return
        self._said.object, self._table.object, self._results = "", "", {}
        self._state.object = _status("learning ...")
        self._chart.clear()
        self._jobs.start(NAME, lambda progress: learn(experiments, progress, self._show), self._done, self._failed)

    def _show(self, label: str, rows: Sequence[Row]) -> None:
        self._chart.put(label, columns(rows))

    def _axes(self) -> tuple[tuple[str, str], tuple[str, str]]:
        x, y = self._x.value, self._y.value
        return (x, XS[x][0]), (y, YS[y][0])

    def _done(self, results: Mapping[str, Result]) -> None:
        self._results = results
        self._state.object = _status("done")
        self._tell()

    def _cancelled(self) -> None:
        points = sum(len(self._chart.values(name)["time"]) for name in self._chart.names)
        self._state.object = _status(f"cancelled; the {points} points that had been reached stay")

    def _failed(self, text: str) -> None:
        self._jobs.cancel(NAME)
        self._said.object, self._state.object = message(text).object, ""

    def _tell(self) -> None:
        if self._results and self._target.value is not None:
            self._table.object = outcome(self._results, self._target.value / 100.0)

    def _files(self) -> list[File]:
        return files(self._setup, self._lesson(), self._others.value)


def outcome(results: Mapping[str, Result], target: float) -> str:
    """Return what came out of each run, as an HTML table, with notes."""
    heads = ["strategy", "accuracy", f"to {percent(target)}", "simulated time", "updates", "bytes sent", "ended by"]
    rows = []
    for label, result in results.items():
        last, reached = result.evaluations[-1], result.time_to_accuracy(target)
        rows.append([
            label, percent(result.accuracy), seconds(reached) if reached < float("inf") else "never",
            seconds(last.time), f"{last.updates:,}", size(last.nbytes), result.stop_reason,
        ])  # fmt: skip
    said = dict.fromkeys(text for result in results.values() for text in result.warnings)
    return table(heads, rows) + lines(list(said), "warning")


def files(setup: Setup, lesson: Lesson, others: Sequence[str]) -> list[File]:
    """Return the experiment, or the study over strategies, as a file and as a program."""
    experiments = lessons(setup, lesson, others)
    first = next(iter(experiments.values()))
    if len(experiments) == 1:
        return experiment_files(first, "learning")
    study = Study(first, {"strategy": {label: each.strategy for label, each in experiments.items()}})
    return [File("learning.toml", study.to_toml()), File("learning.py", study.to_python())]


def _status(text: str) -> str:
    return f'<div class="busy" role="status">{text}</div>'
