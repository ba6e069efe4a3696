"""Changing one field of an experiment by its dotted path: "batch_size", "strategy.period", "cluster.nic.bandwidth".

A path names a field of :class:`~ddlsim.Experiment`, then a field of its value, and so on. For lists of faults,
slowdowns or jobs, it refers to the only one with that field ("faults.mtbf"), or contains an index ("faults.0.mtbf").
Clusters and devices have more paths:

``cluster.<kind>.bandwidth``  of all links of a kind ("nic", "trunk", "nvlink", "pcie", "link"); also ``.latency`` and
                              ``.efficiency``, and ``.flow_rate`` of a connection if they have a transport
``cluster.<column>``          ``speed`` (factor), ``send_overhead``, ``recv_overhead``, ``reduce_bandwidth`` of all
                              machines; ``price``, ``device_price``, ``switch_power`` as in cluster files
``device.<field>``            the device of the catalogue (that of the cluster if the experiment sets none), with
                              another ``power_w``, ``memory_bandwidth``, ``peak_flops.fp32``, ...
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np

from ddlsim.arguments import number, quantity
from ddlsim.cluster import Cluster, load_cluster
from ddlsim.cluster.cluster import Bools
from ddlsim.compression import Compression
from ddlsim.data.dataset import DataSet
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.run.costs import priced
from ddlsim.run.experiment import Experiment
from ddlsim.units import parse
from ddlsim.workload.devices import Device, load_device
from ddlsim.workload.model import Model

#: name -> new value (under ""), and changes inside it
_Tree: TypeAlias = dict[str, "_Tree | object"]

#: fields of links and of machines -> validation rule
_LINK_FIELDS = {
    "bandwidth": quantity("bandwidth", si=True),
    "latency": quantity("time", zero=True, si=True),
    "efficiency": number(0.0, 1.0, above=True, hint=" (0.01 is 1 %)"),
    "flow_rate": quantity("bandwidth", zero=True, si=True),
}
_NODE_FIELDS = {
    "speed": number(0.0, above=True),
    "send_overhead": quantity("time", zero=True, si=True),
    "recv_overhead": quantity("time", zero=True, si=True),
    "reduce_bandwidth": quantity("bandwidth", si=True),
}
_COST_FIELDS = ("price", "device_price", "switch_power")
#: fields of a device that accept text with a unit
_DEVICE_UNITS = {
    "memory_nbytes": "bytes", "memory_bandwidth": "bandwidth", "power_w": "power", "idle_power_w": "power",
    "price": "price", "peak_flops": "flops", "launch_time": "time",
}  # fmt: skip


class UnknownPathError(ConfigError):
    """A dotted path that does not exist in this experiment (it may exist in another one)."""


def changed(experiment: Experiment, settings: Mapping[str, object]) -> Experiment:
    """Return the experiment with the value of each dotted path in `settings` set.

    All values are set before the experiment is checked, so their order does not matter; an object is set before its
    fields ("strategy" before "strategy.period"). Raises :class:`UnknownPathError` for an unknown path, and
    :class:`~ddlsim.errors.ConfigError` for incompatible values.
    """
    tree = _tree(settings)
    names = [f.name for f in dataclasses.fields(Experiment)]
    for name in tree:
        if name not in names:
            raise _unknown(name, names, "")
    heads: dict[str, object] = {}
    for name, branch in tree.items():
        now = getattr(experiment, name)
        if not isinstance(branch, dict):
            heads[name] = branch
            continue
        inner = dict(branch)
        now = inner.pop("", now)
        if name == "cluster":
            heads[name] = _cluster(load_cluster(now), inner)
        elif name == "device":
            held = settings.get("cluster", experiment.cluster)
            heads[name] = _replaced(_device(now, held), inner, "device", _DEVICE_UNITS)
        else:
            heads[name] = _replaced(now, inner, name, {})
    return experiment.with_(**heads)


def _tree(settings: Mapping[str, object]) -> _Tree:
    tree: _Tree = {}
    for path in sorted(settings):  # "a" before "a.b"
        *parents, leaf = path.split(".")
        level = tree
        for name in parents:
            inner = level.get(name, {})
            level[name] = inner = inner if isinstance(inner, dict) else {"": inner}
            level = inner
        level[leaf] = settings[path]
    return tree


def _unknown(name: str, names: Iterable[str], where: str) -> UnknownPathError:
    path = f"{where}.{name}" if where else name
    return UnknownPathError(str(unknown_name("field", name, names, path)))


def _replaced(value: object, tree: Mapping[str, object], where: str, units: Mapping[str, str]) -> object:
    """Return `value`, a frozen object, a mapping or a sequence of these, with the fields in `tree` changed."""
    if isinstance(value, list | tuple) and value:
        return _with_items(value, tree, where)
    if isinstance(value, Mapping):
        names = [str(key) for key in value]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
    else:
        field = next(iter(tree))
        raise UnknownPathError(f"{where}.{field}: {where} = {value!r} has no fields")
    new: dict[str, object] = {}
    for name, branch in tree.items():
        if name not in names:
            raise _unknown(name, names, where)
        unit = units.get(name, units.get("*", ""))
        if isinstance(branch, dict):
            inner = dict(branch)
            now = inner.pop("", value[name] if isinstance(value, Mapping) else getattr(value, name))
            branch = _replaced(now, inner, f"{where}.{name}", {"*": unit} if unit else {})
        new[name] = parse(branch, unit, f"{where}.{name}") if unit and isinstance(branch, str) else branch
    if isinstance(value, Mapping):
        return {**value, **new}
    try:
        return dataclasses.replace(value, **new)
    except TypeError as error:  # such as text instead of a number
        settings = ", ".join(f"{name} = {field!r}" for name, field in new.items())
        raise ConfigError(f"{where}: {settings} has the wrong type: {error}") from None


def _with_items(values: Sequence[object], tree: Mapping[str, object], where: str) -> list[object]:
    """Return the values with the fields in `tree` changed, in items named by index or the only one with the field."""
    items: dict[int, dict[str, object]] = {}
    for name, branch in tree.items():
        if name.isdecimal() and int(name) < len(values):
            items.setdefault(int(name), {}).update(branch if isinstance(branch, dict) else {"": branch})
            continue
        having = [i for i, item in enumerate(values) if name in getattr(item, "__dataclass_fields__", ())]
        if not having:
            fields = dict.fromkeys(field for item in values for field in getattr(item, "__dataclass_fields__", ()))
            raise _unknown(name, list(fields), where)
        if len(having) > 1:
            n_with, n_all = len(having), len(values)
            raise UnknownPathError(
                f"{where}.{name}: {n_with} of the {n_all} items in {where} have this field; select one item by its "
                f"index, as in {where}.0.{name}"
            )
        items.setdefault(having[0], {})[name] = branch
    changed = list(values)
    for i, inner in items.items():
        changed[i] = inner.pop("", changed[i])
        changed[i] = _replaced(changed[i], inner, f"{where}.{i}", {}) if inner else changed[i]
    return changed


def _device(value: object, cluster: object) -> Device:
    """Return the experiment's device, or else the only device of the cluster's workers."""
    if isinstance(value, str | Path | Device):
        return load_device(value)
    loaded = load_cluster(cluster)  # type: ignore[arg-type]  # refuses what is none
    names = {loaded.device_of[node] for node in loaded.workers.tolist()}
    if len(names) != 1 or (only := names.pop()) is None:
        raise ConfigError(
            f"device: the workers of cluster {loaded.name!r} do not all have the same known device; set device in the "
            "experiment, as in device='v100'"
        )
    return load_device(only)


def _cluster(cluster: Cluster, tree: Mapping[str, object]) -> Cluster:
    kinds = sorted(set(cluster.link_kind))
    for name, branch in tree.items():
        where = f"cluster.{name}"
        if name in kinds:
            if not isinstance(branch, dict):
                fields = ", ".join(f"{where}.{field}" for field in _LINK_FIELDS)
                raise UnknownPathError(f"{where}: does not say which field of the links to change; use one of {fields}")
            for field, value in branch.items():
                cluster = _with_links(cluster, name, field, value)
        elif isinstance(branch, dict):
            raise _unknown(name, kinds, "cluster")
        elif name in _NODE_FIELDS:
            new = cast(float, _NODE_FIELDS[name](branch, where))
            column, new = ("reduce_time", 1.0 / new) if name == "reduce_bandwidth" else (name, new)
            cluster = _with_column(cluster, column, cluster.is_endpoint, new)
        elif name == "price":
            cluster = priced(cluster, branch)  # type: ignore[arg-type]  # refuses what is no quantity
        elif name in _COST_FIELDS:
            cluster = cluster.with_costs(**{name: branch})  # type: ignore[arg-type]  # refuses what is no quantity
        else:
            raise _unknown(name, [*kinds, *_NODE_FIELDS, *_COST_FIELDS], "cluster")
    return cluster


def _with_links(cluster: Cluster, kind: str, field: str, value: object) -> Cluster:
    where = f"cluster.{kind}.{field}"
    if field not in _LINK_FIELDS:
        raise _unknown(field, _LINK_FIELDS, f"cluster.{kind}")
    chosen = np.array([link_kind == kind for link_kind in cluster.link_kind])
    new = cast(float, _LINK_FIELDS[field](value, where))
    if field != "flow_rate":
        return _with_column(cluster, f"link_{field}", chosen, new)
    details = cluster.details
    if details is None or not (chosen & (details.transport != "")).any():
        hint = f"{cluster.name}+transport=tcp-cubic"
        raise UnknownPathError(f"{where}: these links have no transport that uses connections; set one, as in {hint}")
    rates = np.where(chosen & (details.transport != ""), new, details.flow_rate)
    return dataclasses.replace(cluster, details=dataclasses.replace(details, flow_rate=rates))


def _with_column(cluster: Cluster, column: str, chosen: Bools, value: float) -> Cluster:
    values = np.where(chosen, value, getattr(cluster, column))
    return dataclasses.replace(cluster, **{column: values})  # type: ignore[arg-type]  # only arrays


def labels_of(values: Sequence[object]) -> list[str | int | float | bool]:
    """Return a label for each value. Different values have different labels; that of None or of no items is "none"."""
    values = [bare(v) for v in values]
    long = [_long(v) for v in values]
    labels = [getattr(v, "label", None) for v in values]
    pairs = [(a if isinstance(a, str) else b, b) for a, b in zip(labels, long, strict=True)]
    n_meanings = Counter(short for short, _ in set(pairs))
    return [b if n_meanings[a] > 1 else a for a, b in pairs]


def bare(value: object) -> object:
    """Return the compressor of a Compression without other settings; experiments accept both."""
    only = isinstance(value, Compression) and value == Compression(value.compressor)
    return value.compressor if only and isinstance(value, Compression) else value


def _long(value: object) -> str | int | float | bool:
    """Return a text with all fields of an object that differ from their defaults."""
    if value is None:
        return "none"
    if isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Path):
        return value.stem
    if isinstance(value, Cluster | DataSet | Device | Model):
        return value.name
    if isinstance(value, tuple | list):
        return ", ".join(str(_long(item)) for item in value) or "none"
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return str(getattr(value, "__name__", value))
    shown = []
    for f in dataclasses.fields(value):
        now = getattr(value, f.name)
        usual = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        if f.init and f.repr and now != usual:
            text = _long(now)
            required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            shown.append(f"{text}" if required else f"{f.name}={text}")
    return f"{type(value).__name__}({', '.join(shown)})" if shown else type(value).__name__
