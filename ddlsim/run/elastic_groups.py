"""The groups of workers that an elastic run can form."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.life import Elastic, Failures, Timeline
from ddlsim.life.checkpoints import NO_CHECKPOINTS, Cost
from ddlsim.run.experiment import Experiment
from ddlsim.run.living import copy_seconds, cost_of, holds_parts
from ddlsim.run.parts import machines_of, machines_taken
from ddlsim.workload.model import load_model
from ddlsim.workload.stage import stages_of

if TYPE_CHECKING:
    from ddlsim.run.outcome import Outcome


@dataclass(frozen=True, eq=False)
class Group:
    """Workers on so many machines: what they do, and how long their steps take."""

    experiment: Experiment
    n_workers: int
    timeline: Timeline
    samples_per_update: float
    every: float
    cost: Cost

    def saving(self, timeline: Timeline, seconds: float) -> Timeline:
        """Return a timeline with the checkpoints of so many s."""
        if math.isinf(self.every) or math.isinf(seconds):
            return timeline
        length = float(timeline.end_of(np.array(timeline.count(seconds) + 2)))
        return replace(timeline, every=self.every, cost=self.cost, length=length)


class Groups:
    """The groups that a run's machines can form, each simulated when it is first asked for.

    A group on k machines is that of the first k: with equal machines it does not matter which ones are left.
    """

    def __init__(self, result: Outcome) -> None:
        self._experiment, self._nodes = result.experiment, result.nodes.tolist()
        self._machine = machines_of(result.cluster, self._nodes)
        self._places = {int(node): place for place, node in enumerate(result.cluster.workers.tolist())}
        self._cluster, self._found = result.cluster, dict[int, Group | None]()
        self._workload = result.workloads[0]
        self.n_machines = max(self._machine) + 1
        #: whether each worker holds all of the state
        self.whole = not holds_parts(stages_of(result.experiment.strategy, result.workloads), result.workloads)
        self.copy = copy_seconds(result) if self.whole and self.n_machines > 1 else 0.0

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

    def on(self, n_machines: int) -> Group | None:
        """Return the group that so many machines form, None where that has fewer workers than there must be."""
        if n_machines not in self._found:
            self._found[n_machines] = self._made(n_machines)
        return self._found[n_machines]

    def _made(self, n_machines: int) -> Group | None:
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

    def _simulated(self, nodes: list[int]) -> Group:
        from ddlsim.run.simulate import run  # which knows of results, and they of lives

        whole, n = self._experiment, len(nodes)
        speed = whole.speed
        experiment = whole.with_(
            cluster=self._cluster, workers=tuple(self._places[node] for node in nodes), failures=None, elastic=None,
            checkpoints=None, batch_size=self._batch_size(n), max_time=math.inf,
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
        every, cost = math.inf, NO_CHECKPOINTS
        if whole.checkpoints is not None:
            every = whole.checkpoints.interval
            cost = cost_of(whole.checkpoints, self._cluster, nodes, self._workload)
            cost.check(every)
        return Group(experiment, n, timeline, result.samples_per_update, every, cost)
