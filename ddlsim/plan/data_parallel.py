"""Data parallelism as a plan: every rank computes all layers on its own batch, buckets of gradients are summed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.plan.plan import ALL_REDUCE, BACKWARD, FORWARD, UPDATE, Floats, Ints, Lane, Part, Plan
from ddlsim.workload.buckets import Bucket, ddp_buckets
from ddlsim.workload.compute import Workload
from ddlsim.workload.layer_times import ELEMENT_NBYTES

__all__ = ["data_parallel"]


class _Row(NamedTuple):
    """A task of one rank in one step; `need` is a row of the same rank and step, -1 if none is needed.

    ``micro`` is the micro-batch within the step, ``stream`` whether the communication stream does it.
    """

    kind: int
    stream: bool = False
    micro: int = -1
    first: int = 0
    end: int = 0
    part: int = -1
    need: int = -1


def data_parallel(
    workloads: Workload | Sequence[Workload],
    n_ranks: int | None = None,
    buckets: Callable[[Workload], Sequence[Bucket]] = ddp_buckets,
    *,
    steps: int = 1,
    accumulation: int = 1,
) -> Plan:
    """Return the plan of synchronous data-parallel training, step by step and rank by rank.

    workloads     of each rank; or one for all, with ``n_ranks``
    buckets       which gradients travel together (:mod:`ddlsim.workload.buckets`): ``one_bucket`` after the backward
                  pass, ``per_layer`` (Zhang et al. 2017, Poseidon), ``ddp_buckets`` (Li et al. 2020, PyTorch DDP)
    steps         training steps
    accumulation  micro-batches of each rank in a step; gradients travel during the backward pass of the last

    A rank has the lanes "compute" and "stream". A bucket enters the stream when the backward pass has gone through its
    layers, and its all-reduce begins on a rank when the one before has ended there; the update follows the last.
    Layers hold their activations from the forward pass to their backward pass (what each rank holds all the time,
    parameters, gradients and momentum, is not in the plan).

    Raises ConfigError for workloads of different models, and for buckets that leave gradients out or come too early.
    """
    each = _each_rank(workloads, n_ranks)
    for name, value in (("steps", steps), ("accumulation", accumulation)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"data_parallel: {name} = {value!r}: must be a whole number of at least 1")
    chosen = tuple(buckets(each[0]))
    n_layers = len(each[0].forward)
    parts = _parts(each[0], chosen)
    rows = _rows_of_a_step(chosen, n_layers, accumulation)
    n, per = len(each), len(rows)

    def repeated(values: Sequence[int] | Ints) -> Ints:
        """Repeat a column of one rank's step (per,) for all ranks and steps."""
        return np.tile(np.asarray(values, dtype=np.int64), n * steps)

    rank = np.tile(np.repeat(np.arange(n), per), steps)
    step = np.repeat(np.arange(steps), n * per)
    kind, micro, part = (repeated([getattr(row, name) for row in rows]) for name in ("kind", "micro", "part"))
    need = repeated([row.need for row in rows])
    offsets = np.concatenate([[0], np.cumsum(need >= 0)])
    start_of_step = np.repeat(np.arange(n * steps) * per, per)
    different = {id(workload): workload for workload in each}
    seconds = {key: _seconds(workload, rows, accumulation) for key, workload in different.items()}
    holds = {key: _holds(workload, rows) for key, workload in different.items()}
    sizes = np.array([bucket.nbytes for bucket in chosen])
    return Plan(
        lanes=tuple(Lane(r, name) for r in range(n) for name in ("compute", "stream")),
        groups=(tuple(range(n)),), parts=parts, names=(), n_layers=n_layers,
        lane=2 * rank + repeated([row.stream for row in rows]), kind=kind, name=np.full(len(kind), -1),
        seconds=np.tile(np.concatenate([seconds[id(workload)] for workload in each]), steps),
        nbytes=np.where(part >= 0, sizes[part], 0.0), peer=np.where(part >= 0, 0, -1),
        key=np.where(part >= 0, step * len(chosen) + part, -1), step=step,
        batch=np.where(micro >= 0, rank * accumulation + micro, -1),
        first=repeated([row.first for row in rows]), end=repeated([row.end for row in rows]), part=part,
        holds=np.tile(np.concatenate([holds[id(workload)] for workload in each]), steps),
        need_offsets=offsets, needs=(start_of_step + need)[need >= 0],
    )  # fmt: skip


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


def _rows_of_a_step(buckets: Sequence[Bucket], n_layers: int, accumulation: int) -> list[_Row]:
    rows = []
    for micro in range(accumulation - 1):
        rows.append(_Row(FORWARD, micro=micro, end=n_layers))
        rows.append(_Row(BACKWARD, micro=micro, end=n_layers))
    micro = accumulation - 1
    rows.append(_Row(FORWARD, micro=micro, end=n_layers))
    latest, layer = len(rows) - 1, n_layers  # the backward pass has come down to `layer`
    for part, bucket in enumerate(buckets):
        if bucket.ready_layer > layer:
            raise ConfigError(
                f"data_parallel: bucket {part} is ready at layer {bucket.ready_layer}, those before it at layer "
                f"{layer}; list buckets as they become ready"
            )
        if bucket.ready_layer < layer:
            rows.append(_Row(BACKWARD, micro=micro, first=bucket.ready_layer, end=layer))
            latest, layer = len(rows) - 1, bucket.ready_layer
        rows.append(_Row(ALL_REDUCE, stream=True, part=part, need=latest))
    last = len(rows) - 1
    if layer > 0:
        rows.append(_Row(BACKWARD, micro=micro, end=layer))
    rows.append(_Row(UPDATE, end=n_layers, need=last))
    return rows


def _seconds(workload: Workload, rows: Sequence[_Row], accumulation: int) -> Floats:
    """Return the seconds of each task of a rank's step, as a simulated worker adds them up."""
    until = np.append(np.cumsum(workload.backward[::-1])[::-1], 0.0)  # of the backward pass, until each layer is done
    times = {FORWARD: workload.forward_time, UPDATE: workload.optimizer, ALL_REDUCE: 0.0}
    return np.array([
        times[row.kind] if row.kind in times else
        workload.backward_time if row.micro < accumulation - 1 else until[row.first] - until[row.end]
        for row in rows
    ])  # fmt: skip


def _holds(workload: Workload, rows: Sequence[_Row]) -> Floats:
    """Return the bytes of activations that each task of a rank's step takes or gives back."""
    sample = np.array([layer.stored_nbytes for layer in workload.model.layers])
    element = ELEMENT_NBYTES[workload.precision] / 4.0
    before = np.concatenate([[0.0], np.cumsum(np.round(sample * element * workload.batch_size))])
    sign = {FORWARD: 1.0, BACKWARD: -1.0}
    return np.array([sign.get(row.kind, 0.0) * (before[row.end] - before[row.first]) for row in rows])
