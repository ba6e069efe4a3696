"""All-to-all: every rank has one block for every rank.

In place, by relative position: slot j of rank r starts with its block for rank r+j and ends with the block
from rank r-j (mod p). A block never leaves its slot number, so a message needs no other address.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddlsim.arguments import checked
from ddlsim.collectives.combine import reorder
from ddlsim.collectives.gloo import gloo_all_to_all as gloo_all_to_all
from ddlsim.collectives.schedule import Ints, Ranks, Schedule, Segments, messages
from ddlsim.errors import ConfigError

#: upper limit of the number of rounds over which the machines are distributed
MOST_ROUNDS = 8


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

    In step k, all slots with bit k set move by 2^k ranks, so slot j moves by j ranks in total.
    """
    rank = np.arange(n_ranks)
    rounds = tuple(
        messages(rank, (rank + (1 << k)) % n_ranks, reduce=False, slots=np.flatnonzero(rank >> k & 1))
        for k in range((n_ranks - 1).bit_length())
    )
    return Schedule(n_ranks, n_ranks, (rounds,) if rounds else (), kind="all_to_all")


@checked
def direct(n_ranks: Ranks) -> Schedule:
    """All messages at once, as in a plain loop of non-blocking sends: alpha + (p-1)/p S beta."""
    rank, step = (a.ravel() for a in np.indices((n_ranks, n_ranks - 1)))
    lanes = ((messages(rank, (rank + 1 + step) % n_ranks, 1 + step, reduce=False),),) if n_ranks > 1 else ()
    return Schedule(n_ranks, n_ranks, lanes, kind="all_to_all")


@checked
def nccl(n_ranks: Ranks, n_segments: Segments = 1, rails: Sequence[Ints] | None = None) -> Schedule:
    """NCCL's PXN: messages go over NVLink to the local GPU on the receiver's rail, and from its NIC to the receiver.

    rails  ranks of each machine in the order of their interfaces, the same number in all. They are determined from the
           links of clusters whose machines have NVLinks and several interfaces. None: all messages at once
           (:func:`direct`).

    There are up to 8 rounds, one per segment; data for the next round are sent to their rail during the current one.
    With m machines of n ranks, in one round: a1 + (n-1)/n S b1 + a2 + (m-1)/m S b2 (``src/graph/paths.cc``; NVIDIA
    2022, "Doubling all2all performance with NCCL 2.12").
    """
    if rails is None or n_ranks == 1:
        return direct(n_ranks)
    order = np.concatenate([np.zeros(0, dtype=np.int64), *rails])
    n = len(rails[0]) if len(rails) else 0
    if any(len(rail) != n for rail in rails) or not np.array_equal(np.sort(order), np.arange(n_ranks)):
        raise ConfigError(
            f"rails: must contain each rank from 0 to {n_ranks - 1} once, with the same number of ranks per machine"
        )
    m = len(rails)
    n_rounds = min(n_segments, MOST_ROUNDS)
    n_pieces = n_rounds if m <= MOST_ROUNDS else 1  # per block, so that few machines still fill several rounds
    items = np.arange(m * n_pieces)
    columns: list[list[list[Ints]]] = [[] for _ in range(n_rounds + 1)]
    for i, item in enumerate(np.array_split(items, n_rounds)):
        ahead, piece = item % m, item // m * n_ranks  # blocks d n to d n + n - 1 are for machines d or d + 1 further on
        machine, src, step, which = (a.ravel() for a in np.indices((m, n, n - 1, len(item))))
        dst, chunk = (src + 1 + step) % n, (piece + ahead * n)[which] + 1 + step
        columns[i].append([machine * n + src, machine * n + dst, chunk, np.ones_like(chunk)])
        machine, place, which = (a.ravel() for a in np.indices((m, n, len(item))))
        for beyond, start, count in ((0, 0, place + 1), (1, place + 1, n - 1 - place)):
            further = (ahead[which] + beyond) % m
            there, chunk = (machine + further) % m * n + place, (piece + ahead * n)[which] + start
            away = (further > 0) & (count > 0)
            columns[i + 1].append([column[away] for column in (machine * n + place, there, chunk, count)])
    parts = [[np.concatenate(column) for column in zip(*pieces, strict=True)] for pieces in columns]
    rounds = tuple(messages(*part, reduce=False) for part in parts if len(part[0]))
    n_chunks = n_ranks * n_pieces
    schedule = Schedule(n_ranks, n_chunks, (rounds,), kind="all_to_all", block_of=np.arange(n_chunks) % n_ranks)
    return reorder(schedule, order)
