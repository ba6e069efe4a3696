"""Accurate sums of very many terms: bytes issued, delivered and carried.

A plain sum of n terms may drift by n / 2 units in its last place (a relative 1e-9 after 2e7 messages of equal size,
because each addition is rounded the same way), which the conservation checks of a run would report. Each sum is
therefore two numbers, a high and a low word; the low word collects the rounding errors of the high word (Knuth, The Art
of Computer Programming, volume 2, section 4.2.2, theorem B). Booking n messages at once gives the same sum as booking
each by itself, so a sum does not depend on how many rounds the kernel has replayed.

Busy seconds are plain sums, because the intervals of a replayed round equal those of the first one only up to rounding.
"""

from __future__ import annotations

from ddlsim.compiler import inlined
from ddlsim.network.state import View


@inlined
def two_sum(high, low, term):  # type: ignore[no-untyped-def]
    """Add a term to a sum; return its high and low word."""
    total = high + term
    part = total - high
    return total, low + ((high - (total - part)) + (term - part))


@inlined
def add_equal(high, low, term, n):  # type: ignore[no-untyped-def]
    """Add n equal terms to a sum; return its high and low word."""
    total, rest = two_sum(high, low, n * term)
    if n != 1:  # the rounding error of n * term, exact for n below 2^27 (Dekker 1971, the halves of a product)
        half = term * 134217729.0
        half = half - (half - term)
        rest += (n * half - n * term) + n * (term - half)
    return total, rest


@inlined
def book_bytes(net: View, channel, nbytes, n):  # type: ignore[no-untyped-def]
    """Count n messages that a channel has carried."""
    high, low = net.channels[channel].nbytes, net.channels[channel].nbytes_low
    net.channels[channel].nbytes, net.channels[channel].nbytes_low = add_equal(high, low, nbytes, n)
