"""NCCL's estimate of a collective's time, from which its tuner chooses the algorithm and protocol.

The formulas are in :mod:`ddlsim.collectives.nccl_tuner`; the fastest combination is chosen. This module determines
their inputs from the cluster. The bus bandwidth is set by the caller or computed from the links between the GPUs of the
communicator. In a single node, it is that of the rings that NCCL's search finds. In several nodes, it is the minimum
over all workers and nodes of the bandwidth from a worker to the other ranks in its node and of a node's network cards
together, each limited by the connections of its transport (``connections * flow_rate``, docs/models/transport.md). NCCL
counts only part of an NVLink's bandwidth (``src/graph/topo.h``, such as 20 of 25 GB/s). Links between switches are
ignored here, but not in a run (:mod:`ddlsim.runtime.costs`). Switches between machines reduce (SHARP) if
``switch_reduces`` is set for all of them on the routes.

The estimate ranks algorithms for the tuner; as a prediction it is rough (docs/calibration.md).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Bandwidth, Count, Index, checked, one_of, quantity
from ddlsim.cluster import Cluster, load_cluster
from ddlsim.cluster.calibrated import inside_hosts, payload_rate
from ddlsim.cluster.cluster import ClusterLike
from ddlsim.cluster.groups import groups_of, members
from ddlsim.cluster.rings import channels, ring_rate
from ddlsim.collectives.nccl_tuner import ALGORITHMS, LAPS, SIMPLE_ONLY, Algorithm, Plugin, Protocol, Site, plugins
from ddlsim.errors import ConfigError
from ddlsim.ties import distinct
from ddlsim.units import si

#: GPU generations by prefix of the device name; other devices count as "ampere"
GENERATIONS = {
    "volta": ("v100", "t4", "titan-v"),
    "hopper": ("h100", "h200", "h800", "h20", "gh200"),
    "blackwell": ("b100", "b200", "b300", "gb200", "gb300"),
}
#: GPUs before Volta, which do not support LL128
OLD = ("k40", "k80", "m40", "m60", "p4", "p100", "gtx", "titan-x")
#: share of an NVLink's nominal bandwidth that NCCL counts, by prefix of the GPU's name (``src/graph/topo.h``)
NVLINK_SHARE = {
    "p100": 18 / 20,
    "v100": 20 / 25,
    "a100": 20 / 25,
    "a800": 20 / 25,
    **dict.fromkeys(("h100", "h20", "h800", "gh200"), 20.6 / 25),
    **dict.fromkeys(("b200", "b300", "gb200", "gb300"), 40.1 / 50),
}

#: bandwidths (bytes/s, at least 25e9) that the search tries for rings between machines, on Hopper and Blackwell
#: (``src/graph/search.cc``, sm90SpeedArrayInter and sm100SpeedArrayInter)
RING_SPEEDS = (96e9, 86e9, 80e9, 48e9, 45e9, 42e9, 40e9, 30e9)
#: bytes/s that NCCL counts for 16 lanes of PCIe 5.0 and 6.0 (``src/graph/topo.cc``, kvDictPciGen), by generation of the
#: GPU; before Hopper, it is at most 24e9
PCIE_SPEED = {"hopper": 48e9, "blackwell": 96e9}
#: maximum number of channels of a communicator (``src/include/device.h``, MAXCHANNELS, before version 2.25)
MAX_CHANNELS = 32
#: channels per peer in another machine: NCCL starts with 2 per network interface (``src/graph/paths.cc``,
#: ncclTopoGetNchannels, since version 2.12; NCCL_NCHANNELS_PER_NET_PEER)
MESSAGE_CHANNELS = 2


@dataclass(frozen=True)
class NcclTime:
    """NCCL's choice: `seconds` of `algorithm` by `protocol` (names: :mod:`ddlsim.collectives.nccl_tuner`)."""

    seconds: float
    algorithm: str
    protocol: str


@checked
@functools.lru_cache(maxsize=256)
def bus_bandwidth(cluster: Cluster, n_ranks: Count, places: tuple[int, ...] | None = None) -> tuple[float, str]:
    """Return the bandwidth of rings over the first workers, or the nodes `places`, in bytes/s, and the interconnect
    inside a node ("nvlink" or "pcie"; if there are both, "pcie").

    In one node, this is the rate of all rings together. Over several nodes, it is the minimum over all workers and
    nodes, because a ring passes through each: the bandwidth of a worker's links to other ranks (of its NVLinks if it
    has any), and of a node's links to other nodes.
    """
    nodes = cluster.workers[:n_ranks].tolist() if places is None else places
    inside, outside, hardware = _buses(cluster, tuple(nodes))
    return min(inside, outside), hardware


@functools.lru_cache(maxsize=1024)
def _buses(cluster: Cluster, places: tuple[int, ...]) -> tuple[float, float, str]:
    """Return the bandwidth inside and between machines (bytes/s, inf without such links) and the interconnect inside.

    NVLinks to GPUs outside the communicator do not count, because NCCL trims them from its topology.
    """
    nodes = np.array(places, dtype=np.int64)
    hosts = cluster.host_of[nodes]
    if len(members(cluster, nodes)) == 1 and len(nodes) > 1:
        return _bus_inside(cluster, nodes)
    inside = inside_hosts(cluster)
    nvlink = _nvlinks(cluster)
    n_members = dict(zip(*(a.tolist() for a in np.unique(hosts, return_counts=True)), strict=True))
    is_member = np.zeros(cluster.n_nodes, dtype=bool)
    is_member[nodes] = True
    reached = ~nvlink | is_member[cluster.link_dst] | ~cluster.is_endpoint[cluster.link_dst]
    links_from = _grouped(cluster.link_src, np.flatnonzero(inside & reached & is_member[cluster.link_src]))
    limits, hardware, between = [], set(), []
    for node, host in zip(nodes.tolist(), hosts.tolist(), strict=True):
        links = links_from.get(node, np.zeros(0, dtype=np.int64))
        if len(links) and n_members[host] > 1:
            joined = links[nvlink[links]] if nvlink[links].any() else links
            hardware.add("nvlink" if nvlink[joined].any() else "pcie")
            limits.append(float(np.minimum(payload_rate(cluster, joined), _counted(cluster)[joined]).sum()))
    if len(n_members) > 1:
        between = [_outwards(cluster).get(host, 0.0) for host in n_members]
    least = min(limits, default=np.inf), min(between, default=np.inf)
    if not limits + between or min(least) <= 0.0:
        raise ConfigError(
            f"cluster {cluster.name!r}: the first {len(places)} workers are not connected by links; set bandwidth"
        )
    return *least, "nvlink" if hardware == {"nvlink"} else "pcie"


@functools.lru_cache(maxsize=16)
def _nvlinks(cluster: Cluster) -> npt.NDArray[np.bool_]:
    """Whether each link is an NVLink, shape (n_links,)."""
    return np.array([kind == "nvlink" for kind in cluster.link_kind], dtype=bool)


def _bus_inside(cluster: Cluster, nodes: npt.NDArray[np.int64]) -> tuple[float, float, str]:
    """Like :func:`_buses`, for workers of one machine: the rate of the rings that NCCL's search finds."""
    rings = channels(cluster, tuple(nodes.tolist())).rings
    links = distinct(np.concatenate([cluster.routes(nodes[ring], nodes[np.roll(ring, -1)]).links for ring in rings]))
    rates = np.minimum(payload_rate(cluster, links), _counted(cluster)[links])
    capacity = np.full(cluster.n_channels, np.inf)
    np.minimum.at(capacity, cluster.link_channel[links], rates)
    hardware = "nvlink" if _nvlinks(cluster)[links].all() else "pcie"
    return ring_rate(cluster, nodes, rings, capacity), np.inf, hardware


@functools.lru_cache(maxsize=1024)
def site(cluster: Cluster, nodes: tuple[int, ...], bandwidth: float | None = None) -> Site:
    """Return the tuner's inputs for workers at `nodes`. `bandwidth` overrides the bus bandwidth (bytes/s)."""
    at = np.array(nodes, dtype=np.int64)
    hosts, n_local = np.unique(cluster.host_of[at], return_counts=True)
    several = len(hosts) > 1
    carried, n_interfaces, _ = _interfaces(cluster, nodes) if several else (math.inf, 1, math.inf)
    plugin, latency = _plugin(cluster, at) if several else (Plugin(), 0.0)
    if bandwidth is None:
        inside, outside, hardware = _buses(cluster, nodes)
        outside = min(outside, carried)
    else:
        inside, outside = bandwidth, bandwidth if several else math.inf
        hardware = "nvlink" if "nvlink" in cluster.link_kind else "pcie"
    devices = {_device(cluster.device_of[node]) for node in nodes}
    adding_up = GENERATIONS["hopper"] + GENERATIONS["blackwell"]
    nvswitches = len(set(n_local.tolist())) == 1 and n_local[0] > 1 and behind_nvswitches(cluster, at)
    return Site(
        len(nodes),
        len(hosts),
        inside,
        outside,
        n_channels=_n_rings(cluster, nodes, n_interfaces, bundled=latency > 0.0) if several else 1,
        hardware=hardware,
        generation=_generation(devices),
        cpu=_cpu(cluster, hosts),
        ll128=not any(device.startswith(OLD) for device in devices)
        and (hardware == "nvlink" or n_local.max() == 1)
        and not (several and _by_cpu(cluster, at)),
        nvls=nvswitches and all(device.startswith(adding_up) for device in devices),
        sharp=several and len(set(n_local.tolist())) == 1 and _switches_reduce(cluster, at),
        net_latency=latency,
        plugin=plugin,
    )


@functools.lru_cache(maxsize=4096)
def network_channels(cluster: Cluster, nodes: tuple[int, ...], device: str) -> int:
    """Return the number of channels of NCCL's collectives among GPUs (`device`) at `nodes` in several machines.

    Each channel is a thread block, which occupies a multiprocessor of every GPU. The rules are those of NCCL 2.21:

    - The search finds a ring for each network interface that the group uses in a machine (:mod:`ddlsim.cluster.rings`).
    - It splits each ring in two if it has at least 25 GB/s. On Hopper and later, it does not split more than 4 rings of
      less than 50 GB/s (``src/graph/search.cc``, ncclTopoDupChannels).
    - Two channels alternate on each of these rings, so that the interface is never idle (``src/graph/connect.cc``,
      ncclTopoPostset; https://github.com/NVIDIA/nccl/issues/438).
    - On Hopper and later, there are four per ring if the rings have more than 45 GB/s and there would be fewer than 16
      channels (ncclTopoPostset).

    For example, one GPU per machine has 4 channels on Hopper with an interface of 400 Gbit/s, and 2 on other GPUs or
    with slower interfaces; a machine with 8 interfaces, all in use, has 16. The model ignores that NCCL uses fewer
    channels for small buffers.
    """
    at = np.array(nodes, dtype=np.int64)
    _, n_interfaces, bandwidth = _interfaces(cluster, nodes)
    n = _n_rings(cluster, nodes, n_interfaces, bundled=_plugin(cluster, at)[1] > 0.0)
    recent = PCIE_SPEED.get(_generation({device}), 0.0)
    speed = next((candidate for candidate in RING_SPEEDS if candidate <= min(recent, bandwidth / n)), 0.0)
    if speed >= 25e9 and not (speed < 50e9 and n > 4):
        n, speed = 2 * n, speed / 2
    n *= 2
    if speed > 45e9 and n < 16:
        n *= 2
    return min(n, MAX_CHANNELS)


def _n_rings(cluster: Cluster, nodes: tuple[int, ...], n_interfaces: int, *, bundled: bool) -> int:
    """Return the number of rings over workers at `nodes` in several machines, each of which uses `n_interfaces` network
    cards. `bundled` means that NCCL treats the interfaces of a GPU as one."""
    n_rings = len(channels(cluster, nodes).rings)
    alone = len(distinct(cluster.host_of[list(nodes)])) == len(nodes)
    return max(n_rings, n_interfaces) if not bundled and (n_rings > 1 or alone) else n_rings


@functools.lru_cache(maxsize=1024)
def _interfaces(cluster: Cluster, nodes: tuple[int, ...]) -> tuple[float, int, float]:
    """Return the bandwidth of the network cards that connect the workers to other machines, their number and their
    nominal bandwidth (bytes/s), each the minimum over the machines.

    Cards nearest to GPUs outside the communicator are unused.
    """
    at = np.array(nodes, dtype=np.int64)
    hosts, first, machine = np.unique(cluster.host_of[at], return_index=True, return_inverse=True)
    routes = cluster.split_routes(at, at[np.roll(first, -1)][machine])
    owner = np.repeat(machine, np.diff(routes.offsets))
    source, target = (cluster.host_of[ends[routes.links]] for ends in (cluster.link_src, cluster.link_dst))
    leaving = (source == hosts[owner]) & (target != hosts[owner])
    pairs = np.divmod(distinct(owner[leaving] * cluster.n_links + routes.links[leaving]), cluster.n_links)
    weights = (payload_rate(cluster, pairs[1]), None, cluster.link_bandwidth[pairs[1]])
    rates, numbers, nominal = (np.bincount(pairs[0], weight, len(hosts)) for weight in weights)
    return float(rates.min()), int(numbers.min()), float(nominal.min())


def _plugin(cluster: Cluster, at: npt.NDArray[np.int64]) -> tuple[Plugin, float]:
    """Return the plugin that NCCL uses between machines, and the latency in s that it reports (0 if none).

    A plugin that reports a latency bundles a GPU's interfaces.
    """
    first = at[np.unique(cluster.host_of[at], return_index=True)[1]]
    links = cluster.routes(first[:1], first[1:2]).links
    if cluster.details is None:
        return Plugin(), 0.0
    plugin = next((plugins()[name] for name in cluster.details.transport[links] if name in plugins()), Plugin())
    outside = links[~inside_hosts(cluster)[links]]
    latency = float(cluster.link_latency[outside].sum() + cluster.details.overhead[outside].max(initial=0.0))
    return plugin, latency if plugin.reports_latency else 0.0


def _generation(devices: set[str]) -> str:
    generations = {name for name, begins in GENERATIONS.items() for device in devices if device.startswith(begins)}
    if any(device.startswith(OLD) for device in devices):
        return "volta"
    if any(not device.startswith(sum(GENERATIONS.values(), ())) for device in devices):
        generations.add("ampere")
    return next(name for name in ("volta", "ampere", "hopper", "blackwell") if name in generations)


def _cpu(cluster: Cluster, hosts: npt.NDArray[np.int64]) -> str:
    """Return the vendor of the machines' CPUs; "intel" if it is not given."""
    inside = np.flatnonzero(np.isin(cluster.host_of, hosts)).tolist()
    devices = {cluster.device_of[node] for node in inside if cluster.node_kind[node] == "host"}
    return "amd" if any(_device(device).startswith("epyc") for device in devices) else "intel"


def _by_cpu(cluster: Cluster, at: npt.NDArray[np.int64]) -> bool:
    """Whether traffic of GPUs to other machines passes through a CPU."""
    first = at[np.unique(cluster.host_of[at], return_index=True)[1]]
    passed = cluster.link_dst[cluster.routes(first, np.roll(first, -1)).links]
    return bool((cluster.is_endpoint[passed] & ~np.isin(passed, at)).any())


def _switches_reduce(cluster: Cluster, at: npt.NDArray[np.int64]) -> bool:
    """Whether every switch on the routes between corresponding GPUs of different machines can reduce."""
    if cluster.switch_reduces is None:
        return False
    rails = at.reshape(-1, len(at) // len(distinct(cluster.host_of[at])))
    routes = cluster.routes(rails.ravel(), np.roll(rails, -1, axis=0).ravel())
    ends = cluster.link_dst[routes.links]
    switches = ends[cluster.is_fabric_switch[ends]]
    return len(switches) > 0 and bool(cluster.switch_reduces[switches].all())


@functools.lru_cache(maxsize=16)
def _outwards(cluster: Cluster) -> dict[int, float]:
    """Return the bandwidth of each machine's links to others for a ring (bytes/s), limited by their connections."""
    links = _grouped(cluster.host_of[cluster.link_src], np.flatnonzero(~inside_hosts(cluster)))
    limit = np.full(cluster.n_links, np.inf) if cluster.details is None else cluster.details.connection_limit
    return {host: float(np.minimum(payload_rate(cluster, ids), limit[ids]).sum()) for host, ids in links.items()}


@functools.lru_cache(maxsize=256)
def _device(path: str | None) -> str:
    """Return the name of a node's device without its folder (for device files); "" if it has none."""
    return PurePath(path or "").name


@functools.lru_cache(maxsize=16)
def _counted(cluster: Cluster) -> npt.NDArray[np.float64]:
    """Return the bandwidth that NCCL counts for each link (bytes/s), (n_links,); inf if it counts the full one."""
    shares = {
        path: next((share for name, share in NVLINK_SHARE.items() if _device(path).startswith(name)), np.inf)
        for path in set(cluster.device_of)
    }
    node_share = np.array([shares[path] for path in cluster.device_of])
    return np.where(_nvlinks(cluster), node_share[cluster.link_src] * cluster.link_bandwidth, np.inf)


def nvlink_excess(cluster: Cluster, nodes: npt.NDArray[np.int64]) -> float:
    """Return the ratio of the actual bandwidth between GPUs of a machine to the one that NCCL uses, at least 1."""
    links = distinct(cluster.routes(nodes, np.roll(nodes, -1)).links)
    links = links[np.isin(cluster.link_src[links], nodes)]
    return float(np.max(payload_rate(cluster, links) / _counted(cluster)[links], initial=1.0))


def behind_nvswitches(cluster: Cluster, at: npt.NDArray[np.int64]) -> bool:
    """Whether NVSwitches connect the GPUs of each machine."""
    hosts = cluster.host_of[at]
    if (hosts < 0).any():
        return False
    machines = [at[hosts == host] for host in distinct(hosts)]
    routes = cluster.routes(np.concatenate(machines), np.concatenate([np.roll(machine, -1) for machine in machines]))
    return bool(_nvlinks(cluster)[routes.links].all() and (np.diff(routes.offsets) == 2).all())


def _grouped(key: npt.NDArray[np.int64], links: npt.NDArray[np.int64]) -> dict[int, npt.NDArray[np.int64]]:
    """Group `links` by ``key[link]``."""
    return {int(key[links[group[0]]]): links[group] for group in groups_of(key[links])}


@checked
def nccl_time(
    cluster: ClusterLike,
    nbytes: Annotated[float | str, quantity("bytes", zero=True)],
    *,
    kind: Annotated[str, one_of(*LAPS)] = "all_reduce",
    ranks: Count | None = None,
    nodes: tuple[Index, ...] | None = None,
    bandwidth: Bandwidth | None = None,
    algorithm: Algorithm | None = None,
    protocol: Protocol | None = None,
) -> NcclTime:
    """Estimate the time of a collective on the cluster's first workers, as NCCL's tuner does.

    nbytes     buffer per rank, in bytes or text such as "100 MB"
    kind       "all_reduce", "reduce_scatter" or "all_gather" (trees for all-reduce only)
    ranks      number of workers; None: all
    nodes      nodes of the ranks, instead of the first workers
    bandwidth  bus bandwidth in bytes/s or text such as "230 GB/s"; None: :func:`bus_bandwidth`
    algorithm, protocol   fixed choices: "ring", "tree", "nvls", "nvls_tree", "collnet_direct", "collnet_chain"; "LL",
               "LL128", "Simple"

    Raises ConfigError for unknown names, invalid sizes, and for fewer than 2 ranks or more than there are workers.
    """
    loaded = load_cluster(cluster)
    size = si(nbytes, "bytes")
    if nodes is not None and ranks is not None:
        raise ConfigError(
            f"nccl_time: ranks = {ranks} cannot be combined with nodes, which has one entry per rank; remove ranks"
        )
    if nodes is not None and not (len(set(nodes)) == len(nodes) and np.isin(nodes, loaded.workers).all()):
        raise ConfigError(f"nccl_time: nodes = {nodes}: must be distinct workers of {loaded.name!r}")
    n_ranks = len(nodes) if nodes is not None else len(loaded.workers) if ranks is None else ranks
    if not 2 <= n_ranks <= len(loaded.workers):
        raise ConfigError(
            f"ranks = {n_ranks}: must be from 2 to {len(loaded.workers)}, the number of workers of {loaded.name!r}"
        )
    if algorithm not in (None, "ring") and kind != "all_reduce":
        raise ConfigError(f"algorithm = {algorithm!r}: supported for all_reduce only, not for {kind}; use 'ring'")
    at = tuple(int(node) for node in (loaded.workers[:n_ranks] if nodes is None else nodes))
    place = site(loaded, at, None if bandwidth is None else si(bandwidth, "bandwidth"))
    return least(place, kind, size, algorithm, protocol, loaded.name)


def least(place: Site, kind: str, size: float, algorithm: str | None, protocol: str | None, name: str) -> NcclTime:
    """Return NCCL's choice among the allowed combinations: that of the network's plugin, or else the fastest. `name` is
    the cluster's name, for errors."""
    if algorithm is protocol is None:
        algorithm, protocol = place.plugin_choice(kind, size) or (None, None)
    times = [
        NcclTime(place.seconds(kind, candidate, p, size), candidate, p)
        for candidate in ALGORITHMS
        if algorithm in (None, candidate)
        for p in place.protocols(candidate, kind)
        if protocol in (None, p)
    ]
    if times:
        return min(times, key=lambda time: time.seconds)
    wanted = " with ".join(repr(word) for word in (algorithm, protocol) if word is not None)
    raise ConfigError(
        f"algorithm = {wanted}: not available, because {name!r} has {_lacking(algorithm, protocol, place)}"
    )


def _lacking(algorithm: str | None, protocol: str | None, place: Site) -> str:
    allowed = (*place.plugin.algorithms, *place.plugin.protocols)
    if any(word not in (None, *allowed) for word in (algorithm, protocol)):
        return f"a network whose plugin supports only {', '.join(map(repr, allowed))}"
    if algorithm in SIMPLE_ONLY and protocol not in (None, "Simple"):
        return "it with the protocol 'Simple' only"
    if algorithm == "nvls_tree":
        return "no machines with equal numbers of GPUs on NVSwitches that can reduce (Hopper and later); use 'tree'"
    if algorithm == "nvls" and not place.nvls:
        return "no NVSwitches that can reduce (Hopper and later) between all GPUs of a machine; use 'ring' or 'tree'"
    if algorithm in SIMPLE_ONLY:
        return "no switches that can reduce (switch_reduces = true) between these machines; use 'ring' or 'tree'"
    return "no NVLinks between GPUs, or NICs behind the CPU, which disables LL128; use 'LL' or 'Simple'"
