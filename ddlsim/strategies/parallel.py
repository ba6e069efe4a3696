"""`Parallel`: one model split over the workers, by layers along a pipeline, in replicas that learn together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from ddlsim.arguments import Count, by, checked
from ddlsim.errors import ConfigError
from ddlsim.learning import Array, Value
from ddlsim.plan import Chunk, Mesh, Plan, balanced, between_blocks, chunks_at, mesh_of, pipeline
from ddlsim.plan.pipeline_orders import ORDERS, PassOrder, pass_order
from ddlsim.plan.plan import Floats
from ddlsim.plan.schedules import Schedules
from ddlsim.runtime.fabric import AllReduceAlgorithm, Fabric, RankOrder, name_of
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.table_run import run_table
from ddlsim.workload.buckets import Bucket, ddp_buckets, one_bucket, per_layer
from ddlsim.workload.compute import Workload
from ddlsim.workload.stage import Stage

__all__ = ["Parallel"]

BUCKETS: dict[str, Callable[[Workload], Sequence[Bucket]]] = {
    "none": one_bucket, "layer": per_layer, "ddp": ddp_buckets,
}  # fmt: skip


def _known_order(order: object, where: str) -> object:
    if isinstance(order, str) and order not in ORDERS:
        pass_order(order, 1, 1, 1)  # raises, with what there is
    return order


@checked
@dataclass(frozen=True)
class Parallel:
    """Synchronous SGD on a model that is split over ``pipeline`` workers, in ``data`` replicas.

    The batch size of a run is that of an update, of all workers together, as in Megatron-LM and DeepSpeed: each replica
    does ``batch_size / (data * micro_batch)`` micro-batches. Worker i is rank i of the mesh
    (:class:`~ddlsim.plan.Mesh`): replicas of a stage are neighbours.

    pipeline     stages, each on a worker
    data         replicas; None: as many as there are workers for
    micro_batch  samples that a worker computes at once
    order        "gpipe", "1f1b", "zb-1p", "zb-2p", "zb-v", "v-half" or "v-min" (docs/models/splitting.md), or a table:
                 for every stage a list of ("F", "B" or "W", chunk, micro-batch)
    interleave   chunks of layers per stage, with "1f1b" and with tables
    recompute    stages keep their input only, and go forward again before they go backward
    sharded      replicas update a share of each bucket and gather the rest (ZeRO stage 1)
    overlap      what replicas sum beside the last backward passes: "none" (chunk by chunk), "layer" or "ddp" buckets
    algorithm, rank_order
                 how replicas sum
    """

    pipeline: Count = 1
    data: Count | None = None
    micro_batch: Count = 1
    order: Annotated[str | Sequence[Sequence[tuple[str, int, int]]], by(_known_order)] = "1f1b"
    interleave: Count = 1
    recompute: bool = False
    sharded: bool = False
    overlap: Literal["none", "layer", "ddp"] = "ddp"
    algorithm: AllReduceAlgorithm = "ring"
    rank_order: RankOrder = "topology"

    def __post_init__(self) -> None:
        per_stage = ORDERS[self.order][0] if isinstance(self.order, str) else 1
        if self.interleave > 1 and isinstance(self.order, str) and self.order != "1f1b":
            raise ConfigError(
                f"Parallel: interleave = {self.interleave}: has no effect with order = {self.order!r}, which has "
                f"{per_stage} chunk{'s' * (per_stage > 1)} per stage; leave it out, or use '1f1b'"
            )

    @property
    def label(self) -> str:
        """Sizes and order."""
        order = self.order if isinstance(self.order, str) else "own order"
        chunks = f" x {self.interleave}" if self.interleave > 1 else ""
        more = "".join(f", {name}" for name in ("recompute", "sharded") if getattr(self, name))
        data = "" if self.data is None else f"data {self.data}, "
        return f"parallel ({data}pipeline {self.pipeline}, {order}{chunks}{more}, {name_of(self.algorithm)})"

    def updates(self, steps: int, n_workers: int) -> int:
        """One update a step."""
        return steps

    def on_fabric(self, fabric: Fabric) -> Parallel:
        """Return the strategy whose replicas sum on a fabric. Raises ConfigError where its cost is not simulated."""
        if fabric.cost != "simulated":
            raise ConfigError(
                f"fabric: cost = {fabric.cost!r}: {self.label} has groups of several kinds, whose collectives are "
                "simulated; leave it out"
            )
        return dataclasses.replace(self, algorithm=fabric.algorithm, rank_order=fabric.rank_order)

    # ------------------------------------------------------------ who has what

    def mesh(self, n_workers: int) -> Mesh:
        """Return the mesh of so many workers. Raises ConfigError, with the nearest ones, where there is none."""
        return mesh_of(n_workers, self.data, self.pipeline)

    def micro_batch_size(self, batch_size: int, n_workers: int) -> int:
        """Return the samples that a worker computes at once."""
        at_once = self.mesh(n_workers).data * self.micro_batch
        if batch_size % at_once:
            below = batch_size - batch_size % at_once
            near = " or ".join(str(each) for each in (below, below + at_once) if each)
            raise ConfigError(
                f"batch_size = {batch_size}: must be a multiple of {at_once}, data {self.mesh(n_workers).data} x "
                f"micro_batch {self.micro_batch}; use {near}"
            )
        return self.micro_batch

    def n_replicas(self, n_workers: int) -> int:
        """Return how many replicas learn from samples of their own."""
        return self.mesh(n_workers).data

    def stage(self, workload: Workload, rank: int, n_workers: int) -> Stage:
        """Return what a worker computes of the model, and its share of the optimizer's state."""
        mesh = self.mesh(n_workers)
        place = mesh.coordinates(rank).pipeline
        mine = sorted({each.chunk for each in self._order(mesh, 2 * self.pipeline)[place]})
        chunks = self._chunks(workload)
        return Stage(_together(tuple(chunks[i] for i in mine)), state=1.0 / mesh.data if self.sharded else 1.0)

    def _chunks(self, workload: Workload) -> tuple[Chunk, ...]:
        per_stage = ORDERS[self.order][0] if isinstance(self.order, str) else 1
        return _cut(workload, self.pipeline, max(per_stage, self.interleave))

    def _order(self, mesh: Mesh, micro_batches: int) -> PassOrder:
        per_stage = ORDERS[self.order][0] if isinstance(self.order, str) else 1
        if not isinstance(self.order, str):
            micro_batches = 1 + max((each[2] for passes in self.order for each in passes), default=0)
        return pass_order(self.order, mesh.pipeline, micro_batches, self.pipeline * max(per_stage, self.interleave))

    # ------------------------------------------------------------ what they do

    def plan(self, workloads: Sequence[Workload], steps: int = 1, accumulation: int = 1) -> Plan:
        """Return what workers do in `steps` steps of `accumulation` micro-batches of each replica.

        Stages are balanced for workers like the first. Raises ConfigError for an order that does not go with the
        micro-batches.
        """
        mesh, cuts = self.mesh(len(workloads)), [chunk.first for chunk in self._chunks(workloads[0])[1:]]
        different = {id(workload): workload for workload in workloads}
        plans = {
            number: pipeline(
                chunks_at(workload, cuts), mesh, accumulation, self.order, steps=steps, recompute=self.recompute,
                buckets=BUCKETS[self.overlap], sharded=self.sharded,
            )
            for number, workload in different.items()
        }  # fmt: skip
        first = plans[id(workloads[0])]
        if len(plans) == 1:
            return first
        which = np.array([list(plans).index(id(workload)) for workload in workloads])[first.rank]
        every = np.stack([plan.seconds for plan in plans.values()])
        return dataclasses.replace(first, seconds=every[which, np.arange(len(first))])

    def start(self, setting: Setting) -> None:
        """Start all workers."""
        workers, learner = setting.workers, setting.learner
        whole = setting.whole
        mesh, micro_batches = self.mesh(len(workers)), workers[0].accumulation
        schedules = Schedules(
            self.plan(whole, 1, micro_batches), self.algorithm, setting.cluster, np.array(setting.nodes),
            self.rank_order,
        )  # fmt: skip
        samples = whole[0].batch_size * micro_batches
        params: Value[Array] = learner.initial
        state, seen = learner.optimizer_state(params), 0
        firsts = mesh.ranks[:, 0, 0]

        def follow(step: int, begins: Floats) -> None:
            """w <- w - eta * (1/N) sum_i g_i"""
            nonlocal params, state, seen
            gradients = [
                learner.gradient(replica, params, samples, float(begins[rank])) for replica, rank in enumerate(firsts)
            ]
            params, state = learner.update(params, learner.mean(gradients), state, learner.rate(seen))
            seen += samples * mesh.data

        setting.model = lambda: params
        run_table(
            setting, lambda steps: self.plan(whole, steps, micro_batches), schedules, samples=samples * mesh.data,
            follow=follow,
        )  # fmt: skip


@functools.lru_cache(maxsize=16)
def _cut(workload: Workload, stages: int, chunks: int) -> tuple[Chunk, ...]:
    """Return balanced chunks, cut between blocks if there are enough of them."""
    places = between_blocks(workload.model)
    return balanced(workload, stages, chunks, at=places if len(places) >= stages * chunks - 1 else None)


@functools.lru_cache(maxsize=256)
def _together(chunks: tuple[Chunk, ...]) -> Workload:
    """Return what a worker computes that has several chunks."""
    works = [chunk.workload for chunk in chunks]
    first = works[0]
    if len(works) == 1:
        return first
    starts = np.cumsum([0, *(len(work.forward) for work in works[:-1])])
    name = " and ".join(f"{chunk.first} to {chunk.end - 1}" for chunk in chunks)
    whole = first.model.name.partition(", layers")[0]
    layers = tuple(layer for work in works for layer in work.model.layers)
    return dataclasses.replace(
        first, model=dataclasses.replace(first.model, name=f"{whole}, layers {name}", layers=layers),
        forward=np.concatenate([work.forward for work in works]),
        backward=np.concatenate([work.backward for work in works]), optimizer=sum(work.optimizer for work in works),
        grad_nbytes=np.concatenate([work.grad_nbytes for work in works]),
        tensor_layer=np.concatenate([work.tensor_layer + at for work, at in zip(works, starts, strict=True)]),
        tensor_nbytes=np.concatenate([work.tensor_nbytes for work in works]),
    )  # fmt: skip
