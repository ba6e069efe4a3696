"""`checked`: the decorator that validates calls against annotations; functions with the fields of a dataclass."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, dataclass_transform

from ddlsim.arguments.annotations import checked_items, rule_of
from ddlsim.arguments.rules import Rule
from ddlsim.errors import ConfigError, listed, unknown_name

T = TypeVar("T", bound=Callable[..., Any])
K = TypeVar("K")
_EMPTY = inspect.Parameter.empty
_PLAIN, _NAMED = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
_SEVERAL, _MORE = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def _read(annotation: object, name: str, function: Callable[..., object], cls: type | None) -> object:
    """Return an annotation as an object: modules here postpone their evaluation.

    The names in it are those of the module that it is written in: a dataclass inherits fields from other modules.
    """
    if not isinstance(annotation, str):
        return annotation
    scope = inspect.unwrap(function).__globals__
    if cls is not None and dataclasses.is_dataclass(cls):
        bases = (base for base in cls.__mro__ if name in vars(base).get("__annotations__", ()))
        scope = next((vars(sys.modules[base.__module__]) for base in bases), scope)
    return eval(annotation, scope)


def annotations_of(make: Callable[..., object]) -> dict[str, object]:
    """Return the annotations of a function's, or a class's, arguments as objects."""
    cls = make if isinstance(make, type) else None
    function: Callable[..., object] = make if cls is None else cls.__init__  # type: ignore[misc]  # of this very class
    written = inspect.get_annotations(inspect.unwrap(function)).items()
    return {name: _read(annotation, name, function, cls) for name, annotation in written if name != "return"}


class _Signature:
    """What a function (the constructor of the class `cls`) asks of its arguments; messages call it `owner`."""

    def __init__(self, function: Callable[..., object], owner: str, cls: type | None) -> None:
        self.owner = owner
        self.signature = inspect.signature(function)
        self.rules = {
            name: rule
            for name, annotation in annotations_of(function if cls is None else cls).items()
            if (rule := rule_of(annotation)) is not None
        }
        kinds = {name: parameter.kind for name, parameter in self.signature.parameters.items()}
        #: those that can stand without their names, and those that can stand with it: where, and the rule
        self.places = [self._of(name) for name, kind in kinds.items() if kind is _PLAIN]
        self.named = {name: self._of(name) for name, kind in kinds.items() if kind in (_PLAIN, _NAMED)}
        self.needed = [name for name in self.named if self.signature.parameters[name].default is _EMPTY]
        self.several = next((self._of(name) for name, kind in kinds.items() if kind is _SEVERAL), None)
        self.more = next((self._of(name) for name, kind in kinds.items() if kind is _MORE), None)

    def _of(self, name: str) -> tuple[str, Rule | None]:
        return f"{self.owner}: {name}", self.rules.get(name)

    def checked(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[list[object], dict[str, object]]:
        """Return the arguments as the function gets them. Raises ConfigError for those that do not fit."""
        n = len(args)
        kept = [value if rule is None else rule(value, where) for (where, rule), value in zip(self.places, args)]  # noqa: B905
        if n > len(kept):
            if self.several is None:
                raise self._misfit(args, kwargs)
            where, rule = self.several
            kept += checked_items(rule, args[len(kept) :], where)
        named = {}
        for name, value in kwargs.items():
            place = self.named.get(name)
            if place is None:
                if self.more is None:
                    raise self._misfit(args, kwargs)
                place = f"{self.owner}: {name}", self.more[1]
            named[name] = value if place[1] is None else place[1](value, place[0])
        for i, name in enumerate(self.named):
            if (i < n and i < len(self.places)) == (name in kwargs) and (name in kwargs or name in self.needed):
                raise self._misfit(args, kwargs)  # given twice, or not at all
        return kept, named

    def _misfit(self, args: tuple[object, ...], kwargs: dict[str, object]) -> ConfigError:
        names = [name for name in self.signature.parameters if name != "self"]
        for name in kwargs:
            if name not in names:
                return unknown_name("argument", name, names, self.owner)
        reason = "wrong arguments"
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            reason = str(error)
        return ConfigError(f"{self.owner}: {reason}; valid arguments: {listed(names) or 'none'}")


def checked(target: T) -> T:
    """Decorate a function or class so that calls validate their arguments.

    Each argument is validated against its annotation. Invalid arguments raise ConfigError.
    """
    if isinstance(target, type):
        target.__init__ = _guarded(target.__init__, target)  # type: ignore[misc]
        return target
    return _guarded(target, None)


def _guarded(function: T, cls: type | None) -> T:
    name = function.__qualname__.rpartition("<locals>.")[2]
    signatures: dict[str, _Signature] = {}  # made when it is needed: annotations may name what is defined later

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        owner = name if cls is None else type(args[0]).__name__
        signature = signatures.get(owner)
        if signature is None:
            signature = signatures[owner] = _Signature(function, owner, cls)
        kept, named = signature.checked(args, kwargs)
        return function(*kept, **named)

    return call  # type: ignore[return-value]


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,))
def settings(kind: type[K]) -> type[K]:
    """Make a class a checked dataclass of keyword arguments, which type checkers treat as frozen.

    It has no comparison, no representation and no guard against changes, which would take longer to create than it.
    """
    return checked(dataclasses.dataclass(kw_only=True, eq=False, repr=False)(kind))


P = ParamSpec("P")
F = TypeVar("F")
R = TypeVar("R")


def takes_fields_of(kind: Callable[P, F]) -> Callable[[Callable[[F], R]], Callable[P, R]]:
    """Decorate a function that takes a dataclass instance, so that callers pass the fields as arguments instead.

    kind   the dataclass, which also validates the arguments

    The decorated function has the signature of `kind`, including inherited fields. Documentation, editors and type
    checkers show this signature, and a field added to a base class becomes an argument automatically.

    >>> from dataclasses import dataclass
    >>> from ddlsim.arguments import Count
    >>> @dataclass(frozen=True)
    ... class Size:
    ...     width: Count
    ...     height: Count = 1
    >>> @takes_fields_of(Size)
    ... def area(size: Size) -> int:
    ...     return size.width * size.height
    >>> area(3, height=2)
    6
    >>> area(3, heigth=2)
    Traceback (most recent call last):
        ...
    ddlsim.errors.ConfigError: area: unknown argument 'heigth'; did you mean 'height'?
    """

    def decorate(function: Callable[[F], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return function(kind(*args, **kwargs))

        del call.__wrapped__
        signature = inspect.signature(kind)
        types: dict[str, object] = {}
        for base in reversed(inspect.getmro(kind)):  # type: ignore[arg-type]  # a class
            types |= inspect.get_annotations(base, eval_str=True)  # each in the module of its class
        call.__annotations__ = {name: types[name] for name in signature.parameters}
        returned = inspect.signature(function).return_annotation
        call.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
        return checked(call)

    return decorate
