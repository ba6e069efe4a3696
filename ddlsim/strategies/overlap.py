"""When gradients travel: after the backward pass, bucket by bucket beside it, fused, or by priority.

Each class is one policy (:class:`Overlap`). A *bucket* is ready when
the backward pass has gone through its layers (:mod:`ddlsim.workload.buckets`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from ddlsim.arguments import Bytes, Count, Duration, by, checked
from ddlsim.errors import ConfigError, shown, unknown_name
from ddlsim.named_code import imported, names_code
from ddlsim.plan import FusedQueue, StepProgram, UrgentQueue, data_parallel
from ddlsim.runtime.setting import Setting
from ddlsim.strategies import contract
from ddlsim.units import si
from ddlsim.workload.buckets import Bucket, ddp_buckets, one_bucket, partitioned, per_layer
from ddlsim.workload.compute import Workload


class Overlap(Protocol):
    """When gradients travel; ``buckets`` is enough: workers exchange them in order, beside the backward pass.

    A policy that does otherwise returns a step program: ``program(workloads, accumulation)``, by
    :func:`ddlsim.plan.data_parallel` with a queue of its own, or with changed tasks.
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
class WhileWaiting:
    """The buckets of another policy, which go on only while workers wait for them: messages of a library that makes no
    progress by itself, as MPI without a thread of its own (Hoefler and Lumsdaine 2008, Message progression in parallel
    computing: to thread or not to thread?). So nothing travels beside the backward pass.

    overlap  "layer", "ddp" or DdpBuckets(...)
    """

    overlap: Literal["layer", "ddp"] | DdpBuckets = "layer"

    def buckets(self, workload: Workload) -> tuple[Bucket, ...]:
        buckets = overlap_named(self.overlap).buckets(workload)
        return tuple(dataclasses.replace(bucket, ready_layer=0) for bucket in buckets)


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

    def program(self, workloads: Sequence[Workload], accumulation: int = 1) -> StepProgram:
        """Return the step of workers with these workloads."""
        queue = FusedQueue(self.threshold, self.cycle_time)
        return data_parallel(workloads, None, self.buckets, accumulation=accumulation, queue=queue)


@checked
@dataclass(frozen=True)
class Priority:
    """Tensors cut in `partition` bytes, the most urgent (nearest the input) first, `in_flight` at a time; the
    next forward pass starts as its layers arrive (Jayarajan et al. 2019, P3; Peng et al. 2019, ByteScheduler)."""

    partition: Bytes = 4e6
    in_flight: Count = 4

    def buckets(self, workload: Workload) -> tuple[Bucket, ...]:
        return partitioned(workload, si(self.partition, "bytes"))

    def program(self, workloads: Sequence[Workload], accumulation: int = 1) -> StepProgram:
        """Return the step of workers with these workloads."""
        queue = UrgentQueue(self.in_flight)
        return data_parallel(workloads, None, self.buckets, accumulation=accumulation, queue=queue, layer_by_layer=True)


_NAMES: dict[str, Overlap] = {
    "none": NoOverlap(),
    "layer": PerLayer(),
    "ddp": DdpBuckets(),
    "horovod": HorovodFusion(),
    "priority": Priority(),
    "while-waiting": WhileWaiting(),
}


def overlap_named(overlap: str | Overlap, where: str = "overlap") -> Overlap:
    """Return the policy of a name ("none", "layer", "ddp", "horovod", "priority", "while-waiting", or
    "package.module:Name" of a class without arguments), or the policy itself. Raises ConfigError."""
    if names_code(overlap):
        policy = imported(str(overlap), where)
        return overlap_named(policy() if isinstance(policy, type) else policy, where)  # type: ignore[arg-type]
    if not isinstance(overlap, str):
        if isinstance(overlap, type) or not contract.of(overlap).defines("buckets"):
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


def program(overlap: Overlap, workloads: Sequence[Workload], accumulation: int, *, no_sync: bool = True) -> StepProgram:
    """Return the step of workers with these workloads: what a policy says, or its buckets in order.

    Raises ConfigError without `no_sync` for a policy with a program of its own.
    """
    policy = contract.of(overlap)
    if policy.defines("program"):
        if not no_sync:
            raise ConfigError(
                f"AllReduce: no_sync = False: {type(overlap).__name__} sums gradients once per step; use "
                "overlap='none', 'layer' or 'ddp'"
            )
        return policy.program(workloads, accumulation)
    return data_parallel(
        workloads, None, functools.partial(buckets_of, overlap), accumulation=accumulation, no_sync=no_sync
    )
