"""All-reduce: every rank ends with the sum of all buffers."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import numpy as np

from ddlsim.arguments import Count, Index, checked, one_of, whole
from ddlsim.cluster.levels import Levels
from ddlsim.collectives import all_gather, broadcast, reduce, reduce_scatter
from ddlsim.collectives.combine import on_ranks, parallel, sequence, strided, uniform
from ddlsim.collectives.find import called, find, given, parameters_of
from ddlsim.collectives.gloo import gloo_ring
from ddlsim.collectives.nccl_schedule import by_nccl, side_by_side
from ddlsim.collectives.nccl_tuner import ALGORITHMS, PROTOCOLS
from ddlsim.collectives.nccl_way import Way
from ddlsim.collectives.reduce_scatter import fold_pairs, halving
from ddlsim.collectives.schedule import Collective, Ints, Ranks, Round, Schedule, Segments, messages
from ddlsim.collectives.trees import double_binary_tree
from ddlsim.errors import ConfigError, unknown_name

#: a reduce-scatter and an all-gather
Pair: TypeAlias = tuple[Collective, Collective]
#: what runs inside a group before and after the exchange between groups: reduce-scatter and all-gather ...
_SHARED = {
    "ring": ("ring", "ring"),
    "halving_doubling": ("recursive_halving", "recursive_doubling"),
    "direct": ("direct", "direct"),
}
#: ... or reduce to a leader and broadcast
_LEADER = {"binomial_tree": ("binomial", "binomial"), "chain": ("chain", "chain")}


@checked
def hierarchical(
    n_ranks: Ranks, inside: str | Pair | None = None, between: str | Collective | None = None,
    further: Sequence[str | Collective] = (), *, groups: Sequence[Ints], levels: Levels | None = None,
    n_segments: Segments = 1,
) -> Schedule:  # fmt: skip
    """On every level reduce inside groups, all-reduce between them, spread inside (Cho et al. 2017; BlueConnect).

    inside      "ring", "halving_doubling", "direct", or a (reduce-scatter, all-gather) pair of functions: the
                members of a group share the work, and n all-reduces run between the groups in parallel.
                "binomial_tree", "chain": only the first member of a group talks to other groups.
                None: what suits the links, or "binomial_tree" if the groups are of unequal size
    between     any all-reduce of one lane, among all groups: two levels. None: what suits each level's links
    further     algorithms of more levels: all but the outermost as `inside`
    groups      the ranks of each group (machine), together all ranks, where no `levels` are given
    levels      of a cluster (:mod:`ddlsim.cluster.levels`)
    n_segments  for inner algorithms that are pipelined

    With rings, groups of n, m groups: 2(n-1) a1 + 2 (n-1)/n S b1 + 2(m-1) a2 + 2 (m-1)/m S/n b2. Raises
    ConfigError for groups that do not fit, unknown names, and more names than levels.
    """
    levels = levels or Levels((_checked_groups(groups, n_ranks),), ("ring", "ring"))
    n_levels = len(levels.groups) + 1
    names = [inside, *[None] * (n_levels - 1)] if between is None else [inside, between, *further]
    if len(names) > n_levels:
        raise ConfigError(f"hierarchical: {len(names)} algorithms for {n_levels} levels; name {n_levels} at most")
    return _level_by_level(levels.groups[: len(names) - 1], n_ranks, names, levels.algorithms, n_segments)


def _level_by_level(
    levels: Sequence[Sequence[Ints]], n_ranks: int, names: Sequence[str | Collective | Pair | None],
    usual: Sequence[str], n_segments: int,
) -> Schedule:  # fmt: skip
    """Return the all-reduce of ranks in groups at several levels, at the innermost by ``names[0]``; `usual` are the
    algorithms where that is None."""
    name = names[0]
    if not levels:
        name = name or usual[0]
        if name == "direct":
            name = find(name, "reduce_scatter"), find(name, "all_gather")
        if isinstance(name, tuple):
            return sequence(*(part(n_ranks) for part in name), kind="all_reduce")
        return _bound(find(name), n_segments)(n_ranks)
    groups = levels[0]
    exchange = _level_by_level(levels[1:], len(groups), names[1:], usual[1:], n_segments)
    equal = len({len(g) for g in groups}) == 1
    name = name or (usual[0] if equal else "binomial_tree")
    if isinstance(name, str) and name in _LEADER:
        return _through_leaders(groups, n_ranks, name, exchange, n_segments)
    if not equal:
        sizes = sorted({len(g) for g in groups})
        raise ConfigError(
            f"hierarchical: inside={name!r} needs groups of equal size, not of {sizes}; "
            f"use inside='binomial_tree' or place equally many ranks on each machine"
        )
    if not isinstance(name, tuple):
        if name not in _SHARED:
            raise unknown_name("algorithm inside groups", str(name), [*_SHARED, *_LEADER])
        name = find(_SHARED[name][0], "reduce_scatter"), find(_SHARED[name][1], "all_gather")
    down, up = (_bound(part, n_segments)(len(groups[0])) for part in name)
    return _shared_work(np.stack(groups), down, exchange, up)


@checked
def torus_2d(
    n_ranks: Ranks, rows: Count | None = None, columns: Count | None = None, *,
    groups: Sequence[Ints] | None = None, levels: Levels | None = None,
) -> Schedule:  # fmt: skip
    """Rings along the rows, then along the columns, then along the rows (Mikami et al. 2018).

    With X columns, Y rows: 2(X-1) a1 + 2 (X-1)/X S b1 + 2(Y-1) a2 + 2 (Y-1)/Y S/X b2. The shape is the one given
    (consecutive ranks form a row, where the network does not have this shape); else that of the network's `levels`, in
    all dimensions; else a row is a machine (`groups`), if machines hold several ranks; else the most nearly square one.
    Raises ConfigError for a shape that does not hold n_ranks.
    """
    singles = np.arange(n_ranks)[:, None]
    groups = _checked_groups(groups or tuple(singles), n_ranks)
    levels = levels or Levels((groups,))
    if rows is None and max(map(len, groups if levels.places is None else levels.groups[0])) == 1:
        rows = next(y for y in range(math.isqrt(n_ranks), 0, -1) if n_ranks % y == 0)
    if rows is not None:
        columns = n_ranks // max(rows, 1) if columns is None else columns
        if rows < 1 or rows * columns != n_ranks:
            raise ConfigError(f"torus_2d: {rows} rows x {columns} columns are not {n_ranks} ranks; change the shape")
        if levels.places is None or levels.places.shape != (rows, columns):
            levels = Levels((tuple(singles.reshape(rows, columns)),))
    inner = levels.groups[: 1 if levels.places is None else levels.places.ndim - 1]
    return _level_by_level(inner, n_ranks, ["ring"] * (len(inner) + 1), (), 1)


def _checked_groups(groups: Sequence[Ints], n_ranks: int) -> tuple[Ints, ...]:
    arrays = tuple(np.asarray(g, dtype=np.int64) for g in groups)
    if not arrays or any(g.ndim != 1 or len(g) == 0 for g in arrays):
        raise ConfigError("hierarchical: groups must be lists of ranks, one or more; leave an empty one out")
    if not np.array_equal(np.sort(np.concatenate(arrays)), np.arange(n_ranks)):
        raise ConfigError(f"hierarchical: the groups must hold each rank of 0..{n_ranks - 1} exactly once")
    return arrays


def _bound(function: Collective, n_segments: int) -> Collective:
    """Give the function its number of segments, if it takes one that is not given yet."""
    if "n_segments" in parameters_of(function) and "n_segments" not in given(function):
        function = functools.partial(function, n_segments=n_segments)

    def checked_call(n_ranks: int) -> Schedule:
        return called(function, n_ranks)

    return checked_call


def _through_leaders(
    groups: Sequence[Ints], n_ranks: int, inside: str, exchange: Schedule, n_segments: int
) -> Schedule:
    """Reduce to each group's first member, all-reduce among these, broadcast."""
    down_name, up_name = _LEADER[inside]
    reduce = _bound(find(down_name, "reduce"), n_segments)
    spread = _bound(find(up_name, "broadcast"), n_segments)
    down = parallel(*(on_ranks(reduce(len(g)), g, n_ranks) for g in groups))
    up = parallel(*(on_ranks(spread(len(g)), g, n_ranks) for g in groups))
    leaders = on_ranks(exchange, [g[0] for g in groups], n_ranks)
    whole = sequence(down, leaders, up, kind="all_reduce")
    return dataclasses.replace(whole, groups=None)


def _shared_work(members: Ints, down: Schedule, exchange: Schedule, up: Schedule) -> Schedule:
    """Compose reduce-scatter, parallel all-reduces and all-gather; `members` is (n_groups, n_inside).

    Chunk a of the inside and chunk b of the exchange meet in chunk b * A + a. The inside sends whole residue
    classes mod A, the exchange steps of A, so that both keep their arithmetic modulo the number of chunks.
    """
    if len(exchange.lanes) > 1 or exchange.copies > 1:
        raise ConfigError("hierarchical: between groups use an algorithm of one lane and one buffer, e.g. 'ring'")
    n_inside = members.shape[1]
    if len(down.lanes) > 1 or len(up.lanes) > 1 or down.n_chunks != up.n_chunks or down.n_chunks % n_inside:
        raise ConfigError("hierarchical: the pair inside must have one lane each, and equal blocks")
    a, b = down.n_chunks, exchange.n_chunks
    width = a // n_inside
    rounds = [_inside(r, members, a, b) for lane in down.lanes for r in lane]
    for lane in exchange.lanes:
        for r in lane:
            every = np.repeat(np.arange(len(r.src)), n_inside)
            which = np.tile(np.arange(n_inside), len(r.src))
            src, dst = (members[ends[every], which] for ends in (r.src, r.dst))
            one = dataclasses.replace(r, src=src, dst=dst, start=r.start[every], count=r.count[every])
            rounds.append(strided(one, b, a, which * width, width))
    rounds += [_inside(r, members, a, b) for lane in up.lanes for r in lane]
    weight = None if exchange.chunk_weight is None else np.repeat(exchange.chunk_weight, a)
    return Schedule(members.size, a * b, (tuple(rounds),) if rounds else (), weight)


def _inside(round: Round, members: Ints, a: int, b: int) -> Round:
    """Run a round of the inside in all groups at once, on all chunks b * a + (its chunks)."""
    even, _ = uniform(round, a)
    carried = np.arange(even.count[0]) if even.slots is None else even.slots
    slots = (np.arange(b)[:, None] * a + carried).ravel()
    kept = None if b == 1 and even.slots is None else slots
    src, dst = members[:, even.src].ravel(), members[:, even.dst].ravel()
    start, count = np.tile(even.start, len(members)), np.tile(even.count * b, len(members))
    return dataclasses.replace(even, src=src, dst=dst, start=start, count=count, slots=kept)


NcclAlgorithm = Annotated[str, one_of(*ALGORITHMS)]
NcclProtocol = Annotated[str, one_of(*PROTOCOLS)]

__all__ = [
    "binomial_tree",
    "double_binary_tree",
    "gloo_ring",
    "halving_doubling",
    "hierarchical",
    "naive_ring",
    "nccl",
    "nccl_ring",
    "parameter_server",
    "pipelined_ring",
    "recursive_doubling",
    "ring",
    "torus_2d",
]


@checked
def ring(n_ranks: Ranks) -> Schedule:
    """Bandwidth-optimal ring (Patarasuk and Yuan 2009): one lap reduces, one lap gathers.

    2 (p-1) alpha + 2 (p-1)/p S beta + (p-1)/p S gamma.
    """
    return sequence(reduce_scatter.ring(n_ranks), all_gather.ring(n_ranks), kind="all_reduce")


@checked
def nccl(
    n_ranks: Ranks, algorithm: NcclAlgorithm | None = None, protocol: NcclProtocol | None = None, way: Way | None = None
) -> Schedule:
    """What NCCL runs on GPUs: rings or trees over all channels, or what switches add up, as its tuner chooses by size.

    algorithm, protocol   this one whatever the size, as NCCL_ALGO and NCCL_PROTO have it: "nccl(nvls_tree)",
                          "nccl(ring, LL128)"
    way                   where it runs, and the tuner's choice (:mod:`ddlsim.collectives.nccl_way`), found for the
                          cluster, the nodes and the size; None: a plain ring
    """
    return by_nccl(ring, n_ranks, way)


@checked
def nccl_ring(n_ranks: Ranks, rings: Sequence[Ints] | None = None) -> Schedule:
    """Rings on all ways between the GPUs at once, as NCCL has them on its channels: each carries 1/k of the buffer.

    rings  the orders of the ranks in each of the k; None: one, in the order of the ranks. On a cluster they are found
           in its links (:mod:`ddlsim.cluster.rings`): over disjoint NVLinks inside a machine, or one for each network
           interface

    2 (p-1) alpha + 2 (p-1)/p S/k beta + (p-1)/p S/k gamma where no two rings share a link.
    """
    return side_by_side(ring, n_ranks, rings)


@checked
def naive_ring(n_ranks: Ranks) -> Schedule:
    """Whole buffers go round and are added up locally (Gloo's ``allreduce_ring``): (p-1) (alpha + S beta)."""
    return dataclasses.replace(all_gather.ring(n_ranks), kind="all_reduce", copies=n_ranks)


@checked
def pipelined_ring(n_ranks: Ranks, n_lanes: Annotated[int, whole(1, 1024)] = 2) -> Schedule:
    """Ring whose chunks are cut in `n_lanes` slices that travel independently, so that latency is hidden.

    While a slice is under way the port sends another one, as in Gloo's ``allreduce_ring_chunked`` (two chunks
    in flight). Lanes in lockstep would share the port and then wait together, hiding nothing; so lane i sends
    its very first slice in i + 1 pieces, which sets it back by i latencies for good. With two lanes that is
    alpha + 2 (p-1)/p S beta, as long as alpha is less than S/(4p) beta (`cost.pipelined_ring` has the rest).
    """
    if n_lanes < 1:
        raise ConfigError(f"pipelined_ring: n_lanes is {n_lanes}; give 1 or more")
    rank = np.arange(n_ranks)
    right = (rank + 1) % n_ranks
    n_pieces = n_lanes * (n_lanes + 1) // 2  # of each of the p chunks
    lanes = []
    for i in range(n_lanes):
        begin = i * (i + 1) // 2
        sent = (rank - 1) % n_ranks * n_pieces + begin
        kept = rank * n_pieces + begin
        rounds = [messages(rank, right, sent + piece, reduce=True) for piece in range(i + 1)]
        if n_ranks > 2:
            later = (sent - n_pieces) % (n_ranks * n_pieces)
            reducing = messages(rank, right, later, i + 1, reduce=True, repeat=n_ranks - 2, shift=-n_pieces)
            rounds.append(reducing)
        rounds.append(messages(rank, right, kept, i + 1, reduce=False, repeat=n_ranks - 1, shift=-n_pieces))
        lanes.append(tuple(rounds))
    weight = np.concatenate([np.full(i + 1, 1.0 / (i + 1)) for i in range(n_lanes)])
    n_chunks = n_ranks * n_pieces
    return Schedule(n_ranks, n_chunks, tuple(lanes) if n_ranks > 1 else (), np.tile(weight, n_ranks))


@checked
def recursive_doubling(n_ranks: Ranks) -> Schedule:
    """Whole buffers to partners at distance 1, 2, 4, ... : log2 p (alpha + S (beta + gamma)) if p = 2^q.

    Thakur, Rabenseifner and Gropp 2005, sec. 4.5. If p is not a power of two, see :func:`halving_doubling`.
    """
    _, active = fold_pairs(n_ranks)
    place = np.arange(len(active))
    exchange = [messages(active, active[place ^ (1 << k)], reduce=True) for k in range(len(active).bit_length() - 1)]
    return _folded(n_ranks, 1, exchange)


@checked
def halving_doubling(n_ranks: Ranks, first: Annotated[str, one_of("near", "far")] = "near") -> Schedule:
    """Reduce-scatter by halving, all-gather by doubling (Rabenseifner 2004; Thakur et al. 2005, sec. 4.5).

    2 log2 p alpha + 2 (p-1)/p S beta + (p-1)/p S gamma if p = 2^q. Otherwise the lowest p - 2^q pairs fold: a
    step before and one after with whole buffers. (Ranks that need not fold start at once, and their early
    messages share the receivers' ports with the folding, so the textbook's sum of steps is a lower bound.)

    first  the partner of the first, largest exchange: "near" (large messages stay in a rack) or "far", as most
           implementations have it
    """
    _, active = fold_pairs(n_ranks)
    distances = [1 << k for k in range(len(active).bit_length() - 1)]
    if first == "far":
        distances.reverse()
    down = halving(active, np.arange(len(active) + 1), distances)
    up = [dataclasses.replace(r, src=r.dst, dst=r.src, reduce=False) for r in reversed(down)]
    return _folded(n_ranks, len(active), down + up)


def _folded(n_ranks: int, n_chunks: int, exchange: list[Round]) -> Schedule:
    """Put the fold before and the unfold after an exchange among the active ranks."""
    pairs, _ = fold_pairs(n_ranks)
    before = [messages(pairs, pairs + 1, 0, n_chunks, reduce=True)] if len(pairs) else []
    after = [messages(pairs + 1, pairs, 0, n_chunks, reduce=False)] if len(pairs) else []
    rounds = (*before, *exchange, *after)
    return Schedule(n_ranks, n_chunks, (rounds,) if rounds else ())


@checked
def binomial_tree(n_ranks: Ranks, answer: Index = 0) -> Schedule:
    """Binomial reduce to rank 0, then binomial broadcast, children answering with `answer` bytes if any.

    2 log2 p (alpha + S beta) + log2 p S gamma if p = 2^q; with ceil(log2 p), an upper bound for any p.
    """
    return sequence(reduce.binomial(n_ranks), broadcast.binomial(n_ranks, answer=answer), kind="all_reduce")


@checked
def parameter_server(n_ranks: Ranks, n_servers: Count = 1) -> Schedule:
    """Ranks 0..k-1 each add up one of k shards and send it back: 2 alpha + 2 (p-1)/k S beta + S/k gamma.

    One server is the star; as many as ranks are co-located shards, with the bytes of a ring (Li et al. 2014).
    """
    if not 1 <= n_servers <= n_ranks:
        raise ConfigError(f"parameter_server: n_servers is {n_servers}; give 1 to {n_ranks}, the ranks")
    rank, server = (a.ravel() for a in np.indices((n_ranks, n_servers)))
    others = rank != server
    rank, server = rank[others], server[others]
    push = messages(rank, server, server, reduce=True)
    pull = messages(server, rank, server, reduce=False)
    return Schedule(n_ranks, n_servers, ((push, pull),) if n_ranks > 1 else ())
