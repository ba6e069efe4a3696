"""What is measured on which ranks, and in which order."""

import pytest

from ddlsim.errors import ConfigError
from ddlsim.measure.runner import COLLECTIVES, make_plan, pair_sets, sizes

TWO_BY_FOUR = ["a", "a", "a", "a", "b", "b", "b", "b"]


def plan(hosts, only=(), models=(), max_nbytes=2**20, batch_sizes=(1, 8)):
    return make_plan(hosts, max_nbytes, only, models, batch_sizes)


def test_sizes_rise_by_four_and_fit_the_ranks():
    """12 ranks: 4 and 16 bytes both become one element for each rank, 48 bytes."""
    assert sizes(4, 300, 4) == (4, 16, 64, 256)
    assert sizes(4, 300, 48) == (48, 96, 288)


def test_pairs_on_two_hosts():
    assert pair_sets(TWO_BY_FOUR) == [
        (1, ((0, 1),)),
        (2, ((0, 4),)),
        (1, ((0, 1), (2, 3))),
        (2, ((0, 4), (1, 5))),
        (2, ((0, 4), (1, 5), (2, 6), (3, 7))),
    ]


def test_pairs_on_hosts_of_their_own():
    """One rank per host: the second pair has its own network cards."""
    assert pair_sets(["a", "b", "c", "d", "e"]) == [(2, ((0, 1),)), (4, ((0, 1), (2, 3)))]


@pytest.mark.parametrize("hosts", [TWO_BY_FOUR, ["a", "b"] * 3, ["a", "b", "b", "c", "b"], ["a"] * 7], ids="wxyz")
def test_every_pair_set_is_what_it_says(hosts):
    for n_hosts, pairs in pair_sets(hosts):
        ranks = [rank for pair in pairs for rank in pair]
        assert len(set(ranks)) == len(ranks), "a rank is in two pairs"
        assert len({hosts[rank] for rank in ranks}) == n_hosts
        assert all((hosts[a] == hosts[b]) == (n_hosts == 1) for a, b in pairs)


def test_single_pairs_and_all_reduce_come_first():
    first = [(task.operation, task.n_hosts, task.n_ranks) for task in plan(TWO_BY_FOUR)[:3]]
    assert first == [("one_way", 1, 2), ("one_way", 2, 2), ("all_reduce", 2, 8)]


def test_collectives_that_the_library_lacks_are_left_out():
    tasks = make_plan(["a", "a"], 2**10, ["collective"], (), (1,), lacking=("reduce_scatter", "gather"))
    assert {task.operation for task in tasks} == {*COLLECTIVES} - {"reduce_scatter", "gather"}


def test_one_rank_has_memory_and_steps_only():
    tasks = plan(["a"], models=["lenet5"])
    assert {task.experiment for task in tasks} == {"memory", "step"}
    assert tasks[-1].sizes == (1, 8)


def test_only_some_experiments():
    assert {task.operation for task in plan(["a", "a"], only=["memory"])} == {"reduction", "copy"}
    assert all(task.sizes for task in plan(["a"] * 4, max_nbytes=16))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"only": ["memroy"]}, "--only: unknown experiment 'memroy'; did you mean 'memory'?"),
        ({"only": ["kernals"]}, "--only: unknown experiment 'kernals'; did you mean 'kernels'?"),
        ({"only": ["memory", "kernels"]}, "--only memory,kernels: kernels are measured on one device; use them alone"),
        ({"only": ["step"]}, "set --model or --module"),
        ({"only": ["collective"]}, "start more ranks"),
        ({"only": ["memory"], "models": ["lenet5"]}, "--only memory: steps of lenet5 would not be timed; add step"),
        ({"models": ["lenet5"], "batch_sizes": []}, "--batch-sizes is empty"),
        ({"max_nbytes": 3}, "--max-size 3 B: must be at least 4 B for 1 ranks"),
    ],
    ids=["unknown", "kernals", "kernels", "no_model", "alone", "untimed", "no_batch", "small"],
)
def test_plans_that_cannot_be_made(arguments, message):
    with pytest.raises(ConfigError) as error:
        plan(["a"], **arguments)
    assert message in str(error.value)
