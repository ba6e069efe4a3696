"""A study over what stands for several strategies (`Splits`): one configuration becomes as many as it has ways."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from ddlsim.cluster import Cluster
from ddlsim.errors import ConfigError
from ddlsim.run.experiment import Experiment
from ddlsim.strategies.splits import text_of_senseless
from ddlsim.study.changes import changed
from ddlsim.study.designs import paths_of
from ddlsim.study.loading import Loader
from ddlsim.workload.model import Model


class Row(NamedTuple):
    """A configuration: what the table shows of it by key, its settings by path, and why it cannot be simulated."""

    named: Mapping[str, object]
    settings: Mapping[str, object]
    error: str = ""


@runtime_checkable
class Family(Protocol):
    """What stands for several strategies among the values of a study, such as :class:`~ddlsim.Splits`."""

    def ways(
        self, cluster: Cluster, model: Model, n_workers: int, batch_size: int, senseless: Counter[str]
    ) -> Iterator[object]:
        """Yield the strategies that go with the rest of a configuration, and count why others do not."""


def each_way(
    named_rows: Sequence[Mapping[str, object]], rows: Sequence[Mapping[str, object]], base: Experiment, loader: Loader
) -> Iterator[Row]:
    """Yield the configurations of a design, all ways in the place of a :class:`Family`.

    named_rows, rows  what the table shows of each, and its settings
    """
    for named, row in zip(named_rows, rows, strict=True):
        family = row.get("strategy")
        if not isinstance(family, Family):
            yield Row(named, row)
            continue
        rest = {path: value for path, value in row.items() if path != "strategy"}
        key = next(key for key in named if "strategy" in paths_of(key))
        try:
            ways = _ways(family, loader.loaded(changed(base, loader.settings(rest))), loader)
        except ConfigError as error:
            yield Row(named, row, str(error))
            continue
        for way in ways:
            shown = named[key]
            if isinstance(shown, tuple | list):  # of fields that change together
                shown = tuple(
                    way if path == "strategy" else value for path, value in zip(paths_of(key), shown, strict=True)
                )
            else:
                shown = way
            yield Row({**named, key: shown}, {**row, "strategy": way})


def _ways(family: Family, experiment: Experiment, loader: Loader) -> list[object]:
    cluster, model, senseless = experiment.cluster, experiment.model, Counter[str]()
    assert isinstance(cluster, Cluster)
    assert isinstance(model, Model)
    n_workers = loader.n_workers(experiment)
    ways: list[object] = list(family.ways(cluster, model, n_workers, experiment.batch_size, senseless))
    if not ways:
        raise ConfigError(
            f"{type(family).__name__}: no way to share {model.name} out over {n_workers} workers with batch_size = "
            f"{experiment.batch_size}: {text_of_senseless(senseless)}"
        )
    return ways
