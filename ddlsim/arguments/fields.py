"""Functions that take the fields of a dataclass, so that these are written once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ddlsim.arguments.checking import checked

P = ParamSpec("P")
F = TypeVar("F")
R = TypeVar("R")


def takes_fields_of(kind: Callable[P, F]) -> Callable[[Callable[[F], R]], Callable[P, R]]:
    """Decorate a function of one `kind` of dataclass so that it is called with the fields of it, and checked.

    The function has the signature of the class, for people, editors and type checkers alike; what a dataclass inherits
    is part of it, so a field that is added to a base is an argument of the function at once.

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
