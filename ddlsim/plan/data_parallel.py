"""Data parallelism as a step program: every rank computes all layers on its own batch, and gradients are summed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.plan.chunks import stored_nbytes
from ddlsim.plan.gathered_ahead import gathered_as
from ddlsim.plan.norms import Together, with_partial_norms
from ddlsim.plan.plan import (
    ALL_GATHER,
    ALL_REDUCE,
    BACKWARD,
    COMPUTE,
    FORWARD,
    REDUCE_SCATTER,
    UPDATE,
    Floats,
    Part,
    Plan,
)
from ddlsim.plan.program import N_STEPS, Row, StepProgram, step_of, template_of
from ddlsim.plan.queues import Queue
from ddlsim.workload.buckets import Bucket, ddp_buckets
from ddlsim.workload.compute import Workload


def data_parallel(
    workloads: Workload | Sequence[Workload],
    n_ranks: int | None = None,
    buckets: Callable[[Workload], Sequence[Bucket]] = ddp_buckets,
    *,
    accumulation: int = 1,
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
    each = each_rank(workloads, n_ranks, accumulation)
    chosen = tuple(buckets(each[0]))
    parts = parts_of(each[0], chosen)
    n_layers = len(each[0].forward)
    if layer_by_layer:
        _check_layer_by_layer(parts, queue)
        steps = [pipelined(chosen, parts, n_layers, accumulation, first=first) for first in (True, False, False)]
    else:
        queued = queue is not None
        steps = [in_order(chosen, n_layers, accumulation, queued=queued, no_sync=no_sync) for _ in range(N_STEPS)]
    make = lambda work: _template(steps, work, chosen, accumulation, 1, queue)  # noqa: E731
    return StepProgram.replicated(each, make, accumulation)


def sharded(
    workloads: Workload | Sequence[Workload],
    n_ranks: int | None = None,
    buckets: Callable[[Workload], Sequence[Bucket]] = ddp_buckets,
    *,
    accumulation: int = 1,
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
    each = each_rank(workloads, n_ranks, accumulation)
    chosen = tuple(buckets(each[0]))
    firsts = [part.first if overlap else 0 for part in parts_of(each[0], chosen)]
    n_layers = len(each[0].forward)
    steps = [
        in_shards(chosen, firsts, n_layers, accumulation, first=first, no_sync=no_sync)
        for first in (True, False, False)
    ]

    def make(work: Workload) -> Plan:
        plan = gathered_as(_template(steps, work, chosen, accumulation, len(each)), each[0], param_dtype)
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


def each_rank(workloads: Workload | Sequence[Workload], n_ranks: int | None, accumulation: int = 1) -> list[Workload]:
    """Return the workload of every rank, after checking the arguments of a builder."""
    if isinstance(accumulation, bool) or not isinstance(accumulation, int) or accumulation < 1:
        raise ConfigError(f"plan: accumulation = {accumulation!r}: must be a positive integer")
    if isinstance(workloads, Workload):
        if n_ranks is None or isinstance(n_ranks, bool) or not isinstance(n_ranks, int) or n_ranks < 1:
            raise ConfigError(f"plan: n_ranks = {n_ranks!r}: must be a positive integer")
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


def _row(
    kind: int, *, stream: bool = False, micro: int = -1, first: int = 0, end: int = 0, part: int = -1,
    needs: Sequence[int] = (), before: Sequence[int] = (),
) -> Row:  # fmt: skip
    """Return a row of the rank's device or of its communication stream.

    `before` are indices of the previous step's updates, or of its all-gathers, until :func:`_template` replaces them by
    rows.
    """
    lane = "stream" if stream else "compute"
    return Row(0, lane, kind, micro=micro, first=first, end=end, part=part, needs=[*needs], before=[*before])


def _template(
    steps: Sequence[Sequence[Row]],
    workload: Workload,
    buckets: Sequence[Bucket],
    accumulation: int,
    sharers: int,
    queue: Queue | None = None,
) -> Plan:
    """Return the template of one of the `sharers` ranks that share an update."""
    urgency = np.empty(len(buckets), dtype=np.int64)
    urgency[np.argsort([bucket.priority for bucket in buckets], kind="stable")] = np.arange(len(buckets))
    order = range(len(buckets)) if queue is None else urgency.tolist()
    lanes = {(0, "compute"): 0, (0, "stream"): 1}
    made = []
    for i, rows in enumerate(steps):
        previous = steps[max(i - 1, 0)]
        kind = ALL_GATHER if any(row.kind == ALL_GATHER for row in previous) else UPDATE
        brings = [at for at, row in enumerate(previous) if row.kind == kind]
        labels = [  # exchanges in the order of their keys; sums of the rest of a step come last
            (row.micro if row.micro >= 0 else accumulation, row.kind, order[row.part]) for row in rows if row.part >= 0
        ]
        number = {label: at for at, label in enumerate(sorted(labels))}
        exchanges = iter(labels)
        done = [
            dataclasses.replace(
                row,
                before=[brings[nth] for nth in row.before if isinstance(nth, int)] if i else [],
                number=number[next(exchanges)] if row.part >= 0 else -1,
                group=0 if row.part >= 0 else -1,
                nbytes=buckets[row.part].nbytes if row.part >= 0 else 0.0,
            )
            for row in rows
        ]
        step = step_of(done, lanes)
        step.columns["seconds"] = _seconds(workload, rows, accumulation, sharers)
        step.columns["holds"] = _holds(workload, rows)
        made.append(step)
    return template_of(
        made,
        lanes,
        groups=[(0,)],
        parts=parts_of(workload, buckets),
        n_layers=len(workload.forward),
        queues=() if queue is None else (queue,),
        queued="stream",
    )


def in_order(
    buckets: Sequence[Bucket], n_layers: int, accumulation: int, *, queued: bool, no_sync: bool = True
) -> list[Row]:
    """Return the rows of a step that updates all layers at its end, when its last bucket has arrived.

    If `queued`, any bucket can be the last. Without `no_sync`, buckets are summed during the backward pass of every
    micro-batch, and the next pass waits for them, as at the end of each backward pass of PyTorch's DDP.
    """
    rows: list[Row] = []
    waits: tuple[int, ...] = ()
    for micro in range(accumulation - 1):
        rows.append(_row(FORWARD, micro=micro, end=n_layers, needs=waits))
        if no_sync:
            rows.append(_row(BACKWARD, micro=micro, end=n_layers))
        else:
            waits = (_backward(rows, buckets, n_layers, micro, of=micro)[-1],)
    rows.append(_row(FORWARD, micro=accumulation - 1, end=n_layers, needs=waits))
    sums = _backward(rows, buckets, n_layers, accumulation - 1)
    rows.append(_row(UPDATE, end=n_layers, needs=tuple(sums) if queued else (sums[-1],)))
    return rows


def pipelined(
    buckets: Sequence[Bucket], parts: Sequence[Part], n_layers: int, accumulation: int, *, first: bool
) -> list[Row]:
    """Return the rows of a step in which each layer is updated as soon as its own gradients have arrived.

    The next forward pass proceeds as layers are updated; its rank then spends the optimizer's time. The `first` step
    waits for nothing.
    """
    updated = sorted({part.first for part in parts})
    everything = () if first else tuple(range(len(updated)))
    rows: list[Row] = []
    for micro in range(accumulation - 1):
        rows += [_row(FORWARD, micro=micro, end=n_layers, before=everything), _row(BACKWARD, micro=micro, end=n_layers)]
    last = accumulation - 1
    if first:
        rows.append(_row(FORWARD, micro=last, end=n_layers))
    else:
        if updated[0] > 0:
            rows.append(_row(FORWARD, micro=last, end=updated[0]))
        for nth, (layer, end) in enumerate(zip(updated, [*updated[1:], n_layers], strict=True)):
            rows.append(_row(FORWARD, micro=last, first=layer, end=end, before=(nth,)))
        rows.append(_row(COMPUTE))
    sums = _backward(rows, buckets, n_layers, last)
    for layer in updated:
        needs = tuple(row for row, part in zip(sums, parts, strict=True) if part.first == layer)
        rows.append(_row(UPDATE, stream=True, first=layer, end=layer + 1, needs=needs))
    return rows


def in_shards(
    buckets: Sequence[Bucket], firsts: Sequence[int], n_layers: int, accumulation: int, *, first: bool, no_sync: bool
) -> list[Row]:
    """Return the rows of a step that updates shards and gathers them, bucket by bucket, during the next forward pass.

    The forward pass needs a bucket from layer ``firsts[bucket]`` on. Without `no_sync`, buckets are reduce-scattered
    after each micro-batch.
    """
    rows: list[Row] = []
    for micro in range(accumulation):
        begins = [0] if first or micro else sorted({0, *firsts})
        for layer, end in zip(begins, [*begins[1:], n_layers], strict=True):
            waits = () if first or micro else [i for i, needed in enumerate(firsts[::-1]) if needed == layer]
            rows.append(_row(FORWARD, micro=micro, first=layer, end=end, before=tuple(waits)))
        if micro < accumulation - 1 and no_sync:
            rows.append(_row(BACKWARD, micro=micro, end=n_layers))
        elif micro < accumulation - 1:
            _backward(rows, buckets, n_layers, micro, kind=REDUCE_SCATTER, of=micro)
    sums = _backward(rows, buckets, n_layers, accumulation - 1, kind=REDUCE_SCATTER)
    rows.append(_row(UPDATE, end=n_layers, needs=(sums[-1],)))
    update = len(rows) - 1
    rows += [_row(ALL_GATHER, stream=True, part=part, needs=(update,)) for part in reversed(range(len(buckets)))]
    return rows


def _backward(
    rows: list[Row], buckets: Sequence[Bucket], n_layers: int, micro: int, kind: int = ALL_REDUCE, of: int = -1
) -> list[int]:
    """Append a backward pass, during which each bucket is sent when it is ready; return the rows of its sums, which are
    those `of` a micro-batch, or of the rest of the step (-1)."""
    latest, layer = len(rows) - 1, n_layers  # the backward pass has reached `layer`
    sums = []
    for part, bucket in enumerate(buckets):
        if bucket.ready_layer > layer:
            raise ConfigError(
                f"plan: bucket {part} is ready at layer {bucket.ready_layer}, but an earlier bucket is ready "
                f"at layer {layer}; list buckets in the order in which they become ready"
            )
        if bucket.ready_layer < layer:
            rows.append(_row(BACKWARD, micro=micro, first=bucket.ready_layer, end=layer))
            latest, layer = len(rows) - 1, bucket.ready_layer
        sums.append(len(rows))
        rows.append(_row(kind, stream=True, micro=of, part=part, needs=(latest,)))
    if layer > 0:
        rows.append(_row(BACKWARD, micro=micro, end=layer))
    return sums


def _seconds(workload: Workload, rows: Sequence[Row], accumulation: int, sharers: int) -> Floats:
    """Return the seconds of each task of a rank's step, summed in the same order as in a simulated worker."""
    until = np.append(np.cumsum(workload.backward[::-1])[::-1], 0.0)  # until each layer's gradient is complete
    n_layers = len(workload.forward)

    def seconds(row: Row) -> float:
        if row.kind == FORWARD:
            return float(workload.forward[row.first : row.end].sum())
        if row.kind == BACKWARD and row.micro < accumulation - 1 and row.end - row.first == n_layers:
            return workload.backward_time
        if row.kind == BACKWARD:
            return float(until[row.first] - until[row.end])
        # if layers are updated one by one, the optimizer's time is a single task
        return 0.0 if row.lane == "stream" else workload.optimizer / sharers

    return np.array([seconds(row) for row in rows])


def _holds(workload: Workload, rows: Sequence[Row]) -> Floats:
    """Return the bytes of activations that each task of a rank's step allocates or frees."""
    before = np.concatenate([[0.0], np.cumsum(stored_nbytes(workload))])
    sign = {FORWARD: 1.0, BACKWARD: -1.0}
    return np.array([sign.get(row.kind, 0.0) * (before[row.end] - before[row.first]) for row in rows])
