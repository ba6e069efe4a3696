"""Faults: temporary slow-downs, stops and outages of parts of a run, at known times or at random.

A fault is an object with a `start` and a `duration` (s) and a method `effects`, which returns what it does to workers
and links; :class:`RandomFaults` samples such objects. Everything else asks for the effects only, so a new kind of fault
needs no other code. Random faults are sampled up to a time, the horizon. A run that reaches it is simulated again with
a later one; earlier faults stay the same, so results do not depend on the horizon.
"""

from __future__ import annotations

import copy
import dataclasses
import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Count, Index, NotNegative, Positive, Seed, checked, number, one_of, quantity
from ddlsim.cluster import Cluster
from ddlsim.cluster.groups import ranks_of_parts
from ddlsim.errors import ConfigError, DdlsimError, unknown_name
from ddlsim.network import Network
from ddlsim.network.devices import STANDSTILL
from ddlsim.readable import count
from ddlsim.streams import stream
from ddlsim.units import si

Start = Annotated[float | str, quantity("time", "60 s", zero=True)]
Duration = Annotated[float | str, quantity("time", "60 s")]
Ranks = Index | Iterable[Index]

#: default time in s until a fabric reroutes: between the fastest possible and usual values (RFC 7938, section 7)
CONVERGENCE = 1.0
#: duration in s that represents a permanent fault, in simulations of its steady state
FOREVER = 1e9
#: mean number of random faults up to the first horizon
FIRST_FAULTS = 500
#: most faults sampled from one RandomFaults
MAX_FAULTS = 20_000
#: number of the first sample of link faults, which all jobs share
SHARED = 1_000_000
Simulated = TypeVar("Simulated")
Moved = TypeVar("Moved")


# ------------------------------------------------------------ effects


class Effect(NamedTuple):
    """The effect of a fault on a run from time `start` to time `end`, in s on the run's clock.

    slowed   (rank, factor) pairs: computations of the worker take `factor` times as long
    stopped  ranks that compute nothing and neither send nor receive messages; messages in flight still arrive
    links    (channel, factor) pairs: the bandwidth of the channel is multiplied by `factor`; 0: the channel is down
    avoided  links that the fabric avoids wherever other paths exist
    pauses   True: workers and servers start no new computations, messages, collectives or updates, but finish those
             already started
    """

    start: float
    end: float
    slowed: Sequence[tuple[int, float]] = ()
    stopped: Sequence[int] = ()
    links: Sequence[tuple[int, float]] = ()
    avoided: frozenset[int] = frozenset()
    pauses: bool = False


class Fault(Protocol):
    """Protocol of faults at known times, in s."""

    @property
    def start(self) -> float: ...

    @property
    def duration(self) -> float: ...

    def effects(self, cluster: Cluster, nodes: Sequence[int]) -> Iterable[Effect]:
        """Return the effects on a run on `cluster` with worker i at ``nodes[i]``.

        Raises ConfigError for unknown workers or links.
        """


def effects_of(faults: Iterable[Any], cluster: Cluster, nodes: Sequence[int], field: str = "faults") -> list[Effect]:
    """Return the effects of all faults at known times. Raises ConfigError for invalid effects, such as on unknown
    workers and links."""
    effects = []
    for fault in at_known_times(faults):
        for effect in fault.effects(cluster, nodes):
            _check(effect, fault, cluster, len(nodes), field)
            effects.append(effect)
    return effects


def _check(effect: Effect, fault: Fault, cluster: Cluster, n_workers: int, field: str) -> None:
    numbers = {
        "rank": ([*(rank for rank, _ in effect.slowed), *effect.stopped], n_workers, "workers"),
        "channel": ([channel for channel, _ in effect.links], cluster.n_channels, "channels"),
        "link": (effect.avoided, len(cluster.link_src), "links"),
    }
    for part, (chosen, n, parts) in numbers.items():
        if wrong := [number for number in chosen if not 0 <= number < n]:
            problem = f"but there are only {n} {parts}, numbered from 0"
            if n == 0:  # of several jobs
                problem = "not the shared network; set it in the experiment of a job, Experiment(faults=...)"
            raise ConfigError(f"{field}: {fault} affects {part} {max(wrong)}, {problem}")
    least = 1.0 if field == "faults" else 0.0  # of a fault; the factor of a timed event may also be below 1
    factors = [x for _, x in effect.slowed if x < least] + [x for _, x in effect.links if x < 0.0]
    if factors:
        hint = "; for workers that become faster, use slowdowns=" if factors[0] > 0.0 else ""
        raise ConfigError(
            f"{field}: {fault} has the factor {factors[0]:g}: must be at least {least:g} for workers, 0 for links{hint}"
        )
    start, end = effect.start, effect.end
    if not (isinstance(start, float | int) and isinstance(end, float | int)) or not 0.0 <= start < end:
        raise ConfigError(
            f"{field}: {fault} has start = {start!r} and end = {end!r}: must be increasing, non-negative times in s"
        )


def at_known_times(faults: Iterable[Any]) -> list[Fault]:
    """Return the faults that are not sampled."""
    return [fault for fault in faults if hasattr(fault, "effects")]


def at_random(faults: Iterable[Any]) -> list[RandomFaults]:
    """Return the faults that are sampled."""
    return [fault for fault in faults if not hasattr(fault, "effects")]


def slow_intervals_of(effects: Sequence[Effect], rank: int, begin: float) -> list[tuple[float, float, float]]:
    """Return (s, s, factor by which computations of `rank` take longer), in a run that begins at `begin` (s)."""
    slowed = [(e, factor) for e in effects for other, factor in e.slowed if other == rank and factor != 1.0]
    slowed += [(effect, STANDSTILL) for effect in effects if rank in effect.stopped]
    return [(begin + effect.start, begin + effect.end, factor) for effect, factor in slowed]


def stops_of(effects: Sequence[Effect], begin: float) -> dict[int, list[tuple[float, float]]]:
    """Return rank -> sorted (start in s, end in s) of its standstills, in a run that begins at `begin` (s)."""
    stops = sorted((effect for effect in effects if effect.stopped), key=lambda effect: effect.start)
    ranks = sorted({rank for effect in stops for rank in effect.stopped})
    return {rank: [(begin + e.start, begin + e.end) for e in stops if rank in e.stopped] for rank in ranks}


def inject(effects: Sequence[Effect], network: Network, nodes: Sequence[int], begin: float = 0.0) -> None:
    """Schedule the network changes of faults in a run that begins at `begin` (s), with worker i at ``nodes[i]``.

    Raises ConfigError if routes change while other clients already use the network.
    """
    stops = [(begin + e.start, begin + e.end, nodes[rank]) for e in effects for rank in e.stopped]
    shares = [(begin + e.start, begin + e.end, channel, factor) for e in effects for channel, factor in e.links]
    avoided = [(e.start, e.end, e.avoided) for e in effects if e.avoided]
    if avoided and not network.engine.is_new:
        raise ConfigError(
            "faults: rerouting around a dead link affects all users of the network; pass the LinkFault "
            "to simulate_jobs(..., faults=[...]), or set reroute=float('inf')"
        )
    if effects:
        pauses = [(begin + e.start, begin + e.end) for e in effects if e.pauses]
        network.will_change(shares, stops, avoided, pauses)


@dataclass(frozen=True, eq=False)
class Disturbances:
    """The times at which channels lose bandwidth or routes, or nodes stand still.

    times     (n, 2) s on the network's clock
    channels  of each, the channels that it changes
    nodes     of each, the nodes that stand still
    """

    times: npt.NDArray[np.float64]
    channels: Sequence[Set[int]]
    nodes: Sequence[Set[int]]

    def meet(self, start: float, end: float, channels: Set[int], nodes: Set[int]) -> bool:
        """Return whether any of them meets what uses some channels and nodes from `start` to `end` (s)."""
        meanwhile = np.flatnonzero((self.times[:, 0] < end) & (self.times[:, 1] > start)).tolist()
        return any(self.channels[i] & channels or self.nodes[i] & nodes for i in meanwhile)


def disturbances_of(effects: Sequence[Effect], cluster: Cluster, nodes: Sequence[int], begin: float) -> Disturbances:
    """Return what effects change of a network, in a run that begins at `begin` (s) with worker i at ``nodes[i]``."""
    times, channels, stopped = [], list[set[int]](), list[set[int]]()
    for effect in effects:
        avoided = cluster.link_channel[sorted(effect.avoided)].tolist() if effect.avoided else []
        changed = {channel for channel, factor in effect.links if factor != 1.0} | set(avoided)
        if changed or effect.stopped:
            times.append((begin + effect.start, begin + effect.end))
            channels.append(changed)
            stopped.append({nodes[rank] for rank in effect.stopped})
    return Disturbances(np.reshape(times, (-1, 2)), channels, stopped)


# ------------------------------------------------------------ faults at known times


def _moved(fault: Moved, **times: float) -> Moved:
    """Return a fault with other times, which are valid: `replace` would check each copy."""
    moved = copy.copy(fault)
    vars(moved).update(times)
    return moved


def _settle(fault: object, **values: Any) -> None:
    """Set the fields of a fault, with its times converted to s."""
    for name, value in values.items():
        if name == "ranks":
            value = (value,) if isinstance(value, int) else tuple(value)
            if not value:
                raise ConfigError(f"{type(fault).__name__}: ranks = (): must contain at least one rank")
        object.__setattr__(fault, name, si(value, "time") if name in ("start", "duration", "reroute") else value)


@checked
@dataclass(frozen=True, init=False)
class Slowdown:
    """A temporary slowdown of some workers.

    ranks     ranks of the workers
    start     time at which the slowdown begins, in s or as a string such as "10 min"
    duration  duration of the slowdown, in s or as a string
    factor    factor by which the compute times of the workers are multiplied. Below 1, the workers become faster, which
              only `slowdowns` accept, not `faults`
    """

    ranks: tuple[int, ...]
    start: float
    duration: float
    factor: float

    def __init__(self, ranks: Ranks, start: Start, duration: Duration, factor: Positive) -> None:
        _settle(self, ranks=ranks, start=start, duration=duration, factor=float(factor))

    def effects(self, cluster: Cluster, nodes: Sequence[int]) -> list[Effect]:
        return [Effect(self.start, self.start + self.duration, slowed=[(rank, self.factor) for rank in self.ranks])]


@checked
@dataclass(frozen=True, init=False)
class Stop:
    """A temporary suspension of some workers' processes.

    ranks     ranks of the workers
    start     time at which the suspension begins, in s or as a string such as "10 min"
    duration  duration of the suspension, in s or as a string

    Suspended workers neither compute nor send nor receive messages. Data that they have already passed to the operating
    system or the network adapter is still sent. SIGSTOP, temporary hangs and virtual machine migrations have this
    effect. For workers that only compute more slowly, see :class:`ddlsim.Slowdown`.
    """

    ranks: tuple[int, ...]
    start: float
    duration: float

    def __init__(self, ranks: Ranks, start: Start, duration: Duration) -> None:
        _settle(self, ranks=ranks, start=start, duration=duration)

    def effects(self, cluster: Cluster, nodes: Sequence[int]) -> list[Effect]:
        return [Effect(self.start, self.start + self.duration, stopped=self.ranks)]


@checked
@dataclass(frozen=True, init=False)
class Pause:
    """A maintenance window that drains the run: no new work starts until the window ends.

    start     time at which the pause begins, in s or as a string such as "10 min"
    duration  duration of the pause, in s or as a string

    Computations and collectives that are running finish, and messages that have been sent are delivered. Work that
    becomes ready during the pause starts when the pause ends; until then, workers wait. To suspend workers in the
    middle of their work, see :class:`ddlsim.Stop`.
    """

    start: float
    duration: float

    def __init__(self, start: Start, duration: Duration) -> None:
        _settle(self, start=start, duration=duration)

    def effects(self, cluster: Cluster, nodes: Sequence[int]) -> list[Effect]:
        return [Effect(self.start, self.start + self.duration, pauses=True)]


@checked
@dataclass(frozen=True, init=False)
class LinkFault:
    """A degraded or dead link between two neighbouring nodes, in both directions.

    source, target  names of the two nodes, such as "h0" and "switch"
    start           time at which the fault begins, in s or as a string such as "10 min"
    duration        duration of the fault, in s or as a string
    factor          factor by which the bandwidth is multiplied, such as 1 / 4 if three of four lanes have failed. 0:
                    the link is down, and its traffic waits
    reroute         time in s that the fabric takes to react to the start or the end of an outage (factor 0). After this
                    time, it moves traffic to other routes, if there are any (:mod:`ddlsim.cluster.routing`), or back to
                    this link. Traffic simply waits if the outage is shorter than this time. inf: routes do not change.
                    The default is 1 s. Real fabrics react faster if switches detect the loss of signal, and take
                    several seconds if they wait for missing keep-alive messages (RFC 7938, section 7)
    """

    source: str
    target: str
    start: float
    duration: float
    factor: float
    reroute: float

    def __init__(
        self,
        source: str,
        target: str,
        start: Start,
        duration: Duration,
        factor: Annotated[float, number(0.0, 1.0, hint=" (0: down, 0.25: a quarter of the bandwidth)")] = 0.0,
        reroute: Annotated[float | str, quantity("time", "1 s", zero=True, infinite=True)] | None = None,
    ) -> None:
        if factor and reroute is not None and si(reroute, "time") < math.inf:
            raise ConfigError(
                f"LinkFault: reroute = {reroute!r} has no effect with factor = {factor:g}, because a slow "
                "link keeps its routes; leave reroute out, or use factor = 0"
            )
        converges = (math.inf if factor else CONVERGENCE) if reroute is None else reroute
        times = {"start": start, "duration": duration, "reroute": converges}
        _settle(self, source=source, target=target, factor=float(factor), **times)

    def effects(self, cluster: Cluster, nodes: Sequence[int]) -> Iterator[Effect]:
        links, end = links_between(cluster, self.source, self.target), self.start + self.duration
        channels: list[int] = np.unique(cluster.link_channel[links]).tolist()
        yield Effect(self.start, end, links=[(channel, self.factor) for channel in channels])
        if self.factor == 0.0 and self.reroute < self.duration:
            yield Effect(self.start + self.reroute, end + self.reroute, avoided=frozenset(links))

    def phases(self) -> list[tuple[float, float, LinkFault | Avoided]]:
        """Return (start, end, fault) tuples for the phases of the fault.

        If the fabric reroutes traffic, there are three: traffic waits, then uses other routes while the link is down,
        and for `reroute` seconds after the link has recovered.
        """
        end, turn = self.start + self.duration, self.start + self.reroute
        lasting = _moved(self, start=0.0, duration=FOREVER, reroute=math.inf)
        if self.reroute >= self.duration:
            return [(self.start, end, lasting)]
        phases: list[tuple[float, float, LinkFault | Avoided]] = [
            (self.start, turn, lasting),
            (turn, end, _moved(lasting, reroute=0.0)),
            (end, end + self.reroute, Avoided(self.source, self.target, 0.0, FOREVER)),
        ]
        return [phase for phase in phases if phase[0] < phase[1]]


@dataclass(frozen=True)
class Avoided:
    """A link that works again after an outage, but that the fabric still avoids where there are other routes.

    source, target   names of the two nodes
    start, duration  s
    """

    source: str
    target: str
    start: float
    duration: float

    def effects(self, cluster: Cluster, nodes: Sequence[int]) -> list[Effect]:
        links = frozenset(links_between(cluster, self.source, self.target))
        return [Effect(self.start, self.start + self.duration, avoided=links)]


def links_between(cluster: Cluster, one: str, other: str) -> list[int]:
    """Return the links between two nodes, in both directions. Raises ConfigError if there are none."""
    for name in (one, other):
        if name not in cluster.node_names:
            raise unknown_name("node", name, cluster.node_names, f"faults: cluster {cluster.name!r}")
    source, target = cluster.node(one), cluster.node(other)
    there = (cluster.link_src == source) & (cluster.link_dst == target)
    back = (cluster.link_src == target) & (cluster.link_dst == source)
    links: list[int] = np.flatnonzero(there | back).tolist()
    if not links:
        others = np.unique(cluster.link_dst[cluster.link_src == source])
        names = ", ".join(cluster.node_names[node] for node in others[:5].tolist())
        raise ConfigError(
            f"faults: cluster {cluster.name!r} has no link between {one} and {other}; the neighbours of "
            f"{one} are {names}"
        )
    return links


@dataclass(frozen=True)
class OfGroup:
    """A fault as seen by a group of workers, in which they have other ranks.

    fault   the fault, which affects workers by their ranks among all workers
    ranks   ranks of the group's workers among all workers
    nodes   nodes of all workers
    start, duration  those of the fault, in s
    """

    fault: Any
    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    start: float
    duration: float

    def effects(self, cluster: Cluster, nodes: Sequence[int]) -> Iterator[Effect]:
        place = {rank: i for i, rank in enumerate(self.ranks)}
        fault = dataclasses.replace(self.fault, start=self.start, duration=self.duration)
        for effect in fault.effects(cluster, self.nodes):
            slowed = [(place[rank], factor) for rank, factor in effect.slowed if rank in place]
            yield effect._replace(slowed=slowed, stopped=[place[rank] for rank in effect.stopped if rank in place])

    def phases(self) -> list[tuple[float, float, OfGroup]]:
        """Return (start, end, fault) tuples for the phases of the fault."""
        return [
            (start, end, dataclasses.replace(self, fault=what, start=what.start, duration=what.duration))
            for start, end, what in phases(dataclasses.replace(self.fault, start=self.start, duration=self.duration))
        ]


def in_group(fault: Any, ranks: Sequence[int], cluster: Cluster, nodes: Sequence[int]) -> Any:
    """Return a fault as seen by the workers with these `ranks`, with worker i at ``nodes[i]``; None if it affects only
    others."""
    if not hasattr(fault, "effects"):  # a random fault, sampled for the workers of the group
        return fault
    effects = list(fault.effects(cluster, nodes))
    hit = {rank for effect in effects for rank in (*(rank for rank, _ in effect.slowed), *effect.stopped)}
    if not hit:
        return fault
    if hit.isdisjoint(ranks) and not any(effect.links or effect.avoided or effect.pauses for effect in effects):
        return None
    if isinstance(fault, Stop):
        return dataclasses.replace(fault, ranks=tuple(i for i, rank in enumerate(ranks) if rank in hit))
    return OfGroup(fault, tuple(ranks), tuple(nodes), fault.start, fault.duration)


def phases(event: Any) -> list[tuple[float, float, Any]]:
    """Return (start in s, end in s, permanent event from 0 s on) per phase of a fault, job or background traffic."""
    if hasattr(event, "phases"):
        return list(event.phases())
    move = _moved if isinstance(event, Slowdown | Stop | Pause) else dataclasses.replace
    lasting = move(event, start=0.0, duration=FOREVER)
    return [(event.start, event.start + event.duration, lasting)]


def left_of(events: Iterable[Any], since: float) -> tuple[Any, ...]:
    """Return the remaining parts of faults, jobs and traffic for a run that begins at `since` (s), on its clock."""
    left = []
    for event in events:
        if not since or not hasattr(event, "start"):  # a random fault
            left.append(event)
            continue
        start = si(event.start, "time")
        changes, end = {"start": max(start - since, 0.0)}, math.inf
        if hasattr(event, "duration"):
            end = start + event.duration - since
            changes["duration"] = end - changes["start"]
        elif hasattr(event, "end"):
            changes["end"] = end = si(event.end, "time") - since
        if getattr(event, "reroute", math.inf) < math.inf:
            changes["reroute"] = max(event.reroute + min(start - since, 0.0), 0.0)
        if end > 0.0:
            left.append(dataclasses.replace(event, **changes))
    return tuple(left)


# ------------------------------------------------------------ faults at random


def recurring(
    mean: float, shape: float, n_parts: int, lasting: float, seed: int, number: int, what: str
) -> Iterator[tuple[float, int]]:
    """Yield (time in s, part) of the events of all parts in order of time, without end.

    mean     mean time from the end of an event to the part's next one, in s; Weibull distribution of this `shape`
    lasting  duration of an event, in s
    number   number of the sample; samples are independent, and so are those of other events `what`
    """
    if math.isinf(mean):
        return
    scale = mean / math.gamma(1.0 + 1.0 / shape)
    first = scale * stream(seed, number, what).weibull(shape, n_parts)
    coming = [(time, part) for part, time in enumerate(first.tolist())]
    heapq.heapify(coming)
    later = stream(seed, number, f"later {what}")  # sampled in order of time, which is deterministic
    while True:
        time, part = coming[0]
        yield time, part
        heapq.heapreplace(coming, (time + lasting + scale * float(later.weibull(shape)), part))


#: kind -> parts that can be affected
PARTS = {"slow": ("host", "device"), "stop": ("host", "device"), "link": ("host", "link", "switch")}


@checked
@dataclass(frozen=True)
class RandomFaults:
    """Random temporary faults, which slow down a run but, unlike :class:`ddlsim.Failures`, do not end it.

    mtbf      mean time between faults of a single unit (see `per`), in s or as a string such as "200 h". It is measured
              from the end of a fault to the start of the next one (mean *operating* time between failures, IEC
              60050-192)
    duration  duration of each fault, in s
    kind      "slow": computations of the unit's workers take `factor` times as long (:class:`ddlsim.Slowdown`), for
              instance because a machine throttles or has a noisy neighbour; "stop": its workers are suspended
              (:class:`ddlsim.Stop`); "link": the bandwidth of its links is multiplied by `factor`
              (:class:`ddlsim.LinkFault`)
    per       the unit that a fault affects: "host" (one machine or, with kind="link", all of its links to other
              machines), "device", "link" (between two neighbours that are not both inside one machine), or "switch"
              (with all of its links)
    factor    for kind="slow", a factor above 1 applied to compute times; for kind="link", a factor below 1 applied to
              the bandwidth, where None means 0 (the links are down)
    shape     shape of the Weibull distribution of times between faults; 1 is exponential
    reroute   for links that are down, time in s until the fabric routes around them (:class:`ddlsim.LinkFault`)

    Faults are sampled from the run's seed, for its workers and for all links of its cluster. Raises ConfigError for
    contradictory arguments.
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
            "slow": (self.factor is None or self.factor <= 1.0, "above 1 (2.0: computations take twice as long)"),
            "stop": (self.factor is not None, "left out with kind='stop', which stops all computation"),
            "link": (self.factor is not None and self.factor >= 1.0, "below 1, a share of the bandwidth (0: down)"),
        }[self.kind]
        if wrong:
            raise ConfigError(f"RandomFaults: factor = {self.factor!r} with kind={self.kind!r}: must be {hint}")
        if self.reroute is not None and (self.kind != "link" or self.factor):
            raise ConfigError(
                f"RandomFaults: reroute = {self.reroute!r} applies only to links that are down; leave reroute out, "
                "or use kind='link' without factor"
            )

    @property
    def rate(self) -> float:
        """Mean number of faults of one part per second."""
        return 1.0 / (si(self.mtbf, "time") + si(self.duration, "time"))

    @checked
    def events(self, n_parts: Count, seed: Seed = 0, number: Index = 0) -> Iterator[tuple[float, int]]:
        """Yield (time in s, part) for the faults of `n_parts` parts in chronological order, without end.

        seed    seed of the random faults
        number  number of the sample: each number gives a different sequence for the same seed
        """
        mean, duration = si(self.mtbf, "time"), si(self.duration, "time")
        return recurring(mean, self.shape, n_parts, duration, seed, number, "faults")

    def parts(self, cluster: Cluster, nodes: Sequence[int]) -> list[list[Any]]:
        """Return the faults that affect each part, starting at 0 s; a part with several links has one fault per link.

        Raises ConfigError if the cluster has no such parts.
        """
        duration, factor = si(self.duration, "time"), self.factor or 0.0
        if self.kind == "link":
            groups = _links(self.per, cluster)
            return [[LinkFault(a, b, 0.0, duration, factor, self.reroute) for a, b in pairs] for pairs in groups]
        parts = ranks_of_parts(cluster, nodes, self.per)
        if self.kind == "stop":
            return [[Stop(ranks, 0.0, duration)] for ranks in parts]
        return [[Slowdown(ranks, 0.0, duration, factor)] for ranks in parts]


def _links(per: str, cluster: Cluster) -> list[list[tuple[str, str]]]:
    """Return the groups of neighbours whose links fail together."""
    host, switch, names = cluster.host_of, cluster.is_fabric_switch, cluster.node_names
    outside = (host[cluster.link_src] != host[cluster.link_dst]) | (host[cluster.link_src] < 0)
    ends = np.sort(np.stack([cluster.link_src, cluster.link_dst], axis=1)[outside], axis=1)
    groups: dict[int, list[tuple[str, str]]] = {}
    for link, (a, b) in enumerate(np.unique(ends, axis=0).tolist()):
        owners = [link]
        if per != "link":
            owners = [node if per == "switch" else host[node] for node in (a, b) if switch[node] == (per == "switch")]
        for owner in owners:
            groups.setdefault(owner, []).append((names[a], names[b]))
    if not groups:
        which = "switches between its machines" if per == "switch" else "links between its machines"
        raise ConfigError(
            f"faults: RandomFaults per = {per!r}: cluster {cluster.name!r} has no {which}; remove these faults"
        )
    return [groups[owner] for owner in sorted(groups)]


def sampled(
    faults: Iterable[Any],
    cluster: Cluster,
    nodes: Sequence[int],
    seed: int,
    until: float,
    *,
    shared: bool = False,
    index: int = 0,
) -> tuple[Any, ...]:
    """Return the random faults up to `until` (s), in order of time; worker i is at ``nodes[i]``.

    Faults `shared` by all jobs differ from those of a job with the same seed, as do those of another `index`. Raises
    ConfigError for more than `MAX_FAULTS`.
    """
    faults_at = []
    for sample, source in enumerate(at_random(faults), SHARED if shared else 1000 * index):
        parts = source.parts(cluster, nodes)
        for n, (time, part) in enumerate(source.events(len(parts), seed, sample)):
            if time >= until:
                break
            if n >= MAX_FAULTS:
                raise ConfigError(
                    f"faults: {source} has more than {MAX_FAULTS:,} faults in the first {time:.4g} of {until:.4g} s; "
                    "reduce max_time, or increase mtbf"
                )
            for fault in parts[part]:
                faults_at.append(_moved(fault, start=time))
    return tuple(sorted(faults_at, key=lambda fault: fault.start))


#: a fault of one run, and one of the cluster that several jobs share
AnyFault = Annotated[
    Slowdown | Stop | Pause | LinkFault | RandomFaults | Fault,
    "a Slowdown, Stop, Pause, LinkFault or RandomFaults object, or an object with the method effects",
    "Slowdown, Stop, Pause, LinkFault or RandomFaults objects, or of objects with the method effects",
]
SharedFault = Annotated[
    LinkFault | Pause | RandomFaults | Fault,
    "a ddlsim.LinkFault, ddlsim.Pause, ddlsim.RandomFaults or an object with effects",
]


class BeyondError(DdlsimError):
    """A run has reached the time up to which its faults are sampled."""


def horizon_of(faults: Iterable[Any], cluster: Cluster, n_faults: float) -> float:
    """Return the time by which about `n_faults` random faults are expected, in s; inf if there are none."""
    workers = cluster.workers.tolist()
    rate = math.fsum(source.rate * len(source.parts(cluster, workers)) for source in at_random(faults))
    return n_faults / FIRST_FAULTS * (FIRST_FAULTS / rate) if rate > 0.0 else math.inf


def up_to_its_end(
    faults: Iterable[Any], cluster: Cluster, simulated: Callable[[float], Simulated], first: float = math.inf
) -> Simulated:
    """Call `simulated(horizon)` with growing horizons, the first one at most `first` (s), until the run ends before its
    horizon; return the result."""
    horizon = min(horizon_of(faults, cluster, FIRST_FAULTS), first)
    while True:
        try:
            return simulated(horizon)
        except BeyondError:
            horizon *= 4.0


def sampled_notes(faults: Sequence[Any], happened: Sequence[Any], seconds: float) -> Iterator[str]:
    """Yield notes on how often random faults occurred in a run of `seconds`."""
    words = {Slowdown: "slow-down", Stop: "stop", LinkFault: "link fault"}
    counts = Counter(words.get(type(fault), type(fault).__name__) for fault in happened)
    texts = ", ".join(count(n, word) for word, n in counts.items())
    if texts:
        yield f"faults: {texts} occurred at random in the {seconds:.4g} s of the run (Result.sampled_faults)"
    elif at_random(faults):
        remedy = "simulate more steps, or a training run"
        yield f"faults: no random fault occurred in the {seconds:.4g} s of the run; {remedy}"
