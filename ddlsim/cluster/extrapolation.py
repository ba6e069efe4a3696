"""How much less sure a prediction is beyond what was measured: other operations, sizes, numbers of ranks and batches.

A simulation deviates from what it is a model of, and a fit to some operation does not tell by how much another one does
(Kennedy and O'Hagan 2001, Journal of the Royal Statistical Society B 63(3)). Until that operation is measured,
:data:`DEVIATION` is expected; and beyond the measured range the variance grows with the doublings, as that of a random
walk does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Standard deviation, in the logarithm, of what an operation deviates that nothing was fitted to: the all-reduces of
#: NCCL on four machines behind a shaped network deviate by 2.0 % in the mean from what point-to-point rows give
#: (docs/accuracy.md), and sqrt(pi / 2) times the mean of a normal's absolute values is its standard deviation
DEVIATION = 0.025
#: the same for each doubling beyond what was measured (half of it)
PER_DOUBLING = 0.0125


@dataclass(frozen=True)
class Beyond:
    """How far a prediction is beyond the measurements: `variance` in the logarithm to add, and what to tell of it."""

    variance: float = 0.0
    notes: tuple[str, ...] = ()

    def __add__(self, other: Beyond) -> Beyond:
        return Beyond(self.variance + other.variance, (*self.notes, *other.notes))


def beyond(value: float, measured: Sequence[float], what: str) -> Beyond:
    """Return how far a value is outside of the least and the most that were `measured`."""
    least, most = min(measured), max(measured)
    if least <= value <= most or value <= 0.0 or most <= 0.0:
        return Beyond()
    doublings = math.log2(value / most) if value > most else math.log2(max(least, 1e-300) / value)
    ends = f"{least:.6g}" if least == most else f"{least:.6g} to {most:.6g}"
    return Beyond(doublings * PER_DOUBLING**2, (f"extrapolated: {value:.6g} {what}, measured {ends}",))
