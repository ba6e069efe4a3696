"""Canonical text of an experiment: two experiments with the same text have the same result.

Names are not sufficient, because a cluster, a model, a data set or a function can change under the same name. The text
therefore contains digests of their contents, but not the source code of user-defined classes. Start a new store after
changing the methods of a custom strategy.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
from collections.abc import Mapping
from pathlib import Path

import numpy as np

import ddlsim
from ddlsim.cluster import Cluster
from ddlsim.data.dataset import DataSet
from ddlsim.run.experiment import Experiment
from ddlsim.run.prepare import nvlink_limits
from ddlsim.workload.model import Model

#: descriptive fields of a cluster, which do not affect simulations
_COMMENTS = frozenset({"title", "sources", "notes", "source"})
_ABOUT = (Cluster, Model, DataSet)


class Digests:
    """Digests of clusters, models and data sets, each computed once (they are immutable)."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[object, str]] = {}

    def of(self, part: object) -> str:
        """Return a digest of the contents of `part`, 32 hexadecimal digits."""
        entry = self._entries.get(id(part))
        if entry is None:  # keeping the part keeps its id unique
            entry = self._entries[id(part)] = part, _digest(json.dumps(_fields(part, self)))
        return entry[1]


def text_of(experiment: Experiment, digests: Digests, *, stability: bool = False) -> str:
    """Return the experiment as canonical JSON: all fields, digests of contents, the version of ddlsim, and whether the
    result includes its `stability`.

    Cluster, models and data must have been loaded.
    """
    fields = {f.name: canonical(getattr(experiment, f.name), digests) for f in dataclasses.fields(experiment)}
    wanted: dict[str, object] = {"stability": True} if stability else {}
    cluster = experiment.cluster
    assert isinstance(cluster, Cluster)
    if (limits := nvlink_limits(cluster, experiment.device)) is not None:
        wanted["nvlink_limits"] = canonical(limits, digests)
    return json.dumps({"ddlsim": ddlsim.__version__, **fields, **wanted}, sort_keys=True)


def key_of(text: str) -> str:
    """Return the key under which the result of an experiment is stored."""
    return _digest(text)


def canonical(value: object, digests: Digests) -> object:
    """Return `value` in a form that JSON can write; values with the same simulation have the same form."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if np.isfinite(value) else str(value)
    if isinstance(value, np.generic):
        return canonical(value.item(), digests)
    if isinstance(value, _ABOUT):
        return {"name": value.name, "digest": digests.of(value)}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.ndarray):
        return [str(value.dtype), list(value.shape), hashlib.sha256(np.ascontiguousarray(value).data).hexdigest()]
    if isinstance(value, Mapping):
        return sorted([str(key), canonical(item, digests)] for key, item in value.items())
    if isinstance(value, tuple | list):
        return [canonical(item, digests) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(canonical(item, digests)) for item in value)
    if isinstance(value, types.FunctionType):  # by name, code and closure
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        outside = [canonical(part, digests) for part in (value.__defaults__, value.__kwdefaults__, cells)]
        return [f"{value.__module__}.{value.__qualname__}", _code(value.__code__), outside]
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, type | types.BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    return _fields(value, digests)


def _fields(value: object, digests: Digests) -> object:
    state = getattr(value, "__dict__", ())
    names = [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else sorted(state)
    values = {name: canonical(getattr(value, name), digests) for name in names if name not in _COMMENTS}
    return {"type": f"{type(value).__module__}.{type(value).__qualname__}", **values}


def _code(code: types.CodeType) -> str:
    constants = [_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return _digest(repr((code.co_code, constants, code.co_names, code.co_varnames)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
