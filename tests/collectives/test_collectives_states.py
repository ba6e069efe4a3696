"""Schedules played round by round: what ranks hold is counted, and ends in what the kind promises."""

import dataclasses

import numpy as np
import pytest

from ddlsim.collectives import (
    KINDS,
    algorithm_names,
    all_reduce,
    broadcast,
    build,
    messages,
    on_ranks,
    parallel,
    split,
    states,
)
from ddlsim.collectives.states import MOST_COUNTS, beginning
from ddlsim.errors import ConfigError

EVERY = [(kind, name) for kind in KINDS for name in algorithm_names(kind)]


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_every_algorithm_ends_with_what_its_kind_promises(kind, name):
    schedule = build(name, 6, nbytes=3e6, hosts=[r // 3 for r in range(6)], kind=kind)
    played = list(states(schedule))
    assert [state.round for state in played] == list(range(len(played)))
    assert not played[0].done.all()
    assert played[-1].done.all()
    carried = [schedule.chunks(round, k)[1] for lane in schedule.lanes for round in lane for k in range(round.repeat)]
    assert sum(len(state.chunk) for state in played) == sum(map(len, carried))


def test_a_ring_of_three_by_hand():
    start, first, second, third, last = states(all_reduce.ring(3))
    assert start.contributors.tolist() == [[1, 1, 1]] * 3
    assert not len(start.src)
    assert (first.dst - first.src).tolist() == [1, 1, -2]
    assert first.reduced.all()
    r, c = int(first.dst[0]), int(first.chunk[0])
    assert first.counts[r, c].tolist() == [1, 1, 0]  # rank 0's and rank 1's own
    assert first.contributors.sum() == 9 + 3
    assert second.contributors.max(axis=1).tolist() == [3, 3, 3]
    assert second.whole.sum() == 3
    assert not third.reduced.any()
    assert third.whole.sum() == 6
    assert last.whole.all()
    assert last.done.all()
    assert (last.counts == 1).all()


def test_copies_kept_side_by_side_count_as_one_buffer():
    last = list(states(all_reduce.naive_ring(3)))[-1]
    assert last.counts.shape == (3, 1, 3)
    assert (last.counts == 1).all()
    assert last.done.all()


def test_lanes_go_beside_each_other():
    both = split(all_reduce.ring(3), all_reduce.parameter_server(3))
    assert [sorted(set(state.lane.tolist())) for state in states(both)] == [[], [0, 1], [0, 1], [0], [0]]


def test_ranks_with_nothing_in_common_do_not_wait_for_each_other():
    both = parallel(on_ranks(all_reduce.ring(2), [0, 1], 5), on_ranks(all_reduce.ring(3), [2, 3, 4], 5))
    played = list(states(both))
    assert [len(set(state.src.tolist())) for state in played] == [0, 5, 5, 3, 3]
    assert played[2].done.tolist() == [True, True, False, False, False]
    assert played[-1].done.all()


def test_what_is_wrong_is_played_as_it_is():
    """A contribution counted twice is not whole, nor is one that is lacking."""
    twice = dataclasses.replace(all_reduce.ring(2), n_chunks=1, lanes=((messages([0], [1], reduce=True, repeat=2),),))
    last = list(states(twice))[-1]
    assert last.counts[1, 0].tolist() == [2, 1]
    assert not last.done.any()
    assert np.array_equal(last.counts[0, 0], [1, 0])


def test_what_nobody_is_promised_does_not_count():
    played = list(states(broadcast.binomial(4)))
    assert [int(state.done.sum()) for state in played] == [1, 2, 4]
    assert played[0].required.all()
    assert played[0].whole.sum() == played[0].whole[0].sum()


@pytest.mark.parametrize("name", ["ring", "double_binary_tree", "hierarchical", "pipelined_ring"])
def test_the_beginning_of_a_schedule_does_its_first_rounds(name):
    schedule = build(name, 6, nbytes=3e6, hosts=[r // 3 for r in range(6)])
    played = list(states(schedule))
    for state in played:
        last = list(states(beginning(schedule, state.round)))[-1]
        assert last.round == state.round
        assert np.array_equal(last.counts, state.counts)
    assert beginning(schedule, played[-1].round).n_messages == schedule.n_messages


def test_too_many_contributions_and_malformed_schedules_are_refused():
    with pytest.raises(ConfigError, match=rf"101 ranks with 101 chunks have 1,030,301 .* limit of {MOST_COUNTS:,}"):
        states(all_reduce.ring(101))
    wrong = dataclasses.replace(all_reduce.ring(2), lanes=((messages([0], [2], reduce=True),),))
    with pytest.raises(ConfigError, match="dst 2 is out of range"):
        states(wrong)
