"""Learning rates as functions of the epoch (a float: 1.5 is half way through the second epoch).

Every schedule is a frozen dataclass with ``rate(epoch)``. Linear and square-root scaling return the rate for
many workers from the rate that is right for one; WarmUp goes there from a smaller rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from ddlsim.arguments import Count, NotNegative, Positive, checked
from ddlsim.errors import ConfigError


class Schedule(Protocol):
    """A learning rate that depends on the epoch."""

    def rate(self, epoch: float) -> float: ...


@checked
def linear_scaling(rate: NotNegative, n_workers: Count) -> float:
    """Return n_workers * rate: the batch grows n-fold, so should the rate (Goyal et al. 2017,
    arXiv:1706.02677, section 2.1)."""
    return n_workers * rate


@checked
def square_root_scaling(rate: NotNegative, n_workers: Count) -> float:
    """Return sqrt(n_workers) * rate, which keeps the variance of the step (Krizhevsky 2014, arXiv:1404.5997,
    section 5)."""
    return math.sqrt(n_workers) * rate


@checked
@dataclass(frozen=True)
class Constant:
    """base, always."""

    base: NotNegative

    def rate(self, epoch: float) -> float:
        return self.base


@checked
@dataclass(frozen=True)
class Steps:
    """base * factor^k once k of the milestones (epochs) have been reached (He et al. 2016, section 3.4)."""

    base: NotNegative
    milestones: tuple[Positive, ...]
    factor: NotNegative = 0.1

    def __post_init__(self) -> None:
        if not self.milestones or any(b <= a for a, b in pairwise((0.0, *self.milestones))):
            raise ConfigError(f"Steps: milestones = {self.milestones}: must be epochs above 0 that increase")

    def rate(self, epoch: float) -> float:
        return self.base * self.factor ** sum(epoch >= milestone for milestone in self.milestones)


@checked
@dataclass(frozen=True)
class Cosine:
    """final + (base - final) (1 + cos(pi e / n)) / 2 until epoch n, then final (Loshchilov and Hutter 2017,
    arXiv:1608.03983, equation 5)."""

    base: NotNegative
    n_epochs: Positive
    final: NotNegative = 0.0

    def rate(self, epoch: float) -> float:
        share = min(max(epoch / self.n_epochs, 0.0), 1.0)
        return self.final + (self.base - self.final) * 0.5 * (1.0 + math.cos(math.pi * share))


@checked
@dataclass(frozen=True)
class Polynomial:
    """final + (base - final) (1 - e / n)^power until epoch n, then final (You et al. 2017, arXiv:1708.03888,
    section 5, power 2)."""

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
    """For the first `n_epochs`, a straight line from `start` to the rate that `then` has at their end; after
    that, `then` (Goyal et al. 2017, section 2.2: start = the rate of one worker, 5 epochs)."""

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
    """A batch of `base` samples that grows by `factor` at each milestone (epochs), to `largest` at most.

    With SGD's noise scale eta n_samples / batch, this anneals like dividing the rate by `factor` does (Smith,
    Kindermans, Ying and Le 2018, arXiv:1711.00489, section 3), in fewer updates.
    """

    base: Count
    milestones: tuple[Positive, ...]
    factor: Count = 2
    largest: Count | None = None

    def __post_init__(self) -> None:
        if self.largest is not None and self.largest < self.base:
            raise ConfigError(f"GrowingBatch: largest = {self.largest}: must be at least base = {self.base}")
        if not self.milestones or any(b <= a for a, b in pairwise((0.0, *self.milestones))):
            raise ConfigError(f"GrowingBatch: milestones = {self.milestones}: must be epochs above 0 that increase")

    def batch_size(self, epoch: float) -> int:
        """Return the samples of a batch at `epoch`."""
        size: int = self.base * self.factor ** sum(epoch >= milestone for milestone in self.milestones)
        return size if self.largest is None else min(size, self.largest)
