"""Model files: TOML -> :class:`~ddlsim.workload.model.Model` (imports pydantic).

A file lists ``layers``. An entry is a layer (``type = "conv"``, keys as in :mod:`ddlsim.workload.layers`), a
``block`` defined under ``[blocks.NAME]`` with values for its ``"$parameters"`` and an optional ``repeat``, or
one of the shapes of a graph: ``residual`` (``body``, ``shortcut``), ``concat`` (``branches``), ``side``
(``body``: a head with its own loss). ``option = "aux"`` on any entry leaves it out unless asked for.

Names: a layer without one is called after its type and a running number (``conv1``). The name of an entry
that contains others is their prefix, numbered from 0 if there is a ``repeat`` (``layer1.0.conv1``); entries
with the same name and a ``repeat`` count on. Without a name there is no prefix.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict, TypeAdapter

from ddlsim.bundled import bundled_files
from ddlsim.errors import ConfigError, shown, unknown_name
from ddlsim.workload.kept import with_kept
from ddlsim.workload.layer_rules import MAX_DIMS, MAX_ELEMENTS, MAX_SIZE
from ddlsim.workload.layers import LAYER_TYPES, LayerSpec
from ddlsim.workload.model import Model
from ddlsim.workload.model_build import Block, Builder, Entry, Flow, check_layer_type
from ddlsim.workload.toml_files import read_toml, validate

__all__ = ["find_model_file", "read_model"]


class _File(BaseModel):
    """The top level, its blocks still unchecked."""

    model_config = ConfigDict(extra="forbid", strict=True)
    title: str
    input: tuple[int, ...]
    layers: list[object]
    blocks: dict[str, Entry] = {}
    trainable: bool = False
    sources: tuple[str, ...] = ()


def find_model_file(source: str | Path) -> tuple[Path, tuple[str, ...]]:
    """Return the path that ``name``, ``path``, ``name+option`` or ``path+option`` means, and the options."""
    text = str(source)
    stem, *options = text.split("+") if not os.path.isfile(text) else [text]
    if isinstance(source, Path) or stem.endswith(".toml") or "/" in stem:
        return Path(stem), tuple(options)
    files = bundled_files("models")
    if stem not in files:
        raise unknown_name("model", stem, files)
    return files[stem], tuple(options)


def read_model(
    path: Path, options: tuple[str, ...] = (), layers: Mapping[str, type[LayerSpec]] = MappingProxyType({}), *,
    allow_code: bool = False,
) -> Model:  # fmt: skip
    """Return the model in the file `path` with the given optional parts.

    layers       type in the file -> class, beside the bundled ones
    allow_code   a type may be "package.module:Name", which is imported

    Raises ConfigError, in one line with file, layer and field, for anything that cannot be used: unknown
    keys or types, shapes that do not fit, an option that the file does not have.
    """
    table = read_toml(path)
    file = validate(TypeAdapter(_File), table, str(path), _File.model_fields)
    blocks = {
        name: validate(TypeAdapter(Block), block, f"{path}: blocks.{name}", Block.model_fields)
        for name, block in file.blocks.items()
    }
    if not 1 <= len(file.input) <= MAX_DIMS or not all(1 <= size <= MAX_SIZE for size in file.input):
        raise ConfigError(
            f"{path}: input = {shown(list(file.input))}: must be 1 to {MAX_DIMS} sizes from 1 to {MAX_SIZE}"
        )
    if math.prod(file.input) > MAX_ELEMENTS:
        raise ConfigError(
            f"{path}: input = {list(file.input)}: has {math.prod(file.input):.3g} elements, more than "
            f"{MAX_ELEMENTS:.0e}; correct the sizes of one sample"
        )
    for kind, layer in layers.items():
        check_layer_type(layer, f"load_model: layers[{kind!r}]")
    builder = Builder(str(path), blocks, frozenset(options), {**layers, **LAYER_TYPES}, allow_code)
    structure, _ = builder.sequence(file.layers, "layers", "", Flow(file.input, learned=False), 0)
    for option in options:
        if option not in builder.seen_options:
            raise unknown_name("option", option, builder.seen_options, str(path))
    if not builder.layers:
        raise ConfigError(f"{path}: layers = []: list at least one layer")
    name = "+".join((path.stem, *options))
    leaves = with_kept(builder.layers, structure)
    return Model(name, file.title, file.input, leaves, file.trainable, file.sources, structure, options)
