"""Faults that come at random and do not end a run, but slow it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from ddlsim.arguments import Count, Index, NotNegative, Positive, Seed, checked, one_of, quantity
from ddlsim.errors import ConfigError
from ddlsim.streams import stream
from ddlsim.units import si


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


#: kind -> what it can happen to
PARTS = {"slow": ("host", "device"), "stop": ("host", "device"), "link": ("host", "link", "switch")}


@checked
@dataclass(frozen=True)
class RandomFaults:
    """Faults at random, which do not end a run as :class:`ddlsim.Failures` do, but slow it for a while.

    mtbf      mean time between failures of one part, such as "200 h": from the end of a fault to its next one (mean
              *operating* time between failures, IEC 60050-192)
    duration  how long each lasts
    kind      "slow": the workers of the part take `factor` times as long to compute (a machine throttles, has a noisy
              neighbour), as a :class:`ddlsim.SlowDown`; "stop": they stand still (:class:`ddlsim.Stop`); "link": its
              links have `factor` of their bandwidth (:class:`ddlsim.LinkFault`)
    per       what it happens to: each "host" (machine; kind="link": all its links to others at once), each "device",
              each "link" between two neighbours that are not parts of one machine, each "switch" with all its links
    factor    of kind="slow", above 1: 2.0: it takes twice as long; of kind="link", below 1; None: 0, the link is down
    shape     of the Weibull distribution of the times between failures: 1 is exponential
    reroute   of links that are down: how long until the fabric goes round them, see :class:`ddlsim.LinkFault`

    They are drawn from the seed of the run, for its workers and for all links of its cluster. Raises ConfigError for
    values that make no sense.
    """

    mtbf: Annotated[float | str, quantity("time", "200 h", infinite=True)]
    duration: Annotated[float | str, quantity("time", "10 min")]
    _: KW_ONLY
    kind: Annotated[str, one_of(*PARTS)] = "slow"
    per: Annotated[str, one_of("host", "device", "link", "switch")] = "host"
    factor: NotNegative | None = None
    shape: Positive = 1.0
    reroute: Annotated[float | str, quantity("time", "1 s", zero=True, infinite=True)] | None = None

    def __post_init__(self) -> None:
        if self.per not in PARTS[self.kind]:
            parts = ", ".join(PARTS[self.kind])
            raise ConfigError(f"RandomFaults: per = {self.per!r} with kind={self.kind!r}: must be one of {parts}")
        wrong, hint = {
            "slow": (self.factor is None or self.factor <= 1.0, "above 1 (2.0: computing takes twice as long)"),
            "stop": (self.factor is not None, "left out with kind='stop': nothing is computed"),
            "link": (self.factor is not None and self.factor >= 1.0, "below 1, a share of the bandwidth (0: down)"),
        }[self.kind]
        if wrong:
            raise ConfigError(f"RandomFaults: factor = {self.factor!r} with kind={self.kind!r}: must be {hint}")
        if self.reroute is not None and (self.kind != "link" or self.factor):
            raise ConfigError(
                f"RandomFaults: reroute = {self.reroute!r} is for links that are down; leave it out, or use "
                "kind='link' without factor"
            )

    @property
    def rate(self) -> float:
        """Faults of one part in a second, on average."""
        return 1.0 / (si(self.mtbf, "time") + si(self.duration, "time"))

    @checked
    def events(self, n_parts: Count, seed: Seed = 0, number: Index = 0) -> Iterator[tuple[float, int]]:
        """Return (s, part) of the faults of so many parts by time, without end; other numbers have other ones."""
        mean, duration = si(self.mtbf, "time"), si(self.duration, "time")
        return recurring(mean, self.shape, n_parts, duration, seed, number, "faults")
