"""Variability of compute times: random factors per step, and slow-downs.

Each distribution is a frozen dataclass with ``mean`` and ``sample(stream, n)``, which returns n factors, shape (n,), by
which the compute times of steps are multiplied. The stream comes from :mod:`ddlsim.streams`. Sampling n factors at once
or in parts gives the same sequence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Positive, checked, number
from ddlsim.errors import ConfigError

Floats = npt.NDArray[np.float64]


class _Factors:
    """Base class of the distributions."""

    @property
    def mean(self) -> float:
        """Expected value of the factors."""
        return 1.0

    def sample(self, stream: np.random.Generator, n: int) -> Floats:
        """Return `n` random factors, shape (n,)."""
        return np.ones(n)


@checked
@dataclass(frozen=True)
class NoJitter(_Factors):
    """No jitter: compute times do not vary between steps."""


@checked
@dataclass(frozen=True)
class Lognormal(_Factors):
    """Jitter that multiplies compute times by log-normally distributed factors with mean 1.

    cv  coefficient of variation of the factors: their standard deviation divided by their mean
    """

    cv: Positive

    def sample(self, stream: np.random.Generator, n: int) -> Floats:
        variance = math.log1p(self.cv**2)
        return np.exp(math.sqrt(variance) * stream.standard_normal(n) - 0.5 * variance)


@checked
@dataclass(frozen=True)
class Gamma(_Factors):
    """Jitter that multiplies compute times by gamma-distributed factors with mean 1.

    cv  coefficient of variation of the factors: their standard deviation divided by their mean
    """

    cv: Positive

    def sample(self, stream: np.random.Generator, n: int) -> Floats:
        return stream.standard_gamma(self.cv**-2, n) * self.cv**2


@checked
@dataclass(frozen=True)
class ShiftedExponential(_Factors):
    """Jitter that multiplies compute times by 1 plus an exponentially distributed number with mean `mean_extra`.

    See Lee et al. 2018, IEEE Trans. Inf. Theory 64(3).
    """

    mean_extra: Positive

    @property
    def mean(self) -> float:
        return 1.0 + self.mean_extra

    def sample(self, stream: np.random.Generator, n: int) -> Floats:
        return 1.0 + self.mean_extra * stream.standard_exponential(n)


@checked
@dataclass(frozen=True)
class Exponential(_Factors):
    """Jitter that multiplies compute times by exponentially distributed factors with mean 1."""

    def sample(self, stream: np.random.Generator, n: int) -> Floats:
        return stream.standard_exponential(n)


@checked
@dataclass(frozen=True)
class Pareto(_Factors):
    """Jitter that multiplies compute times by Pareto-distributed factors of at least 1, with tail exponent `a` > 1.

    The mean factor is a / (a - 1). The variance is infinite for a <= 2.
    """

    a: Annotated[float, number(1.0, above=True)]

    @property
    def mean(self) -> float:
        return self.a / (self.a - 1.0)

    def sample(self, stream: np.random.Generator, n: int) -> Floats:
        return np.exp(stream.standard_exponential(n) / self.a)


@checked
@dataclass(frozen=True)
class Uniform(_Factors):
    """Jitter that multiplies compute times by factors with a uniform distribution from `low` to `high`.

    The mean factor is (low + high) / 2. Raises ConfigError if `high` is below `low`.
    """

    low: Positive
    high: Positive

    def __post_init__(self) -> None:
        if self.high < self.low:
            raise ConfigError(f"Uniform: high = {self.high!r}: must be finite and not below low = {self.low!r}")

    @property
    def mean(self) -> float:
        return 0.5 * (self.low + self.high)

    def sample(self, stream: np.random.Generator, n: int) -> Floats:
        return self.low + (self.high - self.low) * stream.random(n)


@checked
@dataclass(frozen=True)
class Trace(_Factors):
    """Jitter that multiplies compute times by recorded factors, sampled with replacement.

    values  recorded factors: the time of each step divided by the time of a step without jitter. The order of the
            factors is ignored
    """

    values: tuple[Positive, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ConfigError("Trace: values = (): must have at least one factor")

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)

    def sample(self, stream: np.random.Generator, n: int) -> Floats:
        return np.array(self.values)[(stream.random(n) * len(self.values)).astype(np.int64)]


Jitter = NoJitter | Lognormal | Gamma | ShiftedExponential | Exponential | Pareto | Uniform | Trace


#: (start in s, end in s, factor): interval in which computations take `factor` times as long
Slow = tuple[float, float, float]


def slowed_duration(work: float, begin: float, slow: Iterable[Slow]) -> float:
    """Return the duration of `work` seconds of computing that start at time `begin`, in s.

    The rate is 1 / (product of the active factors), so a computation that overlaps a slow interval partially is
    stretched partially.
    """
    left_slow = [interval for interval in slow if interval[1] > begin]
    edges = sorted({edge for start, end, _ in left_slow for edge in (start, end) if edge > begin})
    now, left = begin, work
    for edge in [*edges, math.inf]:
        factor = math.prod(factor for start, end, factor in left_slow if start <= now < end)
        if left * factor <= edge - now:
            return now + left * factor - begin
        left -= (edge - now) / factor
        now = edge
    raise AssertionError("unreachable: the last interval does not end")


def slow_intervals(slow: Iterable[Slow]) -> list[tuple[float, float]]:
    """Return consecutive intervals as (end in s, factor); in each, work takes `factor` times as long."""
    to_come = sorted(slow, key=lambda interval: interval[0], reverse=True)
    edges = sorted({edge for start, end, _ in to_come for edge in (start, end)})
    intervals, active = [], list[Slow]()
    for begin, interval_end in itertools.pairwise([-math.inf, *edges, math.inf]):
        while to_come and to_come[-1][0] <= begin:
            active.append(to_come.pop())
        active = [interval for interval in active if begin < interval[1]]
        intervals.append((interval_end, math.prod(factor for *_, factor in active)))
    return intervals
