"""One rank's part of a schedule: the messages that it sends and receives in each step.

The buffer is float32. Chunks end at whole elements, equally on all ranks, so sizes differ from the schedule's exact
shares by less than an element. A message without data still carries one byte, so that its receiver can detect it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from ddlsim.collectives.schedule import Ints, Round, Schedule
from ddlsim.errors import ConfigError

ITEM_NBYTES = 4


@dataclass(frozen=True)
class Part:
    """One end of a message: parts of the buffer that go to, or come from, a `peer`.

    pieces    slices of the buffer, in elements, in message order
    padding   meaningless bytes before them
    reduce    a received message is added to the buffer instead of overwriting it
    snapshot  a sent message must be copied first, because the same step receives into its pieces
    ordinal   index among all messages of this lane from (or to) `peer`
    """

    peer: int
    pieces: tuple[slice, ...]
    padding: int
    reduce: bool
    snapshot: bool
    ordinal: int

    @property
    def nbytes(self) -> int:
        """Bytes on the connection."""
        n_elements: int = sum(piece.stop - piece.start for piece in self.pieces)
        return self.padding + ITEM_NBYTES * n_elements


@dataclass(frozen=True)
class Step:
    """A round in which this rank participates; it ends when all of these messages have ended on this rank."""

    sends: tuple[Part, ...]
    receives: tuple[Part, ...]


@dataclass(frozen=True)
class Program:
    """The work of one rank: lanes of steps on a buffer of `n_elements` float32 (times `copies`)."""

    rank: int
    n_elements: int
    copies: int
    lanes: tuple[tuple[Step, ...], ...]

    def peers(self) -> set[tuple[int, int]]:
        """Return the connections needed, as (peer, lane)."""
        return {
            (part.peer, number)
            for number, lane in enumerate(self.lanes)
            for step in lane
            for part in (*step.sends, *step.receives)
        }


def boundaries(schedule: Schedule, n_elements: int) -> Ints:
    """Return the boundaries of the chunks in a buffer of `n_elements`, shape (n_chunks + 1,), in elements.

    With `copies`, the buffer is longer by this factor. Raises ConfigError unless all copies have equal chunks.
    """
    n_copied = schedule.n_chunks // schedule.copies
    weight = np.ones(schedule.n_chunks) if schedule.chunk_weight is None else schedule.chunk_weight
    copies = weight.reshape(schedule.copies, n_copied)
    if (copies != copies[0]).any():
        raise ConfigError("the copies of this schedule have different chunks; use the same chunk_weight for each copy")
    ends = np.rint(np.cumsum(copies[0]) * (n_elements / copies[0].sum())).astype(np.int64)
    starts = np.arange(schedule.copies)[:, None] * n_elements
    return np.concatenate([np.zeros(1, dtype=np.int64), (starts + ends).ravel()])


def program_of(schedule: Schedule, rank: int, nbytes: int) -> Program:
    """Return the program of `rank` for `schedule` with `nbytes` (a multiple of 4) per rank."""
    n_elements = nbytes // ITEM_NBYTES
    bounds = boundaries(schedule, n_elements)
    lanes = tuple(tuple(_steps(schedule, lane, rank, bounds)) for lane in schedule.lanes)
    return Program(rank, n_elements, schedule.copies, lanes)


def _steps(schedule: Schedule, lane: tuple[Round, ...], rank: int, bounds: Ints) -> list[Step]:
    n_sent, n_received = Counter[int](), Counter[int]()
    steps = []
    for round in lane:
        mine = np.flatnonzero((round.src == rank) | (round.dst == rank)).tolist()
        for repetition in range(round.repeat if mine else 0):
            owner, chunk = schedule.chunks(round, repetition)
            carried = {message: chunk[owner == message] for message in mine}
            incoming = [m for m in mine if round.dst[m] == rank]
            outgoing = [m for m in mine if round.src[m] == rank]
            written = np.concatenate([carried[m] for m in incoming]) if incoming else chunk[:0]
            sends = tuple(
                _part(round, int(round.dst[m]), carried[m], bounds, bool(np.isin(carried[m], written).any()), n_sent)
                for m in outgoing
            )
            receives = tuple(_part(round, int(round.src[m]), carried[m], bounds, False, n_received) for m in incoming)
            steps.append(Step(sends, receives))
    return steps


def slices(chunks: Ints, bounds: Ints) -> list[slice]:
    """Return the slices of chunks in a buffer, merging consecutive ones."""
    runs = np.split(chunks, np.flatnonzero(np.diff(chunks) != 1) + 1) if len(chunks) else []
    return [slice(int(bounds[run[0]]), int(bounds[run[-1] + 1])) for run in runs]


def _part(round: Round, peer: int, chunks: Ints, bounds: Ints, snapshot: bool, counts: Counter[int]) -> Part:
    """Return one end of a message that carries `chunks`, and increment the message count of `peer`."""
    pieces = [piece for piece in slices(chunks, bounds) if piece.stop > piece.start]
    padding = math.ceil(round.header)
    counts[peer] += 1
    return Part(peer, tuple(pieces), padding if pieces else max(padding, 1), round.reduce, snapshot, counts[peer] - 1)
