"""Expected order statistics: the time of the slowest, or of the k-th fastest, of n workers.

A synchronous step takes the maximum of n times; waiting for the fastest k of n takes the k-th smallest. Each function
returns the expectation of the k-th smallest of n independent samples (k = n, the default, is the maximum). Exact unless
noted otherwise; Arnold, Balakrishnan, Nagaraja 2008, A first course in order statistics, chapters 3 to 5.
"""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Count, NotNegative, Positive, checked, integer
from ddlsim.errors import ConfigError

Floats = npt.NDArray[np.float64]


#: number of samples; some of the sums below have as many terms
Samples = Annotated[int, integer(1, 10**7)]


def _rank(n: int, k: int | None) -> int:
    chosen = n if k is None else k
    if not 1 <= chosen <= n:
        raise ConfigError(f"k = {chosen}: must be between 1 and n = {n}")
    return chosen


@checked
def exponential(n: Samples, k: Count | None = None, mean: NotNegative = 1.0) -> float:
    """Return mean * (H_n - H_(n-k)), with H the harmonic numbers (Renyi's representation)."""
    return mean * math.fsum(1.0 / i for i in range(n - _rank(n, k) + 1, n + 1))


@checked
def shifted_exponential(
    n: Samples, k: Count | None = None, shift: NotNegative = 1.0, mean_extra: NotNegative = 1.0
) -> float:
    """Return the same for shift + Exp(mean_extra)."""
    return shift + exponential(n, k, mean_extra)


@checked
def uniform(n: Samples, k: Count | None = None, low: float = 0.0, high: float = 1.0) -> float:
    """Return low + (high - low) * k / (n + 1)."""
    return low + (high - low) * _rank(n, k) / (n + 1)


@checked
def pareto(n: Samples, k: Count | None = None, a: Positive = 2.0, minimum: NotNegative = 1.0) -> float:
    """Return minimum * G(n+1) G(n-k+1-1/a) / (G(n-k+1) G(n+1-1/a)), G the gamma function.

    `a` is the tail exponent; it must exceed 1 / (n - k + 1), or the expectation is infinite.
    """
    above = n - _rank(n, k) + 1
    if above <= 1.0 / a:
        least = 1.0 / above
        raise ConfigError(f"a = {a}: must be greater than {least:.3g} for a finite expectation")
    log = math.lgamma(n + 1) + math.lgamma(above - 1.0 / a) - math.lgamma(above) - math.lgamma(n + 1 - 1.0 / a)
    return minimum * math.exp(log)


@checked
def normal(n: Samples, k: Count | None = None, mean: float = 0.0, sd: NotNegative = 1.0) -> float:
    """Return the k-th of n Gaussian samples, by quadrature (error below 1e-9 sd for n up to 1e6)."""
    z, log_density, log_cdf, log_survival = _gaussian()
    return mean + sd * _expectation(n, _rank(n, k), z, z, log_density, log_cdf, log_survival)


@checked
def lognormal(n: Samples, k: Count | None = None, cv: NotNegative = 0.1, mean: NotNegative = 1.0) -> float:
    """Return the k-th of n lognormal samples of this mean and coefficient of variation (quadrature)."""
    variance = math.log1p(cv * cv)
    z, log_density, log_cdf, log_survival = _gaussian()
    value = np.exp(math.sqrt(variance) * z - 0.5 * variance)
    return mean * _expectation(n, _rank(n, k), z, value, log_density, log_cdf, log_survival)


def _gaussian() -> tuple[Floats, Floats, Floats, Floats]:
    """Return z, log density, log cdf and log survival of a standard normal on a fine grid."""
    z = np.linspace(-12.0, 12.0, 9601)
    cdf = np.array([0.5 * math.erfc(-x / math.sqrt(2.0)) for x in z])
    return z, -0.5 * z * z - 0.5 * math.log(2.0 * math.pi), np.log(cdf), np.log(cdf[::-1])


def _expectation(
    n: int, k: int, grid: Floats, value: Floats, log_density: Floats, log_cdf: Floats, log_survival: Floats
) -> float:
    """Return the integral of value * n!/((k-1)!(n-k)!) F^(k-1) (1-F)^(n-k) f over the even grid."""
    log_weight = math.lgamma(n + 1) - math.lgamma(k) - math.lgamma(n - k + 1) + log_density
    if k > 1:
        log_weight = log_weight + (k - 1) * log_cdf
    if k < n:
        log_weight = log_weight + (n - k) * log_survival
    return float((value * np.exp(log_weight)).sum() * (grid[1] - grid[0]))  # weights at the ends vanish
