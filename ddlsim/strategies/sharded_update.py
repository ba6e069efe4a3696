"""Synchronous SGD with a sharded optimizer: every worker updates its shard of the parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from ddlsim.arguments import checked, validated_by
from ddlsim.collectives import Collective
from ddlsim.errors import ConfigError, shown
from ddlsim.plan import StepProgram, sharded
from ddlsim.plan.plan import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from ddlsim.runtime import Communicator, Exchange, Fabric, RunContext
from ddlsim.runtime.codec import backwards
from ddlsim.runtime.exchange import CollectiveExchange, Vectors
from ddlsim.runtime.fabric import Collectives, Cost, RankOrder, algorithm_name, algorithm_of, cost_suffix
from ddlsim.runtime.table_run import planned
from ddlsim.strategies import contract
from ddlsim.strategies.overlap import NoOverlap, Overlap, as_compressed, buckets_of, overlap_named
from ddlsim.strategies.split_rules import check_shares
from ddlsim.workload.compute import Workload
from ddlsim.workload.stage import Stage


def _in_order(overlap: str | Overlap, where: str) -> str | Overlap:
    if contract.of(overlap_named(overlap, where)).defines("program"):
        raise ConfigError(
            f"{where} = {shown(overlap)}: buckets that are fused or split during the step cannot be sharded; use "
            "'none', 'layer', 'ddp', or a policy that defines only buckets"
        )
    return overlap


@checked
@dataclass(frozen=True)
class ShardedUpdate:
    """Synchronous SGD with a sharded optimizer: each worker updates one shard of the parameters.

    Workers reduce-scatter the gradients, update their shards, and all-gather the parameters. This is the "distributed
    weight update" of Intel MLSL (Sridharan et al. 2018, arXiv:1801.08030) and stage 1 of ZeRO (Rajbhandari et al. 2020,
    arXiv:1910.02054, section 5.1). Each worker sends as many bytes as in a ring all-reduce, but needs only 1/N of the
    optimizer's time and state. Numerically, this is equivalent to synchronous SGD.

    reduce_scatter, all_gather
                algorithms of the two collectives: each a name, or a function ``n_ranks -> Schedule``
    rank_order, cost
                rank order and cost model of both collectives; see :class:`~ddlsim.Fabric`
    overlap     when gradients are sent: "none", "layer", "ddp", or a policy that only defines buckets, such as
                DdpBuckets(...). Buckets are reduce-scattered during the backward pass and all-gathered during the next
                forward pass, as in Megatron-LM's distributed optimizer (:func:`ddlsim.plan.sharded`)

    LARS and LAMB need the norms of whole tensors, which a small all-reduce computes from the norms of shards
    (:func:`ddlsim.plan.norms.with_partial_norms`).
    """

    reduce_scatter: Annotated[str | Collective, algorithm_of("reduce_scatter")] = "default"
    all_gather: Annotated[str | Collective, algorithm_of("all_gather")] = "default"
    rank_order: RankOrder = "topology"
    cost: Cost = "simulated"
    overlap: Annotated[str | Overlap, validated_by(_in_order)] = "none"

    @property
    def label(self) -> str:
        """Label for tables and plots: the algorithms, and the overlap and cost model if they are not the defaults."""
        policy = overlap_named(self.overlap)
        name = self.overlap if isinstance(self.overlap, str) else type(policy).__name__
        more = ("" if isinstance(policy, NoOverlap) else f", {name}") + cost_suffix(self.cost)
        return f"sharded update ({algorithm_name(self.reduce_scatter)}, {algorithm_name(self.all_gather)}{more})"

    def collectives(self) -> Collectives:
        """Return the algorithms of both collectives and their cost."""
        return Collectives({"reduce_scatter": self.reduce_scatter, "all_gather": self.all_gather}, self.cost)

    def on_fabric(self, fabric: Fabric) -> ShardedUpdate:
        """Return the strategy with the reduce-scatter and all-gather of the fabric's all-reduce."""
        return dataclasses.replace(
            self,
            reduce_scatter=fabric.algorithm,
            all_gather=fabric.algorithm,
            rank_order=fabric.rank_order,
            cost=fabric.cost,
        )

    def stage(self, workload: Workload, rank: int, n_workers: int) -> Stage:
        """Return a worker's stage: the full model, with a shard of the optimizer state."""
        return Stage(workload, state=1.0 / n_workers)

    def program(self, workloads: Sequence[Workload], accumulation: int = 1) -> StepProgram:
        """Return the step program for these workloads."""
        policy = overlap_named(self.overlap)
        overlaps, buckets = not isinstance(policy, NoOverlap), functools.partial(buckets_of, policy)
        return sharded(workloads, None, buckets, accumulation=accumulation, overlap=overlaps)

    def start(self, context: RunContext) -> None:
        """Start all workers. Raises ConfigError for a custom optimizer that works layer by layer."""
        check_shares("ShardedUpdate", context)
        members = Communicator(context, Fabric("default", self.rank_order, self.cost), owner="ShardedUpdate")
        policy = overlap_named(self.overlap)
        if as_compressed(policy, context) is not policy:
            raise ConfigError(
                "ShardedUpdate: the compressor needs the whole gradient, but overlap splits it into buckets; use "
                "overlap='none'"
            )
        parts = backwards(buckets_of(policy, context.workers[0].workload))

        def exchanges(gradients: Vectors) -> dict[int, Exchange]:
            scatter = CollectiveExchange(members, "reduce_scatter", self.reduce_scatter, parts=parts, vectors=gradients)
            gather = CollectiveExchange(members, "all_gather", self.all_gather)
            norms = {ALL_REDUCE: CollectiveExchange(members)} if context.workers[0].workload.norms else {}
            return {REDUCE_SCATTER: scatter, ALL_GATHER: gather, **norms}

        accumulation = context.workers[0].accumulation
        planned(members, lambda workloads: self.program(workloads, accumulation), exchanges)
