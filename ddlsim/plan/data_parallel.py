"""Data parallelism as a plan: every rank computes all layers on its own batch, buckets of gradients are summed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ddlsim.errors import ConfigError
from ddlsim.plan.plan import ALL_REDUCE, BACKWARD, FORWARD, UPDATE, Floats, Lane, Part, Plan
from ddlsim.plan.queues import Queue
from ddlsim.plan.templates import Row, in_order, pipelined
from ddlsim.workload.buckets import Bucket, ddp_buckets
from ddlsim.workload.compute import Workload
from ddlsim.workload.layer_times import ELEMENT_NBYTES

__all__ = ["data_parallel"]


def data_parallel(
    workloads: Workload | Sequence[Workload],
    n_ranks: int | None = None,
    buckets: Callable[[Workload], Sequence[Bucket]] = ddp_buckets,
    *,
    steps: int = 1,
    accumulation: int = 1,
    queue: Queue | None = None,
    layer_by_layer: bool = False,
) -> Plan:
    """Return the plan of synchronous data-parallel training, step by step and rank by rank.

    workloads       of each rank; or one for all, with ``n_ranks``
    buckets         which gradients travel together (:mod:`ddlsim.workload.buckets`): ``one_bucket`` after the backward
                    pass, ``per_layer`` (Zhang et al. 2017, Poseidon), ``ddp_buckets`` (Li et al. 2020, PyTorch DDP)
    steps           training steps
    accumulation    micro-batches of each rank in a step; gradients travel during the backward pass of the last
    queue           what decides which ready bucket travels next: ``UrgentQueue`` or ``FusedQueue``; None: they travel
                    in order
    layer_by_layer  each layer is updated when its own gradients have arrived, and the next forward pass goes on as far
                    as layers have been updated (Peng et al. 2019, ByteScheduler); buckets must be of one layer each.
                    Otherwise all layers are updated when all have arrived.

    A rank has the lanes "compute" and "stream". A bucket enters the stream when the backward pass has gone through its
    layers. In order, its all-reduce begins on a rank when the one before has ended there.
    Layers hold their activations from the forward pass to their backward pass (what each rank holds all the time,
    parameters, gradients and momentum, is not in the plan).

    Raises ConfigError for workloads of different models, and for buckets that leave gradients out or come too early.
    """
    each = _each_rank(workloads, n_ranks)
    for name, value in (("steps", steps), ("accumulation", accumulation)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"data_parallel: {name} = {value!r}: must be a whole number of at least 1")
    chosen = tuple(buckets(each[0]))
    parts = _parts(each[0], chosen)
    n_layers = len(each[0].forward)
    if layer_by_layer:
        _check_layer_by_layer(parts, queue)
        templates = [pipelined(chosen, parts, n_layers, accumulation, first=first) for first in (True, False)]
    else:
        templates = [in_order(chosen, n_layers, accumulation, queued=queue is not None)] * 2
    blocks = [_block(templates[0], each, 1, accumulation), _block(templates[1], each, steps - 1, accumulation)]
    columns: dict[str, Any] = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    columns["step"][len(blocks[0]["step"]) :] += 1
    bucket_of, step = columns["part"], columns["step"]
    urgency = np.empty(len(chosen), dtype=np.int64)
    urgency[np.argsort([bucket.priority for bucket in chosen], kind="stable")] = np.arange(len(chosen))
    order = np.arange(len(chosen)) if queue is None else urgency
    sizes = np.array([bucket.nbytes for bucket in chosen])
    place = -1 if queue is None else 0
    return Plan(
        lanes=tuple(lane for r in range(len(each)) for lane in (Lane(r, "compute"), Lane(r, "stream", place))),
        groups=(tuple(range(len(each))),), parts=parts, names=(), n_layers=n_layers,
        queues=() if queue is None else (queue,), name=np.full(len(step), -1),
        nbytes=np.where(bucket_of >= 0, sizes[bucket_of], 0.0), peer=np.where(bucket_of >= 0, 0, -1),
        key=np.where(bucket_of >= 0, step * len(chosen) + order[bucket_of], -1),
        **columns, **_needs(templates, len(each), steps),  # type: ignore[arg-type]  # columns only
    )  # fmt: skip


def _check_layer_by_layer(parts: Sequence[Part], queue: Queue | None) -> None:
    for i, part in enumerate(parts):
        if part.end > part.first + 1:
            raise ConfigError(
                f"data_parallel: layer_by_layer: bucket {i} is of layers {part.first} to {part.end - 1}; use buckets "
                "of one layer each, such as per_layer"
            )
    if queue is None:
        raise ConfigError("data_parallel: layer_by_layer needs a queue, such as UrgentQueue(in_flight=4)")


def _each_rank(workloads: Workload | Sequence[Workload], n_ranks: int | None) -> list[Workload]:
    if isinstance(workloads, Workload):
        if n_ranks is None or isinstance(n_ranks, bool) or not isinstance(n_ranks, int) or n_ranks < 1:
            raise ConfigError(f"data_parallel: n_ranks = {n_ranks!r}: must be a whole number of at least 1")
        return [workloads] * n_ranks
    each = list(workloads)
    if not each or n_ranks not in (None, len(each)):
        raise ConfigError(f"data_parallel: {len(each)} workloads for n_ranks = {n_ranks!r}; give one for each rank")
    for rank, workload in enumerate(each):
        if not np.array_equal(workload.tensor_nbytes, each[0].tensor_nbytes):
            raise ConfigError(
                f"data_parallel: the gradients of rank {rank} ({workload.model.name}) are not those of rank 0 "
                f"({each[0].model.name}); give all ranks the same model and gradient_dtype"
            )
    return each


def _parts(workload: Workload, buckets: Sequence[Bucket]) -> tuple[Part, ...]:
    """Return which layers' gradients each bucket has: buckets take the tensors in backward order."""
    sent, total = float(sum(bucket.nbytes for bucket in buckets)), workload.gradient_nbytes
    if not abs(sent - total) <= 1e-9 * total:
        raise ConfigError(f"data_parallel: the buckets carry {sent:.0f} of {total:.0f} bytes of gradients")
    ends = np.cumsum(workload.tensor_nbytes[::-1])
    starts = np.cumsum([0.0, *(bucket.nbytes for bucket in buckets[:-1])])
    tensor = np.minimum(np.searchsorted(ends, starts + 1e-9 * total, side="right"), len(ends) - 1)
    last = workload.tensor_layer[::-1][tensor].tolist()
    return tuple(
        Part(bucket.nbytes, bucket.first_layer, max(bucket.first_layer, layer) + 1)
        for bucket, layer in zip(buckets, last, strict=True)
    )


# ---------------------------------------------------------------- from one rank's step to all


def _block(rows: Sequence[Row], each: Sequence[Workload], steps: int, accumulation: int) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of `steps` steps of all ranks, numbered from 0, that do these rows."""
    n, per = len(each), len(rows)
    column = {name: np.tile(np.array([getattr(row, name) for row in rows], dtype=np.int64), n * steps)
              for name in ("kind", "stream", "micro", "first", "end", "part")}  # fmt: skip
    rank = np.tile(np.repeat(np.arange(n), per), steps)
    micro = column.pop("micro")
    different = {id(workload): workload for workload in each}
    seconds = {key: _seconds(workload, rows, accumulation) for key, workload in different.items()}
    holds = {key: _holds(workload, rows) for key, workload in different.items()}
    return {
        "lane": 2 * rank + column.pop("stream"),
        "step": np.repeat(np.arange(steps), n * per),
        "batch": np.where(micro >= 0, rank * accumulation + micro, -1),
        "seconds": np.tile(np.concatenate([seconds[id(workload)] for workload in each]), steps),
        "holds": np.tile(np.concatenate([holds[id(workload)] for workload in each]), steps),
        **column,
    }


def _needs(templates: Sequence[Sequence[Row]], n_ranks: int, steps: int) -> dict[str, npt.NDArray[Any]]:
    """Return the needs as a CSR, of a first step by ``templates[0]`` and further ones by ``templates[1]``."""
    counts, needs = [], []
    begin = 0  # of the step
    for step in range(steps):
        rows, before = templates[min(step, 1)], templates[min(max(step - 1, 0), 1)]
        updates = [i for i, row in enumerate(before) if row.kind == UPDATE]
        inside = [(i, need) for i, row in enumerate(rows) for need in row.needs]
        earlier = [(i, updates[nth]) for i, row in enumerate(rows) for nth in row.updates]
        row = np.array([i for i, _ in (*inside, *earlier)], dtype=np.int64)
        need = np.array([j for _, j in (*inside, *earlier)], dtype=np.int64)
        order = np.argsort(row, kind="stable")
        back = np.where(np.arange(len(row)) < len(inside), 0, 1)[order]  # steps
        ranks = np.arange(n_ranks)[:, None]
        here = begin + ranks * len(rows)
        there = begin - n_ranks * len(before) + ranks * len(before)
        needs.append((np.where(back == 0, here, there) + need[order]).ravel())
        counts.append(np.tile(np.bincount(row, minlength=len(rows)), n_ranks))
        begin += n_ranks * len(rows)
    return {"needs": np.concatenate(needs), "need_offsets": np.cumsum(np.concatenate([[0], *counts]))}


def _seconds(workload: Workload, rows: Sequence[Row], accumulation: int) -> Floats:
    """Return the seconds of each task of a rank's step, as a simulated worker adds them up."""
    until = np.append(np.cumsum(workload.backward[::-1])[::-1], 0.0)  # of the backward pass, until each layer is done
    n_layers = len(workload.forward)

    def seconds(row: Row) -> float:
        if row.kind == FORWARD:
            return float(workload.forward[row.first : row.end].sum())
        if row.kind == BACKWARD and row.micro < accumulation - 1 and row.end - row.first == n_layers:
            return workload.backward_time
        if row.kind == BACKWARD:
            return float(until[row.first] - until[row.end])
        # where layers are updated as they arrive, the optimizer's time comes in one piece of its own
        return 0.0 if row.kind == ALL_REDUCE or row.stream else workload.optimizer

    return np.array([seconds(row) for row in rows])


def _holds(workload: Workload, rows: Sequence[Row]) -> Floats:
    """Return the bytes of activations that each task of a rank's step takes or gives back."""
    sample = np.array([layer.stored_nbytes for layer in workload.model.layers])
    element = ELEMENT_NBYTES[workload.precision] / 4.0
    before = np.concatenate([[0.0], np.cumsum(np.round(sample * element * workload.batch_size))])
    sign = {FORWARD: 1.0, BACKWARD: -1.0}
    return np.array([sign.get(row.kind, 0.0) * (before[row.end] - before[row.first]) for row in rows])
