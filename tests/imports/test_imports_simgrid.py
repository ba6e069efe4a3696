"""SimGrid platforms: units, clusters of every topology, zones with SimGrid's own routes; what is refused.

Expected routes are written as the sums of latencies and the tightest bandwidth that the platform files say.
"""

import numpy as np
import pytest

import ddlsim
from ddlsim.cluster import Cluster, load_cluster
from ddlsim.errors import ConfigError
from ddlsim.imports.simgrid import read_simgrid

HEAD = """<?xml version='1.0'?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1">
"""


def read(tmp_path, body, head=HEAD):
    path = tmp_path / "platform.xml"
    path.write_text(f"{head}{body}\n</platform>\n", encoding="utf-8")
    return read_simgrid(path)


def cluster(more, radical="0-3"):
    return (
        f'<zone id="AS0" routing="Full">\n<cluster id="c" prefix="node-" suffix=".acme.org" radical="{radical}" '
        f'speed="1Gf" bw="125MBps" lat="50us" {more}/>\n</zone>'
    )


def along(made, src, dst):
    """Return (latency, tightest bandwidth, channels) of the route between two nodes."""
    links = made.routes([made.node(src)], [made.node(dst)])[0]
    return (
        made.link_latency[links].sum(), made.link_bandwidth[links].min(), set(made.link_channel[links].tolist())
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("125MBps", 125e6), ("10Gbps", 1.25e9), ("1GiBps", 2.0**30), ("8Kibps", 1024.0), ("1kBps", 1e3),
        ("1e9Bps", 1e9), ("1250000", 1.25e6), ("41.279125MBps", 41.279125e6), ("1EBps", 1e18), ("1.5TBps", 1.5e12),
    ],
)  # fmt: skip
def test_bandwidths(tmp_path, text, value):
    made = read(tmp_path, cluster("").replace("125MBps", text))
    assert made.link_bandwidth.tolist() == pytest.approx([value] * 8, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "value"),
    [("50us", 5e-5), ("1.4ms", 1.4e-3), ("3ns", 3e-9), ("5ps", 5e-12), ("0", 0.0), ("2m", 120.0), ("1E-4s", 1e-4)],
)
def test_latencies(tmp_path, text, value):
    assert read(tmp_path, cluster("").replace("50us", text)).link_latency[0] == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("125MBps", "125MB", r"platform\.xml:5: <cluster>: bw = '125MB' has the unknown unit 'MB'"),
        ("125MBps", "fast", "bw = 'fast' is not a quantity"),
        ("125MBps", "0Bps", "bw = '0Bps' must be above 0"),
        ("50us", "-1us", "lat = '-1us' must be from 0"),
        ("1Gf", "1Gflop", "speed = '1Gflop' has the unknown unit"),
        ("0-3", "3-0", "radical = '3-0': '3-0' is not a range"),
        ("0-3", "0-3,2", "contains a host twice"),
        ("0-3", "0-99999999", "gives more than 100000 hosts"),
        ('bw="125MBps"', "", "the attribute 'bw' is missing"),
        ("/>", ' limiter_link="1GBps"/>', "limiter_link .* is not supported"),
        ("/>", ' sharing_policy="FATPIPE"/>', "'FATPIPE' is not supported"),
        ("/>", ' topology="MESH"/>', "topology = 'MESH' is unknown"),
        ("/>", ' topology="TORUS" topo_parameters="3,2"/>', "has 6 places, radical = '0-3' 4 hosts"),
        ("/>", ' topology="FAT_TREE" topo_parameters="2;4,4;1,2"/>', "must be levels;down;up;cables"),
        ("/>", ' topology="DRAGONFLY" topo_parameters="2,x;1,1;1,1;2"/>', "'2,x' must be integers"),
        ("/>", ' topology="FAT_TREE" topo_parameters="1;4;9999;9999"/>', "level 1 is too large"),
    ],
)
def test_a_bad_cluster_is_refused_with_its_line(tmp_path, old, new, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, cluster("").replace(old, new, 1))


def test_a_flat_cluster_is_a_crossbar_of_full_duplex_links(tmp_path):
    made = read(tmp_path, cluster(""))
    assert made.node_names[:4] == tuple(f"node-{i}.acme.org" for i in range(4))
    there, back = (along(made, f"node-{i}.acme.org", f"node-{3 - i}.acme.org") for i in (0, 3))
    assert there[:2] == (pytest.approx(1e-4), 125e6)
    assert not there[2] & back[2]


def test_shared_links_are_half_duplex(tmp_path):
    made = read(tmp_path, cluster('sharing_policy="SHARED"'))
    assert along(made, "node-0.acme.org", "node-3.acme.org")[2] == along(made, "node-3.acme.org", "node-0.acme.org")[2]


def test_every_message_crosses_the_backbone_once(tmp_path):
    """50 us + 500 us + 50 us; opposite directions share it, as SHARED says."""
    made = read(tmp_path, cluster('bb_bw="100MBps" bb_lat="500us"'))
    there, back = (along(made, f"node-{i}.acme.org", f"node-{3 - i}.acme.org") for i in (0, 3))
    assert there[:2] == (pytest.approx(6e-4), 100e6)
    assert len(there[2] & back[2]) == 1


def test_a_torus_counts_its_first_dimension_fastest(tmp_path):
    """3 x 2 x 2: node 0 borders 1 and 2 (round the ring of 3), 3 and 6; 12 * (2 + 1 + 1) directed links."""
    made = read(tmp_path, cluster('topology="TORUS" topo_parameters="3,2,2"', "0-11"))
    links = [(made.node_names[a], made.node_names[b]) for a, b in zip(made.link_src, made.link_dst, strict=True)]
    assert {b for a, b in links if a == "node-0.acme.org"} == {f"node-{i}.acme.org" for i in (1, 2, 3, 6)}
    assert made.n_links == 12 * 4
    assert along(made, "node-0.acme.org", "node-11.acme.org")[0] == pytest.approx(3 * 50e-6)


def test_the_fat_tree_of_the_documentation(tmp_path):
    """2 levels, 4 leaves with 4 nodes each, 2 core switches joined to each leaf by two cables.

    Directed links: 16 nodes * 1 + 4 leaves * 2 cores * 2 cables, twice. Four hops between leaves.
    """
    made = read(tmp_path, cluster('topology="FAT_TREE" topo_parameters="2;4,4;1,2;1,2"', "0-15"))
    assert made.node_kind.count("switch") == 4 + 2
    assert made.n_links == 2 * (16 + 16)
    assert along(made, "node-0.acme.org", "node-3.acme.org")[0] == pytest.approx(2 * 50e-6)
    assert along(made, "node-0.acme.org", "node-4.acme.org")[0] == pytest.approx(4 * 50e-6)


def test_the_dragonfly_of_the_documentation(tmp_path):
    """3 groups (4 links between two), 3 chassis (2), 2 routers (1), 2 nodes: 36 nodes, 18 routers.

    Per group 3 green links of 125e6 and 2 * 3 black ones of 250e6; 3 blue ones of 500e6.
    """
    made = read(tmp_path, cluster('topology="DRAGONFLY" topo_parameters="3,4;3,2;2,1;2"', "0-35"))
    assert made.node_kind.count("switch") == 18
    sizes, counts = np.unique(made.link_bandwidth, return_counts=True)
    assert dict(zip(sizes.tolist(), counts.tolist(), strict=True)) == {
        125e6: 2 * (36 + 3 * 3), 250e6: 2 * 3 * 6, 500e6: 2 * 3
    }  # fmt: skip


DOGBONE = """<zone id="AS0" routing="Full">
 <host id="S1" speed="1Gf"/> <host id="C1" speed="2Gf"/> <host id="S2" speed="1Gf"/> <host id="C2" speed="1Gf"/>
 <link id="1" bandwidth="100MBps" latency="1ms"/>
 <link id="2" bandwidth="80MBps" latency="10ms" sharing_policy="SPLITDUPLEX"/>
 <link id="3" bandwidth="100MBps" latency="1ms"/>
 <link id="4" bandwidth="10MBps" latency="2ms"/>
 <link id="5" bandwidth="100MBps" latency="1ms"/>
 <link id="loopback" bandwidth="498MBps" latency="15us" sharing_policy="FATPIPE"/>
 <route src="S1" dst="S1"><link_ctn id="loopback"/></route>
 <route src="S1" dst="C1"><link_ctn id="1"/><link_ctn id="2"/><link_ctn id="3"/></route>
 <route src="S2" dst="C2"><link_ctn id="4"/><link_ctn id="2_UP"/><link_ctn id="5"/></route>
 <route src="S1" dst="C2"><link_ctn id="1"/><link_ctn id="2" direction="UP"/><link_ctn id="5"/></route>
 <route src="S2" dst="C1"><link_ctn id="4"/><link_ctn id="2"/><link_ctn id="3"/></route>
 <route src="S1" dst="S2"><link_ctn id="1"/><link_ctn id="4"/></route>
 <route src="C1" dst="C2"><link_ctn id="3"/><link_ctn id="5"/></route>
</zone>"""


def test_routes_of_a_full_zone_are_simgrids(tmp_path):
    made = read(tmp_path, DOGBONE)
    assert along(made, "S1", "C1")[:2] == (pytest.approx(12e-3), 80e6)
    assert along(made, "S2", "C2")[:2] == (pytest.approx(13e-3), 10e6)
    assert along(made, "C2", "S2")[:2] == (pytest.approx(13e-3), 10e6)
    middle = made.node("2_UP.in"), made.node("2_UP.out")
    shared = along(made, "S1", "C1")[2] & along(made, "S2", "C2")[2]
    (used,) = shared
    assert (made.link_src[used], made.link_dst[used]) == middle
    assert made.speed[[made.node("S1"), made.node("C1")]].tolist() == [0.5, 1.0]


def test_opposite_directions_share_a_link_unless_it_is_split(tmp_path):
    """1 and 3 are SHARED (no policy given), 2 is split: the two ways have the edges of 1 and 3 in common."""
    made = read(tmp_path, DOGBONE)
    both = along(made, "S1", "C1")[2] & along(made, "C1", "S1")[2]
    latencies = sorted(made.link_latency[np.isin(made.link_channel, list(both))].tolist())
    assert latencies == [1e-3, 1e-3]


def test_a_platform_survives_saving_and_loading(tmp_path):
    made = read(tmp_path, DOGBONE)
    made.save(tmp_path / "saved.json")
    again = load_cluster(tmp_path / "saved.json")
    assert isinstance(again, Cluster)
    assert along(again, "S2", "C2")[:2] == along(made, "S2", "C2")[:2]


TWO = """<AS id="AS0" routing="Full">
<cluster id="a" prefix="n-" suffix="" radical="0-1" speed="1Gf" bw="125MBps" lat="50us" bb_bw="2GBps" bb_lat="500us"/>
<cluster id="b" prefix="n-" suffix="" radical="10-11" power="1E9" bw="125MBps" lat="60us"/>
<link id="backbone" bandwidth="50MBps" latency="1ms"/>
<ASroute src="a" dst="b" gw_src="n-a_router" gw_dst="n-b_router"><link_ctn id="backbone"/></ASroute>
</AS>"""


def test_clusters_meet_at_their_gateways(tmp_path):
    """n-0 up, its backbone, the link between, n-10 down: 0.05 + 0.5 + 1 + 0.06 ms; inside b: 60 + 60 us."""
    made = read(tmp_path, TWO, HEAD.replace("4.1", "3"))
    assert along(made, "n-0", "n-10")[:2] == (pytest.approx(1.61e-3), 50e6)
    assert along(made, "n-10", "n-0")[:2] == (pytest.approx(1.61e-3), 50e6)
    assert along(made, "n-10", "n-11")[:2] == (pytest.approx(1.2e-4), 125e6)
    assert along(made, "n-0", "n-1")[0] == pytest.approx(6e-4)


ROUTERS = """<zone id="z" routing="Floyd">
 <host id="a" speed="1Gf"/> <host id="b" speed="1Gf"/> <router id="r"/> <router id="q"/>
 <link id="ar" bandwidth="1GBps" latency="1us"/> <link id="rb" bandwidth="1GBps" latency="2us"/>
 <link id="aq" bandwidth="1GBps" latency="4us"/> <link id="qx" bandwidth="1GBps" latency="8us"/>
 <link id="xb" bandwidth="1GBps" latency="16us"/>
 <route src="a" dst="r"><link_ctn id="ar"/></route>
 <route src="r" dst="b"><link_ctn id="rb"/></route>
 <route src="a" dst="q"><link_ctn id="aq"/></route>
 <route src="q" dst="b"><link_ctn id="qx"/><link_ctn id="xb"/></route>
</zone>"""


@pytest.mark.parametrize("routing", ["Floyd", "Dijkstra", "DijkstraCache"])
def test_routers_are_crossed_with_the_fewest_links(tmp_path, routing):
    assert along(read(tmp_path, ROUTERS.replace("Floyd", routing)), "b", "a")[0] == pytest.approx(3e-6)


HOST_LINKS = """<zone id="z" routing="Cluster">
 <router id="r"/>
 <host id="h1" speed="1Gf"/><host id="h2" speed="1Gf"/>
 <link id="l1" bandwidth="125MBps" latency="100us" sharing_policy="FULLDUPLEX"/>
 <link id="l2" bandwidth="100MBps" latency="10us"/>
 <host_link id="h1" up="l1_UP" down="l1_DOWN"/><host_link id="h2" up="l2" down="l2"/>
 <backbone id="bb" bandwidth="2.25GBps" latency="500us"/>
</zone>"""


def test_zones_of_host_links_and_a_backbone(tmp_path):
    made = read(tmp_path, HOST_LINKS)
    assert along(made, "h1", "h2")[:2] == (pytest.approx(610e-6), 100e6)


@pytest.mark.parametrize(
    ("body", "old", "new", "message"),
    [
        (DOGBONE, '<route src="C1" dst="C2"', '<route src="C1" dst="C3"', r"xml:18: <route>: 'C3' is not a host"),
        (DOGBONE, '<link_ctn id="3"/><link_ctn id="5"/></route>\n', "</route>\n", "'C1' to 'C2' has no link"),
        (DOGBONE, '<link_ctn id="4"/></route>', '<link_ctn id="9"/></route>', r"xml:17: .*the link '9' is not"),
        (DOGBONE, 'routing="Full"', 'routing="Vivaldi"', r"xml:4: <zone>: routing = 'Vivaldi' is not supported"),
        (DOGBONE, '<link id="1"', '<peer id="1"', r"xml:6: <peer>: is not supported"),
        (DOGBONE, '<link id="2" ', '<link id="2" bandwidth_file="x" ', r"xml:7: <link>: bandwidth_file"),
        (DOGBONE, "SPLITDUPLEX", "FATPIPE", r"xml:7: <link>: sharing_policy = 'FATPIPE' is not supported"),
        (DOGBONE, '<host id="S2"', '<host id="S1"', r"xml:5: <host>: id = 'S1' is already taken"),
        (TWO, "gw_src=\"n-a_router\"", 'gw_src="n-b_router"', r"xml:8: .*'n-b_router' is not in the zone 'a'"),
        (TWO, '<ASroute src="a" dst="b"', '<ASroute src="a" dst="c"', r"xml:8: <ASroute>: 'c' is not a zone"),
        (ROUTERS, '<route src="r" dst="b">', '<route src="r" dst="b" symmetrical="NO">', None),
        (ROUTERS, '<route src="a" dst="r">', '<route src="a" dst="r" symmetrical="so">', "'SO' must be YES or NO"),
    ],
)  # fmt: skip
def test_bad_zones_are_refused_with_their_line(tmp_path, body, old, new, message):
    assert old in body
    if message is None:  # one way only: the other takes the longer path
        assert along(read(tmp_path, body.replace(old, new)), "b", "a")[0] == pytest.approx(28e-6)
        return
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, body.replace(old, new))


def test_hosts_without_a_route_are_refused_when_they_communicate(tmp_path):
    line = ' <route src="C1" dst="C2"><link_ctn id="3"/><link_ctn id="5"/></route>\n'
    made = read(tmp_path, DOGBONE.replace(line, ""))
    assert along(made, "S1", "C1")[0] == pytest.approx(12e-3)
    made.save(tmp_path / "saved.toml")
    for each in (made, load_cluster(tmp_path / "saved.toml")):
        with pytest.raises(
            ConfigError, match="no path from 'C1' to 'C2'; add a route, or use only one of the two nodes"
        ):
            each.routes([each.node("C1")], [each.node("C2")])


def star_platform(n_clients):
    """A server and clients that have routes to it only: the usual federated platform."""
    parts = "".join(
        f'<host id="c{i}" speed="1Gf"/><link id="l{i}" bandwidth="125MBps" latency="1ms"/>' for i in range(n_clients)
    )
    routes = "".join(f'<route src="s" dst="c{i}"><link_ctn id="l{i}"/></route>' for i in range(n_clients))
    return f'<zone id="z" routing="Full"><host id="s" speed="1Gf"/>{parts}{routes}</zone>'


def test_clients_of_a_server_train_without_routes_between_them(tmp_path):
    """Push and pull of 246.8 kB by each of two clients over links of their own: 2 (1 ms + 1.9744 ms) and the pass."""
    cluster_ = read(tmp_path, star_platform(2))
    result = ddlsim.simulate(
        cluster_, "lenet5", ddlsim.ParameterServer(overlap="none"), 8, workers=[1, 2], steps=3,
        compute=ddlsim.Measured("10 ms", 8),
    )  # fmt: skip
    assert result.step_time == pytest.approx(10e-3 + 2 * (1e-3 + 246_824 / 125e6), rel=1e-6)
    with pytest.raises(ConfigError, match="no path from 'c0' to 'c1'"):
        ddlsim.simulate(cluster_, "lenet5", ddlsim.AllReduce(), 8, workers=[1, 2], steps=3)


SPEEDS = '<zone id="z" routing="Full"><host id="a" speed="100Mf"/><host id="b" {}/><host id="c" speed="80Mf"/></zone>'


@pytest.mark.parametrize(
    ("attributes", "share"),
    [
        ('speed="100Mf,50Mf,20Mf" pstate="1"', 0.5), ('speed="100Mf, 50Mf, 20Mf" pstate="2"', 0.2),
        ('speed="100Mf,50Mf"', 1.0), ('speed="100Mf" availability="0.3"', 0.3),
        ('speed="100Mf,50Mf" pstate="1" availability="0.5" state="ON"', 0.25), ('power="1E8" availability="0.5"', 0.5),
    ],
)  # fmt: skip
def test_hosts_compute_at_their_pstate_and_availability(tmp_path, attributes, share):
    made = read(tmp_path, SPEEDS.format(attributes))
    assert made.speed[[made.node("a"), made.node("b")]].tolist() == [1.0, pytest.approx(share)]


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ('speed="100Mf,50Mf" pstate="2"', r"<host>: pstate = 2: speed = '100Mf,50Mf' has the states 0 to 1"),
        ('speed="100Mf" pstate="fast"', "pstate = 'fast' is not an integer"),
        ('speed="100Mf" availability="0"', r"\(pstate 0, times availability\) must be from 1 to 1e\+30 flop/s"),
        ('speed="100Mf" availability="half"', "availability = 'half' is not a quantity"),
        ('speed="100Mf" state="BROKEN"', "state = 'BROKEN' must be ON or OFF"),
    ],
)  # fmt: skip
def test_bad_pstates_are_refused(tmp_path, attributes, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, SPEEDS.format(attributes))


def test_hosts_and_links_that_are_off_are_left_out_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match=r"skipped parts in state OFF: b \(1 in total\)"):
        made = read(tmp_path, SPEEDS.format('speed="1Gf" state="OFF"'))
    assert made.host_names == ("a", "c")
    assert made.speed[: len(made.workers)].tolist() == [1.0, 0.8]
    with pytest.warns(UserWarning, match=r"skipped parts in state OFF: l1"):
        made = read(tmp_path, star_platform(3).replace('<link id="l1"', '<link id="l1" state="OFF"'))
    assert along(made, "s", "c0")[0] == 1e-3
    with pytest.raises(ConfigError, match="no path from 's' to 'c1'"):
        along(made, "s", "c1")
    with pytest.raises(ConfigError, match="contains no host that is ON"):
        read(tmp_path, '<zone id="z" routing="Full"><host id="a" speed="1Gf" state="OFF"/></zone>')


@pytest.mark.slow
def test_zones_of_any_size(tmp_path):
    """4 cabinets of 128 and a master: 10 us up, 5 us backbone, 10 us down; 513 messages of 1 kB share 2 GB/s."""
    cabinets = "".join(
        f'<cabinet id="c" prefix="{p}" suffix="" radical="0-{n}" speed="1Gf" bw="100MBps" lat="10us"/>'
        for p, n in (("a", 127), ("b", 127), ("c", 127), ("d", 127), ("m", 0))
    )
    backbone = '<backbone id="bb" bandwidth="2GBps" latency="5us"/></zone>'
    made = read(tmp_path, '<zone id="z" routing="Cluster">' + cabinets + backbone)
    assert len(made.workers) == 513
    assert along(made, "a5", "m0")[:2] == (pytest.approx(25e-6), 100e6)
    time = ddlsim.collective_time(made, "ring", "513 kB")
    assert time == pytest.approx(2 * 512 * (25e-6 + 513 * 1000 / 2e9), rel=1e-6)


FLOYD = """<zone id="g" routing="Floyd">
 <zone id="core" routing="Floyd"><router id="x"/><router id="y"/>
  <link id="xy" bandwidth="1GBps" latency="8us"/><route src="x" dst="y"><link_ctn id="xy"/></route></zone>
 <cluster id="a" prefix="a" suffix="" radical="0-1" speed="1Gf" bw="1GBps" lat="1us"/>
 <cluster id="b" prefix="b" suffix="" radical="0-1" speed="1Gf" bw="1GBps" lat="2us" bb_bw="9GBps" bb_lat="4us"/>
 <link id="ax" bandwidth="100MBps" latency="16us"/><link id="by" bandwidth="1GBps" latency="32us"/>
 <zoneRoute src="a" dst="core" gw_src="aa_router" gw_dst="x"><link_ctn id="ax"/></zoneRoute>
 <zoneRoute src="b" dst="core" gw_src="bb_router" gw_dst="y"><link_ctn id="by"/></zoneRoute>
</zone>"""


@pytest.mark.parametrize("routing", ["Floyd", "Dijkstra"])
def test_zones_are_crossed_on_the_way_to_others(tmp_path, routing):
    """a0 up, ax, xy inside the zone between, by, the backbone of b, b1 down: 1 + 16 + 8 + 32 + 4 + 2 us."""
    made = read(tmp_path, FLOYD.replace("Floyd", routing))
    assert along(made, "a0", "b1")[:2] == (pytest.approx(63e-6), 100e6)
    assert along(made, "b1", "a0")[:2] == (pytest.approx(63e-6), 100e6)
    assert along(made, "a0", "a1")[0] == pytest.approx(2e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('<platform>\n<zone id="a" routing="Full">\n</platform>', r":3: not valid XML: mismatched tag"),
        ('<!DOCTYPE p [<!ENTITY x "y">]>\n<platform>&x;</platform>', "DTDs and entity declarations are not allowed"),
        ('<?xml version="1.0"?>\n<graph/>', r":2: <graph>: not a SimGrid platform"),
        ("<platform/>", "must contain one <zone> or one <cluster>"),
        ("<p>" * 200, "nested more than 100 levels deep"),
        ("", "not valid XML"),
    ],
    ids=["cut", "entity", "other", "empty", "deep", "nothing"],
)
def test_files_that_are_no_platforms(tmp_path, text, message):
    path = tmp_path / "p.xml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_simgrid(path)


def test_cabinets_share_a_backbone(tmp_path):
    cabinet = '<cabinet id="c{0}" prefix="h" suffix="" radical="{0}" speed="1Gf" bw="100MBps" lat="10us"/>'
    backbone = '<backbone id="bb" bandwidth="2GBps" latency="5us"/></zone>'
    made = read(tmp_path, '<zone id="z" routing="Cluster">' + cabinet.format("1-2") + cabinet.format("3-4") + backbone)
    assert made.host_names == ("h1", "h2", "h3", "h4")
    near, far = along(made, "h1", "h2"), along(made, "h1", "h4")
    assert near[:2] == far[:2] == (pytest.approx(25e-6), 100e6)
    (backbone,) = (
        made.link_channel[i]
        for i, (a, b) in enumerate(zip(made.link_src, made.link_dst, strict=True))
        if (made.node_names[a], made.node_names[b]) == ("bb.in", "bb.out")
    )
    assert backbone in near[2] & far[2]


def test_profiles_joined_by_trace_connect_are_left_out_aloud(tmp_path):
    traces = '<trace id="t" periodicity="1">0 1</trace>{}<trace_connect kind="SPEED" trace="t" element="S1"/>'
    with pytest.warns(UserWarning, match=r"1 <trace_connect> skipped; speeds and rates are constant"):
        assert len(read(tmp_path, traces.format(DOGBONE)).workers) == 4
