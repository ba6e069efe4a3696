"""Objects from tables of a TOML file: the keys are the fields of the class, strict, with errors in one line.

A table names what it describes by ``type``; fields that hold other objects are tables again, or names where the
class takes names. Quantities are texts with a unit; a plain number where one is meant is refused.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, create_model

from ddlsim.arguments.annotations import alternatives
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.workload.toml_files import validate

__all__ = ["Kinds", "Table", "build", "chosen"]

T = TypeVar("T")


class Table(BaseModel):
    """A table whose keys and types are all known."""

    model_config = ConfigDict(extra="forbid", strict=True)


#: name -> the dataclass it stands for; or the schema of its table, and what makes an object from it
Kinds = Mapping[str, type | tuple[type[Table], Callable[..., object]]]
#: what a field may be in a file, by its type in the class
_PLAIN: dict[object, object] = {
    int: int, float: float, str: str, bool: bool,
    tuple[int, ...]: list[int], tuple[float, ...]: list[float], Sequence[int]: list[int],
}  # fmt: skip
#: fields that are worked out by the run
_HIDDEN = frozenset({"bounds"})


def chosen(table: Mapping[str, object], kinds: Kinds, parts: Mapping[str, Kinds], where: str) -> object:
    """Return the object that `table` describes by its ``type``, which may be left out if there is only one.

    parts  field -> what the tables in this field may describe
    """
    rest = dict(table)
    kind = rest.pop("type", next(iter(kinds)) if len(kinds) == 1 else None)
    if kind is None:
        raise ConfigError(f"{where}: key 'type' is missing; add type = one of {', '.join(sorted(kinds))}")
    if not isinstance(kind, str) or kind not in kinds:
        raise unknown_name("type", str(kind), kinds, where)
    make = kinds[kind]
    if isinstance(make, type):
        return build(make, rest, parts, where)
    schema, function = make
    fields = validate(TypeAdapter(schema), rest, where, schema.model_fields)
    return _made(function, fields.model_dump(), where)


def build(make: Callable[..., T], table: Mapping[str, object], parts: Mapping[str, Kinds], where: str) -> T:
    """Return ``make(...)``, a dataclass, with the fields in `table`; what is not there keeps its default."""
    schema = _schema(make, parts)
    validate(TypeAdapter(schema), dict(table), where, schema.model_fields)
    given: dict[str, object] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            value = chosen(value, parts[name], parts, f"{where}.{name}")
        given[name] = tuple(value) if isinstance(value, list) else value
    return _made(make, given, where)


def _made(make: Callable[..., T], fields: Mapping[str, object], where: str) -> T:
    try:
        return make(**fields)
    except ConfigError as error:
        raise type(error)(f"{where}: {error}") from None


def _schema(make: Callable[..., object], parts: Mapping[str, Kinds]) -> type[Table]:
    """Return what a table of a dataclass's fields must look like."""
    fields: dict[str, object] = {}
    types = inspect.get_annotations(make, eval_str=True)
    for field in dataclasses.fields(make):  # type: ignore[arg-type]
        annotation = _annotation(alternatives(types[field.name]), field.name in parts)
        if annotation is not None and field.init and field.name not in _HIDDEN:
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            fields[field.name] = (annotation, ... if required else None)
    return create_model(getattr(make, "__name__", "table"), __base__=Table, **fields)  # type: ignore[call-overload, no-any-return]


def _annotation(kinds: Sequence[object], has_parts: bool) -> object:
    """Return the type that a field may have in a file, or None if files cannot say it."""
    if float in kinds and str in kinds:  # a quantity
        kinds = [kind for kind in kinds if kind is not float]
    found = [_PLAIN[kind] for kind in kinds if kind in _PLAIN]
    if has_parts:
        found.append(dict[str, object])
    if not found:
        return None
    union = found[0]
    for kind in found[1:]:
        union = union | kind  # type: ignore[operator]
    return union
