"""Strategies of the mini-cluster that communicate less."""

import dataclasses

import pytest

from accuracy import minicluster_lowcomm as lowcomm
from accuracy.minicluster import read
from accuracy.rows import mean_error

ROWS = {(row.algorithm, row.n, row.nbytes, str(row.extra)): row for row in read(lowcomm.DATA / "lowcomm.csv")}


def test_every_row_is_predicted() -> None:
    assert not lowcomm.table().omitted
    assert len(lowcomm.table().rows) == len(ROWS) == 40


def test_local_sgd_and_compressed_exchanges_are_within_3_percent() -> None:
    rows = [row for row in lowcomm.rows() if not row.case.startswith("neighbours")]
    assert len(rows) == 24
    assert mean_error(rows) < 0.01
    assert max(abs(row.error) for row in rows) < 0.03


def test_neighbours_take_the_fair_share_and_up_to_6_ms_more() -> None:
    rows = [row for row in lowcomm.rows() if row.case.startswith("neighbours")]
    assert len(rows) == 8
    for row in rows:
        assert -0.5e-3 < row.measured - row.predicted < 10e-3


def test_gossip_is_within_2_percent() -> None:
    assert len(lowcomm.gossip_rows()) == 8
    assert mean_error(lowcomm.gossip_rows()) < 0.005
    assert max(abs(row.error) for row in lowcomm.gossip_rows()) < 0.02


@pytest.mark.parametrize("algorithm", ["local_blocking", "local_overlapped"])
def test_a_round_of_local_sgd_is_the_sum_or_the_longer_of_both(algorithm: str) -> None:
    """Of computing and of the ring."""
    row = next(row for row in ROWS.values() if row.algorithm == algorithm and row.n == 2)
    ring = lowcomm.predicted(dataclasses.replace(row, algorithm="local_blocking", extra=row.extra | {"compute_s": "0"}))
    for compute in (0.005, 0.1):
        seconds = lowcomm.predicted(dataclasses.replace(row, extra=row.extra | {"compute_s": str(compute)}))
        alone = int(row.extra["local_steps"]) * compute
        expected = alone + ring if algorithm == "local_blocking" else max(alone, ring)
        assert seconds == pytest.approx(expected, rel=0.02)
