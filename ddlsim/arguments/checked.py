"""`checked`: the decorator that holds every call to the annotations."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ddlsim.arguments.annotations import checked_items, rule_of
from ddlsim.errors import ConfigError, unknown_name

__all__ = ["checked"]

T = TypeVar("T", bound=Callable[..., Any])


class _Signature:
    """What a function asks of its arguments."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.signature = inspect.signature(function)
        annotations = inspect.get_annotations(function, eval_str=True)
        annotations.pop("return", None)
        self.rules = {name: rule for name, each in annotations.items() if (rule := rule_of(each)) is not None}
        self.kinds = {name: parameter.kind for name, parameter in self.signature.parameters.items()}

    def bind(self, owner: str, args: tuple[object, ...], kwargs: dict[str, object]) -> inspect.BoundArguments:
        """Return the arguments as the function takes them."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise self._misfit(owner, kwargs, str(error)) from None
        for name, value in bound.arguments.items():
            rule = self.rules.get(name)
            if rule is None:
                continue
            where = f"{owner}: {name}"
            if self.kinds[name] is inspect.Parameter.VAR_POSITIONAL:
                bound.arguments[name] = tuple(checked_items(rule, value, where))
            elif self.kinds[name] is inspect.Parameter.VAR_KEYWORD:
                bound.arguments[name] = {key: rule(each, f"{owner}: {key}") for key, each in value.items()}
            else:
                bound.arguments[name] = rule(value, where)
        return bound

    def _misfit(self, owner: str, kwargs: dict[str, object], reason: str) -> ConfigError:
        names = [name for name in self.kinds if name != "self"]
        for name in kwargs:
            if name not in names:
                return unknown_name("argument", name, names, owner)
        return ConfigError(f"{owner}: {reason}; it takes {', '.join(names) or 'no arguments'}")


def checked(target: T) -> T:
    """Decorate a function, or a class with annotated arguments, so that wrong ones raise ConfigError."""
    if isinstance(target, type):
        target.__init__ = _guarded(target.__init__, of_class=True)  # type: ignore[misc]
        return target
    return _guarded(target, of_class=False)


def _guarded(function: T, *, of_class: bool) -> T:
    known: list[_Signature] = []  # one, once it is needed: annotations may name what is defined later
    name = function.__qualname__.rpartition("<locals>.")[2]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not known:
            known.append(_Signature(function))
        bound = known[0].bind(type(args[0]).__name__ if of_class else name, args, kwargs)
        return function(*bound.args, **bound.kwargs)

    return call  # type: ignore[return-value]
