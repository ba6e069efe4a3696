"""A device of a measured profile: the few numbers of :class:`~ddlsim.workload.devices.Kernels`, by least squares.

A wave of tiles takes its arithmetic and `tile_time`: one fraction of the peak for each precision, one tile and one
time for all, fitted by logarithms. Products that are over before the host has issued the next say nothing of the
device and are left out. Whole steps are not fitted, so that they can be the check.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ddlsim.errors import ConfigError
from ddlsim.workload.devices import AttentionRates, Device, Kernels, device_names, load_device

Profile = Mapping[str, Any]
Floats = npt.NDArray[np.float64]
#: tokens at which attention reaches half of its rate, forward and backward
RAMPS = (300.0, 1100.0)
#: tiles of a product; those that fit best count
TILES = ((128, 128), (256, 128))
#: PyTorch's name of a backend -> that of its kernel
ATTENTION = {"flash": "flash-2", "cudnn": "cudnn", "efficient": "efficient"}
#: precision of products -> (bytes of an operand's number, of the result's)
NBYTES = {
    "bf16": (2.0, 2.0), "fp16": (2.0, 2.0), "tf32": (4.0, 4.0), "fp32": (4.0, 4.0),
    "fp8": (1.0, 2.0), "fp4": (0.5, 2.0),
}  # fmt: skip
#: kernels that do nothing but stream
STREAMING = ("copy", "add", "gelu")


def device_of(profile: Profile) -> Device:
    """Return the device that a profile describes: fitted kernels on the data sheet's numbers.

    The data sheet is that of the catalogue's device of the same name. Of others the profile gives the peaks (the best
    rates that products reached), bandwidth and memory. Raises ConfigError for a profile without products.
    """
    measured = [row for row in profile.get("gemm", ()) if "seconds" in row]
    rows = [{**row, "precision": {"nvfp4": "fp4"}.get(row["precision"], row["precision"])} for row in measured]
    rows = [row for row in rows if row["precision"] in NBYTES]
    if not rows:
        raise ConfigError(f"profile of {profile.get('device', 'a device')}: has no products; measure it again")
    base = _catalogued(profile) or _uncatalogued(profile, rows)
    units, source = int(profile["multiprocessors"]), f"measured with PyTorch {profile['torch']}"
    streaming = _streaming(profile) / base.memory_bandwidth
    rows = _busy([row for row in rows if row["precision"] in base.peak_flops])
    fitted = [(*_fit_products(rows, base, units, tile, streaming), tile) for tile in TILES]
    gemm, tile_time, _, tile = min(fitted, key=lambda each: each[2])
    kernels = Kernels(
        gemm=gemm, units=units, tile=tile, tile_time=tile_time, attention=_attention(profile, base, units),
        streaming=_rounded(min(1.0, streaming)), source=f"{source} ({profile['device']})",
    )  # fmt: skip
    launch = min(row["seconds"] for row in profile["launch"] if "per kernel" in row["what"])
    return replace(
        base, name=f"{base.name}-measured", title=f"{profile['device']}, measured", launch_time=_rounded(launch), kernels=kernels,
        sources=(*base.sources, f"kernels and launch_time: {source}"),
    )  # fmt: skip


def _catalogued(profile: Profile) -> Device | None:
    """Return the catalogue's device with this name, of several that with the nearest memory."""
    words = set(re.findall("[a-z0-9]+", profile["device"].lower()))
    found = [
        load_device(name) for name in device_names()
        if {part for part in name.split("-") if not re.fullmatch("[0-9]+g", part)} <= words
    ]  # fmt: skip
    nbytes = float(profile.get("memory_nbytes") or 0.0)
    return min(found, key=lambda device: abs(device.memory_nbytes - nbytes), default=None)


def _uncatalogued(profile: Profile, rows: Sequence[Mapping[str, Any]]) -> Device:
    peaks: dict[str, float] = {}
    for row in rows:
        peaks[row["precision"]] = max(peaks.get(row["precision"], 0.0), row["flops"] / row["seconds"])
    power = profile.get("power_w")
    name = "-".join(re.findall("[a-z0-9]+", profile["device"].lower()))
    return Device(
        name=name or "device", title=profile["device"], peak_flops=peaks, memory_nbytes=profile["memory_nbytes"],
        memory_bandwidth=_streaming(profile), power_w=power or 0.0, efficiency=dict.fromkeys(peaks, 1.0),
        efficiency_basis="as matrix products", pcie_generation=None,
        sources=("peaks: the best rates of matrix products; memory_bandwidth: that of copies, both as measured",
                 "power_w: nvidia-smi's limit" if power else "power_w: not known, write it here"),
    )  # fmt: skip


def _streaming(profile: Profile) -> float:
    """Return the bytes/s at which large element-wise kernels run: the median over those of the largest sizes."""
    rows = [row for row in profile["memory"] if row.get("kernel") in STREAMING]
    if not rows:
        raise ConfigError(f"profile of {profile['device']}: has no memory-bound kernels; measure it again")
    largest = max(row["elements"] for row in rows)
    return _rounded(np.median([row["nbytes"] / row["seconds"] for row in rows if row["elements"] >= largest / 4]))


def _rounded(value: float) -> float:
    """Return a measured number with the digits that mean something."""
    return float(f"{value:.4g}")


def _busy(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the products that take more than twice as long as the shortest of their precision, which the host limits."""
    least: dict[str, float] = {}
    for row in rows:
        least[row["precision"]] = min(row["seconds"], least.get(row["precision"], np.inf))
    return [row for row in rows if row["seconds"] > 2.0 * least[row["precision"]]]


def _fit_products(
    rows: Sequence[Mapping[str, Any]], device: Device, units: int, tile: tuple[int, int], streaming: float
) -> tuple[dict[str, float], float, float]:
    """Return the fractions of the peaks by precision, the seconds of a tile, and the mean error."""
    from scipy.optimize import least_squares

    names = sorted({row["precision"] for row in rows})
    which = np.array([names.index(row["precision"]) for row in rows])
    m, n, k, seconds = np.array([[row[key] for key in ("m", "n", "k", "seconds")] for row in rows], dtype=float).T
    (high, wide), nbytes = tile, np.array([NBYTES[row["precision"]] for row in rows]).T
    peaks = np.array([device.peak_flops[row["precision"]] for row in rows])
    tiles = np.minimum(*(np.ceil(m / a) * np.ceil(n / b) for a, b in ((high, wide), (wide, high))))
    waves = np.ceil(tiles / units)
    arithmetic = waves * 2.0 * high * wide * k / (peaks / units)
    moved = (nbytes[0] * (m * k + k * n) + nbytes[1] * m * n) / (device.memory_bandwidth * streaming)

    def off(point: Floats) -> Floats:
        return np.log(np.maximum(arithmetic / point[which] + waves * point[-1] * 1e-6, moved) / seconds)

    start, bounds = [0.7] * len(names), ([0.01] * len(names) + [0.0], [1.0] * len(names) + [1e4])
    point = least_squares(off, [*start, 1.0], bounds=bounds, loss="soft_l1", f_scale=0.02).x
    fractions = dict(zip(names, map(_rounded, point[:-1]), strict=True))
    return fractions, _rounded(point[-1] * 1e-6), float(np.abs(np.expm1(off(point))).mean())


def _attention(profile: Profile, device: Device, units: int) -> dict[str, AttentionRates]:
    """Return the rates of causal attention by kernel, of the widest heads, where all multiprocessors have work."""
    peak = device.peak_flops.get("bf16") or device.peak_flops.get("fp16") or max(device.peak_flops.values())
    seconds: dict[tuple[str, int, int, int, int], dict[str, float]] = {}
    for row in profile.get("attention", ()):
        if "seconds" in row and row["causal"] and row["backend"] in ATTENTION:
            key = ATTENTION[row["backend"]], row["batch"], row["heads"], row["length"], row["head_width"]
            seconds.setdefault(key, {})[row["passes"]] = row["seconds"]
    rates: dict[str, list[tuple[float, float]]] = {}
    widest = max((key[-1] for key in seconds), default=0)
    for (kernel, batch, heads, length, width), passes in seconds.items():
        if width < widest or batch * heads * length < 900 * units or len(passes) < 2:
            continue
        flops = 2.0 * batch * heads * length**2 * width
        backward = passes["forward+backward"] - passes["forward"]
        per_pass = (flops / passes["forward"], 2.5 * flops / backward)
        ramped = [rate / peak * (length + ramp) / length for rate, ramp in zip(per_pass, RAMPS, strict=True)]
        rates.setdefault(kernel, []).append((ramped[0], ramped[1]))
    means = {kernel: np.exp(np.log(np.array(each)).mean(axis=0)) for kernel, each in rates.items()}
    return {kernel: AttentionRates(*map(_rounded, np.minimum(mean, 1.0))) for kernel, mean in means.items()}
