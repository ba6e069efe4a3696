"""Bounds of plans: against networkx, by hand, and against what the network takes."""

import networkx as nx
import numpy as np
import pytest
from plan_examples import TOGETHER, hand_made, random_plan, two_ranks, with_value, workload
from unrolled import data_parallel

import ddlsim
from ddlsim import ConfigError, algorithm_names
from ddlsim.cluster import star, with_detail
from ddlsim.plan import KINDS, Draft
from ddlsim.plan.bounds import least_crossing
from ddlsim.plan.plan import RECEIVE, SEND
from ddlsim.workload.buckets import one_bucket


def longest_path(plan, least):
    """Return the longest path of the graph of starts and ends of all tasks, made row by row from the definition."""
    graph = nx.DiGraph()
    kind, key, seconds = plan.kind.tolist(), plan.key.tolist(), plan.seconds.tolist()
    ends = []
    latest = {}
    for row in range(len(plan)):
        exchanges = kind[row] >= SEND
        end = ("all", key[row]) if KINDS[kind[row]] in TOGETHER[:-1] else ("end", row)
        ends.append(end)
        graph.add_edge(("start", row), end, weight=least if exchanges else seconds[row])
        if plan.lane[row] in latest:
            graph.add_edge(("end of", latest[plan.lane[row]]), ("start", row), weight=0.0)
        latest[plan.lane[row]] = row
        graph.add_edge(end, ("end of", row), weight=0.0)
        for need in plan.needs[plan.need_offsets[row] : plan.need_offsets[row + 1]].tolist():
            graph.add_edge(("end of", need), ("start", row), weight=0.0)
        if kind[row] == RECEIVE:
            (sender,) = np.flatnonzero((plan.kind == SEND) & (plan.key == key[row])).tolist()
            graph.add_edge(("end of", sender), ("start", row), weight=0.0)
        if KINDS[kind[row]] == "push_pull":  # servers do not wait for each other
            members = np.flatnonzero((plan.key == key[row]) & (plan.kind == kind[row])).tolist()
            for member in members:
                if not (plan.rank[row] in plan.servers and plan.rank[member] in plan.servers):
                    graph.add_edge(("start", member), ("end", row), weight=least)
        if KINDS[kind[row]] in ("broadcast", "scatter", "reduce", "gather"):
            members = np.flatnonzero((plan.key == key[row]) & (plan.kind == kind[row])).tolist()
            (root,) = [member for member in members if plan.rank[member] == plan.groups[plan.peer[row]][0]]
            source, sink = (root, row) if KINDS[kind[row]] in ("broadcast", "scatter") else (row, root)
            graph.add_edge(("start", source), ("end", sink), weight=least)
    return nx.dag_longest_path_length(graph)


@pytest.mark.parametrize("least", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(25))
def test_the_critical_path_is_the_longest_path(seed, least):
    plan = random_plan(np.random.default_rng(seed), 6, kinds=KINDS[8:])
    assert plan.critical_path(least) == pytest.approx(longest_path(plan, least), rel=1e-12)


def test_the_critical_path_by_hand():
    assert hand_made().critical_path() == 1.0 + 2.0 + 0.5 + 0.25
    assert (
        hand_made().critical_path(min_seconds=1.0) == 1.0 + 2.0 + 1.0 + 0.25
    )  # the all-reduce beside other work of 0.5 s
    with pytest.raises(ConfigError, match="min_seconds = -1 s: must not be negative"):
        hand_made().critical_path(min_seconds=-1.0)
    assert Draft().plan().critical_path() == 0.0


@pytest.mark.parametrize("seed", range(25))
def test_bounds_are_never_above_what_is_simulated(seed):
    rng = np.random.default_rng(seed)
    name = ("dgx1-v100", "two-racks-oversubscribed", "star-1024-10g", "minicluster")[seed % 4]
    cluster = ddlsim.load_cluster(name)
    plan = random_plan(rng, min(len(cluster.workers), 6), kinds=KINDS[8:])
    if seed % 2:  # all bytes, no work
        plan = with_value(plan, "seconds", slice(None), 0.0)
    algorithms = {
        "all_reduce": ("ring", "hierarchical", "double_binary_tree")[seed % 3],
        **{kind: str(rng.choice(algorithm_names(kind))) for kind in ("broadcast", "reduce", "gather", "scatter")},
        **dict.fromkeys(("reduce_scatter", "all_gather"), ("direct", "ring")[seed % 2]),
        "all_to_all": str(rng.choice(algorithm_names("all_to_all"))), "push_pull": ("direct", "tree", "star")[seed % 3],
    }  # fmt: skip
    nodes = cluster.workers[: plan.n_ranks].tolist()
    seconds = plan.execute(cluster, algorithms, nodes=nodes).seconds
    bound = max(plan.critical_path(), plan.cut(cluster, nodes).seconds)
    assert 0.0 < bound <= seconds * (1.0 + 1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_an_infinitely_fast_network_takes_the_critical_path(seed):
    plan = random_plan(np.random.default_rng(seed), 6, kinds=(*TOGETHER, "gather", "scatter"))
    cluster = ddlsim.load_cluster(star(plan.n_ranks, bandwidth=1e30, latency=0.0))
    nodes = cluster.workers.tolist()
    assert plan.execute(cluster, nodes=nodes).seconds == pytest.approx(plan.critical_path(), rel=1e-12)


def test_a_cycle_has_no_critical_path():
    draft = Draft()
    draft.work(0, 1.0, "a", needs=[1])
    draft.work(0, 1.0, "b")
    with pytest.raises(ConfigError, match="dependency cycle"):
        draft.plan().critical_path()


# ---------------------------------------------------------------- cuts


def network(n=4, **details):
    cluster = ddlsim.load_cluster(star(n, bandwidth=1e9, latency=0.0))
    return with_detail(cluster, **details) if details else cluster


def test_a_message_crosses_two_interfaces():
    draft = Draft()
    draft.message(0, 1, 2e9)
    draft.message(2, 1, 3e9)
    found = draft.plan().cut(network())
    assert found.seconds == 5.0
    assert (found.out, found.into) == (0.0, 5e9)
    assert "'h1'" in found.interface


def test_an_all_reduce_needs_as_long_as_the_best_one():
    """2 (n - 1) / n of the bytes over each link: what a ring does without latency (Patarasuk and Yuan 2009)."""
    plan = data_parallel(workload(), 4, one_bucket)
    nbytes = workload().gradient_nbytes
    found = plan.cut(network())
    assert found.seconds == pytest.approx(2 * 3 / 4 * nbytes / 1e9, rel=1e-12)
    assert found.interface == "all 4 devices together"
    lonely = with_value(plan, "seconds", slice(None), 0.0)
    assert lonely.execute(network(), "ring").seconds == pytest.approx(found.seconds, rel=1e-9)


@pytest.mark.parametrize(
    ("kind", "out", "into", "together", "algorithm", "tight"),
    [
        ("reduce_scatter", 3 / 4, 1 / 4, 3.0, "ring", True),
        ("all_gather", 1 / 4, 3 / 4, 3.0, "ring", True),
        ("broadcast", [1, 0, 0, 0], [0, 1, 1, 1], 3.0, "scatter_all_gather", False),
        ("reduce", [0, 1, 1, 1], [1, 0, 0, 0], 3.0, "binomial", False),
        ("gather", [0, 1 / 4, 1 / 4, 1 / 4], [3 / 4, 0, 0, 0], 3 / 4, "direct", True),
        ("scatter", [3 / 4, 0, 0, 0], [0, 1 / 4, 1 / 4, 1 / 4], 3 / 4, "direct", True),
        ("all_to_all", 3 / 4, 3 / 4, 3.0, "direct", True),
        ("push_pull", [1, 1, 1, 1], [1, 1, 1, 1], 6.0, "direct", False),
    ],
)
def test_what_every_kind_brings_across_borders(kind, out, into, together, algorithm, tight):
    """Four ranks on a machine each; of the push_pull, the last is a server. Some algorithms need no more than that."""
    servers = np.array([False, False, False, kind == "push_pull"])
    least = least_crossing(kind, np.arange(4), servers)
    assert least.out.tolist() == np.broadcast_to(out, 4).tolist()
    assert least.into.tolist() == np.broadcast_to(into, 4).tolist()
    assert least.together == together
    assert least_crossing(kind, np.zeros(4, dtype=np.int64), servers).together == 0.0  # all on one machine
    draft = Draft(servers=[3] if kind == "push_pull" else [])
    draft.collective(kind, range(4), 4e9)
    plan = draft.plan()
    seconds = plan.execute(network(), {kind: algorithm}, nodes=network().workers.tolist()).seconds
    bound = plan.cut(network(), network().workers.tolist()).seconds
    assert 0.0 < bound <= seconds * (1.0 + 1e-12)
    assert not tight or seconds == pytest.approx(bound, rel=1e-9)


def test_pushes_of_machines_are_not_added_up_on_the_way():
    """Three machines with a worker each, whose server is on the first: two push to it; devices of one machine could
    send one push for both."""
    place, server = np.array([0, 1, 2, 0]), np.array([False, False, False, True])
    crossing = {added_up: least_crossing("push_pull", place, server, added_up=added_up) for added_up in (True, False)}
    assert [crossing[added_up].into.tolist() for added_up in (True, False)] == [[1.0, 1.0, 1.0], [2.0, 1.0, 1.0]]
    assert [crossing[added_up].together for added_up in (True, False)] == [4.0, 4.0]


def test_ranks_of_a_machine_share_what_crosses():
    """Three of four ranks in one place: their pieces do not cross, and what all need crosses once."""
    place = np.array([0, 0, 0, 1])
    none = np.zeros(4, dtype=np.bool_)
    assert least_crossing("all_gather", place, none).into.tolist() == [1 / 4, 3 / 4]
    assert least_crossing("reduce_scatter", place, none).into.tolist() == [3 / 4, 1 / 4]
    assert least_crossing("all_to_all", place, none).out.tolist() == [3 / 4, 3 / 4]
    assert least_crossing("broadcast", place, none).together == 1.0
    server = np.array([False, False, True, True])  # one beside both workers, one elsewhere: half of all crosses, twice
    least = least_crossing("push_pull", place, server)
    assert least.out.tolist() == [1 / 2, 1 / 2]
    assert least.together == 1.0


def test_what_a_bucket_lets_through_at_once_takes_no_time():
    draft = Draft()
    draft.message(0, 1, 2e9)
    cluster = network(burst=5e8)
    assert draft.plan().cut(cluster).seconds == 1.5
    assert draft.plan().execute(cluster).seconds >= 1.5 * (1.0 - 1e-12)


def test_ranks_of_one_machine_cross_nothing():
    draft = Draft()
    draft.message(0, 1, 1e9)
    plan = draft.plan()
    assert plan.cut(network(), nodes=[1, 1]).seconds == 0.0
    with pytest.raises(ConfigError, match="must list 2 nodes of cluster 'star-4'"):
        plan.cut(network(), nodes=[1])


# ---------------------------------------------------------------- memory


def test_memory_by_hand():
    draft = Draft()
    for holds in (5.0, 7.0, -5.0, 4.0, -11.0):
        draft.work(0, 1.0, holds=holds)
    draft.work(0, 1.0, lane="other", holds=100.0)
    draft.work(1, 1.0, holds=-3.0)
    draft.work(1, 1.0, holds=2.0)
    assert draft.plan().peak_memory().tolist() == [112.0, 0.0]


def test_a_rank_holds_all_activations_of_one_micro_batch():
    one = workload()
    expected = one.model.activation_nbytes * one.batch_size
    for accumulation in (1, 4):
        assert two_ranks(accumulation=accumulation).peak_memory() == pytest.approx([expected] * 2, rel=1e-6)
    assert abs(two_ranks().holds.sum()) == 0.0
