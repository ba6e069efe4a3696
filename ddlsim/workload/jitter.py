"""Variability of the compute time: distributions of a factor per step, and transient slow-downs.

Each distribution is a frozen dataclass with ``mean`` and ``sample(stream, n)``, which draws n factors, shape
(n,), that multiply a step's compute time. Streams are addressed by (seed, rank, purpose), so what a worker
draws depends on nothing that other workers or processes do; drawing n factors at once or in pieces gives the
same sequence.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ddlsim.errors import ConfigError
from ddlsim.units import parse

__all__ = [
    "Exponential",
    "Gamma",
    "Jitter",
    "Lognormal",
    "NoJitter",
    "Pareto",
    "ShiftedExponential",
    "SlowDown",
    "Trace",
    "Uniform",
    "slowed_duration",
    "stream",
]

Floats = npt.NDArray[np.float64]


def stream(seed: int, rank: int, purpose: str) -> np.random.Generator:
    """Return the random stream of one worker for one purpose ("compute", "failures", ...).

    Philox keyed by a SeedSequence of (seed, rank, digest of the purpose): independent of call order, process
    and platform. Raises ConfigError for a negative seed or rank.
    """
    if seed < 0 or rank < 0:
        raise ConfigError(f"seed = {seed}, rank = {rank}: must not be negative")
    digest = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "big")
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, rank, digest])))


def _require(ok: bool, kind: str, field_name: str, value: object, rule: str) -> None:
    if not ok:
        raise ConfigError(f"{kind}: {field_name} = {value!r}: must be {rule}")


def _positive(kind: str, field_name: str, value: object) -> None:
    number = float(value) if isinstance(value, int | float | np.number) else math.nan
    _require(math.isfinite(number) and number > 0.0, kind, field_name, value, "finite and above 0")


@dataclass(frozen=True)
class NoJitter:
    """Every factor is 1."""

    mean: float = field(default=1.0, init=False)

    def sample(self, stream: np.random.Generator, n: int) -> Floats:
        return np.ones(n)


@dataclass(frozen=True)
class Lognormal:
    """Lognormal of mean 1 and coefficient of variation `cv`."""

    cv: float
    mean: float = field(default=1.0, init=False)

    def __post_init__(self) -> None:
        _positive("Lognormal", "cv", self.cv)

    def sample(self, stream: np.random.Generator, n: int) -> Floats:
        variance = math.log1p(self.cv**2)
        return np.exp(math.sqrt(variance) * stream.standard_normal(n) - 0.5 * variance)


@dataclass(frozen=True)
class Gamma:
    """Gamma of mean 1 and coefficient of variation `cv`."""

    cv: float
    mean: float = field(default=1.0, init=False)

    def __post_init__(self) -> None:
        _positive("Gamma", "cv", self.cv)

    def sample(self, stream: np.random.Generator, n: int) -> Floats:
        return stream.standard_gamma(self.cv**-2, n) * self.cv**2


@dataclass(frozen=True)
class ShiftedExponential:
    """1 plus an exponential of mean `mean_extra` (Lee et al. 2018, IEEE Trans. Inf. Theory 64(3))."""

    mean_extra: float

    def __post_init__(self) -> None:
        _positive("ShiftedExponential", "mean_extra", self.mean_extra)

    @property
    def mean(self) -> float:
        return 1.0 + self.mean_extra

    def sample(self, stream: np.random.Generator, n: int) -> Floats:
        return 1.0 + self.mean_extra * stream.standard_exponential(n)


@dataclass(frozen=True)
class Exponential:
    """Exponential of mean 1."""

    mean: float = field(default=1.0, init=False)

    def sample(self, stream: np.random.Generator, n: int) -> Floats:
        return stream.standard_exponential(n)


@dataclass(frozen=True)
class Pareto:
    """Pareto with minimum 1 and tail exponent `a` > 1: mean a / (a - 1), infinite variance for a <= 2."""

    a: float

    def __post_init__(self) -> None:
        _require(math.isfinite(self.a) and self.a > 1.0, "Pareto", "a", self.a, "finite and above 1")

    @property
    def mean(self) -> float:
        return self.a / (self.a - 1.0)

    def sample(self, stream: np.random.Generator, n: int) -> Floats:
        return np.exp(stream.standard_exponential(n) / self.a)


@dataclass(frozen=True)
class Uniform:
    """Uniform between `low` and `high`: mean (low + high) / 2."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _positive("Uniform", "low", self.low)
        _require(math.isfinite(self.high) and self.high >= self.low, "Uniform", "high", self.high,
                 f"finite and at least low = {self.low!r}")  # fmt: skip

    @property
    def mean(self) -> float:
        return 0.5 * (self.low + self.high)

    def sample(self, stream: np.random.Generator, n: int) -> Floats:
        return self.low + (self.high - self.low) * stream.random(n)


@dataclass(frozen=True, init=False)
class Trace:
    """Factors drawn at random, with replacement, from recorded ones (their order is not kept)."""

    values: tuple[float, ...]

    def __init__(self, values: Sequence[float]) -> None:
        object.__setattr__(self, "values", tuple(float(value) for value in values))
        _require(len(self.values) > 0, "Trace", "values", self.values, "at least one factor")
        for i, value in enumerate(self.values):
            _positive("Trace", f"values[{i}]", value)

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)

    def sample(self, stream: np.random.Generator, n: int) -> Floats:
        return np.array(self.values)[(stream.random(n) * len(self.values)).astype(np.int64)]


Jitter = NoJitter | Lognormal | Gamma | ShiftedExponential | Exponential | Pareto | Uniform | Trace


@dataclass(frozen=True, init=False)
class SlowDown:
    """From `start`, for `duration` seconds, the workers `ranks` take `factor` times as long to compute."""

    ranks: tuple[int, ...]
    start: float
    duration: float
    factor: float

    def __init__(
        self, ranks: int | Iterable[int], start: float | str, duration: float | str, factor: float
    ) -> None:
        chosen = (ranks,) if isinstance(ranks, int) else tuple(ranks)
        begin = parse(start, "time", "SlowDown: start") if isinstance(start, str) else float(start)
        length = parse(duration, "time", "SlowDown: duration") if isinstance(duration, str) else float(duration)
        _require(
            bool(chosen) and min(chosen) >= 0, "SlowDown", "ranks", ranks, "one rank or more, none negative"
        )
        _require(math.isfinite(begin) and begin >= 0.0, "SlowDown", "start", start, "finite and not negative")
        _positive("SlowDown", "duration", length)
        _positive("SlowDown", "factor", factor)
        for name, value in (
            ("ranks", chosen),
            ("start", begin),
            ("duration", length),
            ("factor", float(factor)),
        ):
            object.__setattr__(self, name, value)


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
