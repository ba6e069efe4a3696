"""*Learning*: accuracy over simulated time, updates or bytes, updated during the runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import panel as pn

import ddlsim
from ddlsim.errors import ConfigError
from ddlsim.explore.components import Chart, Exports, File, files_of, html, lines, message, side_by_side, table
from ddlsim.explore.jobs import Jobs, Progress
from ddlsim.explore.setup import Setup, at_most, chosen_strategies
from ddlsim.learning.monitor import Row
from ddlsim.readable import percent, seconds, size
from ddlsim.report.progress import share_done, status
from ddlsim.run.experiment import Experiment
from ddlsim.run.files import STRATEGIES
from ddlsim.run.result import Result
from ddlsim.study import Study

#: data set -> small model trained on it
MODELS = {"digits": "digits-cnn", "shapes": "shapes-cnn"}
#: interval in s (wall-clock) between updates of the curves
LOOK = 0.2
#: column of a chart -> label and unit
XS = {
    "time": ("simulated time (s)", 1.0),
    "updates": ("updates", 1.0),
    "nbytes": ("bytes sent (GB)", 1e-9),
    "epoch": ("epochs", 1.0),
}
YS = {"accuracy": ("held-out accuracy (%)", 100.0), "loss": ("held-out loss", 1.0)}
COLUMNS = (*XS, *YS)


@dataclass(frozen=True)
class Lesson:
    """Settings of the training.

    batch_size  samples per worker and step
    rate        learning rate
    clock       whether sizes and compute times are those of the form's model, instead of the small one that is trained
    """

    data: str = "digits"
    workers: int = 8
    batch_size: int = 16
    rate: float = 0.1
    epochs: float = 20.0
    evaluate_every: int = 5
    clock: bool = True


def lessons(setup: Setup, lesson: Lesson, others: Sequence[str]) -> dict[str, Experiment]:
    """Return an experiment per strategy, by its label. Raises a DdlsimError for invalid settings."""
    if lesson.data not in MODELS:
        raise ConfigError(f"data = {lesson.data!r}: must be one of {', '.join(MODELS)}")
    base = setup.experiment()
    training = ddlsim.Training(
        lesson.data, rate=lesson.rate, epochs=lesson.epochs, evaluate_every=lesson.evaluate_every
    )
    sizes = {"workers": lesson.workers, "batch_size": lesson.batch_size, "steps": 10}
    clock = base.model if lesson.clock else None
    learns = base.with_(model=MODELS[lesson.data], time_model=clock, training=training, **sizes)
    strategies = chosen_strategies(setup, others, lesson.workers)
    return {label: learns.with_(strategy=strategy) for label, strategy in strategies.items()}


def columns(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return evaluations as columns of a chart, in its units."""
    units: dict[str, Any] = {**XS, **YS}
    return {name: [units[name][1] * getattr(row, name) for row in rows] for name in COLUMNS}


def learn(
    experiments: Mapping[str, Experiment], progress: Progress, show: Callable[[str, Sequence[Row]], None]
) -> dict[str, Result]:
    """Simulate all experiments, and `show` each one's evaluations on the page as they come."""
    results: dict[str, Result] = {}
    for number, (label, experiment) in enumerate(experiments.items()):
        progress.check()
        rows: list[Row] = []
        told = 0.0

        def report(
            now: float, n_updates: int, epoch: float, row: Row, *, label: str = label, number: int = number,
            rows: list[Row] = rows, experiment: Experiment = experiment,
        ) -> None:  # fmt: skip
            nonlocal told
            if not rows or row is not rows[-1]:
                rows.append(row)
                if time.monotonic() >= told + LOOK:
                    told = time.monotonic()
                    progress.tell(partial(show, label, tuple(rows)))
            assert experiment.training is not None
            share = share_done(experiment.training, float(experiment.max_time), now, n_updates, epoch) or 0.0
            progress.update((number + share) / len(experiments), f"{label}: {status(now, n_updates, epoch, row)}")

        result = ddlsim.simulate(experiment, progress=report)
        progress.check()
        results[label] = result
        progress.tell(partial(show, label, tuple(result.evaluations)))
    return results


NAME = "learning"
TITLE = "Learning"
#: default strategies for comparison
COMPARED = ("local-sgd", "async-parameter-server")


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
        }
        label, every = "Updates per point", first.evaluate_every
        self._widgets["evaluate_every"] = pn.widgets.IntInput(label=label, value=every, start=1, **wide)
        label = "Use the sizes and compute times of the form's model (the small model is trained)"
        self._clock = pn.widgets.Checkbox(label=label, value=True)
        label, strategies = "Further strategies", sorted(STRATEGIES)
        self._others = pn.widgets.MultiChoice(label=label, options=strategies, value=list(COMPARED), **wide)
        label = "Target accuracy (%)"
        self._target = pn.widgets.FloatInput(label=label, value=90.0, start=1.0, end=100.0, step=1.0, **wide)
        self._x = pn.widgets.Select(label="Over", options={XS[x][0]: x for x in XS}, value="time", **wide)
        self._y = pn.widgets.Select(label="What", options={YS[y][0]: y for y in YS}, value="accuracy", **wide)
        self._start = pn.widgets.Button(label="Start", width=120)
        self._start.on_click(lambda _: self._begin())
        self._chart = Chart(*self._axes(), COLUMNS)
        self._said, self._state, self._table = message(""), html(css_classes=["state"]), html()
        self._results: Mapping[str, Result] = {}
        self._exports = Exports(lambda: files(setup, self._lesson(), self._others.value))
        for widget in (self._x, self._y):
            widget.param.watch(lambda _: self._chart.show(*self._axes()), "value")
        for widget in (*self._widgets.values(), self._clock, self._others):
            widget.param.watch(lambda _: self._exports.stale(), "value")
        self._target.param.watch(lambda _: self._tell(), "value")
        self.view = pn.Column(
            side_by_side((*self._widgets.values(), self._target), width=175),
            self._clock, self._others, self._start, self._said,
            jobs.bar(NAME, self._cancelled), self._state,
            side_by_side((self._y, self._x), width=220), self._chart.view, self._table,
            self._exports.card, sizing_mode="stretch_width",
        )  # fmt: skip
        setup.when_shown(NAME, self._exports.stale, simulates=False)
        self._state.object = _status("Press Start to train; the accuracy is shown as it grows.")

    def _lesson(self) -> Lesson:
        values = {name: widget.value for name, widget in self._widgets.items()}
        empty = [widget.label for widget in self._widgets.values() if widget.value is None]
        if empty:
            raise ConfigError(f"{empty[0]} is empty; enter a number")
        return Lesson(**values, clock=bool(self._clock.value))

    def _begin(self) -> None:
        def prepared() -> Callable[[Progress], dict[str, Result]]:
            experiments = lessons(self._setup, self._lesson(), self._others.value)
            self._said.object, self._table.object, self._results = "", "", {}
            self._state.object = _status("learning ...")
            self._chart.clear()
            return partial(learn, experiments, show=lambda label, rows: self._chart.put(label, columns(rows)))

        self._jobs.ask(NAME, prepared, self._done, self._failed)

    def _axes(self) -> tuple[tuple[str, str], tuple[str, str]]:
        x, y = self._x.value, self._y.value
        return (x, XS[x][0]), (y, YS[y][0])

    def _done(self, results: Mapping[str, Result]) -> None:
        self._results = results
        self._state.object = _status("done")
        self._tell()

    def _cancelled(self) -> None:
        points = sum(len(self._chart.values(name)["time"]) for name in self._chart.names)
        self._state.object = _status(f"cancelled; the first {points} points remain")

    def _failed(self, text: str) -> None:
        self._said.object, self._state.object = message(text).object, ""

    def _tell(self) -> None:
        if self._results and self._target.value is not None:
            self._table.object = outcome(self._results, self._target.value / 100.0)


def outcome(results: Mapping[str, Result], target: float) -> str:
    """Return the outcome of each run as an HTML table, with notes."""
    heads = ["strategy", "accuracy", f"to {percent(target)}", "simulated time", "updates", "bytes sent", "ended by"]
    rows = []
    for label, result in results.items():
        last, reached = result.evaluations[-1], result.time_to_accuracy(target)
        until = seconds(reached) if reached < float("inf") else "never"
        spent = seconds(last.time), f"{last.updates:,}", size(last.nbytes)
        rows.append([label, percent(result.accuracy), until, *spent, result.stop_reason])
    said = dict.fromkeys(text for result in results.values() for text in result.warnings)
    return table(heads, rows) + lines(list(said), "warning")


def files(setup: Setup, lesson: Lesson, others: Sequence[str]) -> list[File]:
    """Return the experiment, or the study over strategies, as a file and as a program."""
    experiments = lessons(setup, lesson, others)
    first = next(iter(experiments.values()))
    if len(experiments) == 1:
        return files_of(first, NAME)
    return files_of(Study(first, {"strategy": {label: run.strategy for label, run in experiments.items()}}), NAME)


def _status(text: str) -> str:
    return f'<div class="busy" role="status">{text}</div>'
