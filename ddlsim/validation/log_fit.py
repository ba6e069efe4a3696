"""Least squares in the logarithm: positive parameters, relative errors, weak priors, intervals for few points."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares
from scipy.stats import t as student

from ddlsim.errors import ConfigError

Floats = npt.NDArray[np.float64]

#: relative scatter that a timing is expected to have before any is seen, and how many observations that is worth
NOISE = 0.03
NOISE_WEIGHT = 2.0
#: relative errors beyond this count linearly instead of squared, so that single outliers do not lead
ROBUST = 0.15
LEVEL = 0.95
#: parameters are looked for within this of where the search starts, in the logarithm (a factor of 160,000)
REACH = 12.0


@dataclass(frozen=True)
class Prior:
    """What a parameter is expected to be: `value`, within a factor of exp(`sd`) two times out of three."""

    value: float
    sd: float


@dataclass(frozen=True)
class LogFit:
    """Fitted positive parameters; `logs` and `covariance` are of their natural logarithms.

    spread   standard deviation of ln(predicted / measured), with `dof` degrees of freedom
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

    @property
    def values(self) -> dict[str, float]:
        """The parameters by name."""
        return dict(zip(self.names, np.exp(self.logs).tolist(), strict=True))

    def interval(self, name: str) -> tuple[float, float]:
        """Return the 95 % confidence interval of a parameter."""
        i = self.names.index(name)
        half = t_quantile(self.dof) * math.sqrt(self.covariance[i, i])
        return math.exp(self.logs[i] - half), math.exp(self.logs[i] + half)


def t_quantile(dof: float, level: float = LEVEL) -> float:
    """Return how many standard deviations an interval of probability `level` reaches to each side (Student's t)."""
    return float(student.ppf(0.5 + level / 2, dof))


def spread_of(squares: float, n_rows: int, n_parameters: int) -> tuple[float, float]:
    """Return the scatter of relative errors and its degrees of freedom.

    The sum of squares is joined by :data:`NOISE_WEIGHT` imagined errors of :data:`NOISE`: with as many parameters as
    rows nothing else would say how large errors are.
    """
    dof = max(n_rows - n_parameters, 0) + NOISE_WEIGHT
    return math.sqrt((squares + NOISE_WEIGHT * NOISE**2) / dof), dof


def fit_logs(
    predict: Callable[[Floats], Floats],
    measured: Floats,
    names: Sequence[str],
    start: Sequence[float],
    priors: Sequence[Prior],
) -> LogFit:
    """Return the parameters for which ``predict(values)`` (n_rows,) is nearest to `measured` (n_rows,).

    Minimises the squared ln(predicted / measured), with soft_l1 loss beyond :data:`ROBUST`, plus the priors, each
    worth as much as a measurement with a scatter of NOISE (so that any measurement that tells the parameter outweighs
    it). The covariance is spread^2 (J'J)^-1. Raises ConfigError if no parameters make the prediction finite.
    """
    centre = np.log([prior.value for prior in priors])
    weight = NOISE / np.array([prior.sd for prior in priors])

    def residuals(logs: Floats) -> Floats:
        return np.concatenate([np.log(predict(np.exp(logs)) / measured), weight * (logs - centre)])

    begin = np.log(np.asarray(start, dtype=np.float64))
    if not np.isfinite(residuals(begin)).all():
        raise ConfigError("calibration: the simulation gives no finite time for some measurement; check the sizes")
    found = least_squares(
        residuals, begin, loss="soft_l1", f_scale=ROBUST, bounds=(begin - REACH, begin + REACH), diff_step=1e-4,
        xtol=1e-10, ftol=1e-10,
    )  # fmt: skip
    errors = residuals(found.x)[: len(measured)]
    spread, dof = spread_of(2.0 * robust_cost(errors), len(measured), len(start))
    known = found.jac[: len(measured)]
    prior = (spread / np.array([prior.sd for prior in priors])) ** 2
    unit = np.linalg.inv(known.T @ known + np.diag(prior))
    informed = 1.0 - np.clip(np.diag(unit) * prior, 0.0, 1.0)
    covariance = np.asarray(spread**2 * unit)
    bounds = tuple(zip(np.exp(begin - REACH).tolist(), np.exp(begin + REACH).tolist(), strict=True))
    return LogFit(
        tuple(names), np.asarray(found.x), covariance, spread, dof, errors, informed, tuple(priors), bounds
    )


def robust_cost(errors: Floats) -> float:
    """Return half the sum of the errors' soft_l1 losses."""
    return float(np.sum(ROBUST**2 * (np.sqrt(1.0 + (errors / ROBUST) ** 2) - 1.0)))
