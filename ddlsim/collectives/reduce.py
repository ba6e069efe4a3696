"""Reduce: the root ends with the sum of all buffers."""

from __future__ import annotations

import numpy as np

from ddlsim.arguments import Index, checked
from ddlsim.collectives.combine import with_root
from ddlsim.collectives.gloo import gloo_reduce as gloo_reduce
from ddlsim.collectives.schedule import Ranks, Schedule, Segments, messages
from ddlsim.collectives.trees import pipeline


@checked
def binomial(n_ranks: Ranks, root: Index = 0) -> Schedule:
    """Binomial tree, nearest rank first: log2 p (alpha + S (beta + gamma)) if p = 2^q.

    For other numbers of ranks, this is an upper bound, because ranks with smaller subtrees send early.
    """
    rank = np.arange(n_ranks)
    rounds = []
    for k in range((n_ranks - 1).bit_length()):
        sender = rank[rank % (2 << k) == 1 << k]
        rounds.append(messages(sender, sender - (1 << k), reduce=True))
    return with_root(Schedule(n_ranks, 1, (tuple(rounds),) if rounds else (), kind="reduce"), root)


@checked
def chain(n_ranks: Ranks, root: Index = 0, *, n_segments: Segments = 1) -> Schedule:
    """Pipelined chain ..., root+1, root: (p - 2 + c) (alpha + S/c (beta + gamma)) with c segments."""
    sender = np.arange(n_ranks - 1, 0, -1)
    rounds = pipeline(sender, sender - 1, n_ranks - 1 - sender, n_segments, reduce=True)
    return with_root(Schedule(n_ranks, n_segments, (rounds,) if rounds else (), kind="reduce"), root)
