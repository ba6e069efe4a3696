"""Models from tables of tensors, with exact gradient sizes and estimated FLOPs.

A row or entry has the name and the shape of a tensor, and optionally a dtype and the ``flops`` per sample in the
forward pass. Tensors whose names differ only after the last dot belong to one layer, in the order of the table.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from ddlsim.errors import ConfigError, shown
from ddlsim.imports.json_values import Node
from ddlsim.imports.text import SourceText
from ddlsim.plain import check_separator
from ddlsim.readable import count
from ddlsim.workload.layer_rules import MAX_DIMS, MAX_PARAMETERS
from ddlsim.workload.model import Layer, Model
from ddlsim.workload.precision import FP32_NBYTES

MAX_HEADER = 10**8  # bytes
_FLOAT = re.compile(r"(?:torch\.)?(?:b?f(?:loat)?\d+\w*|half|double|float|fp\d+\w*|bf16)?$", re.IGNORECASE)
_LIST = re.compile(r"\s*(?:\(.*\)|\[.*\])\s*")
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def is_csv(source: SourceText) -> bool:
    """Return whether a text is a CSV table with columns name and shape."""
    head = next(csv.reader(io.StringIO(source.text.lstrip()[:10_000], newline=None)), [])
    words = re.split(r"[;\t]", head[0]) if len(head) == 1 else head
    return {"name", "shape"} <= {word.strip().lower() for word in words}


def read_csv(source: SourceText) -> Model:
    """Return the model of a CSV file; a shape is written like ``64x3x7x7`` or ``[64, 3, 7, 7]``."""
    rows = csv.DictReader(io.StringIO(source.text.lstrip(), newline=None))
    check_separator(rows.fieldnames or (), str(source.path))
    rows.fieldnames = [word.strip().lower() for word in rows.fieldnames or ()]
    try:
        return _model((Node(dict(row), f"{source.path}:{rows.line_num}: ") for row in rows), source.path)
    except csv.Error as error:
        raise source.error(rows.line_num, f"not valid CSV: {error}; correct the line") from None


def read_json(root: Node) -> Model:
    """Return the model of a JSON table: a list of objects, or a mapping from names to shapes or objects."""
    path, value = Path(root.place.rstrip(": ")), root.value
    if not isinstance(value, Mapping):
        return _model(root.items(), path)
    if "weight_map" in value:
        raise root.error("an index without shapes; use one of its .safetensors files, or a table of name and shape")
    entries = []
    for name in value:
        entry = root[name]
        if not isinstance(entry.value, list | Mapping):
            raise entry.error(f"must be a shape, not {shown(entry.value)}; a config.json needs its model_type")
        if name != "__metadata__":
            fields = entry.value if isinstance(entry.value, Mapping) else {"shape": entry.value}
            entries.append(Node({**fields, "name": name}, entry.place))
    return _model(entries, path)


def safetensors_header(path: Path) -> Node:
    """Return the header of a .safetensors file: 8 bytes with its length, then JSON."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return Node(json.loads(file.read(length) if length <= MAX_HEADER else b""), f"{path}: ")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; check the path") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path}: the safetensors header is missing; is the file complete?") from None


def _shape(place: Node) -> tuple[int, ...]:
    sizes = place.value
    if isinstance(sizes, str):
        text, is_list = sizes.strip(), _LIST.fullmatch(sizes)
        text = text[1:-1].strip() if is_list else text
        words = re.split(r"\s*[x*,;]\s*|\s+", text.removesuffix("," * bool(is_list))) if text or not is_list else []
        sizes = [int(word) if re.fullmatch("[0-9]{1,15}", word) else word for word in words]
    if not isinstance(sizes, list) or len(sizes) > MAX_DIMS or not all(type(n) is int and n > 0 for n in sizes):
        raise place.error(f"{shown(place.value)}: must be at most {MAX_DIMS} positive integers, like 64x3x7x7")
    return tuple(sizes)


def _model(entries: Iterable[Node], path: Path) -> Model:
    """Return the model of entries with a name, a shape, and optionally a dtype and flops."""
    modules: dict[str, dict[str, tuple[tuple[int, ...], float]]] = {}
    n_skipped = n_estimated = n_params = 0
    for entry in entries:
        name, shape = entry["name"].text().strip(), _shape(entry["shape"])
        dtype = entry["dtype"].text().strip() if entry.has("dtype") else ""
        if not _FLOAT.match(dtype) or name.endswith(_STATISTICS):
            n_skipped += 1
            continue
        module, _, last = name.rpartition(".")
        group, size = modules.setdefault(module, {}), math.prod(shape)
        if not name or last in group:
            raise entry["name"].error(f"{shown(name)} appears twice, or is empty; list each tensor once")
        has_flops = entry.has("flops") and entry["flops"].value != ""
        group[last] = shape, entry["flops"].nonnegative() if has_flops else 2.0 * size
        n_estimated, n_params = n_estimated + (not has_flops), n_params + size
        if n_params > MAX_PARAMETERS:
            raise entry.error(f"{n_params:.3g} parameters up to {shown(name)}; correct the sizes")
    if not modules:
        raise ConfigError(f"{path}: no learned tensor found; list at least one, with its name and shape")
    guess = f"the work of {count(n_estimated, 'tensor')} is estimated as 2 FLOPs per parameter per sample; "
    notes = [f"{path.stem}: {guess * (n_estimated > 0)}activations are unknown and not included in memory and traffic"]
    if n_skipped:
        notes.append(f"{path.stem}: skipped {count(n_skipped, 'tensor')}: running statistics, or not floating-point")
    layers = tuple(_layer(name or "top", group, first=i == 0) for i, (name, group) in enumerate(modules.items()))
    return Model(path.stem, "", (1,), layers, trainable=False, sources=(str(path),), notes=tuple(notes))


def _layer(name: str, group: Mapping[str, tuple[tuple[int, ...], float]], *, first: bool) -> Layer:
    """Return a layer with these tensors; a matrix or a convolution keeps its shape."""
    dims = group["weight"][0] if "weight" in group else ()
    kind = "dense" if len(dims) == 2 else "conv" if len(dims) > 2 else "tensors"
    tensors = tuple((last, math.prod(shape)) for last, (shape, _) in group.items())
    flops, out = sum(flops for _, flops in group.values()), dims[:1] or (1,)
    sizes = (sum(n for _, n in tensors), flops / 2.0, flops, FP32_NBYTES * out[0], tensors)
    return Layer(name, kind, dims[1:2] or (1,), out, *sizes, input_grad=not first)
