"""Network plugins of NCCL: what their threads add to a message, their settings, and how chunks fill the stages."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ddlsim
from ddlsim.cluster import load_cluster, star, with_detail
from ddlsim.cluster.calibrated import current_parameters, with_parameters
from ddlsim.cluster.details import PROTOCOLS
from ddlsim.collectives import build
from ddlsim.collectives.nccl import nccl_time
from ddlsim.collectives.nccl_choice import choose
from ddlsim.collectives.nccl_tuner import ALGORITHMS, plugins

MEGA, P5 = "gcp-a3-mega", "aws-p5-48xlarge"
PAIR = load_cluster(star(2, bandwidth="200 Gbit/s", latency="5 us"))


def at(name, n):
    return tuple(load_cluster(name).workers[:n].tolist())


@settings(max_examples=20, deadline=None)
@given(st.floats(1e-7, 1e-3), st.floats(1.0, 1e9))
def test_a_message_takes_its_overhead_once_and_large_ones_the_link(overhead, nbytes):
    """2 L + overhead + S / B: never less than the overhead, and B in the limit."""
    slow = with_detail(PAIR, transport="fastrak", unordered=True, overhead=overhead)
    took = ddlsim.collective_time(slow, "binomial", nbytes, kind="broadcast")
    assert took == pytest.approx(10e-6 + overhead + nbytes / 25e9, rel=1e-9)
    assert took > overhead
    assert 1e13 / ddlsim.collective_time(slow, "binomial", 1e13, kind="broadcast") == pytest.approx(25e9, rel=1e-4)


def test_without_overhead_a_transport_changes_nothing():
    named = with_detail(PAIR, transport="fastrak", unordered=True)
    for algorithm in ("ring", "nccl", "halving_doubling"):
        times = [ddlsim.collective_time(c, algorithm, 1e6) for c in (PAIR, named)]
        if algorithm == "nccl":  # the plugin runs Simple only
            times[0] = ddlsim.collective_time(PAIR, "nccl(tree, Simple)", 1e6)
            times[1] = ddlsim.collective_time(named, "nccl(tree, Simple)", 1e6)
        assert times[0] == times[1]


def test_messages_on_an_ordered_connection_and_on_several_links_count_it_once():
    slow = with_detail(PAIR, transport="efa", overhead="30 us")
    assert ddlsim.collective_time(slow, "ring", 0.0) == pytest.approx(2 * 40e-6, rel=1e-9)
    with pytest.raises(ddlsim.ConfigError, match="overhead = 3e-05 has no effect without a transport"):
        with_detail(PAIR, overhead="30 us")
    assert "overhead 30 us" in slow.summary()


def test_a_measured_latency_includes_the_overhead():
    cluster = load_cluster(P5)
    assert current_parameters(cluster)["between.latency"] == pytest.approx(31e-6)
    measured = with_parameters(cluster, {"between.latency": 25e-6})
    assert current_parameters(measured)["between.latency"] == pytest.approx(25e-6)
    assert not measured.details.overhead.any()


def test_the_file_of_plugins():
    assert set(plugins()) <= set(PROTOCOLS)
    for plugin in plugins().values():
        assert set(plugin.algorithms) <= set(ALGORITHMS)
        for areas in plugin.areas.values():
            assert list(areas) == sorted(areas)
            assert areas[-1][0] == np.inf


def test_fastrak_runs_trees_by_simple_on_two_machines():
    for nbytes in (8.0, 1e6, 1e10):
        assert choose(load_cluster(MEGA), at(MEGA, 16), nbytes, "all_reduce")[:2] == ("tree", "Simple")
    assert choose(load_cluster(MEGA), at(MEGA, 16), 1e9, "all_gather")[:2] == ("ring", "Simple")
    with pytest.raises(ddlsim.ConfigError, match="a network whose plugin supports only 'ring', 'tree', 'Simple'"):
        build("nccl(nvls_tree)", 16, 1e6, where=(load_cluster(MEGA), at(MEGA, 16)))
    high = choose(load_cluster("gcp-a3-high"), at("gcp-a3-high", 16), 8.0, "all_reduce")
    assert high[:2] == ("ring", "Simple")
    assert choose(load_cluster(MEGA), at(MEGA, 8), 1e9, "all_reduce").algorithm == "nvls"  # no network, no plugin


def test_a_trees_chunk_is_an_eighth_of_the_plugins_buffer():
    """8 MiB: 16 channels with one chunk each up to 16 MiB; NCCL's own buffer of 4 MiB has chunks of half of that."""
    sizes = (2.0**24, 2.0**26)
    assert [choose(load_cluster(MEGA), at(MEGA, 16), s, "all_reduce").n_chunks for s in sizes] == [1, 4]
    ideal = load_cluster(MEGA + "+transport=ideal")
    assert choose(ideal, at(MEGA, 16), 2.0**26, "all_reduce", "tree", "Simple").n_chunks == 8


def test_a_chunk_is_copied_before_the_next_gpu_has_it():
    """As long as there is one chunk, each of 2 (7 + 1) stages takes as long as a channel copies it, 20.7 GB/s; two
    channels share an NVLink, which adds up to 4 %."""
    times = [ddlsim.collective_time(MEGA, "default", nbytes, ranks=16) for nbytes in (2.0**23, 2.0**24)]
    copied = 16 * 2.0**19 / (41.4e9 / 2)
    between = 2 * 2.0**23 / 16 * 2 / 22.5e9  # up and down, two channels at an interface
    assert times[1] - times[0] == pytest.approx(copied + between, rel=0.04)


def test_a_proxy_thread_is_busy_with_every_message_of_a_tree():
    """On eight machines a thread has 3.5 messages a chunk on average, two trees up and down; 4 us each."""
    cluster = load_cluster(P5)
    chosen = choose(cluster, at(P5, 64), 2.0**26, "all_reduce")
    assert chosen[:2] == ("tree", "LL128")
    least = chosen.n_chunks * 3.5 * plugins()["efa"].message_time
    assert ddlsim.collective_time(P5, "default", 2.0**26, ranks=64) > least
    larger = choose(cluster, at(P5, 64), 2.0**26, "all_reduce", "tree", "Simple")
    assert larger.message / 45e9 > plugins()["efa"].message_time  # the wire takes longer for 1 MiB


def test_the_tuner_reads_the_latency_that_efa_reports():
    places = at(P5, 64)
    times = [nccl_time(f"{P5}+overhead={us} us", "256 MiB", nodes=places).seconds for us in (11, 21)]
    assert times[1] - times[0] == pytest.approx(14 * 10e-6, rel=1e-6)  # a ring by LL128: 14 hops between machines
