"""Link behaviour beyond bandwidth: frames with headers, token buckets, acknowledgements.

All of it is off (``SHAPED`` is 0) unless a link of the cluster asks for it; docs/models/tcp.md has the formulas.
"""

from __future__ import annotations

import numpy as np

from ddlsim.compiler import inlined
from ddlsim.network.extension_calls import begin
from ddlsim.network.flows import share_of
from ddlsim.network.state import NOW, Net
from ddlsim.network.sums import book_bytes


@inlined
def start_shaped(net: Net, slot, follows):  # type: ignore[no-untyped-def]
    """Let a message flow, less what the buckets on its route let through at once: nothing if it `follows` another one.

    Returns False if that is the whole message, so that it has arrived.
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
def wire_bytes(net: Net, slot):  # type: ignore[no-untyped-def]
    """Return the bytes that a message puts on the wire: its own and the headers of its frames."""
    nbytes = net.slots[slot].nbytes
    route = net.slots[slot].route
    header = net.frames[route].header
    if header > 0.0:
        nbytes += header * np.ceil(nbytes / net.frames[route].payload)
    return nbytes


@inlined
def saved_bytes(net: Net, first, last):  # type: ignore[no-untyped-def]
    """Return what passes at once over the channels hops[first:last]; brings the tokens of idle ones up to date.

    That is the least that any of their buckets holds, if the narrowest of them has one, and if all of them are idle.
    (A link without a bucket that is wider than that is taken not to hold a burst back.)
    """
    now = net.reals[NOW]
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
