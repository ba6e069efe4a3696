"""Model files: TOML -> :class:`~ddlsim.workload.model.Model`.

A file lists ``layers``. An entry is a layer (``type = "conv"``, keys as in :mod:`ddlsim.workload.layers`), a
``block`` defined under ``[blocks.NAME]`` with values for its ``"$parameters"`` and an optional ``repeat``, or
one of the shapes of a graph: ``residual`` (``body``, ``shortcut``), ``concat`` (``branches``), ``side``
(``body``: a head with its own loss). ``option = "aux"`` on any entry leaves it out unless asked for. A ``concat`` with
``copy = false`` carries several tensors side by side and moves none of them.

``[parameters]`` are values for ``"$names"`` anywhere in input, layers and blocks; ``[sizes.NAME]`` are other values of
them, which make the model ``FILE-NAME``.

Names: a layer without one is called after its type and a running number (``conv1``). The name of an entry
that contains others is their prefix, numbered from 0 if there is a ``repeat`` (``layer1.0.conv1``); entries
with the same name and a ``repeat`` count on. Without a name there is no prefix.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import cast

from ddlsim.arguments import checked
from ddlsim.bundled import bundled_files, split_options
from ddlsim.errors import ConfigError, shown, unknown_name
from ddlsim.plain import read_toml
from ddlsim.schema import PLAIN, Source
from ddlsim.workload.kept import with_kept
from ddlsim.workload.layer_rules import MAX_DIMS, MAX_ELEMENTS, MAX_SIZE
from ddlsim.workload.layers import LAYER_TYPES, LayerSpec
from ddlsim.workload.model import Model
from ddlsim.workload.model_build import Block, Builder, Entry, Flow, check_layer_type
from ddlsim.workload.model_names import bundled_names, sizes_of
from ddlsim.workload.model_values import Values, chosen_values, substitute, titled


@checked
@dataclass(frozen=True)
class _File:
    """The top level."""

    title: str
    input: Sequence[int | str]
    layers: list[object]
    blocks: Mapping[str, Block] = field(default_factory=dict)
    parameters: Mapping[str, object] = field(default_factory=dict)
    sizes: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    trainable: bool = False
    sources: tuple[str, ...] = ()


def find_model_file(source: str | Path) -> tuple[Path, tuple[str, ...], bool]:
    """Return the path that ``name``, ``path``, ``name+option`` or ``path+option`` means, the options, and whether that
    is the name of a bundled file.

    A name of the form ``family-size`` is the file ``family`` with the option ``size``.
    """
    stem, options = split_options(str(source))
    suffix = Path(stem).suffix
    other = suffix[1:2].isalpha() and suffix != ".toml"  # .3b belongs to a size
    if not other and (isinstance(source, Path) or suffix == ".toml" or "/" in stem):
        return Path(stem), tuple(options), False
    files = bundled_files("models")
    if stem in files:
        return files[stem], tuple(options), True
    for family, path in files.items():
        if stem.startswith(f"{family}-") and (size := stem.removeprefix(f"{family}-")) in sizes_of(path):
            return path, (size, *options), True
    if other or os.path.isfile(stem):
        raise ConfigError(
            f"{stem}: models are read from .toml files (docs/formats/own_files.md), not from checkpoints or code; "
            "describe the layers in a .toml file, or name a bundled model (see: ddlsim models)"
        )
    raise unknown_name("model", stem, bundled_names())


def read_bundled(path: Path, options: tuple[str, ...]) -> Model:
    """Return the model in a bundled file, read once for all runs of a study."""
    return _read_bundled(path, options, os.stat(path).st_mtime_ns)


@functools.lru_cache(maxsize=128)  # all that are bundled, so that who goes through them twice reads them once
def _read_bundled(path: Path, options: tuple[str, ...], changed: int) -> Model:
    """Return the model of a file as it was `changed` last."""
    return read_model(path, options)


def read_model(
    path: Path, options: tuple[str, ...] = (), layers: Mapping[str, type[LayerSpec]] = MappingProxyType({}), *,
    allow_code: bool = False,
) -> Model:  # fmt: skip
    """Return the model in the file `path` with the given optional parts.

    options      names of optional parts or of a size, and "parameter=value"
    layers       type in the file -> class, beside the bundled ones
    allow_code   a type may be "package.module:Name", which is imported

    Raises ConfigError, in one line with file, layer and field, for anything that cannot be used: unknown
    keys or types, shapes that do not fit, an option that the file does not have.
    """
    table = read_toml(path)
    file = PLAIN.build(_File, table, str(path), Source(allow_code=True), ": ")  # the builder looks at what layers name
    prefix = f"{path.stem}-" if bundled_files("models").get(path.stem) == path else "+"
    values, size, settings, parts = chosen_values(file.parameters, file.sizes, options, str(path), prefix)
    _check_used(values, table, path)
    shape = _input_shape(file.input, values, path)
    for kind, layer in layers.items():
        check_layer_type(layer, f"load_model: layers[{kind!r}]")
    builder = Builder(str(path), file.blocks, frozenset(parts), values, {**layers, **LAYER_TYPES}, allow_code)
    try:
        entries = substitute(file.layers, values, set())
    except ConfigError as error:
        raise ConfigError(f"{path}: layers: {error}") from None
    structure, _ = builder.sequence(entries, "layers", "", Flow(shape, learned=False), 0)
    for option in parts:
        if option not in builder.seen_options:
            raise unknown_name("option", option, {*builder.seen_options, *file.sizes}, str(path))
    if not builder.layers:
        raise ConfigError(f"{path}: layers = []: list at least one layer")
    name = "+".join((path.stem if size is None else f"{path.stem}-{size}", *settings, *parts))
    leaves = with_kept(builder.layers, structure)
    title = titled(file.title, values, size)
    return Model(name, title, shape, leaves, file.trainable, file.sources, structure, (*settings, *parts))


def _input_shape(sizes: Sequence[int | str], values: Values, path: Path) -> tuple[int, ...]:
    """Return the shape of a sample, its ``$names`` replaced."""
    try:
        shape = cast("list[int]", substitute(list(sizes), values, set()))
    except ConfigError as error:
        raise ConfigError(f"{path}: input: {error}") from None
    if not 1 <= len(shape) <= MAX_DIMS or not all(type(size) is int and 1 <= size <= MAX_SIZE for size in shape):
        raise ConfigError(f"{path}: input = {shown(list(shape))}: must be 1 to {MAX_DIMS} sizes from 1 to {MAX_SIZE}")
    if math.prod(shape) > MAX_ELEMENTS:
        raise ConfigError(
            f"{path}: input = {shape}: has {math.prod(shape):.3g} elements, more than {MAX_ELEMENTS:.0e}; correct the "
            "sizes of one sample"
        )
    return tuple(shape)


def _check_used(values: Values, table: Entry, path: Path) -> None:
    """Raise ConfigError for a parameter that would have no effect."""
    used: set[str] = set()
    substitute([table.get(key) for key in ("input", "layers", "blocks")], {}, used)
    for name in values:
        if name not in used:
            raise ConfigError(f'{path}: parameters: {name!r} is used nowhere; write "${name}" where it counts')
