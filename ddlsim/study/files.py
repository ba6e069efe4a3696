"""Studies from TOML files: the base experiment as in an experiment file, and lists of values for its fields
(docs/studies.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddlsim.arguments import checked
from ddlsim.errors import ConfigError, DdlsimError, shown
from ddlsim.plain import read_toml
from ddlsim.run.experiment import Experiment
from ddlsim.run.files import SCHEMA
from ddlsim.schema import Source, required, unknown_key
from ddlsim.study.designs import Range, paths_of
from ddlsim.study.study import Study

#: fields for which "none" means None
_OPTIONAL = frozenset(field.name for field in dataclasses.fields(Experiment) if field.default is None)


@checked
def load_study(source: str | Path, *, allow_code: bool = False) -> Study:
    """Load a study from a TOML file.

    source      path of the file (see :mod:`ddlsim.study.files` for its keys)
    allow_code  whether the file may contain "package.module:Name", which imports and runs code, as in experiment files

    Raises :class:`~ddlsim.errors.ConfigError` for an invalid file; the message contains the file, field, value and
    rule, and suggests a correction.
    """
    path = Path(source)
    here = Source(path.parent, allow_code)
    table = read_toml(path)
    varied = table.pop("vary", None)
    if not isinstance(varied, Mapping):
        known = SCHEMA.arguments_of(Study)
        for name in table:
            if name not in known:
                raise unknown_key(name, known, str(path), table)
        if varied is None:
            raise ConfigError(f"{path}: the key 'vary' is missing; add a table [vary]")
        raise ConfigError(f"{path}: vary = {shown(varied)}: must be a table of fields and their values")
    arguments: dict[str, Any] = SCHEMA.arguments(Study, table, str(path), here, ": ", partial=True)
    if missing := [name for name in required(Study) if name not in (*arguments, "vary")]:
        key = missing[0]
        raise ConfigError(f"{path}: the key {key!r} is missing; add {key} = ...")
    arguments["vary"] = {field: _values(path, field, values, here) for field, values in varied.items()}
    try:
        return Study(**arguments)
    except DdlsimError as error:
        raise type(error)(f"{path}: {error}") from None


def _values(path: Path, field: str, values: object, source: Source) -> list[object] | dict[str, object] | Range:
    where = f"{path}: vary.{field if len(field) <= 80 else f'{field[:77]}...'}"
    if isinstance(values, Mapping) and not {"low", "high"} & set(values):
        return {name: _value(field, value, f"{where}.{name}", source) for name, value in values.items()}
    if isinstance(values, Mapping):
        return SCHEMA.build(Range, values, where, source)
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ConfigError(f"{where} = {shown(values)}: must be a list of values, even for a single value")
    return [_value(field, value, f"{where}[{i}]", source) for i, value in enumerate(values)]


def _value(field: str, value: object, where: str, source: Source) -> object:
    """Convert a value in a list: tables become objects, and file names are resolved from the study's folder."""
    paths = paths_of(field)
    if len(paths) > 1 and isinstance(value, list) and len(value) == len(paths):
        return tuple(_value(one, each, where, source) for one, each in zip(paths, value, strict=True))
    if value == "none" and field in _OPTIONAL:
        return None
    annotation = SCHEMA.annotation_at(Experiment, field)
    made = SCHEMA.value(annotation, value, where, field.rpartition(".")[2], source)
    return tuple(made) if isinstance(made, list) else made
