"""Synchronous data-parallel SGD by all-reduce: w <- w - eta * (1/N) sum_i g_i after every step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddlsim.arguments import checked
from ddlsim.collectives import Schedule
from ddlsim.errors import ConfigError
from ddlsim.plan import Plan
from ddlsim.runtime.algorithms import AllReduceAlgorithm, RankOrder, name_of, order_of, schedules
from ddlsim.runtime.compressed_all_reduce import CompressedAllReduce
from ddlsim.runtime.costs import Cost, stream_of
from ddlsim.runtime.group import Carrier, Group
from ddlsim.runtime.setting import Setting
from ddlsim.strategies.overlap import HorovodFusion, Overlap, OverlapChoice, Priority, buckets_of, overlap_named
from ddlsim.strategies.plans import tells_plan
from ddlsim.workload.buckets import Bucket
from ddlsim.workload.compute import Workload

__all__ = ["AllReduce", "start_group"]

#: makes what carries the buckets of a group
NewCarrier = Callable[[Group, Sequence[Bucket]], Carrier]


@checked
@dataclass(frozen=True)
class AllReduce:
    """Synchronous SGD: all workers average their gradients in every step.

    algorithm   name of an all-reduce ("ring", "hierarchical", "double_binary_tree", ...), a function
                ``n_ranks -> Schedule``, ``"package.module:function"``, or "auto": the fastest by simulation,
                for each bucket size
    overlap     "none", "layer", "ddp", "horovod", "priority", or a policy with its own settings
    rank_order  "topology" (neighbours in the network are neighbours in the ring, as NCCL arranges them),
                "given" (the cluster's order, as MPI ranks), or the ranks in the order wanted
    cost        what a bucket's all-reduce costs: "simulated" message by message; "calibrated": by the curve that was
                measured on this cluster (see docs/calibration.md); "nccl": what NCCL's tuner expects of `algorithm`,
                "ring" or "double_binary_tree" ("auto": of the faster one)
    """

    algorithm: AllReduceAlgorithm = "ring"
    overlap: OverlapChoice = "ddp"
    rank_order: RankOrder = "topology"
    cost: Cost = "simulated"
    takes_compression = True

    @property
    def label(self) -> str:
        """Algorithm and overlap, and what they cost unless that is simulated."""
        overlap = self.overlap if isinstance(self.overlap, str) else type(self.overlap).__name__
        cost = "" if self.cost == "simulated" else f", {self.cost} cost"
        return f"all-reduce ({name_of(self.algorithm)}, {overlap}{cost})"

    def updates(self, steps: int, n_workers: int) -> int:
        """One update a step."""
        return steps

    def start(self, setting: Setting) -> None:
        """Start all workers."""
        schedule = schedules(setting, self.algorithm, self.rank_order)
        stream = stream_of(setting, "AllReduce", self.cost, self.algorithm, self.rank_order)
        group = start_group(setting, overlap_named(self.overlap), schedule, [], self._compressed(setting, schedule))
        group.servers = stream

    def plan(self, workloads: Sequence[Workload], steps: int = 1, accumulation: int = 1) -> Plan:
        """Return what workers with these workloads do in `steps` steps, gradients uncompressed.

        What their collectives cost, `algorithm`, `rank_order` and `cost`, is not part of it. Raises ConfigError for an
        overlap that does not tell its plan.
        """
        overlap = overlap_named(self.overlap)
        if not tells_plan(overlap, "work"):
            raise ConfigError(
                f"plan: the step of overlap = {type(overlap).__name__} is not a table; give it a method "
                "plan(workloads, steps, accumulation) that is true of its method work"
            )
        return overlap.plan(workloads, steps, accumulation)

    def _compressed(self, setting: Setting, schedule: Callable[[float], Schedule]) -> NewCarrier | None:
        if setting.compression is None:
            return None
        order = order_of(setting, self.rank_order)
        return functools.partial(CompressedAllReduce, setting, self.algorithm, schedule, order)


def start_group(
    setting: Setting, overlap: Overlap, schedule: Callable[[float], Schedule], servers: list[int],
    carrier: NewCarrier | None = None,
) -> Group:  # fmt: skip
    """Start synchronous workers (with servers behind them) that exchange gradients under `overlap`; return them.

    A `carrier` takes the place of dense collectives by `schedule`.
    """
    nodes = setting.nodes + servers
    group = Group(setting.loop, setting.recorder, nodes, len(setting.workers), schedule, setting.learner)
    setting.model = lambda: group.params
    if carrier is not None:
        if isinstance(overlap, HorovodFusion | Priority):
            raise ConfigError(
                f"overlap = {type(overlap).__name__} fuses or cuts what compression has packed; with compression "
                "use 'none', 'layer' or 'ddp'"
            )
        group.carrier = carrier(group, buckets_of(overlap, setting.workers[0].workload))
    if isinstance(overlap, HorovodFusion | Priority):
        group.coordinator = overlap.coordinator(group)
    for worker in setting.workers:
        setting.loop.env.process(overlap.work(worker, group))
    return group
