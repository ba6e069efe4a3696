"""The bytes that a collective must bring across the borders of places, whatever its algorithm."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ddlsim.plan.plan import Bools, Floats, Ints


class Crossing(NamedTuple):
    """Buffers that must leave and enter each of some places, (k,) each, and all places together."""

    place: Ints
    out: Floats
    into: Floats
    together: float


def least_crossing(kind: str, members: Ints, is_server: Bools, *, added_up: bool = True) -> Crossing:
    """Return what a collective must bring across borders at least, in units of its buffer.

    members    (n,) the place of each member, in the group's order
    is_server  (n,) of the members of a push_pull, which come last
    added_up   whether pushes of several places may be added up on their way, as those of a machine's devices are;
               otherwise every place with workers pushes by itself, and pulls

    What has to be added up (all-reduce, reduce-scatter, reduce, push) can be added up inside a place first, and what
    all need (all-reduce, all-gather, broadcast, pull) enters a place once: k - 1 receptions make a sum of k places,
    and k - 1 tell something to k (Patarasuk and Yuan 2009, JPDC 69(2), theorem 1). What is each member's own
    (all-gather, gather, scatter, all-to-all) travels from its place to those where it is wanted.
    """
    place, which, count = np.unique(members, return_inverse=True, return_counts=True)
    which, k = which.reshape(-1), len(place)
    none = np.zeros(k)
    if k == 1:
        return Crossing(place, none, none, 0.0)
    every, share = np.ones(k), count / len(members)
    root = (place == members[0]).astype(np.float64)
    if kind == "all_reduce":
        return Crossing(place, every, every, 2.0 * (k - 1))
    if kind in ("reduce_scatter", "all_gather"):
        out, into, together = share, 1.0 - share, k - 1.0
        return Crossing(place, *((out, into) if kind == "all_gather" else (into, out)), together)
    if kind in ("broadcast", "reduce"):
        return Crossing(place, *((root, 1.0 - root) if kind == "broadcast" else (1.0 - root, root)), k - 1.0)
    if kind in ("gather", "scatter"):
        others, elsewhere = (1.0 - root) * share, root * (1.0 - share)
        return Crossing(
            place, *((others, elsewhere) if kind == "gather" else (elsewhere, others)), float(elsewhere.sum())
        )
    if kind == "all_to_all":
        crossing = count * (1.0 - share)
        return Crossing(place, crossing, crossing, float(crossing.sum()))
    shard = np.bincount(which[is_server], minlength=k) / is_server.sum()
    works = np.bincount(which[~is_server], minlength=k) > 0
    elsewhere = works.sum() - works  # places with workers besides this one
    answers = elsewhere > 0 if added_up else elsewhere
    crossing = works * (1.0 - shard) + shard * answers  # out: push to others, answer others; into: likewise
    return Crossing(place, crossing, crossing, 2.0 * float((shard * elsewhere).sum()))
