"""Formulas and constants with which NCCL's tuner estimates the time of a collective.

The source is ``src/graph/tuning.cc`` (https://github.com/NVIDIA/nccl, version 2.30). For each algorithm and protocol

    time = latency + nbytes / bandwidth

    ring         latency = base + (n_steps - n_inter) intra + n_inter inter, n_steps = 2 (n_ranks - 1) for all-reduce
                 bandwidth = bus n_ranks / n_steps
    tree         latency = base + 2 ((n_local - 1) intra + log2(n_nodes) inter)
                 bandwidth = 0.92 bus / 2, less for medium sizes
    nvls         latency = 25 us (plus 18 us for switches between nodes that reduce)
                 bandwidth = 0.85 inside / (1 + 1 / n_local), between nodes at most outside n_ranks / n_steps
    nvls_tree    latency = 25 us + 2 log2(n_nodes) 20.9 us
                 bandwidth = that of nvls, at most outside n_ranks / n_steps (twice that for two nodes)
    collnet_direct   latency = 31 us + 2 (3.7 us + (n_local - 1) 0.4 us)
                     bandwidth = bus / 2, on Hopper's generation 0.85 of that
    collnet_chain    latency = 30 us + 2 (n_local - 1) 2.8 us; bandwidth = bus / 2

LL sends a flag with every 4 bytes, LL128 with every 120. LL128 is enabled if NVLinks connect the GPUs and PCIe switches
connect them to their network cards. A channel uses only a few multiprocessors of a GPU, which limits its bandwidth
(`ceiling`). With NVLS, every GPU sends its buffer to the switches once, and then its part of the sum; the tuner itself
counts twice the bus bandwidth of its heads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from ddlsim.arguments import one_of, quantity
from ddlsim.plain import read_toml
from ddlsim.schema import PLAIN
from ddlsim.units import si

PROTOCOLS = ("LL", "LL128", "Simple")
#: algorithms that support only the protocol Simple
SIMPLE_ONLY = ("nvls", "nvls_tree", "collnet_direct", "collnet_chain")
ALGORITHMS = ("ring", "tree", *SIMPLE_ONLY)
Algorithm = Annotated[str, one_of(*ALGORITHMS)]
Protocol = Annotated[str, one_of(*PROTOCOLS)]
#: base latency of each algorithm, and latency per hop over NVLink, PCIe and network, in s; each for LL, LL128, Simple
BASE = {"ring": (6.6e-6, 14.0e-6, 8.4e-6), "tree": (6.8e-6, 14.0e-6, 8.4e-6)}
HOP = {
    ("ring", "nvlink"): (0.6e-6, 1.9e-6, 3.4e-6),
    ("tree", "nvlink"): (0.6e-6, 1.25e-6, 4.0e-6),
    ("ring", "pcie"): (1.0e-6, 2.5e-6, 5.7e-6),
    ("tree", "pcie"): (1.0e-6, 1.9e-6, 4.0e-6),
    ("ring", "network"): (2.7e-6, 4.0e-6, 14.0e-6),
    ("tree", "network"): (5.0e-6, 8.5e-6, 14.0e-6),
}
#: latency per hop of algorithms with a single protocol, in s: inside a machine, in the network
HOP_SIMPLE = {
    "nvls": (25e-6, 18e-6),
    "nvls_tree": (25e-6, 20.9e-6),
    "collnet_direct": (3.7e-6, 31e-6),
    "collnet_chain": (2.8e-6, 30e-6),
}
#: latency in s per additional GPU of a machine that sends to the same one (CollNet)
ARITY_HOP = 0.4e-6
#: minimum time of a ring step between nodes in s, because a CPU thread posts it; twice that on AMD CPUs
NET_OVERHEAD, SIMPLE_POSTS = 1e-6, 3.0
#: share of the NVLinks' bandwidth used by switches that reduce, and by CollNet on GPUs of these generations
NVLS_SHARE = {"hopper": 0.85, "blackwell": 0.74}
DIRECT_SHARE = 0.85
#: bandwidth of LL in one machine in bytes/s, by generation of the GPU
LL_BANDWIDTH = {"volta": 39.0e9, "ampere": 87.7e9, "hopper": 141.0e9, "blackwell": 282.0e9}
#: bandwidth of LL over 2 and over more nodes in bytes/s, by vendor of the CPU
LL_BETWEEN = {"intel": (39.0e9, 20.4e9), "amd": (22.5e9, 19.0e9)}
#: bandwidth per channel over 2 and over more nodes in bytes/s: LL128 in rings, LL128 in trees, trees, NVLS trees
RING_LL128_CHANNEL = dict(zip(LL_BANDWIDTH, ((20e9, 20e9), (20e9, 20e9), (36.7e9, 36.7e9), (40e9, 40e9)), strict=True))
TREE_LL128_CHANNEL = dict(zip(LL_BANDWIDTH, ((20e9, 20e9), (20e9, 20e9), (36.7e9, 29e9), (31.67e9, 20e9)), strict=True))
TREE_CHANNEL = dict(zip(LL_BANDWIDTH, ((18.5e9, 10e9), (23.6e9, 17.8e9), (41.4e9, 36e9), (42.8e9, 24e9)), strict=True))
NVLS_TREE_CHANNEL = {"hopper": (57.7e9, 45.5e9), "blackwell": (96e9, 80e9)}
#: bandwidth of a tree with LL128 relative to Simple, and the factor by which it is lower with LL
LL128_SHARE, LL_TREE = 120.0 / 128.0, 3.8
#: from this size per rank on, Simple rings over several nodes cannot hide the network's latency ("plateau effect")
PLATEAU, PLATEAU_FACTOR, PLATEAU_VOLTA = 4096.0, 1.4, 1.9
#: share of a tree's bandwidth that is reached, for sizes from 64 bytes up, by powers of two
TREE_SHARE = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9),
    "Simple": (0.9,) * 7 + (0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
}
#: number of laps of a ring: steps per rank, and steps between nodes per node
LAPS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}


@dataclass(frozen=True)
class Plugin:
    """Changes that the plugin of a network makes to NCCL's settings.

    ``plugins.toml`` in this folder explains the fields and lists the values with their sources.

    areas   by number of ranks: choices for all-reduces as (largest size in bytes, algorithm, protocol)
    """

    buffer_size: Annotated[float, quantity("bytes", si=True)] = 4.0 * 2**20
    nvls_chunk_size: Annotated[float, quantity("bytes", si=True)] = 0.0
    algorithms: tuple[str, ...] = ALGORITHMS
    protocols: tuple[str, ...] = PROTOCOLS
    reports_latency: bool = False
    message_time: Annotated[float, quantity("time", si=True)] = 0.0
    areas: Mapping[int, tuple[tuple[float, str, str], ...]] = field(default_factory=dict)


@functools.cache
def plugins() -> dict[str, Plugin]:
    """Return NCCL's network plugins by transport."""
    tables: dict[str, Any] = read_toml(Path(__file__).with_name("plugins.toml"))
    by_transport = {}
    for name, table in tables.items():
        values = {key: value for key, value in table.items() if key not in ("sources", "all_reduce")}
        areas = {
            area["ranks"]: tuple((si(most, "bytes") if most else math.inf, a, p) for most, a, p in area["choices"])
            for area in table.get("all_reduce", ())
        }
        by_transport[name] = replace(PLAIN.build(Plugin, values, name), areas=areas)
    return by_transport


@dataclass(frozen=True)
class Site:
    """The tuner's inputs for a group of ranks; bandwidths are in bytes/s.

    inside, outside   bandwidth of a GPU to others in its machine, and of a machine to the others; inf: no such links
    n_channels        number of concurrent rings or trees
    hardware          interconnect between GPUs of a machine, "nvlink" or "pcie"
    generation        generation of the GPUs: "volta" (and before), "ampere", "hopper", "blackwell"
    cpu               "amd" or "intel"
    ll128             whether this protocol is enabled
    nvls, sharp       whether NVSwitches, and the switches between machines, can reduce
    net_latency       latency in s that the network's plugin reports. NCCL adds it to a hop, and twice for Simple. The
                      plugins of InfiniBand and sockets report none, that of EFA does (``aws-ofi-nccl``)
    plugin            plugin of the network between the machines
    """

    n_ranks: int
    n_nodes: int
    inside: float
    outside: float
    n_channels: int = 1
    hardware: str = "pcie"
    generation: str = "ampere"
    cpu: str = "intel"
    ll128: bool = True
    nvls: bool = False
    sharp: bool = False
    net_latency: float = 0.0
    plugin: Plugin = Plugin()

    @property
    def bus(self) -> float:
        """Bandwidth of rings, in bytes/s."""
        return min(self.inside, self.outside)

    @property
    def n_local(self) -> float:
        """Number of ranks per machine."""
        return self.n_ranks / self.n_nodes

    def hop(self, algorithm: str, protocol: str) -> tuple[float, float]:
        """Return the latency of a hop inside a machine and of one between machines, in s."""
        reported = self.net_latency * (2.0 if protocol == "Simple" else 1.0)
        if algorithm in HOP_SIMPLE:
            return HOP_SIMPLE[algorithm][0], HOP_SIMPLE[algorithm][1] + reported
        p = PROTOCOLS.index(protocol)
        inside = HOP[algorithm, self.hardware][p]
        if algorithm == "ring" and self.n_nodes > 1:
            posts = NET_OVERHEAD * (2.0 if self.cpu == "amd" else 1.0) * (SIMPLE_POSTS if protocol == "Simple" else 1.0)
            inside = max(inside, posts)
        between = "tree" if self.n_local == 1 else algorithm  # with one GPU per machine, no other hop hides it
        return inside, HOP[between, "network"][p] + reported

    def plugin_choice(self, kind: str, size: float) -> tuple[str, str] | None:
        """Return the algorithm and protocol that the network plugin's tuner chooses; None: NCCL's tuner decides."""
        areas = self.plugin.areas
        if kind != "all_reduce" or not areas or (self.generation, self.n_local) != ("hopper", 8):
            return None
        chosen = areas[max(n for n in areas if n <= self.n_ranks)]
        _, algorithm, protocol = next(area for area in chosen if size <= area[0])
        return (algorithm, protocol) if algorithm and protocol in self.protocols(algorithm, kind) else None

    def plateau(self, kind: str, protocol: str, size: float) -> float:
        """Return the factor of a ring's latency due to the plateau effect."""
        if protocol != "Simple" or self.n_nodes == 1 or kind != "all_reduce" or size < PLATEAU * self.n_ranks:
            return 1.0
        return PLATEAU_VOLTA if self.generation == "volta" else PLATEAU_FACTOR

    def ceiling(self, algorithm: str, protocol: str) -> float:
        """Return the upper bound of the channels' total bus bandwidth in bytes/s, regardless of the links."""
        most = math.inf
        if protocol == "LL":
            most = LL_BANDWIDTH[self.generation] if self.n_nodes == 1 else LL_BETWEEN[self.cpu][self.n_nodes > 2]
        if self.n_nodes == 1:
            return most  # in a single machine, NCCL creates enough channels to saturate the links
        several, n = self.n_nodes > 2, self.n_channels
        if algorithm == "ring":
            return n * RING_LL128_CHANNEL[self.generation][several] if protocol == "LL128" else most
        if algorithm == "tree":
            tree = n * TREE_CHANNEL[self.generation][several]
            if protocol == "LL128":
                return min(tree * LL128_SHARE, n * TREE_LL128_CHANNEL[self.generation][several])
            return min(tree / LL_TREE, most) if protocol == "LL" else tree
        return self.n_local * NVLS_TREE_CHANNEL[self.generation][several] if algorithm == "nvls_tree" else math.inf

    def in_switches(self) -> float:
        """Return the bandwidth of an all-reduce in the switches of a machine, in bytes/s."""
        return NVLS_SHARE[self.generation] * self.inside / (1.0 + 1.0 / self.n_local)

    def protocols(self, algorithm: str, kind: str) -> tuple[str, ...]:
        """Return the protocols available for an algorithm; none if it cannot run."""
        if algorithm not in self.plugin.algorithms or (algorithm != "ring" and kind != "all_reduce"):
            return ()
        if algorithm in ("ring", "tree"):
            return tuple(p for p in self.plugin.protocols if self.ll128 or p != "LL128")
        several = self.n_nodes > 1 and self.n_local > 1
        runs = {
            "nvls": self.nvls and (self.n_nodes == 1 or self.sharp),
            "nvls_tree": self.nvls and several,
            "collnet_direct": self.sharp and several and self.hardware == "nvlink",
            "collnet_chain": self.sharp and self.n_nodes > 1,
        }
        return ("Simple",) if runs[algorithm] else ()

    def seconds(self, kind: str, algorithm: str, protocol: str, size: float) -> float:
        """Return the tuner's estimate for `size` bytes per rank, in s."""
        base = BASE[algorithm][PROTOCOLS.index(protocol)] if algorithm in BASE else 0.0
        intra, inter = self.hop(algorithm, protocol)
        n, n_nodes, levels = self.n_ranks, self.n_nodes, math.floor(math.log2(self.n_nodes))
        local = math.floor(self.n_local) - 1
        laps = LAPS[kind]
        n_steps, n_inter = laps * (n - 1), laps * (n_nodes - 1)
        most = self.ceiling(algorithm, protocol)
        if algorithm == "ring":
            latency = base + ((n_steps - n_inter) * intra + n_inter * inter)
            latency *= self.plateau(kind, protocol, size)
            share = {"LL": 0.5, "LL128": 0.7 if self.n_local < 2 else 0.92, "Simple": 1.0}[protocol]
            return latency + size / (min(share * self.bus, most) * n / n_steps)
        if algorithm == "tree":
            latency = base + 2.0 * (local * intra + levels * inter)
            rate = 0.92 * self.bus
            rate *= {"LL": 1.0 / LL_TREE, "LL128": 7.0 / 9.0 if n_nodes == 1 else LL128_SHARE, "Simple": 1.0}[protocol]
            rate = min(rate, most)
            step = max(math.floor(math.log2(size / 64.0)), 0) if size >= 1.0 else 0
            shares = TREE_SHARE[protocol]
            return latency + size / (0.5 * rate * (shares[step] if step < len(shares) else 1.0))
        if algorithm == "nvls":
            rate = self.in_switches()
            if n_nodes == 1:
                return intra + size / rate
            return intra + inter + size / min(rate, self.outside * n / n_steps)
        if algorithm == "nvls_tree":
            outside = self.outside * (2.0 if n_nodes == 2 else 1.0)
            rate = min(self.in_switches(), min(outside, most) * n / n_steps)
            return intra + 2.0 * levels * inter + size / rate
        if algorithm == "collnet_direct":
            share = DIRECT_SHARE if self.generation in NVLS_SHARE else 1.0
            return inter + 2.0 * (intra + local * ARITY_HOP) + size / (0.5 * share * self.bus)
        return inter + 2.0 * local * intra + size / (0.5 * self.bus)
