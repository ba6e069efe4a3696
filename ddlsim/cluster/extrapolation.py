"""How much less sure a prediction is than the measurements it rests on: other operations, sizes, ranks and batches.

A simulation deviates from what it is a model of, and a fit to one operation does not tell by how much another one does
(Kennedy and O'Hagan 2001, Journal of the Royal Statistical Society B 63(3)). How far off predictions of each kind have
been is data: `deviations/learned.toml`, which ``python -m accuracy.deviations`` writes from the measurements of the
accuracy page. It holds one-sided 97.5 % quantiles, because what is not modelled mostly makes a run slower. Besides,
each message may take up to as much longer or shorter as the latency of the measured ones: they do not tell how much of
that is software, and how often another operation waits for it (:data:`PER_MESSAGE`). Beyond the measured range the
variance grows with the doublings, as that of a random walk does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from ddlsim.bundled import bundled_files
from ddlsim.plain import read_toml

#: standard deviation, in the logarithm, of each doubling beyond what was measured
PER_DOUBLING = 0.0125
#: standard deviation of the time that a message takes besides, in measured latencies: uniform in [-1, 1]
PER_MESSAGE = 1.0 / math.sqrt(3.0)

#: bytes; messages and buffers below this are a kind of their own
SHORT = 64 * 1024


@dataclass(frozen=True)
class Beyond:
    """How far a prediction is beyond the measurements: `variance` in the logarithm to add, what to tell of it, the
    standard deviation of the time of each message, in measured latencies, and how much `faster` and `slower` than the
    prediction measurements of its kind have been (logarithm, one-sided quantiles of 97.5 %)."""

    variance: float = 0.0
    notes: tuple[str, ...] = ()
    per_message: float = 0.0
    faster: float = 0.0
    slower: float = 0.0

    def __add__(self, other: Beyond) -> Beyond:
        per_message = math.hypot(self.per_message, other.per_message)
        faster, slower = max(self.faster, other.faster), max(self.slower, other.slower)
        return Beyond(self.variance + other.variance, (*self.notes, *other.notes), per_message, faster, slower)

    def around(self, value: float, faster: float = 0.0, slower: float = 0.0) -> tuple[float, float]:
        """Return the ends of the interval of a time `value`, which without this reaches so far (logarithms)."""
        return value * math.exp(-math.hypot(faster, self.faster)), value * math.exp(math.hypot(slower, self.slower))


#: of what was measured like this
INSIDE = Beyond()


def operation_kind(operation: str, algorithm: str, transport: str, nbytes: float) -> str:
    """Return the kind of a message (without `algorithm`) or a collective: latency decides how long short ones take."""
    names = (f"collective/{algorithm.partition('(')[0]}" if algorithm else f"message/{operation}", transport)
    return ("short " if nbytes < SHORT else "") + "/".join(filter(None, names))


@functools.cache
def learned() -> dict[str, tuple[float, float]]:
    """Return how much faster and slower measurements were, by kind of prediction; "" is all of them together."""
    path = bundled_files("deviations")["learned"]
    kinds = cast("dict[str, dict[str, float]]", read_toml(path)["kinds"])
    return {kind: (row["faster"], row["slower"]) for kind, row in kinds.items()}


def deviation(kind: str) -> Beyond:
    """Return by how much predictions of a `kind` deviate, such as "collective/ring/tcp-cubic".

    Without measurements of that kind it is that of the kind above it ("collective/ring"). Where no more is known than
    the operation ("collective"), it is that of the least accurate kind of it, and a note says so.
    """
    parts, table = kind.split("/"), learned()
    known = next(name for n in range(len(parts), -1, -1) if (name := "/".join(parts[:n])) in table)
    if "/" in known:
        return Beyond(0.0, (), 0.0, *table[known])
    alike = [sides for name, sides in table.items() if name.startswith(known) and name.count("/") == bool(known)]
    note = f"no measured family resembles {kind}: the interval is that of the least accurate kind"
    return Beyond(0.0, (note,), 0.0, max(faster for faster, _ in alike), max(slower for _, slower in alike))


def unmeasured(note: str, kind: str) -> Beyond:
    """Return how far an operation of a `kind` is beyond measurements of others."""
    return Beyond(0.0, (f"extrapolated: {note}",), PER_MESSAGE) + deviation(kind)


def beyond(value: float, measured: Sequence[float], what: str) -> Beyond:
    """Return how far a value is outside of the least and the most that were `measured`."""
    least, most = min(measured), max(measured)
    if least <= value <= most or value <= 0.0 or most <= 0.0:
        return Beyond()
    doublings = math.log2(value / most) if value > most else math.log2(max(least, 1e-300) / value)
    ends = f"{least:.6g}" if least == most else f"{least:.6g} to {most:.6g}"
    return Beyond(doublings * PER_DOUBLING**2, (f"extrapolated: {value:.6g} {what}, measured {ends}",))
