"""Experiments as text: the file that describes one, and the Python that makes it.

Both leave out what has its default, and both are exact: what they say, read back, is the same experiment.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import ddlsim
from ddlsim.arguments.checking import annotations_of
from ddlsim.arguments.rules import Rule
from ddlsim.cluster import Cluster
from ddlsim.compression import Compression
from ddlsim.errors import ConfigError, UnitError, shown
from ddlsim.run.experiment import Experiment
from ddlsim.run.files import FIELDS
from ddlsim.units import DIMENSIONS, parse
from ddlsim.workload.model import Model

#: dimension -> units to try; the first in which the number has few digits is taken
_UNITS: Mapping[str, tuple[str, ...]] = {
    "time": ("us", "ms", "s", "h"),
    "bytes": ("GiB", "MiB", "KiB", "GB", "MB", "kB", "B"),
    "bandwidth": ("Gbit/s", "Mbit/s", "GB/s", "MB/s", "B/s"),
    "price": ("USD/h", "USD/s"),
    "flops": ("TFLOP/s", "GFLOP/s", "FLOP/s"),
}
#: what a text in TOML and a text in Python both mark with a backslash; JSON leaves DEL as it is, TOML forbids it
_DELETE = "\x7f"


def toml_of(experiment: Experiment) -> str:
    """Return the file that :func:`ddlsim.load_experiment` reads as this experiment.

    Raises ConfigError for what files cannot say: clusters and models that are objects, and parts of one's own.
    """
    return "\n".join([*toml_lines(told_fields(experiment)), ""])


def toml_lines(fields: Mapping[str, object], under: str = "") -> list[str]:
    """Return the lines of a file with these fields, tables last; all of it `under` a table if one is named."""
    lines = [f"{name} = {toml_text(value)}" for name, value in fields.items() if not isinstance(value, dict)]
    for name, value in fields.items():
        if isinstance(value, dict):
            lines += ["", f"[{under}{name}]", *(f"{key} = {toml_text(each)}" for key, each in value.items())]
    return lines


def told_fields(experiment: Experiment) -> dict[str, object]:
    """Return what stands in a file for each field of an experiment that has not its default."""
    return {name: told(name, value, name) for name, value in _set(experiment)}


def python_of(experiment: Experiment, *, script: bool = False) -> str:
    """Return the expression, after ``import ddlsim``, that makes this experiment; with `script`, a program to run it.

    Raises ConfigError for clusters and models that are objects.
    """
    fields = [(name, python_text(value, name)) for name, value in _set(experiment)]
    if not script:
        return f"ddlsim.Experiment({', '.join(f'{name}={text}' for name, text in fields)})"
    arguments = "".join(f"    {name}={text},\n" for name, text in fields)
    return f"import ddlsim\n\nresult = ddlsim.simulate(\n{arguments})\nprint(result)\n"


def _set(thing: Any) -> list[tuple[str, Any]]:
    """Return the (name, value) of the arguments that differ from their defaults, quantities as texts.

    An argument that the object does not keep is one of two ways to say what it keeps.
    """
    kind = type(thing)
    fields = dataclasses.fields(kind)
    factories = {field.name: field.default_factory for field in fields if callable(field.default_factory)}
    values: list[tuple[str, Any]] = []
    for name, argument in inspect.signature(kind).parameters.items():
        if hasattr(thing, name):
            default = factories[name]() if name in factories else argument.default
            value, default = (_text(each, _dimension(kind, name)) for each in (getattr(thing, name), default))
            if type(value) is not type(default) or value != default:
                values.append((name, value))
    return values


def _text(value: Any, dimension: str | None) -> Any:
    """Return a quantity as the text that says it, anything else as it is."""
    if dimension is None or not isinstance(value, float | str) or (isinstance(value, float) and math.isinf(value)):
        return value
    try:
        return _quantity(parse(value, dimension) if isinstance(value, str) else value, dimension)
    except UnitError:  # a name, where quantities may have names
        return value


def _dimension(owner: type, name: str) -> str | None:
    """Return the dimension of a quantity, an argument of a class; None if it is a plain number."""
    return next((rule.dimension for rule in _rules(annotations_of(owner)[name]) if rule.dimension), None)


def _rules(annotation: Any) -> list[Rule]:
    inner = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return [each for each in inner[1:] if isinstance(each, Rule)] + _rules(inner[0])
    return [rule for each in inner for rule in _rules(each)]


# ---------------------------------------------------------------- TOML


def told(field: str, value: Any, where: str) -> object:
    """Return what stands in a file for the value of a field."""
    if isinstance(value, Cluster | Model) or (value is not None and field == "cluster" and not _named(value)):
        raise ConfigError(
            f"{where}: is an object; save it as a file (cluster.save('mine.toml')) and give its path to have it in text"
        )
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): told(field, each, f"{where}.{key}") for key, each in value.items()}
    if isinstance(value, Sequence):
        return [told(field, each, f"{where}[{i}]") for i, each in enumerate(value)]
    if isinstance(value, Compression) and not value.down and not value.cost:
        return told(field, value.compressor, where)
    kinds: dict[str, type] = {**FIELDS.get(field, {}), "": Compression, " ": ddlsim.Training}
    kind = next((name for name, kind in kinds.items() if kind is type(value)), None)
    if kind is None:
        raise ConfigError(f"{where} = {shown(value)}: files have no name for it; use it from Python")
    table = {} if not kind.strip() or len(FIELDS[field]) == 1 else {"type": kind}
    return table | {name: told(name, each, f"{where}.{name}") for name, each in _set(value)}


def _named(value: object) -> bool:
    return isinstance(value, str | Path)


def _quantity(value: float, dimension: str) -> str:
    """Return the number with a unit: the shortest of the texts that say it exactly."""
    units = (*_UNITS.get(dimension, ()), *DIMENSIONS[dimension][1])
    numbers = ((value / parse(f"1 {unit}", dimension), unit) for unit in units)
    texts = [(f"{n:.{digits}g} {unit}", not 1.0 <= n < 1000.0) for n, unit in numbers for digits in (12, 17)]
    exact = [(len(text), far, text) for text, far in texts if "e" not in text and parse(text, dimension) == value]
    return min(exact)[2] if exact else f"{value!r} {DIMENSIONS[dimension][0]}"


def toml_text(value: object) -> str:
    """Return a value as TOML writes it in a line."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key_text(key)} = {toml_text(each)}' for key, each in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(toml_text(each) for each in value)}]"
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace(_DELETE, "\\u007f")


def key_text(name: str) -> str:
    """Return a key as TOML writes it."""
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else json.dumps(name)


# ---------------------------------------------------------------- Python


def python_text(value: Any, where: str) -> str:
    """Return the expression, after ``import ddlsim``, that makes a value of the field `where`."""
    if isinstance(value, Cluster | Model) or (where == "cluster" and not _named(value)):
        raise ConfigError(
            f"{where}: is an object; save it as a file (cluster.save('mine.toml')) and give its path to have it in text"
        )
    if isinstance(value, Path):
        return repr(str(value))
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if isinstance(value, tuple | list):
        return f"[{', '.join(python_text(each, where) for each in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {python_text(each, where)}' for key, each in value.items())}}}"
    if dataclasses.is_dataclass(value):
        kind = type(value)
        name = f"ddlsim.{kind.__name__}" if getattr(ddlsim, kind.__name__, None) is kind else None
        arguments = ", ".join(f"{field}={python_text(each, f'{where}.{field}')}" for field, each in _set(value))
        return f"{name or f'{kind.__module__}.{kind.__qualname__}'}({arguments})"
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)
