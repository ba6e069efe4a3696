"""Link behaviour beyond bandwidth and latency: frames with headers, token buckets, acknowledgements, transports.

The network engine applies them (docs/models/tcp.md and docs/models/transport.md have the formulas).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import (
    Count,
    Decay,
    NotNegative,
    Rule,
    checked,
    integer,
    number,
    one_of,
    quantity,
    settings,
    takes_fields_of,
    validated_by,
)
from ddlsim.arguments.annotations import rule_of
from ddlsim.cluster.cluster import Bools, Cluster, Floats, Ints, Routes
from ddlsim.cluster.quantity import Quantity
from ddlsim.errors import ConfigError, shown, unknown_name
from ddlsim.spread import Spread, Variation
from ddlsim.streams import stream
from ddlsim.units import si

#: bytes per Ethernet frame besides its payload: preamble 8, header 14, check sequence 4, gap 12 (IEEE 802.3)
ETHERNET = 38.0
#: minimum retransmission time-out in s (TCP_RTO_MIN in Linux' include/net/tcp.h); a round trip is added
LEAST_TIMEOUT = 0.2
#: maximum time-out in s after repeated doubling (RFC 6298, section 2.5; TCP_RTO_MAX)
MOST_TIMEOUT = 120.0


@dataclass(frozen=True)
class Protocol:
    """Constants of a transport protocol.

    header      header bytes per frame, including the link's own
    inside      part of `header` in bytes that counts towards the MTU
    mtu         default MTU in bytes
    window      default maximum of bytes in flight per connection; inf: no window
    segments    initial window in frames' payloads (slow start); inf: no slow start
    least       minimum average window in segments under any loss; 0: the protocol loses nothing
    burst       maximum bytes sent at once by a connection that keeps its rate under loss; 0: it reduces its rate
    """

    header: float
    inside: float
    mtu: float
    window: float = math.inf
    segments: float = math.inf
    least: float = 0.0
    burst: float = 0.0


# IPv4 20, TCP 20, its timestamps 12. 3 MiB: half of the 6 MiB to which Linux lets the receiver's buffer grow; the other
# half is for its own records (tcp(7): tcp_rmem, tcp_adv_win_scale). Initial window of ten segments: RFC 6928. A loss
# halves the window to at least two segments (RFC 5681, equation 4), so it varies from two to four: three.
_TCP = Protocol(header=ETHERNET + 52.0, inside=52.0, mtu=1500.0, window=3.0 * 2**20, segments=10.0, least=3.0)
# BBR does not treat a loss as congestion (Cardwell et al., "BBR: congestion-based congestion control", ACM Queue 14(5),
# 2016), and keeps three quanta of two segments in flight on arbitrarily short paths (Cardwell et al., "BBR congestion
# control", draft-cardwell-iccrg-bbr-congestion-control-02, section 4.6.4.2).
_BBR = dataclasses.replace(_TCP, least=6.0, burst=65536.0)

#: by name in files. The TCP variants differ in their response to losses. The others have no slow start: RoCE begins at
#: line rate (Zhu et al. 2015, section 3.1: "hyper-fast start"), InfiniBand is limited by credits.
PROTOCOLS = {
    "tcp-cubic": _TCP,
    "tcp-reno": _TCP,
    "tcp-bbr": _BBR,
    # RoCE v2: IPv4 20, UDP 8, base transport header 12, check 4 (InfiniBand Architecture Specification, annex A17)
    "roce": Protocol(header=ETHERNET + 44.0, inside=0.0, mtu=4096.0),
    # EFA's SRD sends packets of about 8 KiB over all paths and reorders them (fi_efa(7)); the size of its headers is
    # not published
    "efa": Protocol(header=ETHERNET, inside=0.0, mtu=8192.0),
    # GPUDirect-TCPX and -TCPXO (FasTrak) keep connections between GPU memories open; Google's networks have frames of
    # 8,896 bytes (Google Cloud, VPC networks: maximum transmission unit)
    "tcpx": Protocol(header=ETHERNET + 52.0, inside=52.0, mtu=8896.0),
    "fastrak": Protocol(header=ETHERNET + 52.0, inside=52.0, mtu=8896.0),
    # local header 8, base transport header 12, checks 4 and 2 (InfiniBand Architecture Specification, section 6)
    "infiniband": Protocol(header=26.0, inside=0.0, mtu=4096.0),
}


def window_under_loss(transport: str, loss: float, round_trip: float, segment: float) -> float:
    """Return the mean window (bytes) of a TCP connection that loses a share `loss` of its segments.

    Reno: sqrt(3 / (2 p)) segments (Mathis, Semke, Mahdavi and Ott, "The macroscopic behavior of the TCP congestion
    avoidance algorithm", CCR 27(3), 1997). Cubic: 1.054 (RTT / p)^(3/4) segments, or Reno's if that is larger (RFC
    8312, equation 6 and section 4.2). BBR: the whole window.
    """
    if loss == 0.0 or transport == "tcp-bbr":
        return math.inf
    reno = math.sqrt(1.5 / loss)
    if transport == "tcp-reno":
        return reno * segment
    return max(reno, 1.054 * math.pow(round_trip / loss, 0.75)) * segment


Transport: TypeAlias = Annotated[str, one_of("", *PROTOCOLS)]
#: names in files, and the values of an ideal link
_Sharing: TypeAlias = Annotated[str, one_of("", "max-min", "fifo")]
Sharing: TypeAlias = Annotated[str, one_of("", "fifo")]
#: name by which users select links without a transport
IDEAL = "ideal"
Texts: TypeAlias = npt.NDArray[np.str_]


@checked
@dataclass(frozen=True)
class LinkDetail:
    """Optional properties of a link, in SI units. The defaults describe an ideal link.

    frame_header   header bytes that each frame adds to its payload
    frame_payload  payload bytes per full frame; 0: messages are not divided into frames
    burst          number of bytes that a link can send at once after it has been idle (token-bucket size)
    reverse_load   bandwidth that acknowledgements use in the opposite direction, as a fraction of the rate of the data
    transport      transport protocol: a name in `PROTOCOLS`, such as "tcp-cubic". Messages between a pair of nodes are
                   then queued on the connections of that pair. If empty, there is no transport: every message is an
                   independent flow, as on ideal links
    connections    number of connections per pair of nodes; every message is divided among these connections
    flow_rate      maximum rate of a connection in bytes/s; 0: no limit
    window         maximum bytes in flight per connection; 0: the transport's default
    window_spread  with sharing="fifo": standard deviation of the logarithm of the window, which is sampled for every
                   message that shares a link; `window` is the median
    rendezvous     size in bytes above which a message is sent only after the receiver has answered a request; 0: no
                   message waits
    loss           fraction of TCP segments that are lost
    unordered      whether the messages of a connection share its rate instead of waiting for each other
    warm           whether windows are already open, which avoids slow start
    queued_acks    whether acknowledgements wait in the queues of the opposite direction (with sharing="fifo")
    buffer         bytes that can queue at this switch port before TCP segments are lost; 0: unlimited
    overhead       time in seconds that the threads at both ends take to process a message, in addition to link latency
    spread         variation between the rates of links of this kind, as in :class:`ddlsim.Spread`
    sharing        "fifo": bytes are sent in order of arrival, on all links of the network if one link is "fifo"; "":
                   messages share links by max-min fairness
    """

    frame_header: NotNegative = 0.0
    frame_payload: NotNegative = 0.0
    burst: NotNegative = 0.0
    reverse_load: Decay = 0.0
    transport: Transport = ""
    connections: Count = 1
    flow_rate: NotNegative = 0.0
    window: NotNegative = 0.0
    window_spread: NotNegative = 0.0
    rendezvous: NotNegative = 0.0
    loss: Decay = 0.0
    unordered: bool = False
    warm: bool = False
    queued_acks: bool = False
    buffer: NotNegative = 0.0
    overhead: NotNegative = 0.0
    spread: Variation = 0.0
    sharing: Sharing = ""

    def written(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as edge attributes."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value != getattr(_NONE, key)}

    def __bool__(self) -> bool:
        """Whether the link differs from an ideal link."""
        return self != _NONE


_NONE = LinkDetail()
#: names in graphs and in files
DETAIL_KEYS = tuple(field.name for field in dataclasses.fields(LinkDetail))


@dataclass(frozen=True, eq=False)
class LinkDetails:
    """Properties of all links in a cluster. Each field of :class:`LinkDetail` is an array of shape (n_links,)."""

    frame_header: Floats
    frame_payload: Floats
    burst: Floats
    reverse_load: Floats
    transport: Texts
    connections: Ints
    flow_rate: Floats
    window: Floats
    window_spread: Floats
    rendezvous: Floats
    loss: Floats
    unordered: Bools
    warm: Bools
    queued_acks: Bools
    buffer: Floats
    overhead: Floats
    spread: Floats
    sharing: Texts

    def __post_init__(self) -> None:
        for key in DETAIL_KEYS:
            getattr(self, key).setflags(write=False)

    def of(self, link: int) -> LinkDetail:
        """Return the properties of one link."""
        return LinkDetail(*(getattr(self, key)[link].item() for key in DETAIL_KEYS))

    @property
    def has_effects(self) -> bool:
        """Whether any link behaves differently from an ideal link; merely naming a transport does not count."""
        told = self.flow_rate + self.window + self.rendezvous > 0.0
        in_order = np.isin(self.transport, [name for name in PROTOCOLS if name.startswith("tcp-")])
        transported = told | ~self.unordered | in_order
        shaped = (self.frame_header + self.burst + self.reverse_load > 0.0) | (self.sharing == "fifo")
        return bool((shaped | (self.transport != "") & transported).any())

    @property
    def is_sampled(self) -> bool:
        """Whether anything is sampled from the seed of a run."""
        return bool((self.spread + self.window_spread).any())

    @property
    def connection_limit(self) -> Floats:
        """Maximum bytes/s of all connections between two nodes together, inf without a limit, shape (n_links,)."""
        return np.where(self.flow_rate > 0.0, self.connections * self.flow_rate, np.inf)


def route_overhead(details: LinkDetails | None, routes: Routes) -> Floats:
    """Return the processing time of the threads at both ends on each route in s, the maximum over its links, (n,)."""
    most = np.zeros(len(routes.offsets) - 1)
    if details is not None:
        np.maximum.at(most, routes.of, details.overhead[routes.links])
    return most


def transport_of(cluster: Cluster) -> str:
    """Return the common transport of all links between hosts; "" if they have none or several."""
    if cluster.details is None:
        return ""
    between = cluster.host_of[cluster.link_src] != cluster.host_of[cluster.link_dst]
    named = set(cluster.details.transport[between].tolist())
    return str(named.pop()) if len(named) == 1 else ""


_Size = Annotated[Quantity, quantity("bytes", zero=True, si=True)]
_Time = Annotated[Quantity, quantity("time", zero=True, si=True)]
_Rate = Annotated[Quantity, quantity("bandwidth", zero=True, si=True)]
_Part = Annotated[float, number(0.0, 1.0, below=True)]


def _variation(value: object, where: str) -> object:
    if isinstance(value, Spread) and value.measured_on is not None:
        raise ConfigError(f"{where} = Spread(measured_on={value.measured_on}): is for devices; leave measured_on out")
    return value.variation if isinstance(value, Spread) else cast("Rule", rule_of(Variation))(value, where)


_Spread = Annotated[float | Spread, "the variation of a Spread, 0 to 1, or a ddlsim.Spread()", validated_by(_variation)]


@settings
class LinkDetailSettings:
    """Link details as written in files and by users: sizes are bytes or text such as "66 B", `flow_rate` is bytes/s or
    "5 Gbit/s".

    mtu      MTU of the transport in bytes, which determines frame_header and frame_payload
    sharing  "max-min" is the same as ""

    The other fields are those of :class:`LinkDetail`.
    """

    frame_header: _Size = 0.0
    frame_payload: _Size = 0.0
    burst: _Size = 0.0
    reverse_load: _Part = 0.0
    transport: Annotated[str, one_of("", IDEAL, *PROTOCOLS)] = ""
    mtu: _Size = 0.0
    connections: Annotated[int, integer(1, 1 << 20)] = 1
    flow_rate: _Rate = 0.0
    window: _Size = 0.0
    window_spread: Annotated[float, number(0.0)] = 0.0
    rendezvous: _Size = 0.0
    loss: _Part = 0.0
    unordered: bool = False
    warm: bool = False
    queued_acks: bool = False
    buffer: _Size = 0.0
    overhead: _Time = 0.0
    spread: _Spread = 0.0
    sharing: _Sharing = ""

    def detail(self, where: str = "") -> LinkDetail:
        """Convert to a :class:`LinkDetail`. Raises :class:`ConfigError` for conflicting fields."""
        told: dict[str, Any] = {key: getattr(self, key) for key in DETAIL_KEYS}
        transport = told["transport"] = "" if self.transport == IDEAL else self.transport
        told["sharing"] = "" if self.sharing == "max-min" else self.sharing
        header, payload, mtu = told["frame_header"], told["frame_payload"], si(self.mtu, "bytes")
        if bool(header) != bool(payload):
            raise ConfigError(
                f"{where}frame_header = {header:g} B and frame_payload = {payload:g} B must be set together, for "
                "example '66 B' and '1448 B'"
            )
        if not transport:
            for key, value in {**{key: told[key] for key in TRANSPORT_KEYS}, "mtu": mtu}.items():
                if value != getattr(_NONE, key, 0.0):
                    raise ConfigError(
                        f"{where}{key} = {shown(value)} has no effect without a transport; set transport to one of "
                        f"{', '.join(map(repr, PROTOCOLS))}"
                    )
        elif (self.queued_acks or self.window_spread) and told["sharing"] != "fifo":
            key = "queued_acks" if self.queued_acks else "window_spread"
            raise ConfigError(f"{where}{key} has no effect without queues; set sharing = 'fifo'")
        elif not transport.startswith("tcp-") and self.loss:
            raise ConfigError(
                f"{where}loss = {self.loss} applies only to TCP, but {transport} is lossless; remove loss"
            )
        elif not transport.startswith("tcp-") and self.buffer:
            raise ConfigError(
                f"{where}buffer = {self.buffer:g} B applies only to TCP, but {transport} uses flow control; "
                "remove buffer"
            )
        elif mtu:
            if header:
                raise ConfigError(f"{where}mtu and frame_header both define the frame; remove one of them")
            protocol = PROTOCOLS[transport]
            if mtu < protocol.inside + 200.0:
                raise ConfigError(
                    f"{where}mtu = {shown(mtu)} is too small for {transport}; expected a size such as '1500 B'"
                )
            told |= {"frame_header": protocol.header, "frame_payload": mtu - protocol.inside}
        return LinkDetail(**told)


@settings
class _DetailArguments(LinkDetailSettings):
    cluster: Cluster = field(kw_only=False)
    kinds: Collection[str] | None = None


#: fields that require a transport
TRANSPORT_KEYS = DETAIL_KEYS[DETAIL_KEYS.index("connections") : DETAIL_KEYS.index("spread")]


def collected(details: Collection[LinkDetail]) -> LinkDetails | None:
    """Return the details of all links as arrays, or None if no link has any."""
    distinct = {id(detail): detail for detail in details}  # most links of a cluster share theirs
    if not any(distinct.values()):
        return None
    place = {identity: i for i, identity in enumerate(distinct)}
    at = np.array([place[id(detail)] for detail in details])
    return LinkDetails(*(np.array([getattr(detail, key) for detail in distinct.values()])[at] for key in DETAIL_KEYS))


@takes_fields_of(_DetailArguments)
def with_detail(wanted: _DetailArguments) -> Cluster:
    """Return a copy of a cluster in which the optional properties of all links of the given kinds are replaced.

    cluster  original cluster, which is not changed
    kinds    kinds of links to change, such as ["nic"]; None: all links between machines
    mtu      frame size in bytes (MTU) of the transport; sets `frame_header` and `frame_payload`

    The other parameters are described in :class:`LinkDetail`; parameters that are omitted are reset to their defaults.
    Sizes and rates can also be strings such as "3 MiB" or "5 Gbit/s". If ``transport="ideal"`` is the only property,
    transports are removed, but frames, bursts, acknowledgements and spread are kept.

    Raises :class:`ConfigError` for an invalid number, an unknown transport, or a kind that no link has.
    """
    cluster, kinds, detail = wanted.cluster, wanted.kinds, wanted.detail()
    for kind in kinds or ():
        if kind not in cluster.link_kind:
            raise unknown_name("link kind", kind, set(cluster.link_kind), f"cluster {cluster.name!r}")
    host = cluster.host_of
    inside = (host[cluster.link_src] == host[cluster.link_dst]) & (host[cluster.link_src] >= 0)
    chosen = [not inside[link] if kinds is None else kind in kinds for link, kind in enumerate(cluster.link_kind)]
    before = cluster.details or LinkDetails(*(np.full(cluster.n_links, getattr(_NONE, key)) for key in DETAIL_KEYS))
    idealised = wanted.transport == IDEAL and not detail
    kept = ("frame_header", "frame_payload", "burst", "reverse_load", "spread") if idealised else ()
    columns = {key: getattr(before, key) for key in DETAIL_KEYS}
    columns |= {key: np.where(chosen, getattr(detail, key), columns[key]) for key in DETAIL_KEYS if key not in kept}
    is_ideal = all((column == getattr(_NONE, key)).all() for key, column in columns.items())
    return dataclasses.replace(cluster, details=None if is_ideal else LinkDetails(**columns))


def with_spread(cluster: Cluster, spread: Floats | float) -> Cluster:
    """Return a cluster with this `spread` of its links, one value or one per link, (n_links,)."""
    if cluster.details is None:
        return cluster
    column = np.broadcast_to(np.float64(spread), cluster.n_links).copy()
    return dataclasses.replace(cluster, details=dataclasses.replace(cluster.details, spread=column))


def sampled_times(cluster: Cluster) -> Floats:
    """Return the sampled time per byte of each channel relative to the nominal one, (n_channels,); 1 without a
    `spread`.

    Each direction of a link is sampled separately, by the rule of :class:`ddlsim.Spread` among all of equal spread, in
    the order of random numbers from the streams (seed, link). Links from a switch into a machine keep their nominal
    rate, because clouds limit what a machine sends (docs/models/variability.md).
    """
    assert cluster.details is not None
    times, spread = np.ones(cluster.n_channels), cluster.details.spread
    sends = (spread > 0.0) & ~(cluster.is_switch_port & (cluster.host_of[cluster.link_dst] >= 0))
    for variation in np.unique(spread[sends]).tolist():
        links = np.flatnonzero(sends & (spread == variation))
        channels, first = np.unique(cluster.link_channel[links], return_index=True)
        drawn = [stream(cluster.link_seed or 0, link, "link spread").random() for link in links[first].tolist()]
        times[channels[np.argsort(drawn)]] = Spread(variation).relative_times(len(channels))
    return times


def reverse_links(cluster: Cluster) -> Ints:
    """Return the index of each link's reverse link, -1 if there is none, shape (n_links,).

    Parallel links are matched in order.
    """
    ends, back = (u * cluster.n_nodes + v for u, v in itertools.permutations((cluster.link_src, cluster.link_dst)))
    order = np.argsort(ends, kind="stable")
    ends, back, links = ends[order], back[order], np.arange(cluster.n_links)
    place = np.searchsorted(ends, back) + links - np.searchsorted(ends, ends)
    matched = np.flatnonzero(np.append(ends, -1)[np.minimum(place, cluster.n_links)] == back)
    reverse = np.full(cluster.n_links, -1, dtype=np.int64)
    reverse[order[matched]] = order[place[matched]]
    return reverse
