"""Rings as NCCL runs them: one on each of its channels, side by side, each with its share of the buffer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ddlsim.collectives.combine import strided
from ddlsim.collectives.schedule import Ints, Schedule
from ddlsim.errors import ConfigError


def side_by_side(ring: Callable[[int], Schedule], n_ranks: int, rings: Sequence[Ints] | None) -> Schedule:
    """Return the schedule in which ``ring(n_ranks)`` runs once in each of the orders `rings`, all in step.

    Part k of each block is what ring k carries of it, so a rank's block is the same for all of them. Raises ConfigError
    for orders that are none of the ranks.
    """
    alone = ring(n_ranks)
    if rings is None or n_ranks == 1:
        return alone
    for order in rings:
        if not np.array_equal(np.sort(np.asarray(order)), np.arange(n_ranks)):
            raise ConfigError(f"rings: {np.asarray(order).tolist()} is no order of the ranks 0..{n_ranks - 1}")
    n_rings = len(rings)
    (lap,) = alone.lanes  # the rounds of all rings are alike, and go on together
    rounds = []
    for r in lap:
        parts = [
            strided(dataclasses.replace(r, src=order[r.src], dst=order[r.dst]), n_ranks, n_rings, np.full(n_ranks, i))
            for i, order in enumerate(rings)
        ]
        src, dst, start, count = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("src", "dst", "start", "count")
        )
        rounds.append(dataclasses.replace(parts[0], src=src, dst=dst, start=start, count=count))
    return dataclasses.replace(
        alone,
        n_chunks=n_ranks * n_rings,
        lanes=(tuple(rounds),),
        block_of=None if alone.kind == "all_reduce" else np.stack(rings, axis=1).ravel(),
    )
