"""Compilation of schedules into flat programs that the kernel executes.

Rounds become steps of threads (a thread is one rank in one lane): a rank enters a step for each round in which it sends
or receives. The messages of a step are contiguous, so entering it is a loop over a range.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddlsim.collectives import Round, Schedule
from ddlsim.compiler import entry
from ddlsim.errors import ConfigError
from ddlsim.network.state import Floats, Ints, Places


@dataclass(frozen=True)
class Program:
    """A schedule as flat arrays; indices are relative to the program.

    n_ranks, n_lanes   threads are numbered lane * n_ranks + rank
    first_step         (n_threads,) first step of each thread, -1 if it has none
    steps              (n_steps,) columns of STEP
    messages           (n_messages,) columns of MESSAGE, in the order of the steps that send them, without nodes
    recv_message       (n_messages,) messages in the order of the steps that receive them
    weights            message sizes for a buffer of 1 byte; that of a message is at place ``weight``, and ``stride``
                       places further in each repetition
    headers            header bytes of the messages; as long as `weights`
    latency            (n_messages,) s from issue until the bytes flow, NaN: latency of the route; None: NaN for all
    handled            (n_messages,) see :class:`ddlsim.collectives.Round`; 1 by default
    sends_bound        largest number of messages in flight at the same time
    """

    n_ranks: int
    n_lanes: int
    first_step: Places
    steps: dict[str, Places]
    messages: dict[str, Places]
    recv_message: Places
    weights: Floats
    headers: Floats
    latency: Floats | None
    handled: Floats
    sends_bound: int

    @property
    def n_messages(self) -> int:
        """Number of messages, without repetitions."""
        return len(self.messages["src"])

    @functools.cached_property
    def n_deliveries(self) -> int:
        """Number of messages, including repetitions."""
        return int((self.steps["send_end"] - self.steps["send"]) @ self.steps["repeat"].astype(np.int64))


@entry
def find_steps(src, dst, round_of, repeat, threads, steps, ends):  # type: ignore[no-untyped-def]
    """Number the steps round by round, so that ranks that advance together read adjacent memory; return their number.

    threads  (5, n_threads): rows of -1, the last two of 0; output: first steps in the first row, most sends in flight
             in the last
    steps    (2, 2 n), output: next step, and repetitions, of each step
    ends     (2, n), output: step of the sender, and of the receiver, of each message
    """
    first, last, last_round, sends, most = threads[0], threads[1], threads[2], threads[3], threads[4]
    next_step, repeats = steps[0], steps[1]
    n = 0
    for i in range(src.size):
        r = round_of[i]
        for thread in (src[i], dst[i]):
            if last_round[thread] != r:
                if last[thread] < 0:
                    first[thread] = n
                else:
                    next_step[last[thread]] = n
                last[thread] = n
                last_round[thread] = r
                sends[thread] = 0
                next_step[n] = -1
                repeats[n] = repeat[r]
                n += 1
        ends[0, i] = last[src[i]]
        ends[1, i] = last[dst[i]]
        sends[src[i]] += 1
        most[src[i]] = max(most[src[i]], sends[src[i]])
    return n


@entry
def place(keys, places, items):  # type: ignore[no-untyped-def]
    """Write the items 0, 1, ... in the order of their keys, those of key k from ``places[k]`` on."""
    for i in range(keys.size):
        key = keys[i]
        items[places[key]] = i
        places[key] += 1


def _grouped(keys: Places, n_keys: int) -> tuple[Places, Places]:
    """Return offsets (n_keys + 1,) and the items, stably sorted by key."""
    offsets = np.zeros(n_keys + 1, dtype=np.int32)
    np.cumsum(np.bincount(keys, minlength=n_keys), out=offsets[1:])
    items = np.empty(len(keys), dtype=np.int32)
    place(keys, offsets[:-1].copy(), items)
    return offsets, items


@entry
def write_routes(rows, hops, base, offsets, links, share, channel, latency):  # type: ignore[no-untyped-def]
    """Fill ROUTE records and, from place `base` on, `hops` from a CSR of links; return the largest number of hops.

    The paths of a split route have equal latencies, so the sum over the links of share * latency is that of each path.
    """
    longest = 0
    for i in range(rows.size):
        total = crossed = 0.0
        for h in range(offsets[i], offsets[i + 1]):
            total += share[h] * latency[links[h]]
            crossed += share[h]
            hops[h] = channel[links[h]]
        rows[i].first = base + offsets[i]
        rows[i].last = base + offsets[i + 1]
        rows[i].latency = total
        rows[i].n_hops = round(crossed)
        longest = max(longest, offsets[i + 1] - offsets[i])
    return longest


@entry
def write_frames(rows, offsets, links, header, payload):  # type: ignore[no-untyped-def]
    """Fill FRAME records from a CSR of links: the largest header and the smallest payload on each route."""
    for i in range(rows.size):
        rows[i].header = 0.0
        rows[i].payload = np.inf
        for h in range(offsets[i], offsets[i + 1]):
            if header[links[h]] > 0.0:
                rows[i].header = max(rows[i].header, header[links[h]])
                rows[i].payload = min(rows[i].payload, payload[links[h]])


def compile_schedule(schedule: Schedule, sizes: Sequence[Floats] | None = None) -> Program:
    """Return the program of `schedule`. Raises ConfigError if the shapes of `sizes` do not match it.

    sizes  bytes of every message, instead of the schedule's: a table of shape (repeat, m) per round, lane by lane
    """
    n_ranks = schedule.n_ranks
    lanes = schedule.lanes
    rounds = [r for lane in lanes for r in lane]
    if sizes is not None and len(sizes) != len(rounds):
        raise ConfigError(
            f"nbytes: got {len(sizes)} tables of message sizes for {len(rounds)} rounds; pass one table per round"
        )
    lane_of = [i for i, lane in enumerate(lanes) for _ in lane]
    n_in_round = np.array([len(r.src) for r in rounds], dtype=np.int64)
    round_of = np.repeat(np.arange(len(rounds), dtype=np.int32), n_in_round)
    first_thread = np.repeat(np.array(lane_of, dtype=np.int32) * n_ranks, n_in_round)
    src = _joined([r.src for r in rounds]).astype(np.int32) + first_thread
    dst = _joined([r.dst for r in rounds]).astype(np.int32) + first_thread
    repeat = np.array([r.repeat for r in rounds], dtype=np.int32)
    n_lanes = max(len(lanes), 1)
    threads = np.full((5, n_ranks * n_lanes), -1, dtype=np.int32)
    threads[3:] = 0
    steps, ends = np.empty((2, 2 * len(src)), dtype=np.int32), np.empty((2, len(src)), dtype=np.int32)
    n_steps = find_steps(src, dst, round_of, repeat, threads, steps, ends)
    step_send, by_step = _grouped(ends[0], n_steps)
    order = by_step.astype(np.intp)  # the index type of `take`
    receiving, numbers = ends[1].take(order), np.arange(len(src), dtype=np.int32)
    step_recv, recv_message = _grouped(receiving, n_steps)
    weights, headers, place, stride = _weights(schedule, rounds, sizes)
    reduced = np.repeat(np.array([r.reduce for r in rounds], dtype=np.int32), n_in_round)
    columns = {"src": src, "dst": dst, "weight": place, "stride": stride, "reduce": reduced}
    sent = {name: column.take(order) for name, column in columns.items()}
    return Program(
        n_ranks=n_ranks,
        n_lanes=n_lanes,
        first_step=threads[0],
        steps={
            "next": steps[0, :n_steps],
            "repeat": steps[1, :n_steps],
            "send": step_send[:-1],
            "send_end": step_send[1:],
            "recv": step_recv[:-1],
            "recv_end": step_recv[1:],
        },
        messages={**sent, "step": receiving, "route": numbers, "counter": numbers},
        recv_message=recv_message,
        weights=weights,
        headers=headers,
        latency=_latency(rounds, order),
        handled=schedule.handled * _joined_or_one([r.handled for r in rounds], n_in_round).take(order),
        sends_bound=int(threads[4].sum()),
    )


def _latency(rounds: list[Round], order: Ints) -> Floats | None:
    """Return the latencies that rounds set for their messages, in `order`; None if there are none."""
    if all(r.latency is None for r in rounds):
        return None
    parts = [np.full(len(r.src), np.nan) if r.latency is None else r.latency for r in rounds]
    return np.concatenate(parts).take(order)


def _joined_or_one(parts: list[Floats | None], sizes: Ints | list[int]) -> Floats:
    """Concatenate the parts, with ones for those that are None."""
    return np.concatenate([np.empty(0), *(np.ones(n) if p is None else p for p, n in zip(parts, sizes, strict=True))])


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate(parts, dtype=np.int64) if parts else np.empty(0, dtype=np.int64)


def _weights(
    schedule: Schedule, rounds: list[Round], sizes: Sequence[Floats] | None
) -> tuple[Floats, Floats, Places, Places]:
    """Return the weights and headers of all messages, and the weight and stride of each (see :class:`Program`)."""
    headed = any(r.header for r in rounds)
    if schedule.chunk_weight is None and sizes is None:
        counts = _joined([r.count for r in rounds])
        shares: Floats = counts * np.float64(schedule.wire * schedule.copies / schedule.n_chunks)
        if any(r.wire is not None for r in rounds):
            shares *= _joined_or_one([r.wire for r in rounds], [len(r.src) for r in rounds])
        none = np.zeros(len(shares), dtype=np.int32)
        if (shares == shares[:1]).all() and not headed:  # one size for all, which every message reads
            return shares[:1], np.zeros(len(shares[:1])), none, none
        headers = np.repeat([r.header for r in rounds], [len(r.src) for r in rounds])
        return shares, headers, np.arange(len(shares), dtype=np.int32), none
    tables: list[Floats] = []
    heads: list[Floats] = []
    places: list[Places] = []
    strides: list[Places] = []
    used = 0
    for i, r in enumerate(rounds):
        m = len(r.src)
        table = _shares(schedule, r) if sizes is None else _checked(sizes[i], r, i)
        if (table == table[0]).all():
            table = table[:1]
        tables.append(table.ravel())
        heads.append(np.full(table.size, r.header))
        places.append(np.arange(used, used + m, dtype=np.int32))
        strides.append(np.full(m, m if len(table) > 1 else 0, dtype=np.int32))
        used += table.size
    no_places = np.empty(0, dtype=np.int32)
    return (
        np.concatenate([np.empty(0), *tables]),
        np.concatenate([np.empty(0), *heads]),
        np.concatenate([no_places, *places]),
        np.concatenate([no_places, *strides]),
    )


def _shares(schedule: Schedule, r: Round) -> Floats:
    """Return the message sizes of a round for a buffer of 1 byte, (1 or repeat, m)."""
    n_different = r.repeat if r.shift % schedule.n_chunks else 1
    return np.stack([schedule.message_bytes(1.0, r, k) for k in range(n_different)])


def _checked(table: Floats, r: Round, i: int) -> Floats:
    """Return the given sizes of round `i`, (repeat, m)."""
    table = np.asarray(table, dtype=np.float64)
    if table.shape != (r.repeat, len(r.src)):
        raise ConfigError(
            f"nbytes: the table of round {i} has shape {table.shape}; expected {(r.repeat, len(r.src))}, "
            f"with one row per repetition and one column per message"
        )
    if not (np.isfinite(table).all() and table.min() >= 0.0):
        raise ConfigError(f"nbytes: the table of round {i} contains a size that is negative or not finite")
    return table
