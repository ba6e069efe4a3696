"""All-reduce: every rank ends with the sum of all buffers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np

from ddlsim.arguments import Count, Index, NotNegative, checked, integer, one_of
from ddlsim.collectives import all_gather, broadcast, reduce, reduce_scatter
from ddlsim.collectives.combine import reverse, sequence
from ddlsim.collectives.gloo import gloo_ring as gloo_ring
from ddlsim.collectives.hierarchy import hierarchical as hierarchical
from ddlsim.collectives.hierarchy import torus_2d as torus_2d
from ddlsim.collectives.nccl_choice import Way
from ddlsim.collectives.nccl_schedule import by_nccl, side_by_side
from ddlsim.collectives.nccl_tuner import Algorithm, Protocol
from ddlsim.collectives.schedule import Ints, Ranks, Round, Schedule, messages
from ddlsim.collectives.trees import double_binary_tree as double_binary_tree
from ddlsim.collectives.trees import fold_pairs, halving
from ddlsim.errors import ConfigError

#: Open MPI uses another algorithm for sums below this number of ranks or below this number of bytes (open-mpi/ompi
#: 8efebee, ``coll_tuned_decision_fixed.c``); larger buffers use halving and doubling
_OPEN_MPI: tuple[tuple[float, tuple[tuple[int, str], ...]], ...] = (
    (4, ((8, "ring"), (4096, "doubling"), (8192, "ring"), (16384, "doubling"), (262144, "ring"))),
    (8, ((16, "ring"), (8192, "doubling"))),
    (16, ((8192, "doubling"),)),
    (32, ((64, "ring"), (4096, "doubling"))),
    (64, ((128, "ring"),)),
    (128, ((262144, "doubling"),)),
    (256, ((131072, "tree"), (262144, "doubling"))),
    (512, ((4096, "tree"),)),
    (2048, ((2048, "tree"), (16384, "doubling"))),
    (4096, ((2048, "tree"), (4096, "ring"), (16384, "doubling"))),
    (math.inf, ((2048, "tree"), (16384, "ring"), (32768, "doubling"))),
)


@checked
def ring(n_ranks: Ranks) -> Schedule:
    """Bandwidth-optimal ring (Patarasuk and Yuan 2009): one lap reduces, one lap gathers.

    2 (p-1) alpha + 2 (p-1)/p S beta + (p-1)/p S gamma.
    """
    return sequence(reduce_scatter.ring(n_ranks), all_gather.ring(n_ranks), kind="all_reduce")


@checked
def nccl(
    n_ranks: Ranks, algorithm: Algorithm | None = None, protocol: Protocol | None = None, way: Way | None = None
) -> Schedule:
    """NCCL's algorithm on GPUs, chosen by its tuner: rings or trees over all channels, or reduction in switches.

    algorithm, protocol  fixed choices, independent of the size, like NCCL_ALGO and NCCL_PROTO: "nccl(nvls_tree)",
                         "nccl(ring, LL128)"
    way                  placement and the tuner's choice (:mod:`ddlsim.collectives.nccl_choice`), determined from
                         cluster, nodes and size; None: a plain ring
    """
    return by_nccl(ring, n_ranks, way)


@checked
def nccl_ring(n_ranks: Ranks, rings: Sequence[Ints] | None = None) -> Schedule:
    """Concurrent rings over all links between GPUs, like NCCL's channels; each of k rings carries 1/k of the buffer.

    rings  order of the ranks in each of the k rings; None: one ring in rank order. On a cluster, they are determined
           from its links (:mod:`ddlsim.cluster.rings`): over disjoint NVLinks inside a machine, or one per network
           interface.

    2 (p-1) alpha + 2 (p-1)/p S/k beta + (p-1)/p S/k gamma if no two rings share a link.
    """
    return side_by_side(ring, n_ranks, rings)


@checked
def torus(n_ranks: Ranks, axes: Ints | None = None) -> Schedule:
    """Reduce-scatter and all-gather in rings along all axes of a torus at once, in both directions.

    On one torus of D equal axes of n ranks: 2 D (n-1) alpha + (p-1)/p S beta / D.
    """
    down = reduce_scatter.torus(n_ranks, axes)
    lanes = tuple(a + b for a, b in zip(down.lanes, reverse(down, "all_gather").lanes, strict=True))
    return dataclasses.replace(down, kind="all_reduce", lanes=lanes, block_of=None)


@checked
def naive_ring(n_ranks: Ranks) -> Schedule:
    """Ring that passes on whole buffers, added up locally (Gloo's ``allreduce_ring``): (p-1) (alpha + S beta)."""
    return dataclasses.replace(all_gather.ring(n_ranks), kind="all_reduce", copies=n_ranks)


@checked
def pipelined_ring(n_ranks: Ranks, n_lanes: Annotated[int, integer(1, 1024)] = 2) -> Schedule:
    """Ring whose chunks are divided into `n_lanes` slices that are sent independently, which hides latency.

    While one slice is in flight, the port sends another, as in Gloo's ``allreduce_ring_chunked`` (two chunks in
    flight). Lanes in lockstep would share the port and then wait together, which would hide nothing. Lane i therefore
    sends its very first slice in i + 1 pieces, which delays it by i latencies permanently. With two lanes, the time is
    alpha + 2 (p-1)/p S beta, as long as alpha is less than S/(4p) beta (`cost.pipelined_ring` has the general case).
    """
    rank = np.arange(n_ranks)
    right = (rank + 1) % n_ranks
    n_pieces = n_lanes * (n_lanes + 1) // 2  # per chunk; there are p chunks
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
    """Exchange of whole buffers at distances 1, 2, 4, ...: log2 p (alpha + S (beta + gamma)) if p = 2^q.

    Thakur, Rabenseifner and Gropp 2005, sec. 4.5. If p is not a power of two, see :func:`halving_doubling`.
    """
    _, active = fold_pairs(n_ranks)
    place = np.arange(len(active))
    exchange = [messages(active, active[place ^ (1 << k)], reduce=True) for k in range(len(active).bit_length() - 1)]
    return _folded(n_ranks, 1, exchange)


@checked
def halving_doubling(n_ranks: Ranks, first: Annotated[str, one_of("near", "far")] = "near") -> Schedule:
    """Reduce-scatter by halving, all-gather by doubling (Rabenseifner 2004; Thakur et al. 2005, sec. 4.5).

    2 log2 p alpha + 2 (p-1)/p S beta + (p-1)/p S gamma if p = 2^q. Otherwise the lowest p - 2^q pairs fold, in one step
    before and one after with whole buffers. Ranks that do not fold start at once, and their early messages share the
    receivers' ports with the folding, so the textbook's sum of steps is a lower bound.

    first  partner in the first, largest exchange: "near" (large messages stay in a rack), or "far" as in most
           implementations
    """
    _, active = fold_pairs(n_ranks)
    distances = [1 << k for k in range(len(active).bit_length() - 1)]
    if first == "far":
        distances.reverse()
    down = halving(active, np.arange(len(active) + 1), distances)
    up = [dataclasses.replace(r, src=r.dst, dst=r.src, reduce=False) for r in reversed(down)]
    return _folded(n_ranks, len(active), down + up)


@checked
def open_mpi(n_ranks: Ranks, nbytes: NotNegative = math.inf) -> Schedule:
    """Open MPI's choice (4.1 and later) for `nbytes` per rank, mostly :func:`halving_doubling`.

    It is also used if p is not a power of two, where it takes about twice as long as a ring. Earlier releases run
    :func:`ring` from 10 kB on.
    """
    rules = next(rules for n, rules in _OPEN_MPI if n_ranks < n)
    name = next((name for most, name in rules if nbytes < most), "halving")
    return {"ring": ring, "doubling": recursive_doubling, "tree": binomial_tree, "halving": halving_doubling}[name](
        n_ranks
    )


def _folded(n_ranks: int, n_chunks: int, exchange: list[Round]) -> Schedule:
    """Add the fold before and the unfold after an exchange among the active ranks."""
    pairs, _ = fold_pairs(n_ranks)
    before = [messages(pairs, pairs + 1, 0, n_chunks, reduce=True)] if len(pairs) else []
    after = [messages(pairs + 1, pairs, 0, n_chunks, reduce=False)] if len(pairs) else []
    rounds = (*before, *exchange, *after)
    return Schedule(n_ranks, n_chunks, (rounds,) if rounds else ())


@checked
def binomial_tree(n_ranks: Ranks, answer: Index = 0) -> Schedule:
    """Binomial reduce to rank 0, then binomial broadcast.

    answer  bytes with which children acknowledge the broadcast; 0: none

    2 log2 p (alpha + S beta) + log2 p S gamma if p = 2^q; with ceil(log2 p), an upper bound for any p.
    """
    return sequence(reduce.binomial(n_ranks), broadcast.binomial(n_ranks, answer=answer), kind="all_reduce")


@checked
def parameter_server(n_ranks: Ranks, n_servers: Count = 1) -> Schedule:
    """Ranks 0 to k-1 each reduce one of k shards and send it back: 2 alpha + 2 (p-1)/k S beta + S/k gamma.

    One server makes a star. With one server per rank, shards are co-located with workers, and the traffic is that of a
    ring (Li et al. 2014).
    """
    if n_servers > n_ranks:
        raise ConfigError(
            f"parameter_server: n_servers = {n_servers}: must be from 1 to {n_ranks}, the number of ranks"
        )
    rank, server = (a.ravel() for a in np.indices((n_ranks, n_servers)))
    others = rank != server
    rank, server = rank[others], server[others]
    push = messages(rank, server, server, reduce=True)
    pull = messages(server, rank, server, reduce=False)
    return Schedule(n_ranks, n_servers, ((push, pull),) if n_ranks > 1 else ())
