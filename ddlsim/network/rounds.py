"""Replay of repeated rounds, with the same results as event-by-event simulation.

Between two barriers (moments at which every thread of all live collectives enters a step while no flow is active), the
events are recorded as *spans*: at the instant `cause`, an event was scheduled `before` plus `length` seconds ahead, and
it took place at the instant `effect`. A round is replayed by adding the same seconds to the same instants, as long as
the events keep their order and those of one instant still coincide. This is exact if

* the messages have constant sizes, and no message waits for a processor that sends or receives another;
* no active flow changes its rate, and the bits of its rate do not depend on the order of events.

The busy log contains the intervals of the recorded round once, and its spans, from which :mod:`ddlsim.network.busy`
computes the intervals of the replayed ones.
"""

from __future__ import annotations

import numpy as np

from ddlsim.compiler import inlined
from ddlsim.network.calendar import insert
from ddlsim.network.flows import add_equal, book_bytes, book_issue, link_bytes, share_of
from ddlsim.network.state import DELIVERING, LAST, SAME_INSTANT, WAITING, View
from ddlsim.network.transport import asks

MOST = 64  # flows on a channel that are searched for slower ones


@inlined
def later(time, now):  # type: ignore[no-untyped-def]
    """Whether `time` counts as a different instant after `now`."""
    return time > now + now * SAME_INSTANT


@inlined
def at_barrier(net: View):  # type: ignore[no-untyped-def]
    """Whether all threads of all live collectives have just entered a step, and nothing else is in progress."""
    if (
        net.replay_rounds_code == 0
        or net.n_active + net.n_queued + net.n_delivering > 0
        or net.n_out + net.n_foreign > 0
    ):
        return False
    if net.live_single != 0 or net.replay == 0 or net.n_stopped > 0:
        return False
    return net.stepped == net.live_threads and n_timers(net) > 0


@inlined
def n_timers(net: View):  # type: ignore[no-untyped-def]
    """Return the number of messages in flight that do not flow yet."""
    return net.fifo_tail - net.fifo_head + net.n_timer_heap


@inlined
def is_repeated(net: View):  # type: ignore[no-untyped-def]
    """Whether one message in flight, which stands for all, belongs to a step that is repeated."""
    mask = net.fifo.size - 1
    slot = net.fifo[(net.fifo_tail - 1) & mask].item
    return net.steps[net.messages[net.slots[slot].message].step].repeat > 1


@inlined
def watch(net: View):  # type: ignore[no-untyped-def]
    """Start recording the round that begins at the present barrier."""
    net.n_moments = 0
    if net.steps_left == 0 or not is_repeated(net):
        return
    net.round_threads = net.live_threads
    net.round_log = net.log_used
    net.round_begin = net.now
    net.n_spans = 0
    net.rerated = 0
    net.round_new = 0
    net.round_tail = net.fifo_head
    net.round_sequence = 0
    net.round_size = n_timers(net)
    net.round_delivered = net.n_messages
    for channel in range(net.channels.size):
        net.round_busy[channel] = net.channels[channel].busy
    record_scheduled(net, 0)


@inlined
def observe(net: View):  # type: ignore[no-untyped-def]
    """Record the instant that has just been handled; stop recording if the round cannot be replayed."""
    at = net.n_moments
    left = 0
    for i in range(net.n_spans):
        if net.spans[i].effect < 0:
            if later(net.spans[i].time, net.now):
                left += 1
            else:
                net.spans[i].effect = at
    stepped = net.stepped
    if net.rerated > 0 or (stepped > 0 and stepped != net.live_threads):
        net.n_moments = 0
    elif stepped > 0:  # the end of the round, if it has one
        net.n_moments = at + 1 if at_barrier(net) and left == 0 else 0
    else:
        record_scheduled(net, at)


@inlined
def record_scheduled(net: View, at):  # type: ignore[no-untyped-def]
    """Record what has been scheduled at the present instant, number `at`; stop recording if there is no room."""
    now = net.now
    fits = at + 2 < net.moments.size
    mask = net.fifo.size - 1
    span = 0
    head = max(net.round_tail, net.fifo_head)
    for i in range(head, net.fifo_tail):
        if fits:
            before, length = waiting_time(net, net.fifo[i & mask].item)
            span = add_span(net, span, at, before, length)
            fits = span >= 0 and net.fifo[i & mask].time == (now + before) + length
    if net.timer_sequence != net.round_sequence:
        for i in range(net.n_timer_heap):
            if fits and net.timers[i].sequence >= net.round_sequence:
                before, length = waiting_time(net, net.timers[i].item)
                span = add_span(net, max(span, 0), at, before, length)
                fits = span >= 0 and net.timers[i].time == (now + before) + length
    for flow in range(net.n_active - net.round_new, net.n_active):
        if fits:
            slot = net.flows[flow].slot
            nbytes = link_bytes(net, slot) if net.shaped == 0 else net.wire[slot]
            length = nbytes / net.flow_rate[flow]
            span = add_span(net, max(span, 0), at, 0.0, length)
            fits = span >= 0 and net.flow_end[flow] == now + length and is_order_independent(net, flow)
            if net.transported == 1:
                fits = fits and not is_awaited(net, slot)
    net.round_tail = net.fifo_tail
    net.round_sequence = net.timer_sequence
    net.n_moments = at + 1 if fits else 0


@inlined
def waiting_time(net: View, slot):  # type: ignore[no-untyped-def]
    """Return how long a message waits until it flows, or until it has been received and reduced, in s: the time of the
    processor, and the rest; NaN if that is not constant."""
    message = net.messages[net.slots[slot].message]
    route = net.routes[net.slots[slot].route]
    if net.slots[slot].state == WAITING:
        steady = message.stride == 0
        if net.shaped == 1:
            steady = steady and not (net.transported == 1 and asks(net, slot)) and not meets_bucket(net, slot)
        return sending_time(net, slot), route.latency if steady else np.nan
    target = net.nodes[message.target]
    receiving = target.recv_overhead * route.occupies
    # a processor that receives several messages one after the other might make one of them wait in later rounds
    steady = receiving <= 0.0 or net.n_delivering == net.round_size
    if net.slots[slot].state != DELIVERING or not steady:
        return receiving, np.nan
    return receiving, message.reduce * target.reduce_time * net.slots[slot].nbytes


@inlined
def sending_time(net: View, slot):  # type: ignore[no-untyped-def]
    """Return the s for which sending a message occupies the processor."""
    source = net.messages[net.slots[slot].message].source
    return net.nodes[source].send_overhead * net.routes[net.slots[slot].route].occupies


@inlined
def meets_bucket(net: View, slot):  # type: ignore[no-untyped-def]
    """Whether a token bucket on the message's route may let some of it through at once."""
    route = net.slots[slot].route
    most = 0.0
    for h in range(net.routes[route].first, net.routes[route].last):
        most = max(most, net.buckets[net.hops[h]].burst)
    return most > 0.0


@inlined
def is_awaited(net: View, slot):  # type: ignore[no-untyped-def]
    """Whether other messages wait for the connection of a message that flows."""
    connection = net.transports[net.slots[slot].route].connection
    return connection >= 0 and net.connections[connection].first >= 0


@inlined
def shrinks(net: View, slot):  # type: ignore[no-untyped-def]
    """Whether idling may shrink the window of a message in flight before it flows.

    (Windows that open delay their messages by timers that do not match a span, so such rounds are not replayed.)
    """
    route = net.slots[slot].route
    transport = net.transports[route]
    if transport.connection < 0:
        return False
    idle = net.now + net.routes[route].latency - net.connections[transport.connection].since
    return 2.0 * idle > transport.timeout and net.connections[transport.connection].window > transport.initial


@inlined
def may_shrink(net: View):  # type: ignore[no-untyped-def]
    """Whether :func:`shrinks` holds for any message in flight."""
    mask = net.fifo.size - 1
    any_shrinks = False
    for i in range(net.fifo_head, net.fifo_tail):
        any_shrinks = any_shrinks or shrinks(net, net.fifo[i & mask].item)
    for i in range(net.n_timer_heap):
        any_shrinks = any_shrinks or shrinks(net, net.timers[i].item)
    return any_shrinks


@inlined
def is_order_independent(net: View, flow):  # type: ignore[no-untyped-def]
    """Whether the bits of a flow's rate do not depend on the order in which channels and flows were processed.

    They do not on a full channel on which all slower flows have one and the same rate: this flow's rate is an equal
    part of what they leave.
    """
    rate = net.flow_rate[flow]
    shift = np.uint64(net.hop_shift)
    entry = flow << net.hop_shift
    while net.flow_hops[entry] != LAST:
        channel = net.flow_hops[entry]
        entry += 1
        residual = net.channels[channel].capacity
        used = net.channels[channel].used
        if net.split == 1:  # sums of shares depend on the order, unless the flow is the only one
            if used == 1 and residual / net.flow_share[entry - 1] == rate:
                return True
            continue
        if residual / used == rate:
            return True
        if used > MOST:
            continue
        first = net.channels[channel].first
        slower = np.inf
        for p in range(first, first + used):
            other = net.flow_rate[net.pool[p] >> shift]
            if other < rate:
                if slower < np.inf and other != slower:
                    residual = np.nan
                slower = other
                residual -= other
                used -= 1
            elif other > rate:
                residual = np.nan
        if residual / used == rate:
            return True
    return False


@inlined
def is_span(net: View, i, cause, before, length):  # type: ignore[no-untyped-def]
    span = net.spans[i]
    return span.cause == cause and span.before == before and span.length == length


@inlined
def add_span(net: View, guess, cause, before, length):  # type: ignore[no-untyped-def]
    """Return the place of a span, perhaps `guess`; append it if it is new. Return -1 if there is no room."""
    n = net.n_spans
    if guess < n and is_span(net, guess, cause, before, length):
        return guess
    for i in range(n):
        if is_span(net, i, cause, before, length):
            return i
    if n == net.spans.size or not length >= 0.0:
        return -1
    net.spans[n].cause = cause
    net.spans[n].effect = -1
    net.spans[n].before = before
    net.spans[n].length = length
    net.spans[n].time = (net.now + before) + length
    net.n_spans = n + 1
    return n


@inlined
def replay(net: View, until):  # type: ignore[no-untyped-def]
    """Repeat the recorded round that has just ended as often as it is certain to recur."""
    rounds = net.steps_left
    last = net.n_moments - 1
    if last < 1 or rounds <= 0 or net.round_threads != net.live_threads:
        return
    size = n_timers(net)
    if size != net.round_size or net.n_messages - net.round_delivered != size:
        return
    if net.transported == 1 and may_shrink(net):
        return
    begin = now = net.round_begin
    done = -1  # the first pass reproduces the recorded round
    while done < rounds:
        net.moments[0] = now
        for at in range(1, last + 1):
            net.moments[at] = np.inf
        for i in range(net.n_spans):  # in the order of their causes, so that these are known
            time = (net.moments[net.spans[i].cause] + net.spans[i].before) + net.spans[i].length
            net.spans[i].time = time
            net.moments[net.spans[i].effect] = min(net.moments[net.spans[i].effect], time)
        alike = net.moments[last] <= until and (done >= 0 or net.moments[last] == net.now)
        for i in range(net.n_spans):
            alike = alike and not later(net.spans[i].time, net.moments[net.spans[i].effect])
        for at in range(1, last + 1):
            alike = alike and later(net.moments[at], net.moments[at - 1])
        if not alike:
            break
        begin = now
        now = net.moments[last]
        done += 1
    if done > 0:
        if net.log_on == 1:
            log_rounds(net, done)
        passed = now - net.now
        net.round_begin = begin
        net.now = now
        net.steps_left -= done
        book_rounds(net, done, passed)


@inlined
def log_rounds(net: View, done):  # type: ignore[no-untyped-def]
    """Log how often the recorded round is repeated, and its spans."""
    first = net.round_log
    n = net.log_repeats
    if n > 0 and net.repeats[n - 1].first == first:  # replayed further
        for i in range(n - net.n_spans, n):
            net.repeats[i].times += done
        return
    if net.log_used == first:
        return
    for i in range(net.n_spans):
        net.repeats[n + i].begin = net.round_begin
        net.repeats[n + i].before = net.spans[i].before
        net.repeats[n + i].length = net.spans[i].length
        net.repeats[n + i].cause = net.spans[i].cause
        net.repeats[n + i].effect = net.spans[i].effect
        net.repeats[n + i].first = first
        net.repeats[n + i].last = net.log_used
        net.repeats[n + i].times = done
    net.log_repeats = n + net.n_spans


@inlined
def book_rounds(net: View, done, passed):  # type: ignore[no-untyped-def]
    """Book `done` replayed rounds that took `passed` s: bytes, busy seconds, arrivals, repetitions. Reset the message
    timers as if issued now, and shift the idle times of connections."""
    now = net.now
    mask = net.fifo.size - 1
    size = n_timers(net)
    slot = 0
    for i in range(net.fifo_head, net.fifo_tail):
        slot = net.fifo[i & mask].item
        net.fifo[i & mask].time = (now + sending_time(net, slot)) + net.routes[net.slots[slot].route].latency
        book_message(net, slot, done, passed)
    for i in range(net.n_timer_heap):  # inserted again, because different times may have become equal
        slot = net.timers[i].item
        time = (now + sending_time(net, slot)) + net.routes[net.slots[slot].route].latency
        insert(net.timers, i, time, net.timers[i].sequence, slot)
        book_message(net, slot, done, passed)
    for channel in range(net.channels.size):
        busy = done * (net.channels[channel].busy - net.round_busy[channel])
        net.channels[channel].busy += busy
        net.round_busy[channel] += busy
    repeat_threads(net, done)
    net.n_messages += done * size
    net.round_delivered += done * size
    net.fast_forwarded += done * size


@inlined
def book_message(net: View, slot, done, passed):  # type: ignore[no-untyped-def]
    """Book a message of `done` replayed rounds, which took `passed` s."""
    table = net.instances[net.slots[slot].instance]
    place = table.counters + net.messages[net.slots[slot].message].counter
    net.counters[place] += done
    net.slots[slot].repetition += done
    if net.ahead > 0:
        net.arrivals[place].delivered += done
    nbytes = net.slots[slot].nbytes
    route = net.slots[slot].route
    sending = sending_time(net, slot)
    if sending > 0.0:
        net.nodes[net.messages[net.slots[slot].message].source].send_free = net.now + sending
    book_issue(net, route, nbytes, done)
    net.delivered, net.delivered_low = add_equal(net.delivered, net.delivered_low, nbytes, done)
    for h in range(net.routes[route].first, net.routes[route].last):
        book_bytes(net, net.hops[h], nbytes * share_of(net, h), done)
    if net.transported == 1 and net.transports[route].connection >= 0:
        net.connections[net.transports[route].connection].since += passed


@inlined
def repeat_threads(net: View, done):  # type: ignore[no-untyped-def]
    """Advance the threads of all live collectives by `done` repetitions of their steps."""
    for instance in range(net.instances.size):
        if net.instances[instance].ranks_left > 0:
            table = net.instances[instance]
            program = net.programs[table.program]
            for thread in range(table.threads, table.threads + program.n_ranks * program.n_lanes):
                if net.threads[thread].step >= 0:
                    net.threads[thread].repetition += done
