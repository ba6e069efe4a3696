"""Synchronous SGD on mixture-of-experts models whose experts are distributed over the workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from ddlsim.arguments import Count, checked
from ddlsim.collectives import Collective
from ddlsim.plan import StepProgram
from ddlsim.plan.experts import expert_elements, experts, experts_in
from ddlsim.plan.schedules import Schedules
from ddlsim.runtime.context import RunContext
from ddlsim.runtime.exchange import OfGroups
from ddlsim.runtime.fabric import Collectives, RankOrder, algorithm_of
from ddlsim.runtime.table_run import CommonModel, TableRun
from ddlsim.strategies.overlap import InOrder, InOrderChoice, overlap_named
from ddlsim.strategies.split_rules import DealtOut, whole_batch
from ddlsim.workload.compute import Workload
from ddlsim.workload.memory import holding_of, memory_of
from ddlsim.workload.precision import ELEMENT_NBYTES
from ddlsim.workload.stage import Stage


@checked
@dataclass(frozen=True)
class ExpertParallel(DealtOut):
    """Data parallelism with expert parallelism, for mixture-of-experts models.

    Within each group of consecutive workers, the experts of each mixture-of-experts layer are distributed over the
    workers. In each pass through such a layer, two all-to-alls carry tokens to their experts and back (Lepikhin et al.
    2021, GShard, arXiv:2006.16668; Rajbhandari et al. 2022, DeepSpeed-MoE, arXiv:2201.05596). ``batch_size`` is the
    global batch size. The simulation assumes that all experts receive the same number of tokens.

    degree      number of workers in a group; each group holds all experts. None: all workers form one group
    overlap     when gradients are sent during the backward pass: "ddp", "layer", "none" or DdpBuckets(...)
    algorithm   algorithm of the all-reduces, such as "ring"
    all_to_all  algorithm of the all-to-alls
    rank_order  order of the ranks in a collective, as for :class:`~ddlsim.AllReduce`
    """

    degree: Count | None = None
    overlap: InOrderChoice = "ddp"
    algorithm: Annotated[str | Collective, algorithm_of("all_reduce")] = "default"
    all_to_all: Annotated[str | Collective, algorithm_of("all_to_all")] = "direct"
    rank_order: RankOrder = "topology"

    @property
    def label(self) -> str:
        """Label for tables and plots: the degree of expert parallelism."""
        return f"expert parallel (degree {self.degree or 'all'})"

    def collectives(self) -> Collectives:
        """Return the algorithms of the all-reduces and all-to-alls, by the names of their fields."""
        return Collectives({"algorithm": self.algorithm, "all_to_all": self.all_to_all})

    def stage(self, workload: Workload, rank: int, n_workers: int) -> Stage:
        """Return a worker's stage: the dense layers, its experts, and buffers for the tokens that it exchanges."""
        degree, model = self._degree(n_workers), workload.model
        layers = tuple(
            dataclasses.replace(layer, n_params=n, tensors=(("own", n),)) if n < layer.n_params else layer
            for layer in model.layers
            for n in [layer.n_params - expert_elements(layer) * (degree - 1) // degree]
        )
        local_model = dataclasses.replace(model, layers=layers, structure=(), trainable=False)
        memory = memory_of(local_model, workload.batch_size, workload.precision, holding_of(workload))
        tokens = max((numbers for _, numbers in experts_in(model).values()), default=0.0)
        exchanged = 2.0 * workload.batch_size * tokens * ELEMENT_NBYTES[workload.precision] if degree > 1 else 0.0
        return Stage(workload, memory=dataclasses.replace(memory, buffers=memory.buffers + exchanged))

    def program(self, workloads: Sequence[Workload], accumulation: int = 1) -> StepProgram:
        """Return the step program for these workloads (:func:`ddlsim.plan.experts.experts`)."""
        whole_batch(accumulation, "ExpertParallel")
        policy = overlap_named(self.overlap)
        assert isinstance(policy, InOrder)
        return experts(workloads, self._degree(len(workloads)), policy.buckets)

    def _degree(self, n_workers: int) -> int:
        return n_workers if self.degree is None else self.degree

    def start(self, context: RunContext) -> None:
        """Start all workers. Raises ConfigError for options that a static step program does not support."""
        workloads = context.workloads
        algorithms = {"all_reduce": self.algorithm, "all_to_all": self.all_to_all}
        program = self.program(workloads, context.workers[0].accumulation)
        nodes = np.array(context.nodes)
        schedules = Schedules(program, algorithms, context.cluster, nodes, self.rank_order, context.notes)
        exchanges = OfGroups(context, context.workers, program.groups, schedules)
        TableRun(context, program, exchanges, CommonModel(context))
