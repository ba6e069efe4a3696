"""Parser for model files: TOML -> :class:`~ddlsim.workload.model.Model`.

A file lists ``layers``. An entry is a layer (``type = "conv"``, keys as in :mod:`ddlsim.workload.layers`), a
``block`` defined under ``[blocks.NAME]`` with values for its ``"$parameters"`` and an optional ``repeat``, or a graph
node: ``residual`` (``body``, ``shortcut``), ``concat`` (``branches``), ``side`` (``body``: a branch with its own loss).
An entry with ``option = "aux"`` is omitted unless requested. A ``concat`` with ``copy = false`` combines several
tensors without moving them.

``[parameters]`` are values for ``"$names"`` anywhere in input, layers and blocks, and may depend on each other
(``head_size = "$dim / $heads"``). ``[sizes.NAME]`` contains other values, which define the model ``FILE-NAME``.

A layer without a name is named after its type with a running number (``conv1``). The name of an entry that contains
others is their prefix, numbered from 0 if there is a ``repeat`` (``layer1.0.conv1``); entries with the same name and a
``repeat`` continue the numbers. Without a name, there is no prefix.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from string import Template
from types import MappingProxyType
from typing import NamedTuple, cast

from ddlsim.arguments import checked
from ddlsim.bundled import bundled_files
from ddlsim.errors import ConfigError, shown, unknown_name
from ddlsim.named_code import imported, names_code
from ddlsim.plain import parse_value, read_toml
from ddlsim.schema import PLAIN, Source, refuse_code
from ddlsim.workload.activations import with_kept
from ddlsim.workload.layer_rules import MAX_DIMS, MAX_ELEMENTS, MAX_PARAMETERS, MAX_SIZE, Cost, Shape
from ddlsim.workload.layers import LAYER_TYPES, EmbeddingBag, LayerSpec
from ddlsim.workload.model import Concat, Layer, Leaf, Model, Node, Residual, Side
from ddlsim.workload.model_names import bundled_names, sizes_of
from ddlsim.workload.precision import FP32_NBYTES

Entry = dict[str, object]


def check_layer_type(kind: object, where: str) -> None:
    """Raise ConfigError unless `kind` is a class of layers."""
    if not (isinstance(kind, type) and is_dataclass(kind) and hasattr(kind, "cost")):
        raise ConfigError(f"{where} is {shown(kind)}: must be a frozen dataclass with a cost(in_shape) method")


MAX_LAYERS = 10_000  # a larger `repeat` is a typing error, not a model
MAX_ENTRIES = 10 * MAX_LAYERS
MAX_DEPTH = 20  # deeper blocks contain themselves
GRAPH_KEYS = {"residual": ("body", "shortcut"), "concat": ("branches", "copy"), "side": ("body",)}


@checked
@dataclass(frozen=True)
class Block:
    """A ``[blocks.NAME]`` table: layers in which ``"$x"`` stands for the parameter x."""

    layers: list[Mapping[str, object]]
    defaults: Mapping[str, object] = field(default_factory=dict)


class Flow(NamedTuple):
    """State of the traversal at an entry: input shape, and whether an upstream layer has parameters."""

    shape: Shape
    learned: bool


#: nodes and the state after the last one
Walked = tuple[tuple[Node, ...], Flow]


@dataclass
class Builder:
    """Walks the entries in forward order and collects the leaf layers."""

    path: str
    blocks: Mapping[str, Block]
    options: frozenset[str]
    values: Values = field(default_factory=dict)
    kinds: Mapping[str, type[LayerSpec]] = field(default_factory=lambda: LAYER_TYPES)
    allow_code: bool = False
    layers: list[Layer] = field(default_factory=list)
    seen_options: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)  # instances so far, by name
    leaf_names: set[str] = field(default_factory=set)
    specs: dict[tuple[type, str], LayerSpec] = field(default_factory=dict)
    n_expanded: int = 0  # block instances so far
    n_walked: int = 0  # entries
    n_params: int = 0

    def sequence(self, entries: object, where: str, scope: str, flow: Flow, depth: int) -> Walked:
        """Return the nodes of a list of entries and the state after the last one.

        `where` is the position in the file, `scope` the prefix of the layers' names.
        """
        if depth > MAX_DEPTH:
            raise self.error(where, "nested too deeply; does a block contain itself?")
        if not isinstance(entries, list):
            raise self.error(where, f"must be a list of layers, not {shown(entries)}")
        self.n_walked += len(entries)
        if self.n_walked > MAX_ENTRIES:  # includes omitted options
            raise self.error(where, f"the model has more than {MAX_ENTRIES} entries; check the values of repeat")
        nodes: list[Node] = []
        for i, raw in enumerate(entries):
            place = f"{where}[{i}]"
            if not isinstance(raw, dict):
                raise self.error(place, f'must be a table like {{type = "relu"}}, not {shown(raw)}')
            entry = dict(raw)
            option = entry.pop("option", "")
            if not isinstance(option, str) or ("option" in raw and not option):
                raise self.error(place, f"option = {shown(option)}: must be a name")
            if option:
                self.seen_options.add(option)
            if not option or option in self.options:
                new, flow = self._entry(entry, place, scope, flow, depth)
                nodes += new
        return tuple(nodes), flow

    def error(self, place: str, message: str) -> ConfigError:
        return ConfigError(f"{self.path}: {place}: {message}")

    def _entry(self, entry: Entry, place: str, scope: str, flow: Flow, depth: int) -> Walked:
        if "block" in entry:
            return self._block(entry, place, scope, flow, depth)
        kind = entry.get("type")
        if kind is None:
            raise self.error(place, 'type or block is missing; add type = "conv" or similar')
        if names_code(kind):
            return self._leaf(entry, self._coded(str(kind), place), place, scope, flow)
        if not isinstance(kind, str) or kind not in (*self.kinds, *GRAPH_KEYS):
            raise unknown_name("layer type", str(kind), (*self.kinds, *GRAPH_KEYS), f"{self.path}: {place}")
        if kind not in GRAPH_KEYS:
            return self._leaf(entry, self.kinds[kind], place, scope, flow)
        for key in entry:
            if key not in ("type", "name", *GRAPH_KEYS[kind]):
                raise unknown_name("key", key, ("name", *GRAPH_KEYS[kind]), f"{self.path}: {place} ({kind})")
        inner = f"{self._name(entry, kind, place, scope)}." if "name" in entry else scope
        if kind == "side":
            body, _ = self.sequence(entry.get("body"), f"{place}.body", inner, flow, depth + 1)
            return (Side(body),), flow
        build = self._residual if kind == "residual" else self._concat
        node, flow = build(entry, place, inner, flow, depth + 1)
        return (node,), flow

    def _name(self, entry: Entry, kind: str, place: str, scope: str) -> str:
        """Return the entry's full name: as given, or its type with a running number within the scope."""
        name = entry.pop("name", None)
        if name is None:
            self.counts[f"{scope}{kind}#"] += 1
            name = f"{kind}{self.counts[f'{scope}{kind}#']}"
        if not isinstance(name, str) or not name:
            raise self.error(place, f"name = {shown(name)}: must be a non-empty string")
        return f"{scope}{name}"

    def _block(self, entry: Entry, place: str, scope: str, flow: Flow, depth: int) -> Walked:
        """Expand a block: check its parameters, then walk its layers once, or `repeat` times, numbered."""
        kind = entry.pop("block")
        if not isinstance(kind, str) or kind not in self.blocks:
            raise unknown_name("block", str(kind), self.blocks, f"{self.path}: {place}")
        repeat = entry.pop("repeat", None)
        if repeat is not None and (type(repeat) is not int or not 1 <= repeat <= MAX_LAYERS):
            raise self.error(place, f"repeat = {shown(repeat)}: must be an integer from 1 to {MAX_LAYERS}")
        named = "name" in entry or repeat is not None
        name = self._name(entry, kind, place, scope) if "name" in entry else f"{scope}{kind}"
        block, used = self.blocks[kind], set[str]()
        values = {**self.values, **block.defaults, **entry}
        try:
            body = substitute(block.layers, values, used)
        except ConfigError as error:
            raise self.error(place, f"block {kind!r}: {error}") from None
        for key in entry:
            if key not in used:
                raise unknown_name("parameter", key, used, f"{self.path}: {place} (block {kind!r})")
        if missing := sorted(used - set(values)):
            raise self.error(place, f"block {kind!r} requires {missing[0]!r}; add {missing[0]} = ...")
        nodes: tuple[Node, ...] = ()
        for _ in range(repeat or 1):
            self.n_expanded += 1
            if self.n_expanded > MAX_LAYERS:  # also for blocks without layers, which only take time
                raise self.error(place, f"the model has more than {MAX_LAYERS} blocks; check the values of repeat")
            inner = f"{name}." if named else scope
            if repeat is not None:
                inner = f"{name}.{self.counts[name]}."
                self.counts[name] += 1
            new, flow = self.sequence(body, f"blocks.{kind}", inner, flow, depth + 1)
            nodes += new
        return nodes, flow

    def _coded(self, name: str, place: str) -> type[LayerSpec]:
        """Import the layer class ``"package.module:Name"``, if allowed."""
        if not self.allow_code:
            refuse_code(name, f"{self.path}: {place}: type")
        kind = imported(name, f"{self.path}: {place}: type")
        check_layer_type(kind, f"{self.path}: {place}: type {name!r}")
        return cast("type[LayerSpec]", kind)

    def _leaf(self, entry: Entry, spec_type: type[LayerSpec], place: str, scope: str, flow: Flow) -> Walked:
        has_type = "type" in PLAIN.arguments_of(spec_type)
        kind = str(entry["type"]) if has_type else spec_type.__name__
        name = self._name(entry, kind, place, scope)
        options = entry if has_type else {key: value for key, value in entry.items() if key != "type"}
        spec = self.specs.get(key := (spec_type, repr(options)))  # most layers of a large model are alike
        if spec is None:
            where = f"{self.path}: {place} ({kind} {name!r})"
            spec = self.specs[key] = PLAIN.build(spec_type, options, where, Source(allow_code=self.allow_code), ": ")
        try:
            cost = spec.cost(flow.shape)
        except ConfigError as error:
            raise self.error(place, f"{kind} {name!r}: {error}") from None
        index = self._append(name, kind, flow, cost, model_parallel=isinstance(spec, EmbeddingBag))
        return (Leaf(index, spec),), Flow(cost.out_shape, flow.learned or bool(cost.tensors))

    def _append(self, name: str, kind: str, flow: Flow, cost: Cost, *, model_parallel: bool = False) -> int:
        if len(self.layers) >= MAX_LAYERS:
            raise self.error(name, f"the model has more than {MAX_LAYERS} layers; check the values of repeat")
        if name in self.leaf_names:
            raise self.error(name, "two layers have this name; rename one of them")
        self.leaf_names.add(name)
        n_params = sum(n for _, n in cost.tensors)
        self.n_params += n_params
        for n, limit, items in (
            (math.prod(cost.out_shape), MAX_ELEMENTS, "outputs per sample"),
            (self.n_params, MAX_PARAMETERS, "parameters up to this layer"),
        ):
            if n > limit:
                raise self.error(name, f"{n:.3g} {items} exceed the limit of {limit:.0e}; correct the sizes")
        output, moved, stored = (FP32_NBYTES * n for n in (math.prod(cost.out_shape), cost.moved, cost.stored))
        sizes = (flow.shape, cost.out_shape, n_params, cost.macs, 2.0 * cost.macs, output, cost.tensors, moved, stored)
        self.layers.append(Layer(name, kind, *sizes, flow.learned, model_parallel, cost.winograd, window=cost.window))
        return len(self.layers) - 1

    def _residual(self, entry: Entry, place: str, scope: str, flow: Flow, depth: int) -> tuple[Node, Flow]:
        body, out = self.sequence(entry.get("body"), f"{place}.body", scope, flow, depth)
        shortcut, skip = self.sequence(entry.get("shortcut", []), f"{place}.shortcut", f"{scope}shortcut.", flow, depth)
        if out.shape != skip.shape:
            shapes = f"the output of body is {out.shape}, that of shortcut {skip.shape}"
            raise self.error(place, f"residual: {shapes}; make them equal, for example with a 1x1 conv in shortcut")
        joined = Flow(out.shape, out.learned or skip.learned)
        index = self._append(
            self._name({}, "add", place, scope), "add", joined, Cost(out.shape, moved=3.0 * math.prod(out.shape))
        )
        return Residual(body, shortcut, index), joined

    def _concat(self, entry: Entry, place: str, scope: str, flow: Flow, depth: int) -> tuple[Node, Flow]:
        entries = entry.get("branches")
        if not isinstance(entries, list) or len(entries) < 2:
            raise self.error(place, "concat: branches must be a list of at least two lists of layers")
        places = [(f"{place}.branches[{i}]", f"{scope}branch{i + 1}.") for i in range(len(entries))]
        walked = [self.sequence(branch, *where, flow, depth) for branch, where in zip(entries, places, strict=True)]
        shapes = [out.shape for _, out in walked]
        if len({shape[1:] for shape in shapes}) > 1:
            outputs = ", ".join(map(str, shapes))
            raise self.error(
                place, f"concat: the branches have outputs {outputs}; all but their first dimension must be equal"
            )
        shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        joined = Flow(shape, any(out.learned for _, out in walked))
        copy = entry.get("copy", True)
        if not isinstance(copy, bool):
            raise self.error(place, f"concat: copy = {shown(copy)}: must be true or false")
        n = float(math.prod(shape)) if copy else 0.0
        index = self._append(
            self._name({}, "concat", place, scope), "concat", joined, Cost(shape, moved=2.0 * n, stored=n)
        )
        return Concat(tuple(nodes for nodes, _ in walked), index), joined


Values = Mapping[str, object]

MAX_LENGTH = 200  # of an expression

_NAME = re.compile(r"\$([A-Za-z_]\w*)")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]]
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def substitute(value: object, values: Values, used: set[str]) -> object:
    """Return `value` with every ``$x`` in its texts replaced; adds each x to `used`.

    ``"$x"`` alone becomes ``values["x"]`` of any type; expressions such as ``"4 * $x"`` and ``"$x / 2 + 1"`` become
    integers. Names without a value are left unchanged. Raises ConfigError for an expression that is not an integer.
    """
    if isinstance(value, str) and "$" in value:
        names = _NAME.findall(value)
        used.update(names)
        if names and value == f"${names[0]}":
            return values.get(names[0], value)
        return _sum(value, values) if names and all(name in values for name in names) else value
    if isinstance(value, list):
        return [substitute(part, values, used) for part in value]
    if isinstance(value, dict):
        return {key: substitute(part, values, used) for key, part in value.items()}
    return value


def _sum(text: str, values: Values) -> int:
    """Evaluate an expression such as ``"4 * $x"`` to an integer."""
    names = set(_NAME.findall(text))
    for name in names:
        if type(values[name]) is not int:
            raise ConfigError(f"{shown(text)} requires an integer, but {name} = {shown(values[name])}")
    try:
        if len(text) > MAX_LENGTH:
            raise ValueError
        return _evaluated(ast.parse(_NAME.sub(r"\1", text), mode="eval").body, values)
    except (SyntaxError, ValueError):
        raise ConfigError(
            f"{shown(text)} is not an integer expression; use one such as '4 * $x' or '$x / 2 + 1'"
        ) from None
    except ArithmeticError:
        parameters = ", ".join(f"{name} = {values[name]}" for name in sorted(names))
        raise ConfigError(f"{shown(text)} is not an integer for {parameters}; choose other values") from None


def _evaluated(node: ast.expr, values: Values) -> int:
    match node:
        case ast.Constant(value=int(number)) if type(number) is int:
            return number
        case ast.Name(id=name):
            value = values[name]
            assert isinstance(value, int)  # as checked above
            return value
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            quotient, rest = divmod(_evaluated(left, values), _evaluated(right, values))
            if rest:
                raise ArithmeticError
            return quotient
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluated(left, values), _evaluated(right, values))
    raise ValueError


def chosen_values(
    parameters: Values, sizes: Mapping[str, Values], options: Sequence[str], where: str, prefix: str
) -> tuple[dict[str, object], str | None, tuple[str, ...], tuple[str, ...]]:
    """Return the parameters' values, the selected size, the settings (as "key=value"), and the other options.

    parameters  values in the file
    sizes       name -> values that it sets
    options     requested names of sizes, "key=value", and names of optional parts
    where       name of the file for messages; `prefix` precedes a size's name in user input

    Raises ConfigError for an unknown parameter, two sizes, and a missing size that the file requires.
    """
    values, size = dict(parameters), None
    settings, parts = [], []
    for option in options:
        key, is_setting, text = option.partition("=")
        if is_setting:
            settings.append((key, text))
        elif option in sizes and size is None:
            size = option
        elif option in sizes:
            raise ConfigError(f"{where}: {size!r} and {option!r} are both sizes; choose one")
        else:
            parts.append(option)
    if size is not None:
        values.update(sizes[size])
    names = {*parameters, *(key for table in sizes.values() for key in table)}
    for key, text in settings:
        if key not in names:
            raise unknown_name("parameter", key, names, where)
        values[key] = _setting(key, text, where, values.get(key))
    try:
        values = {key: substitute(value, values, set()) for key, value in values.items()}
    except ConfigError as error:
        raise ConfigError(f"{where}: parameters: {error}") from None
    if missing := sorted(names - set(values)):
        names_of_sizes, parameter = ", ".join(f"{prefix}{name}" for name in sizes), missing[0]
        raise ConfigError(
            f"{where}: {parameter} has no value; choose a size ({names_of_sizes}) or add +{parameter}=..."
        )
    return values, size, tuple(f"{key}={text}" for key, text in settings), tuple(parts)


def _setting(key: str, text: str, where: str, default: object) -> object:
    """Return the value in ``key=value``: a number or a list, or the name of a block or type if the default is one."""
    value = parse_value(text)
    if isinstance(value, str) and (not isinstance(default, str) or "$" in default):
        raise ConfigError(f"{where}: {key} = {shown(text)}: must be a number, such as {key}=1024")
    return value


def titled(title: str, values: Values, size: str | None) -> str:
    """Return the title with its ``$names`` replaced; ``$size`` is removed if there is no size."""
    text = title.replace(" $size", "") if size is None else title
    return Template(text).safe_substitute({**values, "size": size})


@checked
@dataclass(frozen=True)
class _File:
    title: str
    input: Sequence[int | str]
    layers: list[object]
    blocks: Mapping[str, Block] = field(default_factory=dict)
    parameters: Mapping[str, object] = field(default_factory=dict)
    sizes: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    trainable: bool = False
    sources: tuple[str, ...] = ()


#: endings of files of other tools; TOML is ddlsim's own
FOREIGN_SUFFIXES = (".json", ".sh", ".txt", ".log", ".args", ".yaml", ".yml", ".csv", ".safetensors")
#: what is in their texts, and in no path
CONTENT = re.compile(r"^\s*\{|\n|(?:^|\s)--[a-z]|^Namespace\(")


def is_foreign(source: str | Path, stem: str) -> bool:
    """Return whether a source of a model, with the path or name `stem`, is a file or a text of another tool."""
    if isinstance(source, str) and CONTENT.search(source):
        return True
    is_path = isinstance(source, Path) or "/" in stem
    return stem.endswith(FOREIGN_SUFFIXES) or (is_path and os.path.isfile(os.path.join(stem, "config.json")))


def find_model_file(source: str | Path, stem: str, options: Sequence[str]) -> tuple[Path, tuple[str, ...], bool]:
    """Return the path and the options of a source, which consists of `stem` and `options`, and whether it is the name
    of a bundled file.

    A name of the form ``family-size`` is the file ``family`` with the option ``size``.
    """
    suffix = Path(stem).suffix
    other = suffix[1:2].isalpha() and suffix != ".toml"  # ".3b" is part of a size
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
            f"{stem}: models cannot be loaded from checkpoints or code; use a config.json, Megatron-LM arguments, a "
            "table of tensors, a .toml file (docs/formats/own_files.md), or a bundled model (see: ddlsim models)"
        )
    raise unknown_name("model", stem, bundled_names())


@functools.lru_cache(maxsize=128)  # at least the number of bundled models
def read_bundled(path: Path, options: tuple[str, ...], changed: int) -> Model:
    """Return the model in a bundled file, read once for all runs of a study; `changed`: when it was modified, in ns."""
    return read_model(path, options)


def read_model(
    path: Path,
    options: tuple[str, ...] = (),
    layers: Mapping[str, type[LayerSpec]] = MappingProxyType({}),
    *,
    allow_code: bool = False,
) -> Model:
    """Return the model in the file `path` with the given optional parts.

    options      names of optional parts or of a size, and "parameter=value"
    layers       type in the file -> class, in addition to the bundled ones
    allow_code   whether a type may be "package.module:Name", which is imported

    Raises ConfigError, in one line with file, layer and field, for anything invalid, such as unknown keys or types,
    incompatible shapes, or an unknown option.
    """
    for kind, layer in layers.items():
        check_layer_type(layer, f"load_model: layers[{kind!r}]")
    prefix = f"{path.stem}-" if bundled_files("models").get(path.stem) == path else "+"
    return model_of(read_toml(path), str(path), path.stem, options, layers, allow_code=allow_code, prefix=prefix)


def model_of(
    table: Entry, path: str, stem: str, options: Sequence[str] = (),
    layers: Mapping[str, type[LayerSpec]] = MappingProxyType({}), *, allow_code: bool = False, prefix: str = "+",
) -> Model:  # fmt: skip
    """Return the model in a table. Errors name the file `path`, and the model's name begins with `stem`."""
    file = PLAIN.build(_File, table, path, Source(allow_code=True), ": ")  # layers are checked by the builder
    values, size, settings, parts = chosen_values(file.parameters, file.sizes, options, path, prefix)
    _check_used(values, table, path)
    shape = _input_shape(file.input, values, path)
    builder = Builder(path, file.blocks, frozenset(parts), values, {**layers, **LAYER_TYPES}, allow_code)
    try:
        entries = substitute(file.layers, values, set())
    except ConfigError as error:
        raise ConfigError(f"{path}: layers: {error}") from None
    structure, _ = builder.sequence(entries, "layers", "", Flow(shape, learned=False), 0)
    for option in parts:
        if option not in builder.seen_options:
            raise unknown_name("option", option, {*builder.seen_options, *file.sizes}, path)
    if not builder.layers:
        raise ConfigError(f"{path}: layers = []: list at least one layer")
    name = "+".join((stem if size is None else f"{stem}-{size}", *settings, *parts))
    leaves = with_kept(builder.layers, structure)
    title = titled(file.title, values, size)
    return Model(name, title, shape, leaves, file.trainable, file.sources, structure, (*settings, *parts))


def _input_shape(sizes: Sequence[int | str], values: Values, path: str) -> tuple[int, ...]:
    """Return the shape of a sample, its ``$names`` replaced."""
    try:
        shape = cast("list[int]", substitute(list(sizes), values, set()))
    except ConfigError as error:
        raise ConfigError(f"{path}: input: {error}") from None
    if not 1 <= len(shape) <= MAX_DIMS or not all(type(size) is int and 1 <= size <= MAX_SIZE for size in shape):
        raise ConfigError(
            f"{path}: input = {shown(list(shape))}: must have 1 to {MAX_DIMS} dimensions, each of size 1 to {MAX_SIZE}"
        )
    if math.prod(shape) > MAX_ELEMENTS:
        raise ConfigError(
            f"{path}: input = {shape}: a sample has {math.prod(shape):.3g} elements, more than {MAX_ELEMENTS:.0e}; "
            "correct the sizes"
        )
    return tuple(shape)


def _check_used(values: Values, table: Entry, path: str) -> None:
    """Raise ConfigError for a parameter that would have no effect."""
    used: set[str] = set()
    substitute([table.get(key) for key in ("input", "layers", "blocks", "parameters")], {}, used)
    for name in values:
        if name not in used:
            raise ConfigError(
                f'{path}: parameters: {name!r} is not used; write "${name}" where the value belongs, or remove the '
                "parameter"
            )
