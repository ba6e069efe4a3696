"""When a training run is evaluated, what its history holds, and when it is enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ddlsim.learning.learner import Learner
from ddlsim.learning.training import Training
from ddlsim.learning.values import Array, Value

__all__ = ["Monitor", "Progress", "Row"]


class Row(NamedTuple):
    """A line of the history. Sizes in bytes, times in s.

    ``train_loss`` is the mean loss of the gradients computed since the last row, ``loss`` and ``accuracy`` are
    those of the held-out samples; ``nbytes`` all bytes sent so far; ``staleness`` the mean over the gradients
    applied since the last row; ``consensus`` the root mean square distance of the workers' parameters from their
    mean (NaN where there is one model).
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


#: called after every evaluation, and now and then between them: (simulated time, updates, epoch, last row)
Progress = Callable[[float, int, float, Row | None], None]


@dataclass
class Monitor:
    """Watches a run: :meth:`updated` after every update says why the run should end, or nothing.

    model      the parameters that would be handed over if the run ended now
    nbytes     bytes sent so far
    staleness  staleness of every gradient applied so far
    replicas   all workers' parameters, where they differ
    charge     makes somebody spend the time of an evaluation
    """

    training: Training
    learner: Learner
    model: Callable[[], Value[Array]]
    nbytes: Callable[[], float]
    staleness: Sequence[int]
    replicas: Callable[[], Sequence[Value[Array]]] | None = None
    progress: Progress | None = None
    charge: Callable[[], None] | None = None
    history: list[Row] = field(default_factory=list)
    n_updates: int = 0
    n_samples: int = 0
    _n_stale: int = 0
    _next_time: float = 0.0

    def start(self) -> None:
        """Evaluate the initial parameters."""
        self._evaluate(0.0)

    def updated(self, now: float, n_samples: int) -> str:
        """Count an update made from `n_samples` samples; return why the run should end, or ""."""
        self.n_updates += 1
        self.n_samples += n_samples
        self.learner.settle(self._values)
        limit = self._limit()
        if self._due(now) or limit:
            self._evaluate(now)
            limit = self._target() or limit
        elif self.progress is not None and self.n_updates % 16 == 0:
            self.progress(now, self.n_updates, self.learner.epoch(self.n_samples), self._last())
        return limit

    def finish(self, now: float) -> None:
        """Evaluate once more at the end of a run that was cut short."""
        if not self.history or self.history[-1].updates != self.n_updates:
            self._evaluate(now)

    def _values(self) -> Sequence[Value[Array]]:
        return self.replicas() if self.replicas is not None else [self.model()]

    def _last(self) -> Row | None:
        return self.history[-1] if self.history else None

    def _due(self, now: float) -> bool:
        seconds = self.training.evaluate_seconds
        if seconds is None:
            return self.n_updates % int(self.training.evaluate_every) == 0
        return now >= self._next_time

    def _limit(self) -> str:
        training = self.training
        if training.updates is not None and self.n_updates >= training.updates:
            return "updates"
        if training.epochs is not None and self.learner.epoch(self.n_samples) >= training.epochs - 1e-9:
            return "epochs"
        return ""

    def _target(self) -> str:
        training, n = self.training, self.training.moving_average
        last = self.history[-n:]
        if len(last) < n:
            return ""
        if training.target_accuracy is not None and _mean([r.accuracy for r in last]) >= training.target_accuracy:
            return "target accuracy"
        if training.target_loss is not None and _mean([r.loss for r in last]) <= training.target_loss:
            return "target loss"
        return ""

    def _evaluate(self, now: float) -> None:
        seconds = self.training.evaluate_seconds
        if seconds is not None:
            self._next_time = (math.floor(now / seconds) + 1.0) * seconds
        train_loss = self.learner.recent_loss()
        loss, accuracy = self.learner.evaluate(self.model())
        fresh = self.staleness[self._n_stale :]
        self._n_stale = len(self.staleness)
        row = Row(
            now, self.n_updates, self.n_samples, self.learner.epoch(self.n_samples), self.learner.rate(self.n_samples),
            train_loss, loss, accuracy, self.nbytes(), _mean(fresh), self._consensus(),
        )  # fmt: skip
        self.history.append(row)
        if self.charge is not None:
            self.charge()
        if self.progress is not None:
            self.progress(now, self.n_updates, row.epoch, row)

    def _consensus(self) -> float:
        return math.nan if self.replicas is None else self.learner.spread(self.replicas())


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
