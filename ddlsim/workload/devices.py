"""The device catalogue: what a processor can do on paper, and what it was measured to do.

The numbers lie in ``devices.toml`` beside this file, each with its source.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, NotRequired, TypedDict, cast

from ddlsim.arguments import Count, Density, NotNegative, Positive, checked
from ddlsim.errors import unknown_name
from ddlsim.units import parse

_CATALOGUE = Path(__file__).with_name("devices.toml")


@checked
@dataclass(frozen=True)
class Curve:
    """Measured training throughput (samples/s) of a device over the batch size, for one model."""

    model: str
    precision: str
    batch_size: tuple[Count, ...]
    throughput: tuple[Positive, ...]
    source: str


@checked
@dataclass(frozen=True)
class Kernels:
    """How fast a device gets through the layers of transformers, kernel by kernel.

    precisions       that it holds for
    fraction         of the peak FLOP/s that matrix products reach while all multiprocessors are at work
    units, tile      multiprocessors, each of which makes a tile of (rows, columns) of the product at a time: with more
                     tiles than that they come in waves, and the last wave takes as long as a full one
    forward_launch   s in which the framework gets one kernel of the forward pass under way; while the device is faster,
                     it waits
    backward_launch  the same in the backward pass, for each kernel of the forward pass
    loss_time        s that the framework takes for each micro-batch beside its layers (batch, loss, schedule)
    wait             s by which each further rank of a tensor-parallel group is later at a collective
    source           of these numbers
    flash            of the peak FLOP/s that fused attention (flash) reaches, counted as if nothing were masked; None:
                     as other products
    """

    precisions: tuple[str, ...]
    fraction: Density
    units: Count
    tile: tuple[Count, Count]
    forward_launch: NotNegative
    backward_launch: NotNegative
    loss_time: NotNegative
    wait: NotNegative
    source: str
    flash: Density | None = None


@checked
@dataclass(frozen=True)
class Device:
    """A processor that a worker computes on.

    ``peak_flops`` maps a precision ("fp32", "tf32", "fp16", "bf16") to FLOP/s; ``efficiency`` to the
    fraction of that peak which the arithmetic of convolutional networks achieves while it is not limited by
    memory, ``efficiency_basis`` saying how that is known. Bytes, bytes/s and watts otherwise.

    ``power_w`` is what it draws while it computes (the datasheet's limit), ``idle_power_w`` what it draws while it
    waits, ``price`` what it costs to use, in USD/s; None: not known. ``launch_time`` is what
    each of several kernels takes at least, one after the other, in s. ``kernels`` is what is known of the layers of
    transformers; None: nothing, they take the roofline's time. `pcie_generation` is that of its bus.
    """

    name: str
    title: str
    peak_flops: Mapping[str, Positive]
    memory_nbytes: Positive
    memory_bandwidth: Positive
    power_w: NotNegative
    efficiency: Mapping[str, Density]
    efficiency_basis: str
    sources: tuple[str, ...]
    curves: tuple[Curve, ...] = ()
    idle_power_w: NotNegative | None = None
    price: NotNegative | None = None
    launch_time: NotNegative = 0.0
    kernels: Kernels | None = None
    pcie_generation: Count | None = None


class _KernelsTable(TypedDict):
    devices: list[str]
    precisions: list[str]
    fraction: float
    units: int
    tile: list[int]
    forward_launch: str
    backward_launch: str
    loss_time: str
    wait: str
    source: str
    flash: float


class _DeviceTable(TypedDict):
    title: str
    peak: dict[str, str]
    efficiency: dict[str, float]
    efficiency_basis: str
    memory: str
    memory_bandwidth: str
    power: str
    idle_power: NotRequired[str]
    price: NotRequired[str]
    launch_time: NotRequired[str]
    pcie_generation: NotRequired[int]
    sources: list[str]


class _CurveTable(TypedDict):
    devices: list[str]
    model: str
    precision: str
    batch_size: list[int]
    throughput: list[float]
    source: str


DeviceLike = Annotated[str | Device, "a name such as 'v100', or a Device"]


@checked
def load_device(name: DeviceLike) -> Device:
    """Return the device called `name` in the catalogue (or `name` itself if it is a device).

    Raises :class:`~ddlsim.errors.ConfigError` with the nearest name when there is none.
    """
    if isinstance(name, Device):
        return name
    catalogue = _catalogue()
    if name not in catalogue:
        raise unknown_name("device", name, catalogue)
    return catalogue[name]


def device_names() -> list[str]:
    """Return the names of the catalogue, sorted."""
    return sorted(_catalogue())


@cache
def _catalogue() -> Mapping[str, Device]:
    tables = tomllib.loads(_CATALOGUE.read_text(encoding="utf-8"))
    curves = cast(list[_CurveTable], tables["curves"])
    kernels = cast(list[_KernelsTable], tables["kernels"])
    return {
        name: _device(
            name, cast(_DeviceTable, table), tuple(_curve(c) for c in curves if name in c["devices"]),
            next((_kernels(k) for k in kernels if name in k["devices"]), None),
        )
        for name, table in tables["devices"].items()
    }  # fmt: skip


def _device(name: str, table: _DeviceTable, curves: tuple[Curve, ...], kernels: Kernels | None) -> Device:
    return Device(
        name=name,
        title=table["title"],
        peak_flops=MappingProxyType({key: parse(text, "flops") for key, text in table["peak"].items()}),
        memory_nbytes=parse(table["memory"], "bytes"),
        memory_bandwidth=parse(table["memory_bandwidth"], "bandwidth"),
        power_w=parse(table["power"], "power"),
        efficiency=MappingProxyType(table["efficiency"]),
        efficiency_basis=table["efficiency_basis"],
        sources=tuple(table["sources"]),
        curves=curves,
        idle_power_w=parse(table["idle_power"], "power") if "idle_power" in table else None,
        price=parse(table["price"], "price") if "price" in table else None,
        launch_time=parse(table["launch_time"], "time") if "launch_time" in table else 0.0,
        kernels=kernels,
        pcie_generation=table.get("pcie_generation"),
    )


def _kernels(table: _KernelsTable) -> Kernels:
    rows, columns = table["tile"]
    return Kernels(
        tuple(table["precisions"]), table["fraction"], table["units"], (rows, columns),
        forward_launch=parse(table["forward_launch"], "time"), backward_launch=parse(table["backward_launch"], "time"),
        loss_time=parse(table["loss_time"], "time"), wait=parse(table["wait"], "time"), source=table["source"],
        flash=table["flash"],
    )  # fmt: skip


def _curve(table: _CurveTable) -> Curve:
    batches, rates = tuple(table["batch_size"]), tuple(table["throughput"])
    return Curve(table["model"], table["precision"], batches, rates, table["source"])
