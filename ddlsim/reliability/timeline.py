"""Steps and checkpoints of a training run without failures, on the clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ddlsim.cluster.cluster import Floats, Ints
from ddlsim.reliability.checkpoints import Cost


@dataclass(frozen=True, eq=False)
class Pace:
    """Progress of a training run without failures, piecewise linear in the time on the clock.

    clock      times in s, ascending from 0, shape (n,), n >= 2
    work       time in s that a run without events needs for the same steps, ascending from 0, shape (n,)
    rate       s of work per second after the last point
    busy       s that each worker has computed by each point, shape (n, n_workers)
    computing  s that each worker computes per second after the last point, shape (n_workers,)

    A run that resumes from a checkpoint repeats work, but not events, which are fixed on the clock.
    """

    clock: Floats
    work: Floats
    rate: float = 1.0
    busy: Floats | None = None
    computing: Floats | None = None

    def until(self, time: Floats | float) -> Floats:
        """Return the work done by times on the clock, in s."""
        late = np.maximum(np.asarray(time) - self.clock[-1], 0.0)
        return np.asarray(np.interp(time, self.clock, self.work) + (self.rate * late if self.rate else 0.0))

    def computed(self, start: float, end: float) -> Floats:
        """Return the computing time of each worker between two times on the clock, (n_workers,) s."""
        assert self.busy is not None
        assert self.computing is not None
        each = np.array([np.diff(np.interp((start, end), self.clock, own))[0] for own in self.busy.T])
        return np.asarray(each + self.computing * (max(end, self.clock[-1]) - max(start, self.clock[-1])))

    def when(self, work: Floats | float) -> Floats:
        """Return the time on the clock at which `work` (s) is done, in s; inf: never."""
        work = np.asarray(work)
        after = np.clip(np.searchsorted(self.work, work), 1, len(self.work) - 1)  # in a standstill, its beginning
        left, right = self.work[after - 1], self.work[after]
        late = np.maximum(work - self.work[-1], 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(right > left, (np.minimum(work, right) - left) / (right - left), work > right)
            late = np.where(late > 0.0, late / self.rate, 0.0)
        return np.asarray(self.clock[after - 1] + share * (self.clock[after] - self.clock[after - 1]) + late)


#: of a run without events
STEADY = Pace(np.zeros(2), np.zeros(2))


@dataclass(frozen=True, eq=False)
class FailureFreeTimeline:
    """The consecutive steps of a run without failures, and the checkpoints between them.

    A position on this timeline is the undisturbed training time since the start of the run, in s. It includes stalls
    for checkpoints.

    ends    ascending times at which the steps end, in s, shape (n_steps,); training begins at 0
    cycle   number of steps at the end that repeat indefinitely, so that a short simulation can represent a long
            training run; 0: the timeline ends with the last step
    every   training time between checkpoints, in s; inf: no checkpoints, so that a failure undoes all work
    cost    cost of a checkpoint
    length  training time at which the timeline ends, in s, if the steps repeat or `ends` extend beyond this time
    pace    undisturbed training time as a function of the time on the clock; the two differ if the run has scheduled
            faults
    """

    ends: Floats
    cycle: int
    every: float
    cost: Cost
    length: float
    pace: Pace = STEADY

    @cached_property
    def _pattern(self) -> Floats:
        """Ends of the repeating steps, relative to the end of the step before them, shape (cycle,)."""
        before = float(self.ends[-self.cycle - 1]) if self.cycle < len(self.ends) else 0.0
        return np.asarray(self.ends[-self.cycle :] - before)

    def end_of(self, steps: Ints) -> Floats:
        """Return the time in s at which each number of `steps` (from 1) has been completed."""
        known, further = len(self.ends), np.maximum(steps - len(self.ends) - 1, 0)
        ends: Floats = np.asarray(self.ends[np.minimum(steps, known) - 1])
        if not self.cycle:
            return ends
        later = self.ends[-1] + (self._pattern[-1] * (further // self.cycle) + self._pattern[further % self.cycle])
        return np.asarray(np.where(steps <= known, ends, later))

    def count(self, time: float) -> int:
        """Return the number of steps that have ended by `time` (s)."""
        last = float(self.ends[-1])
        if time < last or not self.cycle:
            return int(np.searchsorted(self.ends, time, "right"))
        repeats = int((time - last) // self._pattern[-1])
        rest = time - last - repeats * float(self._pattern[-1])
        steps = len(self.ends) + repeats * self.cycle + int(np.searchsorted(self._pattern, rest, "right"))
        while self.end_of(np.array(steps + 1)) <= time:  # correct for rounding
            steps += 1
        while steps > len(self.ends) and self.end_of(np.array(steps)) > time:
            steps -= 1
        return steps

    @cached_property
    def n_steps(self) -> int:
        """Number of steps that end within `length`; at least 1."""
        return max(self.count(self.length), 1)

    @cached_property
    def saved_steps(self) -> Ints:
        """Numbers of the steps after which a checkpoint is written, including the last step if the training ends."""
        if math.isinf(self.every):
            return np.empty(0, dtype=np.int64)
        steps, done = [], 0.0
        due = self.every * (1.0 - 1e-12)  # a step that ends exactly when the checkpoint is due is not too early
        while (step := self._first_at(done + due)) <= self.n_steps:
            steps.append(step)
            done = float(self.end_of(np.array(step)))
        if not self.cycle and (not steps or steps[-1] < self.n_steps):
            steps.append(self.n_steps)
        return np.array(steps, dtype=np.int64)

    def _first_at(self, time: float) -> int:
        """Return the number of the first step that ends at `time` or later; one more than the last if there is none."""
        steps = self.count(time)
        return steps if steps and self.end_of(np.array(steps)) == time else steps + 1

    @cached_property
    def saved_at(self) -> Floats:
        """Positions at which training continues after each checkpoint. The first is 0, for the initial state."""
        stalls = self.cost.stall * np.arange(1, len(self.saved_steps) + 1)
        return np.concatenate([[0.0], self.end_of(self.saved_steps) + stalls])

    @cached_property
    def safe_at(self) -> Floats:
        """Positions at which each checkpoint is completely written, so that it can be read."""
        safe = self.saved_at + self.cost.write
        safe[0] = 0.0
        return safe

    @property
    def end(self) -> float:
        """Position at which training has ended and its last checkpoint is written; inf if training does not end."""
        if self.cycle:
            return math.inf
        return float(self.safe_at[-1] if len(self.saved_steps) else self.end_of(np.array(self.n_steps)))

    def position(self, times: Floats) -> Floats:
        """Convert times of a run without checkpoints (s) to positions on this timeline, which includes checkpoints."""
        if not len(self.saved_steps):
            return np.asarray(times, dtype=np.float64)
        saved = self.end_of(self.saved_steps)
        return np.asarray(times + self.cost.stall * np.searchsorted(saved, times, "left"))

    def next_end(self, position: float) -> tuple[float, float]:
        """Return the positions at which the current step and the checkpoint due after it end; inf: no step is left."""
        step = self.steps_at(position) + 1
        if step > self.n_steps:
            return math.inf, math.inf
        end = float(self.position(self.end_of(np.array([step])))[0])
        return end, end + (self.cost.stall if step in self.saved_steps else 0.0)

    def end_of_step(self, position: float) -> float:
        """Return the position at which the current step ends, including the checkpoint that is due after it."""
        if math.isfinite(self.every):
            return self.next_end(position)[1]
        return float(self.end_of(np.array(self.count(position) + 1)))

    def checkpointing(self, position: float) -> float:
        """Return the time in s that training stops for checkpoints between position 0 and `position`."""
        ended = int(np.searchsorted(self.saved_at[1:], position, "right"))
        partly = 0.0
        if ended < len(self.saved_steps):
            partly = max(position - (float(self.saved_at[ended + 1]) - self.cost.stall), 0.0)
        return ended * self.cost.stall + partly

    def latest(self, position: float, since: int) -> int:
        """Return the number of the latest checkpoint that can be read at a position, at least `since`."""
        return max(int(np.searchsorted(self.safe_at, position, "right")) - 1, since)

    def steps_at(self, position: float) -> int:
        """Return the number of steps that have ended at a position."""
        number = int(np.searchsorted(self.saved_at, position, "right")) - 1
        base = int(self.saved_steps[number - 1]) if number else 0
        since = float(self.end_of(np.array(base))) if base else 0.0
        steps = self.count((since + (position - float(self.saved_at[number]))) * (1.0 + 1e-12))  # rounding
        following = int(self.saved_steps[number]) if number < len(self.saved_steps) else self.n_steps
        return min(max(steps, base), following)

    def ended(self, position: float) -> int:
        """Return the number of steps that have ended at a position, for timelines with or without checkpoints."""
        return self.steps_at(position) if math.isfinite(self.every) else self.count(position)


@dataclass(frozen=True, eq=False)
class OnClock(FailureFreeTimeline):
    """A timeline that begins at `since` (s on the clock), with times that follow the clock from then on."""

    since: float = 0.0
    _steady: FailureFreeTimeline | None = None

    @classmethod
    def of(cls, steady: FailureFreeTimeline, since: float) -> FailureFreeTimeline:
        """Return a timeline on the clock from `since` on."""
        if steady.pace is STEADY:
            return steady
        return cls(steady.ends, steady.cycle, steady.every, steady.cost, steady.length, steady.pace, since, steady)

    def end_of(self, steps: Ints) -> Floats:
        assert self._steady is not None
        return self.pace.when(self.pace.until(self.since) + self._steady.end_of(steps)) - self.since

    def count(self, time: float) -> int:
        assert self._steady is not None
        steps = self._steady.count(float(self.pace.until(self.since + time) - self.pace.until(self.since)))
        while self.end_of(np.array(steps + 1)) <= time:  # correct for rounding
            steps += 1
        return steps
