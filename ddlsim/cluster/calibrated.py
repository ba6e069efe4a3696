"""Calibrated clusters: latencies, bandwidths and overheads scaled to measured values.

A measured value applies to the *reference route* of a class of links:

between   links between hosts; the route from the first worker of the first host to that of the second host
inside    links inside hosts; the route between the first two workers of the first host with at least two

``latency`` is the sum over the links of the class on this route (s), ``bandwidth`` the smallest rate at which they
carry the payload of a large message (bytes/s), as measured by programs. On routes with frames, headers add to the
payload, so the capacity of the links is larger (:func:`payload_rate`). All links of the class are scaled by the same
factor, which preserves their proportions: a trunk with four times the bandwidth of a network card keeps four times its
bandwidth. Inside hosts, only links of the kinds on the reference route change their bandwidth, because NVLink rates say
nothing about PCIe. Latencies of all kinds are scaled, because they decide between routes with the same number of hops.

The second half of the module has the deviations of predictions from reality (docs/calibration.md). Those of earlier
predictions of each kind are in `deviations/learned.toml`, which ``python -m accuracy.deviations`` writes. In addition,
each message may be faster or slower by up to the latency of the measured ones (:data:`PER_MESSAGE`). Beyond the
measured range, the variance grows with the number of doublings, as in a random walk.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np

from ddlsim.bundled import bundled_files
from ddlsim.cluster.cluster import Bools, Cluster, Floats, Ints
from ddlsim.cluster.details import with_detail
from ddlsim.cluster.groups import workers_by_machine
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.plain import read_toml

#: name of a parameter -> its dimension in :data:`ddlsim.units.DIMENSIONS`
PARAMETERS = {
    "between.latency": "time",
    "between.bandwidth": "bandwidth",
    "between.frame_header": "bytes",  # these six are fields of LinkDetail, on all links between hosts
    "between.frame_payload": "bytes",
    "between.burst": "bytes",
    "between.reverse_load": "share",
    "between.window": "bytes",  # of TCP, which becomes the transport of links without one
    "between.warm": "share",  # 1: windows are already open
    "inside.latency": "time",
    "inside.bandwidth": "bandwidth",
    "overhead": "time",  # per message, at the sender and again at the receiver
    "reduce_bandwidth": "bandwidth",  # rate at which received data are reduced
}

#: link details that can be measured
FITTED_DETAILS = ("frame_header", "frame_payload", "burst", "reverse_load", "window", "warm")
#: transport of links with a calibrated window: Linux's default (tcp(7), RFC 9438)
DEFAULT_TRANSPORT = "tcp-cubic"
DETAILS = tuple(f"between.{key}" for key in FITTED_DETAILS)

_Ends: TypeAlias = tuple[int, int]


def inside_hosts(cluster: Cluster) -> Bools:
    """Whether each link is inside a host (otherwise between hosts), shape (n_links,)."""
    src, dst = cluster.host_of[cluster.link_src], cluster.host_of[cluster.link_dst]
    inside: Bools = (src == dst) & (src >= 0)
    return inside


def reference_ends(cluster: Cluster, link_class: str) -> _Ends | None:
    """Return the end nodes of the reference route of "between" or "inside", or None if there is none."""
    by_host = workers_by_machine(cluster)
    if link_class == "inside":
        several = [nodes for nodes in by_host if len(nodes) > 1]
        return (several[0][0], several[0][1]) if several else None
    firsts = [nodes[0] for nodes in by_host]
    return (firsts[0], firsts[1]) if len(firsts) > 1 else None


def current_parameters(cluster: Cluster) -> dict[str, float]:
    """Return the values (s, bytes/s) of the parameters in `cluster`, omitting those without a link or host.

    ``reduce_bandwidth`` is infinite if reducing takes no time. Details of links are omitted if there are none.
    """
    values: dict[str, float] = {}
    for link_class in ("between", "inside"):
        reference = _reference_links(cluster, link_class)
        if reference is not None and len(reference[0]):
            links, rate = reference
            values[f"{link_class}.latency"] = float(cluster.link_latency[links].sum())
            if cluster.details is not None:
                values[f"{link_class}.latency"] += float(cluster.details.overhead[links].max())
            values[f"{link_class}.bandwidth"] = float(rate.min())
            if link_class == "between" and cluster.details is not None:
                detail = cluster.details.of(int(links[0]))
                told = {f"between.{key}": getattr(detail, key) for key in FITTED_DETAILS}
                values |= {name: value for name, value in told.items() if value}
    endpoints = cluster.is_endpoint
    values["overhead"] = float(0.5 * (cluster.send_overhead + cluster.recv_overhead)[endpoints].mean())
    slowest = float(cluster.reduce_time[endpoints].max())
    values["reduce_bandwidth"] = 1.0 / slowest if slowest else np.inf
    return values


def with_parameters(cluster: Cluster, values: Mapping[str, float]) -> Cluster:
    """Return the cluster with the given parameters (names of :data:`PARAMETERS`, SI values above 0).

    Setting a value again replaces it. Raises :class:`ConfigError` for an unknown name or a class of links that the
    cluster does not have.
    """
    told = {name.removeprefix("between."): value for name, value in values.items() if name in DETAILS}
    if told:  # first, because payload rates depend on frames
        cluster = _with_details(cluster, told)
    details = cluster.details
    latency, bandwidth = cluster.link_latency.copy(), cluster.link_bandwidth.copy()
    efficiency = cluster.link_efficiency.copy()
    send, receive, reduce_time = cluster.send_overhead, cluster.recv_overhead, cluster.reduce_time
    for name, value in values.items():
        if name not in PARAMETERS:
            raise unknown_name("parameter", name, PARAMETERS, f"cluster {cluster.name!r}: calibration")
        if name in DETAILS:
            continue
        if name == "overhead":
            send = receive = np.where(cluster.is_endpoint, value, 0.0)
            continue
        if name == "reduce_bandwidth":
            reduce_time = np.where(cluster.is_endpoint, 1.0 / value, 0.0)
            continue
        link_class, _, quantity = name.partition(".")
        reference = _reference_links(cluster, link_class)
        if reference is None or not len(reference[0]):
            raise ConfigError(
                f"cluster {cluster.name!r}: calibration: {name} does not apply, because no two workers "
                f"communicate over links {link_class} hosts; remove {name}"
            )
        route, rate = reference
        members = inside_hosts(cluster) == (link_class == "inside")  # the links that are scaled together
        if link_class == "inside":
            members &= np.isin(cluster.link_kind, [cluster.link_kind[link] for link in route.tolist()])
        if quantity == "latency":
            current = float(latency[route].sum())
            if details is not None:  # the measurement includes the threads at both ends
                details = dataclasses.replace(details, overhead=np.where(members, 0.0, details.overhead))
            if current and link_class == "inside":  # all kinds, because other proportions would change routes
                members = inside_hosts(cluster)
            latency[members] = latency[members] * (value / current) if current else value / len(route)
        else:
            share = efficiency[members] * (value / float(rate.min()))
            # a share above 1 raises the bandwidth itself
            bandwidth[members] *= np.maximum(share, 1.0)
            efficiency[members] = np.minimum(share, 1.0)
            if details is not None and link_class == "between":  # a measured rate refutes lower limits of connections
                refuted = members & (details.connection_limit < value)
                details = dataclasses.replace(details, flow_rate=np.where(refuted, 0.0, details.flow_rate))
    links: dict[str, Any] = {"link_latency": latency, "link_bandwidth": bandwidth, "link_efficiency": efficiency}
    costs: dict[str, Any] = {"send_overhead": send, "recv_overhead": receive, "reduce_time": reduce_time}
    return dataclasses.replace(cluster, details=details, **links, **costs)


def _with_details(cluster: Cluster, values: Mapping[str, float]) -> Cluster:
    """Set these details on all links between hosts, and keep the others."""
    told: dict[str, Any] = {key: bool(value) if key == "warm" else value for key, value in values.items()}
    if cluster.details is None:
        return with_detail(cluster, transport=DEFAULT_TRANSPORT if "window" in told else "", **told)
    inside, before = inside_hosts(cluster), cluster.details
    columns = {key: np.where(inside, getattr(before, key), value) for key, value in told.items()}
    if "window" in told:
        columns["transport"] = np.where(inside | (before.transport != ""), before.transport, DEFAULT_TRANSPORT)
    return dataclasses.replace(cluster, details=dataclasses.replace(before, **columns))


def payload_rate(cluster: Cluster, links: Ints) -> Floats:
    """Return the payload rate of a large message on each of the links of a route, in bytes/s, shape (n,).

    It excludes frame headers (the largest header and the smallest payload on the route) and acknowledgements on
    half-duplex links (docs/models/tcp.md).
    """
    rate = cluster.link_bandwidth[links] * cluster.link_efficiency[links]
    details = cluster.details
    if details is None:
        return rate
    back = cluster.reverse_link[links]
    shared = (back >= 0) & (cluster.link_channel[back] == cluster.link_channel[links])
    rate = rate / np.where(shared, 1.0 + details.reverse_load[links], 1.0)
    payload = details.frame_payload[links]
    if not (payload > 0.0).any():
        return rate
    return np.asarray(rate / (1.0 + details.frame_header[links].max() / payload[payload > 0.0].min()))


def _reference_links(cluster: Cluster, link_class: str) -> tuple[Ints, Floats] | None:
    """Return the links of the class on its reference route, and their payload rates for messages on it (bytes/s)."""
    ends = reference_ends(cluster, link_class)
    if ends is None:
        return None
    links = cluster.routes([ends[0]], [ends[1]])[0]
    share = dict(zip(*cluster.split_routes(*np.array(ends).reshape(2, 1)).path(0), strict=True))
    of_class = inside_hosts(cluster)[links] == (link_class == "inside")
    return links[of_class], payload_rate(cluster, links)[of_class] / [share[link] for link in links[of_class].tolist()]


#: standard deviation of the logarithm per doubling beyond the measured range
PER_DOUBLING = 0.0125
#: standard deviation of an additional time per message, in measured latencies: uniform in [-1, 1]
PER_MESSAGE = 1.0 / math.sqrt(3.0)

#: size in bytes below which messages and buffers have a kind of their own
SHORT = 64 * 1024


@dataclass(frozen=True)
class Beyond:
    """Uncertainty of a prediction beyond its measurements: additional `variance` of the logarithm, notes, standard
    deviation of the time per message in measured latencies, and how much `faster` and `slower` measurements of its kind
    were than predictions (logarithm, one-sided 97.5 % quantiles)."""

    variance: float = 0.0
    notes: tuple[str, ...] = ()
    per_message: float = 0.0
    faster: float = 0.0
    slower: float = 0.0

    def __add__(self, other: Beyond) -> Beyond:
        per_message = math.hypot(self.per_message, other.per_message)
        faster, slower = max(self.faster, other.faster), max(self.slower, other.slower)
        return Beyond(self.variance + other.variance, (*self.notes, *other.notes), per_message, faster, slower)

    def around(self, value: float, faster: float = 0.0, slower: float = 0.0) -> tuple[float, float]:
        """Return the interval of a time `value`; `faster` and `slower` are its limits without this (logarithms)."""
        return value * math.exp(-math.hypot(faster, self.faster)), value * math.exp(math.hypot(slower, self.slower))


#: no extrapolation
INSIDE = Beyond()


def operation_kind(operation: str, algorithm: str, transport: str, nbytes: float) -> str:
    """Return the kind of a message (without `algorithm`) or a collective; short ones are dominated by latency."""
    names = (f"collective/{algorithm.partition('(')[0]}" if algorithm else f"message/{operation}", transport)
    return ("short " if nbytes < SHORT else "") + "/".join(filter(None, names))


@functools.cache
def learned() -> dict[str, tuple[float, float]]:
    """Return (faster, slower) deviations of measurements by kind of prediction; "" covers all kinds."""
    path = bundled_files("deviations")["learned"]
    kinds = cast("dict[str, dict[str, float]]", read_toml(path)["kinds"])
    return {kind: (row["faster"], row["slower"]) for kind, row in kinds.items()}


def deviation(kind: str) -> Beyond:
    """Return the deviation of predictions of a `kind`, such as "collective/ring/tcp-cubic".

    Without measurements of that kind, it is that of the parent kind ("collective/ring"). If only the operation
    ("collective") is known, it is that of its least accurate kind, with a note.
    """
    parts, table = kind.split("/"), learned()
    family = next(name for n in range(len(parts), -1, -1) if (name := "/".join(parts[:n])) in table)
    if "/" in family:
        return Beyond(0.0, (), 0.0, *table[family])
    alike = [sides for name, sides in table.items() if name.startswith(family) and name.count("/") == bool(family)]
    note = f"no measured family resembles {kind}; using the interval of the least accurate kind"
    return Beyond(0.0, (note,), 0.0, *map(max, zip(*alike, strict=True)))


def unmeasured(note: str, kind: str) -> Beyond:
    """Return the uncertainty of an operation of a `kind` that was not measured itself."""
    return Beyond(0.0, (f"extrapolated: {note}",), PER_MESSAGE) + deviation(kind)


def beyond(value: float, measured: Sequence[float], what: str) -> Beyond:
    """Return the uncertainty of a value outside the range of the `measured` ones."""
    least, most = min(measured), max(measured)
    if least <= value <= most or value <= 0.0 or most <= 0.0:
        return INSIDE
    doublings = math.log2(value / most) if value > most else math.log2(max(least, 1e-300) / value)
    ends = f"{least:.6g}" if least == most else f"{least:.6g} to {most:.6g}"
    return Beyond(doublings * PER_DOUBLING**2, (f"extrapolated: {value:.6g} {what} (measured: {ends})",))
