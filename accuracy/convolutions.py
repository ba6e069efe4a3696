"""Fits the rates of convolutional networks' kernels to one H200, and predicts the steps of one H100.

    python -m accuracy.convolutions          fits the rates to the kernels of the H200
    python -m accuracy.convolutions FILE     compares the steps and kernels of a file with predictions

A file has one JSON object per line: "device", "conv" (seconds of a convolution and of its two gradients), "element"
(other kernels) and "step" (seconds of a training step with momentum SGD). The form of the model was revised with the
steps of the H200 in view, so only the steps of the H100, which were compared once the model was finished, count as
predictions. The fit reads kernels only, and minimises soft-L1 losses of the logarithms. Kernels shorter than
:data:`SHORTEST` are left out, because the host was slower than the kernels. For the same reason, the forward time of a
convolution is the shortest of all repetitions.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from accuracy.rows import Row, bias, mean_error, show
from ddlsim import ConfigError, PerKernel, load_device, load_model, load_stack
from ddlsim.workload.compute import make_workload
from ddlsim.workload.convolutions import LayerKernels
from ddlsim.workload.devices import ConvolutionRates, Device
from ddlsim.workload.layers import LAYER_TYPES
from ddlsim.workload.model import Layer
from ddlsim.workload.products import Timing

__all__ = ["FILE", "HELD_OUT", "Kernel", "errors", "fit", "kernels", "read", "remark", "rows", "steps", "summary"]

_DATA = Path(__file__).parent / "data"
FILE, HELD_OUT = _DATA / "conv_h200.jsonl", _DATA / "conv_h100.jsonl"
#: shortest kernels that are fitted: convolutions and their gradients, other kernels forward and backward, in s
SHORTEST = {"conv": (25e-6, 150e-6), "element": (100e-6, 250e-6)}
#: share of a step in which the host issues kernels from which on the host is the limit
HOST_LIMIT = 0.8
#: models under other names than the bundled ones, and devices by a part of their names
MODELS = {"resnext101_32x8d": "resnext101-32x8d", "inception_v3": "inception-v3", "vgg19": "vgg-19", "vgg11": "vgg-a"}
DEVICES = {"H200": "h200", "H100 NVL": "h100-nvl", "H100 PCIe": "h100-pcie", "H100": "h100"}
_NAMES = {"batch-norm": "batch_norm", "max-pool": "max_pool"}
_PASSES = ("forward", "input", "weight")
_SHARES = (*_PASSES, "streaming")  # at most 1


class Kernel(NamedTuple):
    """A measured kernel: `part` of a layer, with the seconds that it took."""

    layer: Layer
    batch: int
    precision: str
    memory_format: str
    part: str
    seconds: float


class Setting(NamedTuple):
    """Precision and memory format of a mode such as "bf16-nhwc"; "default" is PyTorch's."""

    precision: str
    memory_format: str

    @staticmethod
    def of(mode: str) -> Setting:
        """Return the setting of a mode; raise ConfigError if it is unknown."""
        precision = "tf32" if mode.startswith("default") else mode.split("-")[0]
        if precision not in ("tf32", "fp32", "bf16", "fp16"):
            raise ConfigError(f"mode {mode!r}: expected default, fp32, tf32, fp16 or bf16, with -nchw or -nhwc")
        return Setting(precision, "channels_last" if "nhwc" in mode else "nchw")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def device_of(lines: Sequence[Mapping[str, Any]]) -> Device:
    """Return the catalogue's device on which a file was measured."""
    name = next(line["name"] for line in lines if line["what"] == "device")
    found = next((known for part, known in DEVICES.items() if part in name), None)
    if found is None:
        raise ConfigError(f"device {name!r}: expected a name that contains {', '.join(DEVICES)}")
    return load_device(found)


def _layer(kind: str, in_shape: tuple[int, ...], **options: Any) -> Layer:
    cost = LAYER_TYPES[kind](type=kind, **options).cost(in_shape)  # type: ignore[call-arg]
    n_params, n_out = sum(n for _, n in cost.tensors), math.prod(cost.out_shape)
    return Layer(
        kind, kind, in_shape, cost.out_shape, n_params, cost.macs, 2.0 * cost.macs, 4.0 * n_out, cost.tensors,
        winograd=cost.winograd, window=cost.window,
    )  # fmt: skip


def kernels(lines: Sequence[Mapping[str, Any]]) -> list[Kernel]:
    """Return the measured kernels that the host did not limit."""
    found = []
    for line in lines:
        if line["what"] == "conv" and not line.get("autotuned"):
            sizes = {
                key: tuple(line[key]) if isinstance(line[key], list) else line[key]
                for key in ("kernel", "stride", "padding", "groups")
            }
            layer = _layer(
                "conv", (line["cin"], line["size"], line["size"]), channels=line["cout"], bias=False, **sizes
            )
            seconds = {part: line[part] for part in _PASSES}
            seconds["forward"] = line["spread"][0]
        elif line["what"] == "element" and line["kernel"] in _NAMES:
            kind = _NAMES[line["kernel"]]
            options = {"kernel": 3, "stride": 2, "padding": 1} if kind == "max_pool" else {}
            layer = _layer(kind, (line["channels"], line["size"], line["size"]), **options)
            seconds = {part: line[part] for part in ("forward", "backward")}
        else:
            continue
        setting = Setting.of(line["mode"])
        for part, value in seconds.items():
            if value is not None and value >= SHORTEST[line["what"]][part != "forward"]:
                found.append(Kernel(layer, line["batch"], *setting, part, value))
    return found


def predicted(kernel: Kernel, device: Device) -> float:
    """Return the seconds of a kernel."""
    stack = replace(load_stack("pytorch"), memory_format=kernel.memory_format)
    times = LayerKernels(Timing(device, stack, kernel.batch, kernel.precision, False))
    if kernel.layer.type == "conv":
        return times.products(kernel.layer)[_PASSES.index(kernel.part)]
    return times.seconds(kernel.layer, (0.0, 0.0))[kernel.part == "backward"]


def errors(measured: Sequence[Kernel], device: Device) -> np.ndarray:
    """Return predicted / measured - 1 of each kernel."""
    return np.array([predicted(kernel, device) / kernel.seconds - 1.0 for kernel in measured])


def values(rates: ConvolutionRates) -> dict[str, float]:
    """Return all rates, by names such as "forward.bf16" and "pooled.0"."""
    found: dict[str, float] = {}
    for name in ("forward", "input", "weight"):
        found |= {f"{name}.{key}": value for key, value in getattr(rates, name).items()}
    for name, pair in {"winograd": rates.winograd, "pooled": rates.pooled, **rates.normalised}.items():
        found |= {f"{name}.{i}": value for i, value in enumerate(pair)}
    return found | {"streaming": rates.streaming, "converted": rates.converted}


def with_values(device: Device, new: Mapping[str, float]) -> Device:
    """Return the device with other rates."""
    old = rates_of(device)
    left = values(old) | new
    shares = {part: {key: left[f"{part}.{key}"] for key in getattr(old, part)} for part in _PASSES}
    pairs = {name: (left[f"{name}.0"], left[f"{name}.1"]) for name in ("pooled", *old.normalised)}
    rates = replace(
        old, **shares, winograd=tuple(left[f"winograd.{i}"] for i in range(3)), pooled=pairs.pop("pooled"),
        normalised=pairs, streaming=left["streaming"], converted=left["converted"],
    )  # fmt: skip
    return replace(device, kernels=replace(device.kernels, convolution=rates))


def rates_of(device: Device) -> ConvolutionRates:
    """Return the rates of a device."""
    assert device.kernels is not None
    assert device.kernels.convolution is not None
    return device.kernels.convolution


def fitted_to(kernel: Kernel) -> tuple[str, ...]:
    """Return the names of the rates that are fitted to a kernel, together with the others of its group."""
    if kernel.layer.type == "max_pool":
        return "pooled.0", "pooled.1"
    if kernel.layer.type == "batch_norm":
        name = (
            kernel.memory_format
            if kernel.memory_format != "nchw"
            else f"nchw-{16 if kernel.precision == 'bf16' else 32}"
        )
        return f"{name}.0", f"{name}.1"
    if kernel.precision == "fp32":
        return (*(f"{part}.fp32" for part in _PASSES), *(f"winograd.{i}" for i in range(3)))
    return (*(f"{part}.{key}" for key in ("bf16", "tf32") for part in _PASSES), "streaming", "converted")


def fit(measured: Sequence[Kernel], device: Device) -> Device:
    """Return the device with the rates that fit the kernels best."""
    from scipy.optimize import least_squares

    groups: dict[tuple[str, ...], list[Kernel]] = {}
    for kernel in measured:
        groups.setdefault(fitted_to(kernel), []).append(kernel)
    for names, members in groups.items():

        def at(point: np.ndarray, device: Device, names: tuple[str, ...]) -> Device:
            return with_values(device, dict(zip(names, np.exp(point).tolist(), strict=True)))

        def residuals(point: np.ndarray, device: Device, names: tuple[str, ...], members: list[Kernel]) -> np.ndarray:
            return np.log1p(errors(members, at(point, device, names)))

        start = np.log([values(rates_of(device))[name] for name in names])
        bounds = (-np.inf, [0.0 if name.startswith(_SHARES) else np.inf for name in names])
        options: dict[str, Any] = {"bounds": bounds, "loss": "soft_l1", "f_scale": 0.1, "diff_step": 1e-4}
        solution = least_squares(residuals, start, args=(device, names, members), **options)
        device = at(solution.x, device, names)
    return device


def steps(path: Path) -> list[Row]:
    """Return the steps of a file; those that the host limits have a note."""
    lines, found = read(path), []
    device = device_of(lines)
    for line in lines:
        if line["what"] != "step":
            continue
        try:
            model, setting = load_model(MODELS.get(line["model"], line["model"])), Setting.of(line["mode"])
            if not any(layer.type == "conv" for layer in model.layers):
                continue
        except ConfigError as error:
            print(f"{line['model']}, {line['mode']}: not predicted: {error}", file=sys.stderr)
            continue
        stack = replace(load_stack("pytorch"), memory_format=setting.memory_format)
        work = make_workload(
            model, device, line["batch"], compute=PerKernel(), precision=setting.precision, stack=stack
        )
        host = line.get("issue", 0.0) > HOST_LIMIT * min(line["seconds"], line.get("alone", math.inf))
        found.append(
            Row(
                f"{model.name}: {line['mode']}", f"batch {line['batch']}", 1e3 * line["seconds"], 1e3 * work.step_time,
                "ms", False, "host" if host else "", inside=False,
            )
        )  # fmt: skip
    return found


def rows() -> list[Row]:
    """Return the steps of the H100."""
    return steps(HELD_OUT)


def summary(found: Sequence[Row]) -> str:
    """Return mean errors and biases by model and mode, of steps limited by the GPU and of those limited by the host."""
    lines = []
    for title, chosen in (
        ("limited by the GPU", [row for row in found if not row.note]),
        ("limited by the host", [row for row in found if row.note]),
    ):
        groups = {"all": chosen}
        for row in chosen:
            for name in row.case.split(": "):
                groups.setdefault(name, []).append(row)
        lines += [
            f"{title}, {name}: {len(each)} steps, mean error {mean_error(each):.1%}, bias {bias(each):+.1%}"
            for name, each in groups.items()
            if each
        ]
    return "\n".join(lines)


def remark() -> str:
    """Return the mean errors and biases by model and mode as a list, and those of the H200."""
    seen = [row for row in steps(FILE) if not row.note]
    return (
        "Errors by model and mode:\n\n"
        + "\n".join(f"- {line}" for line in summary(rows()).splitlines())
        + f"\n\nOn the H200, the mean error of {len(seen)} steps that the GPU limits is {mean_error(seen):.1%} "
        f"(bias {bias(seen):+.1%}). The form of the model, and the share of 80 % above which the host counts as the "
        "limit, were chosen with these steps in view."
    )


def main() -> None:
    if len(sys.argv) > 1:
        path = Path(sys.argv[1])
        lines, found = read(path), steps(path)
        show(found)
        print(summary(found))
        measured = kernels(lines)
        if measured:
            _show("kernels", measured, device_of(lines))
        return
    lines = read(FILE)
    device, measured = device_of(lines), kernels(lines)
    for label, fitted, others in (
        ("even rows", measured[::2], measured[1::2]),
        ("odd rows", measured[1::2], measured[::2]),
        ("all rows", measured, measured),
    ):
        found = fit(fitted, device)
        print(label, {name: float(f"{value:.4g}") for name, value in values(rates_of(found)).items()})
        _show("  fitted", fitted, found)
        _show("  the others", others, found)
    _show("as in the catalogue", measured, device)


def _show(label: str, measured: Sequence[Kernel], device: Device) -> None:
    logs = np.log1p(errors(measured, device))
    print(f"{label}: {len(measured)} kernels, mean |ln| {np.abs(logs).mean():.3f}, median {np.median(logs):+.3f}")
    groups: dict[str, list[int]] = {}
    for i, kernel in enumerate(measured):
        groups.setdefault(f"{kernel.layer.type}, {kernel.precision}, {kernel.memory_format}, {kernel.part}", []).append(
            i
        )
    for name, chosen in groups.items():
        each = logs[chosen]
        print(f"    {name}: {len(chosen)}, mean |ln| {np.abs(each).mean():.3f}, median {np.median(each):+.3f}")


if __name__ == "__main__":
    main()
