"""The small models of the accuracy report against hand calculations."""

import dataclasses
import math

import pytest

from accuracy import aws, techniques
from accuracy.families import FAMILIES
from accuracy.report import judged, misses
from accuracy.rows import Row, mean_error
from ddlsim import load_device, load_model
from ddlsim.workload.compute import make_workload


def test_what_is_known_of_shaped_machines() -> None:
    """2 Gbit/s behind 5 ms: the calibrated latency and the delay, and what frames of 9,015 bytes leave of the rate."""
    row = aws.Measurement("p2p", "gloo", 2, 2.0**27, 5e-3, 2.5e8, 0.581)
    n_bytes = 2.0**27 / (8949 / 9015 * 2.5e8)
    wire, late = aws.parameters("gloo")["between.latency"] + 5e-3 + n_bytes, 0.045  # of slow start, about
    assert wire < aws.predicted(row).value < wire + late
    assert not row.calibrates
    assert dataclasses.replace(row, delay=0.0, rate=math.inf).calibrates


def test_calibrated_rows_do_not_count() -> None:
    figures = [(1.0, 3.0, True), (2.0, 2.2, False), (2.0, 1.4, False)]
    rows = [Row("a", "b", measured, predicted, "s", fitted) for measured, predicted, fitted in figures]
    assert mean_error(rows) == pytest.approx((0.1 + 0.3) / 2)
    assert math.isnan(mean_error(rows[:1]))


def test_tensors_that_dgc_compresses() -> None:
    """ResNet-152 has 154 weights of at least 16,384 elements; small tensors travel with them: no byte is lost."""
    work = make_workload(load_model("resnet152"), load_device("p40"), 1)
    buckets = techniques.TensorByTensor().buckets(work)
    assert len(buckets) == sum(nbytes >= 4 * 16384 for nbytes in work.tensor_nbytes) + 1 == 154 + 1
    assert sum(bucket.nbytes for bucket in buckets) == work.gradient_nbytes
    assert buckets[-1].nbytes < 4 * 16384  # the first normalisation's, with no large tensor after them


def test_one_device_of_the_same_kind() -> None:
    """ByteScheduler's cases take the compute time of PaddlePaddle's one-GPU rows: V100, 32 images, single precision."""
    case = {"model": {"name": "VGG-16"}, "worker": {"device": "NVIDIA V100 x 8 per machine"}, "system": ""}
    assert techniques.one_device(case, 32) == 0.12664
    assert techniques.one_device(case, 33) is None
    assert techniques.one_device({**case, "model": {"name": "Transformer"}}, 32) is None


def test_gains_are_judged_by_themselves() -> None:
    """1.08 for 1.1 misses a fifth of the gain, 1.09 for 1.1 a tenth; 0.99 has the wrong sign."""
    rows = [Row("a", str(x), 1.1, x, "x", fitted_on=False) for x in (1.08, 1.09, 0.99)]
    ratios, near, wrong = judged(rows)
    assert (ratios, near, wrong) == (rows, rows[1:2], rows[2:])
    family = next(family for family in FAMILIES if family.key == "techniques")
    assert misses(family, rows).count("(-1.8%)") == 1
