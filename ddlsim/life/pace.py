"""Progress of a training on the clock, which events at known times slow down for a while."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Pace:
    """Progress of a training without failures, piecewise linear in the time on the clock.

    clock      s, ascending from 0, shape (n,), n >= 2
    work       s that a training without events needs for the same steps, ascending from 0, shape (n,)
    rate       s of work per second after the last point
    busy       s that each worker has computed until each point, shape (n, n_workers)
    computing  s that each worker computes per second after the last point, shape (n_workers,)

    A training that resumes from a checkpoint repeats work, but not events, which are fixed on the clock.
    """

    clock: Floats
    work: Floats
    rate: float = 1.0
    busy: Floats | None = None
    computing: Floats | None = None

    def until(self, time: Floats | float) -> Floats:
        """Return the s of work until times on the clock, in s."""
        late = np.maximum(np.asarray(time) - self.clock[-1], 0.0)
        return np.asarray(np.interp(time, self.clock, self.work) + (self.rate * late if self.rate else 0.0))

    def computed(self, start: float, end: float) -> Floats:
        """Return the s that each worker computes between two times on the clock, (n_workers,)."""
        assert self.busy is not None
        assert self.computing is not None
        each = np.array([np.diff(np.interp((start, end), self.clock, own))[0] for own in self.busy.T])
        return np.asarray(each + self.computing * (max(end, self.clock[-1]) - max(start, self.clock[-1])))

    def when(self, work: Floats | float) -> Floats:
        """Return the time on the clock, in s, at which that many s of work are done; inf: never."""
        work = np.asarray(work)
        after = np.clip(np.searchsorted(self.work, work), 1, len(self.work) - 1)  # of a standstill, its beginning
        left, right = self.work[after - 1], self.work[after]
        late = np.maximum(work - self.work[-1], 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(right > left, (np.minimum(work, right) - left) / (right - left), work > right)
            late = np.where(late > 0.0, late / self.rate, 0.0)
        return np.asarray(self.clock[after - 1] + share * (self.clock[after] - self.clock[after - 1]) + late)


#: of a training without events
STEADY = Pace(np.zeros(2), np.zeros(2))
