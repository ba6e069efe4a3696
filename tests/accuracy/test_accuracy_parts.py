"""The small models of the accuracy report against hand calculations."""

import dataclasses
import math

import pytest

from accuracy.aws import INITIAL_WINDOW, Transport
from accuracy.collectives import Pieces
from accuracy.rows import Row, mean_error


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
