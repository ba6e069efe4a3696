"""What the ranks of one pipeline do in a step with a flush, as columns that `pipeline` repeats for replicas and steps.

A stage does the same with every micro-batch: the rows of each pass that differs are made once, and repeated by numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ddlsim.plan.chunks import Chunk
from ddlsim.plan.pipeline_orders import Pass, PassOrder
from ddlsim.plan.pipeline_rows import Row
from ddlsim.plan.pipeline_template import Buckets, Template
from ddlsim.plan.plan import ALL_GATHER, ALL_REDUCE, RECEIVE, SEND, Ints

_COLUMNS = ("kind", "seconds", "nbytes", "micro", "first", "end", "part", "holds", "to", "group", "number", "shared")


@dataclass(frozen=True, eq=False)
class Step:
    """The rows of a step of one replica.

    columns   of :class:`~ddlsim.plan.pipeline_rows.Row`, (n,) each, and "lane", which of `lanes`
    lanes     stage and name
    needs     (row, row that it needs), (n_needs,) each
    before    (row, row of the step before that it needs)
    groups, parts, n_alone, n_shared
              as a :class:`~ddlsim.plan.pipeline_template.Template` has them
    """

    columns: dict[str, npt.NDArray[Any]]
    lanes: list[tuple[int, str]]
    needs: tuple[Ints, Ints]
    before: tuple[Ints, Ints]
    groups: list[tuple[int, ...]]
    parts: tuple[Any, ...]
    n_alone: int
    n_shared: int


def step_of(chunks: Sequence[Chunk], order: PassOrder, buckets: Buckets, replicas: int, *, recompute: bool,
            sharded: bool, p2p: str) -> Step:  # fmt: skip
    """Return a step in which all micro-batches go forward and back before the update; see
    :func:`ddlsim.plan.pipeline.pipeline`."""
    return _Blocks(chunks, order, buckets, replicas, recompute=recompute, sharded=sharded).step(p2p)


class _Block(NamedTuple):
    """The rows of a pass: `begin` to `end` - 1, among them the message that it sends and the row that another stage
    then has it with, -1 if none."""

    begin: int
    end: int
    sends: int
    arrives: int


class _Passes(NamedTuple):
    """All passes, stage by stage in their order, (n_passes,) each: block, and kind as a place in "FBW"."""

    stage: Ints
    block: Ints
    kind: Ints
    chunk: Ints
    micro: Ints


class _Blocks(Template):
    def step(self, p2p: str) -> Step:
        blocks, passes = self._different()
        size = np.array([block.end - block.begin for block in blocks], dtype=np.int64)
        sizes = size[passes.block]
        offset = np.cumsum(sizes) - sizes
        n = int(sizes.sum())
        begin = np.array([block.begin for block in blocks], dtype=np.int64)
        made = np.arange(n) + np.repeat(begin[passes.block] - offset, sizes)  # from which each row is copied
        place = np.empty(len(self.rows), dtype=np.int64)
        place[made[::-1]] = np.arange(n)[::-1]  # of the first copy
        n_made, self.n_before = len(self.rows), n - len(self.rows)
        self.sums = {chunk: place[rows].tolist() for chunk, rows in self.sums.items()}
        micro = np.repeat(passes.micro, sizes)
        sends = np.array([row.kind == SEND for row in self.rows])[made]
        carries = np.array([row.kind in (SEND, RECEIVE) for row in self.rows])[made]
        self.n_alone = int(sends.sum())
        numbers = np.cumsum(sends) - 1  # a message is received in the row after it
        needs = [_copied(self.rows, made), *_between(blocks, passes, offset, len(self.chunks), p2p)]
        stage_begins = np.searchsorted(passes.stage, np.arange(len(self.order) + 1))
        ends = np.append(offset, n)[stage_begins[1:]]
        compute = np.flatnonzero(np.array([row.lane == "compute" for row in self.rows])[made])
        latest = compute[np.searchsorted(compute, ends) - 1].tolist()
        tied, before = self._tied_sums(latest), list[tuple[int, int]]()
        for stage, first in enumerate(offset[stage_begins[:-1]].tolist()):
            before += [(first, row) for row in self._end_stage(stage, tied.get(stage))]
        column = {name: np.array([getattr(row, name) for row in self.rows]) for name in _COLUMNS}
        lanes: dict[tuple[int, str], int] = {}
        column["lane"] = np.array([lanes.setdefault((row.stage, row.lane), len(lanes)) for row in self.rows])
        copied = np.concatenate([made, np.arange(n_made, len(self.rows))])
        column = {name: each[copied] for name, each in column.items()}
        column["micro"][:n] = np.where(column["micro"][:n] >= 0, micro, -1)
        column["number"][:n] = np.where(carries, numbers, column["number"][:n])
        needs.append(_pairs([(self.n_before + i, need) for i in range(n_made, len(self.rows))
                             for need in self.rows[i].needs]))  # fmt: skip
        return Step(
            column, list(lanes), _joined(needs), _pairs(before), self.groups, tuple(self.parts), self.n_alone,
            self.n_shared,
        )  # fmt: skip

    n_before = 0  # rows that there are more than those made

    def _add(self, row: Row) -> int:
        return super()._add(row) + self.n_before

    def _different(self) -> tuple[list[_Block], _Passes]:
        """Make the rows of all passes that differ; return them, and which of them each pass is."""
        blocks: dict[tuple[int, str, int, bool, bool], int] = {}
        made: list[_Block] = []
        of_pass: list[int] = []
        apart = self.apart
        for stage, passes in enumerate(self.order):
            last = {each.chunk: at for at, each in enumerate(passes)
                    if each.kind == "W" or (each.kind == "B" and (each.chunk, each.micro) not in apart)}  # fmt: skip
            for at, each in enumerate(passes):
                kind, chunk, micro = each
                key = stage, kind, chunk, bool(apart) and (chunk, micro) in apart, last[chunk] == at
                if key not in blocks:
                    blocks[key] = len(made)
                    made.append(self._block(stage, each, key[-1]))
                of_pass.append(blocks[key])
        stages = np.repeat(np.arange(len(self.order)), [len(passes) for passes in self.order])
        every = [each for passes in self.order for each in passes]
        kinds = np.array(["FBW".index(each.kind) for each in every], dtype=np.int64)
        chunks = np.array([each.chunk for each in every], dtype=np.int64)
        micros = np.array([each.micro for each in every], dtype=np.int64)
        return made, _Passes(stages, np.array(of_pass, dtype=np.int64), kinds, chunks, micros)

    def _block(self, stage: int, each: Pass, last: bool) -> _Block:
        begin = len(self.rows)
        if each.kind == "F":
            self._forward(stage, each)
        else:
            self._backward(stage, each, last)
        sends = next((i for i in range(begin, len(self.rows)) if self.rows[i].kind == SEND), -1)
        to = Pass(each.kind, each.chunk + (1 if each.kind == "F" else -1), each.micro)
        return _Block(begin, len(self.rows), sends, self.arrivals.get(to, -1))

    # ------------------------------------------------------------ after all passes

    def _tied_sums(self, latest: list[int]) -> dict[int, tuple[int, int]]:
        """Sum the gradient of tied weights over replicas, then over the two stages that have them; return (part, row
        that has the sum) by stage.

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
                sums[stage] = self._collective(ALL_REDUCE, stage, tuple(stages), part, [sums[stage]], number)
                number = self.rows[-1].number
        return {stage: (part, row) for stage, row in sums.items()}

    def _end_stage(self, stage: int, tied: tuple[int, int] | None) -> list[int]:
        """Update a stage's chunks and, where replicas have shares, gather them for the next forward pass; return the
        rows that gather."""
        updates = self._updates(stage, tied)
        if not self.sharded:
            return []
        gathers = [
            self._collective(ALL_GATHER, stage, (stage,), part, [row])
            for chunk, row in updates.items() for part in reversed(self.parts_of.get(chunk, []))
        ]  # fmt: skip
        if tied is not None:
            gathers.append(self._collective(ALL_GATHER, stage, (stage,), tied[0], list(updates.values())))
        return gathers


def _pairs(pairs: Sequence[tuple[int, int]]) -> tuple[Ints, Ints]:
    row, need = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return row, need


def _joined(pairs: Sequence[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    row, need = (np.concatenate(each) for each in zip(*pairs, strict=True))
    return row, need


def _copied(rows: Sequence[Row], made: Ints) -> tuple[Ints, Ints]:
    """Return what copies of rows need of their own pass, if `made` says of which row each is one."""
    counts = np.array([len(row.needs) for row in rows], dtype=np.int64)
    flat = np.array([need for row in rows for need in row.needs], dtype=np.int64)
    own = counts[made]
    row = np.repeat(np.arange(len(made)), own)
    at = np.arange(len(row)) + np.repeat((np.cumsum(counts) - counts)[made] - (np.cumsum(own) - own), own)
    return row, flat[at] + row - made[row]


def _between(
    blocks: Sequence[_Block], passes: _Passes, offset: Ints, n_chunks: int, p2p: str
) -> list[tuple[Ints, Ints]]:
    """Return what passes need of others: what has been sent before, what has arrived, and, where neighbours take turns,
    what has come before something is sent back."""
    begin, sends, arrives = (
        np.array([getattr(block, name) for block in blocks], dtype=np.int64)[passes.block]
        for name in ("begin", "sends", "arrives")
    )
    sent = np.where(sends >= 0, offset + sends - begin, -1)
    shape = 3, n_chunks + 2, int(passes.micro.max(initial=0)) + 1
    where = np.full(shape, -1)  # the row with which a tensor has arrived for a pass
    left = np.flatnonzero(arrives >= 0)
    to = passes.chunk[left] + np.where(passes.kind[left] == 0, 1, -1)
    where[passes.kind[left], to, passes.micro[left]] = (offset + arrives - begin)[left]
    needed = where[passes.kind, passes.chunk, passes.micro]
    coming = np.flatnonzero(needed >= 0)
    pairs = [(offset[coming], needed[coming])]
    same = passes.stage[1:] == passes.stage[:-1]
    if p2p != "overlapped":
        after = 1 + np.flatnonzero(same & (sent[:-1] >= 0))
        pairs.insert(0, (offset[after], sent[after - 1]))
    if p2p == "in turns":
        back = np.flatnonzero(same & (passes.kind[:-1] == 1) & (passes.kind[1:] == 0) & (sent[:-1] >= 0))
        back = back[needed[back + 1] >= 0]
        pairs.append((sent[back], needed[back + 1]))
    return pairs
