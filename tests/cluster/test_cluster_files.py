"""Formats: round trips through graphs, node-link JSON, GraphML; what TOML builds; errors in one line."""

import dataclasses
import json

import networkx as nx
import numpy as np
import pytest
from draws import few, seeds
from hypothesis import given, settings
from hypothesis import strategies as st

import ddlsim
from ddlsim.cluster import Cluster, Host, MultiGpu, cluster_names, load_cluster, ring, star
from ddlsim.cluster.files import GENERATORS
from ddlsim.cluster.graphs import from_graph, to_graph
from ddlsim.errors import ConfigError
from ddlsim.workload.devices import load_device

STAR = """
[generator]
type = "star"
n_hosts = 4
bandwidth = "10 Gbit/s"
latency = "10 us"
"""

PAIR = """
routing = "ecmp"
[[hosts]]
name = "a"
device = "v100"
speed = 0.5
send_overhead = "1 us"
source = "the invoice"
[[hosts]]
name = "b"
count = 2
[[switches]]
name = "s"
[[links]]
between = ["a", "s"]
bandwidth = "1 Gbit/s"
reverse_bandwidth = "2 Gbit/s"
latency = "10 us"
[[links]]
between = ["b*", "s"]
bandwidth = "8 Gbit/s"
latency = "0 s"
efficiency = 0.5
shared = true
kind = "radio"
[[routes]]
path = ["a", "s", "b1"]
"""


def _same(a, b):
    for column in dataclasses.fields(Cluster):
        left, right = getattr(a, column.name), getattr(b, column.name)
        if isinstance(left, np.ndarray):
            np.testing.assert_array_equal(left, right, err_msg=column.name)
        elif column.name == "details" and left is not None:
            assert [left.of(link) for link in range(a.n_links)] == [right.of(link) for link in range(b.n_links)]
        elif column.name != "name":
            assert left == right, column.name


@pytest.fixture
def odd():
    """A cluster with everything: GPUs, half duplex, parallel links, fixed routes, overheads."""
    host = MultiGpu(n_gpus=2, device="v100", speed=0.5, send_overhead=1e-6, reduce_bandwidth=4e9)
    graph = star(3, bandwidth=1e9, latency=1e-6, efficiency=0.9, shared=True, host=host)
    graph.add_edge("h0.cpu", "h1.cpu", bandwidth=3.0, latency=1e-3, kind="cross")
    graph.add_edge("h0.cpu", "h1.cpu", bandwidth=4.0, latency=1e-3, kind="cross")
    graph.graph.update(title="odd", sources=["x", "y"], notes=["z"], routes=[["h0.cpu", "h1.cpu"]])
    return Cluster.from_graph(graph)


#: what a text in a file may be
_PROSE = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=9)


@st.composite
def any_graphs(draw):
    """Draw a directed multigraph with odd names, numbers without end, machines, half duplex, grids and routes."""
    names = draw(st.lists(st.text(min_size=1, max_size=6), min_size=2, max_size=6, unique=True))
    number = st.floats(1e-6, 1e12)
    graph = nx.MultiDiGraph(name="any", title=draw(_PROSE), sources=draw(st.lists(_PROSE, max_size=2)))
    for i, name in enumerate(names):
        kind = draw(st.sampled_from(["gpu", "host", "switch"])) if i else "host"
        data = {"kind": kind} | ({"host": draw(st.sampled_from(names))} if draw(st.booleans()) else {})
        if kind != "switch":
            data |= draw(st.fixed_dictionaries({}, optional={"speed": number, "send_overhead": st.floats(1e-12, 1)}))
        graph.add_node(name, **data)
    for a, b in draw(st.lists(st.tuples(*[st.sampled_from(names)] * 2).filter(lambda p: p[0] != p[1]), max_size=12)):
        data = {"bandwidth": draw(number), "latency": draw(st.floats(1e-12, 1)), "kind": draw(st.sampled_from("xyz"))}
        data |= draw(st.fixed_dictionaries({}, optional={"efficiency": st.floats(0.1, 1), "burst": st.floats(1, 1e6)}))
        if draw(st.booleans()):
            key = 100 + graph.number_of_edges()
            graph.add_edge(a, b, key, shared=True, **data)
            graph.add_edge(b, a, key, shared=True, **data)
        else:
            graph.add_edge(a, b, **data)
    return graph


@pytest.mark.parametrize("share", seeds(1, 2))  # of 20 examples
@given(any_graphs())
@settings(max_examples=10, deadline=None)
def test_any_cluster_comes_back_from_toml_as_it_was(share, tmp_path_factory, graph):
    cluster = Cluster.from_graph(graph)
    path = tmp_path_factory.getbasetemp() / "any.toml"
    cluster.save(path)
    again = load_cluster(path)
    _same(cluster, again)
    assert again.name == cluster.name


def test_a_calibrated_cluster_keeps_its_calibration_in_toml(tmp_path):
    rows = '[[calibration.parameters]]\nname = "between.latency"\nvalue = "21 us"\nlow = "20 us"\nhigh = "22 us"\n'
    compute = (
        '[[calibration.compute]]\nmodel = "m"\nc0 = "1.5 ms"\nc1 = "3 us"\ncovariance = [[1.0, 0.0], [0.0, 1.0]]\n'
        "spread = 0.1\ndof = 3.0\nbatch_sizes = [8]\n"
    )
    (tmp_path / "a.toml").write_text(STAR + "[calibration]\nspread = 0.02\n" + rows + compute)
    cluster = load_cluster(tmp_path / "a.toml")
    cluster.save(tmp_path / "b.toml")
    again = load_cluster(tmp_path / "b.toml")
    assert again.calibration == cluster.calibration
    assert again.link_latency.tolist() == pytest.approx(cluster.link_latency.tolist(), rel=1e-12)


@pytest.mark.parametrize("name", ["dgx1-v100", "minicluster", "lab-heterogeneous", "torus-2d", "three-regions-wan"])
def test_bundled_clusters_come_back_from_toml(tmp_path, name):
    load_cluster(name).save(tmp_path / "copy.toml")
    _same(load_cluster(tmp_path / "copy.toml"), load_cluster(name))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[nodes]]\nname = "a"\n', r"nodes\[0\]\.names = None must be a list of names"),
        ('[[nodes]]\nnames = ["a", "a"]\n', r"nodes\[0\]\.names: 'a' is already taken"),
        ('[[nodes]]\nnames = ["a"]\nspeeed = 1.0\n', "unknown attribute 'speeed'; did you mean 'speed'"),
        (
            '[[nodes]]\nnames = ["a"]\n[[edges]]\nlinks = ["a"]\n',
            r"edges\[0\]\.links = \['a'\] must be a list of node pairs",
        ),
        ('[[nodes]]\nnames = ["a"]\n[[edges]]\nlinks = [["a", "bb"]]\n', r"edges\[0\]\.links: unknown node 'bb'"),
        ('[[nodes]]\nnames = ["a"]\n[[edges]]\nlinks = []\nkeys = [1]\n', r"keys = \[1\] must be 0 integers"),
        ('[[nodes]]\nnames = ["a", "b"]\n[[edges]]\nlinks = [["a", "b"]]\n', "bandwidth is missing"),
        ('[generator]\ntype = "star"\n[[nodes]]\nnames = ["a"]\n', r"nodes cannot be combined with \[generator\]"),
    ],
)
def test_bad_tables_of_nodes_and_edges_in_one_line(tmp_path, text, message):
    path = tmp_path / "bad.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"bad\.toml: .*{message}"):
        load_cluster(path)


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_of_files_build_the_graphs_of_the_functions(name):
    """Files do without networkx, whose graphs have the same order of nodes and links."""
    sizes = {"leaf-spine": (2, 2, 3), "dragonfly": (3, (2, 2), 1), "racks": (3, 2), "torus": ((2, 3),)}.get(name, (4,))
    more = {"global_links": 2} if name == "dragonfly" else {}
    host = MultiGpu(n_gpus=2, device="v100") if name != "torus" else Host()
    arguments = {"bandwidth": 1e9, "latency": 1e-6, "host": host, **more}
    made = getattr(ddlsim.cluster, name.replace("-", "_"))(*sizes, **arguments)
    assert isinstance(made, nx.MultiDiGraph)
    _same(from_graph(GENERATORS[name](*sizes, **arguments)), Cluster.from_graph(made))


def test_graphs_do_without_networkx(odd):
    graph = to_graph(odd)
    assert [*graph.edges()] == [*graph.to_networkx().edges(keys=True, data=True)]
    _same(from_graph(graph), odd)
    a, b = odd.node_names[:2]
    graph.add_edge(a, b, bandwidth=1.0)
    graph.add_edge(a, b, next(iter(graph.adj[a][b])), latency=2.0)  # changes the link with this key
    assert [*graph.edges()] == [*graph.to_networkx().edges(keys=True, data=True)]
    assert graph.pred[b][a] is graph.adj[a][b]
    assert next(iter(graph.adj[a][b].values()))["latency"] == 2.0


def test_graph_round_trip(odd):
    again = Cluster.from_graph(odd.to_graph())
    _same(odd, again)
    assert again.n_channels < again.n_links


@pytest.mark.parametrize("suffix", [".json", ".graphml"])
def test_file_round_trip(odd, tmp_path, suffix):
    path = tmp_path / f"odd{suffix}"
    odd.save(path)
    _same(odd, load_cluster(path))
    grid = Cluster.from_graph(ring(5, bandwidth=1.5, latency=0.1))
    grid.save(path)
    _same(grid, load_cluster(str(path)))


SMALL = [name for name in cluster_names() if name not in ("theta", "selene", "cori-haswell")]


@pytest.mark.parametrize("name", few(SMALL, 6))
def test_bundled_clusters_survive_json(name, tmp_path):
    cluster = load_cluster(name)
    cluster.save(tmp_path / "x.json")
    _same(cluster, load_cluster(tmp_path / "x.json"))


@pytest.mark.parametrize("key", ["edges", "links"])
def test_node_link_json_with_either_key(tmp_path, key):
    graph = nx.Graph()
    graph.add_edge("a", "b", bandwidth="8 Gbit/s", latency="5 us")
    path = tmp_path / "pair.json"
    path.write_text(json.dumps(nx.node_link_data(graph, edges=key)))
    cluster = load_cluster(path)
    assert cluster.name == "pair"
    assert cluster.link_bandwidth.tolist() == [1e9, 1e9]
    assert cluster.link_latency.tolist() == [5e-6, 5e-6]


@pytest.mark.parametrize("kind", [nx.Graph, nx.DiGraph, nx.MultiGraph, nx.MultiDiGraph])
def test_plain_networkx_graphs(kind):
    graph = kind()
    graph.add_edge(1, 2, bandwidth=5.0)
    cluster = load_cluster(graph)
    assert cluster.node_names == ("1", "2")
    assert cluster.node_kind == ("host", "host")
    assert cluster.n_links == (1 if graph.is_directed() else 2)
    assert cluster.link_latency.tolist() == [0.0] * cluster.n_links
    assert load_cluster(cluster) is cluster


@pytest.mark.parametrize("nodes", ["ab", "ba"])
@pytest.mark.parametrize("kind", [nx.Graph, nx.MultiGraph])
def test_undirected_edges_have_no_direction(nodes, kind):
    """Which end networkx lists first depends on the order of the nodes: it must not decide which way is slower."""
    graph = kind()
    graph.add_nodes_from(nodes)
    graph.add_edge("a", "b", bandwidth=5.0, reverse_bandwidth=7.0)
    with pytest.raises(ConfigError, match=r"reverse_bandwidth = 7.0 is not supported; an undirected .* use a directed"):
        Cluster.from_graph(graph)


def test_explicit_toml(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(PAIR)
    cluster = load_cluster(path)
    assert (cluster.name, cluster.routing) == ("mine", "ecmp")
    assert cluster.node_names == ("a", "b0", "b1", "s")
    assert cluster.sources == ("the invoice",)
    assert cluster.speed.tolist() == [0.5, 1, 1, 1]
    assert cluster.send_overhead[0] == pytest.approx(1e-6)
    up, down = (cluster.routes([u], [v]).links[0] for u, v in ((0, 3), (3, 0)))
    assert cluster.link_bandwidth[[up, down]].tolist() == [1.25e8, 2.5e8]
    assert cluster.link_kind[up] == "nic"
    radio = [link for link in range(cluster.n_links) if cluster.link_kind[link] == "radio"]
    assert len(radio) == 4
    assert len(set(cluster.link_channel[radio])) == 2
    assert set(cluster.channel_capacity[cluster.link_channel[radio]]) == {5e8}
    assert list(cluster.fixed_routes) == [(0, 2)]


def _edit(text, old, new):
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[generator", ["not valid TOML", "complete?"]),
        ("title = 'x'", ["no machines", "[generator]"]),
        (_edit(STAR, "n_hosts", "n_host"), ["generator", "'n_host'", "did you mean 'n_hosts'?"]),
        (_edit(STAR, "n_hosts = 4\n", ""), ["generator", "'n_hosts' is missing"]),
        (_edit(STAR, "n_hosts = 4", 'n_hosts = 4\nsharing = "fifo"'), ["generator.sharing", "[link]", "move it"]),
        (_edit(STAR, "n_hosts = 4", "n_hosts = 4\nn_gpus = 2"), ["generator.n_gpus", "[host]", "move it"]),
        (_edit(STAR, '"star"', '"stra"'), ["generator", "'stra'", "did you mean 'star'?"]),
        (_edit(STAR, 'type = "star"\n', ""), ["generator.type", "missing", "leaf-spine"]),
        (_edit(STAR, "n_hosts = 4", 'n_hosts = "4"'), ["generator.n_hosts", "'4'", "integer"]),
        (_edit(STAR, "n_hosts = 4", "n_hosts = 0"), ["generator", "n_hosts = 0", "from 1 to"]),
        (_edit(STAR, '"10 Gbit/s"', "10"), ["generator.bandwidth = 10", "unit", "25 Gbit/s"]),
        (_edit(STAR, '"10 Gbit/s"', '"10"'), ["generator.bandwidth", "'10'", "no unit", "25 Gbit/s"]),
        (_edit(STAR, '"10 Gbit/s"', '"10 us"'), ["generator.bandwidth", "'10 us'", "is a time", "Gbit/s"]),
        (_edit(STAR, '"10 Gbit/s"', '"-1 Gbit/s"'), ["generator.bandwidth", "'-1 Gbit/s'", "above 0"]),
        (_edit(STAR, '"10 Gbit/s"', '"nan Gbit/s"'), ["generator.bandwidth", "'nan Gbit/s'", "use"]),
        (_edit(STAR, '"10 Gbit/s"', '"0 Gbit/s"'), ["generator.bandwidth", "'0 Gbit/s'", "above 0"]),
        (_edit(STAR, '"10 us"', '"-10 us"'), ["generator.latency", "'-10 us'", "not negative"]),
        (STAR + "efficiency = 2.0", ["generator", "efficiency = 2.0", "above 0 and at most 1"]),
        (STAR + "colour = 'red'", ["generator", "'colour'"]),
        ("color = 'red'" + STAR, ["unknown key 'color'", "known:"]),
        ("routing = 'ecpm'" + STAR, ["routing", "'ecpm'", "did you mean 'ecmp'?"]),
        ("routing = 'dimension-order'" + STAR, ["dimension-order", "grid"]),
        (STAR + "[host]\nn_gpu = 8", ["host", "'n_gpu'"]),
        (STAR + "[host]\nn_gpus = 8\ninside = 'pcie'", ["host", "'pcie'", "did you mean 'pcie_tree'?"]),
        (STAR + "[host]\ninside = 'nvswitch'", ["host.inside = 'nvswitch'", "n_gpus"]),
        (STAR + "[host]\nsend_overhead = 1e-6", ["host.send_overhead = 1e-06", "10 us"]),
        (STAR + "[[links]]\nbandwidth = 1", ["links", "[generator]", "remove one"]),
        (_edit(PAIR, '["a", "s"]', '["a", "t"]'), ["links[0].between", "'t'"]),
        (_edit(PAIR, '["a", "s"]', '["a"]'), ["links[0].between", "['a']", "list of 2"]),
        (_edit(PAIR, '["a", "s"]', '["a", "a"]'), ["links[0].between", "itself"]),
        (_edit(PAIR, 'latency = "10 us"\n', ""), ["links[0]", "'latency' is missing"]),
        (_edit(PAIR, "efficiency = 0.5", "efficiency = 1.5"), ["links[1].efficiency = 1.5", "at most 1"]),
        (_edit(PAIR, 'kind = "radio"', "knid = 1"), ["links[1]", "'knid'", "did you mean 'kind'?"]),
        (
            _edit(PAIR, "shared = true", 'shared = true\nreverse_bandwidth = "1 Gbit/s"'),
            ["links[1]", "reverse_bandwidth", "shared"],
        ),
        (_edit(PAIR, 'name = "b"', 'name = "a"\n#'), ["a0", "links[1].between", "'b*'"]),
        (_edit(PAIR, 'name = "b"\ncount = 2', 'name = "a"'), ["hosts[1].name = 'a'", "another name"]),
        (_edit(PAIR, "count = 2", "count = 0"), ["hosts[1].count = 0", "from 1 to"]),
        (_edit(PAIR, '"a", "s", "b1"', '"a", "b1"'), ["routes[0]", "from 'a' to 'b1'"]),
        (_edit(PAIR, '"a", "s", "b1"', '"a", "s", "c"'), ["'c'", "unknown node"]),
        (_edit(PAIR, "speed = 0.5", "speed = -1.0"), ["hosts[0]", "speed = -1.0", "above 0"]),
        ("[host]\n" + PAIR, ["[host]", "[generator]"]),
    ],
)
def test_bad_toml_in_one_line(tmp_path, text, words):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    _expect_one_line(path, words)


def _expect_one_line(path, words):
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    for word in words:
        assert word in message


def _json(nodes, edges, **more):
    return json.dumps({"nodes": nodes, "edges": edges, **more})


AB = [{"id": "a"}, {"id": "b"}]


def test_parallel_half_duplex_links_are_not_merged(tmp_path):
    """networkx keeps the last of two edges with the same key, so files with repeated edges are refused."""
    edges = [{"source": "a", "target": "b", "bandwidth": rate, "shared": True} for rate in (1e9, 2e9)]
    path, about = tmp_path / "two.json", {"nodes": AB, "graph": {}, "directed": False}
    path.write_text(json.dumps({**about, "multigraph": True, "edges": edges}))
    assert load_cluster(path).link_channel.tolist() == [0, 1, 0, 1]
    for several, more in ((True, {"key": "x"}), (False, {})):
        path.write_text(json.dumps({**about, "multigraph": several, "edges": [{**edge, **more} for edge in edges]}))
        with pytest.raises(ConfigError, match=r"the edge 'a' - 'b'.* appears twice; remove one or"):
            load_cluster(path)
    graph = nx.node_link_graph({**about, "multigraph": True, "edges": edges}, edges="edges")
    text = "\n".join(nx.generate_graphml(graph, named_key_ids=True, edge_id_from_attribute=None))
    path.with_suffix(".graphml").write_text(text)
    assert len(load_cluster(path.with_suffix(".graphml")).link_channel) == 4
    path.with_suffix(".graphml").write_text(text.replace('id="1"', 'id="0"'))
    with pytest.raises(ConfigError, match="the edge 'a' - 'b' with key '0' appears twice"):
        load_cluster(path.with_suffix(".graphml"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"nodes": [', ["not valid JSON", "complete?"]),
        ("[" * 100_000, ["nested too deeply"]),
        ("[1, 2]", ["'nodes'", "node_link_data"]),
        (_json(AB, [{"source": "a"}]), ["node-link", "'target'"]),
        (_json(AB, [{"source": "a", "target": "c", "bandwidth": 1}]), ["'c'", "add the node"]),
        (_json([{"id": "a"}, {"id": "a"}], []), ["'a'", "twice"]),
        (_json(AB, 2 * [{"source": "a", "target": "b", "key": 0, "bandwidth": 1}]), ["'a' - 'b' with key 0", "twice"]),
        (_json([], []), ["no nodes"]),
        (_json(AB, [{"source": "a", "target": "b"}]), ["'a' -> 'b'", "bandwidth is missing", "25 Gbit/s"]),
        (
            _json(AB, [{"source": "a", "target": "b", "bandwidth": float("nan")}]),
            ["edges.0.bandwidth = nan", "is no number"],
        ),
        (_json(AB, [{"source": "a", "target": "b", "bandwidth": -5}]), ["bandwidth = -5", "above 0"]),
        (_json(AB, [{"source": "a", "target": "b", "bandwidth": "5"}]), ["'5'", "no unit"]),
        (
            _json(AB, [{"source": "a", "target": "b", "bandwidth": None}]),
            ["bandwidth = None", "must be a number"],
        ),
        (_json(AB, [{"source": "a", "target": "b", "bandwith": 5}]), ["'bandwith'", "mean 'bandwidth'?"]),
        (_json(AB, [{"source": "a", "target": "a", "bandwidth": 5}]), ["itself"]),
        (_json([{"id": "a", "kind": "gpuu"}], []), ["node 'a'", "'gpuu'", "did you mean 'gpu'?"]),
        (_json([{"id": "a", "kind": "switch"}], []), ["switches", "kind = 'host'"]),
        (_json([{"id": "a", "speed": 0}], []), ["node 'a'", "speed = 0", "above 0"]),
        (_json([{"id": "a", "send_overhead": "1 GB"}], []), ["send_overhead", "'1 GB'", "10 us"]),
        (_json(AB, [], graph={"routing": "x"}), ["routing policy 'x'"]),
        (_json(AB, [], graph={"routing": "dimension-order"}), ["dimension-order", "grid"]),
        (_json(AB, [], graph={"grid": "ab"}), ["grid = 'ab'", "[8, 8]"]),
        (_json(AB, [], graph={"titel": "ab"}), ["'titel'", "did you mean 'title'?"]),
        (_json(AB, [], graph={"routes": [["a", "b"]]}), ["routes[0]", "from 'a' to 'b'"]),
    ],
)
def test_bad_json_in_one_line(tmp_path, text, words):
    path = tmp_path / "bad.json"
    path.write_text(text)
    _expect_one_line(path, words)


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_switches_that_add_up_are_read_and_written(tmp_path, suffix):
    """All between the machines, or single ones."""
    whole = load_cluster("dgx-h100-pod+switch_reduces=true")
    assert (whole.switch_reduces == whole.is_fabric_switch).all()
    assert load_cluster("dgx-h100-pod").switch_reduces is None
    file = tmp_path / "one.toml"
    file.write_text(
        '[[hosts]]\nname = "m"\ncount = 2\n[[switches]]\nname = "a"\nreduces = true\n[[switches]]\nname = "b"\n'
        '[[links]]\nbetween = ["m*", "a"]\nbandwidth = "1 Gbit/s"\nlatency = "1 us"\n'
        '[[links]]\nbetween = ["a", "b"]\nbandwidth = "1 Gbit/s"\nlatency = "1 us"\n'
    )
    one = load_cluster(file)
    one.save(tmp_path / f"again{suffix}")
    for cluster in (one, load_cluster(tmp_path / f"again{suffix}")):
        assert [cluster.node_names[i] for i in np.flatnonzero(cluster.switch_reduces)] == ["a"]
    graph = one.to_graph()
    graph.nodes["m0"]["reduces"] = True
    with pytest.raises(ConfigError, match="node 'm0': reduces applies only to switches"):
        Cluster.from_graph(graph)
    with pytest.raises(ConfigError, match=r"\+switch_reduces=1: must be true or false"):
        load_cluster("dgx-h100-pod+switch_reduces=1")


def test_a_grid_without_its_links_is_refused_when_routed(tmp_path):
    graph = ring(4, bandwidth=1.0, latency=0.0)
    graph.remove_edge("h1", "h2")
    cluster = Cluster.from_graph(graph)
    with pytest.raises(ConfigError, match=r"link from 'h1' to 'h2'.*'shortest'"):
        cluster.routes([0], [1])


GRAPHML = '<graphml xmlns="http://graphml.graphdrawing.org/xmlns"><graph edgedefault="directed">{}</graph></graphml>'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<graphml", ["not valid XML", "complete?"]),
        (
            '<!DOCTYPE x [<!ENTITY a "b">]>' + GRAPHML.format('<node id="&a;"/>'),
            ["DTDs and entity declarations", "not allowed"],
        ),
        (GRAPHML.format('<node id="a"/><edge source="a" target="b"/>'), ["'b'", "add the node"]),
        (
            GRAPHML.format('<node id="a"/><node id="b"/><edge source="a" target="b"/>'),
            ["the edge has no speed", "+bandwidth=..."],
        ),
        (GRAPHML.format("<node/>"), ["<node>", "'id' is missing"]),
        (
            GRAPHML.format('<data key="d"/><node id="a"><data key="zz">1</data></node>'),
            ["'zz'", "has no declaration"],
        ),
    ],
)
def test_bad_graphml_in_one_line(tmp_path, text, words):
    path = tmp_path / "bad.graphml"
    path.write_text(text)
    _expect_one_line(path, words)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("zenit", ["unknown cluster 'zenit'", "did you mean 'zenith'?"]),
        ("nowhere.toml", ["nowhere.toml: no such file"]),
        ("nowhere.tml", ["nowhere.tml: no such file", "ddlsim topologies"]),
        ("no/where", ["no/where: no such file"]),
        (42, ["42", "networkx"]),
    ],
)
def test_bad_sources(source, words):
    with pytest.raises(ConfigError) as caught:
        load_cluster(source)
    assert all(word in str(caught.value) for word in words)


def test_unknown_format_and_unreadable_text(tmp_path, odd):
    path = tmp_path / "x.yaml"
    path.write_text("")
    _expect_one_line(path, ["is empty", ".toml"])
    with pytest.raises(ConfigError, match=r"x\.yaml: cannot write"):
        odd.save(path)
    binary = tmp_path / "x.toml"
    binary.write_bytes(b"\xff\xfe")
    _expect_one_line(binary, ["line 1", "invalid UTF-8", "byte 0"])
    folder = tmp_path / "dir.toml"
    folder.mkdir()
    _expect_one_line(folder, ["cannot be read"])


def test_half_duplex_directions_must_agree():
    graph = nx.MultiDiGraph()
    graph.add_edge("a", "b", bandwidth=1.0, shared=True)
    graph.add_edge("b", "a", bandwidth=2.0, shared=True)
    with pytest.raises(ConfigError, match=r"'b' -> 'a'.*must equal"):
        Cluster.from_graph(graph)
    directed = nx.DiGraph()
    directed.add_edge("a", "b", bandwidth=1.0, reverse_bandwidth=2.0)
    with pytest.raises(ConfigError, match=r"reverse_bandwidth = 2\.0"):
        Cluster.from_graph(directed)


@pytest.mark.parametrize("suffix", [".toml", ".json", ".graphml"])
def test_saved_clusters_find_their_device_files_from_anywhere(suffix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("in", "out", "other"):
        (tmp_path / folder).mkdir()
    load_device("v100").save("in/v100-lab.toml")
    (tmp_path / "in" / "c.toml").write_text(f'{STAR}[host]\ndevice = "v100-lab.toml"\n')
    load_cluster("in/c.toml").save(f"out/c{suffix}")
    monkeypatch.chdir(tmp_path / "other")
    (device,) = set(load_cluster(f"../out/c{suffix}").device_of) - {None}
    assert (tmp_path / "other" / device).resolve() == tmp_path / "in" / "v100-lab.toml"
    monkeypatch.chdir(tmp_path / "in")
    load_cluster("c.toml").save(f"d{suffix}")
    assert load_cluster(f"d{suffix}").device_of == load_cluster("c.toml").device_of
