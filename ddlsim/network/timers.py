"""Timers of messages: in order they cost nothing (a ring buffer), out of order they go to a heap."""

from __future__ import annotations

import numpy as np

from ddlsim.compiler import inlined
from ddlsim.network.heap import heap_remove, heap_set
from ddlsim.network.state import FIFO_HEAD, FIFO_TAIL, N_TIMER_HEAP, Net


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
    net.counts[N_TIMER_HEAP] = heap_set(net.timers, net.slots, net.counts[N_TIMER_HEAP], time, slot)


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
    """Return the slot of the earliest timer; at equal times the ring buffer goes first."""
    head = net.counts[FIFO_HEAD]
    mask = net.fifo.size - 1
    n = net.counts[N_TIMER_HEAP]
    if head != net.counts[FIFO_TAIL] and not (n > 0 and net.timers[0].time < net.fifo[head & mask].time):
        net.counts[FIFO_HEAD] = head + 1
        return net.fifo[head & mask].item
    slot = net.timers[0].item
    net.counts[N_TIMER_HEAP] = heap_remove(net.timers, net.slots, n, slot)
    return slot
