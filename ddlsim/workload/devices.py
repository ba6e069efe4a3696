"""The device catalogue: data-sheet values and measured rates of processors.

The numbers and their sources are in ``devices.toml`` in this folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from ddlsim.arguments import Count, Density, NotNegative, Positive, checked, quantity
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.output_files import check_suffix, write_text
from ddlsim.plain import read_toml
from ddlsim.schema import PLAIN, UNIMPORTED, to_toml
from ddlsim.workload.precision import product_type

_Time = Annotated[float, quantity("time", zero=True, si=True)]
_Power = Annotated[float, quantity("power", zero=True, si=True)]
_T = TypeVar("_T")
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
class AttentionRates:
    """Fractions of the 16-bit peak that a fused attention kernel reaches on long sequences.

    FLOPs count only unmasked entries: 2 h s^2 forward for s tokens and h features under a causal mask, and
    2.5 times that backward, because the matrix is recomputed (Dao et al. 2022, arXiv:2205.14135, section 3.1).
    Heads of d < 128 features reach (d / 128) ** `narrow` of these.
    """

    forward: Density
    backward: Density
    narrow: NotNegative = 0.0


@checked
@dataclass(frozen=True)
class ConvolutionRates:
    """Rates of the kernels of convolutional networks (docs/models/compute.md).

    forward, input, weight
                fractions of the peak that full tiles reach, by precision ("bf16", which also applies to fp16, "tf32",
                "fp32"), in a convolution, the gradient of its input and that of its weight
    winograd    speed-up of 3 x 3 convolutions with stride 1 in fp32, in the same three products
    streaming   fraction that convolutions reach of the bandwidth of element-wise kernels
    converted   elements/s per multiprocessor of a conversion between memory formats
    pooled      elements/s per multiprocessor in pooling, forward and backward: those of the input and of all windows
    normalised  elements/s per multiprocessor in batch normalisation, forward and backward, by format: "channels_last",
                and "nchw-16" and "nchw-32" in types of 16 and 32 bits
    """

    forward: Mapping[str, Density]
    input: Mapping[str, Density]
    weight: Mapping[str, Density]
    winograd: tuple[Positive, Positive, Positive]
    streaming: Density
    converted: Positive
    pooled: tuple[Positive, Positive]
    normalised: Mapping[str, tuple[Positive, Positive]]
    source: str


@checked
@dataclass(frozen=True)
class Kernels:
    """Rates of the kernels that transformers consist of, and of convolutions if these were measured.

    gemm        fraction of the peak that large matrix products reach, sustained, per type of operands ("bf16", "fp16",
                "fp8", "fp4"; "fp16" as "bf16" if missing)
    units, tile  number of multiprocessors, and (rows, columns) of the tile that each computes at a time. More tiles
                than multiprocessors take several waves, and the last wave takes as long as a full one
    tile_time   overhead per wave in s: loading the first operands and writing the results
    attention   fused attention kernels, by name; without one, matrices are written to memory
    streaming   fraction of the memory bandwidth that element-wise kernels reach
    spread      lowest and highest gemm fraction, relative to `gemm`, that published runs imply; (1, 1): unknown
    persistent_tile  (rows, columns) of the tiles of persistent kernels, which are launched for all multiprocessors: if
                collectives occupy some, products take one more tile's time; None: kernels are not persistent
    convolution  rates of the kernels of convolutional networks; None: unknown
    tiles       other tiles; each product uses the one with which it is fastest
    source      of these numbers
    """

    gemm: Mapping[str, Density]
    units: Count
    tile: tuple[Count, Count]
    source: str
    tile_time: _Time = 0.0
    attention: Mapping[str, AttentionRates] = field(default_factory=dict)
    streaming: Density = 0.8
    spread: tuple[Positive, Positive] = (1.0, 1.0)
    persistent_tile: tuple[Count, Count] | None = None
    convolution: ConvolutionRates | None = None
    tiles: tuple[tuple[Count, Count], ...] = ()

    def fraction(self, precision: str) -> float | None:
        """Return the fraction of the peak that products reach in a precision; None if unknown.

        fp16, fp8 and fp4 use the value of bf16 unless set.
        """
        kind = product_type(precision)
        return self.gemm.get(kind, self.gemm.get("bf16") if kind in ("fp16", "fp8", "fp4") else None)


@checked
@dataclass(frozen=True)
class Price:
    """On-demand price of a cloud instance with `n_devices` devices in a given month ("2026-11"), in USD/s."""

    cloud: str
    instance: str
    n_devices: Count
    price: Annotated[float, quantity("price", si=True)]
    date: str
    source: str


@checked
@dataclass(frozen=True)
class Device:
    """A processor on which a worker computes, such as a GPU.

    peak_flops         peak FLOP/s of dense operations for each data type: "fp32", "tf32", "fp16", "bf16", "fp8", "fp4"
    memory_nbytes      memory capacity in bytes
    memory_bandwidth   peak memory bandwidth in bytes/s
    power_w            power in watts while computing (the data sheet's power limit)
    efficiency         for each data type, the fraction of peak FLOP/s that convolutional networks achieve when memory
                       is not the bottleneck
    efficiency_basis   description of how the efficiency was determined
    sources            sources of these numbers
    curves             measured training throughputs of some models at several batch sizes
    idle_power_w       power in watts while waiting; None: `power_w`
    price              price in USD per second; None: unknown
    launch_time        minimum time in seconds per kernel in a sequence of kernels
    kernels            measured rates of transformer kernels; None: unknown, so transformers use roofline times
    pcie_generation    generation of the PCIe bus, such as 4; None: unknown
    nvlink_bandwidth   maximum bandwidth in bytes/s of its NVLinks in each direction; None: that of the cluster's links
    prices             prices of cloud instances with this device
    """

    name: str
    title: str
    peak_flops: Mapping[str, Annotated[float, quantity("flops", si=True)]]
    memory_nbytes: Annotated[float, quantity("bytes", si=True)]
    memory_bandwidth: Annotated[float, quantity("bandwidth", si=True)]
    power_w: _Power
    efficiency: Mapping[str, Density]
    efficiency_basis: Annotated[str, UNIMPORTED]
    sources: tuple[str, ...]
    curves: tuple[Curve, ...] = ()
    idle_power_w: _Power | None = None
    price: Annotated[float, quantity("price", zero=True, si=True)] | None = None
    launch_time: _Time = 0.0
    kernels: Kernels | None = None
    pcie_generation: Count | None = None
    nvlink_bandwidth: Annotated[float, quantity("bandwidth", si=True)] | None = None
    prices: tuple[Price, ...] = ()

    def price_in(self, cloud: str) -> float:
        """Return the lowest price per device of a cloud, in USD/s.

        Raises ConfigError if the catalogue has no price for this cloud; the message lists the clouds it has.
        """
        asked = [price.price / price.n_devices for price in self.prices if price.cloud == cloud]
        if not asked:
            clouds = sorted({price.cloud for price in self.prices})
            raise ConfigError(
                f"price: the catalogue has no {cloud!r} price for device {self.name!r}; set a price such as "
                "'3.06 USD/h'" + (f", or use a cloud with a known price: {', '.join(clouds)}" if clouds else "")
            )
        return min(asked)

    def save(self, path: str | Path) -> None:
        """Write the device to a TOML file that :func:`load_device` can read."""
        check_suffix(path, ".toml")
        write_text(path, to_toml(PLAIN.unstructure(self, annotation=Device)))


DeviceLike = Annotated[str | Path | Device, "a name such as 'v100', a device file or a Device object"]


def of_same_chip(device: Device, names: Sequence[str]) -> bool:
    """Whether one of the named devices is this one, or one of the catalogue with the same chip: as many units that
    compute matrix products, and a peak that differs by less than half (H100 and H200, B200 and GB300)."""
    for name in names:
        other = device if name == device.name else load_device(name) if name in device_names() else None
        if other is not None and other.kernels and device.kernels and other.kernels.units == device.kernels.units:
            peaks = [chip.peak_flops["bf16"] for chip in (device, other) if "bf16" in chip.peak_flops]
            if max(peaks, default=0.0) < 1.5 * min(peaks, default=1.0):
                return True
    return False


@checked
def load_device(name: DeviceLike) -> Device:
    """Load a device from the catalogue or from a file.

    name  name in the catalogue (see :func:`device_names`), path to a file such as ``my-gpu.toml``, or a
          :class:`Device`, which is returned unchanged

    Raises :class:`~ddlsim.errors.ConfigError` for an unknown name or an invalid file. For an unknown name, the message
    suggests the closest match; for an invalid file, it gives the file, the field, its value and a remedy.
    """
    if isinstance(name, Device):
        return name
    path, names = Path(name), _tables()["devices"]
    if path.suffix == ".toml":
        return _read_device(path, path.stat().st_mtime_ns if path.is_file() else 0)
    if str(name) not in names:
        raise unknown_name("device", str(name), names)
    return _of_catalogue(str(name))


@cache
def _read_device(path: Path, changed: int) -> Device:
    """Read a device file; its name is the default name. `changed` (modification time) is part of the cache key."""
    return PLAIN.structure(Device, {"name": path.stem, **read_toml(path)}, str(path))


def device_names() -> list[str]:
    """Return the sorted names of the devices in the catalogue."""
    return sorted(_tables()["devices"])


@cache
def _tables() -> dict[str, Any]:
    return read_toml(_CATALOGUE)


@cache
def _of_catalogue(name: str) -> Device:
    device = PLAIN.build(Device, {"name": name, **_tables()["devices"][name]}, name)
    kernels = _parts("kernels", Kernels, name)
    rates = _parts("convolutions", ConvolutionRates, name)
    return replace(
        device,
        curves=_parts("curves", Curve, name),
        prices=_parts("prices", Price, name),
        kernels=replace(kernels[-1], convolution=rates[0] if rates else None) if kernels else None,
    )


def _parts(key: str, kind: type[_T], device: str) -> tuple[_T, ...]:
    """Return the objects in the tables called `key` that name a device."""
    tables = [table for table in _tables()[key] if device in table["devices"]]
    return tuple(PLAIN.build(kind, {k: table[k] for k in table if k != "devices"}, kind.__name__) for table in tables)
