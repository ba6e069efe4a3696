"""`Study`: many experiments that differ in some fields, simulated once each, and what they say together."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Concatenate, ParamSpec, TypeVar

import ddlsim
from ddlsim.arguments import Rule, Seed, checked, one_of, whole
from ddlsim.errors import ConfigError, shown
from ddlsim.run.experiment import Experiment
from ddlsim.study.changes import UnknownPathError, changed
from ddlsim.study.content import Digests, canonical, key_of, text_of
from ddlsim.study.designs import DESIGNS, MAX_POINTS, Range, Vary, paths_of, rows_of, spread
from ddlsim.study.dispatch import Count, Progress, Task, dispatch
from ddlsim.study.executors import DaskClient, open_pool
from ddlsim.study.labels import bare, labels_of
from ddlsim.study.loading import Loader
from ddlsim.study.parcels import Packer
from ddlsim.study.store import Member, Store
from ddlsim.study.table import Table
from ddlsim.study.ways import Row, each_way
from ddlsim.study.work import DONE, FAILED, SKIPPED, Outcome

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Point:
    """One experiment of a study.

    settings    dotted path -> value as the table shows it
    seed        of the experiment
    experiment  with cluster, model and data loaded; None if the settings do not fit together
    error       why they do not
    key         under which its result is stored
    text        that the key is the digest of
    """

    settings: Mapping[str, object]
    seed: int
    experiment: Experiment | None
    error: str
    key: str
    text: str


AN_EXECUTOR = "a concurrent.futures.Executor, or a dask.distributed.Client"
_Points = Annotated[int, whole(1, MAX_POINTS)]
_Whole = Annotated[int, whole(1)]
#: what a study varies is looked at field by field when the study is made
A_VARY = Rule(
    "a mapping such as {'workers': [8, 16]}",
    lambda value: isinstance(value, Mapping) and all(isinstance(path, str) for path in value),
    lambda value, _: value,
)


def _of_table(method: Callable[Concatenate[Table, P], R]) -> Callable[Concatenate[Study, P], R]:
    """Return a method of a study that asks the table of its last run."""

    @functools.wraps(method)
    def ask(study: Study, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(study.table, *args, **kwargs)

    return ask


@checked
@dataclass(frozen=True, eq=False)
class Study:
    """A base experiment, and the values that some of its fields take.

    base         the experiment; what is not varied is as here
    vary         dotted path -> values: ``{"workers": [8, 16], "cluster.nic.bandwidth": ["25 Gbit/s", "100 Gbit/s"]}``
                 (see :mod:`ddlsim.study.changes` for the paths), by the name that the table is to show if it is a
                 mapping (``{"strategy": {"slow": AllReduce("ring", "none"), "fast": AllReduce("auto")}}``), or a
                 :class:`~ddlsim.study.Range` to sample from. Fields that change together share a key:
                 ``{"model, batch_size": [("resnet50", 64), ("bert-large", 8)]}``. A :class:`~ddlsim.Splits` among
                 the strategies stands for all ways to share the model out that go with the rest
    seeds        how many seeds each configuration is simulated with, from the base's own on, or which. They are the
                 same for all: compared configurations see the same random numbers
    design       "grid": all combinations; "list": the first values of all fields, then the second, ...; "random" and
                 "latin-hypercube": a sample of `n_points`
    design_seed  of the sampling
    stability    whether each point is simulated three times more, with its inputs moved by 1e-12, so that the table
                 says how stable its throughput is (column throughput_spread) and ranks nothing below that

    Raises ConfigError for a path that leads nowhere in any configuration, an empty design and values given twice.
    """

    base: Experiment
    vary: Annotated[Vary, A_VARY]
    seeds: _Points | Sequence[Seed] = 1
    design: Annotated[str, one_of(*DESIGNS)] = "grid"
    n_points: _Points | None = None
    design_seed: Seed = 0
    stability: bool = False
    _finished: dict[str, Table] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for path, values in self.vary.items():
            if isinstance(values, str) or not isinstance(values, Sequence | Mapping | Range):
                raise ConfigError(f"vary[{path!r}] = {values!r}: must be a list of values, also if it is only one")
            for name in values if isinstance(values, Mapping) else ():
                if not isinstance(name, str) or not name:
                    raise ConfigError(f"vary[{path!r}]: the name {name!r} must be a text; write {{'name': value}}")
        paths = [path for key in self.vary for path in paths_of(key)]
        if twice := [path for path in paths if paths.count(path) > 1]:
            raise ConfigError(f"vary: {twice[0]!r} stands there twice; keep one")
        if "seed" in paths:
            raise ConfigError("vary['seed']: give the seeds as seeds=..., so that all configurations have the same")
        seeds = self._seeds
        if not seeds or len(set(seeds)) < len(seeds) or len(seeds) > MAX_POINTS:
            raise ConfigError(f"seeds = {shown(self.seeds)}: must be how many, at least 1, or different whole numbers")
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
        named = {path: values for path, values in self.vary.items() if isinstance(values, Mapping)}
        return [
            spread({path: named[path][str(value)] if path in named else value for path, value in row.items()})
            for row in self._named_rows
        ]

    @cached_property
    def _loader(self) -> Loader:
        return Loader(Digests())

    def _check_paths(self) -> None:
        """Refuse a path that leads nowhere, whatever the other fields are."""
        base = self._loader.base(self.base)
        for path in [path for key in self.vary for path in paths_of(key)]:
            unknown: UnknownPathError | None = None
            for row in self._rows:
                around = {other: value for other, value in row.items() if path == other or path.startswith(f"{other}.")}
                try:
                    changed(base, self._loader.settings(around))
                except UnknownPathError as error:
                    unknown = unknown or error
                    continue
                except ConfigError:  # there is such a field, but the value does not fit: the table will say so
                    pass
                unknown = None
                break
            if unknown is not None:
                raise ConfigError(f"vary: {unknown}")

    @cached_property
    def points(self) -> list[Point]:
        """All points in the order of the design, the seeds of a configuration after each other.

        Raises ConfigError if no configuration fits together.
        """
        base = self._loader.base(self.base)
        rows = list(each_way(self._named_rows, self._rows, base, self._loader))
        labels = {path: labels_of([row.named[path] for row in rows]) for path in self.vary}
        points = [
            point
            for i, row in enumerate(rows)
            for point in self._of_row(base, row, {path: labels[path][i] for path in self.vary})
        ]
        if points and not any(point.experiment for point in points):
            raise ConfigError(f"no configuration fits together; the first: {points[0].error}")
        return points

    def _of_row(self, base: Experiment, row: Row, settings: Mapping[str, object]) -> Iterator[Point]:
        loader = self._loader
        error, made = row.error, None
        try:
            made = None if error else loader.loaded(changed(base, loader.settings(row.settings)))
        except ConfigError as refused:
            error = str(refused)
        for seed in self._seeds:
            if made is not None:
                experiment = made.with_(seed=seed)
                text = text_of(experiment, loader.digests, stability=self.stability)
            else:
                experiment = None
                bared = {path: bare(value) for path, value in row.settings.items()}
                text = json.dumps([ddlsim.__version__, canonical([self.base, bared, seed], loader.digests)])
            yield Point(settings, seed, experiment, error, key_of(text), text)

    # ------------------------------------------------------------ running

    @checked
    def run(
        self,
        store: str | Path | None = None,
        *,
        executor: Annotated[Executor | DaskClient, AN_EXECUTOR] | None = None,
        jobs: _Whole | None = None,
        retry_failed: bool = False,
        add: bool = False,
        progress: bool | Progress | None = None,
    ) -> Table:
        """Simulate all points that are not in the store yet, and return the table of all.

        store         SQLite file that keeps every finished point, made if there is none; None: nothing is kept
        executor      a ``distributed.Client``, or any ``concurrent.futures.Executor``, ``mpi4py.futures``' too
        jobs          processes on this machine, where there is no executor (default: a core each; 1: in this
                      process). A script that uses several must do its work under ``if __name__ == "__main__":``
        retry_failed  simulate points again that have failed before
        add           put this study into a store of another one
        progress      show how far it is (default: on a terminal), or a function that is called with a
                      :class:`~ddlsim.study.Count` as points finish

        Results do not depend on the executor. Ctrl-C ends it early with ``table.interrupted``; running it again goes
        on from there. Raises ConfigError for a store that cannot be used, DdlsimError if an executor breaks.
        """
        with Store(store) as opened:
            self._check_store(opened, add)
            opened.register(self._digest, self.base.manifest(), list(self.vary), self._members)
            unique = {point.key: point for point in self.points}
            if retry_failed:
                opened.forget_failed(unique)
            states = opened.statuses(unique)
            misfits = [p for p in unique.values() if p.experiment is None and p.key not in states]
            if misfits:
                opened.save((p.key, p.text, Outcome(SKIPPED, p.error)) for p in misfits)
                states |= {p.key: SKIPPED for p in misfits}
            with _shown(progress) as report:
                interrupted = self._simulate(opened, states, executor, jobs, report)
            texts = {key: point.text for key, point in unique.items()}
            table = Table(list(self.vary), self._members, opened.outcomes(unique), interrupted, texts)
        self._finished["table"] = table
        return table

    def _simulate(
        self,
        store: Store,
        states: dict[str, str],
        executor: Executor | DaskClient | None,
        jobs: _Whole | None,
        progress: Progress | None,
    ) -> bool:
        """Simulate what has no state yet; return whether it was interrupted."""
        unique = {point.key: point for point in self.points}

        def finished(new: Mapping[str, str]) -> None:
            states.update(new)
            if progress is not None:
                n = [sum(state == s for state in states.values()) for s in (DONE, SKIPPED, FAILED)]
                progress(Count(len(unique), *n))

        finished({})
        tasks = [
            Task(p.key, p.text, p.experiment, _name(p), self.stability)
            for p in unique.values()
            if p.key not in states and p.experiment is not None
        ]
        if not tasks:
            return False
        # the long ones first: the last ones then end at about the same time
        tasks.sort(key=lambda task: -(task.experiment.n_workers or self._loader.n_workers(task.experiment)))
        pool = open_pool(executor, jobs, Packer(self._loader.digests), [task.experiment for task in tasks])
        done = False
        try:
            dispatch(tasks, pool, store, finished)
            done = True
        except KeyboardInterrupt:
            return True
        finally:
            pool.close(at_once=not done)
        return False

    @cached_property
    def _members(self) -> list[Member]:
        return [Member(point.key, point.settings, point.seed) for point in self.points]

    @property
    def _digest(self) -> str:
        """What tells this study from others in the same store."""
        text = json.dumps([list(self.vary), [[m.key, dict(m.settings), m.seed] for m in self._members]])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def _check_store(self, store: Store, add: bool) -> None:
        """Refuse a store whose studies all have another base: it is probably not the one that was meant."""
        mine = json.loads(json.dumps(self.base.manifest()))
        bases = store.bases()
        if add or not bases or mine in bases:
            return
        other = bases[-1]
        name = next(name for name in mine if mine[name] != other.get(name))
        raise ConfigError(
            f"{store.path}: holds another study, whose base has {name} = {other.get(name)!r}, not {mine[name]!r}; give "
            "another file, or add=True (--add) to keep both in one"
        )

    # ------------------------------------------------------------ what came out

    @property
    def table(self) -> Table:
        """The table of the last run. Raises ConfigError before the first."""
        if "table" not in self._finished:
            raise ConfigError("the study has not been run: table = study.run(store='study.sqlite')")
        return self._finished["table"]

    best = _of_table(Table.best)
    pareto = _of_table(Table.pareto)
    plot_scaling = _of_table(Table.plot_scaling)
    plot_lines = _of_table(Table.plot_lines)
    plot_pareto = _of_table(Table.plot_pareto)

    @checked
    def save_html(self, path: str | Path, *, title: str = "", question: str = "", metric: str = "") -> None:
        """Write the report of the last run as one HTML file, with the sensitivities of its best configuration.

        Those are worked out by some more runs of that configuration. `metric` says what makes the best; see
        :func:`ddlsim.report.html.html_report`. Raises ConfigError if the study has not been run, for a metric that no
        configuration has, and if the file cannot be written.
        """
        from ddlsim.report.html import save_html, sensitivities_of_best

        found = sensitivities_of_best(self, self.table, metric)
        save_html(self.table, path, title=title, question=question, metric=metric, sensitivities=found)

    def with_(self, **changes: object) -> Study:
        """Return the study with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


def _name(point: Point) -> str:
    return ", ".join([*(f"{path} {value}" for path, value in point.settings.items()), f"seed {point.seed}"])


def _shown(progress: bool | Progress | None) -> AbstractContextManager[Progress | None]:
    """Return what yields the function that is told how far a study is."""
    if callable(progress):
        return nullcontext(progress)
    if not (sys.stderr.isatty() if progress is None else progress):
        return nullcontext()
    from ddlsim.report.progress import study_bar

    return study_bar()
