"""`Training`: what a run learns, from which data, with which optimizer, and when it is enough."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from ddlsim.arguments import Count, NotNegative, Positive, checked, number, one_of, quantity
from ddlsim.data import BatchStream, by_class, dirichlet, iid, load_data, split
from ddlsim.data.dataset import DataSet, HeldOut
from ddlsim.errors import ConfigError
from ddlsim.learning.learner import Task
from ddlsim.learning.phases import Phase, PhasedRate, phase_at, total_epochs
from ddlsim.nn.network import Loss, Network, build_network, each_label
from ddlsim.optim import SGD, Constant, GrowingBatch, Schedule
from ddlsim.optim.rules import Optimizer, with_layers
from ddlsim.units import parse
from ddlsim.workload.model import Model
from ddlsim.workload.resized import resized

SHARDINGS = ("iid", "by_class", "shared")


@checked
@dataclass(frozen=True)
class Dirichlet:
    """Shards whose class shares are drawn from Dirichlet(alpha); see :func:`ddlsim.data.dirichlet`."""

    alpha: Positive


@checked
@dataclass(frozen=True)
class Training:
    """Makes a run learn: ``simulate(..., training=Training("digits", rate=0.1, epochs=5))``.

    data              "digits", "shapes", "sentences", "clicks", a path (see :func:`ddlsim.data.load_data`) or a
                      :class:`DataSet`
    held_out          share or number of samples to evaluate on, or a DataSet of them
    optimizer         SGD, Momentum, Adam, LARS or LAMB of :mod:`ddlsim.optim`
    rate              learning rate: a number, or a schedule over epochs
    sharding          "iid", "by_class", Dirichlet(alpha), or "shared": the workers take turns over one sequence,
                      so that N of them see what one with an N times larger batch would see
    loss              "cross_entropy" or "mean_squared_error"
    epochs, updates, target_accuracy, target_loss
                      the run ends at the first of these that is reached (or at the experiment's ``max_time``).
                      Targets are held-out values, by the mean of the last ``moving_average`` evaluations
    evaluate_every    updates between evaluations, or simulated time such as "0.5 s"
    charge_evaluation worker 0 spends the time of the evaluations; otherwise they cost nothing
    growing_batch     batch size by epoch in the place of the experiment's (Smith et al. 2018)
    phases            parts of the run with images, batches and rates of their own, one after the other
                      (:class:`Phase`); their epochs together are those of the run, if it has no others
    batching          compute gradients at the same parameters as one batch (the same up to float32 rounding)
    """

    data: str | Path | DataSet = "digits"
    held_out: HeldOut | DataSet = 0.2
    optimizer: Annotated[Optimizer, "an object such as Momentum(0.9)"] = SGD()
    rate: NotNegative | Schedule = 0.1
    sharding: Annotated[str, one_of(*SHARDINGS, also="Dirichlet(alpha), ")] | Dirichlet = "iid"
    loss: Loss = "cross_entropy"
    epochs: Annotated[float, number(0.0, 1e9, above=True)] | None = None
    updates: Count | None = None
    target_accuracy: Annotated[float, number(0.0, 1.0, above=True, hint=" (0.95 is 95 %)")] | None = None
    target_loss: Positive | None = None
    moving_average: Count = 1
    evaluate_every: Count | Annotated[str, quantity("time", "0.5 s")] = 50
    charge_evaluation: bool = False
    growing_batch: GrowingBatch | None = None
    phases: tuple[Phase, ...] = ()
    batching: bool = True

    def __post_init__(self) -> None:
        if self.phases and self.growing_batch is not None:
            raise ConfigError("Training: growing_batch beside phases, which have batch sizes: give each its batch")

    @property
    def evaluate_seconds(self) -> float | None:
        """Simulated seconds between evaluations; None if updates are counted."""
        return parse(self.evaluate_every, "time") if isinstance(self.evaluate_every, str) else None

    @property
    def schedule(self) -> Schedule:
        """The learning rate as a schedule."""
        rate = Constant(float(self.rate)) if isinstance(self.rate, int | float) else self.rate
        return PhasedRate(self.phases, rate) if self.phases else rate

    @property
    def last_epoch(self) -> float | None:
        """The epoch that ends the run: as given, or where the last phase ends; None where none does."""
        return total_epochs(self.phases) if self.epochs is None and self.phases else self.epochs

    def regime(self, epoch: float, batch_size: int) -> tuple[int, int | None]:
        """Return the batch size at an epoch, `batch_size` being the run's, and the number of the phase."""
        if self.phases:
            index, _ = phase_at(self.phases, epoch)
            return self.phases[index].batch or batch_size, index
        return (batch_size if self.growing_batch is None else self.growing_batch.batch_size(epoch)), None

    @property
    def has_end(self) -> bool:
        """Whether any rule ends the run."""
        return any(v is not None for v in (self.last_epoch, self.updates, self.target_accuracy, self.target_loss))

    def task(self, model: Model, n_workers: int, seed: int, clock: Model | None = None) -> Task:
        """Return what the workers of a run learn; the `clock` may be that of another model.

        Raises ConfigError if data and model do not fit.
        """
        network = build_network(model, seed, loss=self.loss)
        network.check_layers()
        networks = tuple(self._in_phase(phase, network, seed, clock or model) for phase in self.phases)
        data = self.data if isinstance(self.data, DataSet) else load_data(self.data)
        if isinstance(self.held_out, DataSet):
            train, held_out = data, self.held_out
        else:
            train, held_out = split(data, self.held_out, seed)
        for part in (train, held_out):
            if part.sample_shape != model.input_shape:
                what = f"data {part.name!r} has samples of shape {part.sample_shape}, but model {model.name!r} takes"
                raise ConfigError(f"{what} {model.input_shape}; choose a model or data that fit")
        each = each_label(network.out_shape)
        if train.is_regression:
            self._check_targets(train, held_out, network)
        elif train.labels.shape[1:] != each:
            what = f"data {train.name!r} has labels of shape {train.labels.shape[1:]} for each sample, but model"
            learns = f"{model.name!r}, whose outputs are {network.out_shape}, learns {each}"
            raise ConfigError(f"{what} {learns}; choose a model or data that fit")
        if each and not train.is_regression and self.loss != "cross_entropy":
            raise ConfigError(f"loss = {self.loss!r} with a label for each token; use 'cross_entropy'")
        if train.n_classes > network.n_classes:
            what = f"data {train.name!r} has {train.n_classes} classes, but model {model.name!r} has"
            raise ConfigError(f"{what} {network.n_classes} outputs; choose a model or data that fit")
        if each and self.sharding not in ("iid", "shared"):
            what = "its samples have no class of their own but a label for each token; use 'iid' or 'shared'"
            raise ConfigError(f"sharding = {self.sharding!r} of data {train.name!r}: {what}")
        fitted = with_layers(self.optimizer, network.slots), self.schedule
        shards = self._shards(train, n_workers, seed)
        return Task(network, train, held_out, shards, *fitted, seed, self.batching, self.phases, networks)

    def _check_targets(self, train: DataSet, held_out: DataSet, network: Network) -> None:
        """Raise ConfigError for data with numbers to predict that do not fit the rest."""
        what = f"data {train.name!r} has numbers to predict, not classes"
        if self.loss != "mean_squared_error":
            raise ConfigError(f"{what}, but loss = {self.loss!r}; use 'mean_squared_error' (classes are whole numbers)")
        for part in (train, held_out):
            if not part.is_regression or part.labels[0].size != network.n_outputs:
                labels = f"labels {part.labels.shape[1:]} of type {part.labels.dtype} for each sample"
                outputs = f"model {network.model.name!r} has {network.n_outputs} outputs"
                raise ConfigError(f"data {part.name!r} has {labels}, but {outputs}; choose what fits")
        if self.sharding not in ("iid", "shared"):
            raise ConfigError(f"sharding = {self.sharding!r}: {what}; use 'iid' or 'shared'")
        if self.target_accuracy is not None:
            raise ConfigError(f"target_accuracy = {self.target_accuracy}: {what}; use target_loss")

    def _in_phase(self, phase: Phase, network: Network, seed: int, clock: Model) -> Network:
        """Return the network for the images of a phase."""
        if phase.input_size is None:
            return network
        model, size = network.model, phase.input_size
        if clock is not model:
            resized(clock, size)  # raises what does not fit
            size = max(1, round(size * model.input_shape[-1] / clock.input_shape[-1]))
        other = resized(model, size)
        return network if other is model else build_network(other, seed, loss=self.loss)

    def _shards(self, train: DataSet, n_workers: int, seed: int) -> list[BatchStream]:
        if self.sharding in ("iid", "shared"):
            shards = iid(np.arange(train.n_samples), n_workers if self.sharding == "iid" else 1, seed)
        elif self.sharding == "by_class":
            shards = by_class(train.labels, n_workers)
        else:
            assert isinstance(self.sharding, Dirichlet)
            shards = dirichlet(train.labels, n_workers, self.sharding.alpha, seed)
        return [BatchStream(shard, seed, rank) for rank, shard in enumerate(shards)]
