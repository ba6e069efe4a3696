"""The small models of the accuracy report against hand calculations."""

import dataclasses
import math

import pytest

from accuracy.aws import INITIAL_WINDOW, Transport
from accuracy.collectives import Pieces
from accuracy.gloo import SEGMENT_NBYTES, ring_all_reduce
from accuracy.rows import Row, mean_error
from ddlsim import collective_time, load_cluster
from ddlsim.cluster import star
from ddlsim.collectives.check import check


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 5])
def test_gloo_ring_adds_up_everything_once(n_ranks: int) -> None:
    schedule = ring_all_reduce(n_ranks, 3.5 * n_ranks * SEGMENT_NBYTES)
    data = tuple(tuple(round for round in lane if round.count.all()) for lane in schedule.lanes)
    check(dataclasses.replace(schedule, lanes=data))  # without the messages that carry nothing


def test_gloo_ring_waits_for_every_segment() -> None:
    """Latency 10 ms, 4 segments of 1 MiB of 1 ms each per rank, 4 ranks: in either lane 6 steps of 2 segments, each
    with a "ready" (10 ms), the latency of the data (10 ms) and 1 ms; the second lane starts 10 ms later."""
    rate = SEGMENT_NBYTES / 1e-3
    cluster = load_cluster(star(4, bandwidth=rate, latency=5e-3))
    nbytes = 4 * 4 * SEGMENT_NBYTES
    assert collective_time(cluster, ring_all_reduce(4, nbytes), nbytes) == pytest.approx(0.010 + 12 * 0.021, rel=1e-9)


def test_slow_start() -> None:
    """A window 8 times the initial one: 3 round trips pass, in which 7/8 of a round trip's bytes are sent."""
    delay = 1e-3 - 50e-6  # with the machines' own delay a round trip of 2 ms
    transport = Transport(1, 1.0, math.inf, math.inf, 8 * INITIAL_WINDOW)
    assert transport.bandwidth(delay, math.inf) == pytest.approx(8 * INITIAL_WINDOW / 2e-3)
    assert transport.slow_start(delay, math.inf) == pytest.approx((3 - 7 / 8) * 2e-3)
    assert dataclasses.replace(transport, window=INITIAL_WINDOW).slow_start(delay, math.inf) == 0.0


def test_pieces() -> None:
    pieces = Pieces((1e3, 2e3, 4e3), (1.0, 2.0, 8.0))
    assert [pieces(size) for size in (1e3, 1.5e3, 2e3, 3e3, 4e3, 5e3)] == pytest.approx([1.0, 1.5, 2.0, 5.0, 8.0, 11.0])
    assert Pieces((2e3, 4e3), (1.0, 4.0))(1e3) == pytest.approx(0.5)  # not 2 - 1.5: the time would be negative at 0


def test_calibrated_rows_do_not_count() -> None:
    figures = [(1.0, 3.0, True), (2.0, 2.2, False), (2.0, 1.4, False)]
    rows = [Row("a", "b", measured, predicted, "s", fitted) for measured, predicted, fitted in figures]
    assert mean_error(rows) == pytest.approx((0.1 + 0.3) / 2)
    assert math.isnan(mean_error(rows[:1]))
