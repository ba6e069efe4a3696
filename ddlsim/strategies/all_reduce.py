"""Synchronous data-parallel SGD, w <- w - eta * (1/N) sum_i g_i after every step: by an all-reduce, or with a sharded
optimizer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from ddlsim.arguments import checked, validated_by
from ddlsim.collectives import Collective
from ddlsim.errors import ConfigError, shown
from ddlsim.plan import StepProgram, data_parallel, sharded
from ddlsim.plan.plan import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from ddlsim.plan.transforms import with_shared_norms
from ddlsim.runtime import Communicator, Exchange, Fabric, RunContext, communicator
from ddlsim.runtime.exchange import CollectiveExchange, OfKinds
from ddlsim.runtime.fabric import (
    AllReduceAlgorithm,
    Collectives,
    Cost,
    OnFabric,
    RankOrder,
    algorithm_name,
    algorithm_of,
    cost_suffix,
)
from ddlsim.runtime.table_run import CommonModel, TableRun
from ddlsim.strategies import contract
from ddlsim.strategies.overlap import NoOverlap, Overlap, OverlapChoice, as_compressed, buckets_of, overlap_named
from ddlsim.strategies.split_rules import check_shares
from ddlsim.workload.buckets import backwards
from ddlsim.workload.compute import Workload
from ddlsim.workload.stage import Stage


@checked
@dataclass(frozen=True)
class AllReduce(OnFabric):
    """Synchronous SGD: all workers average their gradients in every step.

    overlap     when gradients are sent during the backward pass: "none", "layer", "ddp", "horovod", "priority", or a
                policy object such as DdpBuckets("50 MiB")
    algorithm, rank_order, cost
                algorithm, rank order and cost model of the all-reduce; see :class:`~ddlsim.Fabric`. They can also be
                set with ``simulate(..., fabric=...)``
    shared_norms
                for LARS and LAMB: all-gather algorithm, such as "bruck" or "ring". Each of N workers then computes the
                norms of only 1/N of the layers, and the workers all-gather the norms. This saves time and gives the
                same values (Shi et al. 2021, arXiv:2010.10458, "parallel tensor operator"). None: every worker computes
                all norms
    no_sync     with gradient accumulation, whether gradients are exchanged only once per update, as in DDP's
                ``no_sync`` context. False: they are exchanged after every micro-step, which gives the same values but
                sends ``accumulation`` times as many bytes
    """

    algorithm: AllReduceAlgorithm = "default"
    overlap: OverlapChoice = "ddp"
    rank_order: RankOrder = "topology"
    cost: Cost = "simulated"
    shared_norms: Annotated[str | Collective, algorithm_of("all_gather")] | None = None
    no_sync: bool = True

    @property
    def label(self) -> str:
        """Label for tables and plots: algorithm and overlap, and the cost model unless collectives are simulated."""
        overlap = self.overlap if isinstance(self.overlap, str) else type(self.overlap).__name__
        norms = "" if self.shared_norms is None else ", shared norms"
        norms += "" if self.no_sync else ", sums in every micro-step"
        return f"all-reduce ({algorithm_name(self.algorithm)}, {overlap}{norms}{cost_suffix(self.cost)})"

    def start(self, context: RunContext) -> None:
        """Start all workers."""
        members, overlap = communicator(context, self), as_compressed(overlap_named(self.overlap), context)
        parts = backwards(buckets_of(overlap, context.workers[0].workload))
        accumulation, compresses = context.workers[0].accumulation, context.compression is not None
        if self.shared_norms is not None and (compresses or not members.simulated):
            raise ConfigError(
                "AllReduce: shared_norms requires uncompressed gradients and cost = 'simulated'; remove shared_norms, "
                "or remove compression and cost"
            )
        if compresses and accumulation > 1 and not self.no_sync:
            raise ConfigError(
                "AllReduce: with no_sync = False, every micro-step would compress its gradients and add a compression "
                "error; remove no_sync or compression"
            )
        plain = AllReduce(overlap=overlap, shared_norms=self.shared_norms, no_sync=self.no_sync)
        make = functools.partial(plain.program, accumulation=accumulation)
        program, model = make(context.workloads), CommonModel(context)
        exchanges: dict[int, Exchange] = {ALL_REDUCE: CollectiveExchange(members, parts=parts, vectors=model.gradient)}
        if self.shared_norms is not None:
            exchanges[ALL_GATHER] = CollectiveExchange(members, "all_gather", self.shared_norms)
        TableRun(context, program, OfKinds(exchanges), model, make, owner=members.owner)

    def program(self, workloads: Sequence[Workload], accumulation: int = 1) -> StepProgram:
        """Return the step program for these workloads, without compression.

        It does not depend on `algorithm`, `rank_order` and `cost`, which decide only how long collectives take. Raises
        ConfigError without `no_sync` for an overlap policy with its own program.
        """
        overlap = overlap_named(self.overlap)
        policy = contract.of(overlap)
        if not policy.defines("program"):
            buckets = functools.partial(buckets_of, overlap)
            program = data_parallel(workloads, None, buckets, accumulation=accumulation, no_sync=self.no_sync)
        elif self.no_sync:
            program = policy.program(workloads, accumulation)
        else:
            raise ConfigError(
                f"AllReduce: no_sync = False cannot be combined with overlap = {type(overlap).__name__}, which sums "
                "gradients once per step; use overlap='none', 'layer' or 'ddp'"
            )
        if self.shared_norms is None:
            return program
        works = {id(workload): [workload] for workload in workloads}
        return program.map(functools.partial(with_shared_norms, n_ranks=len(workloads)), list(works.values()))


# ---------------------------------------------------------------- sharded optimizers


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
    (:func:`ddlsim.plan.transforms.with_partial_norms`).
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

        make = functools.partial(self.program, accumulation=context.workers[0].accumulation)
        program, model = make(context.workloads), CommonModel(context)
        algorithm, gradients = self.reduce_scatter, model.gradient
        exchanges = {
            REDUCE_SCATTER: CollectiveExchange(members, "reduce_scatter", algorithm, parts=parts, vectors=gradients),
            ALL_GATHER: CollectiveExchange(members, "all_gather", self.all_gather),
        }
        if context.workers[0].workload.norms:
            exchanges[ALL_REDUCE] = CollectiveExchange(members)
        TableRun(context, program, OfKinds(exchanges), model, make, owner=members.owner)
