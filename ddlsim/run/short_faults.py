"""Faults that are over within a few steps, simulated as they happen.

How much time such a fault costs depends on the phase of the step and on other faults: a worker that stops where it
would have waited for others loses nothing, and of two workers that stop in the same step, only the later one counts.
The training is therefore simulated with these faults and, for comparison, without them. The time between two faults is
shortened by a whole number of cycles of steps, which leaves the phases of the steps unchanged; the steps left out count
as undisturbed.

The simulation covers all faults if they fit in `MOST_STEPS` steps. Of more faults, it covers the first: it ends when
the standard error of the mean pace is at most `PRECISION`, or after `MOST_STEPS` steps. Later faults slow down the
training as much as these do on average.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ddlsim.cluster.cluster import Floats
from ddlsim.errors import NoUpdateError

if TYPE_CHECKING:
    from ddlsim.run.result import Result

#: steps that are simulated at first if not all faults fit, and at most
FIRST_STEPS, MOST_STEPS = 256, 4096
#: standard error of the mean pace with which the simulation of further faults ends
PRECISION = 0.002
#: parts of a simulation, from whose differences its standard error is estimated
N_PARTS = 16


class ShortFault(NamedTuple):
    """A fault or slow-down `what` from `start` to `end` (s), in the `field` of an experiment."""

    start: float
    end: float
    field: str
    what: Any

    def at(self, start: float) -> ShortFault:
        """Return the fault with another start, in s."""
        length = self.end - self.start
        what = dataclasses.replace(self.what, start=start, duration=length)
        return ShortFault(start, start + length, self.field, what)


@dataclass(frozen=True, eq=False)
class Progress:
    """Progress of a training with short faults, piecewise linear.

    time       s, ascending from 0, shape (n,)
    done       s that a training without these faults needs for the same steps, shape (n,)
    last       s at which the last of these faults ends
    computing  share of the time up to then that each worker computes, shape (n_workers,)
    """

    time: Floats
    done: Floats
    last: float
    computing: Floats

    def until(self, time: Floats | float) -> Floats:
        """Return how far a training without these faults is when this one is at `time`; both in s."""
        late = np.maximum(np.asarray(time) - self.time[-1], 0.0)
        return np.asarray(np.interp(time, self.time, self.done) + late)

    def between(self, start: float, end: float) -> tuple[Floats, Floats, Floats]:
        """Return times from after `start` up to the `end`, if it is finite, between which progress is linear; how far
        a training without these faults goes from `start` on; and the s up to the last fault. Shape (n,) each."""
        points = self.time[(self.time > start) & (self.time < end)]
        times = np.append(points, end) if math.isfinite(end) else points
        disturbed = np.minimum(times, self.last) - min(start, self.last)
        return times, self.until(times) - self.until(start), disturbed


#: returns the run with some faults for a number of steps, or for a number of s
Simulate = Callable[[Sequence[ShortFault], int, float], "Result"]


def progress(
    faults: Sequence[ShortFault], simulate: Simulate, step_time: float, n_steps: int, n_repeated: int, n_updates: int
) -> Progress:
    """Return the progress of a training with short faults from the end of its first `n_steps` steps on.

    faults      by start
    step_time   s that a step takes without these faults
    n_steps     steps that are simulated between two faults, if there are as many
    n_repeated  steps after which the training without these faults repeats
    n_updates   number of updates in the first steps
    """
    few, cycle, last = n_steps * step_time, n_repeated * step_time, max(fault.end for fault in faults)
    n_needed = math.ceil((_Shortened(faults, few, cycle).end + 2.0 * few) / step_time) + 1
    total = n_needed if n_needed <= MOST_STEPS else FIRST_STEPS
    while True:
        steady = simulate((), total, math.inf)
        ends = np.array([0.0, *(time for time, _ in steady.recorder.updates)])
        begin = float(ends[min(n_updates, len(ends) - 1)])
        shortened = _Shortened(faults, few, cycle, begin)
        try:
            disturbed = simulate(shortened.before(2.0 * ends[-1]), total, 2.0 * ends[-1])
        except NoUpdateError:
            n_workers = len(steady.workloads)
            return Progress(np.array([0.0, last]), np.zeros(2), last, np.zeros(n_workers))
        times = np.array([0.0, *(time for time, _ in disturbed.recorder.updates)])
        ends = ends[: len(times)]
        is_all = times[-1] >= shortened.end
        time, done = shortened.given(times), ends + shortened.left_out(shortened.given(times))
        if is_all or total >= MOST_STEPS or (n_needed > MOST_STEPS and _standard_error(time, done) <= PRECISION):
            break
        total = min(4 * total, MOST_STEPS)
    knots = shortened.knots[shortened.knots < time[-1]]
    points = np.unique(np.concatenate([[begin], time[time > begin], knots[knots > begin]]))
    left_out = shortened.left_out(points)
    through = np.interp(points - left_out, times, ends) + left_out
    calmly = steady.device_seconds["compute"] / steady.simulated_time
    calm = left_out[-1] - begin - max(disturbed.simulated_time - shortened.end, 0.0)
    computing = (disturbed.device_seconds["compute"] + calmly * calm) / (disturbed.simulated_time + calm)
    points, through = points - begin, through - begin
    if not is_all:  # as until then
        rest = max(last - points[-1], 0.0)
        through = np.append(through, through[-1] * (1.0 + rest / points[-1]))
        points = np.append(points, points[-1] + rest)
    return Progress(points, through, last, computing)


def _standard_error(time: Floats, done: Floats) -> float:
    """Return the standard error of the mean pace of steps that have ended at a `time`, from the paces of its parts."""
    if len(time) <= N_PARTS:
        return math.inf
    ends = np.linspace(0, len(time) - 1, N_PARTS + 1).astype(np.int64)
    seconds, gone = np.diff(time[ends]), np.diff(done[ends])
    errors = gone - done[-1] / time[-1] * seconds
    return float(np.sqrt(N_PARTS / (N_PARTS - 1) * np.sum(errors**2)) / time[-1])


class _Shortened:
    """Faults, of a training that has begun `begin` s before, between which it is undisturbed for a shorter time.

    end    s, in shortened time, at which the last fault ends
    knots  ascending s, in unshortened time, from and until which cycles are left out
    """

    def __init__(self, faults: Sequence[ShortFault], few: float, cycle: float, begin: float = 0.0) -> None:
        self._faults, self._starts = faults, list[float]()
        at, omitted, self.end = [0.0], [0.0], begin
        for fault in faults:
            gap = begin + fault.start - omitted[-1] - self.end
            if (cycles := math.floor((gap - few) / cycle)) > 0:
                at.append(self.end + few)
                omitted.append(omitted[-1] + cycles * cycle)
            self._starts.append(begin + fault.start - omitted[-1])
            self.end = max(self.end, begin + fault.end - omitted[-1])
        self._at, self._omitted = np.array(at), np.array(omitted)
        #: s that have been left out until each knot
        self._until = np.repeat(self._omitted, 2)[:-1]
        self.knots = np.repeat(self._at, 2)[1:] + self._until

    def before(self, time: float) -> list[ShortFault]:
        """Return the faults that start before a shortened `time`, with shortened times."""
        return [fault.at(start) for fault, start in zip(self._faults, self._starts, strict=True) if start < time]

    def given(self, times: Floats) -> Floats:
        """Return the unshortened times of shortened ones, s."""
        return np.asarray(times + self._omitted[np.searchsorted(self._at, times, "left").clip(1) - 1])

    def left_out(self, time: Floats) -> Floats:
        """Return how many s have been left out until an unshortened `time`."""
        return np.asarray(np.interp(time, self.knots, self._until))
