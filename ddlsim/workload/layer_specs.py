"""From the keys of a layer in a model file to the dataclass that describes it (imports pydantic)."""

from __future__ import annotations

import functools
import json
import typing
from dataclasses import MISSING, fields, is_dataclass

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model

from ddlsim.errors import ConfigError, shown
from ddlsim.workload.layers import LAYER_TYPES, LayerSpec
from ddlsim.workload.toml_files import validate

_ADAPTERS: dict[type[LayerSpec], TypeAdapter[LayerSpec]] = {
    kind: TypeAdapter(kind) for kind in set(LAYER_TYPES.values())
}


def is_bundled(kind: type[LayerSpec]) -> bool:
    """Return whether a class of layers comes with ddlsim."""
    return kind in _ADAPTERS


def check_layer_type(kind: object, where: str) -> None:
    """Raise ConfigError unless `kind` is a class of layers."""
    if not (isinstance(kind, type) and is_dataclass(kind) and hasattr(kind, "cost")):
        raise ConfigError(f"{where} is {shown(kind)}: must be a frozen dataclass with a method cost(in_shape)")


def read_spec(kind: type[LayerSpec], entry: dict[str, object], where: str) -> LayerSpec:
    """Return the layer that an entry of a file describes. Raises ConfigError, after `where`, for wrong keys."""
    keys = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if is_bundled(kind):
        try:
            return _read_once(kind, json.dumps(entry, default=str))
        except ValidationError:
            return validate(_ADAPTERS[kind], entry, where, keys)
    given = {key: value for key, value in entry.items() if key != "type"}
    table = validate(_schema(kind), given, where, keys)
    try:
        return kind(**{key: getattr(table, key) for key in given})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


@functools.lru_cache(maxsize=4096)
def _read_once(kind: type[LayerSpec], text: str) -> LayerSpec:
    """Return the bundled layer that an entry, as JSON, describes: most layers of a large model are alike."""
    return _ADAPTERS[kind].validate_json(text)


@functools.cache
def _schema(kind: type[LayerSpec]) -> TypeAdapter[BaseModel]:
    """Return what the keys of a user's layer must look like."""
    types = typing.get_type_hints(kind)
    keys = {f.name: (types[f.name], ... if f.default is f.default_factory is MISSING else None) for f in fields(kind)}  # type: ignore[arg-type]
    strict = ConfigDict(extra="forbid", strict=True)
    table: type[BaseModel] = create_model(kind.__name__, __config__=strict, **keys)  # type: ignore[call-overload]
    return TypeAdapter(table)
