"""`FSDP`: data parallelism with sharded optimizer state, gradients and weights (ZeRO, FSDP, HYBRID_SHARD)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from ddlsim.arguments import Count, Density, Index, checked, integer, one_of
from ddlsim.collectives import Collective
from ddlsim.compression.exchange import title
from ddlsim.errors import ConfigError, listed
from ddlsim.plan import Plan, StepProgram, fully_sharded, sharded
from ddlsim.plan.chunks import stored_nbytes
from ddlsim.plan.plan import BACKWARD, FORWARD
from ddlsim.plan.program import slices
from ddlsim.plan.schedules import Schedules
from ddlsim.readable import count, percent
from ddlsim.runtime.context import RunContext
from ddlsim.runtime.fabric import (
    AllReduceAlgorithm,
    Collectives,
    Cost,
    Fabric,
    RankOrder,
    algorithm_name,
    algorithm_of,
    cost_suffix,
    halves_of,
)
from ddlsim.runtime.table_run import CommonModel, TableRun
from ddlsim.strategies.overlap import InOrderChoice, NoOverlap, overlap_named
from ddlsim.strategies.replica_groups import OfReplicas
from ddlsim.strategies.split_rules import check_shares, divisors, lower_memory_fsdp
from ddlsim.workload.buckets import rounded
from ddlsim.workload.compute import Workload
from ddlsim.workload.memory import Memory, holding_of, memory_of
from ddlsim.workload.model import Model
from ddlsim.workload.precision import GRADIENT_TYPES
from ddlsim.workload.roles import weight_units
from ddlsim.workload.stage import Stage, for_each
from ddlsim.workload.tensor_parallel import tensor_parallel

#: fields that apply only to some stages
OF_STAGE_3 = ("prefetch", "shard", "units")


@checked
@dataclass(frozen=True)
class FSDP:
    """Data parallelism with sharded optimizer state, gradients and weights: ZeRO and PyTorch FSDP.

    See Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO, implemented in DeepSpeed) and Zhao et al. 2023,
    arXiv:2304.11277. ``batch_size`` is the global batch size of an update, as in DeepSpeed. Each worker computes
    ``batch_size / (workers * micro_batch)`` micro-batches, one at a time.

    stage         ZeRO stage. Stage 1 shards the optimizer state; stage 2 also shards the gradients; stage 3 also shards
                  the weights, which are gathered unit by unit for each pass (FSDP's FULL_SHARD)
    micro_batch   samples per micro-batch on each worker. None: each worker processes its share of the batch as a single
                  micro-batch
    no_sync       whether each worker accumulates unsharded gradients, which takes memory, and reduce-scatters them only
                  after the last micro-batch. False: stages 2 and 3 reduce-scatter the gradients of every micro-batch.
                  Stage 1 always accumulates locally
    recompute     activations to recompute in the backward pass (activation checkpointing): "none"; "selective", the
                  matrices of attention; "dots-saveable", everything in transformer layers but products with weights
                  (JAX's checkpoint policy dots_with_no_batch_dims_saveable, MaxText's remat_policy "minimal");
                  "operators", every second matrix product and the element-wise operations of these layers; "full",
                  transformer layers; "early-stop", transformer layers without their last matrix product, whose output
                  the backward pass does not need (PyTorch's checkpoint with use_reentrant=False)
    recompute_share
                  fraction of the transformer layers that recompute, evenly spread (Megatron-LM's
                  --recompute-num-layers, torchtitan's "selective" for every n-th layer). :class:`~ddlsim.Parallel` has
                  no such option: its stages recompute in all of their layers
    param_dtype   data type of gathered weights. None: that of the computation; "fp32": each rank casts the gathered
                  weights (autocast)
    reduce_scatter, all_gather, rank_order, cost
                  algorithms, rank order and cost model of the two collectives, as for :class:`~ddlsim.ShardedUpdate`

    For stages 1 and 2 only:

    overlap       buckets that are reduce-scattered during the backward pass and gathered during the next forward pass:
                  "ddp" (the default), "layer" or DdpBuckets(...). "none": a single bucket after the backward pass

    For stage 3 only:

    prefetch      number of units to gather ahead of the unit that is being computed; 1 by default
    reshard       whether weights are freed after the forward pass and gathered again for the backward pass. False: they
                  are kept (SHARD_GRAD_OP)
    units         index of the first layer of each unit. None: each transformer layer is a unit, as are the layers
                  before and after them; in models without transformer layers, each block is a unit
    shard         size of a sharding group of neighbouring workers, such as the GPUs of a machine (HYBRID_SHARD, or
                  _HYBRID_SHARD_ZERO2 with ``reshard=False``). The groups are replicas, which all-reduce their shards of
                  the gradients. None: all workers form one group
    all_reduce    algorithm of the all-reduce between sharding groups; None: the default algorithm

    LARS and LAMB need the norms of whole tensors: each rank computes the sums of squares of its shards, and a small
    all-reduce adds them up (:func:`ddlsim.plan.transforms.with_partial_norms`). Compression applies to the gradients
    that are reduce-scattered; weights are gathered uncompressed.
    """

    stage: Annotated[int, integer(1, 3)] = 3
    micro_batch: Count | None = None
    prefetch: Index | None = None
    reshard: bool = True
    shard: Count | None = None
    units: Sequence[Index] | None = None
    no_sync: bool = False
    recompute: Annotated[str, one_of("none", "selective", "dots-saveable", "operators", "full", "early-stop")] = "none"
    recompute_share: Density = 1.0
    overlap: InOrderChoice | None = None
    param_dtype: Annotated[str, one_of(*GRADIENT_TYPES)] | None = None
    reduce_scatter: Annotated[str | Collective, algorithm_of("reduce_scatter")] = "default"
    all_gather: Annotated[str | Collective, algorithm_of("all_gather")] = "default"
    all_reduce: AllReduceAlgorithm | None = None
    rank_order: RankOrder = "topology"
    cost: Cost = "simulated"

    def __post_init__(self) -> None:
        if self.stage < 3:
            of_stage_3 = [name for name in OF_STAGE_3 if getattr(self, name) is not None]
            of_stage_3 += [] if self.reshard else ["reshard"]
            if of_stage_3:
                name, value = of_stage_3[0], getattr(self, of_stage_3[0])
                raise ConfigError(
                    f"FSDP: {name} = {value!r} has no effect with stage = {self.stage}, which does not shard the "
                    f"weights; use stage=3, or remove {name}"
                )
        elif self.overlap is not None:
            raise ConfigError(
                f"FSDP: overlap = {self.overlap!r} has no effect with stage = 3, which communicates unit by unit. "
                "Set units and prefetch instead, or remove overlap"
            )
        if self.stage == 1 and self.no_sync:
            raise ConfigError(
                "FSDP: no_sync = True has no effect with stage = 1, which always accumulates locally; remove no_sync, "
                "or use stage=2"
            )
        if self.recompute_share < 1.0 and self.recompute == "none":
            raise ConfigError(
                f"FSDP: recompute_share = {self.recompute_share} has no effect with recompute = 'none'; set recompute, "
                "or remove recompute_share"
            )
        if self.all_reduce is not None and self.shard is None:
            raise ConfigError(
                f"FSDP: all_reduce = {algorithm_name(self.all_reduce)!r} has no effect without shard, because there "
                "are no replicas to reduce over; set shard, or remove all_reduce"
            )

    @property
    def label(self) -> str:
        """Label for tables and plots: stage and sharding options."""
        more = f", micro-batch {self.micro_batch}" if self.micro_batch is not None else ""
        more += "" if self.shard is None else f", hybrid {self.shard}"
        more += "" if self.reshard else ", weights kept"
        more += "" if self.stage < 3 else f", prefetch {self._ahead}"
        more += ", no_sync" if self.no_sync else ""
        part = "" if self.recompute_share == 1.0 else f" in {percent(self.recompute_share, 0)} of the layers"
        more += "" if self.recompute == "none" else f", {self.recompute} recomputation{part}"
        return f"FSDP (stage {self.stage}{more}{cost_suffix(self.cost)})"

    def collectives(self) -> Collectives:
        """Return the algorithms of the reduce-scatter, all-gather and all-reduce, and their cost."""
        algorithms = {"reduce_scatter": self.reduce_scatter, "all_gather": self.all_gather}
        more = {} if self.all_reduce is None else {"all_reduce": self.all_reduce}
        return Collectives(algorithms | more, self.cost)

    def on_fabric(self, fabric: Fabric) -> FSDP:
        """Return the strategy with the reduce-scatter and all-gather of the fabric's all-reduce.

        Raises ConfigError for an all-reduce that does not consist of these two.
        """
        reduce_scatter, all_gather = halves_of(fabric, self.label)
        return dataclasses.replace(
            self,
            reduce_scatter=reduce_scatter,
            all_gather=all_gather,
            rank_order=fabric.rank_order,
            cost=fabric.cost,
            all_reduce=None if self.shard is None else fabric.algorithm,
        )

    # ------------------------------------------------------------ parts of the model

    @property
    def _ahead(self) -> int:
        return 1 if self.prefetch is None else self.prefetch

    def recomputes_layers(self) -> bool:
        """Whether the backward pass recomputes whole transformer layers."""
        return self.recompute in ("full", "early-stop")

    def default_batch_size(self, n_workers: int) -> int:
        """Return the batch size with one micro-batch per worker."""
        return n_workers * (self.micro_batch or 1)

    def micro_batch_size(self, batch_size: int, n_workers: int) -> int:
        """Return the samples per micro-batch and worker.

        Raises ConfigError, with the nearest valid batch sizes, if the batch cannot be divided evenly.
        """
        at_once = n_workers * (self.micro_batch or 1)
        if batch_size % at_once:
            below = batch_size - batch_size % at_once
            nearest = " or ".join(str(n) for n in (below, below + at_once) if n)
            factors = count(n_workers, "worker")
            factors += "" if self.micro_batch is None else f" x micro_batch {self.micro_batch}"
            raise ConfigError(f"batch_size = {batch_size}: must be a multiple of {at_once} ({factors}); use {nearest}")
        return self.micro_batch or batch_size // n_workers

    def check_sizes(self, model: Model, batch_size: int, n_workers: int) -> None:
        """Raise ConfigError, with valid values, for groups and units that do not fit the model or the worker count."""
        if self.shard is not None and n_workers % self.shard:
            near = sorted(divisors(n_workers), key=lambda n: abs(math.log(n / self.shard)))[:4]  # type: ignore[operator]
            raise ConfigError(
                f"FSDP: shard = {self.shard}: must divide the number of workers, {n_workers}; use one of "
                f"{listed(sorted(near))}"
            )
        units, n_layers = self.units, len(model.layers)
        if units is not None and not (units and list(units) == sorted({0, *units}) and units[-1] < n_layers):
            raise ConfigError(
                f"FSDP: units = {list(units)}: must be an increasing list of layer numbers that starts at 0 and stays "
                f"below {n_layers}, the number of layers in {model.name}; remove units to use one unit per transformer "
                "layer or block"
            )

    def split_sizes(self, n_workers: int) -> dict[str, object]:
        """Return the sizes that :class:`~ddlsim.Splits` varies, by name."""
        return {
            "tensor": 1, "pipeline": 1, "data": n_workers, "micro_batch": self.micro_batch, "interleave": 1,
            "order": "-", "recompute": self.recompute, "sequence": False, "stage": self.stage, "shard": self.shard,
            "cut": "-", "p2p": "-",
        }  # fmt: skip

    def scaled_down(self) -> FSDP:
        """Return an equally exact strategy for two workers and any model."""
        return FSDP(stage=self.stage)

    def stages(self, workloads: Sequence[Workload]) -> list[Stage]:
        """Return each worker's stage: the full model, with the memory that sharding leaves.

        With P parameters in fp16 and Adam on N workers, these are 4 P + 12 P / N bytes in stage 1, 2 P + 14 P / N in
        stage 2, and 16 P / N in stage 3, plus the gathered weights of `prefetch` + 1 units.
        """
        n_workers = len(workloads)
        state = 1.0 / (n_workers if self.shard is None else self.shard)
        return for_each(workloads, lambda work: Stage(work, state=state, memory=_memory(self, work, n_workers)))

    lower_memory_variants = lower_memory_fsdp

    def _units(self, model: Model) -> tuple[int, ...]:
        """Return the first layer of each unit."""
        if self.units is not None:
            return tuple(self.units)
        return weight_units(model.layers)

    # ------------------------------------------------------------ the step

    def accumulates_shards(self, n_workers: int) -> bool:
        """Return whether every micro-batch ends with reduce-scatters, which leave each worker a shard."""
        return self.stage > 1 and not self.no_sync and (n_workers if self.shard is None else self.shard) > 1

    def program(self, workloads: Sequence[Workload], accumulation: int = 1) -> StepProgram:
        """Return the step program with `accumulation` micro-batches per worker.

        It is built by :func:`ddlsim.plan.sharded` or :func:`ddlsim.plan.fully_sharded`.
        """
        model = workloads[0].model
        recomputed = [_recomputing(workload, self.recompute, self.recompute_share) for workload in workloads]
        kept = _memory(self, workloads[0], len(workloads)).activations
        no_sync = self.stage == 1 or self.no_sync
        how: dict[str, Any] = {"accumulation": accumulation, "no_sync": no_sync, "param_dtype": self.param_dtype}
        if self.stage < 3:
            policy = overlap_named("ddp" if self.overlap is None else self.overlap)
            program = sharded(recomputed, None, policy.buckets, overlap=not isinstance(policy, NoOverlap), **how)
        else:
            how |= {"prefetch": self._ahead, "reshard": self.reshard, "shard": self.shard}
            program = fully_sharded(recomputed, None, self._units(model), **how)
        stored, inside = stored_nbytes(workloads[0]), np.array([layer.block > 0 for layer in model.layers])
        if not inside.any():
            inside[:] = True
        share = (kept - stored[~inside].sum()) / max(stored[inside].sum(), 1.0)  # only transformer layers recompute

        def keeping(plan: Plan) -> Plan:
            recomputes = np.isin(plan.kind, (FORWARD, BACKWARD)) & inside[np.minimum(plan.first, len(inside) - 1)]
            return dataclasses.replace(plan, holds=np.where(recomputes, plan.holds * share, plan.holds))

        return program.map(keeping)

    def _compressible(self, context: RunContext, plan: Plan, accumulation: int) -> list[slice]:
        """Return the slice of the flat gradient in each part of the plan. Raises ConfigError, with the reason, if the
        gradients cannot be compressed."""
        assert context.compression is not None
        compressor = context.compression.compressor
        if self.shard is not None:
            raise ConfigError(
                f"compression: FSDP with shard = {self.shard} sums gradients twice, within groups and between "
                "replicas, and would compress them twice; remove shard, or use AllReduce('hierarchical'), which "
                "compresses between machines"
            )
        if accumulation > 1 and self.stage > 1 and not self.no_sync:
            raise ConfigError(
                f"compression: FSDP reduce-scatters the gradients of each of {accumulation} micro-batches, and would "
                "add a compression error each time; use no_sync=True, which reduce-scatters their sum, or a larger "
                "micro_batch"
            )
        if compressor.traits.whole and len(plan.parts) > 1:
            raise ConfigError(
                f"compression: {title(compressor)} needs the whole gradient, but FSDP reduce-scatters it in "
                f"{len(plan.parts)} parts; use stage=1 or 2 with overlap='none', or a compressor such as TopK"
            )
        turn = 1 if self.stage == 3 else -1  # buckets start with the last tensors
        return slices([rounded(part.nbytes) for part in plan.parts][::turn])[::turn]

    def start(self, context: RunContext) -> None:
        """Start all workers.

        Raises ConfigError for a custom optimizer that needs whole layers, and for unsupported compression.
        """
        check_shares("FSDP", context)
        workloads = context.workloads
        accumulation = context.workers[0].accumulation
        algorithms = {
            "reduce_scatter": self.reduce_scatter,
            "all_gather": self.all_gather,
            "all_reduce": "default" if self.all_reduce is None else self.all_reduce,
        }
        program = self.program(workloads, accumulation)
        nodes = np.array(context.nodes)
        schedules = Schedules(program, algorithms, context.cluster, nodes, self.rank_order, context.notes)
        parts = [] if context.compression is None else self._compressible(context, program.template, accumulation)
        model, among = CommonModel(context), (context, context.workers, program.groups, schedules)
        fabric = Fabric(algorithms["all_reduce"], self.rank_order, self.cost)
        halves = {kind: algorithms[kind] for kind in ("reduce_scatter", "all_gather")}
        exchanges = OfReplicas(*among, fabric, len(workloads), parts, model.gradient, owner="FSDP", algorithms=halves)
        TableRun(context, program, exchanges, model, owner="FSDP", beside_first=2)


@functools.lru_cache(maxsize=16)
def _recomputing(workload: Workload, recompute: str, share: float = 1.0) -> Workload:
    """Return the workload whose backward pass recomputes activations."""
    if recompute == "none":
        return workload
    if not any(layer.heads for layer in workload.model.layers):
        raise ConfigError(
            f"FSDP: recompute = {recompute!r} has no effect, because {workload.model.name} has no transformer layers; "
            "remove recompute"
        )
    if share < 1.0:
        every = _recomputing(workload, recompute).backward
        return dataclasses.replace(workload, backward=workload.backward + share * (every - workload.backward))
    return tensor_parallel(workload, 1, recompute=recompute).workload


@functools.lru_cache(maxsize=64)
def _memory(strategy: FSDP, workload: Workload, n_workers: int) -> Memory:
    shards = n_workers if strategy.shard is None else strategy.shard
    model, samples, precision = workload.model, workload.batch_size, workload.precision

    def memory(zero: int, recompute: str = strategy.recompute) -> Memory:
        holding = holding_of(
            workload,
            zero=zero if shards > 1 else 0,
            shards=shards,
            gathered=strategy._ahead + 1 if strategy.reshard else 0,
            units=None if strategy.units is None else tuple(strategy.units),
            param_dtype=strategy.param_dtype,
            recompute=recompute,
        )
        return memory_of(model, samples, precision, holding, n_workers=n_workers)

    held = memory(strategy.stage)
    if strategy.recompute_share < 1.0:
        kept = memory(strategy.stage, "none").activations
        kept += strategy.recompute_share * (held.activations - kept)
        held = dataclasses.replace(held, activations=kept)
    if strategy.no_sync:
        in_fp32 = workload.known_stack is not None and workload.known_stack.accumulation_traffic is not None
        held = dataclasses.replace(held, gradients=model.gradient_nbytes(4) if in_fp32 else memory(1).gradients)
    return held
