"""Values that stand for ``"$names"`` in a model file: parameters, named sizes, and whole-number sums of them."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from string import Template

from ddlsim.errors import ConfigError, shown, unknown_name
from ddlsim.plain import parse_value

Values = Mapping[str, object]

MAX_LENGTH = 200  # of a sum

_NAME = re.compile(r"\$([A-Za-z_]\w*)")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]]
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def substitute(value: object, values: Values, used: set[str]) -> object:
    """Return `value` with every text in it that has a ``$x`` replaced; adds each x to `used`.

    ``"$x"`` alone becomes ``values["x"]`` whatever it is; ``"4 * $x"``, ``"$x / 2 + 1"`` and the like the whole number
    that they make. What has no value stays as it is. Raises ConfigError for a sum that makes none.
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
    """Return the whole number that a text like ``"4 * $x"`` makes."""
    names = set(_NAME.findall(text))
    for name in names:
        if type(values[name]) is not int:
            raise ConfigError(f"{shown(text)} needs a whole number, but {name} = {shown(values[name])}")
    try:
        if len(text) > MAX_LENGTH:
            raise ValueError
        return _evaluated(ast.parse(_NAME.sub(r"\1", text), mode="eval").body, values)
    except (SyntaxError, ValueError):
        raise ConfigError(f"{shown(text)} is no sum of whole numbers; write it like '4 * $x' or '$x / 2 + 1'") from None
    except ArithmeticError:
        asked = ", ".join(f"{name} = {values[name]}" for name in sorted(names))
        raise ConfigError(f"{shown(text)} is no whole number with {asked}") from None


def _evaluated(node: ast.expr, values: Values) -> int:
    match node:
        case ast.Constant(value=int(number)) if type(number) is int:
            return number
        case ast.Name(id=name):
            value = values[name]
            assert isinstance(value, int)  # as checked above
            return value
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            whole, rest = divmod(_evaluated(left, values), _evaluated(right, values))
            if rest:
                raise ArithmeticError
            return whole
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluated(left, values), _evaluated(right, values))
    raise ValueError


def chosen_values(
    parameters: Values, sizes: Mapping[str, Values], options: Sequence[str], where: str, prefix: str
) -> tuple[dict[str, object], str | None, tuple[str, ...], tuple[str, ...]]:
    """Return the parameters' values, the named size, what was set of them (as "key=value"), and the other options.

    parameters  the file's own values
    sizes       name -> values that it sets
    options     as asked for: names of sizes, "key=value", and names of optional parts
    where       the file, for messages; `prefix` is what stands before a size's name in what the user writes

    Raises ConfigError for a parameter that there is not, for two sizes, and for a file that needs a size.
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
        values[key] = _setting(key, text, where)
    if missing := sorted(names - set(values)):
        which = ", ".join(f"{prefix}{name}" for name in sizes)
        raise ConfigError(f"{where}: {missing[0]} has no value; choose a size ({which}) or add +{missing[0]}=...")
    return values, size, tuple(f"{key}={text}" for key, text in settings), tuple(parts)


def _setting(key: str, text: str, where: str) -> object:
    """Return the value in ``key=value``: a number or a list."""
    value = parse_value(text)
    if isinstance(value, str):
        raise ConfigError(f"{where}: {key} = {shown(text)}: must be a number, like {key}=1024")
    return value


def titled(title: str, values: Values, size: str | None) -> str:
    """Return the title with its ``$names`` replaced, ``$size`` among them, which goes where there is none."""
    text = title.replace(" $size", "") if size is None else title
    return Template(text).safe_substitute({**values, "size": size})
