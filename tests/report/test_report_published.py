"""The published run beside a simulated one: which is the nearest, what differs, none where nothing is comparable."""

from __future__ import annotations

import json
import math

import pytest

import ddlsim
from ddlsim.report.published import MFU, TOKENS, _rows, nearest

FSDP = ddlsim.FSDP()


@pytest.fixture(scope="module")
def llama():
    return ddlsim.simulate("dgx-h100-pod", "llama-3-8b", FSDP, workers=64, steps=2)


def test_a_language_model_as_typed_opens_with_what_people_ask_for(llama):
    labels = [line[:13].strip() for line in str(llama).splitlines()]
    assert labels[:6] == ["throughput", "memory", "time goes to", "bottleneck", "software", "published"]
    assert llama.experiment.batch_size == 64
    text = str(llama)
    stack = ddlsim.load_stack("torchtitan")
    assert f"{stack.title} ({stack.release}); stack torchtitan (assumed; --stack or stack= sets another" in text
    assert f"simulated: {llama.tokens_per_second / 64:,.0f} with" in text


def test_json_has_the_stack_and_the_published_run(llama):
    data = json.loads(llama.to_json())
    stack = ddlsim.load_stack("torchtitan")
    assert data["stack"] == {
        "name": "torchtitan", "title": stack.title, "release": stack.release, "assumed": True,
    }  # fmt: skip
    row, published = nearest(llama).row, data["published"]
    assert published["source"] == row.source
    assert published["simulated"] == pytest.approx(llama.tokens_per_second / 64)
    assert published["differences"]["GPUs"] == 64
    assert "device" not in published["differences"] or row.device != "h100"


def test_a_stack_that_is_set_is_not_assumed():
    result = ddlsim.simulate("dgx-h100-pod", "llama-3-8b", FSDP, workers=8, stack="megatron", precision="fp8", steps=1)
    row = result.published.row
    assert (row.stack, row.gpus, row.precision, row.device) == ("megatron", 8, "fp8", "h100")
    assert result.published.differences == {}
    assert str(result.published).endswith(f"simulated: {result.tokens_per_second / 8:,.0f}")
    assert not result.to_dict()["stack"]["assumed"]
    assert "assumed" not in str(result)
    assert f"MFU {100 * result.mfu:.1f} % of the bf16 peak" in str(result)


def test_experts_are_not_compared_with_dense_models():
    assert ddlsim.simulate("dgx-h100-pod", "mixtral-8x7b", FSDP, workers=8, steps=1).published is None


def test_measured_times_are_of_no_stack():
    step = ddlsim.Measured("1 s", 1)
    result = ddlsim.simulate("dgx-h100-pod", "llama-3-8b", batch_size=1, workers=8, compute=step, steps=1)
    assert "software" not in str(result)
    assert result.to_dict()["stack"] is None
    assert "stack" not in result.published.differences


def test_differences_read_as_a_sentence():
    result = ddlsim.simulate("dgx-h100-pod", "llama-3-8b", FSDP, workers=16, steps=1)
    assert next(iter(result.published.differences)) == "device"
    assert f"simulated: {result.tokens_per_second / 16:,.0f} on h100, 16 GPUs" in str(result.published)


@pytest.mark.parametrize("recompute", ["none", "operators", "full"])
def test_full_recomputation_is_a_difference(recompute):
    """MaxText's rows of TPU v5e recompute whole layers, which costs a quarter of their MFU."""
    result = ddlsim.simulate("tpu-v5e", "llama-3-8b", ddlsim.FSDP(recompute=recompute), workers=64, steps=1)
    assert ", recomputed" in result.published.row.layout
    assert result.published.differences.get("recomputation") == (
        None if recompute == "full" else "without full recomputation"
    )
    text = str(result.published)
    assert ("without full recomputation" in text) == (recompute != "full")
    assert "64 chips" in text
    assert "64 GPUs" not in text


@pytest.mark.parametrize(
    ("cluster", "model"), [("cloud-25g-16x8-v100", "bert-large"), ("dgx-h100-pod", "resnet50"), ("selene", "gpt2")]
)
def test_nothing_comparable_is_nothing_published(cluster, model):
    """No figure of a V100, of images, or of a model of a tenth of the size."""
    result = ddlsim.simulate(cluster, model, batch_size=1, workers=2, steps=1)
    assert result.published is None
    assert "published" not in str(result)
    assert result.to_dict()["published"] is None


def test_a_share_of_the_peak_is_compared_with_one():
    result = ddlsim.simulate("tpu-v5p", "maxtext-32b", FSDP, workers=64, steps=1)
    row = result.published.row
    assert (row.unit, row.model, row.gpus) == (MFU, "MaxText 32B", 64)
    assert result.published.simulated == result.mfu
    assert "71.5 % MFU: MaxText 32B on 64 tpu-v5p" in str(result.published)


def test_rows_are_of_known_parts():
    devices, stacks = ddlsim.device_names(), ddlsim.stack_names()
    assert len(_rows()) > 40
    for row in _rows():
        assert row.device in devices
        assert row.stack in stacks
        assert row.unit in (TOKENS, MFU)
        peak = ddlsim.load_device(row.device).peak_flops["bf16"]
        used = row.figure if row.unit == MFU else 6e9 * row.parameters * row.figure / peak
        assert 0.2 < used < (1.0 if row.precision in ("bf16", "fp16") else 2.0), row
        assert math.log2(row.gpus) > 2.0
