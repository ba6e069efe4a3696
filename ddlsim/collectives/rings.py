"""Several rings at once, each of which leaves every machine by another device: what NCCL does with many adapters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddlsim.collectives.schedule import Ints, Schedule, messages


def laps(n_ranks: int, groups: Sequence[Ints] | None, kind: str) -> Schedule:
    """Return one lap of as many rings as a machine has members, r: (p-1) (alpha + S/(r p) beta) of each.

    groups  the ranks of each machine; None, or one machine only: one ring. There are as many rings as the smallest
            machine has members; ring i goes through a machine from its i-th member round to the one before it, so each
            leaves it by another member, and adapters carry the same
    kind    "reduce_scatter" or "all_gather"

    A rank goes on when it has sent and received in all rings, so that all rounds are alike. A block is cut in as many
    chunks as there are rings; chunk p r + i is in the begin (in the end) where place p of ring i is.
    """
    machines = [np.arange(n_ranks)] if groups is None else [np.asarray(group) for group in groups]
    n_rings = 1 if len(machines) == 1 else min(len(machine) for machine in machines)
    places = np.arange(n_ranks)
    owners = np.empty(n_ranks * n_rings, dtype=np.int64)
    first = places if kind == "all_gather" else (places - 1) % n_ranks
    src, dst, start = [], [], []
    for i in range(n_rings):
        order = np.concatenate([np.roll(machine, -i) for machine in machines])
        owners[places * n_rings + i] = order
        src.append(order)
        dst.append(np.roll(order, -1))
        start.append(first * n_rings + i)
    lap = messages(
        np.concatenate(src), np.concatenate(dst), np.concatenate(start), reduce=kind == "reduce_scatter",
        repeat=n_ranks - 1, shift=-n_rings,
    )  # fmt: skip
    lanes = ((lap,),) if n_ranks > 1 else ()
    return Schedule(n_ranks, n_ranks * n_rings, lanes, kind=kind, owners=None if n_rings == 1 else owners)
