"""Costs of collectives in a run: simulated message by message, by a measured curve, or by the estimate of NCCL's tuner.

docs/calibration.md (Curves in runs) describes collectives of known time: when they start and end, the lower bound that
their links impose (:class:`Charge`), and the formula of a measured curve.

**If the network is shared, or while faults change its links or stop workers**, the bytes of such a collective are sent
as messages along the same links, phase by phase. It ends later than its known time by as much as these messages take
longer than on an idle network. A library that gets less out of a link than its bandwidth also holds the link for the
rest of its time: this is sent after the bytes, and counted as overhead. Otherwise, a collective of known time takes no
network time by itself (:meth:`ddlsim.runtime.loop.Loop.run_known`).

The bytes of a link are those of the collective's own schedule (:func:`by_schedule`), or those of a library that spreads
its rings or trees over all links (:func:`spread`). Inside a machine, the rings are those of NCCL's search
(:mod:`ddlsim.cluster.rings`). Each ring is cut at each of its GPUs in turn, so that all of them, and the cards nearest
to them, carry the same between machines. NCCL's trees are a chain through each machine and a double binary tree over
the machines (``src/graph/trees.cc``).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ddlsim.cluster import Cluster
from ddlsim.cluster.rings import channels
from ddlsim.collectives import Collective, Schedule, build
from ddlsim.collectives.build import forced
from ddlsim.collectives.lookup import find
from ddlsim.collectives.nccl import bus_bandwidth, nccl_time
from ddlsim.collectives.nccl_tuner import LAPS
from ddlsim.collectives.trees import double_tree
from ddlsim.errors import ConfigError
from ddlsim.network import Network, schedule_time
from ddlsim.network.state import Floats, Ints
from ddlsim.readable import si
from ddlsim.runtime.context import RunContext
from ddlsim.runtime.fabric import algorithm_name
from ddlsim.runtime.loop import Loop, Traffic

if TYPE_CHECKING:
    import simpy

    from ddlsim.cluster.calibration_table import CurveTable


@dataclass(frozen=True)
class Parts:
    """Components of the simulated time of one operation over `nbytes`, in s."""

    nbytes: float
    per_message: float
    per_byte: float
    reduction: float


def parts_of(seconds: Callable[[Cluster], float], cluster: Cluster, nbytes: float) -> Parts:
    """Split the time of an operation, which ``seconds(cluster)`` simulates, into its parts, by simulating it without
    latency and with twice the rate as well."""
    idle = np.zeros_like(cluster.send_overhead)
    hardly = 1e-15 * cluster.link_latency  # with latency 0, messages could take other routes
    free = dataclasses.replace(cluster, link_latency=hardly, send_overhead=idle, recv_overhead=idle)
    fast = dataclasses.replace(free, link_bandwidth=2.0 * free.link_bandwidth)
    total, bytes_only, faster = (seconds(c) for c in (cluster, free, fast))
    per_byte = 2.0 * (bytes_only - faster)
    return Parts(nbytes, total - bytes_only, per_byte, bytes_only - per_byte)


def schedule_parts(cluster: Cluster, schedule: Schedule, nodes: Sequence[int], nbytes: float) -> Parts:
    """Split the time of a collective; latencies that the schedule itself sets (NCCL's) are per message as well."""
    lanes = tuple(tuple(dataclasses.replace(r, latency=None) for r in lane) for lane in schedule.lanes)
    free = dataclasses.replace(schedule, lanes=lanes)
    return parts_of(
        lambda now: schedule_time(now, schedule if now is cluster else free, nodes, nbytes), cluster, nbytes
    )


def columns(parts: Sequence[Parts], sizes: Sequence[int]) -> Floats:
    """Return the coefficients of a curve's factors, shape (n_rows, 1 + n_pieces); pieces meet at `sizes` (bytes)."""
    size = np.array([p.nbytes for p in parts])
    edges = np.array([0.0, *sizes, math.inf])
    inside = np.clip(size[:, None], edges[:-1], edges[1:]) - edges[:-1]
    per_byte = np.array([p.per_byte for p in parts])
    return np.column_stack([[p.per_message for p in parts], inside * (per_byte / size)[:, None]])


def curve_seconds(parts: Parts, per_message: float, sizes: Sequence[int], per_byte: Sequence[float]) -> float:
    """Return the seconds of an operation, by a curve with these factors."""
    return float(columns([parts], sizes)[0] @ np.array([per_message, *per_byte])) + parts.reduction


Process = Generator["simpy.Event", object, None]


@dataclass(frozen=True, eq=False)
class KnownCost:
    """Collectives of known time: `seconds`, their `traffic`, and for each phase its messages and the overhead that
    follows these, as a share of their bytes."""

    cluster: Cluster
    seconds: float
    traffic: Traffic
    phases: tuple[tuple[Charge, float], ...] = ()

    @classmethod
    def none(cls, cluster: Cluster) -> KnownCost:
        """Return an empty collective, which takes no time."""
        return cls(cluster, 0.0, Traffic(np.zeros(cluster.n_channels), np.zeros(cluster.n_channels), 0.0, 0))

    def then(self, other: KnownCost) -> KnownCost:
        """Return this collective followed by another one."""
        traffic, phases = self.traffic.plus(other.traffic, 1.0), (*self.phases, *other.phases)
        return KnownCost(self.cluster, self.seconds + other.seconds, traffic, phases)

    @functools.cached_property
    def idle_seconds(self) -> float:
        """Time of the messages on an idle network with empty token buckets (as when they are sent once more), s."""
        loop = Loop(Network(self.cluster).shared())
        loop.run(loop.env.process(self._sent(loop)))
        first = loop.now
        loop.run(loop.env.process(self._sent(loop)))
        return loop.now - first

    def _sent(self, loop: Loop) -> Process:
        for charge, behind in self.phases:
            source, target, nbytes = charge.messages
            for share, overhead in ((1.0, False), (behind, True)):
                rows = zip(source.tolist(), target.tolist(), (share * nbytes).tolist(), strict=True)
                if sends := [loop.send(*row, overhead=overhead) for row in rows if row[2] > 0.0]:
                    yield loop.env.all_of(sends)

    def is_disturbed(
        self, loop: Loop, start: float, turns: Sequence[Hashable], channels: Set[int], nodes: Set[int]
    ) -> bool:
        """Return whether others may slow it down, on a shared network: if it could run from `start` (s) on, after those
        before it, over these channels and between these nodes."""
        before = (loop.turns.get(turn) for turn in turns)
        if loop.disturbances is None or any(event is not None and not event.processed for event in before):
            return True
        start = loop.start_of_known(start, self.traffic)
        return loop.disturbances.meet(start, start + self.seconds, channels, nodes)

    def run(self, loop: Loop, start: float, turns: Sequence[Hashable], ended: Callable[[float], None]) -> None:
        """Run from `start` (s) on, or when those before it have left their `turns`; `ended` is called with its end
        (s)."""
        before = {id(event): event for turn in turns if (event := loop.turns.get(turn)) is not None}
        over = loop.env.event()
        loop.turns.update(dict.fromkeys(turns, over))
        loop.env.process(self._run(loop, start, list(before.values()), over, ended))

    def _run(
        self,
        loop: Loop,
        start: float,
        before: list[simpy.Event],
        over: simpy.Event,
        ended: Callable[[float], None],
    ) -> Process:
        if (start := loop.start_of_known(start, self.traffic)) > loop.now and loop.disturbances is not None:
            yield loop.at(start)
        if waiting := [event for event in before if not event.processed]:
            yield loop.env.all_of(waiting)
        start = loop.now
        yield from self._sent(loop)
        loop.n_more_messages += self.traffic.n_messages - sum(len(charge.messages[0]) for charge, _ in self.phases)
        late = loop.now - start - self.idle_seconds
        if late <= 1e-9 * self.seconds + 1e-14 * loop.now:  # rounding
            late = 0.0
        end = max(start + (self.seconds + late), loop.now)
        loop.trigger_at(over, end)
        ended(end)


#: our names of the algorithms that NCCL's tuner chooses among; None: the fastest one
_NCCL = {"ring": "ring", "nccl_ring": "ring", "double_binary_tree": "tree", "auto": None, "nccl": None}
#: schedules with the same number of messages; the other algorithms have schedules of their own
_SCHEDULE = {"ring": "ring", "tree": "double_binary_tree"}


class Phase(NamedTuple):
    """Concurrent collectives of one `kind` over `nbytes` each; ``groups`` are the nodes of each, by rank.

    algorithm  their algorithm; None: the usual one of NCCL, "auto" for all-reduces and "ring" for other kinds
    """

    kind: str
    groups: tuple[tuple[int, ...], ...]
    nbytes: float
    algorithm: str | Collective | None = None


def known_cost(
    context: RunContext, cost: str, owner: str, algorithm: str | Collective, nodes: Sequence[int], kind: str
) -> Callable[[Phase], KnownCost]:
    """Return the cost of a phase of a `kind` among the workers at `nodes`, by a measured curve or by NCCL's tuner.

    Raises ConfigError, with the measurement or change needed, if the cluster has no curve for it, and for an algorithm
    that the curve or NCCL does not cover.
    """
    where = f"{owner}: cost = {cost!r}"
    if cost == "calibrated":
        return _by_curve(context, where, algorithm, nodes, kind)
    return _by_nccl(context, where, algorithm, kind)


def _known_cost(
    context: RunContext, what: str, nbytes: float, seconds: float, charge: Charge, n_messages: int, moving: float
) -> KnownCost:
    """Return a collective that takes `seconds`, or as long as the tightest link needs for its bytes.

    If that is longer, a note says so, once per `what`. All links that it uses are busy for its whole duration. The
    links that determine its time are held for `moving` seconds, the others in inverse proportion to their bandwidths.
    """
    cluster, least = context.cluster, charge.seconds
    if least > seconds * (1.0 + 1e-9) and not any(note.startswith(f"{what}: link ") for note in context.notes):
        link = int(np.flatnonzero(cluster.link_channel == charge.tightest)[0])
        source, target = (cluster.node_names[ends[link]] for ends in (cluster.link_src, cluster.link_dst))
        kind = cluster.link_kind[link]
        context.notes.append(
            f"{what}: link {source} -> {target} ({kind}) needs at least {least * 1e3:.4g} ms to carry its share of "
            f"{si(nbytes, 'B', 3)}, but the cost model returns {seconds * 1e3:.4g} ms; the time of the link is used"
        )
    seconds = max(seconds, least)
    busy = np.where(charge.nbytes > 0.0, seconds, 0.0)
    overhead = max(moving / least - 1.0, 0.0) if least > 0.0 else 0.0
    traffic = Traffic(charge.nbytes, busy, charge.sent, n_messages)
    return KnownCost(cluster, seconds, traffic, ((charge, overhead),))


def _undisturbed(context: RunContext) -> str:
    """Return a remark for notes if contention is ignored, else ""."""
    return "" if context.loop.network.is_shared else "; other traffic does not slow them down"


def _schedule(
    context: RunContext, algorithm: str | Collective, group: Sequence[int], nbytes: float, kind: str
) -> Schedule:
    """Return the schedule of a collective in a group, with rank r at ``group[r]``."""
    return build(algorithm, len(group), nbytes, None, kind, (context.cluster, group))


# ---------------------------------------------------------------- bytes on links


@dataclass(frozen=True)
class Charge:
    """Traffic of collectives: bytes on every channel, (n_channels,), their sum over messages (`sent`), the time that
    channel `tightest` needs at least, s, and the messages: source nodes, target nodes and bytes, (n,)."""

    nbytes: Floats
    sent: float
    seconds: float
    tightest: int
    messages: tuple[Ints, Ints, Floats] = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))


class Load:
    """Bytes between pairs of nodes of a `cluster`."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._parts: list[tuple[Ints, Ints, Floats]] = []

    @property
    def empty(self) -> bool:
        """Whether there are none."""
        return not self._parts

    def add(self, src: npt.ArrayLike, dst: npt.ArrayLike, nbytes: npt.ArrayLike) -> None:
        """Send ``nbytes[i]`` from node ``src[i]`` to node ``dst[i]``, (n,)."""
        source, target = np.asarray(src, dtype=np.int64), np.asarray(dst, dtype=np.int64)
        self._parts.append((source, target, np.broadcast_to(np.asarray(nbytes, dtype=np.float64), source.shape)))

    def charge(self) -> Charge:
        """Return the traffic on the channels. Frame headers and acknowledgements take time as well."""
        cluster = self.cluster
        if self.empty:
            return Charge(np.zeros(cluster.n_channels), 0.0, 0.0, 0)
        source, target, nbytes = (np.concatenate(column) for column in zip(*self._parts, strict=True))
        pairs, which = np.unique(np.stack([source, target]), axis=1, return_inverse=True)
        messages = pairs[0], pairs[1], np.bincount(which.reshape(-1), nbytes).astype(np.float64)
        routes = cluster.split_routes(source, target)
        of = routes.of
        wire = nbytes.copy()
        details = cluster.details
        if details is not None:
            header, payload = np.zeros(len(source)), np.full(len(source), np.inf)
            framed = details.frame_header[routes.links] > 0.0
            np.maximum.at(header, of[framed], details.frame_header[routes.links[framed]])
            np.minimum.at(payload, of[framed], details.frame_payload[routes.links[framed]])
            message_nbytes = messages[2][which.reshape(-1)]  # a pair's bytes are sent as one message
            wire += np.divide(nbytes, message_nbytes, out=np.zeros_like(nbytes), where=message_nbytes > 0.0) * (
                header * np.ceil(message_nbytes / payload)
            )
        channel = cluster.link_channel[routes.links]
        carried = np.bincount(channel, nbytes[of] * routes.share, cluster.n_channels).astype(np.float64)
        if not len(channel):
            return Charge(carried, float(nbytes.sum()), 0.0, 0, messages)
        crossing = np.bincount(channel, wire[of] * routes.share, cluster.n_channels)
        seconds = crossing / Network(cluster).accounts().capacity
        if details is not None and details.reverse_load.any():
            seconds = _with_acknowledgements(cluster, seconds, details.reverse_load)
        return Charge(carried, float(nbytes.sum()), float(seconds.max()), int(seconds.argmax()), messages)


def _with_acknowledgements(cluster: Cluster, seconds: Floats, reverse_load: Floats) -> Floats:
    """Return the seconds that channels need if both directions of their links start at the same time, (n_channels,).

    seconds       for each channel, with its opposite direction idle, (n_channels,)
    reverse_load  of each link, (n_links,)

    While both directions are in use, 1 / (1 + reverse_load) of the bandwidth is left for data: the direction that takes
    longer is slowed down until the other one has ended.
    """
    links = np.flatnonzero(cluster.reverse_link >= 0)
    channel, opposite = cluster.link_channel[links], cluster.link_channel[cluster.reverse_link[links]]
    load = np.where(channel == opposite, 0.0, reverse_load[links])  # already included in half-duplex capacities
    total = seconds.copy()
    total[channel] += load * np.minimum(seconds[channel], seconds[opposite])
    return total


def by_schedule(load: Load, schedule: Schedule, nodes: Sequence[int], nbytes: float) -> None:
    """Add the messages of `schedule` over `nbytes`, with rank r at ``nodes[r]``."""
    place = np.asarray(nodes, dtype=np.int64)
    for round_ in (r for lane in schedule.lanes for r in lane):
        n_distinct = 1 if schedule.chunk_weight is None or round_.shift == 0 else round_.repeat
        for repetition in range(n_distinct):
            size = schedule.message_bytes(nbytes, round_, repetition) + round_.header
            load.add(place[round_.src], place[round_.dst], size * (round_.repeat / n_distinct))


def spread(load: Load, nodes: Sequence[int], nbytes: float, algorithm: str, kind: str = "all_reduce") -> None:
    """Add the traffic of NCCL's "ring" or "tree" over `nbytes` among workers at `nodes`."""
    cluster, place = load.cluster, np.asarray(nodes, dtype=np.int64)
    place = place[cluster.locality_order(place)]
    machine = np.where(cluster.host_of[place] >= 0, cluster.host_of[place], len(cluster.host_names) + place)
    first = np.sort(np.unique(machine, return_index=True)[1])
    machines = np.split(place, first[1:])
    n = len(place)
    tree = algorithm == "tree"
    hop = nbytes if tree else LAPS[kind] * (n - 1) / n * nbytes
    for members in machines:
        m = len(members)
        if m == 1:
            continue
        share = (m - 1) / m if tree or len(machines) > 1 else 1.0
        rings = channels(cluster, tuple(members.tolist())).rings
        for ring in rings:
            here, following = members[ring], members[np.roll(ring, -1)]
            load.add(here, following, hop * share / len(rings))
            if tree:
                load.add(following, here, hop * share / len(rings))
    if len(machines) == 1:
        return
    if tree:
        for parent, depth in double_tree(len(machines)):
            for child in np.flatnonzero(depth).tolist():
                above = int(parent[child])
                for a, b in ((child, above), (above, child)):
                    _between(load, machines[a], machines[b], nbytes / 2.0)
    else:
        for i, members in enumerate(machines):
            _between(load, members, machines[(i + 1) % len(machines)], hop)


def _between(load: Load, source: Ints, target: Ints, nbytes: float) -> None:
    """Add `nbytes` from one machine to another: all GPUs send the same, and all receive the same, in order."""
    cuts = np.unique(np.concatenate([np.arange(len(a) + 1) / len(a) for a in (source, target)]))
    middle = (cuts[1:] + cuts[:-1]) / 2.0
    at = [a[(middle * len(a)).astype(np.int64)] for a in (source, target)]
    load.add(at[0], at[1], nbytes * np.diff(cuts))


# ---------------------------------------------------------------- by a measured curve


def _by_curve(
    context: RunContext, where: str, algorithm: str | Collective, nodes: Sequence[int], kind: str
) -> Callable[[Phase], KnownCost]:
    curve = _curve(context, where, nodes, kind)
    if algorithm_name(algorithm) != curve.algorithm:
        raise ConfigError(
            f"{where}: the {kind} curve was fitted for {curve.algorithm!r}, not for {algorithm_name(algorithm)!r}; use "
            f"algorithm = {curve.algorithm!r}, or calibrate with --algorithm {kind}={algorithm_name(algorithm)}"
        )
    (least, most), backend = curve.nbytes, f" by {curve.backend}" if curve.backend else ""
    context.notes.append(
        "cost = 'calibrated': collective times are those of the measured curve of "
        f"{kind}{backend}{_undisturbed(context)}"
    )
    warned: list[str] = []

    def cost_of(phase: Phase) -> KnownCost:
        cluster, nbytes = context.cluster, phase.nbytes
        if not least <= nbytes <= most and not warned:
            warned.append(f"the curve was measured from {least} to {most} bytes; {nbytes:.0f} bytes are extrapolated")
            context.notes.append(warned[0])
        plans = [_schedule(context, algorithm, group, nbytes, kind) for group in phase.groups]
        seconds, moving, narrow, wide = 0.0, 0.0, Load(cluster), Load(cluster)
        for group, plan in zip(phase.groups, plans, strict=True):
            parts = schedule_parts(cluster, plan, group, nbytes)
            seconds = max(seconds, curve_seconds(parts, curve.per_message, curve.sizes, curve.per_byte))
            moving = max(moving, curve_seconds(parts, 0.0, curve.sizes, curve.per_byte) - parts.reduction)
            by_schedule(narrow, plan, group, nbytes)
            if _NCCL.get(curve.algorithm) is not None:
                spread(wide, group, nbytes, str(_NCCL[curve.algorithm]), kind)
        charge = narrow.charge()
        if charge.seconds > seconds and not wide.empty:  # then the library must have used more links
            charge = min(charge, wide.charge(), key=lambda c: c.seconds)
        n_messages = sum(plan.n_messages for plan in plans)
        return _known_cost(context, "cost = 'calibrated'", nbytes, seconds, charge, n_messages, moving)

    return cost_of


def _curve(context: RunContext, where: str, nodes: Sequence[int], kind: str) -> CurveTable:
    """Return the cluster's curve for this number of ranks, inside a machine or between machines."""
    cluster, n = context.cluster, len(nodes)
    inside = len(set(context.hosts(list(nodes)).tolist())) == 1
    place = "inside a host" if inside else "between hosts"
    remedy = (
        f"measure {kind} of at least 3 sizes on {n} ranks {place} (python -m ddlsim.measure --only collective), then "
        "ddlsim calibrate"
    )
    table = cluster.calibration
    if table is None:
        raise ConfigError(f"{where}: cluster {cluster.name!r} is not calibrated; {remedy}")
    curves = [c for c in table.curves if (c.operation, c.inside) == (kind, inside)]
    if not curves:
        raise ConfigError(f"{where}: the calibration of cluster {cluster.name!r} has no {kind} curve {place}; {remedy}")
    fitting = [c for c in curves if c.ranks[0] <= n <= c.ranks[1]]
    if not fitting:
        counts = ", ".join(f"{c.ranks[0]} to {c.ranks[1]}" for c in curves)
        raise ConfigError(
            f"{where}: the calibration of cluster {cluster.name!r} has {kind} curves {place} for {counts} ranks, but "
            f"not for {n}; {remedy}"
        )
    if len(fitting) > 1:
        backends = " and ".join(sorted(repr(c.backend) for c in fitting))
        raise ConfigError(
            f"{where}: {kind} was measured with several backends, {backends}; calibrate with --backend to choose one"
        )
    return fitting[0]


# ---------------------------------------------------------------- by NCCL's tuner


def _by_nccl(context: RunContext, where: str, algorithm: str | Collective, kind: str) -> Callable[[Phase], KnownCost]:
    name = algorithm_name(algorithm)
    wanted, protocol = (_NCCL.get(name), None) if "(" not in name else forced(find(name, kind))
    if name.partition("(")[0] not in _NCCL or (wanted is None and "(" in name):
        raise ConfigError(
            f"{where}: NCCL has no algorithm {name!r}; use algorithm = 'ring', 'double_binary_tree', or 'auto' to let "
            "NCCL's tuner choose"
        )
    cluster = context.cluster
    note = f"cost = 'nccl': collective times are the estimates of NCCL's tuner{_undisturbed(context)}"
    if note not in context.notes:
        context.notes.append(note)
    seen: set[tuple[str, str]] = set()

    def cost_of(phase: Phase) -> KnownCost:
        nbytes, seconds, moving, n_messages, load = phase.nbytes, 0.0, 0.0, 0, Load(cluster)
        beside = _side_by_side(context, phase)
        for group in phase.groups:
            if len(group) == 1:
                continue
            bus = bus_bandwidth(cluster, len(group), group)[0] / beside
            site = functools.partial(nccl_time, cluster, nbytes, kind=kind, nodes=group)
            choice = site(algorithm=wanted, protocol=protocol, bandwidth=bus if beside > 1 else None)
            chosen = functools.partial(site, algorithm=choice.algorithm, protocol=choice.protocol)
            bytes_only = 2.0 * (chosen(bandwidth=bus).seconds - chosen(bandwidth=2.0 * bus).seconds)
            slower = bytes_only * (_slowest(cluster, group) - 1.0)  # NCCL reads nominal rates
            moving = max(moving, bytes_only + slower)
            if (choice.algorithm, choice.protocol) not in seen:
                seen.add((choice.algorithm, choice.protocol))
                context.notes.append(f"nccl: {choice.algorithm} with {choice.protocol} for {si(nbytes, 'B', 3)}")
            name_of_plan = _SCHEDULE.get(choice.algorithm, f"nccl({choice.algorithm})")
            plan = _schedule(context, name_of_plan, group, nbytes, kind)
            if choice.algorithm in _SCHEDULE:
                spread(load, group, nbytes, choice.algorithm, kind)
            else:
                by_schedule(load, plan, group, nbytes)
            n_messages += plan.n_messages
            seconds = max(seconds, choice.seconds + slower)
        return _known_cost(context, "cost = 'nccl'", nbytes, seconds, load.charge(), n_messages, moving)

    return cost_of


def _slowest(cluster: Cluster, group: Sequence[int]) -> float:
    """Return the largest ratio of nominal to actual capacity on the links of a ring over the group."""
    at = np.array(group, dtype=np.int64)
    used = cluster.link_channel[cluster.routes(at, np.roll(at, -1)).links]
    return float((cluster.nominal_capacity[used] / cluster.channel_capacity[used]).max(initial=0.0)) or 1.0


def _side_by_side(context: RunContext, phase: Phase) -> int:
    """Return the largest number of a phase's groups that share the network links of a machine."""
    shared: Counter[int] = Counter()
    for group in phase.groups:
        machines = set(context.hosts(list(group)).tolist())
        if len(machines) > 1:
            shared.update(machines)
    return max(shared.values(), default=1)
