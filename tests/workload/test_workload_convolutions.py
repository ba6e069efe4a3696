"""Kernel times of convolutional networks: products, conversions, traffic, and whole steps that were not fitted."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from ddlsim import ConfigError, Measured, PerKernel, Training, fits, load_device, load_model, load_stack, simulate
from ddlsim.run.experiment import Experiment
from ddlsim.run.prepare import with_defaults
from ddlsim.workload.compute import make_workload
from ddlsim.workload.convolutions import (
    LayerKernels,
    converts,
    convolution_products,
    convolution_times,
    has_convolutions,
    tile_waves,
)
from ddlsim.workload.layers import LAYER_TYPES
from ddlsim.workload.model import Layer
from ddlsim.workload.products import Product, Timing

DATA = Path(__file__).parents[2] / "accuracy" / "data"
H200, PYTORCH, LAST = load_device("h200"), load_stack("pytorch"), load_stack("pytorch-channels-last")
BANDWIDTH = 4.8e12 * 0.873


def layer(kind="conv", shape=(64, 56, 56), **options):
    options = {"channels": 64, "kernel": 3, "padding": 1, "bias": False} | options if kind == "conv" else options
    cost = LAYER_TYPES[kind](type=kind, **options).cost(shape)
    n = sum(n for _, n in cost.tensors)
    made = 4.0 * math.prod(cost.out_shape)
    return Layer(
        kind, kind, shape, cost.out_shape, n, cost.macs, 2.0 * cost.macs, made, cost.tensors,
        moved_nbytes=4.0 * cost.moved, winograd=cost.winograd, window=cost.window,
    )  # fmt: skip


def kernels(precision="bf16", batch=32, stack=LAST, device=H200):
    return LayerKernels(Timing(device, stack, batch, precision, False))


def step(name, batch, device="h100", precision="bf16", stack="pytorch-channels-last"):
    work = make_workload(
        load_model(name), load_device(device), batch, compute=PerKernel(), precision=precision, stack=stack
    )
    return work.step_time


def test_a_convolution_is_a_product_of_pixels_channels_and_kernel():
    forward, of_input, of_weight = convolution_products(layer(channels=128, stride=2), 32)
    assert forward == Product(32 * 28 * 28, 128, 64 * 9)
    assert of_input == Product(32 * 56 * 56, 64, 128 * 9 / 4)  # of 9 weights, a quarter meet a pixel
    assert of_weight == Product(64 * 9, 128, 32 * 28 * 28)


@pytest.mark.parametrize(
    "options", [{}, {"stride": 2}, {"kernel": 1, "padding": 0}, {"groups": 4}, {"kernel": (1, 7), "padding": (0, 3)}]
)
def test_all_three_products_have_the_macs_of_the_layer(options):
    one = layer(**options)
    for m, n, k, copies, _ in convolution_products(one, 8):
        assert m * n * k * copies == pytest.approx(8 * one.macs, rel=1e-12)


@pytest.mark.parametrize(("precision", "channels"), [("fp32", 3), ("tf32", 16), ("bf16", 32), ("fp16", 32)])
def test_tensor_cores_read_few_channels_in_slices_of_64_bytes(precision, channels):
    image = layer(shape=(3, 224, 224), kernel=7, stride=2, padding=3)
    assert convolution_products(image, 1, precision)[0] == Product(112 * 112, 64, channels * 49)


def test_tensor_cores_compute_groups_together():
    grouped = layer(shape=(256, 56, 56), channels=256, groups=32)
    assert convolution_products(grouped, 1)[0] == Product(56 * 56, 8, 8 * 9, 32)
    assert convolution_products(grouped, 1, "bf16")[0] == Product(56 * 56, 64, 64 * 9, 4)
    depthwise = layer(shape=(96, 56, 56), channels=96, groups=96)
    assert convolution_products(depthwise, 1, "bf16")[0] == Product(56 * 56, 64, 64 * 9, 1.5)


@pytest.mark.parametrize("groups", [2, 16, 64])
def test_groups_take_no_longer_than_zeros_in_a_kernel_without_groups(groups):
    times = kernels("fp32", 64)
    grouped, dense = (layer(shape=(64, 112, 112), channels=64, groups=each) for each in (groups, 1))
    # without groups, Winograd's algorithm saves up to this factor
    limits = [seconds * max(times.rates.winograd) for seconds in times.products(dense)]
    assert all(seconds <= limit for seconds, limit in zip(times.products(grouped), limits, strict=True))


def test_a_tile_of_half_the_columns_takes_three_quarters_of_a_full_one():
    assert tile_waves(Product(128 * 132, 128, 1), (128, 128), 132) == 1.0
    assert tile_waves(Product(128 * 132, 64, 1), (128, 128), 132) == 0.75
    assert tile_waves(Product(128 * 133, 128, 1), (128, 128), 132) == 2.0


@pytest.mark.parametrize(
    ("precision", "options", "expected"),
    [
        ("bf16", {}, True),
        ("tf32", {}, True),
        ("fp32", {}, False),
        ("bf16", {"kernel": 1, "padding": 0}, False),
        ("bf16", {"kernel": 1, "padding": 0, "stride": 2}, True),
        ("bf16", {"kernel": 1, "padding": 0, "shape": (64, 14, 14)}, True),  # 392 bytes, no multiple of 16
        ("tf32", {"kernel": 1, "padding": 0, "shape": (64, 14, 14)}, False),  # 784 bytes
        ("tf32", {"kernel": 1, "padding": 0, "shape": (64, 7, 7)}, True),
    ],
)
def test_nchw_is_converted_for_tensor_cores(precision, options, expected):
    assert converts(layer(**options), precision, "nchw") is expected
    assert converts(layer(**options), precision, "channels_last") is False


def test_a_conversion_reads_and_writes_input_output_and_weight():
    one = layer()
    numbers = 32 * 2 * 64 * 56 * 56 + 64 * 64 * 9
    extra = [a - b for a, b in zip(kernels(stack=PYTORCH).products(one), kernels().products(one), strict=True)]
    assert extra == pytest.approx([numbers / (4.22e9 * 132) + 5e-6] * 3, rel=1e-9)
    extra = [
        a - b for a, b in zip(kernels("tf32", stack=PYTORCH).products(one), kernels("tf32").products(one), strict=True)
    ]
    assert extra == pytest.approx([2 * 4 * numbers / BANDWIDTH + 5e-6] * 3, rel=1e-9)


def test_traffic_of_layers_limited_by_memory():
    n = 256 * 256 * 56 * 56
    relu = layer("relu", (256, 56, 56))
    assert kernels(batch=256).seconds(relu, (9.0, 9.0)) == pytest.approx(
        (2 * 2 * n / BANDWIDTH + 5e-6, 3 * 2 * n / BANDWIDTH + 5e-6), rel=1e-12
    )
    narrow = layer(shape=(256, 56, 56), channels=64, kernel=1, padding=0)
    forward, _, _ = kernels(batch=256).products(narrow)
    moved = 2 * (n + n / 4 + 64 * 256)
    assert forward == pytest.approx(moved / (0.871 * BANDWIDTH) + 5e-6, rel=1e-12)


def test_batch_normalisation_is_limited_by_elements_and_by_channels():
    rates = H200.kernels.convolution.normalised
    n = 128 * 64 * 112 * 112
    norm = layer("batch_norm", (64, 112, 112))
    forward, backward = kernels(batch=128).seconds(norm, (0.0, 0.0))
    assert forward == pytest.approx(n / (132 * rates["channels_last"][0]) + 5e-6)
    forward, backward = kernels(batch=128, stack=PYTORCH).seconds(norm, (0.0, 0.0))  # 64 blocks on 132 multiprocessors
    assert forward == pytest.approx(n * 132 / 64 / (132 * rates["nchw-16"][0]) + 5e-6)
    assert backward == pytest.approx(n * 264 / 64 / (132 * rates["nchw-16"][1]) + 5e-6)
    slow = replace(H200, memory_bandwidth=1e11)
    forward, backward = kernels(batch=128, device=slow).seconds(norm, (0.0, 0.0))
    assert (forward, backward) == pytest.approx((3 * 2 * n / 8.73e10 + 5e-6, 5 * 2 * n / 8.73e10 + 5e-6))


def test_autocast_converts_weights_and_a_bias_is_a_kernel_of_its_own():
    with_bias, without = layer(bias=True), layer()
    forward, of_input, of_weight = kernels().products(without)
    cast = 6 * 64 * 64 * 9 / BANDWIDTH
    n_out = 2 * 32 * 64 * 56 * 56
    assert kernels().seconds(without, (0, 0)) == pytest.approx((forward + cast, of_input + of_weight + cast))
    assert kernels().seconds(with_bias, (0, 0)) == pytest.approx(
        (forward + cast + 2 * n_out / BANDWIDTH, of_input + of_weight + cast + n_out / BANDWIDTH)
    )
    first = replace(without, input_grad=False)
    assert kernels().seconds(first, (0, 0))[1] == pytest.approx(of_weight + cast)
    forward, of_input, of_weight = kernels("tf32").products(without)
    assert kernels("tf32").seconds(without, (0, 0)) == pytest.approx((forward, of_input + of_weight))


def test_tf32_applies_to_dense_layers_only_if_the_stack_says_so():
    dense = layer("dense", (4096,), units=4096)
    strict = kernels("fp32", 1024).seconds(dense, (0, 0))
    assert kernels("tf32", 1024).seconds(dense, (0, 0)) == strict
    assert kernels("tf32", 1024, replace(LAST, tf32_dense=True)).seconds(dense, (0, 0))[0] < 0.3 * strict[0]


@pytest.mark.parametrize("name", ["resnet50", "vgg16", "inception-v3", "resnext101-32x8d", "unet", "lenet5"])
@pytest.mark.parametrize("precision", ["bf16", "tf32", "fp32"])
def test_larger_batches_take_longer_and_no_longer_per_sample(name, precision):
    times = [step(name, batch, precision=precision) for batch in (8, 64, 512)]
    for less, more in itertools.pairwise(times):
        assert less * (1.0 - 1e-12) <= more <= 8.0 * less  # equal up to rounding if the host is the limit


def test_the_order_of_modes():
    last, nchw = step("resnet50", 256), step("resnet50", 256, stack="pytorch")
    tf32, fp32 = (step("resnet50", 256, precision=each, stack="pytorch") for each in ("tf32", "fp32"))
    assert last < nchw < tf32 < fp32
    assert step("resnet50", 256, precision="fp16") == last


def test_small_batches_wait_for_the_host():
    one, model = step("resnet50", 1), load_model("resnet50")
    update = 20 * model.n_params / (0.8 * 3.35e12)
    convolutions, norms, others = 53, 53, 49 + 16 + 1 + 1
    launches = convolutions * 2 + norms * 2 + 4 + others  # weights are converted; the dense layer has a bias
    assert one == pytest.approx(launches * 45e-6 + update)
    assert step("resnet50", 2) == pytest.approx(one, rel=1e-12)


@pytest.mark.parametrize("device", ["h100", "h200"])
def test_whole_steps_of_both_devices_that_nothing_was_fitted_to(device):
    lines = json.loads((DATA / f"gpu_{device}.json").read_text(encoding="utf-8"))["steps"]
    modes = {"amp-bf16": "bf16", "tf32": "tf32", "fp32": "fp32"}  # with channels_last
    steps = [line for line in lines if line["model"] == "resnet50" and line["batch"] >= 128]
    assert len(steps) == 5
    for line in steps:
        time = step("resnet50", line["batch"], device, modes[line["mode"]])
        assert time == pytest.approx(line["seconds"], rel=0.15)


def test_which_networks_and_devices_have_kernel_times():
    assert has_convolutions(load_model("resnet50"), load_device("h100-pcie"), "tf32")
    assert not has_convolutions(load_model("resnet50"), load_device("a100-80g"), "tf32")
    assert not has_convolutions(load_model("gpt2"), load_device("h100"), "bf16")
    assert not has_convolutions(load_model("dlrm"), load_device("h100"), "bf16")
    model = load_model("resnet50")
    unknown = replace(model, layers=(replace(model.layers[0], window=0), *model.layers[1:]))
    assert not has_convolutions(unknown, load_device("h100"), "bf16")


def test_8_bit_products_are_those_of_transformers_only():
    """Convolutions in fp8 take as long as in bf16, as the note says."""
    asked = Experiment("dgx-h100-pod", "resnet50", batch_size=32, workers=1, precision="fp8")
    result = simulate(asked)
    assert result.step_time == simulate(asked.with_(precision="bf16")).step_time
    assert any(note.startswith("fp8 is simulated at the speed of bf16: kernels of h100") for note in result.notes)


def test_the_default_precision_is_that_of_the_framework():
    model, h100, a100, v100 = load_model("resnet50"), *map(load_device, ("h100", "a100-80g", "v100"))
    asked = Experiment("dgx-h100-pod", "resnet50", batch_size=32, workers=1)
    assert with_defaults(asked, model, h100).precision == "tf32"
    assert with_defaults(asked, model, h100, a100).precision == "tf32"
    assert with_defaults(asked, model, h100, v100).precision == "fp32"
    assert with_defaults(asked, load_model("dlrm"), a100).precision == "fp32"
    assert with_defaults(asked.with_(precision="fp32"), model, h100).precision == "fp32"
    assert with_defaults(asked.with_(training=Training(data="digits", epochs=1)), model, h100).precision == "fp32"
    assert "tf32 (the default of convolutional networks" in str(simulate(asked.with_(cluster="dgx-a100-pod")))
    text = str(simulate(asked))
    assert "tf32 in convolutions, fp32 in dense layers (the default of convolutional networks; --precision fp32" in text
    assert "memory format NCHW (stack pytorch-channels-last: channels_last)" in text
    text = str(simulate(asked.with_(precision="bf16", stack="pytorch-channels-last")))
    assert "bf16; memory format channels_last" in text
    assert "the default of" not in text
    for name, device, precision in (
        ("resnet50", "a100-80g", "tf32"), ("resnet50", "v100", "fp32"), ("gpt2", "a100-80g", "bf16"),
        ("dlrm", "a100-80g", "fp32"),
    ):  # fmt: skip
        assert f" in {precision} with " in fits(name, device).question
    assert "memory format" not in str(simulate(asked.with_(compute=Measured("50 ms", 32))))


def test_occupied_multiprocessors_slow_down_all_kernels():
    model = load_model("resnet50")
    free = Timing(H200, LAST, 256, "bf16", False)
    whole, part = (sum(map(sum, convolution_times(model, each))) for each in (free, free._replace(occupied=33)))
    assert 1.25 < part / whole < 1.4
    work = make_workload(model, H200, 256, compute=PerKernel(), precision="bf16", stack=LAST)
    assert work.slowdown.beside(33) == pytest.approx(part / whole, rel=1e-12)
    asked = Experiment("dgx-h100-pod", "resnet50", batch_size=64, workers=8)
    assert simulate(asked).step_time > simulate(asked.with_(overlap_slowdown=1.0)).step_time


def test_rates_survive_a_file(tmp_path):
    H200.save(tmp_path / "my.toml")
    assert load_device(tmp_path / "my.toml").kernels.convolution == H200.kernels.convolution
    with pytest.raises(ConfigError, match="memory_format"):
        replace(PYTORCH, memory_format="nhwc")
