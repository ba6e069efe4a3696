"""Levels of networks: declared by a grid, or read from the links; and hierarchical all-reduces over all of them."""

import functools
import math

import networkx as nx
import numpy as np
import pytest
from draws import seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlsim import (
    FSDP,
    AllReduce,
    ConfigError,
    Experiment,
    Fabric,
    HierarchicalLocalSGD,
    LocalSGD,
    ParameterServer,
    TopK,
    collective_time,
    load_cluster,
    simulate,
)  # fmt: skip
from ddlsim.cluster import (
    MultiGpu,
    dragonfly,
    fat_tree,
    fully_connected,
    hypercube,
    leaf_spine,
    racks,
    ring,
    star,
    torus,
)  # fmt: skip
from ddlsim.cluster.groups import innermost, levels
from ddlsim.collectives import all_reduce, build, check, cost, reorder
from ddlsim.collectives.build import default_algorithm
from ddlsim.imports.astra import read_astra
from ddlsim.plan.schedules import fastest
from ddlsim.run import run

LINK = {"bandwidth": "10 GB/s", "latency": "1 us"}
GPUS = MultiGpu(4, "nvswitch", nvlink_bandwidth="100 GB/s")
RAILS = MultiGpu(4, "nvswitch", nvlink_bandwidth="100 GB/s", n_pcie_switches=4, n_nics=4)
GIB = float(2**30)


def found(cluster, nodes=None):
    return levels(cluster, tuple((cluster.workers if nodes is None else cluster.workers[nodes]).tolist()))


def network(path, blocks, counts, bandwidths, latencies):
    lists = {"topology": blocks, "npus_count": counts, "bandwidth": bandwidths, "latency": latencies}
    lines = [f"{key}: [ {', '.join(map(str, values))} ]\n" for key, values in lists.items()]
    path.write_text("".join(lines), encoding="utf-8")
    return read_astra(path)


@pytest.fixture
def two_switches(tmp_path):
    return network(tmp_path / "network.yml", ["Switch", "Switch"], [8, 4], [200.0, 25.0], [500, 1000])


@pytest.mark.parametrize(
    ("graph", "shape"),
    [
        (star(6, **LINK), (6, 1)),
        (star(1, **LINK, host=GPUS), (1, 4)),
        (star(3, **LINK, host=GPUS), (3, 4)),
        (racks(3, 5, **LINK), (3, 5)),
        (racks(2, 4, **LINK, trunk_bandwidth="40 GB/s", host=GPUS), (2, 4, 4)),  # trunks faster than interfaces
        (leaf_spine(4, 3, 2, **LINK), (4, 3)),
        (leaf_spine(8, 2, 2, **LINK, rail_optimised=True, host=RAILS), (2, 2, 4)),
        (fat_tree(4, **LINK), (4, 2, 2)),
        (fat_tree(4, **LINK, host=GPUS), (4, 2, 2, 4)),  # GPU, machine, rack, pod
        (dragonfly(3, [4], 2, **LINK, global_links=2, local_bandwidth="20 GB/s"), (3, 4, 2)),
        (torus([3, 4, 5], **LINK), (3, 4, 5)),
        (torus([2, 1, 4], **LINK), (2, 4)),
        (torus([2, 3], **LINK, host=GPUS), (2, 3, 4)),
        (hypercube(3, **LINK), (2, 2, 2)),
        (ring(5, **LINK), (1, 5)),
        (fully_connected(5, **LINK), (5, 1)),
    ],
)  # fmt: skip
def test_levels_of_generated_networks(graph, shape):
    cluster = load_cluster(graph)
    assert found(cluster).places.shape == shape
    assert found(cluster).are_several == (1 not in shape)
    assert np.array_equal(np.sort(found(cluster).places.ravel()), np.arange(len(cluster.workers)))


def drawn(shape, bandwidths, latency=1e-6):
    """Hosts in as many dimensions of switches as there are bandwidths, the last dimension numbered fastest, drawn by
    hand: nothing declares them."""
    graph = nx.Graph()
    places = list(np.ndindex(*shape))
    graph.add_nodes_from((f"h{place}" for place in places), kind="host")
    for dim, bandwidth in enumerate(bandwidths):
        for place in places:
            switch = f"s{dim}{place[:dim]}{place[dim + 1 :]}"
            graph.add_node(switch, kind="switch")
            graph.add_edge(f"h{place}", switch, bandwidth=bandwidth, latency=latency)
    return graph


@pytest.mark.parametrize(("bandwidths", "shape"), [
    ((1e9, 5e9, 9e9), (2, 3, 4)), ((9e9, 5e9, 1e9), (4, 3, 2)), ((1e9, 9e9, 1e9), (8, 3)), ((1e9, 1e9, 1e9), (24, 1)),
])  # fmt: skip
def test_levels_are_read_from_the_speeds_of_links(bandwidths, shape):
    """Members with the same place in neighbouring groups share a switch, whatever the order of the nodes."""
    cluster = load_cluster(drawn((2, 3, 4), bandwidths))
    assert found(cluster).places.shape == shape
    if len(shape) == 3:
        for order in (np.arange(24), cluster.locality_order(cluster.workers), np.random.default_rng(1).permutation(24)):
            at = cluster.workers[order]
            places = levels(cluster, tuple(at.tolist())).places
            for axis in range(3):
                routes = cluster.routes(at[places].ravel(), at[np.roll(places, 1, axis)].ravel())
                assert set(np.diff(routes.offsets).tolist()) == {2}


def test_a_grid_declares_levels_where_links_do_not_show_them(tmp_path):
    graph = drawn((2, 3, 4), (1e9, 1e9, 1e9))
    graph.graph["grid"] = [2, 3, 4]
    cluster = load_cluster(graph)
    assert found(cluster).places.shape == (2, 3, 4)
    for suffix in ("toml", "json", "graphml"):
        cluster.save(tmp_path / f"cluster.{suffix}")
        assert found(load_cluster(tmp_path / f"cluster.{suffix}")).places.shape == (2, 3, 4)
    graph.graph["grid"] = [3, 7]
    with pytest.raises(ConfigError, match=r"grid = \[3, 7\] does not match the number of machines, 24; correct"):
        load_cluster(graph)


@pytest.mark.parametrize(("nodes", "sizes"), [
    (range(8), [{8}]),  # one switch: one level, all
    ([0, 1, 2, 8, 9, 10], [{3}]),
    ([0, 8, 16, 24], [{4}]),  # one of each: the other dimension alone
    (range(13), [{5, 8}]),
    ([0, 9], [{1}]),  # on no common switch
])  # fmt: skip
def test_levels_of_some_of_the_workers(two_switches, nodes, sizes):
    assert [set(map(len, level)) for level in found(two_switches, list(nodes)).groups] in (sizes, [{2}])


def test_the_innermost_group_is_named_by_its_first_node(two_switches):
    nodes = two_switches.workers[[9, 1, 8, 3]].tolist()
    assert innermost(two_switches, nodes) == [two_switches.workers[each] for each in (8, 1, 8, 1)]


# ---------------------------------------------------------------- schedules


def test_two_switches_of_astra_sim(two_switches):
    """A flat ring puts everything on the slow links; by levels they carry an eighth."""
    seconds = functools.partial(collective_time, two_switches, nbytes="100 MB")
    assert seconds("ring") == pytest.approx(7404e-6, rel=1e-4)
    latencies, bandwidths = 6 * 1e-6 + 4 * 2e-6, 2 * 7 / 8 * 100e6 / (200 * GIB) + 2 * 3 / 4 * 12.5e6 / (25 * GIB)
    assert bandwidths == pytest.approx(1513e-6, rel=1e-3)
    assert seconds("hierarchical") == seconds("default") == pytest.approx(latencies + bandwidths, rel=1e-9)
    assert seconds("hierarchical(ring, ring)") == pytest.approx(bandwidths + 14 * 1e-6 + 6 * 2e-6, rel=1e-9)
    assert seconds("hierarchical(direct, direct)") == pytest.approx(bandwidths + 2 * 1e-6 + 2 * 2e-6, rel=1e-9)
    assert seconds("hierarchical", rank_order="topology") == seconds("hierarchical")


def test_a_ring_in_a_switch_of_astra_sim(tmp_path):
    cluster = network(tmp_path / "network.yml", ["Ring", "Switch"], [4, 8], [200.0, 25.0], [500, 1000])
    expected = cost.hierarchical(4, 8, 100e6, (0.5e-6, 1 / (200 * GIB), 0.0), (2e-6, 1 / (25 * GIB), 0.0))
    assert collective_time(cluster, "hierarchical(ring, ring)", "100 MB") == pytest.approx(expected, rel=1e-9)
    assert collective_time(cluster, "default", "100 MB") < expected < collective_time(cluster, "ring", "100 MB") / 3


BLOCKS = st.tuples(
    st.sampled_from(["Ring", "FullyConnected", "Switch"]), st.integers(2, 5),
    st.sampled_from([400.0, 100.0, 25.0, 6.0]), st.sampled_from([100, 500, 3000]),
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(st.lists(BLOCKS, min_size=1, max_size=4), st.booleans())
def test_every_dimension_takes_its_closed_form(tmp_path_factory, blocks, by_name):
    """The sum over dimensions, the fastest first, of an all-reduce over what the one before has left to share."""
    cluster = network(tmp_path_factory.mktemp("astra") / "network.yml", *zip(*blocks, strict=True))
    algorithms, seconds, left = [], 0.0, 1e8
    for block, n, bandwidth, latency in sorted(blocks, key=lambda each: -each[2]):
        algorithm = "direct" if block == "FullyConnected" and n > 2 else "ring"
        if not by_name and n > 2 and block == "Ring" and n == 3:
            algorithm = "direct"
        if not by_name and block == "Switch" and n in (2, 4):
            algorithm = "halving_doubling"
        n_steps = {"ring": n - 1, "direct": 1, "halving_doubling": (n - 1).bit_length()}[algorithm]
        links = n - 1 if algorithm == "direct" else 1
        alpha = (2 if block == "Switch" else 1) * latency * 1e-9
        seconds += 2 * n_steps * alpha + 2 * (n - 1) / n * left / (bandwidth * GIB) / links
        algorithms.append(algorithm)
        left /= n
    name = f"hierarchical({', '.join(algorithms)})" if by_name and len(blocks) > 1 else "hierarchical"
    if len(blocks) > 1:
        assert collective_time(cluster, name, 1e8) == pytest.approx(seconds, rel=1e-9)


NETWORKS = [
    fat_tree(4, **LINK, host=GPUS), fat_tree(4, **LINK), racks(3, 5, **LINK), torus([3, 4, 2], **LINK),
    torus([2, 2, 2, 2, 2], **LINK), star(3, **LINK, host=GPUS), dragonfly(3, [2, 2], 2, **LINK, global_links=1),
    drawn((2, 3, 4), (1e9, 5e9, 9e9)),
]  # fmt: skip


@functools.cache
def loaded(i):
    return load_cluster(NETWORKS[i])


@pytest.mark.parametrize("share", seeds(1, 3))  # of 150 examples
@settings(max_examples=50, deadline=None)
@given(st.integers(0, len(NETWORKS) - 1), st.data())
def test_schedules_of_any_workers_by_any_algorithms_are_all_reduces(share, number, data):
    cluster = loaded(number)
    n = len(cluster.workers)
    ranks = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True))
    at = cluster.workers[ranks]
    of = levels(cluster, tuple(at.tolist()))
    even = [len(set(map(len, level))) == 1 for level in of.groups]
    shared, leaders = (["ring", "halving_doubling", "direct"], ["binomial_tree", "chain"])
    names = [data.draw(st.sampled_from([*shared, *leaders] if each else leaders)) for each in even]
    names = names[: data.draw(st.integers(1, len(names)))]
    names.append(data.draw(st.sampled_from(["ring", "halving_doubling", "recursive_doubling", "direct"])))
    for name in ("hierarchical", f"hierarchical({', '.join(names)})"):
        check(build(name, len(at), 1e6, where=(cluster, at.tolist())))
    if even[0] or len(set(cluster.host_of[at].tolist())) == len(at):  # else machines are rows of unequal length
        check(build("torus_2d", len(at), 1e6, where=(cluster, at.tolist())))
    assert np.array_equal(np.sort(np.concatenate(of.groups[0])), np.arange(len(at)))


def test_as_many_names_as_levels_at_most(two_switches):
    with pytest.raises(ConfigError, match="hierarchical: got 3 algorithms for 2 levels; use at most one"):
        collective_time(two_switches, "hierarchical(ring, ring, ring)", "1 MB")
    with pytest.raises(ConfigError, match="unknown algorithm inside groups 'rings'; did you mean 'ring'"):
        collective_time(load_cluster(fat_tree(4, **LINK)), "hierarchical(ring, rings, ring)", "1 MB")


def test_two_names_are_two_levels():
    """Even where there are four; so machines are what they were."""
    cluster = load_cluster(NETWORKS[0])
    hosts, at = cluster.host_of[cluster.workers].tolist(), cluster.workers.tolist()
    here, there = (build("hierarchical(ring, ring)", 64, 1e6, hosts, where=where) for where in (None, (cluster, at)))
    for one, other in zip(here.lanes[0], there.lanes[0], strict=True):
        assert all(np.array_equal(getattr(one, key), getattr(other, key)) for key in ("src", "dst", "start", "repeat"))


def test_four_levels_take_fewer_steps_than_two():
    """GPU, machine, rack, pod: each all-reduce between groups of a level is over what the level below has left."""
    cluster = load_cluster(NETWORKS[0])
    four, two = (build(name, 64, 1e6, where=(cluster, cluster.workers.tolist())).n_rounds
                 for name in ("hierarchical", "hierarchical(ring, ring)"))  # fmt: skip
    assert (four, two) == (2 * (3 + 1 + 1 + 3), 2 * (3 + 15))
    assert collective_time(cluster, "hierarchical", "100 MB") < collective_time(cluster, "ring", "100 MB")


def own(n_ranks, levels):
    """A collective of a user's: the first level decides which ring."""
    return reorder(all_reduce.ring(n_ranks), np.concatenate(levels.groups[0]))


def test_a_function_of_ones_own_gets_the_levels(two_switches):
    assert collective_time(two_switches, own, "1 MB") == collective_time(two_switches, "ring", "1 MB")


@pytest.mark.parametrize("sizes", [
    (4, 4), (2, 8), (8, 2), (3, 5), (7, 2), (1, 6), (6, 1), (3, 4, 5), (4, 2, 2), (2, 2, 2, 2),
])  # fmt: skip
@pytest.mark.parametrize("order", ["given", "topology"])
def test_a_torus_of_any_shape(sizes, order):
    """One ring per dimension, each over links of its own."""
    cluster, seconds, left = load_cluster(torus(list(sizes), **LINK)), 0.0, 1e8
    for size in reversed(sizes):
        seconds += cost.ring(size, left, 1e-6, 1e-10)
        left /= size
    assert collective_time(cluster, "torus_2d", 1e8, rank_order=order) == pytest.approx(seconds, rel=1e-9)
    if len(sizes) == 2:
        assert seconds == pytest.approx(
            cost.torus_2d(math.prod(sizes), 1e8, 1e-6, 1e-10, rows=sizes[0], columns=sizes[1]), rel=1e-9
        )
        named = collective_time(cluster, f"torus_2d({sizes[0]}, {sizes[1]})", 1e8, rank_order=order)
        assert named == pytest.approx(seconds, rel=1e-9)


# ---------------------------------------------------------------- what asks for levels


def step(cluster, strategy, **more):
    return simulate(cluster, "resnet18", strategy, 32, device="v100", steps=1, warmup=0, **more)


def test_the_default_and_auto_consider_levels(two_switches):
    default, by_levels, auto, ring = (
        step(two_switches, AllReduce(name, "none")) for name in ("default", "hierarchical", "auto", "ring")
    )
    assert default.step_time == by_levels.step_time >= auto.step_time
    assert ring.step_time > by_levels.step_time
    assert not by_levels.notes


@pytest.mark.parametrize("name", ["torus-2d", "cloud-25g-16x8-v100", "two-racks-oversubscribed", "fat-tree-k8-10g"])
def test_the_default_remains_a_ring_where_its_links_are_as_fast(name):
    cluster = load_cluster(name)
    nodes = cluster.workers[cluster.locality_order(cluster.workers)].tolist()
    assert default_algorithm(cluster, nodes) == "ring"


def test_the_default_between_regions_goes_over_the_ocean_less():
    regions = load_cluster("three-regions-wan")
    assert default_algorithm(regions, regions.workers.tolist()) == "hierarchical"
    assert default_algorithm(regions, regions.workers.tolist(), "all_gather") == "ring"


def test_auto_names_an_algorithm_per_level():
    """Rings among the three of a level, halving and doubling among its four."""
    host = MultiGpu(3, "nvswitch", nvlink_bandwidth="100 GB/s")
    cluster = load_cluster(racks(3, 4, bandwidth="10 GB/s", latency="5 us", host=host))
    notes: list[str] = []
    name = fastest(cluster, cluster.workers.tolist(), cluster.locality_order(cluster.workers), 1e7, notes)
    assert (name, *notes) == (
        "hierarchical(ring, halving_doubling, ring)",
        f"auto: {name} is the fastest algorithm for 10 MB (2.108 ms)",
    )
    seconds = functools.partial(collective_time, cluster, nbytes=1e7, rank_order="topology")
    assert seconds(name) == pytest.approx(2.108e-3, rel=1e-3)
    assert seconds(name) < seconds("hierarchical") < seconds("ring")


@pytest.mark.parametrize(("strategy", "n_workers"), [
    (AllReduce("hierarchical"), 8), (LocalSGD(2, algorithm="hierarchical(ring, ring)"), 8),
    (AllReduce("hierarchical"), 2), (FSDP(shard=2, all_reduce="hierarchical"), 8),
])  # fmt: skip
def test_a_note_where_there_is_no_level(two_switches, strategy, n_workers):
    notes = step(two_switches, strategy, workers=n_workers).notes
    assert [note for note in notes if note.startswith(f"hierarchical: all {n_workers} workers are on one level of")]
    assert not any("one level" in note for note in step(two_switches, strategy, workers=16).notes)


def test_a_fabric_is_noted_too():
    (note,) = step("office-1gbe", AllReduce(), fabric=Fabric("hierarchical")).notes
    assert "one level of the network" in note


@pytest.mark.slow
def test_calls_of_nccl_on_every_level():
    """A reduce-scatter inward, an all-gather outward on each of three inner levels, and an all-reduce between pods."""
    cluster = load_cluster(NETWORKS[0])
    simulated, by_nccl = (step(cluster, AllReduce("hierarchical", "none", cost=cost)) for cost in ("simulated", "nccl"))
    two = step(cluster, AllReduce("hierarchical(ring, ring)", "none", cost="nccl"))
    assert by_nccl.nbytes_sent == pytest.approx(simulated.nbytes_sent, rel=1e-9)
    assert two.nbytes_sent == pytest.approx(simulated.nbytes_sent, rel=1e-9)
    assert two.step_time != by_nccl.step_time
    with pytest.raises(ConfigError, match=r"number of workers in every innermost group of the network, not \[3, 8\]"):
        step(load_cluster(drawn((4, 8), (1e9, 9e9))), AllReduce("hierarchical", cost="nccl"), workers=11)


@pytest.mark.parametrize("cluster", ["dgx1-v100-16", fat_tree(4, **LINK, host=GPUS)])
def test_links_are_busy_as_long_as_their_calls_of_nccl(cluster):
    """In the timeline as in the accounts, which a run with spans compares: links belong to a call until its end."""
    experiment = Experiment(
        cluster, "resnet18", AllReduce("hierarchical", "none", cost="nccl"), 32, workers=16, device="v100", steps=2
    )
    result = run(experiment, keep_spans=True)
    assert 0.0 < result.links["busy"].max() <= 1.0


def test_compressed_between_the_innermost_groups(two_switches):
    """HiTopKComm: dense on the fast switches, a hundredth of an eighth from each worker over the slow ones."""
    result = step(two_switches, AllReduce("hierarchical", "none"), compression=TopK(0.01))
    slow = result.links["source"].str.startswith("switch1")
    n = result.workloads[0].gradient_nbytes / 4
    payload = math.ceil(0.01 * n / 8) * 8  # a float and an index each
    assert result.links["nbytes"][slow].sum() == pytest.approx(32 * 3 * payload, rel=0.01)
    by_nccl = step(two_switches, AllReduce("hierarchical", "none", cost="nccl"), compression=TopK(0.01))
    assert by_nccl.nbytes_sent == pytest.approx(result.nbytes_sent, rel=1e-3)


def test_blocks_of_local_sgd_are_innermost_groups(two_switches):
    """Inner averages stay on their switch."""
    result = step(two_switches, HierarchicalLocalSGD(1, 4))
    slow = result.links["source"].str.startswith("switch1") | result.links["target"].str.startswith("switch1")
    assert result.links["nbytes"].sum() > 0.0 == result.links["nbytes"][slow].sum()
    assert not [note for note in result.notes if "hierarchical" in note]


def test_servers_get_one_push_from_an_innermost_group(two_switches):
    servers = [ParameterServer(1, "colocated", "none", local_reduction=local) for local in (False, True)]
    each, one = (step(two_switches, strategy) for strategy in servers)
    assert one.step_time < each.step_time / 1.9


def test_copies_of_shares_sum_by_levels(two_switches):
    ring, by_levels = (
        simulate(two_switches, "resnet18", FSDP(shard=2, all_reduce=name), 32, device="v100", steps=2, warmup=0)
        for name in ("ring", "hierarchical")
    )
    assert by_levels.step_time < ring.step_time
