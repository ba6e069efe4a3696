"""What one rank does in a step, a few rows, repeated for all ranks and steps: a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ddlsim.errors import ConfigError
from ddlsim.plan.chunks import stored_nbytes
from ddlsim.plan.plan import ALL_GATHER, BACKWARD, FORWARD, KINDS, REDUCE_SCATTER, UPDATE, Floats, Lane, Part, Plan
from ddlsim.plan.queues import Queue
from ddlsim.plan.templates import Row
from ddlsim.workload.buckets import Bucket
from ddlsim.workload.compute import Workload


def repeated(
    templates: Sequence[Sequence[Row]], each: Sequence[Workload], buckets: Sequence[Bucket], steps: int,
    accumulation: int, queue: Queue | None = None,
) -> Plan:  # fmt: skip
    """Return the plan of ranks with these workloads that do the rows of ``templates[0]`` in the first step and those of
    ``templates[1]`` in further ones."""
    blocks = [_block(templates[0], each, 1, accumulation), _block(templates[1], each, steps - 1, accumulation)]
    columns = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    columns["step"][len(blocks[0]["step"]) :] += 1
    bucket_of, step, n = columns["part"], columns["step"], len(buckets)
    urgency = np.empty(n, dtype=np.int64)
    urgency[np.argsort([bucket.priority for bucket in buckets], kind="stable")] = np.arange(n)
    order = np.arange(n) if queue is None else urgency
    sizes = np.array([bucket.nbytes for bucket in buckets])
    place = -1 if queue is None else 0
    moved = np.flatnonzero(bucket_of >= 0)
    micro = np.where(columns["batch"] >= 0, columns["batch"] % accumulation, accumulation)[moved]  # the rest come last
    label = ((step[moved] * (accumulation + 1) + micro) * len(KINDS) + columns["kind"][moved]) * n
    key = np.full(len(step), -1)
    key[moved] = np.unique(label + order[bucket_of[moved]], return_inverse=True)[1].reshape(-1)
    return Plan(
        lanes=tuple(lane for r in range(len(each)) for lane in (Lane(r, "compute"), Lane(r, "stream", place))),
        groups=(tuple(range(len(each))),), parts=parts_of(each[0], buckets), names=(), n_layers=len(each[0].forward),
        queues=() if queue is None else (queue,), name=np.full(len(step), -1),
        nbytes=np.where(bucket_of >= 0, sizes[bucket_of], 0.0), peer=np.where(bucket_of >= 0, 0, -1), key=key,
        **columns, **_needs(templates, len(each), steps),  # type: ignore[arg-type]  # columns only
    )  # fmt: skip


def each_rank(
    workloads: Workload | Sequence[Workload], n_ranks: int | None, steps: int, accumulation: int
) -> list[Workload]:
    """Return the workload of every rank, after checking that they and the numbers of a builder make sense."""
    for name, value in (("steps", steps), ("accumulation", accumulation)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"plan: {name} = {value!r}: must be a whole number of at least 1")
    if isinstance(workloads, Workload):
        if n_ranks is None or isinstance(n_ranks, bool) or not isinstance(n_ranks, int) or n_ranks < 1:
            raise ConfigError(f"plan: n_ranks = {n_ranks!r}: must be a whole number of at least 1")
        return [workloads] * n_ranks
    each = list(workloads)
    if not each or n_ranks not in (None, len(each)):
        raise ConfigError(f"plan: {len(each)} workloads for n_ranks = {n_ranks!r}; give one for each rank")
    for rank, workload in enumerate(each):
        if not np.array_equal(workload.tensor_nbytes, each[0].tensor_nbytes):
            raise ConfigError(
                f"plan: the gradients of rank {rank} ({workload.model.name}) are not those of rank 0 "
                f"({each[0].model.name}); give all ranks the same model and gradient_dtype"
            )
    return each


def parts_of(workload: Workload, buckets: Sequence[Bucket]) -> tuple[Part, ...]:
    """Return which layers' gradients each bucket has: buckets take the tensors in backward order."""
    sent, total = float(sum(bucket.nbytes for bucket in buckets)), workload.gradient_nbytes
    if not abs(sent - total) <= 1e-9 * total:
        raise ConfigError(f"plan: the buckets carry {sent:.0f} of {total:.0f} bytes of gradients")
    ends = np.cumsum(workload.tensor_nbytes[::-1])
    starts = np.cumsum([0.0, *(bucket.nbytes for bucket in buckets[:-1])])
    tensor = np.minimum(np.searchsorted(ends, starts + 1e-9 * total, side="right"), len(ends) - 1)
    last = workload.tensor_layer[::-1][tensor].tolist()
    return tuple(
        Part(bucket.nbytes, bucket.first_layer, max(bucket.first_layer, layer) + 1)
        for bucket, layer in zip(buckets, last, strict=True)
    )


def _block(rows: Sequence[Row], each: Sequence[Workload], steps: int, accumulation: int) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of `steps` steps of all ranks, numbered from 0, that do these rows."""
    n, per = len(each), len(rows)
    column = {name: np.tile(np.array([getattr(row, name) for row in rows], dtype=np.int64), n * steps)
              for name in ("kind", "stream", "micro", "first", "end", "part")}  # fmt: skip
    rank = np.tile(np.repeat(np.arange(n), per), steps)
    micro = column.pop("micro")
    different = {id(workload): workload for workload in each}
    sharers = n if any(row.kind == REDUCE_SCATTER for row in rows) else 1
    seconds = {key: _seconds(workload, rows, accumulation, sharers) for key, workload in different.items()}
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
        kind = ALL_GATHER if any(row.kind == ALL_GATHER for row in before) else UPDATE
        whole = [i for i, row in enumerate(before) if row.kind == kind]
        inside = [(i, need) for i, row in enumerate(rows) for need in row.needs]
        earlier = [(i, whole[nth]) for i, row in enumerate(rows) for nth in row.updates]
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


def _seconds(workload: Workload, rows: Sequence[Row], accumulation: int, sharers: int) -> Floats:
    """Return the seconds of each task of a rank's step, as a simulated worker adds them up; so many share an update."""
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
        return 0.0 if row.stream else workload.optimizer / sharers

    return np.array([seconds(row) for row in rows])


def _holds(workload: Workload, rows: Sequence[Row]) -> Floats:
    """Return the bytes of activations that each task of a rank's step takes or gives back."""
    before = np.concatenate([[0.0], np.cumsum(stored_nbytes(workload))])
    sign = {FORWARD: 1.0, BACKWARD: -1.0}
    return np.array([sign.get(row.kind, 0.0) * (before[row.end] - before[row.first]) for row in rows])
