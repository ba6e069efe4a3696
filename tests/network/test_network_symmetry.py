"""Collectives that are simulated for one rank of each class end as if all ranks were simulated."""

import numpy as np
import pytest

import ddlsim
from ddlsim.cluster import Cluster, MultiGpu, leaf_spine, star
from ddlsim.collectives import all_gather, all_reduce, reduce_scatter
from ddlsim.network import Network, episodes, symmetry

HOST = MultiGpu(n_gpus=4, inside="nvswitch", device="v100", nvlink_bandwidth="150 GB/s", pcie_bandwidth="12 GB/s")


def machines(n):
    return star(n, bandwidth="100 Gbit/s", latency="2 us", host=HOST)


def groups(n_leaves):
    """Hosts under leaves with wide trunks without latency, so that it does not matter which messages cross them."""
    spines = {"n_spines": 2, "trunk_latency": "0 s", "trunk_bandwidth": "1 Tbit/s"}
    return leaf_spine(n_leaves, hosts_per_leaf=3, bandwidth="10 Gbit/s", latency="2 us", **spines)


def slower(tree):
    """One link of a network is slower than its likes."""
    next(data for a, b, data in tree.edges(data=True) if "switch" in (a, b))["bandwidth"] /= 2.0
    return tree


def courses(tree, rings, sizes, n_ranks, earlier=False):
    """Return when the ranks of concurrent collectives end, and the traffic then: by classes (None: there are too few),
    and simulated."""
    network = Network(Cluster.from_graph(tree))
    nodes = Cluster.from_graph(tree).workers[:n_ranks]
    now, used = 0.25, episodes.Episodes(network.engine, 0)
    if earlier:  # traffic that not all channels have carried
        network.send(nodes[:1], nodes[-1:], np.array([1e5]), 0.0)
        while network.advance() is not None:
            pass
    ids = [network.collective(ring, nodes, size) for ring, size in zip(rings, sizes, strict=True)]
    by_classes = symmetry.course(network.engine, ids, used._books(), now)
    ends = np.full((len(ids), n_ranks), np.nan)
    network.join(np.repeat(ids, n_ranks), np.tile(np.arange(n_ranks), len(ids)), now)
    while (done := network.advance()) is not None:
        ends[np.searchsorted(ids, done.ids), done.ranks] = done.time
    return by_classes, ends, used._books()


ALIKE = [
    (machines(8), [all_gather.ring], [3e7], 32),
    (machines(8), [all_gather.ring, reduce_scatter.ring], [3e7, 1e7], 32),
    (machines(8), [all_reduce.ring, all_gather.ring], [1e6, 3e6], 32),
    (groups(6), [all_gather.ring, reduce_scatter.ring], [3e6, 5e6], 18),
    (groups(6), [all_gather.ring, reduce_scatter.ring], [3e6, 5e6], 16),  # the last group is smaller
]


@pytest.mark.parametrize(("tree", "rings", "sizes", "n_ranks"), ALIKE)
@pytest.mark.parametrize("earlier", [False, True])
def test_classes_as_simulated(tree, rings, sizes, n_ranks, earlier):
    by_classes, ends, books = courses(tree, [ring(n_ranks) for ring in rings], sizes, n_ranks, earlier)
    assert by_classes is not None or earlier
    if by_classes is None:  # the channels that have carried more limit rates
        return
    assert np.array_equal(np.array(by_classes[0]), ends)
    assert by_classes[1].n_messages == books.n_messages
    assert np.array_equal(by_classes[1].nbytes.sum(axis=0), books.nbytes.sum(axis=0))
    assert np.array_equal(by_classes[1].sums.sum(axis=1), books.sums.sum(axis=1))
    np.testing.assert_allclose(by_classes[1].busy, books.busy, rtol=1e-12)


def test_unlike_ranks():
    """A slow link makes all ranks of a ring unlike."""
    rings = [all_gather.ring(32)]
    assert courses(machines(8), rings, [3e7], 32)[0] is not None
    assert courses(slower(machines(8)), rings, [3e7], 32)[0] is None


def test_simulated_messages_do_not_grow(monkeypatch):
    """More machines add repetitions of the same messages."""
    simulated, add = [], symmetry.Engine.add
    monkeypatch.setattr(symmetry.Engine, "add", lambda *args: simulated.append(args[1].n_messages) or add(*args))
    numbers = []
    for n in (8, 16, 32):
        simulated.clear()
        assert courses(machines(n), [all_gather.ring(4 * n)], [3e7], 4 * n)[0] is not None
        numbers.append(simulated[-1])
    assert numbers == [4, 4, 4]


def test_runs_as_without_classes(monkeypatch):
    """A run in which weights are gathered while gradients are scattered."""
    monkeypatch.setattr(episodes, "LARGE", 0)
    monkeypatch.setattr(episodes, "REPEATED", 0)
    folded, of = [], episodes.course
    monkeypatch.setattr(episodes, "course", lambda *args: folded.append(of(*args)) or folded[-1])
    cluster = Cluster.from_graph(machines(8))

    def run(least):
        monkeypatch.setattr(episodes, "FOLDED", least)
        return ddlsim.simulate(cluster, "resnet18-cifar", ddlsim.FSDP(), workers=32, steps=3, device="v100")

    by_classes, simulated = run(0), run(1 << 62)
    assert any(each is not None for each in folded)
    for name in ("step_time", "end_time", "n_messages", "nbytes_sent"):
        assert getattr(by_classes, name) == getattr(simulated, name)
    assert np.array_equal(by_classes.channel_nbytes, simulated.channel_nbytes)
    np.testing.assert_allclose(by_classes.channel_busy, simulated.channel_busy, rtol=1e-12)
