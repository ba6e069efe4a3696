"""The numbers of stacks: those measured on an H100 by hand, those fitted by the procedure that the catalogue names."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accuracy.stacks import FITS, catalogue, errors
from ddlsim import Experiment, Parallel, load_device, load_model, load_stack
from ddlsim.run.prepare import prepare
from ddlsim.workload.compute import EXPOSED_TRAFFIC
from ddlsim.workload.memory import kept_nbytes
from ddlsim.workload.products import Product, Timing, kernel_times, product_time
from ddlsim.workload.roles import blocks

DATA = Path(__file__).parents[2] / "accuracy" / "data" / "stack_h100.jsonl"
ROWS = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
H100 = load_device("h100")


def measured(mode: str, layers: int) -> dict[str, float]:
    """The first row of passes in bf16 through a number of layers."""
    wanted = (mode, layers, "bf16")
    return next(row for row in ROWS if (row.get("mode"), row.get("layers"), row.get("precision")) == wanted)


def of_layers(mode: str, field: str) -> float:
    """What a layer takes: the difference of six and two layers, by four."""
    return (measured(mode, 6)[field] - measured(mode, 2)[field]) / 4


def test_element_wise_work_of_eager_layers() -> None:
    """With the measured rates of products and attention, 2.4 times the bytes of fused kernels explain a layer; of two
    runs of six layers one was 1 % faster, which is 2 % of a layer."""
    model = load_model("llama-3-8b+layers=2")
    stack = replace(load_stack("fsdp-eager"), gemm=1.0, attention=("cudnn",))
    (first, end), *_ = blocks(model.layers)

    def seconds(elementwise: float) -> float:
        passes = kernel_times(model, Timing(H100, replace(stack, elementwise=elementwise), 1, "bf16", True))
        return float(sum(each[first:end].sum() for each in passes))

    assert load_stack("fsdp-eager").elementwise == 2.4
    assert seconds(2.4) == pytest.approx(of_layers("eager", "seconds"), rel=0.025)


def test_what_recomputed_layers_keep() -> None:
    """The growth of the measured peak per layer, less the layer's weights: all products that the policy names, and
    attention's log-sum-exp."""
    keeps = of_layers("eager, every second product recomputed", "peak_bytes") - of_layers("eager", "weight_bytes")
    two, six = (
        kept_nbytes(
            load_model(f"llama-3-8b+layers={n}").layers, "bf16", recompute="operators", flash=True,
            stack=load_stack("fsdp-eager"),
        )[0]
        for n in (2, 6)
    )  # fmt: skip
    log_sums = 4 * 32 * 8192
    assert (six - two) / 4 + log_sums == pytest.approx(keeps, rel=1e-4)


@pytest.mark.parametrize("row", [
    json.loads(line) for line in DATA.with_name("memory_h200.jsonl").read_text(encoding="utf-8").splitlines()
], ids=lambda row: f"{row['model']}, {row['stack']}")  # fmt: skip
def test_measured_peaks_of_fsdp2(row: dict[str, Any]) -> None:
    """What is reserved, and what is allocated at the peak of the loss, when there are no gradients of shards. With
    tensor groups, transient tensors of the first layers leave another 3 GiB of free blocks."""
    strategy = Parallel(
        data=row["data"], tensor=row["tensor"], sequence=row["tensor"] > 1, micro_batch=row["batch"], sharded="full",
        recompute=row["recompute"],
    )  # fmt: skip
    n = row["data"] * row["tensor"]
    made = prepare(
        Experiment(
            f"roce-h100+n_hosts={-(-n // 8)}",
            f"{row['model']}+seq=8192",
            strategy,
            row["data"] * row["batch"],
            workers=n,
            stack=row["stack"],
            device="h200",
        )
    )
    memory = made.stages[0].memory
    assert memory is not None
    params = (memory.weights + memory.gradients + memory.optimizer) / 16
    allocated = memory.activations + memory.buffers + 12 * params
    assert allocated / 2**30 == pytest.approx(row["allocated_gib"], rel=0.015)
    reserved = allocated + 4 * params + memory.reserved
    assert reserved / 2**30 == pytest.approx(row["reserved_gib"], rel=0.005 if row["tensor"] == 1 else 0.05)


def beside_channels(kind: str) -> dict[str, list[tuple[int, float, float]]]:
    """(channels, GB/s that they copy, ratio of the time to that alone) of each work whose name starts so."""
    rows = [json.loads(line) for line in DATA.with_name("channels_h100.jsonl").read_text(encoding="utf-8").splitlines()]
    names = dict.fromkeys(row["work"] for row in rows if row["work"].startswith(kind))
    alone = {
        name: float(np.median([row["seconds"] for row in rows if row["work"] == name and not row["channels"]]))
        for name in names
    }
    return {
        name: [
            (row["channels"], row["gbytes_per_s"], row["seconds"] / alone[name])
            for row in rows
            if row["work"] == name and row["channels"]
        ]
        for name in names
    }


def test_products_beside_collectives() -> None:
    """One more tile's time on the multiprocessors that are left, against their share alone: 23 products, two types."""
    assert H100.kernels is not None
    one, share = [], []
    for name, rows in beside_channels("gemm").items():
        m, k, n = map(int, name.rsplit(" ", 1)[1].split("x"))
        product, precision = Product(m, n, k), "fp8" if "fp8" in name else "bf16"
        alone = product_time(product, H100, precision)
        for channels, _, ratio in rows:
            left = H100.kernels.units - channels
            one.append(product_time(product, H100, precision, units=left) / alone / ratio - 1.0)
            share.append(H100.kernels.units / left / ratio - 1.0)
    assert len(one) == 171
    assert np.abs(one).mean() < 0.05
    assert abs(np.mean(one)) < 0.03
    assert np.abs(share).mean() > 0.11


def test_layers_beside_collectives() -> None:
    """Layers whose kernels the host launches in time, beside 16 channels that copy 6 GB/s each or only wait."""
    stack = replace(load_stack("pytorch"), rotation=None, gemm=1.0)

    def seconds(name: str, occupied: int) -> float:
        spec, batch, mode = re.search(r"(llama\S+), batch (\d+), (\w+)", name).groups()  # type: ignore[union-attr]
        model = load_model(spec)
        (first, end), *_ = blocks(model.layers)
        kernels = replace(stack, elementwise={"eager": 2.4, "compiled": 1.0}[mode])
        passes = kernel_times(model, Timing(H100, kernels, int(batch), "bf16", True, occupied=occupied))
        return float(sum(each[first:end].sum() for each in passes[: 2 if "backward" in name else 1]))

    errors = [
        seconds(name, channels) / seconds(name, 0) / ratio - 1.0
        for name, rows in beside_channels("layer").items()
        for channels, rate, ratio in rows
        if channels == 16 and rate < 100.0 and "dim=2048" not in name
    ]
    assert len(errors) == 16
    assert np.abs(errors).mean() < 0.03


def test_element_wise_work_of_the_foundation_model_stack() -> None:
    """Least squares over the element-wise kernels of 13 passes with FlashAttention-2; the steps follow."""
    rows = [json.loads(line) for line in DATA.with_name("fms_h100.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if "flash-2" in row["mode"]]
    assert len(rows) == 13
    stack = replace(load_stack("fms-fsdp"), gemm=1.0, forward_launch=0.0, backward_launch=0.0)

    def seconds(row: dict[str, Any], elementwise: float, rotation: float) -> float:
        timing = Timing(
            H100, replace(stack, elementwise=elementwise, rotation=rotation), row["batch"], "bf16", True
        )  # fmt: skip
        return float(sum(each.sum() for each in kernel_times(load_model(row["model"]), timing)))

    tiny = 1e-9
    parts = np.array([
        [seconds(row, 1.0, tiny) - seconds(row, tiny, tiny), seconds(row, tiny, 1.0) - seconds(row, tiny, tiny)]
        for row in rows
    ])  # fmt: skip
    kinds = ("elementwise", "reduce", "memcpy", "other")
    found = np.array([sum(row["kernels"].get(kind, 0.0) for kind in kinds) for row in rows])
    fitted = np.linalg.lstsq(parts / found[:, None], np.ones(len(rows)), rcond=None)[0]
    assert fitted == pytest.approx([stack.elementwise, stack.rotation], rel=0.01)
    assert np.abs(parts @ fitted / found - 1.0).mean() < 0.025
    busy = [row for row in rows if row["batch"] > 1 or "dim=2048" not in row["model"]]  # the host launches in time
    steps = [seconds(row, stack.elementwise, stack.rotation or 0.0) / row["seconds"] - 1.0 for row in busy]
    assert np.abs(steps).mean() < 0.03


MODELS = {
    "gpt2-small": "gpt2",
    "gpt2-medium": "gpt2-medium",
    "gpt-1.3b": "gpt3-1.3b",
    "llama-3-8b, 4 of 32 layers": "llama-3-8b+layers=4",
    "llama-2-7b, 8 of 32 layers": "llama-2-7b+layers=8",
    "gpt3-13b, 4 of 40 layers": "gpt3-13b+layers=4",
}


def whole_steps(mode: str) -> list[tuple[str, int, float]]:
    """(model, batch, seconds) of the measured steps in which the GPU and not the host decides."""
    steps = json.loads(DATA.with_name("gpu_h100.json").read_text(encoding="utf-8"))["steps_again"]
    chosen = [
        (MODELS[row["model"]], row["batch"], row["seconds"])
        for row in steps
        if row["model"] in MODELS
        and row["mode"] == {"autocast": "amp"}.get(mode, mode)
        and row["batch"] * row["length"] >= (8192 if "gpt2" in row["model"] else 4096)
    ]
    ours = [row for row in ROWS if row.get("mode") == f"llama-{mode}" and "dim=768" not in row["model"]]
    return chosen + [
        (row["model"], row["batch"], row["seconds"])
        for row in ours
        if row["batch"] > 1 or "layers=4+" in row["model"]  # a batch of 1 does not keep 24 layers busy
    ]


@pytest.mark.parametrize(
    ("mode", "elementwise", "rotation", "loss", "update", "error"),
    [("autocast", 1.7, 24.0, 56.0, 32.0, 0.07), ("bf16", 0.85, 19.0, 23.0, 20.0, 0.045)],
)
def test_whole_steps(mode: str, elementwise: float, rotation: float, loss: float, update: float, error: float) -> None:
    """Both numbers are those of least squares; AdamW moved 32 and 20 bytes per parameter (stack_h100.jsonl)."""
    rows = whole_steps(mode)
    assert len(rows) >= 16
    assert H100.kernels is not None
    bandwidth = H100.memory_bandwidth * H100.kernels.streaming

    def errors(numbers: tuple[float, float]) -> list[float]:
        stack = replace(load_stack("pytorch"), elementwise=numbers[0], rotation=numbers[1], loss_traffic=loss)
        found = []
        for name, batch, seconds in rows:
            model = load_model(name)
            passes = sum(float(each.sum()) for each in kernel_times(model, Timing(H100, stack, batch, "bf16", True)))
            found.append((passes + update * model.n_params / bandwidth) / seconds - 1.0)
        return found

    def squares(numbers: tuple[float, float]) -> float:
        return sum(each * each for each in errors(numbers))

    best = squares((elementwise, rotation))
    for factor in (0.85, 1.15):
        assert best < squares((factor * elementwise, rotation))
        assert best < squares((elementwise, factor * rotation))
    assert sum(map(abs, errors((elementwise, rotation)))) / len(rows) < error
    stack = load_stack("pytorch")
    assert (stack.elementwise, stack.rotation, stack.loss_traffic) == (1.7, 24.0, 56.0)


@pytest.mark.parametrize(
    ("mode", "stack", "traffic"),
    [("eager-fp32", "fsdp-eager", 56), ("eager-bf16", "llm-foundry", 23), ("compile-fp32", "megatron", 14)],
)
def test_traffic_of_the_loss(mode: str, stack: str, traffic: float) -> None:
    row = next(row for row in ROWS if row["what"] == "loss" and row["mode"] == mode)
    assert H100.kernels is not None
    moved = row["seconds"] * H100.memory_bandwidth * H100.kernels.streaming
    assert moved / row["logits"] == pytest.approx(traffic, rel=0.03)
    assert load_stack(stack).loss_traffic == traffic


def test_peak_of_the_loss() -> None:
    """What is there beside weights and kept activations: 12 bytes per logit in eager fp32, 4 compiled."""
    for mode, nbytes in (("eager", 12.0), ("compiled", 4.0)):
        two = measured(mode, 2)
        weights = of_layers(mode, "weight_bytes")  # gradients of a layer take as much, until the pass is over
        kept = of_layers(mode, "peak_bytes") - weights
        logits = (two["peak_bytes"] - two["weight_bytes"] - 2 * kept) / (8192 * 128256)
        assert logits == pytest.approx(nbytes, rel=0.06)
    assert load_stack("fsdp-eager").loss_nbytes == 12.0


def test_power_limits_products_and_passes() -> None:
    """At 700 W neither runs at 1.98 GHz, and rates do not fall with time."""
    for mode in ("bf16", "fp8", "lm6-eager"):
        rows = [row for row in ROWS if row["what"] == "sustained" and row["mode"] == mode]
        assert all(690 < row["watts"] < 705 and row["sm_mhz"] < 1550 for row in rows[1:])
        assert rows[-1]["seconds"] == pytest.approx(rows[0]["seconds"], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", FITS)
def test_no_other_numbers_fit_better(name: str) -> None:
    """A tenth more or less of a number brings no smaller sum of squares than 1 % below that of the catalogue."""
    fit = FITS[name]
    numbers = catalogue(fit)
    least = float((errors(fit, numbers) ** 2).sum())
    for i, number in enumerate(numbers):
        for factor in (0.9, 1.1):
            other = [
                *numbers[:i],
                min(number * factor, 1.0 if fit.numbers[i][1] == "gemm" else 10.0),
                *numbers[i + 1 :],
            ]
            assert float((errors(fit, other) ** 2).sum()) > 0.99 * least


# ------------------------------------------------------------ sums of gradients

#: bytes per number of the result besides those of a result in bf16
SUMS = {"fp32-output": 2.0, "fp32-accumulated": 6.0, "bf16-accumulated": 2.0}


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in DATA.with_name(name).read_text(encoding="utf-8").splitlines()]


def test_products_that_compute_sums_of_gradients() -> None:
    """The share of their additional traffic that adds to the time is that of least squares over 21 products."""
    rows = rows_of("accumulation_h100.jsonl")
    assert len(rows) == 21

    def errors(share: float) -> np.ndarray:
        seconds = [
            row["bf16"] + share * nbytes * row["m"] * row["n"] / (0.8 * H100.memory_bandwidth)
            for row in rows
            for nbytes in SUMS.values()
        ]
        return np.log(np.array(seconds) / [row[kind] for row in rows for kind in SUMS])

    best = (errors(EXPOSED_TRAFFIC) ** 2).sum()
    assert best < min((errors(EXPOSED_TRAFFIC + step) ** 2).sum() for step in (-0.01, 0.01))
    assert np.abs(np.expm1(errors(EXPOSED_TRAFFIC))).mean() < 0.03 < 0.09 < np.abs(np.expm1(errors(0.0))).mean()


@pytest.mark.parametrize(("device", "error"), [("h100", 0.12), ("h200", 0.14)])
def test_grouped_products_of_experts(device: str, error: float) -> None:
    """Products of all experts, and those of their weights' gradients, if each expert has the same number of tokens."""
    errors = []
    for row in rows_of("experts.jsonl"):
        if row["device"] == device:
            n, k, experts, each = row["n"], row["k"], row["experts"], row["tokens"] / row["experts"]
            products = Product(each, n, k, experts), Product(k, n, each, experts)
            found = [product_time(product, load_device(device), "bf16") for product in products]
            errors += [found[0] / row["balanced"] - 1.0, found[1] / row["balanced weight"] - 1.0]
    assert len(errors) == 14
    assert np.abs(errors).mean() < error
