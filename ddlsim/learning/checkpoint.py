"""Saved runs: live values and control-flow decisions, in a file that cannot run code.

A file is a NumPy ``.npz`` archive, read without pickle. It contains the arrays of all values once each, the numbers
that decided how the run continued, the times of the updates, and a JSON text with the manifest and the place of each
array. Values are arrays, numbers, texts, tuples, lists, dicts and dataclasses of ddlsim, which the file names as
"module:Class"; any other class raises an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from ddlsim.errors import ConfigError, shown
from ddlsim.learning.values import Replay
from ddlsim.output_files import replacing

#: version 2 has a digest
FORMAT = 3
#: packages whose dataclasses values may contain
PACKAGES = ("ddlsim.compression", "ddlsim.learning", "ddlsim.optim", "ddlsim.runtime", "ddlsim.strategies")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """State of a run between two events, or after the update that ends it.

    replay  the live values and the numbers that were read for decisions
    losses  losses of the gradients computed since the last evaluation
    times   times of the updates, in s; a resumed run must repeat them at the same times
    """

    replay: Replay
    losses: tuple[float, ...] = ()
    times: tuple[float, ...] = ()


def write(path: str | Path, checkpoint: Checkpoint, manifest: Mapping[str, object]) -> None:
    """Write a saved run atomically. `manifest` describes the run, in plain values."""
    replay = checkpoint.replay
    arrays: list[npt.NDArray[np.generic]] = []
    encoder = _Encoder(arrays, {})
    text = {
        "format": FORMAT,
        "manifest": manifest,
        "n_values": replay.n_values,
        "results": [[number, encoder.encode(result)] for number, result in sorted(replay.results.items())],
        "pending": sorted(replay.pending),
    }
    parts: dict[str, npt.NDArray[np.generic]] = {f"array {i}": array for i, array in enumerate(arrays)}
    parts["run"] = np.frombuffer(json.dumps(text).encode(), np.uint8)
    parts["scalars"] = np.array(replay.scalars, np.float64)
    parts["losses"] = np.array(checkpoint.losses, np.float64)
    parts["times"] = np.array(checkpoint.times, np.float64)
    parts["digest"] = np.frombuffer(_digest(parts), np.uint8)
    with replacing(path) as file:
        np.savez(file, **parts)  # type: ignore[arg-type]  # its stub takes the arrays for allow_pickle


def read(path: str | Path) -> tuple[Checkpoint, dict[str, object]]:
    """Return a saved run and its manifest."""
    try:
        return _read(Path(path))
    except ConfigError:
        raise
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; result.save({str(path)!r}) writes one") from None
    except Exception as error:  # a damaged file can cause any error in zipfile, numpy, json and this module
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        reason = "not an archive of arrays" if "pickle" in reason else reason  # not NumPy's advice to allow pickle
        raise ConfigError(f"{path}: not a saved run, or a damaged one ({reason}); save the run again") from None


def _read(path: Path) -> tuple[Checkpoint, dict[str, object]]:
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
        text = json.loads(file["run"].tobytes())
        if _index(text["format"]) != FORMAT:
            actual = text["format"]
            raise ConfigError(
                f"{path}: the file has format {actual}, but this version of ddlsim reads format {FORMAT}; resume the "
                "run with the version that saved it, or start it again"
            )
        parts = {name: file[name] for name in file.files if name != "digest"}
        is_whole = "digest" in file.files and file["digest"].tobytes() == _digest(parts)
    arrays = [parts[f"array {i}"] for i in range(sum(name.startswith("array ") for name in parts))]
    scalars, losses, times = (_numbers(parts[name], name) for name in ("scalars", "losses", "times"))
    if not (np.isfinite(losses).all() and np.isfinite(times).all() and (np.diff(times, prepend=0.0) >= 0.0).all()):
        raise ValueError("a loss or time is not finite, or the times do not increase")
    results = {_index(number): _decode(code, arrays) for number, code in text["results"]}
    pending = frozenset(_index(number) for number in text["pending"])
    if not isinstance(text["manifest"], dict):
        raise ValueError("the manifest is not a JSON object")
    if not is_whole:  # last, because the other errors are more specific
        raise ValueError("the contents of the file do not match its digest")
    replay = Replay(_index(text["n_values"]), results, pending, tuple(scalars.tolist()))
    return Checkpoint(replay, tuple(losses.tolist()), tuple(times.tolist())), text["manifest"]


def _digest(parts: Mapping[str, npt.NDArray[np.generic]]) -> bytes:
    """Return a digest of the parts of a file."""
    content = hashlib.sha256()
    for name in sorted(parts):
        array = parts[name]
        content.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        content.update(array.tobytes())
    return content.digest()


def _index(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{shown(value)} is not a valid index of a value; expected a non-negative integer")
    return value


def _numbers(array: npt.NDArray[np.generic], name: str) -> npt.NDArray[np.float64]:
    if array.dtype != np.float64 or array.ndim != 1:
        raise ValueError(f"{name} is not a list of numbers")
    return cast("npt.NDArray[np.float64]", array)


@dataclass
class _Encoder:
    """Collects arrays; an array that several values share is stored once (`places`: its identity -> its index)."""

    arrays: list[npt.NDArray[np.generic]]
    places: dict[int, int]

    def encode(self, value: object) -> object:
        """Return `value` as JSON: plain values unchanged, others as a list that begins with their kind."""
        if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
            return ["array", self._place(value)]
        if isinstance(value, np.generic) and value.dtype.kind in "fiub":
            return ["scalar", self._place(np.asarray(value))]
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is tuple or kind is list:
            return [kind.__name__, *map(self.encode, cast("Sequence[object]", value))]
        if kind is dict:
            items = cast("dict[object, object]", value).items()
            return ["dict", *([self.encode(key), self.encode(item)] for key, item in items)]
        name = f"{kind.__module__}:{kind.__qualname__}"
        if _may_be_part(kind):
            fields = {f.name: self.encode(getattr(value, f.name)) for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
            return ["class", name, fields]
        raise ConfigError(
            f"a value of this run contains a {name}, which cannot be saved; use arrays, numbers, strings, tuples, "
            "lists, dicts and dataclasses of ddlsim"
        )

    def _place(self, array: npt.NDArray[np.generic]) -> int:
        if id(array) not in self.places:
            self.places[id(array)] = len(self.arrays)
            self.arrays.append(array)
        return self.places[id(array)]


def _may_be_part(kind: type) -> bool:
    """Return whether a class is a dataclass of one of the PACKAGES."""
    package = ".".join(kind.__module__.split(".")[:2])
    return package in PACKAGES and dataclasses.is_dataclass(kind)


def _decode(code: object, arrays: list[npt.NDArray[np.generic]]) -> object:
    if not isinstance(code, list):
        return code
    kind, *parts = code
    if kind == "array":
        return arrays[_index(parts[0])]
    if kind == "scalar":
        return arrays[_index(parts[0])][()]
    if kind == "class":
        return _decode_dataclass(parts[0], parts[1], arrays)
    if kind == "dict":
        return {_decode(key, arrays): _decode(item, arrays) for key, item in parts}
    return {"tuple": tuple, "list": list}[kind](_decode(part, arrays) for part in parts)


def _decode_dataclass(name: str, fields: dict[str, object], arrays: list[npt.NDArray[np.generic]]) -> object:
    """Return an object with these fields, without running code of its class."""
    module, _, attribute = name.partition(":")
    if ".".join(module.split(".")[:2]) not in PACKAGES:
        raise ValueError(f"values of class {name!r} are not allowed in a saved run")
    kind = getattr(importlib.import_module(module), attribute, None)
    if not isinstance(kind, type) or kind.__module__ != module or not _may_be_part(kind):
        raise ValueError(f"values of class {name!r} are not allowed in a saved run")
    wanted = {f.name for f in dataclasses.fields(kind)}
    if wanted != fields.keys():
        in_file = sorted(fields)
        raise ValueError(f"the class {name!r} has the fields {sorted(wanted)}, but the file has {in_file}")
    restored: object = object.__new__(kind)
    for field, code in fields.items():
        object.__setattr__(restored, field, _decode(code, arrays))
    return restored
