"""Distributions, streams, slow-downs, and the closed forms of order statistics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from ddlsim import Slowdown
from ddlsim.errors import ConfigError
from ddlsim.runtime.context import factors
from ddlsim.streams import stream
from ddlsim.workload import order_statistics
from ddlsim.workload.jitter import (
    Exponential,
    Gamma,
    Jitter,
    Lognormal,
    NoJitter,
    Pareto,
    ShiftedExponential,
    Trace,
    Uniform,
    slowed_duration,
)

#: distribution -> its variance
KINDS: list[tuple[Jitter, float]] = [
    (NoJitter(), 0.0),
    (Lognormal(0.3), 0.09),
    (Gamma(0.5), 0.25),
    (ShiftedExponential(0.2), 0.04),
    (Exponential(), 1.0),
    (Pareto(5.0), 5.0 / (4.0**2 * 3.0)),
    (Uniform(0.5, 1.5), 1.0 / 12.0),
    (Trace([1.0, 1.0, 4.0]), 2.0),
]
IDS = [type(kind).__name__ for kind, _ in KINDS]


@pytest.mark.parametrize(("kind", "variance"), KINDS, ids=IDS)
def test_moments(kind: Jitter, variance: float):
    """The sample mean lies within 5 standard errors, the sample variance within a few per cent."""
    n = 200_000
    factors = kind.sample(stream(1, 0, "test"), n)
    assert factors.shape == (n,)
    assert factors.min() > 0.0
    assert factors.mean() == pytest.approx(kind.mean, abs=5.0 * math.sqrt(variance / n) + 1e-15)
    assert factors.var() == pytest.approx(variance, rel=0.06, abs=1e-15)


@pytest.mark.parametrize("kind", [kind for kind, _ in KINDS], ids=IDS)
def test_a_sequence_does_not_depend_on_how_it_is_cut(kind: Jitter):
    whole = kind.sample(stream(7, 3, "compute"), 10)
    pieces = stream(7, 3, "compute")
    assert np.array_equal(np.concatenate([kind.sample(pieces, n) for n in (1, 4, 2, 3)]), whole)


@pytest.mark.parametrize("kind", [kind for kind, _ in KINDS], ids=IDS)
@pytest.mark.parametrize("sizes", [(1, 4, 59, 1, 600, 7), (512, 512), (64, 128, 63, 2)])
def test_factors_taken_at_once_are_those_taken_one_by_one(kind: Jitter, sizes: tuple[int, ...]):
    """Bit by bit those of blocks of 64, however many are asked for at once."""
    source = stream(7, 3, "compute")
    blocks = np.concatenate([kind.sample(source, 64) for _ in range(17)])[: sum(sizes)]
    taken = factors(kind, 7, 3)
    assert np.concatenate([taken.take(n) for n in sizes]).tobytes() == blocks.tobytes()
    one_by_one = np.array(list(itertools.islice(factors(kind, 7, 3), sum(sizes))))
    assert one_by_one.tobytes() == blocks.tobytes()


class Alternating(Lognormal):
    """A custom class whose sequence depends on how it is cut: even places of a sample, then odd ones."""

    def sample(self, stream: np.random.Generator, n: int) -> np.ndarray:
        drawn = super().sample(stream, n)
        return np.concatenate([drawn[::2], drawn[1::2]])


def test_factors_of_custom_classes_come_in_blocks():
    kind, source = Alternating(0.1), stream(7, 3, "compute")
    blocks = np.concatenate([kind.sample(source, 64) for _ in range(4)])
    assert np.array_equal(factors(kind, 7, 3).take(200), blocks[:200])
    assert not np.array_equal(kind.sample(stream(7, 3, "compute"), 256), blocks)


def test_streams_are_addressed_not_shared():
    """Drawing ranks in any order, interleaved or not, gives each the same numbers; addresses differ."""
    alone = {rank: stream(5, rank, "compute").random(4) for rank in (0, 1, 2)}
    streams = {rank: stream(5, rank, "compute") for rank in (2, 0, 1)}
    drawn = {rank: [] for rank in streams}
    for _ in range(4):
        for rank, source in streams.items():
            drawn[rank].append(source.random())
    assert all(np.array_equal(drawn[rank], alone[rank]) for rank in alone)
    firsts = {stream(s, r, p).random() for s in (0, 1) for r in (0, 1) for p in ("compute", "network")}
    assert len(firsts) == 8


def test_a_stream_is_the_same_everywhere():
    """Pinned: a change here changes every seeded result."""
    assert stream(0, 0, "compute").integers(0, 2**32, 3).tolist() == [4001657382, 4203586323, 1645876755]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Lognormal(0.0), "Lognormal: cv = 0.0: must be finite and above 0"),
        (lambda: Lognormal("10 %"), "Lognormal: cv = '10 %': must be a finite number above 0"),
        (lambda: Gamma(math.nan), "Gamma: cv = nan"),
        (lambda: ShiftedExponential(-1.0), "ShiftedExponential: mean_extra = -1.0"),
        (lambda: Pareto(1.0), "Pareto: a = 1.0: must be finite and above 1"),
        (lambda: Uniform(2.0, 1.0), "Uniform: high = 1.0: must be finite and not below low = 2.0"),
        (lambda: Trace([]), r"Trace: values = \(\): must have at least one factor"),
        (lambda: Trace([1.0, -2.0]), r"Trace: values\[1\] = -2.0"),
        (lambda: Slowdown([], "1 s", "1 s", 2.0), "Slowdown: ranks = "),
        (
            lambda: Slowdown(0, "1 m", "1 s", 2.0),
            r"start: '1 m' has the unknown unit 'm' \(did you mean 'ms' or 'min'\?\)",
        ),
        (lambda: Slowdown(0, -1.0, "1 s", 2.0), "Slowdown: start = -1.0"),
        (lambda: Slowdown(0, 1.0, 0.0, 2.0), "Slowdown: duration = 0.0"),
        (lambda: stream(-1, 0, "x"), "seed = -1"),
    ],
)
def test_bad_parameters(make: Callable[[], object], message: str):
    with pytest.raises(ConfigError, match=message):
        make()


def test_slowdowns_stretch_what_they_cover():
    """3 s of work from t = 0; half speed from 1 s to 3 s: 1 + 2 + 1 = 4 s. Two at once: 4x."""
    slow = (1.0, 3.0, 2.0)
    assert slowed_duration(3.0, 0.0, [slow]) == 4.0
    assert slowed_duration(3.0, 5.0, [slow]) == 3.0
    assert slowed_duration(0.5, 1.5, [slow]) == 1.0
    assert slowed_duration(0.25, 1.0, [slow, slow]) == 1.0
    assert slowed_duration(3.0, 2.0, []) == 3.0


#: (expectation of the k-th of n, sampler of that distribution)
Sampler = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
ORDER: list[tuple[Callable[[int, int], float], Sampler]] = [
    (lambda n, k: order_statistics.exponential(n, k, 2.0), lambda g, s: g.exponential(2.0, s)),
    (
        lambda n, k: order_statistics.shifted_exponential(n, k, 1.0, 0.5),
        lambda g, s: ShiftedExponential(0.5).sample(g, s[0] * s[1]).reshape(s),
    ),
    (lambda n, k: order_statistics.uniform(n, k, 0.5, 1.5), lambda g, s: g.uniform(0.5, 1.5, s)),
    (
        lambda n, k: order_statistics.pareto(n, k, 3.0, 1.0),
        lambda g, s: Pareto(3.0).sample(g, s[0] * s[1]).reshape(s),
    ),
    (lambda n, k: order_statistics.normal(n, k, 1.0, 0.1), lambda g, s: g.normal(1.0, 0.1, s)),
    (
        lambda n, k: order_statistics.lognormal(n, k, 0.3),
        lambda g, s: Lognormal(0.3).sample(g, s[0] * s[1]).reshape(s),
    ),
]


@pytest.mark.parametrize(("n", "k"), [(1, 1), (8, 8), (8, 3), (64, 64), (64, 60)])
@pytest.mark.parametrize(
    ("expected", "sampler"),
    ORDER,
    ids=["exponential", "shifted", "uniform", "pareto", "normal", "lognormal"],
)
def test_order_statistics_against_sampling(expected: Callable[[int, int], float], sampler: Sampler, n: int, k: int):
    """Within 5 standard errors of the mean of 20,000 sampled order statistics."""
    samples = np.sort(sampler(stream(3, n, "order"), (20_000, n)), axis=1)[:, k - 1]
    error = float(samples.std()) / math.sqrt(len(samples))
    assert float(samples.mean()) == pytest.approx(expected(n, k), abs=5.0 * error)


def test_order_statistics_known_values():
    assert order_statistics.normal(2) == pytest.approx(1.0 / math.sqrt(math.pi), rel=1e-12)
    assert order_statistics.normal(3) == pytest.approx(1.5 / math.sqrt(math.pi), rel=1e-12)
    assert order_statistics.exponential(4) == pytest.approx(25.0 / 12.0)
    assert order_statistics.pareto(1, a=3.0) == pytest.approx(1.5)
    assert order_statistics.uniform(3, 1) == 0.25


def test_order_statistics_errors():
    with pytest.raises(ConfigError, match="k = 5: must be between 1 and n = 4"):
        order_statistics.exponential(4, 5)
    with pytest.raises(ConfigError, match=r"a = 0\.9: must be greater than 1 for a finite expectation"):
        order_statistics.pareto(10, a=0.9)
