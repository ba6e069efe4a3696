"""All-gather: rank r starts with block r, and every rank ends with all blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddlsim.arguments import checked
from ddlsim.cluster.groups import Levels
from ddlsim.collectives import reduce_scatter
from ddlsim.collectives.combine import reverse
from ddlsim.collectives.gloo import gloo_all_gather as gloo_all_gather
from ddlsim.collectives.nccl_choice import Way
from ddlsim.collectives.nccl_schedule import by_nccl, side_by_side
from ddlsim.collectives.schedule import Ints, Ranks, Schedule, messages


@checked
def ring(n_ranks: Ranks) -> Schedule:
    """One lap of a ring (Patarasuk and Yuan 2009, sec. 3): (p-1) (alpha + S/p beta)."""
    rank = np.arange(n_ranks)
    step = messages(rank, (rank + 1) % n_ranks, rank, reduce=False, repeat=n_ranks - 1, shift=-1)
    return Schedule(n_ranks, n_ranks, ((step,),) if n_ranks > 1 else (), kind="all_gather")


@checked
def nccl(n_ranks: Ranks, way: Way | None = None) -> Schedule:
    """NCCL's algorithm, which consists of rings. See :func:`ddlsim.collectives.all_reduce.nccl`."""
    return by_nccl(ring, n_ranks, way)


@checked
def nccl_ring(n_ranks: Ranks, rings: Sequence[Ints] | None = None) -> Schedule:
    """Concurrent rings over all links between the GPUs. See :func:`ddlsim.collectives.all_reduce.nccl_ring`."""
    return side_by_side(ring, n_ranks, rings)


@checked
def recursive_doubling(n_ranks: Ranks) -> Schedule:
    """Recursive doubling (Thakur, Rabenseifner and Gropp 2005, sec. 4.1): log2 p alpha + (p-1)/p S beta.

    It is the reverse of recursive halving, with two more steps if p is not a power of two.
    """
    return reverse(reduce_scatter.recursive_halving(n_ranks), "all_gather")


@checked
def bruck(n_ranks: Ranks) -> Schedule:
    """Bruck et al. 1997: ceil(log2 p) alpha + (p-1)/p S beta for every number of ranks.

    In step k, rank r sends the blocks that it holds, starting with block r, to rank r - 2^k, except those that this
    rank already holds.
    """
    rank = np.arange(n_ranks)
    steps = [1 << k for k in range((n_ranks - 1).bit_length())]
    rounds = tuple(messages(rank, (rank - d) % n_ranks, rank, min(d, n_ranks - d), reduce=False) for d in steps)
    return Schedule(n_ranks, n_ranks, (rounds,) if rounds else (), kind="all_gather")


@checked
def hierarchical(n_ranks: Ranks, *, groups: Sequence[Ints], levels: Levels | None = None) -> Schedule:
    """Reverse of the hierarchical reduce-scatter: between groups first, then inside them."""
    return reverse(reduce_scatter.hierarchical(n_ranks, groups=groups, levels=levels), "all_gather")


@checked
def torus(n_ranks: Ranks, axes: Ints | None = None) -> Schedule:
    """Reverse of the reduce-scatter on a torus: between slices first, then along all axes at once."""
    return reverse(reduce_scatter.torus(n_ranks, axes), "all_gather")


@checked
def direct(n_ranks: Ranks) -> Schedule:
    """Every rank sends its block to all other ranks at once: alpha + (p-1)/p S beta."""
    return reverse(reduce_scatter.direct(n_ranks), "all_gather")
