"""Accurate sums of very many terms: bytes issued, delivered and carried.

A plain sum of n terms may drift by n / 2 units in its last place (1e-9 of it after 2e7 messages of equal size, because
each addition is rounded the same way), which the conservation laws of a run would report. Each sum is therefore two
numbers, the high and the low word; the low word collects what the additions to the high word lose (Knuth, The Art of
Computer Programming, volume 2, section 4.2.2, theorem B). Messages that are booked n at a time count as if each were
booked by itself, so that a sum does not depend on how the kernel went on.

Busy seconds are plain sums: intervals of a replayed round are as long as those of the first one only to rounding.
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
def lost(term, n):  # type: ignore[no-untyped-def]
    """Return what rounding takes from n * term, for n below 2^27 exactly (Dekker 1971, the halves of a product)."""
    high = term * 134217729.0
    high = high - (high - term)
    return (n * high - n * term) + n * (term - high)


@inlined
def count(net: Net, place, term, n):  # type: ignore[no-untyped-def]
    """Add n terms to one of the sums in ``Net.reals``."""
    net.reals[place], net.reals[place + 1] = two_sum(net.reals[place], net.reals[place + 1], n * term)
    if n != 1:
        net.reals[place + 1] += lost(term, n)


@inlined
def book_bytes(net: Net, channel, nbytes, n):  # type: ignore[no-untyped-def]
    """Count n messages that a channel has carried."""
    high, low = net.channels[channel].nbytes, net.channels[channel].nbytes_low
    net.channels[channel].nbytes, net.channels[channel].nbytes_low = two_sum(high, low, n * nbytes)
    if n != 1:
        net.channels[channel].nbytes_low += lost(nbytes, n)
