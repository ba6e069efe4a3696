"""Lower bounds on the time of a plan and of the steps of a program. They hold for any network and algorithm.

:func:`critical_path` and :func:`cut` bound a plan: its longest chain of work, and the bytes that must cross the
narrowest interface. :func:`of_steps` bounds the time that a run measures: from the end t0 of the step before some steps
to the end t1 of the last one. At t0, some task u ends that has no successors in its step, so its successors start after
t0.

**Chains.** t1 - t0 is at least the longest chain from the end of u to an update, minimised over all candidates u. A
chain continues from a member of a collective to all members that need its bytes, which must leave one device (and
machine) and enter another, for any algorithm. A message takes the time that the narrowest channel of its route needs.
Identical copies (workers, replicas of a pipeline) have the same chains, so it is enough to consider one of them:
whichever copy enters a collective last, some copy gets its bytes only after they have crossed. Replicas of pipelines
are assumed to enter their sums together.

**Bytes.** Take a collective that comes after every candidate u, through any of its members. When it ends anywhere, all
members have entered it, so its successors start after t0 plus the longest chain from u to it. The bytes that the
updates wait for must then cross the interfaces, see :func:`cut`. Of the collective itself, only the last member's
contribution counts. If the bytes are unknown, only the bound on chains of work remains.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.errors import ConfigError
from ddlsim.network.chains import NEVER, longest, order_events, reach
from ddlsim.network.executor import distinct
from ddlsim.plan import plan as ps
from ddlsim.plan.check import check_exchanges
from ddlsim.plan.order import Order
from ddlsim.plan.plan import KINDS, Bools, Floats, Ints, Plan
from ddlsim.plan.rows import csr

if TYPE_CHECKING:
    from ddlsim.plan.program import StepProgram


class Cut(NamedTuple):
    """A lower bound on the running time of a plan, derived from the bytes that must cross one boundary in the cluster.

    seconds    the lower bound in seconds
    interface  description of what the boundary encloses: a device, a machine, or (for a bound on total traffic) all
               devices or all machines
    out, into  bytes that must leave and enter the enclosed part; for a bound on total traffic, both are the total over
               all devices or machines
    """

    seconds: float
    interface: str
    out: float
    into: float


def critical_path(plan: Plan, min_seconds: float | Floats = 0.0) -> float:
    """Return the length of a plan's critical path in seconds, which is a lower bound on its makespan.

    The critical path is the longest chain of tasks in which each task must wait for the previous one, because it
    depends on that task or because both share a lane.

    plan         plan to analyse
    min_seconds  assumed duration in seconds of messages and collectives: a number for all of them, or an array of shape
                 (n,) with one value per task

    Raises ConfigError if the plan has a dependency cycle.
    """
    check_exchanges(plan)
    order = Order(plan)
    beside = np.broadcast_to(np.asarray(min_seconds, dtype=np.float64), len(plan))
    if not bool((beside >= 0.0).all()):
        lowest = float(beside.min())
        raise ConfigError(f"critical_path: min_seconds = {lowest:g} s: must not be negative")
    seconds = np.where(plan.kind >= ps.SEND, beside, plan.seconds)
    per_event = np.zeros(order.n_events)
    np.maximum.at(per_event, order.event, seconds)
    return max(order.ends(per_event.tolist()), default=0.0)


def peak_memory(plan: Plan, rows: Bools | None = None) -> Floats:
    """Return the peak memory held by the tasks of each rank, in bytes, shape (n_ranks,).

    plan  plan to analyse
    rows  (n,) mask of the tasks to count; None: all tasks

    The peak of a rank is the sum of the peaks of its lanes. On lanes with a queue, memory is assumed never to be freed,
    because the order of their tasks is unknown. The result is exact if only one lane of a rank allocates and frees
    memory; otherwise, it is an upper bound.
    """
    counted = np.arange(len(plan)) if rows is None else np.flatnonzero(rows)
    order = counted[np.argsort(plan.lane[counted], kind="stable")]
    taken = np.maximum(plan.holds[order], 0.0)
    holds = np.where(plan.queue[order] >= 0, taken, plan.holds[order])
    after = np.cumsum(holds)
    lane = plan.lane[order]
    sizes = np.bincount(lane, minlength=len(plan.lanes))
    start = np.concatenate([[0.0], after])[np.cumsum(sizes) - sizes]
    level = after - holds + taken - np.repeat(start, sizes)
    worst = np.zeros(len(plan.lanes))
    np.maximum.at(worst, lane, level)
    peak = np.zeros(plan.n_ranks)
    np.add.at(peak, plan.lane_rank, worst)
    return peak


def nodes_of(plan: Plan, cluster: Cluster, nodes: Sequence[int] | None) -> Ints:
    """Return the node of every rank, (n_ranks,): `nodes`, by default the cluster's first workers."""
    if nodes is None and plan.servers:
        raise ConfigError("nodes = None: the plan has servers, so nodes must list the node of every rank")
    if nodes is None:
        if plan.n_ranks > len(cluster.workers):
            raise ConfigError(
                f"nodes = None: the plan has {plan.n_ranks} ranks, but cluster {cluster.name!r} has "
                f"{len(cluster.workers)} devices; use a larger cluster, or list the node of every rank"
            )
        return cluster.workers[: plan.n_ranks]
    places = np.array(nodes, dtype=np.int64)
    if places.shape != (plan.n_ranks,) or not ((places >= 0) & (places < cluster.n_nodes)).all():
        raise ConfigError(f"nodes: must list {plan.n_ranks} nodes of cluster {cluster.name!r}, one per rank")
    return places


# ---------------------------------------------------------------- bytes that cross interfaces


class Copies(NamedTuple):
    """The copies that a plan of one copy represents.

    ranks      (n_copies, n_places) the rank at each place of each copy
    instances  per group of the plan: the groups of ranks that it represents
    """

    ranks: Ints
    instances: Sequence[Sequence[tuple[int, ...]]]


def cut(plan: Plan, cluster: Cluster, nodes: Sequence[int] | None = None) -> Cut:
    """Return a lower bound on a plan's running time, from the bytes that must enter or leave devices and machines.

    The bound is the time that the busiest boundary, of a device or of a machine, needs to carry the bytes that must
    cross it. It holds for any collective algorithm.

    plan     plan to analyse
    cluster  cluster on which the plan would run
    nodes    (n_ranks,) index of each rank's node in the cluster; None: the cluster's first workers

    A message crosses every boundary between its sender and its receiver. For collectives,
    :func:`ddlsim.plan.bounds.least_crossing` gives the minimum number of bytes: in an all-reduce of m bytes over k
    machines, at least m bytes enter and leave each machine, and at least ``2 * (k - 1) * m`` bytes enter machines in
    total. Pushes to servers may be summed inside machines, but not between them. Bytes covered by the burst of a token
    bucket (docs/models/tcp.md) take no time.
    """
    itself, every = Copies(np.arange(plan.n_ranks)[None, :], [[group] for group in plan.groups]), np.ones(len(plan))
    return _narrowest(plan, itself, interfaces(cluster), nodes_of(plan, cluster, nodes), every, None, None)


def _narrowest(
    plan: Plan,
    copies: Copies,
    levels: Sequence[Interfaces],
    nodes: Ints,
    times: Floats,
    begun: Ints | None,
    inside: Bools | None,
) -> Cut:
    """Return the cut of the rows of a plan with rank r at ``nodes[r]``.

    times   (n,) how often each row counts
    begun   rows of collectives that all members but one may have entered before: only that one's contribution counts
    inside  (n_ranks,) ranks whose bytes count, None: all; of other collectives, only their contributions
    """
    cuts = (_slowest_place(plan, copies, level, level.place[nodes], times, begun, inside) for level in levels)
    return max(Cut(0.0, "none", 0.0, 0.0), *cuts, key=lambda candidate: candidate.seconds)


def _slowest_place(
    plan: Plan, copies: Copies, level: Interfaces, place: Ints, times: Floats, begun: Ints | None, inside: Bools | None
) -> Cut:
    """Return the cut of the slowest place; rank r is in ``place[r]``."""
    n = len(level.out.rate)
    out, into = np.zeros(n), np.zeros(n)
    sends = np.flatnonzero((plan.kind == ps.SEND) & (times > 0.0))
    from_rank, to_rank = copies.ranks[:, plan.rank[sends]], copies.ranks[:, plan.peer[sends]]
    counts = np.ones(from_rank.shape, dtype=np.bool_) if inside is None else inside[from_rank] & inside[to_rank]
    src, dst = place[from_rank], place[to_rank]
    nbytes = np.broadcast_to(plan.nbytes[sends] * times[sends], src.shape)
    apart = (src != dst) & counts
    out += np.bincount(src[apart], weights=nbytes[apart], minlength=n)
    into += np.bincount(dst[apart], weights=nbytes[apart], minlength=n)
    together = float(nbytes[apart].sum())  # entering any place
    for kind, number, total in _totals(plan, times):
        for group in copies.instances[number]:
            members = np.array(group, dtype=np.int64)
            crossing = _crossing(plan, level, kind, place[members], members)
            if inside is None or inside[members].all():
                out[crossing.place] += crossing.out * total
                into[crossing.place] += crossing.into * total
                together += crossing.together * total
            elif kind == ps.ALL_REDUCE:
                is_inside = np.isin(crossing.place, place[members[inside[members]]])
                out[crossing.place[is_inside]] += crossing.out[is_inside] * total
    once = np.zeros(len(plan))
    once[[] if begun is None else begun] = 1.0
    for kind, number, total in _totals(plan, once):
        for group in copies.instances[number] if kind in (ps.ALL_REDUCE, ps.PUSH_PULL) else ():
            members = np.array(group, dtype=np.int64)
            if inside is None or inside[members].all():  # half of the bytes form the sum, half distribute it
                together += 0.5 * _crossing(plan, level, kind, place[members], members).together * total
    directions = ((out, level.out), (into, level.into), (out + into, level.both))
    seconds = np.maximum.reduce([_seconds(carried, *width) for carried, width in directions])
    used = np.unique(place if inside is None else place[inside])
    slowest = int(used[np.argmax(seconds[used])]) if len(used) else -1
    together_seconds = float(_seconds(np.array(together), *map(np.array, level.together(used))))
    if slowest >= 0 and seconds[slowest] >= together_seconds:
        limit = float(seconds[slowest])
        return Cut(limit, level.name(slowest) if limit else "none", float(out[slowest]), float(into[slowest]))
    return Cut(together_seconds, f"all {len(used)} {level.what}s together", together, together)


def _totals(plan: Plan, times: Floats) -> list[tuple[int, int, float]]:
    """Return (kind, group, total bytes) of the collectives, summed over those with the same kind and group."""
    rows = np.flatnonzero((plan.kind >= ps.ALL_REDUCE) & (times > 0.0))
    rows = rows[np.unique(plan.key[rows], return_index=True)[1]]
    alike, which = np.unique(np.stack([plan.kind[rows], plan.peer[rows]]), axis=1, return_inverse=True)
    totals = np.bincount(which.reshape(-1), weights=plan.nbytes[rows] * times[rows], minlength=alike.shape[1])
    return [(kind, number, total) for (kind, number), total in zip(alike.T.tolist(), totals.tolist(), strict=True)]


def _crossing(plan: Plan, level: Interfaces, kind: int, place: Ints, members: Ints) -> Crossing:
    return least_crossing(KINDS[kind], place, np.isin(members, plan.servers), added_up=level.what != "machine")


def _seconds(nbytes: Floats, rate: Floats, burst: Floats) -> Floats:
    """Return a lower bound on the time in which channels carry `nbytes`, in s; 0 without channels."""
    left = np.where(rate > 0.0, np.maximum(nbytes - burst, 0.0), 0.0)
    return left / np.where(rate > 0.0, rate, 1.0)


@dataclass(frozen=True, eq=False)
class Carriers:
    """The network that carries the bytes of a program: the cluster, and the node of every rank, (n_ranks,).

    rerouted  whether link failures may change the routes of messages
    together  whether copies enter their collectives together, because they act identically
    """

    cluster: Cluster
    nodes: Ints
    rerouted: bool = False
    together: bool = False

    @property
    def levels(self) -> tuple[Interfaces, Interfaces]:
        """The interfaces of devices and of machines."""
        return interfaces(self.cluster)

    def messages(self, source: Ints, target: Ints) -> Floats:
        """Return lower bounds on the s per byte of messages between ranks, (n,), from the narrowest channels."""
        a, b = self.nodes[source], self.nodes[target]
        if not self.rerouted:
            pairs, which = np.unique(a * self.cluster.n_nodes + b, return_inverse=True)
            per_byte: Floats = _of_pairs(self.cluster, pairs.tobytes())[which.reshape(-1)]
            return per_byte
        seconds = np.zeros(len(a))
        for level in self.levels:
            src, dst = level.place[a], level.place[b]
            slower = np.minimum(known_rate(level.out, src), known_rate(level.into, dst))
            seconds = np.maximum(seconds, np.where(src != dst, 1.0 / slower, 0.0))
        return seconds

    def members(self, kind: int, ranks: Ints, servers: Sequence[int]) -> list[tuple[Ints, Floats, Floats]]:
        """Return, for devices and for machines, the place of each member of a collective, and lower bounds on the s per
        byte of the buffer for its contribution to leave its place, and for its result to enter it."""
        share = 1.0 if kind in (ps.ALL_REDUCE, ps.PUSH_PULL) else 1.0 / len(ranks)
        crossing = []
        for level in self.levels:
            place = level.place[self.nodes[ranks]]
            part: float | Floats = share
            label = place
            if kind == ps.PUSH_PULL:  # through servers, even from a worker to itself
                part = 1.0 - (level.place[self.nodes[list(servers)]][None, :] == place[:, None]).mean(axis=1)
                label = np.full(len(place), -1, dtype=np.int64)
            crossing.append((label, part / known_rate(level.out, place), part / known_rate(level.into, place)))
        return crossing

    def late_member(self, kind: int, ranks: tuple[int, ...]) -> float:
        """Return a lower bound on the s per byte of the buffer for which a collective continues, for some member, after
        the last member has entered it."""
        return _after_last(self.cluster, kind, tuple(self.nodes[list(ranks)].tolist()))

    def collective(self, kind: int, ranks: tuple[int, ...]) -> float:
        """Return a lower bound on the s per byte of the buffer of a collective that all members enter together."""
        return _collective(self.cluster, KINDS[kind], tuple(self.nodes[list(ranks)].tolist()))


@functools.lru_cache(maxsize=256)
def _of_pairs(cluster: Cluster, pairs: bytes) -> Floats:
    source, target = np.divmod(np.frombuffer(pairs, dtype=np.int64), cluster.n_nodes)
    routes = cluster.split_routes(source, target)
    seconds = np.zeros(len(source))
    np.maximum.at(seconds, routes.of, _per_byte(cluster)[cluster.link_channel[routes.links]] * routes.share)
    return seconds


@functools.lru_cache(maxsize=4096)
def _after_last(cluster: Cluster, kind: int, nodes: tuple[int, ...]) -> float:
    n, at = len(nodes), np.array(nodes, dtype=np.int64)
    late = np.zeros(n)
    for level in interfaces(cluster):
        place = level.place[at]
        places, which, count = np.unique(place, return_inverse=True, return_counts=True)
        if len(places) == 1:
            continue
        which = which.reshape(-1)
        same = {ps.ALL_REDUCE: (1.0, 1.0), ps.ALL_GATHER: (1.0 / n, 1.0 / n)}
        gives, gets = (1.0 - count[which] / n, count / n) if kind == ps.REDUCE_SCATTER else same.get(kind, (0.0, 0.0))
        enters = gets / known_rate(level.into, places)
        second, first = np.sort(enters)[-2:]
        others = np.where(np.arange(len(places)) == np.argmax(enters), second, first)[which]
        late = np.maximum(late, np.maximum(gives / known_rate(level.out, place), others))
    return float(late.min())


#: larger collectives are not bounded, because they have too many routes
MOST_MEMBERS = 64


@functools.lru_cache(maxsize=4096)
def _collective(cluster: Cluster, kind: str, nodes: tuple[int, ...]) -> float:
    """Bound any algorithm: bytes from a member, or a machine, to others use the channels that all routes to them
    share."""
    members = np.array(nodes, dtype=np.int64)
    n = len(members)
    if n > MOST_MEMBERS:
        return 0.0
    host = np.where(cluster.host_of[members] >= 0, cluster.host_of[members], len(cluster.host_names) + members)
    slowest = 0.0
    for place in (np.arange(n), np.unique(host, return_inverse=True)[1].reshape(-1)):
        a, b = np.nonzero(place[:, None] != place[None, :])
        if not len(a):
            continue
        crossing = least_crossing(kind, place, np.zeros(n, dtype=np.bool_))
        routes = cluster.split_routes(members[a], members[b])
        channel = cluster.link_channel[routes.links]
        out, into = (_shared(cluster, place[ranks], routes.of, channel, routes.share) for ranks in (a, b))
        rates = np.divide(1.0, into, out=np.full(len(into), np.inf), where=into > 0.0)
        together = crossing.together / float(rates.sum())
        slowest = max(slowest, float((crossing.out * out).max()), float((crossing.into * into).max()), together)
    return slowest


def _shared(cluster: Cluster, place: Ints, route: Ints, channel: Ints, share: Floats) -> Floats:
    """Return the s per byte of the slowest channel that all routes of each place share, (n_places,).

    place    (n_routes,) place of each route
    route    route of each (route, channel) pair; `channel`: its channel; `share`: of a message's bytes on the channel
    """
    pairs, which, count = np.unique(
        place[route] * cluster.n_channels + channel, return_inverse=True, return_counts=True
    )
    smallest = np.ones(len(pairs))
    np.minimum.at(smallest, which.reshape(-1), share)
    smallest[count < np.bincount(place)[pairs // cluster.n_channels]] = 0.0  # not on all routes
    slowest = np.zeros(int(place.max()) + 1)
    np.maximum.at(slowest, pairs // cluster.n_channels, smallest * _per_byte(cluster)[pairs % cluster.n_channels])
    return slowest


@functools.lru_cache(maxsize=8)
def _per_byte(cluster: Cluster) -> Floats:
    """Return the s per byte of each channel, 0 for those with a token bucket."""
    seconds: Floats = 1.0 / cluster.channel_capacity
    if cluster.details is not None:
        free = np.bincount(cluster.link_channel, weights=cluster.details.burst, minlength=cluster.n_channels)
        seconds = np.where(free > 0.0, 0.0, seconds)
    return seconds


# ---------------------------------------------------------------- steps


class Bound(NamedTuple):
    """Lower bounds on the seconds of some steps, from chains and from bytes; 0 if there is none."""

    chains: float
    crossing: float


class _Step(NamedTuple):
    """The tasks of one step of a template, numbered within it.

    rows                of the template, (n,)
    order               events, topologically sorted
    first, members      CSR: the tasks of each event
    offsets, following  CSR: the successors of each task in the step
    before              (n_steps_back, tasks, tasks of that earlier step that they depend on)
    last                tasks of workers without successors of workers in the step
    """

    rows: Ints
    order: Ints
    first: Ints
    members: Ints
    offsets: Ints
    following: Ints
    before: tuple[tuple[int, Ints, Ints], ...]
    last: Ints


class StepGraph:
    """The precedence graph of a template's steps; further steps equal the last one."""

    def __init__(self, template: Plan) -> None:
        check_exchanges(template)
        self.template, self._order = template, Order(template)
        self._before, self._later = self._order.ends_after
        self._rows = np.split(
            np.argsort(template.step, kind="stable"),
            np.cumsum(np.bincount(template.step, minlength=template.n_steps))[:-1],
        )
        self._place = np.empty(len(template), dtype=np.int64)
        for rows in self._rows:
            self._place[rows] = np.arange(len(rows))
        self._steps: dict[int, _Step] = {}
        self._inside: dict[tuple[bytes, ...], _Step] = {}
        self._works = np.ones(template.n_ranks, dtype=np.bool_)
        self._works[list(template.servers)] = False

    def step(self, number: int) -> _Step:
        """Return the graph of a step. Raises ConfigError for a dependency cycle."""
        number = min(number, self.template.n_steps - 1)
        if number not in self._steps:
            self._steps[number] = self._new(number)
        return self._steps[number]

    def _new(self, number: int) -> _Step:
        template, rows, place = self.template, self._rows[number], self._place
        in_step = template.step[self._later] == number
        later, before = self._later[in_step], self._before[in_step]
        back = number - template.step[before]
        if (back < 0).any():
            raise ConfigError("plan: a task depends on a task of a later step")
        earlier = tuple(
            (steps, place[later[back == steps]], place[before[back == steps]])
            for steps in np.unique(back[back > 0]).tolist()
        )
        first, second = place[before[back == 0]], place[later[back == 0]]
        event = distinct(self._order.event[rows], self._order.n_events)[1]
        works = self._works[template.rank[rows]]
        inside = tuple(column.tobytes() for column in (event, first, second, works))
        if inside not in self._inside:  # most steps are alike
            n = int(event.max(initial=-1)) + 1
            order, missing = np.empty(n, dtype=np.int64), np.bincount(event[second], minlength=n)
            firsts, by_event = csr(event, np.arange(len(rows)), n)
            offsets, following = csr(first, second, len(rows))
            if order_events(event, firsts, by_event, offsets, following, missing, order) < n:
                _ = self._order.events  # raises, naming the tasks
            followed = np.zeros(len(rows), dtype=np.bool_)
            followed[first[works[first] & works[second]]] = True
            last = np.flatnonzero(works & ~followed)
            self._inside[inside] = _Step(rows, order, firsts, by_event, offsets, following, earlier, last)
        return self._inside[inside]._replace(rows=rows, before=earlier)

    def chains(
        self, begin: int, end: int, work: Floats, crossing: tuple[Ints, Floats, Floats], ends: Bools
    ) -> tuple[Floats, list[tuple[Floats, Floats]]]:
        """Return the longest chains to one of `ends` in the steps `begin` to `end` - 1, in s: from the end of each task
        of the step before, and from the start and the end of each task of these steps; -inf if there is none.

        work, crossing, ends  arguments of :func:`ddlsim.network.chains.longest`, for all rows of the template
        """
        chain_times: list[tuple[Floats, Floats]] = []
        waiting: dict[int, Floats] = {}
        for number in range(end - 1, begin - 1, -1):
            step = self.step(number)
            start, after = np.empty(len(step.rows)), waiting.pop(number, np.full(len(step.rows), NEVER))
            places = [np.ascontiguousarray(array[:, step.rows]) for array in crossing] if len(crossing[0]) else crossing
            graph = step.order, step.first, step.members, step.offsets, step.following
            longest(*graph, work[step.rows], ends[step.rows], *places, after, start)
            chain_times.append((start, after))
            for back, tasks, earlier in step.before:
                n = len(self.step(number - back).rows)
                np.maximum.at(waiting.setdefault(number - back, np.full(n, NEVER)), earlier, start[tasks])
        before = np.zeros(0) if begin == 0 else np.full(len(self.step(begin - 1).rows), NEVER)
        return waiting.get(begin - 1, before), chain_times[::-1]

    def later_than(self, begin: int, tasks: Ints, end: int) -> list[Bools]:
        """Return for each of the steps `begin` to `end` - 1 which tasks depend on `tasks` of the first one."""
        reached: list[Bools] = []
        for number in range(begin, end):
            step = self.step(number)
            mark = np.zeros(len(step.rows), dtype=np.bool_)
            if number == begin:
                mark[tasks] = True
            for back, rows, earlier in step.before:
                if number - back >= begin:
                    mark[rows[reached[number - back - begin][earlier]]] = True
            reach(step.order, step.first, step.members, step.offsets, step.following, mark)
            reached.append(mark)
        reached[0][tasks] = False
        return reached

    @functools.cached_property
    def sends(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Rows of messages; distinct senders and their receivers; index of each message among these pairs."""
        plan = self.template
        rows = plan.rows(ps.SEND)
        pairs, which = np.unique(plan.rank[rows] * plan.n_ranks + plan.peer[rows], return_inverse=True)
        return rows, *np.divmod(pairs, plan.n_ranks), which.reshape(-1)

    @functools.cached_property
    def collectives(self) -> tuple[Ints, list[tuple[int, int]], Ints]:
        """Rows of collectives between all members; distinct (kind, group); index of each row among these."""
        plan = self.template
        rows = plan.rows(*TO_ALL)
        code, which = np.unique(plan.kind[rows] * len(plan.groups) + plan.peer[rows], return_inverse=True)
        return rows, [divmod(number, len(plan.groups)) for number in code.tolist()], which.reshape(-1)


#: collectives in which every member's data affects every other member
TO_ALL = (ps.ALL_REDUCE, ps.REDUCE_SCATTER, ps.ALL_GATHER, ps.ALL_TO_ALL, ps.PUSH_PULL)


def of_steps(
    program: StepProgram, begin: int, end: int, carriers: Carriers | None = None, seconds: Floats | None = None
) -> Bound:
    """Return lower bounds on the time of the steps `begin` to `end` - 1 of a program; see the module.

    carriers  None: messages and collectives may take no time
    seconds   (n,) durations of the tasks, instead of those in the program's template (jitter)

    Raises ConfigError for a program with a dependency cycle.
    """
    graph, copies = program.graph, program.copies
    work, crossing = _durations(program, copies, carriers, seconds)
    before, chains = graph.chains(begin, end, work, crossing, program.template.kind == ps.UPDATE)
    if begin == 0:
        return Bound(max(0.0, *(float(start.max(initial=0.0)) for start, _ in chains)), 0.0)
    last = graph.step(begin - 1).last
    if not len(last):
        return Bound(0.0, 0.0)
    longest_chain = max(float(before[last].min()), 0.0)
    if carriers is None or copies.ranks.shape[0] > 1 < copies.ranks.shape[1]:
        return Bound(longest_chain, 0.0)
    needed = [after > NEVER for _, after in chains]
    return Bound(longest_chain, _bytes(program, copies, begin, end, carriers, work, crossing, needed))


def _durations(
    program: StepProgram, copies: Copies, carriers: Carriers | None, seconds: Floats | None
) -> tuple[Floats, tuple[Ints, Floats, Floats]]:
    """Return lower bounds on the seconds of tasks, (n,), and the crossings of collectives with several tasks, as
    arguments of :func:`ddlsim.network.chains.longest`."""
    plan, ranks = program.template, copies.ranks
    work = (plan.seconds if seconds is None else seconds).copy()
    none = np.zeros((0, len(plan)))
    if carriers is None:
        return work, (none.astype(np.int64), none, none)
    sends, source, target, which = program.graph.sends
    if len(sends):
        of_copies = carriers.messages(ranks[:, source].ravel(), ranks[:, target].ravel())
        per_byte = of_copies.reshape(len(ranks), -1).min(axis=0)
        work[sends] = np.maximum(work[sends], plan.nbytes[sends] * per_byte[which])
    rows, alike, which = program.graph.collectives
    if len(ranks) > 1:
        per_byte = np.zeros(len(alike))
        lockstep = carriers.together or (ranks.shape[1] > 1 and not plan.delays)
        takes = carriers.collective if lockstep else carriers.late_member
        for i, (kind, group) in enumerate(alike):
            if len(plan.groups[group]) == 1:
                per_byte[i] = min(takes(kind, ranks_of) for ranks_of in copies.instances[group])
        work[rows] += plan.nbytes[rows] * per_byte[which]
        return work, (none.astype(np.int64), none, none)
    place, out, into = np.full((2, len(plan)), -2), np.zeros((2, len(plan))), np.zeros((2, len(plan)))
    for i, (kind, group) in enumerate(alike):
        in_group, members = rows[which == i], np.array(copies.instances[group][0], dtype=np.int64)
        at = np.searchsorted(np.sort(members), ranks[0, plan.rank[in_group]])
        at = np.argsort(members)[at]
        for level, crossing in enumerate(carriers.members(kind, members, plan.servers)):
            place[level, in_group] = crossing[0][at]
            out[level, in_group], into[level, in_group] = (plan.nbytes[in_group] * share[at] for share in crossing[1:])
    return work, (place, out, into)


def _bytes(
    program: StepProgram, copies: Copies, begin: int, end: int, carriers: Carriers, work: Floats,
    crossing: tuple[Ints, Floats, Floats], needed: Sequence[Bools],
) -> float:  # fmt: skip
    """Return a lower bound in s: the chain to a collective that comes after all tasks that may end the previous step,
    plus the time of the bytes that come after it."""
    plan, graph = program.template, program.graph
    first = _first_joint(graph, copies, begin, end)
    if first is None:
        return 0.0
    number, joint = first
    step = graph.step(number)
    ends = np.zeros(len(plan), dtype=np.bool_)
    ends[step.rows[joint]] = True
    work = np.where(ends, 0.0, work)
    before, _ = graph.chains(begin, number + 1, work, crossing, ends)
    until = float(before[graph.step(begin - 1).last].min())
    if until == NEVER:
        return 0.0
    times = np.zeros(len(plan))
    serves = np.isin(plan.rank, plan.servers)
    members = np.array([len(set(group) - set(plan.servers)) for group in plan.groups])
    for step_number, later in enumerate(graph.later_than(number, joint, end), number):
        rows = graph.step(step_number).rows[later & needed[step_number - begin]]
        workers = rows[(plan.kind[rows] >= ps.ALL_REDUCE) & ~serves[rows]]
        entering = np.bincount(plan.key[workers], minlength=len(plan))
        # collectives that no rank has entered yet
        times[workers[entering[plan.key[workers]] == members[plan.peer[workers]]]] += 1.0
        times[rows[plan.kind[rows] == ps.SEND]] += 1.0
    begun = step.rows[joint]
    groups = copies.instances[int(plan.peer[begun[0]])]
    inside: list[Bools | None] = [None]
    if len(copies.ranks) > 1 and len(groups) > 1:
        inside = [np.isin(np.arange(len(carriers.nodes)), group) for group in groups]
    nodes, levels = carriers.nodes, carriers.levels
    return max(until, 0.0) + min(
        _narrowest(plan, copies, levels, nodes, times, begun, ranks).seconds for ranks in inside
    )


def _first_joint(graph: StepGraph, copies: Copies, begin: int, end: int) -> tuple[int, Ints] | None:
    """Return the first collective of several ranks in some steps: its step, and its tasks there."""
    plan = graph.template
    for number in range(begin, end):
        step = graph.step(number)
        size, row = np.diff(step.first)[step.order], step.rows[step.members[step.first[step.order]]]
        if len(copies.ranks) > 1:
            groups = np.array([len(instances[0]) for instances in copies.instances] or [0])
            grouped = plan.kind[row] >= ps.ALL_REDUCE
            size = np.where(grouped, groups[np.where(grouped, plan.peer[row], 0)], size)
        joint = np.flatnonzero(size > 1)
        if len(joint):
            event = int(step.order[joint[0]])
            return number, step.members[step.first[event] : step.first[event + 1]]
    return None


# ---------------------------------------------------------------- interfaces


class Crossing(NamedTuple):
    """Number of buffers that must leave and enter each of some places, (k,) each, and enter all of them in total."""

    place: Ints
    out: Floats
    into: Floats
    together: float


def least_crossing(kind: str, members: Ints, is_server: Bools, *, added_up: bool = True) -> Crossing:
    """Return lower bounds on the data of a collective that crosses interfaces, in units of its buffer.

    members    (n,) the place of each member, in the group's order
    is_server  (n,) of the members of a push_pull, whose servers come last
    added_up   whether pushes of several places may be summed on their way, as those of a machine's devices are;
               otherwise every place with workers pushes and pulls separately

    Sums (all-reduce, reduce-scatter, reduce, push) can first be computed inside a place, and data that all members need
    (all-reduce, all-gather, broadcast, pull) enters a place once: a sum over k places takes k - 1 receptions, and so
    does a distribution to k places (Patarasuk and Yuan 2009, JPDC 69(2), theorem 1). Data of a single member
    (all-gather, gather, scatter, all-to-all) crosses from its place to the places that need it.
    """
    place, which, count = np.unique(members, return_inverse=True, return_counts=True)
    which, k = which.reshape(-1), len(place)
    none = np.zeros(k)
    if k == 1:
        return Crossing(place, none, none, 0.0)
    every, share = np.ones(k), count / len(members)
    root = (place == members[0]).astype(np.float64)
    if kind == "all_reduce":
        return Crossing(place, every, every, 2.0 * (k - 1))
    if kind == "all_to_all":
        crossing = count * (1.0 - share)
        return Crossing(place, crossing, crossing, float(crossing.sum()))
    one_to_all = {  # data of one place for all others: what leaves and enters places, and enters all together
        "all_gather": (share, 1.0 - share, k - 1.0),
        "broadcast": (root, 1.0 - root, k - 1.0),
        "scatter": (root * (1.0 - share), (1.0 - root) * share, float((root * (1.0 - share)).sum())),
    }
    if kind in one_to_all:
        return Crossing(place, *one_to_all[kind])
    inverse = {"reduce_scatter": "all_gather", "reduce": "broadcast", "gather": "scatter"}
    if kind in inverse:
        into, out, together = one_to_all[inverse[kind]]
        return Crossing(place, out, into, together)
    shard = np.bincount(which[is_server], minlength=k) / is_server.sum()
    works = np.bincount(which[~is_server], minlength=k) > 0
    elsewhere = works.sum() - works  # other places with workers
    answers = elsewhere > 0 if added_up else elsewhere
    crossing = works * (1.0 - shard) + shard * answers  # out: pushes to others and answers to others; into: likewise
    return Crossing(place, crossing, crossing, 2.0 * float((shard * elsewhere).sum()))


class Width(NamedTuple):
    """Total bandwidth of channels, bytes/s, and bytes that their token buckets let through; (n_places,) each."""

    rate: Floats
    burst: Floats


@dataclass(frozen=True, eq=False)
class Interfaces:
    """The channels between places. `out` and `into` contain shared half-duplex channels as well; `both` contains all.

    what   "device" or "machine"
    place  (n_nodes,) place of every node
    """

    what: str
    place: Ints
    out: Width
    into: Width
    both: Width
    cluster: Cluster

    def together(self, places: Ints) -> tuple[float, float]:
        """Return the bandwidth (bytes/s) and the burst of all channels that enter some places."""
        cluster, place = self.cluster, self.place
        enters = np.isin(place[cluster.link_dst], places) & (place[cluster.link_src] != place[cluster.link_dst])
        width = _width(cluster, np.zeros(int(enters.sum()), dtype=np.int64), enters, 1)
        return float(width.rate[0]), float(width.burst[0])

    def name(self, place: int) -> str:
        """Return a description of a place."""
        nodes = np.flatnonzero(self.place == place)
        host = self.cluster.host_of[nodes[0]]
        is_machine = self.what == "machine" and len(nodes) > 1 and host >= 0
        return f"{self.what} {self.cluster.host_names[host] if is_machine else self.cluster.node_names[nodes[0]]!r}"


def known_rate(width: Width, place: Ints) -> Floats:
    """Return the bandwidth of places in bytes/s, inf for those without a channel or with a burst."""
    is_steady: Bools = (width.rate[place] > 0.0) & (width.burst[place] == 0.0)
    return np.where(is_steady, width.rate[place], np.inf)


@functools.lru_cache(maxsize=8)
def interfaces(cluster: Cluster) -> tuple[Interfaces, Interfaces]:
    """Return the interfaces of a cluster's devices and of its machines; a node outside a machine counts as one."""
    nodes = np.arange(cluster.n_nodes)
    machines = np.where(cluster.host_of >= 0, cluster.host_of, len(cluster.host_names) + nodes)
    return _interfaces(cluster, nodes, "device"), _interfaces(cluster, machines, "machine")


def _interfaces(cluster: Cluster, place: Ints, what: str) -> Interfaces:
    n = int(place.max(initial=-1)) + 1
    source, target = place[cluster.link_src], place[cluster.link_dst]
    apart = source != target
    ends = np.concatenate([source[apart], target[apart]])
    twice = np.concatenate([np.flatnonzero(apart)] * 2)
    pairs = ((source[apart], apart), (target[apart], apart), (ends, twice))
    out, into, both = (_width(cluster, places, links, n) for places, links in pairs)
    return Interfaces(what, place, out, into, both, cluster)


def _width(cluster: Cluster, place: Ints, links: Bools | Ints, n: int) -> Width:
    """Return the widths of `n` places; link ``links[i]`` belongs to ``place[i]``."""
    pairs = np.unique(np.stack([place, cluster.link_channel[links]]), axis=1)
    rate: Floats = np.bincount(pairs[0], weights=cluster.channel_capacity[pairs[1]], minlength=n).astype(np.float64)
    burst: Floats = np.zeros(n)
    if cluster.details is not None:
        free = np.bincount(cluster.link_channel, weights=cluster.details.burst, minlength=cluster.n_channels)
        burst = np.bincount(pairs[0], weights=free[pairs[1]], minlength=n).astype(np.float64)
    return Width(rate, burst)
