"""Outlines of pipelines, in units of chunks, that bound the steps and memory of many splits of a model.

Splits with the same stages, micro-batches and order differ only in seconds and bytes. The step is therefore built once,
for chunks of one layer, and its columns are replaced for every split. It takes at most as long as the step of
:func:`ddlsim.plan.pipeline.pipeline`: the gradients of a chunk are summed at once, during its last backward pass if
buckets overlap, and gathering shards of weights (ZeRO stage 1) takes no time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ddlsim.plan import plan as ps
from ddlsim.plan.chunks import Chunk, crossing_nbytes
from ddlsim.plan.mesh import Mesh
from ddlsim.plan.pipeline import in_replicas
from ddlsim.plan.pipeline_orders import PassOrder, pass_order
from ddlsim.plan.pipeline_steps import Blocks, Tie, tie_of
from ddlsim.plan.plan import Bools, Floats, Ints, Plan
from ddlsim.plan.program import StepProgram
from ddlsim.plan.rows import csr, ranges
from ddlsim.plan.tensor_ranks import Seconds
from ddlsim.workload.buckets import one_bucket
from ddlsim.workload.compute import Workload
from ddlsim.workload.model import Layer, Model


class Costs(NamedTuple):
    """Costs of each chunk per micro-batch and step, (n_chunks,) each: seconds of the forward pass, of the backward
    pass, and of its part for gradients of weights; bytes across the cut before the chunk, and of its gradients; seconds
    of its update; and the bytes of the weights that the first and the last chunk share, 0 if there are none."""

    forward: Floats
    backward: Floats
    weights: Floats
    enters: Floats
    gradient: Floats
    update: Floats
    tied: float = 0.0


class Outline(NamedTuple):
    """Split and order of a pipeline; see :func:`ddlsim.plan.pipeline.pipeline`.

    overlap  whether sums overlap backward passes
    """

    order: str | PassOrder
    mesh: Mesh
    micro_batches: int
    n_chunks: int
    recompute: bool = False
    sharded: bool = False
    overlap: bool = True
    p2p: str = "overlapped"


def costs_of(workload: Workload, cuts: Sequence[int], tensor: int = 1, gather: Seconds | None = None) -> Costs:
    """Return the costs of the chunks of a workload that is cut before some layers, for one of `tensor` ranks; `gather`
    returns the times of the all-gathers of tensors that enter a chunk."""
    first = np.array([0, *cuts], dtype=np.int64)
    model = _in_one(workload)
    forward, backward, weights, gradient = (
        np.add.reduceat(each, first)
        for each in (workload.forward, workload.backward, model.weight_seconds, workload.grad_nbytes)
    )
    enters = crossing_nbytes(workload)[first]
    if gather is not None and tensor > 1:
        seconds = np.array([gather(ps.ALL_GATHER, each) for each in enters[1:].tolist()])
        forward[1:] += seconds
        backward[:-1] += seconds
    enters[1:] /= tensor
    total = float(gradient.sum())
    update = workload.optimizer * gradient / total if total > 0.0 else np.zeros(len(first))
    tie = _tie(workload)
    return Costs(forward, backward, weights, enters, gradient, update, 0.0 if tie is None else tie.nbytes)


@functools.lru_cache(maxsize=256)
def _in_one(workload: Workload) -> Chunk:
    return Chunk(0, len(workload.forward), workload, 0.0)


@functools.lru_cache(maxsize=256)
def _tie(workload: Workload) -> Tie | None:
    return tie_of([_in_one(workload)])


def outlined(outline: Outline, costs: Costs) -> StepProgram:
    """Return the program of a pipeline with these costs. Raises ConfigError if the order does not fit the mesh, the
    chunks and the micro-batches."""
    tied = costs.tied > 0.0 and outline.mesh.pipeline > 1
    template = _template_of(outline, several=outline.mesh.data > 1, tied=tied)
    none, share = np.zeros(1), outline.mesh.data if outline.sharded else 1
    seconds = np.concatenate([
        none, costs.forward, costs.backward, costs.backward - costs.weights, costs.weights, costs.update / share,
    ])  # fmt: skip
    nbytes = np.concatenate([none, costs.enters, costs.gradient, np.array([costs.tied])])
    columns = {"seconds": seconds[template.seconds], "nbytes": nbytes[template.nbytes]}
    if not (costs.gradient > 0.0).all():  # chunks without weights are not updated
        plan = template.program.template
        idle = (plan.kind == ps.UPDATE) & (costs.gradient + costs.update == 0.0)[template.chunk]
        columns["kind"] = np.where(idle, ps.COMPUTE, plan.kind)
    program = template.program.with_columns(**columns)
    batches = (1, outline.micro_batches, 0)
    replicated = in_replicas(program.template, Mesh(outline.mesh.data, outline.mesh.pipeline), batches)
    vars(replicated)["graph"] = program.graph
    return replicated


def activations_held(outline: Outline, chunks: Sequence[Chunk]) -> Floats:
    """Return the peak memory of activations of each stage, in bytes, (n_stages,)."""
    stages, m = outline.mesh.pipeline, outline.micro_batches
    # after a warm-up of at most (chunks per stage + 1) x stages passes, 1F1B is periodic
    if outline.order == "1f1b" and m > 3 * stages and (outline.n_chunks == stages or m % stages == 0):
        outline = outline._replace(micro_batches=3 * stages)
    template = _template_of(outline._replace(sharded=False), several=False, tied=False)
    stored = np.array([float(chunk.stored.sum()) for chunk in chunks])
    kept = np.array([chunk.enters for chunk in chunks]) if outline.recompute else stored
    plan, chunk = template.program.template, template.chunk
    given = stored + kept if outline.recompute else stored
    holds = np.select(
        [plan.kind == ps.FORWARD, plan.name >= 0, np.isin(plan.kind, (ps.BACKWARD, ps.BACKWARD_WEIGHT))],
        [kept[chunk], stored[chunk], -given[chunk]],
    )
    return template.program.with_columns(holds=holds).peak_memory()


class _Template(NamedTuple):
    """A program, and for each task its chunk, and where :func:`outlined` finds its seconds and bytes."""

    program: StepProgram
    chunk: Ints
    seconds: Ints
    nbytes: Ints


def _template_of(outline: Outline, *, several: bool, tied: bool) -> _Template:
    mesh = Mesh(1 + several, outline.mesh.pipeline)
    if not isinstance(outline.order, str):
        return _written(outline._replace(mesh=mesh), tied)
    known = _latest if outline.n_chunks * outline.micro_batches > MOST_PASSES else _known
    return known(outline._replace(mesh=mesh, sharded=outline.sharded and several), tied)


def _written(outline: Outline, tied: bool) -> _Template:
    n, mesh = outline.n_chunks, outline.mesh
    order = pass_order(outline.order, mesh.pipeline, outline.micro_batches, n)
    chunks = [Chunk(i, i + 1, _unit(), 1.0) for i in range(n)]
    tie = Tie(0, n - 1, 0.5) if tied else None
    blocks = Blocks(chunks, order, one_bucket, mesh.data, recompute=outline.recompute, sharded=False, tie=tie)
    plan = blocks.template([blocks.step(outline.p2p)] * 2)
    chunk = plan.first
    part = np.array([[part.first, part.tied >= 0] for part in plan.parts] or [[0, 0]], dtype=np.int64)
    code = np.full(len(plan), -1)
    for i, kind in enumerate((ps.FORWARD, ps.BACKWARD, ps.BACKWARD_INPUT, ps.BACKWARD_WEIGHT, ps.UPDATE)):
        code[plan.kind == kind] = i
    code[plan.name >= 0] = 0
    sums = plan.kind == ps.ALL_REDUCE
    seconds = np.where(code >= 0, 1 + code * n + chunk, 0)
    nbytes = np.where(np.isin(plan.kind, (ps.SEND, ps.RECEIVE)), 1 + chunk, 0)
    nbytes = np.where(sums, np.where(part[plan.part, 1] > 0, 1 + 2 * n, 1 + n + part[plan.part, 0]), nbytes)
    columns: dict[str, Ints] = {}
    if outline.sharded:
        alone = np.array([len(group) == 1 for group in plan.groups] or [False])
        columns["kind"] = np.where(sums & alone[np.where(sums, plan.peer, 0)], ps.REDUCE_SCATTER, plan.kind)
    if outline.overlap:
        columns |= _beside(plan, sums & (part[plan.part, 1] == 0))
    return _Template(in_replicas(plan.with_columns(**columns), mesh, (1, 0, 0)), chunk, seconds, nbytes)


#: largest number of forward passes of a template that is kept beside others; its graph takes about 50 MB
MOST_PASSES = 4096
_known, _latest = (functools.lru_cache(maxsize=n)(_written) for n in (8, 1))


def _beside(plan: Plan, sums: Bools) -> dict[str, Ints]:
    """Return the dependencies of a plan whose sums overlap the pass that they need: they start when that pass does."""
    row, need = plan.needing, plan.needs
    earlier = sums[row] & (plan.kind[need] < ps.SEND)
    sum_of, of_pass = row[earlier], need[earlier]
    before, counts = plan.previous[of_pass], np.diff(plan.need_offsets)[of_pass]
    at = ranges(plan.need_offsets[of_pass], counts)
    rows = np.concatenate([row[~earlier], sum_of[before >= 0], np.repeat(sum_of, counts)])
    needs = np.concatenate([need[~earlier], before[before >= 0], need[at]])
    offsets, needs = csr(rows, needs, len(plan))
    return {"needs": needs, "need_offsets": offsets}


@functools.lru_cache(maxsize=1)
def _unit() -> Workload:
    """Return a workload of one layer that takes 1 s and has 1 byte of gradients."""
    layer = Layer("unit", "dense", (1,), (1,), 1, 1.0, 2.0, 4.0, (("weight", 1),), input_grad=False)
    model, one, at = Model("unit", "", (1,), (layer,), False, ()), np.ones(1), np.zeros(1, dtype=np.int64)
    return Workload(model, 1, "fp32", "", one, one, 1.0, one, at, one, memory_bandwidth=np.inf, launch_time=0.0)
