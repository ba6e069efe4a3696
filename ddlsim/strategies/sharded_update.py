"""Synchronous SGD in which every worker updates its share of the parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import simpy

from ddlsim.arguments import by, checked
from ddlsim.collectives import Collective
from ddlsim.errors import ConfigError
from ddlsim.plan import Plan, sharded
from ddlsim.runtime.coded import Coded
from ddlsim.runtime.communicator import Communicator
from ddlsim.runtime.fabric import Cost, Fabric, RankOrder, algorithm_of, cost_said, name_of
from ddlsim.runtime.group import Carrier, Dense, Group
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.worker import Process, Worker
from ddlsim.strategies.overlap import DdpBuckets, NoOverlap, PerLayer, as_compressed, buckets_of, overlap_named
from ddlsim.workload.buckets import Bucket
from ddlsim.workload.compute import Workload
from ddlsim.workload.stage import Stage

__all__ = ["ShardedUpdate"]

InOrder = NoOverlap | PerLayer | DdpBuckets


def _in_order(overlap: str | InOrder, where: str) -> str | InOrder:
    if not isinstance(overlap_named(overlap, where), InOrder):
        raise ConfigError(
            f"{where} = {overlap!r}: buckets are cut in shards once, not fused or cut again on the way; use "
            "'none', 'layer', 'ddp' or DdpBuckets(...)"
        )
    return overlap


@checked
@dataclass(frozen=True)
class ShardedUpdate:
    """Reduce-scatter the gradients, update the own shards of the parameters, all-gather the updated shards.

    The "distributed weight update" of Intel MLSL (Sridharan et al. 2018, arXiv:1801.08030) and stage 1 of ZeRO
    (Rajbhandari et al. 2020, arXiv:1910.02054, section 5.1): the bytes of a ring all-reduce, 1/N of the
    optimizer's time and state, and the values of synchronous SGD.

    reduce_scatter, all_gather  names of such collectives, or functions ``n_ranks -> Schedule``
    rank_order, cost            as for :class:`~ddlsim.AllReduce`; measured or NCCL's times of both collectives
    overlap                     "none"; or "layer", "ddp", or DdpBuckets(...): buckets are reduce-scattered beside the
                                backward pass and gathered beside the next forward pass, as Megatron-LM's distributed
                                optimizer does (:func:`ddlsim.plan.sharded`)

    Rules that need whole layers (LARS, LAMB) do not fit: their norms would have to be exchanged too.
    """

    reduce_scatter: Annotated[str | Collective, algorithm_of("reduce_scatter")] = "ring"
    all_gather: Annotated[str | Collective, algorithm_of("all_gather")] = "ring"
    rank_order: RankOrder = "topology"
    cost: Cost = "simulated"
    overlap: Annotated[str | InOrder, by(_in_order)] = "none"

    @property
    def label(self) -> str:
        """The algorithms, the overlap if there is one, and what they cost unless that is simulated."""
        policy = overlap_named(self.overlap)
        name = self.overlap if isinstance(self.overlap, str) else type(policy).__name__
        more = ("" if isinstance(policy, NoOverlap) else f", {name}") + cost_said(self.cost)
        return f"sharded update ({name_of(self.reduce_scatter)}, {name_of(self.all_gather)}{more})"

    def on_fabric(self, fabric: Fabric) -> ShardedUpdate:
        """Return it with both collectives by the algorithm of a fabric."""
        return dataclasses.replace(
            self, reduce_scatter=fabric.algorithm, all_gather=fabric.algorithm, rank_order=fabric.rank_order,
            cost=fabric.cost,
        )  # fmt: skip

    def updates(self, steps: int, n_workers: int) -> int:
        """One update a step."""
        return steps

    def stage(self, workload: Workload, rank: int, n_workers: int) -> Stage:
        """Return what a worker holds: the whole model, and its share of the optimizer's state."""
        return Stage(workload, state=1.0 / n_workers)

    def plan(self, workloads: Sequence[Workload], steps: int = 1, accumulation: int = 1) -> Plan:
        """Return what workers with these workloads do in `steps` steps."""
        policy = self._policy
        overlaps = not isinstance(policy, NoOverlap)
        return sharded(workloads, None, policy.buckets, steps=steps, accumulation=accumulation, overlap=overlaps)

    @property
    def _policy(self) -> InOrder:
        policy = overlap_named(self.overlap)
        assert isinstance(policy, InOrder)
        return policy

    def start(self, setting: Setting) -> None:
        """Start all workers. Raises ConfigError for an optimizer that is not element-wise."""
        learner = setting.learner
        if learner.task is not None and hasattr(learner.task.optimizer, "with_bounds"):
            raise ConfigError(
                f"ShardedUpdate: optimizer = {type(learner.task.optimizer).__name__} needs whole layers; use "
                "AllReduce, or an element-wise optimizer such as Momentum(0.9)"
            )
        members = Communicator(setting, Fabric("ring", self.rank_order, self.cost), owner="ShardedUpdate")
        if as_compressed(self._policy, setting) is not self._policy:
            raise ConfigError(
                "ShardedUpdate: the compressor is of the whole gradient, which overlaps cut in buckets; "
                "use overlap='none'"
            )
        buckets = buckets_of(self._policy, setting.workers[0].workload)

        def scattering(group: Group) -> Carrier:
            if setting.compression is None:
                return Dense(members, "reduce_scatter", self.reduce_scatter)
            return Coded(members, buckets, group.gradient, "reduce_scatter")

        scatter = Group(members, scattering)
        gather = Group(members, lambda _: Dense(members, "all_gather", self.all_gather))
        setting.model = lambda: scatter.params
        for worker in setting.workers:
            setting.loop.env.process(_Member(worker, scatter, gather, self._policy).work())


@dataclass
class _Member:
    """One worker. Its collectives run one after the other, as on NCCL's stream: the last one is `latest`.

    What all workers do to their shards, element by element, is what is done to the whole once: `scatter` does.
    """

    worker: Worker
    scatter: Group
    gather: Group
    policy: InOrder
    step: int = 0
    #: samples in the gradient of the step; the batch may have grown when the step ends, beside the next one
    n_samples: int = 0
    latest: simpy.Event | None = None
    #: the all-gathers of the step before, by bucket
    gathered: list[simpy.Event] = field(default_factory=list)

    def work(self) -> Process:
        worker = self.worker
        overlaps = not isinstance(self.policy, NoOverlap)
        while True:
            buckets = buckets_of(self.policy, worker.workload)
            if not overlaps:
                yield from self._wait_for(self.gathered, "parameters", self.gather, "all-gather")
            forward = functools.partial(self._forward, buckets)
            yield from worker.begin_step(forward)
            yield from forward() if worker.accumulation == 1 else worker.forward()
            if self.step > 0:
                worker.params = self.scatter.parameters(self.step - 1, self.n_samples)
            self.n_samples = worker.samples_per_step
            self.scatter.contribute(self.step, worker.rank, worker.draw())
            layer = len(worker.workload.forward)
            for i, bucket in enumerate(buckets):
                yield from worker.backward(layer, bucket.ready_layer)
                layer = bucket.ready_layer
                yield from worker.compute(self.scatter.carrier.encode_seconds(worker, self.step, i), "encode")
                scattered = self._enter(self.scatter, i, bucket, self.scatter.carrier.what)
            yield from worker.backward(layer, 0)
            yield from self._wait_for([scattered], "gradients", self.scatter, self.scatter.carrier.what)
            for i in range(len(buckets)):
                yield from worker.compute(self.scatter.carrier.decode_seconds(worker, self.step, i), "decode")
            yield from worker.compute(worker.workload.optimizer / self.scatter.n_workers, "optimizer")
            arrivals = [self._enter(self.gather, i, buckets[i], "all-gather") for i in reversed(range(len(buckets)))]
            self.gathered = arrivals[::-1]
            worker.loop.env.process(self._finish(self.step, self.n_samples, arrivals[-1]))
            self.step += 1

    def _forward(self, buckets: Sequence[Bucket]) -> Process:
        """Compute the first forward pass of a step, as far as updated parameters have arrived."""
        worker, done = self.worker, 0
        for layer in sorted({bucket.first_layer for bucket in buckets} if self.gathered else ()):
            yield from worker.compute(float(worker.workload.forward[done:layer].sum()), "forward")
            done = layer
            needed = [e for bucket, e in zip(buckets, self.gathered, strict=True) if bucket.first_layer == layer]
            yield from self._wait_for(needed, f"parameters of layer {layer}", self.gather, "all-gather")
        if done:
            yield from worker.compute(float(worker.workload.forward[done:].sum()), "forward")
        else:
            yield from worker.forward()

    def _enter(self, group: Group, index: int, bucket: Bucket, what: str) -> simpy.Event:
        """Put a bucket behind what this worker has on its stream; return the event of its end."""
        group.ready(self.step, index)
        self.latest = self.worker.loop.env.process(self._travel(group, self.step, index, bucket, what, self.latest))
        return self.latest

    def _travel(
        self, group: Group, step: int, index: int, bucket: Bucket, what: str, before: simpy.Event | None
    ) -> Process:
        worker = self.worker
        if before is not None:
            yield before
        start = worker.loop.now
        yield group.carrier.carry(worker, step, index, bucket.nbytes)
        worker.recorder.background(f"{worker.name} network", f"{what} of bucket {index}", start, worker.loop.now)

    def _wait_for(self, events: Sequence[simpy.Event], values: str, group: Group, what: str) -> Process:
        missing = [event for event in events if not event.processed]
        if missing:
            worker, start = self.worker, self.worker.loop.now
            step = self.step if group is self.scatter else self.step - 1
            operations = [operation for (at, _), operation in group.operations.items() if at == step]
            yield from worker.block(worker.loop.env.all_of(missing), f"the {values} of step {step}")
            worker.book(start, max(operation.last_ready for operation in operations), what)

    def _finish(self, step: int, n_samples: int, last: simpy.Event) -> Process:
        yield last
        worker = self.worker
        self.scatter.parameters(step, n_samples)
        worker.end_step()
        self.gather.finish_step(step)
        if self.scatter.finish_step(step):
            worker.stop.updated(n_samples * self.scatter.n_workers)
