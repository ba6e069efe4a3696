"""Every algorithm does what its kind says; wrong and unsafe schedules are refused with a reason."""

import dataclasses

import numpy as np
import pytest
from draws import pairwise
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlsim.collectives import (
    KINDS,
    Schedule,
    algorithm_names,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    build,
    check,
    messages,
    on_ranks,
    parallel,
    reduce,
    reduce_scatter,
    reorder,
    sequence,
    split,
)
from ddlsim.collectives.check import validate
from ddlsim.errors import ConfigError

EVERY = [(kind, name) for kind in KINDS for name in algorithm_names(kind)]
SHAPES = [[1], [4], [1, 1, 1], [2, 2], [3, 3, 3], [8, 8], [4] * 5, [1, 2], [3, 1, 2], [5, 8, 4]]


def hosts_of(sizes):
    return [host for host, size in enumerate(sizes) for _ in range(size)]


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_every_algorithm_does_its_kind(kind, name):
    for n_ranks in range(1, 18):
        n_inside = 3 if kind == "all_reduce" or n_ranks % 3 == 0 else 1
        hosts = [r // n_inside for r in range(n_ranks)] if name == "hierarchical" else None
        schedule = build(name, n_ranks, nbytes=3e6, hosts=hosts, kind=kind)
        assert (schedule.n_ranks, schedule.kind) == (n_ranks, kind)
        assert (schedule.n_messages == 0) == (n_ranks == 1)
        check(schedule)


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, n in EVERY if k in ("broadcast", "reduce")])
def test_every_rank_can_be_the_root(kind, name):
    module = {"broadcast": broadcast, "reduce": reduce}[kind]
    for root in range(6):
        schedule = getattr(module, name)(6, root)
        assert schedule.root == root
        check(schedule)
    with pytest.raises(ConfigError, match=r"root = 6: must be a rank from 0 to 5"):
        getattr(module, name)(6, 6)


INSIDE = ["ring", "halving_doubling", "direct", "binomial_tree", "chain"]
BETWEEN = ["ring", "halving_doubling", "double_binary_tree", "parameter_server"]


@pytest.mark.parametrize(("sizes", "inside", "between"), pairwise(SHAPES, INSIDE, BETWEEN))
def test_hierarchies(sizes, inside, between):
    n_ranks, text = sum(sizes), f"hierarchical({inside}, {between})"
    if len(set(sizes)) > 1 and inside in ("ring", "halving_doubling", "direct"):
        with pytest.raises(ConfigError, match="groups of equal size"):
            build(text, n_ranks, hosts=hosts_of(sizes))
        return
    check(build(text, n_ranks, nbytes=1.5e6, hosts=hosts_of(sizes)))


def test_unequal_machines_reduce_through_leaders_by_default():
    hosts = hosts_of([3, 1, 2])
    check(build("hierarchical", 6, hosts=hosts))
    sent = build("hierarchical(binomial_tree, ring)", 6, hosts=hosts).bytes_sent(1.0)
    assert build("hierarchical", 6, hosts=hosts).bytes_sent(1.0) == pytest.approx(sent)


def test_machines_may_hold_their_ranks_in_any_order():
    hosts = [2, 0, 1, 1, 2, 0, 0, 1, 2]
    schedule = build("hierarchical", 9, hosts=hosts)
    check(schedule)
    first = schedule.lanes[0][0]
    assert all(hosts[s] == hosts[d] for s, d in zip(first.src, first.dst, strict=True))


def test_any_pair_of_functions_may_run_inside():
    groups = list(np.arange(15).reshape(3, 5))
    for down in (reduce_scatter.ring, reduce_scatter.recursive_halving, reduce_scatter.direct):
        for up in (all_gather.bruck, all_gather.recursive_doubling, all_gather.ring):
            check(all_reduce.hierarchical(15, (down, up), all_reduce.recursive_doubling, groups=groups))


def test_a_hierarchy_stays_small():
    """1,024 ranks in 128 groups of 8: two laps inside, two between."""
    schedule = build("hierarchical", 1024, hosts=[r // 8 for r in range(1024)])
    assert [(len(r.src), r.repeat) for r in schedule.lanes[0]] == [
        (1024, 7),
        (1024, 127),
        (1024, 127),
        (1024, 7),
    ]
    check(build("hierarchical", 128, hosts=[r // 8 for r in range(128)]))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_order_and_any_subgroup(data):
    kind, name = data.draw(st.sampled_from([e for e in EVERY if e[1] != "hierarchical"]))
    n_ranks = data.draw(st.integers(2, 12))
    order = data.draw(st.permutations(range(n_ranks)))
    schedule = build(name, n_ranks, nbytes=1e6, kind=kind)
    check(reorder(schedule, order))
    members = data.draw(st.permutations(range(20)))
    check(on_ranks(schedule, members[:n_ranks], 20))
    both = parallel(on_ranks(schedule, members[:n_ranks], 32), on_ranks(schedule, 20 + np.arange(n_ranks), 32))
    check(both)
    assert both.n_messages == 2 * schedule.n_messages
    assert sum(map(len, both.lanes)) == sum(map(len, schedule.lanes)), "rounds are shared"


@pytest.mark.parametrize("n_ranks", [2, 3, 6, 8])
def test_sequences_and_splits(n_ranks):
    check(sequence(reduce.chain(n_ranks, n_segments=3), broadcast.binomial(n_ranks), kind="all_reduce"))
    check(sequence(reduce_scatter.recursive_halving(n_ranks), all_gather.bruck(n_ranks), kind="all_reduce"))
    backwards = reorder(all_reduce.ring(n_ranks), np.arange(n_ranks)[::-1])
    both = split(all_reduce.ring(n_ranks), dataclasses.replace(backwards, groups=None), shares=[3, 1])
    check(both)
    size = [both.message_bytes(8.0 * n_ranks, lane[0]) for lane in both.lanes]
    assert size[0] == pytest.approx(6.0)
    assert size[1] == pytest.approx(2.0)
    check(split(all_reduce.halving_doubling(n_ranks), all_reduce.double_binary_tree(n_ranks, n_segments=2)))


def test_weighted_schedules_go_together_if_they_cut_alike():
    """Chunks of 1, 2 and 5 parts, once finer; the same as 2, 4 and 10. Chunks of 1, 2 and 6 are something else."""

    def weighted(*weight):
        return dataclasses.replace(all_reduce.ring(3), chunk_weight=np.array(weight, dtype=float))

    for schedule in (sequence(weighted(1, 2, 5), kind="all_reduce"), parallel(weighted(1, 2, 5))):
        assert schedule.bytes_sent(8.0) == pytest.approx(weighted(1, 2, 5).bytes_sent(8.0))
    both = sequence(weighted(1, 2, 5), weighted(2, 4, 10), kind="all_reduce")
    assert both.bytes_sent(8.0) == pytest.approx(2 * weighted(1, 2, 5).bytes_sent(8.0))
    for other in (weighted(1, 2, 6), weighted(1, 2, 5.001)):
        for pair in ((weighted(1, 2, 5), other), (other, weighted(1, 2, 5))):
            with pytest.raises(ConfigError, match="divide the buffer differently"):
                sequence(*pair, kind="all_reduce")


def test_combinations_that_cannot_work_say_why():
    ring = all_reduce.ring(4)
    with pytest.raises(ConfigError, match="rank 0 is in several"):
        parallel(ring, ring)
    with pytest.raises(ConfigError, match="a schedule has 2 lanes"):
        sequence(all_reduce.pipelined_ring(4), ring, kind="all_reduce")
    with pytest.raises(ConfigError, match="the same n_ranks"):
        sequence(ring, all_reduce.ring(5), kind="all_reduce")
    with pytest.raises(ConfigError, match=r"ranks = \[.*\]: must be distinct ranks"):
        reorder(ring, [0, 1, 1, 2])
    with pytest.raises(ConfigError, match="got 3 ranks for a schedule with 4"):
        on_ranks(ring, [0, 1, 2], 8)
    with pytest.raises(ConfigError, match="a all_to_all cannot be split"):
        split(all_to_all.direct(3), all_to_all.direct(3))
    with pytest.raises(ConfigError, match="one lane and one buffer"):
        build("hierarchical(ring, pipelined_ring)", 4, hosts=[0, 0, 1, 1])


@pytest.mark.parametrize("name", algorithm_names("all_reduce"))
def test_all_reduce_sends_no_less_than_the_lower_bound(name):
    """Patarasuk and Yuan 2009, theorem 1: 2 (p-1)/p S on some rank, so 2 (p-1) S in all."""
    for n_ranks in range(2, 18):
        hosts = [r // 3 for r in range(n_ranks)] if name == "hierarchical" else None
        sent = build(name, n_ranks, nbytes=2e6, hosts=hosts).bytes_sent(1.0)
        assert sent.shape == (n_ranks,)
        assert sent.sum() >= 2 * (n_ranks - 1) * (1 - 1e-12)


@pytest.mark.parametrize("n_ranks", [2, 4, 8, 16])
def test_ring_and_halving_doubling_send_the_least(n_ranks):
    for name in ("ring", "pipelined_ring", "halving_doubling", "torus_2d", f"parameter_server({n_ranks})"):
        sent = build(name, n_ranks).bytes_sent(3.0)
        assert sent == pytest.approx(np.full(n_ranks, 6 * (n_ranks - 1) / n_ranks))


def test_bytes_follow_the_chunk_weights():
    """Blocks of 1, 2 and 5 bytes on a ring of three: rank r sends all blocks but r in the first lap (it keeps
    its own sum), and all but r+1 in the second."""
    weight = np.array([1.0, 2.0, 5.0])
    schedule = dataclasses.replace(all_reduce.ring(3), chunk_weight=weight)
    check(schedule)
    assert schedule.bytes_sent(8.0) == pytest.approx([(8 - 1) + (8 - 2), (8 - 2) + (8 - 5), (8 - 5) + (8 - 1)])
    assert schedule.message_bytes(8.0, schedule.lanes[0][0], 0).tolist() == [5, 1, 2]
    assert schedule.message_bytes(8.0, schedule.lanes[0][0], 1).tolist() == [2, 5, 1]


def star(n_ranks):
    """A user's collective: everybody sends to rank 0, which sends the sum back."""
    others = np.arange(1, n_ranks)
    if n_ranks == 1:
        return Schedule(1, 1, ())
    collect = messages(others, 0, reduce=True)
    answer = messages(np.zeros_like(others), others, reduce=False)
    return Schedule(n_ranks, 1, ((collect, answer),))


def test_a_collective_of_ones_own_takes_ten_lines():
    for n_ranks in (1, 2, 9):
        assert build(star, n_ranks).n_messages == 2 * (n_ranks - 1)
    assert build("test_collectives_check:star", 5).n_messages == 8
    check(build(lambda n: all_reduce.hierarchical(n, between=star, groups=np.arange(n).reshape(2, -1)), 6))


def test_large_user_schedules_are_proved_on_fewer_ranks():
    assert build(lambda n: all_reduce.ring(n), 4096).n_ranks == 4096

    def wrong(n_ranks):
        return dataclasses.replace(all_reduce.ring(n_ranks), lanes=(all_reduce.ring(n_ranks).lanes[0][:1],))

    with pytest.raises(ConfigError, match=r"'wrong' for 64 ranks: .*counted 0 times"):
        build(wrong, 4096)


def first_round(schedule, **changes):
    (first, *rest), *others = schedule.lanes
    return dataclasses.replace(schedule, lanes=((dataclasses.replace(first, **changes), *rest), *others))


RING = all_reduce.ring(4)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            first_round(RING, dst=np.array([1, 2, 3, 4])),
            "lane 0, round 0: dst 4 is out of range; it must be from 0 to 3",
        ),
        (first_round(RING, dst=np.array([1, 1, 3, 0])), "lane 0, round 0: rank 1 sends to itself"),
        (first_round(RING, start=np.array([3, 0, 1, 9])), "lane 0, round 0: start 9 is out of range"),
        (first_round(RING, count=np.array([1, 1, 1, 0])), "count 0 is out of range; it must be from 1 to 4"),
        (first_round(RING, count=np.ones(3, dtype=np.int64)), "count must be an int64 array of the same length as src"),
        (first_round(RING, slots=np.array([0, 4])), "slots contain the same chunk twice"),
        (first_round(RING, slots=np.array([0, 1])), "count must equal the number of slots, 2"),
        (first_round(RING, repeat=0), "remove the round"),
        (dataclasses.replace(RING, kind="allreduce"), "unknown kind of collective 'allreduce'; did you mean"),
        (dataclasses.replace(RING, chunk_weight=np.ones(3)), "chunk_weight must have 4 positive values"),
        (dataclasses.replace(RING, chunk_weight=np.zeros(4)), "chunk_weight must have 4 positive values"),
        (dataclasses.replace(RING, groups=(np.array([0, 0]),)), "groups must contain distinct ranks from 0 to 3"),
        (dataclasses.replace(RING, groups=(np.array([-1, 0]),)), "groups must contain distinct ranks from 0 to 3"),
        (dataclasses.replace(RING, groups=(np.array([3, 4]),)), "groups must contain distinct ranks from 0 to 3"),
        (dataclasses.replace(RING, groups=(np.array([0, 1]), np.array([1, 2]))), "groups must contain distinct ranks"),
        (dataclasses.replace(all_gather.ring(4), groups=(np.arange(3),)), "4 chunks cannot be divided into 3 equal"),
        (dataclasses.replace(RING, copies=3), "copies=3 requires"),
        *[
            (dataclasses.replace(RING, copies=2, kind=kind), "copies=2 requires an all_reduce")
            for kind in KINDS
            if kind != "all_reduce"
        ],
        (dataclasses.replace(RING, root=4), "root = 4: must be a rank"),
    ],
)
def test_malformed_schedules_are_refused(broken, message):
    with pytest.raises(ConfigError, match=message):
        validate(broken)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            first_round(RING, reduce=False),
            "chunk 0 of rank 0 ends up with the contribution of rank 0 .*last written in lane 0, round 0",
        ),
        (first_round(RING, repeat=2), "counted 0 times instead of 1"),
        (first_round(all_reduce.recursive_doubling(4), repeat=2), "counted 2 times instead of 1"),
        (dataclasses.replace(RING, lanes=()), "chunk 0 of rank 0 .*never written"),
        (dataclasses.replace(all_reduce.ring(3), kind="all_to_all"), "contribution of rank"),
        (dataclasses.replace(reduce.binomial(4), kind="all_reduce"), "chunk 0 of rank 1"),
        (dataclasses.replace(reduce.binomial(4, 1), root=0), "chunk 0 of rank 0"),
        (dataclasses.replace(all_to_all.pairwise(4), kind="all_gather"), "chunk 1 of rank 0"),
    ],
)
def test_schedules_that_do_not_do_their_kind_are_refused(broken, message):
    with pytest.raises(ConfigError, match=message):
        check(broken)


def test_double_counting_is_found_among_many_ranks_too():
    """300 ranks are replayed on fingerprints instead of counts."""
    folding = all_reduce.halving_doubling(300)
    check(folding)
    with pytest.raises(ConfigError, match="ends up with contributions missing or counted twice"):
        check(first_round(folding, repeat=2))


def test_races_are_refused():
    """Two lanes on one chunk, and two copies into one chunk, depend on who comes first."""
    up, down = messages([1], 0, reduce=True), messages([0], 1, reduce=False)
    check(Schedule(2, 1, ((up, down),)))
    with pytest.raises(ConfigError, match="lanes 0 and 1 both use chunk 0 of rank 0"):
        check(Schedule(2, 1, ((up,), (down,))))
    both = messages([1, 2], 0, reduce=False)
    with pytest.raises(ConfigError, match="lane 0, round 0: two messages overwrite chunk 0 of rank 0"):
        check(Schedule(3, 1, ((both,),), kind="broadcast"))
    # two lanes that only add into the same chunk commute
    check(Schedule(3, 1, ((messages([1], 0, reduce=True),), (messages([2], 0, reduce=True),)), kind="reduce"))


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("rnig", "unknown all_reduce algorithm 'rnig'; did you mean 'ring'"),
        ("ring)", "is not a valid name"),
        ("hierarchical", "'hierarchical' requires the machine of each rank; pass hosts"),
        ("parameter_server(9)", "n_servers = 9: must be from 1 to 4"),
        ("parameter_server(5)", "n_servers = 5: must be from 1 to 4"),
        ("parameter_server(0)", "n_servers = 0: must be a positive integer"),
        ("ring(3)", "ring takes at most 0 arguments"),
        ("torus_2d(3, 2)", "3 x 2 does not equal the number of ranks, 4"),
        ("torus_2d(0)", "torus_2d: rows = 0: must be a positive integer"),
        ("no_such_package:ring", "No module named 'no_such_package'"),
        ("test_collectives_check:nothing", "has no attribute 'nothing'"),
        ("test_collectives_check:RING", "is of type Schedule; expected a function"),
        (lambda n: 42, "(n_ranks) -> Schedule: it returned 42"),
        (lambda n: all_reduce.ring(n + 1), "returned a schedule for 5 ranks of kind 'all_reduce'"),
        (lambda n: reduce.binomial(n), "of kind 'reduce'; expected 'all_reduce'"),
        (lambda n: first_round(all_reduce.ring(n), repeat=2), "counted 0 times instead of 1"),
    ],
)
def test_build_says_what_is_wrong(algorithm, message):
    with pytest.raises(ConfigError) as caught:
        build(algorithm, 4)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_arguments_by_keyword_can_be_written_in_a_text_too():
    """The second argument of a chain is the number of segments, which Python takes by keyword only."""
    (lane,) = build("chain(1, 64)", 4, kind="broadcast").lanes
    (same,) = broadcast.chain(4, 1, n_segments=64).lanes
    assert [(r.src.tolist(), r.repeat, r.shift) for r in lane] == [(r.src.tolist(), r.repeat, r.shift) for r in same]
    assert build("chain(1, 64)", 4, kind="broadcast").n_chunks == 64
    with pytest.raises(ConfigError, match="chain takes at most 2 arguments"):
        build("chain(1, 64, 2)", 4, kind="broadcast")


@pytest.mark.parametrize("function", [lambda: RING, lambda n, more: RING, max])
def test_a_function_that_cannot_be_called_with_a_number_of_ranks_is_refused(function):
    with pytest.raises(ConfigError, match=r"must be callable as function\(n_ranks\) -> Schedule"):
        build(function, 4)


def test_build_refuses_wrong_sizes_and_names():
    with pytest.raises(ConfigError, match="n_ranks = 0: must be an integer from 1 to 1000000"):
        build("ring", 0)
    with pytest.raises(ConfigError, match="hosts has 2 entries for 3 ranks"):
        build("ring", 3, hosts=[0, 1])
    with pytest.raises(ConfigError, match="did you mean 'all_gather'"):
        algorithm_names("allgather")
    with pytest.raises(ConfigError, match="unknown algorithm inside groups 'rings'; did you mean 'ring'"):
        build("hierarchical(rings, ring)", 4, hosts=[0, 0, 1, 1])
    with pytest.raises(ConfigError, match=r"must contain each rank from 0 to 3 exactly once"):
        all_reduce.hierarchical(4, groups=[np.array([0, 1]), np.array([1, 2])])


def test_segments_follow_the_bytes_unless_given():
    assert build("double_binary_tree", 4, nbytes=2.1 * 2**20).n_chunks == 2 * 5
    assert build("double_binary_tree(3)", 4, nbytes=2.1 * 2**20).n_chunks == 2 * 3
    assert build("chain", 4, nbytes=1e12, kind="broadcast").n_chunks == 1024
    assert build("chain", 4, kind="broadcast").n_chunks == 50  # of 25 MiB, a bucket of PyTorch's DDP
