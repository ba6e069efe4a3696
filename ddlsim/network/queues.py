"""Links that serve bytes in order of arrival (FIFO), as the queues of kernels and switches do. Compiled.

Bytes are modelled as a fluid. A queue consists of two curves: bytes arrived and bytes served, over time. A message
enters the queue of its first link at once, as a *burst*, and uses the whole link when its turn comes. It enters later
links at the rate at which it leaves the previous one. Bytes of several messages that arrive together leave together:
each message's share of the link equals its share of the arrivals at that time. If an inflow changes, the outflows
change once the bytes behind the change reach the head; until then, the queue holds a *mark*. This is the exact limit of
a packet simulation with ever smaller frames (`tests/network/frames_reference.py`).

A message that meets no other on its route is simulated as a flow, as under max-min sharing, with one planned end that
is the same to the last bit. When another message shares a link with it, it moves to the queues, which replay its
progress so far. :mod:`ddlsim.network.rounds` therefore replays rounds of such messages, but not rounds in which a
message is queued.

A connection with a window has at most `UNITS` *units* of the window in flight, besides the one that is arriving: when a
unit has arrived, the next one enters the first link. With `queued_acks`, it enters when an acknowledgement has
returned: a mark without bytes that waits in the queues of the opposite direction, link by link.

Order within an instant: queues are served first, then messages enter in the order in which they were sent.
"""

from __future__ import annotations

import math

import numpy as np

from ddlsim.compiler import called, inlined
from ddlsim.network.calendar import heap_remove, heap_set
from ddlsim.network.flows import (
    add_flow,
    book_bytes,
    enqueue,
    free_reverse,
    link_bytes,
    load_reverse,
    log_busy,
    renumber,
)
from ddlsim.network.state import FLOWING, UNITS, View

#: kinds of marks: change of an inflow; first byte of a burst; last byte of a unit, and of a message; acknowledgement of
#: a unit, which crosses the link of its entry in the opposite direction
INFLOW, BURST, UNIT, END, ACK = 0, 1, 2, 3, 4
MOST_UNITS = 1 << 16  # per message, however small its window is
SAME = 1e-12  # relative; inflows this close count as equal
LOST = 1e-6  # share of a message's bytes; fewer missing bytes than this do not wait in a queue
PRIME = 1000003  # for keys of random numbers
SQRT_3 = 3.0**0.5  # the sum of four uniform numbers has a variance of 1/3
FULL_RATE = 1.0 + 1e-11  # inflows that exceed the service rate by less than this factor do not build a backlog


# ---------------------------------------------------------------- entering messages


@called
def enter(net: View, slot):  # type: ignore[no-untyped-def]
    """Start a message: as a flow, if it meets no other on its route, else in the queues at the end of this instant."""
    now = net.now
    route = net.slots[slot].route
    first = slot << net.hop_shift
    n = 0
    if net.transported == 1 and net.transports[route].channel >= 0:
        net.crossings[first].channel = net.transports[route].channel
        n = 1
    for h in range(net.routes[route].first, net.routes[route].last):
        net.crossings[first + n].channel = net.hops[h]
        n += 1
    for entry in range(first, first + n):
        net.crossings[entry].stage = 0
    net.trains[slot].start = now
    net.trains[slot].hops = n
    net.trains[slot].wire = link_bytes(net, slot) if net.shaped == 0 else net.wire[slot]
    alone = True
    for entry in range(first, first + n):
        channel = net.crossings[entry].channel
        alone = alone and is_idle(net, channel) and is_idle(net, opposite(net, slot, entry))
    if alone:
        for entry in range(first, first + n):
            channel = net.crossings[entry].channel
            net.queues[channel].capacity = net.channels[channel].capacity
        add_flow(net, slot)
        return
    for entry in range(first, first + n):
        meet(net, net.crossings[entry].channel)
        if opposite(net, slot, entry) >= 0:
            meet(net, opposite(net, slot, entry))
    net.slots[slot].state = FLOWING
    join(net, slot)


@inlined
def is_idle(net: View, channel):  # type: ignore[no-untyped-def]
    return channel < 0 or (net.channels[channel].used == 0 and net.queues[channel].expected == 0)


@inlined
def opposite(net: View, slot, entry):  # type: ignore[no-untyped-def]
    """Return the channel that acknowledgements of a message use on one of its links, -1 if they wait for nothing."""
    if net.transported == 0 or net.transports[net.slots[slot].route].queued_acks == 0:
        return np.int64(-1)
    return np.int64(net.buckets[net.crossings[entry].channel].reverse)


@inlined
def join(net: View, slot):  # type: ignore[no-untyped-def]
    """Let a message enter the queues at the end of this instant, and reserve its route."""
    first = slot << net.hop_shift
    for entry in range(first, first + net.trains[slot].hops):
        channel = net.crossings[entry].channel
        net.queues[channel].expected += 1
    net.joining[net.n_joining] = slot
    net.n_joining += 1
    net.n_queued += 1
    net.rerated += 1  # this round cannot be replayed


@inlined
def meet(net: View, channel):  # type: ignore[no-untyped-def]
    """Move the flow that uses a channel on its own, if there is one, to the queues."""
    if net.channels[channel].used == 0 or net.queues[channel].expected > 0:
        return
    flow = np.int64(net.pool[net.channels[channel].first]) >> net.hop_shift
    slot = net.flows[flow].slot
    first = slot << net.hop_shift
    for entry in range(first, first + net.trains[slot].hops):
        net.crossings[entry].stage = 1  # a flow is on all links from its start
    place = net.flows[flow].heap_place
    if net.heap_valid == 1 and place >= 0:
        net.n_heap = heap_remove(net.heap, net.flows, net.n_heap, flow)
    last = net.n_active - 1
    new = net.n_active - net.n_new
    if flow >= new:
        net.n_new -= 1
    elif flow != new - 1:  # flows without a rate have to stay last
        renumber(net, new - 1, flow)
    free = max(flow, new - 1)
    if free != last:
        renumber(net, last, free)
    net.n_active = last
    join(net, slot)


@inlined
def deviate(number):  # type: ignore[no-untyped-def]
    """Return a sample of the standard normal distribution: the scaled sum of four parts of a hash of `number`."""
    mixed = np.int64(number) * 0x1E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0x3F58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x14D049BB133111EB
    mixed ^= mixed >> 31
    total = 0.0
    for part in range(4):
        total += ((mixed >> (16 * part)) & 0xFFFF) / 65536.0
    return (total - 2.0) * SQRT_3


@inlined
def inject(net: View, slot):  # type: ignore[no-untyped-def]
    """Put a message into the queue of its first link: all of it, or as much as its window allows."""
    train = net.trains[slot]
    first = slot << net.hop_shift
    for entry in range(first, first + train.hops):
        net.crossings[entry].inflow = 0.0
        net.crossings[entry].head = 0.0
        net.crossings[entry].passed = 0.0
        net.crossings[entry].entered = 0.0
        net.crossings[entry].through = net.queues[net.crossings[entry].channel].through
        if net.crossings[entry].stage == 1:
            list_onward(net, entry)
    window = np.inf
    if net.transported == 1:
        transport = net.transports[net.slots[slot].route]
        window = transport.window
        if transport.window_spread > 0.0:
            net.connections[transport.connection].seq += 1
            key = (net.link_seed * PRIME + transport.connection) * PRIME + net.connections[transport.connection].seq
            window *= math.exp(transport.window_spread * deviate(key))
    if net.shaped == 1 and net.frames[net.slots[slot].route].header > 0.0:
        frame = net.frames[net.slots[slot].route]
        window += frame.header * np.ceil(window / frame.payload)
    net.trains[slot].unit = max(window / UNITS, train.wire / MOST_UNITS) if window < train.wire else train.wire
    net.trains[slot].allowed = np.int64(window / net.trains[slot].unit) if window < train.wire else 1
    net.trains[slot].left = train.wire
    net.trains[slot].flying = 0
    connection: int = ordered_connection(net, slot)
    if connection >= 0 and net.connections[connection].busy == 1:  # others have to enter the first link before it
        enqueue(net, slot, connection)
    else:
        send_units(net, slot, 0)


@called
def send_units(net: View, slot, arriving):  # type: ignore[no-untyped-def]
    """Put units of a message into the queue of its first link, as its window allows besides `arriving` units that
    arrive now, followed by those of the next messages on its connection."""
    while True:
        entry = slot << net.hop_shift
        channel = net.crossings[entry].channel
        work(net, channel)
        handed_over = net.trains[slot].left <= 0.0  # earlier: the connection now serves another message
        while net.trains[slot].flying < net.trains[slot].allowed + arriving and net.trains[slot].left > 0.0:
            size = min(net.trains[slot].unit, net.trains[slot].left)
            net.trains[slot].left -= size
            net.trains[slot].last = size
            net.trains[slot].flying += 1
            arrive(net, entry)
            if net.queues[channel].backlogged == 0:
                begin_backlog(net, channel)
                net.queues[channel].burst = entry
            else:
                put_mark(net, channel, entry, BURST, 0.0)
            net.queues[channel].arrived += size
            put_mark(net, channel, entry, UNIT if net.trains[slot].left > 0.0 else END, 0.0)
        touch(net, channel)
        connection: int = ordered_connection(net, slot)
        if connection < 0 or handed_over:
            return
        following = net.connections[connection].first
        net.connections[connection].busy = 1 if net.trains[slot].left > 0.0 or following >= 0 else 0
        if net.trains[slot].left > 0.0 or following < 0:
            return
        net.connections[connection].first = net.line[following]
        slot = np.int64(following)
        arriving = 0


@inlined
def ordered_connection(net: View, slot):  # type: ignore[no-untyped-def]
    """Return the connection of a message if that sends messages one after the other, else -1."""
    if net.transported == 0:
        return -1
    connection = net.transports[net.slots[slot].route].connection
    return connection if connection >= 0 and net.connections[connection].ordered == 1 else -1


# ---------------------------------------------------------------- a queue


@inlined
def work(net: View, channel):  # type: ignore[no-untyped-def]
    """Advance a queue to the present time."""
    passed = net.queue_time - net.queues[channel].time
    net.queues[channel].time = net.queue_time
    if passed <= 0.0:
        return
    served = net.queues[channel].rate * passed
    net.queues[channel].served += served
    net.queues[channel].arrived += net.queues[channel].inflow * passed
    burst = net.queues[channel].burst
    if burst >= 0:
        net.crossings[burst].passed += served
    elif net.queues[channel].head > 0.0:
        net.queues[channel].through += served / net.queues[channel].head


@inlined
def begin_backlog(net: View, channel):  # type: ignore[no-untyped-def]
    """Begin a backlog. Positions of bytes are counted from its beginning."""
    net.queues[channel].backlogged = 1
    net.queues[channel].arrived = 0.0
    net.queues[channel].served = 0.0


@inlined
def put_mark(net: View, channel, entry, kind, rate):  # type: ignore[no-untyped-def]
    """Put a mark behind the bytes that have arrived, in place of the same message's inflow mark at that position."""
    last = net.queues[channel].last
    position = net.queues[channel].arrived
    again = kind == INFLOW and last >= 0 and net.queue_marks[last].kind == INFLOW
    if again and net.queue_marks[last].entry == entry and net.queue_marks[last].position == position:
        net.queue_marks[last].rate = rate
        return
    net.n_free_marks -= 1
    mark = net.free_marks[net.n_free_marks]
    net.queue_marks[mark].position = position
    net.queue_marks[mark].rate = rate
    net.queue_marks[mark].entry = entry
    net.queue_marks[mark].kind = kind
    net.queue_marks[mark].next = -1
    if last < 0:
        net.queues[channel].first = mark
    else:
        net.queue_marks[last].next = mark
    net.queues[channel].last = mark


@called
def set_inflow(net: View, channel, entry, rate):  # type: ignore[no-untyped-def]
    """Set the rate at which bytes of a message arrive at the tail of a queue."""
    before = net.crossings[entry].inflow
    now = net.queue_time
    net.crossings[entry].entered += before * (now - net.crossings[entry].since)
    net.crossings[entry].since = now
    net.crossings[entry].inflow = rate
    net.queues[channel].arriving += (1 if rate > 0.0 else 0) - (1 if before > 0.0 else 0)
    net.queues[channel].inflow += rate - before
    if net.queues[channel].arriving == 0:
        net.queues[channel].inflow = 0.0


@called
def set_head(net: View, channel, entry, rate):  # type: ignore[no-untyped-def]
    """Set the arrival rate of the bytes of a message that now leave at the head of a queue."""
    before = net.crossings[entry].head
    through = net.queues[channel].through
    net.crossings[entry].passed += before * (through - net.crossings[entry].through)
    net.crossings[entry].through = through
    net.crossings[entry].head = rate
    net.queues[channel].leaving += (1 if rate > 0.0 else 0) - (1 if before > 0.0 else 0)
    net.queues[channel].head += rate - before
    if net.queues[channel].leaving == 0:
        net.queues[channel].head = 0.0


@inlined
def touch(net: View, channel):  # type: ignore[no-untyped-def]
    """Mark a queue for a recomputation of its outflows at this instant."""
    if net.queues[channel].touched == 0:
        net.queues[channel].touched = 1
        net.touched[net.n_touched] = channel
        net.n_touched += 1


@inlined
def schedule(net: View, channel):  # type: ignore[no-untyped-def]
    """Schedule a queue's next event: a mark reaches the head, or the queue is empty."""
    queue = net.queues[channel]
    time = np.inf
    if queue.first >= 0:
        time = queue.time + max(net.queue_marks[queue.first].position - queue.served, 0.0) / queue.rate
    elif queue.backlogged == 1 and queue.inflow * FULL_RATE < queue.rate:
        time = queue.time + max(queue.arrived - queue.served, 0.0) / (queue.rate - queue.inflow)
    if time < np.inf:
        net.n_queue_heap = heap_set(net.queue_heap, net.queues, net.n_queue_heap, time, channel)
    elif queue.heap_place >= 0:
        net.n_queue_heap = heap_remove(net.queue_heap, net.queues, net.n_queue_heap, channel)


@called
def refresh(net: View, channel):  # type: ignore[no-untyped-def]
    """Compute the rates at which messages leave a queue, and pass them on to the next links."""
    work(net, channel)
    net.n_refreshed += 1
    inflow = net.queues[channel].inflow
    capacity = net.queues[channel].capacity
    if net.queues[channel].backlogged == 0 and inflow > capacity * FULL_RATE:
        begin_backlog(net, channel)
    rate = capacity if net.queues[channel].backlogged == 1 else inflow
    net.queues[channel].rate = rate
    burst = net.queues[channel].burst
    head = net.queues[channel].head
    factor = 0.0
    if burst < 0 and head > 0.0:
        factor = rate / head if net.queues[channel].backlogged == 1 else 1.0
    entry = np.int64(net.queues[channel].onward)
    while entry >= 0:
        following = np.int64(net.crossings[entry].next)
        flow_on(net, entry + 1, rate if entry == burst else net.crossings[entry].head * factor)
        entry = following
    schedule(net, channel)


@called
def flow_on(net: View, entry, rate):  # type: ignore[no-untyped-def]
    """Set the rate of a message's bytes into a link, and into those behind it as long as these have no backlog."""
    # around a cycle of full links without a backlog, changes would become ever smaller but never vanish
    rounds = net.n_refreshed // net.queues.size
    same = SAME * (1 + rounds) ** 4
    while True:
        before = net.crossings[entry].inflow
        if rate == before or (rate > 0.0 and abs(rate - before) <= same * before):
            return
        channel = net.crossings[entry].channel
        work(net, channel)
        if rate > 0.0:
            arrive(net, entry)
        set_inflow(net, channel, entry, rate)
        if net.queues[channel].backlogged == 1:
            put_mark(net, channel, entry, INFLOW, rate)
            schedule(net, channel)
            return
        set_head(net, channel, entry, rate)
        if net.queues[channel].inflow > net.queues[channel].capacity * FULL_RATE:
            touch(net, channel)
            return
        net.queues[channel].rate = net.queues[channel].inflow
        if is_last(net, entry):
            return
        entry += 1


@inlined
def is_last(net: View, entry):  # type: ignore[no-untyped-def]
    shift = net.hop_shift
    return entry + 1 == ((entry >> shift) << shift) + net.trains[entry >> shift].hops


@called
def leave(net: View, entry, kind):  # type: ignore[no-untyped-def]
    """Let the last byte of a unit (of a message, if `kind` is END) leave a link, and the links behind it that have no
    backlog."""
    while True:
        if kind == END:
            depart(net, entry)
        if is_last(net, entry):
            slot = entry >> net.hop_shift
            if kind == END:
                net.ended[net.n_ended] = slot
                net.n_ended += 1
                net.n_queued -= 1
            else:
                acknowledge(net, slot, entry, net.trains[slot].start)
            return
        entry += 1
        channel = net.crossings[entry].channel
        work(net, channel)
        set_inflow(net, channel, entry, 0.0)
        train = net.trains[entry >> net.hop_shift]
        size = train.last if kind == END else train.unit
        missing = size - net.crossings[entry].entered  # lost to rounding of times, if earlier links are fast
        net.crossings[entry].entered = 0.0
        if net.queues[channel].backlogged == 0:
            set_head(net, channel, entry, 0.0)
            net.queues[channel].rate = net.queues[channel].inflow
            if missing <= LOST * size:
                continue
            arrive(net, entry)
            begin_backlog(net, channel)
            net.queues[channel].burst = entry
        last = net.queues[channel].last
        position = net.queues[channel].arrived + missing
        if last >= 0:
            position = max(position, net.queue_marks[last].position)
        net.queues[channel].arrived = position
        put_mark(net, channel, entry, kind, 0.0)
        touch(net, channel)
        return


@called
def acknowledge(net: View, slot, entry, start):  # type: ignore[no-untyped-def]
    """Return the acknowledgement of a unit from the end of a link, through the queues of the opposite direction.

    `start` identifies the message, whose slot may serve another one when the acknowledgement has returned.
    """
    while entry >= slot << net.hop_shift:
        channel: int = opposite(net, slot, entry)
        if channel >= 0 and net.queues[channel].backlogged == 1:
            work(net, channel)
            put_mark(net, channel, entry, ACK, start)
            touch(net, channel)
            return
        entry -= 1
    net.trains[slot].flying -= 1
    send_units(net, slot, 1)  # a window slides while bytes arrive


# ---------------------------------------------------------------- messages on a link


@inlined
def list_onward(net: View, entry):  # type: ignore[no-untyped-def]
    """Add a message to the list of those on a link that continue to another link."""
    if is_last(net, entry):
        return
    channel = net.crossings[entry].channel
    following = net.queues[channel].onward
    net.crossings[entry].next = following
    net.crossings[entry].previous = -1
    if following >= 0:
        net.crossings[following].previous = entry
    net.queues[channel].onward = entry


@inlined
def arrive(net: View, entry):  # type: ignore[no-untyped-def]
    """Let the first byte of a message reach a link."""
    if net.crossings[entry].stage != 0:
        return
    net.crossings[entry].stage = 1
    list_onward(net, entry)
    channel = net.crossings[entry].channel
    net.channels[channel].used += 1
    if net.channels[channel].used == 1:
        net.channels[channel].since = net.queue_time
        net.queues[channel].capacity = net.channels[channel].capacity
        if net.shaped == 1:
            load_reverse(net, channel)


@inlined
def depart(net: View, entry):  # type: ignore[no-untyped-def]
    """Let the last byte of a message leave a link."""
    slot = entry >> net.hop_shift
    channel = net.crossings[entry].channel
    net.crossings[entry].stage = 2
    if not is_last(net, entry):
        before, behind = net.crossings[entry].previous, net.crossings[entry].next
        if before >= 0:
            net.crossings[before].next = behind
        else:
            net.queues[channel].onward = behind
        if behind >= 0:
            net.crossings[behind].previous = before
    book_bytes(net, channel, net.slots[slot].nbytes, 1.0)
    net.queues[channel].expected -= 1
    net.channels[channel].used -= 1
    if net.channels[channel].used == 0:
        now = net.queue_time
        since = net.channels[channel].since
        net.channels[channel].busy += now - since
        if net.log_on == 1 and channel < net.n_linked:
            log_busy(net, channel, since, now, False)
        if net.shaped == 1:
            free_reverse(net, channel)


# ---------------------------------------------------------------- simulated time


@inlined
def marks_suffice(net: View):  # type: ignore[no-untyped-def]
    """Whether there are enough free marks for any consequences of a queue's next event."""
    return net.n_free_marks >= ((net.n_queued + UNITS) << net.hop_shift) + 4 * UNITS + 4


@called
def serve(net: View, limit):  # type: ignore[no-untyped-def]
    """Advance the queues to `limit`, as long as there are enough free marks."""
    while marks_suffice(net):
        if net.n_touched > 0:
            net.n_touched -= 1
            channel = np.int64(net.touched[net.n_touched])
            net.queues[channel].touched = 0
            refresh(net, channel)
            continue
        if net.n_queue_heap == 0 or net.queue_heap[0].time > limit:
            return
        channel = net.queue_heap[0].item
        if net.queue_heap[0].time > net.queue_time:
            net.queue_time = net.queue_heap[0].time
            net.n_refreshed = 0
        work(net, channel)
        touch(net, channel)
        mark = np.int64(net.queues[channel].first)
        if mark < 0:  # the backlog has been served
            net.queues[channel].backlogged = 0
            net.queues[channel].head = net.queues[channel].inflow
            continue
        net.queues[channel].served = net.queue_marks[mark].position
        while mark >= 0 and net.queue_marks[mark].position <= net.queues[channel].served:
            entry = np.int64(net.queue_marks[mark].entry)
            kind = net.queue_marks[mark].kind
            rate = net.queue_marks[mark].rate
            following = np.int64(net.queue_marks[mark].next)
            net.queues[channel].first = following
            if following < 0:
                net.queues[channel].last = -1
            net.free_marks[net.n_free_marks] = mark
            net.n_free_marks += 1
            if kind == BURST:
                net.queues[channel].burst = entry
            elif kind == ACK:
                if net.trains[entry >> net.hop_shift].start == rate:
                    acknowledge(net, entry >> net.hop_shift, entry - 1, rate)
            elif kind != INFLOW and net.queues[channel].burst == entry:
                net.queues[channel].burst = -1
                leave(net, entry, kind)
            else:
                set_head(net, channel, entry, rate)
                if kind != INFLOW:
                    leave(net, entry, kind)
            mark = np.int64(net.queues[channel].first)


@inlined
def next_event(net: View):  # type: ignore[no-untyped-def]
    """Return the time of the next event of a queue, inf if there is none."""
    if net.n_ended + net.n_joining + net.n_touched + net.n_dirty > 0:  # an instant is unfinished for lack of free marks
        return net.now
    return net.queue_heap[0].time if net.n_queue_heap > 0 else np.inf


@inlined
def list_ended(net: View, n):  # type: ignore[no-untyped-def]
    """Write the messages that have left their last queue to `scratch`, behind `n` others; return the new length."""
    for i in range(net.n_ended):
        net.scratch[n] = net.ended[i]
        n += 1
    net.n_ended = 0
    return n


@called
def settle(net: View):  # type: ignore[no-untyped-def]
    """Let the messages and capacity changes of this instant take effect in the queues."""
    now = net.now
    while net.n_joining + net.n_dirty > 0 and marks_suffice(net):
        for i in range(net.n_dirty):
            channel = np.int64(net.dirty[i])
            begun = net.channels[channel].used > 0 and net.queues[channel].expected == 0
            if begun and net.flow_rate[np.int64(net.pool[net.channels[channel].first]) >> net.hop_shift] < np.inf:
                meet(net, channel)
        n = net.n_joining
        done = 0
        for late in range(2):  # first former flows, replayed from their own start times
            for i in range(n):
                slot = np.int64(net.joining[i])
                if slot >= 0 and (net.trains[slot].start < now) == (late == 0) and marks_suffice(net):
                    net.joining[i] = -1
                    done += 1
                    if late == 0:
                        net.queue_time = net.trains[slot].start
                    else:
                        net.queue_time = now
                    net.n_refreshed = 0
                    inject(net, slot)
                    if late == 0:
                        serve(net, now)
        left = 0
        for i in range(net.n_joining):
            if net.joining[i] >= 0:
                net.joining[left] = net.joining[i]
                left += 1
        net.n_joining = left
        net.queue_time = now
        n = net.n_dirty
        net.n_dirty = 0
        for i in range(n):
            channel = np.int64(net.dirty[i])
            net.queues[channel].dirty = 0
            if net.queues[channel].expected > 0:
                work(net, channel)
                net.queues[channel].capacity = net.channels[channel].capacity
                touch(net, channel)
            elif net.channels[channel].used > 0:
                net.queues[channel].capacity = net.channels[channel].capacity
        serve(net, now)
    serve(net, now)
