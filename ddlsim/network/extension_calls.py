"""Calls of the kernel's extensions (:mod:`ddlsim.network.extensions`), at their addresses in ``Net.counts``. Compiled.

The functions have the names of those that they call.
"""

from __future__ import annotations

from ddlsim.compiler import inlined
from ddlsim.network.flows import add_flow
from ddlsim.network.intrinsics import call_extension
from ddlsim.network.state import CHANGES_CODE, FIFO, QUEUES_CODE, ROUNDS_CODE, SHAPING_CODE, Net

#: values of `what` for the extensions for queues, for shaped links and transports, and for rounds
SERVE, SETTLE, ENTER = 0, 1, 2
START, NEXT_IN_LINE = 0, 1
REPLAY, WATCH, OBSERVE = 0, 1, 2


@inlined
def begin(net: Net, slot):  # type: ignore[no-untyped-def]
    """Start a message's transfer."""
    if net.counts[FIFO] == 1:
        call_extension(net.counts[QUEUES_CODE], net, ENTER, slot, 0.0)
    else:
        add_flow(net, slot)


@inlined
def serve(net: Net, limit):  # type: ignore[no-untyped-def]
    """Advance the queues to `limit`, as long as there are enough free marks."""
    call_extension(net.counts[QUEUES_CODE], net, SERVE, 0, limit)


@inlined
def settle(net: Net):  # type: ignore[no-untyped-def]
    """Let the messages and capacity changes of this instant take effect in the queues."""
    call_extension(net.counts[QUEUES_CODE], net, SETTLE, 0, 0.0)


@inlined
def start(net: Net, slot):  # type: ignore[no-untyped-def]
    """Start a message on shaped links, now or when its turn comes; return 1 if it has arrived at once, else 0."""
    return call_extension(net.counts[SHAPING_CODE], net, START, slot, 0.0)


@inlined
def next_in_line(net: Net, slot):  # type: ignore[no-untyped-def]
    """Free the connection of a message that has arrived, and start the next message on it."""
    call_extension(net.counts[SHAPING_CODE], net, NEXT_IN_LINE, slot, 0.0)


@inlined
def apply_next(net: Net):  # type: ignore[no-untyped-def]
    """Apply the next change; rates follow in this instant's solve."""
    call_extension(net.counts[CHANGES_CODE], net, 0, 0, 0.0)


@inlined
def replay(net: Net, limit):  # type: ignore[no-untyped-def]
    """Repeat the round that has just ended, up to `limit`, as often as it is certain to recur."""
    call_extension(net.counts[ROUNDS_CODE], net, REPLAY, 0, limit)


@inlined
def watch(net: Net):  # type: ignore[no-untyped-def]
    """Start observing the round that begins at the present barrier."""
    call_extension(net.counts[ROUNDS_CODE], net, WATCH, 0, 0.0)


@inlined
def observe(net: Net):  # type: ignore[no-untyped-def]
    """Record the instant that has just been handled."""
    call_extension(net.counts[ROUNDS_CODE], net, OBSERVE, 0, 0.0)
