"""Objects from tables of a TOML file: the keys are the fields of the class, strict, with errors in one line.

A table names what it describes by ``type``; fields that hold other objects are tables again, or names where the
class takes names. Quantities are texts with a unit; a plain number where one is meant is refused.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, create_model

from ddlsim.arguments.annotations import alternatives
from ddlsim.arguments.checking import annotations_of
from ddlsim.errors import ConfigError, listed, shown, unknown_name
from ddlsim.named_code import imported, names_code
from ddlsim.workload.toml_files import validate

T = TypeVar("T")


class Table(BaseModel):
    """A table whose keys and types are all known."""

    model_config = ConfigDict(extra="forbid", strict=True)


#: name -> the class it stands for
Kinds = Mapping[str, type]
#: what an argument may be in a file, by its type in the class
_PLAIN: dict[object, object] = {
    int: int, float: float, str: str, bool: bool,
    tuple[int, ...]: list[int], tuple[float, ...]: list[float], Sequence[int]: list[int], Sequence[float]: list[float],
    Iterable[int]: list[int], Sequence[str]: list[str], Sequence[bool]: list[bool],
    Sequence[Sequence[tuple[str, int, int]]]: list[list[list[str | int]]],
}  # fmt: skip
#: fields whose texts are names of files, nodes and jobs, which may have a colon in them and are never imported
_NAMES = frozenset({
    "cluster", "data", "dataset", "model", "name", "path", "source", "storage", "target", "time_model", "trace",
})  # fmt: skip
#: fields that are worked out by the run
_HIDDEN = frozenset({"bounds"})


def chosen(
    table: Mapping[str, object], kinds: Kinds, parts: Mapping[str, Kinds], where: str, *, allow_code: bool = False
) -> object:
    """Return the object that `table` describes by its ``type``, which may be left out if there is only one.

    parts       field -> what the tables in this field may describe
    allow_code  as for :func:`build`
    """
    if not allow_code:
        refuse_code(table, where)
    rest = dict(table)
    kind = rest.pop("type", next(iter(kinds)) if len(kinds) == 1 else None)
    if kind is None:
        raise ConfigError(f"{where}: key 'type' is missing; add type = one of {listed(sorted(kinds))}")
    if names_code(kind):
        return build(class_named(str(kind), f"{where}: type"), rest, parts, where, allow_code=allow_code)
    if not isinstance(kind, str) or kind not in kinds:
        raise unknown_name("type", str(kind), kinds, where)
    return build(kinds[kind], rest, parts, where, allow_code=allow_code)


def class_named(name: str, where: str) -> type:
    """Return the class that ``"package.module:Name"`` stands for; importing it runs its module. Raises ConfigError."""
    make = imported(name, where)
    if not isinstance(make, type) or not is_dataclass(make):
        raise ConfigError(f"{where} {name!r}: is {shown(make)}; name a dataclass, whose fields are its settings")
    return make


def refuse_code(value: object, where: str, field: str = "") -> None:
    """Raise ConfigError if `value`, of a `field`, is or holds a text that names code: importing it would run it."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            refuse_code(each, f"{where}.{key}", str(key))
    elif isinstance(value, list | tuple):
        for i, each in enumerate(value):
            refuse_code(each, f"{where}[{i}]", field)
    elif names_code(value) and field not in _NAMES:
        raise ConfigError(
            f"{where} = {shown(value)} would import code; if you trust the file, use allow_code=True in Python, or "
            "--allow-code on the command line"
        )


def build(
    make: Callable[..., T], table: Mapping[str, object], parts: Mapping[str, Kinds], where: str, *,
    allow_code: bool = False,
) -> T:  # fmt: skip
    """Return ``make(...)``, an object, with the arguments in `table`; what is not there keeps its default.

    All that files, addresses and forms say of objects becomes one here, so here "package.module:Name" is refused,
    unless `allow_code`.
    """
    if not allow_code:
        refuse_code(table, where)
    schema = schema_of(make, parts)
    types = annotations_of(make)
    texts = {  # infinity has no unit; the class says whether it is welcome
        name: str(value) for name, value in table.items()
        if isinstance(value, float) and math.isinf(value) and name in types and str in alternatives(types[name])
    }  # fmt: skip
    validate(TypeAdapter(schema), {**table, **texts}, where, schema.model_fields)
    arguments: dict[str, object] = {}
    for name, value in table.items():
        if isinstance(value, dict) and ("type" in value or not _maps(alternatives(annotations_of(make)[name]))):
            value = chosen(value, parts[name], parts, f"{where}.{name}", allow_code=allow_code)
        if isinstance(value, list):
            value = tuple(
                chosen(each, parts[name], parts, f"{where}.{name}[{i}]", allow_code=allow_code)
                if isinstance(each, dict) else each
                for i, each in enumerate(value)
            )
        arguments[name] = value
    try:
        return make(**arguments)
    except ConfigError as error:
        raise type(error)(f"{where}: {error}") from None


def schema_of(make: Callable[..., object], parts: Mapping[str, Kinds]) -> type[Table]:
    """Return what a table of a class's arguments must look like."""
    fields: dict[str, object] = {}
    types = annotations_of(make)
    for name, argument in inspect.signature(make).parameters.items():
        annotation = _annotation(alternatives(types[name]), name in parts)
        if annotation is not None and name not in _HIDDEN:
            fields[name] = (annotation, ... if argument.default is argument.empty else None)
    return create_model(getattr(make, "__name__", "table"), __base__=Table, **fields)  # type: ignore[call-overload, no-any-return]


def _annotation(kinds: Sequence[object], has_parts: bool) -> object:
    """Return the type that an argument may have in a file, or None if files cannot say it."""
    if float in kinds and str in kinds:  # a quantity
        kinds = [kind for kind in kinds if kind is not float]
    allowed = [_PLAIN[kind] for kind in kinds if kind in _PLAIN]
    if _maps(kinds):
        allowed.append(dict[str, int])
    if has_parts:
        several = any(typing.get_origin(kind) in (tuple, Sequence) and kind not in _PLAIN for kind in kinds)
        if several:
            allowed.append(list[dict[str, object]])
        if not several or any(is_dataclass(kind) for kind in kinds):
            allowed.append(dict[str, object])
    return functools.reduce(operator.or_, allowed) if allowed else None


def _maps(kinds: Sequence[object]) -> bool:
    """Whether one of the types maps names to whole numbers."""
    return any(typing.get_origin(kind) is Mapping and int in alternatives(typing.get_args(kind)[1]) for kind in kinds)
