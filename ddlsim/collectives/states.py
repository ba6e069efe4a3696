"""The contents of every rank's buffer, round by round, for animations of collectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import checked
from ddlsim.collectives.check import Flags, add, addresses, groups_of, initial, promise, validate
from ddlsim.collectives.schedule import REDUCING, Ints, Round, Schedule
from ddlsim.errors import ConfigError

#: upper limit of the numbers in the `counts` of one state (8 MB): a ring of 100 ranks
MOST_COUNTS = 1_000_000


@dataclass(frozen=True, eq=False)
class State:
    """Contents of all ranks' buffers after `round` rounds, and the chunks moved in the last round.

    round     number of executed rounds; 0: initial state
    counts    (n_ranks, n_chunks, n_ranks) number of times that a chunk on a rank contains each rank's contribution. The
              axes are the rank, the chunk and the contributing rank
    required  (n_ranks, n_chunks) whether the collective specifies final contents for the chunk
    whole     (n_ranks, n_chunks) whether the chunk currently has its specified final contents
    src, dst  (m,) sending and receiving rank of each chunk moved in the last round; empty in the initial state
    chunk     (m,) index of each chunk moved in the last round
    reduced   (m,) whether the receiver combined each moved chunk with its own data instead of replacing that data
    lane      (m,) lane of the schedule in which each chunk was moved
    reduces   whether the collective is a reduction

    If the schedule has several `copies`, their contributions are added, and chunk c represents chunk c of every copy.
    """

    round: int
    counts: Ints
    required: Flags
    whole: Flags
    src: Ints
    dst: Ints
    chunk: Ints
    reduced: Flags
    lane: Ints
    reduces: bool

    @property
    def contributors(self) -> Ints:
        """Number of ranks that have contributed to each chunk of each rank, shape (n_ranks, n_chunks)."""
        return np.asarray(np.count_nonzero(self.counts, axis=2), dtype=np.int64)

    @property
    def labels(self) -> npt.NDArray[np.str_]:
        """Labels of the cells in a picture, shape (n_ranks, n_chunks).

        In reductions, the label is the number of contributions. In other collectives, it is the rank whose data the
        chunk contains, or "" if the chunk is empty.
        """
        held = self.contributors
        whose = np.where(held == 0, "", self.counts.argmax(axis=2).astype(np.str_))
        return held.astype(np.str_) if self.reduces else whose

    @property
    def done(self) -> Flags:
        """Whether each rank has the final contents in all chunks that the collective specifies, shape (n_ranks,)."""
        return np.asarray((self.whole | ~self.required).all(axis=1))


@checked
def states(schedule: Schedule) -> Iterator[State]:
    """Yield the contents of all ranks' buffers before the first round of `schedule` and after every round.

    Each repetition of a round counts as a separate round. Ranks execute the rounds of a lane in lockstep, and lanes run
    concurrently. In a simulation, by contrast, each rank proceeds at its own pace, but the final contents are the same
    (see :func:`ddlsim.collectives.check`). The schedule need not implement its collective correctly.

    Raises ConfigError for a malformed schedule, and if there are too many ranks and chunks to count every contribution
    (for a ring, more than 100 ranks).
    """
    validate(schedule)
    n_counts = schedule.n_ranks * schedule.n_chunks * schedule.n_ranks
    if n_counts > MOST_COUNTS:
        raise ConfigError(
            f"states: {schedule.n_ranks} ranks with {schedule.n_chunks} chunks have {n_counts:,} contributions to "
            f"count, more than the limit of {MOST_COUNTS:,}; use fewer ranks or chunks"
        )
    return _played(schedule)


def _played(schedule: Schedule) -> Iterator[State]:
    n_ranks, n_chunks = schedule.n_ranks, schedule.n_chunks
    marks = np.eye(n_ranks, dtype=np.uint64)
    held = initial(schedule, marks)
    flat = held.reshape(-1, n_ranks)
    promises = [promise(schedule, group, n_chunks // schedule.copies, marks) for group in groups_of(schedule)]

    def state(round: int, src: Ints, dst: Ints, chunk: Ints, reduced: Flags, lane: Ints) -> State:
        counts = held.reshape(n_ranks, schedule.copies, -1, n_ranks).sum(axis=1, dtype=np.int64)
        required, final = np.zeros((2, *counts.shape[:2]), dtype=np.bool_)
        for group, (expected, must) in zip(groups_of(schedule), promises, strict=True):
            required[group] = must
            final[group] = must & (counts[group] == expected).all(axis=2)
        return State(
            round, counts, required, final, src, dst, chunk % counts.shape[1], reduced, lane, schedule.kind in REDUCING
        )

    nothing, no_flags = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.bool_)
    yield state(0, nothing, nothing, nothing, no_flags, nothing)
    for number, rounds in enumerate(_steps(schedule), start=1):
        moves = [addresses(schedule, round, repetition) for _, round, repetition in rounds]
        brought = [flat[source] for source, _ in moves]  # data that all senders held when they entered the round
        for (_, round, _), (_, target), values in zip(rounds, moves, brought, strict=True):
            if round.reduce and len(target):
                add(flat, target, values)
            else:
                flat[target] = values
        sizes = [len(source) for source, _ in moves]
        source, target = (np.concatenate(parts) for parts in zip(*moves, strict=True))
        lanes, reduced = [lane for lane, _, _ in rounds], [round.reduce for _, round, _ in rounds]
        reduces = np.repeat(np.array(reduced, dtype=np.bool_), sizes)
        lane = np.repeat(np.array(lanes, dtype=np.int64), sizes)
        yield state(number, source // n_chunks, target // n_chunks, source % n_chunks, reduces, lane)


def beginning(schedule: Schedule, n_rounds: int) -> Schedule:
    """Return the part of `schedule` up to state `n_rounds` (0: nothing); it does not implement its kind."""
    lanes = []
    for lane, levels in zip(schedule.lanes, _levels(schedule), strict=True):
        kept = [sum(level < n_rounds for level in round_levels) for round_levels in levels]
        lanes.append(tuple(replace(round, repeat=n) for round, n in zip(lane, kept, strict=True) if n))
    return replace(schedule, lanes=tuple(lane for lane in lanes if lane))


def _steps(schedule: Schedule) -> list[list[tuple[int, Round, int]]]:
    """Return the active (lane, round, repetition) of each step."""
    steps: dict[int, list[tuple[int, Round, int]]] = {}
    for number, (lane, levels) in enumerate(zip(schedule.lanes, _levels(schedule), strict=True)):
        for round, round_levels in zip(lane, levels, strict=True):
            for repetition, level in enumerate(round_levels):
                steps.setdefault(level, []).append((number, round, repetition))
    return [steps[level] for level in sorted(steps)]


def _levels(schedule: Schedule) -> list[list[list[int]]]:
    """Return the step of each repetition of each round of each lane, the earliest that its ranks allow."""
    levels_by_lane = []
    for lane in schedule.lanes:
        n_before = np.zeros(schedule.n_ranks, dtype=np.int64)  # steps that each rank has completed
        levels = []
        for round in lane:
            ranks = np.concatenate([round.src, round.dst])
            first = int(n_before[ranks].max())
            n_before[ranks] = first + round.repeat
            levels.append(list(range(first, first + round.repeat)))
        levels_by_lane.append(levels)
    return levels_by_lane
