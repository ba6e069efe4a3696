"""Models split over the ranks of a pipeline, as plans: chunks of layers, micro-batches, messages between stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Count, checked
from ddlsim.errors import ConfigError
from ddlsim.plan.asynchronous_pipeline import asynchronous_pipeline
from ddlsim.plan.chunks import Chunk
from ddlsim.plan.mesh import Mesh
from ddlsim.plan.pipeline_blocks import Step, step_of
from ddlsim.plan.pipeline_orders import ASYNCHRONOUS, pass_order
from ddlsim.plan.pipeline_rows import groups_of
from ddlsim.plan.pipeline_template import RECOMPUTE
from ddlsim.plan.plan import COMPUTE, Lane, Plan
from ddlsim.workload.buckets import Bucket, one_bucket
from ddlsim.workload.compute import Workload


@checked
def pipeline(
    chunks: Sequence[Chunk],
    mesh: Mesh,
    micro_batches: Count,
    order: str | Sequence[Sequence[tuple[str, int, int]]] = "1f1b",
    *,
    steps: Count = 1,
    recompute: bool = False,
    buckets: Callable[[Workload], Sequence[Bucket]] = one_bucket,
    sharded: bool = False,
    p2p: Literal["overlapped", "exchange", "in turns"] = "overlapped",
) -> Plan:
    """Return the plan of a model that is split over the pipeline axis of a mesh, in replicas along its data axis.

    chunks         of the model, in forward order, as :func:`ddlsim.plan.balanced` or :func:`ddlsim.plan.chunks_at` cut
                   it; one for each stage, or several (interleaved and V-shaped orders)
    micro_batches  of each replica in a step
    order          "gpipe", "1f1b" (interleaved where there are several chunks per rank), "zb-1p", "zb-2p", "zb-v",
                   "v-half", "v-min" (:mod:`ddlsim.plan.pipeline_orders`), or a table: for every rank of the pipeline a
                   list of ("F", "B" or "W", chunk, micro-batch); or, with weights as old as they say, "pipedream" or
                   "2bw" (:mod:`ddlsim.plan.asynchronous_pipeline`)
    recompute      of a micro-batch that waits for its backward pass a rank keeps the chunk's input only, and goes
                   forward again before it goes backward (Chen et al. 2016, arXiv:1604.06174)
    buckets        of a chunk: which gradients replicas sum together, each as soon as the last backward pass on the
                   chunk has come so far
    sharded        a replica updates its share of every bucket, and the shares are gathered (ZeRO stage 1)

    p2p            what a rank does while it sends to a neighbour: "overlapped": it computes on. "exchange": it waits,
                   while both send to each other at once, as Megatron-LM does without interleaving (megatron/core,
                   p2p_communication.py: isend and irecv in one batch, then wait). "in turns": it waits, and sends a
                   gradient only after the activations of its next forward pass have come, as DeepSpeed does
                   (runtime/pipe/schedule.py and p2p.py: blocking send and recv); for "1f1b" with one chunk per stage

    A rank has the lanes "compute" and "stream" (collectives), and one for the messages to or from each neighbour and in
    each direction, beside which it computes. What crosses a cut is one message, tensors that skip over chunks included:
    they pass through the ranks between. A layer whose weights are tied to those of the first one ("tied_dense") has a
    copy of them on its rank, and the gradients of both are summed, over replicas and then over the two.

    Micro-batch m of replica r is batch ``r * micro_batches + m``. Ranks are numbered as in the mesh. Its tensor axis
    must be 1. Raises ConfigError for an order that does not go with mesh, chunks and micro-batches.
    """
    _check(chunks, mesh)
    if len({chunk.workload.batch_size for chunk in chunks}) > 1:
        raise ConfigError("pipeline: chunks: must be of micro-batches of one size")
    if isinstance(order, str) and order in ASYNCHRONOUS:
        for name, value, default in (("sharded", sharded, False), ("p2p", p2p, "overlapped")):
            if value != default:
                raise ConfigError(
                    f"pipeline: {name} = {value!r}: goes with orders whose steps end before the next begin, not with "
                    f"{order!r}"
                )
        return asynchronous_pipeline(chunks, mesh, micro_batches, order, steps, recompute=recompute, buckets=buckets)
    table = pass_order(order, mesh.pipeline, micro_batches, len(chunks))
    if p2p == "in turns" and (order != "1f1b" or len(chunks) > mesh.pipeline):
        raise ConfigError("pipeline: p2p = 'in turns': goes with order '1f1b' and one chunk per stage; use 'exchange'")
    step = step_of(chunks, table, buckets, mesh.data, recompute=recompute, sharded=sharded, p2p=p2p)
    return _repeated(step, mesh, micro_batches, steps, chunks[-1].end)


def _check(chunks: Sequence[Chunk], mesh: Mesh) -> None:
    if mesh.tensor > 1:
        raise ConfigError(
            f"pipeline: mesh: tensor = {mesh.tensor}: must be 1; see ddlsim.plan.tensor_parallel for groups that "
            "share a stage"
        )
    ends = [0, *(chunk.end for chunk in chunks)]
    if not chunks or any(chunk.first != end for chunk, end in zip(chunks, ends, strict=False)):
        raise ConfigError("pipeline: chunks: must be all layers in their order, as balanced() or chunks_at() cuts them")


def _repeated(once: Step, mesh: Mesh, micro_batches: int, steps: int, n_layers: int) -> Plan:
    """Return the plan in which every replica does the rows, step by step."""
    replicas, n, column = mesh.data, len(once.columns["kind"]), once.columns
    replica, ranks = np.arange(replicas)[:, None], mesh.ranks[:, :, 0]
    groups, group_of = groups_of(once.groups, ranks)
    number, alone, micro = column["number"], replicas * once.n_alone, column["micro"]
    key = np.where(column["shared"], alone + number, replica * once.n_alone + number)
    peer = np.where(column["to"] >= 0, ranks[:, column["to"]], -1)
    each: dict[str, Any] = {
        name: column[name] for name in ("kind", "seconds", "nbytes", "first", "end", "part", "holds")
    } | {
        "lane": replica * len(once.lanes) + column["lane"], "name": np.where(column["kind"] == COMPUTE, 0, -1),
        "peer": np.where(column["group"] >= 0, group_of[:, column["group"]], peer),
        "batch": np.where(micro >= 0, replica * micro_batches + micro, -1),
    }  # fmt: skip
    values: dict[str, Any] = {
        name: _tiled(one, steps * (replicas if one.ndim == 1 else 1)) for name, one in each.items()
    }
    key = np.concatenate([np.where(number >= 0, key + step * (alone + once.n_shared), -1) for step in range(steps)])
    return Plan(
        lanes=tuple(Lane(int(ranks[r, stage]), name) for r in range(replicas) for stage, name in once.lanes),
        groups=groups, parts=once.parts, names=(RECOMPUTE,), n_layers=n_layers,
        step=np.concatenate([np.full(n * replicas, step) for step in range(steps)]), key=key.ravel(), **values,
        **_needs(once, n, replicas, steps),
    )  # fmt: skip


def _tiled(values: npt.NDArray[Any], times: int) -> npt.NDArray[Any]:
    return np.concatenate([values.ravel()] * times)


def _needs(once: Step, n: int, replicas: int, steps: int) -> dict[str, Any]:
    """Return the needs as a CSR: of the first step those inside it, of others also those of the step before."""
    counts, needs = [], []
    first = once.needs
    later = [np.concatenate(each) for each in zip(first, (once.before[0], once.before[1] - replicas * n), strict=True)]
    shapes = []
    for row, need in (first, later)[: min(steps, 2)]:
        shapes.append((need[np.argsort(row, kind="stable")], np.bincount(row, minlength=n)))
    for step in range(steps):
        flat, lengths = shapes[min(step, 1)]
        begins = (step * replicas + np.arange(replicas)) * n
        needs.append((begins[:, None] + flat).ravel())
        counts.append(_tiled(lengths, replicas))
    return {"needs": np.concatenate(needs), "need_offsets": np.cumsum(np.concatenate([[0], *counts]))}
