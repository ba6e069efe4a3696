"""Background traffic on the cluster's links."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Annotated

from ddlsim.arguments import checked, quantity
from ddlsim.errors import ConfigError, shown
from ddlsim.reliability.failures import read_rows
from ddlsim.reliability.faults import Start
from ddlsim.units import si

Time = Annotated[float | str, quantity("time", "60 s", zero=True, infinite=True)]
Part = Annotated[float | str, quantity("time", "5 s")]


@checked
@dataclass(frozen=True)
class Background:
    """Background traffic: a flow of bytes between two nodes, such as a backup or the traffic of other users.

    Background traffic shares links with the run's messages according to max-min fairness. The messages can use the
    bandwidth that the background traffic leaves free. Real routers with a single queue share bandwidth in proportion to
    the arrival rates instead, so a rate-limited flow gets a smaller share there than in the simulation (docs/jobs.md
    has measurements).

    source, target  names of the sending and the receiving node, such as "h0" and "h9"
    rate            maximum rate in bytes/s, or a string such as "40 Gbit/s"; None: limited only by the links
    start, end      times at which the flow starts and ends, in s
    on, off         duty cycle: from `start` on, the flow alternately sends for `on` seconds and pauses for `off`
                    seconds; None: the flow sends without pauses
    trace           CSV file with the columns time_s (seconds after `start`) and rate (a number of bytes/s, or a string
                    such as "2 Gbit/s"). Each row sets the rate from its time on. A trace replaces `rate`, `on` and
                    `off`
    name            name in tables; by default "source -> target"

    Raises ConfigError if times are out of order or the trace cannot be read.
    """

    source: str
    target: str
    rate: Annotated[float | str, quantity("bandwidth", "40 Gbit/s")] | None = None
    _: KW_ONLY
    start: Time = 0.0
    end: Time = math.inf
    on: Part | None = None
    off: Part | None = None
    trace: str | Path | None = None
    name: str = ""
    #: rows of the trace: s from its start, and bytes/s from then on
    rates: tuple[tuple[float, float], ...] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        if self.source == self.target:
            raise ConfigError(
                f"Background: source = target = {shown(self.source)}: the traffic would not cross any link; "
                "use two different nodes"
            )
        if not si(self.start, "time") < si(self.end, "time"):
            raise ConfigError(
                f"Background: start = {shown(self.start)}, end = {shown(self.end)}: start must be before end"
            )
        if math.isinf(si(self.start, "time")):
            raise ConfigError("Background: start = inf: the flow would never start; set a finite time, or remove it")
        if (self.on is None) != (self.off is None):
            missing = "off" if self.off is None else "on"
            raise ConfigError(f"Background: {missing} is missing; set both on and off, or neither")
        if self.trace is not None:
            for name in ("rate", "on"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"Background: {name} has no effect with trace, which contains the rates; leave {name} out"
                    )
            object.__setattr__(self, "rates", _read(Path(self.trace)))

    @property
    def label(self) -> str:
        """Name in tables."""
        return self.name or f"{self.source} -> {self.target}"

    def limit(self, bandwidth: float) -> float:
        """Return the peak rate in bytes/s: that of a flow without a rate limit is the `bandwidth` of its links."""
        if self.rates:
            return max(rate for _, rate in self.rates)
        return bandwidth if self.rate is None else si(self.rate, "bandwidth")

    def shares(self) -> Iterator[tuple[float, float]]:
        """Yield (time, share) pairs in chronological order: the share of the peak rate from that time (s) on."""
        start, end = si(self.start, "time"), si(self.end, "time")
        steps: Iterable[tuple[float, float]] = [(start, 1.0)]
        if self.rates:
            most = self.limit(math.inf)
            steps = [(start + time, rate / most) for time, rate in self.rates]
        elif self.on is not None and self.off is not None:
            on, period = si(self.on, "time"), si(self.on, "time") + si(self.off, "time")
            begins = (start + n * period for n in itertools.count())
            steps = (step for begin in begins for step in ((begin, 1.0), (begin + on, 0.0)))
        yield from itertools.takewhile(lambda step: step[0] < end, steps)
        if math.isfinite(end):
            yield end, 0.0

    def phases(self) -> list[tuple[float, float, Background]]:
        """Return (start, end, traffic) tuples, one for each time span in which the flow is present.

        The traffic in each tuple is a flow that starts at 0 s and never ends. The list is empty if the flow is present
        during the complete run.
        """
        start, end = si(self.start, "time"), si(self.end, "time")
        lasting = replace(self, start=0.0, end=math.inf, trace=None)
        if not self.rates:
            return [(start, end, lasting)] if start or end < math.inf else []
        times, most = [*self.shares(), (math.inf, 0.0)], self.limit(math.inf)
        return [
            (begin, end, replace(lasting, rate=share * most))
            for (begin, share), (end, _) in itertools.pairwise(times)
            if share > 0.0
        ]


def _read(path: Path) -> tuple[tuple[float, float], ...]:
    """Return (time in s, bytes/s) of a trace's rows. Raises ConfigError, with the line, for invalid rows."""
    columns = {"time_s": Start, "rate": Annotated[float | str, quantity("bandwidth", "2 Gbit/s", zero=True)]}
    cells = read_rows(path, columns, tuple(columns), "a trace of rates")
    rows = [(si(row["time_s"], "time"), si(row["rate"], "bandwidth")) for row in cells]
    for line, (before, row) in enumerate(itertools.pairwise(rows), 3):
        if row[0] <= before[0]:
            raise ConfigError(
                f"{path}:{line}: time_s = {row[0]!r}: must be later than the time in the previous row, {before[0]!r}"
            )
    if not any(rate > 0.0 for _, rate in rows):
        raise ConfigError(f"{path}: all rates are 0, so no traffic flows; leave the trace out")
    return tuple(rows)
