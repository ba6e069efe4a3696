"""Fits the A100's matrix products, and the times of Megatron-DeepSpeed's host to the steps of one machine.

`python -m accuracy.kernels` prints what fits measured products (``data/products_a100.csv``) if each uses the fastest
tile, which gives the A100's ``tile_time``, then its ``gemm`` (both ``[[kernels]]`` in
``ddlsim/workload/devices.toml``) and the times of the stack "megatron-2021" (``ddlsim/workload/stacks.toml``), which
are fitted to steps, by least squares of the logarithms. It also fits every second model and every second row alone, and
prints the errors on the others. Tiles and multiprocessors are documented values.

Of a step of m micro-batches on p stages, d replicas and t tensor-parallel ranks,

    T = m (stage + embedding + output) + (p - 1) stage + gradients + update,   stage = L/p (2 forward + backward + sums)

the forward pass twice, as all is computed again, and six all-reduces of a layer's activations in it. All-reduces take
the times that were measured on this machine (``data/all_reduce_a100.csv``), the update moves the bytes of the stack's
``adam_traffic``, and adding the gradients of a micro-batch to those before it 6 bytes a parameter.
"""

from __future__ import annotations

import csv
import functools
import operator
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from ddlsim.workload.devices import Device, Kernels, load_device
from ddlsim.workload.model import Model, load_model
from ddlsim.workload.products import Product, Timing, kernel_times, product_time
from ddlsim.workload.roles import blocks
from ddlsim.workload.stacks import Stack, load_stack

__all__ = [
    "CATALOGUE",
    "FITTED",
    "Row",
    "Software",
    "errors",
    "fit",
    "fit_products",
    "measured_all_reduce",
    "predicted",
    "product_errors",
    "products",
    "rows",
    "values",
]

FILE = Path(__file__).parent / "data" / "transformers_a100.csv"
VOCABULARY = 51_200
ALL_REDUCES = np.loadtxt(FILE.with_name("all_reduce_a100.csv"), delimiter=",", skiprows=3)
PRODUCTS = FILE.with_name("products_a100.csv")
#: tiles of cuBLAS (NVIDIA, Matrix Multiplication Background User's Guide)
TILES = ((128, 256), (128, 128), (64, 256), (64, 128), (64, 64))
SUMMED = 6  # all-reduces of a layer: two in each forward pass, two in the backward pass
#: what is fitted, and in which unit: a rate of the device, and times of the stack
FITTED = {"gemm": 1.0, "forward_launch": 1e-5, "backward_launch": 1e-5, "micro_batch_time": 1e-3, "rank_delay": 1e-5}
MODEL = """
title = "One layer of a GPT"
input = [{seq}]
layers = [
  {{ type = "embedding", vocabulary = {vocabulary}, positions = {seq}, dim = {h} }},
  {{ type = "dropout" }},
  {{ type = "residual", body = [
    {{ type = "layer_norm" }},
    {{ type = "attention", heads = {a}, fused = true }},
    {{ type = "dropout" }},
  ] }},
  {{ type = "residual", body = [
    {{ type = "layer_norm" }},
    {{ type = "dense", units = {wide} }},
    {{ type = "gelu" }},
    {{ type = "dense", units = {h} }},
    {{ type = "dropout" }},
  ] }},
  {{ type = "layer_norm" }},
  {{ type = "tied_dense", units = {vocabulary}, bias = false }},
]
"""


class Row(NamedTuple):
    """A measured step, in the columns of the file."""

    gpus: int
    batch: int
    micro: int
    h: int
    a: int
    layers: int
    seq: int
    t: int
    d: int
    p: int
    seconds: float


class Software(NamedTuple):
    """A device and what runs on it."""

    device: Device
    stack: Stack


CATALOGUE = Software(load_device("a100-80g"), load_stack("megatron-2021"))


def rows(path: Path = FILE) -> list[Row]:
    """Return the rows of a file."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    table = list(csv.reader(lines))[1:]
    return [Row(*(int(value) for value in row[:-1]), seconds=float(row[-1]) / 1e3) for row in table]


@functools.cache
def one_layer(h: int, a: int, seq: int) -> Model:
    """Return a GPT of one layer."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "layer.toml"
        path.write_text(MODEL.format(h=h, a=a, seq=seq, wide=4 * h, vocabulary=VOCABULARY), encoding="utf-8")
        return load_model(path)


def _times(software: Software, row: Row) -> tuple[float, float]:
    """Return the seconds of a recomputed layer without all-reduces, and of what is outside of layers."""
    model = one_layer(row.h, row.a, row.seq)
    forward, backward = kernel_times(model, Timing(*software, row.micro, "fp16", False, row.t))
    ((first, end),) = blocks(model.layers)
    inside = float(forward[first:end].sum()), float(backward[first:end].sum())
    return 2.0 * inside[0] + inside[1], float(forward.sum() + backward.sum()) - sum(inside)


def predicted(row: Row, software: Software) -> float:
    """Return the seconds of a row's step."""
    return _predicted(row, software, *_times(software, row))


def _predicted(row: Row, software: Software, layer: float, outside: float) -> float:
    device, stack = software
    stage = row.layers / row.p * (layer + SUMMED * measured_all_reduce(2.0 * row.micro * row.seq * row.h, row.t))
    params = (12.0 * row.layers * row.h**2 / row.p + VOCABULARY * row.h) / row.t
    update = stack.adam_traffic * params / (0.8 * device.memory_bandwidth)
    steps = row.batch // (row.d * row.micro)
    added = (steps - 1) * 6.0 * params / (0.8 * device.memory_bandwidth)
    reduced = measured_all_reduce(2.0 * params, row.d)
    return float(steps * (stage + outside) + (row.p - 1) * stage + reduced + update + added)


def measured_all_reduce(nbytes: float, n: int) -> float:
    """Return the seconds of an all-reduce on `n` GPUs of the machine, between measured sizes on a line."""
    if n == 1:
        return 0.0
    sizes, ns = ALL_REDUCES[ALL_REDUCES[:, 0] == n, 1:].T
    return 1e-9 * float(np.interp(nbytes, sizes, ns)) * max(1.0, nbytes / float(sizes[-1]))


def products() -> dict[str, list[tuple[Product, float]]]:
    """Return the measured products and their seconds, by model."""
    found: dict[str, list[tuple[Product, float]]] = {}
    lines = PRODUCTS.read_text(encoding="utf-8").splitlines()
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        product = Product(*(float(row[name]) for name in "mnk"))
        found.setdefault(row["model"], []).append((product, 1e-6 * float(row["us"])))
    return found


def product_errors(measured: Sequence[tuple[Product, float]], kernels: Kernels) -> np.ndarray:
    """Return predicted / measured - 1 of each product."""
    device = replace(CATALOGUE.device, kernels=kernels)
    return np.array([product_time(product, device, "fp16") / seconds - 1.0 for product, seconds in measured])


def fit_products(measured: Sequence[tuple[Product, float]]) -> Kernels:
    """Return the `gemm` and `tile_time` that fit products best, as :mod:`ddlsim.measure` fits other devices."""
    from scipy.optimize import least_squares

    kernels = CATALOGUE.device.kernels
    assert kernels is not None

    def kernels_at(point: np.ndarray) -> Kernels:
        gemm = {"bf16": float(point[0])}
        return replace(kernels, gemm=gemm, tile=TILES[0], tiles=TILES[1:], tile_time=1e-6 * float(point[1]))

    def residuals(point: np.ndarray) -> np.ndarray:
        return np.log1p(product_errors(measured, kernels_at(point)))

    bounds = 1e-3, [1.0, 100.0]
    solution = least_squares(residuals, [0.8, 1.0], bounds=bounds, loss="soft_l1", f_scale=0.02, diff_step=1e-3)
    return kernels_at(solution.x)


def errors(measured: Sequence[Row], software: Software) -> np.ndarray:
    """Return predicted / measured - 1 of each row."""
    shape = operator.attrgetter("h", "a", "seq", "micro", "t")  # rows share 31
    times = {key: _times(software, row) for key, row in {shape(row): row for row in measured}.items()}
    return np.array([_predicted(row, software, *times[shape(row)]) / row.seconds - 1.0 for row in measured])


def values(software: Software) -> dict[str, float]:
    """Return the fitted numbers of a device and a stack, in SI units."""
    device, stack = software
    assert device.kernels is not None
    gemm = device.kernels.fraction("fp16")
    assert gemm is not None
    return {name: gemm if name == "gemm" else getattr(stack, name) for name in FITTED}


def fit(measured: Sequence[Row]) -> Software:
    """Return the device and the stack that fit the rows best: soft L1 beyond 1 %, close to the mean absolute error."""
    from scipy.optimize import least_squares

    device, stack = CATALOGUE
    kernels = device.kernels
    assert kernels is not None

    def software_at(point: np.ndarray) -> Software:
        gemm, *times = (value * unit for value, unit in zip(point.tolist(), FITTED.values(), strict=True))
        return Software(
            replace(device, kernels=replace(kernels, gemm={"bf16": gemm})),
            replace(stack, **dict(zip(list(FITTED)[1:], times, strict=True))),
        )

    def residuals(point: np.ndarray) -> np.ndarray:
        return np.log1p(errors(measured, software_at(point)))

    start = [0.8, 3.0, 10.0, 3.0, 2.0]
    solution = least_squares(residuals, start, bounds=(1e-6, [1.0, 50, 100, 50, 50]), loss="soft_l1", f_scale=0.01)
    return software_at(solution.x)


def _show(label: str, measured: Sequence[Row], software: Software) -> None:
    off = np.abs(errors(measured, software))
    print(f"{label}: mean {off.mean():.2%}, worst {off.max():.0%}")


def main() -> None:
    by_model = list(products().values())
    for label, fitted, others in (
        ("even models", by_model[::2], by_model[1::2]),
        ("odd models", by_model[1::2], by_model[::2]),
        ("all models", by_model, by_model),
    ):
        kernels = fit_products([row for rows in fitted for row in rows])
        mean = np.abs(product_errors([row for rows in others for row in rows], kernels)).mean()
        print(label, f"gemm {kernels.gemm['bf16']:.4g}, tile_time {kernels.tile_time * 1e6:.3g} us; others {mean:.2%}")
    measured = rows()
    for label, fitted, others in (
        ("even rows", measured[::2], measured[1::2]),
        ("odd rows", measured[1::2], measured[::2]),
        ("all rows", measured, measured),
    ):
        software = fit(fitted)
        print(label, {name: f"{value:.4g}" for name, value in values(software).items()})
        _show("  fitted", fitted, software)
        _show("  the others", others, software)
    _show("as in the catalogue", measured, CATALOGUE)


if __name__ == "__main__":
    main()
