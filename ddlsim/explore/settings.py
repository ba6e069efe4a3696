"""What strategies and compressors can be told, as fields of a form: read off their classes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Iterable
from dataclasses import dataclass

import ddlsim
from ddlsim.arguments.annotations import rule_of
from ddlsim.arguments.checking import annotations_of
from ddlsim.errors import ConfigError
from ddlsim.plan.pipeline_orders import ASYNCHRONOUS, ORDERS
from ddlsim.run.files import OVERLAPS, SCHEMA
from ddlsim.schema import members

#: what people change most: shown at once, the others on request
COMMON = (
    "algorithm", "overlap", "tensor", "pipeline", "data", "micro_batch", "order", "stage", "servers", "placement",
    "period", "groups", "ways", "sharding", "probability", "fraction",
)  # fmt: skip

#: names that fields take which have no list of their own
WORDS = (
    "simulated", "calibrated", "nccl", "topology", "given", "own", "colocated", "none", "selective", "full",
    "early-stop", "fp32", "fp16", "bf16", "ring", "complete", "bipartite", "exponential", "table-wise", "row-wise",
    "column-wise", "balance", "exchanged", "prefetched", "data-parallel", "one rank", "sgd", "rowwise_adagrad",
    "inverse", "square-root", "maintain", "reset", "average",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """One field of a form.

    kind      "flag", "count", "choice" or "text"
    choices   of a choice; the first is what the class does by default
    default   None: it has none, or it is worked out
    needed    whether something must be given
    about     what its class says about it
    """

    name: str
    kind: str
    choices: tuple[str, ...] = ()
    default: object = None
    needed: bool = False
    about: str = ""

    @property
    def label(self) -> str:
        """What people call it."""
        return self.name.replace("_", " ").capitalize()


@functools.cache
def settings_of(kind: type) -> tuple[Setting, ...]:
    """Return what a strategy or compressor can be told in a file, common things first."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    about = _descriptions(kind)
    made = [
        _setting(kind, name, annotation, defaults.get(name), about.get(name, ""))
        for name, annotation in SCHEMA.arguments_of(kind).items()
    ]
    return tuple(sorted(made, key=lambda each: not (each.needed or each.name in COMMON)))


def _setting(kind: type, name: str, annotation: object, default: object, about: str) -> Setting:
    must = default is dataclasses.MISSING
    kinds = set(members(annotation)) - {type(None)}
    is_text = str in kinds or any(typing.get_origin(each) is typing.Literal for each in kinds)
    choices = _choices(kind, name) if is_text else ()
    known = default if isinstance(default, str | int | float) else None
    if bool in kinds:
        return Setting(name, "flag", (), known, must, about)
    if choices:
        first = (str(known),) if known in choices else ("",)
        return Setting(name, "choice", (*first, *(each for each in choices if each != known)), known, must, about)
    return Setting(name, "count" if kinds == {int} else "text", (), known, must, about)


def _choices(kind: type, name: str) -> tuple[str, ...]:
    """Return the names that the class takes for one of its fields."""
    annotation = annotations_of(kind)[name]
    literals = _literals(annotation)
    if literals:
        return literals
    rule = rule_of(annotation)
    if rule is None:
        return ()
    taken = []
    for word in _vocabulary(name):
        try:
            rule(word, name)
        except ConfigError:
            continue
        taken.append(word)
    return tuple(taken)


def _literals(annotation: object) -> tuple[str, ...]:
    if typing.get_origin(annotation) is typing.Literal:
        return tuple(each for each in typing.get_args(annotation) if isinstance(each, str))
    return tuple(word for each in typing.get_args(annotation) for word in _literals(each))


def _vocabulary(name: str) -> Iterable[str]:
    """Return names that may stand in a field."""
    if name in ("reduce_scatter", "all_gather", "all_to_all"):
        return ("default", *ddlsim.algorithm_names(name))
    if name == "shared_norms":
        return ddlsim.algorithm_names("all_gather")
    if name in ("algorithm", "all_reduce"):
        return ("default", "auto", *ddlsim.algorithm_names("all_reduce"))
    if name == "overlap":
        return (*OVERLAPS, "megatron")
    if name == "order":
        return (*ORDERS, *ASYNCHRONOUS)
    return WORDS


def _descriptions(kind: type) -> dict[str, str]:
    """Return what the class's docstring says about its fields: lines of a name, two spaces and a text."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        lines = inspect.cleandoc(base.__doc__ or "").splitlines()
        name = ""
        for line in lines:
            begins = re.match(r"(\w+)  +(\S.*)", line)
            if begins and line[0] != " ":
                name, text = begins[1], begins[2]
                found[name] = text
            elif name and line.startswith("  "):
                found[name] += " " + line.strip()
            else:
                name = ""
    return {name: re.sub(r":\w+:`~?([\w.]*\.)?(\w+)`", r"\2", text).replace("``", "") for name, text in found.items()}
