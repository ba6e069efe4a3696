"""How the values of a field are shown in a table: numbers and texts as they are, objects in a few words."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ddlsim.cluster import Cluster
from ddlsim.compression import Compression
from ddlsim.data.dataset import DataSet
from ddlsim.workload.devices import Device
from ddlsim.workload.model import Model


def labels_of(values: Sequence[object]) -> list[str | int | float | bool]:
    """Return a label for each value; different values have different labels, None is "none"."""
    values = [bare(v) for v in values]
    short, long = [_short(v) for v in values], [_long(v) for v in values]
    meant: dict[object, set[object]] = {}
    for a, b in zip(short, long, strict=True):
        meant.setdefault(a, set()).add(b)
    return [b if len(meant[a]) > 1 else a for a, b in zip(short, long, strict=True)]


def bare(value: object) -> object:
    """Return the compressor where a Compression is no more than that: an experiment takes both."""
    only = isinstance(value, Compression) and value == Compression(value.compressor)
    return value.compressor if only and isinstance(value, Compression) else value


def _short(value: object) -> str | int | float | bool:
    label = getattr(value, "label", None)
    return label if isinstance(label, str) else _long(value)


def _long(value: object) -> str | int | float | bool:
    """Return a text with all fields of an object that are not as usual."""
    if value is None:
        return "none"
    if isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Path):
        return value.stem
    if isinstance(value, Cluster | DataSet | Device | Model):
        return value.name
    if isinstance(value, tuple | list):
        return ", ".join(str(_long(item)) for item in value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return str(getattr(value, "__name__", value))
    shown = []
    for f in dataclasses.fields(value):
        now = getattr(value, f.name)
        usual = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        if f.init and f.repr and now != usual:
            text = _long(now)
            required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            shown.append(f"{text}" if required else f"{f.name}={text}")
    return f"{type(value).__name__}({', '.join(shown)})" if shown else type(value).__name__
