"""What goes wrong in a run at known times: workers that stand still, links that are slow or down."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from ddlsim.arguments import Index, checked, number, quantity
from ddlsim.errors import ConfigError
from ddlsim.units import si

Start = Annotated[float | str, quantity("time", "60 s", zero=True)]
Duration = Annotated[float | str, quantity("time", "60 s")]

#: s until a fabric takes other routes: between what is within reach and what is usual (RFC 7938, section 7)
CONVERGENCE = 1.0


@checked
@dataclass(frozen=True, init=False)
class Stop:
    """From `start`, for `duration` seconds, the processes of the workers `ranks` stand still, and go on then.

    They compute nothing, begin no message, and take none that has arrived. What they have handed over before goes on
    its way: the kernel of their machine, or its network adapter, sends it. That is what SIGSTOP does to a process; a
    hang that passes is the same, and a virtual machine that is moved. (Workers that only compute more slowly:
    :class:`ddlsim.SlowDown`.)
    """

    ranks: tuple[int, ...]
    start: float
    duration: float

    def __init__(self, ranks: Index | Iterable[Index], start: Start, duration: Duration) -> None:
        chosen = (ranks,) if isinstance(ranks, int) else tuple(ranks)
        if not chosen:
            raise ConfigError("Stop: ranks = (): must be one rank or more")
        object.__setattr__(self, "ranks", chosen)
        object.__setattr__(self, "start", si(start, "time"))
        object.__setattr__(self, "duration", si(duration, "time"))

    @property
    def end(self) -> float:
        """When they go on, in s."""
        return self.start + self.duration


@checked
@dataclass(frozen=True, init=False)
class LinkFault:
    """From `start`, for `duration` seconds, the links between two neighbours carry `factor` of their bandwidth.

    source, target  names of the nodes, such as "h0" and "switch"; both directions are concerned
    factor          1 / 4: three of four lanes have failed; 0: the link is down, and what is on it waits
    reroute         how long after that (1 s) it is until the fabric takes other ways,
                    where it has any (:mod:`ddlsim.cluster.routing`), and from its end until it takes this one again;
                    inf: routes stay what they are. Below a second is within reach where switches notice that a link is
                    down, seconds where they wait for messages of their neighbour (RFC 7938, section 7). A link that is
                    back before is waited for
    """

    source: str
    target: str
    start: float
    duration: float
    factor: float
    reroute: float

    def __init__(
        self, source: str, target: str, start: Start, duration: Duration,
        factor: Annotated[float, number(0.0, 1.0, hint=" (0: down, 0.25: a quarter of the bandwidth)")] = 0.0,
        reroute: Annotated[float | str, quantity("time", "1 s", zero=True, infinite=True)] | None = None,
    ) -> None:  # fmt: skip
        object.__setattr__(self, "source", source)
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "start", si(start, "time"))
        object.__setattr__(self, "duration", si(duration, "time"))
        object.__setattr__(self, "factor", float(factor))
        converges = (math.inf if factor else CONVERGENCE) if reroute is None else si(reroute, "time")
        if factor and converges < math.inf:
            raise ConfigError(
                f"LinkFault: reroute = {reroute!r} has no effect with factor = {factor:g}: a link that is slow keeps "
                "its routes; leave it out, or use factor = 0"
            )
        object.__setattr__(self, "reroute", converges)

    @property
    def end(self) -> float:
        """When they have all their bandwidth again, in s."""
        return self.start + self.duration


Fault = Stop | LinkFault
