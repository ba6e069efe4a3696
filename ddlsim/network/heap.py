"""A binary heap of (time, slot) records in which every slot knows its place, compiled."""

from __future__ import annotations

import numba as nb

#: For the event kernel: no reference counting (it never allocates) and everything inlined, because passing the
#: state between functions would cost more than the work.
jit = nb.njit(cache=True, nogil=True, error_model="numpy", forceinline=True, _nrt=False)


@jit
def heap_up(heap, slots, i):  # type: ignore[no-untyped-def]
    """Move entry `i` towards the root until its parent is not later."""
    time = heap[i].time
    slot = heap[i].slot
    while i > 0:
        parent = (i - 1) >> 1
        if heap[parent].time <= time:
            break
        heap[i].time = heap[parent].time
        heap[i].slot = heap[parent].slot
        slots[heap[i].slot].heap_place = i
        i = parent
    heap[i].time = time
    heap[i].slot = slot
    slots[slot].heap_place = i


@jit
def heap_down(heap, slots, i, n):  # type: ignore[no-untyped-def]
    """Move entry `i` of `n` away from the root until no child is earlier."""
    time = heap[i].time
    slot = heap[i].slot
    while True:
        child = 2 * i + 1
        if child >= n:
            break
        if child + 1 < n and heap[child + 1].time < heap[child].time:
            child += 1
        if heap[child].time >= time:
            break
        heap[i].time = heap[child].time
        heap[i].slot = heap[child].slot
        slots[heap[i].slot].heap_place = i
        i = child
    heap[i].time = time
    heap[i].slot = slot
    slots[slot].heap_place = i


@jit
def heap_push(heap, slots, n, time, slot):  # type: ignore[no-untyped-def]
    """Insert into a heap of `n` entries (the caller counts)."""
    heap[n].time = time
    heap[n].slot = slot
    heap_up(heap, slots, n)


@jit
def heap_move(heap, slots, n, time, slot):  # type: ignore[no-untyped-def]
    """Give a slot that is in the heap another time."""
    i = slots[slot].heap_place
    before = heap[i].time
    heap[i].time = time
    if time < before:
        heap_up(heap, slots, i)
    else:
        heap_down(heap, slots, i, n)


@jit
def heap_remove(heap, slots, n, slot):  # type: ignore[no-untyped-def]
    """Take a slot out of a heap of `n` entries, leaving n - 1 (the caller counts)."""
    i = slots[slot].heap_place
    slots[slot].heap_place = -1
    last = n - 1
    if i == last:
        return
    earlier = heap[last].time < heap[i].time
    heap[i].time = heap[last].time
    heap[i].slot = heap[last].slot
    slots[heap[i].slot].heap_place = i
    if earlier:
        heap_up(heap, slots, i)
    else:
        heap_down(heap, slots, i, last)
