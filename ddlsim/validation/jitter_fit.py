"""Maximum-likelihood fit of the distribution of step times, and its goodness of fit (Kolmogorov-Smirnov)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ddlsim.arguments import Positive, Seed, checked
from ddlsim.errors import ConfigError
from ddlsim.extras import needs
from ddlsim.streams import stream
from ddlsim.validation.log_fit import Floats
from ddlsim.workload.jitter import Gamma, Lognormal, ShiftedExponential

LEAST = 20  # samples; fewer cannot distinguish distributions
BOOTSTRAP = 199
#: relative variation below which times count as equal
CONSTANT = 1e-4


Fitted = Lognormal | Gamma | ShiftedExponential


@dataclass(frozen=True)
class JitterFit:
    """A jitter distribution fitted to step times.

    jitter     the fitted distribution of a factor applied to the compute time
    base_s     compute time in s without jitter
    ks         Kolmogorov-Smirnov distance between the fitted distribution and the samples
    p_value    p-value of the fit from a parametric bootstrap: samples are drawn from the fitted distribution, and the
               distribution is fitted to them again. The p-value is the fraction of repetitions in which the new
               distance is at least `ks`. A small value means that even the best candidate (lognormal, gamma or shifted
               exponential) fits poorly
    n_samples  number of measured steps
    """

    jitter: Fitted
    base_s: float
    ks: float
    p_value: float
    n_samples: int

    @property
    def shape(self) -> float:
        """Coefficient of variation of the factor; for a shifted exponential distribution, its mean excess."""
        return self.jitter.mean_extra if isinstance(self.jitter, ShiftedExponential) else self.jitter.cv

    @property
    def median_factor(self) -> float:
        """Median of the factor, which is part of a measured median step time."""
        if isinstance(self.jitter, Lognormal):
            return 1.0 / math.sqrt(1.0 + self.jitter.cv**2)
        if isinstance(self.jitter, Gamma):
            with needs("scipy"):
                from scipy.special import gammaincinv

            return float(gammaincinv(self.jitter.cv**-2, 0.5)) * self.jitter.cv**2
        return 1.0 + self.jitter.mean_extra * math.log(2.0)

    def __str__(self) -> str:
        doubt = "; it does not fit well" if self.p_value < 0.05 else ""
        kind = type(self.jitter).__name__
        shape = f"extra {self.shape:.3g}" if isinstance(self.jitter, ShiftedExponential) else f"cv {self.shape:.3g}"
        return f"{kind}, {shape}, of {self.n_samples} steps: KS distance {self.ks:.3f}, p = {self.p_value:.2f}{doubt}"


def _lognormal(x: Floats) -> tuple[Lognormal, float]:
    logs = np.log(x)
    variance = float(logs.var())
    return Lognormal(math.sqrt(math.expm1(variance))), math.exp(float(logs.mean()) + 0.5 * variance)


def _gamma(x: Floats) -> tuple[Gamma, float]:
    """Fit by maximum likelihood: ln k - digamma(k) = ln(mean) - mean(ln) (Choi and Wette 1969, Technometrics 11(4))."""
    with needs("scipy"):
        from scipy.optimize import brentq
        from scipy.special import digamma

    gap = math.log(x.mean()) - float(np.log(x).mean())
    shape = float(brentq(lambda log_k: log_k - digamma(math.exp(log_k)) - gap, -7.0, 25.0))
    return Gamma(math.exp(-0.5 * shape)), float(x.mean())


def _shifted(x: Floats) -> tuple[ShiftedExponential, float]:
    least = float(x.min())
    return ShiftedExponential(float(x.mean()) / least - 1.0), least


#: name in files -> class, and its maximum-likelihood fit
FITTED: dict[str, tuple[Callable[[float], Fitted], Callable[[Floats], tuple[Fitted, float]]]] = {
    "lognormal": (Lognormal, _lognormal),
    "gamma": (Gamma, _gamma),
    "shifted-exponential": (ShiftedExponential, _shifted),
}


def _log_likelihood(jitter: Fitted, base: float, x: Floats) -> float:
    factor = x / base
    if isinstance(jitter, Lognormal):
        variance = math.log1p(jitter.cv**2)
        z2 = (np.log(factor) + 0.5 * variance) ** 2 / variance
        return float(np.sum(-0.5 * z2 - np.log(x)) - 0.5 * len(x) * math.log(2.0 * math.pi * variance))
    if isinstance(jitter, Gamma):
        with needs("scipy"):
            from scipy.special import gammaln

        k = jitter.cv**-2
        return float(np.sum((k - 1.0) * np.log(k * factor) - k * factor - gammaln(k)) + len(x) * math.log(k / base))
    extra = jitter.mean_extra
    return float(np.sum(-(factor - 1.0) / extra) - len(x) * math.log(extra * base))


def _cdf(jitter: Fitted, base: float, x: Floats) -> Floats:
    with needs("scipy"):
        from scipy.special import gammainc, ndtr

    factor = x / base
    if isinstance(jitter, Lognormal):
        variance = math.log1p(jitter.cv**2)
        return np.asarray(ndtr((np.log(factor) + 0.5 * variance) / math.sqrt(variance)))
    if isinstance(jitter, Gamma):
        return np.asarray(gammainc(jitter.cv**-2, factor * jitter.cv**-2))
    return -np.expm1(-np.maximum(factor - 1.0, 0.0) / jitter.mean_extra)


def _distance(jitter: Fitted, base: float, x: Floats) -> float:
    cdf = _cdf(jitter, base, np.sort(x))
    n = len(x)
    return float(max((np.arange(1, n + 1) / n - cdf).max(), (cdf - np.arange(n) / n).max()))


@checked
def fit_jitter(step_times: Sequence[Positive], *, seed: Seed = 0) -> JitterFit | None:
    """Fit a lognormal, gamma or shifted exponential distribution to step times (in s) by maximum likelihood.

    Returns the distribution with the highest likelihood, or None if all step times are equal. `seed` is the seed of the
    bootstrap that computes the p-value. Raises ConfigError if there are fewer than 20 step times or if they are not all
    positive.
    """
    x = np.asarray(step_times, dtype=np.float64)
    if len(x) < LEAST:
        raise ConfigError(
            f"step_times has {len(x)} values, but fitting jitter requires at least {LEAST}; measure more steps"
        )
    if x.std() < CONSTANT * x.mean():
        return None
    fits = {name: fit(x) for name, (_, fit) in FITTED.items()}
    best = max(fits, key=lambda name: _log_likelihood(*fits[name], x))
    jitter, base = fits[best]
    distance = _distance(jitter, base, x)
    random = stream(seed, 0, "goodness of fit")
    farther = 0
    for _ in range(BOOTSTRAP):
        drawn = base * jitter.sample(random, len(x))
        farther += _distance(*FITTED[best][1](drawn), drawn) >= distance
    return JitterFit(jitter, base, distance, (1 + farther) / (1 + BOOTSTRAP), len(x))
