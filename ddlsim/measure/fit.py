"""Fit of a device's :class:`~ddlsim.workload.devices.Kernels` to a measured profile, by least squares.

A wave of tiles takes the time of its arithmetic plus `tile_time`. The fit of logarithms has one fraction of the peak
per data type, and one tile size and time for all. Products that finish before the host has issued the next one are
excluded. Whole steps are not fitted, so that they can serve as a check (:func:`predictions`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ddlsim.errors import ConfigError
from ddlsim.extras import needs
from ddlsim.readable import percent
from ddlsim.workload.compute import PerKernel, make_workload
from ddlsim.workload.devices import AttentionRates, Device, Kernels, device_names, load_device
from ddlsim.workload.model import load_model
from ddlsim.workload.precision import ELEMENT_NBYTES, LOW_PRECISIONS, product_type
from ddlsim.workload.products import ATTENTION_RAMPS, Product, product_time
from ddlsim.workload.stacks import load_stack

Profile = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]
Floats = npt.NDArray[np.float64]
#: candidate tile sizes of products; the best fit is chosen
TILES = ((128, 128), (256, 128))
#: PyTorch's backend -> name of its kernel
ATTENTION = {"flash": "flash-2", "cudnn": "cudnn", "efficient": "efficient"}
#: mean error of products above which a device file is not usable
POOR_FIT = 0.25
#: kernels limited only by memory bandwidth
STREAMING = ("copy", "add", "gelu")
#: bytes that AdamW moves per parameter if all numbers are bf16: four are read, three written
ADAMW_NBYTES = 14.0


class Prediction(NamedTuple):
    """A measured time and the library's prediction on the fitted device, in s; `what` is "product" or "step"."""

    what: str
    label: str
    measured: float
    predicted: float


def predictions(profile: Profile, device: Device) -> Iterator[Prediction]:
    """Yield the products, which were fitted, and whole steps in bf16, which were not."""
    assert device.kernels is not None
    for row in _products(profile, device):
        m, n, k, precision = row["m"], row["n"], row["k"], row["precision"]
        seconds = product_time(Product(m, n, k), device, precision)
        yield Prediction("product", f"{m} x {k} by {k} x {n} in {precision}", row["seconds"], seconds)
    usual = {row["usual"].partition("_")[0].lower() for row in profile.get("attention", ()) if "usual" in row}
    kernels = tuple(ATTENTION[name] for name in ATTENTION if name in usual)
    # without autocast's casts, logits in bf16: fitted like the stack's other numbers
    stack = replace(load_stack("pytorch"), attention=kernels, elementwise=0.85, rotation=19.0, loss_traffic=23.0)
    for row in profile.get("steps", ()):
        if "seconds" in row and "+layers=" in row["model"] and "bf16" in device.kernels.gemm:
            model = load_model(row["model"])
            work = make_workload(model, device, row["batch"], compute=PerKernel(), precision="bf16", stack=stack)
            update = ADAMW_NBYTES * model.n_params / (device.memory_bandwidth * device.kernels.streaming)
            seconds = work.forward_time + work.backward_time + update
            yield Prediction("step", f"{row['model']}, batch {row['batch']}", row["seconds"], seconds)


def comparison(compared: Sequence[Prediction]) -> list[str]:
    """Return lines with the error of the products and of each step, and a warning if the products' is large."""
    errors = [abs(row.predicted / row.measured - 1.0) for row in compared if row.what == "product"]
    mean = sum(errors) / len(errors)
    lines = [f"{len(errors)} products: mean error {percent(mean)}, worst {percent(max(errors), 0)}"]
    if mean > POOR_FIT:
        idle = "run nothing else on the machine (on CPUs, try OMP_NUM_THREADS=1), or increase --budget"
        lines.append(f"warning: the device file does not describe these times; {idle}")
    for step in (row for row in compared if row.what == "step"):
        times = f"measured {step.measured * 1e3:.4g} ms, predicted {step.predicted * 1e3:.4g} ms"
        lines.append(f"{step.label}: {times} ({percent(step.predicted / step.measured - 1.0, 0, '+')})")
    return lines


def device_of(profile: Profile) -> Device:
    """Return the device that a profile describes: fitted kernels, and the data sheet of the catalogue's device.

    For a device outside the catalogue, the peaks are the limits of the measured rates for large products. Raises
    ConfigError for a profile without products or memory-bound kernels.
    """
    catalogued = _catalogued(profile)
    base = catalogued or _uncatalogued(profile)
    units, streaming = int(profile["multiprocessors"]), _streaming(profile) / base.memory_bandwidth
    rows, source = _products(profile, base), f"measured with PyTorch {profile['torch']}"
    fits = [(*_fitted(rows, base, units, tile, streaming), tile) for tile in TILES]
    gemm, tile_time, _, tile = min(fits, key=lambda fit: fit[2])
    if catalogued is None:
        rates = {kind: _rounded(base.peak_flops[kind] * fraction) for kind, fraction in gemm.items()}
        base, gemm = replace(base, peak_flops={**base.peak_flops, **rates}), dict.fromkeys(gemm, 1.0)
    kernels = Kernels(
        gemm={kind: _rounded(min(1.0, fraction)) for kind, fraction in gemm.items()},
        units=units,
        tile=tile,
        tile_time=tile_time,
        persistent_tile=None if base.kernels is None else base.kernels.persistent_tile,
        attention=_attention(profile, base, units),
        streaming=_rounded(min(1.0, streaming)),
        source=f"{source}: {profile['device']}",
    )
    launched = (row["seconds"] for row in profile.get("launch", ()) if "per kernel" in row.get("what", ""))
    sources = (*base.sources, f"kernels and launch_time: {source}")
    launch = _rounded(min(launched, default=base.launch_time))
    base = replace(base, name=f"{base.name}-measured", title=f"{profile['device']}, measured")
    return replace(base, launch_time=launch, kernels=kernels, sources=sources)


def _catalogued(profile: Profile) -> Device | None:
    """Return the catalogue's device whose name is in the profile's; of several, that of the closest memory size."""
    words = set(re.findall("[a-z0-9]+", profile["device"].lower()))
    names = [name for name in device_names() if set(re.sub("-[0-9]+g$", "", name).split("-")) <= words]
    nbytes = float(profile.get("memory_nbytes") or 0.0)
    return min(map(load_device, names), key=lambda device: abs(device.memory_nbytes - nbytes), default=None)


def _uncatalogued(profile: Profile) -> Device:
    peaks: dict[str, float] = {}
    for row in profile.get("gemm", ()):
        if "seconds" in row:
            kind = product_type(row["precision"])
            peaks[kind] = _rounded(max(peaks.get(kind, 0.0), row["flops"] / row["seconds"]))
    power = profile.get("power_w")
    return Device(
        name="-".join(re.findall("[a-z0-9]+", profile["device"].lower())),
        title=profile["device"],
        peak_flops=peaks,
        memory_nbytes=profile["memory_nbytes"],
        memory_bandwidth=_rounded(_streaming(profile)),
        power_w=power or 0.0,
        efficiency=dict.fromkeys(peaks, 1.0),
        efficiency_basis="as matrix products",
        sources=(
            "peak_flops: measured rates of large matrix products; memory_bandwidth: measured rate of copies",
            "power_w: the limit reported by nvidia-smi" if power else "power_w: unknown; set it here",
        ),
    )


def _rounded(value: float) -> float:
    """Round a measured number to its significant digits."""
    return float(f"{value:.4g}")


def _streaming(profile: Profile) -> float:
    """Return the bandwidth of large element-wise kernels in bytes/s: the median over those of the largest sizes."""
    rows = [row for row in profile.get("memory", ()) if row.get("kernel") in STREAMING]
    if not rows:
        device = profile["device"]
        raise ConfigError(f"the profile of {device} contains no memory-bound kernels; run the measurement again")
    least = max(row["elements"] for row in rows) / 4
    return float(np.median([row["nbytes"] / row["seconds"] for row in rows if row["elements"] >= least]))


def _products(profile: Profile, device: Device) -> Rows:
    """Return the products of the device's types that take more than twice as long as the shortest of the type."""
    rows = [row for row in profile.get("gemm", ()) if "seconds" in row]
    rows = [row for row in rows if product_type(row["precision"]) in device.peak_flops]
    least: dict[str, float] = {}
    for row in rows:
        least[row["precision"]] = min(row["seconds"], least.get(row["precision"], np.inf))
    rows = [row for row in rows if row["seconds"] > 2.0 * least[row["precision"]]]
    if not rows:
        device = profile["device"]
        raise ConfigError(f"the profile of {device} contains no matrix products; increase --budget")
    return rows


def _fitted(
    rows: Rows, device: Device, units: int, tile: tuple[int, int], streaming: float
) -> tuple[dict[str, float], float, float]:
    """Return the fractions of the peaks by type, the tile time in s, and the mean error."""
    with needs("scipy"):
        from scipy.optimize import least_squares

    kinds = [product_type(row["precision"]) for row in rows]
    names = sorted(set(kinds))
    which = np.array([names.index(kind) for kind in kinds])
    peaks = np.array([device.peak_flops[kind] for kind in kinds])
    m, n, k, seconds = np.array([[row[key] for key in ("m", "n", "k", "seconds")] for row in rows], dtype=float).T
    results = np.array([ELEMENT_NBYTES[row["precision"]] for row in rows])
    low = [LOW_PRECISIONS.get(row["precision"]) for row in rows]
    operands = np.array([size if kind is None else kind.operand for size, kind in zip(results, low, strict=True)])
    moved = (operands * (m * k + k * n) + results * m * n) / (device.memory_bandwidth * streaming)
    tiles = np.minimum(*(np.ceil(m / a) * np.ceil(n / b) for a, b in (tile, tile[::-1])))
    waves = np.ceil(tiles / units)
    arithmetic = waves * 2.0 * tile[0] * tile[1] * k / (peaks / units)

    def off(point: Floats) -> Floats:
        times = np.maximum(arithmetic / point[which] + waves * point[-1] * 1e-6, moved)
        logarithms: Floats = np.log(times / seconds)
        return logarithms

    bounds = [0.01] * len(names) + [0.0], [2.0] * len(names) + [1e4]
    point = least_squares(off, [0.7] * len(names) + [1.0], bounds=bounds, loss="soft_l1", f_scale=0.02).x
    fractions = dict(zip(names, point[:-1].tolist(), strict=True))
    return fractions, round(float(point[-1]) * 1e-6, 9), float(np.abs(np.expm1(off(point))).mean())


def _attention(profile: Profile, device: Device, units: int) -> dict[str, AttentionRates]:
    """Return the rates of causal attention by kernel, from sizes that occupy all multiprocessors."""
    peak = next((device.peak_flops[name] for name in ("bf16", "fp16") if name in device.peak_flops), None)
    seconds: dict[tuple[str, int, float, int], dict[str, float]] = {}
    for row in profile.get("attention", ()):
        tokens = row.get("batch", 0) * row.get("heads", 0) * row.get("length", 0)
        if "seconds" in row and row["causal"] and row["backend"] in ATTENTION and tokens >= 900 * units:
            key = (row["backend"], row["head_width"], 2.0 * tokens * row["length"] * row["head_width"], row["length"])
            seconds.setdefault(key, {})[row["passes"]] = row["seconds"]
    logarithms: dict[str, dict[int, list[Floats]]] = {}
    for (backend, width, flops, length), passes in seconds.items():
        if peak is not None and len(passes) == 2:
            forward, both = passes["forward"], passes["forward+backward"]
            rates = np.array([flops / forward, 2.5 * flops / (both - forward)]) / peak
            ramped = rates * (1.0 + np.array(ATTENTION_RAMPS) / length)
            logarithms.setdefault(ATTENTION[backend], {}).setdefault(width, []).append(np.log(ramped))
    return {kernel: _rates(by_width) for kernel, by_width in logarithms.items()}


def _rates(by_width: Mapping[int, Sequence[Floats]]) -> AttentionRates:
    """Return the rates of the widest heads, and the exponent for narrower heads, from logarithms of rates."""
    means = {width: np.mean(rates, axis=0) for width, rates in by_width.items()}
    widest = max(means)
    lost = [(means[widest] - mean).mean() / np.log(widest / width) for width, mean in means.items() if width < widest]
    forward, backward = np.minimum(np.exp(means[widest]), 1.0)
    return AttentionRates(_rounded(forward), _rounded(backward), _rounded(max(0.0, np.mean(lost))) if lost else 0.0)
