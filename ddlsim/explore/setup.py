"""`Setup`: the values of the form, shared by all screens; it becomes an `Experiment`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import param

from ddlsim.cluster import load_cluster
from ddlsim.errors import ConfigError, DdlsimError, unknown_name
from ddlsim.plain import parse_toml, parse_value
from ddlsim.run.experiment import Experiment
from ddlsim.run.files import COMPRESSORS, SCHEMA, STRATEGIES, fields_from
from ddlsim.runtime.servers import server_nodes
from ddlsim.schema import Names, Source, required
from ddlsim.strategies import Strategy
from ddlsim.workload.jitter import Lognormal


def at_most(n: int, setup: Setup) -> int:
    """Return the initial number of workers of a screen: `n`, or all that the form's cluster has if fewer."""
    with contextlib.suppress(DdlsimError):  # the form shows the error
        return min(n, len(load_cluster(setup.cluster.strip()).workers))
    return n


def chosen_strategies(setup: Setup, others: Sequence[str], workers: int | None = None) -> dict[str, Strategy]:
    """Return the form's strategy, and others with their initial settings, by label. Raises a DdlsimError if invalid.

    workers  number of workers: servers of the others are co-located if no machine is left. None: not fixed
    """
    chosen = setup.experiment().strategy
    by_label: dict[str, Strategy] = {chosen.label: chosen}
    for name in others:
        begins = beginnings(name, STRATEGIES)
        if workers is not None and "placement" in {field.name for field in dataclasses.fields(STRATEGIES[name])}:  # type: ignore[arg-type]
            begins |= _placement(setup, workers)
        other: Strategy = SCHEMA.build(STRATEGIES[name], begins, name)
        if other != chosen:
            by_label[other.label if other.label not in by_label else f"{other.label} ({name})"] = other
    return by_label


def _placement(setup: Setup, workers: int) -> dict[str, object]:
    """Return the initial placement of a server: its own machine, if one is left."""
    cluster = load_cluster(setup.cluster.strip())
    try:
        server_nodes(cluster, cluster.workers[:workers].tolist(), 1, "own")
    except ConfigError:
        return {"placement": "colocated"}
    return {}


#: initial values in the form for settings without a default
BEGINNINGS: dict[str, object] = {"alpha": 0.1, "backups": 1, "columns": 1000, "density": 0.01, "gamma": 0.1, "k": 4}
BEGINNINGS |= {"inner": {"type": "top-k", "density": 0.01}, "local_steps": 5, "minimum": 0.001, "n": 4, "rank": 4}
BEGINNINGS |= {"n_levels": 16, "rows": 5, "slack": 3, "steps_per_stage": 100}


class Setup(param.Parameterized):
    """The shared state of all screens: the experiment, and the displayed screen.

    `settings` are the fields of the strategy, `compression_settings` those of the compressor, as in experiment files;
    missing fields have their defaults. An empty integer is None.
    """

    cluster = param.String("cloud-25g-16x8-v100", doc="bundled name or path, with +key=value")
    model = param.String("resnet50", doc="bundled name or path, with +option or +key=value")
    workers = param.Integer(None, allow_None=True, doc="number of workers; empty: one on every device")
    batch_size = param.Integer(
        None,
        allow_None=True,
        doc="samples per worker and step; if the strategy splits the model, of all workers together",
    )
    strategy = param.String("all-reduce", doc="a type of experiment files")
    settings = param.Dict({}, doc="fields of the strategy")
    compression = param.String("none", doc="a type of experiment files")
    compression_settings = param.Dict({}, doc="fields of the compressor")
    accumulation = param.Integer(1, allow_None=True, doc="micro-steps per exchange")
    precision = param.String("", doc="arithmetic; empty: that of the model on the device")
    stack = param.String("", doc="software; empty: that of the strategy on the device")
    gradient_dtype = param.String("", doc="gradients on the wire; empty: those of the software")
    jitter = param.Number(0.0, allow_None=True, doc="coefficient of variation of the time that steps compute")
    steps = param.Integer(None, allow_None=True, doc="measured steps; None: 10, rounded up to whole cycles")
    seed = param.Integer(0, allow_None=True, doc="of all random streams")
    others = param.String("", doc="fields of an experiment that have no place of their own: lines of its file, TOML")
    started = param.Boolean(True, doc="whether screens simulate; False on a page that an address has filled in")
    screen = param.String("", doc="NAME of the screen that is shown; empty: all are")

    def choose_strategy(self, name: str) -> None:
        """Select a strategy with its initial settings."""
        self.param.update(strategy=name, settings=beginnings(name, STRATEGIES))

    def choose_compression(self, name: str) -> None:
        """Select a compressor with its initial settings."""
        self.param.update(compression=name, compression_settings=beginnings(name, COMPRESSORS))

    def take(self, state: Mapping[str, object]) -> None:
        """Restore the state returned by another setup's :meth:`state`."""
        self.param.update(**state)

    def state(self) -> dict[str, object]:
        """Return the values that determine the experiment, as plain values."""
        return {name: getattr(self, name) for name in FIELDS}

    def experiment(self) -> Experiment:
        """Return the form's experiment. Raises a one-line DdlsimError if it is invalid."""
        fields: dict[str, Any] = {"cluster": _text(self.cluster, "cluster"), "model": _text(self.model, "model")}
        for name in ("accumulation", "seed"):
            fields[name] = _required(getattr(self, name), name)
        fields |= {name: getattr(self, name) for name in ("workers", "batch_size", "steps")}
        fields |= {name: getattr(self, name) or None for name in ("precision", "stack", "gradient_dtype")}
        fields["strategy"] = _built("strategy", self.strategy, self.settings, STRATEGIES)
        if spread := _required(self.jitter, "jitter"):
            fields["jitter"] = Lognormal(spread)
        if self.compression != "none":
            fields["compression"] = _built("compression", self.compression, self.compression_settings, COMPRESSORS)
        return Experiment(**fields | self._toml_fields(fields))

    def when_changed(self, refresh: Callable[[], None]) -> None:
        """Call `refresh` now, and whenever the experiment changes."""
        self.param.watch(lambda *_: refresh(), list(FIELDS))
        refresh()

    def when_shown(self, name: str, refresh: Callable[[], None], *, simulates: bool = True) -> None:
        """Call `refresh` now or once the screen `name` is shown, and again when its contents have changed.

        A hidden screen is refreshed when it is shown again, if anything has changed. A screen that `simulates` is not
        refreshed before Start has been pressed.
        """
        seen: list[dict[str, object]] = []

        def look(*_: object) -> None:
            if self.screen in ("", name) and (self.started or not simulates) and seen != [now := self.state()]:
                seen[:] = [now]
                refresh()

        self.param.watch(look, [*FIELDS, "screen", "started"])
        look()

    def _toml_fields(self, form_fields: Mapping[str, object]) -> dict[str, Any]:
        """Return the fields written in TOML; file names are relative to the working directory of the explorer."""
        where = "other fields"
        table = parse_toml(self.others, where)
        twice = next((name for name in table if name in form_fields), None)
        if twice is not None:
            raise ConfigError(f"{where}: {twice} has its own field in the form; use that field")
        return fields_from(table, where, Source(Path()))


#: parameters that determine an experiment
FIELDS = tuple(name for name in Setup.param.values() if name not in ("name", "screen", "started"))


def beginnings(kind: str, kinds: Names) -> dict[str, object]:
    """Return the form's initial settings of a strategy or a compressor: those without a default."""
    either = ("local_steps",) if kind == "fedavg" else ()  # or epochs, in training runs
    return {name: BEGINNINGS[name] for name in (*required(kinds[kind]), *either)}


def _built(field: str, kind: str, settings: Mapping[str, object], kinds: Names) -> Any:
    if kind not in kinds:
        raise unknown_name(field, kind, kinds)
    values = {name: parse_value(value) if isinstance(value, str) else value for name, value in settings.items()}
    return SCHEMA.build(kinds[kind], values, kind)


def _text(value: str, name: str) -> str:
    if not value.strip():
        raise ConfigError(f"{name} is empty; choose one, or enter the path of a file")
    return value.strip()


def _required(value: Any, name: str) -> Any:
    if value is None:
        raise ConfigError(f"{name.replace('_', ' ')} is empty; enter a number")
    return value
