"""Events that come again and again to each of many parts, at random."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from ddlsim.streams import stream


def recurring(
    mean: float, shape: float, n_parts: int, lasting: float, seed: int, number: int, what: str
) -> Iterator[tuple[float, int]]:
    """Go through the events of all parts by time, without end: (s, part).

    mean     s from the end of an event of a part to its next one; of a Weibull distribution of this `shape`
    lasting  s that an event lasts
    number   of the draw, of `what` happens: others are independent of it
    """
    if math.isinf(mean):
        return
    scale = mean / math.gamma(1.0 + 1.0 / shape)
    first = scale * stream(seed, number, what).weibull(shape, n_parts)
    coming = [(time, part) for part, time in enumerate(first.tolist())]
    heapq.heapify(coming)
    later = stream(seed, number, f"later {what}")  # drawn in the order of time, which is always the same
    while True:
        time, part = coming[0]
        yield time, part
        heapq.heapreplace(coming, (time + lasting + scale * float(later.weibull(shape)), part))
