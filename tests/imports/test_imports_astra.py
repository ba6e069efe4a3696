"""ASTRA-sim network files: GB of 2**30 bytes, ns, building blocks per dimension; what is refused."""

import pytest

from ddlsim.errors import ConfigError
from ddlsim.imports.astra import read_astra


def read(tmp_path, text):
    path = tmp_path / "network.yml"
    path.write_text(text, encoding="utf-8")
    return read_astra(path)


def network(topology, count, bandwidth="50.0", latency="500.0"):
    lists = {"topology": topology, "npus_count": count, "bandwidth": bandwidth, "latency": latency}
    return "".join(f"{key}: [ {values} ]  # per dimension\n" for key, values in lists.items())


def neighbours(made, name):
    node = made.node(name)
    return {made.node_names[dst] for src, dst in zip(made.link_src, made.link_dst, strict=True) if src == node}


def test_a_switch_has_one_link_per_npu_and_a_gigabyte_is_binary(tmp_path):
    made = read(tmp_path, network("Switch", "8", "400.0", "936.25"))
    assert (len(made.workers), made.n_links) == (8, 16)
    assert set(made.link_bandwidth.tolist()) == {400.0 * 2**30}
    assert made.link_latency[0] == pytest.approx(936.25e-9, rel=1e-12)


@pytest.mark.parametrize(("block", "n_links"), [("Ring", 4), ("FullyConnected", 6)])
def test_one_dimension(tmp_path, block, n_links):
    made = read(tmp_path, network(block, "4"))
    assert (len(made.workers), made.n_links) == (4, 2 * n_links)


def test_a_ring_of_two_has_one_link(tmp_path):
    assert read(tmp_path, network("Ring", "2")).n_links == 2


def test_dimensions_nest_with_the_first_one_fastest(tmp_path):
    """NPU 5 of 4 x 2 x 2 is (1, 1, 0): in its ring 4 and 6, across 1, and the switch of 5 and 13."""
    made = read(tmp_path, network("Ring, FullyConnected, Switch", "4, 2, 2", "200, 100, 50", "1, 2, 3"))
    assert neighbours(made, "npu5") == {"npu4", "npu6", "npu1", "switch2.5"}
    assert neighbours(made, "switch2.5") == {"npu5", "npu13"}
    links = made.routes([made.node("npu0")], [made.node("npu13")])[0]  # (0,0,0) -> (1,1,1)
    assert made.link_latency[links].sum() == pytest.approx((1 + 2 + 2 * 3) * 1e-9)
    assert made.link_bandwidth[links].min() == 50 * 2.0**30


def test_one_dimension_may_stand_without_brackets(tmp_path):
    made = read(tmp_path, "topology: Ring\nnpus_count: 4\nbandwidth: 50\nlatency: 500\n")
    assert made.n_links == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (network("Mesh", "4"), r"network\.yml:1: topology\[0\] = 'Mesh': must be 'Ring', 'FullyConnected' or 'Switch'"),
        (network("Ring", "4") + "npus_count: [ 8 ]\n", r":5: npus_count appears twice \(first in line 2\)"),
        (network("Ring", "1"), r":2: npus_count\[0\] = 1: must be an integer of at least 2"),
        (network("Ring", "2.5"), r":2: npus_count\[0\] = 2.5: must be an integer"),
        (network("Ring", "4", "0"), r":3: bandwidth\[0\] = 0: must be finite and above 0"),
        (network("Ring", "4", "1", "-1"), r":4: latency\[0\] = -1: must be finite and not negative"),
        (network("Ring", "4", "1", ".nan"), r":4: latency\[0\] = nan"),
        (network("Ring", "4", "fast"), r":3: bandwidth\[0\] = 'fast'"),
        (network("Ring, Ring", "4"), "one entry per dimension, but their lengths are topology 2, npus_count 1"),
        (network("Ring", "4") + "links_count: [ 2 ]\n", r":5: unknown key 'links_count'"),
        ("topology: [Ring]\n", "the key 'npus_count' is missing"),
        ("topology: [Ring\nnpus_count: 3\n", r":2: not valid YAML"),
        ("- a\n", "is it an ASTRA-sim network file"),
        ("!!python/object/apply:os.system ['true']\n", "not valid YAML"),
        (network("Ring, Ring", "1000, 1001", "1, 1", "1, 1"), "npus_count gives 1001000 NPUs: 1001000 nodes exceed"),
        (network("FullyConnected", "100000", "1", "1"), "9999900000 links exceed the limit of 2000000"),
    ],
)
def test_what_is_refused_is_named(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)
