"""Models split over the ranks of a pipeline, as plans: chunks of layers, micro-batches, messages between stages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from ddlsim.arguments import Count, checked
from ddlsim.errors import ConfigError
from ddlsim.plan.asynchronous_pipeline import asynchronous_pipeline
from ddlsim.plan.chunks import Chunk
from ddlsim.plan.mesh import Mesh
from ddlsim.plan.pipeline_orders import ASYNCHRONOUS, pass_order
from ddlsim.plan.pipeline_rows import groups_of
from ddlsim.plan.pipeline_template import RECOMPUTE, Template
from ddlsim.plan.plan import COMPUTE, Ints, Lane, Plan
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
    template = Template(chunks, table, buckets, mesh.data, recompute=recompute, sharded=sharded, p2p=p2p)
    return _repeated(template, mesh, micro_batches, steps)


def _check(chunks: Sequence[Chunk], mesh: Mesh) -> None:
    if mesh.tensor > 1:
        raise ConfigError(
            f"pipeline: mesh: tensor = {mesh.tensor}: must be 1; see ddlsim.plan.tensor_parallel for groups that "
            "share a stage"
        )
    ends = [0, *(chunk.end for chunk in chunks)]
    if not chunks or any(chunk.first != end for chunk, end in zip(chunks, ends, strict=False)):
        raise ConfigError("pipeline: chunks: must be all layers in their order, as balanced() or chunks_at() cuts them")


def _repeated(template: Template, mesh: Mesh, micro_batches: int, steps: int) -> Plan:
    """Return the plan in which every replica does the rows, step by step."""
    rows, replicas = template.rows, mesh.data
    n, blocks = len(rows), mesh.data * steps
    lanes: dict[tuple[int, str], int] = {}
    lane_of = np.array([lanes.setdefault((row.stage, row.lane), len(lanes)) for row in rows])
    names = ("kind", "seconds", "nbytes", "micro", "first", "end", "part", "holds", "to", "group", "number", "shared")
    column = {name: np.tile(np.array([getattr(row, name) for row in rows]), blocks) for name in names}
    replica, step = np.tile(np.repeat(np.arange(replicas), n), steps), np.repeat(np.arange(steps), n * replicas)
    ranks = mesh.ranks[:, :, 0]
    groups, group_of = groups_of(template.groups, ranks)
    number, alone, micro = column["number"], replicas * template.n_alone, column["micro"]
    key = step * (alone + template.n_shared) + np.where(
        column["shared"], alone + number, replica * template.n_alone + number
    )
    peer = np.where(column["to"] >= 0, ranks[replica, column["to"]], -1)
    values: dict[str, Any] = _needs(template, replicas, steps) | {
        name: column[name] for name in ("kind", "seconds", "nbytes", "first", "end", "part", "holds")
    } | {
        "lane": replica * len(lanes) + np.tile(lane_of, blocks), "name": np.where(column["kind"] == COMPUTE, 0, -1),
        "peer": np.where(column["group"] >= 0, group_of[replica, column["group"]], peer),
        "key": np.where(number >= 0, key, -1), "step": step,
        "batch": np.where(micro >= 0, replica * micro_batches + micro, -1),
    }  # fmt: skip
    return Plan(
        lanes=tuple(Lane(int(ranks[r, stage]), name) for r in range(replicas) for stage, name in lanes),
        groups=groups, parts=tuple(template.parts), names=(RECOMPUTE,), n_layers=template.n_layers, **values,
    )  # fmt: skip


def _needs(template: Template, replicas: int, steps: int) -> dict[str, Ints]:
    """Return the needs as a CSR: of the first step those inside it, of others also those of the step before."""
    n = len(template.rows)
    counts, needs = [], []
    first = [row.needs for row in template.rows]
    later = [row.needs + [each - replicas * n for each in row.before] if row.before else row.needs
             for row in template.rows]  # fmt: skip
    shapes = [(np.array([*itertools.chain.from_iterable(lists)], dtype=np.int64), [len(each) for each in lists])
              for lists in (first, later)[: min(steps, 2)]]  # fmt: skip
    for step in range(steps):
        flat, lengths = shapes[min(step, 1)]
        begins = (step * replicas + np.arange(replicas)) * n
        needs.append((begins[:, None] + flat).ravel())
        counts.append(np.tile(lengths, replicas))
    return {"needs": np.concatenate(needs), "need_offsets": np.cumsum(np.concatenate([[0], *counts]))}
