"""One exception tree. Every message names what was wrong, where, and what to do about it.

Constructors take one plain message: simpy rebuilds a failed event's exception from its ``args``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["ConfigError", "DdlsimError", "DeadlockError", "UnitError", "unknown_name"]


class DdlsimError(Exception):
    """Base of every error that ddlsim raises on purpose."""


class ConfigError(DdlsimError, ValueError):
    """Something the user wrote (file, argument, graph) cannot be used as it is."""


class UnitError(ConfigError):
    """A quantity without a unit, with an unknown unit, or of the wrong dimension."""


class DeadlockError(DdlsimError, RuntimeError):
    """The simulation can make no progress while processes still wait."""


def unknown_name(what: str, name: str, known: Iterable[str], where: str = "") -> ConfigError:
    """Return the error for a `name` that is not among the `known` ones, with the nearest as a hint."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    prefix = f"{where}: " if where else ""
    return ConfigError(f"{prefix}unknown {what} {name!r}; {hint}")
