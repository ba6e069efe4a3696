"""The laboratory's network for a cluster: machines, switches, and cables with a token bucket at each end.

A machine is a single host, so links inside machines are omitted. A link is Ethernet: a frame carries the payload of an
MTU plus the headers of Ethernet, IP and TCP, and on the wire another 24 bytes (preamble, frame check, gap; IEEE 802.3).
A topology file can set other frames (`frame_header`, `frame_payload`). The kernel does not count bytes that exist only
on the wire, so a link's rate is reduced by their share in full frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.errors import ConfigError
from ddlsim.readable import percent

MOST_HOSTS = 64
#: latency of a frame over a veth pair in s; links up to twice this latency get no delay
KERNEL_LATENCY = 25e-6
#: bytes: Ethernet (14), IPv4 (20), TCP with timestamps (32); and what they are in without the first
_HEADERS, _INSIDE_MTU = 66, 52
_WIRE = 24
_PAYLOAD = 1448
#: default token bucket of an idle link: frames, and s at the link's rate; about the minimum that keeps a link busy
#: despite occasional late timers of the kernel
_BURST_FRAMES, _BURST_SECONDS = 3, 300e-6
#: congestion control of links without a transport: the default of Linux (RFC 9438)
CUBIC = "cubic"


@dataclass(frozen=True)
class Port:
    """The sending end of a link.

    rate   bytes/s of frames as counted by the kernel, including Ethernet headers
    delay  additional latency in s
    burst  bytes that can be sent at once after a pause
    """

    rate: float
    delay: float
    burst: int


@dataclass(frozen=True)
class Cable:
    """A link in both directions between two places; `there` is the sending end at `a`, `back` the one at `b`."""

    a: int
    b: int
    there: Port
    back: Port


@dataclass(frozen=True)
class Cabling:
    """Places: first machines with a worker in rank order, then machines without one, then switches.

    place_names  names of all places
    n_hosts      places 0..n_hosts-1 have a rank
    mtu          bytes
    efficiency   payload share of a link's rate
    congestion   kernel's name of the congestion control of all connections
    notes        differences between the file and the laboratory
    """

    place_names: tuple[str, ...]
    n_hosts: int
    cables: tuple[Cable, ...]
    mtu: int
    efficiency: float
    congestion: str
    notes: tuple[str, ...]


def plan(cluster: Cluster) -> Cabling:
    """Return the machines, switches and cables of the lab that emulates a cluster.

    Raises :class:`ConfigError` if the lab cannot emulate the cluster. Each machine must have one worker, and all links
    must be full-duplex. The network must be connected and must not contain loops. Its frames must be TCP/IP on
    Ethernet, with a single kind of TCP. The message gives the names of the nodes concerned.
    """
    where, names, n_hosts = _places(cluster)
    payload, header = _frame(cluster)
    cables = _cables(cluster, where, payload + _HEADERS, payload + header)
    _check_tree(cluster, cables, names)
    efficiency = payload / (payload + header)
    notes = _notes(cluster, where, efficiency)
    return Cabling(names, n_hosts, cables, payload + _INSIDE_MTU, efficiency, _congestion(cluster, where), notes)


def _refusal(cluster: Cluster, what: str) -> ConfigError:
    return ConfigError(f"lab: cluster {cluster.name!r}: {what}")


def _places(cluster: Cluster) -> tuple[list[int], tuple[str, ...], int]:
    """Return the place of each node, the places' names, and the number of machines with a worker."""
    hosts = cluster.host_of[cluster.workers].tolist()
    for i, host in enumerate(hosts):
        if host in hosts[:i]:
            raise _refusal(
                cluster,
                f"the machine {cluster.host_names[host]!r} has several workers, but the lab supports one per machine; "
                "describe each worker as a separate machine",
            )
    if not 2 <= len(hosts) <= MOST_HOSTS:
        raise _refusal(cluster, f"has {len(hosts)} workers; the lab supports 2 to {MOST_HOSTS}")
    keys = [(host, -1) if host >= 0 else (-1, node) for node, host in enumerate(cluster.host_of.tolist())]
    places = {key: i for i, key in enumerate(dict.fromkeys([*((host, -1) for host in hosts), *keys]))}
    names = (cluster.node_names[node] if host < 0 else cluster.host_names[host] for host, node in places)
    return [places[key] for key in keys], tuple(names), len(hosts)


def _frame(cluster: Cluster) -> tuple[int, int]:
    """Return payload and header of a frame, which must be equal on all links: those of the file, or of Ethernet."""
    details = cluster.details
    if details is None or not details.frame_header.any():
        return _PAYLOAD, _HEADERS + _WIRE
    framed = details.frame_header > 0
    payloads, headers = set(details.frame_payload[framed].tolist()), set(details.frame_header[framed].tolist())
    payload, header = round(payloads.pop()), round(headers.pop())
    if payloads or headers:
        raise _refusal(
            cluster, "links have different frames, but the lab has one MTU; set the same frames for all links"
        )
    if header < _HEADERS or not 500 <= payload <= 9000 - _INSIDE_MTU:
        raise _refusal(
            cluster,
            f"frames with {payload} bytes of payload and {header} bytes of headers are not TCP/IP on Ethernet; use 500 "
            f"to {9000 - _INSIDE_MTU} bytes of payload and at least {_HEADERS} of headers, such as '1448 B' and '90 B'",
        )
    return payload, header


def _congestion(cluster: Cluster, where: Sequence[int]) -> str:
    """Return the congestion control of the links' transport, such as "reno" for "tcp-reno"."""
    if cluster.details is None:
        return CUBIC
    ends = zip(cluster.link_src.tolist(), cluster.link_dst.tolist(), cluster.details.transport.tolist(), strict=True)
    named = sorted({name for a, b, name in ends if where[a] != where[b] and name.startswith("tcp-")})
    if len(named) > 1:
        raise _refusal(
            cluster,
            f"links have different transports, {' and '.join(named)}, but a connection crosses several links; use one",
        )
    return named[0].removeprefix("tcp-") if named else CUBIC


def _cables(cluster: Cluster, where: Sequence[int], counted: int, on_wire: int) -> tuple[Cable, ...]:
    """Return the cables; a full frame has `counted` bytes for the kernel, and takes the time of `on_wire` bytes."""
    n_users = np.bincount(cluster.link_channel)
    cables = []
    for link in range(cluster.n_links):
        src, dst = int(cluster.link_src[link]), int(cluster.link_dst[link])
        back = int(cluster.reverse_link[link])
        if where[src] == where[dst]:
            continue
        ends = f"link from {cluster.node_names[src]!r} to {cluster.node_names[dst]!r}"
        if n_users[cluster.link_channel[link]] > 1:
            raise _refusal(cluster, f"{ends} shares its capacity with another; the lab supports full-duplex links only")
        if back < 0:
            raise _refusal(cluster, f"{ends} has no link in the opposite direction; add one")
        if link < back:
            cables.append(Cable(where[src], where[dst], *(_port(cluster, i, counted, on_wire) for i in (link, back))))
    return tuple(cables)


def _port(cluster: Cluster, link: int, counted: int, on_wire: int) -> Port:
    details = cluster.details
    channel = cluster.link_channel[link]
    unequal = float(cluster.channel_capacity[channel] / cluster.nominal_capacity[channel])
    rate, burst = float(cluster.link_bandwidth[link]) * unequal * counted / on_wire, 0.0
    if details is not None:
        burst = float(details.burst[link]) * counted / on_wire
        if details.frame_header[link] > 0:
            # the efficiency is then unrelated to frames, such as a provider's rate limit
            rate *= float(cluster.link_efficiency[link])
    latency = float(cluster.link_latency[link])
    delay = latency - KERNEL_LATENCY if latency > 2 * KERNEL_LATENCY else 0.0
    return Port(rate, delay, round(max(burst or rate * _BURST_SECONDS, _BURST_FRAMES * counted)))


def _check_tree(cluster: Cluster, cables: Sequence[Cable], names: Sequence[str]) -> None:
    """Raise ConfigError for loops, in which the switches cannot forward, and for unconnected parts."""
    from networkx.utils import UnionFind

    parts = UnionFind(range(len(names)))
    for cable in cables:
        if parts[cable.a] == parts[cable.b]:
            raise _refusal(
                cluster,
                f"the link between {names[cable.a]!r} and {names[cable.b]!r} closes a loop, but the lab's switches "
                "forward along a tree only; remove parallel links and redundant paths",
            )
        parts.union(cable.a, cable.b)
    first, *others = sorted(min(part) for part in parts.to_sets())
    if others:
        raise _refusal(cluster, f"no path connects {names[first]!r} with {names[others[0]]!r}; add a link")


def _notes(cluster: Cluster, where: Sequence[int], efficiency: float) -> tuple[str, ...]:
    notes = []
    inside = [where[a] == where[b] for a, b in zip(cluster.link_src.tolist(), cluster.link_dst.tolist(), strict=True)]
    if any(inside):
        notes.append("links inside machines are not emulated in the lab")
    if cluster.details is None or not cluster.details.frame_header.any():
        efficiencies = cluster.link_efficiency[~np.array(inside)]
        far = efficiencies[np.abs(efficiencies - efficiency) > 0.005]
        if len(far):
            in_file = percent(far[0], 2)
            notes.append(
                f"TCP/IP on Ethernet leaves {percent(efficiency, 2)} of a link's bandwidth for payload, but the "
                f"cluster file specifies {in_file}; predictions and measurements differ by the ratio of the two"
            )
    return tuple(notes)
