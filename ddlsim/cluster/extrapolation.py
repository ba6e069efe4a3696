"""How much less sure a prediction is beyond what was measured: other operations, sizes, numbers of ranks and batches.

A simulation deviates from what it is a model of, and a fit to some operation does not tell by how much another one does
(Kennedy and O'Hagan 2001, Journal of the Royal Statistical Society B 63(3)). Until that operation is measured, two
things are expected. It deviates by the geometric mean of :data:`DEVIATION`, which others have, and of the scatter of
what was measured on these links: two guesses of the same weight. And each of its messages may take up to as much longer
or shorter as the latency of the measured ones: they do not tell how much of that is software, and how often another
operation waits for it (:data:`PER_MESSAGE`). Beyond the measured range the variance grows with the doublings, as that
of a random walk does.
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
#: standard deviation of the time that a message takes besides, in measured latencies: uniform in [-1, 1]
PER_MESSAGE = 1.0 / math.sqrt(3.0)


@dataclass(frozen=True)
class Beyond:
    """How far a prediction is beyond the measurements: `variance` in the logarithm to add, what to tell of it, and the
    standard deviation of the time of each message, in measured latencies."""

    variance: float = 0.0
    notes: tuple[str, ...] = ()
    per_message: float = 0.0

    def __add__(self, other: Beyond) -> Beyond:
        per_message = math.hypot(self.per_message, other.per_message)
        return Beyond(self.variance + other.variance, (*self.notes, *other.notes), per_message)


#: of what was measured like this
INSIDE = Beyond()


def unmeasured(note: str, spread: float) -> Beyond:
    """Return how far an operation is beyond measurements of others, which scatter by `spread` around their fit."""
    return Beyond(DEVIATION * spread, (f"extrapolated: {note}",), PER_MESSAGE)


def beyond(value: float, measured: Sequence[float], what: str) -> Beyond:
    """Return how far a value is outside of the least and the most that were `measured`."""
    least, most = min(measured), max(measured)
    if least <= value <= most or value <= 0.0 or most <= 0.0:
        return Beyond()
    doublings = math.log2(value / most) if value > most else math.log2(max(least, 1e-300) / value)
    ends = f"{least:.6g}" if least == most else f"{least:.6g} to {most:.6g}"
    return Beyond(doublings * PER_DOUBLING**2, (f"extrapolated: {value:.6g} {what}, measured {ends}",))
