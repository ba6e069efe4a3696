"""Array-based routing policies with one table per destination, built on first use.

Endpoints with a single attachment are contracted to their switch first, so the search of a fat tree with 10,000 hosts
covers only its switches. If no shortest path passes through a machine, the search skips its nodes until a route from
one of them is requested. Tori and hypercubes need no search (dimension order by formula).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from ddlsim.cluster.cluster import Cluster, Floats, Ints, Routes
from ddlsim.cluster.details import DETAIL_KEYS, LinkDetails
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.ties import distinct

#: Choice among equally short paths: lowest link ids; a hash of (src, dst, node); the digits of the destination; on
#: grids, one dimension after the other; "fixed": only fixed routes; "spray": all paths, with each node dividing every
#: message evenly among its equal next links.
POLICIES = ("shortest", "ecmp", "d-mod-k", "dimension-order", "fixed", "spray")


def check_policy(policy: str, where: str) -> str:
    """Return `policy`, or raise :class:`ConfigError` for an unknown routing policy."""
    if policy == "adaptive":
        raise ConfigError(f"{where}: adaptive routing is not simulated; 'spray' uses all equal paths as well")
    if policy not in POLICIES:
        raise unknown_name("routing policy", policy, POLICIES, where)
    return policy


def make_router(cluster: Cluster) -> TableRouter | GridRouter:
    """Return the router for the cluster's policy."""
    return GridRouter(cluster) if cluster.routing == "dimension-order" else TableRouter(cluster)


class TableRouter:
    """Shortest paths by hops, endpoints, bandwidth and latency; the policy chooses among equal ones."""

    def __init__(self, cluster: Cluster) -> None:
        from ddlsim.cluster import walk

        self._cluster = cluster
        self._policy = {"ecmp": walk.ECMP, "d-mod-k": walk.D_MOD_K}.get(cluster.routing, walk.SHORTEST)
        self._port = port_numbers(cluster)
        n = cluster.n_nodes
        self._up, self._down, self._core = _contract(cluster)
        inner = (self._up[cluster.link_src] < 0) & (self._up[cluster.link_dst] < 0)
        ids = np.flatnonzero(inner)
        ids = ids[np.argsort(cluster.link_src[ids], kind="stable")]  # by source, then by id
        self._ids, src, self._dst = ids, cluster.link_src[ids], cluster.link_dst[ids]
        per_byte = 1.0 / cluster.nominal_capacity[cluster.link_channel[ids]]
        forwards = cluster.is_endpoint[self._dst].astype(np.float64)
        costs = np.stack([forwards, per_byte, cluster.link_latency[ids], per_byte], axis=1)
        self._out_start = np.searchsorted(src, np.arange(n + 1))
        in_links = np.argsort(self._dst, kind="stable")
        in_start = np.searchsorted(self._dst[in_links], np.arange(n + 1))
        host, n_hosts = cluster.host_of, len(cluster.host_names)
        skipped = np.append(_dead_ends(cluster, src, self._dst), False)[host]
        by_host = np.argsort(host, kind="stable")
        machines = np.searchsorted(host[by_host], np.arange(n_hosts + 1)), by_host
        initial_hops = np.where(skipped, np.iinfo(np.int64).max, -1)
        links = (self._dst, costs, self._out_start, in_start, src[in_links])
        self._search = (initial_hops, machines, *links)
        self._room = *(np.empty(n, dtype=np.int64) for _ in range(3)), np.zeros(n), np.zeros(len(ids))
        self._gpu = np.array([kind == "gpu" for kind in cluster.node_kind], dtype=bool)
        self._row_of = np.full(n, -1, dtype=np.int64)
        self._dags = np.zeros((0, (len(ids) + 63) // 64), dtype=np.uint64)
        self._n_searches = np.zeros(n, dtype=np.int64)  # to each target

    def route(
        self, src: Ints, dst: Ints, flows: Ints | None = None, n_flows: Ints | None = None, ports: bool = False
    ) -> tuple[Ints, Ints, Floats]:
        """Return `offsets`, `links` and `shares` of the routes src[i] -> dst[i]. Raises ConfigError for a missing
        route.

        A route has all equal paths if ``n_flows[i]`` is 0, otherwise those of ``n_flows[i]`` flows from ``flows[i]``
        on; without flows, one path. With `ports`, messages between machines use all interfaces equally near to a GPU.
        """
        from ddlsim.cluster import walk

        missing = self._row_of[self._core[dst]] < 0
        self._prepare(src[missing], dst[missing])
        flows = np.zeros(len(src), dtype=np.int64) if flows is None else flows
        n_flows = np.ones(len(src), dtype=np.int64) if n_flows is None else n_flows
        host = self._cluster.host_of
        ends = np.where(self._gpu[src] & self._gpu[dst] & (host[src] != host[dst]), [host[src], host[dst]], -2).T
        ends = np.ascontiguousarray(ends) if ports else np.full((len(src), 2), -2)
        room = 6 * len(src) + len(self._ids) + 2
        offsets, links, shares = np.zeros(len(src) + 1, dtype=np.int64), np.empty(room, dtype=np.int64), np.empty(room)
        attached, onward = (self._up, self._down, self._core, self._row_of), (self._out_start, self._dst, self._ids)
        choice, n_done, is_final = (self._policy, self._port, flows, n_flows, host, ends, self._room), 0, False
        while True:
            place = (n_done, offsets, links, shares)
            n_done, lost = walk.walk(src, dst, *attached, self._dags, *onward, *choice, *place)
            if lost and is_final:
                raise self._cluster.no_route(int(src[n_done]), int(dst[n_done]))
            if n_done == len(src):
                return offsets, links[: offsets[-1]], shares[: offsets[-1]]
            if lost:  # searches may have skipped sources in other machines
                skipped = n_done + np.flatnonzero((host[self._core[src]] != host[self._core[dst]])[n_done:])
                self._prepare(src[skipped], dst[skipped])
                is_final = True
            else:
                links, shares = np.concatenate([links, links]), np.concatenate([shares, shares])

    def _prepare(self, src: Ints, dst: Ints) -> None:
        """Search for the routes src[i] -> dst[i], whose tables are missing or incomplete."""
        from ddlsim.cluster import walk

        if not len(src):
            return
        n, n_hosts, host = len(self._row_of), len(self._cluster.host_names), self._cluster.host_of
        targets, number = np.unique(self._core[dst], return_inverse=True)
        self._n_searches[targets] += 1
        # Routes begin and end in these machines. After several searches, nothing is skipped, because routes are often
        # requested one at a time.
        often = np.flatnonzero(self._n_searches[targets] > n_hosts.bit_length())
        which = np.concatenate([number, np.arange(len(targets)), np.repeat(often, n_hosts)])
        machine = np.concatenate([host[self._core[src]], host[targets], np.tile(np.arange(n_hosts), len(often))])
        which, machine = np.divmod(distinct((which * n_hosts + machine)[machine >= 0]), n_hosts)
        machines = np.searchsorted(which, np.arange(len(targets) + 1)), machine
        new = targets[self._row_of[targets] < 0]
        n_rows = int(self._row_of.max()) + 1
        self._row_of[new] = np.arange(n_rows, n_rows + len(new))
        if n_rows + len(new) > len(self._dags):
            n_more = max(len(new), len(self._dags))  # at least double the size
            self._dags = np.concatenate([self._dags, np.zeros((n_more, self._dags.shape[1]), dtype=np.uint64)])
        room = [np.empty(size, dtype=np.int64) for size in (n, n, len(self._ids))]
        scratch = (room[0], np.empty((n, 4)), *room[1:])
        walk.mark_shortest(self._dags, *scratch, targets, self._row_of[targets], machines, *self._search)


class GridRouter:
    """Dimension-order routes on a torus (or hypercube) whose nodes are numbered in row-major order.

    If a switch connects several tori, the first dimension is their index, and routes between them use the switch.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._shape = np.asarray(cluster.grid, dtype=np.int64)
        self._slice = math.prod(cluster.grid[1:] if cluster.is_fabric_switch.any() else cluster.grid)
        self._next_link = _grid_links(cluster)
        self._up, self._down = (np.full(cluster.n_nodes, -1, dtype=np.int64) for _ in range(2))
        for links, ends, others in (
            (self._up, cluster.link_src, cluster.link_dst),
            (self._down, cluster.link_dst, cluster.link_src),
        ):
            to_switch = np.flatnonzero(cluster.is_fabric_switch[others])
            links[ends[to_switch]] = to_switch

    def route(self, src: Ints, dst: Ints, *_: Ints | bool) -> tuple[Ints, Ints, Floats]:
        """Return `offsets`, `links` and `shares` of the routes src[i] -> dst[i]; none is split."""
        from ddlsim.cluster import walk

        across = src // self._slice != dst // self._slice
        offsets, inside = np.empty(len(src) + 1, dtype=np.int64), np.empty(4 * len(src) + 16, dtype=np.int64)
        goal = np.where(across, src, dst)
        n_links = walk.grid_walk(src, goal, self._shape, self._next_link, offsets, inside)
        if n_links > len(inside):
            inside = np.empty(n_links, dtype=np.int64)
            walk.grid_walk(src, goal, self._shape, self._next_link, offsets, inside)
        inside = inside[:n_links]
        if not across.any():
            return offsets, inside, np.ones(len(inside))
        offsets = offsets + 2 * np.append(0, np.cumsum(across))
        links, first = np.full(offsets[-1], -1, dtype=np.int64), offsets[:-1][across]
        links[first], links[first + 1] = self._up[src[across]], self._down[dst[across]]
        links[links < 0] = inside
        return offsets, links, np.ones(len(links))


def _contract(cluster: Cluster) -> tuple[Ints, Ints, Ints]:
    """Return `up`, `down`, `core`: the two links of singly attached nodes (else -1), and the nodes that they lead to.

    Such a node can only be the first or last node of a route, so removing it from the search is exact.
    """
    n = cluster.n_nodes
    n_out = np.bincount(cluster.link_src, minlength=n)
    n_in = np.bincount(cluster.link_dst, minlength=n)
    out_link, in_link = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    links = np.arange(len(cluster.link_src))
    out_link[cluster.link_src] = links
    in_link[cluster.link_dst] = links
    single = (n_out == 1) & (n_in == 1)
    up, down = np.full(n, -1, dtype=np.int64), np.full(n, -1, dtype=np.int64)
    core = np.arange(n)
    nodes = np.flatnonzero(single)
    beyond = cluster.link_dst[out_link[nodes]]
    # Exclude nodes whose two links lead to different nodes, and pairs of such nodes.
    fits = (cluster.link_src[in_link[nodes]] == beyond) & ~single[beyond]
    nodes, beyond = nodes[fits], beyond[fits]
    up[nodes], down[nodes], core[nodes] = out_link[nodes], in_link[nodes], beyond
    return up, down, core


def _dead_ends(cluster: Cluster, src: Ints, dst: Ints) -> npt.NDArray[np.bool_]:
    """Return whether no shortest path over links src[i] -> dst[i] passes through each machine, shape (n_hosts,).

    A path through a machine whose nodes have at most one neighbour outside has at least three hops from neighbour to
    neighbour. So if the network connects all its neighbours in one or two hops, no shortest path uses the machine.
    """
    outside = np.flatnonzero((cluster.host_of[src] != cluster.host_of[dst]) | (cluster.host_of[src] < 0))
    ends = src[outside], dst[outside]
    hosts = (cluster.host_of[nodes].tolist() for nodes in ends)
    attached: dict[int, set[tuple[int, int]]] = {}  # nodes of each machine with their neighbours outside
    after: dict[int, set[int]] = {}  # switches one hop after each switch
    for a, b, host_a, host_b in zip(*(nodes.tolist() for nodes in ends), *hosts, strict=True):
        if host_a < 0 and host_b < 0:
            after.setdefault(a, set()).add(b)
        if host_a >= 0:
            attached.setdefault(host_a, set()).add((a, b))
        if host_b >= 0:
            attached.setdefault(host_b, set()).add((b, a))

    @cache
    def are_near(nodes: frozenset[int]) -> bool:
        """Return whether nodes reach each other in at most two hops between switches."""
        reached = {a: after.get(a, set()).union(*(after.get(c, ()) for c in after.get(a, ()))) for a in nodes}
        return all(nodes <= reached[a] | {a} for a in nodes)

    dead = np.ones(len(cluster.host_names), dtype=bool)
    for machine, pairs in attached.items():
        neighbours = frozenset(neighbour for _, neighbour in pairs)
        dead[machine] = len(dict(pairs)) == len(pairs) and are_near(neighbours)
    return dead


def port_numbers(cluster: Cluster) -> Ints:
    """Return for each node the index of the network port (NIC) through which its traffic arrives, shape (n_nodes,).

    Ports are counted switch by switch and on each switch machine by machine, so with one endpoint and one NIC
    per machine this is the rank. The endpoints of a machine are distributed over its ports in order. D-mod-k takes its
    digits from these numbers, so neighbours on one switch must differ in the last digit.
    """
    port = np.zeros(cluster.n_nodes, dtype=np.int64)
    src_host, dst_host = cluster.host_of[cluster.link_src], cluster.host_of[cluster.link_dst]
    entries = np.flatnonzero((dst_host >= 0) & (src_host != dst_host))
    if not len(entries):
        return port
    n_hosts = len(cluster.host_names)
    number = np.empty(len(entries), dtype=np.int64)
    number[np.lexsort((entries, dst_host[entries], cluster.link_src[entries]))] = np.arange(len(entries))
    # ports of each machine, in the order of the nodes inside it that they lead to
    inside = np.lexsort((entries, cluster.link_dst[entries], dst_host[entries]))
    n_ports = np.bincount(dst_host[entries], minlength=n_hosts)
    first = np.cumsum(n_ports) - n_ports
    for nodes in (cluster.servers, cluster.workers):  # in this order, so that the workers' numbers take precedence
        host = cluster.host_of[nodes]
        members = np.bincount(host, minlength=n_hosts)
        by_host = np.argsort(host, kind="stable")
        place = np.empty(len(nodes), dtype=np.int64)
        place[by_host] = np.arange(len(nodes)) - (np.cumsum(members) - members)[host[by_host]]
        has_port = n_ports[host] > 0
        nodes, host, place = nodes[has_port], host[has_port], place[has_port]
        port[nodes] = number[inside[first[host] + place * n_ports[host] // members[host]]]
    return port


def widest_links(cluster: Cluster) -> dict[tuple[int, int], int]:
    """Return the link between each pair of adjacent nodes: the widest of parallel ones, among these the lowest id."""
    capacity = cluster.nominal_capacity[cluster.link_channel]
    widest_last = np.lexsort((-np.arange(cluster.n_links), capacity)).tolist()
    return {(int(cluster.link_src[link]), int(cluster.link_dst[link])): link for link in widest_last}


def _grid_links(cluster: Cluster) -> Ints:
    """Return the links to the neighbours at +1 and -1, (n_nodes, n_dims, 2). Raises ConfigError if one is missing.

    If a switch connects tori, the first dimension has no links.
    """
    joined = bool(cluster.is_fabric_switch.any())
    shape, n = cluster.grid, sum(kind != "switch" for kind in cluster.node_kind)
    where = f"cluster {cluster.name!r}"
    if int(np.prod(shape)) != n or not shape:
        raise ConfigError(
            f"{where}: grid = {list(shape)} does not match the number of nodes, {n}; correct or remove the grid"
        )
    link_of = widest_links(cluster)
    table = np.zeros((n, len(shape), 2), dtype=np.int64)
    numbers = np.arange(n).reshape(shape)
    for dim, size in list(enumerate(shape))[joined:]:
        for way, step in enumerate((-1, 1)):  # rolling by -1 yields the neighbour at +1
            beside = np.roll(numbers, step, axis=dim).ravel().tolist() if size > 1 else range(n)
            for node, other in enumerate(beside):
                if node == other:
                    continue
                if (node, other) not in link_of:
                    source, target = cluster.node_names[node], cluster.node_names[other]
                    raise ConfigError(
                        f"{where}: grid = {list(shape)} requires a link from {source!r} to {target!r}; "
                        f"add the link or use routing = 'shortest'"
                    )
                table[node, dim, way] = link_of[node, other]
    return table


class Detours:
    """The routes of a cluster while some links are down, after the fabric has adapted.

    Switches choose other paths. Machines do not: traffic of a machine that lost its own link waits. Detours do not pass
    through other machines, unless the network has no switches (tori). They are the shortest remaining paths, chosen by
    the routing policy; for dimension order and fixed routes, the first of these.
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
        """The cluster with the remaining links, and their original indices."""
        cluster, left = self._cluster, np.flatnonzero(~self._down)
        kinds = tuple(cluster.link_kind[link] for link in left.tolist())
        changed = {
            name: getattr(cluster, name)[left]
            for name in ("link_src", "link_dst", "link_channel", "link_bandwidth", "link_efficiency", "link_latency")
        }
        policy = "shortest" if cluster.routing in ("dimension-order", "fixed") else cluster.routing
        details = cluster.details and LinkDetails(*(getattr(cluster.details, key)[left] for key in DETAIL_KEYS))
        changed |= {"link_kind": kinds, "routing": policy, "grid": (), "fixed_routes": {}, "calibration": None}
        rest = dataclasses.replace(cluster, **changed, details=details)
        return rest, left

    def routes(self, src: Ints, dst: Ints, usual: Routes) -> Routes:
        """Return the routes src[i] -> dst[i]: the `usual` ones, except for those over links that are down."""
        blocked = distinct(usual.of[self._down[usual.links]]).tolist()
        flows = np.zeros(len(src), dtype=np.int64) if usual.flows is None else usual.flows
        around = {i: self._around(src[i : i + 1], dst[i : i + 1], flows[i : i + 1]) for i in blocked}
        return usual.replaced({i: path for i, path in around.items() if path is not None})

    def _around(self, src: Ints, dst: Ints, flows: Ints) -> tuple[Ints, Floats] | None:
        """Return another path between two nodes (arrays of length 1) as links and shares; None if there is none."""
        rest, left = self._left
        try:
            routes = rest.split_routes(src, dst, flows)
        except ConfigError:
            return None
        links = left[routes.links]
        hosts = self._cluster.host_of
        between = hosts[self._cluster.link_dst[links]]
        allowed = (between < 0) | (between == hosts[src]) | (between == hosts[dst])
        return (links, routes.share) if allowed.all() or not self._switched else None
