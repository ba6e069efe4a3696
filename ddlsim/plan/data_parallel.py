"""Data parallelism as a step program: every rank computes all layers on its own batch, and gradients are summed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ddlsim.arguments import Count, checked
from ddlsim.errors import ConfigError
from ddlsim.plan import plan as ps
from ddlsim.plan.chunks import stored_nbytes
from ddlsim.plan.gathered_ahead import gathered_as
from ddlsim.plan.norms import Together, with_partial_norms
from ddlsim.plan.plan import Part, Plan
from ddlsim.plan.program import N_STEPS, Row, Step, StepProgram, step_of, template_of
from ddlsim.plan.queues import Queue
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
    each = each_rank(workloads, n_ranks)
    chosen = tuple(buckets(each[0]))
    parts = parts_of(each[0], chosen)
    if layer_by_layer:
        _check_layer_by_layer(parts, queue)

    def write(step: _Step, *, first: bool) -> None:
        if layer_by_layer:
            step.layer_by_layer(first=first)
        else:
            step.in_order(queued=queue is not None, no_sync=no_sync)

    make = lambda work: _template(work, chosen, accumulation, 1, write, queue)  # noqa: E731
    return StepProgram.replicated(each, make, accumulation)


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
    each = each_rank(workloads, n_ranks)
    chosen = tuple(buckets(each[0]))

    def write(step: _Step, *, first: bool) -> None:
        step.in_shards(first=first, overlap=overlap, no_sync=no_sync)

    def make(work: Workload) -> Plan:
        plan = gathered_as(_template(work, chosen, accumulation, len(each), write), each[0], param_dtype)
        return with_partial_norms(plan, [work], [Together((0,), len(work.tensor_layer), len(each))])

    return StepProgram.replicated(each, make, accumulation)


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
    each = list(workloads)
    if not each or n_ranks not in (None, len(each)):
        n_workloads = len(each)
        raise ConfigError(f"plan: got {n_workloads} workloads for n_ranks = {n_ranks!r}; pass one workload per rank")
    for rank, workload in enumerate(each):
        if not np.array_equal(workload.tensor_nbytes, each[0].tensor_nbytes):
            raise ConfigError(
                f"plan: the gradients of rank {rank} ({workload.model.name}) differ from those of rank 0 "
                f"({each[0].model.name}); all ranks need the same model and gradient_dtype"
            )
    return each


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


class _Step:
    """The rows of a step of one of the `sharers` ranks that share an update, with exchanges during backward passes.

    before  (row, index of the previous step's update, or of its all-gather, that it needs)
    """

    def __init__(self, work: Workload, buckets: Sequence[Bucket], accumulation: int, sharers: int) -> None:
        self.work, self.buckets, self.accumulation, self.sharers = work, buckets, accumulation, sharers
        self.parts, self.n_layers = parts_of(work, buckets), len(work.forward)
        self.rows, self.before = list[Row](), list[tuple[int, int]]()
        self._until = np.append(np.cumsum(work.backward[::-1])[::-1], 0.0)  # until each layer's gradient is complete
        self._stored = np.concatenate([[0.0], np.cumsum(stored_nbytes(work))])

    def _add(self, row: Row) -> int:
        self.rows.append(row)
        return len(self.rows) - 1

    def _forward(
        self, micro: int, first: int = 0, end: int | None = None, needs: Sequence[int] = (), before: Iterable[int] = ()
    ) -> None:
        end = self.n_layers if end is None else end
        seconds, held = float(self.work.forward[first:end].sum()), self._stored[end] - self._stored[first]
        at = self._add(Row(0, "compute", ps.FORWARD, seconds, 0.0, micro, first, end, holds=held, needs=[*needs]))
        self.before += [(at, nth) for nth in before]

    def _backward(self, micro: int, first: int = 0, end: int | None = None) -> int:
        end = self.n_layers if end is None else end
        seconds, held = self._until[first] - self._until[end], self._stored[end] - self._stored[first]
        if micro < self.accumulation - 1 and end - first == self.n_layers:  # summed as in a simulated worker
            seconds = self.work.backward_time
        return self._add(Row(0, "compute", ps.BACKWARD, seconds, 0.0, micro, first, end, holds=-held))

    def _exchange(self, kind: int, part: int, after: int, micro: int = -1) -> int:
        nbytes = self.buckets[part].nbytes
        return self._add(Row(0, "stream", kind, 0.0, nbytes, micro, part=part, group=0, needs=[after]))

    def _exchanged(self, micro: int, kind: int = ps.ALL_REDUCE, of: int = -1) -> list[int]:
        """Add a backward pass, during which each bucket is sent when it is ready; return the rows of its sums, which
        are those `of` a micro-batch, or of the rest of the step (-1)."""
        latest, layer = len(self.rows) - 1, self.n_layers  # the backward pass has reached `layer`
        sums = []
        for part, bucket in enumerate(self.buckets):
            if bucket.ready_layer > layer:
                raise ConfigError(
                    f"plan: bucket {part} is ready at layer {bucket.ready_layer}, but an earlier bucket is ready "
                    f"at layer {layer}; list buckets in the order in which they become ready"
                )
            if bucket.ready_layer < layer:
                latest, layer = self._backward(micro, bucket.ready_layer, layer), bucket.ready_layer
            sums.append(self._exchange(kind, part, latest, of))
        if layer > 0:
            self._backward(micro, 0, layer)
        return sums

    def _update(self, needs: list[int]) -> int:
        seconds = self.work.optimizer / self.sharers
        return self._add(Row(0, "compute", ps.UPDATE, seconds, end=self.n_layers, needs=[*needs]))

    def in_order(self, *, queued: bool, no_sync: bool) -> None:
        """Update all layers at the end, when the last bucket has arrived.

        If `queued`, any bucket can be the last. Without `no_sync`, buckets are summed during the backward pass of every
        micro-batch, and the next pass waits for them, as at the end of each backward pass of PyTorch's DDP.
        """
        waits: list[int] = []
        for micro in range(self.accumulation - 1):
            self._forward(micro, needs=waits)
            if no_sync:
                self._backward(micro)
            else:
                waits = self._exchanged(micro, of=micro)[-1:]
        self._forward(self.accumulation - 1, needs=waits)
        sums = self._exchanged(self.accumulation - 1)
        self._update(sums if queued else sums[-1:])

    def layer_by_layer(self, *, first: bool) -> None:
        """Update each layer as soon as its own gradients have arrived.

        The next forward pass proceeds as layers are updated; its rank then spends the optimizer's time in a single
        task. The `first` step waits for nothing.
        """
        updated, last = sorted({part.first for part in self.parts}), self.accumulation - 1
        for micro in range(last):
            self._forward(micro, before=() if first else range(len(updated)))
            self._backward(micro)
        if first:
            self._forward(last)
        else:
            if updated[0] > 0:
                self._forward(last, 0, updated[0])
            for nth, (layer, end) in enumerate(zip(updated, [*updated[1:], self.n_layers], strict=True)):
                self._forward(last, layer, end, before=(nth,))
            self._add(Row(0, "compute", ps.COMPUTE, self.work.optimizer / self.sharers))
        sums = self._exchanged(last)
        for layer in updated:
            needs = [row for row, part in zip(sums, self.parts, strict=True) if part.first == layer]
            self._add(Row(0, "stream", ps.UPDATE, first=layer, end=layer + 1, needs=needs))

    def in_shards(self, *, first: bool, overlap: bool, no_sync: bool) -> None:
        """Update shards and gather them, bucket by bucket, during the next forward pass if they `overlap`.

        Without `no_sync`, buckets are reduce-scattered after each micro-batch.
        """
        firsts = [part.first if overlap else 0 for part in self.parts]  # layers that need the buckets
        for micro in range(self.accumulation):
            begins = [0] if first or micro else sorted({0, *firsts})
            for layer, end in zip(begins, [*begins[1:], self.n_layers], strict=True):
                waits = [] if first or micro else [i for i, needed in enumerate(firsts[::-1]) if needed == layer]
                self._forward(micro, layer, end, before=waits)
            if micro < self.accumulation - 1 and no_sync:
                self._backward(micro)
            elif micro < self.accumulation - 1:
                self._exchanged(micro, ps.REDUCE_SCATTER, of=micro)
        update = self._update(self._exchanged(self.accumulation - 1, ps.REDUCE_SCATTER)[-1:])
        for part in reversed(range(len(self.buckets))):
            self._exchange(ps.ALL_GATHER, part, update)


def _template(
    work: Workload,
    buckets: Sequence[Bucket],
    accumulation: int,
    sharers: int,
    write: Callable[..., None],
    queue: Queue | None = None,
) -> Plan:
    """Return the template of one of the `sharers` ranks that share an update; `write` adds the rows of a step."""
    urgency = np.empty(len(buckets), dtype=np.int64)
    urgency[np.argsort([bucket.priority for bucket in buckets], kind="stable")] = np.arange(len(buckets))
    order = range(len(buckets)) if queue is None else urgency.tolist()
    lanes = {(0, "compute"): 0, (0, "stream"): 1}
    made, brings = list[Step](), list[int]()  # what the next step waits for
    for i in range(N_STEPS):
        step = _Step(work, buckets, accumulation, sharers)
        write(step, first=i == 0)
        rows = step.rows
        exchanges = [row for row in rows if row.part >= 0]  # in the order of their keys, sums of the rest come last
        exchanges.sort(key=lambda row: (row.micro if row.micro >= 0 else accumulation, row.kind, order[row.part]))
        for number, row in enumerate(exchanges):
            row.number = number
        for at, nth in step.before:
            rows[at].needs.append((brings[nth], 1))
        kind = ps.ALL_GATHER if any(row.kind == ps.ALL_GATHER for row in rows) else ps.UPDATE
        brings = [at for at, row in enumerate(rows) if row.kind == kind]
        made.append(step_of(rows, lanes))
    queues, parts = () if queue is None else (queue,), parts_of(work, buckets)
    return template_of(
        made, lanes, groups=[(0,)], parts=parts, n_layers=len(work.forward), queues=queues, queued="stream"
    )
