"""`Study`: many experiments that differ in some fields, each simulated once, and their combined results."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import ddlsim
from ddlsim.arguments import Rule, Seed, checked, integer, one_of
from ddlsim.cluster import Cluster, load_cluster
from ddlsim.data import load_data
from ddlsim.data.dataset import DataSet
from ddlsim.errors import ConfigError, DdlsimError, shown
from ddlsim.output_files import write_text
from ddlsim.plain import read_toml
from ddlsim.run.experiment import Experiment
from ddlsim.run.files import SCHEMA
from ddlsim.schema import Source, changed_arguments, required, to_toml, toml_key, toml_value, unknown_key
from ddlsim.strategies import contract
from ddlsim.strategies.contract import Contract
from ddlsim.strategies.splits import text_of_invalid
from ddlsim.study.changes import UnknownPathError, bare, changed, labels_of
from ddlsim.study.designs import DESIGNS, MAX_POINTS, Range, Vary, paths_of, rows_of, spread
from ddlsim.study.dispatch import Point, Progress, Simulations
from ddlsim.study.executors import DaskClient, Pool, open_pool
from ddlsim.study.fingerprint import Digests, canonical, key_of, text_of
from ddlsim.study.search import Search, Trials
from ddlsim.study.serialization import Packer
from ddlsim.study.store import Member, Store
from ddlsim.study.table import Table
from ddlsim.workload.model import Model, load_model

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")


AN_EXECUTOR = "a concurrent.futures.Executor or a dask.distributed.Client object"
_Points = Annotated[int, integer(1, MAX_POINTS)]
_PositiveInteger = Annotated[int, integer(1)]
#: the varied paths are checked when the study is created
A_VARY = Rule(
    "a mapping such as {'workers': [8, 16]}",
    lambda value: isinstance(value, Mapping) and all(isinstance(path, str) for path in value),
)


def _of_table(method: Callable[Concatenate[Table, P], R]) -> Callable[Concatenate[Study, P], R]:
    """Return a method of a study that delegates to the table of its last run."""

    @functools.wraps(method)
    def ask(study: Study, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(study.table, *args, **kwargs)

    return ask


class Loader:
    """Loads each cluster, model and data set of the experiments once per study."""

    def __init__(self, digests: Digests) -> None:
        self.digests = digests
        self._parts: dict[tuple[str, object], tuple[object, object]] = {}

    def base(self, experiment: Experiment) -> Experiment:
        """Return a study's base with its cluster and models loaded, unless they are varied."""
        for name in ("cluster", "model", "time_model"):
            with suppress(ConfigError):
                experiment = experiment.with_(**{name: self._part(name, getattr(experiment, name))})
        return experiment

    def settings(self, row: Mapping[str, object]) -> dict[str, object]:
        """Return the settings with clusters and models loaded. Raises ConfigError for unknown names."""
        return {path: self._part(path, value) for path, value in row.items()}

    def loaded(self, experiment: Experiment) -> Experiment:
        """Return an experiment with its cluster, models and data loaded."""
        names = ("cluster", "model", "time_model")
        parts = {name: self._part(name, getattr(experiment, name)) for name in names}
        training = experiment.training
        if training is not None and not isinstance(training.data, DataSet):
            training = replace(training, data=self._once("data", load_data, training.data))
        return experiment.with_(**parts, training=training)

    def n_workers(self, experiment: Experiment) -> int:
        """Return the number of workers of a loaded experiment."""
        assert isinstance(experiment.cluster, Cluster)
        return experiment.n_workers or len(experiment.cluster.workers)

    def _part(self, path: str, value: object) -> object:
        if path == "cluster" and not isinstance(value, Cluster):
            return self._once(path, load_cluster, value)  # type: ignore[arg-type]  # it refuses what is none
        if path in ("model", "time_model") and value is not None and not isinstance(value, Model):
            return self._once("model", load_model, value)  # type: ignore[arg-type]
        return value

    def _once(self, kind: str, load: Callable[[S], T], source: S) -> T:
        key = kind, source if isinstance(source, str | Path) else id(source)
        if key not in self._parts:
            self._parts[key] = source, load(source)  # keeping the source keeps its id unique
        return self._parts[key][1]  # type: ignore[return-value]  # what `load` has returned


class Row(NamedTuple):
    """A configuration: its values in the table by key, its settings by path, and why it cannot be simulated."""

    named: Mapping[str, object]
    settings: Mapping[str, object]
    error: str = ""


@checked
@dataclass(frozen=True, eq=False)
class Study:
    """A set of experiments that vary some fields of a base experiment.

    base         experiment that provides the values of all fields that are not varied
    vary         mapping from the dotted path of each varied field to its values:
                 ``{"workers": [8, 16], "cluster.nic.bandwidth": ["25 Gbit/s", "100 Gbit/s"]}`` (see
                 :mod:`ddlsim.study.changes` for the paths). The values can be a list, a mapping from names (shown in
                 the table) to values
                 (``{"strategy": {"slow": AllReduce("ring", "none"), "fast": AllReduce("auto")}}``), or a
                 :class:`~ddlsim.study.Range` to sample from. Fields that change together share a key:
                 ``{"model, batch_size": [("resnet50", 64), ("bert-large", 8)]}``. A :class:`~ddlsim.Splits` among the
                 strategies represents all valid ways to split the model
    seeds        number of consecutive seeds per configuration, starting with the seed of `base`, or a list of seeds.
                 All configurations use the same seeds, so that they use the same random numbers
    design       "grid": all combinations; "list": the first value of each field, then the second value of each, and so
                 on; "random" and "latin-hypercube": a sample of `n_points` combinations
    n_points     number of combinations to sample
    design_seed  seed of the sample
    stability    whether to simulate each point three more times with its inputs changed by 1e-12. The table then shows
                 how much the throughput changes (column throughput_spread), and does not rank smaller differences
    search       a :class:`~ddlsim.study.Search`, which replaces the design and proposes configurations based on the
                 results of earlier ones; None: use the design

    Raises ConfigError for a path that does not exist in any configuration, an empty design, and repeated fields.
    """

    base: Experiment
    vary: Annotated[Vary, A_VARY]
    seeds: _Points | Sequence[Seed] = 1
    design: Annotated[str, one_of(*DESIGNS)] = "grid"
    n_points: _Points | None = None
    design_seed: Seed = 0
    stability: bool = False
    search: Search | None = None
    #: the table and the points of the last run
    _finished: list[tuple[Table, list[Point]]] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        for path, values in self.vary.items():
            if isinstance(values, str) or not isinstance(values, Sequence | Mapping | Range):
                raise ConfigError(f"vary[{path!r}] = {values!r}: must be a list of values, even for a single value")
            for name in values if isinstance(values, Mapping) else ():
                if not isinstance(name, str) or not name:
                    raise ConfigError(f"vary[{path!r}]: the name {name!r} must be a non-empty string, as in {{'a': 1}}")
        paths = [path for key in self.vary for path in paths_of(key)]
        if twice := [path for path in paths if paths.count(path) > 1]:
            repeated = twice[0]
            raise ConfigError(f"vary: the field {repeated!r} occurs twice; remove one of the two")
        if "seed" in paths:
            raise ConfigError(
                "vary['seed'] is not supported; set seeds=..., so that all configurations use the same seeds"
            )
        seeds = self._seeds
        if not seeds or len(set(seeds)) < len(seeds) or len(seeds) > MAX_POINTS:
            raise ConfigError(
                f"seeds = {shown(self.seeds)}: must be a number of seeds (at least 1) or a list of distinct seeds"
            )
        if self.search is not None:
            self.search.check(self.vary, len(seeds))
            if (self.design, self.n_points, self.design_seed) != ("grid", None, 0):
                raise ConfigError("design, n_points and design_seed have no effect with search; remove them")
        self._check_paths()

    @property
    def _seeds(self) -> list[int]:
        if isinstance(self.seeds, int):
            return list(range(self.base.seed, self.base.seed + self.seeds))
        return list(self.seeds)

    @cached_property
    def _named_rows(self) -> list[dict[str, object]]:
        """The settings of each configuration, with the names of values that have one."""
        listed = {path: list(v) if isinstance(v, Mapping) else v for path, v in self.vary.items()}
        return rows_of(listed, self.design, self.n_points, self.design_seed)

    @cached_property
    def _rows(self) -> list[dict[str, object]]:
        return [self._settings(row) for row in self._named_rows]

    def _settings(self, named_row: Mapping[str, object]) -> dict[str, object]:
        named = {path: values for path, values in self.vary.items() if isinstance(values, Mapping)}
        return spread({path: named[path][str(v)] if path in named else v for path, v in named_row.items()})

    def _around(self, path: str) -> Iterator[dict[str, object]]:
        """Yield the settings of a path's field, and of the objects that contain it, in each configuration."""

        def matters(other: str) -> bool:
            return path == other or path.startswith(f"{other}.")

        rows: Iterable[dict[str, object]] = ()
        if self.search is None:
            rows = self._rows
        else:
            keys = [key for key in self.vary if any(map(matters, paths_of(key)))]
            values = ([v.at(0.0)] if isinstance(v := self.vary[key], Range) else list(v) for key in keys)
            rows = (self._settings(dict(zip(keys, row, strict=True))) for row in itertools.product(*values))
        for row in rows:
            yield {other: value for other, value in row.items() if matters(other)}

    @cached_property
    def _loader(self) -> Loader:
        return Loader(Digests())

    def _check_paths(self) -> None:
        """Raise ConfigError for a path that exists in no configuration."""
        base = self._loader.base(self.base)
        for path in [path for key in self.vary for path in paths_of(key)]:
            unknown: UnknownPathError | None = None
            for around in self._around(path):
                try:
                    changed(base, self._loader.settings(around))
                except UnknownPathError as error:
                    unknown = unknown or error
                    continue
                except ConfigError:  # the field exists; the table reports the invalid value
                    pass
                unknown = None
                break
            if unknown is not None:
                raise ConfigError(f"vary: {unknown}")

    @cached_property
    def points(self) -> list[Point]:
        """All points in the order of the design. The seeds of a configuration follow one another.

        Raises ConfigError if no configuration is valid, or if a search has not run yet, because its points are not
        known before.
        """
        if self.search is not None:
            self.table  # noqa: B018  # refuses if there is none
            return self._finished[0][1]
        base = self._loader.base(self.base)
        rows = list(with_layouts(self._named_rows, self._rows, base, self._loader))
        labels = {path: labels_of([row.named[path] for row in rows]) for path in self.vary}
        points = [
            point
            for i, row in enumerate(rows)
            for point in self._of_row(base, row, {path: labels[path][i] for path in self.vary})
        ]
        if points and not any(point.experiment for point in points):
            reason = points[0].error
            raise ConfigError(f"no configuration of the study is valid; the first one failed with: {reason}")
        return points

    def _of_row(self, base: Experiment, row: Row, settings: Mapping[str, object]) -> Iterator[Point]:
        loader = self._loader
        error, loaded = row.error, None
        try:
            loaded = None if error else loader.loaded(changed(base, loader.settings(row.settings)))
        except ConfigError as refused:
            error = str(refused)
        bared = {path: bare(value) for path, value in row.settings.items()}
        for seed in self._seeds:
            experiment = None if loaded is None else loaded.with_(seed=seed)
            if experiment is not None:
                text = text_of(experiment, loader.digests, stability=self.stability)
            else:
                text = json.dumps([ddlsim.__version__, canonical([self.base, bared, seed], loader.digests)])
            yield Point(settings, seed, experiment, error, key_of(text), text)

    def _of_proposed(self, base: Experiment, named: Mapping[str, object]) -> list[Point]:
        settings = {}
        for key, value in named.items():
            listed = [value] if isinstance(values := self.vary[key], Range) else list(values)
            place = next(i for i, other in enumerate(listed) if other is value)
            settings[key] = labels_of(listed)[place]
        return list(self._of_row(base, Row(named, self._settings(named)), settings))

    @checked
    def run(
        self,
        store: str | Path | None = None,
        *,
        executor: Annotated[Executor | DaskClient, AN_EXECUTOR] | None = None,
        jobs: _PositiveInteger | None = None,
        retry_failed: bool = False,
        add: bool = False,
        progress: bool | Progress | None = None,
    ) -> Table:
        """Simulate all points that are not in the store yet, and return the table of all points.

        store         SQLite file for the results, created if it does not exist; None: results are not stored
        executor      a ``distributed.Client``, or any ``concurrent.futures.Executor``, such as that of
                      ``mpi4py.futures``; None: processes on this computer
        jobs          number of processes on this computer; None: one per core; 1: this process. A script that uses
                      several processes must guard its top-level code with ``if __name__ == "__main__":``
        retry_failed  whether to simulate points again that failed in an earlier run
        add           whether to accept a store that contains another study
        progress      whether to show a progress bar (None: on a terminal), or a function that is called with a
                      :class:`~ddlsim.study.Count` as points finish

        Results do not depend on the executor. Ctrl-C ends the study early and sets ``table.interrupted``; another call
        continues from there. Raises ConfigError for an unusable store, and DdlsimError if an executor fails.
        """
        with Store(store) as opened:
            self._check_store(opened, add)
            n_points = len(self.points) if self.search is None else self.search.n_trials * len(self._seeds)
            n_at_once = 0 if self.search is None else self.search.batch

            def pool(experiments: Sequence[Experiment]) -> Pool:
                return open_pool(executor, jobs, Packer(self._loader.digests), experiments, n_at_once)

            with (
                _shown(progress) as report,
                Simulations(
                    opened,
                    pool,
                    n_workers=self._loader.n_workers,
                    progress=report,
                    n_points=n_points,
                    retry_failed=retry_failed,
                ) as simulations,
            ):
                if self.search is None:
                    points = self.points
                    self._register(opened, points)
                    is_complete = simulations.settle(points, stability=self.stability)
                else:
                    points, is_complete = self._searched(self.search, opened, simulations)
            unique = {point.key: point for point in points}
            texts = {key: point.text for key, point in unique.items()}
            metrics = () if self.search is None else self.search.metrics
            table = Table(list(self.vary), _members(points), opened.outcomes(unique), not is_complete, texts, metrics)
        self._finished[:] = [(table, points)]
        return table

    def _searched(self, search: Search, store: Store, simulations: Simulations) -> tuple[list[Point], bool]:
        """Return the points of a search, and whether it came to its end."""
        base = self._loader.base(self.base)
        trials = Trials(search, self.vary, len(self._seeds), lambda row: self._of_proposed(base, row))
        for points in trials.rounds():
            self._register(store, trials.points)
            if not simulations.settle(points, stability=self.stability):
                return trials.points, False
            trials.take(store.outcomes(point.key for point in points))
        return trials.points, True

    def _register(self, store: Store, points: Sequence[Point]) -> None:
        """Record which points belong to this study, under a digest that distinguishes it from others in the store."""
        members = _members(points)
        what: object = [[m.key, dict(m.settings), m.seed] for m in members]
        if self.search is not None:  # its points are only known one after the other
            space = [repr(v) if isinstance(v, Range) else labels_of(list(v)) for v in self.vary.values()]
            what = [repr(self.search), self._seeds, space]
        digest = hashlib.sha256(json.dumps([list(self.vary), what]).encode()).hexdigest()[:32]
        store.register(digest, self.base.manifest(), list(self.vary), members)

    def _check_store(self, store: Store, add: bool) -> None:
        """Raise ConfigError if all studies in the store have another base: it is probably the wrong file."""
        mine = json.loads(json.dumps(self.base.manifest()))
        bases = [base for _, base, _ in store.studies()]
        if add or not bases or mine in bases:
            return
        other = bases[-1]
        name = next(name for name in mine if mine[name] != other.get(name))
        stored, current = other.get(name), mine[name]
        raise ConfigError(
            f"{store.path}: contains another study, whose base experiment has {name} = {stored!r} instead of "
            f"{current!r}; use another file, or add=True (--add) to store both studies in this file"
        )

    @property
    def table(self) -> Table:
        """The table of the last run. Raises ConfigError before the first."""
        if not self._finished:
            raise ConfigError("the study has not been run; call study.run(store='study.sqlite') first")
        return self._finished[0][0]

    best = _of_table(Table.best)
    pareto = _of_table(Table.pareto)
    plot_scaling = _of_table(Table.plot_scaling)
    plot_lines = _of_table(Table.plot_lines)
    plot_pareto = _of_table(Table.plot_pareto)

    @checked
    def save_html(self, path: str | Path, *, title: str = "", question: str = "", metric: str = "") -> None:
        """Write a report on the last run as a single HTML file, with the sensitivities of its best configuration.

        The sensitivities require a few more simulations of that configuration. `metric` determines which configuration
        is the best. The other arguments are described in :func:`ddlsim.report.html.html_report`. Raises ConfigError if
        the study has not been run, for a metric that no configuration has, and if the file cannot be written.
        """
        from ddlsim.report.html import html_report, sensitivities_of_best

        sensitivities = sensitivities_of_best(self, self.table, metric)
        report = html_report(self.table, title=title, question=question, metric=metric, sensitivities=sensitivities)
        write_text(path, report)

    def to_toml(self) -> str:
        """Return this study as the text of a TOML file for :func:`ddlsim.study.load_study`.

        Raises ConfigError for parts that a file cannot express, such as cluster and model objects.
        """
        varied = (f"{toml_key(key)} = {toml_value(_unstructured(key, values))}" for key, values in self.vary.items())
        options = {name: value for name, value in self._options.items() if name != "search"}
        text = to_toml({**SCHEMA.unstructure(options), "base": SCHEMA.table(self.base)})
        searching = "" if self.search is None else to_toml({"search": SCHEMA.table(self.search)})
        return "\n".join([text.lstrip("\n"), "[vary]", *varied, searching])

    def to_python(self) -> str:
        """Return a Python program that runs this study. Raises ConfigError for cluster and model objects."""
        varied = (f"    {key!r}: {SCHEMA.expression(values, key)},\n" for key, values in self.vary.items())
        options = "".join(f", {name}={SCHEMA.expression(value, name)}" for name, value in self._options.items())
        return (
            f"import ddlsim\nimport ddlsim.study\n\nbase = {SCHEMA.expression(self.base, '')}\n"
            f'vary = {{\n{"".join(varied)}}}\n\nif __name__ == "__main__":\n'
            f"    print(ddlsim.Study(base, vary{options}).run())\n"
        )

    @property
    def _options(self) -> dict[str, object]:
        """The arguments besides `base` and `vary` that differ from their defaults."""
        return {name: value for name, value in changed_arguments(self).items() if name not in ("base", "vary")}

    def with_(self, **changes: object) -> Study:
        """Return a copy of the study with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


def _unstructured(key: str, values: Sequence[object] | Mapping[str, object] | Range) -> object:
    """Return the values of a field, or of several that change together, as plain values."""
    if isinstance(values, Range):
        return SCHEMA.table(values)
    paths = paths_of(key)
    annotations = [SCHEMA.annotation_at(Experiment, path) for path in paths]

    def plain(value: object) -> object:
        if len(paths) > 1 and isinstance(value, list | tuple):
            parts = zip(value, annotations, strict=True)
            return ["none" if one is None else SCHEMA.unstructure(one, f"vary[{key!r}]", kind) for one, kind in parts]
        return "none" if value is None else SCHEMA.unstructure(value, f"vary[{key!r}]", annotations[0])

    if isinstance(values, Mapping):
        return {name: plain(value) for name, value in values.items()}
    return [plain(value) for value in values]


def _members(points: Sequence[Point]) -> list[Member]:
    return [Member(point.key, point.settings, point.seed) for point in points]


def _shown(progress: bool | Progress | None) -> AbstractContextManager[Progress | None]:
    if callable(progress):
        return nullcontext(progress)
    if not (sys.stderr.isatty() if progress is None else progress):
        return nullcontext()
    from ddlsim.report.progress import study_bar

    return study_bar()


def with_layouts(
    named_rows: Sequence[Mapping[str, object]], rows: Sequence[Mapping[str, object]], base: Experiment, loader: Loader
) -> Iterator[Row]:
    """Yield the configurations of a design, with an object such as :class:`~ddlsim.Splits` replaced by all strategies
    that it represents.

    named_rows, rows  each configuration's values in the table, and its settings
    """
    for named, row in zip(named_rows, rows, strict=True):
        family = contract.of(row.get("strategy"))
        if not family.defines("layouts"):
            yield Row(named, row)
            continue
        rest = {path: value for path, value in row.items() if path != "strategy"}
        key = next(key for key in named if "strategy" in paths_of(key))
        try:
            layouts = _layouts(family, loader.loaded(changed(base, loader.settings(rest))), loader)
        except ConfigError as error:
            yield Row(named, row, str(error))
            continue
        for layout in layouts:
            shown, together = layout, named[key]
            if isinstance(together, tuple | list):  # fields that change together
                pairs = zip(paths_of(key), together, strict=True)
                shown = tuple(layout if path == "strategy" else value for path, value in pairs)
            yield Row({**named, key: shown}, {**row, "strategy": layout})


def _layouts(family: Contract, experiment: Experiment, loader: Loader) -> list[object]:
    cluster, model, invalid = experiment.cluster, experiment.model, Counter[str]()
    assert isinstance(cluster, Cluster)
    assert isinstance(model, Model)
    n_workers = loader.n_workers(experiment)
    batch_size = experiment.batch(n_workers)
    layouts = list(family.layouts(cluster, model, n_workers, batch_size, invalid))
    if not layouts:
        raise ConfigError(
            f"{family.name}: no valid way to split {model.name} over {n_workers} workers with batch_size = "
            f"{batch_size}: {text_of_invalid(invalid)}"
        )
    return layouts


#: fields for which "none" means None
_OPTIONAL = frozenset(f.name for f in fields(Experiment) if f.default is None)


@checked
def load_study(source: str | Path, *, allow_code: bool = False) -> Study:
    """Load a study from a TOML file.

    source      path of the file: a base experiment as in an experiment file, and lists of values for its fields
                (docs/studies.md)
    allow_code  whether the file may contain "package.module:Name", which imports and runs code, as in experiment files

    Raises :class:`~ddlsim.errors.ConfigError` for an invalid file; the message contains the file, field, value and
    rule, and suggests a correction.
    """
    path = Path(source)
    here = Source(path.parent, allow_code)
    table = read_toml(path)
    varied = table.pop("vary", None)
    if not isinstance(varied, Mapping):
        keys = SCHEMA.arguments_of(Study)
        for name in table:
            if name not in keys:
                raise unknown_key(name, keys, str(path), table)
        if varied is None:
            raise ConfigError(f"{path}: the key 'vary' is missing; add a table [vary]")
        raise ConfigError(f"{path}: vary = {shown(varied)}: must be a table of fields and their values")
    arguments: dict[str, Any] = SCHEMA.arguments(Study, table, str(path), here, ": ", partial=True)
    if missing := [name for name in required(Study) if name not in (*arguments, "vary")]:
        key = missing[0]
        raise ConfigError(f"{path}: the key {key!r} is missing; add {key} = ...")
    arguments["vary"] = {field: _values(path, field, values, here) for field, values in varied.items()}
    try:
        return Study(**arguments)
    except DdlsimError as error:
        raise type(error)(f"{path}: {error}") from None


def _values(path: Path, field: str, values: object, source: Source) -> list[object] | dict[str, object] | Range:
    where = f"{path}: vary.{field if len(field) <= 80 else f'{field[:77]}...'}"
    if isinstance(values, Mapping) and not {"low", "high"} & set(values):
        return {name: _value(field, value, f"{where}.{name}", source) for name, value in values.items()}
    if isinstance(values, Mapping):
        return SCHEMA.build(Range, values, where, source)
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ConfigError(f"{where} = {shown(values)}: must be a list of values, even for a single value")
    return [_value(field, value, f"{where}[{i}]", source) for i, value in enumerate(values)]


def _value(field: str, value: object, where: str, source: Source) -> object:
    """Convert a value in a list: tables become objects, and file names are resolved from the study's folder."""
    paths = paths_of(field)
    if len(paths) > 1 and isinstance(value, list) and len(value) == len(paths):
        return tuple(_value(one, item, where, source) for one, item in zip(paths, value, strict=True))
    if value == "none" and field in _OPTIONAL:
        return None
    annotation = SCHEMA.annotation_at(Experiment, field)
    converted = SCHEMA.value(annotation, value, where, field.rpartition(".")[2], source)
    return tuple(converted) if isinstance(converted, list) else converted
