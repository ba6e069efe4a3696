"""When gradients travel: after the backward pass, bucket by bucket beside it, fused, or by priority.

Each class is one policy (:class:`Overlap`). A *bucket* is ready when
the backward pass has gone through its layers (:mod:`ddlsim.workload.buckets`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import simpy

from ddlsim.arguments import Bytes, Count, Duration, by, checked
from ddlsim.errors import ConfigError, shown, unknown_name
from ddlsim.named_code import imported, names_code
from ddlsim.plan import FusedQueue, Plan, UrgentQueue, data_parallel
from ddlsim.runtime.coordinator import Coordinator, Fused, MostUrgent
from ddlsim.runtime.group import Group
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.worker import Process, Worker
from ddlsim.strategies.plans import tells_plan
from ddlsim.units import si
from ddlsim.workload.buckets import Bucket, ddp_buckets, one_bucket, partitioned, per_layer
from ddlsim.workload.compute import Workload

__all__ = [
    "DdpBuckets",
    "HorovodFusion",
    "NoOverlap",
    "Overlap",
    "OverlapChoice",
    "PerLayer",
    "Priority",
    "as_compressed",
    "buckets_of",
    "is_table",
    "overlap_named",
    "plan",
    "work",
]  # fmt: skip


class Overlap(Protocol):
    """When gradients travel; ``buckets`` is enough: workers exchange them in order, beside the backward pass.

    With ``work(worker, group)`` it is a worker's whole life, with ``coordinator(group)`` something else decides which
    bucket goes next; ``plan(workloads, steps, accumulation)`` is what workers do then, as a table.
    """

    def buckets(self, workload: Workload) -> tuple[Bucket, ...]:
        """Return what travels together, in the order in which it is ready: every gradient byte once."""

    def __hash__(self) -> int: ...


@checked
@dataclass(frozen=True)
class NoOverlap:
    """Exchange all gradients at once, after the backward pass."""

    def buckets(self, workload: Workload) -> tuple[Bucket, ...]:
        return one_bucket(workload)


@checked
@dataclass(frozen=True)
class PerLayer:
    """Wait-free backpropagation: each layer's gradients leave as soon as they are ready (Zhang et al. 2017,
    Poseidon, section 3.1); one wire, first come first served."""

    def buckets(self, workload: Workload) -> tuple[Bucket, ...]:
        return per_layer(workload)


@checked
@dataclass(frozen=True)
class DdpBuckets:
    """PyTorch DistributedDataParallel: buckets of at least `cap` bytes, the first of `first` (Li et al. 2020,
    VLDB 13(12), section 3.2), exchanged in order beside the backward pass."""

    cap: Bytes = 25 * 2**20
    first: Bytes = 2**20

    def buckets(self, workload: Workload) -> tuple[Bucket, ...]:
        return ddp_buckets(workload, si(self.cap, "bytes"), si(self.first, "bytes"))


@checked
@dataclass(frozen=True)
class HorovodFusion:
    """Horovod: every `cycle_time` the coordinator fuses the tensors that are ready on all workers into buffers
    of at most `threshold` bytes and reduces them one after the other (Sergeev and Del Balso 2018,
    arXiv:1802.05799, section 4; defaults of HOROVOD_FUSION_THRESHOLD and HOROVOD_CYCLE_TIME)."""

    threshold: Bytes = 128 * 2**20
    cycle_time: Duration = 1e-3

    def buckets(self, workload: Workload) -> tuple[Bucket, ...]:
        return per_layer(workload)

    def coordinator(self, group: Group) -> Coordinator:
        return Fused(group, si(self.threshold, "bytes"), si(self.cycle_time, "time"))

    def work(self, worker: Worker, group: Group) -> Process:
        yield from coordinated(worker, group, buckets_of(self, worker.workload), pipelined=False)

    def plan(self, workloads: Sequence[Workload], steps: int = 1, accumulation: int = 1) -> Plan:
        """Return what workers with these workloads do in `steps` steps, as a table."""
        queue = FusedQueue(self.threshold, self.cycle_time)
        return data_parallel(workloads, None, self.buckets, steps=steps, accumulation=accumulation, queue=queue)


@checked
@dataclass(frozen=True)
class Priority:
    """Tensors cut in `partition` bytes, the most urgent (nearest the input) first, `in_flight` at a time; the
    next forward pass starts as its layers arrive (Jayarajan et al. 2019, P3; Peng et al. 2019, ByteScheduler)."""

    partition: Bytes = 4e6
    in_flight: Count = 4

    def buckets(self, workload: Workload) -> tuple[Bucket, ...]:
        return partitioned(workload, si(self.partition, "bytes"))

    def coordinator(self, group: Group) -> Coordinator:
        return MostUrgent(group, self.in_flight)

    def work(self, worker: Worker, group: Group) -> Process:
        yield from coordinated(worker, group, buckets_of(self, worker.workload), pipelined=True)

    def plan(self, workloads: Sequence[Workload], steps: int = 1, accumulation: int = 1) -> Plan:
        """Return what workers with these workloads do in `steps` steps, as a table."""
        return data_parallel(
            workloads, None, self.buckets, steps=steps, accumulation=accumulation, queue=UrgentQueue(self.in_flight),
            layer_by_layer=True,
        )  # fmt: skip


_NAMES: dict[str, Overlap] = {
    "none": NoOverlap(),
    "layer": PerLayer(),
    "ddp": DdpBuckets(),
    "horovod": HorovodFusion(),
    "priority": Priority(),
}


def overlap_named(overlap: str | Overlap, where: str = "overlap") -> Overlap:
    """Return the policy of a name ("none", "layer", "ddp", "horovod", "priority", or "package.module:Name" of a class
    without arguments), or the policy itself. Raises ConfigError."""
    if names_code(overlap):
        policy = imported(str(overlap), where)
        return overlap_named(policy() if isinstance(policy, type) else policy, where)  # type: ignore[arg-type]
    if not isinstance(overlap, str):
        if isinstance(overlap, type) or not hasattr(overlap, "buckets"):
            raise ConfigError(
                f"{where} = {shown(overlap)}: must be one of {', '.join(_NAMES)}, or a policy such as "
                "DdpBuckets('25 MiB'): a frozen dataclass with a method buckets(workload)"
            )
        if type(overlap).__hash__ is None:
            raise ConfigError(f"{where} = {shown(overlap)}: can change; make it @dataclass(frozen=True)")
        return overlap
    if overlap not in _NAMES:
        raise unknown_name("overlap", overlap, _NAMES, where.partition(":")[0])
    return _NAMES[overlap]


def _choice(overlap: str | Overlap, where: str) -> str | Overlap:
    overlap_named(overlap, where)
    return overlap


OverlapChoice = Annotated[str | Overlap, by(_choice)]


def as_compressed(overlap: Overlap, setting: Setting) -> Overlap:
    """Return the policy under which gradients travel: "none" where what compresses them is of the whole gradient."""
    choice = setting.compression
    if choice is None or not choice.compressor.traits.whole or isinstance(overlap, NoOverlap):
        return overlap
    setting.notes.append(
        f"compression: {choice.label} is of the whole gradient, so nothing travels beside the backward pass"
    )
    return NoOverlap()


@functools.lru_cache(maxsize=16)
def buckets_of(overlap: Overlap, workload: Workload) -> tuple[Bucket, ...]:
    """Make the buckets once for all workers of the same workload.

    Raises ConfigError for buckets that are none, or do not hold every gradient byte once, in the order of readiness.
    """
    buckets, owner = tuple(overlap.buckets(workload)), f"{type(overlap).__name__}.buckets"
    if not buckets or not all(isinstance(bucket, Bucket) for bucket in buckets):
        raise ConfigError(f"{owner}: must return ddlsim.runtime.Bucket objects, one or more, not {shown(buckets)}")
    total, whole = sum(bucket.nbytes for bucket in buckets), workload.gradient_nbytes
    if not math.isclose(total, whole, rel_tol=1e-9):
        raise ConfigError(f"{owner}: the buckets hold {total:.10g} bytes, the gradients {whole:.10g}; put each in one")
    for earlier, later in itertools.pairwise(buckets):
        if later.ready_layer > earlier.ready_layer:
            raise ConfigError(
                f"{owner}: the bucket that is ready with layer {later.ready_layer} comes after that of layer "
                f"{earlier.ready_layer}, but the backward pass goes from the last layer to the first; return buckets "
                "in the order in which they are ready"
            )
    return buckets


def work(overlap: Overlap, worker: Worker, group: Group) -> Process:
    """Return a worker's life under a policy: the policy's own, or its buckets in order."""
    if hasattr(overlap, "work"):
        process: Process = overlap.work(worker, group)
        return process
    return in_order(worker, group, buckets_of(overlap, worker.workload))


def is_table(overlap: Overlap) -> bool:
    """Return whether the steps under a policy can be told as a plan."""
    return tells_plan(overlap, "work") if hasattr(overlap, "plan") else not hasattr(overlap, "work")


def plan(overlap: Overlap, workloads: Sequence[Workload], steps: int, accumulation: int) -> Plan:
    """Return what workers with these workloads do in `steps` steps. Raises ConfigError where a policy cannot tell."""
    if not hasattr(overlap, "work") and not hasattr(overlap, "plan"):
        return data_parallel(
            workloads, None, functools.partial(buckets_of, overlap), steps=steps, accumulation=accumulation
        )
    if not is_table(overlap):
        raise ConfigError(
            f"plan: the step of overlap = {type(overlap).__name__} is not a table; give it a method "
            "plan(workloads, steps, accumulation) that is true of its method work"
        )
    told: Plan = overlap.plan(workloads, steps, accumulation)  # type: ignore[attr-defined]  # it has one
    return told


# ---------------------------------------------------------------- buckets in order, rank by rank


def in_order(worker: Worker, group: Group, buckets: tuple[Bucket, ...]) -> Process:
    """Exchange buckets first come first served: a rank starts one when it is ready and the last one is over."""
    carrier = group.carrier
    step = 0
    n_layers = len(worker.workload.forward)
    while True:
        yield from worker.begin_step()
        group.contribute(step, worker.rank, worker.draw())
        yield from worker.forward()
        arrivals: list[simpy.Event] = []
        layer = n_layers
        for i, bucket in enumerate(buckets):
            yield from worker.backward(layer, bucket.ready_layer)
            layer = bucket.ready_layer
            yield from worker.compute(carrier.encode_seconds(worker, step, i), "encode")
            group.ready(step, i)
            last = arrivals[-1] if arrivals else None
            arrivals.append(worker.loop.env.process(_exchange(worker, group, step, i, bucket, last)))
        yield from worker.backward(layer, 0)
        yield from _collect(worker, group, step, arrivals)
        yield from worker.optimizer_step()
        worker.params = group.parameters(step, worker.samples_per_step)
        worker.end_step()
        if group.finish_step(step):
            worker.stop.updated(worker.samples_per_step * group.n_workers)
        step += 1


def _exchange(worker: Worker, group: Group, step: int, index: int, bucket: Bucket, wire: simpy.Event | None) -> Process:
    if wire is not None:
        yield wire
    start = worker.loop.now
    yield group.carrier.carry(worker, step, index, bucket.nbytes)
    worker.recorder.background(f"{worker.name} network", f"bucket {index}", start, worker.loop.now)


def _collect(worker: Worker, group: Group, step: int, arrivals: list[simpy.Event]) -> Process:
    """Wait for the means of all buckets, and decode each when it has arrived."""
    for i, arrival in enumerate(arrivals):
        if group.carrier.decodes or i + 1 == len(arrivals):
            start = worker.loop.now
            yield from worker.block(arrival, f"the gradients of step {step}")
            worker.book(start, group.operation(step, i).last_ready, group.carrier.what)
            yield from worker.compute(group.carrier.decode_seconds(worker, step, i), "decode")


# ---------------------------------------------------------------- buckets that a coordinator orders


def coordinated(worker: Worker, group: Group, buckets: tuple[Bucket, ...], *, pipelined: bool) -> Process:
    """Announce buckets to the group's coordinator; it says when they travel.

    With `pipelined`, the next forward pass goes on layer by layer as their gradients arrive; otherwise it
    starts when all have arrived.
    """
    coordinator = group.coordinator
    assert coordinator is not None
    n_layers = len(worker.workload.forward)
    arrived: list[simpy.Event] = []  # of the previous step, by bucket
    step = 0
    while True:
        if arrived and pipelined and worker.accumulation > 1:  # the first micro-step needs all parameters
            start = worker.loop.now
            yield from worker.block(worker.loop.env.all_of(arrived), f"the parameters of step {step}")
            worker.book(start, coordinator.latest_ready, "all-reduce")
        yield from worker.begin_step()
        yield from _forward(worker, buckets, arrived if pipelined else [], coordinator)
        if step > 0:  # by now all of the last step has arrived
            worker.params = group.parameters(step - 1, worker.samples_per_step)
        group.contribute(step, worker.rank, worker.draw())
        arrived = []
        layer = n_layers
        for i, bucket in enumerate(buckets):
            yield from worker.backward(layer, bucket.ready_layer)
            layer = bucket.ready_layer
            arrived.append(coordinator.announce(step, i, bucket, worker.rank))
        yield from worker.backward(layer, 0)
        if pipelined:
            worker.loop.env.process(_finish(worker, group, step, arrived, worker.samples_per_step))
        else:
            start = worker.loop.now
            yield from worker.block(worker.loop.env.all_of(arrived), f"the gradients of step {step}")
            worker.book(start, coordinator.last_ready(step), "all-reduce")
            yield from worker.optimizer_step()
            yield from _finish(worker, group, step, [], worker.samples_per_step)
        step += 1


def _forward(
    worker: Worker, buckets: tuple[Bucket, ...], arrived: list[simpy.Event], coordinator: Coordinator
) -> Process:
    """Compute the forward pass, each layer as soon as its parameters of the previous step are complete."""
    if not arrived:
        yield from worker.forward()
        return
    needed: dict[int, list[simpy.Event]] = {}
    for bucket, event in zip(buckets, arrived, strict=True):
        needed.setdefault(bucket.first_layer, []).append(event)
    done = 0
    forward = worker.workload.forward
    for layer in sorted(needed):
        yield from worker.compute(float(forward[done:layer].sum()), "forward")
        done = layer
        missing = [event for event in needed[layer] if not event.processed]
        if missing:
            start = worker.loop.now
            yield from worker.block(worker.loop.env.all_of(missing), f"the parameters of layer {layer}")
            worker.book(start, coordinator.latest_ready, "all-reduce")
    yield from worker.compute(float(forward[done:].sum()), "forward")
    yield from worker.optimizer_step()


def _finish(worker: Worker, group: Group, step: int, arrived: list[simpy.Event], n_samples: int) -> Process:
    if arrived:
        yield worker.loop.env.all_of(arrived)
    group.parameters(step, n_samples)
    worker.end_step()
    if group.finish_step(step):
        worker.stop.updated(n_samples * group.n_workers)
