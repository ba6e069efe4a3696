"""Link behaviour beyond bandwidth (frames with headers, token buckets), and transport protocols between two nodes:
rendezvous, queueing on connections, slow start and loss.

This code is active only if a link of the cluster has such behaviour (``shaped`` is 1) or names its transport
(``transported`` is 1, too). docs/models/tcp.md and docs/models/transport.md list the formulas and their sources.
"""

from __future__ import annotations

import numpy as np

from ddlsim.cluster.details import MOST_TIMEOUT
from ddlsim.compiler import inlined
from ddlsim.network.calendar import push_timer
from ddlsim.network.flows import begin, book_bytes, enqueue, share_of
from ddlsim.network.state import CLEARED, View


@inlined
def start_shaped(net: View, slot, follows):  # type: ignore[no-untyped-def]
    """Start a message, less what token buckets on its route pass at once (nothing if it `follows` another message).

    Returns False if the whole message has passed at once, and so has arrived.
    """
    wire = wire_bytes(net, slot)
    route = net.slots[slot].route
    first = net.routes[route].first
    last = net.routes[route].last
    saved = 0.0 if follows else min(saved_bytes(net, first, last), wire)
    if saved > 0.0:
        for h in range(first, last):
            net.buckets[net.hops[h]].tokens -= saved * share_of(net, h)
            net.buckets[net.hops[h]].passed += saved * share_of(net, h)
    if saved < wire:
        net.wire[slot] = (wire - saved) * net.routes[route].handled
        begin(net, slot)
        return True
    for h in range(first, last):
        book_bytes(net, net.hops[h], net.slots[slot].nbytes * share_of(net, h), 1.0)
    return False


@inlined
def wire_bytes(net: View, slot):  # type: ignore[no-untyped-def]
    """Return the bytes that a message puts on the wire: payload and frame headers."""
    nbytes = net.slots[slot].nbytes
    route = net.slots[slot].route
    header = net.frames[route].header
    if header > 0.0:
        nbytes += header * np.ceil(nbytes / net.frames[route].payload)
    return nbytes


@inlined
def saved_bytes(net: View, first, last):  # type: ignore[no-untyped-def]
    """Return the bytes that pass at once over the channels hops[first:last]; refill the token buckets of idle channels.

    That is the smallest bucket level on the route if all channels with a bucket are idle and the narrowest channel has
    one, else 0. (A wider link without a bucket is assumed not to delay a burst.)
    """
    now = net.now
    saved = np.inf
    narrowest = np.inf
    bare = np.inf
    for h in range(first, last):
        channel = net.hops[h]
        burst = net.buckets[channel].burst
        free = net.buckets[channel].free / share_of(net, h)
        if burst == 0.0:
            bare = min(bare, free)
            continue
        narrowest = min(narrowest, free)
        if net.channels[channel].used > 0:
            saved = 0.0
            continue
        refilled = net.buckets[channel].tokens + (now - net.buckets[channel].since) * net.buckets[channel].free
        net.buckets[channel].tokens = min(refilled, burst)
        net.buckets[channel].since = now
        saved = min(saved, net.buckets[channel].tokens / share_of(net, h))
    return saved if narrowest < bare else 0.0


# ---------------------------------------------------------------- frames and token buckets


#: BBR (draft-cardwell-iccrg-bbr-congestion-control-02, sections 4.3.4.3, 4.6.3 and 4.6.4.2): bursts in flight, duration
#: of a burst (s), pacing gain while probing, round trips per probing cycle
BURSTS, QUANTUM, PROBE, CYCLE = 3, 1e-3, 1.25, 8.0

# ---------------------------------------------------------------- rendezvous


@inlined
def asks(net: View, slot):  # type: ignore[no-untyped-def]
    """Whether a message is so large that its sender waits for the receiver's permission (rendezvous)."""
    eager = net.transports[net.slots[slot].route].eager
    return 0.0 < eager < net.slots[slot].nbytes


@inlined
def answer(net: View, place):  # type: ignore[no-untyped-def]
    """The receiver of ``parked[place]`` is ready: if its sender has asked, send the permission, then the data."""
    slot = net.parked[place] - 1
    if slot < 0:
        return
    net.parked[place] = 0
    asked = max(net.asked[slot], net.now)
    push_timer(net, asked + net.transports[net.slots[slot].route].round_trip, slot)


# ---------------------------------------------------------------- connections


@inlined
def has_to_wait(net: View, slot):  # type: ignore[no-untyped-def]
    """Whether a message that could start has to wait for others of its connection, its window or a time-out; if so,
    schedule its start, else let it occupy the connection."""
    connection = net.transports[net.slots[slot].route].connection
    if connection < 0:
        return False
    if net.slots[slot].state == CLEARED:
        net.connections[connection].pending -= 1
        return times_out(net, slot, connection)
    if net.is_fifo == 0 and net.connections[connection].busy == 1:
        enqueue(net, slot, connection)
        return True
    if net.is_fifo == 0:  # under FIFO, messages wait for each other in queues
        net.connections[connection].busy = net.connections[connection].ordered
    is_second = net.connections[connection].ordered == 1 and net.connections[connection].pending > 0
    turn = net.connections[connection].released if is_second else net.now
    late = clear(net, slot, connection)
    if is_second or late > 0.0:
        release(net, slot, connection, turn + late)
        return True
    return times_out(net, slot, connection)


@inlined
def next_in_line(net: View, slot):  # type: ignore[no-untyped-def]
    """Free the connection of a message that has arrived, and start the next message on it."""
    connection = net.transports[net.slots[slot].route].connection
    if connection < 0:
        return
    empty_ports(net, slot)
    net.connections[connection].since = net.now
    net.connections[connection].under_way -= 1
    if net.is_fifo == 1:
        return
    following = net.connections[connection].first
    if following < 0:
        net.connections[connection].busy = 0
        return
    net.connections[connection].first = net.line[following]
    release(net, following, connection, net.now + clear(net, following, connection))


@inlined
def clear(net: View, slot, connection):  # type: ignore[no-untyped-def]
    """Give a message its turn on the connection; return by how many seconds slow start delays it."""
    net.slots[slot].state = CLEARED
    net.connections[connection].under_way += 1
    return opening(net, slot, connection)


@inlined
def release(net: View, slot, connection, time):  # type: ignore[no-untyped-def]
    """Schedule the start of a message for `time` (s), not before the previous start on an ordered connection."""
    net.connections[connection].released = time
    net.connections[connection].pending += 1
    push_timer(net, time, slot)


@inlined
def follows(net: View, slot):  # type: ignore[no-untyped-def]
    """Whether the previous message on an ordered connection is still in flight."""
    connection = net.transports[net.slots[slot].route].connection
    if connection < 0:
        return False
    return net.connections[connection].ordered == 1 and net.connections[connection].under_way > 1


@inlined
def opening(net: View, slot, connection):  # type: ignore[no-untyped-def]
    """Return by how many seconds slow start delays a message; update the connection's window.

    The sender transmits a window of bytes, then pauses until the first of them are acknowledged and the window doubles,
    up to the bandwidth-delay product. The window halves for every time-out for which the connection is idle.
    """
    transport = net.transports[net.slots[slot].route]
    window = net.connections[connection].window
    idle = net.now - net.connections[connection].since
    if net.connections[connection].under_way > 1:
        idle = 0.0
    while idle > transport.timeout and window > transport.initial:
        window = max(0.5 * window, transport.initial)
        idle -= transport.timeout
    left = wire_bytes(net, slot)
    late = 0.0
    while window < transport.full and window < left:
        late += transport.round_trip * (1.0 - window / transport.full)
        left -= window
        window *= 2.0
    net.connections[connection].window = window
    return late


# ---------------------------------------------------------------- full buffers


@inlined
def times_out(net: View, slot, connection):  # type: ignore[no-untyped-def]
    """Whether the first window of a message is lost at a port that others fill, so that its sender retransmits it after
    a time-out. If it is not lost, add its window to the buffers of the ports on the route."""
    route = net.slots[slot].route
    transport = net.transports[route]
    if transport.least == 0.0:
        return False
    tries = net.tries[slot]
    least = min(transport.least if tries == 0 else transport.single, wire_bytes(net, slot))
    first, fastest = net.routes[route].first, np.inf
    for h in range(first + 1, net.routes[route].last):
        channel = net.hops[h]
        fastest = min(fastest, net.buckets[net.hops[h - 1]].free)
        window = window_at_port(net, transport, least, fastest, channel)
        if net.buckets[channel].held == 0.0:
            continue
        is_lost = loses_again(net, slot, channel)
        is_dropped = is_lost or (window > 0.0 and lacks_room(net, transport, window, channel, tries))
        if is_dropped and is_crowded(net, route, h):
            wait = min(transport.timeout + net.buckets[channel].room / net.buckets[channel].free, MOST_TIMEOUT)
            if not is_lost:  # otherwise earlier windows have been acknowledged: no backoff
                for _ in range(tries):
                    wait = min(2.0 * wait, MOST_TIMEOUT)
            net.tries[slot] = tries + 1
            net.connections[connection].window = transport.single
            release(net, slot, connection, net.now + wait + opening(net, slot, connection))
            return True
    reserve_buffer(net, slot, least)
    return False


@inlined
def lacks_room(net: View, transport, window, channel, tries):  # type: ignore[no-untyped-def]
    """Whether a port has no room for a window that has been lost `tries` times.

    A first window is a burst, which is lost as a whole. After a time-out, the sender retransmits one segment. The first
    time, the messages that filled the port still fill it. Later, the port drops it with probability p, like any other:
    the share of the windows for which it has no room. It is lost if this many losses in a row are more likely than not.
    """
    bucket = net.buckets[channel]
    space, total = bucket.room + bucket.free * transport.round_trip, bucket.held + window
    return total > space and (tries < 2 or 2.0 * (1.0 - space / total) ** (tries - 1) > 1.0)


@inlined
def reserve_buffer(net: View, slot, least):  # type: ignore[no-untyped-def]
    """Add the bytes of a message's window of `least` bytes that wait at each port on its route."""
    route = net.slots[slot].route
    place, fastest = slot << net.hop_shift, np.inf
    net.held[place] = least
    for h in range(net.routes[route].first + 1, net.routes[route].last):
        place += 1
        channel = net.hops[h]
        fastest = min(fastest, net.buckets[net.hops[h - 1]].free)
        window = window_at_port(net, net.transports[route], least, fastest, channel)
        net.held[place] = window
        net.buckets[channel].held += window
        net.buckets[channel].n_slow += 1 if window == 0.0 else 0


@inlined
def release_buffer(net: View, channel, window):  # type: ignore[no-untyped-def]
    """A message keeps `window` bytes waiting at a port no more."""
    left, slow = net.buckets[channel].held - window, net.buckets[channel].n_slow - (1 if window == 0.0 else 0)
    is_used = net.channels[channel].used > 0
    net.buckets[channel].held = left if is_used else 0.0
    net.buckets[channel].n_slow = max(slow, 0) if is_used else 0


@inlined
def window_at_port(net: View, transport, least, fastest, channel):  # type: ignore[no-untyped-def]
    """Return how many bytes of a window of `least` bytes wait at a port if the links before it deliver at most
    `fastest` bytes/s; 0 if a full buffer is empty again before they deliver a segment."""
    bucket = net.buckets[channel]
    brought = fastest * (transport.round_trip + bucket.room / bucket.free)
    return 0.0 if brought < min(least, transport.single) else min(least, brought)


@inlined
def loses_again(net: View, slot, channel):  # type: ignore[no-untyped-def]
    """Whether at least one of the messages at a port loses all bursts of a round trip with a probability above one
    half, while its sender keeps its rate despite losses (BBR).

    Each of n senders has three bursts and two round trips of its share of the rate in flight. It raises that share by
    PROBE once per cycle of round trips, and continues at the highest rate it has seen. All senders are
    equally likely to lose: after n losses at a port that was never idle in between, the message is sent.
    """
    transport, bucket = net.transports[net.slots[slot].route], net.buckets[channel]
    if transport.burst == 0.0 or bucket.room == np.inf:
        return False
    n, left = net.channels[channel].used - bucket.n_slow + 1.0, wire_bytes(net, slot)
    waited = net.now - net.channels[channel].since
    if net.tries[slot] >= n and waited >= n * (transport.timeout + bucket.room / bucket.free):
        return False
    trips, lost = 0.0, 0.0
    for gain in (1.0, PROBE):
        rate = gain * bucket.free / n
        burst = max(2.0 * transport.single, min(rate * QUANTUM, transport.burst))
        window = min(BURSTS * burst + 2.0 * rate * transport.round_trip, left)
        trips = max(trips, left / window)
        lost = max(1.0 - (bucket.room + bucket.free * transport.round_trip) / (n * window), 0.0)
    return trips >= CYCLE and n * (left / window) * lost**BURSTS > np.log(2.0)


@inlined
def is_crowded(net: View, route, hop):  # type: ignore[no-untyped-def]
    """Whether the flows on the channel of a hop, and one more by a route, may arrive faster than they leave.

    Each arrives at most as fast as on the narrowest channel before, and all that come by the same channel, as fast as
    this one lets them.
    """
    channel, before = net.hops[hop], net.hops[hop - 1]
    narrowest = np.inf
    for h in range(net.routes[route].first, hop):
        narrowest = min(narrowest, net.channels[net.hops[h]].capacity)
    net.epoch += 1
    net.marks[before] = net.epoch
    arriving = min(net.channels[before].capacity, narrowest + arriving_by(net, channel, before))
    mask = (1 << net.hop_shift) - 1
    first = net.channels[channel].first
    for i in range(first, first + net.channels[channel].used):
        entry = np.int64(net.pool[i])
        if entry & mask > 0:
            other = net.flow_hops[entry - 1]
            if net.marks[other] != net.epoch:
                net.marks[other] = net.epoch
                arriving += min(net.channels[other].capacity, arriving_by(net, channel, other))
    return arriving > net.channels[channel].capacity


@inlined
def arriving_by(net: View, channel, before):  # type: ignore[no-untyped-def]
    """Return the bytes/s at which the flows on a channel that come by way of channel `before` may arrive at most."""
    mask = (1 << net.hop_shift) - 1
    first = net.channels[channel].first
    arriving = 0.0
    for i in range(first, first + net.channels[channel].used):
        entry = np.int64(net.pool[i])
        if entry & mask > 0 and net.flow_hops[entry - 1] == before:
            fastest = np.inf
            for place in range(entry - (entry & mask), entry):
                fastest = min(fastest, net.channels[net.flow_hops[place]].capacity)
            arriving += fastest
    return arriving


@inlined
def empty_ports(net: View, slot):  # type: ignore[no-untyped-def]
    """Remove the windows of a message that has arrived from the ports on its route."""
    place = slot << net.hop_shift
    net.tries[slot] = 0
    if net.held[place] == 0.0:
        return
    net.held[place] = 0.0
    route = net.slots[slot].route
    for h in range(net.routes[route].first + 1, net.routes[route].last):
        place += 1
        release_buffer(net, net.hops[h], net.held[place])
