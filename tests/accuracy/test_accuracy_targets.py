"""The accuracy that ddlsim has reached on published measurements, case by case, so that it cannot be lost unnoticed.

`docs/accuracy.md` says which rows calibrate a case, and why some are missed.
"""

from functools import cache
from pathlib import Path

import pytest
import yaml

from accuracy import aws, collectives, hybrids, memory, published, recommendation, strong, techniques
from accuracy.families import FAMILIES, NOT_EXPLAINED, Family
from accuracy.report import CHOICES, READING, judged, section, summary
from accuracy.rows import Row, covered, mean_error, skill

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "accuracy.md").read_text(encoding="utf-8")
FAMILY = {family.key: family for family in FAMILIES}

#: cases of weak scaling that miss 7 %, with what they reach; the report names the causes
WEAK_MISSES = {"theano_mpi_k80_vgg16_b16": 0.095, "tf_dgx1_p100_alexnet": 0.12}


def page_of(key: str) -> str:
    """A family's page."""
    return (DOCS / "accuracy" / f"{key}.md").read_text(encoding="utf-8")


WEAK_CASES = sorted(run.name for run in published.runs())


@cache
def weak_rows() -> list[Row]:
    """Of up to 64 devices; the page has the others."""
    return published.rows(most=64)


@pytest.mark.parametrize("case", WEAK_CASES)
def test_weak_scaling(case: str) -> None:
    rows = [row for row in weak_rows() if row.case == case]
    assert mean_error(rows) <= WEAK_MISSES.get(case, 0.07)
    calibrated = [row for row in rows if row.fitted_on]
    assert calibrated
    assert all(abs(row.error) < 1e-3 for row in calibrated)


def test_memory_of_a_gpu() -> None:
    """GPT as its paper computes it; what PyTorch's allocator reserves for AmoebaNet-D and U-Net."""
    rows = memory.rows()
    assert len(rows) == 7 + 4 * 3 + 4 * 4
    assert all(abs(row.error) < 0.012 for row in rows if row.case.startswith("megatron"))
    assert all(abs(row.error) < 0.002 for row in rows if "state" in row.what)
    assert mean_error([row for row in rows if not row.case.startswith("megatron")]) < 0.06
    assert mean_error([row for row in rows if row.case.startswith("unet")]) < 0.06
    page = page_of("memory")
    assert all(f"| {row.case} | {row.what} | {row.measured:.4g} | {row.predicted:.4g} |" in page for row in rows)


def test_weak_scaling_in_all() -> None:
    assert len(WEAK_CASES) == 17 + 2  # two cases have two columns
    assert mean_error(weak_rows()) <= 0.05  # 0.045 with TensorFlow's sums after the backward pass, which others refute


@pytest.mark.slow
def test_weak_scaling_from_one_device() -> None:
    """On up to 16 devices; without what the devices of a machine share it was 6.4 %."""
    rows = published.rows(machine=False, most=16)
    assert mean_error(rows) <= 0.045
    assert skill(rows)[0] >= 2.0 * mean_error(rows)


def test_copies_inside_a_machine_are_plausible() -> None:
    """MXNet's AlexNet and Inception-v3 ran on the same machines, but their rates differ: 7.4 and 7.8 GB/s."""
    rates = [published.calibrated(run, True)[1] for run in published.runs() if run.kvstore]
    assert len(rates) == 2
    assert all(2e9 < rate < 12e9 for rate in rates if rate is not None)  # below PCIe 3.0 x16


def test_strong_scaling_of_bert() -> None:
    series = next(s for s in strong.read() if s.id == "mlperf07_bert_steps" and s.machine == "a100")
    between = series.points[1]
    assert strong.step(series, between, strong.calibrated(series)) == pytest.approx(between.seconds, rel=0.10)


#: ratio of throughputs -> its mean error, per case (ByteScheduler: of two machines, the worst rows)
# ByteScheduler: 0.09 and 0.04 with the one-GPU row of another framework instead of the catalogue's device
# 1-bit Adam: 0.23 with the step of one machine instead of that of one GPU
# of DGC the row at 1 Gbit/s, which gives the size of the network, no longer counts: the mean was 0.024 with it
GAINS = {"paddle_localsgd_resnet50_32xV100": 0.03, "paddle_dgc_fasterrcnn_2xP40": 0.035,
         "bytescheduler_mxnet_ps_rdma_resnet50": 0.095, "bytescheduler_mxnet_ps_rdma_vgg16": 0.055,
         "onebit_adam_bertlarge_tcp40": 0.12}  # fmt: skip


def test_gains_of_techniques() -> None:
    rows = techniques.rows(most=16)
    assert {row.case for row in rows} == set(GAINS)
    assert mean_error(rows) <= 0.15
    for case, reached in GAINS.items():
        assert mean_error([row for row in rows if row.case == case]) <= reached, case
    assert len(judged(rows)[1]) >= 4  # of 10; with all devices 7 of 14
    # the direction, wherever the measurement shows one (0.375 s against 0.3725 s is within its digits)
    for row in rows:
        assert row.fitted_on or abs(row.measured - 1.0) < 0.01 or (row.measured > 1.0) == (row.predicted > 1.0)


@pytest.mark.parametrize(("library", "target"), [("nccl", 0.03), ("gloo", 0.08)])
def test_all_reduce_on_aws(library: str, target: float) -> None:
    rows = [row for row in aws.rows() if row.case.startswith(library)]
    reduced, messages = ([row for row in rows if (kind in row.case)] for kind in ("all-reduce", "p2p"))
    assert sum(not row.fitted_on for row in reduced) == 8
    assert mean_error(reduced) <= target
    assert sum(row.fitted_on for row in messages) == 2
    assert mean_error(messages) <= 0.03
    inside, half = covered(rows)
    assert inside > 0.88  # of 26
    assert half < 0.135


@pytest.mark.parametrize("first", [0, 1, 2])
def test_nccl_sweeps(first: int) -> None:
    """Whichever third of the sizes calibrates."""
    rows = [row for row in collectives.rows(first=first) if "gpu_count" not in row.case]
    assert mean_error(rows) <= 0.08


@pytest.mark.parametrize("key", ["nccl", "gloo", "sweeps"])
def test_page_is_up_to_date(key: str) -> None:
    """Of the families that take no time; `make accuracy` writes the page."""
    family: Family = FAMILY[key]
    rows = family.rows()
    assert section(family, rows) == page_of(key)
    lines = summary(family, rows).splitlines()
    assert all(line.rsplit(" |", 2)[0].rpartition("|")[0] in PAGE for line in lines)  # intervals are those left out


def test_pages_have_the_texts_of_the_report() -> None:
    """Also those of families that take long: calibration, and an explanation for every miss."""
    assert READING in PAGE
    assert CHOICES in PAGE
    for family in FAMILIES:
        page = page_of(family.key)
        assert f"**Calibration.** {family.calibration}\n" in page
        explanations = {NOT_EXPLAINED, *(explanation for _, _, explanation in family.causes)}
        table = page.partition("| explanation | rows |\n| --- | --- |\n")[2].partition("\n\n")[0]
        found = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()]
        assert explanations.issuperset(found), family.key


def test_every_large_miss_has_a_cause() -> None:
    """Weak scaling: whatever is further off than the target for the mean is explained in the report."""
    for row in weak_rows():
        assert row.fitted_on or abs(row.error) <= 0.07 or FAMILY["weak"].cause(row) != NOT_EXPLAINED, row


def test_sources_are_named() -> None:
    cases = yaml.safe_load(published.DATA.read_text())["cases"]
    assert all(case.get("source") for case in cases)


def test_recommendation_models_on_several_gpus() -> None:
    found = recommendation.rows()
    assert all(abs(row.error) < 1e-3 for row in found if row.fitted_on)
    predicted = [row for row in found if not row.fitted_on]
    assert len(predicted) == 2
    assert max(abs(row.error) for row in predicted) <= 0.12  # 0.163 if launches outside of the CUDA graph took no time


def test_small_products_leave_more_of_the_last_wave_empty() -> None:
    """8192 x 1024 numbers are 32 x 8 tiles, 2.4 waves of 108."""
    assert recommendation.filled(8192, 108) < 0.85 < recommendation.filled(65536, 108) <= 1.0


def test_hybrids_of_data_and_model_parallelism() -> None:
    rows = hybrids.rows()
    counted = [row for row in rows if hybrids.counts(row)]
    assert (len(rows), len(counted)) == (5, 4)
    assert mean_error(counted) <= 0.07
    assert max(abs(row.error) for row in counted) <= 0.14
    for row in rows:
        assert abs(row.error) <= 0.10 or FAMILY["das"].cause(row) != NOT_EXPLAINED, row
