"""`Training`: what a run learns, from which data, with which optimizer, and when it is enough."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddlsim.data import BatchStream, by_class, dirichlet, iid, load_data, split
from ddlsim.data.dataset import DataSet
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.learning.learner import Task
from ddlsim.nn.loss import LOSSES, Loss
from ddlsim.nn.network import build_network
from ddlsim.optim import SGD, Constant, GrowingBatch, Schedule
from ddlsim.optim.layerwise import bounds_of
from ddlsim.optim.rules import Optimizer
from ddlsim.units import parse
from ddlsim.workload.model import Model

__all__ = ["Dirichlet", "Training"]

SHARDINGS = ("iid", "by_class", "shared")


@dataclass(frozen=True)
class Dirichlet:
    """Shards whose class shares are drawn from Dirichlet(alpha); see :func:`ddlsim.data.dirichlet`."""

    alpha: float


@dataclass(frozen=True)
class Training:
    """Makes a run learn: ``simulate(..., training=Training("digits", rate=0.1, epochs=5))``.

    data              "digits", "shapes", a path (see :func:`ddlsim.data.load_data`) or a :class:`DataSet`
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
    batching          compute gradients at the same parameters as one batch (the same up to float32 rounding)
    """

    data: str | Path | DataSet = "digits"
    held_out: float | int | DataSet = 0.2
    optimizer: Optimizer = SGD()
    rate: float | Schedule = 0.1
    sharding: str | Dirichlet = "iid"
    loss: Loss = "cross_entropy"
    epochs: float | None = None
    updates: int | None = None
    target_accuracy: float | None = None
    target_loss: float | None = None
    moving_average: int = 1
    evaluate_every: int | str = 50
    charge_evaluation: bool = False
    growing_batch: GrowingBatch | None = None
    batching: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.sharding, str) and self.sharding not in SHARDINGS:
            raise unknown_name("sharding", self.sharding, SHARDINGS)
        if self.loss not in LOSSES:
            raise unknown_name("loss", str(self.loss), LOSSES)
        for name in ("epochs", "updates", "target_loss"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and value > 0.0):
                raise ConfigError(f"Training: {name} = {value!r}: must be above 0")
        if self.target_accuracy is not None and not 0.0 < self.target_accuracy <= 1.0:
            raise ConfigError(
                f"Training: target_accuracy = {self.target_accuracy!r}: must be above 0 and at most 1 (0.95 is 95 %)"
            )
        if self.moving_average < 1:
            raise ConfigError(f"Training: moving_average = {self.moving_average!r}: must be at least 1 evaluation")
        if not hasattr(self.optimizer, "update") or isinstance(self.optimizer, type):
            raise ConfigError(f"Training: optimizer = {self.optimizer!r}: must be an object such as Momentum(0.9)")
        self._interval()

    def _interval(self) -> float:
        every = self.evaluate_every
        if isinstance(every, bool) or not isinstance(every, int | str):
            raise ConfigError(
                f"Training: evaluate_every = {every!r}: must be a whole number of updates or a time such as '0.5 s'"
            )
        number = parse(every, "time", "Training: evaluate_every") if isinstance(every, str) else float(every)
        if not number > 0.0:
            raise ConfigError(f"Training: evaluate_every = {every!r}: must be above 0")
        return number

    @property
    def evaluate_seconds(self) -> float | None:
        """Simulated seconds between evaluations; None if updates are counted."""
        return self._interval() if isinstance(self.evaluate_every, str) else None

    @property
    def schedule(self) -> Schedule:
        """The learning rate as a schedule."""
        return Constant(float(self.rate)) if isinstance(self.rate, int | float) else self.rate

    @property
    def has_end(self) -> bool:
        """Whether any rule ends the run."""
        return any(v is not None for v in (self.epochs, self.updates, self.target_accuracy, self.target_loss))

    def task(self, model: Model, n_workers: int, seed: int) -> Task:
        """Return what the workers of a run learn. Raises ConfigError if data and model do not fit."""
        network = build_network(model, seed, loss=self.loss)
        data = self.data if isinstance(self.data, DataSet) else load_data(self.data)
        if isinstance(self.held_out, DataSet):
            train, held_out = data, self.held_out
        else:
            train, held_out = split(data, self.held_out, seed)
        for part in (train, held_out):
            if part.sample_shape != model.input_shape:
                raise ConfigError(
                    f"data {part.name!r} has samples of shape {part.sample_shape}, but model {model.name!r} takes "
                    f"{model.input_shape}; choose a model or data that fit"
                )
        if train.n_classes > network.n_outputs:
            raise ConfigError(
                f"data {train.name!r} has {train.n_classes} classes, but model {model.name!r} has "
                f"{network.n_outputs} outputs; choose a model or data that fit"
            )
        optimizer = self.optimizer
        if getattr(optimizer, "bounds", None) == ():
            optimizer = optimizer.with_bounds(bounds_of(network.slots))  # type: ignore[attr-defined]
        shards = self._shards(train, n_workers, seed)
        return Task(network, train, held_out, shards, optimizer, self.schedule, seed, self.batching)

    def _shards(self, train: DataSet, n_workers: int, seed: int) -> list[BatchStream]:
        if self.sharding == "shared":
            shards = iid(train.labels, 1, seed)
        elif self.sharding == "iid":
            shards = iid(train.labels, n_workers, seed)
        elif self.sharding == "by_class":
            shards = by_class(train.labels, n_workers)
        else:
            assert isinstance(self.sharding, Dirichlet)
            shards = dirichlet(train.labels, n_workers, self.sharding.alpha, seed)
        return [BatchStream(shard, seed, rank) for rank, shard in enumerate(shards)]
