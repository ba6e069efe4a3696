"""One schema for files, addresses, forms and manifests, derived from the annotations of classes.

:meth:`Schema.structure` turns plain values (TOML, JSON) into objects, :meth:`Schema.unstructure` objects into plain
values. A table's keys are the arguments of a class; ``type`` names the class if a field accepts several. Quantities are
texts with a unit. Code named by a text is imported only if the caller allows it.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import json
import math
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

from ddlsim.arguments.annotations import rule_of
from ddlsim.arguments.checking import annotations_of
from ddlsim.arguments.rules import TEXT, Rule
from ddlsim.bundled import relative_name, split_options, text_of
from ddlsim.errors import ConfigError, UnitError, listed, shown, unknown_name
from ddlsim.named_code import imported, names_code
from ddlsim.plain import parse_value
from ddlsim.units import quantity_text

T = TypeVar("T")
#: name in files -> class
Names = Mapping[str, type]
#: fields whose texts may contain a colon but are never imported: names of files and nodes, and prose
_TEXTS = frozenset({
    "at", "between", "cluster", "data", "dataset", "model", "name", "note", "notes", "path", "source", "sources",
    "storage", "target", "time_model", "title", "trace", "version", "versions",
})  # fmt: skip
#: other texts that may contain a colon
UNIMPORTED = Rule("a string", TEXT.takes, TEXT.keep)


@dataclass(frozen=True)
class Source:
    """Origin of plain values.

    folder      folder for relative file names; None: file names are not changed
    allow_code  whether texts may name code ("package.module:Name"), which is imported
    """

    folder: Path | None = None
    allow_code: bool = False

    def located(self, name: str) -> str | Path:
        """Return the path of a file (with options) or folder if it exists in the folder, else the name."""
        if self.folder is None:
            return name
        stem, options = split_options(name, self.folder)
        path = self.folder / stem
        if path.suffix and os.path.isfile(path):
            return Path("+".join((str(path), *options)))
        return self.folder / name if "/" in name and os.path.isdir(self.folder / name) else name


UNTRUSTED = Source()
_evaluated = functools.cache(annotations_of)  # each field of an object asks for those of all fields


def refuse_code(text: object, where: str) -> None:
    """Raise ConfigError for a text that names code."""
    if names_code(text):
        raise ConfigError(
            f"{where} = {shown(text)} would import code; if you trust the file, set allow_code=True in Python, or pass "
            "--allow-code on the command line"
        )


def members(annotation: Any) -> Iterator[Any]:
    """Yield the types of a union, without their validation rules."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Annotated, typing.Union, types.UnionType):
        for part in inner[:1] if origin is Annotated else inner:
            yield from members(part)
    else:
        yield annotation


def _rules(annotation: Any) -> Iterator[Rule]:
    inner = typing.get_args(annotation)
    if typing.get_origin(annotation) is Annotated:
        yield from (rule for rule in inner[1:] if isinstance(rule, Rule))
        inner = inner[:1]
    for part in inner:
        yield from _rules(part)


def _quantity_rule(annotation: Any) -> Rule | None:
    """Return the rule of a quantity; None for an annotation with plain numbers in files."""
    rule = next((rule for rule in _rules(annotation) if rule.dimension), None)
    return rule if rule is not None and float in members(annotation) else None


def _items(annotation: Any) -> list[Any]:
    """Return the annotations of the items of an annotation's lists."""
    kinds = (tuple, list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
    return [member for member in members(annotation) if typing.get_origin(member) in kinds]


def _entries(annotation: Any) -> Any:
    """Return the annotation of the values of an annotation's mappings, or None if it has none."""
    mappings = (kind for kind in members(annotation) if typing.get_origin(kind) in (dict, collections.abc.Mapping))
    return next((typing.get_args(mapping)[1] for mapping in mappings), None)


def _annotations(make: Callable[..., object]) -> dict[str, object]:
    """Return the annotations of the arguments of a function or class; empty for a class with local names in them."""
    try:
        return _evaluated(make)
    except NameError:
        return {}


def _kebab(kind: type) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", kind.__name__).lower()


@dataclass(frozen=True)
class Schema:
    """The names of classes in files.

    names    class or protocol in an annotation -> allowed names in ``type``. By default, a dataclass has its own name:
             ``LinkFault`` is "link-fault"
    opaque   dataclasses that files refer to only by name
    untyped  classes of tables without ``type`` if a field accepts several: the first one whose required keys are
             present, or else the one with the most of its keys
    fields   (class, argument) -> annotation, if that of the class is too wide
    readers  class -> function (value, where, source) that returns the object, instead of :meth:`build`
    filled_in  names of arguments that runs fill in and files omit
    short    class -> function that returns a part of an object that defines all of it
    """

    names: Mapping[object, Names] = field(default_factory=dict)
    opaque: Collection[type] = ()
    untyped: Sequence[type] = ()
    fields: Mapping[tuple[type, str], object] = field(default_factory=dict)
    readers: Mapping[type, Callable[[object, str, Source], object]] = field(default_factory=dict)
    filled_in: Collection[str] = ()
    short: Mapping[type, Callable[[Any], object]] = field(default_factory=dict)
    _arguments: dict[object, dict[str, object]] = field(default_factory=dict, init=False, repr=False)

    def kinds(self, annotation: object) -> dict[str, type]:
        """Return the classes that a table may describe for an `annotation`, by name."""
        kinds: dict[str, type] = {}
        for member in members(annotation):
            of = typing.get_origin(member) or member
            if of in self.names:
                kinds |= self.names[of]
            elif isinstance(member, type) and is_dataclass(member) and member not in self.opaque:
                kinds[self._called.get(member) or _kebab(member)] = member
        return kinds

    @property
    def _called(self) -> dict[type, str]:
        return {kind: name for names in self.names.values() for name, kind in names.items()}

    def arguments_of(self, make: Callable[..., object]) -> dict[str, object]:
        """Return the annotations of the arguments that a table can contain, by name."""
        if make not in self._arguments:
            self._arguments[make] = self._arguments_of(make)
        return self._arguments[make]

    def _arguments_of(self, make: Callable[..., object]) -> dict[str, object]:
        kind = make if isinstance(make, type) else type(None)
        declared = {name: self.fields.get((kind, name), annotation) for name, annotation in _annotations(make).items()}
        taken = (name for name in inspect.signature(make).parameters if name in declared and name not in self.filled_in)
        return {name: declared[name] for name in taken if self._is_sayable(declared[name])}

    def _is_sayable(self, annotation: object) -> bool:
        simple = (bool, int, float, str, Path, object, Any)
        if any(member in simple or typing.get_origin(member) is Literal for member in members(annotation)):
            return True
        return any(_rules(annotation)) or bool(_items(annotation) or _entries(annotation) or self.kinds(annotation))

    def annotation_at(self, make: Callable[..., object], path: str) -> object:
        """Return the annotation of a dotted path of fields, such as "strategy.algorithm"; `object` if there is none."""
        name, _, rest = path.partition(".")
        annotation = self.arguments_of(make).get(name, object)
        if not rest:
            return annotation
        inner = [self.annotation_at(kind, rest) for kind in self.kinds(annotation).values()]
        inner = [option for option in inner if option is not object]
        return typing.Union[tuple(inner)] if inner else object  # noqa: UP007  # of a list

    def structure(
        self, kind: type[T], value: object, where: str, *, folder: Path | None = None, allow_code: bool = False
    ) -> T:
        """Return the object of class `kind` that a table describes.

        where       beginning of error messages, such as the path of the file
        folder      folder for relative file names in it
        allow_code  whether texts may name code, "package.module:Name", which is imported

        Raises ConfigError in one line: file, field, value, rule and remedy.
        """
        source = Source(folder, allow_code)
        if isinstance(value, Mapping) and kind not in self.readers and "type" not in value:
            return self.build(kind, value, where, source, ": ")
        return cast(T, self.value(kind, value, where, source=source))

    def value(
        self, annotation: object, value: object, where: str, name: str = "", source: Source = UNTRUSTED
    ) -> object:
        """Convert a plain value for an `annotation`, in a field called `name`."""
        kinds = self.kinds(annotation)
        reader = next((self.readers[kind] for kind in kinds.values() if kind in self.readers), None)
        if isinstance(value, Mapping):
            entries = _entries(annotation)
            if kinds and (entries is None or "type" in value):
                return self._chosen(kinds, value, where, source)
            if entries is None and object not in members(annotation) and Any not in members(annotation):
                raise ConfigError(f"{where} = {shown(value)}: a table is not allowed here; write a number or a string")
            inner = object if entries is None else entries
            return {key: self.value(inner, item, f"{where}.{key}", str(key), source) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [
                self.value(self._item(annotation, i), item, f"{where}[{i}]", name, source)
                for i, item in enumerate(value)
            ]
        if isinstance(value, str):
            if not source.allow_code and name not in _TEXTS and UNIMPORTED not in _rules(annotation):
                refuse_code(value, where)
            if reader is not None and len(kinds) == 1:
                return reader(value, where, source)
            return source.located(value) if Path in members(annotation) else value
        return value

    def _item(self, annotation: object, i: int) -> object:
        """Return the annotation of item i of a list."""
        inner: list[object] = []
        for sequence in _items(annotation):
            types = typing.get_args(sequence)
            fixed = typing.get_origin(sequence) is tuple and types[-1] is not Ellipsis
            inner.append(types[min(i, len(types) - 1)] if fixed else types[0])
        return typing.Union[tuple(inner)] if inner else object  # noqa: UP007  # of a list

    def _chosen(self, kinds: Names, table: Mapping[str, object], where: str, source: Source) -> object:
        rest = dict(table)
        only = next(iter(kinds.values())) if len(kinds) == 1 else None
        name = None if only is not None and "type" in self.arguments_of(only) else rest.pop("type", None)
        if name is None:
            return self._build(self._untyped(kinds, rest, where), rest, where, source)
        if names_code(name):
            if not source.allow_code:
                refuse_code(name, f"{where}.type")
            return self._build(class_named(str(name), f"{where}: type"), rest, where, source)
        if not isinstance(name, str) or name not in kinds:
            raise unknown_name("type", str(name), kinds, where)
        return self._build(kinds[name], rest, where, source)

    def _untyped(self, kinds: Names, table: Mapping[str, object], where: str) -> type:
        """Return the class of a table without a type."""
        if len(kinds) == 1:
            return next(iter(kinds.values()))
        usual = [kind for kind in self.untyped if kind in kinds.values()]
        if not usual:
            raise ConfigError(f"{where}: key 'type' is missing; add type = one of {listed(sorted(kinds))}")
        nearest_kind = max(usual, key=lambda kind: len(table.keys() & self.arguments_of(kind).keys()))
        return next((kind for kind in usual if table.keys() >= set(required(kind))), nearest_kind)

    def _build(self, kind: type, table: Mapping[str, object], where: str, source: Source) -> object:
        reader = self.readers.get(kind)
        return reader(table, where, source) if reader else self.build(kind, table, where, source)

    def build(
        self,
        make: Callable[..., T],
        table: Mapping[str, object],
        where: str,
        source: Source = UNTRUSTED,
        joint: str = ".",
    ) -> T:
        """Return ``make(...)`` with the arguments in `table`; missing ones have their defaults."""
        arguments = self.arguments(make, table, where, source, joint)
        try:
            return make(**arguments)
        except ConfigError as error:
            raise type(error)(f"{where}: {error}") from None

    def arguments(
        self, make: Callable[..., object], table: Mapping[str, object], where: str, source: Source = UNTRUSTED,
        joint: str = ".", *, partial: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the arguments of `make` in `table`, as objects; without `partial`, all that have no default are
        required.

        `joint` is the text between `where` and the name of a field.
        """
        annotations = self.arguments_of(make)
        for name in table:
            if name not in annotations:
                raise unknown_key(str(name), annotations, where, {} if joint == "." else table)
        missing = [] if partial else [name for name in required(make) if name in annotations and name not in table]
        if missing:
            key = missing[0]
            raise ConfigError(f"{where}: key {key!r} is missing; add {key} = ...")
        return {
            name: self._argument(annotations[name], value, f"{where}{joint}{name}", name, source)
            for name, value in table.items()
        }

    def _argument(self, annotation: Any, value: object, where: str, name: str, source: Source) -> object:
        if value == "inf" and float in members(annotation):  # as written in JSON
            value = math.inf
        quantity = _quantity_rule(annotation)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if quantity is not None and is_number:
            expected = quantity.text.replace("a number or a string", "a string with a unit")
            raise ConfigError(f"{where} = {shown(value)}: must be {expected}")
        check = rule_of(annotation)
        try:
            converted = self.value(annotation, value, where, name, source)
            return converted if check is None else check(converted, where)
        except ConfigError:
            if isinstance(value, str):
                self._check_is_table(annotation, value, where, name)
            raise

    def _check_is_table(self, annotation: Any, value: str, where: str, name: str) -> None:
        """Raise ConfigError if a type's name, with options, is given where only a table is allowed."""
        kind, *options = value.split("+")
        if kind not in self.kinds(annotation):
            return
        pairs = (option.partition("=") for option in options)
        parts = [f'type = "{kind}"', *(f"{key} = {toml_value(parse_value(text))}" for key, _, text in pairs if text)]
        raise ConfigError(f"{where} = {shown(value)}: must be a table; write {name} = {{ {', '.join(parts)} }}")

    def unstructure(
        self,
        value: object,
        where: str = "",
        annotation: object = object,
        *,
        full: bool = False,
        folder: Path | None = None,
    ) -> Any:
        """Return an object as plain values, from which :meth:`structure` builds an equal object.

        annotation  annotation of the field
        full        include default values, and names of objects that files refer to by name
        folder      folder of the file for the values, to which file names become relative; None: names are not changed

        Raises ConfigError, after `where`, for objects that files cannot express.
        """
        if folder is not None and isinstance(value, str | Path) and Path in members(annotation):
            return relative_name(value, folder)
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return str(value) if full and not math.isfinite(value) else value
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, Mapping):
            inner = _entries(annotation) or object
            return {
                str(key): self.unstructure(item, f"{where}.{key}", inner, full=full, folder=folder)
                for key, item in value.items()
            }
        if isinstance(value, Sequence):
            return [
                self.unstructure(item, f"{where}[{i}]", self._item(annotation, i), full=full, folder=folder)
                for i, item in enumerate(value)
            ]
        kind = type(value)
        if kind in self.opaque and not full and (text := text_of(value)) is not None:
            return self.unstructure(text, where, annotation, folder=folder)
        if full and (kind in self.opaque or not is_dataclass(value)):
            return getattr(value, "name", None) or getattr(value, "__name__", str(value))
        if kind in self.opaque or (not is_dataclass(value) and not callable(value)):
            raise ConfigError(f"{where}: {_AN_OBJECT}")
        if kind in self.short and (part := self.short[kind](value)) is not value and not full:
            return self.unstructure(part, where, annotation, folder=folder)
        kinds = self.kinds(annotation)
        name = next((name for name, candidate in kinds.items() if candidate is kind), None)
        if name is None and full:
            name = self._called.get(kind) or _kebab(kind)
        if name is None and kind is not annotation:
            raise ConfigError(f"{where} = {shown(value)}: cannot be written to a file; create this object in Python")
        is_clear = _entries(annotation) is None and (len(kinds) == 1 or kind in self.untyped)
        is_known = kind is annotation or (not full and is_clear)
        return ({} if is_known else {"type": name}) | self.table(value, where, full=full, folder=folder)

    def table(self, value: Any, where: str = "", *, full: bool = False, folder: Path | None = None) -> dict[str, Any]:
        """Return the arguments of an object that differ from their defaults as plain values; all of them if `full`.

        folder  as for :meth:`unstructure`
        """
        annotations = self.arguments_of(type(value))
        stem = f"{where}." if where else ""
        return {
            name: self.unstructure(item, f"{stem}{name}", annotations.get(name, object), full=full, folder=folder)
            for name, item in (arguments(value) if full else changed_arguments(value)).items()
            if not (full and name in self.filled_in)
        }

    def expression(self, value: Any, where: str) -> str:
        """Return the Python expression, after ``import ddlsim``, that creates a value.

        Raises ConfigError for objects that files refer to by name: clusters, models.
        """
        import ddlsim

        if isinstance(value, Path):
            return repr(str(value))
        if isinstance(value, float) and not math.isfinite(value):
            return f"float({str(value)!r})"
        if value is None or isinstance(value, str | bool | int | float):
            return repr(value)
        if isinstance(value, tuple | list):
            return f"[{', '.join(self.expression(item, where) for item in value)}]"
        if isinstance(value, Mapping):
            return f"{{{', '.join(f'{key!r}: {self.expression(item, where)}' for key, item in value.items())}}}"
        kind = type(value)
        if kind in self.opaque and (text := text_of(value)) is not None:
            return self.expression(text, where)
        if is_dataclass(value) and kind not in self.opaque:
            name = f"ddlsim.{kind.__name__}" if getattr(ddlsim, kind.__name__, None) is kind else None
            return f"{name or f'{kind.__module__}.{kind.__qualname__}'}({self.call(value, where)})"
        if not callable(value) or kind in self.opaque:
            raise ConfigError(f"{where}: {_AN_OBJECT}")
        return f"{value.__module__}.{value.__qualname__}"

    def call(self, value: Any, where: str = "", between: str = ", ") -> str:
        """Return the arguments of the call that creates an object."""
        stem = f"{where}." if where else ""
        pairs = changed_arguments(value).items()
        return between.join(f"{name}={self.expression(argument, f'{stem}{name}')}" for name, argument in pairs)


#: schema of classes that need no names
PLAIN = Schema()
#: keys of the files that ddlsim reads -> kind of file with the key, and its use
_FILES = {
    "vary": ("a study", "run it with ddlsim sweep FILE"),
    "jobs": ("several jobs", "run them with ddlsim run FILE, or ddlsim.load_jobs"),
    "arrivals": ("several jobs", "run them with ddlsim run FILE, or ddlsim.load_jobs"),
    "layers": ("a model", "use ddlsim run CLUSTER --model FILE"),
    "peak_flops": ("a device", "use ddlsim run CLUSTER --device FILE"),
    "generator": ("a cluster", "use ddlsim run FILE"),
    "hosts": ("a cluster", "use ddlsim run FILE"),
    "edges": ("a cluster", "use ddlsim run FILE"),
    "cluster": ("an experiment", "run it with ddlsim run FILE"),
}
_AN_OBJECT = (
    "is an object without a text form; save it (cluster.save('mine.toml')) and use the path of the file instead"
)


def unknown_key(name: str, names: Iterable[str], where: str, file: Mapping[str, object]) -> ConfigError:
    """Return the error for a key that is not among `names`.

    file  the whole file, so that the message can name another kind of file; empty for a table inside a file
    """
    names = list(names)
    for key, (what, remedy) in _FILES.items():
        if key in file and key not in names:
            return ConfigError(f"{where}{': ' if where else ''}describes {what} (key {key!r}); {remedy}")
    return unknown_name("key", name, names, where)


def required(make: Callable[..., object]) -> list[str]:
    """Return the names of the arguments that have no default."""
    parameters = inspect.signature(make).parameters.values()
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [argument.name for argument in parameters if argument.default is argument.empty and argument.kind in plain]


def class_named(name: str, where: str) -> type:
    """Return the dataclass named ``"package.module:Name"``; importing it runs its module."""
    make = imported(name, where)
    if not isinstance(make, type) or not is_dataclass(make):
        description = shown(make)
        raise ConfigError(f"{where} {name!r} is {description}; must be a dataclass with one field per setting")
    return make


def arguments(value: Any) -> dict[str, Any]:
    """Return the arguments stored in an object, with quantities as texts."""
    names = (name for name in inspect.signature(type(value)).parameters if hasattr(value, name))
    return {name: _as_text(type(value), name, getattr(value, name)) for name in names}


def changed_arguments(value: Any) -> dict[str, Any]:
    """Return the arguments that differ from their defaults, with quantities as texts.

    An argument that the object does not store is an alternative to one that it stores.
    """
    kind = type(value)
    factories = {item.name: item.default_factory for item in dataclasses.fields(kind) if callable(item.default_factory)}
    parameters = inspect.signature(kind).parameters
    changed: dict[str, Any] = {}
    for name, argument in arguments(value).items():
        default = factories[name]() if name in factories else parameters[name].default
        default = _as_text(kind, name, default)
        if type(argument) is not type(default) or argument != default:
            changed[name] = argument
    return changed


def _as_text(kind: type, name: str, value: Any) -> Any:
    annotation = _annotations(kind).get(name)
    if isinstance(value, Mapping) and (inner := _quantity_rule(_entries(annotation))) is not None:
        return {key: quantity_text(item, inner.dimension) for key, item in value.items()}
    if isinstance(value, bool) or not isinstance(value, int | float | str) or value in (math.inf, -math.inf):
        return value
    rule = _quantity_rule(annotation) or next((rule for rule in _rules(annotation) if rule.dimension), None)
    if rule is None or (not isinstance(value, str) and float not in members(annotation)):
        return value
    try:
        return quantity_text(value, rule.dimension)
    except UnitError:  # a name instead of a quantity
        return value


def to_toml(table: Mapping[str, Any]) -> str:
    """Return a table as the text of a TOML file.

    Tables inside tables, and in lists inside tables, have headers if they are long.
    """
    return "\n".join([*_table_lines(table, ""), ""])


def _table_lines(table: Mapping[str, Any], name: str) -> list[str]:
    """Return the lines of a table with the header `name`."""
    headed = [key for key, value in table.items() if _has_header(value, bool(name))]
    lines = [f"{toml_key(key)} = {_toml_lines(value)}" for key, value in table.items() if key not in headed]
    for key in headed:
        header = f"{name}.{toml_key(key)}" if name else toml_key(key)
        is_list = not isinstance(table[key], Mapping)
        for row in table[key] if is_list else [table[key]]:
            lines += ["", f"[[{header}]]" if is_list else f"[{header}]", *_table_lines(row, header)]
    return lines


def _toml_lines(value: object) -> str:
    """Return a value on one line, or on one line per item for a long list of lists or tables."""
    text = toml_value(value)
    if len(text) < 120 or not isinstance(value, list) or not all(isinstance(item, list | Mapping) for item in value):
        return text
    return "\n".join(["[", *(f"  {toml_value(item)}," for item in value), "]"])


def _has_header(value: object, is_nested: bool) -> bool:
    if isinstance(value, Mapping):
        return not is_nested or len(toml_value(value)) > 100
    if not isinstance(value, list) or not value or not all(isinstance(item, Mapping) for item in value):
        return False
    return not is_nested or max(len(toml_value(item)) for item in value) > 180


def toml_value(value: object) -> str:
    """Return a value in TOML notation, on one line."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{toml_key(key)} = {toml_value(item)}' for key, item in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # allowed in JSON, but not in TOML


def toml_key(name: str) -> str:
    """Return a key in TOML notation."""
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else json.dumps(name)
