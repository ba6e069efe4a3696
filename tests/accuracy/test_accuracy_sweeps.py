"""NCCL sweeps from machine and size alone: each family, and what was fitted."""

import pytest

from accuracy import sweeps
from accuracy.rows import mean_error
from ddlsim import load_cluster


@pytest.mark.parametrize(
    ("family", "limit"), [("efa", 0.07), ("fastrak", 0.08), ("nvls", 0.065), ("infiniband", 0.2), ("one_thread", 0.17)]
)
def test_families(family, limit):
    """Of the rows that nothing was fitted to."""
    assert mean_error(sweeps.families()[family]) < limit


def test_all_rows_together_reach_the_target():
    judged = [row for row in sweeps.rows() if not row.fitted_on]
    assert len(judged) > 150
    assert mean_error(judged) < 0.15


def test_switches_that_add_up_are_within_two_percent_for_large_buffers():
    """4 to 8 H200, 8 GiB: 363 to 473 GB/s of bus bandwidth."""
    rows = [row for row in sweeps.families()["nvls"] if "h200" in row.case]
    assert [row.what for row in rows] == ["8 GiB"] * 5
    assert all(abs(row.error) < 0.025 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(sweeps.FITTED))
def test_the_topologies_have_what_was_fitted(family):
    name = sweeps.FITTED[family][0]
    us, error = sweeps.fitted(family)
    assert load_cluster(name).details.overhead.max() == pytest.approx(us * 1e-6)
    assert error < 0.08
