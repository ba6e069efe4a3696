"""Rings over all ways between GPUs: what they cover, and how fast they are."""

import dataclasses
import functools

import numpy as np
import pytest
from draws import seeds
from hypothesis import given, settings
from hypothesis import strategies as st

import ddlsim
from ddlsim.cluster import Cluster, MultiGpu, leaf_spine, load_cluster, star
from ddlsim.cluster.rings import rings
from ddlsim.collectives import build, check


def _rings(name, n):
    cluster = load_cluster(name)
    nodes = cluster.workers[:n]
    nodes = nodes[cluster.locality_order(nodes)]
    return cluster, nodes, rings(cluster, tuple(nodes.tolist()))


def test_inside_a_dgx1_six_rings_use_every_nvlink():
    """The hybrid cube mesh of the DGX-1 V100 is three rings in both directions (NCCL finds the same number)."""
    cluster, nodes, found = _rings("dgx1-v100", 8)
    assert len(found) == 6
    carried = np.zeros(cluster.n_channels)
    for order in found:
        ways = cluster.routes(nodes[order], nodes[np.roll(order, -1)])
        np.add.at(carried, cluster.link_channel[ways.links], 25e9)
    nvlinks = np.unique(cluster.link_channel[[kind == "nvlink" for kind in cluster.link_kind]])
    among = np.isin(nvlinks, np.flatnonzero(carried))
    np.testing.assert_allclose(carried[nvlinks[among]], cluster.channel_capacity[nvlinks[among]])
    assert carried[np.setdiff1d(np.arange(len(carried)), nvlinks)].sum() == 0.0


@pytest.mark.parametrize("n_machines", [2, 3, 4])
def test_each_interface_sends_and_receives_for_one_ring(n_machines):
    cluster, nodes, found = _rings("dgx-a100-pod", 8 * n_machines)
    assert len(found) == 8
    source, target = cluster.host_of[cluster.link_src], cluster.host_of[cluster.link_dst]
    sent = np.zeros(cluster.n_channels)
    for order in found:
        ways = cluster.routes(nodes[order], nodes[np.roll(order, -1)])
        np.add.at(sent, cluster.link_channel[ways.links], 1.0)
    outside = (source >= 0) != (target >= 0)
    used = np.isin(np.where(source >= 0, source, target), cluster.host_of[nodes]) & outside
    assert (sent[cluster.link_channel[used]] == 1.0).all()


@pytest.mark.parametrize("n_machines", [2, 4])
def test_messages_stay_on_their_rail(n_machines):
    """With as many machines in both directions round, no ring crosses a spine."""
    cluster, nodes, found = _rings("dgx-a100-pod", 8 * n_machines)
    for order in found:
        ways = cluster.routes(nodes[order], nodes[np.roll(order, -1)])
        assert not any("spine" in cluster.node_names[node] for node in cluster.link_dst[ways.links])


@pytest.mark.parametrize(("name", "n"), [("cloud-25g-16x8-v100", 32), ("office-1gbe", 8), ("zenith", 6), ("p40-8", 8)])
def test_one_way_between_machines_is_one_ring_in_the_plain_order(name, n):
    _, _, found = _rings(name, n)
    assert [order.tolist() for order in found] == [list(range(n))]


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize(("name", "n", "ways"), [
    ("dgx1-v100", 8, 3), ("dgx-a100-pod", 16, 8), ("dgx-a100-pod", 32, 8), ("dgx-h100-pod", 16, 8),
])  # fmt: skip
def test_rings_side_by_side_take_their_share_of_the_time(kind, name, n, ways):
    """k rings without a link in common take 1/k of the time of one, latencies apart (six narrow ones in a DGX-1 have
    three times the bandwidth of the one that takes pairs of NVLinks)."""
    per_byte = []
    for algorithm in ("ring", "nccl_ring"):
        first, second = (
            ddlsim.collective_time(name, algorithm, nbytes, kind=kind, ranks=n, rank_order="topology")
            for nbytes in (1e9, 2e9)
        )
        per_byte.append(second - first)
    assert per_byte[0] / per_byte[1] == pytest.approx(ways, rel=1e-9)


@st.composite
def machines(draw):
    inside = draw(st.sampled_from(["nvswitch", "nvlink_mesh", "pcie_tree"]))
    n_gpus = draw(st.integers(1, 6))
    n_switches = draw(st.integers(1, n_gpus))
    host = MultiGpu(
        n_gpus=n_gpus, inside=inside, device="v100", n_pcie_switches=n_switches,
        n_nics=draw(st.sampled_from([1, n_switches, 2 * n_switches, n_switches + 1])),
        nvlink_bandwidth=None if inside == "pcie_tree" else draw(st.sampled_from(["25 GB/s", "300 GB/s"])),
    )  # fmt: skip
    fabric = draw(st.sampled_from([star, leaf_spine]))
    if fabric is star:
        graph = star(draw(st.integers(1, 5)), bandwidth="100 Gbit/s", latency="1 us", host=host)
    else:
        graph = leaf_spine(
            2, draw(st.integers(1, 2)), 2, bandwidth="100 Gbit/s", latency="1 us", host=host,
            rail_optimised=n_switches == 2 == host.n_nics and draw(st.booleans()),
            oversubscription=draw(st.sampled_from([1.0, 4.0])),
        )  # fmt: skip
    return Cluster.from_graph(graph)


def _rate(cluster, nodes, orders):
    """Return the bytes/s that rings carry together if each carries as much as the fullest link lets it."""
    at, uses = np.array(nodes), np.zeros(cluster.n_channels)
    for order in orders:
        routes = cluster.split_routes(at[order], at[np.roll(order, -1)])
        np.add.at(uses, cluster.link_channel[routes.links], routes.share)
    used = uses > 0.0
    return len(orders) * np.min(cluster.channel_capacity[used] / uses[used], initial=np.inf)


@pytest.mark.parametrize("share", seeds(1, 3))  # of 60 examples
@settings(max_examples=20, deadline=None)
@given(machines(), st.data())
def test_all_ranks_are_in_every_ring_and_schedules_are_proved(share, cluster, data):
    n = data.draw(st.integers(1, len(cluster.workers)))
    nodes = cluster.workers[:n]
    nodes = nodes[cluster.locality_order(nodes)].tolist()
    found = rings(cluster, tuple(nodes))
    for order in found:
        assert sorted(order.tolist()) == list(range(n))
    assert _rate(cluster, nodes, found) >= _rate(cluster, nodes, [np.arange(n)]) * (1.0 - 1e-9)
    for kind in ("all_reduce", "reduce_scatter", "all_gather"):
        schedule = build("nccl_ring", n, 1e6, kind=kind, where=(cluster, nodes))
        assert schedule.n_chunks == n * (len(found) if n > 1 else 1)
        check(schedule)


def test_orders_that_are_none_are_refused():
    with pytest.raises(ddlsim.ConfigError, match=r"rings: \[0, 0\] must contain each rank from 0 to 1 once"):
        ddlsim.collectives.all_reduce.nccl_ring(2, [np.array([0, 0])])


def test_a_run_says_that_interfaces_are_idle_and_nccl_ring_leaves_none():
    one, all_of_them = (
        ddlsim.simulate("dgx-a100-pod", "resnet50", ddlsim.AllReduce(name), workers=16, steps=2)
        for name in ("ring", "nccl_ring")
    )
    assert any("network interfaces: 2 of the 16 interfaces of these machines" in note for note in one.notes)
    assert not any("network interfaces" in note for note in all_of_them.notes)
    assert all_of_them.step_time < one.step_time
    sharded = ddlsim.simulate(
        "dgx-a100-pod",
        "resnet50",
        ddlsim.ShardedUpdate(reduce_scatter="nccl_ring", all_gather="nccl_ring"),
        workers=16,
        steps=2,
    )
    assert sharded.step_time < one.step_time


@pytest.mark.parametrize("name", ["ring", "nccl_ring", "nccl"])
def test_where_a_machine_has_one_worker_no_more_channels_are_advised(name):
    result = ddlsim.simulate("dgx-a100-pod", "lenet5", ddlsim.AllReduce(name), workers=[0, 1, 8, 9, 17], steps=2)
    (note,) = (note for note in result.notes if note.startswith("network interfaces: 2 of the 16"))
    assert "no further ring passes through every machine" in note


def test_blocks_of_the_wrong_member_are_found():
    orders = [np.array([0, 1, 2, 3]), np.array([0, 2, 1, 3])]
    schedule = build(functools.partial(ddlsim.collectives.all_gather.nccl_ring, rings=orders), 4, kind="all_gather")
    check(schedule)
    with pytest.raises(ddlsim.ConfigError, match="ends up with"):
        check(dataclasses.replace(schedule, block_of=np.roll(schedule.block_of, 1)))
    with pytest.raises(ddlsim.ConfigError, match="block_of must divide the 8 chunks equally among the"):
        check(dataclasses.replace(schedule, block_of=np.zeros(8, dtype=np.int64)))


def test_compressed_payloads_go_round_by_the_rings_of_the_fabric():
    one, all_of_them = (
        ddlsim.simulate(
            "dgx-a100-pod", "resnet50",
            ddlsim.LocalSGD(1, algorithm=name), compression=ddlsim.ErrorFeedback(ddlsim.TopK(0.1)), workers=32, steps=2,
        )
        for name in ("ring", "nccl_ring")
    )  # fmt: skip
    assert any("network interfaces: 4 of the 32" in note for note in one.notes)
    assert not any("network interfaces" in note for note in all_of_them.notes)
    assert all_of_them.step_time < one.step_time


def test_a_name_with_a_hyphen_is_a_misspelt_name():
    with pytest.raises(ddlsim.ConfigError, match="unknown all_reduce algorithm 'nccl-ring'; did you mean 'nccl_ring'"):
        ddlsim.AllReduce("nccl-ring")
