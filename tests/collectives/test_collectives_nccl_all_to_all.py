"""All-to-alls with PXN: correct, on their rails, and as long as their closed form."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ddlsim
from ddlsim.cluster import load_cluster
from ddlsim.cluster.rings import rails
from ddlsim.collectives import build, check, cost


def placed(name, n):
    cluster = load_cluster(name)
    nodes = cluster.workers[:n]
    return cluster, tuple(nodes[cluster.locality_order(nodes)].tolist())


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["dgx-a100-pod", "roce-h100"]), st.integers(2, 11), st.integers(2, 8), st.integers(0, 5), st.data()
)
def test_every_block_arrives(name, n_machines, n_local, mib, data):
    cluster = load_cluster(name)
    at = np.concatenate([cluster.workers[cluster.host_of[cluster.workers] == i][:n_local] for i in range(n_machines)])
    at = tuple(at[data.draw(st.permutations(range(len(at))))].tolist())
    places = rails(cluster, at)
    assert places is not None
    schedule = build("nccl", len(at), mib * 2.0**20, kind="all_to_all", where=(cluster, at))
    check(schedule)
    assert (schedule.bytes_sent(1.0) <= 1.0 - 1 / n_local + 1.0 - 1 / n_machines + 1e-12).all()


def test_between_machines_messages_stay_on_their_rail():
    """So they cross no spine, as those of everything at once do."""
    cluster, at = placed("dgx-a100-pod", 32)
    nodes = np.array(at)
    crossed = {}
    for algorithm in ("nccl", "direct"):
        (lane,) = build(algorithm, 32, 1e8, kind="all_to_all", where=(cluster, at)).lanes
        ways = [cluster.routes(nodes[r.src], nodes[r.dst]).links for r in lane]
        ends = cluster.link_dst[np.concatenate(ways)]
        crossed[algorithm] = any("spine" in cluster.node_names[node] for node in ends.tolist())
    assert crossed == {"nccl": False, "direct": True}


def test_few_spines_are_spared():
    """Uplinks a tenth as wide as all downlinks: rails do without them."""
    cluster = load_cluster("dgx-a100-pod+oversubscription=10")
    thin = ddlsim.collective_time(cluster, "direct", "1 GB", ranks=32, kind="all_to_all", rank_order="topology")
    rail = ddlsim.collective_time(cluster, "nccl", "1 GB", ranks=32, kind="all_to_all", rank_order="topology")
    wide = ddlsim.collective_time("dgx-a100-pod", "nccl", "1 GB", ranks=32, kind="all_to_all", rank_order="topology")
    assert rail == wide
    assert thin > 1.5 * rail


def test_one_round_is_the_closed_form():
    """Two machines of eight: 0.7 us by NVLink, then the rail; 300 kB are one segment."""
    cluster, at = placed("dgx-h100-pod", 16)
    way = cluster.routes(np.array(at[:1]), np.array(at[8:9]))[0]
    between = float(cluster.link_latency[way].sum()), 1 / 48.5e9, 0.0
    wanted = cost.all_to_all_nccl(8, 2, 3e5, (0.7e-6, 1 / (0.81 * 450e9), 0.0), between)
    took = ddlsim.collective_time(cluster, "nccl", 3e5, ranks=16, kind="all_to_all", rank_order="topology")
    assert took == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(("name", "n"), [
    ("dgx-a100-pod", 8), ("dgx1-v100-16", 16), ("office-1gbe", 4), ("dgx-a100-pod", 12),
])  # fmt: skip
def test_elsewhere_everything_is_sent_at_once(name, n):
    """One machine; two GPUs to an interface; one to a machine; machines with eight and four."""
    cluster, at = placed(name, n)
    assert rails(cluster, at) is None
    times = [
        ddlsim.collective_time(cluster, each, 1e7, ranks=n, kind="all_to_all", rank_order="topology")
        for each in ("nccl", "direct")
    ]
    assert times[0] == times[1]


def test_rails_that_are_none_are_refused():
    with pytest.raises(ddlsim.ConfigError, match=r"rails: must contain each rank from 0 to 3 once, with the same"):
        ddlsim.collectives.all_to_all.nccl(4, rails=[np.array([0, 1]), np.array([2])])
