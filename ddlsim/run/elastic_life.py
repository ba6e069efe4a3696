"""The life of an elastic run: groups of workers that take turns as machines fail and come back."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ddlsim.errors import ConfigError, DdlsimError
from ddlsim.learning import Array, Value
from ddlsim.learning.learner import Handover
from ddlsim.learning.monitor import Monitor, Row
from ddlsim.life import Failures, Life, Timeline
from ddlsim.life.checkpoints import NO_CHECKPOINTS
from ddlsim.life.failures import Failure
from ddlsim.life.life import HOPELESS
from ddlsim.life.timeline import Ints, OnClock
from ddlsim.run.elastic_groups import Group, Groups
from ddlsim.run.shift import NoUpdateError, Shift
from ddlsim.units import si

if TYPE_CHECKING:
    import pandas as pd

    from ddlsim.run.outcome import Outcome


@dataclass(frozen=True, eq=False, repr=False)
class ElasticLife(Life):
    """The life of an elastic run; see :class:`ddlsim.Life`. ``timeline`` is that of all workers, undisturbed.

    groups   (s from which on, workers that trained then), 0 workers: too few machines were there
    history  evaluations of a run that learns; model: what it hands over
    """

    groups: tuple[tuple[float, int], ...] = ()
    history: tuple[Row, ...] = ()
    model: Value[Array] | None = None

    @property
    def workers(self) -> pd.DataFrame:
        """One row per group: time (s) from which on, workers."""
        import pandas as pd

        return pd.DataFrame(list(self.groups), columns=["time", "workers"]).rename_axis("group")


class _Saved(NamedTuple):
    """A state of the training that can be read: s that led to it, steps, samples; and how to learn it again: as `group`
    does in so many s from `begin` on, `since` a time on the clock (None: it is `begin`)."""

    useful: float = 0.0
    steps: int = 0
    samples: float = 0.0
    begin: Handover | None = None
    group: Group | None = None
    timeline: Timeline | None = None
    seconds: float = 0.0
    since: float = 0.0


def elastic_life(
    groups: Groups, timeline: Timeline, failures: Failures, length: float, seed: int, life: int = 0
) -> ElasticLife:
    """Return what happens to a training among failures, until it has ended or `length` s are over."""
    machines = groups.taken(failures)
    return _Turns(groups, timeline, failures, length, failures.events(len(machines), seed, life), machines).run()


class _Machines:
    """Which machines are out of service, and when they are back."""

    def __init__(self, failures: Failures) -> None:
        self.failures = failures
        self.out: set[int] = set()
        self._back: list[tuple[float, int]] = []
        self._ready = [0.0] * failures.spares

    def fails(self, machine: int, failure: Failure) -> None:
        """A machine fails; a spare takes its place, if there is one."""
        noticed, restart = failure.time + self.failures.seconds_to_notice, si(self.failures.restart, "time")
        self.out.add(machine)
        if self.failures.takes_machines:
            heapq.heappush(self._ready, failure.time + failure.repair)
            noticed = max(heapq.heappop(self._ready), noticed)
        heapq.heappush(self._back, (noticed + restart, machine))

    @property
    def next_back(self) -> float:
        """When the next one is back, in s; inf: none is out."""
        return self._back[0][0] if self._back else math.inf

    def welcome(self, now: float) -> bool:
        """Let those be there that are back by now; return whether there are any."""
        before = len(self.out)
        while self._back and self._back[0][0] <= now:
            self.out.discard(heapq.heappop(self._back)[1])
        return len(self.out) < before


class _Turns:
    def __init__(
        self, groups: Groups, timeline: Timeline, failures: Failures, length: float, coming: Iterator[Failure],
        taken: list[list[int]],
    ) -> None:  # fmt: skip
        self.groups, self.timeline, self.failures, self.length, self.coming = groups, timeline, failures, length, coming
        self.taken = taken  # machines, by each part that fails
        self.machines, self.now, self.next = _Machines(failures), 0.0, next(coming, _NEVER)
        self.spent = dict.fromkeys(("useful", "lost", "saving", "noticing", "repairing", "restarting"), 0.0)
        self.saved, self.reads = _Saved(), False  # the latest checkpoint, and whether it is to be read
        self.history: tuple[Row, ...] = ()
        self.steps, self.samples = 0, 0.0
        self.computed, self.away = np.zeros(len(groups.machine)), np.zeros(len(groups.machine))
        self.events: list[tuple[float, int, float]] = []
        self.turns: list[tuple[float, int]] = []
        self.handover: Handover | None = None
        self.monitor: Monitor | None = None
        self.finished, self.warned, self.fruitless = False, False, 0

    def run(self) -> ElasticLife:
        group = self.groups.on(range(self.groups.n_machines))
        if group is None:
            raise ConfigError(
                f"elastic: min_workers = {self.groups.elastic.min_workers}, but the run has "
                f"{len(self.groups.machine)} workers"
            )
        self.turns.append((0.0, group.n_workers))
        if group.experiment.training is None and group.n_workers == len(self.groups.machine):
            plain = replace(self.timeline, every=math.inf, cost=NO_CHECKPOINTS, length=math.inf)
            group = replace(group, timeline=plain)  # with what only its first steps have
        while self.now < self.length and not self.finished:
            failed = group is not None and self._train(group)
            if self.now < self.length and not self.finished:
                group = self._formed(failed)
        return ElasticLife(
            self.timeline, self.now, self.finished, self.spent["useful"], self.spent["lost"], self.spent["saving"],
            self.spent["noticing"], self.spent["repairing"], self.spent["restarting"], self.steps, tuple(self.events),
            np.empty((0, 3)), self.samples, groups=tuple(self.turns), history=self.history,
            model=None if self.monitor is None else self.monitor.evaluated, computed=self.computed, away=self.away,
        )  # fmt: skip

    # ------------------------------------------------------------ training

    def _train(self, group: Group) -> bool:
        """Train until a machine fails, or until the end of the step in which one is back, or to the end; return whether
        one has failed."""
        back = self.machines.next_back
        known = [time for time in (self.next.time, back) if math.isfinite(time)]
        bound = min(self.length, max(known, default=math.inf)) - self.now
        begun, steady = self.now, OnClock.of(group.timeline, self.now)
        probed = group.experiment.training is not None and math.isfinite(group.every)
        timeline = self._probed(group, back) if probed else group.saving(steady, bound)
        until = self.length
        if back < until:
            until = min(self.now + _end_of_step(timeline, max(back - self.now, 0.0)), until)
        while self.next.time <= until and self.machines.out.issuperset(self.taken[self.next.unit]):
            self.next = next(self.coming, _NEVER)
        leaves = self._leaves(group, timeline)
        until = min(self.next.time, until)
        warned = leaves <= until
        until = min(leaves, until)
        fails, seconds = warned or until == self.next.time, until - self.now
        before = _Saved(self.spent["useful"], self.steps, self.samples, self._begin(group), group, since=begun)
        if group.experiment.training is not None:
            timeline, samples, seconds = self._learn(group, before.begin, seconds)
        else:
            timeline, samples = group.saving(steady, seconds), np.array([])
        steps = _steps(timeline, seconds) if group.experiment.training is None else len(samples)
        self.steps += steps
        self.samples += steps * group.samples_per_update if group.experiment.training is None else float(samples.sum())
        trained = float(timeline.end_of(np.array(steps))) if steps else 0.0
        saving = 0.0 if math.isinf(timeline.every) else timeline.saving(seconds)
        self._note_saved(before, timeline, samples, seconds)
        self._compute(group, begun, begun + seconds, saving)
        self._book("saving", saving)
        if self.finished:
            self._book("useful", trained)
            return False
        self._book("useful", trained if fails and not warned else seconds - saving)
        if warned:
            if not self.groups.whole:
                self._save(group)
            self.warned = True
            self._fails(0.0)
        elif fails:
            lost = seconds - saving - trained
            self._book("lost", lost)
            self.fruitless = 0 if trained else self.fruitless + 1
            if self.fruitless > HOPELESS:
                raise DdlsimError(f"failures: {HOPELESS:,} in a row without a step between them; use parts that last")
            self._fails(lost)
        elif self.now < self.length and not self.groups.whole and not self._save(group):
            return True
        return fails

    def _compute(self, group: Group, start: float, end: float, saving: float) -> None:
        """Count what the devices of a group compute meanwhile, but for the s in which it saves."""
        pace = group.timeline.pace
        each = group.computing * (end - start) if pace.busy is None else pace.computed(start, end)
        self.computed[group.ranks] += each * (1.0 - saving / (end - start)) if end > start else 0.0

    def _leaves(self, group: Group, timeline: Timeline) -> float:
        """Return when the group goes on without a machine whose failure is announced: at the end of the step under way
        then, if that is before (and the state is saved before, where workers hold parts of it); else inf."""
        if not (warning := self.failures.seconds_of_warning) or math.isinf(self.next.time):
            return math.inf
        end = self.now + _end_of_step(timeline, max(self.next.time - warning - self.now, 0.0))
        takes = 0.0 if self.groups.whole else group.cost.stall + group.cost.write
        return end if end + takes <= self.next.time else math.inf

    def _save(self, group: Group) -> bool:
        """Save the state at hand, as others can only go on from that; return whether no machine fails meanwhile."""
        if self.saved.steps == self.steps:  # one was due just now
            return True
        done = self._pass("saving", min(self.now + group.cost.stall + group.cost.write, self.next.time))
        if done:
            self.saved = _Saved(self.spent["useful"], self.steps, self.samples, self.handover)
        return done

    def _note_saved(self, before: _Saved, timeline: Timeline, samples: Ints, seconds: float) -> None:
        """Note the latest checkpoint made in `seconds` s since the state before."""
        number = 0 if math.isinf(timeline.every) else timeline.latest(seconds, 0)
        if not number:
            return
        assert before.group is not None
        step = int(timeline.saved_steps[number - 1])
        many = float(samples[:step].sum()) if len(samples) else step * before.group.samples_per_update
        end = float(timeline.end_of(np.array(step)))
        self.saved = _Saved(
            before.useful + end, before.steps + step, before.samples + many, before.begin, before.group, timeline, end,
            before.since,
        )  # fmt: skip

    def _go_back(self) -> float:
        """Go back to the latest checkpoint, or to the beginning; return how many s of training that takes."""
        saved, lost = self.saved, self.spent["useful"] - self.saved.useful
        self.spent["lost"] += lost
        self.spent["useful"], self.steps, self.samples = saved.useful, saved.steps, saved.samples
        self.handover, self.reads = saved.begin, saved.steps > 0
        if saved.group is not None and saved.timeline is not None and saved.group.experiment.training is not None:
            self._again(saved.group, saved.begin, saved.seconds, saved.timeline, saved.since)
        elif saved.begin is None:
            self.history = ()
        return lost

    # ------------------------------------------------------------ learning

    def _begin(self, group: Group) -> Handover | None:
        """Return what a group begins with now."""
        if self.handover is None:
            return None
        factor = self.groups.elastic.rate_factor(group.n_workers, len(self.groups.machine))
        return replace(self.handover, time=self.now, rate_factor=factor)

    def _probed(self, group: Group, back: float) -> Timeline:
        """Return the steps that a group can make until something happens, with their checkpoints: learning has its own
        jitter, and ends nobody knows when."""
        slack = 2.0 * (float(np.diff(group.timeline.ends, prepend=0.0).max()) + group.cost.stall)
        try:
            until = min(self.length, self.next.time, back + slack)
            result = self._run(group, self._begin(group), until - self.now, self.now)
        except NoUpdateError:
            return OnClock.of(group.timeline, self.now)
        return self._timeline(group, [time for time, _ in result.recorder.updates])

    def _learn(self, group: Group, begin: Handover | None, seconds: float) -> tuple[Timeline, Ints, float]:
        """Learn for so many s; return the updates' timeline, how many samples each had, and the s."""
        try:
            result = self._run(group, begin, seconds, self.now, self.now + seconds < self.length)
        except NoUpdateError:
            return OnClock.of(group.timeline, self.now), np.array([], dtype=np.int64), seconds
        updates = result.recorder.updates
        timeline = self._timeline(group, [time for time, _ in updates])
        steps = _steps(timeline, seconds) if math.isfinite(seconds) else len(updates)
        samples = np.array([n for _, n in updates[:steps]], dtype=np.int64)
        if steps < len(updates):  # checkpoints have left no time for all
            if steps:
                self._again(group, begin, updates[steps - 1][0], timeline, self.now)
            return timeline, samples, seconds
        self.finished = result.stop_reason != "max_time"
        if self.finished:
            seconds = float(timeline.position(np.array([updates[-1][0]]))[0])
        self._hand_over(result, begin, timeline)
        return timeline, samples, seconds

    def _timeline(self, group: Group, ends: list[float]) -> Timeline:
        """Return the steps that a group has made, with their checkpoints."""
        plain = Timeline(np.array(ends), 1, math.inf, NO_CHECKPOINTS, ends[-1])
        return plain if math.isinf(group.every) else replace(plain, every=group.every, cost=group.cost)

    def _run(
        self, group: Group, begin: Handover | None, seconds: float, since: float, goes_on: bool = True
    ) -> Outcome:  # fmt: skip
        from ddlsim.run.simulate import run

        return run(group.experiment.with_(max_time=seconds), shift=Shift(begin, goes_on, since))

    def _again(self, group: Group, begin: Handover | None, seconds: float, timeline: Timeline, since: float) -> None:
        """Learn once more what a group has learnt `since` then, but only for so many s."""
        self._hand_over(self._run(group, begin, seconds, since), begin, timeline)

    def _hand_over(self, result: Outcome, begin: Handover | None, timeline: Timeline) -> None:
        """Let what a group has learnt be what the next one begins with."""
        monitor = self.monitor = result.monitor
        assert monitor is not None
        former, since = (0, 0.0) if begin is None else (len(begin.history), begin.time)
        rows = list(monitor.history)
        for i in range(former, len(rows)) if math.isfinite(timeline.every) else ():
            at = float(timeline.position(np.array([rows[i].time - since]))[0])
            rows[i] = rows[i]._replace(time=since + at)
        self.history = tuple(rows)
        if monitor.latest is not None:
            model, state = monitor.latest
            samples = sum(n for _, n in result.recorder.updates)
            made, learned, sent = (0, 0, 0.0) if begin is None else (begin.n_updates, begin.n_samples, begin.nbytes)
            self.handover = Handover(
                model.read(), None if model.statistics is None else model.statistics.read(),
                None if state is None else state.read(), made + len(result.recorder.updates), learned + int(samples),
                result.nbytes_sent + sent, self.now, self.history,
            )  # fmt: skip

    # ------------------------------------------------------------ forming groups

    def _fails(self, lost: float) -> bool:
        """The next failure happens; return whether it hits a machine in service."""
        failure, self.next = self.next, next(self.coming, _NEVER)
        hit = [machine for machine in self.taken[failure.unit] if machine not in self.machines.out]
        if not hit:
            return False
        for machine in hit:
            self.machines.fails(machine, failure)
        parted = not self.groups.whole and not self.warned
        if parted or len(self.machines.out) == self.groups.n_machines:  # nobody holds all of the state any more
            lost += self._go_back()
        self.events.append((failure.time, failure.unit, lost))
        return True

    def _formed(self, failed: bool) -> Group | None:
        """Form a group of those that are there, as often as others fail meanwhile; None if time is over."""
        warned, self.warned = self.warned, False
        if failed and not warned:
            self._pass("noticing", self.now + self.failures.seconds_to_notice)
        while self.now < self.length:
            grown = self.machines.welcome(self.now)
            there = set(range(self.groups.n_machines)) - self.machines.out
            group = self.groups.on(there) if there else None
            if group is None:
                self._turn(0)
                if math.isinf(min(self.machines.next_back, self.length)):
                    raise DdlsimError(
                        f"elastic: at {self.now:.6g} s too few machines are left, and none ever comes back; give "
                        "failures a repair time, or the run a max_time"
                    )
                self._pass("repairing", self.machines.next_back)
                continue
            reads = self.reads or not self.groups.whole
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
        """Let time pass up to `until`, or to a failure of a machine in service; return whether all of it has."""
        while self.next.time < min(until, self.length):
            self._book(kind, self.next.time - self.now)
            if self._fails(0.0) and kind != "noticing":
                return False
        self._book(kind, until - self.now)
        return True

    def _book(self, kind: str, seconds: float) -> None:
        seconds = max(min(seconds, self.length - self.now), 0.0)
        self.spent[kind] += seconds
        self.now += seconds
        self.away[[machine in self.machines.out for machine in self.groups.machine]] += seconds


_NEVER = Failure(math.inf, 0, 0.0)


def _end_of_step(timeline: Timeline, seconds: float) -> float:
    """Return when the step under way after so many s ends, with the checkpoint that is due then."""
    if math.isfinite(timeline.every):
        return timeline.next_end(seconds)[1]
    return float(timeline.end_of(np.array(timeline.count(seconds) + 1)))


def _steps(timeline: Timeline, seconds: float) -> int:
    """Return how many steps have ended after so many s."""
    return timeline.steps_at(seconds) if math.isfinite(timeline.every) else timeline.count(seconds)
