"""Gloo's schedules: their messages, their closed forms, what goes into headers."""

import dataclasses
import math

import numpy as np
import pytest
from collectives_reference import execute

from ddlsim.collectives import KINDS, algorithm_names, build, check, messages
from ddlsim.collectives.all_reduce import binomial_tree, gloo_ring, halving_doubling
from ddlsim.collectives.broadcast import gloo_broadcast
from ddlsim.collectives.gather import gloo_gather
from ddlsim.errors import ConfigError

MIB = 2**20
ALPHA, BETA = 1e-4, 8e-8
READY = 48


@pytest.mark.parametrize(
    ("n_ranks", "nbytes", "segments"),
    [(2, 1, 2), (2, 4 * MIB, 2), (2, 4 * MIB + 1, 4), (4, 8 * MIB, 2), (4, 16 * MIB, 4), (4, 16 * MIB + 1, 6)],
)
def test_a_chunk_has_two_segments_of_at_most_one_mib_or_more(n_ranks, nbytes, segments):
    """gloo/allreduce.cc: the number of segments is that of MiB, rounded up to a multiple of 2 p."""
    assert build("gloo_ring", n_ranks, nbytes=nbytes).n_chunks == n_ranks * segments


@pytest.mark.parametrize("n_ranks", [2, 3, 8])
@pytest.mark.parametrize("nbytes", [MIB, 16 * MIB])
def test_two_segments_in_flight_hide_each_others_handshakes(n_ranks, nbytes):
    """A lap takes a handshake and the bytes; a segment has two notifications and a preamble besides its data."""
    schedule = build("gloo_ring", n_ranks, nbytes=nbytes)
    laps = 2 * (2 * ALPHA + (n_ranks - 1) / n_ranks * nbytes * BETA)
    took = max(execute(schedule, nbytes, ALPHA, BETA))
    headers = schedule.n_messages / n_ranks * READY * BETA
    assert laps < took <= (laps + headers) * (1 + 1e-12)


def test_segments_shorter_than_the_handshake_leave_the_link_idle():
    """A lane then takes a handshake and a transfer for every segment."""
    schedule = build("gloo_ring", 8, nbytes=1600)  # 100 B a segment
    assert max(execute(schedule, 1600, ALPHA, BETA)) > 14 * 2 * ALPHA


@pytest.mark.parametrize(("n_ranks", "transfers"), [(2, 1), (3, 2), (4, 3), (8, 6)])
def test_a_parent_broadcasts_to_all_its_children_at_once(n_ranks, transfers):
    """1, 2, 3, 6 messages' time at 2, 3, 4, 8 ranks: with one child at a time 8 ranks would take 3."""
    took = max(execute(gloo_broadcast(n_ranks), 100 * MIB, 0.0, BETA))
    assert took == pytest.approx(transfers * 100 * MIB * BETA, rel=1e-5)


def test_the_root_receives_all_blocks_at_once():
    took = max(execute(gloo_gather(4), 4 * MIB, ALPHA, BETA))
    assert took == pytest.approx(2 * ALPHA + (3 * (MIB + READY) + 3 * READY) * BETA, rel=1e-9)


def test_an_answer_costs_one_more_latency_a_level():
    silent = max(execute(binomial_tree(8), MIB, ALPHA, BETA))
    answering = max(execute(binomial_tree(8, 1), MIB, ALPHA, BETA))
    # of the three levels, the last answer is not waited for by anybody but its own parent
    assert answering - silent == pytest.approx(3 * (ALPHA + BETA), rel=1e-6)
    check(binomial_tree(8, 1))


def test_halving_can_begin_with_the_far_partner():
    far = halving_doubling(8, "far")
    assert (far.lanes[0][0].dst - far.lanes[0][0].src).tolist() == [4] * 4 + [-4] * 4
    assert far.lanes[0][0].count.tolist() == [4] * 8
    assert np.array_equal(far.bytes_sent(8.0), halving_doubling(8).bytes_sent(8.0))
    with pytest.raises(ConfigError, match=r"halving_doubling: first = 'middle': must be 'near' or 'far'"):
        halving_doubling(8, "middle")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_that_gloo_has_is_found_by_name(kind):
    name = "gloo_ring" if kind == "all_reduce" else f"gloo_{kind}"
    assert name in algorithm_names(kind)
    check(build(name, 5, kind=kind))


def test_headers_are_not_part_of_the_buffer():
    schedule = gloo_ring(4)
    assert schedule.bytes_sent(1e6).sum() == pytest.approx(2 * 3 * 1e6)
    assert not schedule.message_bytes(1e6, schedule.lanes[0][0]).any()


@pytest.mark.parametrize("header", [-1.0, math.nan, math.inf])
def test_a_header_is_a_size(header):
    with pytest.raises(ConfigError, match=r"Round: header = .*: must be finite and not negative"):
        dataclasses.replace(gloo_broadcast(2).lanes[0][0], header=header)


def test_a_message_of_nothing_needs_a_header():
    schedule = dataclasses.replace(gloo_broadcast(2), lanes=((messages([0], [1], 0, 0, reduce=False),),))
    with pytest.raises(ConfigError, match=r"count 0 is out of range; it must be from 1 to 1"):
        check(schedule)
