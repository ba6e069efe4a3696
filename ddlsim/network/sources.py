"""Traffic sources with limited rates: extra nodes, each with a link to a node of the cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.cluster.cluster import Routes
from ddlsim.cluster.details import LinkDetail, LinkDetails
from ddlsim.network.changes import Around
from ddlsim.network.state import Bools, Floats, Ints


class WithSources:
    """A cluster with traffic sources.

    at     nodes that the sources send from; source i is the node ``cluster.n_nodes + i``, with a link of its own behind
           those of the cluster
    rates  (n_sources,) bytes/s
    """

    def __init__(self, cluster: Cluster, at: Sequence[int], rates: Sequence[float]) -> None:
        self.cluster, self.at = cluster, np.asarray(at, dtype=np.int64)
        n = len(at)
        none = np.zeros(n)
        self.channel_capacity: Floats = np.concatenate([cluster.channel_capacity, np.asarray(rates, dtype=np.float64)])
        self.link_channel: Ints = np.concatenate([cluster.link_channel, cluster.n_channels + np.arange(n)])
        self.link_latency: Floats = np.concatenate([cluster.link_latency, none])
        self.send_overhead: Floats = np.concatenate([cluster.send_overhead, none])
        self.recv_overhead: Floats = np.concatenate([cluster.recv_overhead, none])
        self.reduce_time: Floats = np.concatenate([cluster.reduce_time, none])
        self.reverse_link: Ints = np.concatenate([cluster.reverse_link, np.full(n, -1)])
        self.is_switch_port: Bools = np.concatenate([cluster.is_switch_port, np.zeros(n, dtype=np.bool_)])
        self.splits, self.link_seed = cluster.splits, cluster.link_seed
        self.details = None if cluster.details is None else _longer(cluster.details, n)

    def split_routes(self, src: Ints, dst: Ints, flows: Ints | None) -> Routes:
        """Return the routes between nodes; a source's route begins with its link."""
        return self.from_sources(src, self.cluster.split_routes(self.nodes(src), dst, flows))

    def around(self, down: Iterable[int]) -> Around:
        """Return the routes while the links `down` are unavailable."""
        return _Around(self, self.cluster.around(down))

    def nodes(self, src: Ints) -> Ints:
        """Return the nodes of the cluster that messages from nodes or sources leave from."""
        source = src - self.cluster.n_nodes
        return np.where(source >= 0, self.at[np.maximum(source, 0)], src) if (source >= 0).any() else src

    def from_sources(self, src: Ints, routes: Routes) -> Routes:
        """Return routes of the cluster, each with the link of the source in `src`, if any, in front."""
        sources = src >= self.cluster.n_nodes
        at = routes.offsets[:-1][sources]
        links = np.insert(routes.links, at, self.cluster.n_links + src[sources] - self.cluster.n_nodes)
        offsets = routes.offsets + np.concatenate([[0], np.cumsum(sources)])
        return Routes(offsets, links, np.insert(routes.share, at, 1.0), routes.flows)


@dataclass(frozen=True, eq=False)
class _Around:
    """Routes of a cluster with sources while some links are down."""

    whole: WithSources
    detours: Around

    def routes(self, src: Ints, dst: Ints, usual: Routes) -> Routes:
        nodes = self.whole.nodes(src)
        plain = self.whole.cluster.split_routes(nodes, dst, usual.flows) if (nodes != src).any() else usual
        return self.whole.from_sources(src, self.detours.routes(nodes, dst, plain))


def _longer(details: LinkDetails, n: int) -> LinkDetails:
    """Return link details extended by `n` links without any."""
    plain = LinkDetail()
    columns = {}
    for field in dataclasses.fields(details):
        column = getattr(details, field.name)
        columns[field.name] = np.concatenate([column, np.full(n, getattr(plain, field.name), dtype=column.dtype)])
    return LinkDetails(**columns)
