"""What intervals rest on: quantiles learned from the rows of the accuracy page, judged by leaving whole series out."""

import math

import numpy as np
import pytest

from accuracy import deviations
from accuracy.deviations import FILE, Scored, halves, learn, scored, series_left_out, sides, written
from accuracy.rows import Row, covered, mean_error
from ddlsim.cluster.calibrated import deviation, learned


def score(error, kind="run/all-reduce/x", series="a", own=0.0, unit="s"):
    """Return a prediction of 1 whose measurement is off by `error` (logarithm)."""
    return Scored(Row("c", "w", math.exp(error), 1.0, unit, False, kind=kind), series, error, own)


def test_quantiles_are_one_sided_and_every_series_counts_the_same():
    """By hand: of fewer than 39 rows the largest score; of a hundred in one series and one in another, that one."""
    assert sides([score(e) for e in (-0.1, 0.02, 0.3)]) == pytest.approx((0.1, 0.3))
    many = [score(0.01 * i, series="a") for i in range(100)]
    assert sides([*many, score(5.0, series="b")])[1] == pytest.approx(5.0)
    assert sides(many)[1] == pytest.approx(0.98)  # of 100 the one at 98.475 %
    assert sides(many)[0] == deviations.LEAST


def test_what_the_calibration_knows_by_itself_is_not_counted_twice():
    """By hand: an error of 5 % where the calibration is unsure of 3 % leaves 4 %."""
    assert score(0.05, own=0.03).score == pytest.approx(0.04)
    assert score(-0.02, own=0.03).score == 0.0
    row = score(0.05, own=0.03)
    judged = row.judged(learn([row])["run/all-reduce/x"])
    assert judged.interval[1] == pytest.approx(math.exp(0.05))


def test_few_rows_lean_on_the_kind_above():
    """By hand: of two rows a share of 2 / 22 is their own (logarithm); never less than their own largest score."""
    above = [score(0.2, "run/all-reduce/y", series=str(i)) for i in range(20)]
    found = learn([*above, score(0.01), score(0.02)])
    assert found["run/all-reduce"].slower == pytest.approx(0.2)
    assert found["run/all-reduce/x"].slower == pytest.approx(0.02 ** (2 / 22) * 0.2 ** (20 / 22))
    assert learn([*above, score(0.9)])["run/all-reduce/x"].slower == pytest.approx(0.9)


def test_whole_series_are_left_out():
    """A series that is off by 50 % is not in the interval that the others give."""
    rows = [score(0.01 * (i % 3), series=f"s{i}") for i in range(9)] + [score(0.5, series="odd")]
    judged = series_left_out(rows)
    assert [row.interval[0] <= row.measured <= row.interval[1] for row in judged] == 9 * [True] + [False]


def test_intervals_hold_on_families_with_known_scatter():
    """Ten series, each with a bias and scatter of its own, slower more often: 90 to 98 % hold, both ways."""
    random = np.random.default_rng(1)
    rows = []
    for i in range(30):
        bias = 0.05 * abs(random.standard_normal())
        rows += [score(bias + 0.02 * random.standard_normal(), series=str(i)) for _ in range(15)]
    for judge in (series_left_out, halves):
        inside, half = covered(judge(rows))
        assert 0.9 <= inside <= 0.99
        assert half < 3.5 * mean_error(judge(rows))


def test_rates_are_slower_when_they_are_less():
    slow = Row("c", "w", 80.0, 100.0, "images/s", False, kind="run/all-reduce/strong")
    (found,) = scored("x", [slow])
    assert found.error == pytest.approx(math.log(100 / 80))
    given = deviation(slow.kind)
    assert slow.interval == pytest.approx((100.0 * math.exp(-given.slower), 100.0 * math.exp(given.faster)))
    assert scored("x", [Row("c", "w", 80.0, 100.0, "images/s", True, kind=slow.kind)]) == []


def test_the_file_is_what_the_library_reads():
    """It has its command, every kind with those above it, and how many rows and series it rests on."""
    text = FILE.read_text(encoding="utf-8")
    assert "python -m accuracy.deviations" in text
    kinds = learned()
    assert all(kind.rpartition("/")[0] in kinds for kind in kinds)
    for kind in ("run/all-reduce/strong", "run/parameter-server/async", "gain/compression", "collective/ring/tcp-reno",
                 "run/all-reduce/weak-from-one-machine", "run/parameter-server/weak-from-one-machine"):  # fmt: skip
        assert kind in kinds
        assert "rows = " in next(line for line in text.splitlines() if line.startswith(f'"{kind}" = '))
    slower = [kind for kind, (fast, slow) in kinds.items() if slow > fast]
    assert len(slower) > 0.6 * len(kinds)
    rows = [score(0.1), score(-0.2, "gain/y", series="b")]
    assert '"gain/y" = { faster = 0.2000' in written(rows)
