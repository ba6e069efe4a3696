"""The failure engine: the course of a training run with failing machines, on one clock, with one pool of spares.

:class:`Outages` contains the failures of a run by time, and the machines that they take out of service. A policy sets
what the workers do meanwhile: all wait and return to a checkpoint (:func:`simulate_failures`), the remaining ones form
a new group (:class:`TakeTurns`), or the others continue (:func:`windows`). Between two failures, the times of steps and
checkpoints are known (:class:`FailureFreeTimeline`), so the engine jumps to the next one.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ddlsim.cluster.cluster import Floats, Ints
from ddlsim.errors import ConfigError, DdlsimError, SuggestsAttributes
from ddlsim.readable import count, duration, percent
from ddlsim.reliability.checkpoints import NO_CHECKPOINTS, Cost
from ddlsim.reliability.failures import Failure, Failures
from ddlsim.text_tables import labelled
from ddlsim.units import si

if TYPE_CHECKING:
    import pandas as pd

    from ddlsim.learning import Array, Value
    from ddlsim.learning.monitor import Row
    from ddlsim.run.elastic import Groups

KINDS = ("useful", "lost", "checkpointing", "detecting", "repairing", "restarting")
NEVER = Failure(math.inf, 0, 0.0)
#: consecutive failures without a checkpoint in between after which the simulation gives up
HOPELESS = 100_000
#: largest number of checkpoints in a timeline
MOST_CHECKPOINTS = 10_000_000
LESS_OFTEN = "use parts that fail less often"


@dataclass(frozen=True, eq=False, repr=False)
class FailureTimeline(SuggestsAttributes):
    """A failure timeline: how a training run with failures and checkpoints spent its time. All times are in s.

    timeline     steps and checkpoints of the same run without failures
    end          time at which the run reached its target or its time limit
    finished     whether the run reached its target
    useful       total time spent in steps that no failure undid
    lost         total time spent in steps that a failure undid, including their checkpoints
    checkpointing  total time that training was stopped for checkpoints, except those included in `lost`
    detecting    total time between failures and their detection
    repairing    total time spent waiting for repaired or spare machines
    restarting   total time spent restarting the job, including reading checkpoints
    steps        number of steps that no failure undid
    events       tuple (time, index of the failed part, lost work in s) for each failure
    running_intervals
                 periods of uninterrupted training, shape (n, 3): the start time of each period, and the positions on
                 `timeline` at its start and end

    samples      number of samples processed in these steps, in elastic runs
    computed     time that each worker spent computing, shape (n_workers,), in elastic runs
    out_of_service  time that each worker was out of service, shape (n_workers,), in runs that continue without failed
                 workers
    groups       tuple (start in s, number of workers) for each group of an elastic run; 0 workers: too few machines
                 were left
    history      evaluations of an elastic training run
    model        final model of an elastic training run

    ``useful``, ``lost``, ``checkpointing``, ``detecting``, ``repairing`` and ``restarting`` add up to ``end``.
    """

    timeline: FailureFreeTimeline
    end: float
    finished: bool
    useful: float
    lost: float
    checkpointing: float
    detecting: float
    repairing: float
    restarting: float
    steps: int
    events: tuple[tuple[float, int, float], ...]
    running_intervals: Floats
    samples: float | None = None
    computed: Floats | None = None
    out_of_service: Floats | None = None
    groups: tuple[tuple[float, int], ...] = ()
    history: tuple[Row, ...] = ()
    model: Value[Array] | None = None

    @property
    def down(self) -> float:
        """Downtime: time in s during which training did not run."""
        return self.detecting + self.repairing + self.restarting

    @property
    def availability(self) -> float:
        """Share of the time in which training ran."""
        return 1.0 - self.down / self.end

    @property
    def effective(self) -> float:
        """Fraction of the time spent in steps that counted, also called the effective training time ratio."""
        return self.useful / self.end

    @property
    def breakdown(self) -> str:
        """Breakdown of the time as a string, such as "useful 98.1 %, lost 1.1 %, repairing 0.8 %"."""
        parts = [f"{kind} {percent(part / self.end)}" for kind in KINDS[1:] if (part := getattr(self, kind)) > 0.0]
        return ", ".join([f"useful {percent(self.effective)}", *parts])

    def _rows(self) -> list[tuple[str, str]]:
        ended = "reached its target" if self.finished else "reached its time limit"
        return [
            ("timeline", f"{duration(self.end)} with {count(len(self.events), 'failure')}; the run {ended}"),
            ("time split", self.breakdown),
            ("counted steps", f"{self.steps:,}"),
            ("lost work", f"{duration(self.lost)}, including checkpoints" if self.events else ""),
        ]

    def __repr__(self) -> str:
        failures = count(len(self.events), "failure")
        return f"<{type(self).__name__}: {duration(self.end)} with {failures}, {self.breakdown}>"

    def __str__(self) -> str:
        return "\n".join(labelled([row for row in self._rows() if row[1]]))

    def _repr_html_(self) -> str:
        from ddlsim.notebook import labelled as table
        from ddlsim.notebook import page

        return page("Failure timeline", table(self._rows()))

    def to_dict(self) -> dict[str, object]:
        """Return the main figures as a dictionary of plain values."""
        names = ("end", *KINDS, "finished", "steps", "availability", "effective")
        return {**{name: getattr(self, name) for name in names}, "failures": len(self.events)}

    @cached_property
    def failures(self) -> pd.DataFrame:
        """Table with one row per failure. Columns: time (s), unit (index of the failed part), lost (s of work)."""
        import pandas as pd

        return pd.DataFrame(list(self.events), columns=["time", "unit", "lost"]).rename_axis("failure")

    @property
    def workers(self) -> pd.DataFrame:
        """Table with one row per group of an elastic run.

        Columns: time (s) at which the group starts, number of workers.
        """
        import pandas as pd

        return pd.DataFrame(list(self.groups), columns=["time", "workers"]).rename_axis("group")

    def first_reached(self, times: Floats) -> Floats:
        """Return when this timeline first reaches given times of the run without failures and checkpoints, in s.

        The result is inf for times that the timeline does not reach.
        """
        pace = self.timeline.pace
        positions = self.timeline.position(pace.until(np.asarray(times, dtype=np.float64)))
        starts, froms, tos = self.running_intervals.T
        furthest = np.maximum.accumulate(tos)
        stretch = np.searchsorted(furthest, positions, "left")
        there = stretch < len(starts)
        at = np.where(there, stretch, 0)
        return np.where(there, pace.when(pace.until(starts[at]) + positions - froms[at]), math.inf)


class Outages:
    """The failures of a run by time, the machines that they take out of service, and the spares that replace these.

    parts  for each part that can fail, the machines that fail with it
    out    machines that are out of service
    next   the next failure
    """

    def __init__(self, failures: Failures, parts: Sequence[Sequence[int]], seed: int = 0, index: int = 0) -> None:
        self.failures, self.parts, self.out = failures, parts, set[int]()
        self._coming = failures.events(len(parts), seed, index)
        self._ready = [0.0] * failures.spares
        self._back: list[tuple[float, int]] = []
        self.next = next(self._coming, NEVER)

    def advance(self) -> Failure:
        """Return the next failure, and move on to the one after it."""
        failure, self.next = self.next, next(self._coming, NEVER)
        return failure

    def replaced(self, failure: Failure, noticed: float) -> float:
        """Return when a machine is available in place of a failed one, not before `noticed`."""
        if not self.failures.takes_machines:
            return noticed
        heapq.heappush(self._ready, failure.time + failure.repair)
        return max(heapq.heappop(self._ready), noticed)

    def strike(self) -> tuple[Failure, list[tuple[int, float]]]:
        """Let the next failure occur; return it, and (machine, time of its return) for each machine that it takes out
        of service."""
        failure, hit = self.advance(), []
        for machine in self.parts[failure.unit]:
            if machine not in self.out:
                there = self.replaced(failure, failure.time + self.failures.detection_seconds)
                hit.append((machine, there + si(self.failures.restart, "time")))
                self.out.add(machine)
                heapq.heappush(self._back, (hit[-1][1], machine))
        return failure, hit

    @property
    def next_back(self) -> float:
        """Time at which the next machine returns, in s; inf if none is out of service."""
        return self._back[0][0] if self._back else math.inf

    def welcome(self, now: float) -> bool:
        """Return machines that are back by `now` to service; return whether there are any."""
        before = len(self.out)
        while self._back and self._back[0][0] <= now:
            self.out.discard(heapq.heappop(self._back)[1])
        return len(self.out) < before


class _Course:
    """A training run from failure to failure: its clock, and how its time is spent."""

    def __init__(self, timeline: FailureFreeTimeline, outages: Outages, length: float) -> None:
        self.timeline, self.outages, self.length, self.now = timeline, outages, length, 0.0
        self.failures = outages.failures
        if timeline.cycle:  # it does not end earlier
            self.failures.check_number(len(outages.parts), length)
        self.spent = dict.fromkeys(KINDS, 0.0)
        self.events: list[tuple[float, int, float]] = []
        self._fruitless = 0

    def book(self, kind: str, seconds: float) -> float:
        """Book seconds within the length of the run; return how many that are."""
        seconds = max(min(seconds, self.length - self.now), 0.0)
        self.spent[kind] += seconds
        return seconds

    def progress(self, advanced: bool, reason: str) -> None:
        """Record whether there was progress before a failure; raise DdlsimError after too many failures without any."""
        self._fruitless = 0 if advanced else self._fruitless + 1
        if self._fruitless > HOPELESS:
            raise DdlsimError(f"failures: no progress between {HOPELESS:,} consecutive failures: {reason}")

    def over(
        self, end: float, finished: bool, steps: int, running_intervals: Sequence[object] = (), **more: Any
    ) -> FailureTimeline:
        """Return the timeline of a run that ends at `end` (s)."""
        more |= self.spent
        spans = np.array(running_intervals, dtype=np.float64).reshape(-1, 3)
        return FailureTimeline(
            self.timeline, end, finished, steps=steps, events=tuple(self.events), running_intervals=spans, **more
        )


# ------------------------------------------------------------ all wait


def simulate_failures(
    timeline: FailureFreeTimeline,
    failures: Failures,
    parts: Sequence[Sequence[int]],
    length: float,
    *,
    seed: int = 0,
    index: int = 0,
) -> FailureTimeline:
    """Simulate the failure timeline of a run in which every failure stops all workers.

    timeline  steps and checkpoints of the run without failures
    failures  distribution or trace of the failures
    parts     for each part that can fail, the machines that fail with it
    length    time in s at which the simulation stops if training has not ended earlier
    seed      seed of the random failures
    index     number of the sample: each index gives a different failure timeline for the same seed

    Raises ConfigError for a failure trace with unknown parts, and DdlsimError if failures are so frequent that no
    checkpoint is ever reached.
    """
    return _AllWait(timeline, Outages(failures, parts, seed, index), length).run()


class _AllWait(_Course):
    """All workers stop at a failure, wait for a machine, and resume from the latest checkpoint."""

    def run(self) -> FailureTimeline:
        timeline, outages, checkpoint, running_intervals = self.timeline, self.outages, 0, []
        position = 0.0  # where training resumes
        while self.now < self.length:
            start, begin, ends = self.now, position, self._time(timeline.end, self.now, position)
            if (left := self._leaves(start, begin, min(ends, self.length))) is not None:
                position, self.now = left
                running_intervals.append((start, begin, position))
                checkpoint = timeline.latest(position, checkpoint)
                self.progress(True, "")
                self._recover(0.0, warned=True)
                continue
            self.now = min(ends, self.length, outages.next.time)
            position = timeline.end if self.now == ends else self._position(self.now, start, begin)
            running_intervals.append((start, begin, position))
            if self.now == ends or self.now >= self.length:
                return self._over(self.now, position, self.now == ends, running_intervals)
            checkpoint = timeline.latest(position, checkpoint)
            position = max(float(timeline.saved_at[checkpoint]), begin)
            self.progress(
                position > begin,
                f"they never leave time for the {timeline.every:.6g} s of training until a checkpoint; write "
                f"checkpoints more often, or {LESS_OFTEN}",
            )
            lost = self.now - self._time(position, start, begin)
            self.spent["lost"] += lost
            self._recover(lost)
        return self._over(self.length, position, False, running_intervals)

    def _position(self, time: float, start: float, begin: float) -> float:
        """Return the position at `time`, if training runs since `start` from the position `begin` on."""
        return begin + float(self.timeline.pace.until(time) - self.timeline.pace.until(start))

    def _time(self, position: float, start: float, begin: float) -> float:
        """Return the time at which a position is reached, the inverse of :meth:`_position`."""
        return max(float(self.timeline.pace.when(self.timeline.pace.until(start) + (position - begin))), start)

    def _leaves(self, start: float, begin: float, until: float) -> tuple[float, float] | None:
        """Return (position, time) at which training has stopped for an announced failure and saved its state; None if
        no failure is announced before `until`, or if the state cannot be saved before the failure."""
        cost, warning, failure = self.timeline.cost, self.failures.warning_seconds, self.outages.next
        if not warning or math.isinf(self.timeline.every):
            return None
        warned = max(failure.time - warning, start)
        if warned >= until:
            return None
        end, after = self.timeline.next_end(self._position(warned, start, begin))
        saved = self._time(end, start, begin) + cost.stall + cost.write
        if saved > failure.time or saved >= until:
            return None
        self.spent["checkpointing"] += cost.stall + cost.write - (after - end)
        return after, saved

    def _recover(self, lost: float, warned: bool = False) -> None:
        """Advance to the time at which training runs again; every failure until then restarts the recovery."""
        outages, restart = self.outages, si(self.failures.restart, "time") + self.timeline.cost.load
        while True:
            failure = outages.advance()
            self.events.append((failure.time, failure.unit, lost))
            lost = 0.0
            if failure.time >= self.now and not warned:  # failures while all wait are noticed with the first
                self._pass("detecting", self.failures.detection_seconds)
            warned = False
            there = max(outages.replaced(failure, self.now) for _ in outages.parts[failure.unit])
            self._pass("repairing", there - self.now)
            if outages.next.time >= self.now + restart or self.now >= self.length:
                return self._pass("restarting", restart)
            if math.isinf(self.length):
                self.progress(False, f"they never leave time for the {restart:.6g} s of a restart; {LESS_OFTEN}")
            if outages.next.time > self.now:
                self._pass("restarting", outages.next.time - self.now)

    def _pass(self, kind: str, seconds: float) -> None:
        self.book(kind, seconds)
        self.now += seconds

    def _over(
        self, end: float, position: float, finished: bool, running_intervals: list[tuple[float, float, float]]
    ) -> FailureTimeline:
        timeline, spent = self.timeline, self.spent
        n_saved = len(timeline.saved_steps)
        checkpointing = timeline.cost.stall * n_saved if finished else timeline.checkpointing(position)
        waiting = position - float(timeline.saved_at[-1]) if finished and n_saved else 0.0
        # time to write the last checkpoint, and those before announced failures
        spent["checkpointing"] = checkpointing + (waiting + spent["checkpointing"])
        spent["useful"] = end
        for kind in ("checkpointing", "detecting", "repairing", "restarting", "lost"):
            spent["useful"] -= spent[kind]
        steps = timeline.n_steps if finished else timeline.steps_at(position)
        return self.over(end, finished, steps, running_intervals)


# ------------------------------------------------------------ groups take turns


class Stretch(NamedTuple):
    """The result of a group's training: timeline of its steps, number of steps, samples of the first n steps, duration
    in s, state of the training, and whether that has reached its goal."""

    timeline: FailureFreeTimeline
    steps: int
    samples: Callable[[int], float]
    seconds: float
    state: Any = None
    finished: bool = False


@dataclass(frozen=True, eq=False)
class Group:
    """Workers that train together: their ranks in the run, and the timeline of their undisturbed steps.

    computing  fraction of the time that each worker computes, (n_workers,)
    """

    ranks: list[int]
    timeline: FailureFreeTimeline
    samples_per_update: float
    every: float
    cost: Cost
    computing: Floats

    @property
    def n_workers(self) -> int:
        """Number of workers."""
        return len(self.ranks)

    def at_first(self, timeline: FailureFreeTimeline) -> Group:
        """Return the group at the start of the run, where its first steps may differ from later ones."""
        return replace(self, timeline=replace(timeline, every=math.inf, cost=NO_CHECKPOINTS, length=math.inf))

    def checkpointing(self, now: float, seconds: float) -> FailureFreeTimeline:
        """Return the timeline of the next `seconds` s from `now` on, with checkpoints."""
        timeline = OnClock.of(self.timeline, now)
        if math.isinf(self.every) or math.isinf(seconds):
            return timeline
        length = float(timeline.end_of(np.array(timeline.count(seconds) + 2)))
        return replace(timeline, every=self.every, cost=self.cost, length=length)

    def expected(self, state: Any, now: float, length: float, failure: float, back: float) -> FailureFreeTimeline:
        """Return the timeline until the run ends (at `length`), a machine fails, or a machine returns (s)."""
        times = [time for time in (failure, back) if math.isfinite(time)]
        return self.checkpointing(now, min(length, max(times, default=math.inf)) - now)

    def train(self, state: Any, now: float, seconds: float, endless: bool) -> Stretch:
        """Train for `seconds` s from the `state` of another group, or None; `endless` if another group may follow."""
        timeline = self.checkpointing(now, seconds)
        return Stretch(timeline, timeline.ended(seconds), lambda steps: steps * self.samples_per_update, seconds)

    def again(self, state: Any, now: float, seconds: float, timeline: FailureFreeTimeline) -> Any:
        """Return the state after the first `seconds` s of a stretch with this timeline."""
        return None


class _Saved(NamedTuple):
    """A saved state: useful time that led to it (s), steps, samples, and a function that returns the state."""

    useful: float = 0.0
    steps: int = 0
    samples: float = 0.0
    learned: Callable[[], Any] = lambda: None


class TakeTurns(_Course):
    """The remaining workers form a new group, and another one when a machine returns, until the training ends or
    `length` s have passed.

    groups    the groups that machines can form
    timeline  of all workers, undisturbed
    """

    def __init__(self, groups: Groups, timeline: FailureFreeTimeline, outages: Outages, length: float) -> None:
        super().__init__(timeline, outages, length)
        self.groups, self.saved, self.reads = groups, _Saved(), False  # latest checkpoint, whether it must be read
        self.steps, self.samples = 0, 0.0
        self.state: Any = None
        self.last_state: Any = None
        self.computed, self.out_of_service = np.zeros(len(groups.machine)), np.zeros(len(groups.machine))
        self.turns: list[tuple[float, int]] = []
        self.finished, self.warned = False, False

    def run(self) -> FailureTimeline:
        """Simulate the run. Raises DdlsimError if too few machines are left forever."""
        group = self.groups.on(range(self.groups.n_machines))
        assert group is not None  # experiments are checked before they are simulated
        self.turns.append((0.0, group.n_workers))
        if group.n_workers == len(self.groups.machine):
            group = group.at_first(self.timeline)
        while self.now < self.length and not self.finished:
            failed = group is not None and self._train(group)
            if self.now < self.length and not self.finished:
                group = self._formed(failed)
        return self.over(
            self.now,
            self.finished,
            self.steps,
            samples=self.samples,
            computed=self.computed,
            out_of_service=self.out_of_service,
            groups=tuple(self.turns),
            history=() if self.state is None else self.state.history,
            model=None if self.last_state is None else self.last_state.model,
        )

    def _train(self, group: Group) -> bool:
        """Train until a machine fails, until the end of the step in which one returns, or to the end; return whether
        one has failed."""
        outages, start, until, replicated = self.outages, self.now, self.length, self.groups.is_replicated
        back = outages.next_back
        timeline = group.expected(self.state, start, self.length, outages.next.time, back)
        if back < until:
            until = min(start + timeline.end_of_step(max(back - start, 0.0)), until)
        while outages.next.time <= until and outages.out.issuperset(outages.parts[outages.next.unit]):
            outages.advance()
        leaves = self._leaves(group, timeline)
        until = min(outages.next.time, until)
        warned = leaves <= until
        until = min(leaves, until)
        fails, seconds = warned or until == outages.next.time, until - start
        done = group.train(self.state, start, seconds, start + seconds < self.length)
        timeline, steps, seconds = done.timeline, done.steps, done.seconds
        trained = float(timeline.end_of(np.array(steps))) if steps else 0.0
        self._note_saved(group, done)
        checkpointing = 0.0 if math.isinf(timeline.every) else timeline.checkpointing(seconds)
        self.steps, self.samples = self.steps + steps, self.samples + done.samples(steps)
        self.state, self.finished = done.state, done.finished
        self.last_state = self.state or self.last_state
        self._compute(group, start, start + seconds, checkpointing)
        self._book("checkpointing", checkpointing)
        if self.finished:
            self._book("useful", trained)
            return False
        self._book("useful", trained if fails and not warned else seconds - checkpointing)
        if warned:
            if not replicated:
                self._save(group)
            self.warned = True
            self._fails(0.0)
        elif fails:
            lost = seconds - checkpointing - trained
            self._book("lost", lost)
            self.progress(trained > 0.0, f"they never leave time for a step; {LESS_OFTEN}")
            self._fails(lost)
        elif self.now < self.length and not replicated and not self._save(group):
            return True
        return fails

    def _compute(self, group: Group, start: float, end: float, checkpointing: float) -> None:
        """Add the computing time of a group's devices from `start` to `end`, without the time spent on checkpoints."""
        pace = group.timeline.pace
        seconds = group.computing * (end - start) if pace.busy is None else pace.computed(start, end)
        self.computed[group.ranks] += seconds * (1.0 - checkpointing / (end - start)) if end > start else 0.0

    def _leaves(self, group: Group, timeline: FailureFreeTimeline) -> float:
        """Return when the group continues without a machine whose failure is announced: at the end of the current step,
        if that (and, if workers hold shards, saving the state) comes before the failure; else inf."""
        failure = self.outages.next.time
        if not (warning := self.failures.warning_seconds) or math.isinf(failure):
            return math.inf
        end = self.now + timeline.end_of_step(max(failure - warning - self.now, 0.0))
        takes = 0.0 if self.groups.is_replicated else group.cost.stall + group.cost.write
        return end if end + takes <= failure else math.inf

    def _save(self, group: Group) -> bool:
        """Save the state, from which other workers can resume; return whether no machine fails meanwhile."""
        if self.saved.steps == self.steps:  # a checkpoint has just been written
            return True
        done = self._pass("checkpointing", min(self.now + group.cost.stall + group.cost.write, self.outages.next.time))
        if done:
            state = self.state
            self.saved = _Saved(self.spent["useful"], self.steps, self.samples, lambda: state)
        return done

    def _note_saved(self, group: Group, done: Stretch) -> None:
        """Record the latest checkpoint of a stretch, which began with the current state."""
        timeline = done.timeline
        if number := 0 if math.isinf(timeline.every) else timeline.latest(done.seconds, 0):
            step = int(timeline.saved_steps[number - 1])
            end = float(timeline.end_of(np.array(step)))
            learned = partial(group.again, self.state, self.now, end, timeline)
            self.saved = _Saved(
                self.spent["useful"] + end, self.steps + step, self.samples + done.samples(step), learned
            )

    def _go_back(self) -> float:
        """Return to the latest checkpoint, or to the beginning; return the seconds of training that are lost."""
        saved, lost = self.saved, self.spent["useful"] - self.saved.useful
        self.spent["lost"] += lost
        self.spent["useful"], self.steps, self.samples = saved.useful, saved.steps, saved.samples
        self.reads, self.state = saved.steps > 0, saved.learned()
        self.last_state = self.state or self.last_state
        return lost

    def _fails(self, lost: float) -> bool:
        """Let the next failure occur; return whether it hits a machine in service."""
        failure, hit = self.outages.strike()
        if hit:
            parted = not self.groups.is_replicated and not self.warned
            if parted or len(self.outages.out) == self.groups.n_machines:  # no machine holds the whole state
                lost += self._go_back()
            self.events.append((failure.time, failure.unit, lost))
        return bool(hit)

    def _formed(self, failed: bool) -> Group | None:
        """Form a group of the machines in service, again after each failure meanwhile; None if the run has ended."""
        warned, self.warned = self.warned, False
        if failed and not warned:
            self._pass("detecting", self.now + self.failures.detection_seconds)
        for n_failed in itertools.count():
            if self.now >= self.length:
                break
            if n_failed > HOPELESS and math.isinf(self.length):
                raise DdlsimError(f"elastic: {HOPELESS:,} failures, and no time for a new group to form; {LESS_OFTEN}")
            grown = self.outages.welcome(self.now)
            there = set(range(self.groups.n_machines)) - self.outages.out
            group = self.groups.on(there) if there else None
            if group is None:
                self._turn(0)
                if math.isinf(min(self.outages.next_back, self.length)):
                    raise DdlsimError(
                        f"elastic: at time {self.now:.6g} s, too few machines are left and none will return; set a "
                        "repair time for failures, or max_time for the run"
                    )
                self._pass("repairing", self.outages.next_back)
                continue
            reads = self.reads or not self.groups.is_replicated
            copied = group.cost.load if reads else self.groups.copy if grown else 0.0
            if self._pass("restarting", self.now + self.groups.elastic.seconds + copied):
                self.reads = False
                self._turn(group.n_workers)
                return group
        return None

    def _turn(self, n_workers: int) -> None:
        if self.turns[-1] != (self.now, n_workers):
            self.turns.append((self.now, n_workers))

    def _pass(self, kind: str, until: float) -> bool:
        """Advance to `until`, or to a failure of a machine in service; return whether `until` was reached."""
        while self.outages.next.time < min(until, self.length):
            self._book(kind, self.outages.next.time - self.now)
            if self._fails(0.0) and kind != "detecting":
                return False
        self._book(kind, until - self.now)
        return True

    def _book(self, kind: str, seconds: float) -> None:
        seconds = self.book(kind, seconds)
        self.now += seconds
        self.out_of_service[[machine in self.outages.out for machine in self.groups.machine]] += seconds


# ------------------------------------------------------------ the others continue

Windows = Sequence[tuple[float, float]]


def windows(outages: Outages, n_machines: int, length: float) -> list[list[tuple[float, float]]]:
    """Return the outages (start in s, end in s) of each machine that begin by `length` (s)."""
    outages.failures.check_number(len(outages.parts), length)
    out_of_service: list[list[tuple[float, float]]] = [[] for _ in range(n_machines)]
    while outages.next.time <= length:
        outages.welcome(outages.next.time)
        failure, hit = outages.strike()
        for machine, back in hit:
            out_of_service[machine].append((failure.time, back))
    return out_of_service


def seconds_missing(failures: Failures, out_of_service: Windows, end: float) -> dict[str, float]:
    """Return kind -> seconds of a worker's outages up to `end`: detecting a failure, repairing, and restarting the
    worker."""
    spent = dict.fromkeys(KINDS[3:], 0.0)
    for start, back in out_of_service:
        edges = [start, start + failures.detection_seconds, back - si(failures.restart, "time"), back]
        for kind, first, last in zip(spent, edges[:-1], edges[1:], strict=True):
            spent[kind] += max(min(last, end) - min(first, end), 0.0)
    return spent


def covered(out_of_service: Windows, end: float) -> float:
    """Return how much of the time up to `end` the outages cover, in s."""
    seconds = until = 0.0
    for start, back in sorted(out_of_service):
        seconds += max(min(back, end) - max(start, until), 0.0)
        until = max(until, min(back, end))
    return seconds


# ---------------------------------------------------------------- steps and checkpoints without failures


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
        seconds = np.array([np.diff(np.interp((start, end), self.clock, busy))[0] for busy in self.busy.T])
        return np.asarray(seconds + self.computing * (max(end, self.clock[-1]) - max(start, self.clock[-1])))

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


class GrowingPace(Pace):
    """A pace that is simulated only as far as it is asked for.

    simulated  returns the pace at least until a time in s, and whether that is all of it
    """

    def __init__(self, simulated: Callable[[float], tuple[Pace, bool]]) -> None:
        first, is_all = simulated(-1.0)
        vars(self).update(vars(first), _simulated=simulated, _is_all=is_all)

    def until(self, time: Floats | float) -> Floats:
        self._grow("clock", float(np.max(time, initial=0.0)))
        return super().until(time)

    def when(self, work: Floats | float) -> Floats:
        self._grow("work", float(np.max(work, initial=0.0)))
        return super().when(work)

    def computed(self, start: float, end: float) -> Floats:
        self._grow("clock", math.inf)
        return super().computed(start, end)

    def _grow(self, axis: str, value: float) -> None:
        """Simulate until the last point on an axis is beyond a value."""
        limit = value
        while not vars(self)["_is_all"] and vars(self)[axis][-1] <= value:
            longer, is_all = vars(self)["_simulated"](limit)
            vars(self).update(vars(longer), _is_all=is_all)
            limit = 2.0 * max(limit, float(longer.clock[-1]))


class _Steady(Pace):
    """The pace of a run without events: work is time. This takes a tenth of the time of the general case."""

    def until(self, time: Floats | float) -> Floats:
        return np.maximum(time, 0.0)

    def when(self, work: Floats | float) -> Floats:
        return np.maximum(work, 0.0)


#: of a run without events
STEADY = _Steady(np.zeros(2), np.zeros(2))


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
        n_ends, further = len(self.ends), np.maximum(steps - len(self.ends) - 1, 0)
        ends: Floats = np.asarray(self.ends[np.minimum(steps, n_ends) - 1])
        if not self.cycle:
            return ends
        later = self.ends[-1] + (self._pattern[-1] * (further // self.cycle) + self._pattern[further % self.cycle])
        return np.asarray(np.where(steps <= n_ends, ends, later))

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
        blocks, recent, done = list[Ints](), list[int](), 0.0
        due = self.every * (1.0 - 1e-12)  # a step that ends exactly when the checkpoint is due is not too early
        while (step := self._first_at(done + due)) <= self.n_steps:
            recent.append(step)
            if len(recent) == 100:
                blocks.append(self._repeated(np.array(recent), due))
                step, recent = int(blocks[-1][-1]), []
            done = float(self.end_of(np.array(step)))
            if not recent and sum(map(len, blocks)) > MOST_CHECKPOINTS:
                raise ConfigError(
                    f"checkpoints: more than {MOST_CHECKPOINTS:,} checkpoints in {done:.4g} s; reduce max_time "
                    "(30 days by default) to at most this time, or increase the time between checkpoints"
                )
        steps = np.concatenate([*blocks, recent]).astype(np.int64)
        ends = not self.cycle and (not len(steps) or steps[-1] < self.n_steps)
        return np.append(steps, self.n_steps) if ends else steps

    def _repeated(self, steps: Ints, due: float) -> Ints:
        """Return steps with a checkpoint and further ones, as long as their distances are repeated."""
        distances = np.diff(steps)
        n = next((n for n in range(1, len(steps) // 2) if (distances[n:] == distances[:-n]).all()), 0)
        if not n:
            return steps
        further = np.concatenate([steps, steps[-1] + np.cumsum(np.resize(distances[-n:], 100_000))])
        further = further[further <= self.n_steps]
        times = self.end_of(further[:-1]) + due
        right = (self.end_of(further[1:] - 1) < times) & (times <= self.end_of(further[1:]))
        return further[: len(right) + 1 if right.all() else int(right.argmin()) + 1]

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
