"""Mixtures of experts: what a layer costs, and expert parallelism as a plan and a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from strategy_plans import plan_of
from unrolled import experts

import ddlsim
from ddlsim import ConfigError, ExpertParallel, load_model
from ddlsim.cluster import star
from ddlsim.plan.experts import expert_elements
from ddlsim.plan.plan import ALL_REDUCE, KINDS
from ddlsim.workload.buckets import one_bucket, per_layer
from ddlsim.workload.compute import Workload, make_workload
from ddlsim.workload.devices import load_device

MIXTURE = """
title = "two layers of 8 experts"
sources = ["made for this test"]
trainable = false
input = [16]
layers = [
  { type = "embedding", vocabulary = 50, dim = 12 },
  { type = "residual", body = [{ type = "mixture_of_experts", experts = 8, active = 2, capacity = 1.25, units = 20 }] },
  { type = "layer_norm" },
  { type = "mixture_of_experts", experts = 8, active = 1, units = 24, gated = false },
  { type = "dense", units = 50 },
]
"""
ALL_TO_ALL = KINDS.index("all_to_all")
BATCH, BANDWIDTH = 10, 1e9
#: numbers of a sample that the layers send to their experts: 16 tokens x 2 x 1.25, and 16, of 12 each
SENT = [16 * 2.5 * 12, 16 * 12]
#: parameters of their experts, gate, up and down; and up and down
HELD = [8 * 3 * 12 * 20, 8 * 2 * 12 * 24]


@pytest.fixture
def workload(tmp_path: Path) -> Workload:
    path = tmp_path / "mixture.toml"
    path.write_text(MIXTURE)
    return make_workload(load_model(path), load_device("v100"), BATCH)


def test_parameters_and_multiplications_are_exact(workload: Workload):
    first, second = [layer for layer in workload.model.layers if layer.type == "mixture_of_experts"]
    assert [expert_elements(layer) for layer in (first, second)] == HELD
    assert [layer.n_params for layer in (first, second)] == [held + 8 * 12 for held in HELD]
    assert first.macs == 16 * 12 * 8 + 40 * 3 * 12 * 20
    assert second.macs == 16 * 12 * 8 + 16 * 2 * 12 * 24
    assert first.out_shape == (16, 12)


def test_the_active_parameters_of_mixtral_are_the_published_ones():
    """12.9 billion (Mistral AI); a token multiplies with all of them but the embedding's."""
    model = load_model("mixtral-8x7b")
    held = sum(expert_elements(layer) for layer in model.layers)
    assert model.n_params - held * 6 // 8 == 12_879_925_248
    scores = 2 * 4096**2 * 4096 * 32
    norms = sum(layer.n_params for layer in model.layers if layer.type == "rms_norm")
    assert model.macs - scores == 4096 * (12_879_925_248 - 32000 * 4096 - norms)


@pytest.mark.parametrize("buckets", [one_bucket, per_layer])
@pytest.mark.parametrize(("n", "degree"), [(1, 1), (4, 4), (4, 2), (4, 1), (8, 4)])
def test_plans_are_proved_and_carry_what_the_formulas_say(workload: Workload, n: int, degree: int, buckets):
    plan = experts([workload] * n, degree, buckets, steps=2)
    plan.check()
    rows = plan.rows(ALL_TO_ALL)
    rows = rows[(plan.rank[rows] == 0) & (plan.step[rows] == 0)]
    wanted = [4 * BATCH * numbers for numbers in (SENT[0], SENT[0], SENT[1], SENT[1], *[SENT[1]] * 2, *[SENT[0]] * 2)]
    assert plan.nbytes[rows].tolist() == (wanted if degree > 1 else [])
    sums = plan.rows(ALL_REDUCE)
    sums = sums[(plan.rank[sums] == 0) & (plan.step[sums] == 0)]
    shared = workload.gradient_nbytes - 4 * sum(HELD)
    assert plan.nbytes[sums].sum() == pytest.approx(shared + (4 * sum(HELD) / degree if n > degree else 0.0))


@pytest.mark.parametrize("n", [2, 4, 8])
def test_with_instant_compute_four_all_to_alls_a_layer_and_an_all_reduce_are_left(workload: Workload, n: int):
    plan = experts([workload] * n, n, one_bucket)
    instant = dataclasses.replace(plan, seconds=np.zeros(len(plan)))
    tokens = 4 * sum(SENT) * 4 * BATCH * (n - 1) / n
    sums = 2 * (n - 1) / n * (workload.gradient_nbytes - 4 * sum(HELD))
    run = instant.execute(star(n, bandwidth=BANDWIDTH, latency=0.0))
    assert run.seconds == pytest.approx((tokens + sums) / BANDWIDTH, rel=1e-9)


def test_with_compute_nothing_hides_an_all_to_all(workload: Workload):
    plan = experts([workload] * 4, 4, one_bucket)
    run = plan.execute(star(4, bandwidth=BANDWIDTH, latency=0.0))
    tokens = 4 * sum(SENT) * 4 * BATCH * 3 / 4 / BANDWIDTH
    sums = 2 * 3 / 4 * (workload.gradient_nbytes - 4 * sum(HELD)) / BANDWIDTH
    assert run.seconds == pytest.approx(plan.critical_path() + tokens + sums, rel=1e-9)


def test_runs_and_their_plans_tell_the_same(workload: Workload):
    strategy = ExpertParallel(2)
    result = ddlsim.simulate("office-1gbe", workload.model, strategy, workers=4, batch_size=40, steps=3, warmup=0)
    execution = plan_of(strategy, result.workloads, 5).execute(result.cluster)
    np.testing.assert_allclose(result.step_times, execution.step_times[:3], rtol=1e-12)
    assert result.samples_per_update == 40
    alone = ddlsim.simulate("office-1gbe", workload.model, ExpertParallel(1), workers=4, batch_size=40)
    plain = ddlsim.simulate("office-1gbe", workload.model, workers=4, batch_size=10)
    assert alone.nbytes_per_step == pytest.approx(plain.nbytes_per_step, rel=1e-9)


def test_memory_counts_the_own_experts(workload: Workload):
    stages = [ExpertParallel(degree).stage(workload, 0, 8).memory for degree in (1, 2, 8)]
    n_params = workload.model.n_params
    assert [memory.weights for memory in stages] == [4 * (n_params - sum(HELD) * (w - 1) / w) for w in (1, 2, 8)]
    assert stages[1].buffers - stages[0].buffers == 2 * BATCH * max(SENT) * 4


@pytest.mark.parametrize(
    ("model", "workers", "degree", "text"),
    [
        ("mixtral-8x7b", 4, 3, "degree = 3: must divide the number of ranks, 4, .* experts .*, 8; use one of 1, 2, 4"),
        ("mixtral-8x7b", 6, 6, "degree = 6: must divide the number of ranks, 6, .* experts .*, 8; use one of 1, 2$"),
        ("mixtral-8x7b", 16, 5, "degree = 5: .* use one of 1, 2, 4, 8$"),
        ("lenet5", 4, 2, "model 'lenet5' has no mixture_of_experts layer; use data parallelism, such as AllReduce"),
    ],
)
def test_what_does_not_match_is_said(model: str, workers: int, degree: int, text: str):
    with pytest.raises(ConfigError, match=text):
        ddlsim.simulate("dgx1-v100-16", model, ExpertParallel(degree), workers=workers, batch_size=workers)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("experts = 2, active = 3", "active = 3: must be at most experts = 2"),
        ("experts = 2, active = 1, capacity = 0.0", "capacity = 0.0: must be above 0"),
    ],
)
def test_layers_that_cannot_be_are_refused(tmp_path: Path, line: str, text: str):
    path = tmp_path / "mixture.toml"
    path.write_text(MIXTURE.replace("experts = 8, active = 2, capacity = 1.25", line))
    with pytest.raises(ConfigError, match=text):
        load_model(path)
