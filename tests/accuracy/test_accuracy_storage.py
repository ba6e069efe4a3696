"""Workers of the mini-cluster that read from one storage host."""

import pytest

from accuracy import minicluster_storage as storage
from accuracy.minicluster import Measurement, read
from accuracy.rows import mean_error

ROWS = read(storage.DATA / "storage.csv")


def test_with_prefetching_every_row_is_within_3_percent() -> None:
    rows = [row for row in storage.rows() if "prefetch0" not in row.case]
    assert len(rows) == 26
    assert max(abs(row.error) for row in rows) < 0.03
    assert mean_error(rows) < 0.005


def test_no_row_is_declined_and_readers_separate_as_measured() -> None:
    """The steps of one row have a median of 102 ms and a mean of 92 ms; all others are within 2 %."""
    assert not storage.table().omitted
    rows = storage.rows()
    assert len(rows) == 39
    assert mean_error(rows) < 0.01
    assert sorted(abs(row.error) for row in rows)[-2] < 0.02


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.extra["prefetch"] == "0"], ids=lambda row: f"{row.n} x {row.where}"
)
def test_without_prefetching_rows_are_between_the_closed_forms(row: Measurement) -> None:
    """Up to the software of a message of 8 bytes, less than that of the large ones on which it is calibrated."""
    least, most = storage.bounds(row)
    assert least - 0.4e-3 <= row.seconds <= most
    assert least * (1.0 - 1e-6) <= storage.simulated(row).step_time <= most * (1.0 + 1e-6)


def test_the_first_batch_takes_the_sum_of_both() -> None:
    for row in ROWS:
        if row.n == 1:
            first = storage.simulated(row).recorder.updates[0][0]
            assert first == pytest.approx(float(row.extra["first_step_s"]), rel=0.03)
