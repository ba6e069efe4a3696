"""NCCL's choice of algorithm, channels and protocol for a collective, by size.

:mod:`ddlsim.cluster.rings` finds the channels, and :mod:`ddlsim.collectives.nccl` chooses algorithm and protocol. The
model (docs/models/collectives.md) follows https://github.com/NVIDIA/nccl, version 2.19: ``prims_ll.h`` and
``prims_ll128.h`` for protocols, ``tuning.cc`` for the latency of hops (which includes the wire's), ``collectives.h``
and ``all_reduce.h`` for the slices and the last step of rings, ``trees.cc`` and ``connect.cc`` for trees. In addition:

* First messages start after a start-up time.
* A connection buffers eight chunks of a tree, so only the first chunk waits for the latency and for copies at each
  stage.
* With NVLS and CollNet, GPUs send each other their parts, and byte counts are those on links of switches that reduce
  and multicast. Trunks between such switches carry more than with SHARP.
* If a protocol limits channels (:mod:`ddlsim.collectives.nccl_tuner`), messages occupy links for longer than their
  bytes on the wire require.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.cluster.details import route_overhead
from ddlsim.cluster.groups import members
from ddlsim.cluster.rings import channels
from ddlsim.collectives.nccl import behind_nvswitches, bus_bandwidth, least, nvlink_excess, site
from ddlsim.collectives.nccl_tuner import (
    ARITY_HOP,
    BASE,
    HOP,
    NVLS_SHARE,
    PROTOCOLS,
    SIMPLE_ONLY,
    TREE_CHANNEL,
    TREE_LL128_CHANNEL,
    Site,
)
from ddlsim.collectives.schedule import Floats, Ints

Nodes = tuple[int, ...]

#: bytes on the wire per byte of data
WIRE = {"LL": 16 / 8, "LL128": 128 / 120, "Simple": 1.0}
SLICES = 2
#: number of steps (chunks) in a connection's buffer (``NCCL_STEPS``)
STEPS = 8
#: bytes of data per chunk of a tree for LL (half a step) and LL128; Simple uses one step of the plugin's buffer
TREE_CHUNK = {"LL": 32.0 * 2**10, "LL128": 576e3}
#: channels created from each ring or tree of the search (``connect.cc``); the tuner's constants cover both
COPIES = 2.0
#: channels that read from NVSwitches (``nvls.cc``, Hopper generation)
NVLS_CHANNELS = 16
#: resolution of `Choice.hidden`, per longest latency of a ring; it is coarse so that similar sizes share schedules
PARTS = 64
MOST_CHUNKS = 1024


class Choice(NamedTuple):
    """The tuner's choice. Sizes with the same choice use the same schedule.

    n_chunks  number of pipelined chunks in a tree, or between machines
    hidden    latency hidden by slices, in units of 1/`PARTS` of the ring's longest latency
    plateau   factor of the hop latency of rings over several machines (NCCL's "plateau effect")
    fill      time in s that a stage takes to copy its first chunk before the next stage has it
    message   bytes per chunk of a tree
    """

    algorithm: str
    protocol: str
    n_chunks: int = 1
    hidden: int = 0
    plateau: float = 1.0
    fill: float = 0.0
    message: float = 0.0


@dataclass(frozen=True, eq=False)
class Way:
    """Where and how a collective runs. Ranks are indices of ``nodes``.

    choice          algorithm, protocol and chunks
    rings, chains   see :class:`ddlsim.cluster.rings.Channels`
    nodes           (n_ranks,) nodes of the `cluster`
    site            inputs of the tuner
    """

    choice: Choice
    rings: tuple[Ints, ...]
    chains: tuple[tuple[Ints, ...], ...]
    cluster: Cluster
    nodes: Ints
    site: Site

    @functools.cached_property
    def machines(self) -> list[Ints]:
        """The ranks in each machine."""
        return members(self.cluster, self.nodes)

    @property
    def wire(self) -> float:
        """Bytes on the wire per byte of the buffer, without the factors of :meth:`inside`."""
        return WIRE[self.choice.protocol]

    @property
    def handled(self) -> float:
        """Bytes that multiprocessors handle per byte on the wire; more than 1 if channels are slower than links."""
        algorithm, site = self.choice.algorithm, self.site
        if algorithm in SIMPLE_ONLY:
            # rate of the buffer on the links, bytes/s; two trees through one machine share its interfaces
            n_halves = 2.0 if algorithm == "nvls_tree" and site.n_nodes > 2 else 1.0
            rate = min(site.in_switches() if site.nvls else site.inside, site.outside / n_halves)
            return max(1.0, rate * (2.0 * (site.n_ranks - 1) / site.n_ranks) / site.ceiling(algorithm, "Simple"))
        handled = 1.0
        if self.choice.protocol != "LL" or site.n_nodes == 1:
            handled = max(handled, site.bus / site.ceiling(algorithm, self.choice.protocol) / self.wire)
        return handled * nvlink_excess(self.cluster, self.nodes) if site.n_nodes == 1 else handled

    def handled_between(self, src: Ints, dst: Ints) -> Floats | None:
        """Return the additional `handled` factor of each message, (m,), or None if all are 1.
        Between machines, LL passes through CPU memory, and a small message occupies the proxy thread for longer than
        the wire. Inside, NVLinks carry only what NCCL counts."""
        site, inside, between = self.site, 1.0, 1.0
        if site.n_nodes > 1 and site.outside > site.inside:
            inside = nvlink_excess(self.cluster, self.nodes)
        if site.n_nodes > 1 and self.choice.protocol == "LL":
            between = max(1.0, site.outside / WIRE["LL"] / site.ceiling("ring", "LL"))
        if self.choice.message and site.plugin.message_time:
            wire = self.choice.message * self.wire * self.handled * len(self.rings) / site.outside
            between = max(between, site.plugin.message_time / wire)
        if inside == between == 1.0:
            return None
        host = self.cluster.host_of[self.nodes]
        return np.where(host[src] == host[dst], inside, between)

    @property
    def idle_last(self) -> bool:
        """Whether the links are idle in a ring's last step. That is so with Simple inside a machine with A100 or H100
        (docs/models/collectives.md). V100 do not show it, and between machines copies are short."""
        site, simple = self.site, self.choice.protocol == "Simple"
        return simple and site.n_nodes == 1 and site.hardware == "nvlink" and site.generation in ("ampere", "hopper")

    @property
    def inside(self) -> tuple[float, float]:
        """Bytes on NVLinks per byte of messages that switches reduce or multicast inside a machine, and bytes that
        multiprocessors and switches handle per byte on NVLinks."""
        n = self.site.n_local
        excess = nvlink_excess(self.cluster, self.nodes)
        if self.choice.algorithm.startswith("collnet"):
            return 1.0, excess
        return (1.0 + 1.0 / n) / (2.0 * (n - 1.0) / n), excess / NVLS_SHARE[self.site.generation]

    @property
    def start(self) -> float:
        """Start-up time until a rank's first message is in flight, in s."""
        return BASE[self.choice.algorithm][PROTOCOLS.index(self.choice.protocol)]

    @property
    def first_inside(self) -> float:
        """Latency of the first message exchanged by switches inside a machine, in s.

        NVLS copies chunks to a buffer, reduces them in the switches, and copies them out of the buffer, so the first
        chunk passes two additional stages (``all_reduce.h``: scatter, reduce, gather).
        """
        hop = self.site.hop(self.choice.algorithm, "Simple")[0] + 2.0 * self.choice.fill
        return hop + (self.site.n_local - 1.0) * ARITY_HOP * (self.choice.algorithm == "collnet_direct")

    def latency(self, src: Ints, dst: Ints, first: bool = False) -> Floats:
        """Return the latency of messages between ranks in s, (m,). For `first` messages, slices hide none of it."""
        choice = self.choice
        route = routes_latency(self.cluster, self.nodes[src], self.nodes[dst])
        host = self.cluster.host_of[self.nodes]
        inside = (host[src] == host[dst]) & (host[src] >= 0)
        hop = np.where(inside, *self.site.hop(choice.algorithm, choice.protocol))
        hidden = 0.0 if first else float(route.max(initial=0.0)) * choice.hidden / PARTS
        # Simple channels forward full chunks; LL128 threads read data on arrival, but proxies wait for chunks
        copied = choice.fill * (choice.algorithm == "tree")
        handed_on = max(copied - choice.message / self.site.inside, 0.0) * (choice.protocol == "Simple")
        return np.maximum(hop * choice.plateau, route - hidden) + np.where(inside, handed_on, copied)


@functools.lru_cache(maxsize=4096)
def choose(
    cluster: Cluster, nodes: Nodes, nbytes: float, kind: str, algorithm: str | None = None, protocol: str | None = None
) -> Choice:
    """Return the tuner's choice for `nbytes` per rank at ``nodes``; the last two arguments may fix it."""
    place = site(cluster, nodes)
    time = least(place, kind, nbytes, algorithm, protocol, cluster.name)
    ring_channels, n = channels(cluster, nodes), len(nodes)
    n_machines, n_channels = len(ring_channels.chains[0]), len(ring_channels.rings)
    if time.algorithm in SIMPLE_ONLY:
        n_chunks, step = _chunks(time.algorithm, place, nbytes, n_channels)
        fill = _stepped(min(step, nbytes)) / place.in_switches() if time.algorithm.startswith("nvls") else 0.0
        return Choice(time.algorithm, time.protocol, n_chunks, fill=fill)
    if time.algorithm == "tree":
        part = nbytes / (n_channels * min(n_machines, 2))
        chunk = _tree_chunk(time.protocol, place, part, n_machines, n / n_machines)
        n_chunks = min(max(math.ceil(part / chunk), 1), MOST_CHUNKS)
        counts = time.protocol == "Simple" or (time.protocol == "LL128" and n_machines > 1)
        message = _stepped(part / n_chunks) if counts or place.plugin.message_time else 0.0  # else 0: share schedules
        return Choice("tree", time.protocol, n_chunks, fill=message / _copying(time.protocol, place), message=message)
    hidden = 0
    if time.protocol == "Simple":
        at = np.array(nodes, dtype=np.int64)
        longest = float(routes_latency(cluster, at, np.roll(at, -1)).max())
        slice_time = nbytes / (SLICES * n * bus_bandwidth(cluster, n, nodes)[0])
        hidden = PARTS if slice_time >= longest else int(PARTS * slice_time / longest)
        hop = HOP["ring", "network" if n_machines > 1 else "nvlink"][PROTOCOLS.index("Simple")]
        hidden = hidden if longest > hop else 0  # the hop latency includes the wire's
    return Choice("ring", time.protocol, hidden=hidden, plateau=place.plateau(kind, time.protocol, nbytes))


def _stepped(nbytes: float) -> float:
    """Round a size to a sixteenth of an octave, so that similar sizes share schedules."""
    return 2.0 ** (round(16.0 * math.log2(nbytes)) / 16.0) if nbytes > 1.0 else nbytes


def _copying(protocol: str, place: Site) -> float:
    """Return the rate at which one channel of a tree copies a chunk from one GPU to the next, in bytes/s.

    For LL, the ceilings between machines include it. (NCCL 2.8's tuner documents its latency for Simple: a chunk of 256
    kB at 12 GB/s; ``tuning.cc``.)
    """
    table = {"LL128": TREE_LL128_CHANNEL, "Simple": TREE_CHANNEL}.get(protocol)
    return math.inf if table is None else table[place.generation][place.n_nodes > 2] / COPIES


def _chunks(algorithm: str, place: Site, nbytes: float, n_channels: int) -> tuple[int, float]:
    """Return the number of pipelined chunks between machines, and the bytes that all channels process at a time
    (``calcCollChunking``)."""
    n_heads = 1.0 if algorithm == "collnet_chain" else place.n_local
    chunk, depth = 128.0 * 2**10, 2.0
    rules: tuple[tuple[float, float], ...]
    if algorithm.startswith("nvls") and place.plugin.nvls_chunk_size > 0.0:
        chunk = place.plugin.nvls_chunk_size
    elif algorithm == "nvls_tree" and place.n_nodes >= 4:
        chunk = 64.0 * 2**10
    if algorithm == "nvls":
        rules = (64, 64), (8, 32), (2, 16)
    elif algorithm == "nvls_tree":
        rules = (32, 256), (16, 128), (4, 64), (1, 32)
    else:
        depth = place.n_local if algorithm == "collnet_chain" else depth
        chunk = 2.0 * chunk if algorithm == "collnet_chain" else 4.0 * chunk
        rules = (64, 256), (64, 128), (8, 64), (1 if algorithm == "collnet_chain" else 8, 32)
    side_by_side = n_heads * (NVLS_CHANNELS if algorithm.startswith("nvls") else n_channels)
    for n_wanted, kibibytes in rules:
        wanted = n_wanted * (1.0 if algorithm.startswith("nvls") else depth)
        if nbytes < wanted * side_by_side * chunk:
            chunk = min(chunk, kibibytes * 2.0**10)
    step = side_by_side * chunk
    return 1 if place.n_nodes == 1 else min(max(math.ceil(nbytes / step), 1), MOST_CHUNKS), step


def _tree_chunk(protocol: str, place: Site, part: float, n_machines: int, n_local: float) -> float:
    """Return the chunk size of a tree's `part` in bytes. LL128 uses smaller chunks if there would be too few to
    pipeline (``enqueue.cc``, ``calcCollChunking``)."""
    chunk = TREE_CHUNK.get(protocol, place.plugin.buffer_size / STEPS)
    if protocol == "LL128":
        steps = (1 + int(math.log2(n_machines)) + 0.1 * n_local) / n_local
        for n_wanted, least in ((64 * steps, 128 * 2**10), (16 * steps, 32 * 2**10)):
            while part // chunk < n_wanted and chunk > least:
                chunk /= 2
    return chunk


def way(
    cluster: Cluster, nodes: Nodes, nbytes: float, kind: str, algorithm: str | None = None, protocol: str | None = None
) -> Way:
    """Return how NCCL runs a collective of `nbytes` per rank among the workers at ``nodes``."""
    ring_channels, choice = channels(cluster, nodes), choose(cluster, nodes, nbytes, kind, algorithm, protocol)
    return Way(choice, ring_channels.rings, ring_channels.chains, cluster, np.array(nodes), site(cluster, nodes))


def several_ways(cluster: Cluster, nodes: Nodes) -> bool:
    """Whether machines have several devices and several paths between them: NVLinks, NVSwitches, interfaces."""
    at = np.array(nodes, dtype=np.int64)
    n_local = np.unique(cluster.host_of[at], return_counts=True)[1]
    if n_local.max() == 1:
        return False
    return bool(n_local.min() > 1 and behind_nvswitches(cluster, at)) or len(channels(cluster, nodes).rings) > 1


def routes_latency(cluster: Cluster, src: Ints, dst: Ints) -> Floats:
    """Return the latency of routes between nodes in s, including host overhead at both ends, (m,)."""
    routes = cluster.routes(src, dst)
    latency = np.bincount(routes.of, cluster.link_latency[routes.links], len(src))
    return latency + route_overhead(cluster.details, routes)
