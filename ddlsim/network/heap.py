"""A binary heap of (time, item) records that tracks the position of every item. Compiled.

`owners` is the record array of the items; its field ``heap_place`` is kept up to date.
"""

from __future__ import annotations

from ddlsim.compiler import inlined


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
