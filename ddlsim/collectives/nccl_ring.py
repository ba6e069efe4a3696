"""Rings as NCCL runs them: one on each of its channels, side by side, each with its share of the buffer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

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
    if not len(rings):
        raise ConfigError("rings = (): must be one order of the ranks or more")
    for order in rings:
        if not np.array_equal(np.sort(np.asarray(order)), np.arange(n_ranks)):
            raise ConfigError(f"rings: {np.asarray(order).tolist()} is no order of the ranks 0..{n_ranks - 1}")
    n_rings, orders = len(rings), np.stack(rings)
    which = np.arange(n_rings)[:, None]
    (lap,) = alone.lanes  # the rounds of all rings are alike, and go on together; each message carries one chunk
    rounds = [
        dataclasses.replace(
            r, src=orders[:, r.src].ravel(), dst=orders[:, r.dst].ravel(),
            start=(r.start * n_rings + which).ravel(), count=np.tile(r.count, n_rings), shift=r.shift * n_rings,
        ) for r in lap
    ]  # fmt: skip
    return dataclasses.replace(
        alone,
        n_chunks=n_ranks * n_rings,
        lanes=(tuple(rounds),),
        block_of=None if alone.kind == "all_reduce" else orders.T.ravel(),
    )
