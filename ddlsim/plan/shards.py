"""Replay of collectives on parts: the range that each rank holds, the gradients in it, and whether it is updated."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ddlsim.errors import ConfigError
from ddlsim.plan.plan import (
    ALL_GATHER,
    BROADCAST,
    PUSH_PULL,
    REDUCE,
    REDUCE_SCATTER,
    UPDATE,
    Bools,
    Ints,
    Plan,
)
from ddlsim.plan.rows import refuse

#: of a number that stands for a micro-batch; sums wrap around
Marks = npt.NDArray[np.uint64]
#: the most pieces that ranges are cut into
LIMIT = 2**62


class Replay:
    """Deeds (sums, updates, distribution) executed in order at each *place*: a rank's copy of a part in a step.

    A place holds a range of the part with the gradient sum of some micro-batches, as the sum of their marks. A
    reduce-scatter leaves member i with the i-th of equal pieces; an all-gather concatenates adjacent ranges in the
    order of the group; a broadcast copies the first member's range.

    rows, places   (n,) the deeds, those of a place together and in their order
    contributions  (2, m) places and batches of the gradients that are there at the beginning
    marks          (n_batches, width) of the batches
    """

    def __init__(self, plan: Plan, rows: Ints, places: Ints, contributions: Ints, marks: Marks) -> None:
        self.plan, self.rows = plan, rows
        own_place, own_batch = contributions
        self.places = np.union1d(own_place, places)
        self.marks = np.zeros((len(self.places), marks.shape[1]), dtype=np.uint64)
        np.add.at(self.marks, np.searchsorted(self.places, own_place), marks[own_batch])
        cuts = {len(plan.groups[i]) for i in np.unique(plan.peer[rows[plan.kind[rows] == REDUCE_SCATTER]]).tolist()}
        #: the size of a part, of which whole pieces are left when any two of the groups have cut it
        self.size = math.lcm(1, *cuts) ** 2
        if self.size > LIMIT:
            raise ConfigError(
                f"plan: gradients are scattered over groups of {', '.join(map(str, sorted(cuts)))} ranks; use "
                "fewer different group sizes"
            )
        self.first = np.zeros(len(self.places), dtype=np.int64)
        self.end = np.full(len(self.places), self.size, dtype=np.int64)
        self.updated = np.zeros(len(self.places), dtype=np.bool_)
        self.found = np.zeros_like(self.marks)
        self.at = np.searchsorted(self.places, places)  # rows of the same place stand together, in their order
        begins = np.flatnonzero(np.diff(self.at, prepend=-1))
        self.nth = np.arange(len(rows)) - np.repeat(begins, np.diff(np.append(begins, len(rows))))
        # an update is by itself, also where one row is many of them
        key = np.where(plan.kind[rows] == UPDATE, len(plan) + np.arange(len(rows)), plan.key[rows])
        _, which, self.n_members = np.unique(key, return_inverse=True, return_counts=True)
        self.which = which.reshape(-1)
        position = np.full((max(len(plan.groups), 1), plan.n_ranks), -1, dtype=np.int64)
        for i, group in enumerate(plan.groups):
            position[i, list(group)] = np.arange(len(group))
        self.position = np.where(plan.kind[rows] == UPDATE, 0, position[plan.peer[rows], plan.rank[rows]])

    def at_update(self, places: Ints) -> Marks:
        """Return the sums at these places when they were updated, (n, width)."""
        return self.found[np.searchsorted(self.places, places)]

    def held(self, places: Ints) -> tuple[Ints, Ints, Bools]:
        """Return where the range of each place begins and ends, of :attr:`size`, and whether it has been updated."""
        at = np.searchsorted(self.places, places)
        return self.first[at], self.end[at], self.updated[at]

    def to_end(self) -> None:
        """Execute all deeds; a collective is executed when all its members have reached it."""
        n_done, left = np.zeros(len(self.places), dtype=np.int64), np.arange(len(self.rows))
        while len(left):
            here = left[self.nth[left] == n_done[self.at[left]]]
            n_here = np.bincount(self.which[here], minlength=len(self.n_members))
            go = here[(n_here == self.n_members)[self.which[here]]]
            kinds = self.plan.kind[self.rows[go]]
            for kind in np.unique(kinds).tolist():
                self._do(kind, go[kinds == kind])
            n_done[self.at[go]] += 1
            if not len(go):
                self._refuse(left[:1], "other ranks sum, update or distribute this part in a different order")
            left = left[~np.isin(left, go)]

    def _do(self, kind: int, go: Ints) -> None:
        go = go[np.lexsort((self.position[go], self.which[go]))]  # members of a collective together, in their order
        at = self.at[go]
        if kind == UPDATE:
            self.found[at], self.updated[at] = self.marks[at], True
            return
        begins = np.flatnonzero(np.diff(self.which[go], prepend=-1))
        size = np.diff(np.append(begins, len(go)))
        leader = np.repeat(begins, size)  # of each row, the first member of its collective
        if kind == BROADCAST:
            for held in (self.first, self.end, self.marks, self.updated):
                held[at] = held[at[leader]]
        elif kind == ALL_GATHER:
            self._gather(go, at, begins, size, leader)
        else:
            self._sum(kind, go, at, begins, size, leader)

    def _gather(self, go: Ints, at: Ints, begins: Ints, size: Ints, leader: Ints) -> None:
        inside = np.ones(len(go), dtype=np.bool_)
        inside[begins] = False
        second = np.flatnonzero(inside)
        apart = self.end[at[second - 1]] != self.first[at[second]]
        self._refuse(
            go[second[apart]], "its range of the part does not begin at the end of the previous member's range"
        )
        mixed = (self.marks[at] != self.marks[at[leader]]).any(axis=1) & ~self.updated[at]
        mixed |= self.updated[at] != self.updated[at[leader]]
        self._refuse(go[mixed], "its sum differs from that of the first member of its group")
        self.end[at] = np.repeat(self.end[at[begins + size - 1]], size)
        self.first[at] = self.first[at[leader]]

    def _sum(self, kind: int, go: Ints, at: Ints, begins: Ints, size: Ints, leader: Ints) -> None:
        self._refuse(go[self.updated[at]], "it sums gradients after their update")
        same = (self.first[at] == self.first[at[leader]]) & (self.end[at] == self.end[at[leader]])
        if kind == PUSH_PULL:  # servers bring nothing
            same |= np.isin(self.plan.rank[self.rows[go]], self.plan.servers)
        self._refuse(go[~same], "its range of the part differs from that of the first member of its group")
        total = np.repeat(np.add.reduceat(self.marks[at], begins, axis=0), size, axis=0)
        position = self.position[go]
        if kind == REDUCE:
            self.marks[at] = np.where(position[:, None] == 0, total, self.marks[at])
            self.end[at] = np.where(position == 0, self.end[at], self.first[at])
            return
        self.marks[at] = total
        if kind == REDUCE_SCATTER:
            piece, rest = np.divmod(self.end[at] - self.first[at], np.repeat(size, size))
            self._refuse(go[rest != 0], "it scatters a part for the third time; at most two are supported")
            self.first[at] += position * piece
            self.end[at] = self.first[at] + piece

    def _refuse(self, wrong: Ints, problem: str) -> None:
        refuse(self.plan, self.rows[wrong], problem)
