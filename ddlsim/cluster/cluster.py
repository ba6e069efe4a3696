"""Clusters as arrays, which the network, strategies and reports read. See docs/architecture.md."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Index, NotNegative, Positive, Rule, Seed, checked, with_attributes
from ddlsim.arguments.annotations import array_of
from ddlsim.arguments.rules import PATH
from ddlsim.cluster.quantity import Quantity, nonnegative
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.printable import shown
from ddlsim.readable import count, size
from ddlsim.ties import distinct

if TYPE_CHECKING:
    import networkx as nx

    from ddlsim.cluster.calibration_table import CalibrationTable
    from ddlsim.cluster.details import LinkDetail, LinkDetails
    from ddlsim.cluster.routing import Detours, GridRouter, TableRouter


Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


#: indices of nodes
NodesLike = Annotated[npt.ArrayLike, array_of(np.int64, scalar=True)]
_GRAPH = with_attributes("a networkx graph", "nodes", "edges", "is_directed")
GraphLike = Annotated["nx.Graph[Any]", _GRAPH]
#: arguments of :func:`ddlsim.load_cluster` (checked without importing networkx)
ClusterLike = Annotated[
    Union[str, Path, "nx.Graph[Any]", "Cluster"],  # networkx is slow to import
    Rule(
        "the name of a bundled cluster, a path, a networkx graph or a Cluster object",
        lambda value: isinstance(value, str | Path | Cluster) or _GRAPH.takes(value),
        lambda value, where: PATH(value, where) if isinstance(value, str) else value,
        plural="names of bundled clusters, paths, networkx graphs or Cluster objects",
    ),
]


@dataclass(frozen=True)
class Routes:
    """Routes through a cluster, each a sequence of links.

    The routes are stored in compressed sparse row form: route i is ``links[offsets[i]:offsets[i + 1]]``, in order.

    offsets  (n_routes + 1,) start of each route in `links`
    links    (n_hops,) indices of the links of all routes
    shares   (n_hops,) fraction of a message's bytes that each link carries, for messages that are split over several
             paths; None: every link carries all bytes
    flows    (n_routes,) flow number of each route, which ECMP hashes to choose a path; None: 0 for all routes
    """

    offsets: Ints
    links: Ints
    shares: Floats | None = None
    flows: Ints | None = None

    @property
    def share(self) -> Floats:
        """Share of a message's bytes on each link, shape (n_hops,)."""
        return np.broadcast_to(np.float64(1.0), len(self.links)) if self.shares is None else self.shares

    @property
    def of(self) -> Ints:
        """Index of the route that each link belongs to, shape (n_hops,)."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    def path(self, i: int) -> tuple[Ints, Floats]:
        """Return the links of route i and the share of a message's bytes on each."""
        span = slice(self.offsets[i], self.offsets[i + 1])
        return self.links[span], self.share[span]

    def replaced(self, paths: Mapping[int, tuple[Ints, Floats]]) -> Routes:
        """Return a copy in which the routes with the given indices have new paths.

        paths  route index -> (links, share of bytes on each)
        """
        if not paths:
            return self
        links, shares = zip(*(paths[i] if i in paths else self.path(i) for i in range(len(self))), strict=True)
        ends = np.cumsum([0, *map(len, links)], dtype=np.int64)
        return Routes(ends, np.concatenate(links), np.concatenate(shares), self.flows)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> Ints:
        return self.links[self.offsets[i] : self.offsets[i + 1]]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Cluster:
    """An immutable description of machines and their network.

    Create clusters with :func:`ddlsim.load_cluster` or :meth:`from_graph`.

    The kind of a node is "gpu", "host" (a CPU), "storage" or "switch"; all nodes except switches are endpoints.
    `host_of` contains the machine index of each node, or -1 for switches between machines. Links are directed. Every
    link belongs to a channel with a limited capacity; the two directions of a half-duplex link share one channel.

    Arrays of shape (n_nodes,):

    speed            compute speed, relative to the catalogue speed of the node's device
    send_overhead    software time in seconds to send a message (o in LogGP)
    recv_overhead    software time in seconds to receive a message
    reduce_time      time in seconds to reduce one byte of received data

    Arrays of shape (n_links,):

    link_src, link_dst  source and destination node of each link
    link_bandwidth   bandwidth in bytes/s
    link_efficiency  fraction of the bandwidth available for payload
    link_latency     latency in seconds
    link_kind        kind of the link, such as "nic" or "trunk"
    """

    name: str
    title: str = ""
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    routing: str = "shortest"
    #: sizes of the dimensions in which machines are numbered in row-major order; for "dimension-order", of the torus
    grid: tuple[int, ...] = ()
    #: (source node, destination node) -> links, which override the routing policy
    fixed_routes: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    node_names: tuple[str, ...]
    node_kind: tuple[str, ...]
    host_of: Ints
    host_names: tuple[str, ...]
    device_of: tuple[str | None, ...]
    speed: Floats
    send_overhead: Floats
    recv_overhead: Floats
    reduce_time: Floats
    link_src: Ints
    link_dst: Ints
    link_channel: Ints
    link_bandwidth: Floats
    link_efficiency: Floats
    link_latency: Floats
    link_kind: tuple[str, ...]
    #: prices and power, NaN if unknown: USD/s of a machine, (n_hosts,), and of a device in it, (n_nodes,); power draw
    #: of a switch in W, (n_nodes,)
    host_price: Floats | None = None
    device_price: Floats | None = None
    switch_power: Floats | None = None
    #: whether a switch reduces messages (SHARP), (n_nodes,); None: no switch does
    switch_reduces: Bools | None = None
    #: time per operation of a storage in s, (n_nodes,); None: no storage has a limit
    operation_time: Floats | None = None
    #: frames, token buckets, transports etc. of links; None: no link has any
    details: LinkDetails | None = None
    #: seed of the sampled rates of links with a `spread`, and windows; None: 0, until a run sets its own seed
    link_seed: int | None = None
    #: calibration from measurements; links, overheads and reduction rates are set accordingly
    calibration: CalibrationTable | None = None

    def __post_init__(self) -> None:
        for value in vars(self).values():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)

    def __repr__(self) -> str:
        n_storages = len(self.storages)
        more = f", {n_storages} storages" if n_storages > 1 else ", 1 storage" * n_storages
        return (
            f"<Cluster {self.name!r}: {len(self.workers)} workers, {len(self.host_names) - n_storages} hosts{more}, "
            f"{self.node_kind.count('switch')} switches, {self.n_links} links>"
        )

    @property
    def n_nodes(self) -> int:
        """Number of nodes, including switches."""
        return len(self.node_names)

    @property
    def n_links(self) -> int:
        """Number of directed links."""
        return len(self.link_src)

    @property
    def n_channels(self) -> int:
        """Number of channels, at most one per link."""
        return len(self.nominal_capacity)

    @cached_property
    def is_endpoint(self) -> Bools:
        """Whether each node is an endpoint (GPU, host or storage) rather than a switch, shape (n_nodes,)."""
        return _frozen(np.array([kind != "switch" for kind in self.node_kind], dtype=bool))

    @cached_property
    def workers(self) -> Ints:
        """Nodes of the workers in rank order: the GPUs, or the hosts if the cluster has no GPUs."""
        gpus = self._of_kind("gpu")
        return gpus if len(gpus) else self.servers

    @cached_property
    def servers(self) -> Ints:
        """Host (CPU) nodes, on which parameter servers can be placed."""
        return self._of_kind("host")

    @cached_property
    def memory_nodes(self) -> Ints:
        """The host node of each node's machine, or the node itself if it has none, shape (n_nodes,)."""
        host_node = np.full(len(self.host_names) + 1, -1)  # the last one is that of switches between machines
        host_node[self.host_of[self.servers]] = self.servers
        return _frozen(np.where(host_node[self.host_of] < 0, np.arange(self.n_nodes), host_node[self.host_of]))

    @cached_property
    def storages(self) -> Ints:
        """Storage nodes."""
        return self._of_kind("storage")

    def _of_kind(self, kind: str) -> Ints:
        return _frozen(np.array([node for node, label in enumerate(self.node_kind) if label == kind], dtype=np.int64))

    def operation_seconds(self, node: int) -> float:
        """Return the time (s) of one operation of a storage, independent of the number of bytes."""
        return 0.0 if self.operation_time is None else float(self.operation_time[node])

    @cached_property
    def channel_capacity(self) -> Floats:
        """Bytes/s of each channel, shape (n_channels,): nominal, or sampled for links with `spread`."""
        from ddlsim.cluster.details import sampled_times

        has_spread = self.details is not None and self.details.spread.any()
        return _frozen(self.nominal_capacity / sampled_times(self)) if has_spread else self.nominal_capacity

    @checked
    def sampled(self, seed: Seed) -> Cluster:
        """Return this cluster with the rates of links with `spread`, and windows with `window_spread`, sampled from
        `seed`, as in a run with that seed.

        A cluster that has already been sampled is returned unchanged. Routes are those of the nominal rates.
        """
        if self.link_seed is not None or self.details is None or not self.details.is_sampled:
            return self
        cluster = dataclasses.replace(self, link_seed=seed)
        vars(cluster)["_router"] = self._router
        return cluster

    @cached_property
    def nominal_capacity(self) -> Floats:
        """Nominal bytes/s of each channel (bandwidth * efficiency), shape (n_channels,).

        This includes payload and, on links with frames, frame headers. Routes, rings and algorithms are chosen by
        nominal rates, as in real systems, where slow links are not known in advance.
        """
        n_channels = int(self.link_channel.max()) + 1 if self.n_links else 0
        capacity = np.zeros(n_channels)
        capacity[self.link_channel] = self.link_bandwidth * self.link_efficiency
        return _frozen(capacity)

    @cached_property
    def reverse_link(self) -> Ints:
        """Index of the link in the opposite direction of each link, or -1 if there is none, shape (n_links,)."""
        from ddlsim.cluster.details import reverse_links

        return _frozen(reverse_links(self))

    @cached_property
    def _router(self) -> TableRouter | GridRouter:
        from ddlsim.cluster.routing import make_router

        return make_router(self)

    @cached_property
    def _node_index(self) -> dict[str, int]:
        return {name: node for node, name in enumerate(self.node_names)}

    @checked
    def node(self, name: str) -> int:
        """Return the index of the node called `name`. Raises :class:`ConfigError` if there is none."""
        if name not in self._node_index:
            raise unknown_name("node", name, self.node_names, f"cluster {self.name!r}")
        return self._node_index[name]

    @checked
    def routes(self, src: NodesLike, dst: NodesLike) -> Routes:
        """Return the routes from src[i] to dst[i] (node indices, shape (n_routes,)).

        The route from a node to itself is empty. Raises :class:`ConfigError` if an index is not a node, or if there is
        no path between two nodes; the message names both.
        """
        src, dst = self._pairs(src, dst)
        if self.routing == "fixed" or self.fixed_routes:
            return self._routes_with_fixed(src, dst)
        return Routes(*self._router.route(src, dst)[:2])

    @cached_property
    def splits(self) -> bool:
        """Whether a message may use several paths: spraying, ECMP over several connections, or several interfaces."""
        several = self.details is not None and bool((self.details.connections > 1).any())
        return self.routing == "spray" or (self.routing == "ecmp" and several) or self.several_ports

    @cached_property
    def several_ports(self) -> bool:
        """Whether a node of a GPU machine has several interfaces to the network: its own links, or NIC nodes."""
        src, dst = self.host_of[self.link_src], self.host_of[self.link_dst]
        hosts = distinct(self.host_of[self._of_kind("gpu")])
        leaves, inside = np.isin(src, hosts) & (src != dst), np.isin(src, hosts) & (src == dst)
        n_inside, n_leaving = (np.bincount(self.link_src[links], minlength=self.n_nodes) for links in (inside, leaves))
        is_card = (n_inside == 1) & (n_leaving > 0)
        n_cards = np.bincount(self.link_src[inside & is_card[self.link_dst]], minlength=self.n_nodes)
        return bool((n_leaving + n_cards > 1).any())

    @checked
    def split_routes(self, src: NodesLike, dst: NodesLike, flows: NodesLike | None = None) -> Routes:
        """Return all links used by messages from src[i] to dst[i], with the share of bytes on each.

        Unlike :meth:`routes`, which returns one path per pair, this includes every path over which a message is split.
        With routing "spray" these are all shortest paths. "ecmp" hashes every connection of a pair (see ``details``)
        and every flow separately. Messages between GPUs of different machines are divided among all equally near
        interfaces.

        flows  (n_routes,) non-negative flow numbers, such as NCCL channels; None: 0

        Raises ConfigError for pairs without a route, and for arrays of different lengths.
        """
        src, dst = self._pairs(src, dst)
        flows = np.zeros_like(src) if flows is None else np.asarray(flows, dtype=np.int64)
        if flows.shape != src.shape or (flows < 0).any():
            raise ConfigError(f"split_routes: flows must be {len(src)} non-negative integers, one per route")
        one_each = not self.splits and (self.routing != "ecmp" or not flows.any())
        routes = self.routes(src, dst) if one_each or self.routing == "ecmp" or self.fixed_routes else None
        if routes is not None and one_each:
            return routes
        n_flows = np.full(len(src), int(self.routing != "spray"))
        if routes is not None and self.routing == "ecmp" and self.details is not None:
            named = np.flatnonzero(self.details.transport[routes.links] != "")
            of, first = np.unique(np.searchsorted(routes.offsets, named, "right") - 1, return_index=True)
            n_flows[of] = self.details.connections[routes.links[named[first]]]
        pairs = enumerate(zip(src.tolist(), dst.tolist(), strict=True)) if self.fixed_routes else ()
        fixed = [i for i, pair in pairs if pair in self.fixed_routes]
        ends = dst.copy()
        ends[fixed] = src[fixed]
        split = Routes(*self._router.route(src, ends, n_flows * flows, n_flows, self.several_ports), flows)
        return split if routes is None else split.replaced({i: routes.path(i) for i in fixed})

    def _pairs(self, src: npt.ArrayLike, dst: npt.ArrayLike) -> tuple[Ints, Ints]:
        # One memory layout, because the walk is compiled for each layout (read-only, strided) that it receives.
        ends = [np.require(self._nodes(nodes), np.int64, ["C", "W"]) for nodes in (src, dst)]
        if ends[0].shape != ends[1].shape:
            raise ConfigError(f"routes: src and dst must have the same length, not {ends[0].shape} and {ends[1].shape}")
        return ends[0], ends[1]

    def _routes_with_fixed(self, src: Ints, dst: Ints) -> Routes:
        fixed = [self.fixed_routes.get(pair) for pair in zip(src.tolist(), dst.tolist(), strict=True)]
        if self.routing == "fixed":
            lost = (src != dst) & self.is_endpoint[src] & self.is_endpoint[dst] & [path is None for path in fixed]
            if lost.any():
                raise self.no_route(int(src[lost.argmax()]), int(dst[lost.argmax()]))
        # fixed routes replace routes that need not exist, so the router gets the empty route for these
        offsets, links = self._router.route(src, np.where([path is not None for path in fixed], src, dst))[:2]
        routed = np.split(links, offsets[1:-1])
        parts = [
            route if path is None else np.array(path, dtype=np.int64)
            for route, path in zip(routed, fixed, strict=False)
        ]
        ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        return Routes(ends, np.concatenate(parts) if parts else links)

    @checked
    def around(self, down: Iterable[Index]) -> Detours:
        """Return the routes of this cluster while the links with the indices `down` are unavailable.

        See :mod:`ddlsim.cluster.routing`. Raises ConfigError for an index that is not a link.
        """
        from ddlsim.cluster.routing import Detours

        links = sorted(down)
        if links and links[-1] >= self.n_links:
            raise ConfigError(f"cluster {self.name!r} has no link {links[-1]}; its links are 0 to {self.n_links - 1}")
        return Detours(self, links)

    def no_route(self, src: int, dst: int) -> ConfigError:
        """Return the error to raise for two nodes without a path between them."""
        source, target = self.node_names[src], self.node_names[dst]
        return ConfigError(
            f"cluster {self.name!r}: there is no path from {source!r} to {target!r}; "
            f"add a {'route' if self.routing == 'fixed' else 'link'}, or use only one of the two nodes"
        )

    def _nodes(self, nodes: npt.ArrayLike) -> Ints:
        places = np.atleast_1d(np.asarray(nodes, dtype=np.int64))
        if places.ndim > 1:
            raise ConfigError(f"nodes: expected a one-dimensional list, got an array of shape {places.shape}")
        wrong = places[(places < 0) | (places >= self.n_nodes)]
        if len(wrong):
            raise ConfigError(f"cluster {self.name!r} has no node {wrong[0]}; its nodes are 0 to {self.n_nodes - 1}")
        return places

    @checked
    def check_connected(self, nodes: NodesLike) -> None:
        """Check that all `nodes` can reach each other. Raises :class:`ConfigError` naming two nodes that cannot."""
        members = self._nodes(nodes)
        if not len(members):
            return
        root = int(members[0])
        for src, dst, swap in ((self.link_src, self.link_dst, False), (self.link_dst, self.link_src, True)):
            lost = members[~_reached(root, src, dst, self.n_nodes)[members]]
            if len(lost):
                raise self.no_route(*((int(lost[0]), root) if swap else (root, int(lost[0]))))

    @checked
    def scaled(self, kind: str, *, bandwidth: Positive = 1.0, latency: NotNegative = 1.0) -> Cluster:
        """Return a copy of this cluster in which bandwidth and latency of all links of one `kind` are scaled.

        kind                kind of the links to scale, such as "nic"
        bandwidth, latency  factors by which the current values are multiplied

        Raises :class:`ConfigError` for a kind that no link has, or an invalid factor.
        """
        if kind not in self.link_kind:
            raise unknown_name("link kind", kind, set(self.link_kind), f"cluster {self.name!r}")
        chosen = np.array([link_kind == kind for link_kind in self.link_kind])
        return dataclasses.replace(
            self,
            link_bandwidth=np.where(chosen, self.link_bandwidth * bandwidth, self.link_bandwidth),
            link_latency=np.where(chosen, self.link_latency * latency, self.link_latency),
        )

    def with_links(self, bandwidth: Floats, latency: Floats) -> Cluster:
        """Return a copy of this cluster with new link bandwidths (bytes/s) and latencies (s), each of shape (n_links,).

        The copy keeps the routes of this cluster, even if other paths have become faster.
        """
        cluster = dataclasses.replace(self, link_bandwidth=bandwidth, link_latency=latency)
        vars(cluster)["_router"] = self._router  # cached property; keeps the tables built so far
        return cluster

    def with_spraying(self) -> Cluster:
        """Return a copy of this cluster with routing "spray"."""
        cluster = dataclasses.replace(self, routing="spray")
        if self.routing != "dimension-order":  # other policies share the tables of shortest paths
            vars(cluster)["_router"] = self._router
        return cluster

    @checked
    def with_costs(
        self,
        *,
        price: Quantity | None = None,
        device_price: Quantity | None = None,
        switch_power: Quantity | None = None,
    ) -> Cluster:
        """Return a copy of this cluster with new prices and power draws. None keeps the current value.

        price         price of every machine except storages, such as "3.06 USD/h" (a number is in USD/s)
        device_price  price of every worker's device, in addition to the price of its machine
        switch_power  power draw of every switch between machines, such as "150 W"
        """
        new: dict[str, Floats] = {}
        if price is not None:
            new["host_price"] = np.full(len(self.host_names), nonnegative(price, "price", "price"))
            new["host_price"][self.host_of[self.storages]] = np.nan
        if device_price is not None:
            new["device_price"] = np.full(self.n_nodes, np.nan)
            new["device_price"][self.workers] = nonnegative(device_price, "price", "device_price")
        if switch_power is not None:
            watts = nonnegative(switch_power, "power", "switch_power")
            new["switch_power"] = np.where(self.is_fabric_switch, watts, np.nan)
        return dataclasses.replace(self, **new)  # type: ignore[arg-type]  # only arrays

    @cached_property
    def is_switch_port(self) -> Bools:
        """Whether each link leaves a switch between machines, shape (n_links,)."""
        return _frozen(self.is_fabric_switch[self.link_src])

    @cached_property
    def is_fabric_switch(self) -> Bools:
        """Whether each node is a switch between machines, not inside one, shape (n_nodes,)."""
        return _frozen(~self.is_endpoint & (self.host_of < 0))

    @checked
    def locality_order(self, nodes: NodesLike) -> Ints:
        """Return a permutation of ``range(len(nodes))`` that keeps most hops of a ring local.

        Nodes of one machine are adjacent, and so are the machines of one rack. On a tree of switches, such a ring
        crosses each uplink once per direction. See :mod:`ddlsim.cluster.rings`.
        """
        from ddlsim.cluster.rings import locality_order

        return locality_order(self, self._nodes(nodes))

    @cached_property
    def machine_tour(self) -> Ints:
        """Machines in the order of a depth-first traversal of the fabric, shape (n_machines,)."""
        from ddlsim.cluster.rings import machine_tour

        return _frozen(machine_tour(self))

    @cached_property
    def direct_links(self) -> dict[tuple[int, int], float]:
        """Bandwidth (bytes/s) of the links between endpoints of one machine, by (source, destination) node."""
        from ddlsim.cluster.rings import direct_links

        return direct_links(self)

    def to_graph(self) -> nx.MultiDiGraph[str]:
        """Convert the cluster to a networkx graph. :meth:`from_graph` is the inverse."""
        from ddlsim.cluster.graphs import to_graph

        return to_graph(self).to_networkx()

    @classmethod
    @checked
    def from_graph(cls, graph: GraphLike, name: str | None = None) -> Cluster:
        """Build a cluster from a networkx graph. :mod:`ddlsim.cluster.graphs` lists the attributes.

        Raises :class:`ConfigError` naming the node or edge and the invalid attribute.
        """
        from ddlsim.cluster.graphs import from_graph

        return from_graph(graph, name)

    @checked
    def save(self, path: str | Path) -> None:
        """Write the cluster as TOML (``.toml``), node-link JSON (``.json``) or GraphML (``.graphml``)."""
        from ddlsim.cluster.files import write_cluster

        write_cluster(self, Path(path))

    def summary(self) -> str:
        """Return a short text that lists machines, devices, links by kind, routing and sources."""
        texts = (": ".join(filter(None, row)) for row in summary_rows(self))
        return shown("\n".join([title(self), *(f"  {text}" for text in texts)]))

    def _repr_html_(self) -> str:
        from ddlsim.notebook import labelled, page

        return page(title(self), labelled(summary_rows(self)))


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.setflags(write=False)
    return array


def _reached(root: int, src: Ints, dst: Ints, n_nodes: int) -> Bools:
    """Whether a search from `root` along the links src -> dst reaches each node, shape (n_nodes,)."""
    order = np.argsort(src, kind="stable")
    starts = np.searchsorted(src[order], np.arange(n_nodes + 1)).tolist()
    beyond = dst[order].tolist()
    seen = np.zeros(n_nodes, dtype=bool)
    seen[root] = True
    stack = [root]
    while stack:
        node = stack.pop()
        for other in beyond[starts[node] : starts[node + 1]]:
            if not seen[other]:
                seen[other] = True
                stack.append(other)
    return seen


def title(cluster: Cluster) -> str:
    """Return the cluster's name, with its title if it has one."""
    return f"{cluster.name}: {cluster.title}" if cluster.title else cluster.name


def summary_rows(cluster: Cluster) -> list[tuple[str, str]]:
    """Return the rows of a summary below the title as (label, text); the label of the machines is ""."""
    n_gpus, n_storages = cluster.node_kind.count("gpu"), len(cluster.storages)
    storages = f"{count(n_storages, 'storage')}, " if n_storages else ""
    machines = (
        f"{count(len(cluster.host_names) - n_storages, 'host')}, {count(len(cluster.workers), 'worker')} "
        f"({count(n_gpus, 'GPU')}), {storages}{count(int(cluster.is_fabric_switch.sum()), 'fabric switch', 'es')}; "
        f"routing: {cluster.routing}"
    )
    devices = Counter(cluster.device_of[node] or "no device specified" for node in cluster.workers.tolist())
    rows = [("", machines), ("workers", ", ".join(f"{n} x {device}" for device, n in sorted(devices.items())))]
    link_kind = np.array(cluster.link_kind)
    for kind in dict.fromkeys(cluster.link_kind):
        of_kind = link_kind == kind
        rate = _range(cluster.link_bandwidth[of_kind] * 8e-9, "Gbit/s")
        delay = _range(cluster.link_latency[of_kind] * 1e6, "us")
        share = _range(cluster.link_efficiency[of_kind], "")
        more = _details(cluster, of_kind)
        rows.append((kind, f"{of_kind.sum()} links of {rate}, {delay}, efficiency {share}".rstrip() + more))
    return [*rows, *(("note", note) for note in cluster.notes), *(("source", text) for text in cluster.sources)]


def _details(cluster: Cluster, of_kind: Bools) -> str:
    """Describe the details of links of a kind, or return ""."""
    if cluster.details is None:
        return ""
    details = [cluster.details.of(link) for link in np.flatnonzero(of_kind).tolist()]
    units = {"frame_header": "B", "frame_payload": "B", "spread": "", "burst": "B", "reverse_load": ""}
    columns = {key: np.array([getattr(detail, key) for detail in details]) for key in units}
    ranges = {key: _range(column, units[key]) for key, column in columns.items() if column.any()}
    texts = {
        "frame_header": "{frame_header} of headers per {frame_payload} of payload",
        "spread": "rates vary by {spread}",
        "burst": "bursts of {burst}",
        "reverse_load": "acknowledgements {reverse_load}",
    }
    parts = [text.format(**ranges) for key, text in texts.items() if key in ranges]
    if any(detail.sharing for detail in details):
        parts.append("first in, first out")
    parts += sorted({_transport(detail) for detail in details if detail.transport})
    return "".join(f", {part}" for part in parts)


def _transport(detail: LinkDetail) -> str:
    """Describe a transport: its name and settings."""
    words = [f"{detail.connections} connections"] if detail.connections > 1 else []
    words += [f"{detail.flow_rate * 8e-9:.4g} Gbit/s each"] if detail.flow_rate else []
    words += [f"window {size(detail.window)}"] if detail.window else []
    words += [f"windows vary by {detail.window_spread:g}"] if detail.window_spread else []
    words += [f"rendezvous above {size(detail.rendezvous)}"] if detail.rendezvous else []
    words += [f"loss {detail.loss:.4g}"] if detail.loss else []
    words += [f"overhead {detail.overhead * 1e6:.4g} us"] if detail.overhead else []
    words += [f"buffers of {size(detail.buffer)}"] if detail.buffer else []
    words += [key for key in ("unordered", "warm", "queued_acks") if getattr(detail, key)]
    return f"transport {detail.transport}" + (f" ({', '.join(words)})" if words else "")


def _range(values: Floats, unit: str) -> str:
    low, high = float(values.min()), float(values.max())
    return f"{low:.4g} {unit}".strip() if low == high else f"{low:.4g} to {high:.4g} {unit}".strip()
