"""Models split over the ranks of a pipeline, as plans: chunks of layers, micro-batches, messages between stages; and
outlines of such plans, which bound the steps and memory of many splits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from ddlsim.arguments import Count, checked
from ddlsim.errors import ConfigError
from ddlsim.plan import plan as ps
from ddlsim.plan.chunks import Chunk, crossing_nbytes
from ddlsim.plan.mesh import Mesh
from ddlsim.plan.pipeline_orders import ASYNCHRONOUS, Pass, PassOrder, one_f_one_b, pass_order
from ddlsim.plan.pipeline_steps import Blocks, Buckets, Template, Tie, tie_between, tie_of
from ddlsim.plan.plan import ALL_REDUCE, Bools, Floats, Ints, Plan
from ddlsim.plan.program import N_STEPS, Row, Step, StepProgram, step_of
from ddlsim.plan.rows import csr, ranges
from ddlsim.plan.tensor_ranks import Seconds
from ddlsim.workload.buckets import Bucket, one_bucket
from ddlsim.workload.compute import Workload
from ddlsim.workload.model import Layer, Model


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
                   or "W", chunk, micro-batch) tuples for every stage; or an asynchronous order, "pipedream" or "2bw",
                   without flushes (Narayanan et al. 2019; 2021, arXiv:2006.09503)
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
        for replica, replica_ranks in enumerate(ranks):
            members = ranks[:, stages[0]] if len(stages) == 1 else replica_ranks[list(stages)]
            of[replica, nth] = groups.setdefault(tuple(members.tolist()), len(groups))
    return tuple(groups), of


def _check(chunks: Sequence[Chunk], mesh: Mesh) -> None:
    if mesh.tensor > 1:
        raise ConfigError(
            f"pipeline: mesh: tensor = {mesh.tensor}: must be 1; Parallel(tensor={mesh.tensor}) makes groups of ranks "
            "that share a stage"
        )
    ends = [0, *(chunk.end for chunk in chunks)]
    if not chunks or any(chunk.first != end for chunk, end in zip(chunks, ends, strict=False)):
        raise ConfigError(
            "pipeline: chunks: must contain all layers in order, as returned by balanced_chunks() or chunks_at()"
        )


# ---------------------------------------------------------------- without flushes
#
# In asynchronous pipelines, updates follow each other without a flush, and gradients use older weights.
#
# "pipedream" (Narayanan et al. 2019, SOSP, doi:10.1145/3341301.3359646) updates after every micro-batch. When stage i
# of p alternates forward and backward passes, it is p - 1 - i forward passes ahead, so the forward pass of a
# micro-batch uses weights that lack the last p - 1 - i updates before its own. They are *stashed* for its backward
# pass: p - i versions.
#
#     w_i(t + 1) = w_i(t) - eta grad_i f(w_0(t - p + 1), ..., w_(p-2)(t - 1), w_(p-1)(t))
#
# "2bw" (Narayanan et al. 2021, ICML, arXiv:2006.09503) updates after m >= p micro-batches, all of which use the weights
# before the newest update, on all stages: two versions.
#
#     w(t + 1) = w(t) - eta grad f(w(t - 1))
#
# Replicas of a stage sum their gradients before its update (as in PipeDream's replicated stages with the same number
# of replicas on all stages), and a stage updates before it goes on.


def stage_delays(order: str, stages: int) -> tuple[int, ...]:
    """Return the age, in updates, of the weights with which each stage computes gradients, (stages,)."""
    return tuple(stages - 1 - stage if order == "pipedream" else 1 for stage in range(stages))


def steps_under_way(stages: int, micro_batches: int) -> int:
    """Return the largest number of steps in flight in an asynchronous pipeline.

    While the first stage is in a step, the last one can be (p - 1)/m steps ahead. While the last one updates, the first
    one can be in the next step, whose micro-batches the second stage receives for the step behind that. In both cases
    one stage already waits for the first message of a further step.
    """
    return max((stages - 1) // micro_batches + 3, 4)


def asynchronous_template(
    chunks: Sequence[Chunk], mesh: Mesh, micro_batches: int, order: str, *, recompute: bool, buckets: Buckets
) -> Plan:
    """Return the template of a pipeline without flushes (:func:`ddlsim.plan.pipeline` describes its arguments).

    A step of a stage consists of its tasks from one update to the next. Micro-batch m of replica r is batch
    ``m * data + r``. Raises ConfigError for a number of micro-batches that the order does not allow, and if the first
    and the last stage share weights at different ages.
    """
    stages = mesh.pipeline
    if len(chunks) != stages:
        raise ConfigError(
            f"pipeline: order {order!r} needs one chunk per stage, but there are {len(chunks)} chunks for "
            f"{stages} ranks"
        )
    if order == "pipedream" and micro_batches > 1:
        raise ConfigError(
            f"pipeline: micro_batches = {micro_batches}: 'pipedream' updates the weights after every "
            "micro-batch; use micro_batches=1, or '2bw'"
        )
    if order == "2bw" and micro_batches < stages:
        raise ConfigError(
            f"pipeline: micro_batches = {micro_batches}: '2bw' needs at least one micro-batch per stage "
            f"({stages}) in a step; use more, or 'pipedream', which updates after every micro-batch"
        )
    if order == "pipedream" and stages > 1 and tie_of(chunks) is not None:
        raise ConfigError(
            "pipeline: chunks: 'pipedream' does not support models whose first and last stages share weights "
            "(tied_dense), because the two stages would use different versions of the weights; use '2bw'"
        )
    total = (N_STEPS + steps_under_way(stages, micro_batches)) * micro_batches
    stream = _Stream(chunks, micro_batches, total, buckets, mesh.data, recompute)
    delays = stage_delays(order, stages)
    ages = [delay for chunk, delay in zip(chunks, delays, strict=True) for _ in range(chunk.first, chunk.end)]
    return stream.template(stream.first_steps(), tuple(ages))


class _Stream(Template):
    """The tasks of a stream of micro-batches, with an update after every `micro_batches` of them."""

    def __init__(
        self, chunks: Sequence[Chunk], micro_batches: int, total: int, buckets: Buckets, replicas: int, recompute: bool
    ) -> None:
        self.micro_batches, self.step = micro_batches, 0
        self.shared_sums: dict[int, int] = {}  # step -> number of the sum of weights shared by two stages
        self.tied_part = -1
        self.step_of_row: list[int] = []
        super().__init__(chunks, one_f_one_b(len(chunks), total), buckets, replicas, recompute=recompute, sharded=False,
                         tie=tie_between(chunks))  # fmt: skip
        for stage, passes in enumerate(self.order):
            self._stage(stage, passes)
        self._wait_for_messages()

    def _add(self, row: Row) -> int:
        self.step_of_row.append(self.step)
        return super()._add(row)

    def _stage(self, stage: int, passes: list[Pass]) -> None:
        self.step = 0
        for pass_ in passes:
            if pass_.kind == "F":
                self._forward(stage, pass_)
                continue
            last = (pass_.micro + 1) % self.micro_batches == 0
            self._backward(stage, pass_, last=last)
            if last:
                self._updates(stage, self._shared_sum(stage))
                self.sums.pop(stage, None)
                self.step += 1

    def _shared_sum(self, stage: int) -> tuple[int, int] | None:
        """Sum the gradient of the weights that the first and the last stage share, after the previous row."""
        stages = tuple(dict.fromkeys((0, len(self.order) - 1)))
        if self.tie is None or stage not in stages:
            return None
        if self.tied_part < 0:
            self.tied_part = self._part(self.tie.nbytes, self.tie.owner, self.tie.owner + 1, self.tie.user)
        latest = next(i for i in reversed(range(len(self.rows))) if self.rows[i].lane == "compute")
        row = self._of_replicas(stage, self.tied_part, latest)
        if len(stages) == 2:
            number = self.shared_sums.get(self.step)
            row = self._collective(ALL_REDUCE, stage, stages, self.tied_part, [row], number)
            self.shared_sums[self.step] = self.rows[row].number
        return self.tied_part, row

    def _wait_for_messages(self) -> None:
        """Make passes depend on their messages, which belong to the step of the waiting pass."""
        for row, pass_ in self.passes:
            arrival = self.arrivals.get(pass_, -1)
            if arrival >= 0:
                self.rows[row].needs.append(arrival)
                for end in (arrival - 1, arrival):  # a message's two rows are adjacent
                    self.step_of_row[end] = self.step_of_row[row]

    def first_steps(self) -> list[Step]:
        """Return the first steps."""
        step, place = np.array(self.step_of_row), np.empty(len(self.rows), dtype=np.int64)
        rows = [np.flatnonzero(step == i).tolist() for i in range(N_STEPS)]
        for step_rows in rows:
            place[step_rows] = np.arange(len(step_rows))
        for row in self.rows:  # sums of the replica, then over all replicas
            row.number += self.n_alone if row.group >= 0 and len(self.groups[row.group]) == 1 else 0
        steps = []
        for i, step_rows in enumerate(rows):
            ends = [self.rows[row] for row in step_rows]
            for row in ends:  # those of the same step first
                row.needs = sorted(((place[need], i - step[need]) for need in row.needs), key=lambda need: need[1] != 0)
            columns, needs = step_of(ends, self.lanes)
            carried = columns["number"] >= 0
            columns["number"][carried] = np.unique(columns["number"][carried], return_inverse=True)[1].reshape(-1)
            steps.append(Step(columns, needs))
        return steps


# ---------------------------------------------------------------- outlines
#
# Outlines of pipelines, in units of chunks, bound the steps and memory of many splits of a model. Splits with the same
# stages, micro-batches and order differ only in seconds and bytes. The step is therefore built once, for chunks of one
# layer, and its columns are replaced for every split. It takes at most as long as the step of :func:`pipeline`: the
# gradients of a chunk are summed at once, during its last backward pass if buckets overlap, and gathering shards of
# weights (ZeRO stage 1) takes no time.


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
        np.add.reduceat(values, first)
        for values in (workload.forward, workload.backward, model.weight_seconds, workload.grad_nbytes)
    )
    enters = crossing_nbytes(workload)[first]
    if gather is not None and tensor > 1:
        seconds = np.array([gather(ps.ALL_GATHER, nbytes) for nbytes in enters[1:].tolist()])
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
    freed = stored + kept if outline.recompute else stored
    holds = np.select(
        [plan.kind == ps.FORWARD, plan.name >= 0, np.isin(plan.kind, (ps.BACKWARD, ps.BACKWARD_WEIGHT))],
        [kept[chunk], stored[chunk], -freed[chunk]],
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
    written = _latest if outline.n_chunks * outline.micro_batches > MOST_PASSES else _recent
    return written(outline._replace(mesh=mesh, sharded=outline.sharded and several), tied)


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
_recent, _latest = (functools.lru_cache(maxsize=n)(_written) for n in (8, 1))


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
