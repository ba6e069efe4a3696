"""Questions to :func:`~ddlsim.recommend` from TOML files, whose keys are its arguments.

.. code-block:: toml

    clusters = ["dgx1-v100-16"]          # bundled, or paths beside this file
    model = "bert-base"
    workers = [16]
    batch_sizes = [64]
    strategies = [{ type = "splits", stage = [1, 3] }, { type = "all-reduce" }]

    [target]                             # the fields of Target
    throughput = "500 samples/s"

    [base]                               # everything else, as in an experiment file
    precision = "fp16"
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ddlsim.arguments import checked
from ddlsim.errors import DdlsimError
from ddlsim.planner.target import Target
from ddlsim.run.experiment import Experiment
from ddlsim.run.files import beside, experiment_from, value_of
from ddlsim.run.tables import Table, build
from ddlsim.workload.toml_files import read_toml, validate


class _File(Table):
    clusters: list[str]
    model: str = "resnet50"
    target: dict[str, object] | None = None
    samples: int | float | None = None
    training: dict[str, object] | None = None
    learning_model: str | None = None
    workers: list[int] | None = None
    strategies: list[dict[str, object]] | None = None
    compressions: list[str | dict[str, object]] | None = None
    batch_sizes: list[int] | None = None
    base: dict[str, object] | None = None
    n_best: int | None = None
    stability: bool | None = None


@checked
def load_question(source: str | Path, *, allow_code: bool = False) -> dict[str, Any]:
    """Return what the TOML file `source` asks: the arguments of :func:`~ddlsim.recommend` that it names, by name.

    As in experiment files, "package.module:Name" is refused unless `allow_code`. Raises
    :class:`~ddlsim.errors.ConfigError` in one line: file, field, value, rule and remedy.
    """
    path = Path(source)
    table = read_toml(path)
    file = validate(TypeAdapter(_File), table, str(path), _File.model_fields)
    asked: dict[str, Any] = {name: getattr(file, name) for name in table}
    asked["clusters"] = [beside(path, name) for name in file.clusters]
    asked["model"] = beside(path, file.model)
    if file.learning_model is not None:
        asked["learning_model"] = beside(path, file.learning_model)
    if file.target is not None:
        asked["target"] = build(Target, file.target, {}, f"{path}: target")
    if file.training is not None:
        asked["training"] = value_of(path, "training", file.training, f"{path}: training", allow_code=allow_code)
    for field, one in _FIELDS.items():
        if field in table:
            asked[field] = [
                None if each == "none" else value_of(path, one, each, f"{path}: {field}[{i}]", allow_code=allow_code)
                for i, each in enumerate(getattr(file, field))
            ]
    if file.base is not None:
        asked["base"] = _base(path, file, file.base, allow_code)
    return asked


#: lists, and the field of an experiment that each of their values is
_FIELDS = {"strategies": "strategy", "compressions": "compression"}


def _base(path: Path, file: _File, base: dict[str, object], allow_code: bool) -> Experiment:
    cluster = file.clusters[0] if file.clusters else ""
    try:
        return experiment_from({"cluster": cluster, "model": file.model, **base}, path, allow_code=allow_code)
    except DdlsimError as error:
        raise type(error)(str(error).replace(f"{path}: ", f"{path}: base: ", 1)) from None
