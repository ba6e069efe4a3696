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
from ddlsim.network.flows import book_issue, link_bytes, share_of
from ddlsim.network.state import (
    AHEAD,
    DELIVERED,
    DELIVERING,
    FAST_FORWARDED,
    FIFO_HEAD,
    FIFO_TAIL,
    HOP_SHIFT,
    LAST,
    LIVE_SINGLE,
    LIVE_THREADS,
    LOG_ON,
    LOG_REPEATS,
    LOG_USED,
    N_ACTIVE,
    N_DELIVERING,
    N_FOREIGN,
    N_MESSAGES,
    N_MOMENTS,
    N_OUT,
    N_QUEUED,
    N_SPANS,
    N_STOPPED,
    N_TIMER_HEAP,
    NOW,
    REPLAY,
    RERATED,
    ROUND_BEGIN,
    ROUND_DELIVERED,
    ROUND_LOG,
    ROUND_NEW,
    ROUND_SEQUENCE,
    ROUND_SIZE,
    ROUND_TAIL,
    ROUND_THREADS,
    ROUNDS_CODE,
    SAME_INSTANT,
    SHAPED,
    SPLIT,
    STEPPED,
    STEPS_LEFT,
    TIMER_SEQUENCE,
    TRANSPORTED,
    WAITING,
    Net,
)
from ddlsim.network.sums import book_bytes, count
from ddlsim.network.transport import asks

MOST = 64  # flows on a channel that are searched for slower ones


@inlined
def later(time, now):  # type: ignore[no-untyped-def]
    """Whether `time` counts as a different instant after `now`."""
    return time > now + now * SAME_INSTANT


@inlined
def at_barrier(net: Net):  # type: ignore[no-untyped-def]
    """Whether all threads of all live collectives have just entered a step, and nothing else is in progress."""
    if (
        net.counts[ROUNDS_CODE] == 0
        or net.counts[N_ACTIVE] + net.counts[N_QUEUED] + net.counts[N_DELIVERING] > 0
        or net.counts[N_OUT] + net.counts[N_FOREIGN] > 0
    ):
        return False
    if net.counts[LIVE_SINGLE] != 0 or net.counts[REPLAY] == 0 or net.counts[N_STOPPED] > 0:
        return False
    return net.counts[STEPPED] == net.counts[LIVE_THREADS] and n_timers(net) > 0


@inlined
def n_timers(net: Net):  # type: ignore[no-untyped-def]
    """Return the number of messages in flight that do not flow yet."""
    return net.counts[FIFO_TAIL] - net.counts[FIFO_HEAD] + net.counts[N_TIMER_HEAP]


@inlined
def is_repeated(net: Net):  # type: ignore[no-untyped-def]
    """Whether one message in flight, which stands for all, belongs to a step that is repeated."""
    mask = net.fifo.size - 1
    slot = net.fifo[(net.counts[FIFO_TAIL] - 1) & mask].item
    return net.steps[net.messages[net.slots[slot].message].step].repeat > 1


@inlined
def watch(net: Net):  # type: ignore[no-untyped-def]
    """Start recording the round that begins at the present barrier."""
    net.counts[N_MOMENTS] = 0
    if net.counts[STEPS_LEFT] == 0 or not is_repeated(net):
        return
    net.counts[ROUND_THREADS] = net.counts[LIVE_THREADS]
    net.counts[ROUND_LOG] = net.counts[LOG_USED]
    net.reals[ROUND_BEGIN] = net.reals[NOW]
    net.counts[N_SPANS] = 0
    net.counts[RERATED] = 0
    net.counts[ROUND_NEW] = 0
    net.counts[ROUND_TAIL] = net.counts[FIFO_HEAD]
    net.counts[ROUND_SEQUENCE] = 0
    net.counts[ROUND_SIZE] = n_timers(net)
    net.counts[ROUND_DELIVERED] = net.counts[N_MESSAGES]
    for channel in range(net.channels.size):
        net.round_busy[channel] = net.channels[channel].busy
    record_scheduled(net, 0)


@inlined
def observe(net: Net):  # type: ignore[no-untyped-def]
    """Record the instant that has just been handled; stop recording if the round cannot be replayed."""
    at = net.counts[N_MOMENTS]
    left = 0
    for i in range(net.counts[N_SPANS]):
        if net.spans[i].effect < 0:
            if later(net.spans[i].time, net.reals[NOW]):
                left += 1
            else:
                net.spans[i].effect = at
    stepped = net.counts[STEPPED]
    if net.counts[RERATED] > 0 or (stepped > 0 and stepped != net.counts[LIVE_THREADS]):
        net.counts[N_MOMENTS] = 0
    elif stepped > 0:  # the end of the round, if it has one
        net.counts[N_MOMENTS] = at + 1 if at_barrier(net) and left == 0 else 0
    else:
        record_scheduled(net, at)


@inlined
def record_scheduled(net: Net, at):  # type: ignore[no-untyped-def]
    """Record what has been scheduled at the present instant, number `at`; stop recording if there is no room."""
    now = net.reals[NOW]
    fits = at + 2 < net.moments.size
    mask = net.fifo.size - 1
    span = 0
    head = max(net.counts[ROUND_TAIL], net.counts[FIFO_HEAD])
    for i in range(head, net.counts[FIFO_TAIL]):
        if fits:
            before, length = waiting_time(net, net.fifo[i & mask].item)
            span = add_span(net, span, at, before, length)
            fits = span >= 0 and net.fifo[i & mask].time == (now + before) + length
    if net.counts[TIMER_SEQUENCE] != net.counts[ROUND_SEQUENCE]:
        for i in range(net.counts[N_TIMER_HEAP]):
            if fits and net.timers[i].sequence >= net.counts[ROUND_SEQUENCE]:
                before, length = waiting_time(net, net.timers[i].item)
                span = add_span(net, max(span, 0), at, before, length)
                fits = span >= 0 and net.timers[i].time == (now + before) + length
    for flow in range(net.counts[N_ACTIVE] - net.counts[ROUND_NEW], net.counts[N_ACTIVE]):
        if fits:
            slot = net.flows[flow].slot
            nbytes = link_bytes(net, slot) if net.counts[SHAPED] == 0 else net.wire[slot]
            length = nbytes / net.flow_rate[flow]
            span = add_span(net, max(span, 0), at, 0.0, length)
            fits = span >= 0 and net.flow_end[flow] == now + length and is_order_independent(net, flow)
            if net.counts[TRANSPORTED] == 1:
                fits = fits and not is_awaited(net, slot)
    net.counts[ROUND_TAIL] = net.counts[FIFO_TAIL]
    net.counts[ROUND_SEQUENCE] = net.counts[TIMER_SEQUENCE]
    net.counts[N_MOMENTS] = at + 1 if fits else 0


@inlined
def waiting_time(net: Net, slot):  # type: ignore[no-untyped-def]
    """Return how long a message waits until it flows, or until it has been received and reduced, in s: the time of the
    processor, and the rest; NaN if that is not constant."""
    message = net.messages[net.slots[slot].message]
    route = net.routes[net.slots[slot].route]
    if net.slots[slot].state == WAITING:
        steady = message.stride == 0
        if net.counts[SHAPED] == 1:
            steady = steady and not (net.counts[TRANSPORTED] == 1 and asks(net, slot)) and not meets_bucket(net, slot)
        return sending_time(net, slot), route.latency if steady else np.nan
    target = net.nodes[message.target]
    receiving = target.recv_overhead * route.occupies
    # a processor that receives several messages one after the other might make one of them wait in later rounds
    steady = receiving <= 0.0 or net.counts[N_DELIVERING] == net.counts[ROUND_SIZE]
    if net.slots[slot].state != DELIVERING or not steady:
        return receiving, np.nan
    return receiving, message.reduce * target.reduce_time * net.slots[slot].nbytes


@inlined
def sending_time(net: Net, slot):  # type: ignore[no-untyped-def]
    """Return the s for which sending a message occupies the processor."""
    source = net.messages[net.slots[slot].message].source
    return net.nodes[source].send_overhead * net.routes[net.slots[slot].route].occupies


@inlined
def meets_bucket(net: Net, slot):  # type: ignore[no-untyped-def]
    """Whether a token bucket on the message's route may let some of it through at once."""
    route = net.slots[slot].route
    most = 0.0
    for h in range(net.routes[route].first, net.routes[route].last):
        most = max(most, net.buckets[net.hops[h]].burst)
    return most > 0.0


@inlined
def is_awaited(net: Net, slot):  # type: ignore[no-untyped-def]
    """Whether other messages wait for the connection of a message that flows."""
    connection = net.transports[net.slots[slot].route].connection
    return connection >= 0 and net.connections[connection].first >= 0


@inlined
def shrinks(net: Net, slot):  # type: ignore[no-untyped-def]
    """Whether idling may shrink the window of a message in flight before it flows.

    (Windows that open delay their messages by timers that do not match a span, so such rounds are not replayed.)
    """
    route = net.slots[slot].route
    transport = net.transports[route]
    if transport.connection < 0:
        return False
    idle = net.reals[NOW] + net.routes[route].latency - net.connections[transport.connection].since
    return 2.0 * idle > transport.timeout and net.connections[transport.connection].window > transport.initial


@inlined
def may_shrink(net: Net):  # type: ignore[no-untyped-def]
    """Whether :func:`shrinks` holds for any message in flight."""
    mask = net.fifo.size - 1
    any_shrinks = False
    for i in range(net.counts[FIFO_HEAD], net.counts[FIFO_TAIL]):
        any_shrinks = any_shrinks or shrinks(net, net.fifo[i & mask].item)
    for i in range(net.counts[N_TIMER_HEAP]):
        any_shrinks = any_shrinks or shrinks(net, net.timers[i].item)
    return any_shrinks


@inlined
def is_order_independent(net: Net, flow):  # type: ignore[no-untyped-def]
    """Whether the bits of a flow's rate do not depend on the order in which channels and flows were processed.

    They do not on a full channel on which all slower flows have one and the same rate: this flow's rate is an equal
    part of what they leave.
    """
    rate = net.flow_rate[flow]
    shift = np.uint64(net.counts[HOP_SHIFT])
    entry = flow << net.counts[HOP_SHIFT]
    while net.flow_hops[entry] != LAST:
        channel = net.flow_hops[entry]
        entry += 1
        residual = net.channels[channel].capacity
        used = net.channels[channel].used
        if net.counts[SPLIT] == 1:  # sums of shares depend on the order, unless the flow is the only one
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
def is_span(net: Net, i, cause, before, length):  # type: ignore[no-untyped-def]
    span = net.spans[i]
    return span.cause == cause and span.before == before and span.length == length


@inlined
def add_span(net: Net, guess, cause, before, length):  # type: ignore[no-untyped-def]
    """Return the place of a span, perhaps `guess`; append it if it is new. Return -1 if there is no room."""
    n = net.counts[N_SPANS]
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
    net.spans[n].time = (net.reals[NOW] + before) + length
    net.counts[N_SPANS] = n + 1
    return n


@inlined
def replay(net: Net, until):  # type: ignore[no-untyped-def]
    """Repeat the recorded round that has just ended as often as it is certain to recur."""
    rounds = net.counts[STEPS_LEFT]
    last = net.counts[N_MOMENTS] - 1
    if last < 1 or rounds <= 0 or net.counts[ROUND_THREADS] != net.counts[LIVE_THREADS]:
        return
    size = n_timers(net)
    if size != net.counts[ROUND_SIZE] or net.counts[N_MESSAGES] - net.counts[ROUND_DELIVERED] != size:
        return
    if net.counts[TRANSPORTED] == 1 and may_shrink(net):
        return
    begin = now = net.reals[ROUND_BEGIN]
    done = -1  # the first pass reproduces the recorded round
    while done < rounds:
        net.moments[0] = now
        for at in range(1, last + 1):
            net.moments[at] = np.inf
        for i in range(net.counts[N_SPANS]):  # in the order of their causes, so that these are known
            time = (net.moments[net.spans[i].cause] + net.spans[i].before) + net.spans[i].length
            net.spans[i].time = time
            net.moments[net.spans[i].effect] = min(net.moments[net.spans[i].effect], time)
        alike = net.moments[last] <= until and (done >= 0 or net.moments[last] == net.reals[NOW])
        for i in range(net.counts[N_SPANS]):
            alike = alike and not later(net.spans[i].time, net.moments[net.spans[i].effect])
        for at in range(1, last + 1):
            alike = alike and later(net.moments[at], net.moments[at - 1])
        if not alike:
            break
        begin = now
        now = net.moments[last]
        done += 1
    if done > 0:
        if net.counts[LOG_ON] == 1:
            log_rounds(net, done)
        passed = now - net.reals[NOW]
        net.reals[ROUND_BEGIN] = begin
        net.reals[NOW] = now
        net.counts[STEPS_LEFT] -= done
        book_rounds(net, done, passed)


@inlined
def log_rounds(net: Net, done):  # type: ignore[no-untyped-def]
    """Log how often the recorded round is repeated, and its spans."""
    first = net.counts[ROUND_LOG]
    n = net.counts[LOG_REPEATS]
    if n > 0 and net.repeats[n - 1].first == first:  # replayed further
        for i in range(n - net.counts[N_SPANS], n):
            net.repeats[i].times += done
        return
    if net.counts[LOG_USED] == first:
        return
    for i in range(net.counts[N_SPANS]):
        net.repeats[n + i].begin = net.reals[ROUND_BEGIN]
        net.repeats[n + i].before = net.spans[i].before
        net.repeats[n + i].length = net.spans[i].length
        net.repeats[n + i].cause = net.spans[i].cause
        net.repeats[n + i].effect = net.spans[i].effect
        net.repeats[n + i].first = first
        net.repeats[n + i].last = net.counts[LOG_USED]
        net.repeats[n + i].times = done
    net.counts[LOG_REPEATS] = n + net.counts[N_SPANS]


@inlined
def book_rounds(net: Net, done, passed):  # type: ignore[no-untyped-def]
    """Book `done` replayed rounds that took `passed` s: bytes, busy seconds, arrivals, repetitions. Reset the message
    timers as if issued now, and shift the idle times of connections."""
    now = net.reals[NOW]
    mask = net.fifo.size - 1
    size = n_timers(net)
    slot = 0
    for i in range(net.counts[FIFO_HEAD], net.counts[FIFO_TAIL]):
        slot = net.fifo[i & mask].item
        net.fifo[i & mask].time = (now + sending_time(net, slot)) + net.routes[net.slots[slot].route].latency
        book_message(net, slot, done, passed)
    for i in range(net.counts[N_TIMER_HEAP]):  # inserted again, because different times may have become equal
        slot = net.timers[i].item
        time = (now + sending_time(net, slot)) + net.routes[net.slots[slot].route].latency
        insert(net.timers, i, time, net.timers[i].sequence, slot)
        book_message(net, slot, done, passed)
    for channel in range(net.channels.size):
        busy = done * (net.channels[channel].busy - net.round_busy[channel])
        net.channels[channel].busy += busy
        net.round_busy[channel] += busy
    repeat_threads(net, done)
    net.counts[N_MESSAGES] += done * size
    net.counts[ROUND_DELIVERED] += done * size
    net.counts[FAST_FORWARDED] += done * size


@inlined
def book_message(net: Net, slot, done, passed):  # type: ignore[no-untyped-def]
    """Book a message of `done` replayed rounds, which took `passed` s."""
    table = net.instances[net.slots[slot].instance]
    place = table.counters + net.messages[net.slots[slot].message].counter
    net.counters[place] += done
    skip_repetitions(net, slot, place, done)
    nbytes = net.slots[slot].nbytes
    route = net.slots[slot].route
    sending = sending_time(net, slot)
    if sending > 0.0:
        net.nodes[net.messages[net.slots[slot].message].source].send_free = net.reals[NOW] + sending
    book_issue(net, route, nbytes, done)
    count(net, DELIVERED, nbytes, done)
    for h in range(net.routes[route].first, net.routes[route].last):
        book_bytes(net, net.hops[h], nbytes * share_of(net, h), done)
    if net.counts[TRANSPORTED] == 1 and net.transports[route].connection >= 0:
        net.connections[net.transports[route].connection].since += passed


@inlined
def skip_repetitions(net: Net, slot, place, done):  # type: ignore[no-untyped-def]
    """Advance the message in a slot by `done` repetitions; its arrivals are at `place`."""
    net.slots[slot].repetition += done
    if net.counts[AHEAD] > 0:
        net.arrivals[place].known += done


@inlined
def repeat_threads(net: Net, done):  # type: ignore[no-untyped-def]
    """Advance the threads of all live collectives by `done` repetitions of their steps."""
    for instance in range(net.instances.size):
        if net.instances[instance].ranks_left > 0:
            table = net.instances[instance]
            program = net.programs[table.program]
            for thread in range(table.threads, table.threads + program.n_ranks * program.n_lanes):
                if net.threads[thread].step >= 0:
                    net.threads[thread].repetition += done
