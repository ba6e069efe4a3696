"""Devices of measured profiles: an H100 and an H200 of accuracy/data, and profiles of known numbers."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ddlsim
from ddlsim.errors import ConfigError
from ddlsim.measure.fit import Prediction, comparison, device_of, predictions
from ddlsim.workload.devices import AttentionRates, Kernels
from ddlsim.workload.precision import product_type
from ddlsim.workload.products import ATTENTION_RAMPS, Product, product_time

DATA = Path(__file__).parents[2] / "accuracy" / "data"


def profile(name):
    return json.loads((DATA / f"gpu_{name}.json").read_text(encoding="utf-8"))


def errors(measured, device):
    pairs = [each for each in predictions(measured, device) if each.what == "product"]
    return np.array([each.predicted / each.measured - 1.0 for each in pairs])


def test_a_device_file_that_does_not_describe_its_measurements_is_a_warning():
    products = [Prediction("product", "x", 1.0, 1.0 + error) for error in (0.1, -0.2)]
    step = Prediction("step", "llama, batch 4", 0.5, 0.25)
    assert comparison([*products, step]) == [
        "2 products: mean error 15.0 %, worst 20 %",
        "llama, batch 4: measured 500 ms, predicted 250 ms (-50 %)",
    ]
    lines = comparison([*products, Prediction("product", "y", 1.0, 3.0), step])
    assert lines[1].startswith("warning: the device file does not describe these times; run nothing else")


def made(device, sizes=(512, 1024, 2048, 4096, 8192)):
    """Return the profile that a device would have if the library were right about it."""
    kernels, peak = device.kernels, device.peak_flops["bf16"]
    gemm = [
        {"m": m, "n": n, "k": k, "precision": precision, "flops": 2.0 * m * n * k,
         "seconds": product_time(Product(m, n, k), device, precision)}
        for precision in ("bf16", "fp8", "nvfp4") if product_type(precision) in kernels.gemm
        for m in sizes for n in sizes for k in sizes
    ]  # fmt: skip
    attention = []
    for length, width in ((2048, 128), (8192, 128), (4096, 64)):
        about = {"backend": "cudnn", "batch": 2, "heads": 64, "length": length, "head_width": width, "causal": True}
        flops, rates = 2.0 * 128 * length**2 * width, kernels.attention["cudnn"]
        narrow = (width / 128) ** rates.narrow
        forward = flops / peak / rates.forward / narrow * (1.0 + ATTENTION_RAMPS[0] / length)
        backward = 2.5 * flops / peak / rates.backward / narrow * (1.0 + ATTENTION_RAMPS[1] / length)
        attention.append({**about, "passes": "forward", "seconds": forward})
        attention.append({**about, "passes": "forward+backward", "seconds": forward + backward})
    nbytes = 1e9
    copy = {"kernel": "copy", "elements": 1 << 28, "nbytes": nbytes}
    return {
        "device": device.title, "memory_nbytes": device.memory_nbytes, "multiprocessors": kernels.units,
        "torch": "2.11",
        "gemm": [*gemm, {"precision": "mxfp8", "error": "not on this GPU"}], "attention": attention,
        "memory": [{**copy, "seconds": nbytes / device.memory_bandwidth / kernels.streaming}],
        "launch": [{"what": "CUDA graph of element-wise kernels, per kernel", "seconds": 1.5e-6}],
    }  # fmt: skip


@pytest.mark.parametrize("tile", [(128, 128), (256, 128)])
def test_known_numbers_come_back(tile):
    """Of a GPU of the catalogue: its data sheet stays, its kernels are found from the times alone."""
    rates = AttentionRates(0.6, 0.5, 0.4)
    kernels = Kernels({"bf16": 0.7, "fp8": 0.6}, 132, tile, "made", 2e-6, {"cudnn": rates}, 0.85)
    h100 = replace(ddlsim.load_device("h100"), title="NVIDIA H100 80GB HBM3", kernels=kernels)
    device = device_of(made(h100))
    assert device.peak_flops == h100.peak_flops
    assert (device.name, device.launch_time, device.kernels.tile) == ("h100-measured", 1.5e-6, tile)
    assert device.kernels.gemm == pytest.approx(kernels.gemm, rel=1e-3)
    assert device.kernels.tile_time == pytest.approx(2e-6, rel=0.01)
    assert device.kernels.attention == {"cudnn": rates}
    assert device.kernels.streaming == 0.85


def test_a_gpu_that_the_catalogue_does_not_have():
    """Its peaks are the rates of large products, and the times are right."""
    kernels = Kernels(
        {"bf16": 0.9, "fp4": 0.8}, 100, (128, 128), "made", 1e-6, {"cudnn": AttentionRates(0.6, 0.5)}, 1.0
    )
    unknown = replace(
        ddlsim.load_device("h100"), title="Nobody's GPU", kernels=kernels, peak_flops={"bf16": 1e15, "fp4": 4e15}
    )
    measured = made(unknown) | {"power_w": 650.0}
    device = device_of(measured)
    assert (device.name, device.power_w) == ("nobody-s-gpu-measured", 650.0)
    assert device.memory_bandwidth == pytest.approx(unknown.memory_bandwidth, rel=1e-3)
    assert device.peak_flops == pytest.approx({"bf16": 0.9e15, "fp4": 3.2e15}, rel=1e-3)
    assert device.kernels.gemm == {"bf16": 1.0, "fp4": 1.0}
    assert np.abs(errors(measured, device)).mean() < 0.005


def test_h100_and_h200():
    """What the page says; a fit to every second product predicts the others, and one GPU's fractions the other's."""
    h100, h200 = profile("h100"), profile("h200")
    device, other = device_of(h100), device_of(h200)
    assert (device.name, other.name) == ("h100-measured", "h200-measured")
    assert device.peak_flops == ddlsim.load_device("h100").peak_flops
    assert np.abs(errors(h100, device)).mean() < 0.035
    assert np.abs(errors(h200, other)).mean() < 0.032
    assert np.abs(errors(h200, replace(other, kernels=device.kernels))).mean() < 0.035
    halves = [h100 | {"gemm": h100["gemm"][i::2]} for i in (0, 1)]
    assert np.abs(errors(halves[1], device_of(halves[0]))).mean() < 0.045
    for kernels in (device.kernels, other.kernels):
        assert kernels.tile == (128, 128)
        assert kernels.attention.keys() == {"flash-2", "cudnn", "efficient"}
        assert 0.85 < kernels.streaming < 0.95
    for name, rates in device.kernels.attention.items():
        assert rates.forward == pytest.approx(other.kernels.attention[name].forward, rel=0.03)
        assert rates.backward == pytest.approx(other.kernels.attention[name].backward, rel=0.05)


@pytest.mark.parametrize(
    ("left_out", "message"), [("gemm", "no matrix products"), ("memory", "no memory-bound kernels")]
)
def test_an_incomplete_profile_is_one_line(left_out, message):
    measured = profile("h100")
    del measured[left_out]
    with pytest.raises(ConfigError, match=re.escape(f"profile of NVIDIA H100 80GB HBM3 contains {message}")):
        device_of(measured)


def test_steps_are_predicted_and_not_fitted():
    """The Llamas that are measured (accuracy/data/stack_h100.jsonl), where the GPU and not the host decides."""
    measured = profile("h100") | {"attention": [{"usual": "CUDNN_ATTENTION"}]}
    rows = [json.loads(line) for line in (DATA / "stack_h100.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [row | {"mode": "bf16"} for row in rows if row.get("mode") == "llama-bf16"][1:]
    device = device_of(profile("h100") | {"steps": steps})
    assert device == device_of(profile("h100") | {"steps": [steps[0] | {"seconds": 1.0}]})
    found = [each for each in predictions(measured | {"steps": steps}, device) if each.what == "step"]
    assert [each.label for each in found] == [f"{row['model']}, batch {row['batch']}" for row in steps]
    errors = [abs(each.predicted / each.measured - 1.0) for each in found]
    assert np.mean(errors) < 0.065
    assert max(errors) < 0.1
