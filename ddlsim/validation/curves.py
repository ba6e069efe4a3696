"""Cost curves: size-dependent deviations of an operation from the simulation, such as protocol switches of a library.

:mod:`ddlsim.runtime.costs` has the formula. Curves are continuous, with at most three pieces, or one between all
measured sizes; each has Hockney's latency and bandwidth (1994, Parallel Computing 20(3)). The number of pieces and the
(measured) sizes at which they meet minimise Akaike's criterion chi^2 + 2 (number of parameters). The scatter in chi^2
is taken as known: that of a row's repetitions, at least :data:`~ddlsim.validation.log_fit.NOISE`. The plain simulation,
with all factors 1, is one of the choices.

If a curve passes through all sizes, residuals do not show the error in between. Each size is therefore left out in
turn. The error of linear interpolation between its neighbours is halved, because the distance was doubled and the error
at a change of slope is proportional to it. Between two sizes, the scatter is the geometric mean of the errors at these
two and at all sizes, two estimates of equal weight, scaled by the distance of the two sizes (in the logarithm) relative
to the distances there, times 2 sqrt(u (1 - u)) at fraction u of it, like a random walk with fixed ends.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.cluster.calibrated import Beyond
from ddlsim.extras import needs
from ddlsim.run.seeds import t_quantile
from ddlsim.runtime.costs import Parts
from ddlsim.runtime.costs import columns as columns_of
from ddlsim.validation.links import LinkRow
from ddlsim.validation.log_fit import LEAST, NOISE, Floats, sampled, scatter, spread_of, wider

MAX_SEGMENTS = 3


@dataclass(frozen=True)
class Interval:
    """A prediction with an interval from `low` to `high` that contains the measured value with probability `level`.

    value  best single prediction
    notes  warnings about extrapolation beyond the measurements
    """

    low: float
    value: float
    high: float
    level: float = 0.95
    notes: tuple[str, ...] = ()

    def __contains__(self, measured: float) -> bool:
        return self.low <= measured <= self.high


@dataclass(frozen=True, eq=False)
class Curve:
    """Measured corrections to the simulated time of an `operation` with a `backend`, as a function of message size.

    algorithm      algorithm of the collective in the simulation; "" for messages
    inside         True: corrections for operations inside a host; False: corrections for operations between hosts
    per_message    factor by which latencies and overheads are multiplied
    sizes          (n_pieces - 1,) sizes in bytes that separate the pieces of the curve
    per_byte       (n_pieces,) factor by which the time per byte is multiplied in each piece
    covariance     covariance matrix of (per_message, *per_byte)
    spread, dof    cross-validated standard deviation of ln(predicted / measured), and its degrees of freedom
    nbytes, ranks  smallest and largest measured size and number of ranks
    left_out       for curves that pass through every measured size, (n_pieces - 1,) half of the logarithmic error at
                   each of `sizes` when the curve is fitted without that size; for other curves, ()
    """

    operation: str
    backend: str
    algorithm: str
    inside: bool
    per_message: float
    sizes: tuple[int, ...]
    per_byte: tuple[float, ...]
    covariance: Floats
    spread: float
    dof: float
    nbytes: tuple[int, int]
    ranks: tuple[int, int]
    left_out: tuple[float, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether the curve changes nothing because all its factors are 1."""
        return self.per_message == 1.0 and self.per_byte == (1.0,)

    def sampled(self, random: np.random.Generator) -> Curve:
        """Return the curve with randomly sampled factors, multiplied by a common factor sampled from the scatter."""
        factor = wider(self.dof)
        moved = factor * sampled(random, self.covariance)
        scale = math.exp(factor * self.spread * random.standard_normal())
        factors = np.maximum(np.array([self.per_message, *self.per_byte]) + moved, 0.0) * scale
        return dataclasses.replace(self, per_message=float(factors[0]), per_byte=tuple(factors[1:].tolist()))


def fit_curve(rows: Sequence[LinkRow], cluster: Cluster, algorithm: str, absolute: float = 0.0) -> Curve:
    """Return the curve through `rows` (one operation and backend); plain if the simulation is as good.

    With an additional scatter of `absolute` s, short times count less.
    """
    with needs("scipy"):
        from scipy.optimize import nnls

    rows = sorted(rows, key=lambda r: r.row.nbytes)
    parts = [r.case.parts(cluster) for r in rows]
    seconds = np.array([r.row.median_s for r in rows])
    target = 1.0 - np.array([p.reduction for p in parts]) / seconds
    all_sizes = sorted({r.row.nbytes for r in rows})
    plain = np.array([p.per_message + p.per_byte + p.reduction for p in parts])
    noise = _noise(rows)
    counts = noise / scatter(seconds, noise, absolute)
    best = _squares(plain / seconds, counts) / noise**2
    chosen: tuple[tuple[int, ...], Floats] | None = None
    for sizes, n_parameters in _choices(all_sizes):
        columns = columns_of(parts, sizes) / seconds[:, None]
        factors, _ = nnls(counts[:, None] * columns, counts * target)
        predicted = columns @ factors + 1.0 - target
        if (predicted <= 0.0).any():
            continue
        criterion = _squares(predicted, counts) / noise**2 + 2.0 * n_parameters
        if criterion < best - 1e-9:
            best, chosen = criterion, (sizes, factors)
    sizes, factors = chosen or ((), np.ones(2))
    left_out: tuple[float, ...] = ()
    if chosen and len(sizes) == len(all_sizes) - 2 > MAX_SEGMENTS - 1:
        left_out = _left_out(all_sizes, parts[0], factors)
        spread, dof = spread_of(sum(error**2 for error in left_out), len(left_out), 0)
        covariance = np.zeros((len(factors), len(factors)))
    elif chosen:
        columns = columns_of(parts, sizes) / seconds[:, None]
        spread, dof, covariance = _uncertainty(columns, target, factors, counts)
    else:
        spread, dof = spread_of(_squares(plain / seconds, counts), len(rows), 0)
        covariance = np.zeros((2, 2))
    first, ranks = rows[0], [r.row.n_ranks for r in rows]
    about = (first.row.operation, first.row.backend, algorithm, first.link_class == "inside")
    shape = (float(factors[0]), tuple(sizes), tuple(factors[1:].tolist()))
    measured = (all_sizes[0], all_sizes[-1]), (min(ranks), max(ranks))
    return Curve(*about, *shape, covariance, spread, dof, *measured, left_out)


def _choices(all_sizes: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield candidate sizes at which pieces meet, and the number of parameters; a chosen size counts as one."""
    for n_pieces in range(1, MAX_SEGMENTS + 1):
        if 2 * n_pieces <= len(all_sizes):  # every piece needs two sizes
            for sizes in itertools.combinations(all_sizes[1:-1], n_pieces - 1):
                yield sizes, 2 * n_pieces
    if len(all_sizes) - 1 > MAX_SEGMENTS:
        yield tuple(all_sizes[1:-1]), len(all_sizes)


def _left_out(sizes: Sequence[int], parts: Parts, factors: Floats) -> tuple[float, ...]:
    """Return half the errors at all inner `sizes` when a curve through all sizes is interpolated without them."""
    at = [_scaled(parts, size, sizes[1:-1], factors) for size in sizes]
    errors = []
    for i in range(1, len(sizes) - 1):
        share = (sizes[i] - sizes[i - 1]) / (sizes[i + 1] - sizes[i - 1])
        errors.append(0.5 * math.log(((1.0 - share) * at[i - 1] + share * at[i + 1]) / at[i]))
    return tuple(errors)


def _scaled(parts: Parts, nbytes: float, sizes: Sequence[int], factors: Floats) -> float:
    """Return the curve's time for `nbytes` in s, with the time per byte of these parts."""
    ratio = nbytes / parts.nbytes
    other = Parts(nbytes, parts.per_message, ratio * parts.per_byte, ratio * parts.reduction)
    return float(columns_of([other], sizes)[0] @ factors) + other.reduction


def _noise(rows: Sequence[LinkRow]) -> float:
    """Return the relative scatter of repetitions: the median over rows of the normal sd with the same quartiles."""
    quartiles = [(r.row.p25_s, r.row.median_s, r.row.p75_s) for r in rows]
    spreads = [(q3 - q1) / (1.349 * q2) for q1, q2, q3 in quartiles if q1 is not None and q3 is not None]
    return max(NOISE, statistics.median(spreads)) if spreads else NOISE


def _squares(ratio: Floats, counts: Floats) -> float:
    return float(np.sum((counts * np.log(ratio)) ** 2))


def _uncertainty(columns: Floats, target: Floats, factors: Floats, counts: Floats) -> tuple[float, float, Floats]:
    """Return spread, degrees of freedom and covariance of the factors.

    Each row's error is divided by 1 - leverage, which yields its error when left out (Allen 1974, Technometrics 16(1),
    PRESS). Otherwise, pieces with hardly more rows than factors would seem perfect.
    """
    weighted = counts[:, None] * columns
    unit = np.linalg.pinv(weighted.T @ weighted, hermitian=True)
    leverage = np.einsum("ij,jk,ik->i", weighted, unit, weighted)
    left_out = counts * np.log(columns @ factors + 1.0 - target) / np.maximum(1.0 - leverage, 0.2)
    spread, dof = spread_of(float(np.sum(left_out**2)) * (1.0 - len(factors) / len(target)), len(target), len(factors))
    return spread, dof, np.asarray(spread**2 * unit)


def interval_at(value: float, variance: float, dof: float, outside: Beyond) -> Interval:
    """Return the 95 % interval around a value whose logarithm has this variance with `dof` degrees of freedom, widened
    by the extrapolation `outside`."""
    half = math.hypot(t_quantile(dof) * math.sqrt(variance), t_quantile(math.inf) * math.sqrt(outside.variance))
    low, high = outside.around(value, half, half)
    return Interval(low, value, high, notes=outside.notes)


def curve_time(curve: Curve, parts: Parts, outside: Beyond) -> Interval:
    """Return the predicted time of an operation with these parts in s, with the interval of one more measurement."""
    columns, factors = columns_of([parts], curve.sizes)[0], np.array([curve.per_message, *curve.per_byte])
    value = float(columns @ factors) + parts.reduction
    if curve.left_out:
        return interval_at(value, _between(curve, parts.nbytes), curve.dof, outside + Beyond(NOISE**2))
    variance = float(columns @ curve.covariance @ columns) / value**2 + curve.spread**2
    return interval_at(value, variance, curve.dof, outside)


def _between(curve: Curve, nbytes: float) -> float:
    """Return the variance of the logarithm at a size, for a curve that passes through all measured sizes."""
    ends = (curve.nbytes[0], *curve.sizes, curve.nbytes[1])
    i = min(max(bisect.bisect_right(ends, nbytes), 1), len(ends) - 1)
    gaps = [math.log(after / size) for size, after in itertools.pairwise(ends)]
    wide = gaps[i - 1]  # each left-out error spans two gaps
    near = [
        max(abs(curve.left_out[j]) * 2.0 * wide / (gaps[j] + gaps[j + 1]), LEAST)
        for j in range(max(i - 2, 0), min(i, len(curve.left_out)))
    ]
    here = math.exp(statistics.mean(map(math.log, near))) * curve.spread * wide / statistics.mean(gaps)
    share = math.log(nbytes / ends[i - 1]) / wide
    return here * (4.0 * share * (1.0 - share) if 0.0 < share < 1.0 else 1.0 if nbytes not in ends else 0.0)
