"""The groups of workers that an elastic run can form."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.life import Elastic, Failures, Timeline
from ddlsim.life.checkpoints import NO_CHECKPOINTS, Cost
from ddlsim.life.timeline import Floats
from ddlsim.run.experiment import Experiment
from ddlsim.run.living import THIRTY_DAYS, copy_seconds, cost_of, holds_parts
from ddlsim.run.paces import Paces
from ddlsim.run.parts import machines_of, machines_taken, racks
from ddlsim.strategies import contract
from ddlsim.units import si
from ddlsim.workload.input import Input
from ddlsim.workload.model import load_model

if TYPE_CHECKING:
    from ddlsim.run.outcome import Outcome


@dataclass(frozen=True, eq=False)
class Group:
    """Workers that are there, of these ranks of the run: what they do, and how long their steps take."""

    experiment: Experiment
    ranks: list[int]
    timeline: Timeline
    samples_per_update: float
    every: float
    cost: Cost
    computing: Floats  # share of its time that each computes, (n_workers,)

    @property
    def n_workers(self) -> int:
        """How many they are."""
        return len(self.ranks)

    def saving(self, timeline: Timeline, seconds: float) -> Timeline:
        """Return a timeline with the checkpoints of so many s."""
        if math.isinf(self.every) or math.isinf(seconds):
            return timeline
        length = float(timeline.end_of(np.array(timeline.count(seconds) + 2)))
        return replace(timeline, every=self.every, cost=self.cost, length=length)


class Groups:
    """The groups that a run's machines can form, each simulated when it is first asked for.

    Machines that are alike in all that is known of them (workers, speed, links, first switch) can stand for each other.
    """

    def __init__(self, result: Outcome) -> None:
        self._experiment, self._nodes = result.experiment, result.nodes.tolist()
        self._machine = machines_of(result.cluster, self._nodes)
        self._places = {int(node): place for place, node in enumerate(result.cluster.workers.tolist())}
        self._cluster, self._found = result.cluster, dict[tuple[object, ...], Group | None]()
        self._workload, self._speeds = result.workloads[0], result.experiment.speeds(len(self._nodes))
        length = si(result.experiment.max_time, "time")
        self._length = length if math.isfinite(length) else THIRTY_DAYS
        self.n_machines = max(self._machine) + 1
        #: whether each worker holds all of the state
        stages = contract.of(result.experiment.strategy).stages_of(result.workloads)
        self.whole = not holds_parts(stages, result.workloads)
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

    def on(self, machines: Collection[int]) -> Group | None:
        """Return the group that these machines form, None where they have fewer workers than there must be."""
        key = tuple(sorted((self._kinds[each] for each in machines), key=repr))
        if key not in self._found:
            self._found[key] = self._made(sorted(machines))
        return self._found[key]

    @cached_property
    def _kinds(self) -> list[tuple[object, ...]]:
        """What is known of each machine."""
        cluster, experiment, switch = self._cluster, self._experiment, racks(self._cluster)
        kinds: list[tuple[object, ...]] = []
        for machine in range(self.n_machines):
            ranks = [rank for rank, own in enumerate(self._machine) if own == machine]
            nodes = [self._nodes[rank] for rank in ranks]
            host = int(cluster.host_of[nodes[0]])
            links = np.isin(cluster.link_src, nodes) | (cluster.host_of[cluster.link_src] == host)
            rates = np.stack([cluster.channel_capacity[cluster.link_channel[links]], cluster.link_latency[links]])
            known = [(cluster.device_of[self._nodes[i]], cluster.speed[self._nodes[i]], self._speeds[i]) for i in ranks]
            named = bool(experiment.slow_downs or experiment.faults or experiment.beside)
            kinds.append((
                *known, np.sort(rates).tobytes(), switch.get(host, -1 - machine), machine if named else -1
            ))  # fmt: skip
        return kinds

    def _made(self, machines: list[int]) -> Group | None:
        """Return the group of the most of these machines that its strategy can split; others stand by."""
        for n in range(len(machines), 0, -1):
            ranks = [rank for rank, own in enumerate(self._machine) if own in machines[:n]]
            if len(ranks) < self.elastic.min_workers:
                return None
            if self._fits(len(ranks)):
                return self._simulated(ranks)
        return None

    def _fits(self, n_workers: int) -> bool:
        experiment = self._experiment
        model = load_model(experiment.time_model or experiment.model)
        try:
            contract.of(experiment.strategy).check_sizes(model, self._batch_size(n_workers), n_workers)
        except ConfigError:
            return False
        return True

    def _batch_size(self, n_workers: int) -> int:
        size = self._experiment.batch_size
        if contract.of(self._experiment.strategy).shares_batch:  # which is that of all workers already
            return size
        return self.elastic.batch_size(size, n_workers, len(self._nodes))

    def _simulated(self, ranks: list[int]) -> Group:
        from ddlsim.run.simulate import run  # which knows of results, and they of lives

        whole, nodes = self._experiment, [self._nodes[rank] for rank in ranks]
        experiment = whole.with_(
            cluster=self._cluster, workers=tuple(self._places[node] for node in nodes), failures=None, elastic=None,
            checkpoints=None, batch_size=self._batch_size(len(ranks)), max_time=math.inf,
            speed=None if whole.speed is None else tuple(self._speeds[rank] for rank in ranks),
            slow_downs=_of(ranks, whole.slow_downs), faults=_of(ranks, whole.faults),
        )  # fmt: skip
        if isinstance(whole.input, Input):  # which has been read once when groups change
            experiment = experiment.with_(input=replace(whole.input, epoch=None))
        clock = experiment
        if experiment.training is not None:
            clock = experiment.with_(training=None, time_model=None, model=experiment.time_model or experiment.model)
        paces = Paces(clock, self._cluster, nodes)
        try:
            result = run(paces.steady)
            pace = paces.of(None, result, self._length)
        except ConfigError as error:
            raise ConfigError(f"elastic: a group of {len(ranks)} workers: {error}") from None
        ends = np.array([time for time, _ in result.recorder.updates])
        timeline = Timeline(ends, len(result.measured_updates) - 1, math.inf, NO_CHECKPOINTS, math.inf, pace)
        every, cost = math.inf, NO_CHECKPOINTS
        if whole.checkpoints is not None:
            every = whole.checkpoints.interval
            cost = cost_of(whole.checkpoints, self._cluster, nodes, self._workload)
            cost.check(every)
        computing = result.device_seconds["compute"] / result.simulated_time
        return Group(experiment, ranks, timeline, result.samples_per_update, every, cost, computing)


def _of(ranks: list[int], events: Sequence[Any]) -> tuple[Any, ...]:
    """Return the events as a group of these ranks has them, in which its workers have other ranks."""
    place = {rank: i for i, rank in enumerate(ranks)}
    own = [(each, [place[rank] for rank in getattr(each, "ranks", ()) if rank in place]) for each in events]
    kept = [replace(each, ranks=new) if new else each for each, new in own if new or not hasattr(each, "ranks")]
    return tuple(kept)
