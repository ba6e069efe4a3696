"""Priority queues of future events: a stable one (first in, first out at equal times), and one that tracks the position
of every item; and pauses, in which nothing starts. Compiled.

Message timers that are set in order of time are kept in a ring buffer, at no cost; only the others use the heap. Timers
for the same time fire in the order in which they were set: a timer goes to the heap only if the ring buffer already
holds a later one, so the timers of that time in the ring buffer were set before it.

In a pause, work in progress finishes, and ready work waits until the pause ends. The clock of whatever starts tasks,
messages and services says when what is ready now starts (:func:`earliest`); Python asks the network
(:meth:`~ddlsim.network.network.Network.earliest`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import numpy as np

from ddlsim.compiler import inlined
from ddlsim.network.state import Floats, Ints, Records, View

# Places in the counts of the owner of a calendar (int64)
N_CALENDAR = 0
N_WOKEN = 1  # events behind those of the calendar that are still to be inserted
SEQUENCE = 2  # number of the next event


@inlined
def _earlier(heap, i, time, sequence):  # type: ignore[no-untyped-def]
    return heap[i].time < time or (heap[i].time == time and heap[i].sequence < sequence)


@inlined
def _put(heap, i, time, sequence, item):  # type: ignore[no-untyped-def]
    heap[i].time = time
    heap[i].sequence = sequence
    heap[i].item = item


@inlined
def insert(heap, n, time, sequence, item):  # type: ignore[no-untyped-def]
    """Insert an item at `time` into a heap of size `n`."""
    i = n
    while i > 0:
        parent = (i - 1) >> 1
        if _earlier(heap, parent, time, sequence):
            break
        _put(heap, i, heap[parent].time, heap[parent].sequence, heap[parent].item)
        i = parent
    _put(heap, i, time, sequence, item)


@inlined
def take_first(heap, n):  # type: ignore[no-untyped-def]
    """Remove and return the first item of a heap of size `n`."""
    first = heap[0].item
    n = n - 1
    time = heap[n].time
    sequence = heap[n].sequence
    item = heap[n].item
    i = 0
    while True:
        child = 2 * i + 1
        if child >= n:
            break
        if child + 1 < n and _earlier(heap, child + 1, heap[child].time, heap[child].sequence):
            child += 1
        if not _earlier(heap, child, time, sequence):
            break
        _put(heap, i, heap[child].time, heap[child].sequence, heap[child].item)
        i = child
    _put(heap, i, time, sequence, item)
    return first


@inlined
def push(counts, heap, time, item):  # type: ignore[no-untyped-def]
    """Insert an item at `time`, behind those of the same time."""
    insert(heap, counts[N_CALENDAR], time, counts[SEQUENCE], item)
    counts[N_CALENDAR] += 1
    counts[SEQUENCE] += 1


@inlined
def insert_woken(counts, heap):  # type: ignore[no-untyped-def]
    """Insert the events that :func:`wake` has added."""
    while counts[N_WOKEN] > 0:
        counts[N_WOKEN] -= 1
        push(counts, heap, heap[counts[N_CALENDAR]].time, heap[counts[N_CALENDAR]].item)


def wake(counts: Ints, heap: Records, time: float, item: int) -> None:
    """Add an event at `time`, from Python."""
    heap[counts[N_CALENDAR] + counts[N_WOKEN]] = (time, 0, item)
    counts[N_WOKEN] += 1


def first_time(counts: Ints, heap: Records) -> float:
    """Return the time of the next event, inf if there is none."""
    n, woken = int(counts[N_CALENDAR]), int(counts[N_WOKEN])
    times = heap["time"]
    return float(min([*times[: min(n, 1)].tolist(), *times[n : n + woken].tolist()], default=np.inf))


@inlined
def pop(counts, heap):  # type: ignore[no-untyped-def]
    counts[N_CALENDAR] -= 1
    return take_first(heap, counts[N_CALENDAR] + 1)


@inlined
def push_timer(net: View, time, slot):  # type: ignore[no-untyped-def]
    """Set a timer of `slot` for `time`."""
    mask = net.fifo.size - 1
    tail = net.fifo_tail
    if tail == net.fifo_head or time >= net.fifo[(tail - 1) & mask].time:
        net.fifo[tail & mask].time = time
        net.fifo[tail & mask].item = slot
        net.fifo_tail = tail + 1
        return
    insert(net.timers, net.n_timer_heap, time, net.timer_sequence, slot)
    net.n_timer_heap += 1
    net.timer_sequence += 1


@inlined
def next_timer(net: View):  # type: ignore[no-untyped-def]
    """Return the time of the next timer, inf if there is none."""
    head = net.fifo_head
    time = np.inf
    if head != net.fifo_tail:
        time = net.fifo[head & (net.fifo.size - 1)].time
    if net.n_timer_heap > 0 and net.timers[0].time < time:
        time = net.timers[0].time
    return time


@inlined
def pop_timer(net: View):  # type: ignore[no-untyped-def]
    """Remove the earliest timer; return its slot."""
    head = net.fifo_head
    mask = net.fifo.size - 1
    n = net.n_timer_heap
    if head != net.fifo_tail and not (n > 0 and net.timers[0].time < net.fifo[head & mask].time):
        net.fifo_head = head + 1
        return net.fifo[head & mask].item
    net.n_timer_heap = n - 1
    return take_first(net.timers, n)


# ---------------------------------------------------------------- heaps of (time, item) that track positions
#
# `owners` is the record array of the items; its field ``heap_place`` is kept up to date.


@inlined
def heap_up(heap, owners, i):  # type: ignore[no-untyped-def]
    """Move entry `i` towards the root until its parent is not later."""
    time = heap[i].time
    item = heap[i].item
    while i > 0:
        parent = (i - 1) >> 1
        if heap[parent].time <= time:
            break
        heap[i].time = heap[parent].time
        heap[i].item = heap[parent].item
        owners[heap[i].item].heap_place = i
        i = parent
    heap[i].time = time
    heap[i].item = item
    owners[item].heap_place = i


@inlined
def heap_down(heap, owners, i, n):  # type: ignore[no-untyped-def]
    """Move entry `i` of `n` away from the root until no child is earlier."""
    time = heap[i].time
    item = heap[i].item
    while True:
        child = 2 * i + 1
        if child >= n:
            break
        if child + 1 < n and heap[child + 1].time < heap[child].time:
            child += 1
        if heap[child].time >= time:
            break
        heap[i].time = heap[child].time
        heap[i].item = heap[child].item
        owners[heap[i].item].heap_place = i
        i = child
    heap[i].time = time
    heap[i].item = item
    owners[item].heap_place = i


@inlined
def heap_set(heap, owners, n, time, item):  # type: ignore[no-untyped-def]
    """Set the time of an item, inserting it into the heap of `n` entries if needed; return the new number of
    entries."""
    i = owners[item].heap_place
    if i < 0:
        i = n
        n += 1
        heap[i].item = item
        heap[i].time = time
        heap_up(heap, owners, i)
        return n
    before = heap[i].time
    heap[i].time = time
    if time < before:
        heap_up(heap, owners, i)
    else:
        heap_down(heap, owners, i, n)
    return n


@inlined
def heap_remove(heap, owners, n, item):  # type: ignore[no-untyped-def]
    """Remove an item from a heap of `n` entries; return the new number of entries."""
    i = owners[item].heap_place
    owners[item].heap_place = -1
    last = n - 1
    if i == last:
        return last
    earlier = heap[last].time < heap[i].time
    heap[i].time = heap[last].time
    heap[i].item = heap[last].item
    owners[heap[i].item].heap_place = i
    if earlier:
        heap_up(heap, owners, i)
    else:
        heap_down(heap, owners, i, last)
    return last


# ---------------------------------------------------------------- pauses


#: (n, 2) s: start and end of each pause, in order of time, without overlap
NO_PAUSES: Floats = np.zeros((0, 2))


@inlined
def earliest(pauses, now):  # type: ignore[no-untyped-def]
    """Return the earliest start (s) of what is ready at `now`."""
    for i in range(pauses.shape[0]):
        if pauses[i, 0] <= now and now < pauses[i, 1]:
            return pauses[i, 1]
    return now


@inlined
def paused(pauses, begin, end):  # type: ignore[no-untyped-def]
    """Return the seconds of pauses between `begin` and `end` (s)."""
    seconds = 0.0
    for i in range(pauses.shape[0]):
        seconds += max(min(end, pauses[i, 1]) - max(begin, pauses[i, 0]), 0.0)
    return seconds


def earliest_start(pauses: Floats, now: float) -> float:
    """:func:`earliest` outside compiled code."""
    return cast(float, earliest.py_func(pauses, now)) if len(pauses) else now  # type: ignore[attr-defined]


def merged(windows: Iterable[tuple[float, float]]) -> Floats:
    """Return the pauses that cover the given windows (s, s), which may overlap and come in any order."""
    pauses: list[tuple[float, float]] = []
    for start, end in sorted(windows):
        if pauses and start <= pauses[-1][1]:
            pauses[-1] = pauses[-1][0], max(pauses[-1][1], end)
        else:
            pauses.append((start, end))
    return np.array(pauses).reshape(-1, 2)
