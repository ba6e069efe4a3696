"""Learning-rate schedules: functions of the epoch (a float: 1.5 is half way through the second epoch).

Every schedule is a frozen dataclass with ``rate(epoch)``. Linear and square-root scaling convert the learning rate of
one worker to that of many; WarmUp starts with a smaller rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from ddlsim.arguments import Count, NotNegative, Positive, checked
from ddlsim.errors import ConfigError


class Schedule(Protocol):
    """Protocol of learning-rate schedules: the method ``rate(epoch)`` returns a learning rate of at least 0."""

    def rate(self, epoch: float) -> float: ...


@checked
def linear_scaling(rate: NotNegative, n_workers: Count) -> float:
    """Return the learning rate for `n_workers` workers by linear scaling: n_workers * rate.

    The global batch size is proportional to the number of workers, and the learning rate is scaled in proportion to it
    (Goyal et al. 2017, arXiv:1706.02677, section 2.1).

    rate       learning rate of a single worker
    n_workers  number of workers
    """
    return n_workers * rate


@checked
def square_root_scaling(rate: NotNegative, n_workers: Count) -> float:
    """Return the learning rate for `n_workers` workers by square-root scaling: sqrt(n_workers) * rate.

    This keeps the variance of an update constant (Krizhevsky 2014, arXiv:1404.5997, section 5).

    rate       learning rate of a single worker
    n_workers  number of workers
    """
    return math.sqrt(n_workers) * rate


@checked
@dataclass(frozen=True)
class Constant:
    """Learning-rate schedule with the constant rate `base`."""

    base: NotNegative

    def rate(self, epoch: float) -> float:
        return self.base


@checked
@dataclass(frozen=True)
class Steps:
    """Step decay: the learning rate is multiplied by `factor` at each milestone (He et al. 2016, section 3.4).

    base        learning rate before the first milestone
    milestones  epochs at which the learning rate drops, in increasing order
    factor      factor that is applied at each milestone

    Raises ConfigError if the milestones are not in increasing order.
    """

    base: NotNegative
    milestones: tuple[Positive, ...]
    factor: NotNegative = 0.1

    def __post_init__(self) -> None:
        if not self.milestones or any(b <= a for a, b in pairwise((0.0, *self.milestones))):
            raise ConfigError(f"Steps: milestones = {self.milestones}: must be increasing epochs above 0")

    def rate(self, epoch: float) -> float:
        return self.base * self.factor ** sum(epoch >= milestone for milestone in self.milestones)


@checked
@dataclass(frozen=True)
class Cosine:
    """Cosine decay of the learning rate (Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5).

    base      learning rate at epoch 0
    n_epochs  n, the number of epochs until the rate reaches `final`
    final     learning rate from epoch n on

    Up to epoch n, the learning rate at epoch e is ``final + (base - final) * (1 + cos(pi * e / n)) / 2``.
    """

    base: NotNegative
    n_epochs: Positive
    final: NotNegative = 0.0

    def rate(self, epoch: float) -> float:
        share = min(max(epoch / self.n_epochs, 0.0), 1.0)
        return self.final + (self.base - self.final) * 0.5 * (1.0 + math.cos(math.pi * share))


@checked
@dataclass(frozen=True)
class Polynomial:
    """Polynomial decay of the learning rate (You et al. 2017, arXiv:1708.03888, section 5, with a power of 2).

    base      learning rate at epoch 0
    n_epochs  n, the number of epochs until the rate reaches `final`
    power     exponent of the decay; with 1, the decay is linear
    final     learning rate from epoch n on

    Up to epoch n, the learning rate at epoch e is ``final + (base - final) * (1 - e / n) ** power``.
    """

    base: NotNegative
    n_epochs: Positive
    power: NotNegative = 2.0
    final: NotNegative = 0.0

    def rate(self, epoch: float) -> float:
        left = 1.0 - min(max(epoch / self.n_epochs, 0.0), 1.0)
        return self.final + (self.base - self.final) * math.pow(left, self.power)


@checked
@dataclass(frozen=True)
class WarmUp:
    """Linear warm-up of the learning rate, followed by another schedule.

    Goyal et al. (2017, section 2.2) start with the learning rate of a single worker and warm up for 5 epochs.

    then      schedule that applies from epoch `n_epochs` on; the warm-up rises linearly to its learning rate at that
              epoch
    n_epochs  length of the warm-up in epochs
    start     learning rate at epoch 0
    """

    then: Schedule
    n_epochs: Positive
    start: NotNegative = 0.0

    def rate(self, epoch: float) -> float:
        if epoch >= self.n_epochs:
            return self.then.rate(epoch)
        share = max(epoch, 0.0) / self.n_epochs
        return self.start + share * (self.then.rate(self.n_epochs) - self.start)


@checked
@dataclass(frozen=True)
class GrowingBatch:
    """Batch-size schedule: the batch size is multiplied by `factor` at each milestone.

    SGD's noise scale is proportional to the learning rate divided by the batch size. Multiplying the batch size by
    `factor` therefore reduces the noise as much as dividing the learning rate by `factor`, but needs fewer updates
    (Smith, Kindermans, Ying and Le 2018, arXiv:1711.00489, section 3).

    base        samples per batch before the first milestone
    milestones  epochs at which the batch size grows, in increasing order
    factor      factor by which the batch size grows at each milestone
    largest     maximum batch size; None: no limit

    Raises ConfigError if the milestones are not in increasing order, or if `largest` is below `base`.
    """

    base: Count
    milestones: tuple[Positive, ...]
    factor: Count = 2
    largest: Count | None = None

    def __post_init__(self) -> None:
        if self.largest is not None and self.largest < self.base:
            raise ConfigError(f"GrowingBatch: largest = {self.largest}: must be at least base = {self.base}")
        if not self.milestones or any(b <= a for a, b in pairwise((0.0, *self.milestones))):
            raise ConfigError(f"GrowingBatch: milestones = {self.milestones}: must be increasing epochs above 0")

    def batch_size(self, epoch: float) -> int:
        """Return the batch size at `epoch`."""
        size: int = self.base * self.factor ** sum(epoch >= milestone for milestone in self.milestones)
        return size if self.largest is None else min(size, self.largest)
