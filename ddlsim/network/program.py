"""Compile a schedule into the flat program that the kernel executes.

Rounds become per-thread steps (a thread is one rank in one lane): a step is entered by a rank that sends or
receives in the round; its messages are contiguous, so that entering a step is a loop over a range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numba as nb
import numpy as np

from ddlsim.collectives import Round, Schedule
from ddlsim.errors import ConfigError
from ddlsim.network.state import Floats, Ints

jit = nb.njit(cache=True, nogil=True, error_model="numpy")

__all__ = ["Program", "compile_schedule"]


@dataclass(frozen=True)
class Program:
    """A schedule as flat arrays; indices are relative to the program.

    ``n_ranks``, ``n_lanes``  threads are numbered ``lane * n_ranks + rank``
    ``thread_step`` (n_threads + 1,), ``step_repeat`` (n_steps,), ``step_send`` (n_steps + 1,) messages,
    ``step_recv`` (n_steps + 1,) into ``recv_message`` (n_messages,)
    ``message_src``, ``message_dst`` threads; ``message_step`` the receiver's step; ``message_weight`` first place
    in ``weights`` (shares of the collective's bytes), ``weight_stride`` places per repetition (all (n_messages,))
    ``sends_bound`` messages that can be in flight at once
    """

    n_ranks: int
    n_lanes: int
    thread_step: Ints
    step_repeat: Ints
    step_send: Ints
    step_recv: Ints
    recv_message: Ints
    message_src: Ints
    message_dst: Ints
    message_step: Ints
    message_weight: Ints
    weight_stride: Ints
    weights: Floats
    message_reduce: Ints
    sends_bound: int

    @property
    def n_messages(self) -> int:
        return len(self.message_src)


@jit
def count_steps(src, dst, rounds, n_threads):  # type: ignore[no-untyped-def]
    """Return (steps per thread, sender's and receiver's step of each message, counted within the thread)."""
    last = np.full(n_threads, -1, np.int64)
    steps = np.zeros(n_threads, np.int64)
    send_step = np.empty(src.size, np.int64)
    recv_step = np.empty(src.size, np.int64)
    for i in range(src.size):
        a = src[i]
        b = dst[i]
        if last[a] != rounds[i]:
            last[a] = rounds[i]
            steps[a] += 1
        if last[b] != rounds[i]:
            last[b] = rounds[i]
            steps[b] += 1
        send_step[i] = steps[a] - 1
        recv_step[i] = steps[b] - 1
    return steps, send_step, recv_step


@jit
def group(keys, n_keys):  # type: ignore[no-untyped-def]
    """Counting sort: return (offsets (n_keys + 1,), the items in key order, stable)."""
    offsets = np.zeros(n_keys + 1, np.int64)
    for key in keys:
        offsets[key + 1] += 1
    for i in range(n_keys):
        offsets[i + 1] += offsets[i]
    place = offsets[:-1].copy()
    items = np.empty(keys.size, np.int64)
    for i in range(keys.size):
        items[place[keys[i]]] = i
        place[keys[i]] += 1
    return offsets, items


@jit
def most_sends(thread_step, step_send):  # type: ignore[no-untyped-def]
    """Return the number of messages in flight if every thread is in its step with most sends."""
    total = 0
    for thread in range(thread_step.size - 1):
        most = 0
        for step in range(thread_step[thread], thread_step[thread + 1]):
            most = max(most, step_send[step + 1] - step_send[step])
        total += most
    return total


def compile_schedule(schedule: Schedule, sizes: Sequence[Floats] | None = None) -> Program:
    """Return the program of `schedule`.

    sizes  bytes of every message instead of the schedule's: per round (lanes one after the other) a table of
           shape (repeat, m). Raises ConfigError if they do not fit.
    """
    n_ranks = schedule.n_ranks
    lanes = schedule.lanes
    rounds = [(lane, r) for lane, sequence in enumerate(lanes) for r in sequence]
    if sizes is not None and len(sizes) != len(rounds):
        raise ConfigError(f"nbytes: {len(sizes)} tables for {len(rounds)} rounds; give one per round")
    src = _joined([r.src + lane * n_ranks for lane, r in rounds])
    dst = _joined([r.dst + lane * n_ranks for lane, r in rounds])
    n_in_round = np.array([len(r.src) for _, r in rounds], dtype=np.int64)
    round_of = np.repeat(np.arange(len(rounds), dtype=np.int64), n_in_round)
    n_threads = n_ranks * max(len(lanes), 1)
    steps, send_step, recv_step = count_steps(src, dst, round_of, n_threads)
    thread_step = np.concatenate([[0], np.cumsum(steps)]).astype(np.int64)
    n_steps = int(thread_step[-1])
    step_send, order = group(thread_step[src] + send_step, n_steps)
    receiving = (thread_step[dst] + recv_step)[order]
    step_recv, recv_message = group(receiving, n_steps)
    step_repeat = np.ones(n_steps, dtype=np.int64)
    repeat = np.repeat(np.array([r.repeat for _, r in rounds], dtype=np.int64), n_in_round)[order]
    step_repeat[receiving] = repeat
    step_repeat[np.repeat(np.arange(n_steps), np.diff(step_send))] = repeat
    weights, place, stride = _weights(schedule, [r for _, r in rounds], sizes)
    reduced = np.repeat(np.array([int(r.reduce) for _, r in rounds], dtype=np.int64), n_in_round)
    return Program(
        n_ranks=n_ranks,
        n_lanes=max(len(lanes), 1),
        thread_step=thread_step,
        step_repeat=step_repeat,
        step_send=step_send,
        step_recv=step_recv,
        recv_message=recv_message,
        message_src=src[order],
        message_dst=dst[order],
        message_step=receiving,
        message_weight=place[order],
        weight_stride=stride[order],
        weights=weights,
        message_reduce=reduced[order],
        sends_bound=int(most_sends(thread_step, step_send)),
    )


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, dtype=np.int64)


def _weights(
    schedule: Schedule, rounds: list[Round], sizes: Sequence[Floats] | None
) -> tuple[Floats, Ints, Ints]:
    """Return (table of sizes for 1 byte, first place per message, places per repetition per message)."""
    if schedule.chunk_weight is None and sizes is None:
        shares: Floats = _joined([r.count for r in rounds]) * np.float64(schedule.copies / schedule.n_chunks)
        return shares, np.arange(len(shares), dtype=np.int64), np.zeros(len(shares), dtype=np.int64)
    tables: list[Floats] = []
    places: list[Ints] = []
    strides: list[Ints] = []
    used = 0
    for i, r in enumerate(rounds):
        m = len(r.src)
        table = _shares(schedule, r) if sizes is None else _checked(sizes[i], r, i)
        if (table == table[0]).all():
            table = table[:1]
        tables.append(table.ravel())
        places.append(used + np.arange(m, dtype=np.int64))
        strides.append(np.full(m, m if len(table) > 1 else 0, dtype=np.int64))
        used += table.size
    return np.concatenate([np.empty(0), *tables]), _joined(places), _joined(strides)


def _shares(schedule: Schedule, r: Round) -> Floats:
    """Return the message sizes of a round for a buffer of 1 byte, (1 or repeat, m)."""
    n_different = r.repeat if r.shift % schedule.n_chunks else 1
    return np.stack([schedule.message_bytes(1.0, r, k) for k in range(n_different)])


def _checked(table: Floats, r: Round, i: int) -> Floats:
    """Return the sizes given for round `i`, (repeat, m)."""
    table = np.asarray(table, dtype=np.float64)
    if table.shape != (r.repeat, len(r.src)):
        raise ConfigError(
            f"nbytes: the table of round {i} has shape {table.shape}; give {(r.repeat, len(r.src))}, "
            f"a row per repetition and a column per message"
        )
    if not (np.isfinite(table).all() and table.min() >= 0.0):
        raise ConfigError(f"nbytes: the table of round {i} holds a size that is not a finite number >= 0")
    return table
