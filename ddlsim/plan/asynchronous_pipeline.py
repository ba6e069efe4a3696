"""Asynchronous pipelines: updates follow each other without a flush, and gradients use older weights.

"pipedream" (Narayanan et al. 2019, SOSP, doi:10.1145/3341301.3359646) updates after every micro-batch. When stage i of
p alternates forward and backward passes, it is p - 1 - i forward passes ahead, so the forward pass of a micro-batch
uses weights that lack the last p - 1 - i updates before its own. They are *stashed* for its backward pass: p - i
versions.

    w_i(t + 1) = w_i(t) - eta grad_i f(w_0(t - p + 1), ..., w_(p-2)(t - 1), w_(p-1)(t))

"2bw" (Narayanan et al. 2021, ICML, arXiv:2006.09503) updates after m >= p micro-batches, all of which use the weights
before the newest update, on all stages: two versions.

    w(t + 1) = w(t) - eta grad f(w(t - 1))

Replicas of a stage sum their gradients before its update (as in PipeDream's replicated stages with the same number of
replicas on all stages), and a stage updates before it goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.plan.chunks import Chunk
from ddlsim.plan.mesh import Mesh
from ddlsim.plan.pipeline_orders import Pass, one_f_one_b
from ddlsim.plan.pipeline_steps import Buckets, Template, tie_between, tie_of
from ddlsim.plan.plan import ALL_REDUCE, Plan
from ddlsim.plan.program import N_STEPS, Row, Step, step_of


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
        for each in passes:
            if each.kind == "F":
                self._forward(stage, each)
                continue
            last = (each.micro + 1) % self.micro_batches == 0
            self._backward(stage, each, last=last)
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
        for row, each in self.passes:
            arrival = self.arrivals.get(each, -1)
            if arrival >= 0:
                self.rows[row].needs.append(arrival)
                for end in (arrival - 1, arrival):  # a message's two rows are adjacent
                    self.step_of_row[end] = self.step_of_row[row]

    def first_steps(self) -> list[Step]:
        """Return the first steps."""
        step, place = np.array(self.step_of_row), np.empty(len(self.rows), dtype=np.int64)
        rows = [np.flatnonzero(step == i).tolist() for i in range(N_STEPS)]
        for own in rows:
            place[own] = np.arange(len(own))
        for row in self.rows:  # sums of the replica, then over all replicas
            row.number += self.n_alone if row.group >= 0 and len(self.groups[row.group]) == 1 else 0
        steps = []
        for i, own in enumerate(rows):
            ends = [self.rows[row] for row in own]
            for row in ends:  # those of the same step first
                row.needs = sorted(((place[need], i - step[need]) for need in row.needs), key=lambda need: need[1] != 0)
            columns, needs = step_of(ends, self.lanes)
            carried = columns["number"] >= 0
            columns["number"][carried] = np.unique(columns["number"][carried], return_inverse=True)[1].reshape(-1)
            steps.append(Step(columns, needs))
        return steps
