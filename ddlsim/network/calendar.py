"""A heap of what comes when; what comes at the same time comes in the order in which it was put there. Compiled."""

from __future__ import annotations

from ddlsim.compiler import inlined
from ddlsim.network.state import record

#: sequence: larger than that of all events that were put there before
EVENT = record(time="f", sequence="i", item="i")

# Places in the counts of who has a calendar (int64)
N_CALENDAR = 0
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
    """Let an item come at `time`, in a heap of `n`."""
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
    """Return the item that comes first in a heap of `n`, which has one less then."""
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
    """Let an item come at `time`, after those of the same time that are there."""
    insert(heap, counts[N_CALENDAR], time, counts[SEQUENCE], item)
    counts[N_CALENDAR] += 1
    counts[SEQUENCE] += 1


@inlined
def pop(counts, heap):  # type: ignore[no-untyped-def]
    """Return the item that comes first."""
    counts[N_CALENDAR] -= 1
    return take_first(heap, counts[N_CALENDAR] + 1)
