"""Ways around links that are down."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ddlsim.cluster.cluster import Cluster, Floats, Ints, Routes
from ddlsim.cluster.details import DETAIL_KEYS, LinkDetails
from ddlsim.errors import ConfigError


class Detours:
    """The routes of a cluster while some of its links are down, as the fabric finds them once it knows.

    A switch looks for another way, a machine does not: what has lost its own link waits for it, and nothing passes
    through the machines of others, except where these are all that the network consists of (tori). Other ways are
    chosen by the cluster's routing policy among the shortest that are left; where that is dimension order, or a route
    that somebody has fixed, among the first of these.
    """

    def __init__(self, cluster: Cluster, down: Sequence[int]) -> None:
        self._cluster = cluster
        self._switched = bool(cluster.is_fabric_switch.any())
        links = np.array(down, dtype=np.int64)
        if self._switched:
            ends = cluster.host_of[cluster.link_src[links]], cluster.host_of[cluster.link_dst[links]]
            links = links[(ends[0] < 0) & (ends[1] < 0)]
        self._down = np.zeros(cluster.n_links, dtype=bool)
        self._down[links] = True

    @cached_property
    def _left(self) -> tuple[Cluster, Ints]:
        """The cluster with the links that are left, and the numbers of these."""
        cluster, left = self._cluster, np.flatnonzero(~self._down)
        kinds = tuple(cluster.link_kind[link] for link in left.tolist())
        changed = {
            name: getattr(cluster, name)[left]
            for name in ("link_src", "link_dst", "link_channel", "link_bandwidth", "link_efficiency", "link_latency")
        }
        policy = "shortest" if cluster.routing in ("dimension-order", "fixed") else cluster.routing
        details = cluster.details and LinkDetails(*(getattr(cluster.details, key)[left] for key in DETAIL_KEYS))
        rest = dataclasses.replace(
            cluster, **changed, link_kind=kinds, routing=policy, grid=(), fixed_routes={}, details=details,
            calibration=None,
        )  # fmt: skip
        return rest, left

    def routes(self, src: Ints, dst: Ints, usual: Routes) -> Routes:
        """Return the routes src[i] -> dst[i]: the `usual` ones but for those over links that are down."""
        blocked = np.unique(usual.of[self._down[usual.links]]).tolist()
        flows = np.zeros(len(src), dtype=np.int64) if usual.flows is None else usual.flows
        around = {i: self._around(src[i : i + 1], dst[i : i + 1], flows[i : i + 1]) for i in blocked}
        return usual.replaced({i: path for i, path in around.items() if path is not None})

    def _around(self, src: Ints, dst: Ints, flows: Ints) -> tuple[Ints, Floats] | None:
        """Return another path between two nodes, arrays of one: links and shares; None if there is none."""
        rest, left = self._left
        try:
            found = rest.split_routes(src, dst, flows)
        except ConfigError:
            return None
        links = left[found.links]
        hosts = self._cluster.host_of
        between = hosts[self._cluster.link_dst[links]]
        own = (between < 0) | (between == hosts[src]) | (between == hosts[dst])
        return (links, found.share) if own.all() or not self._switched else None
