"""NCCL sweeps from machine and size alone: each family, and what was fitted."""

import pytest

from accuracy import sweeps
from accuracy.rows import mean_error
from ddlsim import load_cluster


@pytest.mark.parametrize(
    ("family", "limit"), [("efa", 0.07), ("fastrak", 0.08), ("nvls", 0.065), ("infiniband", 0.2), ("one_thread", 0.115)]
)
def test_families(family, limit):
    """Of the rows that nothing was fitted to."""
    assert mean_error(sweeps.families()[family]) < limit


def test_all_rows_together_reach_the_target():
    judged = [row for row in sweeps.rows() if not row.fitted_on]
    assert len(judged) > 150
    assert mean_error(judged) < 0.115


def test_launches_of_all_reduces_predict_those_of_reduce_scatters():
    """34 us and 1.7 us per channel, up to 24 of them; nothing is fitted to the reduce-scatters."""
    assert sweeps.launches() == pytest.approx((33.8e-6, 1.68e-6), rel=2e-3)
    assert [sweeps.n_channels(kib * 2**10) for kib in (1, 64, 700, 1024)] == [1, 2, 21, 24]
    rows = [row for row in sweeps.families()["one_thread"] if "reduce_scatter" in row.case]
    assert rows[15].what == "1 MiB"
    assert max(abs(row.error) for row in rows[:16]) < 0.035


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
