"""Tensor parallelism in plans: the ranks that share the layers of a stage as one rank of the plan."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from ddlsim.arguments import Count
from ddlsim.cluster import Cluster
from ddlsim.collectives import Collective, build
from ddlsim.collectives.build import default_algorithm
from ddlsim.errors import ConfigError
from ddlsim.network import schedule_time
from ddlsim.network.distinct import distinct
from ddlsim.plan.chunks import Chunk
from ddlsim.plan.draft import Draft
from ddlsim.plan.plan import RECEIVE, SEND, Floats, Ints, Plan
from ddlsim.workload.beside import Beside
from ddlsim.workload.compute import Workload

#: kind of collective, bytes of the whole -> s
Seconds = Callable[[str, float], float]


class Exchange(Protocol):
    """A collective of a tensor group: its kind, the bytes of the whole, in which pass of which layer, beside what."""

    @property
    def kind(self) -> str: ...
    @property
    def nbytes(self) -> float: ...
    @property
    def layer(self) -> int: ...
    @property
    def phase(self) -> str: ...
    @property
    def beside(self) -> Beside | None: ...


def with_exchanges(workload: Workload, exchanges: Sequence[Exchange], seconds: Seconds) -> Workload:
    """Return what one rank of a tensor group computes, and waits for: its layers take the time of their exchanges too.

    That is exact where the ranks of a group compute equally long and nobody else uses the links between them, as their
    exchanges then start together, one after the other. Of one that travels beside a product the layer takes what the
    two of them take longer than the product alone (:func:`overlap_plan`).
    """
    forward, backward = workload.forward.copy(), workload.backward.copy()

    @functools.cache
    def waits(kind: str, nbytes: float, beside: Beside | None) -> float:
        if beside is None:
            return seconds(kind, nbytes)
        return overlap_plan(beside, kind, nbytes, seconds).critical_path() - beside.counted

    for each in exchanges:
        of_pass = forward if each.phase == "forward" else backward
        of_pass[each.layer] += waits(each.kind, each.nbytes, each.beside)
    return dataclasses.replace(workload, forward=forward, backward=backward)


def overlap_plan(beside: Beside, kind: str, nbytes: float, seconds: Seconds) -> Plan:
    """Return a product and the collective beside it as the plan of one rank: their chunks, on lanes of their own.

    kind, nbytes  of the collective

    Chunk i of a "ring_exchange" is multiplied when it has arrived, the first of them at once, as each rank has one;
    that of a "pipeline" is scattered when it has been multiplied; "bulk" travels beside the product as a whole.
    """
    draft, n = Draft(), beside.chunks
    ring, behind = beside.method == "ring_exchange", beside.method == "pipeline"
    hops = n - 1 if ring else n
    travels = seconds(kind, nbytes) / hops if ring else seconds(kind, nbytes / n)
    arrived = list[int]()  # what the next chunk is multiplied after
    for i in range(n):
        if i and ring:
            arrived = [draft.work(0, travels, kind, lane="stream")]
        made = draft.work(0, beside.slowed / n, "product", needs=arrived)
        if not ring:
            draft.work(0, travels, kind, lane="stream", needs=[made] if behind else ())
    return draft.plan()


def as_one_rank(
    chunks: Sequence[Chunk], tensor: Count, kept: Callable[[Chunk], float], *, gather: Seconds | None
) -> tuple[Chunk, ...]:
    """Return chunks of a plan in which one rank stands for the `tensor` ranks of a group.

    chunks  as one rank of the group computes them (:func:`with_exchanges`)
    kept    bytes of activations that a rank keeps of a micro-batch
    gather  seconds of collectives; None: activations stay split by tokens

    Over a cut each rank of a group sends its part of the activations, 1 / `tensor`, through an interface of its own,
    and the group behind puts them together (the scatter/gather of Narayanan et al. 2021, arXiv:2104.04473, section
    4.1).
    """
    split: list[Chunk] = []
    for i, chunk in enumerate(chunks):
        work = chunk.workload
        if gather is not None and tensor > 1:
            forward, backward = work.forward.copy(), work.backward.copy()
            forward[0] += gather("all_gather", chunk.enters) if i else 0.0
            backward[-1] += gather("all_gather", chunks[i + 1].enters) if i + 1 < len(chunks) else 0.0
            work = dataclasses.replace(work, forward=forward, backward=backward)
        enters = chunk.enters / tensor if i else chunk.enters
        split.append(dataclasses.replace(chunk, workload=work, enters=enters, kept=kept(chunk)))
    return tuple(split)


def with_shared_interfaces(plan: Plan, cluster: Cluster, nodes: Ints) -> Plan:
    """Return the plan with the bytes of messages and collectives by which the first member of each group takes as long
    as all of them together, where members share links on their way.

    nodes  where the members of each rank's group are, (n_ranks, tensor), the first one first

    What each member sends starts at the same time and is as large, so a link that k of them cross carries k times as
    much. Where all have interfaces of their own nothing changes. Of a collective the most crowded hop between
    neighbours counts.
    """

    n = len(nodes)
    sends, receives, grouped = plan.rows(SEND), plan.rows(RECEIVE), plan.collectives
    members = [np.array(group, dtype=np.int64) for group in plan.groups]
    hops = [group * n + np.roll(group, -1) for group in members]
    ways = [plan.rank[sends] * n + plan.peer[sends], plan.peer[receives] * n + plan.rank[receives], *hops]
    pairs = np.unique(np.concatenate([distinct(each, n * n)[0] for each in ways]))
    times = _times(cluster, nodes[pairs // n], nodes[pairs % n])
    if (times == 1.0).all():
        return plan
    factor, of_pair = np.ones(len(plan)), np.empty(n * n)
    of_pair[pairs] = times
    factor[sends], factor[receives] = of_pair[ways[0]], of_pair[ways[1]]
    if len(grouped):
        factor[grouped] = np.array([of_pair[each].max() for each in hops])[plan.peer[grouped]]
    return dataclasses.replace(plan, nbytes=plan.nbytes * factor)


def _times(cluster: Cluster, source: Ints, target: Ints) -> Floats:
    """Return how many times as long it takes if all members of a group send to those of another, (n_pairs,).

    source, target  where they are, (n_pairs, n_members)
    """
    n_pairs, n_members = source.shape
    routes = cluster.split_routes(source.ravel(), target.ravel())
    n = cluster.n_channels
    # each channel of a route once
    crossed, at = np.unique(routes.of * n + cluster.link_channel[routes.links], return_index=True)
    message, channel, share = crossed // n, crossed % n, routes.share[at]
    _, which = np.unique(message // n_members * n + channel, return_inverse=True)
    used = np.bincount(which, share)
    first = np.flatnonzero(message % n_members == 0)
    pair, capacity = message[first] // n_members, cluster.channel_capacity[channel[first]]
    slowest, alone = np.zeros(n_pairs), np.full(n_pairs, np.inf)
    np.maximum.at(slowest, pair, used[which[first]] / capacity)
    np.minimum.at(alone, pair, capacity / share[first])
    with np.errstate(invalid="ignore"):
        return np.where(slowest > 0.0, slowest * alone, 1.0)


def exchange_seconds(
    cluster: Cluster, places: Sequence[int], members: Sequence[Sequence[int]], *, inside: bool,
    algorithm: str | Collective = "default",
) -> Seconds:  # fmt: skip
    """Return what collectives inside a tensor group take on the idle machines of the first group.

    places     the node of every worker
    members    the workers of every group
    inside     groups must be inside a machine (userbuffers)
    algorithm  of the replicas' all-reduces

    By NCCL they are what it runs, if that is the algorithm, or the default where they are. Otherwise, and by
    userbuffers, they are rings inside a machine, across machines the faster one of a ring and a hierarchical
    all-reduce. Raises ConfigError for groups that cross machines and share them with others.
    """
    nodes, tensor = np.array(places), len(members[0])
    machine = cluster.host_of[nodes]
    machine = np.where(machine >= 0, machine, len(cluster.host_names) + nodes)
    hosts = machine[np.array(members)]
    crosses = bool((hosts != hosts[:, :1]).any())
    if crosses and any(len(np.unique(np.nonzero(hosts == each)[0])) > 1 for each in np.unique(hosts)):
        most = int(np.unique(machine, return_counts=True)[1].min())
        raise ConfigError(
            f"Parallel: tensor = {tensor}: groups of {tensor} neighbours cross machines and share them, the smallest "
            f"of which has {most} of the workers; use a number that divides those of every machine, or is a multiple "
            "of them"
        )
    if crosses and inside:
        raise ConfigError(
            f"Parallel: tp_comm_overlap = True: goes with tensor groups inside a machine; those of {tensor} cross "
            "machines"
        )
    by_nccl = not inside and isinstance(algorithm, str) and algorithm.partition("(")[0] in ("nccl", "default")
    return _group_seconds(
        cluster, tuple(nodes[list(members[0])].tolist()), tuple(hosts[0].tolist()), algorithm if by_nccl else "ring"
    )


@functools.lru_cache(maxsize=16)
def _group_seconds(
    cluster: Cluster, nodes: tuple[int, ...], hosts: tuple[int, ...], algorithm: str | Collective
) -> Seconds:
    """Return what collectives among some nodes, on these machines, take on an idle cluster."""
    places = np.array(nodes)[cluster.locality_order(np.array(nodes))].tolist()
    usual = default_algorithm(cluster, places) if algorithm == "default" else algorithm

    @functools.cache
    def seconds(kind: str, nbytes: float) -> float:
        if len(places) == 1:
            return 0.0
        name = algorithm if algorithm in ("ring", "default") or kind == "all_reduce" else "nccl"
        schedules = [build(name, len(places), nbytes, None, kind, (cluster, places))]
        if usual == "ring" and len(set(hosts)) > 1 and kind == "all_reduce":
            schedules.append(build("hierarchical", len(places), nbytes, where=(cluster, places)))
        return min(schedule_time(cluster, each, places, nbytes) for each in schedules)

    return seconds
