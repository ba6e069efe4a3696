"""Pictures of clusters: every link between what is drawn is there, alone or counted; large ones are drawn as groups."""

import networkx as nx
import numpy as np
import pytest
from picture_overlaps import overlaps

import ddlsim
from ddlsim.cluster import with_storage
from ddlsim.report.cluster_plot import N_GROUPS, USE, arranged, cluster_plot, joints

#: thousands of nodes, which take a second or more
HUGE = ("cori-haswell", "selene", "theta")
NAMES = [pytest.param(n, marks=pytest.mark.slow if n in HUGE else ()) for n in ddlsim.cluster_names()]


@pytest.mark.parametrize("name", NAMES)
def test_every_link_between_what_is_drawn_is_in_one_line(name):
    """All links but those within a machine that is drawn as one, each once, and no machine floats."""
    cluster = ddlsim.load_cluster(name)
    items = arranged(cluster)
    lines = joints(cluster, items)
    drawn = np.sort(np.concatenate(lines.links))
    host = cluster.host_of
    inside = (host[cluster.link_src] == host[cluster.link_dst]) & (host[cluster.link_src] >= 0)
    hidden = inside if len(items.kind) < cluster.n_nodes else np.zeros(cluster.n_links, dtype=bool)
    np.testing.assert_array_equal(drawn, np.flatnonzero(~hidden))
    assert set(lines.ends.ravel().tolist()) == set(range(len(items.kind)))
    for (a, b), links in zip(lines.ends.tolist(), lines.links, strict=True):
        ends = items.item_of[cluster.link_src[links]], items.item_of[cluster.link_dst[links]]
        assert {*ends[0].tolist(), *ends[1].tolist()} == {a, b}
    assert sorted(np.concatenate(items.nodes).tolist()) == list(range(cluster.n_nodes))


def test_rails_reach_their_switches():
    """20 machines with a link to each of 8 leaf switches, which have one to each of 4 spines."""
    cluster = ddlsim.load_cluster("dgx-a100-pod")
    items = arranged(cluster)
    lines = joints(cluster, items)
    machines = [i for i, kind in enumerate(items.kind) if kind == "machine"]
    assert len(machines) == 20
    assert sum(1 for a, b in lines.ends.tolist() if a in machines) == 160
    assert len(lines.links) == 160 + 32
    legend = [text.get_text() for text in cluster_plot(cluster).figure.legends[0].get_texts()]
    assert "machine (20): 160 GPUs inside" in legend
    assert "nic, 200 Gbit/s (160)" in legend


@pytest.mark.parametrize("name", ["office-1gbe", "dgx1-v100", "dgx1-v100-16"])
def test_a_storage_is_one_thing_beside_machines(name):
    """Its disks and its port: nothing of it stands in a machine's box, and no box lies on a neighbour."""
    cluster = with_storage(name, "nfs0", read="2 GB/s", bandwidth="10 Gbit/s")
    items = arranged(cluster)
    at = items.kind.index("storage")
    assert items.kind.count("storage") == 1
    assert items.names[at] == "nfs0"
    assert sorted(cluster.node_kind[node] for node in items.nodes[at]) == ["storage", "switch"]
    assert all(at not in members for members in items.frames.values())
    for members in items.frames.values():
        assert not items.x[members].min() <= items.x[at] <= items.x[members].max()
    assert "storage (1)" in [text.get_text() for text in cluster_plot(cluster).figure.legends[0].get_texts()]


def test_links_beside_each_other_are_counted():
    axes = cluster_plot(ddlsim.load_cluster("dgx1-v100-16"))
    legend = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert "nic, 100 Gbit/s (64, 4 in each line)" in legend


@pytest.mark.slow
def test_what_no_page_holds_is_drawn_as_groups():
    """560 machines with 8 links each, to 224 switches in 28 units, with 4 spines above all of them."""
    axes = cluster_plot(ddlsim.load_cluster("selene"))
    texts = [text.get_text() for text in axes.texts]
    assert {"560 machines like this", "224 switches like this", "4 switches like this"} <= set(texts)
    assert "4,480 x 200 Gbit/s\n8 of each machine" in texts


def test_groups_are_of_nodes_that_are_alike():
    """One of 300 machines has a faster link: it is drawn apart."""
    graph = nx.Graph()
    for i in range(300):
        graph.add_node(f"pc{i}", kind="host")
        graph.add_edge(f"pc{i}", "switch", bandwidth="1 Gbit/s" if i else "10 Gbit/s", latency="1 us")
    graph.add_node("switch", kind="switch")
    items = arranged(ddlsim.load_cluster(graph))
    assert sorted(map(len, items.nodes)) == [1, 1, 299]
    assert len(items.nodes) <= N_GROUPS
    assert sorted(items.names) == ["299 machines like this", "pc0", "switch"]


def test_the_scale_of_use_darkens_all_the_way():
    """So that it is read in grey; luminance by Rec. 709."""
    grey = USE(np.linspace(0.0, 1.0, 100))[:, :3] @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(grey) < 0.0).all()
    assert grey[0] < 0.85  # told from white paper
    assert grey[-1] < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ddlsim.cluster_names())
def test_names_in_pictures_of_bundled_clusters_do_not_overlap(name):
    assert overlaps(cluster_plot(ddlsim.load_cluster(name)).figure) == []
