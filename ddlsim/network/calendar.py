"""A stable priority queue of future events (first in, first out at equal times). Compiled.

Message timers that are set in order of time are kept in a ring buffer, at no cost; only the others use the heap. Timers
for the same time fire in the order in which they were set: a timer goes to the heap only if the ring buffer already
holds a later one, so the timers of that time in the ring buffer were set before it.
"""

from __future__ import annotations

import numpy as np

from ddlsim.compiler import inlined
from ddlsim.network.state import Ints, Records, View

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
