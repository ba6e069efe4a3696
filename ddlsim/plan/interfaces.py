"""Interfaces of a cluster's devices or machines, and the bytes that must cross them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.plan.plan import Bools, Floats, Ints


class Crossing(NamedTuple):
    """Number of buffers that must leave and enter each of some places, (k,) each, and enter all of them in total."""

    place: Ints
    out: Floats
    into: Floats
    together: float


def least_crossing(kind: str, members: Ints, is_server: Bools, *, added_up: bool = True) -> Crossing:
    """Return lower bounds on the data of a collective that crosses interfaces, in units of its buffer.

    members    (n,) the place of each member, in the group's order
    is_server  (n,) of the members of a push_pull, whose servers come last
    added_up   whether pushes of several places may be summed on their way, as those of a machine's devices are;
               otherwise every place with workers pushes and pulls separately

    Sums (all-reduce, reduce-scatter, reduce, push) can first be computed inside a place, and data that all members need
    (all-reduce, all-gather, broadcast, pull) enters a place once: a sum over k places takes k - 1 receptions, and so
    does a distribution to k places (Patarasuk and Yuan 2009, JPDC 69(2), theorem 1). Data of a single member
    (all-gather, gather, scatter, all-to-all) crosses from its place to the places that need it.
    """
    place, which, count = np.unique(members, return_inverse=True, return_counts=True)
    which, k = which.reshape(-1), len(place)
    none = np.zeros(k)
    if k == 1:
        return Crossing(place, none, none, 0.0)
    every, share = np.ones(k), count / len(members)
    root = (place == members[0]).astype(np.float64)
    if kind == "all_reduce":
        return Crossing(place, every, every, 2.0 * (k - 1))
    if kind == "all_to_all":
        crossing = count * (1.0 - share)
        return Crossing(place, crossing, crossing, float(crossing.sum()))
    one_to_all = {  # data of one place for all others: what leaves and enters places, and enters all together
        "all_gather": (share, 1.0 - share, k - 1.0),
        "broadcast": (root, 1.0 - root, k - 1.0),
        "scatter": (root * (1.0 - share), (1.0 - root) * share, float((root * (1.0 - share)).sum())),
    }
    if kind in one_to_all:
        return Crossing(place, *one_to_all[kind])
    inverse = {"reduce_scatter": "all_gather", "reduce": "broadcast", "gather": "scatter"}
    if kind in inverse:
        into, out, together = one_to_all[inverse[kind]]
        return Crossing(place, out, into, together)
    shard = np.bincount(which[is_server], minlength=k) / is_server.sum()
    works = np.bincount(which[~is_server], minlength=k) > 0
    elsewhere = works.sum() - works  # other places with workers
    answers = elsewhere > 0 if added_up else elsewhere
    crossing = works * (1.0 - shard) + shard * answers  # out: pushes to others and answers to others; into: likewise
    return Crossing(place, crossing, crossing, 2.0 * float((shard * elsewhere).sum()))


class Width(NamedTuple):
    """Total bandwidth of channels, bytes/s, and bytes that their token buckets let through; (n_places,) each."""

    rate: Floats
    burst: Floats


@dataclass(frozen=True, eq=False)
class Interfaces:
    """The channels between places. `out` and `into` contain shared half-duplex channels as well; `both` contains all.

    what   "device" or "machine"
    place  (n_nodes,) place of every node
    """

    what: str
    place: Ints
    out: Width
    into: Width
    both: Width
    cluster: Cluster

    def together(self, places: Ints) -> tuple[float, float]:
        """Return the bandwidth (bytes/s) and the burst of all channels that enter some places."""
        cluster, place = self.cluster, self.place
        enters = np.isin(place[cluster.link_dst], places) & (place[cluster.link_src] != place[cluster.link_dst])
        width = _width(cluster, np.zeros(int(enters.sum()), dtype=np.int64), enters, 1)
        return float(width.rate[0]), float(width.burst[0])

    def name(self, place: int) -> str:
        """Return a description of a place."""
        nodes = np.flatnonzero(self.place == place)
        host = self.cluster.host_of[nodes[0]]
        whole = self.what == "machine" and len(nodes) > 1 and host >= 0
        return f"{self.what} {self.cluster.host_names[host] if whole else self.cluster.node_names[nodes[0]]!r}"


def known_rate(width: Width, place: Ints) -> Floats:
    """Return the bandwidth of places in bytes/s, inf for those without a channel or with a burst."""
    known: Bools = (width.rate[place] > 0.0) & (width.burst[place] == 0.0)
    return np.where(known, width.rate[place], np.inf)


@functools.lru_cache(maxsize=8)
def interfaces(cluster: Cluster) -> tuple[Interfaces, Interfaces]:
    """Return the interfaces of a cluster's devices and of its machines; a node outside a machine counts as one."""
    nodes = np.arange(cluster.n_nodes)
    machines = np.where(cluster.host_of >= 0, cluster.host_of, len(cluster.host_names) + nodes)
    return _interfaces(cluster, nodes, "device"), _interfaces(cluster, machines, "machine")


def _interfaces(cluster: Cluster, place: Ints, what: str) -> Interfaces:
    n = int(place.max(initial=-1)) + 1
    source, target = place[cluster.link_src], place[cluster.link_dst]
    apart = source != target
    ends = np.concatenate([source[apart], target[apart]])
    twice = np.concatenate([np.flatnonzero(apart)] * 2)
    pairs = ((source[apart], apart), (target[apart], apart), (ends, twice))
    out, into, both = (_width(cluster, own, links, n) for own, links in pairs)
    return Interfaces(what, place, out, into, both, cluster)


def _width(cluster: Cluster, place: Ints, links: Bools | Ints, n: int) -> Width:
    """Return the widths of `n` places; link ``links[i]`` belongs to ``place[i]``."""
    pairs = np.unique(np.stack([place, cluster.link_channel[links]]), axis=1)
    rate: Floats = np.bincount(pairs[0], weights=cluster.channel_capacity[pairs[1]], minlength=n).astype(np.float64)
    burst: Floats = np.zeros(n)
    if cluster.details is not None:
        free = np.bincount(cluster.link_channel, weights=cluster.details.burst, minlength=cluster.n_channels)
        burst = np.bincount(pairs[0], weights=free[pairs[1]], minlength=n).astype(np.float64)
    return Width(rate, burst)
