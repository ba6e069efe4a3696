"""What no network can beat: the longest chain of work, and what must cross the narrowest interface."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.errors import ConfigError
from ddlsim.plan.check import check_exchanges
from ddlsim.plan.interfaces import Crossing, Interfaces, interfaces, least_crossing
from ddlsim.plan.order import Order
from ddlsim.plan.plan import ALL_REDUCE, KINDS, PUSH_PULL, SEND, Floats, Ints, Plan


class Cut(NamedTuple):
    """What must cross an interface: seconds at least, which interface, and the bytes out of it and into it."""

    seconds: float
    interface: str
    out: float
    into: float


def critical_path(plan: Plan, least: float | Floats = 0.0) -> float:
    """Return the seconds that a plan takes at least: of its longest chain of needs and lanes.

    Messages and collectives take no time, or the `least` that is given: s for each of them, or per row, (n,).
    Raises ConfigError for a plan that can never end.
    """
    check_exchanges(plan)
    order = Order(plan)
    beside = np.broadcast_to(np.asarray(least, dtype=np.float64), len(plan))
    if not bool((beside >= 0.0).all()):
        raise ConfigError("critical_path: least must be seconds of at least 0")
    seconds = np.where(plan.kind >= SEND, beside, plan.seconds)
    per_event = np.zeros(order.n_events)
    np.maximum.at(per_event, order.event, seconds)
    return max(order.ends(per_event.tolist()), default=0.0)


def peak_memory(plan: Plan) -> Floats:
    """Return the bytes that the tasks of each rank hold at most, (n_ranks,).

    Each lane of a rank is taken at its own worst moment, one without an order as if nothing were given back: exact
    where one lane takes and gives back, never too little.
    """
    order = np.argsort(plan.lane, kind="stable")
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


# ---------------------------------------------------------------- what must cross


def nodes_of(plan: Plan, cluster: Cluster, nodes: Sequence[int] | None) -> Ints:
    """Return the node of every rank: as given, or the cluster's first workers, (n_ranks,)."""
    if nodes is None and plan.servers:
        raise ConfigError("nodes = None: the plan has servers; give the node of every rank")
    if nodes is None:
        if plan.n_ranks > len(cluster.workers):
            raise ConfigError(
                f"nodes = None: the plan has {plan.n_ranks} ranks, cluster {cluster.name!r} {len(cluster.workers)} "
                "devices; give a larger cluster, or the node of every rank"
            )
        return cluster.workers[: plan.n_ranks]
    places = np.array(nodes, dtype=np.int64)
    if places.shape != (plan.n_ranks,) or not ((places >= 0) & (places < cluster.n_nodes)).all():
        raise ConfigError(f"nodes: must be {plan.n_ranks} nodes of cluster {cluster.name!r}, one per rank")
    return places


def cut(plan: Plan, cluster: Cluster, nodes: Sequence[int] | None = None) -> Cut:
    """Return the interface (of a device, a machine, or all of them together) that needs the longest for its bytes.

    nodes  (n_ranks,) where the ranks are; by default the cluster's first workers

    Messages cross where their ends are apart, and collectives bring what :func:`ddlsim.plan.interfaces.least_crossing`
    says: an all-reduce of m bytes over members in k places at least m bytes out of each and m into each, and
    2 (k - 1) m into all together. What is pushed to servers may be added up inside machines, not on the way between
    them. What a token bucket lets through at once (docs/models/tcp.md) takes no time. No messages are faster.
    """
    return narrowest(plan, interfaces(cluster), nodes_of(plan, cluster, nodes), np.arange(len(plan)))


def narrowest(
    plan: Plan, levels: Sequence[Interfaces], nodes: Ints, rows: Ints, begun: Ints | None = None
) -> Cut:
    """Return the cut of some rows of a plan whose rank r is at ``nodes[r]``; of collectives one row is enough.

    begun  rows of collectives that only one member has not entered before: what it brings has to be told to all
    """
    best = Cut(0.0, "none", 0.0, 0.0)
    for level in levels:
        best = max(best, _narrowest(plan, level, level.place[nodes], rows, begun), key=lambda each: each.seconds)
    return best


def _narrowest(plan: Plan, level: Interfaces, place: Ints, rows: Ints, begun: Ints | None) -> Cut:
    """Return the cut of the slowest place; rank r is in ``place[r]``."""
    n = len(level.out.rate)
    out, into = np.zeros(n), np.zeros(n)
    sends = rows[plan.kind[rows] == SEND]
    src, dst, nbytes = place[plan.rank[sends]], place[plan.peer[sends]], plan.nbytes[sends]
    apart = src != dst
    out += np.bincount(src[apart], weights=nbytes[apart], minlength=n)
    into += np.bincount(dst[apart], weights=nbytes[apart], minlength=n)
    together = float(nbytes[apart].sum())  # into all places
    for _, least, total in _crossings(plan, level, place, rows):
        out[least.place] += least.out * total
        into[least.place] += least.into * total
        together += least.together * total
    for kind, least, total in _crossings(plan, level, place, begun) if begun is not None else ():
        if kind in (ALL_REDUCE, PUSH_PULL):  # half of it makes the sum, half tells it to all
            together += 0.5 * least.together * total
    seconds = np.maximum.reduce([
        _seconds(out, *level.out), _seconds(into, *level.into), _seconds(out + into, *level.both),
    ])  # fmt: skip
    used = np.unique(place)
    slowest = int(used[np.argmax(seconds[used])]) if len(used) else -1
    whole = float(_seconds(np.array(together), *map(np.array, level.together(used))))
    if slowest >= 0 and seconds[slowest] >= whole:
        limit = float(seconds[slowest])
        return Cut(limit, level.name(slowest) if limit else "none", float(out[slowest]), float(into[slowest]))
    return Cut(whole, f"all {len(used)} {level.what}s together", together, together)


def _crossings(plan: Plan, level: Interfaces, place: Ints, rows: Ints) -> Iterator[tuple[int, Crossing, float]]:
    """Yield the kind of collectives that are alike, what their buffers must cross, and the bytes of all of them."""
    rows = rows[plan.kind[rows] >= ALL_REDUCE]
    rows = rows[np.unique(plan.key[rows], return_index=True)[1]]
    alike, which = np.unique(np.stack([plan.kind[rows], plan.peer[rows]]), axis=1, return_inverse=True)
    totals = np.bincount(which.reshape(-1), weights=plan.nbytes[rows], minlength=alike.shape[1])
    for kind, number, total in zip(*alike.tolist(), totals.tolist(), strict=True):
        group = np.array(plan.groups[number], dtype=np.int64)
        is_server, inside = np.isin(group, plan.servers), level.what != "machine"
        yield kind, least_crossing(KINDS[kind], place[group], is_server, added_up=inside), total


def _seconds(nbytes: Floats, rate: Floats, burst: Floats) -> Floats:
    """Return how long channels need for some bytes, at least; 0 where there are none."""
    left = np.where(rate > 0.0, np.maximum(nbytes - burst, 0.0), 0.0)
    return left / np.where(rate > 0.0, rate, 1.0)
