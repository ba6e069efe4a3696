"""Collectives along all axes of tori at once, and their default on TPUs."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ddlsim
from ddlsim.cluster import Host, load_cluster, torus
from ddlsim.cluster.groups import axes
from ddlsim.collectives import all_gather, all_reduce, build, check, reduce_scatter
from ddlsim.collectives.build import default_algorithm

KINDS = {"reduce_scatter": reduce_scatter, "all_gather": all_gather, "all_reduce": all_reduce}
RATE, HOP = 90e9, 1e-6


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4).filter(lambda sizes: math.prod(sizes) < 65), st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_each_contribution_arrives_once_whatever_the_shape(kind, sizes, data):
    order = np.array(data.draw(st.permutations(range(math.prod(sizes)))))
    schedule = KINDS[kind].torus(len(order), order.reshape(sizes))
    assert (schedule.kind, schedule.n_ranks) == (kind, len(order))
    check(schedule)


def _time(sizes, kind, nbytes, slices=1, nic=6.25e9):
    graph = torus(sizes, slices=slices, bandwidth=RATE, latency=HOP, nic_bandwidth=nic, nic_latency=0.0)
    return ddlsim.collective_time(graph, "torus", nbytes, kind=kind)


@pytest.mark.parametrize(("n", "n_axes"), [(4, 1), (3, 2), (8, 2), (16, 2), (4, 3)])
def test_all_links_of_a_torus_carry_all_the_time(n, n_axes):
    """Every chip receives (p-1)/p of the buffer, over the 2 D links of its D axes."""
    p, nbytes = n**n_axes, 1e9
    bound = (p - 1) / p * nbytes / (2 * n_axes * RATE)
    lap = bound + n_axes * (n - 1) * HOP
    assert _time([n] * n_axes, "all_gather", nbytes) == pytest.approx(lap, rel=1e-9)
    assert _time([n] * n_axes, "reduce_scatter", nbytes) == pytest.approx(lap, rel=1e-9)
    assert _time([n] * n_axes, "all_reduce", nbytes) == pytest.approx(2 * lap, rel=1e-9)


@pytest.mark.parametrize("sizes", [[4, 8], [4, 4, 8], [4, 8, 8], [8, 8, 16]])
def test_unequal_axes_lose_little(sizes):
    p, nbytes = math.prod(sizes), 1e9
    bound = (p - 1) / p * nbytes / (2 * len(sizes) * RATE)
    assert bound < _time(sizes, "all_gather", nbytes) < 1.35 * bound


def test_between_slices_a_part_crosses_the_network_once():
    """A chip sends its sixteenth of the buffer to three other slices, while its links rest."""
    nbytes, inside = 1e9, _time([4, 4], "all_gather", 1e9)
    assert _time([4, 4], "all_gather", nbytes, slices=4) == pytest.approx(
        inside + 3 / 4 * nbytes / 16 / 6.25e9, rel=1e-9
    )


def test_places_of_workers_on_tori():
    cluster = load_cluster(torus([2, 3], slices=2, bandwidth=RATE, latency=HOP))
    assert axes(cluster, tuple(range(12))).tolist() == np.arange(12).reshape(2, 2, 3).tolist()
    assert axes(cluster, (0, 2, 6, 8)).tolist() == [[0, 1], [2, 3]]  # two chips of a row in each slice
    assert axes(cluster, (9, 3)).shape == (2,)  # the same place in both slices: no axis
    assert axes(cluster, (0, 1, 3)) is None
    assert axes(cluster, (0, 7)) is None
    assert axes(load_cluster("dgx1-v100"), (0, 1, 2, 3)) is None


def test_the_default_on_tpus():
    tpu = load_cluster("tpu-v5e+sizes=[4, 4]+slices=2")
    everywhere, one = list(range(32)), list(range(16, 32))
    for kind in KINDS:
        assert default_algorithm(tpu, everywhere, kind) == default_algorithm(tpu, one, kind) == "torus"
        assert default_algorithm(tpu, [3, 19], kind) == "ring"
    assert default_algorithm(tpu, [0, 1, 4], "all_gather") == "ring"
    others = load_cluster(torus([4, 4], bandwidth=RATE, latency=HOP, host=Host(device="v100")))
    assert default_algorithm(others, range(16), "all_gather") == "ring"
    check(build("torus", 6))  # without a cluster: one ring, both ways
    assert build("torus", 6).bytes_sent(1.0).tolist() == pytest.approx([10 / 6] * 6)


@pytest.mark.parametrize("name", ["tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e"])
def test_slices_of_tpus_get_the_bandwidth_of_their_links(name):
    """Google: so many GB/s of ICI per chip, both directions of all links; nine tenths of it carry payload."""
    per_chip = {"tpu-v4": 600, "tpu-v5e": 400, "tpu-v5p": 1200, "tpu-v6e": 800}[name] / 2 * 0.9
    axis = 8 if name in ("tpu-v4", "tpu-v5p") else 16
    cluster = f"{name}+sizes={[axis] * (3 if axis == 8 else 2)}"
    n = len(load_cluster(cluster).workers)
    seconds = ddlsim.collective_time(cluster, "default", "4 GB", kind="all_gather")
    assert 4e9 * (n - 1) / n / seconds / 1e9 == pytest.approx(per_chip, rel=0.01)


def test_a_pod_of_tpus_shards_inside_slices():
    """Sharding groups are slices; the sums over copies cross the data-centre network: with MaxText after the backward
    pass, by rings of four of 2 x 3 rounds of 20 us for each unit, with other software beside it."""
    experiment = {"model": "gpt2", "precision": "bf16", "gradient_dtype": "fp32"}
    one = ddlsim.simulate("tpu-v5e+sizes=[4, 4]", strategy=ddlsim.FSDP(), batch_size=64, steps=2, **experiment)
    pod, sent = load_cluster("tpu-v5e+sizes=[4, 4]+slices=4"), []
    uplinks = pod.link_channel[pod.is_fabric_switch[pod.link_dst]]
    for steps in (2, 3):
        four = ddlsim.simulate(pod, strategy=ddlsim.FSDP(shard=16), batch_size=256, steps=steps, **experiment)
        sent.append(four.channel_nbytes[uplinks].sum() / 64)
    gradients = 4 * ddlsim.load_model("gpt2").n_params / 16  # bytes of a chip's shard, in fp32
    assert sent[1] - sent[0] == pytest.approx(2 * 3 / 4 * gradients)
    n_units = 14  # embedding, 12 layers, what follows them
    exposed = 2 * 3 / 4 * gradients / 3.125e9 + n_units * 6 * 20e-6  # 25 Gbit/s a chip
    assert four.step_time - one.step_time == pytest.approx(exposed, rel=0.01)
    hidden = [
        ddlsim.simulate(cluster, strategy=strategy, batch_size=size, steps=2, stack="torchtitan-compile", **experiment)
        for cluster, strategy, size in (
            ("tpu-v5e+sizes=[4, 4]", ddlsim.FSDP(), 64), (pod, ddlsim.FSDP(shard=16), 256),
        )
    ]  # fmt: skip
    assert 3.0 < hidden[1].throughput / hidden[0].throughput <= 4.0
