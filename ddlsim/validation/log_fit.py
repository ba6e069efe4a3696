"""Least squares in the logarithm: positive parameters, relative errors, weak priors, intervals for few points.

Measured times scatter in proportion to their length, and by an absolute time that only short ones show.
The standard deviation of ln(measured / true) is sqrt(relative^2 + (absolute / time)^2), the model of Rocke and
Lorenzato (1995, Technometrics 37(2)): wake-ups and interrupts take as long whatever the size. Single rows may be far
off, so the errors are taken to follow Student's t with 4 degrees of freedom (Lange, Little and Taylor 1989, Journal of
the American Statistical Association 84).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddlsim.errors import ConfigError
from ddlsim.extras import needs
from ddlsim.run.seeds import t_quantile

Floats = npt.NDArray[np.float64]

#: relative scatter that a timing is expected to have before any is seen, and how many observations that is worth
NOISE = 0.03
NOISE_WEIGHT = 2.0
#: no scatter is fitted to be less: clocks, buckets that fill in ticks, and what no model of a link has
LEAST = 2e-3
#: degrees of freedom of the errors' distribution
TAILS = 4.0


def scatter(seconds: Floats, relative: float, absolute: float) -> Floats:
    """Return the standard deviation of the logarithm of each time."""
    return np.asarray(np.sqrt(relative**2 + (absolute / seconds) ** 2))


def minus_log_likelihood(errors: Floats, seconds: Floats, relative: float, absolute: float) -> float:
    """Return -ln of the likelihood of these errors in the logarithm, up to a constant."""
    sd = scatter(seconds, relative, absolute)
    seen = np.log(sd) + 0.5 * (TAILS + 1.0) * np.log1p((errors / sd) ** 2 / TAILS)
    return float(seen.sum())


def fit_noise(errors: Floats, seconds: Floats) -> tuple[float, float]:
    """Return the most likely relative and absolute (s) scatter of errors in the logarithm of these times.

    The ratio of the two is the best of a grid, the relative one the fixed point of expectation and maximisation for it.
    Without at least four times that differ by a factor of ten there is no telling them apart: all is relative then.
    """
    ratios = np.zeros(1)
    if len(errors) >= 4 and float(seconds.max()) >= 10.0 * float(seconds.min()):
        ratios = np.concatenate([ratios, np.geomspace(0.1 * float(seconds.min()), float(seconds.max()), 40)])
    wider = np.sqrt(1.0 + (ratios[:, None] / seconds) ** 2)  # (n_ratios, n) a time's scatter in relative ones
    relative = np.full(len(ratios), max(math.sqrt(float(np.mean(errors**2))), LEAST))
    for _ in range(20):
        weights = (TAILS + 1.0) / (TAILS + (errors / (relative[:, None] * wider)) ** 2)
        relative = np.maximum(np.sqrt((weights * (errors / wider) ** 2).mean(axis=1)), LEAST)
    pairs = list(zip(relative.tolist(), (relative * ratios).tolist(), strict=True))
    return min(pairs, key=lambda pair: minus_log_likelihood(errors, seconds, *pair))


def weights_of(errors: Floats, seconds: Floats, relative: float, absolute: float) -> Floats:
    """Return what each error counts in a sum of squares: less if its time scatters more, or if it is far off."""
    sd = scatter(seconds, relative, absolute)
    return np.asarray(np.sqrt((TAILS + 1.0) / (TAILS + (errors / sd) ** 2)) / sd)


#: relative errors beyond this count linearly instead of squared, so that single outliers do not lead
ROBUST = 0.15
#: parameters are looked for within this of where the search starts, in the logarithm (a factor of 160,000)
REACH = 12.0
#: rows from which on short times may scatter more than long ones, and how often their scatter is fitted
LEAST_ROWS, ROUNDS = 8, 3


@dataclass(frozen=True)
class Prior:
    """What a parameter is expected to be: `value`, within a factor of exp(`sd`) two times out of three."""

    value: float
    sd: float


@dataclass(frozen=True)
class LogFit:
    """Fitted positive parameters; `logs` and `covariance` are of their natural logarithms.

    spread   standard deviation of ln(predicted / measured), with `dof` degrees of freedom
    absolute s by which times scatter besides, whatever their length (:mod:`ddlsim.validation.log_fit`)
    errors   (n_rows,) ln(predicted / measured)
    informed (n,) share of each parameter's knowledge that comes from the measurements, not from the prior
    priors   of each parameter
    bounds   least and most that each parameter was allowed to be
    """

    names: tuple[str, ...]
    logs: Floats
    covariance: Floats
    spread: float
    dof: float
    errors: Floats
    informed: Floats
    priors: tuple[Prior, ...]
    bounds: tuple[tuple[float, float], ...]
    absolute: float = 0.0

    @property
    def values(self) -> dict[str, float]:
        """The parameters by name."""
        return dict(zip(self.names, np.exp(self.logs).tolist(), strict=True))

    def interval(self, name: str) -> tuple[float, float]:
        """Return the 95 % confidence interval of a parameter."""
        i = self.names.index(name)
        half = t_quantile(self.dof) * math.sqrt(self.covariance[i, i]) * float(told(self.informed, self.dof)[i])
        most = min(math.exp(self.logs[i] + half), self.bounds[i][1])
        return math.exp(self.logs[i] - half), max(most, self.values[name])


def told(informed: Floats, dof: float) -> Floats:
    """Return what standard deviations count in intervals that are `dof` degrees of freedom wide, shape (n,).

    Student's t is for what measurements tell of a parameter (the share `informed`), which is as sure as their scatter
    is known; what a prior says of it is normal.
    """
    narrower = (t_quantile(math.inf) / t_quantile(dof)) ** 2
    return np.asarray(np.sqrt(informed + (1.0 - informed) * narrower))


def spread_of(squares: float, n_rows: int, n_parameters: float) -> tuple[float, float]:
    """Return the scatter of relative errors and its degrees of freedom.

    Its logarithm is the mean of what the squares say, known within 1/sqrt(2 dof), and of ln :data:`NOISE`, which is
    expected within a factor of exp(1/2), as :data:`NOISE_WEIGHT` degrees of freedom are: with as many parameters as
    rows nothing else would say how large errors are.
    """
    seen = max(n_rows - n_parameters, 0.0)
    own = max(math.sqrt(squares / seen), LEAST) if seen > 1e-6 else NOISE
    dof = seen + NOISE_WEIGHT
    return math.exp((seen * math.log(own) + NOISE_WEIGHT * math.log(NOISE)) / dof), dof


def fit_logs(
    predict: Callable[[Floats], Floats],
    measured: Floats,
    names: Sequence[str],
    start: Sequence[float],
    priors: Sequence[Prior],
    most: Mapping[str, float] | None = None,
) -> LogFit:
    """Return the parameters for which ``predict(values)`` (n_rows,) is nearest to `measured` (n_rows,).

    Minimises the squared ln(predicted / measured), with soft_l1 loss beyond :data:`ROBUST`, plus the priors, each
    worth as much as a measurement with a scatter of NOISE (so that any measurement that tells the parameter outweighs
    it). What rests on its prior takes no degree of freedom from the scatter: as many as the trace of the matrix that
    makes predictions of measurements (Hastie and Tibshirani 1990, Generalized Additive Models, section 3.5) are counted
    as fitted. With at least :data:`LEAST_ROWS` rows short times may scatter by more than long ones, and count less for
    it. No parameter exceeds what `most` says of it. The covariance is spread^2 (J'J)^-1. Raises ConfigError if no
    parameters make the prediction finite.
    """
    with needs("scipy"):
        from scipy.optimize import least_squares

    centre = np.log([prior.value for prior in priors])
    weight = NOISE / np.array([prior.sd for prior in priors])

    counts = np.ones(len(measured))  # what each row counts
    absolute = 0.0

    def residuals(logs: Floats) -> Floats:
        return np.concatenate([counts * np.log(predict(np.exp(logs)) / measured), weight * (logs - centre)])

    begin = np.log(np.asarray(start, dtype=np.float64))
    if not np.isfinite(residuals(begin)).all():
        raise ConfigError("calibration: the simulated time of a measurement is not finite; check the sizes")
    ceiling = np.log([(most or {}).get(name, np.inf) for name in names])
    least, ends = begin - REACH, np.minimum(begin + REACH, ceiling)
    point = np.minimum(begin, ends - 1e-6)
    for _ in range(ROUNDS if len(measured) >= LEAST_ROWS else 1):
        found = least_squares(
            residuals,
            point,
            loss="soft_l1",
            f_scale=ROBUST,
            bounds=(least, ends),
            diff_step=1e-4,
            xtol=1e-10,
            ftol=1e-10,
        )
        point, errors = np.minimum(found.x, ends - 1e-9), residuals(found.x)[: len(measured)]
        if len(measured) >= LEAST_ROWS:
            relative, absolute = fit_noise(errors / counts, measured)
            counts = relative / scatter(measured, relative, absolute)
    errors = residuals(found.x)[: len(measured)]
    known = found.jac[: len(measured)]
    n_told = float(np.trace(np.linalg.solve(known.T @ known + np.diag(weight**2), known.T @ known)))
    spread, dof = spread_of(2.0 * robust_cost(errors), len(measured), n_told)
    prior = (spread / np.array([prior.sd for prior in priors])) ** 2
    unit = np.linalg.inv(known.T @ known + np.diag(prior))
    informed = 1.0 - np.clip(np.diag(unit) * prior, 0.0, 1.0)
    covariance = np.asarray(spread**2 * unit)
    bounds = tuple(zip(np.exp(least).tolist(), np.exp(ends).tolist(), strict=True))
    parts = (np.asarray(found.x), covariance, spread, dof, errors / counts, informed)
    return LogFit(tuple(names), *parts, tuple(priors), bounds, absolute)


def robust_cost(errors: Floats) -> float:
    """Return half the sum of the errors' soft_l1 losses."""
    return float(np.sum(ROBUST**2 * (np.sqrt(1.0 + (errors / ROBUST) ** 2) - 1.0)))
