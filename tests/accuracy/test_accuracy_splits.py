"""Split models that were measured: torchgpipe's pipelines, and those of the mini-cluster."""

import statistics
from functools import cache

import pytest

from accuracy import minicluster_splits as splits
from accuracy import torchgpipe
from accuracy.minicluster import read
from accuracy.rows import Row, mean_error


@cache
def pipelines() -> list[Row]:
    return splits.pipeline_rows()


@cache
def hybrids() -> list[Row]:
    return splits.hybrid_rows()


def test_pipelines_of_the_mini_cluster() -> None:
    rows = pipelines()
    assert len(rows) == 48
    assert mean_error(rows) < 0.02
    for name in ("gpipe", "1f1b", "zb"):
        assert statistics.median(abs(row.error) for row in rows if name in row.case) < 0.015


@pytest.mark.parametrize(("case", "n"), [
    ("pipeline_x_data", 8), ("tensor_parallel", 6), ("sharded_data", 8), ("bucketed_data", 3),
])  # fmt: skip
def test_hybrids_of_the_mini_cluster(case: str, n: int) -> None:
    rows = [row for row in hybrids() if row.case.startswith(case)]
    assert len(rows) == n
    assert mean_error(rows) < 0.03


def test_messages_that_calibrate() -> None:
    """Latency is the median over messages: none of 64 KiB or more is off by more than a tenth of a millisecond."""
    told = splits.software()
    for row in read(splits.DATA / "calibration.csv"):
        if row.algorithm == "one_way" and row.nbytes >= 65536:
            seconds = told.message + (splits.wire(row.nbytes) - 4542) / (row.mbps * 1e6 / 8)
            assert seconds == pytest.approx(row.seconds, abs=1e-4)


def test_orders_as_the_data_say() -> None:
    assert splits.passes("gpipe", 2, 2, 0) == [("F", 0), ("F", 1), ("B", 0), ("B", 1)]
    assert splits.passes("1f1b", 3, 3, 1) == [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)]
    assert splits.passes("zb", 2, 2, 1) == [("F", 0), ("B", 0), ("F", 1), ("B", 1), ("W", 0), ("W", 1)]
    assert splits.passes("zb", 2, 3, 0) == [
        ("F", 0), ("F", 1), ("B", 0), ("W", 0), ("F", 2), ("B", 1), ("W", 1), ("B", 2), ("W", 2)
    ]  # fmt: skip


def test_modules_of_torchgpipe() -> None:
    """As many as the benchmarks' balances add up to; the cells of AmoebaNet-D begin where its blocks do."""
    assert {model: len(torchgpipe.first_layers(model)) for model in ("amoebanet-d", "unet", "resnet101")} == {
        "amoebanet-d": 24, "unet": 241, "resnet101": 370,
    }  # fmt: skip
    assert all(sum(run.modules) == len(torchgpipe.first_layers(run.model)) for run in torchgpipe.RUNS.values())


def test_torchgpipe() -> None:
    rows = torchgpipe.rows()
    assert mean_error(rows) < 0.10
    misses = [row for row in rows if not row.fitted_on and abs(row.error) > 0.05]
    assert [(row.case, row.what) for row in misses] == [("amoebanet_d_18_256", "n4 m4")]
    assert all(abs(row.error) < 1e-3 for row in rows if row.fitted_on)
