"""What links do besides carrying bytes at a rate: frames with headers, token buckets, acknowledgements, transports.

The network engine applies them (docs/models/tcp.md and docs/models/transport.md have the formulas); links without them
cost nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Count, Decay, NotNegative, checked, one_of, takes_fields_of
from ddlsim.cluster.cluster import Bools, Cluster, Floats, Ints
from ddlsim.cluster.quantity import Quantity, nonnegative
from ddlsim.cluster.transports import PROTOCOLS, frame_of
from ddlsim.errors import ConfigError, shown, unknown_name

Transport: TypeAlias = Annotated[str, one_of("", *PROTOCOLS)]
#: what a user calls links without a transport, whatever their file says
IDEAL = "ideal"
Texts: TypeAlias = npt.NDArray[np.str_]


@checked
@dataclass(frozen=True)
class LinkDetail:
    """The details of one link, SI floats; 0 is what a link does without them.

    frame_header, frame_payload  bytes that every frame of at most `frame_payload` bytes adds to a message
    burst                        bytes that an idle link has saved up and lets through at once (token bucket)
    reverse_load                 share of its rate that traffic takes of the other direction (acknowledgements)
    transport                    "tcp-cubic", "tcp-reno", "tcp-bbr", "roce" or "infiniband": messages of a pair of nodes
                                 travel on its connections, one after the other; "": they are flows, as on ideal links
    connections                  that each pair of nodes has, between which every message is divided
    flow_rate                    bytes/s of one connection at most; 0: no limit
    window                       bytes of one connection under way at most; 0: the transport's own
    rendezvous                   bytes; a larger message asks its receiver first and waits for it; 0: none does
    loss                         share of TCP's segments that are lost
    unordered                    messages of a connection do not wait for each other but share it
    warm                         windows are open already: no slow start
    buffer                       bytes that may wait at this port of a switch before TCP's are lost; 0: no end of them
    """

    frame_header: NotNegative = 0.0
    frame_payload: NotNegative = 0.0
    burst: NotNegative = 0.0
    reverse_load: Decay = 0.0
    transport: Transport = ""
    connections: Count = 1
    flow_rate: NotNegative = 0.0
    window: NotNegative = 0.0
    rendezvous: NotNegative = 0.0
    loss: Decay = 0.0
    unordered: bool = False
    warm: bool = False
    buffer: NotNegative = 0.0

    def written(self) -> dict[str, Any]:
        """Return the fields that say anything, as attributes of an edge."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value != getattr(_NONE, key)}

    def __bool__(self) -> bool:
        """Whether the link does anything besides carrying bytes."""
        return self != _NONE


_NONE = LinkDetail()
#: names in graphs and in files
DETAIL_KEYS = tuple(field.name for field in dataclasses.fields(LinkDetail))


@dataclass(frozen=True, eq=False)
class LinkDetails:
    """The details of all links of a cluster, each of shape (n_links,), as in :class:`LinkDetail`."""

    frame_header: Floats
    frame_payload: Floats
    burst: Floats
    reverse_load: Floats
    transport: Texts
    connections: Ints
    flow_rate: Floats
    window: Floats
    rendezvous: Floats
    loss: Floats
    unordered: Bools
    warm: Bools
    buffer: Floats

    def __post_init__(self) -> None:
        for key in DETAIL_KEYS:
            getattr(self, key).setflags(write=False)

    def of(self, link: int) -> LinkDetail:
        """Return the details of one link."""
        return LinkDetail(*(getattr(self, key)[link].item() for key in DETAIL_KEYS))

    @property
    def acts(self) -> bool:
        """Whether any link does more than to name a transport whose messages share it as flows do."""
        told = self.flow_rate + self.window + self.rendezvous > 0.0
        transported = told | ~self.unordered | np.char.startswith(self.transport, "tcp")
        shaped = self.frame_header + self.burst + self.reverse_load > 0.0
        return bool((shaped | (self.transport != "") & transported).any())

    @property
    def connection_limit(self) -> Floats:
        """Bytes/s that the connections of a pair of nodes carry together, inf where nothing is said, (n_links,)."""
        return np.where(self.flow_rate > 0.0, self.connections * self.flow_rate, np.inf)


def transport_of(cluster: Cluster) -> str:
    """Return the transport of all links between hosts, "" where they name none or several."""
    if cluster.details is None:
        return ""
    between = cluster.host_of[cluster.link_src] != cluster.host_of[cluster.link_dst]
    named = set(cluster.details.transport[between].tolist())
    return str(named.pop()) if len(named) == 1 else ""


@dataclass(frozen=True, kw_only=True)
class Told:
    """The details of a link as files and people write them: sizes are bytes or text such as "66 B", `flow_rate` is
    bytes/s or "5 Gbit/s".

    mtu  bytes of the transport's frames, which says frame_header and frame_payload

    The other fields are those of :class:`LinkDetail`.
    """

    frame_header: Quantity = 0.0
    frame_payload: Quantity = 0.0
    burst: Quantity = 0.0
    reverse_load: float = 0.0
    transport: Annotated[str, one_of("", IDEAL, *PROTOCOLS)] = ""
    mtu: Quantity = 0.0
    connections: Count = 1
    flow_rate: Quantity = 0.0
    window: Quantity = 0.0
    rendezvous: Quantity = 0.0
    loss: float = 0.0
    unordered: bool = False
    warm: bool = False
    buffer: Quantity = 0.0

    def detail(self, where: str = "") -> LinkDetail:
        """Return it as SI floats. Raises :class:`ConfigError` for a number that makes no sense, naming it."""
        header = nonnegative(self.frame_header, "bytes", f"{where}frame_header")
        payload = nonnegative(self.frame_payload, "bytes", f"{where}frame_payload")
        if bool(header) != bool(payload):
            raise ConfigError(
                f"{where}frame_header = {shown(self.frame_header)} and frame_payload = {shown(self.frame_payload)} "
                "say together what a frame is; give both, like '66 B' and '1448 B'"
            )
        for key, share in (("reverse_load", self.reverse_load), ("loss", self.loss)):
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
                raise ConfigError(f"{where}{key} = {shown(share)} must be a share in [0, 1), like 0.022")
        transport = "" if self.transport == IDEAL else self.transport
        if not isinstance(transport, str) or transport not in {"", *PROTOCOLS}:
            raise unknown_name("transport", str(transport), {IDEAL, *PROTOCOLS}, where.rstrip(": ") or "link")
        connections = self.connections
        if isinstance(connections, bool) or not isinstance(connections, int) or not 1 <= connections <= 1 << 20:
            raise ConfigError(f"{where}connections = {shown(connections)} must be a whole number of at least 1")
        for key, switch in (("unordered", self.unordered), ("warm", self.warm)):
            if not isinstance(switch, bool):
                raise ConfigError(f"{where}{key} = {shown(switch)} must be true or false")
        frame = nonnegative(self.mtu, "bytes", f"{where}mtu")
        detail = LinkDetail(
            header, payload, nonnegative(self.burst, "bytes", f"{where}burst"), float(self.reverse_load), transport,
            connections, nonnegative(self.flow_rate, "bandwidth", f"{where}flow_rate"),
            nonnegative(self.window, "bytes", f"{where}window"),
            nonnegative(self.rendezvous, "bytes", f"{where}rendezvous"), float(self.loss), self.unordered, self.warm,
            nonnegative(self.buffer, "bytes", f"{where}buffer"),
        )  # fmt: skip
        return _consistent(detail, frame, where)


@dataclass(frozen=True, kw_only=True)
class _Wanted(Told):
    """What :func:`with_detail` takes."""

    cluster: Cluster = field(kw_only=False)
    kinds: Collection[str] | None = None


#: what only a transport does
TRANSPORT_KEYS = ("connections", "flow_rate", "window", "rendezvous", "loss", "unordered", "warm", "buffer")


def _consistent(detail: LinkDetail, mtu: float, where: str) -> LinkDetail:
    """Return the detail with the frames that `mtu` says; raise :class:`ConfigError` if its parts do not go together."""
    if not detail.transport:
        idle = [key for key in TRANSPORT_KEYS if getattr(detail, key) != getattr(_NONE, key)] + ["mtu"] * (mtu > 0)
        if idle:
            value = mtu if idle[0] == "mtu" else getattr(detail, idle[0])
            raise ConfigError(
                f"{where}{idle[0]} = {shown(value)} belongs to a transport; add transport = one of "
                f"{', '.join(map(repr, PROTOCOLS))}"
            )
        return detail
    if detail.loss and not detail.transport.startswith("tcp"):
        raise ConfigError(f"{where}loss = {detail.loss} is for TCP; {detail.transport} links lose nothing")
    if detail.buffer and not detail.transport.startswith("tcp"):
        raise ConfigError(f"{where}buffer = {detail.buffer:g} B is for TCP; {detail.transport} senders are held back")
    if mtu and detail.frame_header:
        raise ConfigError(f"{where}mtu and frame_header both say what a frame is; remove one")
    if not mtu:
        return detail
    header, payload = frame_of(detail.transport, mtu, where)
    return dataclasses.replace(detail, frame_header=header, frame_payload=payload)


def collected(details: Collection[LinkDetail]) -> LinkDetails | None:
    """Return the details of all links as arrays, or None if no link has any."""
    distinct = {id(detail): detail for detail in details}  # most links of a cluster share theirs
    if not any(distinct.values()):
        return None
    place = {identity: i for i, identity in enumerate(distinct)}
    at = np.array([place[id(detail)] for detail in details])
    return LinkDetails(*(np.array([getattr(detail, key) for detail in distinct.values()])[at] for key in DETAIL_KEYS))


@takes_fields_of(_Wanted)
def with_detail(wanted: _Wanted) -> Cluster:
    """Return the cluster with these details on all links of the given `kinds` (None: all between hosts).

    The parameters are those of :class:`LinkDetail`, sizes as text like "3 MiB" and rates like "5 Gbit/s" as well; `mtu`
    (bytes) says the transport's frames. ``transport="ideal"`` alone takes transports away and leaves frames, bursts and
    acknowledgements as they are. Links of other kinds keep theirs. Raises :class:`ConfigError` for a number
    that makes no sense, a transport that does not exist, or a kind that no link has.
    """
    cluster, kinds, detail = wanted.cluster, wanted.kinds, wanted.detail()
    for kind in kinds or ():
        if kind not in cluster.link_kind:
            raise unknown_name("link kind", kind, set(cluster.link_kind), f"cluster {cluster.name!r}")
    host = cluster.host_of
    inside = (host[cluster.link_src] == host[cluster.link_dst]) & (host[cluster.link_src] >= 0)
    chosen = [not inside[link] if kinds is None else kind in kinds for link, kind in enumerate(cluster.link_kind)]
    before = cluster.details
    as_it_was = [_NONE] * cluster.n_links if before is None else [before.of(link) for link in range(cluster.n_links)]
    idealised = wanted.transport == IDEAL and not detail
    ideal = {id(was): _without_transport(was) for was in as_it_was} if idealised else {}
    after = [
        ideal[id(was)] if idealised and mine else detail if mine else was
        for was, mine in zip(as_it_was, chosen, strict=True)
    ]
    return dataclasses.replace(cluster, details=collected(after))


def _without_transport(detail: LinkDetail) -> LinkDetail:
    return LinkDetail(detail.frame_header, detail.frame_payload, detail.burst, detail.reverse_load)


def reverse_links(cluster: Cluster) -> Ints:
    """Return for each link the one that leads back, -1 if there is none, shape (n_links,).

    Of several links in parallel, the first one belongs to the first one back, and so on.
    """
    waiting: dict[tuple[int, int], list[int]] = {}
    ends = list(zip(cluster.link_src.tolist(), cluster.link_dst.tolist(), strict=True))
    for link, pair in enumerate(ends):
        waiting.setdefault(pair, []).append(link)
    reverse = np.full(cluster.n_links, -1, dtype=np.int64)
    for (u, v), links in waiting.items():
        for link, back in zip(links, waiting.get((v, u), []), strict=False):
            reverse[link] = back
    return reverse
