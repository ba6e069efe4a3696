"""A training without failures, as the times at which its steps end and its checkpoints are made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ddlsim.life.checkpoints import Cost

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Timeline:
    """Steps that follow each other, and what is saved after some of them.

    ends    s at which steps end, ascending, shape (n_steps,); the training begins at 0
    cycle   how many of them repeat at the end, for ever: a run of some steps stands for a long training. 0: it ends
            with the last one
    every   s of training between checkpoints, inf: none is made, and a failure takes all
    cost    of one
    length  s of training that are looked at: with a `cycle`, or where `ends` go further

    A position on the timeline is the time in a training that nothing disturbs, with the stalls of its checkpoints.
    """

    ends: Floats
    cycle: int
    every: float
    cost: Cost
    length: float

    @cached_property
    def step_ends(self) -> Floats:
        """s at which the steps within `length` end, without checkpoints."""
        if not self.cycle or self.ends[-1] >= self.length:
            return self.ends[: max(int(np.searchsorted(self.ends, self.length, "right")), 1)]
        before = self.ends[-self.cycle - 1] if self.cycle < len(self.ends) else 0.0
        pattern = self.ends[-self.cycle :] - before
        repeats = math.ceil((self.length - self.ends[-1]) / pattern[-1]) + 1
        more = self.ends[-1] + (pattern[-1] * np.arange(repeats)[:, None] + pattern).ravel()
        return np.concatenate([self.ends, more[: int(np.searchsorted(more, self.length, "right"))]])

    @cached_property
    def saved_steps(self) -> Ints:
        """Numbers of steps after which a checkpoint is made; of a training that ends, after its last one, too."""
        ends = self.step_ends
        if math.isinf(self.every):
            return np.empty(0, dtype=np.int64)
        steps, done, n_steps = [], 0.0, len(ends)
        due = self.every * (1.0 - 1e-12)  # a step that ends when it is due is not one too early
        while (step := int(np.searchsorted(ends, done + due))) < n_steps:
            steps.append(step + 1)
            done = float(ends[step])
        if not self.cycle and (not steps or steps[-1] < n_steps):
            steps.append(n_steps)
        return np.array(steps, dtype=np.int64)

    @cached_property
    def saved_at(self) -> Floats:
        """Positions at which the stall of each checkpoint ends; before all of them one at 0."""
        stalls = self.cost.stall * np.arange(1, len(self.saved_steps) + 1)
        return np.concatenate([[0.0], self.step_ends[self.saved_steps - 1] + stalls])

    @cached_property
    def safe_at(self) -> Floats:
        """Positions from which on each checkpoint can be read."""
        safe = self.saved_at + self.cost.write
        safe[0] = 0.0
        return safe

    @property
    def end(self) -> float:
        """Position at which a training that ends has ended and is saved; inf for one that goes on."""
        if self.cycle:
            return math.inf
        return float(self.safe_at[-1] if len(self.saved_steps) else self.step_ends[-1])

    def position(self, times: Floats) -> Floats:
        """Return the positions of times of a training without checkpoints, in s."""
        if not len(self.saved_steps):
            return np.asarray(times, dtype=np.float64)
        saved = self.step_ends[self.saved_steps - 1]
        return np.asarray(times + self.cost.stall * np.searchsorted(saved, times, "left"))

    def saving(self, position: float) -> float:
        """Return how many s of a stretch from 0 to a position the training stood still for checkpoints."""
        ended = int(np.searchsorted(self.saved_at[1:], position, "right"))
        partly = 0.0
        if ended < len(self.saved_steps):
            partly = max(position - (float(self.saved_at[ended + 1]) - self.cost.stall), 0.0)
        return ended * self.cost.stall + partly

    def latest(self, position: float, since: int) -> int:
        """Return the number of the latest checkpoint that can be read at a position, reached from that of number
        `since`, which can be read."""
        return max(int(np.searchsorted(self.safe_at, position, "right")) - 1, since)
