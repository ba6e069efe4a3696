"""Frames, buckets and acknowledgements of links: written in files and graphs, checked, kept."""

import dataclasses

import networkx as nx
import numpy as np
import pytest

from ddlsim.cluster import Cluster, LinkDetail, load_cluster, star, two_racks, with_detail
from ddlsim.errors import ConfigError, UnitError

TCP = LinkDetail(66.0, 1448.0, 4542.0, 0.0218)
FILE = """
[generator]
type = "two-racks"
hosts_per_rack = 2
bandwidth = "1 Gbit/s"
latency = "10 us"

[link]
frame_header = "66 B"
frame_payload = "1448 B"
burst = "4542 B"
reverse_load = 0.0218
"""


def load(tmp_path, text):
    path = tmp_path / "c.toml"
    path.write_text(text)
    return load_cluster(path)


def test_a_link_table_is_for_all_links_or_for_some_kinds(tmp_path):
    cluster = load(tmp_path, FILE)
    assert [cluster.details.of(k) for k in range(cluster.n_links)] == [TCP] * cluster.n_links
    cluster = load(tmp_path, FILE + 'kinds = ["trunk"]\nsource = "tc(8)"\n')
    assert cluster.sources == ("tc(8)",)
    for link, kind in enumerate(cluster.link_kind):
        assert cluster.details.of(link) == (TCP if kind == "trunk" else LinkDetail())


def test_a_link_of_its_own(tmp_path):
    text = """
[[hosts]]
name = "h"
count = 3
[[switches]]
name = "s"
[[links]]
between = ["h*", "s"]
bandwidth = "1 Gbit/s"
latency = "10 us"
burst = "4 kB"
"""
    cluster = load(tmp_path, text)
    assert (cluster.details.burst == 4000.0).all()
    assert not cluster.details.frame_header.any()


def test_links_inside_hosts_are_left_alone():
    cluster = with_detail(load_cluster("dgx1-v100-16"), burst="4 kB")
    inside = cluster.host_of[cluster.link_src] == cluster.host_of[cluster.link_dst]
    assert inside.any()
    assert ((cluster.details.burst > 0) == ~inside).all()


def test_graphs_and_files_keep_details(tmp_path):
    cluster = with_detail(Cluster.from_graph(star(3, bandwidth=1e9, latency=1e-5)), **dataclasses.asdict(TCP))
    again = [Cluster.from_graph(cluster.to_graph())]
    for suffix in (".json", ".graphml"):
        cluster.save(tmp_path / f"c{suffix}")
        again.append(load_cluster(tmp_path / f"c{suffix}"))
    for copy in again:
        assert [copy.details.of(k) for k in range(copy.n_links)] == [TCP] * 6
    assert Cluster.from_graph(star(3, bandwidth=1e9, latency=1e-5)).details is None


TRANSPORT = """
transport = "tcp-cubic"
mtu = "9000 B"
connections = 16
flow_rate = "5 Gbit/s"
window = "1 MiB"
rendezvous = "64 KiB"
loss = 0.001
unordered = true
warm = true
queued_acks = true
window_spread = 0.4
buffer = "128 KiB"
sharing = "fifo"
"""


def test_a_transport_in_every_kind_of_file(tmp_path):
    head = FILE[: FILE.index("frame_header")]
    cluster = load(tmp_path, head + TRANSPORT)
    told = LinkDetail(
        90.0,
        8948.0,
        0.0,
        0.0,
        "tcp-cubic",
        16,
        625e6,
        2.0**20,
        0.4,
        65536.0,
        0.001,
        True,
        True,
        True,
        131072.0,
        sharing="fifo",
    )
    again = [cluster, Cluster.from_graph(cluster.to_graph())]
    for suffix in (".toml", ".json", ".graphml"):
        cluster.save(tmp_path / f"c{suffix}")
        again.append(load_cluster(tmp_path / f"c{suffix}"))
    for copy in again:
        assert {copy.details.of(k) for k in range(copy.n_links)} == {told}
    assert (
        "first in, first out, transport tcp-cubic (16 connections, 5 Gbit/s each, window 1.049 MB, "
        "windows vary by 0.4, rendezvous above 65.54 kB, loss 0.001, buffers of 131.1 kB, unordered, warm, queued_acks)"
    ) in cluster.summary()
    assert load(tmp_path, head + 'transport = "roce"').details.of(0) == LinkDetail(transport="roce")


@pytest.mark.parametrize(
    ("transport", "mtu", "header", "payload"),
    [
        ("tcp-reno", "1500 B", 90.0, 1448.0), ("tcp-cubic", "9000 B", 90.0, 8948.0),
        ("roce", "4096 B", 82.0, 4096.0), ("infiniband", "4096 B", 26.0, 4096.0),
    ],
)  # fmt: skip
def test_an_mtu_says_the_frames(transport, mtu, header, payload):
    detail = with_detail(load_cluster("office-1gbe"), transport=transport, mtu=mtu).details.of(0)
    assert (detail.frame_header, detail.frame_payload) == (header, payload)


def test_sharing_is_set_beside_the_name_of_a_cluster():
    assert (load_cluster("office-1gbe+sharing=fifo").details.sharing == "fifo").any()
    assert load_cluster("office-1gbe+sharing=max-min").details is None
    assert with_detail(load_cluster("office-1gbe+sharing=fifo"), transport="ideal").details is None
    with pytest.raises(ConfigError, match=r"sharing = 'fif': must be '', 'max-min' or 'fifo'"):
        load_cluster("office-1gbe+sharing=fif")


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (
            '"tcp-cubic"',
            '"tcp-cubik"',
            r"link\.transport = 'tcp-cubik': must be one of ideal, .*did you mean 'tcp-cubic'",
        ),
        ('"tcp-cubic"', '"roce"', r"link: loss = 0\.001 applies only to TCP"),
        ('transport = "tcp-cubic"', "", r"link: connections = 16 has no effect without a transport; set transport to"),
        ('"9000 B"', '"100 B"', r"link: mtu = 100\.0 is too small for tcp-cubic"),
        ('"9000 B"', '"9000 B"\nframe_header = "90 B"\nframe_payload = "1 kB"', r"mtu and frame_header both define"),
        ("connections = 16", "connections = 0", r"link\.connections = 0: must be an integer from 1 to 1048576"),
        ("connections = 16", "connections = 1.5", r"link\.connections = 1\.5: must be an integer"),
        ("loss = 0.001", "loss = 1", r"link\.loss = 1: must be at least 0 and below 1"),
        ('"5 Gbit/s"', '"5 Gbit"', r"link\.flow_rate.*"),
        ("warm = true", "warm = 1", r"link\.warm = 1: must be True or False"),
    ],
)
def test_mistakes_in_transports_are_named(tmp_path, old, new, error):
    text = FILE[: FILE.index("frame_header")] + TRANSPORT
    assert old in text
    with pytest.raises((ConfigError, UnitError), match=error) as caught:
        load(tmp_path, text.replace(old, new))
    assert str(caught.value).startswith(str(tmp_path / "c.toml"))
    assert "\n" not in str(caught.value)


def test_a_second_table_replaces_only_its_kinds():
    cluster = Cluster.from_graph(two_racks(2, bandwidth=1e9, latency=1e-5))
    cluster = with_detail(with_detail(cluster, burst=1e3), burst=2e3, kinds=["trunk"])
    trunk = np.array(cluster.link_kind) == "trunk"
    assert (cluster.details.burst == np.where(trunk, 2e3, 1e3)).all()


def test_a_summary_tells_them(tmp_path):
    text = load(tmp_path, FILE).summary()
    assert (
        text.count("66 B of headers per 1448 B of payload, bursts of 4542 B, acknowledgements 0.0218") == 2
    )  # nic, trunk
    mixed = with_detail(load_cluster("two-racks-oversubscribed"), burst="4 kB", kinds=["trunk"]).summary()
    assert mixed.count("bursts of 4000 B") == 1


def test_the_link_back():
    graph = nx.MultiDiGraph()
    for u, v in (("a", "b"), ("b", "a"), ("a", "b"), ("b", "a"), ("a", "c")):
        graph.add_edge(u, v, bandwidth=1e9)
    cluster = Cluster.from_graph(graph)
    ends = list(zip(cluster.link_src.tolist(), cluster.link_dst.tolist(), strict=True))
    back = cluster.reverse_link.tolist()
    one_way = [k for k, r in enumerate(back) if r < 0]
    assert [ends[k] for k in one_way] == [(cluster.node("a"), cluster.node("c"))]
    for k, r in enumerate(back):
        if r >= 0:
            assert ends[r] == ends[k][::-1]
            assert back[r] == k


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ('burst = "4542 B"', "burst = 4542", r"link\.burst = 4542: a bytes is a text with a unit|link\.burst"),
        ('burst = "4542 B"', 'burst = "4542"', r"link\.burst.*'4542' has no unit"),
        ('burst = "4542 B"', 'burst = "-1 B"', r"link\.burst.*must be finite and not negative"),
        ('burst = "4542 B"', 'busrt = "4542 B"', r"link: unknown key 'busrt'; did you mean 'burst'\?"),
        ("0.0218", "1.5", r"link\.reverse_load = 1\.5: must be at least 0 and below 1"),
        ('frame_payload = "1448 B"', "", r"link: frame_header = 66 B and frame_payload = 0 B must be set together"),
        ("reverse_load = 0.0218", 'kinds = ["nik"]', r"unknown link kind 'nik'; did you mean 'nic'\?"),
    ],
)
def test_mistakes_are_named(tmp_path, old, new, error):
    with pytest.raises((ConfigError, UnitError), match=error) as caught:
        load(tmp_path, FILE.replace(old, new))
    assert str(caught.value).startswith(str(tmp_path / "c.toml"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("detail", "error"),
    [
        ({"reverse_load": True}, r"with_detail: reverse_load = True: must be a number"),
        ({"reverse_load": 1.0}, r"reverse_load = 1\.0: must be at least 0 and below 1"),
        ({"burst": "1 s"}, r"burst: '1 s' is a time, not a size"),
        ({"frame_payload": "9 kB"}, r"must be set together, for example '66 B' and '1448 B'"),
        ({"transport": "udp"}, r"with_detail: transport = 'udp'"),
        ({"warm": True}, r"warm = True has no effect without a transport"),
        ({"mtu": "1500 B"}, r"mtu = 1500\.0 has no effect without a transport"),
        ({"transport": "tcp-bbr", "queued_acks": True}, r"queued_acks has no effect without queues; set sharing"),
        ({"transport": "tcp-bbr", "window_spread": 0.4}, r"window_spread has no effect without queues; set sharing"),
    ],
)
def test_mistakes_in_python_are_named(detail, error):
    cluster = Cluster.from_graph(star(2, bandwidth=1e9, latency=1e-5))
    with pytest.raises(ConfigError, match=error):
        with_detail(cluster, **detail)
