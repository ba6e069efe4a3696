"""NCCL's tuner by hand: constants of its tuning.cc, worked out for a few cases."""

import math

import networkx as nx
import pytest
from draws import rows, seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlsim import AllReduce, Measured, simulate
from ddlsim.cluster import load_cluster
from ddlsim.cluster.generators import star
from ddlsim.cluster.nodes import MultiGpu
from ddlsim.collectives import build
from ddlsim.collectives.nccl import bus_bandwidth, nccl_time, network_channels
from ddlsim.errors import ConfigError
from ddlsim.network import schedule_time


def test_a_ring_by_simple_on_one_node():
    """8 ranks: 8.4 us + 14 x 3.4 us; 1 GB at 235 GB/s x 8 / 14."""
    found = nccl_time("dgx-a100-pod", 1e9, ranks=8, bandwidth=235e9)
    assert (found.algorithm, found.protocol) == ("ring", "Simple")
    assert found.seconds == pytest.approx(8.4e-6 + 14 * 3.4e-6 + 1e9 / (235e9 * 8 / 14))


def test_small_buffers_go_by_ll():
    """8 ranks, ring LL: 6.6 us + 14 x 0.6 us = 15.0 us; tree LL: 6.8 us + 2 x 7 x 0.6 us = 15.2 us."""
    found = nccl_time("dgx-a100-pod", 8, ranks=8, bandwidth=235e9)
    assert (found.algorithm, found.protocol) == ("ring", "LL")
    assert found.seconds == pytest.approx(15.0e-6, rel=1e-4)
    tree = nccl_time("dgx-a100-pod", 8, ranks=8, bandwidth=235e9, algorithm="tree")
    assert tree.seconds == pytest.approx(15.2e-6, rel=1e-4)


def test_nothing_to_send_takes_the_latency():
    found = nccl_time("dgx-a100-pod", 0, ranks=8, bandwidth=235e9, algorithm="ring", protocol="LL")
    assert found.seconds == pytest.approx(15.0e-6, rel=1e-12)


def test_many_nodes_prefer_trees_for_small_buffers():
    """16 nodes of 8, tree LL: 6.8 + 2 (7 x 0.6 + 4 x 5) = 55.2 us; a ring 224 hops of 1 us (posted) and 30."""
    found = nccl_time("cloud-25g-16x8-v100", 8)
    assert (found.algorithm, found.protocol) == ("tree", "LL")
    assert found.seconds == pytest.approx(55.2e-6, rel=1e-3)
    ring = nccl_time("cloud-25g-16x8-v100", 8, algorithm="ring", protocol="LL")
    assert ring.seconds == pytest.approx((6.6 + 224 * 1.0 + 30 * 2.7) * 1e-6, rel=1e-3)


def test_the_network_card_is_the_bus_between_nodes():
    """25 Gbit/s at efficiency 0.9415; two ranks on two nodes move the buffer once."""
    found = nccl_time("office-1gbe", 1e9, ranks=2)
    assert found.seconds == pytest.approx(1e9 / 117.6875e6, rel=1e-2)
    assert nccl_time("office-1gbe", "1 GB", ranks=8).seconds == pytest.approx(1e9 * 14 / 8 / 117.6875e6, rel=1e-2)


@pytest.mark.parametrize(("pcie", "ranks", "expected"), [
    ("2 GB/s", 2, 2e9),  # one machine: what is inside, whatever the network is
    ("50 GB/s", 2, 50e9),
    ("2 GB/s", 4, 2e9),  # two machines: the narrower of both
    ("50 GB/s", 4, 12.5e9),
])  # fmt: skip
def test_the_bus_is_the_narrowest_link_that_the_ranks_use(pcie, ranks, expected):
    machines = star(2, bandwidth="100 Gbit/s", latency="5 us", host=MultiGpu(n_gpus=2, pcie_bandwidth=pcie))
    assert bus_bandwidth(load_cluster(machines), ranks) == (expected, "pcie")


@pytest.mark.slow
def test_a_ring_has_no_more_than_the_connections_of_the_transport():
    """Of 25 Gbit/s TCP carries 13.6 (topologies/cloud-25g-16x8-v100.toml); inside a machine there is none."""
    cloud = load_cluster("cloud-25g-16x8-v100")
    ideal = load_cluster("cloud-25g-16x8-v100+transport=ideal")
    assert bus_bandwidth(cloud, 16) == (pytest.approx(1.7e9), "nvlink")
    assert bus_bandwidth(ideal, 16) == (pytest.approx(0.9415 * 25e9 / 8), "nvlink")
    assert bus_bandwidth(cloud, 8) == bus_bandwidth(ideal, 8)
    wide = load_cluster("cloud-25g-16x8-v100+connections=2")
    assert bus_bandwidth(wide, 16) == bus_bandwidth(ideal, 16)
    step = {name: simulate(name, "vgg16", AllReduce(cost="nccl"), 32, 16, steps=1).step_time for name in (cloud, ideal)}
    assert step[cloud] > 1.3 * step[ideal]


def test_where_there_are_nvlinks_pcie_does_not_count():
    """Each GPU of a DGX-1 has six NVLinks of 25 GB/s, of which NCCL counts 20, and PCIe beside them."""
    assert bus_bandwidth(load_cluster("dgx1-v100"), 8) == (120e9, "nvlink")


@pytest.mark.parametrize(("gpus", "busbw"), [
    ((0, 1), 20.0), ((0, 3), 40.0), ((0, 1, 2), 40.0), ((0, 1, 2, 3), 79.9), ((0, 1, 4, 5), 40.0),
    (tuple(range(8)), 119.6),
])  # fmt: skip
def test_nvlinks_to_gpus_that_do_not_take_part_do_not_count(gpus, busbw):
    """GB/s of 1 GiB among GPUs of a DGX-1, of whose six NVLinks each (20 GB/s count) NCCL trims those to others.

    GPUs 0, 1, 4 and 5 form a ring with one NVLink at its narrowest, in both directions, whatever else joins them.
    """
    cluster = load_cluster("dgx1-v100")
    nodes = tuple(cluster.workers[list(gpus)].tolist())
    factor = 2 * (len(gpus) - 1) / len(gpus) * 2**30
    assert factor / nccl_time(cluster, "1 GiB", nodes=nodes).seconds * 1e-9 == pytest.approx(busbw, abs=0.1)
    schedule = build("nccl", len(gpus), 2.0**30, where=(cluster, nodes))
    assert factor / schedule_time(cluster, schedule, nodes, 2.0**30) * 1e-9 == pytest.approx(busbw, rel=0.005)


@pytest.mark.parametrize("share", seeds(1, 4))  # of 20 examples
@settings(max_examples=5, deadline=None)
@given(st.sets(st.integers(0, 7), min_size=2), st.sampled_from(["hybrid_cube_mesh", "nvlink_mesh", "nvswitch"]))
def test_the_estimate_of_some_gpus_of_a_machine_is_that_of_their_schedule(share, gpus, inside):
    machine = MultiGpu(8, inside, nvlink_bandwidth="25 GB/s", device="v100", n_pcie_switches=4)
    cluster = load_cluster(star(1, bandwidth="10 GB/s", latency="1 us", host=machine))
    nodes = tuple(cluster.workers[sorted(gpus)].tolist())
    schedule = build("nccl", len(nodes), 2.0**30, where=(cluster, nodes))
    expected = nccl_time(cluster, 2.0**30, nodes=nodes).seconds
    assert schedule_time(cluster, schedule, nodes, 2.0**30) == pytest.approx(expected, rel=0.05)


def test_machines_of_which_two_gpus_take_part_have_the_nvlinks_between_these():
    """Two GPUs in each of two DGX-1, with four interfaces of 12.5 GB/s: one NVLink of 20 and one interface."""
    cluster = load_cluster(star(2, bandwidth="100 GB/s", latency="1 us", host=MultiGpu(
        8, "hybrid_cube_mesh", nvlink_bandwidth="25 GB/s", device="v100", n_pcie_switches=4, n_nics=4)))  # fmt: skip
    nodes = tuple(cluster.workers[[0, 1, 8, 9]].tolist())
    assert bus_bandwidth(cluster, 4, nodes) == (20e9, "nvlink")


def test_a_run_by_nccls_estimate_uses_the_nvlinks_of_its_workers():
    """Two GPUs of a DGX-1: 553 MB over the one NVLink between them, of which NCCL makes use of 20 GB/s."""
    runs = [
        simulate("dgx1-v100", "vgg16", AllReduce("nccl", "none", cost=cost), 1, 2, compute=Measured("1 us", 1), steps=3)
        for cost in ("nccl", "simulated")
    ]
    assert runs[0].step_time == pytest.approx(runs[1].step_time, rel=0.01)
    assert runs[0].workloads[0].gradient_nbytes / runs[0].step_time * 1e-9 == pytest.approx(20.0, rel=0.01)


@pytest.mark.parametrize(
    ("n", "measured"), rows([(4, 363.3), (5, 414.2), (6, 435.6), (7, 460.0), (8, 473.1)], 2, start=1)
)
def test_nvswitches_of_hopper_add_up(n, measured):
    """GB/s of bus bandwidth at 8 GiB on H200 (stas00/ml-engineering, network/benchmarks/README.md); nothing fitted."""
    time = nccl_time("dgx-h100-pod", 8 * 2**30, ranks=n)
    assert (time.algorithm, time.protocol) == ("nvls", "Simple")
    assert 2 * (n - 1) / n * 8 * 2**30 / time.seconds * 1e-9 == pytest.approx(measured, rel=0.03)
    assert nccl_time("dgx-h100-pod", 8 * 2**30, ranks=n, algorithm="ring").seconds > time.seconds
    assert nccl_time("dgx-h100-pod", 8 * 2**30, ranks=n, kind="all_gather").algorithm == "ring"


@pytest.mark.parametrize(("name", "n", "algorithm", "protocol", "lacking"), [
    ("dgx-a100-pod", 8, "nvls", None, "no NVSwitches that can reduce"),
    ("dgx1-v100", 8, "nvls", "Simple", "no NVSwitches that can reduce"),
    ("dgx-h100-pod", 16, "nvls", None, "no switches that can reduce .* between these machines"),
    ("dgx-h100-pod", 8, "nvls_tree", None, "no machines with equal numbers of GPUs"),
    ("dgx-h100-pod", 9, "nvls_tree", None, "no machines with equal numbers of GPUs"),
    ("dgx-h100-pod", 16, "nvls_tree", "LL", "it with the protocol 'Simple' only"),
    ("dgx-h100-pod+switch_reduces=true", 8, "collnet_chain", None, "no switches that can reduce"),
    ("dgx-a100-pod", 16, "collnet_direct", None, "no switches that can reduce"),
    ("p40-8", 8, "ring", "LL128", "no NVLinks between GPUs.*disables LL128"),
])  # fmt: skip
def test_what_cannot_run_says_what_is_lacking(name, n, algorithm, protocol, lacking):
    assert nccl_time(name, 8 * 2**30, ranks=n).algorithm != algorithm or protocol is not None
    with pytest.raises(ConfigError, match=f"algorithm = '{algorithm}'.*{name.replace('+', '.')}.* has {lacking}"):
        nccl_time(name, 1e6, ranks=n, algorithm=algorithm, protocol=protocol)


def test_two_machines_of_hopper_choose_trees_between_their_nvswitches():
    """25 + 2 x 20.9 us; 8 channels of 57.7 GB/s are less than NVLink and two interfaces' worth allow: 461.6 GB/s."""
    found = nccl_time("dgx-h100-pod", 2**30, ranks=16)
    assert (found.algorithm, found.protocol) == ("nvls_tree", "Simple")
    assert found.seconds == pytest.approx(66.8e-6 + 2**30 * 30 / 16 / 461.6e9)
    four = nccl_time("dgx-h100-pod", 2**30, ranks=32)  # 45.5 GB/s on each of 8 channels
    assert four.seconds == pytest.approx(108.6e-6 + 2**30 * 62 / 32 / 364e9)
    assert nccl_time("dgx-h100-pod", 2**30, ranks=16, algorithm="tree").seconds > found.seconds


def test_switches_that_add_up_are_used_where_the_cluster_names_them():
    """NVLS and SHARP: 25 + 18 us; 1 GiB at what the interfaces carry, 388 GB/s; CollNet 31 + 2 (3.7 + 7 x 0.4) us."""
    name = "dgx-h100-pod+switch_reduces=true"
    found = nccl_time(name, 2**20, ranks=32)
    assert found.algorithm == "nvls"
    assert found.seconds == pytest.approx(43e-6 + 2**20 * 62 / 32 / 388e9)
    direct = nccl_time(name, 0, ranks=32, algorithm="collnet_direct")
    assert direct.seconds == pytest.approx((31 + 2 * (3.7 + 7 * 0.4)) * 1e-6)
    chain = nccl_time("dgx-a100-pod+switch_reduces=true", 0, ranks=32, algorithm="collnet_chain")
    assert chain.seconds == pytest.approx((30 + 2 * 7 * 2.8) * 1e-6)


def test_what_channels_carry_has_ceilings():
    """LL of one machine of A100 reaches 87.7 GB/s; a tree's channel over 4 machines 17.8, of which LL128 15/16."""
    ll = [nccl_time("dgx-a100-pod", nbytes, ranks=8, algorithm="ring", protocol="LL").seconds for nbytes in (0, 1e9)]
    assert 1e9 * 14 / 8 / (ll[1] - ll[0]) == pytest.approx(87.7e9)
    for protocol, share in (("Simple", 1.0), ("LL128", 120 / 128)):
        tree = [
            nccl_time("dgx-a100-pod", nbytes, ranks=32, algorithm="tree", protocol=protocol).seconds
            for nbytes in (2e9, 4e9)
        ]
        assert 2e9 / (tree[1] - tree[0]) == pytest.approx(share * 8 * 17.8e9 / 2)


def test_a_machine_with_one_rank_has_no_bus_inside():
    """The card is 12.5 GB/s wide; the GPU's 2 GB/s to its CPU is no link between two ranks of a machine."""
    machines = star(3, bandwidth="100 Gbit/s", latency="5 us", host=MultiGpu(n_gpus=1, pcie_bandwidth="2 GB/s"))
    assert bus_bandwidth(load_cluster(machines), 3) == (12.5e9, "pcie")


def test_workers_of_a_machine_without_links_inside_use_the_network():
    """Two processors of one machine, each with a cable of its own to the switch: nothing joins them inside."""
    graph = nx.Graph()
    for node, machine in (("a", "one"), ("b", "one"), ("c", "two"), ("d", "two")):
        graph.add_node(node, kind="host", host=machine)
        graph.add_edge(node, "switch", bandwidth="8 Gbit/s", latency="1 us")
    graph.add_node("switch", kind="switch")
    assert bus_bandwidth(load_cluster(graph), 4) == (2e9, "pcie")  # the two cables of the first machine


def test_other_collectives_move_half():
    large = [nccl_time("dgx-a100-pod", 1e10, kind=k, ranks=8, bandwidth="235 GB/s").seconds
             for k in ("all_reduce", "all_gather")]  # fmt: skip
    assert large[0] / large[1] == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("nbytes", [2**k for k in range(3, 35, 4)])
def test_the_choice_is_the_least_of_all(nbytes):
    best = nccl_time("dgx-a100-pod", nbytes, ranks=16)
    each = [
        nccl_time("dgx-a100-pod", nbytes, ranks=16, algorithm=a, protocol=p).seconds
        for a in ("ring", "tree")
        for p in ("LL", "LL128", "Simple")
    ]
    assert best.seconds == min(each)
    assert all(math.isfinite(seconds) and seconds > 0 for seconds in each)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kind": "all_reduced"}, "did you mean 'all_reduce'"),
        ({"algorithm": "rings"}, "did you mean 'ring'"),
        ({"protocol": "LL12"}, "did you mean 'LL128'"),
        ({"algorithm": "tree", "kind": "all_gather"}, "algorithm = 'tree': supported for all_reduce only"),
        ({"algorithm": "nvls", "kind": "all_gather"}, "algorithm = 'nvls': supported for all_reduce only"),
        ({"ranks": 1}, "must be from 2 to"),
        ({"bandwidth": 0}, "bandwidth = 0"),
        ({"nbytes": -1}, "nbytes = -1"),
    ],
    ids=["kind", "algorithm", "protocol", "tree", "nvls", "ranks", "bandwidth", "nbytes"],
)
def test_what_makes_no_sense_is_refused(more, message):
    with pytest.raises(ConfigError, match=message):
        nccl_time("dgx-a100-pod", **{"nbytes": 1e6, **more})


@pytest.mark.parametrize(("cluster", "device", "per_machine", "expected"), [
    ("dgx-h100-pod", "h100", 1, 4),  # a ring of 48 GB/s, split in two; two channels for each
    ("dgx-h100-pod", "h100", 4, 16),
    ("dgx-h100-pod", "h100", 6, 24),  # six are not split, but have four channels each
    ("dgx-h100-pod", "h100", 8, 16),  # eight have two channels each
    ("dgx-h100-pod", "a100", 8, 16),
    ("dgx-h100-pod", "a100", 1, 2),  # 24 GB/s by PCIe 4.0
    ("dgx-a100-pod", "a100", 1, 2),
    ("dgx-a100-pod", "a100", 2, 4),
    ("dgx-b300-pod", "b300", 1, 8),  # 96 GB/s: split in two of 48, which have four channels each
    ("dgx-b300-pod", "b300", 8, 32),
    ("aws-p5-48xlarge", "h100", 1, 4),  # the plugin bundles a GPU's four interfaces of 100 Gbit/s
    ("aws-p4de", "a100", 8, 8),  # four interfaces for eight GPUs
    ("cloud-25g-16x8-v100", "v100", 8, 2),  # one interface
    ("office-1gbe", "h100", 1, 2),
])  # fmt: skip
def test_channels_between_machines(cluster, device, per_machine, expected):
    """By hand, from search.cc and connect.cc: of three machines, the first few GPUs."""
    loaded = load_cluster(cluster)
    machines = loaded.workers.reshape(-1, 1 if cluster == "office-1gbe" else 8)[:3, :per_machine]
    assert network_channels(loaded, tuple(machines.ravel().tolist()), device) == expected


def test_the_machine_with_the_fewest_interfaces_counts():
    """Two machines, one of which has a single GPU in the group."""
    loaded = load_cluster("dgx-a100-pod")
    nodes = tuple(loaded.workers[[0, 1, 2, 3, 8]].tolist())
    assert network_channels(loaded, nodes, "a100") == 2
