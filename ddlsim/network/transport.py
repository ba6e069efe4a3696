"""How messages travel between two nodes: they ask first, they queue on their connection, its window opens.

All of it is off (``TRANSPORTED`` is 0) unless a link of the cluster names its transport; docs/models/transport.md has
the formulas and their sources.
"""

from __future__ import annotations

from ddlsim.compiler import inlined
from ddlsim.network.shaping import wire_bytes
from ddlsim.network.state import CLEARED, NOW, Net
from ddlsim.network.timers import push_timer

# ---------------------------------------------------------------- rendezvous


@inlined
def asks(net: Net, slot):  # type: ignore[no-untyped-def]
    """Whether a message is so large that its sender waits for the receiver's leave."""
    eager = net.ways[net.slots[slot].route].eager
    return 0.0 < eager < net.slots[slot].nbytes


@inlined
def answer(net: Net, place):  # type: ignore[no-untyped-def]
    """The receiver of ``parked[place]`` is there: if its sender has asked, the answer goes back, then the data come."""
    slot = net.parked[place] - 1
    if slot < 0:
        return
    net.parked[place] = 0
    asked = max(net.asked[slot], net.reals[NOW])
    push_timer(net, asked + net.ways[net.slots[slot].route].round_trip, slot)


# ---------------------------------------------------------------- connections


@inlined
def has_to_wait(net: Net, slot):  # type: ignore[no-untyped-def]
    """Whether a message that could flow now has to wait for others of its connection, or for the window to open."""
    connection = net.ways[net.slots[slot].route].connection
    if connection < 0 or net.slots[slot].state == CLEARED:
        return False
    if net.connections[connection].busy == 1:
        net.line[slot] = -1
        if net.connections[connection].first < 0:
            net.connections[connection].first = slot
        else:
            net.line[net.connections[connection].last] = slot
        net.connections[connection].last = slot
        return True
    net.connections[connection].busy = net.connections[connection].ordered
    net.slots[slot].state = CLEARED
    late = opening(net, slot, connection)
    if late > 0.0:
        push_timer(net, net.reals[NOW] + late, slot)
    return late > 0.0


@inlined
def next_in_line(net: Net, slot):  # type: ignore[no-untyped-def]
    """A message has arrived: the next one on its connection has its turn."""
    connection = net.ways[net.slots[slot].route].connection
    if connection < 0:
        return
    net.connections[connection].since = net.reals[NOW]
    following = net.connections[connection].first
    if following < 0:
        net.connections[connection].busy = 0
        return
    net.connections[connection].first = net.line[following]
    net.slots[following].state = CLEARED
    push_timer(net, net.reals[NOW] + opening(net, following, connection), following)


@inlined
def opening(net: Net, slot, connection):  # type: ignore[no-untyped-def]
    """Return the s by which a message is later than at full rate, as the window has to open; note how far it opens.

    A window's worth of bytes goes out, then the sender pauses until the first of them are acknowledged and the window
    doubles, up to what the path holds (slow start).
    """
    way = net.ways[net.slots[slot].route]
    window = net.connections[connection].window
    idle = net.reals[NOW] - net.connections[connection].since
    while idle > way.timeout and window > way.initial:
        window = max(0.5 * window, way.initial)
        idle -= way.timeout
    left = wire_bytes(net, slot)
    late = 0.0
    while window < way.full and window < left:
        late += way.round_trip * (1.0 - window / way.full)
        left -= window
        window *= 2.0
    net.connections[connection].window = window
    return late
