"""Runs that learn, one strategy after the other, shown while they go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ddlsim
from ddlsim.errors import ConfigError
from ddlsim.explore.compared import chosen_strategies
from ddlsim.explore.jobs import Progress
from ddlsim.explore.setup import Setup
from ddlsim.learning.monitor import Row
from ddlsim.report.progress import share_done, status
from ddlsim.run.experiment import Experiment
from ddlsim.run.result import Result

#: data set -> the small model that learns it
MODELS = {"digits": "digits-cnn", "shapes": "shapes-cnn"}
#: real s between two looks at what a run has learned
LOOK = 0.2
#: column of a chart -> what it is called, and the unit that it is shown in
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
    """What is learned, and by how many.

    batch_size  samples per worker and step
    rate        learning rate
    clock       whether sizes and compute times are those of the form's model, in the place of the small one that learns
    """

    data: str = "digits"
    workers: int = 8
    batch_size: int = 16
    rate: float = 0.1
    epochs: float = 20.0
    evaluate_every: int = 5
    clock: bool = True


def lessons(setup: Setup, lesson: Lesson, others: Sequence[str]) -> dict[str, Experiment]:
    """Return an experiment for each strategy, by its label. Raises a DdlsimError for what makes no sense."""
    if lesson.data not in MODELS:
        raise ConfigError(f"data = {lesson.data!r}: must be one of {', '.join(MODELS)}")
    base = setup.experiment()
    training = ddlsim.Training(
        lesson.data, rate=lesson.rate, epochs=lesson.epochs, evaluate_every=lesson.evaluate_every
    )
    learns = base.with_(
        model=MODELS[lesson.data],
        time_model=base.model if lesson.clock else None,
        workers=lesson.workers,
        batch_size=lesson.batch_size,
        training=training,
        steps=10,
    )
    strategies = chosen_strategies(setup, others, lesson.workers)
    return {label: learns.with_(strategy=strategy) for label, strategy in strategies.items()}


def columns(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return evaluations as columns of a chart, in its units."""
    units: dict[str, Any] = {**XS, **YS}
    return {name: [units[name][1] * getattr(row, name) for row in rows] for name in COLUMNS}


def learn(
    experiments: Mapping[str, Experiment], progress: Progress, show: Callable[[str, Sequence[Row]], None]
) -> dict[str, Result]:
    """Simulate all, and `show` on the page the evaluations of each so far."""
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
