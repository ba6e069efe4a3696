"""All-to-all: every rank has one block for every rank.

In place, by relative position: slot j of rank r starts with its block for rank r+j and ends with the block
from rank r-j (mod p). A block never leaves its slot number, so a message needs no other address.
"""

from __future__ import annotations

import numpy as np

from ddlsim.arguments import checked
from ddlsim.collectives.gloo import gloo_all_to_all
from ddlsim.collectives.schedule import Ranks, Schedule, messages

__all__ = ["bruck", "direct", "gloo_all_to_all", "pairwise"]


@checked
def pairwise(n_ranks: Ranks) -> Schedule:
    """One partner at a time (Thakur, Rabenseifner and Gropp 2005, sec. 4.4): (p-1) (alpha + S/p beta)."""
    rank = np.arange(n_ranks)
    twice = np.concatenate([rank, rank])
    rounds = tuple(messages(rank, twice[j : j + n_ranks], j, reduce=False) for j in range(1, n_ranks))
    return Schedule(n_ranks, n_ranks, (rounds,) if rounds else (), kind="all_to_all")


@checked
def bruck(n_ranks: Ranks) -> Schedule:
    """Bruck et al. 1997: ceil(log2 p) messages per rank; log2 p (alpha + S/2 beta) if p = 2^q.

    In step k all slots with bit k set move 2^k ranks on, so slot j moves j ranks in all.
    """
    rank = np.arange(n_ranks)
    rounds = tuple(
        messages(rank, (rank + (1 << k)) % n_ranks, reduce=False, slots=np.flatnonzero(rank >> k & 1))
        for k in range((n_ranks - 1).bit_length())
    )
    return Schedule(n_ranks, n_ranks, (rounds,) if rounds else (), kind="all_to_all")


@checked
def direct(n_ranks: Ranks) -> Schedule:
    """Everything at once, as a plain loop of non-blocking sends does: alpha + (p-1)/p S beta."""
    rank, step = (a.ravel() for a in np.indices((n_ranks, n_ranks - 1)))
    lanes = ((messages(rank, (rank + 1 + step) % n_ranks, 1 + step, reduce=False),),) if n_ranks > 1 else ()
    return Schedule(n_ranks, n_ranks, lanes, kind="all_to_all")
