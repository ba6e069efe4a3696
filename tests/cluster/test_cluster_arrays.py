"""The Cluster object: immutability, what-ifs, locality order, text."""

import networkx as nx
import numpy as np
import pytest
from draws import slow

from ddlsim.cluster import (
    Cluster,
    MultiGpu,
    fat_tree,
    leaf_spine,
    load_cluster,
    racks,
    star,
    torus,
)
from ddlsim.errors import ConfigError

RATE = {"bandwidth": 1e9, "latency": 1e-6}


def test_arrays_cannot_be_changed():
    cluster = Cluster.from_graph(star(2, **RATE))
    for array in (cluster.link_bandwidth, cluster.workers, cluster.channel_capacity, cluster.is_endpoint):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    with pytest.raises(AttributeError):
        cluster.name = "other"


def test_workers_are_gpus_and_servers_are_cpus():
    cluster = Cluster.from_graph(star(2, host=MultiGpu(n_gpus=2), **RATE))
    assert [cluster.node_names[node] for node in cluster.workers] == [
        "h0.gpu0",
        "h0.gpu1",
        "h1.gpu0",
        "h1.gpu1",
    ]
    assert [cluster.node_names[node] for node in cluster.servers] == ["h0.cpu", "h1.cpu"]
    assert cluster.host_of[cluster.node("h1.pcie0")] == 1
    assert cluster.host_of[cluster.node("switch")] == -1
    assert not cluster.is_endpoint[cluster.node("switch")]


def test_scaled_changes_one_kind_only():
    cluster = Cluster.from_graph(racks(2, 2, **RATE))
    faster = cluster.scaled("trunk", bandwidth=2.0, latency=0.5)
    trunk = np.array(cluster.link_kind) == "trunk"
    np.testing.assert_allclose(faster.link_bandwidth / cluster.link_bandwidth, np.where(trunk, 2.0, 1.0))
    np.testing.assert_allclose(faster.link_latency / cluster.link_latency, np.where(trunk, 0.5, 1.0))
    assert faster.channel_capacity.max() == 2 * cluster.channel_capacity.max()


def test_scaled_latency_changes_routes():
    graph = nx.MultiGraph()
    graph.add_edge("a", "b", bandwidth=1.0, latency=2.0, kind="slow")
    graph.add_edge("a", "b", bandwidth=1.0, latency=1.0, kind="quick")
    cluster = Cluster.from_graph(graph)
    worse = cluster.scaled("quick", latency=3.0)
    chosen = [c.link_kind[c.routes([0], [1]).links[0]] for c in (cluster, worse)]
    assert chosen == ["quick", "slow"]


def test_scaled_errors():
    cluster = Cluster.from_graph(racks(2, 2, **RATE))
    with pytest.raises(ConfigError, match=r"link kind 'trunks'; did you mean 'trunk'\?"):
        cluster.scaled("trunks")
    with pytest.raises(ConfigError, match=r"bandwidth = 0.*above 0"):
        cluster.scaled("trunk", bandwidth=0)
    with pytest.raises(ConfigError, match=r"latency = nan"):
        cluster.scaled("trunk", latency=float("nan"))


def _crossings(cluster, ring, group_of):
    """Return how many hops of the ring lead from one group to another."""
    groups = np.array([group_of(int(node)) for node in ring])
    return int((groups != np.roll(groups, -1)).sum())


@pytest.mark.parametrize(
    ("graph", "per_group", "n_groups"),
    [
        (racks(2, 4, **RATE), 4, 2),
        (racks(4, 4, **RATE), 4, 4),
        (leaf_spine(3, 5, 2, **RATE), 5, 3),
        (fat_tree(4, **RATE), 4, 4),
    ],
    ids=["two_racks", "racks", "leaf_spine", "fat_tree"],
)
def test_a_local_ring_enters_each_group_once(graph, per_group, n_groups):
    """The machines come in a shuffled order; the groups (racks, leaves, pods) must be found in the fabric."""
    rng = np.random.default_rng(3)
    names = [node for node, data in graph.nodes(data=True) if data["kind"] != "switch"]
    shuffled = nx.MultiDiGraph(**graph.graph)
    order = [names[i] for i in rng.permutation(len(names))] + [node for node in graph if node not in names]
    shuffled.add_nodes_from((node, graph.nodes[node]) for node in order)
    shuffled.add_edges_from(graph.edges(keys=True, data=True))
    cluster = Cluster.from_graph(shuffled)
    ring = cluster.workers[cluster.locality_order(cluster.workers)]
    assert sorted(ring) == sorted(cluster.workers)
    group = lambda node: int(cluster.node_names[node][1:]) // per_group  # noqa: E731
    assert _crossings(cluster, ring, group) == n_groups


@pytest.mark.parametrize("name", [slow("theta"), "dgx-h100-pod", "three-regions-wan"])
def test_a_local_ring_is_never_longer_than_the_plain_one(name):
    """A dragonfly is no tree: the tour may tear groups apart, and then the plain order must win."""
    cluster = load_cluster(name)
    plain = cluster.workers
    local = plain[cluster.locality_order(plain)]
    lengths = [len(cluster.routes(ring, np.roll(ring, -1)).links) for ring in (local, plain)]
    assert lengths[0] <= lengths[1]


def test_a_local_ring_keeps_machines_together_and_follows_fast_links():
    """On a DGX-1 the pairs with two NVLinks form a ring through all eight GPUs."""
    cluster = load_cluster("dgx1-v100-16")
    mixed = np.random.default_rng(0).permutation(cluster.workers)
    ring = mixed[cluster.locality_order(mixed)]
    assert _crossings(cluster, ring, lambda node: cluster.host_of[node]) == 16
    single = load_cluster("dgx1-v100")
    ring = single.workers[single.locality_order(single.workers)]
    routes = single.routes(ring, np.roll(ring, -1))
    assert set(single.link_bandwidth[routes.links]) == {50e9}


def test_a_local_ring_on_a_torus_takes_single_steps():
    cluster = Cluster.from_graph(torus((4, 6), **RATE))
    ring = cluster.workers[cluster.locality_order(cluster.workers)]
    assert (np.diff(cluster.routes(ring, np.roll(ring, -1)).offsets) == 1).all()


def test_locality_order_of_few_nodes():
    cluster = Cluster.from_graph(star(3, **RATE))
    assert cluster.locality_order([]).tolist() == []
    assert cluster.locality_order([2]).tolist() == [0]
    assert sorted(cluster.locality_order([2, 0, 2])) == [0, 1, 2]


def test_texts():
    cluster = load_cluster("office-1gbe")
    assert repr(cluster) == "<Cluster 'office-1gbe': 8 workers, 8 hosts, 1 switches, 16 links>"
    text = cluster.summary()
    assert "8 x desktop-cpu" in text
    assert "16 links of 1 Gbit/s, 50 us, efficiency 0.9415" in text
    with pytest.raises(ConfigError, match=r"unknown node 'swich'; did you mean 'switch'\?"):
        cluster.node("swich")
