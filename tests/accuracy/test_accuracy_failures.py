"""Workers that were stopped on real TCP: whole runs, and updates of servers, from calibration alone."""

from accuracy.minicluster_failures import failure_rows
from accuracy.rows import mean_error


def test_stopped_workers_of_the_mini_cluster() -> None:
    rows = failure_rows()
    assert len(rows) == 14
    assert mean_error(rows) < 0.015
    assert max(abs(row.error) for row in rows) < 0.03


def test_what_a_stop_inside_a_collective_costs_is_what_was_measured() -> None:
    """A ring goes on while one host stands still, until all wait for it: 0.05 s cost 32 ms, and 48 ms in compute."""
    runs = {row.what: row for row in failure_rows() if row.case.endswith("ring_every_step")}
    (inside,) = (row for what, row in runs.items() if "0.05 s in all_reduce" in what)
    (background,) = (row for what, row in runs.items() if "0.05 s in compute" in what)
    assert abs((background.predicted - inside.predicted) - (background.measured - inside.measured)) < 0.006
