"""Scatter: the root starts with all blocks, and rank r ends with block r."""

from __future__ import annotations

from ddlsim.arguments import Index, checked
from ddlsim.collectives import gather
from ddlsim.collectives.combine import reverse
from ddlsim.collectives.gloo import gloo_scatter as gloo_scatter
from ddlsim.collectives.schedule import Ranks, Schedule


@checked
def direct(n_ranks: Ranks, root: Index = 0) -> Schedule:
    """The root sends all ranks their blocks at once: alpha + (p-1)/p S beta."""
    return reverse(gather.direct(n_ranks, root), "scatter")
