"""Verification by replay: does a schedule implement its collective, regardless of timing?

Every buffer starts with a mark that identifies its rank. The rounds are replayed on the marks. At the end, each rank
must hold exactly the marks that the kind specifies:

==============  =========================================================================================
all_reduce      everywhere, the marks of all members, once each
broadcast       everywhere, the root's mark
reduce          the same as all_reduce, at the root
reduce_scatter  the same as all_reduce, for member i in block i (the i-th part of the chunks)
all_gather      everywhere, in block i the mark of member i
all_to_all      at member i, in block j the mark of member i-j (see `ddlsim.collectives.all_to_all`)
gather          the same as all_gather, at the root
scatter         at member i, in block i the root's mark
==============  =========================================================================================

Timing cannot matter inside a lane: a rank sends what it held when it entered the round, and what arrives
early waits for the receiver. One replay is therefore sufficient if no chunk is written twice in one round and no lane
reads or writes chunks that another lane writes; both are checked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import checked
from ddlsim.collectives.schedule import KINDS, REDUCING, Ints, Round, Schedule
from ddlsim.errors import ConfigError, unknown_name

Marks = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]

#: up to this many numbers, marks are exact counts per contributor; above, they are random 64-bit fingerprints
_EXACT_LIMIT = 4_000_000


@checked
def check(schedule: Schedule) -> None:
    """Verify that `schedule` is well formed and implements the collective named by its ``kind``.

    For up to about 64 ranks, every contribution is counted exactly. Larger schedules are replayed with one random
    64-bit number per rank, and reductions add these numbers modulo 2^64. An incorrect schedule then passes with a
    probability of about 2^-64.

    Raises ConfigError, giving the round, rank and chunk of the first error.
    """
    validate(schedule)
    n_ranks, n_chunks = schedule.n_ranks, schedule.n_chunks
    if n_ranks * n_chunks * n_ranks <= _EXACT_LIMIT:
        marks = np.eye(n_ranks, dtype=np.uint64)
    else:
        marks = np.random.default_rng(2009).integers(0, 2**64, (n_ranks, 1), dtype=np.uint64)
    state, written = _replay(schedule, initial(schedule, marks))
    _compare(schedule, state, written, marks)


def validate(schedule: Schedule) -> None:
    """Raise ConfigError unless ranks, chunks and shapes are in range (without replaying anything)."""
    if schedule.kind not in KINDS:
        raise unknown_name("kind of collective", schedule.kind, KINDS)
    weight = schedule.chunk_weight
    if weight is not None and not (weight.shape == (schedule.n_chunks,) and weight.min() > 0):
        raise ConfigError(f"chunk_weight must have {schedule.n_chunks} positive values, one per chunk")
    _validate_groups(schedule)
    for i, lane in enumerate(schedule.lanes):
        for k, round in enumerate(lane):
            _validate_round(schedule, round, f"lane {i}, round {k}")


def _validate_groups(schedule: Schedule) -> None:
    members = np.concatenate(groups_of(schedule))
    if len(np.unique(members)) != len(members) or members.min() < 0 or members.max() >= schedule.n_ranks:
        raise ConfigError(f"groups must contain distinct ranks from 0 to {schedule.n_ranks - 1}")
    for group in groups_of(schedule):
        if schedule.kind not in ("all_reduce", "broadcast", "reduce") and schedule.n_chunks % len(group):
            raise ConfigError(
                f"{schedule.n_chunks} chunks cannot be divided into {len(group)} equal blocks; "
                f"a {schedule.kind} requires a multiple of the number of ranks"
            )
        block_of, size = schedule.block_of, len(group)
        if block_of is not None and (
            block_of.shape != (schedule.n_chunks,)
            or (np.bincount(block_of, minlength=size) * size != schedule.n_chunks).any()
        ):
            raise ConfigError(f"block_of must divide the {schedule.n_chunks} chunks equally among the {size} blocks")
        if not 0 <= schedule.root < len(group):
            raise ConfigError(f"root = {schedule.root}: must be a rank from 0 to {len(group) - 1}")
    if schedule.n_chunks % schedule.copies or (schedule.copies > 1 and schedule.kind != "all_reduce"):
        raise ConfigError(
            f"copies={schedule.copies} requires an all_reduce whose number of chunks is a multiple of copies"
        )


def _validate_round(schedule: Schedule, round: Round, where: str) -> None:
    n_ranks, n_chunks = schedule.n_ranks, schedule.n_chunks
    for name in ("src", "dst", "start", "count"):
        if getattr(round, name).shape != (len(round.src),):
            raise ConfigError(
                f"{where}: {name} must be an int64 array of the same length as src; build rounds with messages()"
            )
    if len(round.src) == 0 or round.repeat < 1:
        raise ConfigError(f"{where}: the round has no messages, or repeat is below 1; remove the round")
    least = 0 if round.header > 0 and not round.count.any() else 1
    limits = (("src", 0, n_ranks), ("dst", 0, n_ranks), ("start", 0, n_chunks), ("count", least, n_chunks + 1))
    for name, low, high in limits:
        array = getattr(round, name)
        bad = array[(array < low) | (array >= high)]
        if len(bad):
            raise ConfigError(f"{where}: {name} {bad[0]} is out of range; it must be from {low} to {high - 1}")
    latency = round.latency
    if latency is not None and not (latency.shape == round.src.shape and latency.min() >= 0.0):
        raise ConfigError(f"{where}: latency must have {len(round.src)} non-negative values in s, one per message")
    for name in ("wire", "handled"):
        array = getattr(round, name)
        if array is not None and not (array.shape == round.src.shape and array.min() > 0.0):
            raise ConfigError(f"{where}: {name} must have {len(round.src)} positive values, one per message")
    if (round.src == round.dst).any():
        raise ConfigError(f"{where}: rank {round.src[round.src == round.dst][0]} sends to itself")
    slots = round.slots
    if slots is not None:
        if len(np.unique(slots % n_chunks)) != len(slots):
            raise ConfigError(f"{where}: slots contain the same chunk twice")
        if (round.count != len(slots)).any():
            raise ConfigError(f"{where}: count must equal the number of slots, {len(slots)}")


def groups_of(schedule: Schedule) -> tuple[Ints, ...]:
    """Return the ranks of each communicator."""
    return (np.arange(schedule.n_ranks),) if schedule.groups is None else schedule.groups


def initial(schedule: Schedule, marks: Marks) -> Marks:
    """Return the initial marks, shape (n_ranks, n_chunks, width): each rank's own mark in all chunks of one copy."""
    copy = np.arange(schedule.n_chunks) * schedule.copies // schedule.n_chunks
    copy_of_rank = np.zeros(schedule.n_ranks, dtype=np.int64)
    for group in groups_of(schedule):
        copy_of_rank[group] = np.arange(len(group)) % schedule.copies
    mine = copy == copy_of_rank[:, None]
    return np.asarray(mine[:, :, None] * marks[:, None, :], dtype=np.uint64)


@dataclass
class _Touched:
    """Which chunks of which rank a lane has sent, combined into and overwritten; shape (n_ranks, n_chunks)."""

    read: Flags
    added: Flags
    copied: Flags

    def conflicts(self, other: _Touched) -> Flags:
        """Return where two lanes conflict; chunks that both only read, or both only add to, are harmless."""
        copied = self.copied & (other.read | other.added | other.copied)
        copied |= other.copied & (self.read | self.added)
        return np.asarray(copied | (self.added & other.read) | (self.read & other.added))


def _replay(schedule: Schedule, state: Marks) -> tuple[Marks, Ints]:
    """Return the final marks, and for each (rank, chunk) the last write as a single number for (lane, round), or -1."""
    shape = (schedule.n_ranks, schedule.n_chunks)
    flat = state.reshape(-1, state.shape[-1])
    written = np.full(shape, -1, dtype=np.int64)
    before: list[_Touched] = []
    number = 0
    for i, lane in enumerate(schedule.lanes):
        touched = _Touched(*(np.zeros(shape, dtype=np.bool_) for _ in range(3)))
        for k, round in enumerate(lane):
            for repetition in range(round.repeat):
                source, target = addresses(schedule, round, repetition)
                if not len(source):
                    continue
                touched.read.ravel()[source] = True
                values = flat[source]
                if round.reduce:
                    add(flat, target, values)
                    touched.added.ravel()[target] = True
                else:
                    _refuse_double_write(schedule, target, f"lane {i}, round {k}")
                    flat[target] = values
                    touched.copied.ravel()[target] = True
                written.ravel()[target] = number
            number += 1
        for j, other in enumerate(before):
            clash = np.argwhere(touched.conflicts(other))
            if len(clash):
                rank, chunk = clash[0]
                raise ConfigError(
                    f"lanes {j} and {i} both use chunk {chunk} of rank {rank}; lanes must use different chunks"
                )
        before.append(touched)
    return state, written


def addresses(schedule: Schedule, round: Round, repetition: int) -> tuple[Ints, Ints]:
    """Return the flat (rank, chunk) indices from which and to which the chunks of a round are copied."""
    owner, chunk = schedule.chunks(round, repetition)
    return round.src[owner] * schedule.n_chunks + chunk, round.dst[owner] * schedule.n_chunks + chunk


def add(flat: Marks, target: Ints, values: Marks) -> None:
    """Add values (k, width) to rows `target` of `flat`; rows may repeat."""
    order = np.argsort(target, kind="stable")
    row, first = np.unique(target[order], return_index=True)
    flat[row] += np.add.reduceat(values[order], first, axis=0)


def _refuse_double_write(schedule: Schedule, target: Ints, where: str) -> None:
    row, n_writes = np.unique(target, return_counts=True)
    if (n_writes > 1).any():
        rank, chunk = divmod(int(row[n_writes > 1][0]), schedule.n_chunks)
        raise ConfigError(
            f"{where}: two messages overwrite chunk {chunk} of rank {rank}, so its contents are undefined"
        )


def _compare(schedule: Schedule, state: Marks, written: Ints, marks: Marks) -> None:
    """Raise ConfigError for the first (rank, chunk) that lacks the contents specified by the kind."""
    n_copied = schedule.n_chunks // schedule.copies
    total = state.reshape(schedule.n_ranks, schedule.copies, n_copied, -1).sum(axis=1, dtype=np.uint64)
    for group in groups_of(schedule):
        expected, must = promise(schedule, group, n_copied, marks)
        wrong = must & (total[group] != expected).any(axis=2)
        if wrong.any():
            place, chunk = np.argwhere(wrong)[0]
            rank = int(group[place])
            contents = _described(total[rank, chunk], expected[place, chunk])
            last_message = _origin(schedule, int(written[rank, chunk]))
            raise ConfigError(f"chunk {chunk} of rank {rank} ends up with {contents} ({last_message})")


def promise(schedule: Schedule, group: Ints, n_chunks: int, marks: Marks) -> tuple[Marks, Flags]:
    """Return the marks that a group must hold, (members, n_chunks, width), and which chunks are specified."""
    size = len(group)
    place, block = np.arange(size)[:, None], schedule.blocks(size)[None, :]
    everywhere = np.ones((size, n_chunks), dtype=np.bool_)
    if schedule.kind in REDUCING:
        everyone = marks[group].sum(axis=0, dtype=np.uint64)
        where = {"all_reduce": everywhere, "reduce": everywhere & (place == schedule.root)}
        required = np.broadcast_to(everyone, (size, n_chunks, len(everyone)))
        return required, where.get(schedule.kind, block == place)
    source = {
        "broadcast": np.full_like(everywhere, schedule.root, dtype=np.int64),
        "scatter": np.full_like(everywhere, schedule.root, dtype=np.int64),
        "all_gather": np.broadcast_to(block, everywhere.shape),
        "gather": np.broadcast_to(block, everywhere.shape),
        "all_to_all": (place - block) % size,
    }[schedule.kind]
    must = {"gather": place == schedule.root, "scatter": block == place}.get(schedule.kind, everywhere)
    return marks[group[source]], everywhere & must


def _origin(schedule: Schedule, number: int) -> str:
    if number < 0:
        return "never written"
    for i, lane in enumerate(schedule.lanes):
        if number < len(lane):
            return f"last written in lane {i}, round {number}"
        number -= len(lane)
    raise AssertionError(f"round {number} is beyond the last round of the schedule")


def _described(held: Marks, expected: Marks) -> str:
    """Describe the error in the marks (width,) of one chunk."""
    if len(held) == 1:
        return "contributions missing or counted twice"
    rank = int(np.flatnonzero(held != expected)[0])
    return f"the contribution of rank {rank} counted {held[rank]} times instead of {expected[rank]}"
