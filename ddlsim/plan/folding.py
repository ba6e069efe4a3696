"""Tensor groups with identical members, executed as one rank each.

Executing one member gives the same result as executing all of them under two conditions, which :func:`fold` checks on
the routes. No other traffic uses the channels of a group's collectives, so these take their time on idle links, and a
pass is a single task. A permutation of channels maps every member's messages to other groups to those of the next, and
preserves capacities, latencies and shares. By this symmetry, corresponding flows have equal rates in the (unique)
max-min fair allocation: if the capacity of channels that k members share is divided by k, the flows of the first member
alone have the same rates as when all members send. Traffic that is not executed is booked on its links.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.cluster.cluster import Routes
from ddlsim.collectives import Collective, Schedule
from ddlsim.network import Network
from ddlsim.plan.plan import ALL_REDUCE, RECEIVE, SEND, Bools, Floats, Ints, Plan
from ddlsim.plan.program import StepProgram
from ddlsim.plan.tensor_ranks import NAMES, PRODUCT, GroupSchedules, Item, Passes, Seconds, timeline
from ddlsim.ties import distinct

#: relative; members that end this close to each other count as ending together
TOGETHER = 1e-12


class Measured(NamedTuple):
    """An exchange of a tensor group on idle links: the end for each member, s after the common start, (t,); the
    channels that it uses, with their bytes and busy s, (n,); total bytes and number of messages."""

    ends: Floats
    channels: Ints
    nbytes: Floats
    busy: Floats
    sent: float
    n_messages: int

    @property
    def seconds(self) -> float:
        return float(self.ends.max())


#: (kind of collective or SEND, total bytes) -> course of the exchange
Measure = Callable[[int, float], Measured]


@functools.lru_cache(maxsize=16)
def measured(cluster: Cluster, nodes: tuple[int, ...], inside: bool, algorithm: str | Collective) -> Measure:
    """Return a function that simulates a tensor group's exchanges on idle links between `nodes`, by kind and bytes:
    collectives, or messages from each member to the next (``SEND``)."""
    schedules, there = GroupSchedules(cluster, np.array([nodes]), inside, algorithm), np.array(nodes)

    @functools.cache
    def run(kind: int, nbytes: float) -> Measured:
        times, network = np.zeros(len(nodes)), Network(cluster)
        if len(nodes) > 1 and kind == SEND:
            ids = network.send(there, there[schedules.following[0]], np.full(len(nodes), nbytes), 0.0)
        elif len(nodes) > 1:
            number = network.collective(schedules(kind, 0, nbytes), there, nbytes)
            network.join(np.full(len(nodes), number), np.arange(len(nodes)), 0.0)
        while (done := network.advance()) is not None:
            times[np.searchsorted(-ids, -done.ids) if kind == SEND else done.ranks] = done.time
        carried, busy = network.channel_nbytes, network.channel_busy
        used = np.flatnonzero(busy)
        return Measured(times, used, carried[used], busy[used], network.nbytes_sent, network.n_messages)

    return run


@dataclass(frozen=True, eq=False)
class Copies:
    """Traffic of channels derived from that of others: channel c carries ``times[c]`` times the bytes of ``source[c]``,
    in the same seconds, (n_channels,) each; ``members``: number of members that each message represents."""

    source: Ints
    times: Floats
    members: int

    def nbytes(self, of_channels: Floats) -> Floats:
        """Return the bytes of all channels, given those of the executed messages."""
        return of_channels[self.source] * self.times

    def busy(self, of_channels: Floats) -> Floats:
        """Return the busy seconds of all channels, given those due to the executed messages."""
        return of_channels[self.source]


@dataclass(frozen=True, eq=False)
class Timeline:
    """The course of a pass of a group: work of the device and exchanges, in s after the pass begins.

    starts, ends         (n_items,) of the device's items
    products             (n_items,) whether the device computes a chunk of a product
    exchange             (n_exchanges,) index of each exchange in ``Folding.exchanges``
    begun, over          (n_exchanges,) when they begin and end
    seconds, exchanging  duration of the pass, and how much of it the device waits for exchanges
    """

    starts: Floats
    ends: Floats
    products: Bools
    exchange: Ints
    begun: Floats
    over: Floats
    seconds: float
    exchanging: float

    def shares(self, elapsed: float | Floats) -> Floats:
        """Return the share of each exchange that is over when a device has been in the pass for `elapsed` s:
        (n_exchanges,), or (..., n_exchanges) for `elapsed` of shape (..., 1)."""
        shares: Floats = np.clip((elapsed - self.begun) / np.maximum(self.over - self.begun, 1e-300), 0.0, 1.0)
        return shares


@dataclass(frozen=True, eq=False)
class Folding:
    """How the ranks of a plan with one rank per tensor group represent the members of the groups.

    members    (n_ranks, t) workers
    passes     of its rows
    kind       (n_ranks,) which of `timelines` and `measured` are of each rank
    timelines  by kind and pass
    exchanges  (kind of collective, bytes) of all exchanges
    measures   by kind: each exchange on idle links
    channels   by rank: the channels of its exchanges, in the order of `local`
    local      by kind: the channels of the group that was measured
    copies     traffic of other members
    shared     (n,) channels that several members use, and the number of these members
    why_not    why the folding is not exact; "" if it is
    """

    members: Ints
    passes: Passes
    kind: Ints
    timelines: Sequence[Sequence[Timeline]]
    exchanges: Sequence[tuple[int, float]]
    measures: Sequence[Sequence[Measured]]
    channels: Sequence[Ints]
    local: Sequence[Ints]
    copies: Copies
    shared: tuple[Ints, Floats]
    why_not: str

    def program(self, programs: Sequence[StepProgram], kinds: Ints) -> StepProgram:
        """Return the program of groups whose passes take the time of their exchanges, too.

        programs  one for each kind of worker, which differ only in seconds
        kinds     (n_ranks,) the kind of each group
        """
        first, templates = programs[0], list[Plan]()
        which = self.passes.which(first.template)
        for kind, timelines in enumerate(self.timelines):
            template = programs[kinds[np.flatnonzero(self.kind == kind)[0]]].template
            times = np.array([pass_timeline.seconds for pass_timeline in timelines])
            templates.append(template.with_columns(seconds=np.where(which >= 0, times[which], template.seconds)))
        return dataclasses.replace(first, templates=tuple(templates), template_of=self.kind[first.ranks])

    def exchanging(self, ranks: Ints, which: Ints) -> Floats:
        """Return the s of each task in which the device waits for exchanges of its tensor group, (n,).

        ranks, which  (n,) the rank of each task, and which pass it is, -1 if none
        """
        table = np.array([[pass_timeline.exchanging for pass_timeline in timelines] for timelines in self.timelines])
        return np.where(which >= 0, table[self.kind[ranks], which], 0.0)

    def traffic(self, times: Floats, n_channels: int) -> tuple[Floats, Floats, float, int]:
        """Return bytes and busy s of channels due to exchanges, (n_channels,), total bytes, and number of messages.

        times  (n_ranks, n_exchanges) number of executions of each exchange of each rank
        """
        nbytes, busy, sent, n_messages = np.zeros(n_channels), np.zeros(n_channels), 0.0, 0.0
        for kind, measures in enumerate(self.measures):
            ranks = np.flatnonzero(self.kind == kind)
            local, kind_times = self.local[kind], times[ranks]
            columns = np.zeros((2, len(measures), len(local)))
            for i, measure in enumerate(measures):
                at = np.searchsorted(local, measure.channels)
                columns[0, i, at], columns[1, i, at] = measure.nbytes, measure.busy
                sent += float(kind_times[:, i].sum()) * measure.sent
                n_messages += float(kind_times[:, i].sum()) * measure.n_messages
            for total, column in zip((nbytes, busy), columns, strict=True):
                np.add.at(total, np.stack([self.channels[rank] for rank in ranks.tolist()]), kind_times @ column)
        return nbytes, busy, sent, int(n_messages + 1e-6)


def fold(
    program: StepProgram,
    passes: Passes,
    members: Ints,
    kinds: Ints,
    cluster: Cluster,
    schedules: GroupSchedules,
    others: Callable[[int, int, float], Schedule],
) -> Folding:
    """Return the folding of a program with one rank per tensor group.

    If it is not exact, exchanges take their time on idle links, and messages of first members take as long as if all
    members sent the same bytes over the links that they share.

    members  (n_ranks, t) workers
    kinds    (n_ranks,) the kind of each group, an index into the items of passes
    others   schedules of the other collectives
    """
    nodes, why_not = schedules.nodes, list[str]()
    if cluster.routing == "ecmp" or (cluster.details is not None and cluster.details.has_effects):
        why_not.append("links have details")
    items = (item for by_kind in passes.items for item in by_kind[0])
    exchanges = sorted({(item.kind, item.nbytes) for item in items if item.kind == SEND or item.kind >= ALL_REDUCE})
    kind, local_of = _inside(cluster, schedules, kinds)
    firsts = np.unique(kind, return_index=True)[1].tolist()
    measures: list[list[Measured]] = []
    timelines: list[list[Timeline]] = []
    local: list[Ints] = []
    for rank in firsts:
        measure = measured(cluster, tuple(nodes[rank].tolist()), schedules.inside, schedules.algorithm)
        group_measures = [measure(*exchange) for exchange in exchanges]
        if any(np.ptp(one.ends) > TOGETHER * one.seconds for one in group_measures):
            why_not.append("members of a group end their collectives at different times")
        measures.append(group_measures)
        timelines.append([_timeline(by_kind[kinds[rank]], measure, exchanges) for by_kind in passes.items])
        local.append(distinct(np.concatenate([one.channels for one in group_measures] or [np.zeros(0, np.int64)])))
    channels = []
    for rank, of_rank in enumerate(local_of):
        at = np.searchsorted(local_of[firsts[kind[rank]]][0], local[kind[rank]])
        channels.append(of_rank[1][at] if len(local[kind[rank]]) else local[kind[rank]])
    inside = np.concatenate(channels)
    if len(distinct(inside)) < len(inside):
        why_not.append("tensor groups share links")
    copies, shared, used, unlike = _copies(cluster, nodes, *_pairs(program, others))
    if unlike:
        why_not.append(unlike)
    if np.isin(inside, used).any():
        why_not.append("collectives of tensor groups share links with other traffic")
    overheads = np.stack([cluster.send_overhead, cluster.recv_overhead, cluster.reduce_time])[:, nodes]
    if len(used) and (overheads[:2] > 0.0).any():
        why_not.append("messages take devices' time")
    if (overheads != overheads[:, :, :1]).any():
        why_not.append("members of a group take different times for messages")
    reason = why_not[0] if why_not else ""
    return Folding(members, passes, kind, timelines, exchanges, measures, channels, local, copies, shared, reason)


@functools.lru_cache(maxsize=16)
def least_seconds(
    cluster: Cluster, nodes: tuple[tuple[int, ...], ...], inside: bool, algorithm: str | Collective
) -> Seconds:
    """Return a lower bound on the times of tensor groups' exchanges: on idle links, in the fastest group.

    nodes  of the members of each group
    """
    groups = GroupSchedules(cluster, np.array(nodes), inside, algorithm)
    firsts = np.unique(_inside(cluster, groups, np.zeros(len(nodes), dtype=np.int64))[0], return_index=True)[1]
    measures = [measured(cluster, nodes[group], inside, algorithm) for group in firsts.tolist()]
    return functools.cache(lambda kind, nbytes: min(float(measure(kind, nbytes).ends.min()) for measure in measures))


def _timeline(items: Sequence[Item], measure: Measure, exchanges: Sequence[tuple[int, float]]) -> Timeline:
    start, end = timeline(items, lambda kind, nbytes: measure(kind, nbytes).seconds)
    device = np.array([item.lane == 0 for item in items])
    travels = [i for i, item in enumerate(items) if item.lane > 0 and item.kind != RECEIVE]
    products = np.array([item.name == NAMES.index(PRODUCT) for item in items])[device]
    exchange = np.array([exchanges.index((items[i].kind, items[i].nbytes)) for i in travels], dtype=np.int64)
    seconds, work = float(end.max()), (start[device], end[device])
    exchanging = seconds - float((work[1] - work[0]).sum())
    return Timeline(*work, products, exchange, start[travels], end[travels], seconds, exchanging)


def _inside(cluster: Cluster, schedules: GroupSchedules, speeds: Ints) -> tuple[Ints, list[tuple[Ints, Ints]]]:
    """Return the kind of each group (groups of one kind have equal speeds and corresponding exchanges), and the
    channels between its members: sorted, and in an order that corresponds to that of the first group of its kind."""
    nodes = schedules.nodes
    n, tensor = nodes.shape
    a, b = np.nonzero(~np.eye(tensor, dtype=bool))
    routes = cluster.split_routes(nodes[:, a].ravel(), nodes[:, b].ravel())
    counts = np.bincount(routes.of, minlength=n * len(a)).reshape(n, len(a))
    bounds = np.concatenate([[0], np.cumsum(counts.sum(axis=1))])
    channel = cluster.link_channel[routes.links]
    facts = np.stack([cluster.channel_capacity[channel], cluster.link_latency[routes.links], routes.share])
    times = np.stack([cluster.send_overhead, cluster.recv_overhead, cluster.reduce_time])
    kind = np.empty(n, dtype=np.int64)
    number: dict[object, int] = {}
    leaders: list[Ints] = []
    channels = []
    for rank in range(n):
        span = slice(int(bounds[rank]), int(bounds[rank + 1]))
        distinct, first, which = np.unique(channel[span], return_index=True, return_inverse=True)
        turn = np.argsort(np.argsort(first))[which.reshape(-1)]  # numbered by first occurrence
        alike = counts[rank], facts[:, span], turn, schedules.order[rank], times[:, nodes[rank]], speeds[rank]
        signature = tuple(array.tobytes() for array in alike)
        by_turn = channel[span][np.sort(first)]
        kind[rank] = number.setdefault(signature, len(leaders))
        if kind[rank] == len(leaders):
            leaders.append(by_turn)
        channels.append((distinct, by_turn[np.argsort(leaders[kind[rank]])]))
    return kind, channels


def _pairs(program: StepProgram, others: Callable[[int, int, float], Schedule]) -> tuple[Ints, Ints]:
    """Return all (rank that sends, rank that receives) of the messages between groups."""
    plan, n = program.template, program.n_ranks
    rows, pairs = plan.rows(SEND), np.zeros((n, n), dtype=np.bool_)
    for ranks in program.ranks:
        pairs[ranks[plan.rank[rows]], ranks[plan.peer[rows]]] = True
    collectives, seen = plan.collectives, set[tuple[int, int]]()
    sizes = (column[collectives].tolist() for column in (plan.kind, plan.peer, plan.nbytes))
    for kind, number, size in dict.fromkeys(zip(*sizes, strict=True)):
        for group in distinct(program.group_of[:, number]).tolist():
            schedule, ranks = others(kind, group, size), np.array(program.groups[group])
            if (group, id(schedule)) not in seen:
                seen.add((group, id(schedule)))
                for one in (one for lane in schedule.lanes for one in lane):
                    pairs[ranks[one.src], ranks[one.dst]] = True
    source, target = np.nonzero(pairs)
    return source, target


def _copies(cluster: Cluster, nodes: Ints, source: Ints, target: Ints) -> tuple[Copies, tuple[Ints, Floats], Ints, str]:
    """Return the copies of first members' channels, the channels that several members share and their number, all
    channels in use, and why other members do not use theirs in the same way ("": they do)."""
    tensor, n = nodes.shape[1], cluster.n_channels
    copies = Copies(np.arange(n), np.ones(n), tensor)
    if not len(source):
        return copies, (np.zeros(0, np.int64), np.zeros(0)), np.zeros(0, np.int64), ""
    routes = [cluster.split_routes(nodes[source, j], nodes[target, j]) for j in range(tensor)]
    channels = [cluster.link_channel[paths.links] for paths in routes]
    unlike = _unlike(cluster, routes, channels, len(source))
    if unlike:
        shared, times = _together(routes, channels, n)
        copies.times[shared] = times
        return copies, (shared, times), distinct(np.concatenate(channels)), unlike
    orbits = distinct(np.stack(channels, axis=1), axis=0)
    k = np.count_nonzero(orbits == orbits[:, :1], axis=1)
    copies.source[orbits] = orbits[:, :1]
    copies.times[orbits] = k[:, None]
    return copies, (orbits[k > 1, 0], k[k > 1].astype(np.float64)), distinct(orbits), ""


def _unlike(cluster: Cluster, routes: Sequence[Routes], channels: Sequence[Ints], n_messages: int) -> str:
    """Return why no permutation of channels maps each member's messages to those of the next; "" if one does.

    routes, channels  of the messages of each member
    """
    counts = np.array([np.bincount(paths.of, minlength=n_messages) for paths in routes])
    if (counts != counts[:1]).any():
        return "members of a group reach others over different numbers of links"
    links, channel = np.stack([paths.links for paths in routes], axis=1), np.stack(channels, axis=1)  # (n_hops, t)
    shares = np.stack([paths.share for paths in routes], axis=1)
    for fact in (shares, cluster.channel_capacity[channel], cluster.link_latency[links]):
        if (fact != fact[:, :1]).any():
            return "members of a group reach others over links that differ"
    orbits = distinct(channel, axis=0)
    # each channel must belong to a single orbit, in which all channels have the same number of members
    used, which, times = np.unique(orbits, return_inverse=True, return_counts=True)
    owner = np.repeat(np.arange(len(orbits)), orbits.shape[1])
    least, most = np.full(len(used), len(orbits)), np.full(len(used), -1)
    np.minimum.at(least, which.reshape(-1), owner)
    np.maximum.at(most, which.reshape(-1), owner)
    if (least != most).any():
        return "members of a group reach others over links that do not correspond"
    k = times[which.reshape(orbits.shape)]
    if (k != k[:, :1]).any() or not _nested(orbits):
        return "members of a group share links unevenly"
    return ""


def _together(routes: Sequence[Routes], channels: Sequence[Ints], n_channels: int) -> tuple[Ints, Floats]:
    """Return the channels of first members' messages that carry more if all members send as much, and by which factor:
    the largest one of all messages on the channel."""
    keys = [paths.of * n_channels + channel for paths, channel in zip(routes, channels, strict=True)]
    crossed, which = np.unique(np.concatenate(keys), return_inverse=True)
    load = np.bincount(which.reshape(-1), np.concatenate([paths.share for paths in routes]))
    first = np.bincount(which.reshape(-1)[: len(keys[0])], routes[0].share, len(crossed))
    crossed_first = first > 0.0
    times = np.ones(n_channels)
    np.maximum.at(times, crossed[crossed_first] % n_channels, load[crossed_first] / first[crossed_first])
    shared = np.flatnonzero(times > 1.0)
    return shared, times[shared]


def _nested(orbits: Ints) -> bool:
    """Return whether members that share a channel also share those that more members share, (n_orbits, t)."""
    patterns = distinct(np.argmax(orbits[:, :, None] == orbits[:, None, :], axis=2), axis=0)
    return all(_refines(a, b) or _refines(b, a) for i, a in enumerate(patterns) for b in patterns[:i])


def _refines(fine: Ints, coarse: Ints) -> bool:
    return all(len(distinct(coarse[fine == label])) == 1 for label in distinct(fine))
