"""The walk from the entries of a model file to nodes and leaf layers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import NamedTuple, cast

from ddlsim.arguments import checked
from ddlsim.errors import ConfigError, shown, unknown_name
from ddlsim.named_code import imported, names_code
from ddlsim.schema import PLAIN, Source, refuse_code
from ddlsim.workload.layer_rules import MAX_ELEMENTS, MAX_PARAMETERS, Cost, Shape
from ddlsim.workload.layers import LAYER_TYPES, EmbeddingBag, LayerSpec
from ddlsim.workload.model import Concat, Layer, Leaf, Node, Residual, Side
from ddlsim.workload.model_values import Values, substitute
from ddlsim.workload.precision import FP32_NBYTES

Entry = dict[str, object]


def check_layer_type(kind: object, where: str) -> None:
    """Raise ConfigError unless `kind` is a class of layers."""
    if not (isinstance(kind, type) and is_dataclass(kind) and hasattr(kind, "cost")):
        raise ConfigError(f"{where} is {shown(kind)}: must be a frozen dataclass with a method cost(in_shape)")


MAX_LAYERS = 10_000  # a runaway `repeat` is a slip of the keyboard, not a model
MAX_ENTRIES = 10 * MAX_LAYERS
MAX_DEPTH = 20  # so is a block that contains itself
GRAPH_KEYS = {"residual": ("body", "shortcut"), "concat": ("branches", "copy"), "side": ("body",)}


@checked
@dataclass(frozen=True)
class Block:
    """A ``[blocks.NAME]`` table: layers in which ``"$x"`` stands for the parameter x."""

    layers: list[Mapping[str, object]]
    defaults: Mapping[str, object] = field(default_factory=dict)


class Flow(NamedTuple):
    """What reaches an entry: its input shape, and whether parameters lie upstream of it."""

    shape: Shape
    learned: bool


#: nodes and what leaves the last
Walked = tuple[tuple[Node, ...], Flow]


@dataclass
class Builder:
    """Walks the entries in forward order and collects the leaf layers that it meets."""

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
        """Return the nodes of a list of entries and what leaves the last.

        `where` is the place in the file, `scope` the prefix of the layers' names.
        """
        if depth > MAX_DEPTH:
            raise self.error(where, "is nested too deeply; does a block contain itself?")
        if not isinstance(entries, list):
            raise self.error(where, f"must be a list of layers, not {shown(entries)}")
        self.n_walked += len(entries)
        if self.n_walked > MAX_ENTRIES:  # also those that an option leaves out
            raise self.error(where, f"the model has more than {MAX_ENTRIES} entries; check every repeat")
        nodes: list[Node] = []
        for i, raw in enumerate(entries):
            place = f"{where}[{i}]"
            if not isinstance(raw, dict):
                raise self.error(place, f'must be a table like {{type = "relu"}}, not {shown(raw)}')
            entry = dict(raw)
            if not self._wanted(entry, place):
                continue
            new, flow = self._entry(entry, place, scope, flow, depth)
            nodes += new
        return tuple(nodes), flow

    def error(self, place: str, message: str) -> ConfigError:
        return ConfigError(f"{self.path}: {place}: {message}")

    def _wanted(self, entry: Entry, place: str) -> bool:
        option = entry.pop("option", None)
        if option is None:
            return True
        if not isinstance(option, str) or not option:
            raise self.error(place, f"option = {shown(option)}: must be a name")
        self.seen_options.add(option)
        return option in self.options

    def _entry(self, entry: Entry, place: str, scope: str, flow: Flow, depth: int) -> Walked:
        if "block" in entry:
            return self._block(entry, place, scope, flow, depth)
        kind = entry.get("type")
        if kind is None:
            raise self.error(place, 'has neither type nor block; add type = "conv" or the like')
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
        build = {"residual": self._residual, "concat": self._concat, "side": self._side}[kind]
        node, flow = build(entry, place, inner, flow, depth + 1)
        return (node,), flow

    def _name(self, entry: Entry, kind: str, place: str, scope: str) -> str:
        """Return the entry's full name: as given, or its type with a running number within the scope."""
        name = entry.pop("name", None)
        if name is None:
            self.counts[f"{scope}{kind}#"] += 1
            name = f"{kind}{self.counts[f'{scope}{kind}#']}"
        if not isinstance(name, str) or not name:
            raise self.error(place, f"name = {shown(name)}: must be a text that is not empty")
        return f"{scope}{name}"

    def _block(self, entry: Entry, place: str, scope: str, flow: Flow, depth: int) -> Walked:
        """Expand a block: check its parameters, then walk its layers once, or `repeat` times, numbered."""
        kind = entry.pop("block")
        if not isinstance(kind, str) or kind not in self.blocks:
            raise unknown_name("block", str(kind), self.blocks, f"{self.path}: {place}")
        repeat = entry.pop("repeat", None)
        if repeat is not None and (type(repeat) is not int or not 1 <= repeat <= MAX_LAYERS):
            raise self.error(place, f"repeat = {shown(repeat)}: must be a whole number from 1 to {MAX_LAYERS}")
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
            raise self.error(place, f"block {kind!r} needs {missing[0]!r}; add {missing[0]} = ...")
        nodes: tuple[Node, ...] = ()
        for _ in range(repeat or 1):
            self.n_expanded += 1
            if self.n_expanded > MAX_LAYERS:  # also for blocks without layers, which would only cost time
                raise self.error(place, f"the model has more than {MAX_LAYERS} blocks; check every repeat")
            inner = f"{name}." if named else scope
            if repeat is not None:
                inner = f"{name}.{self.counts[name]}."
                self.counts[name] += 1
            new, flow = self.sequence(body, f"blocks.{kind}", inner, flow, depth + 1)
            nodes += new
        return nodes, flow

    def _coded(self, name: str, place: str) -> type[LayerSpec]:
        """Return the layer that ``"package.module:Name"`` stands for, if that may be imported."""
        if not self.allow_code:
            refuse_code(name, f"{self.path}: {place}: type")
        kind = imported(name, f"{self.path}: {place}: type")
        check_layer_type(kind, f"{self.path}: {place}: type {name!r}")
        return cast("type[LayerSpec]", kind)

    def _leaf(self, entry: Entry, spec_type: type[LayerSpec], place: str, scope: str, flow: Flow) -> Walked:
        has_type = "type" in PLAIN.arguments_of(spec_type)
        kind = str(entry["type"]) if has_type else spec_type.__name__
        name = self._name(entry, kind, place, scope)
        given = entry if has_type else {key: value for key, value in entry.items() if key != "type"}
        spec = self._spec(spec_type, given, f"{self.path}: {place} ({kind} {name!r})")
        try:
            cost = spec.cost(flow.shape)
        except ConfigError as error:
            raise self.error(place, f"{kind} {name!r}: {error}") from None
        index = self._append(name, kind, flow, cost, model_parallel=isinstance(spec, EmbeddingBag))
        return (Leaf(index, spec),), Flow(cost.out_shape, flow.learned or bool(cost.tensors))

    def _spec(self, kind: type[LayerSpec], entry: Entry, where: str) -> LayerSpec:
        """Return the layer that an entry describes; most layers of a large model are alike."""
        key = kind, repr(entry)
        if key not in self.specs:
            self.specs[key] = PLAIN.build(kind, entry, where, Source(allow_code=self.allow_code), ": ")
        return self.specs[key]

    def _append(self, name: str, kind: str, flow: Flow, cost: Cost, *, model_parallel: bool = False) -> int:
        if len(self.layers) >= MAX_LAYERS:
            raise self.error(name, f"the model has more than {MAX_LAYERS} layers; check every repeat")
        if name in self.leaf_names:
            raise self.error(name, "the name occurs twice; give one of the layers another name")
        self.leaf_names.add(name)
        n_params = sum(n for _, n in cost.tensors)
        self.n_params += n_params
        for n, most, what in (
            (math.prod(cost.out_shape), MAX_ELEMENTS, "outputs per sample"),
            (self.n_params, MAX_PARAMETERS, "parameters up to here"),
        ):
            if n > most:
                raise self.error(name, f"{n:.3g} {what} are more than {most:.0e}; correct the sizes")
        made, moved, stored = (FP32_NBYTES * n for n in (math.prod(cost.out_shape), cost.moved, cost.stored))
        sizes = (flow.shape, cost.out_shape, n_params, cost.macs, 2.0 * cost.macs, made, cost.tensors, moved, stored)
        self.layers.append(Layer(name, kind, *sizes, flow.learned, model_parallel, cost.winograd))
        return len(self.layers) - 1

    def _residual(self, entry: Entry, place: str, scope: str, flow: Flow, depth: int) -> tuple[Node, Flow]:
        body, out = self.sequence(entry.get("body"), f"{place}.body", scope, flow, depth)
        shortcut, skip = self.sequence(entry.get("shortcut", []), f"{place}.shortcut", f"{scope}shortcut.", flow, depth)
        if out.shape != skip.shape:
            made = f"the body makes {out.shape} but the shortcut {skip.shape}"
            raise self.error(place, f"residual: {made}; make both equal, for example with a 1x1 conv in shortcut")
        joined = Flow(out.shape, out.learned or skip.learned)
        index = self._append(
            self._name({}, "add", place, scope), "add", joined, Cost(out.shape, moved=3.0 * math.prod(out.shape))
        )
        return Residual(body, shortcut, index), joined

    def _concat(self, entry: Entry, place: str, scope: str, flow: Flow, depth: int) -> tuple[Node, Flow]:
        entries = entry.get("branches")
        if not isinstance(entries, list) or len(entries) < 2:
            raise self.error(place, "concat: branches must list at least two lists of layers")
        places = [(f"{place}.branches[{i}]", f"{scope}branch{i + 1}.") for i in range(len(entries))]
        walked = [self.sequence(branch, *where, flow, depth) for branch, where in zip(entries, places, strict=True)]
        shapes = [out.shape for _, out in walked]
        if len({shape[1:] for shape in shapes}) > 1:
            made = ", ".join(map(str, shapes))
            raise self.error(place, f"concat: the branches make {made}; all but the first number must be equal")
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

    def _side(self, entry: Entry, place: str, scope: str, flow: Flow, depth: int) -> tuple[Node, Flow]:
        body, _ = self.sequence(entry.get("body"), f"{place}.body", scope, flow, depth)
        return Side(body), flow
