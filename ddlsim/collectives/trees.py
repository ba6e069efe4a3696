"""Parts of algorithms: pipelines over edges, recursive halving, and the pair of complementary binary trees."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import numpy as np

from ddlsim.arguments import checked
from ddlsim.collectives.schedule import Floats, Ints, Ranks, Round, Schedule, Segments, messages
from ddlsim.ties import distinct


def pipeline(
    src: Ints,
    dst: Ints,
    stage: Ints,
    n_segments: int,
    *,
    reduce: bool,
    first: Ints | int = 0,
    latency: Floats | None = None,
    count: Ints | int = 1,
    width: int = 1,
    wire: Floats | None = None,
    handled: Floats | None = None,
) -> tuple[Round, ...]:
    """Send `n_segments` segments along edges; edge i sends its j-th segment in round `stage[i] + j`.

    src, dst, stage (m,) an edge must have a later stage than the edges that it depends on
    first            (m,)  chunk number of each edge's first segment
    latency          (m,)  latency in s of the first segment on an edge; the next ones follow without latency. None: all
                     segments have the latency of their route
    count, width     chunks that an edge sends per segment, and chunks per segment
    wire, handled    (m,)  see :class:`ddlsim.collectives.schedule.Round`

    Consecutive rounds with the same edges are stored once, with a repeat count.
    """
    first, count = (np.broadcast_to(np.asarray(value, dtype=np.int64), stage.shape) for value in (first, count))
    rounds = []
    turns = [stage, stage + n_segments] if latency is None else [stage, stage + 1, stage + n_segments]
    for begin, end in itertools.pairwise(distinct(np.array(turns)).tolist()):
        on = (stage <= begin) & (begin < stage + n_segments)
        if on.any():
            chunk = first[on] + (begin - stage[on]) * width
            one = messages(src[on], dst[on], chunk, count[on], reduce=reduce, repeat=end - begin, shift=width)
            late = None if latency is None else np.where(stage[on] == begin, latency[on], 0.0)
            sent, work = (None if values is None else values[on] for values in (wire, handled))
            rounds.append(dataclasses.replace(one, latency=late, wire=sent, handled=work))
    return tuple(rounds)


def fold_pairs(n_ranks: int) -> tuple[Ints, Ints]:
    """Return `(pairs, active)`: ranks `pairs` sit out, folded into `pairs + 1`; 2^q ranks remain active.

    With 2^q the largest power of two up to n_ranks, there are n_ranks - 2^q pairs (0, 1), (2, 3), ...
    (Thakur, Rabenseifner and Gropp 2005, sec. 4.5).
    """
    n_active = 1 << (n_ranks.bit_length() - 1)
    pairs = np.arange(0, 2 * (n_ranks - n_active), 2)
    return pairs, np.setdiff1d(np.arange(n_ranks), pairs)


def halving(ranks: Ints, boundary: Ints, distances: Iterable[int]) -> list[Round]:
    """Reduce-scatter among 2^q `ranks` by halving: in each step, partners keep one half of their chunks.

    ranks      (2^q,)    participating ranks; position i is paired with position i ^ distance
    boundary   (2^q+1,)  window w consists of the chunks boundary[w] .. boundary[w+1]-1
    distances            a permutation of 1, 2, 4, ...; if descending, position i ends with window i

    The position with the distance's bit set keeps the upper half.
    """
    place = np.arange(len(ranks))
    low = np.zeros(len(ranks), dtype=np.int64)
    half = len(ranks)
    rounds = []
    for distance in distances:
        half //= 2
        upper = (place & distance) > 0
        first = np.where(upper, low, low + half)  # the half that the partner keeps
        start, end = boundary[first], boundary[first + half]
        rounds.append(messages(ranks, ranks[place ^ distance], start, end - start, reduce=True))
        low = np.where(upper, low + half, low)
    return rounds


def double_tree(n_ranks: int) -> tuple[tuple[Ints, Ints], tuple[Ints, Ints]]:
    """Return two trees as `(parent, depth)`, both (n_ranks,); the root is its own parent.

    In the first tree odd ranks are leaves (in-order numbering: the parent differs in the lowest set bit). The
    second is its mirror image, or for odd n_ranks its shift by one, so that a rank is inner in one tree only
    (the root excepted). Sanders, Speck and Traff 2009, sec. 2; NCCL's ``trees.cc``.
    """
    rank = np.arange(n_ranks)
    bit = rank & -rank
    up = (rank ^ bit) | bit << 1
    parent = np.where(up < n_ranks, up, rank ^ bit)
    depth = np.zeros(n_ranks, dtype=np.int64)
    above = rank
    while above.any():
        depth += above > 0
        above = parent[above]
    if n_ranks % 2 == 0:
        return (parent, depth), ((n_ranks - 1 - parent)[::-1], depth[::-1])
    return (parent, depth), (np.roll((parent + 1) % n_ranks, 1), np.roll(depth, 1))


@checked
def double_binary_tree(n_ranks: Ranks, n_segments: Segments = 1) -> Schedule:
    """Two trees, each reducing and broadcasting one half of the buffer in `n_segments` pipelined segments.

    Sanders, Speck and Traff 2009; NCCL since 2.4. About 2 log2 p alpha + 2 S beta + O(sqrt(S alpha beta
    log p)) for the best number of segments: with h the depth of the trees and c segments, there are
    2 (h + c - 1) rounds of about alpha + S/c (beta + gamma), with at most two messages in and out per rank.
    """
    edges = []
    for tree, (parent, depth) in enumerate(double_tree(n_ranks)):
        child = np.flatnonzero(depth)
        edges.append((child, parent[child], depth[child], np.full(len(child), tree * n_segments)))
    child, parent, depth, first = (np.concatenate(column) for column in zip(*edges, strict=True))
    up = pipeline(child, parent, depth.max(initial=0) - depth, n_segments, reduce=True, first=first)
    down = pipeline(parent, child, depth - 1, n_segments, reduce=False, first=first)
    return Schedule(n_ranks, 2 * n_segments, ((*up, *down),) if up else ())
