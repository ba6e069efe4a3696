"""What the ranks of one pipeline do in a pass, as rows that are repeated for micro-batches, replicas and steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ddlsim.plan.chunks import Chunk
from ddlsim.plan.pipeline_orders import Pass, PassOrder
from ddlsim.plan.pipeline_rows import Row, tie_of
from ddlsim.plan.plan import (
    ALL_REDUCE,
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTE,
    FORWARD,
    RECEIVE,
    REDUCE_SCATTER,
    SEND,
    UPDATE,
    Part,
)  # fmt: skip
from ddlsim.plan.repeated import parts_of
from ddlsim.workload.buckets import Bucket
from ddlsim.workload.compute import Workload

#: what the name of the rows says that go forward again
RECOMPUTE = "recompute"
Buckets = Callable[[Workload], Sequence[Bucket]]


class Template:
    """The rows of passes and of what follows them, added one by one in whatever order a builder says.

    groups  stages: one means its replicas, two are those of one replica
    """

    def __init__(self, chunks: Sequence[Chunk], order: PassOrder, buckets: Buckets, replicas: int, *,
                 recompute: bool, sharded: bool) -> None:  # fmt: skip
        self.chunks, self.order, self.replicas = chunks, order, replicas
        self.recompute, self.sharded = recompute, sharded and replicas > 1
        self.n_layers = chunks[-1].end
        self.stage_of = {each.chunk: stage for stage, passes in enumerate(order) for each in passes}
        self.apart = {(each.chunk, each.micro) for passes in order for each in passes if each.kind == "W"}
        self.rows: list[Row] = []
        self.groups: list[tuple[int, ...]] = []
        self.parts: list[Part] = []
        self.n_alone = self.n_shared = 0
        self.tie = tie_of(chunks)
        works = [self._alone(chunk) for chunk in chunks]
        self.buckets = [buckets(work) if len(work.tensor_layer) else () for work in works]
        self.ranges = [parts_of(*each) if each[1] else () for each in zip(works, self.buckets, strict=True)]
        self.arrivals: dict[tuple[str, int, int], int] = {}  # pass -> the receive that it waits for
        self.passes: list[tuple[int, Pass]] = []  # first row of every pass
        self.sums: dict[int, list[int]] = {}  # chunk -> its sums
        self.parts_of: dict[int, list[int]] = {}
        self.part_of: dict[tuple[int, int], int] = {}  # chunk and bucket -> part

    def _alone(self, chunk: Chunk) -> Workload:
        """Return the workload of a chunk without the gradients of tied weights, which are summed apart."""
        work = chunk.workload
        if self.tie is not None and chunk.first <= self.tie.owner < chunk.end:
            mine = (work.tensor_layer == self.tie.owner - chunk.first) & (work.tensor_nbytes == self.tie.nbytes)
            mine &= np.cumsum(mine) == 1
            left = np.bincount(work.tensor_layer[mine], work.tensor_nbytes[mine], len(work.forward))
            work = dataclasses.replace(
                work, grad_nbytes=work.grad_nbytes - left, tensor_layer=work.tensor_layer[~mine],
                tensor_nbytes=work.tensor_nbytes[~mine],
            )  # fmt: skip
        return work

    def _add(self, row: Row) -> int:
        self.rows.append(row)
        return len(self.rows) - 1

    # ------------------------------------------------------------ passes and messages

    def _forward(self, stage: int, each: Pass) -> None:
        chunk = self.chunks[each.chunk]
        holds = chunk.enters if self.recompute else float(chunk.stored.sum())
        row = self._work(stage, FORWARD, chunk.workload.forward_time, each, holds)
        self.passes.append((row, each))
        if each.chunk < len(self.chunks) - 1:
            self._message(row, Pass("F", each.chunk + 1, each.micro), self.chunks[each.chunk + 1])

    def _backward(self, stage: int, each: Pass, last: bool) -> None:
        """Add a backward pass; beside the `last` one of a chunk its gradients leave."""
        chunk = self.chunks[each.chunk]
        split = (each.chunk, each.micro) in self.apart
        at = len(self.rows)
        if each.kind == "B" and self.recompute:
            self._add(Row(stage, "compute", COMPUTE, chunk.workload.forward_time, holds=float(chunk.stored.sum())))
        if each.kind == "B":
            self.passes.append((at, each))
        if split and each.kind == "B":
            seconds = float((chunk.workload.backward - chunk.weight_seconds).sum())
            row = self._work(stage, BACKWARD_INPUT, seconds, each, 0.0)
        else:
            row = self._gradients(stage, each, split, last)
        if each.kind == "B" and each.chunk > 0:
            self._message(row, Pass("B", each.chunk - 1, each.micro), chunk)

    def _gradients(self, stage: int, each: Pass, split: bool, last: bool) -> int:
        """Add what makes the gradients of a chunk's weights, in pieces where buckets are ready; return the last row."""
        chunk = self.chunks[each.chunk]
        kind, seconds = (BACKWARD_WEIGHT, chunk.weight_seconds) if split else (BACKWARD, chunk.workload.backward)
        buckets = self.buckets[each.chunk] if last else ()
        ready = sorted({bucket.ready_layer for bucket in buckets} | {0}, reverse=True)
        end, row = len(seconds), -1
        for layer in ready:
            given = float(chunk.stored[layer:end].sum())
            if self.recompute and layer == 0:
                given += chunk.enters
            if layer < end:
                place = (chunk.first + layer, chunk.first + end)
                row = self._work(stage, kind, float(seconds[layer:end].sum()), each, -given, place)
            end = layer
            self._sum(stage, each.chunk, [i for i, bucket in enumerate(buckets) if bucket.ready_layer == layer], row)
        return row

    def _work(
        self, stage: int, kind: int, seconds: float, each: Pass, holds: float, layers: tuple[int, int] | None = None
    ) -> int:
        chunk = self.chunks[each.chunk]
        first, end = layers or (chunk.first, chunk.end)
        return self._add(Row(stage, "compute", kind, seconds, 0.0, each.micro, first, end, holds=holds))

    def _message(self, row: int, to: Pass, cut: Chunk) -> None:
        """Send what `row` made to the rank of another pass, over the cut before a chunk."""
        here, there = self.rows[row].stage, self.stage_of[to.chunk]
        if here == there:
            self.arrivals[to] = row
            return
        way, n = "forward" if to.kind == "F" else "backward", len(self.order)
        for stage, peer, kind, side in ((here, there, SEND, "to"), (there, here, RECEIVE, "from")):
            name = {1: "next", n - 1: "previous"}.get((peer - stage) % n, f"stage {peer}")
            if n == 2:
                name = "the other"
            self._add(Row(stage, f"{way} {side} {name}", kind, 0.0, cut.enters, to.micro, cut.first, cut.first, to=peer,
                          number=self.n_alone, needs=[row] if kind == SEND else []))  # fmt: skip
        self.arrivals[to] = len(self.rows) - 1
        self.n_alone += 1

    # ------------------------------------------------------------ gradients

    def _sum(self, stage: int, chunk: int, buckets: Sequence[int], row: int) -> None:
        """Let replicas sum some buckets of a chunk after a row."""
        at = self.chunks[chunk].first
        for bucket in buckets:
            nbytes, first, end, _ = self.ranges[chunk][bucket]
            part = self.part_of.get((chunk, bucket), -1)
            if part < 0:
                part = self.part_of[chunk, bucket] = self._part(nbytes, at + first, at + end)
            self.parts_of.setdefault(chunk, []).append(part)
            self.sums.setdefault(chunk, []).append(self._of_replicas(stage, part, row))

    def _part(self, nbytes: float, first: int, end: int, tied: int = -1) -> int:
        self.parts.append(Part(nbytes, first, end, tied))
        return len(self.parts) - 1

    def _of_replicas(self, stage: int, part: int, row: int) -> int:
        """Add a stage's sum over replicas, if there are several, after a row; return the row that has it."""
        if self.replicas == 1:
            return row
        kind = REDUCE_SCATTER if self.sharded else ALL_REDUCE
        return self._collective(kind, stage, (stage,), part, [row])

    def _collective(self, kind: int, stage: int, stages: tuple[int, ...], part: int, needs: list[int],
                    number: int | None = None) -> int:  # fmt: skip
        if stages not in self.groups:
            self.groups.append(stages)
        shared = len(stages) == 1
        if number is None:
            number = self.n_shared if shared else self.n_alone
            self.n_shared, self.n_alone = self.n_shared + shared, self.n_alone + (not shared)
        return self._add(Row(stage, "stream", kind, 0.0, self.parts[part].nbytes, part=part, needs=needs,
                             group=self.groups.index(stages), number=number, shared=shared))  # fmt: skip

    def _updates(self, stage: int, tied: tuple[int, int] | None) -> dict[int, int]:
        """Update a stage's chunks, the weights that are tied after their (part, row that has the sum); return the row
        of each."""
        mine = [chunk for chunk in sorted(self.stage_of) if self.stage_of[chunk] == stage]
        share = self.replicas if self.sharded else 1
        updates = {}
        for chunk in mine:
            piece = self.chunks[chunk]
            sums = list(self.sums.get(chunk, []))
            if tied is not None and chunk in (0, len(self.chunks) - 1):
                sums.append(tied[1])
            if sums:
                seconds = piece.workload.optimizer / share
                row = Row(stage, "compute", UPDATE, seconds, first=piece.first, end=piece.end, needs=sums)
                updates[chunk] = self._add(row)
        return updates
