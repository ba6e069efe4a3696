"""Studies from TOML files: the base experiment as in an experiment file, and lists of what its fields take.

.. code-block:: toml

    seeds = 3                            # how many, or which: [0, 7]
    design = "grid"                      # or "list"; "random" and "latin-hypercube" with n_points = 100
    stability = true                     # three more runs of each point say how stable it is (default: false)

    [base]                               # or base = "experiment.toml", a file beside this one
    cluster = "cloud-25g-16x8-v100"
    model = "resnet50"
    batch_size = 64

    [vary]
    workers = [8, 16, 32, 64, 128]
    strategy = [{ type = "all-reduce", algorithm = "ring" }, { type = "parameter-server", servers = 8 }]
    compression = ["none", { type = "top-k", density = 0.01 }]
    "cluster.nic.bandwidth" = ["25 Gbit/s", "100 Gbit/s"]
    # for designs that sample: accumulation = { low = 1, high = 16, log = true, whole = true }
    # "model, batch_size" = [["resnet50", 64], ["bert-large", 8]]   # fields that change together
    # with names for the table: compression = { dense = "none", sparse = { type = "top-k", density = 0.01 } }

    [search]                             # instead of a design: values may be ranges, and those that pay are proposed
    objective = "throughput"             # or several: ["throughput", "cost_per_sample"]
    n_trials = 60
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from ddlsim.arguments import checked
from ddlsim.errors import DdlsimError
from ddlsim.run.experiment import Experiment
from ddlsim.run.files import experiment_from, load_experiment, value_of
from ddlsim.run.tables import Table
from ddlsim.study.designs import Range, paths_of
from ddlsim.study.search import Search
from ddlsim.study.study import Study
from ddlsim.workload.toml_files import read_toml, validate

#: fields that "none" may stand for nothing in
_OPTIONAL = frozenset(field.name for field in dataclasses.fields(Experiment) if field.default is None)


class _File(Table):
    base: dict[str, object] | str
    vary: dict[str, list[object] | dict[str, object]]
    seeds: int | list[int] = 1
    design: str = "grid"
    n_points: int | None = None
    design_seed: int = 0
    stability: bool = False
    search: dict[str, object] | None = None


class _Search(Table):
    objective: str | list[str]
    n_trials: int
    sampler: str | None = None
    batch: int = 8
    seed: int = 0
    prune: bool = False


class _Range(Table):
    low: float | str
    high: float | str
    log: bool = False
    whole: bool = False


@checked
def load_study(source: str | Path, *, allow_code: bool = False) -> Study:
    """Return the study that the TOML file `source` describes.

    As in experiment files, "package.module:Name" is refused unless `allow_code`. Raises
    :class:`~ddlsim.errors.ConfigError` in one line: file, field, value, rule and remedy.
    """
    path = Path(source)
    file = validate(TypeAdapter(_File), read_toml(path), str(path), _File.model_fields)
    base = _base(path, file.base, allow_code)
    vary = {field: _values(path, field, values, allow_code) for field, values in file.vary.items()}
    try:
        search = None if file.search is None else _search(file.search)
        return Study(base, vary, file.seeds, file.design, file.n_points, file.design_seed, file.stability, search)
    except DdlsimError as error:
        raise type(error)(f"{path}: {error}") from None


def _search(table: Mapping[str, object]) -> Search:
    given = validate(TypeAdapter(_Search), dict(table), "search", _Search.model_fields)
    return Search(**given.model_dump())


def _base(path: Path, base: Mapping[str, object] | str, allow_code: bool) -> Experiment:
    if isinstance(base, str):
        try:
            return load_experiment(path.parent / base, allow_code=allow_code)
        except DdlsimError as error:
            raise type(error)(f"{path}: base: {error}") from None
    try:
        return experiment_from(dict(base), path, allow_code=allow_code)
    except DdlsimError as error:
        raise type(error)(str(error).replace(f"{path}: ", f"{path}: base: ", 1)) from None


def _values(
    path: Path, field: str, values: Sequence[object] | Mapping[str, object], allow_code: bool
) -> list[object] | dict[str, object] | Range:
    where = f"{path}: vary.{field if len(field) <= 80 else f'{field[:77]}...'}"
    if isinstance(values, Mapping) and not {"low", "high"} & set(values):
        return {name: _value(path, field, value, f"{where}.{name}", allow_code) for name, value in values.items()}
    if isinstance(values, Mapping):
        given = validate(TypeAdapter(_Range), dict(values), where, _Range.model_fields)
        try:
            return Range(given.low, given.high, given.log, given.whole)
        except DdlsimError as error:
            raise type(error)(f"{where}: {error}") from None
    return [_value(path, field, value, f"{where}[{i}]", allow_code) for i, value in enumerate(values)]


def _value(path: Path, field: str, value: object, where: str, allow_code: bool) -> object:
    """Return what a value in a list stands for: an object for a table, a file beside for its name."""
    paths = paths_of(field)
    if len(paths) > 1 and isinstance(value, list) and len(value) == len(paths):
        return tuple(_value(path, one, v, where, allow_code) for one, v in zip(paths, value, strict=True))
    if value == "none" and field in _OPTIONAL:
        return None
    return value_of(path, field, value, where, allow_code=allow_code)
