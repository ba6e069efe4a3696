"""The transports that links can name, and what their standards and systems say of them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from ddlsim.errors import ConfigError, shown

#: bytes per Ethernet frame besides its payload: preamble 8, header 14, check sequence 4, gap 12 (IEEE 802.3)
ETHERNET = 38.0
#: s: least retransmission time-out (TCP_RTO_MIN in Linux' include/net/tcp.h); the time-out is that and a round trip
LEAST_TIMEOUT = 0.2
#: s: longest one, however often it has doubled (RFC 6298, section 2.5; TCP_RTO_MAX)
MOST_TIMEOUT = 120.0


@dataclass(frozen=True)
class Protocol:
    """What is the same wherever a transport is used.

    header      bytes of its headers per frame, the link's own included
    inside      those of them that count in the MTU, bytes
    mtu         bytes, the usual one
    window      bytes of a connection under way at most, unless something else is said; inf: it has no window
    segments    frames' payloads that a connection sends before it has heard anything; inf: no slow start
    least       of them, that a connection keeps under way on average whatever is lost; 0: nothing of it is lost
    """

    header: float
    inside: float
    mtu: float
    window: float = math.inf
    segments: float = math.inf
    least: float = 0.0

    def frame(self, mtu: float) -> tuple[float, float]:
        """Return (bytes of headers, bytes of payload) of a full frame."""
        return self.header, mtu - self.inside


# IPv4 20, TCP 20, its timestamps 12. 3 MiB: half of the 6 MiB to which Linux lets the receiver's buffer grow, the
# other half being for its own records (tcp(7): tcp_rmem, tcp_adv_win_scale). Ten segments at first: RFC 6928.
# A loss halves the window to no less than two segments (RFC 5681, equation 4), so it goes from two to four: three.
_TCP = Protocol(header=ETHERNET + 52.0, inside=52.0, mtu=1500.0, window=3.0 * 2**20, segments=10.0, least=3.0)
# BBR does not take a loss for congestion (Cardwell et al., "BBR: congestion-based congestion control", ACM Queue 14(5),
# 2016), and keeps three quanta of two segments under way however short the path is (Cardwell et al., "BBR congestion
# control", draft-cardwell-iccrg-bbr-congestion-control-02, section 4.6.4.2).
_BBR = dataclasses.replace(_TCP, least=6.0)

#: by the names in files. The kinds of TCP differ in how they answer losses. Neither of the others starts slowly:
#: RoCE begins at line rate (Zhu et al. 2015, section 3.1: "hyper-fast start"), InfiniBand is held back by credits.
PROTOCOLS = {
    "tcp-cubic": _TCP,
    "tcp-reno": _TCP,
    "tcp-bbr": _BBR,
    # RoCE v2: IPv4 20, UDP 8, base transport header 12, check 4 (InfiniBand Architecture Specification, annex A17)
    "roce": Protocol(header=ETHERNET + 44.0, inside=0.0, mtu=4096.0),
    # EFA's SRD sends packets of some 8 KiB over all paths and puts them in order (fi_efa(7)); what it adds to them is
    # not published
    "efa": Protocol(header=ETHERNET, inside=0.0, mtu=8192.0),
    # local header 8, base transport header 12, checks 4 and 2 (InfiniBand Architecture Specification, section 6)
    "infiniband": Protocol(header=26.0, inside=0.0, mtu=4096.0),
}


def frame_of(transport: str, mtu: float, where: str) -> tuple[float, float]:
    """Return (header, payload) in bytes of a transport's frames; raise :class:`ConfigError` for an MTU too small."""
    protocol = PROTOCOLS[transport]
    if mtu < protocol.inside + 200.0:
        raise ConfigError(f"{where}mtu = {shown(mtu)} is too small for {transport}; write it like '1500 B'")
    return protocol.frame(mtu)


def window_under_loss(transport: str, loss: float, round_trip: float, segment: float) -> float:
    """Return the mean window (bytes) of a TCP connection that loses a share `loss` of its segments.

    Reno: sqrt(3 / (2 p)) segments (Mathis, Semke, Mahdavi and Ott, "The macroscopic behavior of the TCP congestion
    avoidance algorithm", CCR 27(3), 1997). Cubic: 1.054 (RTT / p)^(3/4) segments, or Reno's where that is more
    (RFC 8312, equation 6 and section 4.2). BBR: all of it.
    """
    if loss == 0.0 or transport == "tcp-bbr":
        return math.inf
    reno = math.sqrt(1.5 / loss)
    if transport == "tcp-reno":
        return reno * segment
    return max(reno, 1.054 * math.pow(round_trip / loss, 0.75)) * segment
