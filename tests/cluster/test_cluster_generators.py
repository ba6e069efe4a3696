"""Generators against the certificates of their graphs: counts, degrees, diameter, bisection."""

import itertools
import math

import networkx as nx
import numpy as np
import pytest

from ddlsim.cluster import (
    Cluster,
    Host,
    MultiGpu,
    dragonfly,
    fat_tree,
    fully_connected,
    hypercube,
    leaf_spine,
    line,
    racks,
    ring,
    star,
    torus,
    two_racks,
)
from ddlsim.cluster.nodes import size_of
from ddlsim.errors import ConfigError

RATE = {"bandwidth": 1e9, "latency": 1e-6}


def _simple(graph):
    """Return the undirected simple graph; its edges must come in both directions."""
    assert all(graph.has_edge(v, u) for u, v in graph.edges())
    return nx.Graph(graph.to_undirected())


def _of_kind(graph, kind):
    return [node for node, data in graph.nodes(data=True) if data["kind"] == kind]


def _bisection(graph, left, right):
    """Return the maximum flow in bytes/s between two sets of nodes (unlimited at both ends)."""
    flow = nx.DiGraph()
    for u, v, data in graph.edges(data=True):
        have = flow.get_edge_data(u, v, {"capacity": 0.0})["capacity"]
        flow.add_edge(u, v, capacity=have + data["bandwidth"])
    for node in left:
        flow.add_edge("source", node)
    for node in right:
        flow.add_edge(node, "sink")
    return nx.maximum_flow_value(flow, "source", "sink")


def test_star():
    graph = star(5, **RATE)
    simple = _simple(graph)
    assert len(_of_kind(graph, "host")) == 5
    assert nx.diameter(simple) == 2
    assert simple.degree("switch") == 5


@pytest.mark.parametrize(
    ("graph", "n_nodes", "degree", "diameter"),
    [
        (ring(9, **RATE), 9, 2, 4),
        (fully_connected(6, **RATE), 6, 5, 1),
        (torus((4, 5), **RATE), 20, 4, 4),
        (torus((3, 4, 5), **RATE), 60, 6, 5),
        (hypercube(4, **RATE), 16, 4, 4),
        (torus((2, 4), **RATE), 8, 3, 3),
    ],
    ids=["ring", "full", "torus2d", "torus3d", "hypercube", "torus2x4"],
)
def test_direct_networks_are_regular(graph, n_nodes, degree, diameter):
    simple = _simple(graph)
    assert set(dict(simple.degree()).values()) == {degree}
    assert simple.number_of_nodes() == n_nodes
    assert nx.diameter(simple) == diameter
    assert graph.number_of_edges() == n_nodes * degree  # no link twice


def test_torus_and_hypercube_are_networkx_ones():
    assert nx.is_isomorphic(_simple(torus((3, 4), **RATE)), nx.grid_graph((3, 4), periodic=True))
    assert nx.is_isomorphic(_simple(hypercube(3, **RATE)), nx.hypercube_graph(3))


def test_slices_are_tori_that_meet_in_a_switch():
    graph = torus((3, 4), slices=2, nic_bandwidth=2e9, nic_latency=7e-6, **RATE)
    nics = [(u, v, data) for u, v, data in graph.edges(data=True) if data["kind"] == "nic"]
    assert len(nics) == 2 * 24
    assert {(data["bandwidth"], data["latency"]) for *_, data in nics} == {(2e9, 7e-6)}
    graph.remove_node("switch")
    slices = [graph.subgraph(part) for part in nx.strongly_connected_components(graph)]
    assert sorted(map(sorted, slices)) == [sorted(f"h{i}" for i in part) for part in (range(12), range(12, 24))]
    assert all(nx.is_isomorphic(_simple(part), nx.grid_graph((3, 4), periodic=True)) for part in slices)


def test_line_ends_have_one_neighbour():
    degrees = dict(_simple(line(5, **RATE)).degree())
    assert [degrees[f"h{i}"] for i in range(5)] == [1, 2, 2, 2, 1]


@pytest.mark.parametrize("k", [2, 4, 6])
def test_fat_tree_counts_and_full_bisection(k):
    """k**3/4 machines, 5k**2/4 switches of k ports; any half can talk to the other half at full rate."""
    graph = fat_tree(k, **RATE)
    hosts, switches = _of_kind(graph, "host"), _of_kind(graph, "switch")
    assert (len(hosts), len(switches)) == (k**3 // 4, 5 * k**2 // 4)
    degrees = _simple(graph).degree()
    assert {degrees[switch] for switch in switches} == {k}
    half = len(hosts) // 2
    assert _bisection(graph, hosts[:half], hosts[half:]) == pytest.approx(half * 1e9)
    assert nx.diameter(_simple(graph)) == 6


@pytest.mark.parametrize("oversubscription", [1.0, 2.0, 4.0])
def test_leaf_spine_oversubscription_is_the_bisection(oversubscription):
    graph = leaf_spine(4, 8, 2, oversubscription=oversubscription, **RATE)
    hosts = _of_kind(graph, "host")
    assert _bisection(graph, hosts[:16], hosts[16:]) == pytest.approx(16e9 / oversubscription)
    assert nx.diameter(_simple(graph)) == 4


def test_leaf_spine_rails_put_each_nic_on_its_leaf():
    host = MultiGpu(n_gpus=2, inside="nvlink_mesh", nvlink_bandwidth=1e10, n_pcie_switches=2, n_nics=2)
    graph = leaf_spine(4, 3, 2, rail_optimised=True, host=host, **RATE)
    assert len(_of_kind(graph, "gpu")) == 2 * 3 * 2
    assert graph.has_edge("h4.pcie0", "leaf2")
    assert graph.has_edge("h4.pcie1", "leaf3")
    assert not graph.has_edge("h4.pcie0", "leaf3")


def test_two_racks_share_one_trunk():
    graph = two_racks(4, oversubscription=2.0, **RATE)
    hosts = _of_kind(graph, "host")
    assert graph["rack0"]["rack1"][0]["bandwidth"] == 2e9
    assert _bisection(graph, hosts[:4], hosts[4:]) == pytest.approx(2e9)


def test_racks_meet_in_the_core():
    graph = racks(3, 2, trunk_bandwidth="4 Gbit/s", **RATE)
    assert graph["rack1"]["core"][0]["bandwidth"] == 5e8
    assert nx.diameter(_simple(graph)) == 4


def test_balanced_dragonfly_has_diameter_three_between_routers():
    """Kim et al.: a = 2p = 2h, a*h + 1 groups, one global link per pair, so local-global-local."""
    graph = dragonfly(9, (4,), 2, global_links=1, **RATE)
    routers = _simple(graph).subgraph(_of_kind(graph, "switch"))
    assert len(_of_kind(graph, "host")) == 72
    assert set(dict(routers.degree()).values()) == {3 + 2}
    assert nx.diameter(routers) == 3


def test_dragonfly_group_with_rows_and_columns():
    graph = dragonfly(1, (3, 4), 1, global_links=1, local_cables=(2, 1), **RATE)
    routers = _simple(graph).subgraph(_of_kind(graph, "switch"))
    assert nx.is_isomorphic(routers, nx.cartesian_product(nx.complete_graph(3), nx.complete_graph(4)))
    assert graph["group0.router0"]["group0.router4"][0]["bandwidth"] == 2e9  # a column, two cables
    assert graph["group0.router0"]["group0.router1"][0]["bandwidth"] == 1e9


def test_dragonfly_may_leave_places_empty():
    assert len(_of_kind(dragonfly(2, (2,), 2, global_links=1, n_hosts=5, **RATE), "host")) == 5


@pytest.mark.parametrize("make", [star, ring, line, fully_connected])
def test_reverse_bandwidth_and_half_duplex(make):
    one = Cluster.from_graph(make(3, bandwidth=2e9, latency=0.0, reverse_bandwidth=1e9))
    assert one.n_channels == one.n_links
    assert sorted(set(one.link_bandwidth)) == [1e9, 2e9]
    half = Cluster.from_graph(make(3, bandwidth=2e9, latency=0.0, shared=True))
    assert half.n_channels == half.n_links // 2
    for channel in range(half.n_channels):
        a, b = np.flatnonzero(half.link_channel == channel)
        assert (half.link_src[a], half.link_dst[a]) == (half.link_dst[b], half.link_src[b])


@pytest.mark.parametrize("inside", ["nvswitch", "nvlink_mesh", "hybrid_cube_mesh", "pcie_tree"])
def test_multi_gpu_interiors(inside):
    nvlink = None if inside == "pcie_tree" else "25 GB/s"
    host = MultiGpu(
        n_gpus=8, inside=inside, nvlink_bandwidth=nvlink, n_pcie_switches=4, n_nics=4, device="v100", cpu="x"
    )
    cluster = Cluster.from_graph(star(2, host=host, **RATE))
    assert len(cluster.workers) == 16
    assert len(cluster.servers) == 2
    assert {cluster.device_of[node] for node in cluster.workers} == {"v100"}
    assert {cluster.device_of[node] for node in cluster.servers} == {"x"}
    # GPU 7 of the first machine to GPU 0 of the second: PCIe, NIC, NIC, PCIe
    far = cluster.routes([cluster.node("h0.gpu7")], [cluster.node("h1.gpu0")])
    assert [cluster.link_kind[link] for link in far.links] == ["pcie", "nic", "nic", "pcie"]
    near = cluster.routes([cluster.node("h0.gpu0")], [cluster.node("h0.gpu1")])
    expected = {
        "nvswitch": ["nvlink"] * 2,
        "nvlink_mesh": ["nvlink"],
        "hybrid_cube_mesh": ["nvlink"],
        "pcie_tree": ["pcie"] * 2,
    }
    assert [cluster.link_kind[link] for link in near.links] == expected[inside]


def test_hybrid_cube_mesh_uses_six_links_of_each_gpu():
    host = MultiGpu(n_gpus=8, inside="hybrid_cube_mesh", nvlink_bandwidth=1.0)
    graph = star(1, host=host, **RATE)
    gpus = _of_kind(graph, "gpu")
    for gpu in gpus:
        beside = graph.out_edges(gpu, data=True)
        assert sum(data["bandwidth"] for *_, data in beside if data["kind"] == "nvlink") == 6.0


def test_one_nic_serves_all_gpus_of_a_machine():
    host = MultiGpu(n_gpus=4, n_pcie_switches=2)
    cluster = Cluster.from_graph(star(2, host=host, **RATE))
    first, second = cluster.workers[:4], cluster.workers[4:]
    routes = cluster.routes(first, second)
    nics = {link for link in routes.links if cluster.link_kind[link] == "nic"}
    assert len(nics) == 2
    assert all(len(routes[i]) == 6 for i in range(4))  # pcie, pcie to the CPU, nic; and back


@pytest.mark.parametrize("make", [lambda h: ring(4, host=h, **RATE), lambda h: torus((2, 3), host=h, **RATE)])
def test_multi_gpu_machines_in_direct_networks(make):
    host = MultiGpu(n_gpus=2, n_pcie_switches=2, n_nics=2)
    cluster = Cluster.from_graph(make(host))
    n = len(cluster.workers)
    pairs = list(itertools.permutations(range(n), 2))
    routes = cluster.routes(*(cluster.workers[np.array(side)] for side in zip(*pairs, strict=True)))
    assert len(routes) == n * (n - 1)
    assert np.diff(routes.offsets).min() > 0


def test_overheads_reach_the_arrays():
    host = Host(speed=2.0, send_overhead="1 us", recv_overhead=2e-6, reduce_bandwidth="10 GB/s")
    cluster = Cluster.from_graph(star(2, host=host, **RATE))
    switch = cluster.node("switch")
    assert cluster.speed[0] == 2.0
    assert cluster.send_overhead[0] == pytest.approx(1e-6)
    assert cluster.recv_overhead[0] == 2e-6
    assert cluster.reduce_time[0] == pytest.approx(1e-10)
    assert cluster.send_overhead[switch] == 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: star(0, **RATE), ["n_hosts = 0", "from 1 to"]),
        (lambda: star(2, bandwidth=-1.0, latency=0.0), ["bandwidth = -1.0", "above 0"]),
        (lambda: star(2, bandwidth=math.nan, latency=0.0), ["bandwidth = nan", "finite"]),
        (lambda: star(2, bandwidth="25 GB", latency=0.0), ["'25 GB'", "bandwidth", "25 Gbit/s"]),
        (lambda: star(2, bandwidth=1.0, latency="1 Gbit/s"), ["latency", "1 Gbit/s", "10 us"]),
        (lambda: star(2, efficiency=1.5, **RATE), ["efficiency = 1.5", "above 0 and at most 1"]),
        (lambda: star(2, shared=True, reverse_bandwidth=1.0, **RATE), ["reverse_bandwidth = 1.0", "shared"]),
        (lambda: fat_tree(5, **RATE), ["k = 5", "even"]),
        (lambda: torus([], **RATE), ["sizes = ()", "[8, 8]"]),
        (lambda: torus([4, 0], **RATE), ["sizes[1] = 0", "from 1 to"]),
        (lambda: leaf_spine(2, 2, 1, oversubscription=0.0, **RATE), ["oversubscription = 0.0"]),
        (
            lambda: leaf_spine(2, 2, 1, oversubscription=2.0, trunk_bandwidth=1.0, **RATE),
            ["oversubscription = 2.0", "trunk_bandwidth = 1.0", "remove one"],
        ),
        (
            lambda: leaf_spine(
                3, 2, 1, rail_optimised=True, host=MultiGpu(n_gpus=2, n_pcie_switches=2, n_nics=2), **RATE
            ),
            ["n_leaves = 3", "NICs per machine (2)"],
        ),
        (lambda: dragonfly(2, (2,), 1, global_links=1, n_hosts=9, **RATE), ["n_hosts = 9", "4 machines"]),
        (lambda: star(2, host=MultiGpu(n_gpus=8, inside="nvswich"), **RATE), ["'nvswich'", "'nvswitch'"]),
        (
            lambda: star(2, host=MultiGpu(n_gpus=8, inside="nvswitch"), **RATE),
            ["requires nvlink_bandwidth"],
        ),
        (
            lambda: star(2, host=MultiGpu(n_gpus=4, inside="hybrid_cube_mesh", nvlink_bandwidth=1.0), **RATE),
            ["n_gpus = 4", "8"],
        ),
        (lambda: star(2, host=MultiGpu(n_gpus=4, nvlink_bandwidth=1.0), **RATE), ["no effect", "pcie_tree"]),
    ],
)
def test_senseless_parameters_are_named(call, words):
    with pytest.raises(ConfigError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


# ---------------------------------------------------------------- sizes

BIG = 10**12


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: star(BIG, **RATE), "n_hosts = 1000000000000: must be an integer from 1 to 500000"),
        (lambda: ring(BIG, **RATE), "n_hosts"),
        (lambda: line(BIG, **RATE), "n_hosts"),
        (lambda: fully_connected(100_000, **RATE), "9999900000 links exceed the limit of 2000000"),
        (lambda: torus([10**4, 10**4], **RATE), "100000000 nodes exceed the limit of 500000"),
        (lambda: torus([1] * 1000, **RATE), "must be a list of 1 to 20 sizes"),
        (lambda: hypercube(BIG, **RATE), "n_dims"),
        (lambda: hypercube(40, **RATE), "n_dims = 40 gives 2 \\*\\* 40 machines"),
        (lambda: fat_tree(10**5, **RATE), "nodes exceed the limit of"),
        (lambda: leaf_spine(10**5, 1, 10**5, **RATE), "20000200000 links exceed the limit of"),
        (lambda: racks(10**5, 10**5, **RATE), "nodes exceed the limit of"),
        (lambda: dragonfly(10**5, [10**5], 10**5, global_links=1, **RATE), "nodes exceed the limit of"),
        (lambda: dragonfly(2, [2], 1, global_links=10**5, **RATE), None),
        (lambda: star(2, host=MultiGpu(BIG), **RATE), "n_gpus = 1000000000000: must be"),
        (lambda: star(10**5, host=MultiGpu(8), **RATE), "1000001 nodes exceed the limit of"),
        (
            lambda: star(1, host=MultiGpu(5000, "nvlink_mesh", nvlink_bandwidth=1e9), **RATE),
            "links exceed the limit of",
        ),
        (lambda: star(10**400, **RATE), "n_hosts = 10..400 approximately: must be an integer from 1 to 500000"),
    ],
)
def test_sizes_are_limited_before_anything_is_built(make, words, monkeypatch):
    """None: within the limits, so it would be built."""

    def built(*arguments, **others):
        raise RuntimeError("built")

    monkeypatch.setattr("ddlsim.cluster.generators.add_host", built)
    if words is None:
        with pytest.raises(RuntimeError, match="built"):
            make()
        return
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize("host", [Host(), MultiGpu(4), MultiGpu(4, "nvswitch", nvlink_bandwidth=1e9, n_pcie_switches=2,
                         n_nics=2), MultiGpu(3, "nvlink_mesh", nvlink_bandwidth=1e9)], ids=repr)  # fmt: skip
@pytest.mark.parametrize(
    "make",
    [
        lambda **more: star(3, **more),
        lambda **more: ring(5, **more),
        lambda **more: ring(2, **more),
        lambda **more: line(4, **more),
        lambda **more: fully_connected(4, **more),
        lambda **more: torus([1, 2, 3], **more),
        lambda **more: hypercube(3, **more),
        lambda **more: leaf_spine(4, 3, 2, **more),
        lambda **more: fat_tree(4, **more),
        lambda **more: racks(3, 2, **more),
        lambda **more: dragonfly(3, [2, 3], 2, global_links=2, **more),
    ],
)  # fmt: skip
def test_the_sizes_that_are_checked_are_those_of_the_graph(make, host, monkeypatch):
    checked = []
    target = "ddlsim.cluster.generators.check_size"
    monkeypatch.setattr(target, lambda nodes, links, where: checked.append((nodes, links)))
    graph = make(host=host, **RATE)
    assert checked == [(graph.number_of_nodes(), graph.number_of_edges())]


def test_the_sizes_of_slices_are_checked(monkeypatch):
    checked = []
    target = "ddlsim.cluster.generators.check_size"
    monkeypatch.setattr(target, lambda nodes, links, where: checked.append((nodes, links)))
    graph = torus([2, 3], slices=3, **RATE)
    assert checked[0] == (graph.number_of_nodes(), graph.number_of_edges())
    with pytest.raises(ConfigError, match="slices = 2 requires machines with a single device; remove n_gpus"):
        torus([2, 2], slices=2, host=MultiGpu(4), **RATE)


@pytest.mark.parametrize(("n_nics", "n_switches", "on_each"), [
    (2, 1, [2]), (4, 4, [1, 1, 1, 1]), (8, 4, [2, 2, 2, 2]), (5, 4, [2, 1, 1, 1]), (2, 4, [1, 0, 1, 0]),
    (32, 8, [4] * 8),
])  # fmt: skip
def test_any_number_of_interfaces_is_spread_over_the_pcie_switches(n_nics, n_switches, on_each):
    host = MultiGpu(n_gpus=8, n_pcie_switches=n_switches, n_nics=n_nics)
    graph = star(2, bandwidth="25 GB/s", latency="1 us", host=host)
    assert [graph.number_of_edges(f"h1.pcie{i}", "switch") for i in range(n_switches)] == on_each
    assert graph.number_of_edges() == size_of(host)[1] * 2 + 2 * 2 * n_nics
