"""Broadcast: every rank ends with the root's buffer."""

from __future__ import annotations

import dataclasses

import numpy as np

from ddlsim.arguments import Index, checked
from ddlsim.collectives import all_gather, reduce
from ddlsim.collectives.combine import reverse, sequence, with_root
from ddlsim.collectives.gloo import gloo_broadcast as gloo_broadcast
from ddlsim.collectives.schedule import Ranks, Schedule, Segments, messages


@checked
def binomial(n_ranks: Ranks, root: Index = 0, *, answer: Index = 0) -> Schedule:
    """Binomial tree, farthest rank first: ceil(log2 p) (alpha + S beta), for every number of ranks.

    answer  bytes with which a child acknowledges to its parent that it has all data; the parent waits for it before it
            sends to its next child, which adds one alpha per level. 0: none
    """
    silent = reverse(reduce.binomial(n_ranks, root), "broadcast")
    if not answer:
        return silent
    lanes = tuple(
        tuple(both for r in lane for both in (r, messages(r.dst, r.src, 0, 0, reduce=False, header=answer)))
        for lane in silent.lanes
    )
    return dataclasses.replace(silent, lanes=lanes)


@checked
def chain(n_ranks: Ranks, root: Index = 0, *, n_segments: Segments = 1) -> Schedule:
    """Pipelined chain root, root+1, ...: (p - 2 + c) (alpha + S/c beta) with c segments."""
    return reverse(reduce.chain(n_ranks, root, n_segments=n_segments), "broadcast")


@checked
def scatter_all_gather(n_ranks: Ranks, root: Index = 0) -> Schedule:
    """Binomial scatter, then a ring all-gather (van de Geijn; Thakur, Rabenseifner and Gropp 2005, sec. 4.2).

    (log2 p + p - 1) alpha + 2 (p-1)/p S beta if p = 2^q.
    """
    rank = np.arange(n_ranks)
    rounds = []
    for k in reversed(range((n_ranks - 1).bit_length())):
        distance = 1 << k
        sender = rank[(rank % (2 * distance) == 0) & (rank + distance < n_ranks)]
        start = sender + distance
        end = np.minimum(start + distance, n_ranks)
        rounds.append(messages(sender, start, start, end - start, reduce=False))
    scatter = Schedule(n_ranks, n_ranks, (tuple(rounds),))
    schedule = sequence(scatter, all_gather.ring(n_ranks), kind="broadcast")
    return with_root(dataclasses.replace(schedule, lanes=schedule.lanes if rounds else ()), root)
