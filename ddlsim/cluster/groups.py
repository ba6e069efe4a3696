"""Groups of workers: those of a machine or a rack, and the levels of a network.

Levels are groups of nearby workers, groups of these groups, and so on. If a topology has a `grid`, each dimension is a
level, the fastest one innermost. Otherwise levels are computed from the links. Machines are the first level. Then every
group joins the groups at the other end of its fastest links (among equal ones, those with the lowest latency), directly
or through switches, until all workers are one group. In this way, machines form racks, and racks form pods.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ddlsim.cluster.cluster import Cluster, Ints
from ddlsim.errors import ConfigError


def groups_of(labels: Ints) -> tuple[Ints, ...]:
    """Return the indices of each label, ordered by first occurrence."""
    _, first, which = np.unique(labels, return_index=True, return_inverse=True)
    parts = np.split(np.argsort(which, kind="stable"), np.cumsum(np.bincount(which))[:-1])
    return tuple(parts[i] for i in np.argsort(first).tolist())


def members(cluster: Cluster, at: Ints) -> list[Ints]:
    """Return the indices in ``at`` of each machine's nodes; machines are ordered by their first node."""
    host = cluster.host_of[at]
    return list(groups_of(np.where(host >= 0, host, len(cluster.host_names) + np.arange(len(at)))))


def workers_by_machine(cluster: Cluster) -> list[list[int]]:
    """Return the workers' nodes on each machine; machines are ordered by their first worker."""
    return [cluster.workers[group].tolist() for group in groups_of(cluster.host_of[cluster.workers])]


def machines_of(cluster: Cluster, nodes: Sequence[int]) -> list[int]:
    """Return the machine of each worker, numbered from 0 in order of appearance."""
    number: dict[int, int] = {}
    return [number.setdefault(memory, len(number)) for memory in cluster.memory_nodes[list(nodes)].tolist()]


def rack_of_hosts(cluster: Cluster, machines_per_rack: int | None = None) -> dict[int, int]:
    """Return the rack of each machine that is in one, by machine number.

    A rack is the switch at the machine's first link (with several rails, the first one) or, with `machines_per_rack`, a
    group of consecutive machines.
    """
    if machines_per_rack is not None:
        hosts = np.setdiff1d(np.arange(len(cluster.host_names)), cluster.host_of[cluster.storages]).tolist()
        return {host: place // machines_per_rack for place, host in enumerate(hosts)}
    up = np.flatnonzero((cluster.host_of[cluster.link_src] >= 0) & cluster.is_fabric_switch[cluster.link_dst])
    first: dict[int, int] = {}
    for host, switch in zip(cluster.host_of[cluster.link_src[up]].tolist(), cluster.link_dst[up].tolist(), strict=True):
        first.setdefault(host, switch)
    return first


def ranks_of_parts(
    cluster: Cluster, nodes: Sequence[int], per: str, machines_per_rack: int | None = None
) -> list[list[int]]:
    """Return the workers on each "device", "host" or "rack" of a run; worker i is at ``nodes[i]``.

    Raises ConfigError for machines whose rack is unknown.
    """
    part = list(range(len(nodes))) if per == "device" else machines_of(cluster, nodes)
    if per == "rack":
        rack_of = rack_of_hosts(cluster, machines_per_rack)
        hosts = cluster.host_of[list(nodes)].tolist()
        for host in hosts:
            if host not in rack_of:
                raise ConfigError(
                    f"failures: per = 'rack': racks cannot be inferred, because machine {cluster.host_names[host]!r} "
                    f"of cluster {cluster.name!r} is not connected to a switch; set the rack size, for example "
                    "machines_per_rack = 16"
                )
        part = [rack_of[host] for host in hosts]
    return [group.tolist() for group in groups_of(np.array(part))]


# ---------------------------------------------------------------- levels


class Levels(NamedTuple):
    """Groups at every level except the outermost, which is one group of all workers.

    groups      members of every group, from the innermost level outwards: indices of workers on the first level,
                indices of groups of the previous level on further ones
    algorithms  the algorithm that suits the links of each level, including the outermost
    """

    groups: tuple[tuple[Ints, ...], ...]
    algorithms: tuple[str, ...] = ()

    @property
    def are_several(self) -> bool:
        """Whether there is more than the outermost level."""
        return len(self.groups) > 1 or 1 < len(self.groups[0]) < sum(map(len, self.groups[0]))

    @property
    def places(self) -> Ints | None:
        """Indices of the workers, (outermost groups, ..., members of the innermost), up to the first level with groups
        of unequal sizes; None if this is the innermost."""
        places = None
        for level in self.groups:
            if len(set(map(len, level))) > 1:
                break
            places = np.stack(level) if places is None else places[np.stack(level)]
        return places


@functools.lru_cache(maxsize=1024)
def levels(cluster: Cluster, nodes: tuple[int, ...]) -> Levels:
    """Return the levels among workers at ``nodes``, in an order that suits the network.

    If there is only one level, the groups are machines, or all workers if they are in one dimension of a grid.
    """
    at = np.array(nodes, dtype=np.int64)
    machines = tuple(members(cluster, at))
    labels, n_groups = [], len(at)
    for label in (partition[at] for partition in _partitions(cluster)):
        if 1 < (n := len(np.unique(label))) < n_groups:
            labels.append(label)
            n_groups = n
    if not labels:
        return Levels(((np.arange(len(at)),) if cluster.grid else machines,), ("ring", "ring"))
    of_machines = n_groups == len(machines)  # otherwise corresponding members of neighbouring groups must be near
    first = np.arange(len(at)) if of_machines else np.argsort(_partitions(cluster)[0][at], kind="stable")
    groups: list[tuple[Ints, ...]] = []
    algorithms: list[str] = []
    for label in labels:
        parts = groups_of(label[first])
        groups.append(parts if groups else tuple(first[part] for part in parts))
        algorithms.append(_algorithm(cluster, at[first[parts[0]]]))
        first = first[[part[0] for part in parts]]
    algorithms.append(_algorithm(cluster, at[first]))
    return Levels(tuple(groups), tuple(algorithms if len(machines) == len(at) else ["ring"] * len(algorithms)))


def axes(cluster: Cluster, nodes: tuple[int, ...]) -> Ints | None:
    """Return the indices of workers at ``nodes`` by position on tori, (slices, sizes of the axes longer than 1); None
    unless they fill the same box in each slice of a cluster with dimension-order routes."""
    if cluster.routing != "dimension-order":
        return None
    shape = cluster.grid if cluster.is_fabric_switch.any() else (1, *cluster.grid)
    sides = [np.unique(side, return_inverse=True)[1] for side in np.unravel_index(np.array(nodes), shape)]
    sizes = [int(side.max()) + 1 for side in sides]
    if math.prod(sizes) != len(nodes):
        return None
    places = np.empty(sizes, dtype=np.int64)
    places[tuple(sides)] = np.arange(len(nodes))
    return places.reshape(sizes[0], *(size for size in sizes[1:] if size > 1))


def innermost(cluster: Cluster, nodes: Sequence[int]) -> list[int]:
    """Return the first node of each worker's innermost group (such as its machine)."""
    first = np.array(nodes, dtype=np.int64)
    for group in levels(cluster, tuple(first.tolist())).groups[0]:
        first[group] = first[group].min()
    return list(map(int, first))


def _algorithm(cluster: Cluster, nodes: Ints) -> str:
    """Return the algorithm that suits the links between nodes, which are direct links, one switch, or anything else."""
    n_hops = set(np.diff(cluster.routes(np.full(len(nodes) - 1, nodes[0]), nodes[1:]).offsets).tolist())
    if n_hops == {1} and len(nodes) > 2:
        return "direct"
    return "halving_doubling" if n_hops == {2} and len(nodes).bit_count() == 1 else "ring"


@functools.lru_cache(maxsize=64)
def _partitions(cluster: Cluster) -> list[Ints]:
    """Return the group label of every node, (n_nodes,), for each level from machines outwards."""
    machine = np.where(cluster.host_of >= 0, cluster.host_of, len(cluster.host_names) + np.arange(cluster.n_nodes))
    homes, first = np.unique(machine[cluster.workers], return_index=True)
    if cluster.grid and math.prod(cluster.grid) == len(homes):
        return [machine, *_dimensions(cluster, machine, homes, cluster.workers[first])]
    partitions = [machine]
    speed = np.stack([cluster.link_latency, -cluster.nominal_capacity[cluster.link_channel]])
    order, rank = np.lexsort(speed), np.zeros(cluster.n_links, dtype=np.int64)
    rank[order[1:]] = np.cumsum((np.diff(speed[:, order]) != 0.0).any(axis=0))
    while True:
        group = partitions[-1]
        a, b = group[cluster.link_src], group[cluster.link_dst]
        leaving = (a != b) & np.isin(a, group[cluster.workers])
        if not leaving.any():
            return partitions
        best = np.full(int(group.max()) + 1, len(rank))
        np.minimum.at(best, a[leaving], rank[leaving])
        leaving &= rank == best[a]
        a, b, label = a[leaving], b[leaving], np.arange(len(best))
        while (label[a] != label[b]).any():
            least = np.minimum(label[a], label[b])
            np.minimum.at(label, label[a], least)
            np.minimum.at(label, label[b], least)
            label = label[label]
        partitions.append(label[group])


def _dimensions(cluster: Cluster, machine: Ints, homes: Ints, at: Ints) -> list[Ints]:
    """Return the groups of machines by level of a grid, fastest dimensions first; ``at``: a worker of each machine."""
    place = np.arange(len(at)).reshape(cluster.grid)
    dims = [dim for dim in reversed(range(place.ndim)) if place.shape[dim] > 1]
    routes = cluster.routes(np.full(len(dims), at[0]), at[[place.strides[dim] // place.itemsize for dim in dims]])
    speed = [cluster.nominal_capacity[cluster.link_channel[routes[i]]].min() for i in range(len(dims))]
    label, partitions = np.full(int(machine.max()) + 1, -1), []
    for i in np.argsort(-np.array(speed), kind="stable").tolist():
        place = np.broadcast_to(place.min(axis=dims[i], keepdims=True), place.shape)
        label[homes] = place.ravel()
        partitions.append(label[machine])
    return partitions
