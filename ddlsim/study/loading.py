"""Loading what experiments name, each cluster, model and data set once for a whole study."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from ddlsim.cluster import Cluster, load_cluster
from ddlsim.data import load_data
from ddlsim.data.dataset import DataSet
from ddlsim.errors import ConfigError
from ddlsim.run.experiment import Experiment
from ddlsim.study.content import Digests
from ddlsim.workload.model import Model, load_model

S = TypeVar("S")
T = TypeVar("T")


class Loader:
    """Loads by name or path, and remembers what it has loaded."""

    def __init__(self, digests: Digests) -> None:
        self.digests = digests
        self._known: dict[tuple[str, object], tuple[object, object]] = {}

    def base(self, experiment: Experiment) -> Experiment:
        """Return a study's base with its cluster and models loaded, as far as it has them: they may be varied."""
        for name in ("cluster", "model", "time_model"):
            with contextlib.suppress(ConfigError):
                experiment = experiment.with_(**{name: self._part(name, getattr(experiment, name))})
        return experiment

    def settings(self, row: Mapping[str, object]) -> dict[str, object]:
        """Return the settings with clusters and models loaded. Raises ConfigError for names of none."""
        return {path: self._part(path, value) for path, value in row.items()}

    def loaded(self, experiment: Experiment) -> Experiment:
        """Return an experiment with its cluster, models and data loaded."""
        names = ("cluster", "model", "time_model")
        parts = {name: self._part(name, getattr(experiment, name)) for name in names}
        training = experiment.training
        if training is not None and not isinstance(training.data, DataSet):
            training = dataclasses.replace(training, data=self._once("data", load_data, training.data))
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
        if key not in self._known:
            self._known[key] = source, load(source)  # the source is kept, so that its id stays its own
        return self._known[key][1]  # type: ignore[return-value]  # what `load` has returned
