"""Routes against a search in Python: contiguous and shortest; policies spread or avoid contention."""

import itertools

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ddlsim
from ddlsim.cluster import Cluster, MultiGpu, dragonfly, fat_tree, hypercube, leaf_spine, racks, star, torus
from ddlsim.errors import ConfigError

RATE = {"bandwidth": 1e9, "latency": 1e-6}


def _all_pairs(nodes):
    src, dst = np.nonzero(~np.eye(len(nodes), dtype=bool))
    return nodes[src], nodes[dst]


def _costs(cluster):
    """Return per link (1 if an endpoint follows, s per byte, s); the only links of an endpoint do not matter."""
    per_byte = 1.0 / cluster.channel_capacity[cluster.link_channel]
    degree = np.bincount(cluster.link_src, minlength=cluster.n_nodes)
    single = degree == 1
    only = single[cluster.link_src] != single[cluster.link_dst]
    forwards = cluster.is_endpoint[cluster.link_dst] & ~single[cluster.link_dst]
    return forwards.astype(int), np.where(only, 0.0, per_byte), np.where(only, 0.0, cluster.link_latency)


def _best_paths(cluster, target):
    """Return per node (hops, forwarding endpoints, s per byte of the narrowest link, latency, s per byte of all) of the
    shortest path to `target`; nodes choose among their neighbours' own shortest paths."""
    forwards, per_byte, latency = _costs(cluster)
    ends = list(zip(cluster.link_src.tolist(), cluster.link_dst.tolist(), strict=True))
    hops = dict(nx.single_target_shortest_path_length(nx.DiGraph(ends), target))
    best = {target: (0, 0, 0.0, 0.0, 0.0)}
    for node in sorted(hops, key=hops.__getitem__):
        for link, (source, after) in enumerate(ends):
            if source == node and hops.get(after) == hops[node] - 1:
                rest = best[after]
                path = (
                    rest[0] + 1, rest[1] + int(forwards[link]), max(rest[2], per_byte[link]),
                    round(rest[3] + latency[link], 15), rest[4] + per_byte[link],
                )  # fmt: skip
                best[node] = min(best.get(node, (np.inf,)), path)
    return best


def _check_shortest(cluster, nodes):
    """Every route is contiguous and as short as the shortest: hops, endpoints, bandwidth and latency, in this order."""
    forwards, per_byte, latency = _costs(cluster)
    for target in np.asarray(nodes).tolist():
        sources = np.setdiff1d(nodes, [target])
        routes = cluster.routes(sources, np.full(len(sources), target))
        best = _best_paths(cluster, target)
        for i, source in enumerate(sources.tolist()):
            links = routes[i]
            assert cluster.link_src[links[0]] == source
            assert cluster.link_dst[links[-1]] == target
            assert (cluster.link_dst[links[:-1]] == cluster.link_src[links[1:]]).all()
            each = per_byte[links]
            found = len(links), forwards[links].sum(), each.max(), latency[links].sum(), each.sum()
            assert found == pytest.approx(best[source], rel=1e-9)


@st.composite
def connected_graphs(draw):
    """Random connected multigraphs of machines and switches, latencies of 0..4 units, rates of 1..3, parallel links."""
    n = draw(st.integers(2, 9))
    tree = [(draw(st.integers(0, i - 1)), i) for i in range(1, n)]
    pair = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda p: p[0] != p[1])
    graph = nx.MultiGraph()
    for node in range(n):
        machine = draw(st.sampled_from([{}, {"host": "x"}, {"host": "y"}]))
        graph.add_node(node, kind="host" if node == 0 else draw(st.sampled_from(["host", "switch"])), **machine)
    for u, v in tree + draw(st.lists(pair, max_size=12)):
        graph.add_edge(u, v, bandwidth=float(draw(st.integers(1, 3))), latency=draw(st.integers(0, 4)) * 1e-4)
    return graph


@settings(max_examples=60, deadline=None)
@given(graph=connected_graphs(), policy=st.sampled_from(["shortest", "ecmp", "d-mod-k"]))
def test_random_graphs(graph, policy):
    graph.graph["routing"] = policy
    cluster = Cluster.from_graph(graph)
    _check_shortest(cluster, range(cluster.n_nodes))


@pytest.mark.parametrize(
    "graph",
    [
        fat_tree(4, **RATE),
        leaf_spine(3, 3, 2, trunk_latency=5e-6, **RATE),
        racks(3, 3, **RATE),
        torus((4, 3), **RATE),
        torus((2, 5, 3), **RATE),
        hypercube(4, **RATE),
        dragonfly(5, (2, 2), 1, global_links=1, local_latency=2e-6, global_latency=9e-6, **RATE),
        star(
            2,
            host=MultiGpu(n_gpus=8, inside="hybrid_cube_mesh", nvlink_bandwidth=1e9, n_pcie_switches=4, n_nics=4),
            **RATE,
        ),
        leaf_spine(
            4,
            2,
            2,
            rail_optimised=True,
            host=MultiGpu(n_gpus=4, inside="nvswitch", nvlink_bandwidth=1e9, n_pcie_switches=4, n_nics=4),
            **RATE,
        ),
    ],
    ids=lambda graph: graph.graph["name"] + "-" + str(graph.number_of_nodes()),
)
def test_generated_networks(graph):
    cluster = Cluster.from_graph(graph)
    _check_shortest(cluster, np.flatnonzero(cluster.is_endpoint))


def test_a_route_to_itself_is_empty():
    cluster = Cluster.from_graph(star(3, **RATE))
    routes = cluster.routes([1, 0], [1, 2])
    assert routes.offsets.tolist() == [0, 0, 2]


def test_ties_go_to_the_lowest_link():
    graph = nx.MultiDiGraph()
    for _ in range(3):
        graph.add_edge("a", "b", bandwidth=1.0)
    cluster = Cluster.from_graph(graph)
    assert cluster.routes([0], [1]).links.tolist() == [0]


@pytest.mark.parametrize("rates", [(1e9, 10e9), (10e9, 1e9)])
@pytest.mark.parametrize("nic", [1e9, 20e9])
@pytest.mark.parametrize("n_nics", [1, 2])
@pytest.mark.parametrize("routing", ["shortest", "ecmp", "d-mod-k"])
def test_the_wider_of_two_parallel_links_carries_everything(rates, nic, n_nics, routing):
    """Whichever is drawn first, and however narrow the ports of the machines are."""
    graph = nx.MultiDiGraph(routing=routing)
    graph.add_nodes_from(("left", "right"), kind="switch")
    for rate in rates:
        graph.add_edge("left", "right", bandwidth=rate)
        graph.add_edge("right", "left", bandwidth=rate)
    for host, switch in (("a", "left"), ("b", "left"), ("c", "right"), ("d", "right")):
        graph.add_node(host, kind="host")
        for _ in range(n_nics):
            graph.add_edge(host, switch, bandwidth=nic)
            graph.add_edge(switch, host, bandwidth=nic)
    cluster = Cluster.from_graph(graph)
    links = cluster.routes(cluster.workers[:2], cluster.workers[2:]).links
    assert cluster.link_bandwidth[links].reshape(2, 3)[:, 1].tolist() == [10e9, 10e9]


def test_gpus_talk_over_the_nvswitch_not_over_pcie():
    """Both are two hops, and PCIe has less latency: 2 (n - 1)/n of 1 GB take 0.125 s there."""
    host = MultiGpu(4, "nvswitch", nvlink_bandwidth="300 GB/s", pcie_latency="0.5 us")
    graph = star(1, bandwidth="10 GB/s", latency="1 us", host=host)
    assert ddlsim.collective_time(graph, "ring", "1 GB") == pytest.approx(0.005, rel=0.01)


def test_endpoints_forward_only_where_switches_do_not():
    """A wide way through another machine's GPU is none for what arrives at its network card."""
    graph = nx.Graph()
    for name in ("a", "b", "c"):
        graph.add_node(name, kind="gpu")
    graph.add_node("switch", kind="switch")
    for u, v, rate in (("a", "b", 100.0), ("b", "c", 100.0), ("a", "switch", 1.0), ("switch", "c", 1.0)):
        graph.add_edge(u, v, bandwidth=rate)
    cluster = Cluster.from_graph(graph)
    assert cluster.link_bandwidth[cluster.routes([0], [2]).links].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("fixed", [{"routes": [["a", "b"]]}, {"routing": "dimension-order", "grid": [2]}])
def test_fixed_and_dimension_order_routes_take_the_widest_of_parallel_links(fixed):
    graph = nx.MultiDiGraph(**fixed)
    for rate in (1.0, 3.0, 3.0, 2.0):
        graph.add_edge("a", "b", bandwidth=rate)
        graph.add_edge("b", "a", bandwidth=rate)
    assert Cluster.from_graph(graph).routes([0], [1]).links.tolist() == [1]


@pytest.mark.parametrize(
    "graph",
    [
        dragonfly(5, (2, 2), 2, global_links=2, **RATE),
        leaf_spine(
            8,
            4,
            2,
            rail_optimised=True,
            host=MultiGpu(n_gpus=2, inside="nvswitch", nvlink_bandwidth=1e9, n_pcie_switches=2, n_nics=2),
            **RATE,
        ),
    ],
    ids=["dragonfly", "rails"],
)
def test_routes_do_not_depend_on_the_order_of_questions(graph):
    asked_at_once, one_by_one = Cluster.from_graph(graph), Cluster.from_graph(graph)
    src, dst = _all_pairs(asked_at_once.workers)
    whole = asked_at_once.routes(src, dst)
    for i in np.random.default_rng(0).permutation(len(src)):
        assert (one_by_one.routes(src[i : i + 1], dst[i : i + 1]).links == whole[i]).all()


@pytest.mark.parametrize("n_switches", [1, 2, 3])
def test_machines_forward_what_switches_carry_over_more_hops(n_switches):
    """Between two leaves, a path through a machine has 3 hops, one over n switches n + 1: the shorter one is taken."""
    graph = nx.Graph()
    graph.add_nodes_from(["leaf0", "leaf1", *range(n_switches)], kind="switch")
    nx.add_path(graph, ["leaf0", *range(n_switches), "leaf1"], bandwidth=1.0)
    for name in ("a", "b"):
        for i in (0, 1):
            graph.add_node(f"{name}{i}", kind="gpu", host=name)
            graph.add_edge(f"{name}{i}", f"leaf{i}", bandwidth=1.0)
        graph.add_edge(f"{name}0", f"{name}1", bandwidth=10.0)
    for i in (0, 1):
        graph.add_edge(f"end{i}", f"leaf{i}", bandwidth=1.0)
    cluster = Cluster.from_graph(graph)
    routes = cluster.routes([cluster.node("end0")], [cluster.node("end1")])
    assert len(routes.links) == 2 + min(n_switches + 1, 3)


def test_switches_of_machines_forward_what_is_faster_over_them():
    """A machine's switch is attached to both leaves, and its links are wider than those of the spine."""
    graph = nx.Graph()
    graph.add_nodes_from(["leaf0", "leaf1", "spine"], kind="switch")
    graph.add_node("card", kind="switch", host="a")
    graph.add_edge("a", "card", bandwidth=1.0)
    for i in (0, 1):
        graph.add_edge(f"leaf{i}", "spine", bandwidth=1.0)
        graph.add_edge(f"leaf{i}", "card", bandwidth=2.0)
        graph.add_edge(f"leaf{i}", f"end{i}", bandwidth=1.0)
    cluster = Cluster.from_graph(graph)
    routes = cluster.routes([cluster.node("end0")], [cluster.node("end1")])
    assert cluster.link_bandwidth[routes.links].tolist() == [1.0, 2.0, 2.0, 1.0]


def test_ecmp_spreads_over_all_cores():
    """Of 64 routes between two pods over 4 cores, an even hash gives 16 each; allow half to double."""
    cluster = Cluster.from_graph(fat_tree(4, routing="ecmp", **RATE))
    src, dst = (np.array(side) for side in zip(*itertools.permutations(range(16), 2), strict=True))
    far = src // 4 != dst // 4
    routes = cluster.routes(src[far], dst[far])
    cores = cluster.link_dst[routes.links.reshape(-1, 6)[:, 2]]
    uses = np.bincount(cores)[np.unique(cores)]
    assert len(uses) == 4
    assert uses.min() > far.sum() / 8
    assert uses.max() < far.sum() / 2


def _busiest(cluster, src, dst):
    return np.bincount(cluster.link_channel[cluster.routes(src, dst).links]).max()


@pytest.mark.parametrize("k", [4, 6, 8])
def test_d_mod_k_shifts_are_free_of_contention(k):
    """Zahavi 2012: under any cyclic shift no channel carries two flows. Lowest-link routing fails this."""
    graph = fat_tree(k, **RATE)
    cluster = Cluster.from_graph(graph)
    workers = cluster.workers
    assert all(_busiest(cluster, workers, np.roll(workers, -s)) == 1 for s in range(1, len(workers)))
    graph.graph["routing"] = "shortest"
    assert _busiest(Cluster.from_graph(graph), workers, np.roll(workers, -k)) > 1


def test_d_mod_k_on_leaf_spine_and_on_rails():
    cluster = Cluster.from_graph(leaf_spine(4, 4, 4, **RATE))
    workers = cluster.workers
    assert all(_busiest(cluster, workers, np.roll(workers, -s)) == 1 for s in range(1, len(workers)))
    host = MultiGpu(n_gpus=2, inside="nvswitch", nvlink_bandwidth=1e9, n_pcie_switches=2, n_nics=2)
    rails = Cluster.from_graph(leaf_spine(4, 4, 4, rail_optimised=True, host=host, **RATE))
    gpus = rails.workers
    for machines in range(1, 8):  # shifts by whole machines stay on their rail
        assert _busiest(rails, gpus, np.roll(gpus, -2 * machines)) == 1


def test_torus_routes_go_dimension_by_dimension():
    cluster = Cluster.from_graph(torus((4, 5), **RATE))
    nodes = cluster.link_dst[cluster.routes([0], [2 * 5 + 4]).links]
    assert nodes.tolist() == [5, 10, 14]  # two steps down the first dimension, one back round the second


def test_between_slices_routes_pass_the_switch():
    """Inside a slice, routes are those of a torus alone, though the switch would be nearer."""
    sizes, n_slices = (4, 5), 3
    cluster, alone = (Cluster.from_graph(torus(sizes, slices=n, **RATE)) for n in (n_slices, 1))
    src, dst = (each.ravel() for each in np.indices((60, 60)))
    routes, inside = cluster.routes(src, dst), alone.routes(src % 20, dst % 20)
    for i in range(len(src)):
        passed = cluster.link_dst[routes[i]].tolist()
        if src[i] // 20 == dst[i] // 20:
            assert passed == (alone.link_dst[inside[i]] + src[i] // 20 * 20).tolist()
        else:
            assert passed == [60, dst[i]]
    assert cluster.locality_order(cluster.workers[::-1])[:3].tolist() == [59, 58, 57]


def test_large_networks_are_routed():
    """10,000 machines: a ring over all, each route of the right length."""
    cluster = Cluster.from_graph(leaf_spine(250, 40, 10, **RATE))
    workers = cluster.workers
    lengths = np.diff(cluster.routes(workers, np.roll(workers, -1)).offsets)
    assert len(workers) == 10_000
    assert np.bincount(lengths).tolist() == [0, 0, 9750, 0, 250]


def test_disconnected_nodes_are_named_only_when_asked_for():
    graph = nx.Graph()
    graph.add_edge("a", "b", bandwidth=1.0)
    graph.add_edge("c", "d", bandwidth=1.0)
    cluster = Cluster.from_graph(graph)
    assert len(cluster.routes([0], [1]).links) == 1
    for question in (lambda: cluster.routes([0], [3]), lambda: cluster.check_connected([0, 1, 3])):
        with pytest.raises(ConfigError, match=r"from 'a' to 'd'.*add a link"):
            question()
    cluster.check_connected([2, 3])


def test_one_way_networks_are_not_connected():
    graph = nx.DiGraph()
    graph.add_edge("a", "b", bandwidth=1.0)
    cluster = Cluster.from_graph(graph)
    with pytest.raises(ConfigError, match="from 'b' to 'a'"):
        cluster.check_connected([0, 1])


def test_fixed_routes_override_the_policy():
    graph = nx.Graph(routes=[["a", "x", "y", "b"]])
    graph.add_nodes_from("ab", kind="host")
    graph.add_nodes_from("xy", kind="switch")
    for u, v in ["ax", "ay", "xy", "xb", "yb"]:
        graph.add_edge(u, v, bandwidth=1.0)
    cluster = Cluster.from_graph(graph)
    routes = cluster.routes([0, 1, 0], [1, 0, 0])
    assert [cluster.node_names[node] for node in cluster.link_dst[routes[0]]] == ["x", "y", "b"]
    assert len(routes[1]) == 2  # the way back is the router's
    assert len(routes[2]) == 0
    assert Cluster.from_graph(cluster.to_graph()).fixed_routes == cluster.fixed_routes


@pytest.mark.parametrize("bad", [-1, 5])
def test_indices_that_are_no_nodes(bad):
    with pytest.raises(ConfigError, match="0 to 3"):
        Cluster.from_graph(star(3, **RATE)).routes([0], [bad])


def test_adaptive_routing_names_the_nearest_policy():
    with pytest.raises(ConfigError, match="adaptive routing is not simulated; 'spray' uses all equal paths"):
        ddlsim.load_cluster("dgx-h100-pod+routing=adaptive")
