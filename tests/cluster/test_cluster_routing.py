"""Routes against networkx: contiguous, shortest, of least latency; policies spread or avoid contention."""

import itertools

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlsim.cluster import Cluster, MultiGpu, dragonfly, fat_tree, hypercube, leaf_spine, racks, star, torus
from ddlsim.errors import ConfigError

RATE = {"bandwidth": 1e9, "latency": 1e-6}


def _all_pairs(nodes):
    src, dst = np.nonzero(~np.eye(len(nodes), dtype=bool))
    return nodes[src], nodes[dst]


def _check_against_networkx(cluster, nodes):
    """Every route is contiguous, as short as networkx's, and of the least latency among those."""
    src, dst = _all_pairs(np.asarray(nodes))
    routes = cluster.routes(src, dst)
    graph = nx.DiGraph()
    graph.add_nodes_from(range(cluster.n_nodes))
    for link in range(cluster.n_links):
        u, v = int(cluster.link_src[link]), int(cluster.link_dst[link])
        # one hop outweighs all latencies, so Dijkstra minimises hops first
        cost = 1.0 + float(cluster.link_latency[link])
        if not graph.has_edge(u, v) or graph[u][v]["cost"] > cost:
            graph.add_edge(u, v, cost=cost)
    best = dict(nx.all_pairs_dijkstra_path_length(graph, weight="cost"))
    for i, (s, d) in enumerate(zip(src.tolist(), dst.tolist(), strict=True)):
        links = routes[i]
        assert cluster.link_src[links[0]] == s
        assert cluster.link_dst[links[-1]] == d
        assert (cluster.link_dst[links[:-1]] == cluster.link_src[links[1:]]).all()
        assert len(links) == nx.shortest_path_length(graph, s, d)
        assert len(links) + cluster.link_latency[links].sum() == pytest.approx(best[s][d], rel=1e-12)


@st.composite
def connected_graphs(draw):
    """Random connected multigraphs with latencies of 0..4 units and parallel links."""
    n = draw(st.integers(2, 9))
    tree = [(draw(st.integers(0, i - 1)), i) for i in range(1, n)]
    pair = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda p: p[0] != p[1])
    graph = nx.MultiGraph()
    graph.add_nodes_from(range(n), kind="host")
    for u, v in tree + draw(st.lists(pair, max_size=12)):
        graph.add_edge(u, v, bandwidth=1.0, latency=draw(st.integers(0, 4)) * 1e-4)
    return graph


@settings(max_examples=60, deadline=None)
@given(graph=connected_graphs(), policy=st.sampled_from(["shortest", "ecmp", "d-mod-k"]))
def test_random_graphs(graph, policy):
    graph.graph["routing"] = policy
    cluster = Cluster.from_graph(graph)
    _check_against_networkx(cluster, range(cluster.n_nodes))


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
            host=MultiGpu(
                n_gpus=8, inside="hybrid_cube_mesh", nvlink_bandwidth=1e9, n_pcie_switches=4, n_nics=4
            ),
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
    _check_against_networkx(cluster, np.flatnonzero(cluster.is_endpoint))


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


def test_routes_do_not_depend_on_the_order_of_questions():
    graph = dragonfly(5, (2, 2), 2, global_links=2, **RATE)
    asked_at_once, one_by_one = Cluster.from_graph(graph), Cluster.from_graph(graph)
    src, dst = _all_pairs(asked_at_once.workers)
    whole = asked_at_once.routes(src, dst)
    for i in np.random.default_rng(0).permutation(len(src)):
        assert (one_by_one.routes(src[i : i + 1], dst[i : i + 1]).links == whole[i]).all()


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
    with pytest.raises(ConfigError, match=r"0\.\.3"):
        Cluster.from_graph(star(3, **RATE)).routes([0], [bad])
