"""Gather: rank r starts with block r, and the root ends with all blocks."""

from __future__ import annotations

import numpy as np

from ddlsim.arguments import Index, checked
from ddlsim.collectives.combine import with_root
from ddlsim.collectives.gloo import gloo_gather as gloo_gather
from ddlsim.collectives.schedule import Ranks, Schedule, messages


@checked
def direct(n_ranks: Ranks, root: Index = 0) -> Schedule:
    """All ranks send their blocks to the root at once: alpha + (p-1)/p S beta."""
    rank = np.arange(1, n_ranks)
    lanes = ((messages(rank, 0, rank, reduce=False),),) if n_ranks > 1 else ()
    return with_root(Schedule(n_ranks, n_ranks, lanes, kind="gather"), root)
