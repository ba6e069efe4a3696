"""GraphML of the Topology Zoo (both of its dialects), yEd and networkx: names, speeds, directions; what is refused."""

import networkx as nx
import pytest

import ddlsim
from ddlsim.errors import ConfigError
from ddlsim.imports import read_any, read_graphml

YED = """\
<?xml version="1.0" encoding="UTF-8" standalone="no"?>
<graphml xmlns="http://graphml.graphdrawing.org/xmlns" xmlns:y="http://www.yworks.com/xml/graphml">
  <!--Created by yFiles for Java 2.9-->
  <key for="graphml" id="d0" yfiles.type="resources"/>
  <key attr.name="Internal" attr.type="boolean" for="node" id="d4"/>
  <key for="node" id="d8" yfiles.type="nodegraphics"/>
  <key attr.name="hyperedge" attr.type="boolean" for="node" id="d9"/>
  <key attr.name="Network" attr.type="string" for="graph" id="d26"/>
  <key attr.name="label" attr.type="string" for="edge" id="d35"/>
  <key for="edge" id="d38" yfiles.type="edgegraphics"/>
  <graph edgedefault="directed" id="G">
    <data key="d26"><![CDATA[Examplenet]]></data>
    <node id="n0"><data key="d4">true</data>
      <data key="d8"><y:ShapeNode><y:NodeLabel>Perth</y:NodeLabel></y:ShapeNode></data></node>
    <node id="n1"><data key="d8"><y:ShapeNode><y:NodeLabel>Darwin</y:NodeLabel></y:ShapeNode></data></node>
    <node id="n2"><data key="d8"><y:ShapeNode><y:NodeLabel>Darwin</y:NodeLabel></y:ShapeNode></data></node>
    <node id="n3"><data key="d9">true</data></node>
    <edge id="e0" source="n0" target="n1"><data key="d35"><![CDATA[LABEL]]></data>
      <data key="d38"><y:PolyLineEdge><y:Arrows source="none" target="none"/></y:PolyLineEdge></data></edge>
    <edge id="e1" source="n1" target="n0"><data key="d35"><![CDATA[10 Gbps]]></data></edge>
    <edge id="e2" source="n2" target="n3"><data key="d35"><![CDATA[1Gb/s Ethernet]]></data></edge>
    <edge id="e3" source="n3" target="n0"><data key="d35"><![CDATA[3 x 622Mbps]]></data></edge>
  </graph>
  <data key="d0"><y:Resources/></data>
</graphml>
"""


def write(tmp_path, text, name="net.graphml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def links(cluster):
    """Return (from, to, bit/s) of every link."""
    names = cluster.node_names
    ends = zip(cluster.link_src, cluster.link_dst, cluster.link_bandwidth, strict=True)
    return sorted((names[a], names[b], float(rate) * 8) for a, b, rate in ends)


def test_a_zoo_file_that_yed_wrote(tmp_path):
    """Four cables, two of them between the same sites; names that appear twice get their ids."""
    cluster = read_graphml(write(tmp_path, YED.replace("LABEL", "2.5Gbps")), latency="2 ms")
    assert (cluster.title, cluster.node_names) == ("Examplenet", ("Perth", "Darwin (n1)", "Darwin (n2)", "n3"))
    assert cluster.node_kind == ("host", "host", "host", "switch")
    one_way = [("Perth", "Darwin (n1)", 2.5e9), ("Perth", "Darwin (n1)", 10e9), ("Perth", "n3", 1.866e9)]
    one_way += [("Darwin (n2)", "n3", 1e9)]
    assert links(cluster) == sorted(one_way + [(b, a, rate) for a, b, rate in one_way])
    assert set(cluster.link_latency) == {0.002}
    assert cluster.notes == ()


@pytest.mark.parametrize(
    ("label", "rate"),
    [
        ("10 Gbit", 10e9), ("1Gb/s Ethernet", 1e9), ("10GE", 10e9), ("2x10G", 20e9), ("2 Mbps (E1)", 2e6),
        ("OC-48c", 2.48832e9), ("4 x STM-1", 622.08e6), ("DS-3", 44.736e6), ("leased E3", 34.368e6),
    ],
)  # fmt: skip
def test_labels_of_a_single_rate(tmp_path, label, rate):
    cluster = read_graphml(write(tmp_path, YED.replace("LABEL", label)))
    assert ("Perth", "Darwin (n1)", pytest.approx(rate)) in links(cluster)


@pytest.mark.parametrize(
    "label", ["< 10 Gbps", "1-10Gbps", "155Mbs/1Gbps", "10Gbps, 100Mbps", "Red Link", "DS-9", "OC-48/STM-1", "0 Gbps"]
)
def test_labels_that_are_no_single_rate_are_silent(tmp_path, label):
    path = write(tmp_path, YED.replace("LABEL", label))
    with pytest.raises(ConfigError, match=r":\d+: <edge>: the edge has no speed; set bandwidth \(--bandwidth\)"):
        read_graphml(path)
    cluster = read_graphml(path, bandwidth="100 Mbit/s")
    assert ("Perth", "Darwin (n1)", 1e8) in links(cluster)
    assert cluster.notes == ("the file gives no speed for 1 of 4 edges; assuming 100 Mbit/s for them",)


def test_a_zoo_file_that_networkx_wrote(tmp_path):
    """The archive's second dialect has speeds as numbers; LinkSpeedRaw is bit/s."""
    graph = nx.MultiGraph(Network="Bellnet", DateYear="1999")
    graph.add_node("0", label="Montreal", Country="Canada", Latitude=45.5, Longitude=-73.6, Internal=1)
    graph.add_node("1", label="Toronto", Country="Canada", Internal=1)
    graph.add_edge("0", "1", LinkLabel="OC-3", LinkSpeed="155", LinkSpeedUnits="M", LinkSpeedRaw=155000000.0)
    graph.add_edge("0", "1", LinkSpeed="2.5", LinkSpeedUnits="G")
    nx.write_graphml(graph, tmp_path / "bell.graphml")
    cluster = read_any(tmp_path / "bell.graphml")
    assert cluster.title == "Bellnet 1999"
    rates = [("Montreal", "Toronto", 1.55e8), ("Montreal", "Toronto", 2.5e9)]
    assert links(cluster) == sorted(rates + [(b, a, rate) for a, b, rate in rates])


def test_a_directed_graph_with_all_counterparts_keeps_its_directions(tmp_path):
    graph = nx.DiGraph()
    graph.add_edge("a", "b", LinkSpeedRaw=8e9)
    graph.add_edge("b", "a", LinkSpeedRaw=1e9)
    nx.write_graphml(graph, tmp_path / "asymmetric.graphml")
    assert links(read_graphml(tmp_path / "asymmetric.graphml")) == [("a", "b", 8e9), ("b", "a", 1e9)]


def test_a_directed_edge_without_counterpart_leaves_the_others_as_they_are(tmp_path):
    """a and b have 8 and 1 Gbit/s; b and c a cable that stands there once, drawn one way."""
    graph = nx.DiGraph()
    for a, b, rate in (("a", "b", 8e9), ("b", "a", 1e9), ("b", "c", 2e9)):
        graph.add_edge(a, b, LinkSpeedRaw=rate)
    nx.write_graphml(graph, tmp_path / "mixed.graphml")
    cluster = read_any(tmp_path / "mixed.graphml")
    assert links(cluster) == [("a", "b", 8e9), ("b", "a", 1e9), ("b", "c", 2e9), ("c", "b", 2e9)]
    assert cluster.notes == ("1 of 3 directed edges have no reverse edge and are treated as bidirectional",)


@pytest.mark.parametrize("kind", ["edge", "all"])
def test_defaults_of_keys_hold_where_an_edge_says_nothing(tmp_path, kind):
    """Two edges of 4 Gbit/s by default, one of 10; a default that is not known is refused as what is said."""
    text = f"""<graphml><key id="r" for="{kind}" attr.name="LinkSpeedRaw"><default>4000000000</default></key>
    <key id="k" for="node" attr.name="kind"><default>switch</default></key>
    <key id="l" for="edge" attr.name="latency"><default>0.001</default></key><graph edgedefault="undirected">
    <node id="a"><data key="k">host</data></node><node id="b"/><node id="c"><data key="k">host</data></node>
    <edge source="a" target="b"/>
    <edge source="b" target="c"><data key="r">10000000000</data></edge></graph></graphml>"""
    if kind == "all":
        text = text.replace('attr.name="LinkSpeedRaw"', 'attr.name="label"').replace(">4000000000<", ">4 Gbps<")
        text = text.replace(">10000000000<", ">10 Gbps<")
        text = text.replace('<node id="b"/>', '<node id="b"><data key="r">B</data></node>')
    cluster = read_graphml(write(tmp_path, text))
    names = ["a", "b", "c"] if kind == "edge" else ["4 Gbps (a)", "B", "4 Gbps (c)"]
    assert (cluster.node_names, cluster.node_kind) == (tuple(names), ("host", "switch", "host"))
    assert [rate for _, _, rate in links(cluster)] == ([4e9, 4e9, 10e9, 10e9] if kind == "edge" else [4e9, 10e9] * 2)
    assert set(cluster.link_latency) == {0.001}
    with pytest.raises(ConfigError, match="unknown attribute 'delay'; did you mean 'latency'"):
        read_graphml(write(tmp_path, text.replace('"latency"', '"delay"')))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Bandwidth", "did you mean 'bandwidth'"), ("delay", "did you mean 'latency'"),
        ("speed", "did you mean 'LinkSpeed'"), ("cost", "known: .*bandwidth"), ("length", "known: .*latency"),
        ("Population", "known: .*bandwidth"),
    ],
)  # fmt: skip
def test_hints_name_what_a_cluster_is_made_of_and_lead_to_a_file_that_is_read(tmp_path, name, hint):
    graph = nx.Graph()
    graph.add_node("a", label="Perth", Latitude=-32.0)
    graph.add_edge("a", "b", **{name: 1e9, "LinkSpeedRaw": 8e9})
    nx.write_graphml(graph, tmp_path / "x.graphml")
    with pytest.raises(ConfigError, match=f"unknown attribute '{name}'; {hint}"):
        read_any(tmp_path / "x.graphml")
    text = (tmp_path / "x.graphml").read_text()
    for known in ("bandwidth", "latency", "LinkSpeed"):
        if f"'{known}'" in hint:
            cluster = read_any(write(tmp_path, text.replace(f'"{name}"', f'"{known}"')))
            assert cluster.node_names == ("Perth", "b")


def test_nodes_in_a_group_are_nodes_and_the_group_is_none(tmp_path):
    group = '<node id="g" yfiles.foldertype="group"><graph id="g:"><node id="n1">'
    text = (
        YED.replace("LABEL", "1 Gbps")
        .replace('<node id="n1">', group)
        .replace('<node id="n3">', "</graph></node>" + '<node id="n3">')
    )
    assert links(read_graphml(write(tmp_path, text))) == links(
        read_graphml(write(tmp_path, YED.replace("LABEL", "1 Gbps")))
    )


def test_unknown_attributes_and_loops_are_left_out_on_request(tmp_path):
    graph = nx.MultiGraph()
    graph.add_edge("a", "b", LinkSpeedRaw=1e9, capacity=7)
    graph.add_edge("b", "b", LinkSpeedRaw=1e9, capacity=7)
    path = tmp_path / "strange.graphml"
    nx.write_graphml(graph, path)
    with pytest.raises(ConfigError, match=r"unknown attribute 'capacity'.*--ignore-unknown"):
        read_graphml(path)
    with pytest.warns(UserWarning, match="skipped: 2 attributes 'capacity', 1 edges from a node to itself"):
        cluster = read_graphml(path, ignore_unknown=True)
    assert links(cluster) == [("a", "b", 1e9), ("b", "a", 1e9)]


def test_our_own_files_are_read_as_such(tmp_path):
    cluster = ddlsim.load_cluster("dgx1-v100")
    cluster.save(tmp_path / "own.graphml")
    assert read_any(tmp_path / "own.graphml").node_names == cluster.node_names
    assert ddlsim.load_cluster(tmp_path / "own.graphml").n_links == cluster.n_links


def test_a_topology_is_taken_wherever_a_cluster_is(tmp_path):
    path = write(tmp_path, YED.replace("LABEL", "?"), "topo.xml")
    seconds = [
        ddlsim.collective_time(f"{path}+bandwidth={rate}", "ring", "1 MB", kind="all_reduce")
        for rate in ("10 Mbit/s", "1 Gbit/s")
    ]
    assert all(one > 0 for one in seconds)
    with pytest.raises(
        ConfigError, match=r"topo\.xml is read as graphml, which does not accept \w+ \(accepted: bandwidth, ignore"
    ):
        ddlsim.load_cluster(f"{path}+n_hosts=2")
    with pytest.raises(ConfigError, match=r"expected \+name=value .* for a value"):
        ddlsim.load_cluster(f"{path}+bandwidth")
    with pytest.raises(ConfigError, match="a ping file does not describe a topology"):
        ddlsim.load_cluster(write(tmp_path, "PING a (1.2.3.4) 56(84) bytes of data.\n", "ping.txt"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('target="n3"', 'target="n9"', r":\d+: <edge>: ends at 'n9', which is not a node"),
        ('id="n1"', 'id="n0"', r":\d+: <node>: id = 'n0' appears twice"),
        ("<graph ", "<port ", "not valid XML"),
        ('<data key="d35">', '<data key="d77">', "key = 'd77' has no declaration; add a <key>"),
        ('<node id="n3">', '<hyperedge/><node id="n3">', "<hyperedge>: have no meaning for a cluster"),
        ("</graph>", "</graph><graph/>", "contains 2 graphs; must contain exactly one"),
    ],
)
def test_what_is_refused_is_named_with_its_line(tmp_path, old, new, message):
    with pytest.raises(ConfigError, match=message):
        read_graphml(write(tmp_path, YED.replace("LABEL", "1 Gbps").replace(old, new)))
