"""Maximum-likelihood fit of the distribution of step times, and its goodness of fit (Kolmogorov-Smirnov)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
        return float(_distribution(self.jitter, 1.0).median())

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
    with needs("scipy"):
        from scipy.stats import gamma

    shape, _, scale = gamma.fit(x, floc=0.0)
    return Gamma(float(shape) ** -0.5), float(shape * scale)


def _shifted(x: Floats) -> tuple[ShiftedExponential, float]:
    least = float(x.min())
    return ShiftedExponential(float(x.mean()) / least - 1.0), least


#: name in files -> class, and its maximum-likelihood fit
FITTED: dict[str, tuple[Callable[[float], Fitted], Callable[[Floats], tuple[Fitted, float]]]] = {
    "lognormal": (Lognormal, _lognormal),
    "gamma": (Gamma, _gamma),
    "shifted-exponential": (ShiftedExponential, _shifted),
}


def _distribution(jitter: Fitted, base: float) -> Any:
    """Return the distribution of step times as a frozen distribution of scipy.stats."""
    with needs("scipy"):
        from scipy import stats

    if isinstance(jitter, Lognormal):
        variance = math.log1p(jitter.cv**2)
        return stats.lognorm(math.sqrt(variance), scale=base * math.exp(-0.5 * variance))
    if isinstance(jitter, Gamma):
        return stats.gamma(jitter.cv**-2, scale=base * jitter.cv**2)
    return stats.expon(base, base * jitter.mean_extra)


def _distance(jitter: Fitted, base: float, x: Floats) -> float:
    from scipy.stats import kstest

    return float(kstest(x, _distribution(jitter, base).cdf).statistic)


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
    best = max(fits, key=lambda name: float(_distribution(*fits[name]).logpdf(x).sum()))
    jitter, base = fits[best]
    distance = _distance(jitter, base, x)
    random = stream(seed, 0, "goodness of fit")
    farther = 0
    for _ in range(BOOTSTRAP):
        drawn = base * jitter.sample(random, len(x))
        farther += _distance(*FITTED[best][1](drawn), drawn) >= distance
    return JitterFit(jitter, base, distance, (1 + farther) / (1 + BOOTSTRAP), len(x))
