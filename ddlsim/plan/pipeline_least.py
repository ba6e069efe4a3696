"""What the steps of a pipeline take at least, and what its ranks hold, in closed form: without writing its plan.

A search looks at hundreds of pipelines, whose plans have a hundred thousand rows each. In each step rank q computes for
`busy` seconds, without a gap at best. It cannot begin before its first micro-batch has come forward through the chunks
before, nor can the ranks before it end before the gradient of its last one has gone back to them. So the update of rank
r comes after that of rank s in the step before by at least

    C[s, r] = max over q >= s, r of  forward from s to q + busy of q + backward from q to r + what ends the step of r

and n steps take at least the least over s of the largest over r of the n-th power of C, where sums are maxima and
products sums: whichever rank ended the step before. Bytes of gradients count as they must leave and enter the devices
of replicas (:mod:`ddlsim.plan.interfaces`), from the first moment at which some can leave.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.plan.chunks import Chunk, crossing_nbytes
from ddlsim.plan.interfaces import least_crossing
from ddlsim.plan.mesh import Mesh
from ddlsim.plan.pipeline_orders import PassOrder, pass_order
from ddlsim.plan.pipeline_steps import Tie, tie_of
from ddlsim.plan.plan import ALL_GATHER, Floats, Ints
from ddlsim.plan.tensor_ranks import Seconds
from ddlsim.workload.compute import Workload

NEVER = -np.inf
#: of collectives among more, whose ways are too many to look at, nothing is said
MOST_MEMBERS = 64


class Costs(NamedTuple):
    """What each chunk takes of a micro-batch and a step, (n_chunks,) each: s forward and backward, bytes over the cut
    before it and of its gradients, s of its update; and the chunk of weights that the last one uses too, with their
    bytes."""

    forward: Floats
    backward: Floats
    enters: Floats
    gradient: Floats
    update: Floats
    tied: tuple[int, float] = (0, 0.0)


def costs_of(
    workload: Workload, cuts: Sequence[int], tensor: int = 1,
    gather: Seconds | None = None,
) -> Costs:  # fmt: skip
    """Return the costs of the chunks of a workload that is cut before some layers, for one of `tensor` ranks that
    `gather` what enters them."""
    first = np.array([0, *cuts], dtype=np.int64)
    forward, backward, gradient = (
        np.add.reduceat(each, first) for each in (workload.forward, workload.backward, workload.grad_nbytes)
    )
    enters = crossing_nbytes(workload)[first]
    if gather is not None and tensor > 1:
        seconds = np.array([gather(ALL_GATHER, each) for each in enters[1:].tolist()])
        forward[1:] += seconds
        backward[:-1] += seconds
    enters[1:] /= tensor
    total = float(gradient.sum())
    update = workload.optimizer * gradient / total if total > 0.0 else np.zeros(len(first))
    tie = _tie(workload)
    tied = (0, 0.0) if tie is None else (int(np.searchsorted(first, tie.owner, side="right")) - 1, tie.nbytes)
    return Costs(forward, backward, enters, gradient, update, tied)


@functools.lru_cache(maxsize=64)
def _tie(workload: Workload) -> Tie | None:
    return tie_of([Chunk(0, len(workload.forward), workload, 0.0)])


@dataclass(frozen=True, eq=False)
class Travel:
    """What carries a pipeline's bytes: the cluster, and the node of every rank of its mesh, (n_ranks,)."""

    cluster: Cluster
    nodes: Ints

    def message(self, source: int, target: int) -> float:
        """Return the s per byte of a message between two ranks, at least: that of the narrowest channel between."""
        return _message(self.cluster, int(self.nodes[source]), int(self.nodes[target]))

    def collective(self, kind: str, ranks: Sequence[int]) -> float:
        """Return the s per byte of its buffer of a collective among ranks on different devices, at least."""
        return _collective(self.cluster, kind, tuple(self.nodes[list(ranks)].tolist()))


@functools.lru_cache(maxsize=4096)
def _message(cluster: Cluster, source: int, target: int) -> float:
    routes = cluster.split_routes(np.array([source]), np.array([target]))
    return float((_per_byte(cluster)[cluster.link_channel[routes.links]] * routes.share).max(initial=0.0))


@functools.lru_cache(maxsize=4096)
def _collective(cluster: Cluster, kind: str, nodes: tuple[int, ...]) -> float:
    """Whatever the algorithm, what leaves a member, or a machine, goes to others: through the channels that all ways to
    them share."""
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
        channel, way = cluster.link_channel[routes.links], routes.of
        out, into = (_shared(cluster, place[each], way, channel, routes.share) for each in (a, b))
        rates = np.divide(1.0, into, out=np.full(len(into), np.inf), where=into > 0.0)
        together = crossing.together / float(rates.sum())
        slowest = max(slowest, float((crossing.out * out).max()), float((crossing.into * into).max()), together)
    return slowest


def _shared(cluster: Cluster, place: Ints, way: Ints, channel: Ints, share: Floats) -> Floats:
    """Return the s per byte of the narrowest channel that all ways of each place share, (n_places,).

    place    (n_ways,) of each way
    channel  on the ways, of which each stands in `way`, and the `share` of a message's bytes that takes it
    """
    pairs, which, count = np.unique(place[way] * cluster.n_channels + channel, return_inverse=True, return_counts=True)
    least = np.ones(len(pairs))
    np.minimum.at(least, which.reshape(-1), share)
    least[count < np.bincount(place)[pairs // cluster.n_channels]] = 0.0  # not on all ways
    slowest = np.zeros(int(place.max()) + 1)
    np.maximum.at(slowest, pairs // cluster.n_channels, least * _per_byte(cluster)[pairs % cluster.n_channels])
    return slowest


@functools.lru_cache(maxsize=8)
def _per_byte(cluster: Cluster) -> Floats:
    """Return the s per byte of each channel, 0 where some bytes pass at once."""
    seconds: Floats = 1.0 / cluster.channel_capacity
    if cluster.details is not None:
        free = np.bincount(cluster.link_channel, weights=cluster.details.burst, minlength=cluster.n_channels)
        seconds = np.where(free > 0.0, 0.0, seconds)
    return seconds


@functools.lru_cache(maxsize=64)
def representative_order(order: str, ranks: int, micro_batches: int, n_chunks: int) -> PassOrder:
    """Return the table of an order's name, of "1f1b" with no more micro-batches than show how it begins, goes on and
    ends.

    After its warm-up of at most (chunks per rank + 1) x ranks passes it repeats itself every chunks per rank x ranks
    passes, so with three times as many micro-batches as ranks each rank holds what it ever holds. Raises ConfigError
    for an order that does not go with so many ranks, micro-batches and chunks.
    """
    few = 3 * ranks  # a multiple of the ranks, as interleaving wants it
    if order == "1f1b" and micro_batches > few and (n_chunks == ranks or micro_batches % ranks == 0):
        micro_batches = few
    return pass_order(order, ranks, micro_batches, n_chunks)


def rank_holds(chunks: Sequence[Chunk], order: PassOrder, *, recompute: bool) -> Floats:
    """Return the bytes of activations that each rank holds at most, (n_ranks,): those of the plan's `peak_memory`.

    recompute  a rank keeps the input of a chunk, and goes forward again before it goes backward
    """
    stored = np.array([float(chunk.stored.sum()) for chunk in chunks])
    kept = np.array([chunk.enters for chunk in chunks]) if recompute else stored
    most = np.zeros(len(order))
    for rank, passes in enumerate(order):
        apart = {(each.chunk, each.micro) for each in passes if each.kind == "W"}
        chunk = np.array([each.chunk for each in passes], dtype=np.int64)
        forward, weights = (np.array([each.kind == kind for each in passes]) for kind in ("F", "W"))
        last = np.array([
            each.kind == "W" or (each.kind == "B" and (each.chunk, each.micro) not in apart) for each in passes
        ])  # fmt: skip
        again = ~forward & ~weights & recompute  # what is computed again stays until the weights' gradient is made
        change = np.where(forward, kept[chunk], np.where(last, -kept[chunk], 0.0))
        change += np.where(again & ~last, stored[chunk], np.where(weights & recompute, -stored[chunk], 0.0))
        level = np.cumsum(change)
        before = level - change + np.where(again, stored[chunk], 0.0)
        most[rank] = max(float(level.max(initial=0.0)), float(before.max(initial=0.0)))
    return most


def least_seconds(
    costs: Costs, order: PassOrder, mesh: Mesh, micro_batches: int, steps: int, *, recompute: bool = False,
    sharded: bool = False, travel: Travel | None = None,
) -> float:  # fmt: skip
    """Return what `steps` steps take at least after the end of the step before them, in s.

    order   of passes, as :func:`representative_order` returns it
    travel  None: messages and collectives may take no time
    """
    ranks = [_Rank(passes) for passes in order]
    place = {chunk: rank for rank, each in enumerate(ranks) for chunk in each.chunks}
    passes = costs.forward, costs.backward + recompute * costs.forward
    forward, backward = _until(costs, passes, place, mesh, travel)
    endings = [_ending(each, costs, passes, mesh, at, sharded, travel) for at, each in enumerate(ranks)]
    ends, own = (np.array(column) for column in zip(*endings, strict=True))
    first, last = (np.array([getattr(each, name) for each in ranks]) for name in ("first", "last"))
    busy = micro_batches * np.array([float((passes[0] + passes[1])[each.chunks].sum()) for each in ranks])
    there = np.where(first[None, :] > first[:, None], forward[first][None, :] - forward[first][:, None], NEVER)
    goes_back = (last[:, None] > last[None, :]) & (last[None, :] >= 0)
    back = np.where(goes_back, backward[last][:, None] - backward[last][None, :] + ends[None, :], NEVER)
    np.fill_diagonal(there, 0.0)
    np.fill_diagonal(back, own)
    chain = _through(there + busy[None, :], back)
    least = chain
    for _ in range(steps - 1):  # what is gathered in between may travel beside passes
        least = _through(least, chain)
    return max(float(least.max(axis=1).min()), 0.0)


def _through(a: Floats, b: Floats) -> Floats:
    """Return the longest of the chains that a and b make together, (n, n)."""
    return np.asarray((a[:, :, None] + b[None, :, :]).max(axis=1), dtype=np.float64)


class _Rank:
    """What a rank of a pipeline does in a step.

    first    chunk of its first pass, which is a forward one
    last     chunk of its last pass if that is a whole backward one, else -1: nobody is known to wait for it
    final    passes from the first one on beside which gradients can leave; None: all
    """

    def __init__(self, passes: Sequence[tuple[str, int, int]]) -> None:
        self.chunks = sorted({each[1] for each in passes})
        whole = not any(each[0] == "W" for each in passes)
        self.first = passes[0][1]
        self.last = passes[-1][1] if whole and passes[-1][0] == "B" else -1
        begin = min({each[1]: at for at, each in enumerate(passes) if each[0] != "F"}.values(), default=0)
        self.final = passes[begin:] if whole else None


def _until(
    costs: Costs, passes: tuple[Floats, Floats], place: dict[int, int], mesh: Mesh, travel: Travel | None
) -> tuple[Floats, Floats]:
    """Return the s in which a micro-batch comes forward to each chunk from the model's input, and goes from each back
    to the first one after the pass on it, (n_chunks,) each."""
    n = len(costs.forward)
    there, back = np.zeros(n), np.zeros(n)
    for i in range(1, n) if travel is not None else ():
        a, b = (int(mesh.ranks[0, place[each], 0]) for each in (i - 1, i))
        if travel is not None and a != b:
            there[i] = costs.enters[i] * travel.message(a, b)
            back[i] = costs.enters[i] * travel.message(b, a)
    before = [np.concatenate([[0.0], each[:-1]]) for each in passes]
    return np.cumsum(before[0] + there), np.cumsum(before[1] + back)


def _ending(
    rank: _Rank, costs: Costs, passes: tuple[Floats, Floats], mesh: Mesh, at: int, sharded: bool, travel: Travel | None
) -> tuple[float, float]:
    """Return the s from the end of a rank's last pass to that of its updates, at least, also if it has passed without
    a gap."""
    updates = costs.update[rank.chunks] / (mesh.data if sharded else 1)
    every = float(updates.sum())
    if mesh.data == 1 or travel is None:
        return every, every
    group = mesh.ranks[:, at, 0].tolist()
    per_byte = travel.collective("reduce_scatter" if sharded else "all_reduce", group)
    anyway, own = every, every
    if rank.last >= 0:  # its gradients leave beside the last pass at the earliest
        tied = costs.tied[1] if costs.tied[0] == rank.last else 0.0
        left = (costs.gradient[rank.last] - tied) * per_byte - costs.backward[rank.last]
        anyway = max(every, float(max(left, 0.0) + updates.min()))
    if rank.final is not None:
        ending = sum(float(passes[kind != "F"][chunk]) for kind, chunk, _ in rank.final)
        own = float(costs.gradient[rank.chunks].sum()) * per_byte - ending + float(updates.min())
    return anyway, max(anyway, own)
