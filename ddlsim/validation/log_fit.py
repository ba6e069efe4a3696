"""Least squares in the logarithm: positive parameters, relative errors, weak priors, intervals for few points.

Measured times have a scatter in proportion to their length, and an absolute scatter that is visible only in short ones.
The standard deviation of ln(measured / true) is sqrt(relative^2 + (absolute / time)^2), the model of Rocke and
Lorenzato (1995, Technometrics 37(2)): wake-ups and interrupts take the same time for all sizes. Because single rows may
be outliers, errors are assumed to follow Student's t with 4 degrees of freedom (Lange, Little and Taylor 1989, Journal
of the American Statistical Association 84).
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

#: prior relative scatter of a timing, and its weight as a number of observations
NOISE = 0.03
NOISE_WEIGHT = 2.0
#: lower limit of the fitted scatter: clocks, buckets that fill in ticks, and effects that no link model includes
LEAST = 2e-3
#: degrees of freedom of the error distribution
TAILS = 4.0


def scatter(seconds: Floats, relative: float, absolute: float) -> Floats:
    """Return the standard deviation of the logarithm of each time."""
    return np.asarray(np.sqrt(relative**2 + (absolute / seconds) ** 2))


def minus_log_likelihood(errors: Floats, seconds: Floats, relative: float, absolute: float) -> float:
    """Return -ln of the likelihood of these logarithmic errors, up to a constant."""
    sd = scatter(seconds, relative, absolute)
    seen = np.log(sd) + 0.5 * (TAILS + 1.0) * np.log1p((errors / sd) ** 2 / TAILS)
    return float(seen.sum())


def fit_noise(errors: Floats, seconds: Floats) -> tuple[float, float]:
    """Return the most likely relative and absolute (s) scatter of these logarithmic errors of times.

    The ratio of the two is the best on a grid; the relative scatter is the fixed point of expectation maximisation for
    it. With fewer than four times, or times that differ by less than a factor of ten, all scatter is relative.
    """
    ratios = np.zeros(1)
    if len(errors) >= 4 and float(seconds.max()) >= 10.0 * float(seconds.min()):
        ratios = np.concatenate([ratios, np.geomspace(0.1 * float(seconds.min()), float(seconds.max()), 40)])
    wider = np.sqrt(1.0 + (ratios[:, None] / seconds) ** 2)  # (n_ratios, n) total relative to relative scatter
    relative = np.full(len(ratios), max(math.sqrt(float(np.mean(errors**2))), LEAST))
    for _ in range(20):
        weights = (TAILS + 1.0) / (TAILS + (errors / (relative[:, None] * wider)) ** 2)
        relative = np.maximum(np.sqrt((weights * (errors / wider) ** 2).mean(axis=1)), LEAST)
    pairs = list(zip(relative.tolist(), (relative * ratios).tolist(), strict=True))
    return min(pairs, key=lambda pair: minus_log_likelihood(errors, seconds, *pair))


def weights_of(errors: Floats, seconds: Floats, relative: float, absolute: float) -> Floats:
    """Return the weight of each error in a sum of squares: lower for times with more scatter, and for outliers."""
    sd = scatter(seconds, relative, absolute)
    return np.asarray(np.sqrt((TAILS + 1.0) / (TAILS + (errors / sd) ** 2)) / sd)


#: relative errors above this count linearly instead of squared, which limits the effect of outliers
ROBUST = 0.15
#: search range of parameters around the start, in the logarithm (a factor of 160,000)
REACH = 12.0
#: minimum number of rows for fitting the absolute scatter, and number of iterations
LEAST_ROWS, ROUNDS = 8, 3


@dataclass(frozen=True)
class Prior:
    """Prior of a parameter: `value`, within a factor of exp(`sd`) with probability 2/3."""

    value: float
    sd: float


@dataclass(frozen=True)
class LogFit:
    """Fitted positive parameters; `logs` and `covariance` are of their natural logarithms.

    spread   standard deviation of ln(predicted / measured), with `dof` degrees of freedom
    absolute additional scatter of all times in s (:mod:`ddlsim.validation.log_fit`)
    errors   (n_rows,) ln(predicted / measured)
    informed (n,) share of each parameter's information that comes from measurements, not from the prior
    priors   one per parameter
    bounds   lower and upper limit of each parameter in the fit
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
        half = t_quantile(self.dof) * math.sqrt(self.covariance[i, i]) * float(t_factors(self.informed, self.dof)[i])
        most = min(math.exp(self.logs[i] + half), self.bounds[i][1])
        return math.exp(self.logs[i] - half), max(most, self.values[name])


def t_factors(informed: Floats, dof: float) -> Floats:
    """Return factors of standard deviations in intervals scaled by Student's t with `dof` degrees of freedom, (n,).

    Student's t applies to the share `informed`, which comes from measurements with an estimated scatter; the share from
    the prior is normal.
    """
    narrower = (t_quantile(math.inf) / t_quantile(dof)) ** 2
    return np.asarray(np.sqrt(informed + (1.0 - informed) * narrower))


def wider(dof: float) -> float:
    """Return the ratio of the widths of a t interval and a normal interval."""
    return t_quantile(dof) / t_quantile(math.inf)


def sampled(random: np.random.Generator, covariance: Floats) -> Floats:
    """Return a sample of normal deviations; the covariance may be singular."""
    values, vectors = np.linalg.eigh(covariance)
    return np.asarray((vectors * np.sqrt(np.maximum(values, 0.0))) @ random.standard_normal(len(values)))


def spread_of(squares: float, n_rows: int, n_parameters: float) -> tuple[float, float]:
    """Return the scatter of relative errors and its degrees of freedom.

    Its logarithm is the weighted mean of the estimate from the squares, known within 1/sqrt(2 dof), and of ln
    :data:`NOISE`, a prior with a standard deviation of 1/2, which is worth :data:`NOISE_WEIGHT` degrees of freedom.
    With as many parameters as rows, only the prior determines the scatter.

    Errors larger than NOISE contradict the prior, so that its weight decreases with the square of their ratio, and the
    variance is the weighted mean. For a poor fit, this is the usual estimate with the degrees of freedom of the errors.
    """
    seen = max(n_rows - n_parameters, 0.0)
    large = math.sqrt(squares / max(seen, 1.0))
    if large > NOISE:
        weight = NOISE_WEIGHT * (NOISE / large) ** 2
        dof = max(seen, 1.0) + weight
        return math.sqrt((squares + weight * NOISE**2) / dof), dof
    estimate = max(math.sqrt(squares / seen), LEAST) if seen > 1e-6 else NOISE
    dof = seen + NOISE_WEIGHT
    return math.exp((seen * math.log(estimate) + NOISE_WEIGHT * math.log(NOISE)) / dof), dof


def fit_logs(
    predict: Callable[[Floats], Floats],
    measured: Floats,
    names: Sequence[str],
    start: Sequence[float],
    priors: Sequence[Prior],
    most: Mapping[str, float] | None = None,
) -> LogFit:
    """Return the parameters for which ``predict(values)`` (n_rows,) is closest to `measured` (n_rows,).

    Minimises the squared ln(predicted / measured), with soft_l1 loss beyond :data:`ROBUST`, plus the priors. Each prior
    has the weight of a measurement with a scatter of NOISE, so that any informative measurement outweighs it.
    Parameters that depend on their prior do not reduce the degrees of freedom: the number of fitted parameters is the
    trace of the matrix that maps measurements to predictions (Hastie and Tibshirani 1990, Generalized Additive Models,
    section 3.5). With at least :data:`LEAST_ROWS` rows, an absolute scatter is fitted, and short times have less
    weight. `most` contains upper limits of parameters. The covariance is spread^2 (J'J)^-1. Raises ConfigError if no
    parameters make the prediction finite.
    """
    with needs("scipy"):
        from scipy.optimize import least_squares

    centre = np.log([prior.value for prior in priors])
    weight = NOISE / np.array([prior.sd for prior in priors])

    counts = np.ones(len(measured))  # weight of each row
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
        solution = least_squares(
            residuals,
            point,
            loss="soft_l1",
            f_scale=ROBUST,
            bounds=(least, ends),
            diff_step=1e-4,
            xtol=1e-10,
            ftol=1e-10,
        )
        point, errors = np.minimum(solution.x, ends - 1e-9), residuals(solution.x)[: len(measured)]
        if len(measured) >= LEAST_ROWS:
            relative, absolute = fit_noise(errors / counts, measured)
            counts = relative / scatter(measured, relative, absolute)
    errors = residuals(solution.x)[: len(measured)]
    jacobian = solution.jac[: len(measured)]
    n_determined = float(np.trace(np.linalg.solve(jacobian.T @ jacobian + np.diag(weight**2), jacobian.T @ jacobian)))
    spread, dof = spread_of(2.0 * robust_cost(errors), len(measured), n_determined)
    prior = (spread / np.array([prior.sd for prior in priors])) ** 2
    unit = np.linalg.inv(jacobian.T @ jacobian + np.diag(prior))
    informed = 1.0 - np.clip(np.diag(unit) * prior, 0.0, 1.0)
    covariance = np.asarray(spread**2 * unit)
    bounds = tuple(zip(np.exp(least).tolist(), np.exp(ends).tolist(), strict=True))
    parts = (np.asarray(solution.x), covariance, spread, dof, errors / counts, informed)
    return LogFit(tuple(names), *parts, tuple(priors), bounds, absolute)


def robust_cost(errors: Floats) -> float:
    """Return half the sum of the errors' soft_l1 losses."""
    return float(np.sum(ROBUST**2 * (np.sqrt(1.0 + (errors / ROBUST) ** 2) - 1.0)))
