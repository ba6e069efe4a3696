"""From a name to a collective algorithm. The modules named after the kinds are the only list there is."""

from __future__ import annotations

import functools
import importlib
import inspect
import re

from ddlsim.collectives.schedule import KINDS, Collective
from ddlsim.errors import ConfigError, unknown_name

__all__ = ["SEGMENT_BYTES", "algorithm_names", "find", "given", "n_segments_for"]

SEGMENT_BYTES = 512 * 1024
MAX_SEGMENTS = 1024

_CALL = re.compile(r"\s*(?P<name>[\w.:]+)\s*(?:\((?P<arguments>[\w\s,.:]*)\))?\s*")


def algorithm_names(kind: str = "all_reduce") -> list[str]:
    """Return the names of the algorithms for `kind`, sorted. Raises ConfigError for an unknown kind."""
    if kind not in KINDS:
        raise unknown_name("kind of collective", kind, KINDS)
    return sorted(importlib.import_module(f"ddlsim.collectives.{kind}").__all__)


def find(algorithm: str | Collective, kind: str = "all_reduce") -> Collective:
    """Return the function for a name, with the arguments of a ``"name(a, b)"`` bound after `n_ranks`.

    A name is one of :func:`algorithm_names`, or ``"package.module:function"``. Raises ConfigError for an
    unknown name (with the nearest known one) or for arguments that the function does not take.
    """
    known = algorithm_names(kind)
    if not isinstance(algorithm, str):
        return algorithm
    match = _CALL.fullmatch(algorithm)
    if match is None:
        raise ConfigError(
            f"collective {algorithm!r} is not a name; write 'ring' or 'hierarchical(ring, ring)'"
        )
    name = match["name"]
    if ":" in name:
        function = _imported(name)
    elif name in known:
        function = getattr(importlib.import_module(f"ddlsim.collectives.{kind}"), name)
    else:
        raise unknown_name(f"{kind} algorithm", name, known)
    if match["arguments"] is None:
        return function
    words = [word.strip() for word in match["arguments"].split(",") if word.strip()]
    return _with_arguments(function, algorithm, [int(w) if w.isdigit() else w for w in words])


def given(function: Collective) -> dict[str, object]:
    """Return the keyword arguments that are bound already (by :func:`functools.partial`)."""
    return dict(function.keywords) if isinstance(function, functools.partial) else {}


def n_segments_for(nbytes: float) -> int:
    """Return the number of segments that pipelined algorithms get by default: 512 KiB each, at most 1024."""
    return int(min(max(-(-nbytes // SEGMENT_BYTES), 1), MAX_SEGMENTS))


def _imported(name: str) -> Collective:
    module_name, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"collective {name!r}: {error}; write it 'package.module:function'") from None
    if not callable(function):
        found = type(function).__name__
        raise ConfigError(f"collective {name!r} is a {found}; name a function n_ranks -> Schedule")
    collective: Collective = function
    return collective


def _with_arguments(function: Collective, text: str, arguments: list[int | str]) -> Collective:
    signature = inspect.signature(function)
    try:
        bound = signature.bind_partial(0, *arguments)
    except TypeError as error:
        raise ConfigError(f"collective {text!r}: {error}; it is {function.__name__}{signature}") from None
    return functools.partial(function, **dict(list(bound.arguments.items())[1:]))
