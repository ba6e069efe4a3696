"""Exact shortcut for repeated rounds, with the same results as event-by-event simulation.

It applies at a moment at which no flow is active and all messages in flight start to flow at one later instant, on
links that only have a bandwidth (others: :mod:`ddlsim.network.rounds`). If the previous round was the same,
:func:`replay` repeats it.
"""

from __future__ import annotations

import numpy as np

from ddlsim.compiler import inlined
from ddlsim.network.flows import book_issue, log_busy, share_of
from ddlsim.network.state import (
    AHEAD,
    DELIVERED,
    DELIVERING,
    EPOCH,
    FAST_FORWARDED,
    FIFO_HEAD,
    FIFO_TAIL,
    LIVE_THREADS,
    LOG_ON,
    LOG_REPEATS,
    LOG_USED,
    N_ACTIVE,
    N_FOREIGN,
    N_MESSAGES,
    N_OUT,
    N_QUEUED,
    N_STOPPED,
    N_TIMER_HEAP,
    NOW,
    REPLAY,
    ROUND_DELIVERY_MAX,
    ROUND_DELIVERY_MIN,
    ROUND_INSTANTS,
    ROUND_THREADS,
    ROUND_TRANSFER_MAX,
    ROUND_TRANSFER_MIN,
    SAME_INSTANT,
    SHAPED,
    STEPS_LEFT,
    Net,
)
from ddlsim.network.sums import book_bytes, count


@inlined
def later(time, now):  # type: ignore[no-untyped-def]
    """Whether `time` counts as a different instant after `now`."""
    return time > now + now * SAME_INSTANT


@inlined
def in_step(net: Net):  # type: ignore[no-untyped-def]
    """Whether no flow is active, and all messages in flight start to flow at one later instant."""
    head = net.counts[FIFO_HEAD]
    tail = net.counts[FIFO_TAIL]
    if net.counts[N_ACTIVE] + net.counts[N_QUEUED] + net.counts[N_TIMER_HEAP] > 0 or head == tail:
        return False
    mask = net.fifo.size - 1
    start = net.fifo[head & mask].time
    if net.counts[N_OUT] + net.counts[N_FOREIGN] > 0 or net.fifo[(tail - 1) & mask].time != start:
        return False
    allowed = net.counts[REPLAY] == 1 and net.counts[SHAPED] == 0 and net.counts[N_STOPPED] == 0
    return allowed and later(start, net.reals[NOW])


@inlined
def replay(net: Net, until):  # type: ignore[no-untyped-def]
    """Repeat the round that has just ended as often as it is certain to recur, by the same floating-point additions.

    Between two *barriers* (moments as above at which every thread of all live collectives entered a step), all messages
    started to flow at one instant, ended at one instant after equal transfers, and were received after equal overheads
    and reductions. If no thread has ended, and each now repeats its step with equal sizes, latencies and overheads, the
    next round is the same again. (Messages of equal size that took equal times were all frozen at the first level of
    the filling, the capacity of a channel / its flows, whose bits do not depend on the order of events.)
    """
    rounds = net.counts[STEPS_LEFT]
    transfer = net.reals[ROUND_TRANSFER_MIN]
    if rounds <= 0 or transfer != net.reals[ROUND_TRANSFER_MAX]:
        return
    mask = net.fifo.size - 1
    head = net.counts[FIFO_HEAD]
    first = net.fifo[head & mask].item
    nbytes = net.slots[first].nbytes
    latency = net.routes[net.slots[first].route].latency
    handled = net.routes[net.slots[first].route].handled
    like = net.messages[net.slots[first].message]
    sending = net.nodes[like.source].send_overhead
    receiving = net.nodes[like.target].recv_overhead
    reducing = like.reduce * net.nodes[like.target].reduce_time * nbytes
    if nbytes <= 0.0 or net.counts[ROUND_THREADS] != net.counts[LIVE_THREADS]:
        return
    if receiving + reducing > 0.0:
        if net.counts[ROUND_INSTANTS] != 3 or net.reals[ROUND_DELIVERY_MIN] != net.reals[ROUND_DELIVERY_MAX]:
            return
    elif net.counts[ROUND_INSTANTS] != 2 or net.reals[ROUND_DELIVERY_MAX] >= 0.0:
        return
    for i in range(head, net.counts[FIFO_TAIL]):
        slot = net.fifo[i & mask].item
        message = net.messages[net.slots[slot].message]
        if net.slots[slot].nbytes != nbytes or message.stride != 0 or net.slots[slot].state == DELIVERING:
            return
        route = net.routes[net.slots[slot].route]
        if route.latency != latency or route.handled != handled:
            return
        if net.nodes[message.source].send_overhead != sending:
            return
        if net.nodes[message.target].recv_overhead != receiving:
            return
        if message.reduce * net.nodes[message.target].reduce_time * nbytes != reducing:
            return
    now = net.reals[NOW]
    done = 0
    while done < rounds:
        start = (now + sending) + latency
        end = start + transfer
        then = (end + receiving) + reducing
        # instants that rounding merges would not be simulated as two
        if then > until or not (later(start, now) and later(end, start)) or (then > end and not later(then, end)):
            break
        now = then
        done += 1
    if done > 0:
        if net.counts[LOG_ON] == 1:
            log_rounds(net, done, sending, latency, transfer, receiving, reducing)
        book(net, done, transfer, (now + sending) + latency)
        net.reals[NOW] = now
        net.counts[STEPS_LEFT] -= done


@inlined
def log_rounds(net: Net, done, sending, latency, transfer, receiving, reducing):  # type: ignore[no-untyped-def]
    """Log each channel that is busy in a replayed round once, and how often the round is repeated."""
    mask = net.fifo.size - 1
    now = net.reals[NOW]
    start = (now + sending) + latency
    first = net.counts[LOG_USED]
    alike = False
    net.counts[EPOCH] += 1
    for i in range(net.counts[FIFO_HEAD], net.counts[FIFO_TAIL]):
        route = net.slots[net.fifo[i & mask].item].route
        for h in range(net.routes[route].first, net.routes[route].last):
            channel = net.hops[h]
            if net.marks[channel] != net.counts[EPOCH]:
                net.marks[channel] = net.counts[EPOCH]
                alike = log_busy(net, channel, start, start + transfer, alike)
    i = net.counts[LOG_REPEATS]
    net.repeats[i].now = now
    net.repeats[i].sending = sending
    net.repeats[i].latency = latency
    net.repeats[i].transfer = transfer
    net.repeats[i].receiving = receiving
    net.repeats[i].reducing = reducing
    net.repeats[i].times = done
    net.repeats[i].first = first
    net.repeats[i].last = net.counts[LOG_USED]
    net.counts[LOG_REPEATS] = i + 1


@inlined
def book(net: Net, done, transfer, start):  # type: ignore[no-untyped-def]
    """Book `done` replayed rounds: bytes, busy seconds, arrivals, repetitions. Reset the message timers to `start`."""
    mask = net.fifo.size - 1
    head = net.counts[FIFO_HEAD]
    n = net.counts[FIFO_TAIL] - head
    net.counts[EPOCH] += 1
    epoch = net.counts[EPOCH]
    for i in range(head, head + n):
        slot = net.fifo[i & mask].item
        net.fifo[i & mask].time = start
        place = net.instances[net.slots[slot].instance].counters + net.messages[net.slots[slot].message].counter
        net.counters[place] += done
        skip_repetitions(net, slot, place, done)
        nbytes = net.slots[slot].nbytes
        route = net.slots[slot].route
        book_issue(net, route, nbytes, done)
        count(net, DELIVERED, nbytes, done)
        for h in range(net.routes[route].first, net.routes[route].last):
            channel = net.hops[h]
            book_bytes(net, channel, nbytes * share_of(net, h), done)
            if net.marks[channel] != epoch:  # once, however many flows cross it
                net.marks[channel] = epoch
                net.channels[channel].busy += done * transfer
    repeat_threads(net, done)
    net.counts[N_MESSAGES] += done * n
    net.counts[FAST_FORWARDED] += done * n


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


@inlined
def start_round(net: Net):  # type: ignore[no-untyped-def]
    """Start observing a round at the present barrier."""
    net.counts[ROUND_INSTANTS] = 0
    net.counts[ROUND_THREADS] = net.counts[LIVE_THREADS]
    net.reals[ROUND_TRANSFER_MIN] = np.inf
    net.reals[ROUND_TRANSFER_MAX] = -np.inf
    net.reals[ROUND_DELIVERY_MIN] = np.inf
    net.reals[ROUND_DELIVERY_MAX] = -np.inf
