"""The order in which what happens at one instant is handled. Compiled.

Where a processor or a connection serves one message after the other, the order of messages that come at one instant
matters. It must not depend on how the kernel has stored them, or on rounds that it has replayed: messages that end at
one instant are handled in the order in which they were issued, and ranks that go on at one instant in the order of
their collectives, lanes and ranks. Both lists are usually in this order already, or in reverse.
"""

from __future__ import annotations

from ddlsim.compiler import inlined
from ddlsim.network.state import N_READY, Net

DENSE = 4  # messages are listed by their numbers, without comparisons, if these are at most so many times as many


@inlined
def _issued_before(net: Net, slot, other):  # type: ignore[no-untyped-def]
    return net.slots[slot].sequence < net.slots[other].sequence


@inlined
def sort_ended(net: Net, n):  # type: ignore[no-untyped-def]
    """Put the `n` slots listed in `scratch` in the order in which their messages were issued."""
    rising = falling = True
    low = high = net.slots[net.scratch[0]].sequence if n > 0 else 0
    for i in range(1, n):
        if _issued_before(net, net.scratch[i - 1], net.scratch[i]):
            falling = False
        else:
            rising = False
        low = min(low, net.slots[net.scratch[i]].sequence)
        high = max(high, net.slots[net.scratch[i]].sequence)
    if rising:
        return
    if falling:
        for i in range(n // 2):
            slot = net.scratch[i]
            net.scratch[i] = net.scratch[n - 1 - i]
            net.scratch[n - 1 - i] = slot
        return
    if high - low < min(DENSE * n, net.freezing.size):  # they have been issued together
        for i in range(high - low + 1):
            net.freezing[i] = 0
        for i in range(n):
            net.freezing[net.slots[net.scratch[i]].sequence - low] = net.scratch[i] + 1
        at = 0
        for i in range(high - low + 1):
            if net.freezing[i] > 0:
                net.scratch[at] = net.freezing[i] - 1
                at += 1
        return
    gap = 1
    while gap < n:
        gap = 3 * gap + 1
    while gap > 1:  # Shell sort, with the gaps of Knuth
        gap //= 3
        for i in range(gap, n):
            slot = net.scratch[i]
            place = i
            while place >= gap and _issued_before(net, slot, net.scratch[place - gap]):
                net.scratch[place] = net.scratch[place - gap]
                place -= gap
            net.scratch[place] = slot


@inlined
def _goes_first(net: Net, i, instance, thread):  # type: ignore[no-untyped-def]
    """Whether the ready thread number `i` goes before another one."""
    other = net.ready[i].instance
    return other < instance or (other == instance and net.ready[i].thread < thread)


@inlined
def sort_ready(net: Net):  # type: ignore[no-untyped-def]
    """Put the ready threads in the order of their collectives, and of the threads of each."""
    n = net.counts[N_READY]
    i = 1
    while i < n and _goes_first(net, i - 1, net.ready[i].instance, net.ready[i].thread):
        i += 1
    if i >= n:
        return
    gap = 1
    while gap < n:
        gap = 3 * gap + 1
    while gap > 1:
        gap //= 3
        for i in range(gap, n):
            instance = net.ready[i].instance
            thread = net.ready[i].thread
            place = i
            while place >= gap and not _goes_first(net, place - gap, instance, thread):
                net.ready[place].instance = net.ready[place - gap].instance
                net.ready[place].thread = net.ready[place - gap].thread
                place -= gap
            net.ready[place].instance = instance
            net.ready[place].thread = thread
