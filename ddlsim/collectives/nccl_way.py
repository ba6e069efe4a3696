"""What NCCL runs for a collective: rings or double binary trees over all channels, by one of its protocols, as its
tuner chooses by size.

The channels are searched in the links (:mod:`ddlsim.cluster.rings`), algorithm and protocol chosen as by
:mod:`ddlsim.collectives.nccl`. Then (https://github.com/NVIDIA/nccl, version 2.19, said here in our own words):

protocols  LL sends 8 bytes of data in 16 (``prims_ll.h``), LL128 120 in 128 (``prims_ll128.h``), Simple the data alone.
           A message flows after the latency of a hop by its protocol (``tuning.cc``, which counts the wire's), or after
           its route's where that is longer; the first ones, after what it takes to start.
slices     Simple cuts the chunks of rings in two slices (``collectives.h``), of which one flows while the other is on
           its way: so much of a route's latency is hidden, beyond the hop's own, as a slice needs to flow.
NVLink     carries at most what NCCL counts for it: where links inside a machine are faster, messages count as larger.
NVLS       every GPU sends each other one its part of the buffer, and then its part of the sum, as many bytes as the
           links carry where switches add up and multicast.
trees      a chain inside each machine, which ends at the device at its channel's interface, and two binary trees
           between these, in one of which a machine is inner (``trees.cc``, ``connect.cc``). Each carries half of the
           channel's part, in chunks that follow each other; as a connection holds eight, only the first waits for the
           latency.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.cluster.rings import channels
from ddlsim.collectives.nccl import (
    BASE,
    HOP,
    NVLS_SHARE,
    PLATEAU,
    PLATEAU_FACTOR,
    PROTOCOLS,
    adds_up_in_switches,
    bus_bandwidth,
    nccl_time,
    nvlink_excess,
)
from ddlsim.collectives.schedule import Floats, Ints

#: bytes on the wire per byte of data
WIRE = {"LL": 16 / 8, "LL128": 128 / 120, "Simple": 1.0}
SLICES = 2
#: bytes of data that a tree's chunk has: an eighth of a connection's buffer (``NCCL_STEPS``), of LL half of that
TREE_CHUNK = {"LL": 32.0 * 2**10, "LL128": 576e3, "Simple": 512.0 * 2**10}
#: the time that slices hide counts in parts of a ring's longest latency, so that sizes share schedules
PARTS = 64
MOST_CHUNKS = 1024


class Choice(NamedTuple):
    """What the tuner has chosen: sizes with the same choice run by the same schedule.

    n_chunks  that follow each other in a tree
    hidden    how many `PARTS` of a ring's longest latency its slices hide
    plateau   whether rings over several machines suffer from what NCCL calls so
    """

    algorithm: str
    protocol: str
    n_chunks: int = 1
    hidden: int = 0
    plateau: bool = False


@dataclass(frozen=True, eq=False)
class Way:
    """Where and how a collective runs; ranks are places among ``nodes``.

    choice          the tuner's
    rings, chains   see :class:`ddlsim.cluster.rings.Channels`
    nodes           (n_ranks,) of the `cluster`
    hardware        what joins GPUs of a machine, "nvlink" or "pcie"
    """

    choice: Choice
    rings: tuple[Ints, ...]
    chains: tuple[tuple[Ints, ...], ...]
    cluster: Cluster
    nodes: Ints
    hardware: str

    @property
    def wire(self) -> float:
        """Bytes that messages carry per byte of the buffer."""
        n = len(self.nodes)
        wire = WIRE[self.choice.protocol]
        if len(self.chains[0]) == 1:
            wire *= nvlink_excess(self.cluster, self.nodes)
        if self.choice.algorithm == "nvls":  # of messages that are all 2 (n - 1) / n of a buffer
            wire *= (1.0 + 1.0 / n) / (2.0 * (n - 1.0) / n) / NVLS_SHARE
        return wire

    @property
    def start(self) -> float:
        """Seconds until a rank's first message is on its way."""
        return BASE[self.choice.algorithm][PROTOCOLS.index(self.choice.protocol)]

    def latency(self, src: Ints, dst: Ints, first: bool = False) -> Floats:
        """Return the seconds until a message between ranks flows, (m,), behind which nothing hides if it is the first.
        """
        choice, protocol = self.choice, PROTOCOLS.index(self.choice.protocol)
        route = _routes_latency(self.cluster, self.nodes[src], self.nodes[dst])
        host = self.cluster.host_of[self.nodes]
        inside = (host[src] == host[dst]) & (host[src] >= 0)
        factor = PLATEAU_FACTOR if choice.plateau else 1.0
        hop = np.where(
            inside, HOP[choice.algorithm, self.hardware][protocol], HOP[choice.algorithm, "network"][protocol]
        )
        hidden = 0.0 if first else float(route.max(initial=0.0)) * choice.hidden / PARTS
        return np.maximum(hop * factor, route - hidden)


@functools.lru_cache(maxsize=4096)
def choose(cluster: Cluster, nodes: tuple[int, ...], nbytes: float, kind: str) -> Choice:
    """Return what NCCL's tuner chooses for `nbytes` per rank among the workers at ``nodes``."""
    time = nccl_time(cluster, nbytes, kind=kind, nodes=nodes)
    ways, n = channels(cluster, nodes), len(nodes)
    n_machines, n_channels = len(ways.chains[0]), len(ways.rings)
    if time.algorithm == "nvls":
        return Choice("nvls", time.protocol)
    if time.algorithm == "tree":
        part = nbytes / (n_channels * min(n_machines, 2))
        chunk = _tree_chunk(time.protocol, part, n_machines, n / n_machines)
        return Choice("tree", time.protocol, min(max(math.ceil(part / chunk), 1), MOST_CHUNKS))
    plateau = kind == "all_reduce" and time.protocol == "Simple" and n_machines > 1 and nbytes >= PLATEAU * n
    hidden = 0
    if time.protocol == "Simple":
        at = np.array(nodes, dtype=np.int64)
        longest = float(_routes_latency(cluster, at, np.roll(at, -1)).max())
        slice_time = nbytes / (SLICES * n * bus_bandwidth(cluster, n, nodes)[0])
        hidden = PARTS if slice_time >= longest else int(PARTS * slice_time / longest)
        hop = HOP["ring", "network" if n_machines > 1 else "nvlink"][PROTOCOLS.index("Simple")]
        hidden = hidden if longest > hop else 0  # a hop takes longer than the wire anyway
    return Choice("ring", time.protocol, hidden=hidden, plateau=plateau)


def _tree_chunk(protocol: str, part: float, n_machines: int, n_local: float) -> float:
    """Return the bytes of a chunk of a tree's `part`: of LL128 fewer where few would follow each other (``enqueue.cc``,
    ``calcCollChunking``)."""
    chunk = TREE_CHUNK[protocol]
    if protocol == "LL128":
        steps = (1 + int(math.log2(n_machines)) + 0.1 * n_local) / n_local
        for n_wanted, least in ((64 * steps, 128 * 2**10), (16 * steps, 32 * 2**10)):
            while part // chunk < n_wanted and chunk > least:
                chunk /= 2
    return chunk


def way(cluster: Cluster, nodes: tuple[int, ...], nbytes: float, kind: str) -> Way:
    """Return how NCCL runs a collective over `nbytes` per rank among the workers at ``nodes``."""
    ways = channels(cluster, nodes)
    _, hardware = bus_bandwidth(cluster, len(nodes), nodes)
    return Way(choose(cluster, nodes, nbytes, kind), ways.rings, ways.chains, cluster, np.array(nodes), hardware)


def several_ways(cluster: Cluster, nodes: tuple[int, ...]) -> bool:
    """Return whether machines have several devices and several ways between them: NVLinks, interfaces, or switches that
    add up."""
    return len(nodes) > 1 and (len(channels(cluster, nodes).rings) > 1 or adds_up_in_switches(cluster, nodes))


def _routes_latency(cluster: Cluster, src: Ints, dst: Ints) -> Floats:
    """Return the summed latency (s) of the links between nodes, (m,)."""
    routes = cluster.routes(src, dst)
    return np.add.reduceat(np.append(cluster.link_latency[routes.links], 0.0), routes.offsets[:-1]) * (
        np.diff(routes.offsets) > 0
    )
