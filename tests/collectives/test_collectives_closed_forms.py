"""Schedules, executed message by message, take exactly the time of their closed forms."""

import itertools

import numpy as np
import pytest
from collectives_reference import execute

from ddlsim.collectives import KINDS, algorithm_names, build, cost
from ddlsim.collectives.all_reduce import double_binary_tree, halving_doubling, pipelined_ring, recursive_doubling
from ddlsim.collectives.trees import double_tree
from ddlsim.errors import ConfigError

RANKS = (1, 2, 3, 4, 5, 7, 8, 12, 16)
#: latency-bound, mixed, bandwidth-bound; with and without the cost of reducing
POINTS = [(1e3, 1e-5, 1e-9), (3e5, 1e-5, 1e-9), (1.7e8, 3e-6, 8e-10)]

ANY = {
    "all_reduce": ["naive_ring", "parameter_server", "pipelined_ring", "ring"],
    "broadcast": ["binomial", "chain"],
    "reduce": ["chain"],
    "reduce_scatter": ["direct", "ring"],
    "all_gather": ["bruck", "direct", "ring"],
    "all_to_all": ["bruck", "direct", "pairwise"],
    "gather": ["direct"],
    "scatter": ["direct"],
}
POWER_OF_TWO = {
    "all_reduce": ["binomial_tree", "halving_doubling", "recursive_doubling"],
    "broadcast": ["scatter_all_gather"],
    "reduce": ["binomial"],
    "reduce_scatter": ["recursive_halving"],
    "all_gather": ["recursive_doubling"],
    "all_to_all": [],
}
CASES = [
    (kind, name, table is POWER_OF_TWO)
    for table in (ANY, POWER_OF_TWO)
    for kind, names in table.items()
    for name in names
]


def closed_form(kind, name):
    return getattr(cost, name if kind == "all_reduce" else f"{kind}_{name}")


def test_every_algorithm_has_a_closed_form_here_or_a_test_of_its_own():
    tested = {(kind, name) for kind, name, _ in CASES}
    every = {(kind, name) for kind in KINDS for name in algorithm_names(kind)}
    gloo = {(kind, name) for kind, name in every if name.startswith("gloo_")}  # test_collectives_gloo.py
    others = {("all_reduce", name) for name in ("double_binary_tree", "hierarchical", "torus_2d")}
    kinds, nccl = ("all_reduce", "all_gather", "reduce_scatter"), ("nccl", "nccl_ring")
    others |= {(kind, name) for kind in kinds for name in nccl}  # test_cluster_rings.py, test_collectives_nccl_way.py
    others |= {("all_gather", "hierarchical"), ("reduce_scatter", "hierarchical")}
    others |= {(kind, "torus") for kind in kinds}  # test_collectives_torus.py
    others |= {("all_reduce", "open_mpi")}  # test_collectives_open_mpi.py
    others |= {("all_to_all", "nccl")}  # test_collectives_nccl_all_to_all.py
    assert every - tested == gloo | others


@pytest.mark.parametrize(("kind", "name", "power_of_two"), CASES)
def test_the_time_is_the_closed_form(kind, name, power_of_two):
    formula = closed_form(kind, name)
    takes_gamma = "gamma" in formula.__annotations__
    for n_ranks, (nbytes, alpha, beta) in itertools.product(RANKS, POINTS):
        if power_of_two and n_ranks & (n_ranks - 1):
            with pytest.raises(ConfigError, match="powers of two"):
                formula(n_ranks, nbytes, alpha, beta)
            continue
        for gamma in (0.0, 0.3 * beta)[: 1 + takes_gamma]:
            more = (gamma,) if gamma else ()  # reducing takes no time unless it is said
            # 1 byte: one segment, as the formulas assume by default
            schedule = build(name, n_ranks, kind=kind, nbytes=1)
            took = max(execute(schedule, nbytes, alpha, beta, gamma))
            assert took == pytest.approx(formula(n_ranks, nbytes, alpha, beta, *more), rel=1e-9)


@pytest.mark.parametrize("kind", ["broadcast", "reduce"])
@pytest.mark.parametrize("n_segments", [2, 3, 10])
def test_a_pipelined_chain_hides_all_but_its_length(kind, n_segments):
    for n_ranks in (2, 5, 9):
        schedule = build("chain", n_ranks, kind=kind, nbytes=n_segments * 2**19)
        assert schedule.n_chunks == n_segments
        expected = closed_form(kind, "chain")(n_ranks, 1e6, 1e-5, 1e-9, n_segments=n_segments)
        assert max(execute(schedule, 1e6, 1e-5, 1e-9)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("n_inside", "n_groups"), [(1, 4), (4, 1), (2, 3), (4, 2), (3, 5), (4, 4)])
def test_two_levels_add_up(n_inside, n_groups):
    """On a uniform network both levels have the same alpha, beta and gamma."""
    n_ranks, model = n_inside * n_groups, (1e-5, 1e-9, 2e-10)
    expected = cost.hierarchical(n_inside, n_groups, 4e6, model, model)
    hosts = [r % n_groups for r in range(n_ranks)]
    assert max(execute(build("hierarchical", n_ranks, hosts=hosts), 4e6, *model)) == pytest.approx(expected, rel=1e-9)
    halves = [
        max(execute(build("hierarchical", n_ranks, hosts=hosts, kind=kind), 4e6, *model))
        for kind in ("reduce_scatter", "all_gather")
    ]
    assert sum(halves) == pytest.approx(expected, rel=1e-9)
    torus = build(f"torus_2d({n_groups}, {n_inside})", n_ranks)
    assert max(execute(torus, 4e6, *model)) == pytest.approx(expected, rel=1e-9)
    assert cost.torus_2d(n_ranks, 4e6, *model, rows=n_groups, columns=n_inside) == expected


def test_reducing_takes_no_time_unless_it_is_said():
    """On two levels of rings as well: 2 (p-1) a + 2 (p-1)/p S b inside 4, then between 2 for a quarter."""
    took = cost.torus_2d(8, 4e6, 1e-5, 1e-9, rows=2, columns=4)
    assert took == pytest.approx(6e-5 + 6 / 4 * 4e-3 + 2e-5 + 1e-3, rel=1e-12)


@pytest.mark.parametrize("n_lanes", [1, 2, 3, 4])
@pytest.mark.parametrize("n_ranks", [2, 3, 5])
def test_lanes_of_a_pipelined_ring_carry_equal_shares(n_ranks, n_lanes):
    """Each lane's message is S/(p L) bytes; lane i cuts its first one in i + 1 equal pieces."""
    share = 1.0 / (n_ranks * n_lanes)
    schedule = pipelined_ring(n_ranks, n_lanes)
    for i, lane in enumerate(schedule.lanes):
        for k, round in enumerate(lane):
            for repetition in range(round.repeat):
                expected = share / (i + 1) if k <= i else share
                sizes = schedule.message_bytes(1.0, round, repetition)
                np.testing.assert_allclose(sizes, np.full(n_ranks, expected), rtol=1e-12)
        assert sum(round.repeat for round in lane) == i + 1 + (n_ranks - 2) + (n_ranks - 1)


def test_servers_share_the_work():
    for n_ranks, n_servers in [(4, 2), (5, 3), (7, 7), (9, 4)]:
        took = max(execute(build(f"parameter_server({n_servers})", n_ranks), 1e6, 1e-5, 1e-9, 1e-10))
        expected = cost.parameter_server(n_ranks, 1e6, 1e-5, 1e-9, 1e-10, n_servers)
        assert took == pytest.approx(expected, rel=1e-9)


def test_folding_three_ranks_by_hand():
    """alpha = beta = gamma = 1, one byte. Rank 0 folds into 1; ranks 1 and 2 exchange.
    Rank 2 does not fold, so it sends to 1 at time 0 as well: both messages share port 1, have arrived at 1+2
    and are reduced at 4. Rank 1 sends to 2 from 4 to 6, which 2 has reduced at 7; then to 0, from 6 to 8.
    """
    took = execute(recursive_doubling(3), 1.0, 1.0, 1.0, 1.0)
    assert took == pytest.approx([8, 8, 7])


@pytest.mark.parametrize("n_ranks", [3, 5, 6, 7, 9, 11, 12, 13, 15])
def test_folding_costs_at_least_the_sum_of_its_steps(n_ranks):
    """The contribution of a folded rank must pass before + log2 p' steps + after, one after the other."""
    n_active = 1 << (n_ranks.bit_length() - 1)
    n, a, b, g = 1e6, 1e-5, 1e-9, 3e-10
    for algorithm, formula in (
        (recursive_doubling, cost.recursive_doubling),
        (halving_doubling, cost.halving_doubling),
    ):
        steps = (a + n * (b + g)) + formula(n_active, n, a, b, g) + (a + n * b)
        took = max(execute(algorithm(n_ranks), n, a, b, g))
        # every early message delays another one by at most its own time at the port
        assert steps <= took * (1 + 1e-12)
        assert took <= steps + 2 * n_active.bit_length() * n * b


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 5, 8, 13, 16])
@pytest.mark.parametrize("n_segments", [1, 4, 16])
def test_double_binary_tree_stays_within_its_bounds(n_ranks, n_segments):
    """At least the bytes of the ring; at most 2 (h + c - 1) rounds of two messages in and two out (or four,
    at the one rank that is inner in both trees if their number is odd)."""
    n, a, b = 1e6, 1e-5, 1e-9
    depth = int(max(d.max() for _, d in double_tree(n_ranks)))
    took = max(execute(double_binary_tree(n_ranks, n_segments=n_segments), n, a, b))
    assert took >= 2 * (n_ranks - 1) / n_ranks * n * b
    ports = 2 if n_ranks % 2 == 0 else 4
    assert took <= 2 * (depth + n_segments - 1) * (a + ports * n / (2 * n_segments) * b) * (1 + 1e-12)


@pytest.mark.parametrize("n_ranks", [2, 3, 6, 7, 12, 25, 64, 127])
def test_the_two_trees_complement_each_other(n_ranks):
    """Every rank is a leaf in at least one tree (but for one, if their number is odd); depth is log2 p."""
    inner = np.zeros((2, n_ranks), dtype=bool)
    for tree, (parent, depth) in enumerate(double_tree(n_ranks)):
        assert np.count_nonzero(depth == 0) == 1
        child = np.flatnonzero(depth)
        assert (depth[child] == depth[parent[child]] + 1).all()
        assert np.bincount(parent[child]).max() <= 2
        assert depth.max() <= n_ranks.bit_length()
        inner[tree, parent[child]] = True
    assert np.count_nonzero(inner.all(axis=0)) <= (n_ranks % 2)


def test_a_late_rank_delays_all_that_depend_on_it():
    """A ring of 4 whose rank 2 enters at 10: every rank needs its contribution, 3 hops at the least."""
    entry = [0.0, 0.0, 10.0, 0.0]
    end = execute(build("ring", 4), 4.0, 1.0, 1.0, 0.0, entry)
    assert min(end) >= 10 + 3 * 2
    assert max(end) <= 10 + cost.ring(4, 4.0, 1.0, 1.0)


def test_pipelining_a_ring_hides_latency():
    """32 ranks, 64 MB: the ring shows 62 latencies, two lanes show one."""
    plain, pipelined = (cost.ring(32, 64e6, 1e-5, 1e-9), cost.pipelined_ring(32, 64e6, 1e-5, 1e-9))
    assert plain - pipelined == pytest.approx(61e-5, rel=1e-9)
