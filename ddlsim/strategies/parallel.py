"""`Parallel`: tensor, pipeline and data parallelism combined."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from ddlsim.arguments import Count, checked
from ddlsim.cluster import Cluster
from ddlsim.collectives import Collective, Schedule
from ddlsim.errors import ConfigError
from ddlsim.learning import Array, Learner, Value
from ddlsim.plan import Chunk, Mesh, Plan, StepProgram, between_blocks, chunks_at, fully_sharded, make_mesh, pipeline
from ddlsim.plan.chunks import balanced_cuts
from ddlsim.plan.folding import Folding, fold
from ddlsim.plan.folding import least_seconds as least_exchange_seconds
from ddlsim.plan.pipeline import Outline, activations_held, costs_of, outlined, stage_delays, steps_under_way
from ddlsim.plan.pipeline_orders import ASYNCHRONOUS, ORDERS, PassOrder, pass_order
from ddlsim.plan.plan import ALL_GATHER, BACKWARD, FORWARD, Floats, Ints
from ddlsim.plan.program import LIVE, N_STEPS, Folded
from ddlsim.plan.schedules import Schedules
from ddlsim.plan.tensor_ranks import (
    GroupSchedules,
    Passes,
    Seconds,
    check_groups,
    passes_of,
    tensor_ranks,
    with_exchanges,
)
from ddlsim.plan.transforms import gathered_as, gathers_beside_forward, with_stage_norms
from ddlsim.readable import count
from ddlsim.runtime.context import RunContext
from ddlsim.runtime.fabric import Collectives, WithFabric, fabric_label, fabric_of, halves_of
from ddlsim.runtime.table_run import CommonModel, TableRun, disturbed, is_one_step
from ddlsim.strategies.replica_groups import OfReplicas, compressible_parts
from ddlsim.strategies.split_rules import check_sizes, divisors, known_order, lower_memory_parallel
from ddlsim.workload.buckets import Bucket, ddp_buckets, megatron_buckets, one_bucket, per_layer, per_unit
from ddlsim.workload.compute import Workload
from ddlsim.workload.memory import holding_of, kept_nbytes, memory_of
from ddlsim.workload.model import Model
from ddlsim.workload.precision import ELEMENT_NBYTES
from ddlsim.workload.roles import blocks, weight_units
from ddlsim.workload.stage import Stage
from ddlsim.workload.tensor_parallel import Shard, tensor_parallel

#: maximum number of tasks of all ranks of tensor groups for executing them all; above, one rank per group is executed
MOST_TASKS = 1_000_000
#: maximum number of tasks of all ranks in a plan
MOST_WRITTEN = 4_000_000
Recomputation = Literal["none", "selective", "dots-saveable", "operators", "full", "early-stop", "stage"]
BUCKETS: dict[str, Callable[[Workload], Sequence[Bucket]]] = {
    "none": one_bucket,
    "layer": per_layer,
    "ddp": ddp_buckets,
}


@checked
@dataclass(frozen=True)
class Parallel(WithFabric):
    """Tensor, pipeline and data parallelism: ``data`` replicas of a model split over ``pipeline`` x ``tensor`` workers.

    ``batch_size`` is the global batch size of an update, as in Megatron-LM and DeepSpeed. Each replica computes
    ``batch_size / (data * micro_batch)`` micro-batches. Ranks are numbered as in :class:`~ddlsim.plan.Mesh`:
    consecutive workers form a tensor group, and the tensor groups of the same stage in the other replicas come next.

    tensor       number of workers over which each layer is split
                 (:func:`ddlsim.workload.tensor_parallel.tensor_parallel`)
    pipeline     number of pipeline stages
    data         number of replicas; None: the number of workers / (pipeline * tensor)
    micro_batch  samples per micro-batch. None: 1; with "pipedream", all samples of the replica
    order        order of forward and backward passes. Synchronous: "gpipe", "1f1b", "zb-1p", "zb-2p", "zb-v", "v-half",
                 "v-min" (docs/models/splitting.md), or a list of (kind, chunk, micro-batch) tuples for each stage, with
                 the kind "F", "B" or "W". Asynchronous, without a flush between updates: "pipedream" updates after
                 every micro-batch, and stage i of p computes gradients with weights that are p - 1 - i updates old;
                 "2bw" uses weights that are one update old on all stages (:mod:`ddlsim.plan.pipeline`)
    interleave   number of model chunks per stage, for "1f1b" and custom orders
    cut          where the model is cut into stages: "balanced" minimises the time of the slowest stage; "layers" gives
                 each chunk the same number of transformer layers, as Megatron-LM and DeepSpeed's partition_method
                 "type:transformer" do; the first chunk also has the embedding, and the last one the output layer
    sequence     sequence parallelism: tensors that tensor parallelism would replicate are split by tokens
    tp_comm_overlap
                 overlap the communication of sequence parallelism with matrix products, in chunks, as Megatron-LM's
                 --tp-comm-overlap does (:mod:`ddlsim.workload.tensor_overlap`)
    recompute    activations to recompute in the backward pass: "none"; "selective", the matrices of attention;
                 "dots-saveable", everything in transformer layers but products with weights; "operators", every second
                 matrix product and the element-wise operations of these layers; "full", transformer layers;
                 "early-stop", transformer layers without their last product; "stage", everything but the inputs of
                 chunks
    sharded      True: each replica updates a shard of each bucket and all-gathers the others (ZeRO stage 1); with
                 `overlap`, the all-gathers overlap the next forward passes. "full": replicas shard weights, gradients
                 and optimizer state (FSDP2 on meshes of two or three axes, as in torchtitan). With one stage,
                 transformer layers are gathered one by one for each pass, as in :class:`~ddlsim.FSDP`. The stages of a
                 pipeline gather their layers once per step, keep them, and accumulate the gradients of all
                 micro-batches before the reduce-scatter
    p2p          what a rank does while tensors are in flight between stages: it computes ("overlapped"); it waits for
                 both directions at the same time, as in Megatron-LM ("exchange"); it waits for one direction and then
                 for the other, as in DeepSpeed ("in turns"); it also waits for what others send to it at that time, as
                 in PyTorch's interleaved schedule ("in step")
    overlap      buckets that replicas sum during the last backward passes: "none" (one per chunk), "layer", "ddp", or
                 "megatron" (those of Megatron Core, with 40 million parameters or, if larger, a million per replica).
                 With sharded="full", the buckets are transformer layers
    algorithm, rank_order, cost
                 algorithm, rank order and cost model of the sums over replicas; see :class:`~ddlsim.Fabric`. With
                 `sharded`, an all-reduce runs as the reduce-scatter and the all-gather that it consists of. All other
                 communication is simulated message by message, in tensor groups with the default algorithm, or with
                 `algorithm` if that is one of NCCL's
    """

    tensor: Count = 1
    pipeline: Count = 1
    data: Count | None = None
    micro_batch: Count | None = None
    order: Annotated[str | Sequence[Sequence[tuple[str, int, int]]], known_order] = "1f1b"
    interleave: Count = 1
    cut: Literal["balanced", "layers"] = "balanced"
    sequence: bool = False
    tp_comm_overlap: bool = False
    recompute: Recomputation = "none"
    sharded: bool | Literal["full"] = False
    p2p: Literal["overlapped", "exchange", "in turns", "in step"] = "overlapped"
    overlap: Literal["none", "layer", "ddp", "megatron"] = "ddp"

    def __post_init__(self) -> None:
        per_stage = self._chunks_per_stage
        for name, default in (("sharded", False), ("p2p", "overlapped")):
            if self._asynchronous and (value := getattr(self, name)) != default:
                raise ConfigError(
                    f"Parallel: {name} = {value!r} needs a synchronous order such as '1f1b', not {self.order!r}"
                )
        if self.sharded:
            halves_of(fabric_of(self), f"Parallel with sharded = {self.sharded!r}")
        if self.sharded == "full":
            fixed: dict[str, object] = {"overlap": "ddp"}
            if self.pipeline == 1:  # passes execute layer by layer
                fixed |= {"order": "1f1b", "interleave": 1, "p2p": "overlapped"}
            for name, usual in fixed.items():
                if (value := getattr(self, name)) != usual:
                    raise ConfigError(
                        f"Parallel: {name} = {value!r} has no effect with sharded = 'full', which communicates layer "
                        f"by layer; remove {name}, or use sharded=True"
                    )
            if self.recompute == "stage":
                raise ConfigError(
                    "Parallel: recompute = 'stage' cannot be combined with sharded = 'full', because stages must keep "
                    "their weights; use recompute='full'"
                )
        if self.interleave > 1 and isinstance(self.order, str) and self.order != "1f1b":
            raise ConfigError(
                f"Parallel: interleave = {self.interleave} has no effect with order = {self.order!r}, which has "
                f"{count(per_stage, 'chunk')} per stage; remove interleave, or use order='1f1b'"
            )
        if self.p2p == "in turns" and (self.order != "1f1b" or self.interleave > 1):
            raise ConfigError(
                "Parallel: p2p = 'in turns' needs order = '1f1b' and interleave = 1, as in DeepSpeed; use "
                "p2p='exchange' for other orders"
            )
        if self.p2p == "in step" and (self.order != "1f1b" or self.interleave == 1):
            raise ConfigError(
                "Parallel: p2p = 'in step' needs order = '1f1b' and interleave = 2 or more, as in PyTorch; use "
                "p2p='exchange' for other orders"
            )
        table = pass_order(self.order, 2, 2, 2 * per_stage) if isinstance(self.order, str) else self.order
        if (self.tensor > 1 or self._again != "none") and any(entry[0] == "W" for passes in table for entry in passes):
            raise ConfigError(
                "Parallel: orders with separate weight gradients (W) need tensor = 1 and recompute = 'none' or "
                "'stage'; use order='gpipe' or '1f1b'"
            )

    @property
    def label(self) -> str:
        """Label for tables and plots: sizes of the mesh, order of passes, and fabric."""
        order = self.order if isinstance(self.order, str) else "own order"
        chunks = f" x {self.interleave}" if self.interleave > 1 else ""
        more = "" if self.recompute == "none" else f", {self.recompute} recomputation"
        more += {True: ", sharded", False: ""}.get(self.sharded, ", fully sharded")  # type: ignore[arg-type]
        tokens = f" with sequence{', overlapped' * self.tp_comm_overlap}" if self.sequence else ""
        data = "" if self.data is None else f"data {self.data}, "
        data += f"tensor {self.tensor}{tokens}, " if self.tensor > 1 else ""
        fabric = fabric_label(self.algorithm, self.cost)
        return f"parallel ({data}pipeline {self.pipeline}, {order}{chunks}{more}, {fabric})"

    # ------------------------------------------------------------ parts of the model

    @property
    def _chunks_per_stage(self) -> int:
        return ORDERS[self.order][0] if isinstance(self.order, str) and self.order in ORDERS else 1

    @property
    def _asynchronous(self) -> bool:
        return isinstance(self.order, str) and self.order in ASYNCHRONOUS

    @property
    def _delays(self) -> tuple[int, ...]:
        """Age, in updates, of the weights with which each stage computes gradients."""
        return stage_delays(str(self.order), self.pipeline) if self._asynchronous else (0,) * self.pipeline

    def n_workers(self) -> int | None:
        """Return the number of workers of the mesh if `data` is set, otherwise None."""
        return None if self.data is None else self.data * self.pipeline * self.tensor

    def mesh(self, n_workers: int) -> Mesh:
        """Return the mesh of `n_workers` workers. Raises ConfigError, with the nearest meshes, if there is none."""
        return _mesh(n_workers, self.data, self.pipeline, self.tensor)

    def recomputes_layers(self) -> bool:
        """Whether the backward pass recomputes whole transformer layers."""
        return self.recompute in ("full", "early-stop")

    def default_batch_size(self, n_workers: int) -> int:
        """Return the batch size with one micro-batch per stage in each replica (with "pipedream", a single one)."""
        data = self.data or max(n_workers // (self.pipeline * self.tensor), 1)
        return data * (self.micro_batch or 1) * (1 if self.order == "pipedream" else self.pipeline)

    def accumulates_shards(self, n_workers: int) -> bool:
        """Return whether every micro-batch ends with reduce-scatters, which leave each worker a shard."""
        return self.sharded == "full" and self.pipeline == 1 and self.mesh(n_workers).data > 1

    def micro_batch_size(self, batch_size: int, n_workers: int) -> int:
        """Return the samples per micro-batch. Raises ConfigError for an invalid batch size."""
        data, micro_batch = self.mesh(n_workers).data, self.micro_batch or 1
        at_once = data * micro_batch
        if batch_size % at_once:  # in a run, `check_sizes` has already reported valid sizes
            raise ConfigError(
                f"batch_size = {batch_size}: must be a multiple of {at_once} (data {data} x micro_batch {micro_batch})"
            )
        if self.order != "pipedream":
            return micro_batch
        if self.micro_batch not in (None, batch_size // data):
            raise ConfigError(
                f"Parallel: micro_batch = {self.micro_batch} cannot be combined with batch_size = {batch_size} and "
                "order = 'pipedream', which updates the weights after every micro-batch: the batch would be split "
                f"over {data} replicas into micro-batches of {batch_size // data}; remove micro_batch, or use "
                f"batch_size={at_once}"
            )
        return batch_size // data

    check_sizes = check_sizes
    lower_memory_variants = lower_memory_parallel

    def collectives(self) -> Collectives:
        """Return its fabric, and whether the sums over replicas are halves of all-reduces."""
        return super().collectives()._replace(in_halves=bool(self.sharded))

    def split_sizes(self, n_workers: int) -> dict[str, object]:
        """Return the sizes that :class:`~ddlsim.Splits` varies, by name."""
        names = ("tensor", "pipeline", "micro_batch", "interleave", "order", "recompute", "sequence", "cut", "p2p")
        sizes: dict[str, object] = {name: getattr(self, name) for name in names}
        stage = 3 if self.sharded == "full" else int(self.sharded)
        return sizes | {"data": self.mesh(n_workers).data, "stage": stage, "shard": None}

    def scaled_down(self) -> Parallel:
        """Return an equally exact strategy for two workers and any model; custom orders are returned unchanged."""
        if not isinstance(self.order, str):
            return self
        return dataclasses.replace(self, tensor=1, pipeline=min(self.pipeline, 2), data=None, micro_batch=1,
                                   interleave=1, recompute="none", sequence=False, cut="balanced",
                                   tp_comm_overlap=False)  # fmt: skip

    def n_replicas(self, n_workers: int) -> int:
        """Return the number of replicas."""
        return self.mesh(n_workers).data

    def stages(self, workloads: Sequence[Workload]) -> list[Stage]:
        """Return each worker's stage, with its memory without activations."""
        cuts, mesh = self._cuts(workloads), self.mesh(len(workloads))
        stages: dict[tuple[int, int], Stage] = {}  # cached by workload and place, because there can be thousands
        places = np.empty(mesh.n_ranks, dtype=np.int64)
        places[mesh.ranks] = np.arange(mesh.pipeline)[:, None]
        result = []
        for place, workload in zip(places.tolist(), workloads, strict=True):
            key = id(workload), place
            if key not in stages:
                stages[key] = self._stage(workload, place, mesh, cuts)
            result.append(stages[key])
        return result

    def _stage(self, workload: Workload, place: int, mesh: Mesh, cuts: tuple[int, ...]) -> Stage:
        """Return the stage of a worker at an index of the pipeline."""
        chunks = _cut_at(self._shard(workload).workload, cuts)
        held = tuple(chunks[i] for i in self._chunks_of_stages()[place])
        zero = {False: 0, True: 1}.get(self.sharded, 3) if mesh.data > 1 else 0  # type: ignore[arg-type]
        shards, gathered = mesh.data if zero else 1, 2 if self.pipeline == 1 else 0
        return _stage(held, 1 + self._delays[place], zero=zero, shards=shards, gathered=gathered, **self._in_layers)

    def _chunks_of_stages(self) -> Sequence[Sequence[int]]:
        """Return the chunks of each stage."""
        if isinstance(self.order, str):
            return _chunks_of(self.order, self.pipeline, self.pipeline * self._per_stage)
        return [sorted({chunk for _, chunk, _ in passes}) for passes in self._table()]

    def _cuts(self, workloads: Sequence[Workload]) -> tuple[int, ...]:
        """Return the first layers of the chunks after the first; balanced cuts use the slowest device of each stage."""
        first = self._shard(workloads[0]).workload
        if self.cut == "layers":
            return equal_layers(first, self.pipeline * self._per_stage)
        if len({workload.device.name if workload.device else "" for workload in workloads}) == 1:
            return cut_places(first, self.pipeline, self._per_stage)
        mesh = self.mesh(len(workloads))
        of_chunks = [first] * (self.pipeline * self._per_stage)
        for place, chunks in enumerate(self._chunks_of_stages()):
            members = (workloads[rank] for rank in mesh.ranks[:, place].ravel().tolist())
            slowest = max(members, key=lambda workload: workload.step_time * workload.speed)
            for chunk in chunks:
                of_chunks[chunk] = self._shard(slowest).workload
        return cut_places(first, self.pipeline, self._per_stage, of_chunks)

    @property
    def _per_stage(self) -> int:
        """Number of chunks per stage."""
        return max(self._chunks_per_stage, self.interleave)

    @property
    def _by_kind(self) -> str | Collective | dict[str, str | Collective]:
        """The algorithm of the replicas' collectives, of each kind if they are halves of all-reduces."""
        if not self.sharded:
            return self.algorithm
        scatter, gather = halves_of(fabric_of(self), "Parallel")
        return {"all_reduce": self.algorithm, "reduce_scatter": scatter, "all_gather": gather}

    @property
    def _again(self) -> str:
        """Recomputation inside layers."""
        return "none" if self.recompute == "stage" else self.recompute

    @property
    def _in_layers(self) -> dict[str, Any]:
        """Settings of tensor groups and recomputation inside layers."""
        return {"tensor": self.tensor, "sequence": self.sequence, "recompute": self._again}

    def _shard(self, workload: Workload) -> Shard:
        """Return the whole model as computed by one rank of a tensor group."""
        if self._again != "none" and not any(layer.heads for layer in workload.model.layers):
            raise ConfigError(
                f"Parallel: recompute = {self.recompute!r} has no effect, because {workload.model.name} has no "
                "transformer layers; use recompute='stage'"
            )
        return _tensor_parallel(workload, tp_comm_overlap=self.tp_comm_overlap, **self._in_layers)

    def _table(self) -> PassOrder:
        """Return the custom order."""
        assert not isinstance(self.order, str)
        most = 1 + max((entry[2] for passes in self.order for entry in passes), default=0)
        return pass_order(self.order, self.pipeline, most, self.pipeline * self._per_stage)

    # ------------------------------------------------------------ the step

    def program(self, workloads: Sequence[Workload], accumulation: int = 1) -> StepProgram:
        """Return the step program with `accumulation` micro-batches per replica; rank r is worker r.

        Raises ConfigError if the order does not fit the number of micro-batches.
        """
        if self.tensor == 1:
            return self._of_stages(workloads, accumulation)
        return self._repeating(self._of_groups(workloads, N_STEPS, accumulation).of_all(), accumulation)

    def _of_stages(self, workloads: Sequence[Workload], micro_batches: int) -> StepProgram:
        """Return the program of workers without tensor groups, one per stage of a replica."""
        groups = self._of_groups(workloads, N_STEPS, micro_batches)
        first, templates = groups.programs[0], tuple(program.template for program in groups.programs)
        return dataclasses.replace(first, templates=templates, template_of=groups.kinds[first.ranks, 0])

    def _repeating(self, plan: Plan, micro_batches: int) -> StepProgram:
        """Return the program that repeats the steps of a plan."""
        later = micro_batches * (plan.n_ranks // self.pipeline // plan.tensor) if self._asynchronous else 0
        return dataclasses.replace(StepProgram.of(plan), batches=(1, 0, later))

    def _of_groups(self, workloads: Sequence[Workload], steps: int, micro_batches: int) -> _Groups:
        """Return the program with one rank per tensor group, and how many of its steps are written out where every rank
        has tasks."""
        mesh, cuts = self.mesh(len(workloads)), self._cuts(workloads)
        of_ranks = [workloads[worker] for worker in self._members(mesh).ravel().tolist()]
        different = {id(workload): workload for workload in of_ranks}
        number = {key: i for i, key in enumerate(different)}
        kinds = np.array([number[id(workload)] for workload in of_ranks]).reshape(-1, self.tensor)
        programs = [self._of_rank(self._split(work, cuts), work, mesh, micro_batches) for work in different.values()]
        shards = [self._shard(workload) for workload in different.values()]
        return _Groups(programs, steps, kinds, shards, chunks_at(shards[0].workload, cuts), not self.sequence)

    def peak_memory(self, workloads: Sequence[Workload], micro_batches: int) -> Floats:
        """Return the peak memory of activations on each rank of the plan, (n_ranks,) bytes.

        Raises ConfigError if the order does not fit the number of micro-batches.
        """
        if self._asynchronous:
            return np.repeat(self._of_groups(workloads, 1, micro_batches).programs[0].peak_memory(), self.tensor)
        mesh, cuts = self.mesh(len(workloads)), self._cuts(workloads)
        outline = self._outline(mesh, micro_batches, len(cuts) + 1)
        chunks = self._split(workloads[0], cuts)
        held = activations_held(outline, chunks)
        if self.pipeline > 1 and _keeps_outputs(workloads[0]):
            last = chunks[-1].workload
            logits = ELEMENT_NBYTES[last.precision] * last.batch_size * math.prod(last.model.layers[-1].out_shape)
            leaving = [*(chunk.enters for chunk in chunks[1:]), logits / self.tensor]
            held += micro_batches * np.array([sum(leaving[i] for i in stage) for stage in self._chunks_of_stages()])
        peak = np.empty(mesh.n_ranks)
        peak[mesh.ranks] = held[:, None]
        return peak

    def _of_rank(self, chunks: tuple[Chunk, ...], workload: Workload, mesh: Mesh, micro_batches: int) -> StepProgram:
        """Return the program of ranks that all have the same chunks of a workload."""
        if self.sharded == "full" and mesh.data > 1 and mesh.pipeline == 1:
            return _layer_by_layer(chunks[0], workload, mesh.data, micro_batches)
        program = pipeline(
            chunks, Mesh(mesh.data, mesh.pipeline), micro_batches, self.order, p2p=self.p2p,
            recompute=self.recompute == "stage", buckets=self._buckets(mesh), sharded=bool(self.sharded),
        )  # fmt: skip
        if not self.sharded:
            return program
        seconds = np.concatenate([chunk.workload.forward for chunk in chunks])

        def in_shards(template: Plan) -> Plan:
            plan = gathered_as(template, workload)
            plan = plan if self.overlap == "none" else gathers_beside_forward(plan, seconds)
            return with_stage_norms(plan, [workload] * mesh.pipeline, mesh.data)

        return program.map(in_shards)

    def _buckets(self, mesh: Mesh) -> Callable[[Workload], Sequence[Bucket]]:
        if self.sharded == "full":
            return per_unit
        if self.overlap != "megatron":
            return BUCKETS[self.overlap]
        return functools.partial(megatron_buckets, replicas=mesh.data)

    def _members(self, mesh: Mesh) -> Ints:
        """Return the workers of each rank of the plan, which are tensor groups, stage by stage, (n_ranks, t)."""
        return mesh.ranks.transpose(1, 0, 2).reshape(-1, self.tensor)

    def _split(self, workload: Workload, cuts: tuple[int, ...]) -> tuple[Chunk, ...]:
        """Return the chunks that one rank of each tensor group computes, without the group's exchanges."""
        if self.tensor == 1 and self._again == "none" and workload.known_stack is None:
            return _cut_at(workload, cuts)
        chunks, shared = _cut_at(self._shard(workload).workload, cuts), list[Chunk]()
        for i, chunk in enumerate(chunks):
            how = {"flash": workload.flash, "stack": workload.known_stack, **self._in_layers}
            kept = workload.batch_size * kept_nbytes(chunk.workload.model.layers, workload.precision, **how)[0]
            if _keeps_outputs(workload) and i + 1 < len(chunks):
                kept += chunks[i + 1].enters / self.tensor
            enters = chunk.enters / self.tensor if i else chunk.enters
            shared.append(dataclasses.replace(chunk, enters=enters, kept=kept))
        return tuple(shared)

    def start(self, context: RunContext) -> None:
        """Start all workers."""
        workers, workloads = context.workers, context.whole
        mesh, micro_batches = self.mesh(len(workers)), workers[0].accumulation
        live = steps_under_way(self.pipeline, micro_batches) if self._asynchronous else LIVE
        nodes, in_groups = np.array(context.nodes), self._group_schedules(context.cluster, np.array(context.nodes))
        folding: Folding | None = None
        if in_groups is None:
            program = self._of_stages(workloads, micro_batches)
        else:
            steps = 2 if is_one_step(context, live) else N_STEPS  # a first step ends with updates
            groups, members = self._of_groups(workloads, steps, micro_batches), self._members(mesh)
            firsts, first, (order, _) = nodes[members[:, 0]], groups.programs[0], self._order_of(members)
            others = Schedules(first, self._by_kind, context.cluster, firsts, order, context.notes)
            folding = self._folding(context, groups, members, in_groups, others)
            if folding is None:
                program = self._repeating(groups.of_all(in_groups), micro_batches)
            else:
                program = folding.program(groups.programs, groups.slowest)
                nodes, workers = firsts, [workers[rank] for rank in members[:, 0].tolist()]

        chunks = _cut_at(self._shard(workloads[0]).workload, self._cuts(workloads))
        ages = self._delays if self._asynchronous else ()
        weights = StashedWeights(context.learner, self._delays, stage_slices(context.learner, [c.end for c in chunks]))
        schedules: Callable[[int, int, float], Schedule]
        if folding is not None:
            schedules = others
        else:
            schedules = Schedules(program, self._by_kind, context.cluster, nodes, self.rank_order, context.notes)
            schedules = schedules if in_groups is None else in_groups.beside(len(program.groups), schedules)
        parts = list[slice]()
        if context.compression is not None and self.sharded == "full" and mesh.pipeline == 1:
            raise ConfigError(
                "compression: Parallel with sharded = 'full' reduce-scatters the gradients of each micro-batch, "
                "and would add a compression error each time; use FSDP(no_sync=True), or sharded=True"
            )
        if context.compression is not None:
            compressor = context.compression.compressor
            parts = compressible_parts(program.template, chunks, self._buckets(mesh), self.tensor, compressor)
        model = CommonModel(context, mesh.data, weights.at if self._asynchronous else None)
        among, n_replicas = (context, workers, program.groups, schedules), mesh.data * program.template.tensor
        exchanges = OfReplicas(*among, fabric_of(self), n_replicas, parts, model.gradient, ages)
        TableRun(context, program, exchanges, model, folding=folding, live=live, owner="Parallel", beside_first=2)

    def _folding(
        self, context: RunContext, groups: _Groups, members: Ints, in_groups: GroupSchedules, others: Schedules
    ) -> Folding | None:
        """Return the folding that executes one rank per tensor group, with a note; None if it would not be exact.

        If there are too many ranks to execute all, folding is always used. Raises ConfigError if members then share
        links with other traffic, or use links that change.
        """
        many = groups.n_tasks > MOST_TASKS and not context.shows_plan
        why_not, network = disturbed(context), context.loop.network
        if (groups.kinds != groups.kinds[:, :1]).any():
            why_not = why_not or "members compute at different speeds"
        if context.workers[0].workload.stack.call_time:
            why_not = why_not or "the exchanges of groups take a fixed time per call (call_time)"
        if not self._order_of(members)[1]:
            why_not = why_not or "the members of a group follow different rank orders"
        is_known = self.cost != "simulated" and len(members) > self.pipeline
        if is_known:
            why_not = why_not or "the time of the replicas' collectives is not simulated"
        if why_not and not many:
            return None
        folding = fold(groups.programs[0], groups.passes, members, groups.slowest, context.cluster, in_groups, others)
        why_not = why_not or folding.why_not
        if why_not and not many:
            return None
        tasks = count(groups.n_tasks, "task")
        if len(folding.shared[0]) and (network.is_shared or network.changes or is_known):
            raise ConfigError(
                f"Parallel: tensor = {self.tensor}: simulating every rank would take {tasks} over "
                f"{groups.steps} steps, above the limit of {MOST_TASKS:,}, and simulating one rank per "
                f"tensor group is not possible, because {why_not} and the ranks of a group share links; use fewer "
                "micro-batches or workers"
            )
        n_executed, n_ranks, tensor = len(members), members.size, self.tensor
        if why_not:
            context.notes.append(
                f"tensor groups: {n_executed} of {n_ranks} ranks are executed, one per group of {tensor}, because all "
                f"ranks together would have {tasks}. This is an approximation, because {why_not}: each group is "
                "assumed to compute at the speed of its slowest member and to exchange messages over idle links"
            )
        else:
            context.notes.append(
                f"tensor groups: {n_executed} of {n_ranks} ranks are executed, one per group of {tensor}, because the "
                "members of a group do the same work at the same times and share no links"
            )
        return folding

    def _order_of(self, members: Ints) -> tuple[str | Sequence[int], bool]:
        """Return the rank order of a plan with one rank per tensor group, and whether all members follow the same.

        members  (n_ranks, t) workers of each group; the order is that of the first members

        Raises ConfigError if the order is not a permutation of the workers.
        """
        if isinstance(self.rank_order, str):
            return self.rank_order, True
        if sorted(self.rank_order) != list(range(members.size)):
            raise ConfigError(
                f"rank_order = {list(self.rank_order)}: must contain each rank from 0 to {members.size - 1} once"
            )
        orders = np.argsort(np.argsort(self.rank_order)[members], axis=0)
        return orders[:, 0].tolist(), bool((orders == orders[:, :1]).all())

    def _group_schedules(self, cluster: Cluster, nodes: Ints) -> GroupSchedules | None:
        """Return the schedules of the tensor groups' exchanges, or None without tensor groups. Raises ConfigError if
        none can be built."""
        if self.tensor == 1:
            return None
        of_groups = nodes[self._members(self.mesh(len(nodes)))]
        check_groups(cluster, of_groups, inside=self.tp_comm_overlap)
        return GroupSchedules(cluster, of_groups, self.tp_comm_overlap, self.algorithm)

    def folded_program(
        self, workloads: Sequence[Workload], micro_batches: int, cluster: Cluster, nodes: Sequence[int]
    ) -> Folded | None:
        """Return a program with one worker per tensor group; None if workers differ or steps overlap.

        The exchanges of every group take as long as those of the fastest group on idle links. Raises ConfigError if
        sizes or order are incompatible with the numbers of workers and micro-batches.
        """
        if self._asynchronous or len({id(workload) for workload in workloads}) > 1:
            return None
        mesh, cuts = self.mesh(len(workloads)), self._cuts(workloads)
        members, shard = self._members(mesh), self._shard(workloads[0])
        groups = self._group_schedules(cluster, np.array(nodes))

        def program() -> StepProgram:
            seconds = None
            if groups is not None:
                nodes_of_groups = tuple(map(tuple, groups.nodes.tolist()))
                seconds = least_exchange_seconds(cluster, nodes_of_groups, groups.inside, self.algorithm)
            costs = costs_of(_exchanging(shard, seconds), cuts, self.tensor, None if self.sequence else seconds)
            return outlined(self._outline(mesh, micro_batches, len(cuts) + 1), costs)

        return Folded(program, members[:, 0])

    def _outline(self, mesh: Mesh, micro_batches: int, n_chunks: int) -> Outline:
        return Outline(
            self.order if isinstance(self.order, str) else self._table(),
            Mesh(mesh.data, mesh.pipeline), micro_batches, n_chunks, self.recompute == "stage", bool(self.sharded),
            self.overlap != "none", self.p2p,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Groups:
    """Programs with one rank per tensor group, and the members of the groups.

    programs  one for each kind of device, as if all workers had it; they differ only in seconds
    steps     that are written out where every rank has tasks
    kinds     (n_ranks, t) the index in `programs` of each worker of a rank's tensor group
    shards    of each kind
    chunks    of the model, with whole activations between them
    gather    whether groups gather the tensors that they receive over a cut
    """

    programs: Sequence[StepProgram]
    steps: int
    kinds: Ints
    shards: Sequence[Shard]
    chunks: Sequence[Chunk]
    gather: bool

    @functools.cached_property
    def passes(self) -> Passes:
        """Return the passes of the programs, with the exchanges in them."""
        return passes_of(self.programs[0].template, self.shards, self.chunks, gather=self.gather)

    @functools.cached_property
    def n_tasks(self) -> int:
        """Number of tasks of all workers."""
        template, n_copies = self.programs[0].template, len(self.programs[0].ranks)
        which = self.passes.which(template)[template.step < self.steps]
        sizes = np.array([len(by_kind[0]) for by_kind in self.passes.items])
        return int(n_copies * self.kinds.shape[1] * np.where(which >= 0, sizes[which], 1).sum())

    @property
    def slowest(self) -> Ints:
        """Kind of the slowest worker of each group, (n_ranks,)."""
        seconds = np.array([shard.workload.step_time for shard in self.shards])
        return np.take_along_axis(self.kinds, seconds[self.kinds].argmax(axis=1)[:, None], axis=1)[:, 0]

    def of_all(self, schedules: GroupSchedules | None = None) -> Plan:
        """Return the plan of all workers; groups exchange by `schedules`. Raises ConfigError if it is too large."""
        tensor = self.kinds.shape[1]
        if self.n_tasks > MOST_WRITTEN:
            raise ConfigError(
                f"plan: Parallel with tensor = {tensor}: the plan would have {self.n_tasks:,} tasks, above the "
                f"limit of {MOST_WRITTEN:,}; use fewer micro-batches or workers"
            )
        following = None if schedules is None else schedules.following
        plans = [program.unroll(self.steps) for program in self.programs]
        return tensor_ranks(plans, self.passes, tensor, self.kinds, following)


#: cached, because every worker uses these
_mesh = functools.lru_cache(maxsize=16)(make_mesh)
_cut_at = functools.lru_cache(maxsize=256)(chunks_at)
_tensor_parallel = functools.lru_cache(maxsize=256)(tensor_parallel)


@functools.lru_cache(maxsize=16)
def _chunks_of(order: str, stages: int, n_chunks: int) -> tuple[tuple[int, ...], ...]:
    """Return the chunks of each stage in a named order."""
    every = pass_order(order, stages, 2 * stages, n_chunks)
    return tuple(tuple(sorted({entry.chunk for entry in passes})) for passes in every)


@functools.lru_cache(maxsize=256)
def _stage(chunks: tuple[Chunk, ...], versions: int, **fields: Any) -> Stage:
    """Return the stage of a worker that keeps `versions` versions of its weights; `fields` are those of `Holding`."""
    work = joined(chunks)
    holding = holding_of(work, **fields)
    memory = memory_of(work.model, work.batch_size, work.precision, holding)
    if holding.zero == 3 and not holding.gathered:  # unsharded gradients, in the dtype of their reduction
        memory = dataclasses.replace(memory, gradients=memory.gradients + work.gradient_nbytes)
    return Stage(work, memory=dataclasses.replace(memory, weights=versions * memory.weights))


def _keeps_outputs(workload: Workload) -> bool:
    """Whether stages keep their outputs until the backward pass."""
    return workload.by_kernel and workload.stack.keeps_outputs


def _layer_by_layer(chunk: Chunk, full: Workload, replicas: int, micro_batches: int) -> StepProgram:
    """Return the program of replicas that gather a rank's share of the model one transformer layer at a time.

    chunk    all layers as computed by a rank of a tensor group
    full     all layers on one rank
    """
    units, work = weight_units(full.model.layers), chunk.workload
    program = fully_sharded(work, replicas, units, accumulation=micro_batches, no_sync=False)
    until, share = np.append(0.0, np.cumsum(chunk.stored)), work.gradient_nbytes / max(full.gradient_nbytes, 1.0)

    def of_rank(plan: Plan) -> Plan:
        sign = np.select([plan.kind == FORWARD, plan.kind == BACKWARD], [1.0, -1.0])
        holds = np.where(sign, sign * (until[plan.end] - until[plan.first]), share * plan.holds)
        return plan.with_columns(nbytes=np.where(plan.kind == ALL_GATHER, share, 1.0) * plan.nbytes, holds=holds)

    return program.map(of_rank)


@functools.lru_cache(maxsize=256)
def _exchanging(shard: Shard, seconds: Seconds | None) -> Workload:
    """Return the workload of a rank of a tensor group, including its exchanges if `seconds` is given."""
    return shard.workload if seconds is None else with_exchanges(shard, seconds)


# ------------------------------------------------------------ cuts between stages


@functools.lru_cache(maxsize=16)
def equal_layers(workload: Workload, chunks: int) -> tuple[int, ...]:
    """Return the cuts of a model into chunks of n transformer layers each."""
    ranges = blocks(workload.model.layers)
    if not ranges or len(ranges) % chunks:
        near = " or ".join(str(n) for n in sorted(sorted(divisors(len(ranges)), key=lambda n: abs(n - chunks))[:2]))
        raise ConfigError(
            f"Parallel: cut = 'layers': the number of chunks, {chunks}, must divide the number of transformer layers "
            f"of {workload.model.name}, {len(ranges)}; use {near or 'cut = balanced'}"
        )
    return tuple(first for first, _ in ranges[:: len(ranges) // chunks][1:])


def cut_places(workload: Workload, stages: int, chunks: int, of_chunks: Sequence[Workload] = ()) -> tuple[int, ...]:
    """Return the cuts of a model into balanced chunks: between blocks if there are enough of them.

    of_chunks  workload of the model on the device of each chunk, if devices differ
    """
    places = _between_blocks(workload.model)
    at = places if len(places) >= stages * chunks - 1 else None
    return balanced_cuts(workload, stages, chunks, at, of_chunks)


@functools.lru_cache(maxsize=256)
def _between_blocks(model: Model) -> tuple[int, ...]:
    return tuple(between_blocks(model))


@functools.lru_cache(maxsize=256)
def joined(chunks: tuple[Chunk, ...]) -> Workload:
    """Return the workload of a worker with several chunks."""
    works = [chunk.workload for chunk in chunks]
    first = works[0]
    if len(works) == 1:
        return first
    starts = np.cumsum([0, *(len(work.forward) for work in works[:-1])])
    name = " and ".join(f"{chunk.first} to {chunk.end - 1}" for chunk in chunks)
    model_name = first.model.name.partition(", layers")[0]
    layers = tuple(layer for work in works for layer in work.model.layers)
    model = dataclasses.replace(first.model, name=f"{model_name}, layers {name}", layers=layers)
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(work, name) for work in works])
        for name in ("forward", "backward", "grad_nbytes", "tensor_nbytes")
    }
    arrays["tensor_layer"] = np.concatenate([work.tensor_layer + at for work, at in zip(works, starts, strict=True)])
    optimizer, norms = (sum(getattr(work, name) for work in works) for name in ("optimizer", "norms"))
    return dataclasses.replace(first, model=model, optimizer=optimizer, norms=norms, **arrays)


# ------------------------------------------------------------ weights of asynchronous pipelines


class StashedWeights:
    """The versions of all parameters that stages still use.

    delays  age of each stage's weights in updates
    slices  each stage's part of the parameters
    """

    def __init__(self, learner: Learner, delays: Sequence[int], slices: Sequence[slice]) -> None:
        self._learner, self._delays, self._slices = learner, delays, slices
        self._versions: deque[Value[Array]] = deque(maxlen=max(delays) + 1)
        self._step, self._met = -1, learner.initial

    def at(self, step: int, params: Value[Array]) -> Value[Array]:
        """Return the parameters with which the micro-batches of a step were computed: each stage's weights are older by
        its delay, or are the initial ones.

        params  before the update of this step; call this method in the order of the steps, any number of times per step
        """
        if step > self._step:
            self._versions.append(params)
            self._step, self._met = step, self._mixed(step)
        return self._met

    def _mixed(self, step: int) -> Value[Array]:
        met = [self._versions[-1 - min(delay, step)] for delay in self._delays]
        if self._learner.task is None or all(version is met[0] for version in met):
            return met[0]
        slices = self._slices

        def together(*versions: Array) -> Array:
            return np.concatenate([version[part] for version, part in zip(versions, slices, strict=True)])

        return self._learner.plane.apply(together, *met)


def stage_slices(learner: Learner, ends: Sequence[int]) -> list[slice]:
    """Return the slice of the learned parameters that belongs to each stage.

    ends  (n_stages,) one past the last layer of each stage, in the timed model. If another model is trained, a stage
          has the same share of its layers
    """
    if learner.task is None:
        return [slice(0, 0) for _ in ends]
    network = learner.task.network
    until = np.cumsum([0, *(layer.n_params for layer in network.model.layers)])
    n_layers = len(network.model.layers)
    bounds = [0, *(int(until[round(end * n_layers / ends[-1])]) for end in ends)]
    return [slice(first, end) for first, end in itertools.pairwise(bounds)]
