"""Calibrates the kernels of the A100 on one machine, and says how well half of its rows predict the other half.

`python -m accuracy.kernels` prints the numbers of ``[[kernels]]`` in ``ddlsim/workload/devices.toml``: the fraction of
the peak, the times of launches and of the framework, and the wait at collectives, by least squares of the logarithms;
waves and tiles are those of the documentation. Fitted to every second row, what does it predict of the others?

Of a step of m micro-batches on p stages, d replicas and t tensor-parallel ranks,

    T = m (stage + embedding + output) + (p - 1) stage + gradients + update,   stage = L/p (2 forward + backward + sums)

the forward pass twice, as all is computed again, and six all-reduces of a layer's activations in it. All-reduces move
2 (n - 1)/n of their bytes at 235 GB/s (what NCCL reaches on the NVLink of this machine), the update 28 bytes a
parameter.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from ddlsim.workload.devices import Device, Kernels, load_device
from ddlsim.workload.model import Model, load_model
from ddlsim.workload.products import kernel_times
from ddlsim.workload.roles import blocks

__all__ = ["Row", "errors", "fit", "predicted", "rows"]

FILE = Path(__file__).parent / "data" / "transformers_a100.csv"
VOCABULARY = 51_200
BUS = 235e9
SUMMED = 6  # all-reduces of a layer: two in each forward pass, two in the backward pass
#: what is fitted, and in which unit
FITTED = {"fraction": 1.0, "forward_launch": 1e-5, "backward_launch": 1e-5, "loss_time": 1e-3, "wait": 1e-5}
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


def predicted(row: Row, device: Device) -> float:
    """Return the seconds of a row's step on a device."""
    model = one_layer(row.h, row.a, row.seq)
    forward, backward = kernel_times(model, device, row.micro, "fp16", tensor=row.t)
    ((first, end),) = blocks(model.layers)
    nbytes = 2.0 * row.micro * row.seq * row.h
    layer = 2.0 * forward[first:end].sum() + backward[first:end].sum() + SUMMED * _all_reduce(nbytes, row.t)
    outside = forward.sum() + backward.sum() - forward[first:end].sum() - backward[first:end].sum()
    stage = row.layers / row.p * layer
    params = (12.0 * row.layers * row.h**2 / row.p + VOCABULARY * row.h) / row.t
    update = 28.0 * params / (0.8 * device.memory_bandwidth)
    steps = row.batch // (row.d * row.micro)
    return float(steps * (stage + outside) + (row.p - 1) * stage + _all_reduce(2.0 * params, row.d) + update)


def _all_reduce(nbytes: float, n: int) -> float:
    return 2.0 * (n - 1) / n * nbytes / BUS


def errors(measured: Sequence[Row], device: Device) -> np.ndarray:
    """Return predicted / measured - 1 of each row."""
    return np.array([predicted(row, device) / row.seconds - 1.0 for row in measured])


def fit(measured: Sequence[Row], device: Device) -> Kernels:
    """Return the kernels that fit the rows best: soft L1 beyond 1 %, close to the mean of absolute errors."""
    from scipy.optimize import least_squares

    kernels = device.kernels
    assert kernels is not None

    def kernels_at(point: np.ndarray) -> Kernels:
        values = zip(FITTED.items(), point.tolist(), strict=True)
        return replace(kernels, **{name: value * unit for (name, unit), value in values})

    def residuals(point: np.ndarray) -> np.ndarray:
        return np.log1p(errors(measured, replace(device, kernels=kernels_at(point))))

    start = [0.8, 3.0, 10.0, 3.0, 2.0]
    found = least_squares(residuals, start, bounds=(1e-6, [1.0, 50, 100, 50, 50]), loss="soft_l1", f_scale=0.01)
    return kernels_at(found.x)


def main() -> None:
    device, measured = load_device("a100-80g"), rows()
    for fitted, tested in ((measured[::2], measured[1::2]), (measured[1::2], measured[::2])):
        kernels = fit(fitted, device)
        print({name: f"{getattr(kernels, name):.4g}" for name in FITTED})
        for label, half in (("fitted", fitted), ("predicted", tested)):
            off = errors(half, replace(device, kernels=kernels))
            print(f"{label}: mean {np.abs(off).mean():.2%}, worst {np.abs(off).max():.0%}")
    kernels = fit(measured, device)
    print("all rows:", {name: f"{getattr(kernels, name):.4g}" for name in FITTED})
    print(f"mean {np.abs(errors(measured, replace(device, kernels=kernels))).mean():.2%}")


if __name__ == "__main__":
    main()
