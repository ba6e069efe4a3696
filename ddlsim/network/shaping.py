"""Link behaviour beyond bandwidth: frames with headers, token buckets, acknowledgements.

This code is active (``shaped`` is 1) only if a link of the cluster asks for it. docs/models/tcp.md has the formulas.
"""

from __future__ import annotations

import numpy as np

from ddlsim.compiler import inlined
from ddlsim.network.flows import begin, share_of
from ddlsim.network.state import View
from ddlsim.network.sums import book_bytes


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
