"""Timers of messages: in order they cost nothing (a ring buffer), out of order they go to a heap.

Those of one instant ring in the order in which they were set. What is in the ring buffer was set before what is in the
heap for the same instant: a timer goes to the heap when a later one is in the ring buffer already.
"""

from __future__ import annotations

import numpy as np

from ddlsim.compiler import inlined
from ddlsim.network.calendar import insert, take_first
from ddlsim.network.state import FIFO_HEAD, FIFO_TAIL, N_TIMER_HEAP, TIMER_SEQUENCE, Net


@inlined
def push_timer(net: Net, time, slot):  # type: ignore[no-untyped-def]
    """Let a timer of `slot` ring at `time`."""
    mask = net.fifo.size - 1
    tail = net.counts[FIFO_TAIL]
    if tail == net.counts[FIFO_HEAD] or time >= net.fifo[(tail - 1) & mask].time:
        net.fifo[tail & mask].time = time
        net.fifo[tail & mask].item = slot
        net.counts[FIFO_TAIL] = tail + 1
        return
    insert(net.timers, net.counts[N_TIMER_HEAP], time, net.counts[TIMER_SEQUENCE], slot)
    net.counts[N_TIMER_HEAP] += 1
    net.counts[TIMER_SEQUENCE] += 1


@inlined
def next_timer(net: Net):  # type: ignore[no-untyped-def]
    """Return when the next timer rings, inf if there is none."""
    head = net.counts[FIFO_HEAD]
    time = np.inf
    if head != net.counts[FIFO_TAIL]:
        time = net.fifo[head & (net.fifo.size - 1)].time
    if net.counts[N_TIMER_HEAP] > 0 and net.timers[0].time < time:
        time = net.timers[0].time
    return time


@inlined
def pop_timer(net: Net):  # type: ignore[no-untyped-def]
    """Return the slot of the earliest timer."""
    head = net.counts[FIFO_HEAD]
    mask = net.fifo.size - 1
    n = net.counts[N_TIMER_HEAP]
    if head != net.counts[FIFO_TAIL] and not (n > 0 and net.timers[0].time < net.fifo[head & mask].time):
        net.counts[FIFO_HEAD] = head + 1
        return net.fifo[head & mask].item
    net.counts[N_TIMER_HEAP] = n - 1
    return take_first(net.timers, n)
