"""Data parallelism as a step program: every rank computes all layers on its own batch, and gradients are summed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ddlsim.arguments import Count, checked
from ddlsim.errors import ConfigError
from ddlsim.plan.draft import DraftedSteps, Needs
from ddlsim.plan.plan import Part, Plan
from ddlsim.plan.program import StepProgram
from ddlsim.plan.queues import Queue
from ddlsim.plan.transforms import Together, gathered_as, with_partial_norms
from ddlsim.workload.buckets import Bucket, ddp_buckets
from ddlsim.workload.compute import Workload


@checked
def data_parallel(
    workloads: Workload | Sequence[Workload],
    n_ranks: Count | None = None,
    buckets: Callable[[Workload], Sequence[Bucket]] = ddp_buckets,
    *,
    accumulation: Count = 1,
    queue: Queue | None = None,
    layer_by_layer: bool = False,
    no_sync: bool = True,
) -> StepProgram:
    """Return the step program for synchronous data-parallel training.

    workloads       workload of each rank, or a single workload for all `n_ranks` ranks
    n_ranks         number of ranks; required if `workloads` is a single workload
    buckets         function that groups gradients into buckets (:mod:`ddlsim.workload.buckets`): ``one_bucket`` (a
                    single bucket after the backward pass), ``per_layer`` (Zhang et al. 2017, Poseidon), or
                    ``ddp_buckets`` (Li et al. 2020, PyTorch DDP)
    accumulation    number of micro-batches per rank and step; gradients are sent during the backward pass of the last
                    micro-batch
    queue           queue that decides which ready bucket is sent next, ``PriorityQueue`` or ``FusedQueue``; None:
                    buckets are sent in order
    layer_by_layer  whether each layer is updated as soon as its own gradients have arrived, so that the next forward
                    pass can start before the gradients of later layers have arrived (Peng et al. 2019, ByteScheduler).
                    This requires a queue, and buckets that belong to a single layer. False: all layers are updated when
                    all gradients have arrived
    no_sync         whether gradients are accumulated locally. False: they are summed over the ranks after every
                    micro-batch

    A rank has the lanes "compute" and "stream". A bucket enters the stream when the backward pass has finished its
    layers. Without a queue, its all-reduce begins on a rank when the previous one has ended there. Layers hold their
    activations from the forward pass to their backward pass. The program does not include constant memory (parameters,
    gradients and momentum).

    Raises ConfigError for workloads of different models, and for buckets that omit gradients or come too early.
    """
    by_rank = each_rank(workloads, n_ranks)
    chosen = tuple(buckets(by_rank[0]))
    parts = parts_of(by_rank[0], chosen)
    if layer_by_layer:
        _check_layer_by_layer(parts, queue)

    write: Write = functools.partial(_Steps.in_order, queued=queue is not None, no_sync=no_sync)
    if layer_by_layer:
        write = _Steps.layer_by_layer
    make = lambda work: _template(work, chosen, accumulation, 1, write, queue)  # noqa: E731
    return StepProgram.replicated(by_rank, make, accumulation)


@checked
def sharded(
    workloads: Workload | Sequence[Workload],
    n_ranks: Count | None = None,
    buckets: Callable[[Workload], Sequence[Bucket]] = ddp_buckets,
    *,
    accumulation: Count = 1,
    overlap: bool = True,
    no_sync: bool = True,
    param_dtype: str | None = None,
) -> StepProgram:
    """Return the step program for data-parallel training with a sharded optimizer (ZeRO stage 1).

    Each rank updates its shard of every bucket (Rajbhandari et al. 2020, arXiv:1910.02054, section 5.1). The schedule
    follows Megatron-LM's distributed optimizer with ``overlap_grad_reduce`` and ``overlap_param_gather`` (Megatron
    Core, ``DistributedDataParallel``). Buckets are reduce-scattered during the (last) backward pass. When a rank has
    received all buckets, it updates its shards. The updated parameters are all-gathered bucket by bucket, starting with
    the layers nearest to the input. The next forward pass starts while later buckets are still in flight.

    overlap      whether the next forward pass overlaps the all-gathers. False: it starts when all parameters have
                 arrived
    no_sync      whether gradients are accumulated unsharded until the last micro-batch. False: the buckets of every
                 micro-batch are reduce-scattered during its backward pass, and ranks accumulate shards (stage 2)
    param_dtype  data type of the gathered weights, independent of that of the gradients; None: that of the computation
                 (DeepSpeed and Megatron cast their fp32 weights to 16 bits and gather these)

    The other arguments, lanes and errors are those of :func:`data_parallel`. An update takes 1 / n_ranks of the
    optimizer's time. If its rule needs norms of layers (LARS, LAMB), ranks first combine the norms of their shards.
    """
    by_rank = each_rank(workloads, n_ranks)
    chosen, write = tuple(buckets(by_rank[0])), functools.partial(_Steps.in_shards, overlap=overlap, no_sync=no_sync)

    def make(work: Workload) -> Plan:
        plan = gathered_as(_template(work, chosen, accumulation, len(by_rank), write), by_rank[0], param_dtype)
        return with_partial_norms(plan, [work], [Together((0,), len(work.tensor_layer), len(by_rank))])

    return StepProgram.replicated(by_rank, make, accumulation)


def _check_layer_by_layer(parts: Sequence[Part], queue: Queue | None) -> None:
    for i, part in enumerate(parts):
        if part.end > part.first + 1:
            raise ConfigError(
                f"data_parallel: layer_by_layer: bucket {i} covers the layers {part.first} to {part.end - 1}; "
                "use single-layer buckets, such as per_layer"
            )
    if queue is None:
        raise ConfigError("data_parallel: layer_by_layer needs a queue, such as PriorityQueue(in_flight=4)")


def each_rank(workloads: Workload | Sequence[Workload], n_ranks: int | None) -> list[Workload]:
    """Return the workload of every rank. Raises ConfigError for a wrong number of workloads, or different models."""
    if isinstance(workloads, Workload):
        if n_ranks is None:
            raise ConfigError("plan: n_ranks = None: must be a positive integer for a single workload")
        return [workloads] * n_ranks
    by_rank = list(workloads)
    if not by_rank or n_ranks not in (None, len(by_rank)):
        n_workloads = len(by_rank)
        raise ConfigError(f"plan: got {n_workloads} workloads for n_ranks = {n_ranks!r}; pass one workload per rank")
    for rank, workload in enumerate(by_rank):
        if not np.array_equal(workload.tensor_nbytes, by_rank[0].tensor_nbytes):
            raise ConfigError(
                f"plan: the gradients of rank {rank} ({workload.model.name}) differ from those of rank 0 "
                f"({by_rank[0].model.name}); all ranks need the same model and gradient_dtype"
            )
    return by_rank


def parts_of(workload: Workload, buckets: Sequence[Bucket]) -> tuple[Part, ...]:
    """Return the layers whose gradients each bucket contains; buckets take the tensors in backward order."""
    sent, total = float(sum(bucket.nbytes for bucket in buckets)), workload.gradient_nbytes
    if not abs(sent - total) <= 1e-9 * total:
        raise ConfigError(
            f"plan: the buckets contain {sent:.0f} of {total:.0f} bytes of gradients; they must contain "
            "every gradient once"
        )
    ends = np.cumsum(workload.tensor_nbytes[::-1])
    starts = np.cumsum([0.0, *(bucket.nbytes for bucket in buckets[:-1])])
    tensor = np.minimum(np.searchsorted(ends, starts + 1e-9 * total, side="right"), len(ends) - 1)
    last = workload.tensor_layer[::-1][tensor].tolist()
    return tuple(
        Part(bucket.nbytes, bucket.first_layer, max(bucket.first_layer, layer) + 1)
        for bucket, layer in zip(buckets, last, strict=True)
    )


class _Steps(DraftedSteps):
    """The steps of one of the `sharers` ranks that share an update, with exchanges during backward passes.

    brought  rows of the previous step for which passes wait: its all-gathers or, without any, its updates
    """

    def __init__(
        self, work: Workload, buckets: Sequence[Bucket], accumulation: int, sharers: int, write: Write
    ) -> None:
        super().__init__([work], buckets, parts_of(work, buckets), accumulation)
        self.write, self.brought, self.kind = write, list[int](), "all_reduce"
        self.optimizer = work.optimizer / sharers
        self._until = np.append(np.cumsum(work.backward[::-1])[::-1], 0.0)  # until each layer's gradient is complete
        layer = self.n_layers - 1
        for i, bucket in enumerate(buckets):
            if bucket.ready_layer > layer:
                raise ConfigError(
                    f"plan: bucket {i} is ready at layer {bucket.ready_layer}, but an earlier bucket is ready at layer "
                    f"{layer}; list buckets in the order in which they become ready"
                )
            layer = bucket.ready_layer

    def write_step(self) -> None:
        self.write(self)

    def seconds(self, kind: str, rank: int, first: int, end: int) -> float:
        """Return the seconds of a pass, rounded as in a worker that is a process."""
        if kind == "forward" or (not self.is_last and end - first == self.n_layers):
            return super().seconds(kind, rank, first, end)
        return float(self._until[first] - self._until[end])

    def _update(self) -> int:
        layers = 0, self.n_layers
        return self.draft.work(0, self.optimizer, kind="update", layers=layers, step=self.now, needs=self.sums[0])

    def reduce(
        self, group: Sequence[int], nbytes: float, done: Needs, name: str = "", *, part: int = -1, lane: str = "stream"
    ) -> None:
        of = -1 if self.is_last else self.micro  # of the rest of the step, or of a micro-batch
        self.exchange(self.kind, group, nbytes, done, self.sums, name, lane, part, of)

    def _forward(self, micro: int, first: int, end: int, needs: Iterable[int] = ()) -> None:
        self.micro = micro
        self.add_pass("forward", 0, first, end, needs)

    def _backward(self, *, sends: bool) -> list[int]:
        """Add a backward pass; if it `sends`, each bucket is sent when it is ready. Return the rows of the sums."""
        self.sums = self.nothing()
        if sends:
            self.add_backward(0, self.n_layers, self.nothing())
        else:
            self.add_pass("backward", 0, 0, self.n_layers)
        return self.sums[0]

    def in_order(self, *, queued: bool, no_sync: bool) -> None:
        """Update all layers at the end, when the last bucket has arrived.

        If `queued`, any bucket can be the last. Without `no_sync`, buckets are summed during the backward pass of every
        micro-batch, and the next pass waits for them, as at the end of each backward pass of PyTorch's DDP.
        """
        sums: list[int] = []
        for micro in range(self.n_batches):
            self._forward(micro, 0, self.n_layers, sums[-1:])
            sums = self._backward(sends=not no_sync or self.is_last)
        self.sums = [sums if queued else sums[-1:]]
        self._update()

    def layer_by_layer(self) -> None:
        """Update each layer as soon as its own gradients have arrived.

        The next forward pass proceeds as layers are updated; its rank then spends the optimizer's time in a single
        task. The first step waits for nothing.
        """
        parts, before = self.draft.parts, self.brought
        updated = sorted({part.first for part in parts})
        last = self.n_batches - 1
        for micro in range(last):
            self._forward(micro, 0, self.n_layers, before)
            self._backward(sends=False)
        if not before:
            self._forward(last, 0, self.n_layers)
        else:
            if updated[0] > 0:
                self._forward(last, 0, updated[0])
            for row, layer, end in zip(before, updated, [*updated[1:], self.n_layers], strict=True):
                self._forward(last, layer, end, [row])
            self.draft.work(0, self.optimizer, step=self.now)
        sums = self._backward(sends=True)
        self.brought = []
        for layer in updated:
            needs = [row for row, part in zip(sums, parts, strict=True) if part.first == layer]
            layers = layer, layer + 1
            self.brought.append(
                self.draft.work(0, 0.0, kind="update", lane="stream", step=self.now, layers=layers, needs=needs)
            )

    def in_shards(self, *, overlap: bool, no_sync: bool) -> None:
        """Update shards and gather them, bucket by bucket, during the next forward pass if they `overlap`.

        Without `no_sync`, buckets are reduce-scattered after each micro-batch.
        """
        firsts = [part.first if overlap else 0 for part in reversed(self.draft.parts)]  # layers that need the buckets
        self.kind, before = "reduce_scatter", self.brought
        for micro in range(self.n_batches):
            begins = sorted({0, *firsts}) if before else [0]
            for layer, end in zip(begins, [*begins[1:], self.n_layers], strict=True):
                waits = zip(before, firsts, strict=True) if before else ()
                self._forward(micro, layer, end, [row for row, needed in waits if needed == layer])
            before = []
            sums = self._backward(sends=not no_sync or self.is_last)
        self.sums, gathers = [sums[-1:]], self.nothing()
        update = self._update()
        for part, bucket in reversed(list(enumerate(self.buckets))):
            self.exchange("all_gather", (0,), bucket.nbytes, [[update]], gathers, "", "stream", part)
        (self.brought,) = gathers


#: adds the rows of a step
Write = Callable[[_Steps], None]


def _template(
    work: Workload, buckets: Sequence[Bucket], accumulation: int, sharers: int, write: Write, queue: Queue | None = None
) -> Plan:
    """Return the template of one of the `sharers` ranks that share an update."""
    plan = _Steps(work, buckets, accumulation, sharers, write).plan()
    if queue is not None:
        lanes = (lane._replace(queue=0 if lane.name == "stream" else -1) for lane in plan.lanes)
        plan = dataclasses.replace(plan, lanes=tuple(lanes), queues=(queue,))
    # keys in the order of urgency, those of the rest of the step last
    urgency = np.arange(len(buckets))
    if queue is not None:
        urgency[np.argsort([bucket.priority for bucket in buckets], kind="stable")] = np.arange(len(buckets))
    rows, key = plan.collectives, plan.key.copy()
    micro = np.where(plan.batch[rows] < 0, accumulation, plan.batch[rows])
    key[rows[np.lexsort((urgency[plan.part[rows]], plan.kind[rows], micro, plan.step[rows]))]] = np.arange(len(rows))
    return plan.with_columns(key=key)
