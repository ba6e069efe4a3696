"""Jobs that shared a trunk on real TCP, and one beside a flow of somebody else, from calibration alone."""

from accuracy.minicluster_jobs import background_rows, shared_rows
from accuracy.rows import mean_error


def test_jobs_that_share_a_trunk() -> None:
    rows = [row for row in shared_rows() if row.case == "2_jobs"]
    assert len(rows) == 32
    assert mean_error(rows) < 0.01
    assert max(abs(row.error) for row in rows) < 0.03


def test_a_job_beside_a_flow() -> None:
    rows = background_rows()
    assert len(rows) == 7
    assert mean_error(rows) < 0.10
    # of each job, they are in the order of the measured ones
    for one in rows:
        for other in rows:
            if one.unchanged == other.unchanged and one.measured > other.measured:
                assert one.predicted > other.predicted
