"""Models split over the ranks of a pipeline, as plans: chunks of layers, micro-batches, messages between stages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from ddlsim.arguments import Count, checked
from ddlsim.errors import ConfigError
from ddlsim.plan.asynchronous_pipeline import asynchronous_template
from ddlsim.plan.chunks import Chunk
from ddlsim.plan.mesh import Mesh
from ddlsim.plan.pipeline_orders import ASYNCHRONOUS, pass_order
from ddlsim.plan.pipeline_steps import Blocks, tie_between
from ddlsim.plan.plan import Ints, Plan
from ddlsim.plan.program import N_STEPS, StepProgram
from ddlsim.workload.buckets import Bucket, one_bucket
from ddlsim.workload.compute import Workload


@checked
def pipeline(
    chunks: Sequence[Chunk],
    mesh: Mesh,
    micro_batches: Count,
    order: str | Sequence[Sequence[tuple[str, int, int]]] = "1f1b",
    *,
    recompute: bool = False,
    buckets: Callable[[Workload], Sequence[Bucket]] = one_bucket,
    sharded: bool = False,
    p2p: Literal["overlapped", "exchange", "in turns", "in step"] = "overlapped",
) -> StepProgram:
    """Return the step program for pipeline-parallel training, with replicas along the data axis of a mesh.

    chunks         chunks of the model in forward order, as returned by :func:`ddlsim.plan.balanced_chunks` or
                   :func:`ddlsim.plan.chunks_at`: one per stage, or several for interleaved and V-shaped orders
    mesh           mesh that sets the numbers of stages and replicas and the numbering of the ranks; its tensor axis
                   must have size 1
    micro_batches  number of micro-batches per replica and step
    order          "gpipe", "1f1b" (interleaved if there are several chunks per rank), "zb-1p", "zb-2p", "zb-v",
                   "v-half", "v-min" (:mod:`ddlsim.plan.pipeline_orders`); a custom order, which is a list of ("F", "B"
                   or "W", chunk, micro-batch) tuples for every stage; or an asynchronous order, "pipedream" or "2bw"
                   (:mod:`ddlsim.plan.asynchronous_pipeline`)
    recompute      whether a rank stores only the input of the chunk for each micro-batch, and repeats the forward pass
                   before the backward pass (activation checkpointing; Chen et al. 2016, arXiv:1604.06174)
    buckets        function that groups a chunk's gradients into buckets. Replicas sum a bucket as soon as the chunk's
                   last backward pass has computed it
    sharded        whether a replica updates only its shard of every bucket, and shards are then gathered (ZeRO stage 1)
    p2p            what a rank does while it sends to a neighbour. "overlapped": it computes. "exchange": it waits
                   while both send to each other at once, as in Megatron-LM without interleaving (megatron/core,
                   p2p_communication.py: isend and irecv in one batch, then wait). "in turns": it waits, and sends a
                   gradient only after the activations of its next forward pass have arrived, as in DeepSpeed
                   (runtime/pipe/schedule.py and p2p.py: blocking send and recv); for "1f1b" with one chunk per stage.
                   "in step": as "exchange", and it also waits for all tensors sent to it in the same row of the table
                   of passes, as PyTorch's interleaved 1F1B (torch/distributed/pipelining/schedules.py, release 2.6:
                   PipelineScheduleMulti._step_microbatches); for "1f1b" with several chunks per stage

    A rank has the lanes "compute" and "stream" (collectives), and one lane per neighbour and direction for messages,
    which overlap computation. All tensors that cross a cut form one message, including those that skip chunks: they
    pass through the ranks in between. A layer whose weights are tied to those of the first one ("tied_dense") has a
    copy of them on its rank. The gradients of both copies are summed over the replicas, then over the two.

    Micro-batch m of replica r is batch ``r * micro_batches + m``. Raises ConfigError for an order that does not fit the
    mesh, the chunks and the micro-batches.
    """
    _check(chunks, mesh)
    if len({chunk.workload.batch_size for chunk in chunks}) > 1:
        raise ConfigError("pipeline: chunks: all chunks must have the same micro-batch size")
    if isinstance(order, str) and order in ASYNCHRONOUS:
        for name, value, default in (("sharded", sharded, False), ("p2p", p2p, "overlapped")):
            if value != default:
                raise ConfigError(
                    f"pipeline: {name} = {value!r}: not supported with the asynchronous order {order!r}; use an "
                    "order whose steps do not overlap, such as '1f1b'"
                )
        template = asynchronous_template(chunks, mesh, micro_batches, order, recompute=recompute, buckets=buckets)
        batches = (mesh.data, 1, micro_batches * mesh.data)
        return in_replicas(template, mesh, batches)
    table = pass_order(order, mesh.pipeline, micro_batches, len(chunks))
    if p2p == "in turns" and (order != "1f1b" or len(chunks) > mesh.pipeline):
        raise ConfigError("pipeline: p2p = 'in turns': needs order '1f1b' and one chunk per stage; use 'exchange'")
    if p2p == "in step" and (order != "1f1b" or len(chunks) == mesh.pipeline):
        raise ConfigError("pipeline: p2p = 'in step': needs order '1f1b' and several chunks per stage; use 'exchange'")
    tie = tie_between(chunks)
    blocks = Blocks(chunks, table, buckets, mesh.data, recompute=recompute, sharded=sharded, tie=tie)
    return in_replicas(blocks.template([blocks.step(p2p)] * N_STEPS), mesh, (1, micro_batches, 0))


def in_replicas(template: Plan, mesh: Mesh, batches: tuple[int, int, int]) -> StepProgram:
    """Return the program of the replicas of a pipeline. A group of one stage consists of its replicas; a group of
    several stages exists once in each replica."""
    ranks, (groups, of) = mesh.ranks[:, :, 0], _groups(mesh, template.groups)
    return StepProgram(
        templates=(template,),
        ranks=ranks,
        groups=groups,
        group_of=of,
        template_of=np.zeros_like(ranks),
        batches=batches,
    )


@functools.lru_cache(maxsize=64)
def _groups(mesh: Mesh, of_stages: tuple[tuple[int, ...], ...]) -> tuple[tuple[tuple[int, ...], ...], Ints]:
    """Return the groups of ranks, and which of them each group of stages is in each replica, (n_replicas, n_groups)."""
    ranks, groups = mesh.ranks[:, :, 0], dict[tuple[int, ...], int]()
    of = np.zeros((mesh.data, len(of_stages)), dtype=np.int64)
    for nth, stages in enumerate(of_stages):
        for replica, own in enumerate(ranks):
            members = ranks[:, stages[0]] if len(stages) == 1 else own[list(stages)]
            of[replica, nth] = groups.setdefault(tuple(members.tolist()), len(groups))
    return tuple(groups), of


def _check(chunks: Sequence[Chunk], mesh: Mesh) -> None:
    if mesh.tensor > 1:
        raise ConfigError(
            f"pipeline: mesh: tensor = {mesh.tensor}: must be 1; for groups that share a stage, see "
            "ddlsim.plan.tensor_parallel"
        )
    ends = [0, *(chunk.end for chunk in chunks)]
    if not chunks or any(chunk.first != end for chunk, end in zip(chunks, ends, strict=False)):
        raise ConfigError(
            "pipeline: chunks: must contain all layers in order, as returned by balanced_chunks() or chunks_at()"
        )
