"""Compute times: fits of measured curves, the split over layers, rooflines, memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ddlsim.bundled import bundled_files
from ddlsim.errors import ConfigError
from ddlsim.workload.compute import Affine, Measured, Roofline, fit_affine, make_workload
from ddlsim.workload.devices import Device, device_names, load_device
from ddlsim.workload.memory import check_memory, memory_of
from ddlsim.workload.model import load_model, model_names
from ddlsim.workload.products import Timing, kernel_times, score_times
from ddlsim.workload.roles import blocks
from ddlsim.workload.stacks import load_stack
from ddlsim.workload.stage import Stage

RESNET50 = load_model("resnet50")
V100 = load_device("v100")
GRAPHS = replace(load_stack("pytorch"), forward_launch=0.0, backward_launch=0.0)
#: the files, of those that are there by their sizes only one size
FILES = [name for name in bundled_files("models") if name in model_names()] + ["llama-7b", "transformer-base"]


def _curve(device: str, model: str):
    return next(curve for curve in load_device(device).curves if curve.model == model)


@pytest.mark.parametrize(
    ("device", "model", "c0_ms", "c1_ms"),
    [
        ("v100", "resnet50", 25.8, 2.51),
        ("k80", "resnet50", 45.9, 18.97),
        ("m60", "resnet50", 34.8, 13.5),
        ("v100", "inception-v3", 41.7, 3.42),
        ("xeon-6148", "vgg-19", 196.4, 32.05),
        ("xeon-6148", "resnet50", 27.5, 11.84),
    ],
)
def test_affine_fits_of_the_measured_curves(device: str, model: str, c0_ms: float, c1_ms: float):
    curve = _curve(device, model)
    fit = fit_affine(curve.batch_size, curve.throughput)
    assert fit.c0 == pytest.approx(c0_ms * 1e-3, rel=0.02)
    assert fit.c1 == pytest.approx(c1_ms * 1e-3, rel=0.02)


@pytest.mark.parametrize(("device", "worst"), [("k80", 0.0262), ("m60", 0.0200), ("v100", 0.0511)])
@pytest.mark.parametrize("model", ["resnet50", "inception-v3"])
def test_fits_are_near_the_tables(device: str, worst: float, model: str):
    curve = _curve(device, model)
    fit = fit_affine(curve.batch_size, curve.throughput)
    for batch, throughput in zip(curve.batch_size, curve.throughput, strict=True):
        assert fit.step_time(batch) == pytest.approx(batch / throughput, rel=worst)


def test_a_fit_recovers_a_line_and_never_goes_negative():
    exact = fit_affine([1, 2, 4], [b / (0.01 + 0.002 * b) for b in (1, 2, 4)])
    assert (exact.c0, exact.c1) == (pytest.approx(0.01), pytest.approx(0.002))
    superlinear = fit_affine([1, 2, 4], [100.0, 80.0, 60.0])
    assert superlinear.c0 == 0.0
    assert superlinear.c1 > 0.0


def test_the_catalogue_curve_is_the_default():
    workload = make_workload(RESNET50, V100, 32)
    curve = _curve("v100", "resnet50")
    assert workload.step_time == pytest.approx(fit_affine(curve.batch_size, curve.throughput).step_time(32))
    assert "MXNet" in workload.basis
    assert "within 3.4 %" in workload.basis
    assert workload.optimizer == 0.0
    assert "roofline" in make_workload(RESNET50, V100, 32, precision="fp16").basis
    assert "roofline" in make_workload(load_model("vgg16"), V100, 32).basis


def test_a_file_of_the_same_name_does_not_get_the_curve(tmp_path):
    path = tmp_path / "resnet50.toml"
    path.write_text('title = "Mine"\ninput = [4]\nlayers = [{ type = "dense", units = 3 }]\n')
    assert "roofline" in make_workload(load_model(path), V100, 32).basis


def test_units_at_the_border():
    assert Measured(step_time="97 ms", batch_size=32).step_time == pytest.approx(0.097)
    assert Measured(throughput="320 images/s", batch_size=32).step_time == pytest.approx(0.1)
    assert Affine("25.8 ms", "2.51 ms") == Affine(25.8e-3, 2.51e-3)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("compute", [Measured(step_time=0.1, batch_size=8), Affine(0.02, 0.003)])
def test_the_split_adds_up(name: str, compute: Measured | Affine):
    workload = make_workload(load_model(name), V100, 8, compute=compute)
    total = compute.step_time if isinstance(compute, Measured) else compute.step_time(8)
    assert workload.forward.sum() + workload.backward.sum() == pytest.approx(total, rel=1e-14)
    assert workload.forward.shape == workload.backward.shape == workload.grad_nbytes.shape
    assert workload.forward.min() >= 0.0


def test_backward_costs_one_pass_per_gradient():
    """Two gradients for a layer with weights, one for one without, the weights' alone for the first layer."""
    workload = make_workload(RESNET50, V100, 32)
    ratio = {
        layer.name: b / f
        for layer, f, b in zip(RESNET50.layers, workload.forward, workload.backward, strict=True)
        if f > 0.0
    }
    assert ratio["conv1"] == pytest.approx(1.0)
    assert ratio["layer1.0.conv1"] == pytest.approx(2.0)
    assert ratio["max_pool1"] == pytest.approx(1.0)
    assert "flatten1" not in ratio  # free
    assert 1.7 < workload.backward_time / workload.forward_time < 2.0


def test_roofline_by_hand():
    """fc of ResNet-50: 2 * 2048 * 1000 FLOP a sample, limited by reading 8.2 MB of weights at batch 1."""
    workload = make_workload(RESNET50, V100, 1, compute=Roofline(0.5, 0.5), stack=GRAPHS)
    nbytes = 4.0 * (2048 + 1000 + 2048 * 1000 + 1000)
    assert workload.forward[-1] == pytest.approx(nbytes / (0.5 * 900e9))
    large = make_workload(RESNET50, V100, 100_000, compute=Roofline(efficiency=0.5))
    assert large.forward[-1] == pytest.approx(100_000 * 2 * 2048 * 1000 / (0.5 * 15.7e12))
    assert large.optimizer == pytest.approx(20 * RESNET50.n_params / (0.8 * 900e9))
    # conv2 of the first block is 3x3 with stride 1: Winograd saves 2.25 in fp32 only
    index = next(i for i, layer in enumerate(RESNET50.layers) if layer.name == "layer1.0.conv2")
    macs = 56 * 56 * 64 * 64 * 9
    assert RESNET50.layers[index].macs == macs
    slow = make_workload(RESNET50, V100, 100, compute=Roofline(efficiency=0.01))
    assert slow.forward[index] == pytest.approx(100 * 2 * macs / 2.25 / (0.01 * 15.7e12))
    half = make_workload(RESNET50, V100, 100, compute=Roofline(efficiency=0.01), precision="fp16")
    assert half.forward[index] == pytest.approx(100 * 2 * macs / (0.01 * 125e12))


@pytest.mark.parametrize(
    ("device", "model", "batch", "precision", "throughput"),
    [
        ("k80", "resnet50", 32, "fp32", 49.48),  # MXNet 1.2 docs/faq/perf.md
        ("m60", "resnet50", 32, "fp32", 68.34),
        ("v100", "resnet50", 128, "fp32", 363.69),
        ("p100", "inception-v3", 64, "fp32", 142.0),  # TensorFlow performance/benchmarks.md
        ("v100", "resnet50", 256, "fp16", 1200.0),  # NVIDIA DeepLearningExamples
        ("a100-80g", "resnet50", 256, "tf32", 938.0),
        ("a100-80g", "resnet50", 256, "fp16", 2470.0),
    ],
)
def test_catalogue_efficiencies_give_the_throughput_they_come_from(
    device: str, model: str, batch: int, precision: str, throughput: float
):
    workload = make_workload(load_model(model), load_device(device), batch, compute=Roofline(), precision=precision)
    assert batch / workload.step_time == pytest.approx(throughput, rel=0.01)


@pytest.mark.parametrize(
    ("device", "model", "batch", "measured", "low", "high"),
    [  # measured images/s, and the band of predicted / measured step time that the roofline is known to keep
        ("k80", "resnet152", 32, 19.4, 0.95, 1.05),  # TensorFlow performance/benchmarks.md, Amazon EC2
        ("k80", "inception-v3", 32, 33.78, 0.85, 1.0),  # MXNet 1.2 docs/faq/perf.md
        ("v100", "inception-v3", 128, 253.68, 0.8, 1.0),
        ("v100", "resnet50", 32, 298.51, 0.75, 1.0),  # launch overheads are not modelled
        ("p100", "vgg16", 64, 154.0, 1.0, 1.6),  # libraries use larger Winograd tiles than F(2x2, 3x3)
    ],
)
def test_roofline_on_measurements_it_was_not_fitted_to(
    device: str, model: str, batch: int, measured: float, low: float, high: float
):
    workload = make_workload(load_model(model), load_device(device), batch, compute=Roofline())
    assert low < workload.step_time * measured / batch < high


def test_speed_and_gradient_type():
    nominal = make_workload(RESNET50, V100, 32)
    slow = make_workload(RESNET50, V100, 32, speed=0.5, gradient_dtype="fp16")
    assert slow.step_time == pytest.approx(2.0 * nominal.step_time)
    assert nominal.gradient_nbytes == 4.0 * 25_557_032
    assert slow.gradient_nbytes == 2.0 * 25_557_032
    assert slow.tensor_nbytes.sum() == slow.gradient_nbytes


def test_tensors_lie_in_declaration_order():
    workload = make_workload(RESNET50, V100, 32)
    assert len(workload.tensor_nbytes) == 161  # torchvision's resnet50 has 161 parameter tensors
    assert np.all(np.diff(workload.tensor_layer) >= 0)
    assert workload.tensor_nbytes[0] == 4 * 64 * 3 * 49
    assert workload.tensor_nbytes[-2:].tolist() == [4.0 * 2_048_000, 4.0 * 1000]
    assert np.array_equal(
        np.bincount(workload.tensor_layer, workload.tensor_nbytes, len(RESNET50.layers)), workload.grad_nbytes
    )


def test_every_device_is_complete():
    for name in device_names():
        device = load_device(name)
        assert set(device.efficiency) == set(device.peak_flops) - {"fp8", "fp4"}
        assert all(0.0 < value <= 1.0 for value in device.efficiency.values())
        assert 1e11 < device.peak_flops["fp32"] < 2e14
        assert 1e10 < device.memory_bandwidth < 1e13
        assert device.memory_nbytes > 4e9
        assert device.power_w > 0.0
        assert device.sources
        assert len(device.efficiency_basis) > 10
    assert load_device(V100) is V100


def test_published_device_numbers():
    assert V100.peak_flops["fp16"] == 125e12
    assert V100.memory_nbytes == 16 * 2**30
    assert load_device("k80").memory_bandwidth == 240e9


@pytest.mark.parametrize(
    ("name", "bf16", "fp8", "fp4", "memory_gb"),
    [
        ("h100", 989.5, 1979.0, None, 85.9),
        ("h20", 148.0, 296.0, None, 96.0),
        ("b200", 2250.0, 4500.0, 9000.0, 180.0),
        ("gb200", 2500.0, 5000.0, 10_000.0, 186.0),
        ("gb300", 2500.0, 5000.0, 15_000.0, 279.0),
        ("mi300x", 1307.4, 2614.9, None, 192.0),
        ("mi355x", 2516.6, 5033.2, 10_066.3, 288.0),
        ("tpu-v5p", 459.0, 459.0, None, 102.0),
    ],
)
def test_rates_of_data_sheets_are_dense(name: str, bf16: float, fp8: float, fp4: float | None, memory_gb: float):
    device = load_device(name)
    rates = {key: value / 1e12 for key, value in device.peak_flops.items()}
    assert (rates["bf16"], rates["fp8"], rates.get("fp4")) == pytest.approx((bf16, fp8, fp4))
    assert device.memory_nbytes / 1e9 == pytest.approx(memory_gb, rel=0.01)
    assert "only data sheets" in device.efficiency_basis or name == "h100"


def test_prices_are_dated_and_per_device():
    h100 = load_device("h100")
    assert {price.cloud for price in h100.prices} == {"aws", "azure", "coreweave", "gcp", "oci"}
    assert h100.price is None  # nobody pays unless asked to
    assert 3600.0 * h100.price_in("aws") == pytest.approx(55.04 / 8)
    for name in device_names():
        for price in load_device(name).prices:
            assert re.fullmatch(r"20\d\d-\d\d", price.date)
            assert 0.3 < 3600.0 * price.price / price.n_devices < 20.0
            assert price.source
    with pytest.raises(ConfigError, match=r"no 'ovh' price for device 'h100'; .* aws, azure, coreweave, gcp, oci"):
        h100.price_in("ovh")
    with pytest.raises(ConfigError, match=r"the catalogue has no 'aws' price for device 'p40'; .* '3.06 USD/h'$"):
        load_device("p40").price_in("aws")


def test_memory_by_hand():
    """12 bytes a parameter; LeNet-5 keeps what tanh and pooling make, and the logits: tanh does not read its input."""
    lenet = load_model("lenet5")
    kept = sum(int(np.prod(layer.out_shape)) for layer in lenet.layers if layer.type in ("tanh", "avg_pool")) + 10
    assert memory_of(lenet, 10).total == 12 * 61_706 + 10 * 4 * kept
    assert memory_of(lenet, 10, "fp16").total == 12 * 61_706 + 10 * 2 * kept
    assert memory_of(lenet, 10, n_workers=8).total == memory_of(lenet, 10).total  # every device has all of it


def _memory_warning(batch_size: int, device: Device = V100, precision: str = "fp32") -> str | None:
    return check_memory(Stage(make_workload(RESNET50, V100, batch_size, precision=precision)), device)


def test_check_memory():
    assert _memory_warning(64) is None
    warning = _memory_warning(512)
    assert warning is not None
    assert "resnet50 with batch size 512 in fp32 needs about 44.0 GB, but v100 has 17.2 GB" in warning
    largest = int(warning.rsplit(" ", 1)[1])
    assert _memory_warning(largest) is None
    assert _memory_warning(largest + 1) is not None
    assert _memory_warning(largest + 1, precision="fp16") is None
    assert "no batch fits" in str(_memory_warning(1, replace(V100, memory_nbytes=3e8)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_workload(RESNET50, V100, 0), "batch_size = 0: must be at least 1"),
        (lambda: make_workload(RESNET50, V100, 1, speed=0.0), "speed = 0.0: must be finite and above 0"),
        (
            lambda: make_workload(RESNET50, V100, 1, precision="tf32"),
            "precision: v100 does not support matrix products in tf32; supported: fp32, fp16",
        ),
        (
            lambda: make_workload(RESNET50, V100, 1, gradient_dtype="fp8"),
            "unknown gradient_dtype 'fp8'; did you",
        ),
        (
            lambda: make_workload(RESNET50, V100, 64, compute=Measured("97 ms", 32)),
            r"measured with batch_size = 32, not 64; measure that batch size too, or use Affine\(c0, c1\)",
        ),
        (lambda: load_device("v10"), "unknown device 'v10'; did you mean 'v100'"),
        (lambda: Measured(batch_size=3), "set either step_time or throughput"),
        (lambda: Measured("1 s", 3, throughput="3 images/s"), "set either step_time or throughput"),
        (lambda: Measured("1 s"), "batch_size = 0: must be at least 1; pass the batch"),
        (lambda: Measured("0 s", 1), "must be finite and above 0"),
        (lambda: Measured(throughput=1e-320, batch_size=1), "throughput = 1e-320: must be at least 1e-100"),
        (lambda: Measured("97", 32), "has no unit"),
        (lambda: Affine(-1.0, 1.0), "Affine: c0 = -1.0: must be finite and not negative"),
        (lambda: Affine(0.0, 0.0), r"c0 \+ c1 must be above 0"),
        (lambda: Roofline(efficiency=1.5), "efficiency = 1.5: must be above 0 and at most 1"),
        (lambda: Roofline(memory_efficiency=0.0), "memory_efficiency = 0.0"),
    ],
)
def test_bad_arguments(make: Callable[[], object], message: str):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_pass_takes_as_long_as_its_launches() -> None:
    """DLRM at a batch of 256: 27 kernels; what is missing lies behind the tables. CPUs and CUDA graphs do not wait."""
    model, stack = load_model("dlrm-criteo"), load_stack("pytorch")
    v100 = load_device("v100-32g")
    eager, replayed = (make_workload(model, v100, 256, compute=Roofline(), stack=each) for each in (stack, GRAPHS))
    assert eager.forward_time == pytest.approx(27 * stack.forward_launch)
    assert eager.backward_time == pytest.approx(27 * stack.backward_launch)
    first = next(i for i, layer in enumerate(model.layers) if layer.model_parallel)
    assert eager.forward[: first + 1].tolist() == replayed.forward[: first + 1].tolist()
    large = [make_workload(model, v100, 65536, compute=Roofline(), stack=each).step_time for each in (stack, GRAPHS)]
    assert large[0] == large[1]
    cpu = load_device("xeon-6148")
    times = [make_workload(model, cpu, 1, compute=Roofline(), stack=each).step_time for each in (stack, GRAPHS)]
    assert times[0] == times[1]
    assert make_workload(model, v100, 256, compute=Measured("1 us", 256)).step_time == pytest.approx(1e-6)


def test_megatron_fuses_the_softmax_of_four_matrices() -> None:
    """Two heads of a rank are too few for its kernel: more traffic, and four kernels more to launch."""
    stack, model = load_stack("megatron-2021"), load_model("gpt2-medium")
    ranks = [Timing(load_device("a100-80g"), stack, 1, "fp16", False, tensor) for tensor in (4, 8)]
    layer = next(i for i, each in enumerate(model.layers) if each.heads)
    assert [timing.fuses_softmax(model.layers[layer]) for timing in ranks] == [True, False]
    written = [float(score_times(model, timing)[layer]) for timing in ranks]
    assert written[1] > 0.7 * written[0]  # of half the matrices
    (first, end), *_ = blocks(model.layers)
    launched = [kernel_times(model, timing)[0][first:end].sum() for timing in ranks]  # both wait for the host
    assert launched[1] - launched[0] == pytest.approx(4 * stack.forward_launch)
