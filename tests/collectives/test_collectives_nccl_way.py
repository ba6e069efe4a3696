"""What NCCL runs, as schedules: closed forms, what the tuner expects, values, and where it is the default."""

import numpy as np
import pytest
from draws import few
from hypothesis import given, settings
from hypothesis import strategies as st

import ddlsim
from ddlsim.cluster import load_cluster, star
from ddlsim.cluster.rings import channels
from ddlsim.collectives import build, check
from ddlsim.collectives.build import default_algorithm, size_class
from ddlsim.collectives.nccl import nccl_time
from ddlsim.collectives.nccl_choice import choose

KINDS = ("all_reduce", "reduce_scatter", "all_gather")


def placed(name, n):
    cluster = load_cluster(name)
    nodes = cluster.workers[:n]
    return cluster, tuple(nodes[cluster.locality_order(nodes)].tolist())


def seconds(name, n, nbytes, kind="all_reduce", algorithm="nccl"):
    return ddlsim.collective_time(name, algorithm, nbytes, ranks=n, kind=kind, rank_order="topology")


@pytest.mark.parametrize("nbytes", few([1e4, 1e5, 2.5e5, 1e6, 4e6, 2.5e7, 1e8, 1e9], 3))
@pytest.mark.parametrize(("name", "n"), [
    ("dgx1-v100", 8), ("dgx1-v100-16", 32), ("dgx-a100-pod", 8), ("dgx-a100-pod", 16), ("dgx-a100-pod", 64),
    ("dgx-h100-pod", 8), ("dgx-h100-pod", 16), ("dgx-h100-pod", 64),
])  # fmt: skip
def test_the_schedules_take_what_the_tuner_expects(name, n, nbytes):
    """Within 30 %: the tuner takes 8 % off the bandwidth of trees, counts no links beyond a hop's own latency and
    gives LL half of the bandwidth, or a quarter; nor does it count how the stages of NVLS fill."""
    cluster, at = placed(name, n)
    for kind in KINDS:
        chosen = choose(cluster, at, nbytes, kind)
        filling = 2 * chosen.fill if chosen.algorithm.startswith("nvls") else 0.0
        wanted = nccl_time(cluster, nbytes, kind=kind, nodes=at).seconds + filling
        assert seconds(cluster, n, nbytes, kind) == pytest.approx(wanted, rel=0.3)


def test_sizes_choose_algorithm_and_protocol():
    cluster, at = placed("dgx-a100-pod", 64)
    chosen = [choose(cluster, at, nbytes, "all_reduce") for nbytes in (1e4, 2.5e7, 3e8, 4e9)]
    assert [(c.algorithm, c.protocol) for c in chosen] == [
        ("tree", "LL"), ("tree", "LL128"), ("ring", "LL128"), ("ring", "Simple"),
    ]  # fmt: skip
    wanted = np.ceil(3e8 / 16 / 2**19)  # 8 channels, two trees on each
    assert choose(cluster, at, 3e8, "all_reduce", "tree", "Simple").n_chunks == wanted
    assert choose(cluster, at, 2.5e7, "all_gather").algorithm == "ring"
    assert size_class("default", 3e8, "all_reduce", (cluster, at)) == chosen[2]
    assert size_class("nccl(ring)", 3e8, "all_reduce", (cluster, at)).algorithm == "ring"
    assert size_class("ring", 3.5e8, "all_reduce", (cluster, at)) == size_class("ring", 3.5e8, "all_reduce", None)


@pytest.mark.parametrize(("nbytes", "protocol", "wire", "start", "hop"), [
    (1e5, "LL", 240 / 87.7, 6.6e-6, 0.7e-6),  # the wire's 0.7 us are longer than a hop's 0.6
    (1.2e7, "LL128", 128 / 120, 14e-6, 1.9e-6),
    (1e9, "Simple", 1.0, 8.4e-6, 3.4e-6),
])  # fmt: skip
def test_a_ring_inside_a_machine_is_its_closed_form(nbytes, protocol, wire, start, hop):
    cluster, at = placed("dgx-a100-pod", 8)
    assert choose(cluster, at, nbytes, "all_reduce")[:2] == ("ring", protocol)
    rate = float(cluster.channel_capacity[cluster.link_channel[cluster.routes(at[:1], at[1:2]).links]].min())
    wire *= 0.915 / 0.8  # of what the links carry NCCL makes use of 80 % of the nominal bandwidth
    wire *= 29 / 28 if protocol == "Simple" else 1.0  # the last step takes half as long as each of 14 others
    assert seconds(cluster, 8, nbytes) == pytest.approx(start + 14 * (hop + wire * nbytes / 8 / rate), rel=1e-9)
    schedule = build("nccl", 8, nbytes, where=(cluster, at))
    assert schedule.bytes_handled(nbytes) == pytest.approx(np.full(8, wire * 14 / 8 * nbytes))
    sent = {"LL": 2.0, "LL128": 128 / 120, "Simple": 1.0}[protocol]  # flags are sent, what the ceilings take is not
    assert schedule.bytes_sent(nbytes) == pytest.approx(np.full(8, sent * 14 / 8 * nbytes))


@pytest.mark.parametrize(
    ("name", "n", "kind", "more"),
    [
        ("dgx-a100-pod", 2, "all_reduce", 0.5 / 2),
        ("dgx-a100-pod", 8, "reduce_scatter", 0.5 / 7),
        ("dgx-h100-pod", 8, "all_gather", 0.5 / 7),
        ("dgx1-v100", 8, "all_gather", 0.0),
        ("dgx-a100-pod", 16, "all_gather", 0.0),
    ],
)
def test_links_are_idle_in_the_last_step_of_a_ring(name, n, kind, more):
    """For half a step inside a machine with A100 or H100, but not on V100, nor between machines."""
    cluster, at = placed(name, n)
    assert choose(cluster, at, 1e10, kind)[:2] == ("ring", "Simple")
    first, second = (nccl_time(cluster, nbytes, kind=kind, nodes=at).seconds for nbytes in (1e9, 1e10))
    took = seconds(cluster, n, 1e10, kind) - seconds(cluster, n, 1e9, kind)
    assert took / (second - first) == pytest.approx(1.0 + more, rel=1e-6)


@pytest.mark.parametrize(("n", "half", "whole"), [(2, 2833.4, 5453.4), (4, 3720.5, 7275.5), (8, 4187.6, 8196.4)])
def test_large_rings_take_what_was_measured_on_a100(n, half, whole):
    """us of 0.5 and 1 GiB on two to eight A100 behind NVSwitches (github.com/VIA-Research/vTrain, trace/a100)."""
    took = [seconds("dgx-a100-pod", n, nbytes) * 1e6 for nbytes in (2.0**29, 2.0**30)]
    assert took == pytest.approx([half, whole], rel=0.03)


@pytest.mark.parametrize("ms", [0.1, 1.0, 5.0])
def test_slices_hide_latency_that_is_longer_than_a_hops(ms):
    """One of two slices flows while the other is on its way."""
    n, rate, nbytes = 4, 1.25e9, 192 * 2.0**20
    cluster = load_cluster(star(n, bandwidth=rate, latency=ms / 2 * 1e-3))
    slice_time = nbytes / (2 * n) / rate
    hidden = np.floor(min(slice_time / (ms * 1e-3), 1.0) * 64) / 64 * ms * 1e-3
    hop = max(ms * 1e-3 - hidden, 1.4 * 14e-6)  # on one machine each NCCL sees a plateau
    wanted = 8.4e-6 + ms * 1e-3 + (2 * n - 3) * hop + 2 * (n - 1) * nbytes / n / rate
    assert seconds(cluster, n, nbytes) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(("name", "n", "rate"), [
    ("dgx-a100-pod", 32, 8 * 24.25e9), ("dgx1-v100", 8, 6 * 20e9),
])  # fmt: skip
def test_the_bus_bandwidth_is_that_of_all_interfaces(name, n, rate):
    """nccl-tests' bus bandwidth of a large all-reduce; the plain ring has one interface's."""
    first, second = (seconds(name, n, nbytes) for nbytes in (1e11, 2e11))
    assert 2 * (n - 1) / n * 1e11 / (second - first) == pytest.approx(rate, rel=1e-6)
    assert choose(*placed(name, n), 1e11, "all_reduce").algorithm == "ring"


@pytest.mark.parametrize("n", [4, 8])
def test_in_switches_that_add_up_links_carry_the_buffer_and_a_part(n):
    cluster, at = placed("dgx-h100-pod", n)
    assert choose(cluster, at, 1e9, "all_reduce")[:2] == ("nvls", "Simple")
    schedule = build("nccl", n, 1e9, where=(cluster, at))
    check(schedule)
    assert schedule.bytes_sent(1e9) == pytest.approx(np.full(n, 1e9 * (1 + 1 / n)))
    assert schedule.bytes_handled(1e9) == pytest.approx(np.full(n, 1e9 * (1 + 1 / n) / 0.85))
    filling = 2 * 8 * 2.0**20  # 16 channels of chunks of 64 KiB for 8 GPUs, 128 KiB for 4, in two more stages
    wanted = 25e-6 + (1e9 + filling) * (1 + 1 / n) / (0.85 * 0.81 * 450e9)
    assert seconds(cluster, n, 1e9) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(("n", "rate"), [(16, 8 * 57.7e9), (32, 8 * 45.5e9)])
def test_trees_between_nvswitches_reach_what_their_channels_carry(n, rate):
    """One ring on two machines has 48 GB/s of bus bandwidth, rings on all interfaces 388, trees of NVLS 461."""
    assert choose(*placed("dgx-h100-pod", n), 1e9, "all_reduce").algorithm == "nvls_tree"
    first, second = (seconds("dgx-h100-pod", n, nbytes, algorithm="nccl(nvls_tree)") for nbytes in (3e11, 6e11))
    assert 2 * (n - 1) / n * 3e11 / (second - first) == pytest.approx(rate, rel=0.01)  # 1024 chunks fill the trees


@pytest.mark.parametrize(
    ("algorithm", "first", "inside", "between"),
    [
        # latencies; bytes that a GPU's NVLink carries each way, and its interface
        ("nvls", 25e-6 + 18e-6, (1 + 1 / 8) / 0.85, 1 / 8),
        ("collnet_direct", 31e-6 + 2 * (3.7e-6 + 7 * 0.4e-6), 2 * 7 / 8, 1 / 8),
        ("nvls_tree", 25e-6 + 2 * 20.9e-6, (1 + 1 / 8) / 0.85 * 1.1177, 1.1177 / 8),  # more than 57.7 GB/s a channel
    ],
)
def test_switches_that_add_up_carry_each_part_once(algorithm, first, inside, between):
    """Two machines: links carry what the formula says, and the slower of NVLink and interface counts."""
    cluster, at = placed("dgx-h100-pod+switch_reduces=true", 16)
    name, nbytes = f"nccl({algorithm})", 1e12
    schedule = build(name, 16, nbytes, where=(cluster, at))
    carried = {True: 0.0, False: 0.0}
    (lane,) = schedule.lanes
    for r in lane:
        size = schedule.message_bytes(nbytes, r) * schedule.handled * r.handled * r.repeat
        for here in carried:
            carried[here] += size[(r.src == 3) & ((r.dst < 8) == here)].sum()
    links = 0.81 * 25 / 20.6  # what NCCL makes use of, of what the links carry
    assert carried[True] / nbytes == pytest.approx(inside * max(links, 1.0), rel=1e-3)
    assert carried[False] / nbytes == pytest.approx(between, rel=1e-3)
    slow = max(carried[True] / (0.81 * 450e9), carried[False] / 48.5e9)
    assert seconds(cluster, 16, nbytes, algorithm=name) == pytest.approx(first + slow, rel=0.01)


@pytest.mark.parametrize(("name", "protocol", "sent"), [
    ("tree", "Simple", 1.0), ("tree", "LL", 2.0), ("tree", "LL128", 128 / 120), ("ring", "LL", 2.0),
    ("ring", "Simple", 1.0),
])  # fmt: skip
def test_bytes_that_are_never_sent_are_not_counted(name, protocol, sent):
    """32 A100: 2 (n-1)/n S on average, LL sends twice as many; trees are slower than the links, by 1.36 for Simple."""
    cluster, at = placed("dgx-a100-pod", 32)
    algorithm = f"nccl({name}, {protocol})"
    schedule = build(algorithm, 32, 1e8, where=(cluster, at))
    wanted = sent * 2 * 31 / 32 * 1e8
    assert schedule.bytes_sent(1e8).mean() == pytest.approx(wanted, rel=1e-9)
    assert schedule.bytes_handled(1e8).mean() >= wanted * (1.0 - 1e-9)
    if (name, protocol) == ("tree", "Simple"):
        assert schedule.bytes_handled(1e8).mean() == pytest.approx(8 * 24.25 / (8 * 17.8) * wanted, rel=1e-9)
        assert "limited by its multiprocessors, takes as long as for 2.554 to 2.725 times" in str(schedule)
    strategy = ddlsim.AllReduce(algorithm, "none")
    result = ddlsim.simulate(cluster, "resnet18", strategy, 32, 32, steps=2, warmup=0)
    assert result.nbytes_sent == pytest.approx(2 * 32 * sent * 2 * 31 / 32 * result.workloads[0].gradient_nbytes)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(["ring", "tree", "nvls", "nvls_tree", "collnet_direct", "collnet_chain"]),
    st.sampled_from(["dgx-h100-pod+switch_reduces=true", "roce-h100+switch_reduces=true"]),
    st.integers(2, 5), st.integers(1, 8), st.floats(0.0, 1e8),
)  # fmt: skip
def test_every_algorithm_can_be_forced_and_is_correct(algorithm, name, n_machines, n_local, nbytes):
    cluster = load_cluster(name)
    first = [cluster.workers[cluster.host_of[cluster.workers] == host][:n_local] for host in range(n_machines)]
    at = tuple(np.concatenate(first).tolist())
    if n_local == 1 and algorithm in ("nvls", "nvls_tree", "collnet_direct"):
        with pytest.raises(ddlsim.ConfigError, match=f"algorithm = '{algorithm}': not available"):
            build(f"nccl({algorithm})", len(at), nbytes, where=(cluster, at))
        return
    schedule = build(f"nccl({algorithm})", len(at), nbytes, where=(cluster, at))
    check(schedule)
    assert choose(cluster, at, nbytes, "all_reduce", algorithm).algorithm == algorithm


def test_a_protocol_can_be_forced():
    cluster, at = placed("dgx-a100-pod", 8)
    schedule = build("nccl(tree, LL)", 8, 1e9, where=(cluster, at))
    assert schedule.wire == 2.0
    assert schedule.wire * schedule.handled == pytest.approx(240 / 87.7 * 0.915 / 0.8)
    with pytest.raises(ddlsim.ConfigError, match=r"unknown algorithm of NCCL 'rings'.*did you mean 'ring'"):
        build("nccl(rings)", 8, 1e9, where=(cluster, at))


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([("dgx1-v100-16", 24), ("dgx-a100-pod", 20), ("dgx-h100-pod", 9), ("cloud-25g-16x8-v100", 17)]),
    st.data(),
)
def test_every_choice_is_a_correct_collective(machines, data):
    cluster = load_cluster(machines[0])
    at = tuple(cluster.workers[data.draw(st.permutations(range(machines[1])))].tolist())
    at = at[: data.draw(st.integers(2, machines[1]))]
    for kind in KINDS:
        nbytes = data.draw(st.floats(0.0, 1e7))
        schedule = build("nccl", len(at), nbytes, kind=kind, where=(cluster, at))
        check(schedule)
        assert schedule.kind == kind
    ways = channels(cluster, at)
    for ring, chains in zip(ways.rings, ways.chains, strict=True):
        assert sorted(ring.tolist()) == sorted(np.concatenate(chains).tolist()) == list(range(len(at)))


def test_the_default_is_nccls_where_gpus_have_several_ways():
    for name, n, wanted in (
        ("dgx-a100-pod", 64, "nccl"), ("dgx-a100-pod", 8, "nccl"), ("dgx1-v100", 8, "nccl"), ("dgx1-v100", 2, "ring"),
        ("dgx-h100-pod", 8, "nccl"),
        ("cloud-25g-16x8-v100", 64, "ring"), ("office-1gbe", 8, "ring"),
    ):  # fmt: skip
        cluster, at = placed(name, n)
        assert default_algorithm(cluster, at) == wanted
        assert seconds(cluster, n, 1e7, algorithm="default") == seconds(cluster, n, 1e7, algorithm=wanted)
    assert build("default", 4).n_messages == build("ring", 4).n_messages  # nothing is known of machines


@pytest.mark.parametrize(("strategy", "several", "one"), [
    (ddlsim.AllReduce(), ddlsim.AllReduce("nccl"), ddlsim.AllReduce("ring")),
    (ddlsim.LocalSGD(2), ddlsim.LocalSGD(2, algorithm="nccl"), ddlsim.LocalSGD(2, algorithm="ring")),
    (ddlsim.ShardedUpdate(), ddlsim.ShardedUpdate("nccl", "nccl"), ddlsim.ShardedUpdate("ring", "ring")),
    (ddlsim.Parallel(), ddlsim.Parallel(algorithm="nccl"), ddlsim.Parallel(algorithm="ring")),
])  # fmt: skip
def test_strategies_run_the_default(strategy, several, one):
    for cluster, wanted in (("dgx1-v100", several), ("office-1gbe", one)):
        runs = [
            ddlsim.simulate(cluster, "resnet18", each, batch_size=32, workers=8, steps=4) for each in (strategy, wanted)
        ]
        assert runs[0].experiment.strategy == wanted
        assert runs[0].step_time == runs[1].step_time
