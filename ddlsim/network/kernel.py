"""The event kernel: processing of events in order of time, and the entry points for Python.

All that happens at one instant is handled together: flows that end, timers that ring (a message has waited
its latency, or has been received and reduced), the steps that ranks take because of it, then one solve of the
rates that changed.

Where a processor or a connection serves one message after the other, the order within an instant matters. It must not
depend on how the kernel has stored messages, or on rounds that it has replayed: messages that end at one instant are
handled in the order in which they were issued, and ranks that go on at one instant in the order of their collectives,
lanes and ranks. Both lists are often in this order already.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddlsim.compiler import addressed, inlined
from ddlsim.network.calendar import next_timer, pop_timer
from ddlsim.network.flows import begin
from ddlsim.network.intrinsics import attach, call_extension
from ddlsim.network.maxmin import end_flows, next_end, solve
from ddlsim.network.queues import list_ended, marks_suffice, next_event
from ddlsim.network.ranks import collect, deliver, finished, issue, make_ready, run_ready
from ddlsim.network.rounds import at_barrier
from ddlsim.network.state import (
    DELIVERING,
    FOREIGN,
    FULL,
    IDLE,
    MANY,
    NEXT_IN_LINE,
    OBSERVE,
    REPLAY,
    SAME_INSTANT,
    SERVE,
    SETTLE,
    START,
    VISIBLE,
    WATCH,
    Ints,
    View,
)

# messages are listed by their numbers, without comparisons, if the range of numbers is at most DENSE times as long
DENSE = 16


@inlined
def has_room(net: View):  # type: ignore[no-untyped-def]
    """Whether there are enough slots for any consequences of the messages in flight."""
    if net.is_fifo == 1 and not marks_suffice(net):
        return False
    return net.slots.size >= net.n_delivering + 2 * net.live_sends


@inlined
def log_is_full(net: View):  # type: ignore[no-untyped-def]
    """Whether the busy log may lack space for the ends of the next instant and one replay."""
    if net.log_on == 0:
        return False
    rows = net.log_used + net.channels.size
    return rows > net.log.size or net.log_repeats + net.spans.size > net.repeats.size


@inlined
def ring(net: View, slot):  # type: ignore[no-untyped-def]
    """Handle a message's timer: the message begins to flow, or has been received and reduced."""
    if net.slots[slot].state == DELIVERING:
        deliver(net, slot)
        return
    route = net.slots[slot].route
    if net.routes[route].first == net.routes[route].last or net.slots[slot].nbytes <= 0.0:
        finished(net, slot)
    elif net.shaped == 0:
        begin(net, slot)
    elif call_extension(net.shape_code, net, START, slot, 0.0) == 1:  # it has arrived at once
        finished(net, slot)


@inlined
def _issued_before(net: View, slot, other):  # type: ignore[no-untyped-def]
    return net.slots[slot].sequence < net.slots[other].sequence


@inlined
def sort_ended(net: View, n):  # type: ignore[no-untyped-def]
    """Put the `n` slots listed in `scratch` in the order in which their messages were issued."""
    rising = True
    low = high = net.slots[net.scratch[0]].sequence if n > 0 else 0
    for i in range(1, n):
        rising = rising and _issued_before(net, net.scratch[i - 1], net.scratch[i])
        low = min(low, net.slots[net.scratch[i]].sequence)
        high = max(high, net.slots[net.scratch[i]].sequence)
    if rising:
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
def _goes_first(net: View, i, instance, thread):  # type: ignore[no-untyped-def]
    """Whether the ready thread number `i` goes before another one."""
    other = net.ready[i].instance
    return other < instance or (other == instance and net.ready[i].thread < thread)


@inlined
def sort_ready(net: View):  # type: ignore[no-untyped-def]
    """Put the ready threads in the order of their collectives, and of the threads of each."""
    n = net.n_ready
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


@inlined
def handle_instant(net: View, now):  # type: ignore[no-untyped-def]
    """Handle all events at `now` (s)."""
    net.now = now
    net.n_events += 1
    net.stepped = 0
    net.steps_left = MANY
    limit = now + now * SAME_INSTANT
    n_ended = end_flows(net, limit)
    if net.is_fifo == 1:
        call_extension(net.work_queues_code, net, SERVE, 0, limit)
        n_ended = list_ended(net, n_ended)
    sort_ended(net, n_ended)
    for i in range(n_ended):
        if net.transported == 1:
            call_extension(net.shape_code, net, NEXT_IN_LINE, net.scratch[i], 0.0)
        finished(net, net.scratch[i])
    sort_ready(net)
    run_ready(net)
    if net.is_fifo == 1 and not marks_suffice(net):  # the instant is split in two
        return
    while next_timer(net) <= limit and has_room(net):  # without room, the instant is split in two
        while next_timer(net) <= limit:  # ranks continue after all timers set so far have fired
            ring(net, pop_timer(net))
        sort_ready(net)
        run_ready(net)
    if net.is_fifo == 1:
        call_extension(net.work_queues_code, net, SETTLE, 0, 0.0)
    solve(net)


@inlined
def interrupt(net: View, now):  # type: ignore[no-untyped-def]
    """Set the clock to an external event, which is no barrier and prevents the current round from being replayed."""
    net.now = now
    net.stepped = -MANY
    net.n_moments = 0


@inlined
def run(net: View, until):  # type: ignore[no-untyped-def]
    """Handle instants up to `until`, or to the first completion to be shown."""
    collect(net)
    while True:
        if net.n_out > 0:
            return VISIBLE
        if net.n_foreign > 0:
            return FOREIGN
        if not has_room(net) or log_is_full(net):
            net.n_moments = 0
            return FULL
        change = net.next_change
        limit = min(until, change)
        barrier = at_barrier(net)
        if barrier:
            call_extension(net.replay_rounds_code, net, REPLAY, 0, limit)
            if log_is_full(net):
                return FULL
        now = min(next_end(net), next_timer(net))
        if net.is_fifo == 1:
            now = min(now, next_event(net))
        if now > limit or now == np.inf:
            if change > until or change == np.inf:
                return IDLE
            interrupt(net, change)
            call_extension(net.change_code, net, 0, 0, 0.0)
            if net.is_fifo == 1:
                call_extension(net.work_queues_code, net, SETTLE, 0, 0.0)
            solve(net)
            continue
        if barrier:
            call_extension(net.replay_rounds_code, net, WATCH, 0, 0.0)
        handle_instant(net, now)
        if net.n_moments > 0:
            call_extension(net.replay_rounds_code, net, OBSERVE, 0, 0.0)


@addressed
def advance(table: Ints, until: float) -> Any:
    """Advance time up to and including `until`, or to the first completion.

    Returns IDLE (no more events up to `until`), VISIBLE (completions are in `out`), FOREIGN (completions of other
    clients are in `foreign`) or FULL (slots or busy log must be enlarged before the next instant can be handled).
    """
    return run(attach(table), until)


@addressed
def join(table: Ints, instances, ranks, now):  # type: ignore[no-untyped-def]
    """Let rank ``ranks[i]`` enter collective ``instances[i]`` at time `now`, for all i in order."""
    net = attach(table)
    interrupt(net, now)
    for i in range(instances.size):
        program = net.programs[net.instances[instances[i]].program]
        for lane in range(program.n_lanes):
            make_ready(net, instances[i], lane * program.n_ranks + ranks[i])
    run_ready(net)


@addressed
def send_one(table: Ints, handle, source, target, route, nbytes, now):  # type: ignore[no-untyped-def]
    """Issue a message outside collectives at time `now`; its delivery is reported as -1 - handle."""
    net = attach(table)
    interrupt(net, now)
    net.live_single += 1
    net.live_sends += 1
    issue(net, -1 - handle, target, nbytes, route, source, 0)
