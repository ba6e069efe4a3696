"""Numbers that tie share a place, and the rest decides."""

import math

import pytest

from ddlsim.ties import FLOOR, in_order, places, tie


@pytest.mark.parametrize(
    ("a", "b", "spread", "expected"),
    [
        (1.0, 1.0, 0.0, True),
        (1.0, 1.0 + 0.9 * FLOOR, 0.0, True),
        (1.0, 1.0 + 1.1 * FLOOR, 0.0, False),
        (1e-30, 1e-30 * (1.0 + 1e-10), 0.0, True),  # relative, not absolute
        (0.0, 1e-30, 0.0, False),
        (100.0, 100.9, 0.01, True),
        (100.0, 101.1, 0.01, False),
        (-100.0, -100.9, 0.01, True),
        (math.inf, math.inf, 0.0, True),
        (1.0, math.inf, 0.5, False),
        (-1.0, 1.0, 0.9, False),
    ],
)
def test_tie(a: float, b: float, spread: float, expected: bool) -> None:
    assert tie(a, b, spread) is expected
    assert tie(b, a, spread) is expected


def test_the_smallest_leads_and_takes_those_that_tie_with_it() -> None:
    """1.00 leads 1.009; 1.018 ties with the second but not with the leader, and leads the next."""
    assert places([1.018, 1.0, 1.009], [0.01] * 3) == [1, 0, 0]
    assert places([3.0, 1.0, 2.0, 1.0]) == [2, 0, 1, 0]
    assert places([]) == []
    assert places([math.inf, 1.0, math.inf]) == [1, 0, 1]


def test_the_larger_spread_of_the_two_counts() -> None:
    """1.05 is unsure by 10 % and ties with the leader; 1.02 is sure and does not, although it lies between them."""
    assert places([1.0, 1.02, 1.05], [0.0, 0.0, 0.1]) == [0, 1, 0]


def test_places_do_not_depend_on_the_order_in_which_values_are_given() -> None:
    values = [1.0 + 0.003 * i for i in range(20)] + [-1.0, 0.0]
    spreads = [0.01, 0.0] * 11
    straight = places(values, spreads)
    turned = places(values[::-1], spreads[::-1])
    assert straight == turned[::-1]
    assert places([1.0, 1.0, 1.005], [0.0, 0.01, 0.0]) == places([1.0, 1.0, 1.005], [0.01, 0.0, 0.0]) == [0, 0, 0]
    assert straight[-2:] == [0, 1]


def test_what_ties_is_ordered_by_the_next_key_and_then_stays() -> None:
    rows = [("a", 1.0, 5.0), ("b", 1.0 + 1e-12, 4.0), ("c", 0.5, 9.0), ("d", 1.0, 4.0)]
    ordered = in_order(rows, lambda row: row[1:], lambda row: 0.0)
    assert [name for name, *_ in ordered] == ["c", "b", "d", "a"]
    assert [name for name, *_ in in_order(rows, lambda row: row[2:], lambda row: 0.3)] == ["a", "b", "d", "c"]
