"""Mapping from devices to machines and racks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddlsim.cluster.cluster import Cluster
from ddlsim.cluster.rings import groups_of
from ddlsim.errors import ConfigError


def host_nodes(cluster: Cluster) -> dict[int, int]:
    """Return the host node of each machine, by machine number."""
    return {int(cluster.host_of[node]): int(node) for node in cluster.servers}


def memory_nodes(cluster: Cluster, nodes: Sequence[int]) -> list[int]:
    """Return the host node of each device's machine, or the device itself if there is none."""
    host_node = host_nodes(cluster)
    return [host_node.get(int(cluster.host_of[node]), node) for node in nodes]


def workers_by_machine(cluster: Cluster) -> list[list[int]]:
    """Return the workers' nodes on each machine; machines are ordered by their first worker."""
    return [cluster.workers[group].tolist() for group in groups_of(cluster.host_of[cluster.workers])]


def machines_of(cluster: Cluster, nodes: Sequence[int]) -> list[int]:
    """Return the machine of each worker, numbered from 0 in order of appearance."""
    number: dict[int, int] = {}
    return [number.setdefault(memory, len(number)) for memory in memory_nodes(cluster, nodes)]


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
