"""A training with failures: from failure to failure, which skips the steps between them exactly."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ddlsim.errors import DdlsimError
from ddlsim.life.failures import Failure, Failures
from ddlsim.life.timeline import Floats, Timeline
from ddlsim.readable import count, duration, percent
from ddlsim.text_tables import labelled
from ddlsim.units import si

if TYPE_CHECKING:
    import pandas as pd

#: failures in a row without a checkpoint between them after which a training is given up
HOPELESS = 100_000


@dataclass(frozen=True, eq=False, repr=False)
class Life:
    """What a training did with its time. Times in s.

    end          when it was over: it had learned enough, or its time was up
    finished     whether it had learned enough
    useful       steps that counted in the end
    lost         steps, and parts of them, that a failure took back, with their checkpoints
    saving       standing still for checkpoints that counted
    noticing     until failures were noticed
    repairing    waiting for a machine
    restarting   starting again, with reading the checkpoint
    steps        steps that counted
    failures     the time of each, the part that failed, and the seconds of work that it took
    stretches    (start, position on the timeline at its start, at its end) of each time that it ran, shape (n, 3)

    samples      samples that counted, in elastic runs
    computed     s that each worker computed, (n_workers,), in elastic runs
    away         s that each worker was out of service, (n_workers,), in elastic runs

    The six kinds of time add up to `end`.
    """

    timeline: Timeline
    end: float
    finished: bool
    useful: float
    lost: float
    saving: float
    noticing: float
    repairing: float
    restarting: float
    steps: int
    events: tuple[tuple[float, int, float], ...]
    stretches: Floats
    samples: float | None = None
    computed: Floats | None = None
    away: Floats | None = None

    @property
    def down(self) -> float:
        """s in which the training did not run."""
        return self.noticing + self.repairing + self.restarting

    @property
    def availability(self) -> float:
        """Share of the time in which the training ran."""
        return 1.0 - self.down / self.end

    @property
    def effective(self) -> float:
        """Share of the time that went into steps that counted: "effective training time", or goodput as a share."""
        return self.useful / self.end

    @property
    def goes_to(self) -> str:
        """What its time went to, in words, e.g. "useful 98.1 %, lost 1.1 %, repairing 0.8 %"."""
        kinds = ("lost", "saving", "noticing", "repairing", "restarting")
        parts = [f"{kind} {percent(part / self.end)}" for kind in kinds if (part := getattr(self, kind)) > 0.0]
        return ", ".join([f"useful {percent(self.effective)}", *parts])

    def _rows(self) -> list[tuple[str, str]]:
        ended = "it had learned enough" if self.finished else "its time was up"
        return [
            ("life", f"{duration(self.end)} with {count(len(self.events), 'failure')}, until {ended}"),
            ("goes to", self.goes_to), ("steps that count", f"{self.steps:,}"),
            ("work lost", f"{duration(self.lost)}, with its checkpoints" if self.events else ""),
        ]  # fmt: skip

    def __repr__(self) -> str:
        failures = count(len(self.events), "failure")
        return f"<{type(self).__name__}: {duration(self.end)} with {failures}, {self.goes_to}>"

    def __str__(self) -> str:
        return "\n".join(labelled([row for row in self._rows() if row[1]]))

    def _repr_html_(self) -> str:
        from ddlsim.notebook import labelled as table
        from ddlsim.notebook import page

        return page("Life of a training", table(self._rows()))

    def to_dict(self) -> dict[str, object]:
        """Return the numbers as plain values."""
        times = ("end", "useful", "lost", "saving", "noticing", "repairing", "restarting")
        return {
            **{name: getattr(self, name) for name in times}, "finished": self.finished, "steps": self.steps,
            "availability": self.availability, "effective": self.effective, "failures": len(self.events),
        }  # fmt: skip

    @cached_property
    def failures(self) -> pd.DataFrame:
        """One row per failure: time (s), unit (number of what failed), lost (s of work)."""
        import pandas as pd

        return pd.DataFrame(list(self.events), columns=["time", "unit", "lost"]).rename_axis("failure")

    def first_reached(self, times: Floats) -> Floats:
        """Return when the training first got to these times of a run without failures and checkpoints, in s; inf where
        it did not get there."""
        pace = self.timeline.pace
        positions = self.timeline.position(pace.until(np.asarray(times, dtype=np.float64)))
        starts, froms, tos = self.stretches.T
        furthest = np.maximum.accumulate(tos)
        stretch = np.searchsorted(furthest, positions, "left")
        there = stretch < len(starts)
        at = np.where(there, stretch, 0)
        return np.where(there, pace.when(pace.until(starts[at]) + positions - froms[at]), math.inf)


class _Machines:
    """Machines that stand ready or are being repaired."""

    def __init__(self, spares: int) -> None:
        self._ready = [0.0] * spares

    def taken_out(self, until: float) -> None:
        heapq.heappush(self._ready, until)

    def replaced_at(self, now: float) -> float:
        """Return when there is a machine, and take it."""
        return max(heapq.heappop(self._ready), now)


def live(
    timeline: Timeline, failures: Failures, n_units: int, length: float, *, machines: Sequence[int] | None = None,
    seed: int = 0, life: int = 0,
) -> Life:  # fmt: skip
    """Return what happens to a training of which `n_units` parts fail, until it has ended or `length` s are over.

    machines  how many must be replaced where each part crashes, (n_units,); None: one
    Raises ConfigError for a trace of parts that are not there, and DdlsimError where no checkpoint is ever reached.
    """
    coming = failures.events(n_units, seed, life)
    return _Living(timeline, failures, length, coming, machines).run()


class _Living:
    def __init__(
        self, timeline: Timeline, failures: Failures, length: float, coming: Iterator[Failure],
        n_machines: Sequence[int] | None,
    ) -> None:  # fmt: skip
        self.timeline, self.failures, self.length, self.coming = timeline, failures, length, coming
        self.n_machines = n_machines
        self.next = self._drawn()
        self.machines = _Machines(failures.spares)
        self.noticing = self.repairing = self.restarting = self.lost = self.saving = 0.0
        self.events: list[tuple[float, int, float]] = []
        self.stretches: list[tuple[float, float, float]] = []

    def _drawn(self) -> Failure:
        return next(self.coming, Failure(math.inf, 0, 0.0))

    def run(self) -> Life:
        timeline, now, checkpoint, fruitless = self.timeline, 0.0, 0, 0
        begin = 0.0  # the position that is gone back to
        while True:
            start, ends = now, self._time(timeline.end, now, begin)
            if (left := self._leaves(start, begin, min(ends, self.length))) is not None:
                position, now = left
                self.stretches.append((start, begin, position))
                checkpoint, begin, fruitless = timeline.latest(position, checkpoint), position, 0
                now = self._recovered(now, 0.0, warned=True)
                if now >= self.length:
                    return self._over(self.length, position, False)
                continue
            until = min(ends, self.length, self.next.time)
            position = timeline.end if until == ends else self._position(until, start, begin)
            self.stretches.append((start, begin, position))
            if until == ends or until >= self.length:
                return self._over(until, position, until == ends)
            reached = timeline.latest(position, checkpoint)
            saved = max(float(timeline.saved_at[reached]), begin)
            fruitless = 0 if saved > begin else fruitless + 1
            if fruitless > HOPELESS:
                raise DdlsimError(
                    f"failures: {HOPELESS:,} in a row, none of them {timeline.every:.6g} s of training apart, so that "
                    "no checkpoint is reached; make checkpoints more often, or use parts that fail less often"
                )
            lost = until - self._time(saved, start, begin)
            self.lost += lost
            checkpoint, begin = reached, saved
            now = self._recovered(until, lost)
            if now >= self.length:
                return self._over(self.length, begin, False)

    def _position(self, time: float, start: float, begin: float) -> float:
        """Return the position at a time of what runs since `start` from the position `begin` on."""
        return begin + float(self.timeline.pace.until(time) - self.timeline.pace.until(start))

    def _time(self, position: float, start: float, begin: float) -> float:
        """Return when it gets to a position, the reverse."""
        return max(float(self.timeline.pace.when(self.timeline.pace.until(start) + (position - begin))), start)

    def _leaves(self, start: float, begin: float, until: float) -> tuple[float, float] | None:
        """Return where a training that runs since `start` stops because a failure is announced, and when it is saved;
        None if none is before `until`, or if it is not saved before the failure."""
        cost, warning = self.timeline.cost, self.failures.seconds_of_warning
        if not warning or math.isinf(self.timeline.every):
            return None
        warned = max(self.next.time - warning, start)
        if warned >= until:
            return None
        end, after = self.timeline.next_end(self._position(warned, start, begin))
        saved = self._time(end, start, begin) + cost.stall + cost.write
        if saved > self.next.time or saved >= until:
            return None
        self.saving += cost.stall + cost.write - (after - end)
        return after, saved

    def _recovered(self, failed: float, lost: float, warned: bool = False) -> float:
        """Return when the training runs again; every failure until then makes it start again."""
        now = failed
        restart = si(self.failures.restart, "time") + self.timeline.cost.load
        while True:
            failure = self.next
            self.next = self._drawn()
            self.events.append((failure.time, failure.unit, lost))
            lost = 0.0
            if failure.time >= now and not warned:  # what fails while all wait anyway is noticed with the first
                now = self._pass("noticing", now, self.failures.seconds_to_notice)
            warned = False
            if self.failures.takes_machines:
                n = 1 if self.n_machines is None else self.n_machines[failure.unit]
                for _ in range(n):
                    self.machines.taken_out(failure.time + failure.repair)
                there = max(self.machines.replaced_at(now) for _ in range(n))
                now = self._pass("repairing", now, there - now)
            if self.next.time >= now + restart or now >= self.length:
                return self._pass("restarting", now, restart)
            if self.next.time > now:
                now = self._pass("restarting", now, self.next.time - now)

    def _pass(self, kind: str, now: float, seconds: float) -> float:
        """Book seconds, as far as they are within the length, and return the time after them."""
        setattr(self, kind, getattr(self, kind) + max(min(seconds, self.length - now), 0.0))
        return now + seconds

    def _over(self, end: float, position: float, finished: bool) -> Life:
        timeline = self.timeline
        saving = timeline.saving(position) if not finished else timeline.cost.stall * len(timeline.saved_steps)
        waiting = position - float(timeline.saved_at[-1]) if finished and len(timeline.saved_steps) else 0.0
        saving += waiting + self.saving  # for the last one to be safe, and for those before announced failures
        useful = end - saving - self.noticing - self.repairing - self.restarting - self.lost
        steps = timeline.n_steps if finished else timeline.steps_at(position)
        return Life(
            timeline, end, finished, useful, self.lost, saving, self.noticing, self.repairing, self.restarting, steps,
            tuple(self.events), np.array(self.stretches, dtype=np.float64).reshape(-1, 3),
        )  # fmt: skip
