"""Tables of tensors as models: exact gradients, and an estimate of the work.

A row or entry has the name and the shape of a tensor, and maybe a dtype and ``flops`` of a sample's forward pass.
Tensors whose names differ only behind the last dot are those of one layer, in the order of the table.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ddlsim.errors import ConfigError, shown
from ddlsim.imports.json_values import Node
from ddlsim.imports.text import SourceText
from ddlsim.workload.layer_rules import MAX_DIMS, MAX_PARAMETERS
from ddlsim.workload.model import Layer, Model
from ddlsim.workload.precision import FP32_NBYTES

MAX_HEADER, MAX_TENSORS = 10**8, 10**6
_FLOAT = re.compile(r"(?:torch\.)?(?:b?f(?:loat)?\d+\w*|half|double|float|fp\d+\w*|bf16)$", re.IGNORECASE)
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Tensor(NamedTuple):
    """A learned tensor; `flops` of a sample's forward pass, None: 2 per parameter."""

    name: str
    shape: tuple[int, ...]
    flops: float | None


def is_csv(source: SourceText) -> bool:
    """Return whether a text is a table with columns name and shape."""
    head = next(csv.reader(io.StringIO(source.text.lstrip()[:10_000])), [])
    return {"name", "shape"} <= {word.strip().lower() for word in head}


def read_csv(source: SourceText) -> Model:
    """Return the model of a CSV file; a shape is written like ``64x3x7x7`` or ``[64, 3, 7, 7]``."""
    rows = csv.DictReader(io.StringIO(source.text.lstrip()))
    rows.fieldnames = [word.strip().lower() for word in rows.fieldnames or ()]
    tensors = (_tensor(Node(dict(row), f"{source.path}:{rows.line_num}: ")) for row in rows)
    return _model(tensors, str(source.path), source.path.stem)


def read_json(root: Node) -> Model:
    """Return the model of a JSON table: a list of objects, or an object of shapes, or of objects, by name."""
    where, value = root.place.rstrip(": "), root.value
    if isinstance(value, Mapping) and "weight_map" in value:
        raise root.error("is an index without shapes; give one of its .safetensors files, or a table of name and shape")
    if isinstance(value, Mapping):
        entries = [Node({"name": name, **_fields(root[name])}, root[name].place) for name in value if name[:2] != "__"]
    else:
        entries = root.items()
    return _model(map(_tensor, entries), where, Path(where).stem)


def _fields(entry: Node) -> dict[str, object]:
    if isinstance(entry.value, list):
        return {"shape": entry.value}
    if not isinstance(entry.value, Mapping):
        raise entry.error(f"must be a shape, or an object with one, not {shown(entry.value)}")
    return dict(entry.value)


def safetensors_header(path: Path) -> Node:
    """Return the header of a .safetensors file: 8 bytes with its length, then JSON."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            data = file.read(length) if length <= MAX_HEADER else b""
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; check the path") from None
    try:
        return Node(json.loads(data), f"{path}: ")
    except (ValueError, RecursionError):
        raise ConfigError(f"{path}: has no header of safetensors; is the file complete?") from None


def _tensor(entry: Node) -> Tensor | None:
    """Return a tensor, None for one that is not learned."""
    name, place = entry["name"].text().strip(), entry["shape"]
    sizes = place.value
    if isinstance(sizes, str):
        words = re.split(r"[\s,x*;]+", sizes.strip(" ()[]\t"))
        sizes = [int(word) if word.isdecimal() and len(word) < 16 else word for word in words if word]
    if not isinstance(sizes, list) or len(sizes) > MAX_DIMS or not all(type(n) is int and n > 0 for n in sizes):
        raise place.error(f"{shown(place.value)}: must be at most {MAX_DIMS} whole numbers above 0, like 64x3x7x7")
    if not name:
        raise entry["name"].error("must not be empty")
    dtype = entry["dtype"].text().strip() if entry.has("dtype") else ""
    if (dtype and not _FLOAT.match(dtype)) or name.endswith(_STATISTICS):
        return None
    has_flops = entry.has("flops") and entry["flops"].value != ""
    return Tensor(name, tuple(sizes), entry["flops"].nonnegative() if has_flops else None)


def _model(tensors: Iterator[Tensor | None], where: str, stem: str) -> Model:
    modules: dict[str, dict[str, Tensor]] = {}
    n_skipped = n_params = 0
    for tensor in tensors:
        if tensor is None:
            n_skipped += 1
            continue
        module, _, last = tensor.name.rpartition(".")
        if last in modules.setdefault(module, {}):
            raise ConfigError(f"{where}: {shown(tensor.name)} occurs twice; give each tensor once")
        modules[module][last] = tensor
        n_params += math.prod(tensor.shape)
        if n_params > MAX_PARAMETERS or len(modules) > MAX_TENSORS:
            raise ConfigError(f"{where}: {n_params:.3g} parameters up to {shown(tensor.name)}; correct the sizes")
    if not modules:
        raise ConfigError(f"{where}: has no learned tensor; list at least one, with its name and shape")
    every = [tensor for group in modules.values() for tensor in group.values()]
    n_given = sum(tensor.flops is not None for tensor in every)
    notes = [
        f"{stem}: FLOPs of a forward pass are {'those of the table' if n_given == len(every) else 'estimated'}"
        + ("" if n_given == len(every) else f", 2 per parameter and sample, for {len(every) - n_given} of {len(every)}")
        + " tensors; activations are not known, so memory and traffic count none"
    ]
    if n_skipped:
        notes.append(f"{stem}: {n_skipped} tensors are no parameters (statistics, or no floating-point numbers)")
    layers = tuple(_layer(name or "top", group, first=i == 0) for i, (name, group) in enumerate(modules.items()))
    return Model(stem, f"{len(every)} tensors", (1,), layers, trainable=False, sources=(where,), notes=tuple(notes))


def _layer(name: str, group: Mapping[str, Tensor], *, first: bool) -> Layer:
    """Return a layer with these tensors; those of a matrix or a convolution keep its shape."""
    weight = group.get("weight")
    dims = () if weight is None else weight.shape
    kind = "dense" if len(dims) == 2 else "conv" if len(dims) > 2 else "tensors"
    out = dims[:1] or (1,)
    tensors = tuple((last, math.prod(tensor.shape)) for last, tensor in group.items())
    n_params = sum(n for _, n in tensors)
    flops = sum(2.0 * math.prod(tensor.shape) if tensor.flops is None else tensor.flops for tensor in group.values())
    size = FP32_NBYTES * out[0]
    return Layer(name, kind, dims[1:2] or (1,), out, n_params, flops / 2.0, flops, size, tensors, input_grad=not first)
