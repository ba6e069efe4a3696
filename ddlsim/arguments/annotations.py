"""Rules from type annotations."""

from __future__ import annotations

import collections.abc
import functools
import itertools
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt

from ddlsim.arguments.rules import PATH, TEXT, Rule, integer, number, one_of, with_attributes, wrong
from ddlsim.errors import ConfigError, shown

MAX_LENGTH = 10**7  # of a sequence
_PLAIN = {
    bool: Rule("True or False", lambda v: isinstance(v, bool | np.bool_), lambda v, _: bool(v), plural="booleans"),
    int: integer(),
    float: number(),
    str: TEXT,
    Path: PATH,
    type(None): Rule("None", lambda value: value is None),
}


#: the type of `type` statements; NumPy 2.5 makes `NDArray` and `ArrayLike` with them on Python 3.12 and later
_ALIAS: Any = getattr(typing, "TypeAliasType", ())


def _without_alias(annotation: Any) -> Any:
    """Return what a `type` statement stands for, with its parameters filled in; other annotations as they are."""
    if isinstance(annotation, _ALIAS):
        return annotation.__value__
    if isinstance(origin := typing.get_origin(annotation), _ALIAS):
        return origin.__value__[typing.get_args(annotation)]
    return annotation


@functools.cache
def rule_of(annotation: Any) -> Rule | None:
    """Return what a type asks for; None if everything is welcome."""
    if annotation == npt.ArrayLike:
        return None
    annotation = _without_alias(annotation)
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if origin is Annotated:
        return _narrowed(inner[0], inner[1:])
    if origin in (typing.Union, types.UnionType):
        return _any_of(inner)
    if origin is Literal:
        return one_of(*inner)
    if origin is tuple and len(inner) and inner[-1] is not Ellipsis:
        return _fixed(tuple(rule_of(item) for item in inner))
    if origin in (tuple, list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection):
        return _sequence(rule_of(inner[0]), list if origin is list else tuple)
    if origin in (dict, collections.abc.Mapping):
        return _table(rule_of(inner[0]), rule_of(inner[1]))
    if origin is np.ndarray:
        return array_of(typing.get_args(inner[1])[0])
    if origin is collections.abc.Callable:
        return Rule("a function", callable)
    kind = origin or annotation
    if kind in (Any, object) or not isinstance(kind, type):
        return None
    if getattr(kind, "_is_protocol", False):
        return _like(kind)
    name = kind.__name__
    text = f"{'an' if name[0] in 'AEIOU' else 'a'} {name}{' object' if name[0].isupper() else ''}"
    return Rule(text, lambda value: isinstance(value, kind), plural=f"{name} objects")


#: before an alternative in a description, outside of brackets
_OR = re.compile(r"(?:, or |, | or )(?=an? |the |'|True|False)(?![^(]*\))(?![^\[]*\])")


def _listed(words: Iterable[str], joint: str = "and") -> str:
    *first, last = words
    comma = "," if any(", " in word for word in first) else ""
    return f"{', '.join(first)}{comma} {joint} {last}" if first else last


def _narrowed(inner: Any, notes: tuple[object, ...]) -> Rule | None:
    if isinstance(notes[0], Rule):
        return notes[0]
    rule = rule_of(inner)
    if rule is None:
        return None
    text, *plural = [note for note in notes if isinstance(note, str)] or [rule.text, rule.plural]
    keeps: list[Callable[[Any, str], object]] = [rule.keep, *filter(callable, notes)]

    def keep(value: Any, where: str) -> object:
        for check in keeps:
            value = check(value, where)
        return value

    return Rule(text, rule.takes, keep, plural=plural[0] if plural else "", words=rule.words)


def _any_of(members: tuple[Any, ...]) -> Rule | None:
    order = [type(None), bool, int]  # an integer stays one where a float is welcome, too
    kinds = [(alternatives(member)[0], member) for member in members]
    ordered = [member for _, member in sorted(kinds, key=lambda pair: order.index(pair[0]) if pair[0] in order else 3)]
    rules = [PATH if member is str and Path in members else rule_of(member) for member in ordered]
    present = [rule for rule in rules if rule is not None]
    if len(present) < len(rules):
        return None
    named = [rule for rule in (*present[1:], present[0]) if rule is not PATH or Path in ordered]
    choices = (_OR.split(rule.text) if "whose" not in rule.text else [rule.text] for rule in named)
    text = _listed(dict.fromkeys(itertools.chain(*choices)), "or")
    plural = _listed(dict.fromkeys(rule.plural for rule in named), "or") if all(rule.plural for rule in named) else ""

    def keep(value: object, where: str) -> object:
        for rule in present:
            if rule.takes(value):
                return rule.keep(value, where)
        raise wrong(value, where, text)

    words = tuple(word for rule in present for word in rule.words)
    return Rule(text, lambda value: any(rule.takes(value) for rule in present), keep, plural=plural, words=words)


def _is_list(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray | Mapping | set | frozenset)


def _items(value: Iterable[object], where: str) -> list[object]:
    if isinstance(value, np.ndarray) and value.ndim == 0:
        raise ConfigError(f"{where} = {shown(value)}: must be a list, or an array with at least one dimension")
    items = list(itertools.islice(value, MAX_LENGTH + 1))
    if len(items) > MAX_LENGTH:
        raise ConfigError(f"{where}: has more than {MAX_LENGTH} entries, or is infinite; pass fewer entries")
    return items


def checked_items(rule: Rule | None, items: Iterable[object], where: str) -> list[object]:
    if rule is None:
        return list(items)
    return [rule(item, f"{where}[{i}]") for i, item in enumerate(items)]


def _sequence(rule: Rule | None, kind: type[tuple[Any, ...]] | type[list[Any]]) -> Rule:
    of = ""
    if rule is not None and rule.plural:
        of = f" of {rule.plural}"
    elif rule is not None and rule.text.startswith("one of "):
        of = f" with entries from {rule.text.removeprefix('one of ')}"
    elif rule is not None and rule.text:
        of = f" whose entries are {rule.text}"
    return Rule(
        f"a list{of}",
        _is_list,
        lambda value, where: kind(checked_items(rule, _items(value, where), where)),
        plural=f"lists{of}",
    )


def several(item: Any) -> Rule:
    """Return a rule that accepts a list of `item`, an annotation; a single one counts as a list of one."""
    one, many = rule_of(item), rule_of(tuple[item, ...])
    assert one is not None
    assert many is not None
    return Rule("", lambda value: True, lambda value, where: many((value,) if one.takes(value) else value, where))


def _fixed(rules: tuple[Rule | None, ...]) -> Rule:
    texts = ["any value" if rule is None else rule.text for rule in rules]
    same = rules[0].plural if rules[0] is not None and len(set(texts)) == 1 else ""
    of = f" of {len(rules)} {same}" if same else f" of {len(rules)} values ({_listed(texts)})"

    def keep(value: Iterable[object], where: str) -> object:
        items = _items(value, where)
        if len(items) != len(rules):
            raise wrong(value, where, f"a list{of}")
        return tuple(
            item if rule is None else rule(item, f"{where}[{i}]")
            for i, (rule, item) in enumerate(zip(rules, items, strict=True))
        )

    return Rule(f"a list{of}", _is_list, keep, plural=f"lists{of}")


def _table(key: Rule | None, item: Rule | None) -> Rule:
    def keep(value: Mapping[object, object], where: str) -> object:
        return {
            (name if key is None else key(name, f"{where}: key")): (
                entry if item is None else item(entry, f"{where}[{shown(name)}]")
            )
            for name, entry in value.items()
        }

    return Rule("a mapping such as {'name': value}", lambda value: isinstance(value, Mapping), keep)


def array_of(kind: Any, *, scalar: bool = False) -> Rule:
    """Arrays, and lists that numpy reads as such; whether their shape fits is for the caller to say."""
    float_rule = _PLAIN[float]
    is_int = isinstance(kind, type) and issubclass(kind, np.integer)
    text = f"an array of {'integers' if is_int else 'numbers'}"

    def keep(value: Any, where: str) -> object:
        if is_int and type(value) is np.ndarray and value.dtype == kind and value.ndim:
            return value
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, OverflowError):
            raise wrong(value, where, text) from None
        if not scalar and array.ndim == 0:
            raise wrong(value, where, text)
        if array.dtype.kind not in ("iu" if is_int else "iuf") and array.size:
            raise wrong(value, where, text)
        if not is_int and not np.isfinite(array).all():
            raise wrong(value, where, "an array of finite numbers")
        try:
            return array.astype(kind, copy=False)
        except TypeError:  # an abstract kind, such as np.floating
            return array

    return Rule(
        text,
        lambda value: isinstance(value, np.ndarray) or _is_list(value) or (scalar and float_rule.takes(value)),
        keep,
    )


def _like(protocol: type) -> Rule:
    """Objects that have what a protocol names."""
    bases = [base for base in protocol.__mro__ if getattr(base, "_is_protocol", False)]
    names = {name for base in bases for name in (*vars(base), *vars(base).get("__annotations__", ()))}
    names = {name for name in names if not name.startswith("_")}
    attributes = f"the attribute{'s' if len(names) > 1 else ''} {_listed(sorted(names))}"
    return with_attributes(f"an object with {attributes}", *names, plural=f"objects with {attributes}")


def alternatives(annotation: Any) -> list[Any]:
    """Return the types that a value may have, with what narrows them left out; a name of several is a string."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return list(dict.fromkeys(kind for member in inner for kind in alternatives(member)))
    if origin is Annotated:
        return alternatives(inner[0])
    if origin is Literal:
        return [str]
    if inner and origin in (tuple, collections.abc.Sequence, collections.abc.Iterable):
        return [origin[tuple(item if item is Ellipsis else alternatives(item)[0] for item in inner)]]
    return [annotation]
