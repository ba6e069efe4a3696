"""The life of an elastic run: groups of workers that take turns as machines fail and come back."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ddlsim.errors import ConfigError, DdlsimError
from ddlsim.learning import Array, Value
from ddlsim.learning.handover import Handover
from ddlsim.learning.monitor import Monitor, Row
from ddlsim.life import Elastic, Failures, Life, Timeline
from ddlsim.life.checkpoints import NO_CHECKPOINTS
from ddlsim.life.failures import Failure
from ddlsim.life.life import HOPELESS
from ddlsim.run.experiment import Experiment
from ddlsim.run.living import copy_seconds
from ddlsim.run.parts import machines_of, machines_taken
from ddlsim.run.shift import NoUpdateError, Shift
from ddlsim.units import si
from ddlsim.workload.model import load_model

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


@dataclass(frozen=True, eq=False)
class _Group:
    """Workers on so many machines: what they do, and how long their steps take."""

    experiment: Experiment
    n_workers: int
    timeline: Timeline
    samples_per_update: float


class Groups:
    """The groups that a run's machines can form, each simulated when it is first asked for.

    A group on k machines is that of the first k: with equal machines it does not matter which ones are left.
    """

    def __init__(self, result: Outcome) -> None:
        self._experiment, self._nodes = result.experiment, result.nodes.tolist()
        self._machine = machines_of(result.cluster, self._nodes)
        self._places = {int(node): place for place, node in enumerate(result.cluster.workers.tolist())}
        self._cluster, self._found = result.cluster, dict[int, _Group | None]()
        self.n_machines = max(self._machine) + 1
        self.copy = copy_seconds(result)

    @property
    def machine(self) -> list[int]:
        """The machine of each worker, from 0."""
        return self._machine

    @property
    def elastic(self) -> Elastic:
        """How groups form."""
        assert self._experiment.elastic is not None
        return self._experiment.elastic

    def taken(self, failures: Failures) -> list[list[int]]:
        """The machines that each part which fails takes out of service."""
        return machines_taken(failures, self._cluster, self._nodes)

    def on(self, n_machines: int) -> _Group | None:
        """Return the group that so many machines form, None where that has fewer workers than there must be."""
        if n_machines not in self._found:
            self._found[n_machines] = self._made(n_machines)
        return self._found[n_machines]

    def _made(self, n_machines: int) -> _Group | None:
        """Return the group of the most machines that its strategy can split; others stand by."""
        for n in range(n_machines, 0, -1):
            nodes = [node for node, own in zip(self._nodes, self._machine, strict=True) if own < n]
            if len(nodes) < self.elastic.min_workers:
                return None
            if self._fits(len(nodes)):
                return self._simulated(nodes)
        return None

    def _fits(self, n_workers: int) -> bool:
        experiment = self._experiment
        check = getattr(experiment.strategy, "check_sizes", None)
        if check is None:
            return True
        try:
            check(load_model(experiment.time_model or experiment.model), self._batch_size(n_workers), n_workers)
        except ConfigError:
            return False
        return True

    def _batch_size(self, n_workers: int) -> int:
        return self.elastic.batch_size(self._experiment.batch_size, n_workers, len(self._nodes))

    def _simulated(self, nodes: list[int]) -> _Group:
        from ddlsim.run.simulate import run  # which knows of results, and they of lives

        whole, n = self._experiment, len(nodes)
        speed = whole.speed
        experiment = whole.with_(
            cluster=self._cluster, workers=tuple(self._places[node] for node in nodes), failures=None, elastic=None,
            batch_size=self._batch_size(n), max_time=math.inf,
            speed=speed[:n] if isinstance(speed, tuple) else speed,
        )  # fmt: skip
        clock = experiment
        if experiment.training is not None:
            clock = experiment.with_(training=None, time_model=None, model=experiment.time_model or experiment.model)
        try:
            result = run(clock)
        except ConfigError as error:
            raise ConfigError(f"elastic: a group of {n} workers: {error}") from None
        ends = np.array([time for time, _ in result.recorder.updates])
        timeline = Timeline(ends, len(result.measured_updates) - 1, math.inf, NO_CHECKPOINTS, math.inf)
        return _Group(experiment, n, timeline, result.samples_per_update)


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
        self.spent = dict.fromkeys(("useful", "lost", "noticing", "repairing", "restarting"), 0.0)
        self.steps, self.samples = 0, 0.0
        self.events: list[tuple[float, int, float]] = []
        self.turns: list[tuple[float, int]] = []
        self.handover: Handover | None = None
        self.monitor: Monitor | None = None
        self.finished, self.warned, self.fruitless = False, False, 0

    def run(self) -> ElasticLife:
        group = self.groups.on(self.groups.n_machines)
        if group is None:
            raise ConfigError(
                f"elastic: min_workers = {self.groups.elastic.min_workers}, but the run has "
                f"{len(self.groups.machine)} workers"
            )
        self.turns.append((0.0, group.n_workers))
        while self.now < self.length and not self.finished:
            failed = group is not None and self._train(group)
            if self.now < self.length and not self.finished:
                group = self._formed(failed)
        history = () if self.monitor is None else tuple(self.monitor.history)
        return ElasticLife(
            self.timeline, self.now, self.finished, self.spent["useful"], self.spent["lost"], 0.0,
            self.spent["noticing"], self.spent["repairing"], self.spent["restarting"], self.steps, tuple(self.events),
            np.empty((0, 3)), self.samples, tuple(self.turns), history,
            None if self.monitor is None else self.monitor.evaluated,
        )  # fmt: skip

    # ------------------------------------------------------------ training

    def _train(self, group: _Group) -> bool:
        """Train until a machine fails, or until the end of the step in which one is back, or to the end; return whether
        one has failed."""
        until, back = self.length, self.machines.next_back
        if back < until:
            step = group.timeline.count(max(back - self.now, 0.0)) + 1
            until = min(self.now + float(group.timeline.end_of(np.array(step))), until)
        while self.next.time <= until and self.machines.out.issuperset(self.taken[self.next.unit]):
            self.next = next(self.coming, _NEVER)
        leaves = self._leaves(group)
        until = min(self.next.time, until)
        warned = leaves <= until
        until = min(leaves, until)
        seconds = until - self.now
        trained = self._learn(group, seconds) if group.experiment.training is not None else self._count(group, seconds)
        if self.finished:
            self._book("useful", trained)
            return False
        fails = until == self.next.time or warned
        self._book("useful", trained if fails and not warned else seconds)
        if warned:
            self.warned = self._fails(0.0)
            return True
        if fails:
            self._book("lost", seconds - trained)
            self.fruitless = 0 if trained else self.fruitless + 1
            if self.fruitless > HOPELESS:
                raise DdlsimError(f"failures: {HOPELESS:,} in a row without a step between them; use parts that last")
            self._fails(seconds - trained)
        return fails

    def _leaves(self, group: _Group) -> float:
        """Return when the group goes on without a machine whose failure is announced: at the end of the step under way
        then, if that is before; else inf."""
        if not (warning := self.failures.seconds_of_warning):
            return math.inf
        warned = max(self.next.time - warning - self.now, 0.0)
        if math.isinf(warned):
            return math.inf
        end = self.now + float(group.timeline.end_of(np.array(group.timeline.count(warned) + 1)))
        return end if end <= self.next.time else math.inf

    def _count(self, group: _Group, seconds: float) -> float:
        """Count the steps of so many s; return how many s they took."""
        steps = group.timeline.count(seconds)
        self.steps += steps
        self.samples += steps * group.samples_per_update
        return float(group.timeline.end_of(np.array(steps))) if steps else 0.0

    def _learn(self, group: _Group, seconds: float) -> float:
        """Learn for so many s; return when the last update was made."""
        from ddlsim.run.simulate import run

        n_at_start = len(self.groups.machine)
        if self.handover is not None:
            self.handover = replace(
                self.handover, time=self.now, rate_factor=self.groups.elastic.rate_factor(group.n_workers, n_at_start)
            )
        goes_on = self.now + seconds < self.length
        try:
            result = run(group.experiment.with_(max_time=seconds), shift=Shift(self.handover, goes_on))
        except NoUpdateError:
            return 0.0
        monitor = self.monitor = result.monitor
        assert monitor is not None
        self.finished = result.stop_reason != "max_time"
        updates = result.recorder.updates
        self.steps += len(updates)
        self.samples += sum(n for _, n in updates)
        if goes_on and not self.finished:
            assert monitor.latest is not None
            model, state = monitor.latest
            self.handover = Handover(
                model.read(), None if model.statistics is None else model.statistics.read(),
                None if state is None else state.read(), self.steps, int(self.samples),
                result.nbytes_sent + (0.0 if self.handover is None else self.handover.nbytes), self.now,
                tuple(monitor.history),
            )  # fmt: skip
        return updates[-1][0]

    # ------------------------------------------------------------ forming groups

    def _fails(self, lost: float) -> bool:
        """The next failure happens; return whether it hits a machine in service."""
        failure, self.next = self.next, next(self.coming, _NEVER)
        hit = [machine for machine in self.taken[failure.unit] if machine not in self.machines.out]
        if not hit:
            return False
        for machine in hit:
            self.machines.fails(machine, failure)
        if len(self.machines.out) == self.groups.n_machines:  # nobody holds the state any more: all over again
            lost += self.spent["useful"]
            self.spent["lost"] += self.spent["useful"]
            self.spent["useful"], self.steps, self.samples, self.handover = 0.0, 0, 0.0, None
        self.events.append((failure.time, failure.unit, lost))
        return True

    def _formed(self, failed: bool) -> _Group | None:
        """Form a group of those that are there, as often as others fail meanwhile; None if time is over."""
        warned, self.warned = self.warned, False
        if failed and not warned:
            self._pass("noticing", self.now + self.failures.seconds_to_notice)
        while self.now < self.length:
            grown = self.machines.welcome(self.now)
            n = self.groups.n_machines - len(self.machines.out)
            group = self.groups.on(n) if n else None
            if group is None:
                self._turn(0)
                if math.isinf(min(self.machines.next_back, self.length)):
                    raise DdlsimError(
                        f"elastic: at {self.now:.6g} s too few machines are left, and none ever comes back; give "
                        "failures a repair time, or the run a max_time"
                    )
                self._pass("repairing", self.machines.next_back)
                continue
            if self._pass("restarting", self.now + self.groups.elastic.seconds + (self.groups.copy if grown else 0.0)):
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


_NEVER = Failure(math.inf, 0, 0.0)
