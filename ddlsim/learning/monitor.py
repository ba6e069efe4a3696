"""Evaluations, history and end of a training run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.learning.checkpoint import Checkpoint
from ddlsim.learning.learner import Handover, Learner, State
from ddlsim.learning.training import Training
from ddlsim.learning.values import ABSENT, Array, Value


class Row(NamedTuple):
    """A row of the history: one evaluation.

    time            simulated time, s
    updates, samples, epoch
                    progress of the training
    rate            learning rate
    train_loss      mean loss of the gradients computed since the last row
    loss, accuracy  on the held-out samples
    nbytes          total bytes sent so far
    staleness       mean staleness of the gradients applied since the last row
    consensus       root mean square distance of the workers' parameters from their mean; NaN if there is one model
    """

    time: float
    updates: int
    samples: int
    epoch: float
    rate: float
    train_loss: float
    loss: float
    accuracy: float
    nbytes: float
    staleness: float
    consensus: float


#: the totals of the preceding groups, if there are none
_NOTHING = Handover(np.zeros(0), None, None, 0, 0, 0.0, 0.0, ())
#: called after every update: (simulated time in s, updates, epoch, last row)
Progress = Callable[[float, int, float, Row], None]


@dataclass
class Monitor:
    """Evaluates the model during a run; :meth:`updated`, called after every update, returns why the run should end.

    model      returns the parameters that the run would return if it ended now
    nbytes     returns the bytes sent so far
    staleness  staleness of all gradients applied so far
    replicas   returns all workers' parameters, if they differ
    steps      returns the number of local steps of each worker
    charge     charges a worker the time of an evaluation
    saved      the run that this one resumes
    optimizer  returns the optimizer's state, if there is one
    begin      state handed over by another group of workers
    keeps_latest
               whether ``latest`` is set to the model and the optimizer's state after each update

    ``evaluated`` is the model of the history's last row. It becomes the result of the run, whatever workers do
    afterwards; ``evaluated_steps`` are the replicas' numbers of steps at that time (empty if there is one model).
    """

    training: Training
    learner: Learner
    model: Callable[[], Value[Array]]
    nbytes: Callable[[], float]
    staleness: Sequence[int]
    replicas: Callable[[], Sequence[Value[Array]]] | None = None
    steps: Callable[[], Sequence[int]] | None = None
    progress: Progress | None = None
    charge: Callable[[], None] | None = None
    saved: Checkpoint | None = None
    optimizer: Callable[[], State] | None = None
    begin: Handover | None = None
    keeps_latest: bool = False
    latest: tuple[Value[Array], State | None] | None = None
    history: list[Row] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    checkpoint: Checkpoint | None = None
    evaluated: Value[Array] = ABSENT
    evaluated_steps: tuple[int, ...] = ()
    n_updates: int = 0
    n_samples: int = 0
    _n_stale: int = 0
    _next_time: float = 0.0

    def start(self) -> None:
        """Evaluate the initial parameters, unless they were handed over with an evaluation."""
        if self.begin is None:
            self._evaluate(0.0)
            return
        self.history, self.n_updates, self.evaluated = list(self.begin.history), self.begin.n_updates, self.model()
        if (seconds := self.training.evaluate_seconds) is not None:
            self._next_time = (math.floor(self.begin.time / seconds) + 1.0) * seconds

    def updated(self, now: float, n_samples: int) -> str:
        """Count an update made from `n_samples` samples; return why the run should end, or ""."""
        self.n_updates += 1
        self.n_samples += n_samples
        self._check_replay(now)
        if self.keeps_latest:
            self.latest = self.model(), None if self.optimizer is None else self.optimizer()
        self.learner.settle(self.replicas or (lambda: [self.model()]))
        reason, due = self._limit(), self._due(now)
        if reason and not due:
            self.mark(reason)  # without the evaluation, which a run that continues would not make
        if reason or due:
            self._evaluate(now)
            reason = self._target() or reason
            if reason and due:
                self.mark(reason)
        if self.progress is not None:
            self.progress(now, self.n_updates, self.learner.epoch(self.n_samples), self.history[-1])
        return reason

    def mark(self, reason: str) -> None:
        """Store the state in which the run ends for `reason`, from which it can be resumed."""
        self.checkpoint = self.snapshot(reason)

    def snapshot(self, reason: str = "") -> Checkpoint:
        """Return the state from which a later run can resume.

        Raises ConfigError if the run ends (for `reason`) before the point at which the resumed run was saved.
        """
        plane = self.learner.plane
        if plane.replaying and self.saved is not None:
            if reason:
                n_saved = len(self.saved.times)
                raise ConfigError(
                    f"the saved run has made {n_saved} updates, but the current limit ({reason}) ends the resumed run "
                    f"after {self.n_updates}; raise this limit"
                )
            return self.saved
        return Checkpoint(plane.snapshot(), tuple(self.learner.losses), tuple(self.times))

    def _check_replay(self, now: float) -> None:
        """Record the time of an update. Raises ConfigError if it differs from that in the saved run."""
        i = len(self.times)
        self.times.append(now)
        if self.saved is not None and i < len(self.saved.times) and self.saved.times[i] != now:
            number, before = i + 1, self.saved.times[i]
            raise ConfigError(
                f"update {number} is at {now!r} s, but was at {before!r} s in the saved run; resume it with the same "
                "cluster, device, models and version of ddlsim"
            )

    def finish(self, now: float) -> None:
        """Evaluate once more at the end of an interrupted run, unless that has been done."""
        if not self.history or self.history[-1].updates != self.n_updates:
            self._evaluate(now)

    @property
    def _before(self) -> Handover:
        return self.begin or _NOTHING

    def _due(self, now: float) -> bool:
        seconds = self.training.evaluate_seconds
        if seconds is None:
            return self.n_updates % int(self.training.evaluate_every) == 0
        return now + self._before.time >= self._next_time

    def _limit(self) -> str:
        training = self.training
        if training.updates is not None and self.n_updates >= training.updates:
            return "updates"
        if training.last_epoch is not None and self.learner.epoch(self.n_samples) >= training.last_epoch - 1e-9:
            return "epochs"
        return ""

    def _target(self) -> str:
        training, last = self.training, self.history[-self.training.moving_average :]
        if len(last) < self.training.moving_average:
            return ""
        if training.target_accuracy is not None and _mean([r.accuracy for r in last]) >= training.target_accuracy:
            return "target accuracy"
        if training.target_loss is not None and _mean([r.loss for r in last]) <= training.target_loss:
            return "target loss"
        return ""

    def _evaluate(self, now: float) -> None:
        now += self._before.time
        seconds = self.training.evaluate_seconds
        if seconds is not None:
            self._next_time = (math.floor(now / seconds) + 1.0) * seconds
        train_loss = self.learner.recent_loss()
        model, steps = self.model(), () if self.steps is None else tuple(self.steps())
        loss, accuracy = self.learner.evaluate(model)
        self.evaluated, self.evaluated_steps = model, steps
        fresh = self.staleness[self._n_stale :]
        self._n_stale = len(self.staleness)
        learned, nbytes = self._before.n_samples + self.n_samples, self._before.nbytes + self.nbytes()
        epoch, rate = self.learner.epoch(self.n_samples), self.learner.rate(self.n_samples)
        apart = math.nan if self.replicas is None else self.learner.spread(self.replicas())
        losses = (train_loss, loss, accuracy)
        self.history.append(Row(now, self.n_updates, learned, epoch, rate, *losses, nbytes, _mean(fresh), apart))
        if self.charge is not None:
            self.charge()


def first_reaching(history: Sequence[Row], target: float, moving_average: int = 1) -> Row | None:
    """Return the evaluation at which the mean of the last `moving_average` accuracies first reached `target`."""
    for i in range(moving_average - 1, len(history)):
        if _mean([row.accuracy for row in history[i + 1 - moving_average : i + 1]]) >= target:
            return history[i]
    return None


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
