"""Lookup of collective algorithms by name. The modules named after the collectives are the only registry."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Mapping

from ddlsim.arguments import checked
from ddlsim.collectives.schedule import Collective, Kind, Schedule
from ddlsim.errors import ConfigError, shown, unknown_name
from ddlsim.named_code import imported, names_code

SEGMENT_BYTES = 512 * 1024
MAX_SEGMENTS = 1024

_CALL = re.compile(r"\s*(?P<name>[\w.:]+)\s*(?:\((?P<arguments>[\w\s,.:]*)\))?\s*")


@checked
def algorithm_names(kind: Kind = "all_reduce") -> list[str]:
    """Return the names of the algorithms for a kind of collective, such as "all_reduce", in alphabetical order.

    Raises ConfigError for an unknown kind of collective.
    """
    return sorted(_algorithms(kind))


@functools.cache
def _algorithms(kind: str) -> dict[str, Collective]:
    """Return the public functions of a module that map a number of ranks to a schedule."""
    functions = inspect.getmembers(importlib.import_module(f"ddlsim.collectives.{kind}"), inspect.isfunction)
    signatures = ((name, make, inspect.signature(make)) for name, make in functions if not name.startswith("_"))
    return {
        name: make
        for name, make, signature in signatures
        if next(iter(signature.parameters), "") == "n_ranks" and signature.return_annotation == "Schedule"
    }


def find(algorithm: str | Collective, kind: str = "all_reduce") -> Collective:
    """Return the function for a name, with the arguments of a ``"name(a, b)"`` bound after `n_ranks`.

    A name is one of :func:`algorithm_names`, or ``"package.module:function"``. Raises ConfigError for an
    unknown name (with the nearest known one) or for arguments that the function does not take.
    """
    names = algorithm_names(kind)
    if not isinstance(algorithm, str):
        return algorithm
    is_short = len(algorithm) <= 1000
    if is_short and "-" in algorithm and re.fullmatch(r"\s*[\w-]+\s*", algorithm):
        raise unknown_name(f"{kind} algorithm", algorithm, names)
    match = _CALL.fullmatch(algorithm) if is_short else None
    if match is None:
        raise ConfigError(
            f"collective {shown(algorithm)} is not a valid name; use a name such as 'ring' or 'hierarchical(ring, "
            "ring)'"
        )
    name = match["name"]
    if names_code(name):
        function = _imported(name)
    elif name in names:
        function = _algorithms(kind)[name]
    else:
        raise unknown_name(f"{kind} algorithm", name, names)
    if match["arguments"] is None:
        return function
    words = [word.strip() for word in match["arguments"].split(",") if word.strip()]
    return _with_arguments(function, algorithm, [int(w) if w.isdecimal() and len(w) < 19 else w for w in words])


def bound_arguments(function: Collective) -> dict[str, object]:
    """Return the keyword arguments that are bound already (by :func:`functools.partial`)."""
    return dict(function.keywords) if isinstance(function, functools.partial) else {}


_signature_of = functools.lru_cache(maxsize=256)(inspect.signature)


def _signature(function: Collective) -> inspect.Signature:
    return _signature_of(function) if inspect.isfunction(function) else inspect.signature(function)  # by identity


def parameters_of(function: Collective) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a collective algorithm. Raises ConfigError if it is not a Python function."""
    try:
        return _signature(function).parameters
    except (TypeError, ValueError):  # for some functions written in C
        raise _no_collective(function, "its signature cannot be determined") from None


def called(function: Collective, n_ranks: int, **more: object) -> Schedule:
    """Return the schedule built by a custom function. Raises ConfigError if the call fails or returns no schedule."""
    try:
        _signature(function).bind(n_ranks, **more)
    except TypeError as error:
        raise _no_collective(function, str(error)) from None
    schedule = function(n_ranks, **more)
    if not isinstance(schedule, Schedule):
        raise _no_collective(function, f"it returned {shown(schedule)}")
    return schedule


def _no_collective(function: Collective, reason: str) -> ConfigError:
    name = getattr(function, "__name__", shown(function))
    return ConfigError(f"collective {name!r} must be callable as function(n_ranks) -> Schedule: {reason}")


def n_segments_for(nbytes: float) -> int:
    """Return the default number of segments of pipelined algorithms: 512 KiB each, at most 1024."""
    return int(min(max(-(-nbytes // SEGMENT_BYTES), 1), MAX_SEGMENTS))


def _imported(name: str) -> Collective:
    function = imported(name, "collective", "function")
    if not callable(function):
        type_name = type(function).__name__
        raise ConfigError(f"collective {name!r} is of type {type_name}; expected a function(n_ranks) -> Schedule")
    collective: Collective = function
    return collective


def _with_arguments(function: Collective, text: str, arguments: list[int | str]) -> Collective:
    """Bind the positional arguments in order to the parameters that users can set (not "groups" or "levels"). A
    parameter "further" takes all remaining names."""
    names = [name for name in list(parameters_of(function))[1:] if name not in ("groups", "levels")]
    at = names.index("further") if "further" in names else len(arguments)
    words, numbers = ([word for word in arguments[at:] if isinstance(word, kind)] for kind in (str, int))
    values = [*arguments[:at], tuple(words), *numbers] if words or numbers else arguments
    if len(values) > len(names):
        raise ConfigError(
            f"collective {text!r}: {function.__name__} takes at most {len(names)} arguments; its signature is "
            f"{function.__name__}{inspect.signature(function)}"
        )
    return functools.partial(function, **dict(zip(names, values, strict=False)))
