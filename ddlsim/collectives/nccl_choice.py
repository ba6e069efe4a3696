"""NCCL's choice for a collective: rings or double binary trees over all channels, and the protocol, by size.

The channels are searched in the links (:mod:`ddlsim.cluster.rings`), algorithm and protocol chosen as by
:mod:`ddlsim.collectives.nccl`. Then (https://github.com/NVIDIA/nccl, version 2.19, said here in our own words):

protocols  LL sends 8 bytes of data in 16 (``prims_ll.h``), LL128 120 in 128 (``prims_ll128.h``), Simple the data alone.
           A message flows after the latency of a hop by its protocol (``tuning.cc``, which counts the wire's), or after
           its route's where that is longer; the first ones, after what it takes to start.
slices     Simple cuts the chunks of rings in two slices (``collectives.h``), of which one flows while the other is on
           its way: so much of a route's latency is hidden, beyond the hop's own, as a slice needs to flow.
NVLink     carries at most what NCCL counts for it: where links inside a machine are faster, messages use them longer.
NVLS       every GPU sends each other one its part of the buffer, and then its part of the sum, as many bytes as the
           links carry where switches add up and multicast.
trees      a chain inside each machine, which ends at the device at its channel's interface, and two binary trees
           between these, in one of which a machine is inner (``trees.cc``, ``connect.cc``). Each carries half of the
           channel's part, in chunks that follow each other; as a connection holds eight, only the first waits for the
           latency, and for each stage to copy it.
NVLS tree  the parts of the sum of each machine, one at each GPU, go up and down two such trees between the machines.
CollNet    they go to the GPUs at the same place in each machine and back, as many bytes as the links carry where the
           switches between machines add up and multicast (SHARP); inside, by NVLS, straight to the GPU whose part it is
           ("direct"), or along the chains. Trunks carry what such an exchange puts on them, more than SHARP would.
ceilings   of what channels carry by a protocol (:mod:`ddlsim.collectives.nccl_tuner`) make messages use links longer
           than their bytes on the wire need.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.cluster.details import route_overhead
from ddlsim.cluster.rings import channels, members
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
#: chunks that a connection's buffer holds (``NCCL_STEPS``)
STEPS = 8
#: bytes of data that a tree's chunk has by LL (half of a step) and LL128; by Simple a step of the plugin's buffer
TREE_CHUNK = {"LL": 32.0 * 2**10, "LL128": 576e3}
#: channels that each ring or tree of the search becomes (``connect.cc``); the tuner's constants are of both together
COPIES = 2.0
#: channels that pull from switches (``nvls.cc``, of Hopper's generation)
NVLS_CHANNELS = 16
#: the time that slices hide counts in parts of a ring's longest latency, so that sizes share schedules
PARTS = 64
MOST_CHUNKS = 1024


class Choice(NamedTuple):
    """What the tuner has chosen: sizes with the same choice run by the same schedule.

    n_chunks  that follow each other in a tree, or between machines
    hidden    how many `PARTS` of a ring's longest latency its slices hide
    plateau   by what the latency of rings over several machines is multiplied for what NCCL calls so
    fill      s for which a stage copies its first chunk before the next one has it
    message   bytes of a tree's chunk
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
    """Where and how a collective runs; ranks are places among ``nodes``.

    choice          the tuner's
    rings, chains   see :class:`ddlsim.cluster.rings.Channels`
    nodes           (n_ranks,) of the `cluster`
    site            what the tuner knows of them
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
        """Bytes on the wire per byte of the buffer; see :meth:`inside`, too."""
        return WIRE[self.choice.protocol]

    @property
    def handled(self) -> float:
        """Bytes that multiprocessors handle per byte on the wire, more than 1 where channels carry less than links."""
        algorithm, site = self.choice.algorithm, self.site
        if algorithm in SIMPLE_ONLY:
            # bytes/s of the buffer that links would carry: NVLink's share, and a part of it up and down each interface
            n_halves = 2.0 if algorithm == "nvls_tree" and site.n_nodes > 2 else 1.0
            rate = min(site.in_switches() if site.nvls else site.inside, site.outside / n_halves)
            return max(1.0, rate * (2.0 * (site.n_ranks - 1) / site.n_ranks) / site.ceiling(algorithm, "Simple"))
        handled = 1.0
        if self.choice.protocol != "LL" or site.n_nodes == 1:
            handled = max(handled, site.bus / site.ceiling(algorithm, self.choice.protocol) / self.wire)
        return handled * nvlink_excess(self.cluster, self.nodes) if site.n_nodes == 1 else handled

    def handled_between(self, src: Ints, dst: Ints) -> Floats | None:
        """Return what messages count in addition, (m,): between machines, LL passes through memory of the CPU, and
        small messages keep the proxy thread of a GPU busy longer than the wire; inside, NVLink carries what NCCL
        counts, where interfaces carry more than that."""
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
    def inside(self) -> tuple[float, float]:
        """Bytes on NVLinks per byte of messages inside a machine that are summed up or spread by switches, and how many
        multiprocessors and switches handle for each of them."""
        n = self.site.n_local
        excess = nvlink_excess(self.cluster, self.nodes)
        if self.choice.algorithm.startswith("collnet"):
            return 1.0, excess
        return (1.0 + 1.0 / n) / (2.0 * (n - 1.0) / n), excess / NVLS_SHARE[self.site.generation]

    @property
    def start(self) -> float:
        """Seconds until a rank's first message is on its way."""
        return BASE[self.choice.algorithm][PROTOCOLS.index(self.choice.protocol)]

    @property
    def first_inside(self) -> float:
        """Seconds of the first message inside a machine that is exchanged by switches.

        NVLS copies chunks to a buffer, then switches add them up, then they are copied from it: the first one has two
        more stages behind it (``all_reduce.h``: scatter, reduce, gather).
        """
        hop = self.site.hop(self.choice.algorithm, "Simple")[0] + 2.0 * self.choice.fill
        return hop + (self.site.n_local - 1.0) * ARITY_HOP * (self.choice.algorithm == "collnet_direct")

    def latency(self, src: Ints, dst: Ints, first: bool = False) -> Floats:
        """Return the seconds until messages between ranks flow, (m,); nothing hides those of the first."""
        choice = self.choice
        route = routes_latency(self.cluster, self.nodes[src], self.nodes[dst])
        host = self.cluster.host_of[self.nodes]
        inside = (host[src] == host[dst]) & (host[src] >= 0)
        hop = np.where(inside, *self.site.hop(choice.algorithm, choice.protocol))
        hidden = 0.0 if first else float(route.max(initial=0.0)) * choice.hidden / PARTS
        # by Simple a channel hands on full chunks; by LL128 threads read data as they come, but proxies wait for chunks
        copied = choice.fill * (choice.algorithm == "tree")
        handed_on = max(copied - choice.message / self.site.inside, 0.0) * (choice.protocol == "Simple")
        return np.maximum(hop * choice.plateau, route - hidden) + np.where(inside, handed_on, copied)


@functools.lru_cache(maxsize=4096)
def choose(
    cluster: Cluster, nodes: Nodes, nbytes: float, kind: str, algorithm: str | None = None, protocol: str | None = None
) -> Choice:
    """Return what NCCL's tuner chooses for `nbytes` per rank among the workers at ``nodes``, if it is free to."""
    place = site(cluster, nodes)
    time = least(place, kind, nbytes, algorithm, protocol, cluster.name)
    ways, n = channels(cluster, nodes), len(nodes)
    n_machines, n_channels = len(ways.chains[0]), len(ways.rings)
    if time.algorithm in SIMPLE_ONLY:
        n_chunks, step = _chunks(time.algorithm, place, nbytes, n_channels)
        fill = _stepped(min(step, nbytes)) / place.in_switches() if time.algorithm.startswith("nvls") else 0.0
        return Choice(time.algorithm, time.protocol, n_chunks, fill=fill)
    if time.algorithm == "tree":
        part = nbytes / (n_channels * min(n_machines, 2))
        chunk = _tree_chunk(time.protocol, place, part, n_machines, n / n_machines)
        n_chunks = min(max(math.ceil(part / chunk), 1), MOST_CHUNKS)
        counts = time.protocol == "Simple" or (time.protocol == "LL128" and n_machines > 1)
        message = _stepped(part / n_chunks) if counts or place.plugin.message_time else 0.0  # or sizes share schedules
        return Choice("tree", time.protocol, n_chunks, fill=message / _copying(time.protocol, place), message=message)
    hidden = 0
    if time.protocol == "Simple":
        at = np.array(nodes, dtype=np.int64)
        longest = float(routes_latency(cluster, at, np.roll(at, -1)).max())
        slice_time = nbytes / (SLICES * n * bus_bandwidth(cluster, n, nodes)[0])
        hidden = PARTS if slice_time >= longest else int(PARTS * slice_time / longest)
        hop = HOP["ring", "network" if n_machines > 1 else "nvlink"][PROTOCOLS.index("Simple")]
        hidden = hidden if longest > hop else 0  # a hop takes longer than the wire anyway
    return Choice("ring", time.protocol, hidden=hidden, plateau=place.plateau(kind, time.protocol, nbytes))


def _stepped(nbytes: float) -> float:
    """Return a size in steps of a sixteenth of an octave, so that sizes share schedules."""
    return 2.0 ** (round(16.0 * math.log2(nbytes)) / 16.0) if nbytes > 1.0 else nbytes


def _copying(protocol: str, place: Site) -> float:
    """Return the bytes/s at which one channel of a tree copies a chunk from one GPU to the next.

    That of LL is in its ceilings between machines. (NCCL 2.8's tuner says what its latency by Simple is: a chunk of
    256 kB at 12 GB/s; ``tuning.cc``.)
    """
    table = {"LL128": TREE_LL128_CHANNEL, "Simple": TREE_CHANNEL}.get(protocol)
    return math.inf if table is None else table[place.generation][place.n_nodes > 2] / COPIES


def _chunks(algorithm: str, place: Site, nbytes: float, n_channels: int) -> tuple[int, float]:
    """Return how many chunks follow each other between machines, and the bytes of all that are handled at a time
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
    """Return the bytes of a chunk of a tree's `part`: of LL128 fewer where few would follow each other (``enqueue.cc``,
    ``calcCollChunking``)."""
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
    """Return how NCCL runs a collective over `nbytes` per rank among the workers at ``nodes``."""
    ways, choice = channels(cluster, nodes), choose(cluster, nodes, nbytes, kind, algorithm, protocol)
    return Way(choice, ways.rings, ways.chains, cluster, np.array(nodes), site(cluster, nodes))


def several_ways(cluster: Cluster, nodes: Nodes) -> bool:
    """Return whether machines have several devices and several ways between them: NVLinks, NVSwitches, interfaces."""
    at = np.array(nodes, dtype=np.int64)
    n_local = np.unique(cluster.host_of[at], return_counts=True)[1]
    if n_local.max() == 1:
        return False
    return len(channels(cluster, nodes).rings) > 1 or (n_local.min() > 1 and behind_nvswitches(cluster, at))


def routes_latency(cluster: Cluster, src: Ints, dst: Ints) -> Floats:
    """Return the latency (s) of the links between nodes, and of the threads at both ends, (m,)."""
    routes = cluster.routes(src, dst)
    latency = np.bincount(routes.of, cluster.link_latency[routes.links], len(src))
    return latency + route_overhead(cluster.details, routes)
