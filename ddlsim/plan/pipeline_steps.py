"""The step of the stages of a pipeline, as the template of one replica.

A stage treats all micro-batches alike: the rows of each distinct pass are built once, and repeated with numpy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ddlsim.plan import plan as ps
from ddlsim.plan.chunks import Chunk
from ddlsim.plan.data_parallel import parts_of
from ddlsim.plan.pipeline_orders import Pass, PassOrder
from ddlsim.plan.plan import Ints, Part, Plan
from ddlsim.plan.program import Row, Step, step_of, template_of
from ddlsim.plan.rows import ranges
from ddlsim.workload.buckets import Bucket
from ddlsim.workload.compute import Workload


class Tie(NamedTuple):
    """Weights shared by the layers `owner`, in the first chunk, and `user`, in the last chunk."""

    owner: int
    user: int
    nbytes: float


def tie_between(chunks: Sequence[Chunk]) -> Tie | None:
    """Return the word embedding that the output layer of another chunk uses too, if there is one."""
    return tie_of(chunks) if len(chunks) > 1 else None


def tie_of(chunks: Sequence[Chunk]) -> Tie | None:
    """Return the word embedding whose weights a tied output layer shares, if there is one."""
    layers = [(chunk, i, layer) for chunk in chunks for i, layer in enumerate(chunk.workload.model.layers)]
    for chunk, i, user in layers:
        if user.type != "tied_dense":
            continue
        size = user.in_shape[-1] * user.out_shape[-1]
        for other, j, owner in layers:
            for name, n in owner.tensors:
                if owner.type == "embedding" and n == size:
                    work = other.workload
                    names = [tensor for tensor, _ in owner.tensors]
                    nbytes = work.tensor_nbytes[work.tensor_layer == j][names.index(name)]
                    return Tie(other.first + j, chunk.first + i, float(nbytes))
    return None


#: name of recomputed forward passes
RECOMPUTE = "recompute"
Buckets = Callable[[Workload], Sequence[Bucket]]


class Template:
    """The rows of passes and of what follows them; builders add them one by one, in any order.

    groups  stages of each group: one stage means its replicas, two mean those of one replica
    """

    def __init__(self, chunks: Sequence[Chunk], order: PassOrder, buckets: Buckets, replicas: int, *,
                 recompute: bool, sharded: bool, tie: Tie | None) -> None:  # fmt: skip
        self.chunks, self.order, self.replicas = chunks, order, replicas
        self.recompute, self.sharded = recompute, sharded and replicas > 1
        self.n_layers = chunks[-1].end
        placed, first = np.unique(order.chunk, return_index=True)
        self.stage_of = dict(zip(placed.tolist(), order.rank[first].tolist(), strict=True))
        self.rows: list[Row] = []
        self.groups: list[tuple[int, ...]] = []
        self.parts: list[Part] = []
        self.n_alone = self.n_shared = 0
        self.tie = tie
        works = [self._alone(chunk) for chunk in chunks]
        self.buckets = [buckets(work) if len(work.tensor_layer) else () for work in works]
        self.ranges = [parts_of(*pair) if pair[1] else () for pair in zip(works, self.buckets, strict=True)]
        self.arrivals: dict[tuple[str, int, int], int] = {}  # pass -> the receive that it waits for
        self.passes: list[tuple[int, Pass]] = []  # first row of each pass
        self.sums: dict[int, list[int]] = {}  # chunk -> rows of its sums
        self.parts_of: dict[int, list[int]] = {}
        self.part_of: dict[tuple[int, int], int] = {}  # (chunk, bucket) -> part
        self.lanes: dict[tuple[int, str], int] = {}

    def _alone(self, chunk: Chunk) -> Workload:
        """Return the workload of a chunk without the gradient of tied weights, which is summed separately."""
        work = chunk.workload
        if self.tie is not None and chunk.first <= self.tie.owner < chunk.end:
            mine = (work.tensor_layer == self.tie.owner - chunk.first) & (work.tensor_nbytes == self.tie.nbytes)
            mine &= np.cumsum(mine) == 1
            left = np.bincount(work.tensor_layer[mine], work.tensor_nbytes[mine], len(work.forward))
            work = dataclasses.replace(
                work,
                grad_nbytes=work.grad_nbytes - left,
                tensor_layer=work.tensor_layer[~mine],
                tensor_nbytes=work.tensor_nbytes[~mine],
            )
        return work

    def template(self, steps: Sequence[Step], delays: tuple[int, ...] = ()) -> Plan:
        """Return the template of steps with the lanes of `lanes`."""
        return template_of(
            steps,
            self.lanes,
            groups=self.groups,
            parts=self.parts,
            n_layers=self.n_layers,
            names=(RECOMPUTE,),
            delays=delays,
        )

    def _add(self, row: Row) -> int:
        self.rows.append(row)
        return len(self.rows) - 1

    # ------------------------------------------------------------ passes and messages

    def _forward(self, stage: int, pass_: Pass) -> None:
        chunk = self.chunks[pass_.chunk]
        holds = chunk.enters if self.recompute else float(chunk.stored.sum())
        row = self._work(stage, ps.FORWARD, chunk.workload.forward_time, pass_, holds)
        self.passes.append((row, pass_))
        if pass_.chunk < len(self.chunks) - 1:
            self._message(row, Pass("F", pass_.chunk + 1, pass_.micro), self.chunks[pass_.chunk + 1])

    def _backward(self, stage: int, pass_: Pass, *, last: bool, split: bool = False) -> None:
        """Add a backward pass, `split` from that for the weights; during the `last` one of a chunk, its gradients are
        sent."""
        chunk = self.chunks[pass_.chunk]
        at = len(self.rows)
        if pass_.kind == "B" and self.recompute:
            held = float(chunk.stored.sum())
            seconds, layers = chunk.workload.forward_time, (chunk.first, chunk.end)
            self._add(Row(stage, "compute", ps.COMPUTE, seconds, 0.0, -1, *layers, holds=held, name=0))
        if pass_.kind == "B":
            self.passes.append((at, pass_))
        if split and pass_.kind == "B":
            seconds = float((chunk.workload.backward - chunk.weight_seconds).sum())
            row = self._work(stage, ps.BACKWARD_INPUT, seconds, pass_, 0.0)
        else:
            row = self._gradients(stage, pass_, split, last)
        if pass_.kind == "B" and pass_.chunk > 0:
            self._message(row, Pass("B", pass_.chunk - 1, pass_.micro), chunk)

    def _gradients(self, stage: int, pass_: Pass, split: bool, last: bool) -> int:
        """Add the backward pass for a chunk's weights, split where buckets are ready; return its last row."""
        chunk = self.chunks[pass_.chunk]
        kind, seconds = (ps.BACKWARD_WEIGHT, chunk.weight_seconds) if split else (ps.BACKWARD, chunk.workload.backward)
        buckets = self.buckets[pass_.chunk] if last else ()
        ready = sorted({bucket.ready_layer for bucket in buckets} | {0}, reverse=True)
        end, row = len(seconds), -1
        for layer in ready:
            freed = float(chunk.stored[layer:end].sum())
            if self.recompute and layer == 0:
                freed += chunk.enters
            if layer < end:
                place = (chunk.first + layer, chunk.first + end)
                row = self._work(stage, kind, float(seconds[layer:end].sum()), pass_, -freed, place)
            end = layer
            self._sum(stage, pass_.chunk, [i for i, bucket in enumerate(buckets) if bucket.ready_layer == layer], row)
        return row

    def _work(
        self, stage: int, kind: int, seconds: float, pass_: Pass, holds: float, layers: tuple[int, int] | None = None
    ) -> int:
        chunk = self.chunks[pass_.chunk]
        first, end = layers or (chunk.first, chunk.end)
        return self._add(Row(stage, "compute", kind, seconds, 0.0, pass_.micro, first, end, holds=holds))

    def _message(self, row: int, to: Pass, cut: Chunk) -> None:
        """Send the output of `row` to the rank of another pass, across the cut before a chunk."""
        here, there = self.rows[row].place, self.stage_of[to.chunk]
        if here == there:
            self.arrivals[to] = row
            return
        way, n = "forward" if to.kind == "F" else "backward", len(self.order)
        for stage, peer, kind, side in ((here, there, ps.SEND, "to"), (there, here, ps.RECEIVE, "from")):
            name = {1: "next", n - 1: "previous"}.get((peer - stage) % n, f"stage {peer}")
            if n == 2:
                name = "the other"
            self._add(Row(stage, f"{way} {side} {name}", kind, 0.0, cut.enters, to.micro, cut.first, cut.first, to=peer,
                          number=self.n_alone, needs=[row] if kind == ps.SEND else []))  # fmt: skip
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
        """Add the sum over a stage's replicas, if there are several, after a row; return the row with the result."""
        if self.replicas == 1:
            return row
        kind = ps.REDUCE_SCATTER if self.sharded else ps.ALL_REDUCE
        return self._collective(kind, stage, (stage,), part, [row])

    def _collective(
        self, kind: int, stage: int, stages: tuple[int, ...], part: int, needs: list[int], number: int | None = None
    ) -> int:
        if stages not in self.groups:
            self.groups.append(stages)
        shared = len(stages) == 1
        if number is None:
            number = self.n_shared if shared else self.n_alone
            self.n_shared, self.n_alone = self.n_shared + shared, self.n_alone + (not shared)
        return self._add(Row(stage, "stream", kind, 0.0, self.parts[part].nbytes, part=part, needs=needs,
                             group=self.groups.index(stages), number=number))  # fmt: skip

    def _updates(self, stage: int, tied: tuple[int, int] | None) -> dict[int, int]:
        """Update a stage's chunks, given (part, row with the sum) of tied weights; return the row of each chunk's
        update."""
        share = self.replicas if self.sharded else 1
        updates = {}
        for chunk in (chunk for chunk in sorted(self.stage_of) if self.stage_of[chunk] == stage):
            piece = self.chunks[chunk]
            sums = list(self.sums.get(chunk, []))
            if tied is not None and chunk in (0, len(self.chunks) - 1):
                sums.append(tied[1])
            if sums:
                seconds = piece.workload.optimizer / share
                row = Row(stage, "compute", ps.UPDATE, seconds, first=piece.first, end=piece.end, needs=sums)
                updates[chunk] = self._add(row)
        return updates


class _Block(NamedTuple):
    """The rows `begin` to `end` - 1 of a pass, the row that sends a message and the row with which another stage has
    received it, -1 if there is none."""

    begin: int
    end: int
    sends: int
    arrives: int


class Blocks(Template):
    """The rows of steps in which the update follows the passes of all micro-batches."""

    def step(self, p2p: str) -> Step:
        """Return the rows of a step."""
        order, (blocks, which) = self.order, self._different()
        sizes = np.array([block.end - block.begin for block in blocks], dtype=np.int64)[which]
        offset = np.cumsum(sizes) - sizes
        n = int(sizes.sum())
        begin = np.array([block.begin for block in blocks], dtype=np.int64)
        source = ranges(begin[which], sizes)  # the row that each row is copied from
        place = np.empty(len(self.rows), dtype=np.int64)
        place[source[::-1]] = np.arange(n)[::-1]  # index of its first copy
        n_written, self.n_before = len(self.rows), n - len(self.rows)
        self.sums = {chunk: place[rows].tolist() for chunk, rows in self.sums.items()}
        micro = np.repeat(order.micro, sizes)
        sends = np.array([row.kind == ps.SEND for row in self.rows])[source]
        carries = np.array([row.kind in (ps.SEND, ps.RECEIVE) for row in self.rows])[source]
        self.n_alone = int(sends.sum())
        numbers = np.cumsum(sends) - 1  # a message is received by the row after its send
        compute = np.flatnonzero(np.array([row.lane == "compute" for row in self.rows])[source])
        done = compute[np.searchsorted(compute, np.append(offset[1:], n)) - 1]  # last row of each pass that computes
        needs = [_copied(self.rows, source), *_between(blocks, which, order, offset, done, len(self.chunks), p2p)]
        ends = np.append(offset, n)[order.offsets[1:]]
        latest = compute[np.searchsorted(compute, ends) - 1].tolist()
        tied, before = self._tied_sums(latest), list[tuple[int, int, int]]()
        for stage, first in enumerate(offset[order.offsets[:-1]].tolist()):
            before += [(first, row, 1) for row in self._end_stage(stage, tied.get(stage))]
        copied = np.concatenate([source, np.arange(n_written, len(self.rows))])
        column = {name: values[copied] for name, values in step_of(self.rows, self.lanes).columns.items()}
        column["micro"][:n] = np.where(column["micro"][:n] >= 0, micro, -1)
        column["number"][:n] = np.where(carries, numbers, column["number"][:n])
        shared = np.array([len(stages) == 1 for stages in self.groups] + [False])[column["group"]]
        column["number"] += np.where(shared, self.n_alone, 0)
        after = [(self.n_before + i, need, 0) for i in range(n_written, len(self.rows)) for need in self.rows[i].needs]
        more = np.array([*after, *before], dtype=np.int64).reshape(-1, 3)
        rows, needed = (np.concatenate([*columns, more[:, i]]) for i, columns in enumerate(zip(*needs, strict=True)))
        return Step(column, (rows, needed, np.append(np.zeros(len(rows) - len(more), dtype=np.int64), more[:, 2])))

    n_before = 0  # number of copied rows minus that of the rows built

    def _add(self, row: Row) -> int:
        return super()._add(row) + self.n_before

    def _different(self) -> tuple[list[_Block], Ints]:
        """Build the rows of all distinct passes; return them, and the index of each pass among them."""
        order, n = self.order, len(self.chunks)
        stage, kind, chunk, micro = order.rank, order.kind, order.chunk, order.micro
        of_micro = chunk * (int(micro.max()) + 1) + micro
        split = np.isin(of_micro, of_micro[kind == 2])
        ends = np.flatnonzero((kind == 2) | ((kind == 1) & ~split))
        at = np.full(n, -1)
        np.maximum.at(at, chunk[ends], ends)
        last = np.isin(np.arange(len(stage)), at)
        code = ((kind * n + chunk) * 2 + split) * 2 + last
        _, first, which = np.unique(code, return_index=True, return_inverse=True)
        turn = np.argsort(first)
        blocks = [self._block(int(stage[i]), order.at(i), bool(last[i]), bool(split[i])) for i in first[turn].tolist()]
        return blocks, np.argsort(turn)[which.reshape(-1)]

    def _block(self, stage: int, pass_: Pass, last: bool, split: bool) -> _Block:
        begin = len(self.rows)
        if pass_.kind == "F":
            self._forward(stage, pass_)
        else:
            self._backward(stage, pass_, last=last, split=split)
        sends = next((i for i in range(begin, len(self.rows)) if self.rows[i].kind == ps.SEND), -1)
        to = Pass(pass_.kind, pass_.chunk + (1 if pass_.kind == "F" else -1), pass_.micro)
        return _Block(begin, len(self.rows), sends, self.arrivals.get(to, -1))

    # ------------------------------------------------------------ after all passes

    def _tied_sums(self, latest: list[int]) -> dict[int, tuple[int, int]]:
        """Sum the gradient of tied weights over replicas, then over the two stages that hold them; return (part, row
        with the sum) by stage.

        latest  the last task of each stage's device
        """
        if self.tie is None:
            return {}
        part = self._part(self.tie.nbytes, self.tie.owner, self.tie.owner + 1, self.tie.user)
        stages = list(dict.fromkeys(self.stage_of[chunk] for chunk in (0, len(self.chunks) - 1)))
        sums = {stage: self._of_replicas(stage, part, latest[stage]) for stage in stages}
        if len(stages) == 2:
            number = None
            for stage in stages:
                sums[stage] = self._collective(ps.ALL_REDUCE, stage, tuple(stages), part, [sums[stage]], number)
                number = self.rows[-1].number
        return {stage: (part, row) for stage, row in sums.items()}

    def _end_stage(self, stage: int, tied: tuple[int, int] | None) -> list[int]:
        """Update a stage's chunks and, if replicas hold shards, gather them for the next forward pass; return the rows
        that gather."""
        updates = self._updates(stage, tied)
        if not self.sharded:
            return []
        parts = [(part, [row]) for chunk, row in updates.items() for part in reversed(self.parts_of.get(chunk, []))]
        if tied is not None:  # the first layer needs them first
            parts.insert(0 if 0 in updates else len(parts), (tied[0], list(updates.values())))
        return [self._collective(ps.ALL_GATHER, stage, (stage,), part, needs) for part, needs in parts]


def _copied(rows: Sequence[Row], source: Ints) -> tuple[Ints, Ints]:
    """Return the dependencies of copied rows within their own pass; `source` is the row that each is copied from."""
    counts = np.array([len(row.needs) for row in rows], dtype=np.int64)
    flat = np.array([need for row in rows for need in row.needs], dtype=np.int64)
    n_needs = counts[source]
    row = np.repeat(np.arange(len(source)), n_needs)
    return row, flat[ranges((np.cumsum(counts) - counts)[source], n_needs)] + row - source[row]


def _between(
    blocks: Sequence[_Block], which: Ints, passes: PassOrder, offset: Ints, done: Ints, n_chunks: int, p2p: str
) -> list[tuple[Ints, Ints]]:
    """Return the dependencies between passes: on earlier sends and on arrivals and, if neighbours take turns, on what
    must arrive before something is sent back. `done`: the last row of each pass that computes."""
    begin, sends, arrives = (
        np.array([getattr(block, name) for block in blocks], dtype=np.int64)[which]
        for name in ("begin", "sends", "arrives")
    )
    sent = np.where(sends >= 0, offset + sends - begin, -1)
    shape = 3, n_chunks + 2, int(passes.micro.max(initial=0)) + 1
    where = np.full(shape, -1)  # row with which the tensor for a pass has arrived
    left = np.flatnonzero(arrives >= 0)
    to = passes.chunk[left] + np.where(passes.kind[left] == 0, 1, -1)
    where[passes.kind[left], to, passes.micro[left]] = (offset + arrives - begin)[left]
    needed = where[passes.kind, passes.chunk, passes.micro]
    coming = np.flatnonzero(needed >= 0)
    pairs = [(offset[coming], needed[coming])]
    same = np.diff(passes.rank) == 0
    if p2p != "overlapped":
        after = 1 + np.flatnonzero(same & (sent[:-1] >= 0))
        pairs.insert(0, (offset[after], sent[after - 1]))
    if p2p == "in turns":
        back = np.flatnonzero(same & (passes.kind[:-1] == 1) & (passes.kind[1:] == 0) & (sent[:-1] >= 0))
        back = back[needed[back + 1] >= 0]
        pairs.append((sent[back], needed[back + 1]))
    if p2p == "in step":  # a rank waits for a tensor that its next pass does not need, and the sender for that rank
        steps = _time_steps(passes, n_chunks)
        place, receiver = passes.rank * (1 + steps.max()) + steps, to % len(passes)
        after = np.searchsorted(place, receiver * (1 + steps.max()) + steps[left], side="right")
        rank = np.append(passes.rank, -1)
        waits, beside = rank[after] == receiver, (rank[after - 1] == receiver) & (rank[left + 1] == rank[left])
        pairs.append((offset[after[waits]], (offset + arrives - begin)[left[waits]]))
        pairs.append((offset[left[beside] + 1], done[after[beside] - 1]))
    return pairs


def _time_steps(passes: PassOrder, n_chunks: int) -> Ints:
    """Return the row of each pass in the table by which PyTorch's ranks execute interleaved 1F1B, (n_passes,).

    The table has a column per rank, in which forward and backward passes alternate once all ranks have had the first
    micro-batches (torch/distributed/pipelining/schedules.py, ``ScheduleInterleaved1F1B``).
    """
    ranks = np.arange(len(passes))[:, None]
    kind = passes.kind.reshape(len(passes), -1)
    nth = np.where(kind == 0, np.cumsum(kind == 0, axis=1), np.cumsum(kind > 0, axis=1)) - 1
    later = 2 * (len(passes) - 1 - ranks)
    warmup = np.minimum(n_chunks - len(passes) + later, kind.shape[1] // 2)
    alternate = n_chunks + later + 2 * nth
    forward = np.where(nth < warmup, ranks + nth, alternate - 2 * warmup)
    return np.asarray(np.where(kind == 0, forward, alternate + 1).ravel(), dtype=np.int64)
