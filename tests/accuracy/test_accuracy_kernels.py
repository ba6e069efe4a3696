"""The kernels of the A100: what half of the measured steps say about the others, and about larger models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from accuracy.kernels import (
    CATALOGUE,
    FITTED,
    errors,
    fit,
    fit_products,
    measured_all_reduce,
    product_errors,
    products,
    rows,
    values,
)
from ddlsim import PerKernel, load_model
from ddlsim.workload.compute import make_workload
from ddlsim.workload.roles import blocks
from ddlsim.workload.tensor_parallel import tensor_parallel


def test_halves_predict_each_other() -> None:
    """6.1 and 5.6 %, where the rows that were fitted are 5.3 and 6.0 % off: five numbers for 180 rows fit no noise."""
    measured = rows()
    assert len(measured) == 363
    means = []
    for fitted, others in ((measured[::2], measured[1::2]), (measured[1::2], measured[::2])):
        means.append(float(np.abs(errors(others, fit(fitted))).mean()))
    assert max(means) <= 0.063
    assert sum(means) / 2.0 <= 0.060


def test_no_other_numbers_fit_better() -> None:
    """The catalogue's numbers, rounded, are 5.65 % off; those that fit best 5.65 %."""
    means = [float(np.abs(errors(rows(), software)).mean()) for software in (CATALOGUE, fit(rows()))]
    assert means[0] <= 0.0575
    assert means[0] - means[1] <= 0.001
    assert list(values(CATALOGUE)) == list(FITTED)


def test_attention_without_the_fused_softmax() -> None:
    """One sample of 16 heads on 8 ranks: two matrices of a rank are too few for Megatron's kernel: 14 %, else 26 %."""
    unfused = [row for row in rows() if row.micro * row.a // row.t % 4]
    assert len(unfused) == 7
    assert float(np.abs(errors(unfused, CATALOGUE)).mean()) <= 0.19


def test_tiles_of_measured_products() -> None:
    """Models predict the products of others within 4.5 and 6.2 %. With tiles of 128 x 256 only, all are 11 % off."""
    by_model = list(products().values())
    assert [len(each) for each in by_model] == [208, 208, 208, 256, 256, 169, 208, 52]
    even, odd = ([row for rows in by_model[first::2] for row in rows] for first in (0, 1))
    assert np.abs(product_errors(odd, fit_products(even))).mean() <= 0.046
    assert np.abs(product_errors(even, fit_products(odd))).mean() <= 0.063
    fitted = fit_products(even + odd)
    assert fitted.gemm["bf16"] == pytest.approx(0.765, abs=5e-4)
    assert fitted.tile_time == pytest.approx(1.81e-6, rel=0.01)
    assert np.abs(product_errors(even + odd, fitted)).mean() <= 0.05
    assert np.abs(product_errors(even + odd, replace(fitted, tiles=()))).mean() >= 0.1


#: Korthikanti et al. 2022 (arXiv:2205.05198), table 5, as in calculon-ai/calculon (calculon/llm/validation.py):
#: model, stages, chunks of a stage, micro-batches, samples of one, recomputation, sequence parallelism, s; 8 ranks
#: of each group side by side in a machine
TABLE_5 = [
    ("megatron-22b", 1, 1, 1, 4, "full", False, 1.42),
    ("megatron-22b", 1, 1, 1, 4, "selective", True, 1.10),
    ("megatron-175b", 8, 3, 64, 1, "full", False, 18.13),
    ("megatron-1t", 64, 1, 512, 1, "selective", True, 71.49),
]


@pytest.mark.parametrize("row", TABLE_5, ids=lambda row: f"{row[0]} {row[5]}")
def test_models_a_hundred_times_as_large(row: tuple[str, int, int, int, int, str, bool, float]) -> None:
    """m micro-batches through p stages of v chunks: m (stage + output) + (p - 1)/v stage, and the update: 4.3 %."""
    name, p, v, m, micro, recompute, sequence, seconds = row
    model = load_model(name)
    device, stack = CATALOGUE
    options = {"precision": "fp16", "optimizer": "adam", "stack": stack}
    whole = make_workload(model, device, micro, compute=PerKernel(), **options)
    shard = tensor_parallel(whole, 8, sequence=sequence, recompute=recompute)
    ranges = blocks(model.layers)

    def took(first: int, end: int) -> float:
        inside = tuple(each for each in shard.collectives if first <= each.layer < end)
        cut = replace(shard, workload=shard.workload.cut(first, end), collectives=inside)
        halves = {"all_reduce": 2}  # of an all-reduce
        exchanged = sum(halves.get(each.kind, 1) / 2 * measured_all_reduce(each.nbytes, 8) for each in inside)
        return cut.workload.step_time - cut.workload.optimizer + exchanged

    stage, output = len(ranges) / p * took(*ranges[0]), took(ranges[-1][1], len(model.layers))
    embedding = took(0, ranges[0][0]) if p == 1 else 0.0  # otherwise in the shadow of the last stage
    step = m * (stage + output + embedding) + (p - 1) / v * stage + shard.workload.optimizer / p
    assert step == pytest.approx(seconds, rel=0.044)
