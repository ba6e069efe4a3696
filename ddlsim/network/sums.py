"""Sums over very many terms: bytes issued, delivered and carried, and busy seconds.

A plain sum of n terms may drift by n / 2 units in its last place (1e-9 of it after 2e7 messages of equal size, because
each addition is rounded the same way), which the conservation laws of a run would report. Each sum is therefore two
numbers, the high and the low word; the low word collects what the additions to the high word lose (Knuth, The Art of
Computer Programming, volume 2, section 4.2.2, theorem B).
"""

from __future__ import annotations

from ddlsim.compiler import inlined
from ddlsim.network.state import Net


@inlined
def two_sum(high, low, term):  # type: ignore[no-untyped-def]
    """Return both words of a sum with one more term."""
    total = high + term
    part = total - high
    return total, low + ((high - (total - part)) + (term - part))


@inlined
def count(net: Net, place, term):  # type: ignore[no-untyped-def]
    """Add a term to one of the sums in ``Net.reals``."""
    net.reals[place], net.reals[place + 1] = two_sum(net.reals[place], net.reals[place + 1], term)


@inlined
def book_bytes(net: Net, channel, nbytes):  # type: ignore[no-untyped-def]
    """Count bytes that a channel has carried."""
    high, low = net.channels[channel].nbytes, net.channels[channel].nbytes_low
    net.channels[channel].nbytes, net.channels[channel].nbytes_low = two_sum(high, low, nbytes)


@inlined
def book_busy(net: Net, channel, seconds):  # type: ignore[no-untyped-def]
    """Count seconds during which a channel has carried something."""
    high, low = net.channels[channel].busy, net.channels[channel].busy_low
    net.channels[channel].busy, net.channels[channel].busy_low = two_sum(high, low, seconds)
