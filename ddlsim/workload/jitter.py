"""Variability of the compute time: distributions of a factor per step, and transient slow-downs.

Each distribution is a frozen dataclass with ``mean`` and ``sample(stream, n)``, which draws n factors, shape
(n,), that multiply a step's compute time; the stream is one of :mod:`ddlsim.streams`. Drawing n factors at once or in
pieces gives the same sequence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Index, Positive, checked, number, quantity
from ddlsim.errors import ConfigError
from ddlsim.units import si

Floats = npt.NDArray[np.float64]


@checked
@dataclass(frozen=True)
class NoJitter:
    """Every factor is 1."""

    mean: float = field(default=1.0, init=False)

    def sample(self, stream: np.random.Generator, n: int) -> Floats:
        return np.ones(n)


@checked
@dataclass(frozen=True)
class Lognormal:
    """Lognormal of mean 1 and coefficient of variation `cv`."""

    cv: Positive
    mean: float = field(default=1.0, init=False)

    def sample(self, stream: np.random.Generator, n: int) -> Floats:
        variance = math.log1p(self.cv**2)
        return np.exp(math.sqrt(variance) * stream.standard_normal(n) - 0.5 * variance)


@checked
@dataclass(frozen=True)
class Gamma:
    """Gamma of mean 1 and coefficient of variation `cv`."""

    cv: Positive
    mean: float = field(default=1.0, init=False)

    def sample(self, stream: np.random.Generator, n: int) -> Floats:
        return stream.standard_gamma(self.cv**-2, n) * self.cv**2


@checked
@dataclass(frozen=True)
class ShiftedExponential:
    """1 plus an exponential of mean `mean_extra` (Lee et al. 2018, IEEE Trans. Inf. Theory 64(3))."""

    mean_extra: Positive

    @property
    def mean(self) -> float:
        return 1.0 + self.mean_extra

    def sample(self, stream: np.random.Generator, n: int) -> Floats:
        return 1.0 + self.mean_extra * stream.standard_exponential(n)


@checked
@dataclass(frozen=True)
class Exponential:
    """Exponential of mean 1."""

    mean: float = field(default=1.0, init=False)

    def sample(self, stream: np.random.Generator, n: int) -> Floats:
        return stream.standard_exponential(n)


@checked
@dataclass(frozen=True)
class Pareto:
    """Pareto with minimum 1 and tail exponent `a` > 1: mean a / (a - 1), infinite variance for a <= 2."""

    a: Annotated[float, number(1.0, above=True)]

    @property
    def mean(self) -> float:
        return self.a / (self.a - 1.0)

    def sample(self, stream: np.random.Generator, n: int) -> Floats:
        return np.exp(stream.standard_exponential(n) / self.a)


@checked
@dataclass(frozen=True)
class Uniform:
    """Uniform between `low` and `high`: mean (low + high) / 2."""

    low: Positive
    high: Positive

    def __post_init__(self) -> None:
        if self.high < self.low:
            raise ConfigError(f"Uniform: high = {self.high!r}: must be finite and at least low = {self.low!r}")

    @property
    def mean(self) -> float:
        return 0.5 * (self.low + self.high)

    def sample(self, stream: np.random.Generator, n: int) -> Floats:
        return self.low + (self.high - self.low) * stream.random(n)


@checked
@dataclass(frozen=True)
class Trace:
    """Factors drawn at random, with replacement, from recorded ones (their order is not kept)."""

    values: tuple[Positive, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ConfigError("Trace: values = (): must be at least one factor")

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)

    def sample(self, stream: np.random.Generator, n: int) -> Floats:
        return np.array(self.values)[(stream.random(n) * len(self.values)).astype(np.int64)]


Jitter = NoJitter | Lognormal | Gamma | ShiftedExponential | Exponential | Pareto | Uniform | Trace


@checked
@dataclass(frozen=True, init=False)
class SlowDown:
    """From `start`, for `duration` seconds, the workers `ranks` take `factor` times as long to compute."""

    ranks: tuple[int, ...]
    start: float
    duration: float
    factor: float

    def __init__(
        self,
        ranks: Index | Iterable[Index],
        start: Annotated[float | str, quantity("time", "60 s", zero=True)],
        duration: Annotated[float | str, quantity("time", "60 s")],
        factor: Positive,
    ) -> None:
        chosen = (ranks,) if isinstance(ranks, int) else tuple(ranks)
        if not chosen:
            raise ConfigError("SlowDown: ranks = (): must be one rank or more")
        object.__setattr__(self, "ranks", chosen)
        object.__setattr__(self, "start", si(start, "time"))
        object.__setattr__(self, "duration", si(duration, "time"))
        object.__setattr__(self, "factor", float(factor))

    def later(self, seconds: float) -> SlowDown:
        """Return it, so many s later."""
        return self if seconds == 0.0 else SlowDown(self.ranks, self.start + seconds, self.duration, self.factor)


def slowed_duration(work: float, begin: float, rank: int, slow_downs: Iterable[SlowDown]) -> float:
    """Return how long `work` seconds of computing take on `rank` when started at time `begin`.

    Work goes on at rate 1 / (product of the factors of the slow-downs that are active), so an interval that a
    slow-down covers partly is stretched partly.
    """
    mine = [slow for slow in slow_downs if rank in slow.ranks and slow.start + slow.duration > begin]
    edges = sorted({t for slow in mine for t in (slow.start, slow.start + slow.duration) if t > begin})
    now, left = begin, work
    for edge in [*edges, math.inf]:
        factor = math.prod(slow.factor for slow in mine if slow.start <= now < slow.start + slow.duration)
        if left * factor <= edge - now:
            return now + left * factor - begin
        left -= (edge - now) / factor
        now = edge
    raise AssertionError("the last edge is infinite")


def slow_intervals(slow_downs: Iterable[SlowDown]) -> list[tuple[float, float]]:
    """Return (end in s, factor) of the intervals, one after the other, in which work takes so many times as long."""
    to_come = sorted(slow_downs, key=lambda slow: slow.start, reverse=True)
    edges = sorted({edge for slow in to_come for edge in (slow.start, slow.start + slow.duration)})
    intervals, active = [], list[SlowDown]()
    for begin, end in itertools.pairwise([-math.inf, *edges, math.inf]):
        while to_come and to_come[-1].start <= begin:
            active.append(to_come.pop())
        active = [slow for slow in active if begin < slow.start + slow.duration]
        intervals.append((end, math.prod(slow.factor for slow in active)))
    return intervals
