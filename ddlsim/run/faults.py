"""Faults of an experiment, on its cluster and workers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.life import RandomFaults
from ddlsim.life.faults import Fault, LinkFault, Stop
from ddlsim.network import Network
from ddlsim.network.devices import STANDSTILL
from ddlsim.run.drawn_faults import parts_of
from ddlsim.units import si
from ddlsim.workload.jitter import SlowDown


def check_faults(faults: Sequence[Fault | RandomFaults], cluster: Cluster, nodes: Sequence[int]) -> None:
    """Raise ConfigError for faults of workers and links that are not there."""
    n_workers = len(nodes)
    for fault in faults:
        if isinstance(fault, RandomFaults):
            parts_of(fault, cluster, nodes)
        elif isinstance(fault, LinkFault):
            _channels(fault, cluster)
        elif max(fault.ranks) >= n_workers:
            raise ConfigError(f"faults: rank {max(fault.ranks)} of {fault} is not among the {n_workers} workers")


def standstills(faults: Sequence[object]) -> tuple[SlowDown, ...]:
    """Return what the faults do to computing."""
    stops = [fault for fault in faults if isinstance(fault, Stop)]
    return tuple(SlowDown(stop.ranks, stop.start, stop.duration, STANDSTILL) for stop in stops)


def stops_of(faults: Sequence[object], begin: float) -> dict[int, list[tuple[float, float]]]:
    """Return (s, s) from when until when each rank stands still in a run that begins at `begin` (s), by start."""
    stops = sorted((fault for fault in faults if isinstance(fault, Stop)), key=lambda stop: stop.start)
    ranks = {rank for stop in stops for rank in stop.ranks}
    return {rank: [(begin + s.start, begin + s.end) for s in stops if rank in s.ranks] for rank in sorted(ranks)}


def let_happen(
    faults: Sequence[object], network: Network, cluster: Cluster, nodes: Sequence[int], begin: float = 0.0
) -> None:
    """Tell a network what faults do to it, in a run that begins at `begin` (s); worker i is at ``nodes[i]``.

    Raises ConfigError for routes that change where others use the network already.
    """
    if not faults:
        return
    stops = [fault for fault in faults if isinstance(fault, Stop)]
    pauses = [(begin + stop.start, begin + stop.end, nodes[rank]) for stop in stops for rank in stop.ranks]
    links = [fault for fault in faults if isinstance(fault, LinkFault)]
    shares = [
        (begin + fault.start, begin + fault.end, channel, fault.factor)
        for fault in links
        for channel in _channels(fault, cluster)
    ]
    avoided = _avoided(links, cluster)
    if avoided and not network.engine.is_new:
        raise ConfigError(
            "faults: around a link that is down all who use the network take other ways; give the LinkFault to "
            "simulate_jobs(..., faults=[...]), or let it have reroute=float('inf')"
        )
    network.will_change(shares, pauses, avoided)


def _avoided(faults: Sequence[LinkFault], cluster: Cluster) -> list[tuple[float, float, frozenset[int]]]:
    """Return (s, s until which it lasts, links for which the fabric takes other ways meanwhile)."""
    return [
        (fault.start + fault.reroute, fault.end + fault.reroute, frozenset(_links(fault, cluster)))
        for fault in faults
        if fault.factor == 0.0 and fault.reroute < fault.duration
    ]


def _channels(fault: LinkFault, cluster: Cluster) -> list[int]:
    """Return the channels of the links between the two nodes of a fault."""
    channels: list[int] = np.unique(cluster.link_channel[_links(fault, cluster)]).tolist()
    return channels


def _links(fault: LinkFault, cluster: Cluster) -> list[int]:
    """Return the links between the two nodes of a fault."""
    for name in (fault.source, fault.target):
        if name not in cluster.node_names:
            raise unknown_name("node", name, cluster.node_names, f"faults: cluster {cluster.name!r}")
    source, target = cluster.node(fault.source), cluster.node(fault.target)
    there = (cluster.link_src == source) & (cluster.link_dst == target)
    back = (cluster.link_src == target) & (cluster.link_dst == source)
    links: list[int] = np.flatnonzero(there | back).tolist()
    if not links:
        others = np.unique(cluster.link_dst[cluster.link_src == source])
        names = ", ".join(cluster.node_names[node] for node in others[:5].tolist())
        raise ConfigError(
            f"faults: no link of cluster {cluster.name!r} joins {fault.source} and {fault.target}; the neighbours of "
            f"{fault.source} are {names}"
        )
    return links


def from_then_on(events: Iterable[Any], since: float) -> tuple[Any, ...]:
    """Return what is left of faults, slow-downs, traffic and jobs for a run that begins at `since`, by its own time."""
    left = []
    for each in events if since else ():
        start = None if isinstance(each, RandomFaults) else si(each.start, "time")
        if start is None:
            left.append(each)
        elif hasattr(each, "duration"):
            end, reroute = start + each.duration - since, getattr(each, "reroute", math.inf)
            changes = {"reroute": max(reroute + min(start - since, 0.0), 0.0)} if reroute < math.inf else {}
            if end > 0.0:
                begins = max(start - since, 0.0)
                left.append(dataclasses.replace(each, start=begins, duration=end - begins, **changes))
        elif (end := si(getattr(each, "end", math.inf), "time") - since) > 0.0:
            changes = {"end": end} if hasattr(each, "end") else {}
            left.append(dataclasses.replace(each, start=max(start - since, 0.0), **changes))
    return tuple(left) if since else tuple(events)
