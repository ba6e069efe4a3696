"""The event kernel: messages, rounds and ranks on top of max-min fair flows, compiled.

:func:`advance` handles instants in order until a completion that somebody waits for. All that happens at one
instant is handled together: flows that end, timers that ring (a message has waited its latency, or has been
received and reduced), the steps that ranks take because of it, then one solve of the rates that changed.
"""

from __future__ import annotations

import numpy as np

from ddlsim.network.heap import heap_push, heap_remove, jit
from ddlsim.network.maxmin import mark_dirty, solve
from ddlsim.network.state import (
    DELIVERING,
    FAST_FORWARDED,
    FIFO_HEAD,
    FIFO_TAIL,
    FLOWING,
    FREE,
    FULL,
    HEAP_VALID,
    HOP_SHIFT,
    IDLE,
    LIVE_SENDS,
    LIVE_SINGLE,
    LIVE_THREADS,
    LOG_ON,
    LOG_USED,
    N_ACTIVE,
    N_DELIVERING,
    N_EVENTS,
    N_FREE,
    N_HEAP,
    N_LIVE,
    N_MESSAGES,
    N_NEW,
    N_OUT,
    N_SLOTS,
    N_TIMER_HEAP,
    NOW,
    POOL_USED,
    REPLAY,
    ROUND_INSTANTS,
    ROUND_THREADS,
    ROUND_TRANSFER_MAX,
    ROUND_TRANSFER_MIN,
    STEPPED,
    STEPS_LEFT,
    THRESHOLD,
    VISIBLE,
    WAITING,
    Net,
)

SAME_INSTANT = 1e-15  # relative; planned ends this close are one event (rounding of equal sums)
MANY = 1 << 62


# ---------------------------------------------------------------- timers


@jit
def push_timer(net: Net, time, slot):  # type: ignore[no-untyped-def]
    """Queue a timer: in order it costs nothing (a ring buffer), out of order it goes to a heap."""
    mask = net.fifo.size - 1
    tail = net.counts[FIFO_TAIL]
    if tail == net.counts[FIFO_HEAD] or time >= net.fifo[(tail - 1) & mask].time:
        net.fifo[tail & mask].time = time
        net.fifo[tail & mask].slot = slot
        net.counts[FIFO_TAIL] = tail + 1
        return
    heap_push(net.timers, net.slots, net.counts[N_TIMER_HEAP], time, slot)
    net.counts[N_TIMER_HEAP] += 1


@jit
def next_timer(net: Net):  # type: ignore[no-untyped-def]
    head = net.counts[FIFO_HEAD]
    time = np.inf
    if head != net.counts[FIFO_TAIL]:
        time = net.fifo[head & (net.fifo.size - 1)].time
    if net.counts[N_TIMER_HEAP] > 0 and net.timers[0].time < time:
        time = net.timers[0].time
    return time


@jit
def pop_timer(net: Net):  # type: ignore[no-untyped-def]
    """Return the slot of the earliest timer; at equal times the ring buffer goes first."""
    head = net.counts[FIFO_HEAD]
    mask = net.fifo.size - 1
    n = net.counts[N_TIMER_HEAP]
    if head != net.counts[FIFO_TAIL] and not (n > 0 and net.timers[0].time < net.fifo[head & mask].time):
        net.counts[FIFO_HEAD] = head + 1
        return net.fifo[head & mask].slot
    slot = net.timers[0].slot
    heap_remove(net.timers, net.slots, n, slot)
    net.counts[N_TIMER_HEAP] = n - 1
    return slot


# ---------------------------------------------------------------- flows on channels


@jit
def make_room(net: Net, channel):  # type: ignore[no-untyped-def]
    """Give a full channel list twice the room at the end of the pool; repack the pool when that is used up."""
    need = 2 * net.channels[channel].room
    if net.counts[POOL_USED] + need > net.pool.size:
        repack(net)
        if net.channels[channel].used < net.channels[channel].room:
            return
    first = net.channels[channel].first
    start = net.counts[POOL_USED]
    for i in range(net.channels[channel].used):
        net.pool[start + i] = net.pool[first + i]
    net.channels[channel].first = start
    net.channels[channel].room = need
    net.counts[POOL_USED] = start + need


@jit
def repack(net: Net):  # type: ignore[no-untyped-def]
    """Lay the channel lists out anew, one after the other, each with room for twice its flows."""
    copy = net.pool_copy
    at = 0
    for channel in range(net.channels.size):
        first = net.channels[channel].first
        for i in range(net.channels[channel].used):
            copy[at] = net.pool[first + i]
            at += 1
    at = 0
    start = 0
    for channel in range(net.channels.size):
        net.channels[channel].first = start
        for i in range(net.channels[channel].used):
            net.pool[start + i] = copy[at]
            at += 1
        room = max(2 * net.channels[channel].used, 2)
        net.channels[channel].room = room
        start += room
    net.counts[POOL_USED] = start


@jit
def activate(net: Net, slot):  # type: ignore[no-untyped-def]
    """A message has waited its latency: put it on its channels, or end it if it has nothing to carry."""
    route = net.slots[slot].route
    first = net.routes[route].first
    n_hops = net.routes[route].last - first
    if n_hops == 0 or net.slots[slot].nbytes <= 0.0:
        finished(net, slot)
        return
    now = net.reals[NOW]
    entry = slot << net.counts[HOP_SHIFT]
    net.slot_hop_end[slot] = entry + n_hops
    for h in range(first, first + n_hops):
        channel = net.hops[h]
        n = net.channels[channel].used
        if n == net.channels[channel].room:
            make_room(net, channel)
        net.pool[net.channels[channel].first + n] = entry
        net.slot_place[entry] = n
        net.slot_hops[entry] = channel
        net.channels[channel].used = n + 1
        if n == 0:
            net.channels[channel].since = now
        entry += 1
    net.slots[slot].state = FLOWING
    net.slot_rate[slot] = np.inf
    net.new_slots[net.counts[N_NEW]] = slot
    net.counts[N_NEW] += 1
    net.counts[N_ACTIVE] += 1


@jit
def log_busy(net: Net, channel, start, end):  # type: ignore[no-untyped-def]
    i = net.counts[LOG_USED]
    net.log[i].channel = channel
    net.log[i].start = start
    net.log[i].end = end
    net.counts[LOG_USED] = i + 1


@jit
def end_flow(net: Net, slot):  # type: ignore[no-untyped-def]
    """All bytes have passed: take the flow off its channels and let sender and receiver go on."""
    shift = net.counts[HOP_SHIFT]
    now = net.reals[NOW]
    nbytes = net.slots[slot].nbytes
    affected = False
    for entry in range(slot << shift, net.slot_hop_end[slot]):
        channel = net.slot_hops[entry]
        offset = net.channels[channel].first
        n = net.channels[channel].used - 1
        place = net.slot_place[entry]
        moved = net.pool[offset + n]
        net.pool[offset + place] = moved
        net.slot_place[moved] = place
        net.channels[channel].used = n
        net.channels[channel].nbytes += nbytes
        if n == 0:
            net.channels[channel].level = np.inf
            net.channels[channel].busy += now - net.channels[channel].since
            if net.counts[LOG_ON] == 1:
                log_busy(net, channel, net.channels[channel].since, now)
        elif net.channels[channel].level < np.inf:  # it was full, so somebody on it may now go faster
            mark_dirty(net, channel)
            affected = True
    if affected and net.slot_rate[slot] < net.reals[THRESHOLD]:
        net.reals[THRESHOLD] = net.slot_rate[slot]
    net.slot_end[slot] = np.inf
    net.slot_rate[slot] = 0.0
    net.counts[N_ACTIVE] -= 1
    if net.slots[slot].heap_place >= 0:
        heap_remove(net.heap, net.slots, net.counts[N_HEAP], slot)
        net.counts[N_HEAP] -= 1
    finished(net, slot)


# ---------------------------------------------------------------- messages


@jit
def issue(net: Net, instance, message, nbytes, route, source):  # type: ignore[no-untyped-def]
    """Send a message from node `source` now: sender overhead, then latency, then it flows."""
    n = net.counts[N_FREE] - 1
    net.counts[N_FREE] = n
    slot = net.free_slots[n]
    if slot >= net.counts[N_SLOTS]:
        net.counts[N_SLOTS] = slot + 1
    net.slots[slot].state = WAITING
    net.slots[slot].instance = instance
    net.slots[slot].message = message
    net.slots[slot].route = route
    net.slots[slot].nbytes = nbytes
    start = net.reals[NOW]
    overhead = net.nodes[source].send_overhead
    if overhead > 0.0:
        start = max(start, net.nodes[source].send_free) + overhead
        net.nodes[source].send_free = start
    push_timer(net, start + net.routes[route].latency, slot)


@jit
def finished(net: Net, slot):  # type: ignore[no-untyped-def]
    """The last byte has arrived: the send is over; the receipt may still cost overhead and reduction."""
    instance = net.slots[slot].instance
    message = net.slots[slot].message
    if instance < 0:
        target = message
        reduce_time = 0.0
    else:
        target = net.messages[message].target
        reduce_time = net.messages[message].reduce * net.nodes[target].reduce_time * net.slots[slot].nbytes
    done = net.reals[NOW]
    overhead = net.nodes[target].recv_overhead
    if overhead > 0.0:
        done = max(done, net.nodes[target].recv_free) + overhead
        net.nodes[target].recv_free = done
    if overhead + reduce_time > 0.0:
        done += reduce_time
        net.slots[slot].state = DELIVERING
        net.counts[N_DELIVERING] += 1
        push_timer(net, done, slot)
    else:
        deliver(net, slot)
    if instance >= 0:
        state = net.instances[instance].threads + net.messages[message].src
        net.threads[state].sends_left -= 1
        if net.threads[state].sends_left == 0 and net.threads[state].recvs_missing == 0:
            next_step(net, instance, net.messages[message].src)


@jit
def deliver(net: Net, slot):  # type: ignore[no-untyped-def]
    """Hand the message to the receiver and free the slot."""
    instance = net.slots[slot].instance
    message = net.slots[slot].message
    if net.slots[slot].state == DELIVERING:
        net.counts[N_DELIVERING] -= 1
    net.slots[slot].state = FREE
    net.free_slots[net.counts[N_FREE]] = slot
    net.counts[N_FREE] += 1
    net.counts[N_MESSAGES] += 1
    if instance < 0:
        net.counts[LIVE_SINGLE] -= 1
        net.counts[LIVE_SENDS] -= 1
        show(net, instance, 0)
        return
    program = net.instances[instance].program
    counter = net.instances[instance].counters + message - net.programs[program].message
    net.arrivals[counter] += 1
    thread = net.messages[message].dst
    state = net.instances[instance].threads + thread
    if net.threads[state].step == net.messages[message].step and net.arrivals[counter] == net.threads[state].repetition + 1:
        net.threads[state].recvs_missing -= 1
        if net.threads[state].recvs_missing == 0 and net.threads[state].sends_left == 0:
            next_step(net, instance, thread)


@jit
def show(net: Net, instance, rank):  # type: ignore[no-untyped-def]
    """Report a completion to whoever waits outside."""
    i = net.counts[N_OUT]
    net.out[i].id = instance
    net.out[i].rank = rank
    net.counts[N_OUT] = i + 1


# ---------------------------------------------------------------- ranks and rounds


@jit
def enter_step(net: Net, instance, thread, step, repetition):  # type: ignore[no-untyped-def]
    """Start a step: issue its sends, count the receipts still missing. Returns True if nothing is left."""
    table = net.instances[instance]
    state = table.threads + thread
    first_message = net.programs[table.program].message
    net.threads[state].step = step
    net.threads[state].repetition = repetition
    if net.threads[state].entered != net.counts[N_EVENTS]:
        net.threads[state].entered = net.counts[N_EVENTS]
        net.counts[STEPPED] += 1
    left = net.steps[step].repeat - 1 - repetition if repetition > 0 else -1
    if left < net.counts[STEPS_LEFT]:
        net.counts[STEPS_LEFT] = left
    low = net.steps[step].send
    high = net.steps[step].send_end
    net.threads[state].sends_left = high - low
    missing = 0
    for i in range(net.steps[step].recv, net.steps[step].recv_end):
        if net.arrivals[table.counters + net.recv_message[i] - first_message] <= repetition:
            missing += 1
    net.threads[state].recvs_missing = missing
    total = net.instances[instance].nbytes
    for message in range(low, high):
        share = net.weights[net.messages[message].weight + repetition * net.messages[message].stride]
        issue(net, instance, message, total * share, net.messages[message].route, net.messages[message].source)
    return low == high and missing == 0


@jit
def next_step(net: Net, instance, thread):  # type: ignore[no-untyped-def]
    table = net.instances[instance]
    state = table.threads + thread
    first_thread = net.programs[table.program].thread
    while True:
        step = net.threads[state].step
        repetition = net.threads[state].repetition + 1
        if repetition == net.steps[step].repeat:
            step += 1
            repetition = 0
        if step == net.thread_step[first_thread + thread + 1]:
            end_thread(net, instance, thread)
            return
        if not enter_step(net, instance, thread, step, repetition):
            return


@jit
def end_thread(net: Net, instance, thread):  # type: ignore[no-untyped-def]
    table = net.instances[instance]
    program = net.programs[table.program]
    rank = thread % program.n_ranks
    net.threads[table.threads + thread].step = -2
    net.counts[LIVE_THREADS] -= 1
    net.lanes_left[table.ranks + rank] -= 1
    if net.lanes_left[table.ranks + rank] > 0:
        return
    show(net, instance, rank)
    net.instances[instance].ranks_left -= 1
    if net.instances[instance].ranks_left == 0:
        net.counts[N_LIVE] -= 1
        net.counts[LIVE_SENDS] -= program.sends_bound


@jit
def join(net: Net, instances, ranks, now):  # type: ignore[no-untyped-def]
    """Let ranks enter their collectives at time `now`."""
    net.reals[NOW] = now
    net.counts[ROUND_INSTANTS] = -MANY
    for i in range(instances.size):
        instance = instances[i]
        program = net.programs[net.instances[instance].program]
        for lane in range(program.n_lanes):
            thread = lane * program.n_ranks + ranks[i]
            step = net.thread_step[program.thread + thread]
            if step == net.thread_step[program.thread + thread + 1]:
                end_thread(net, instance, thread)
            elif enter_step(net, instance, thread, step, 0):
                next_step(net, instance, thread)


@jit
def send(net: Net, handles, sources, targets, routes, nbytes, now):  # type: ignore[no-untyped-def]
    """Issue single messages at time `now`; each is reported as -1 - handle when delivered."""
    net.reals[NOW] = now
    net.counts[ROUND_INSTANTS] = -MANY
    for i in range(handles.size):
        net.counts[LIVE_SINGLE] += 1
        net.counts[LIVE_SENDS] += 1
        issue(net, -1 - handles[i], targets[i], nbytes[i], routes[i], sources[i])


# ---------------------------------------------------------------- instants


@jit
def next_end(net: Net):  # type: ignore[no-untyped-def]
    if net.counts[HEAP_VALID] == 1:
        return net.heap[0].time if net.counts[N_HEAP] > 0 else np.inf
    ends = net.slot_end
    n = net.counts[N_SLOTS]
    while n > 0 and net.slots[n - 1].state == FREE:
        n -= 1
    net.counts[N_SLOTS] = n
    a = b = c = d = np.inf  # four chains of comparisons go side by side in the processor
    for i in range(0, n - 3, 4):
        a = min(a, ends[i])
        b = min(b, ends[i + 1])
        c = min(c, ends[i + 2])
        d = min(d, ends[i + 3])
    for i in range(n - n % 4, n):
        a = min(a, ends[i])
    return min(min(a, b), min(c, d))


@jit
def has_room(net: Net):  # type: ignore[no-untyped-def]
    """Whether the slots suffice for whatever the messages in flight set off; else the instant is split in two."""
    return net.slots.size >= net.counts[N_DELIVERING] + 2 * net.counts[LIVE_SENDS]


@jit
def handle_instant(net: Net, now):  # type: ignore[no-untyped-def]
    net.reals[NOW] = now
    net.counts[N_EVENTS] += 1
    net.counts[STEPPED] = 0
    net.counts[STEPS_LEFT] = MANY
    net.counts[ROUND_INSTANTS] += 1
    limit = now + now * SAME_INSTANT
    if net.counts[HEAP_VALID] == 1:
        while net.counts[N_HEAP] > 0 and net.heap[0].time <= limit:
            end_flow(net, net.heap[0].slot)
    else:
        for slot in range(net.counts[N_SLOTS]):
            if net.slot_end[slot] <= limit:
                end_flow(net, slot)
    while next_timer(net) <= limit and has_room(net):
        slot = pop_timer(net)
        if net.slots[slot].state == DELIVERING:
            deliver(net, slot)
        else:
            activate(net, slot)
    solve(net)


@jit
def fast_forward(net: Net, until):  # type: ignore[no-untyped-def]
    """Replay rounds that repeat exactly, by the same additions that the events would make.

    Between two barriers (instants at which every thread of the only live collective entered a step, with
    nothing in flight) all messages were activated at one instant and ended at one instant after equal
    transfers. If no thread has ended and every one now repeats its step with equal sizes and latencies, the next round is that
    round again, later: `now + latency + transfer`, in this order of additions. (Equal sizes that took equal
    times were all frozen at the first level of the filling, capacity / flows of a channel, whose bits do not
    depend on the order of events.)
    """
    n = net.counts[FIFO_TAIL] - net.counts[FIFO_HEAD]
    rounds = net.counts[STEPS_LEFT]
    transfer = net.reals[ROUND_TRANSFER_MIN]
    if rounds <= 0 or n == 0 or net.counts[N_TIMER_HEAP] > 0 or transfer != net.reals[ROUND_TRANSFER_MAX]:
        return
    mask = net.fifo.size - 1
    head = net.counts[FIFO_HEAD]
    now = net.reals[NOW]
    latency = net.routes[net.slots[net.fifo[head & mask].slot].route].latency
    nbytes = net.slots[net.fifo[head & mask].slot].nbytes
    if net.counts[ROUND_INSTANTS] != 2 or net.counts[ROUND_THREADS] != net.counts[LIVE_THREADS] or nbytes <= 0.0:
        return
    for i in range(head, head + n):
        slot = net.fifo[i & mask].slot
        message = net.messages[net.slots[slot].message]
        same = net.routes[net.slots[slot].route].latency == latency and net.fifo[i & mask].time == now + latency
        same = same and net.slots[slot].nbytes == nbytes and message.stride == 0
        if not same or net.nodes[message.source].send_overhead > 0.0:
            return
    if net.counts[LOG_ON] == 1:
        rounds = min(rounds, (net.log.size - net.counts[LOG_USED]) // net.channels.size)
    done = 0
    while done < rounds:
        start = now + latency
        then = start + transfer
        # instants that rounding makes one would not be handled as two
        if then > until or start <= now + now * SAME_INSTANT or then <= start + start * SAME_INSTANT:
            break
        if net.counts[LOG_ON] == 1:
            log_round(net, start, then)
        now = then
        done += 1
    if done == 0:
        return
    account(net, done, transfer, now + latency)
    net.reals[NOW] = now


@jit
def log_round(net: Net, start, end):  # type: ignore[no-untyped-def]
    """Log the channels that are busy in a replayed round (each carried its first flow of the round at `start`)."""
    mask = net.fifo.size - 1
    for i in range(net.counts[FIFO_HEAD], net.counts[FIFO_TAIL]):
        route = net.slots[net.fifo[i & mask].slot].route
        for h in range(net.routes[route].first, net.routes[route].last):
            channel = net.hops[h]
            if net.channels[channel].since < start:
                net.channels[channel].since = start
                log_busy(net, channel, start, end)


@jit
def account(net: Net, done, transfer, ring_time):  # type: ignore[no-untyped-def]
    """Book `done` replayed rounds: bytes, busy seconds, arrivals, repetitions, and the pending timers."""
    mask = net.fifo.size - 1
    head = net.counts[FIFO_HEAD]
    n = net.counts[FIFO_TAIL] - head
    instance = net.slots[net.fifo[head & mask].slot].instance
    table = net.instances[instance]
    program = net.programs[table.program]
    for i in range(head, head + n):
        slot = net.fifo[i & mask].slot
        net.fifo[i & mask].time = ring_time
        net.arrivals[table.counters + net.slots[slot].message - program.message] += done
        route = net.slots[slot].route
        for h in range(net.routes[route].first, net.routes[route].last):
            channel = net.hops[h]
            net.channels[channel].nbytes += done * net.slots[slot].nbytes
            if net.channels[channel].since < np.inf:  # count a channel once however many flows cross it
                net.channels[channel].busy += done * transfer
                net.channels[channel].since = np.inf
    for i in range(head, head + n):
        route = net.slots[net.fifo[i & mask].slot].route
        for h in range(net.routes[route].first, net.routes[route].last):
            net.channels[net.hops[h]].since = ring_time - transfer
    for thread in range(program.n_ranks * program.n_lanes):
        if net.threads[table.threads + thread].step >= 0:
            net.threads[table.threads + thread].repetition += done
    net.counts[N_MESSAGES] += done * n
    net.counts[FAST_FORWARDED] += done * n


@jit
def advance(net: Net, until):  # type: ignore[no-untyped-def]
    """Handle instants up to and including `until`; stop early at the first completion to be shown.

    Returns IDLE (nothing more up to `until`), VISIBLE (completions wait in `out_*`) or FULL (slots or busy
    log must be made longer before the next instant can be handled).
    """
    while True:
        if net.counts[N_OUT] > 0:
            return VISIBLE
        now = min(next_end(net), next_timer(net))
        if now > until or now == np.inf:
            return IDLE
        if not has_room(net):
            return FULL
        if net.counts[LOG_ON] == 1 and net.counts[LOG_USED] + net.channels.size > net.log.size:
            return FULL
        handle_instant(net, now)
        at_barrier = (
            net.counts[STEPPED] == net.counts[LIVE_THREADS]
            and net.counts[N_LIVE] == 1
            and net.counts[N_ACTIVE] == 0
            and net.counts[LIVE_SINGLE] == 0
        )
        if at_barrier:
            if net.counts[REPLAY] == 1 and net.counts[N_OUT] == 0:
                fast_forward(net, until)
            net.counts[ROUND_INSTANTS] = 0
            net.counts[ROUND_THREADS] = net.counts[LIVE_THREADS]
            net.reals[ROUND_TRANSFER_MIN] = np.inf
            net.reals[ROUND_TRANSFER_MAX] = -np.inf
