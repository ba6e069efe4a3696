"""The groups of workers of an elastic run, each simulated on first use."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from ddlsim.cluster.groups import machines_of, rack_of_hosts
from ddlsim.errors import ConfigError, NoUpdateError
from ddlsim.learning import Array, Value
from ddlsim.learning.learner import Handover, Shift
from ddlsim.learning.monitor import Row
from ddlsim.reliability import Elastic, FailureFreeTimeline
from ddlsim.reliability.checkpoints import NO_CHECKPOINTS
from ddlsim.reliability.engine import Group, OnClock, Stretch
from ddlsim.reliability.faults import in_group, left_of
from ddlsim.run.experiment import Experiment
from ddlsim.run.failure_timeline import THIRTY_DAYS, copy_seconds, holds_parts, interval_of
from ddlsim.run.timed_events import Paces
from ddlsim.strategies import contract
from ddlsim.units import si
from ddlsim.workload.input import Input
from ddlsim.workload.model import Model

if TYPE_CHECKING:
    from ddlsim.run.result import Result


class Groups:
    """The groups that a run's machines can form; see :class:`ddlsim.reliability.engine.Groups`.

    Machines with equal workers, speed, links and first switch are interchangeable.
    """

    def __init__(self, result: Result) -> None:
        self._experiment, self._nodes = result.experiment, result.nodes.tolist()
        self.machine = machines_of(result.cluster, self._nodes)
        self._places = {int(node): place for place, node in enumerate(result.cluster.workers.tolist())}
        self._cluster, self._simulated = result.cluster, dict[tuple[object, ...], Group | None]()
        self._workload, self._speeds = result.workloads[0], result.experiment.speeds(len(self._nodes))
        length = si(result.experiment.max_time, "time")
        self._length = length if math.isfinite(length) else THIRTY_DAYS
        self.n_machines = max(self.machine) + 1
        stages = contract.of(result.experiment.strategy).stages_of(result.workloads)
        self.is_replicated = not holds_parts(stages, result.workloads)
        self.copy = copy_seconds(result) if self.is_replicated and self.n_machines > 1 else 0.0

    @property
    def elastic(self) -> Elastic:
        assert self._experiment.elastic is not None
        return self._experiment.elastic

    def on(self, machines: Collection[int]) -> Group | None:
        """Return the group of these machines, with as many as the strategy can use; the others are idle. None if it has
        too few workers."""
        key = tuple(sorted((self._kinds[machine] for machine in machines), key=repr))
        if key not in self._simulated:
            sizes = range(len(machines), 0, -1)
            options = [[i for i, machine in enumerate(self.machine) if machine in sorted(machines)[:n]] for n in sizes]
            large = [ranks for ranks in options if len(ranks) >= self.elastic.min_workers]
            ranks = next((ranks for ranks in large if self._fits(len(ranks))), None)
            self._simulated[key] = None if ranks is None else self._group(ranks)
        return self._simulated[key]

    @cached_property
    def _kinds(self) -> list[tuple[object, ...]]:
        """Properties of each machine that determine which ones are interchangeable."""
        cluster, experiment, switch = self._cluster, self._experiment, rack_of_hosts(self._cluster)
        kinds: list[tuple[object, ...]] = []
        for machine in range(self.n_machines):
            ranks = [rank for rank, other in enumerate(self.machine) if other == machine]
            nodes = [self._nodes[rank] for rank in ranks]
            host = int(cluster.host_of[nodes[0]])
            links = np.isin(cluster.link_src, nodes) | (cluster.host_of[cluster.link_src] == host)
            rates = np.stack([cluster.channel_capacity[cluster.link_channel[links]], cluster.link_latency[links]])
            workers = [
                (cluster.device_of[self._nodes[i]], cluster.speed[self._nodes[i]], self._speeds[i]) for i in ranks
            ]
            named = bool(experiment.slowdowns or experiment.faults or experiment.background)
            place = switch.get(host, -1 - machine)
            kinds.append((*workers, np.sort(rates).tobytes(), place, machine if named else -1))
        return kinds

    def _fits(self, n_workers: int) -> bool:
        experiment = self._experiment
        model = cast(Model, experiment.time_model or experiment.model)  # of a result, so it has been loaded
        try:
            contract.of(experiment.strategy).check_sizes(model, self._batch_size(n_workers), n_workers)
        except ConfigError:
            return False
        return True

    def _batch_size(self, n_workers: int) -> int:
        size = self._experiment.batch(len(self._nodes))
        if contract.of(self._experiment.strategy).shares_batch:  # the batch size is already global
            return size
        return self.elastic.batch_size(size, n_workers, len(self._nodes))

    def _group(self, ranks: list[int]) -> Group:
        from ddlsim.run.simulate import clock_of, complete  # circular: it imports results, and these failure timelines

        base, nodes = self._experiment, [self._nodes[rank] for rank in ranks]
        speed = None if base.speed is None else tuple(self._speeds[rank] for rank in ranks)
        places, size = tuple(self._places[node] for node in nodes), self._batch_size(len(ranks))
        experiment = base.with_(failures=None, elastic=None, checkpoints=None, max_time=math.inf).with_(
            cluster=self._cluster, workers=places, batch_size=size, speed=speed
        )
        place = {rank: i for i, rank in enumerate(ranks)}
        slowed = [(event, tuple(place[rank] for rank in event.ranks if rank in place)) for event in base.slowdowns]
        faults = [in_group(fault, ranks, self._cluster, self._nodes) for fault in base.faults]
        experiment = experiment.with_(
            slowdowns=[replace(event, ranks=hit) for event, hit in slowed if hit],
            faults=[fault for fault in faults if fault is not None],
        )
        if isinstance(base.input, Input):  # the data set has been read once when groups change
            experiment = experiment.with_(input=replace(base.input, epoch=None))
        paces = Paces(clock_of(experiment), self._cluster, nodes)
        try:
            try:
                result = complete(paces.steady)
            except ConfigError:
                if experiment.training is None:
                    raise
                paces = Paces(experiment, self._cluster, nodes)  # when workers communicate depends on the training
                result = complete(paces.steady)
            pace = paces.of(None, result, self._length)
        except ConfigError as error:
            raise ConfigError(f"elastic: cannot continue with {len(ranks)} workers: {error}") from None
        ends = np.array([time for time, _ in result.recorder.updates])
        timeline = FailureFreeTimeline(ends, len(result.measured_updates) - 1, math.inf, NO_CHECKPOINTS, math.inf, pace)
        every, cost = interval_of(base.checkpoints, self._cluster, nodes, self._workload)
        computing = result.device_seconds["compute"] / result.simulated_time
        group = Group(ranks, timeline, result.samples_per_update, every, cost, computing)
        if experiment.training is None:
            return group
        return Learners(**vars(group), experiment=experiment, n_at_start=len(self._nodes), elastic=self.elastic)


class Learned(NamedTuple):
    """State of the training: input of the next group, the evaluations, and the latest model."""

    handover: Handover | None
    history: tuple[Row, ...]
    model: Value[Array]


@dataclass(frozen=True, eq=False)
class Learners(Group):
    """A group in a training run: the simulation, with its own jitter, determines the ends of its steps and when the
    target is reached."""

    experiment: Experiment
    n_at_start: int
    elastic: Elastic

    def at_first(self, timeline: FailureFreeTimeline) -> Group:
        return self

    def expected(
        self, state: Learned | None, now: float, length: float, failure: float, back: float
    ) -> FailureFreeTimeline:
        if math.isinf(self.every):
            return OnClock.of(self.timeline, now)
        slack = 2.0 * (float(np.diff(self.timeline.ends, prepend=0.0).max()) + self.cost.stall)
        try:
            result = self._run(state, now, min(length, failure, back + slack) - now)
        except NoUpdateError:
            return OnClock.of(self.timeline, now)
        return self._with_checkpoints(result)

    def train(self, state: Learned | None, now: float, seconds: float, endless: bool) -> Stretch:
        try:
            result = self._run(state, now, seconds, endless)
        except NoUpdateError:
            return Stretch(OnClock.of(self.timeline, now), 0, lambda steps: 0.0, seconds, state)
        updates, timeline = result.recorder.updates, self._with_checkpoints(result)
        steps = min(timeline.ended(seconds) if math.isfinite(seconds) else len(updates), len(updates))
        counts = np.array([n for _, n in updates[:steps]], dtype=np.int64)

        def samples(steps: int) -> float:
            return float(counts[:steps].sum())

        if steps < len(updates):  # checkpoints left too little time for all
            if steps:
                state = self.again(state, now, updates[steps - 1][0], timeline)
            return Stretch(timeline, steps, samples, seconds, state)
        finished = result.stop_reason != "max_time"
        if finished:
            seconds = float(timeline.position(np.array([updates[-1][0]]))[0])
        return Stretch(timeline, steps, samples, seconds, self._learned(state, now, result, timeline), finished)

    def again(self, state: Learned | None, now: float, seconds: float, timeline: FailureFreeTimeline) -> Learned:
        return self._learned(state, now, self._run(state, now, seconds), timeline)

    def _begin(self, state: Learned | None, now: float) -> Handover | None:
        if state is None or state.handover is None:
            return None
        return replace(state.handover, time=now, rate_factor=self.elastic.rate_factor(self.n_workers, self.n_at_start))

    def _run(self, state: Learned | None, now: float, seconds: float, endless: bool = True) -> Result:
        from ddlsim.run.simulate import complete

        experiment = self.experiment
        left = {name: left_of(getattr(experiment, name), now) for name in ("faults", "slowdowns", "background")}
        return complete(experiment.with_(max_time=seconds, **left), shift=Shift(self._begin(state, now), endless, now))

    def _with_checkpoints(self, result: Result) -> FailureFreeTimeline:
        """Return the steps of a result with their checkpoints."""
        ends = np.array([time for time, _ in result.recorder.updates])
        plain = FailureFreeTimeline(ends, 1, math.inf, NO_CHECKPOINTS, ends[-1])
        return plain if math.isinf(self.every) else replace(plain, every=self.every, cost=self.cost)

    def _learned(self, state: Learned | None, now: float, result: Result, timeline: FailureFreeTimeline) -> Learned:
        monitor, begin = result.monitor, self._begin(state, now)
        assert monitor is not None
        former, since = (0, 0.0) if begin is None else (len(begin.history), begin.time)
        rows = list(monitor.history)
        for i in range(former, len(rows)) if math.isfinite(timeline.every) else ():
            at = float(timeline.position(np.array([rows[i].time - since]))[0])
            rows[i] = rows[i]._replace(time=since + at)
        handover = None if state is None else state.handover
        if monitor.latest is not None:
            model, optimizer = monitor.latest
            updates = result.recorder.updates
            updated, learned, sent = (0, 0, 0.0) if begin is None else (begin.n_updates, begin.n_samples, begin.nbytes)
            handover = Handover(
                model.read(),
                None if model.statistics is None else model.statistics.read(),
                None if optimizer is None else optimizer.read(),
                updated + len(updates),
                learned + int(sum(n for _, n in updates)),
                result.nbytes_sent + sent,
                now,
                tuple(rows),
            )
        return Learned(handover, tuple(rows), monitor.evaluated)
