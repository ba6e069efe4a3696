"""`Training`: data, optimizer, learning rate, sharding and stopping rules of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np

from ddlsim.arguments import Count, NotNegative, Positive, checked, number, one_of, quantity
from ddlsim.data import BatchStream, by_class, dirichlet, iid, split
from ddlsim.data.dataset import DataSet, HeldOut
from ddlsim.errors import ConfigError
from ddlsim.learning.learner import Task
from ddlsim.learning.phases import Phase, PhasedRate, phase_at
from ddlsim.nn import Loss
from ddlsim.optim import SGD, Constant, GrowingBatch, Schedule
from ddlsim.optim.rules import Optimizer, with_layers
from ddlsim.units import parse
from ddlsim.workload.model import Model
from ddlsim.workload.resized import resized

if TYPE_CHECKING:
    from ddlsim.nn.network import Network

SHARDINGS = ("iid", "by_class", "shared")


@checked
@dataclass(frozen=True)
class Dirichlet:
    """Sharding in which workers have different mixtures of classes, drawn from a Dirichlet distribution.

    alpha  concentration: the smaller the value, the fewer classes dominate each worker's samples; see
           :func:`ddlsim.data.dirichlet`
    """

    alpha: Positive


@checked
@dataclass(frozen=True)
class Training:
    """Settings for training with real gradients: ``simulate(..., training=Training("digits", rate=0.1, epochs=5))``.

    data               data set: "digits", "shapes", "sentences", "clicks", a path (see :func:`ddlsim.data.load_data`)
                       or a :class:`DataSet`
    held_out           samples for evaluation: a fraction of the data (float below 1), a number of samples (int), or a
                       separate DataSet
    optimizer          SGD, Momentum, Adam, LARS or LAMB from :mod:`ddlsim.optim`, or a custom optimizer
    rate               learning rate: a number, or a schedule over epochs
    sharding           how samples are divided among the workers: "iid", "by_class", Dirichlet(alpha), or "shared". With
                       "shared", workers take turns reading from one sequence, so N workers see the same samples as a
                       single worker with N times their batch size
    loss               "cross_entropy" or "mean_squared_error"
    epochs, updates, target_accuracy, target_loss
                       conditions that end the run, whichever is met first; the run also ends at the experiment's
                       ``max_time``. Targets refer to the held-out samples
    moving_average     number of evaluations whose mean must reach a target
    evaluate_every     number of updates between evaluations, or simulated time as a string such as "0.5 s"
    charge_evaluation  True: worker 0 spends simulated time on evaluations; False: evaluations take no time
    growing_batch      schedule of the batch size over epochs, which replaces the experiment's batch size (Smith et al.
                       2018)
    phases             successive parts of the run with their own image sizes, batch sizes and learning rates
                       (:class:`Phase`). If `epochs` is None, the run ends after the last phase
    batching           whether gradients of several workers at the same parameters are computed as one batch, which is
                       faster and gives the same result up to float32 rounding
    """

    data: str | Path | DataSet = "digits"
    held_out: HeldOut | DataSet = 0.2
    optimizer: Annotated[Optimizer, "an optimizer such as Momentum(0.9)"] = SGD()
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
            raise ConfigError(
                "Training: growing_batch cannot be combined with phases; remove growing_batch, and set the batch size "
                "of each phase"
            )

    @property
    def evaluate_seconds(self) -> float | None:
        """Simulated time between evaluations in s; None: evaluations are a number of updates apart."""
        return parse(self.evaluate_every, "time") if isinstance(self.evaluate_every, str) else None

    @property
    def schedule(self) -> Schedule:
        """The learning rate as a schedule over epochs."""
        rate = Constant(float(self.rate)) if isinstance(self.rate, int | float) else self.rate
        return PhasedRate(self.phases, rate) if self.phases else rate

    @property
    def last_epoch(self) -> float | None:
        """The epoch at which the run ends: `epochs`, or the end of the last phase; None: no limit on epochs."""
        total = float(sum(phase.epochs for phase in self.phases))
        return total if self.epochs is None and self.phases else self.epochs

    def regime(self, epoch: float, batch_size: int) -> tuple[int, int | None]:
        """Return the batch size and the index of the phase at an epoch. The index is None if there are no phases.

        batch_size  batch size of the run, which applies where no phase or schedule sets another
        """
        if self.phases:
            index, _ = phase_at(self.phases, epoch)
            return self.phases[index].batch or batch_size, index
        return (batch_size if self.growing_batch is None else self.growing_batch.batch_size(epoch)), None

    @property
    def has_end(self) -> bool:
        """Whether any of the limits and targets can end the run."""
        return any(v is not None for v in (self.last_epoch, self.updates, self.target_accuracy, self.target_loss))

    def task(self, model: Model, n_workers: int, seed: int, clock: Model | None = None) -> Task:
        """Return the task that the workers of a run learn.

        clock  model for which compute times are simulated; None: `model`

        Raises ConfigError if data and model do not match.
        """
        from ddlsim.data import load_data
        from ddlsim.nn.network import build_network

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
                raise ConfigError(
                    f"the data set {part.name!r} has samples of shape {part.sample_shape}, but the model "
                    f"{model.name!r} needs {model.input_shape}; choose another model or data set"
                )
        self._check(train, held_out, network)
        fitted = with_layers(self.optimizer, network.slots), self.schedule
        shards = self._shards(train, n_workers, seed)
        return Task(network, train, held_out, shards, *fitted, seed, self.batching, self.phases, networks)

    def _check(self, train: DataSet, held_out: DataSet, network: Network) -> None:
        """Raise ConfigError for labels that do not match the loss, the sharding, the goal or the network."""
        from ddlsim.nn.network import each_label

        label_shape, name, model = each_label(network.out_shape), train.name, network.model.name
        if not train.is_regression and train.labels.shape[1:] != label_shape:
            raise ConfigError(
                f"the data set {name!r} has labels of shape {train.labels.shape[1:]} per sample, but the model "
                f"{model!r}, with outputs of shape {network.out_shape}, needs labels of shape {label_shape}; choose "
                "another model or data set"
            )
        kind = "regression targets" if train.is_regression else "per-token labels" if label_shape else "classes"
        loss = {"regression targets": "mean_squared_error", "per-token labels": "cross_entropy"}.get(kind, self.loss)
        if self.loss != loss:
            raise ConfigError(f"loss = {self.loss!r} does not support {kind} (data set {name!r}); use {loss!r}")
        if kind != "classes" and self.sharding not in ("iid", "shared"):
            raise ConfigError(
                f"sharding = {self.sharding!r} needs one class per sample, but the data set {name!r} has {kind}; use "
                "'iid' or 'shared'"
            )
        if train.is_regression and self.target_accuracy is not None:
            raise ConfigError(
                f"target_accuracy = {self.target_accuracy} needs classes, but the data set {name!r} has {kind}; use "
                "target_loss"
            )
        for part in (train, held_out) if train.is_regression else ():
            if not part.is_regression or part.labels[0].size != network.n_outputs:
                raise ConfigError(
                    f"the data set {part.name!r} has labels of shape {part.labels.shape[1:]} and type "
                    f"{part.labels.dtype} per sample, but the model {model!r} has {network.n_outputs} outputs; choose "
                    "another model or data set"
                )
        if train.n_classes > network.n_classes:
            raise ConfigError(
                f"the data set {name!r} has {train.n_classes} classes, but the model {model!r} has only "
                f"{network.n_classes} outputs; choose another model or data set"
            )

    def _in_phase(self, phase: Phase, network: Network, seed: int, clock: Model) -> Network:
        """Return the network for the images of a phase."""
        from ddlsim.nn.network import build_network

        if phase.input_size is None:
            return network
        model, size = network.model, phase.input_size
        if clock is not model:
            resized(clock, size)  # raises if the size does not fit
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
