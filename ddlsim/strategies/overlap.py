"""Overlap policies: gradients are sent after the backward pass, bucket by bucket during it, fused, or by priority.

Each class is one policy (:class:`Overlap`). A *bucket* is ready when the backward pass has computed the gradients of
its layers (:mod:`ddlsim.workload.buckets`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from ddlsim.arguments import Bytes, Count, Duration, checked, validated_by
from ddlsim.errors import ConfigError, shown, unknown_name
from ddlsim.named_code import imported, names_code
from ddlsim.plan import FusedQueue, PriorityQueue, StepProgram, data_parallel
from ddlsim.runtime.context import RunContext
from ddlsim.strategies import contract
from ddlsim.units import si
from ddlsim.workload.buckets import Bucket, ddp_buckets, one_bucket, partitioned, per_layer
from ddlsim.workload.compute import Workload


class Overlap(Protocol):
    """Policy for when gradients are sent: a frozen dataclass with a method ``buckets``.

    With this method alone, workers exchange the buckets in order during the backward pass. Any other policy also
    defines ``program(workloads, accumulation)``, which returns a step program, for example by
    :func:`ddlsim.plan.data_parallel` with a custom queue or with changed tasks.
    """

    def buckets(self, workload: Workload) -> tuple[Bucket, ...]:
        """Return the buckets, in the order in which they are ready: every gradient byte in exactly one bucket."""

    def __hash__(self) -> int: ...


@checked
@dataclass(frozen=True)
class NoOverlap:
    """Overlap policy that exchanges all gradients together after the backward pass."""

    def buckets(self, workload: Workload) -> tuple[Bucket, ...]:
        return one_bucket(workload)


@checked
@dataclass(frozen=True)
class PerLayer:
    """Overlap policy that sends the gradients of each layer as soon as they are ready.

    This policy is known as wait-free backpropagation (Zhang et al. 2017, Poseidon, section 3.1).
    """

    def buckets(self, workload: Workload) -> tuple[Bucket, ...]:
        return per_layer(workload)


@checked
@dataclass(frozen=True)
class DdpBuckets:
    """Overlap policy of PyTorch DistributedDataParallel: buckets are exchanged in order during the backward pass.

    See Li et al. 2020, VLDB 13(12), section 3.2. Tensors are added to a bucket until it reaches its minimum size.

    cap    minimum size of a bucket, in bytes or as a string such as "25 MiB"
    first  minimum size of the first bucket, in bytes or as a string such as "1 MiB"
    """

    cap: Bytes = 25 * 2**20
    first: Bytes = 2**20

    def buckets(self, workload: Workload) -> tuple[Bucket, ...]:
        return ddp_buckets(workload, si(self.cap, "bytes"), si(self.first, "bytes"))


@checked
@dataclass(frozen=True)
class WhileWaiting:
    """Overlap policy for communication libraries without asynchronous progress, such as MPI without a progress thread.

    Messages progress only while workers wait for them, so nothing overlaps the backward pass (Hoefler and Lumsdaine
    2008, "Message progression in parallel computing: to thread or not to thread?").

    overlap  policy whose buckets are used: "layer", "ddp" or DdpBuckets(...). All buckets are sent after the backward
             pass
    """

    overlap: Literal["layer", "ddp"] | DdpBuckets = "layer"

    def buckets(self, workload: Workload) -> tuple[Bucket, ...]:
        buckets = overlap_named(self.overlap).buckets(workload)
        return tuple(dataclasses.replace(bucket, ready_layer=0) for bucket in buckets)


@checked
@dataclass(frozen=True)
class HorovodFusion:
    """Overlap policy of Horovod: tensors that are ready on all workers are fused into buffers.

    In every cycle, the coordinator fuses the ready tensors into buffers, which are reduced one at a time (Sergeev and
    Del Balso 2018, arXiv:1802.05799, section 4). The defaults are Horovod's.

    threshold   maximum size of a buffer, in bytes or as a string such as "128 MiB" (HOROVOD_FUSION_THRESHOLD)
    cycle_time  time between two cycles, in seconds or as a string such as "1 ms" (HOROVOD_CYCLE_TIME)
    """

    threshold: Bytes = 128 * 2**20
    cycle_time: Duration = 1e-3

    def buckets(self, workload: Workload) -> tuple[Bucket, ...]:
        return per_layer(workload)

    def program(self, workloads: Sequence[Workload], accumulation: int = 1) -> StepProgram:
        """Return the step program for these workloads."""
        queue = FusedQueue(self.threshold, self.cycle_time)
        return data_parallel(workloads, None, self.buckets, accumulation=accumulation, queue=queue)


@checked
@dataclass(frozen=True)
class Priority:
    """Overlap policy that splits tensors into pieces and sends the pieces of the first layers first.

    The next forward pass can therefore start before the gradients of the last layers have arrived (Jayarajan et al.
    2019, P3; Peng et al. 2019, ByteScheduler).

    partition  maximum size of a piece, in bytes or as a string such as "4 MB"
    in_flight  maximum number of pieces in flight
    """

    partition: Bytes = 4e6
    in_flight: Count = 4

    def buckets(self, workload: Workload) -> tuple[Bucket, ...]:
        return partitioned(workload, si(self.partition, "bytes"))

    def program(self, workloads: Sequence[Workload], accumulation: int = 1) -> StepProgram:
        """Return the step program for these workloads."""
        queue = PriorityQueue(self.in_flight)
        return data_parallel(workloads, None, self.buckets, accumulation=accumulation, queue=queue, layer_by_layer=True)


NAMED: dict[str, Overlap] = {
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
                f"{where} = {shown(overlap)}: must be one of {', '.join(NAMED)}, or a policy such as "
                "DdpBuckets('25 MiB'): a frozen dataclass with a method buckets(workload)"
            )
        if type(overlap).__hash__ is None:
            raise ConfigError(f"{where} = {shown(overlap)}: must be immutable; make its class @dataclass(frozen=True)")
        return overlap
    if overlap not in NAMED:
        raise unknown_name("overlap", overlap, NAMED, where.partition(":")[0])
    return NAMED[overlap]


def _choice(overlap: str | Overlap, where: str) -> str | Overlap:
    overlap_named(overlap, where)
    return overlap


def in_order(*more: type[Overlap]) -> Callable[[str | Overlap, str], str | Overlap]:
    """Return a rule for overlaps whose buckets are sent in order, and for `more` classes of policies."""
    names = ["'none'", "'layer'", "'ddp'", "DdpBuckets(...)", *(f"{kind.__name__}()" for kind in more)]

    def rule(overlap: str | Overlap, where: str) -> str | Overlap:
        if not isinstance(overlap_named(overlap, where), (NoOverlap, PerLayer, DdpBuckets, *more)):
            raise ConfigError(f"{where} = {overlap!r}: must be {', '.join(names[:-1])} or {names[-1]}")
        return overlap

    return rule


OverlapChoice = Annotated[str | Overlap, validated_by(_choice)]
InOrder = NoOverlap | PerLayer | DdpBuckets
InOrderChoice = Annotated[str | InOrder, validated_by(in_order())]


def as_compressed(overlap: Overlap, context: RunContext) -> Overlap:
    """Return the policy for compressed gradients: "none" if the compressor needs the whole gradient."""
    choice = context.compression
    if choice is None or not choice.compressor.traits.whole or isinstance(overlap, NoOverlap):
        return overlap
    context.notes.append(
        f"compression: {choice.label} needs the whole gradient, so no communication overlaps the backward pass"
    )
    return NoOverlap()


@functools.lru_cache(maxsize=16)
def buckets_of(overlap: Overlap, workload: Workload) -> tuple[Bucket, ...]:
    """Return the buckets of a workload, computed once for all workers that share it.

    Raises ConfigError for invalid buckets, and unless they contain every gradient byte once, in the order of readiness.
    """
    buckets, owner = tuple(overlap.buckets(workload)), f"{type(overlap).__name__}.buckets"
    if not buckets or not all(isinstance(bucket, Bucket) for bucket in buckets):
        raise ConfigError(f"{owner} returned {shown(buckets)}; it must return at least one ddlsim.runtime.Bucket")
    total, gradients = sum(bucket.nbytes for bucket in buckets), workload.gradient_nbytes
    if not math.isclose(total, gradients, rel_tol=1e-9):
        raise ConfigError(
            f"{owner}: the buckets hold {total:.10g} bytes, but the gradients have {gradients:.10g}; put every "
            "gradient into exactly one bucket"
        )
    for earlier, later in itertools.pairwise(buckets):
        if later.ready_layer > earlier.ready_layer:
            raise ConfigError(
                f"{owner}: the bucket of layer {later.ready_layer} follows that of layer {earlier.ready_layer}, but "
                "the backward pass runs from the last layer to the first; return buckets in the order in which they "
                "become ready"
            )
    return buckets
