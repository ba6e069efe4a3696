"""Exceptions. Every message states what is wrong, where, and how to fix it.

Constructors take one plain message, because simpy rebuilds the exception of a failed event from its ``args``.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ddlsim import printable

#: maximum lengths of a message, and of a word in it (such as a path)
_LONGEST, _LONGEST_WORD = 1200, 300


class DdlsimError(Exception):
    """Base class of all errors that ddlsim raises deliberately.

    The message is a single line. Overlong parts are shortened, and control characters are escaped.
    """

    def __init__(self, message: str = "") -> None:
        text = message.replace("\n", " ")  # other line separators are escaped
        if len(text) > _LONGEST_WORD:
            text = re.sub(rf"\S{{{_LONGEST_WORD},}}", lambda word: f"{word[0][:60]}...", text)
        half = _LONGEST // 2
        super().__init__(text if len(text) <= _LONGEST else f"{text[:half]} ... {text[-half:]}")

    def __str__(self) -> str:
        return printable.shown(super().__str__())


class ConfigError(DdlsimError, ValueError):
    """Raised when an argument, a file or a graph that the user passed is invalid."""


class UnitError(ConfigError):
    """Raised when a quantity has no unit, an unknown unit, or the wrong dimension."""


class DeadlockError(DdlsimError, RuntimeError):
    """Raised when the simulation cannot make progress although processes are still waiting."""


class NoUpdateError(DdlsimError):
    """The run ended before its first update."""


class ConservationError(DdlsimError, RuntimeError):
    """Raised when a consistency check of a run fails because its bytes, times or updates do not add up.

    No result is returned.
    """


class _Short(reprlib.Repr):
    """A repr that abbreviates long numbers, texts and arrays."""

    def repr_int(self, x: int, level: int) -> str:
        if abs(x) < 10**30:
            return repr(x)
        return f"{'-' if x < 0 else ''}10**{int(abs(x).bit_length() * math.log10(2))} approximately"

    def repr_ndarray(self, x: Any, level: int) -> str:
        return f"an array of shape {x.shape}, {x.dtype}" if x.ndim else f"array({x.item()!r})"


#: maximum number of names listed in a message
MOST_LISTED = 10
_SHORT = _Short()
_SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong, _SHORT.maxlevel = 60, 80, 40, 3
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 6


def shown(value: object) -> str:
    """Return a value for an error message: its repr on one line, shortened, without unprintable characters."""
    text = " ".join(_SHORT.repr(value).split())
    return "".join(c if c.isprintable() else "?" for c in text[:200])


def listed(names: Iterable[object]) -> str:
    """Return names for an error message: at most ten, and the number of further ones."""
    every = list(map(str, names))
    more = len(every) - MOST_LISTED
    return ", ".join(every) if more <= 0 else f"{', '.join(every[:MOST_LISTED])} and {more} more"


#: former names of classes, arguments, keys and attributes, and names in other tools -> current names
RENAMED = (
    ("aim", "objective"),
    ("away", "out_of_service"),
    ("beside", "background"),
    ("communicates", "slowdown_scope"),
    ("ddp", "all-reduce"),
    ("dp", "all-reduce"),
    ("dp", "data"),
    ("drawn_faults", "sampled_faults"),
    ("gathers_operands", "gathers_low_precision_weights"),
    ("goes_on", "endless"),
    ("goes_to", "breakdown"),
    ("gpus", "workers"),
    ("keeps_operands", "keeps_low_precision_inputs"),
    ("keeps_unread", "keeps_unused_outputs"),
    ("life", "failure_timeline"),
    ("life", "reliability"),
    ("Life", "FailureTimeline"),
    ("lives", "timelines"),
    ("lr", "rate"),
    ("notice", "detection"),
    ("noticing", "detecting"),
    ("of", "total_cores"),
    ("pipeline", "parallel"),
    ("pp", "parallel"),
    ("pp", "pipeline"),
    ("ps", "parameter-server"),
    ("saving", "checkpointing"),
    ("slow_downs", "slowdowns"),
    ("split_loss_nbytes", "sharded_loss_nbytes"),
    ("step_time_together", "concurrent_step_time"),
    ("stretches", "running_intervals"),
    ("tp", "parallel"),
    ("tp", "tensor"),
    ("ways", "degree"),
    ("whole", "integer"),
    ("zero1", "sharded-update"),
    ("zero3", "fsdp"),
)


def nearest(name: str, names: Iterable[str], least: float = 0.5) -> str:
    """Return the one of `names` that was probably meant, "" if the spelling of none is similar to the degree `least`.

    Names with the same prefix have priority over similar spellings: "async" does not suggest "k-async".
    """
    import difflib

    names = list(names)
    current = [new for old, new in RENAMED if old == name and new in names]
    if current:
        return current[0]
    plain = {re.sub(r"[\s_-]", "", other).lower(): other for other in sorted(names, reverse=True)}
    wanted = re.sub(r"[\s_-]", "", name[:100]).lower()
    if wanted in plain:
        return plain[wanted]
    close = difflib.get_close_matches(wanted, plain, n=len(plain) or 1, cutoff=0.0)
    words = _words(name)  # the longest name whose words all occur: "h100" in "NVIDIA H100 80GB HBM3"
    within = sorted((other for other in names if len(other) > 2 and _words(other) <= words), key=len, reverse=True)
    begins = [spelling for spelling in close if len(wanted) > 2 and spelling.startswith(wanted)]
    inside = [spelling for spelling in close if len(wanted) > 2 and wanted in spelling]
    alike = difflib.get_close_matches(wanted, plain, n=1, cutoff=least)
    typo = difflib.get_close_matches(wanted, alike, n=1, cutoff=0.8)
    begins, typo, after = ([plain[spelling] for spelling in some] for some in (begins, typo, (*alike, *inside)))
    typo = [other for other in typo if not within or within[0] in other]  # "h100-80g" does not mean "a100-80g"
    return next(iter((*begins, *typo, *within, *after)), "")


def _words(name: str) -> set[str]:
    return set(filter(None, re.split(r"[\s_-]+", name[:100].lower())))


def no_attribute(owner: str, name: str, names: Iterable[str]) -> AttributeError:
    """Return the error for an attribute that `owner` does not have, with the nearest of `names` as a hint."""
    near = nearest(name, names)
    return AttributeError(f"{owner} has no attribute {name!r}" + (f"; did you mean {near!r}?" if near else ""))


def unknown_name(what: str, name: str, names: Iterable[str], where: str = "") -> ConfigError:
    """Return the error for a `name` that is not among `names`, with the nearest as a hint."""
    names = sorted(names)
    near = nearest(name, names)
    hint = f"did you mean {near!r}?" if near else f"known: {listed(names) or 'none'}"
    prefix = f"{where}: " if where else ""
    return ConfigError(f"{prefix}unknown {what} {shown(name)}; {hint}")


class SuggestsAttributes:
    """Base of results: errors for unknown attributes suggest the nearest public one."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            if hasattr(type(self), name):  # a property, whose own AttributeError is raised
                return object.__getattribute__(self, name)
            names = [attribute for attribute in dir(self) if not attribute.startswith("_")]
            raise no_attribute(f"the {type(self).__name__}", name, names)
