"""The order in which events of one instant are handled. Compiled.

If a processor or a connection serves one message after the other, the order of simultaneous messages matters. It must
not depend on how the kernel stores them, or on which rounds it replays. Messages that end at one instant are therefore
handled in the order in which they were issued, and ranks that continue at one instant in the order of their
collectives, lanes and ranks. Both lists are usually in this order already, or in reverse.
"""

from __future__ import annotations

from ddlsim.compiler import inlined
from ddlsim.network.state import N_READY, Net


@inlined
def _issued_before(net: Net, slot, other):  # type: ignore[no-untyped-def]
    return net.slots[slot].sequence < net.slots[other].sequence


@inlined
def sort_ended(net: Net, n):  # type: ignore[no-untyped-def]
    """Sort the `n` slots listed in `scratch` by the order in which their messages were issued."""
    rising = falling = True
    for i in range(1, n):
        if _issued_before(net, net.scratch[i - 1], net.scratch[i]):
            falling = False
        else:
            rising = False
    if rising:
        return
    if falling:
        for i in range(n // 2):
            slot = net.scratch[i]
            net.scratch[i] = net.scratch[n - 1 - i]
            net.scratch[n - 1 - i] = slot
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
    """Whether the ready thread number `i` comes before another one."""
    other = net.ready[i].instance
    return other < instance or (other == instance and net.ready[i].thread < thread)


@inlined
def sort_ready(net: Net):  # type: ignore[no-untyped-def]
    """Sort the ready threads by collective, then by thread."""
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
