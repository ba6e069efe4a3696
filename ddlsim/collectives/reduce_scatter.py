"""Reduce-scatter: the buffers are added up, and rank r keeps block r of the sum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddlsim.arguments import checked
from ddlsim.cluster.groups import Levels
from ddlsim.collectives.gloo import gloo_reduce_scatter as gloo_reduce_scatter
from ddlsim.collectives.hierarchy import grouped, scattered, scattered_on_axes
from ddlsim.collectives.nccl_choice import Way
from ddlsim.collectives.nccl_schedule import by_nccl, side_by_side
from ddlsim.collectives.schedule import Ints, Ranks, Schedule, messages
from ddlsim.collectives.trees import fold_pairs, halving


@checked
def ring(n_ranks: Ranks) -> Schedule:
    """One lap of a ring (Patarasuk and Yuan 2009, sec. 3): (p-1) (alpha + S/p (beta + gamma)).

    In step t, rank r sends block r-1-t to the right, so the last block it receives is its own.
    """
    rank = np.arange(n_ranks)
    step = messages(rank, (rank + 1) % n_ranks, (rank - 1) % n_ranks, reduce=True, repeat=n_ranks - 1, shift=-1)
    return Schedule(n_ranks, n_ranks, ((step,),) if n_ranks > 1 else (), kind="reduce_scatter")


@checked
def nccl(n_ranks: Ranks, way: Way | None = None) -> Schedule:
    """NCCL's algorithm, which consists of rings. See :func:`ddlsim.collectives.all_reduce.nccl`."""
    return by_nccl(ring, n_ranks, way)


@checked
def nccl_ring(n_ranks: Ranks, rings: Sequence[Ints] | None = None) -> Schedule:
    """Concurrent rings over all links between the GPUs. See :func:`ddlsim.collectives.all_reduce.nccl_ring`."""
    return side_by_side(ring, n_ranks, rings)


@checked
def recursive_halving(n_ranks: Ranks) -> Schedule:
    """Recursive halving (Thakur et al. 2005, sec. 4.3): log2 p alpha + (p-1)/p S (beta + gamma) if p = 2^q.

    If p is not a power of two, each of the p - 2^floor(log2 p) lowest pairs folds: rank 2i first sends everything to
    rank 2i+1 and receives its block at the end, which adds two steps.
    """
    pairs, active = fold_pairs(n_ranks)
    # blocks that each active rank reduces: its own, and that of the rank folded into it
    block = np.concatenate([[0], active + 1])
    distances = [len(active) >> k for k in range(1, len(active).bit_length())]
    rounds = []
    if len(pairs):
        rounds.append(messages(pairs, pairs + 1, 0, n_ranks, reduce=True))
    rounds += halving(active, block, distances)
    if len(pairs):
        rounds.append(messages(pairs + 1, pairs, pairs, reduce=False))
    return Schedule(n_ranks, n_ranks, (tuple(rounds),) if rounds else (), kind="reduce_scatter")


@checked
def hierarchical(n_ranks: Ranks, *, groups: Sequence[Ints], levels: Levels | None = None) -> Schedule:
    """Reduce-scatter inside groups of equal size, then between the groups, level by level.

    MiCS (Zhang et al. 2022, arXiv:2205.00119, section 3.3). With rings, groups of n, m groups:
    (n-1) a1 + (n-1)/n S b1 + (m-1) a2 + (m-1)/m S/n b2.
    """
    levels = levels or grouped(groups, n_ranks)
    return scattered(levels.groups, n_ranks, levels.algorithms)


@checked
def torus(n_ranks: Ranks, axes: Ints | None = None) -> Schedule:
    """Rings in both directions along all axes of a torus at once, as in XLA on TPUs, then between slices.

    axes  ranks by position, shape (slices, sizes of the axes), determined from the cluster and its nodes; None: one
          ring

    On one torus of D equal axes of n ranks: D (n-1) alpha + (p-1)/p S beta / (2 D).
    """
    return scattered_on_axes(np.arange(n_ranks)[None] if axes is None else axes)


@checked
def direct(n_ranks: Ranks) -> Schedule:
    """Every rank sends each other rank its block at once: alpha + (p-1)/p S beta + S/p gamma."""
    rank, step = (a.ravel() for a in np.indices((n_ranks, n_ranks - 1)))
    other = (rank + 1 + step) % n_ranks
    lanes = ((messages(rank, other, other, reduce=True),),) if n_ranks > 1 else ()
    return Schedule(n_ranks, n_ranks, lanes, kind="reduce_scatter")
