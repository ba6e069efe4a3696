"""How measured times scatter: in proportion to their length, and by a time of their own that only short ones show.

The standard deviation of ln(measured / true) is sqrt(relative^2 + (absolute / time)^2), the model of Rocke and
Lorenzato (1995, Technometrics 37(2)): wake-ups and interrupts take as long whatever the size. Single rows may be far
off, so the errors are taken to follow Student's t with 4 degrees of freedom (Lange, Little and Taylor 1989, Journal of
the American Statistical Association 84).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

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
