"""Learning rates as functions of the epoch (a float: 1.5 is half way through the second epoch).

Every schedule is a frozen dataclass with ``rate(epoch)``. Linear and square-root scaling return the rate for
many workers from the rate that is right for one; WarmUp goes there from a smaller rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from ddlsim.errors import ConfigError
from ddlsim.optim.rules import check_not_negative

__all__ = [
    "Constant",
    "Cosine",
    "Polynomial",
    "Schedule",
    "Steps",
    "WarmUp",
    "linear_scaling",
    "square_root_scaling",
]


class Schedule(Protocol):
    """A learning rate that depends on the epoch."""

    def rate(self, epoch: float) -> float: ...


def _check_workers(n_workers: int) -> None:
    if n_workers < 1:
        raise ConfigError(f"n_workers = {n_workers}: must be at least 1")


def linear_scaling(rate: float, n_workers: int) -> float:
    """Return n_workers * rate: the batch grows n-fold, so should the rate (Goyal et al. 2017,
    arXiv:1706.02677, section 2.1)."""
    _check_workers(n_workers)
    return n_workers * rate


def square_root_scaling(rate: float, n_workers: int) -> float:
    """Return sqrt(n_workers) * rate, which keeps the variance of the step (Krizhevsky 2014, arXiv:1404.5997,
    section 5)."""
    _check_workers(n_workers)
    return math.sqrt(n_workers) * rate


def _check_span(owner: str, n_epochs: float) -> None:
    if not (math.isfinite(n_epochs) and n_epochs > 0.0):
        raise ConfigError(f"{owner}: n_epochs = {n_epochs}: must be finite and above 0")


@dataclass(frozen=True)
class Constant:
    """base, always."""

    base: float

    def __post_init__(self) -> None:
        check_not_negative("Constant", base=self.base)

    def rate(self, epoch: float) -> float:
        return self.base


@dataclass(frozen=True)
class Steps:
    """base * factor^k once k of the milestones (epochs) have been reached (He et al. 2016, section 3.4)."""

    base: float
    milestones: tuple[float, ...]
    factor: float = 0.1

    def __post_init__(self) -> None:
        check_not_negative("Steps", base=self.base, factor=self.factor)
        if not self.milestones or any(b <= a for a, b in pairwise((0.0, *self.milestones))):
            raise ConfigError(f"Steps: milestones = {self.milestones}: must be epochs above 0 that increase")

    def rate(self, epoch: float) -> float:
        return self.base * self.factor ** sum(epoch >= milestone for milestone in self.milestones)


@dataclass(frozen=True)
class Cosine:
    """final + (base - final) (1 + cos(pi e / n)) / 2 until epoch n, then final (Loshchilov and Hutter 2017,
    arXiv:1608.03983, equation 5)."""

    base: float
    n_epochs: float
    final: float = 0.0

    def __post_init__(self) -> None:
        check_not_negative("Cosine", base=self.base, final=self.final)
        _check_span("Cosine", self.n_epochs)

    def rate(self, epoch: float) -> float:
        share = min(max(epoch / self.n_epochs, 0.0), 1.0)
        return self.final + (self.base - self.final) * 0.5 * (1.0 + math.cos(math.pi * share))


@dataclass(frozen=True)
class Polynomial:
    """final + (base - final) (1 - e / n)^power until epoch n, then final (You et al. 2017, arXiv:1708.03888,
    section 5, power 2)."""

    base: float
    n_epochs: float
    power: float = 2.0
    final: float = 0.0

    def __post_init__(self) -> None:
        check_not_negative("Polynomial", base=self.base, final=self.final, power=self.power)
        _check_span("Polynomial", self.n_epochs)

    def rate(self, epoch: float) -> float:
        left = 1.0 - min(max(epoch / self.n_epochs, 0.0), 1.0)
        return self.final + (self.base - self.final) * math.pow(left, self.power)


@dataclass(frozen=True)
class WarmUp:
    """For the first `n_epochs`, a straight line from `start` to the rate that `then` has at their end; after
    that, `then` (Goyal et al. 2017, section 2.2: start = the rate of one worker, 5 epochs)."""

    then: Schedule
    n_epochs: float
    start: float = 0.0

    def __post_init__(self) -> None:
        check_not_negative("WarmUp", start=self.start)
        _check_span("WarmUp", self.n_epochs)

    def rate(self, epoch: float) -> float:
        if epoch >= self.n_epochs:
            return self.then.rate(epoch)
        share = max(epoch, 0.0) / self.n_epochs
        return self.start + share * (self.then.rate(self.n_epochs) - self.start)
