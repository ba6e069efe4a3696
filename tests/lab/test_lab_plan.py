"""What is built for a cluster file, and what cannot be; what can be asked of a laboratory."""

import sys

import networkx as nx
import numpy as np
import pytest
from typer.testing import CliRunner

from ddlsim.cli import app
from ddlsim.cluster import Cluster, Host, MultiGpu, leaf_spine, ring, star, two_racks, with_detail
from ddlsim.errors import ConfigError
from ddlsim.lab import check_computer, compare, laboratory, parse_operations, plan
from ddlsim.lab.cabling import KERNEL_LATENCY
from ddlsim.lab.laboratory import BUSY, Repetition, measured, predicted, schedule_of

STAR = {"bandwidth": "100 Mbit/s", "latency": "30 us"}


def cluster(graph):
    return Cluster.from_graph(graph)


def test_a_star_becomes_a_cable_per_host():
    """100 Mbit/s carry 1448 of 1538 bytes on the wire; the kernel counts 1514 of them: 12.5e6 * 1514 / 1538 bytes/s."""
    cabling = plan(cluster(star(3, **STAR, efficiency=1448 / 1538)))
    assert cabling.n_hosts == 3
    assert [(cable.a, cable.b) for cable in cabling.cables] == [(0, 3), (1, 3), (2, 3)]
    port = cabling.cables[0].there
    assert port.rate == pytest.approx(12.5e6 * 1514 / 1538)
    assert port.delay == 0.0
    assert port.burst == 3 * 1514
    assert cabling.mtu == 1500
    assert cabling.notes == ()


def test_latency_above_the_kernels_own_is_added():
    port = plan(cluster(star(2, bandwidth="1 Gbit/s", latency="2 ms"))).cables[0].there
    assert port.delay == pytest.approx(2e-3 - KERNEL_LATENCY)
    assert port.burst == round(125e6 * 1514 / 1538 * 300e-6)


def test_directions_may_differ():
    cable = plan(cluster(star(2, **STAR, reverse_bandwidth="10 Mbit/s"))).cables[0]
    assert cable.there.rate == pytest.approx(10 * cable.back.rate)


def test_frames_and_buckets_of_the_file_count():
    """Jumbo frames of 8948 + 66 bytes at 80 % of the rate, and 90 kB saved up."""
    graph = cluster(star(2, **STAR, efficiency=0.8))
    cabling = plan(with_detail(graph, frame_header=66, frame_payload=8948, burst="90 kB"))
    assert cabling.mtu == 9000
    assert cabling.cables[0].there.rate == pytest.approx(10e6)
    assert cabling.cables[0].there.burst == 90_000
    assert cabling.efficiency == pytest.approx(8948 / 9014)


def test_connections_have_the_congestion_control_that_links_name():
    three = cluster(star(3, **STAR))
    assert plan(three).congestion == "cubic"
    assert plan(with_detail(three, transport="tcp-reno")).congestion == "reno"
    assert plan(with_detail(three, transport="tcp-bbr")).congestion == "bbr"
    racks = cluster(two_racks(2, **STAR, trunk_bandwidth="100 Mbit/s"))
    mixed = with_detail(with_detail(racks, transport="tcp-reno", kinds=["nic"]), transport="tcp-bbr", kinds=["trunk"])
    with pytest.raises(
        ConfigError, match="links have different transports, tcp-bbr and tcp-reno, but a connection crosses several"
    ):
        plan(mixed)


def test_a_congestion_control_that_the_kernel_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(laboratory, "check_computer", lambda: None)
    monkeypatch.setattr(laboratory, "congestion_control", lambda name: "cubic")
    reno = with_detail(cluster(star(2, **STAR)), transport="tcp-reno")
    with pytest.raises(ConfigError, match=r"not available in this kernel; run modprobe tcp_reno, or add"):
        next(compare(reno, parse_operations("point_to_point:one_way"), [65536]))


def test_an_efficiency_that_frames_do_not_have_is_told():
    (note,) = plan(cluster(star(2, **STAR))).notes
    assert note == (
        "TCP/IP on Ethernet leaves 94.15 % of a link's bandwidth for payload, but the cluster file specifies 100.00 %; "
        "predictions and measurements differ by the ratio of the two"
    )


def test_a_tree_of_switches_is_built():
    racks = two_racks(2, bandwidth="100 Mbit/s", trunk_bandwidth="100 Mbit/s", latency="10 us")
    cabling = plan(cluster(racks))
    assert cabling.n_hosts == 4
    assert len(cabling.cables) == len(cabling.place_names) - 1 > 4


def test_a_machine_is_one_place_whatever_is_in_it():
    cabling = plan(cluster(star(2, **STAR, efficiency=0.9415, host=MultiGpu(n_gpus=1))))
    assert len(cabling.place_names) == 3
    assert cabling.notes == ("links inside machines are not emulated in the lab",)


def one_way():
    graph = nx.DiGraph()
    for name in "ab":
        graph.add_node(name, kind="host")
    graph.add_edge("a", "b", bandwidth=1e6, latency=0.0)
    return graph


@pytest.mark.parametrize(
    ("graph", "says"),
    [
        pytest.param(lambda: ring(4, **STAR), "closes a loop.*remove parallel links", id="ring"),
        pytest.param(lambda: leaf_spine(2, 2, 2, **STAR), "closes a loop", id="clos"),
        pytest.param(lambda: star(3, **STAR, shared=True), "shares its capacity", id="shared"),
        pytest.param(lambda: star(2, **STAR, host=MultiGpu(n_gpus=2)), "has several workers", id="gpus"),
        pytest.param(lambda: star(65, **STAR), "has 65 workers.*2 to 64", id="large"),
        pytest.param(one_way, "has no link in the opposite direction; add one", id="one-way"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(graph, says):
    with pytest.raises(ConfigError, match=rf"^lab: cluster .*{says}"):
        plan(cluster(graph()))


def test_frames_that_are_not_tcp_are_refused():
    with pytest.raises(
        ConfigError, match="frames with 1500 bytes of payload and 20 bytes of headers are not TCP/IP on Ethernet"
    ):
        plan(with_detail(cluster(star(2, **STAR)), frame_header=20, frame_payload=1500))


def test_operations_are_read():
    found = parse_operations("all_reduce:hierarchical(ring, ring), point_to_point:both_ways,parameter_server:2")
    assert [(o.operation, o.algorithm, o.n_servers, o.factor) for o in found] == [
        ("all_reduce", "hierarchical(ring, ring)", 0, 1), ("both_ways", "", 0, 2),
        ("all_reduce", "parameter_server", 2, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("all_reduse:ring", "unknown operation 'all_reduse'; did you mean 'all_reduce'"),
        ("all_reduce", "the algorithm is missing; write, for example, all_reduce:ring"),
        ("point_to_point:oneway", "did you mean 'one_way'"),
        ("parameter_server:two", "'two' is not a number of servers"),
        (" , ", "is empty"),
    ],
    ids=["kind", "algorithm", "message", "servers", "empty"],
)
def test_operations_that_do_not_exist_are_refused(text, says):
    with pytest.raises(ConfigError, match=says):
        parse_operations(text)


def test_predictions_are_those_of_the_cluster():
    """A message of 1 MB crosses two links of 12.5 MB/s and 30 us: 60 us + 80 ms; both directions at once the same.
    A server takes two gradients one after the other through its link, and sends two: 2 * (60 us + 160 ms)."""
    three = cluster(star(3, **STAR, host=Host()))
    one, both, served = parse_operations("point_to_point:one_way,point_to_point:both_ways,parameter_server")
    for operation in (one, both):
        nbytes = 10**6 * operation.factor
        assert predicted(three, schedule_of(operation, 3, nbytes), nbytes) == pytest.approx(80.06e-3)
    assert predicted(three, schedule_of(served, 3, 10**6), 10**6) == pytest.approx(320.12e-3)


def test_a_collective_of_ones_own_is_proved_first():
    (operation,) = parse_operations(f"all_reduce:{__name__}:wrong")
    with pytest.raises(ConfigError, match="wrong"):
        schedule_of(operation, 3, 64)


def wrong(n_ranks):
    from ddlsim.collectives.reduce import binomial

    return binomial(n_ranks)


def test_too_many_servers_are_refused():
    with pytest.raises(ConfigError, match="3 machines are too few for 3 servers and a worker"):
        schedule_of(parse_operations("parameter_server:3")[0], 3, 64)


@pytest.mark.parametrize("size", [0, 6])
def test_sizes_are_whole_floats(size):
    with pytest.raises(ConfigError, match=f"size = {size}: must be a positive multiple of 4 bytes"):
        next(compare(cluster(star(2, **STAR)), parse_operations("all_reduce:ring"), [size]))


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(laboratory.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(laboratory.shutil, "which", lambda name, path=None: f"/sbin/{name}")
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(ConfigError, match=r"needs root.*sudo"):
        check_computer()
    monkeypatch.setattr(laboratory.shutil, "which", lambda name, path=None: None if name == "tc" else name)
    with pytest.raises(ConfigError, match="the program 'tc', which is missing; install iproute2"):
        check_computer()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="needs Linux"):
        check_computer()


def test_latency_that_the_kernel_cannot_make_is_refused(monkeypatch):
    monkeypatch.setattr(laboratory, "check_computer", lambda: None)
    monkeypatch.setattr(laboratory, "has_netem", lambda: False)
    slow = cluster(star(2, bandwidth="1 Gbit/s", latency="2 ms"))
    with pytest.raises(
        ConfigError, match=r"'star-2': a link latency of 2000 us requires netem.*use latencies of at most 50 us"
    ):
        next(compare(slow, parse_operations("all_reduce:ring"), [64]))


def test_what_may_wait_at_a_port_is_the_queue_of_its_bucket():
    port = plan(cluster(star(2, **STAR))).cables[0].there
    (command,) = laboratory._shaped("port0", port, 1500, 8 * 2**20)
    assert command.endswith(" limit 8388608")
    with pytest.raises(ConfigError, match="queue = 1000 bytes: must hold at least two frames"):
        next(compare(cluster(star(2, **STAR)), parse_operations("all_reduce:ring"), [64], queue=1000))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "lab: set the cluster"),
        (["office-1gbe", "--clean"], "leave the cluster 'office-1gbe' out"),
        (["dgx1-v100"], "has several"),
    ],
    ids=["none", "both", "gpus"],
)
def test_the_command_refuses_in_one_line(arguments, says):
    refused = CliRunner().invoke(app, ["lab", *arguments])
    assert isinstance(refused.exception, ConfigError)
    assert says in str(refused.exception)


def test_repetitions_that_began_together_count_first():
    """50 us or 1 % late is good; a busy computer's repetitions are told in the row's note."""
    good, late = Repetition(0.1, 0.9e-3), Repetition(0.1, 1.1e-3)
    assert good.is_good
    assert Repetition(1e-3, 49e-6).is_good
    assert not late.is_good
    (operation,) = parse_operations("all_reduce:ring")
    three = cluster(star(3, **STAR))
    assert measured(three, operation, 4096, 3, [good, good]).note == "all_reduce:ring on star-3"
    row = measured(three, operation, 4096, 3, [good, late, Repetition(0.4, 0.0)])
    assert row.note == "all_reduce:ring on star-3" + BUSY
    assert (row.min_s, row.median_s, row.max_s, row.n_repetitions) == (0.1, 0.1, 0.4, 3)


def test_bytes_of_the_plan_are_those_of_the_schedule():
    """The program of a rank sends what the schedule says that it sends, to within an element per message."""
    from ddlsim.collectives.all_reduce import halving_doubling
    from ddlsim.lab.rank import program_of

    schedule, nbytes = halving_doubling(4), 4 * 1001
    sent = [
        sum(part.nbytes for lane in program_of(schedule, rank, nbytes).lanes for step in lane for part in step.sends)
        for rank in range(4)
    ]
    assert np.allclose(sent, schedule.bytes_sent(nbytes), atol=4 * 4)
