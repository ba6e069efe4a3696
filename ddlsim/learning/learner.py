"""The learner of a run: gradients, updates and evaluations as lazy values.

The learner has the network, the data and the optimizer of a run (its :class:`Task`). In timing-only runs it has none,
and all of its values are :data:`~ddlsim.learning.values.ABSENT`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ddlsim.compression.payloads import mean
from ddlsim.data.batches import BatchStream
from ddlsim.data.dataset import DataSet, Floats, Ints, resize
from ddlsim.errors import DdlsimError
from ddlsim.learning.phases import Phase, phase_at
from ddlsim.learning.values import ABSENT, Array, BatchStatistics, DataPlane, Value
from ddlsim.optim import OptimizerState, Schedule
from ddlsim.optim.rules import Optimizer
from ddlsim.streams import stream

if TYPE_CHECKING:
    from ddlsim.learning.monitor import Row
    from ddlsim.nn.network import Network


#: number of samples per evaluation batch
CHUNK = 1024


class DivergedError(DdlsimError):
    """Error for training that diverged, so that a loss is NaN or infinite, or a running variance is negative."""


def evaluation(network: Network, data: DataSet, params: Array, state: Array | None) -> tuple[float, float]:
    """Return (mean loss, accuracy) on the samples, or on tokens if each has a label. The accuracy of a regression is
    NaN.

    params  (n_params,)
    state   (n_state,) the matching running statistics; None if the network has no batch normalisation

    Raises DivergedError if a running variance is negative.
    """
    _check_variances(network, state)
    loss, right = 0.0, 0
    for start in range(0, data.n_samples, CHUNK):
        part = slice(start, start + CHUNK)
        labels = data.labels[part] if data.is_regression else data.labels[part].reshape(-1)
        outputs = network.predict(params, data.x[part], state).astype(np.float64).reshape(len(labels), -1)
        loss += _loss(network, outputs, labels)
        right += 0 if data.is_regression else int(np.count_nonzero(outputs.argmax(axis=1) == labels))
    if data.is_regression:
        return loss / data.n_samples, math.nan
    return loss / data.labels.size, right / data.labels.size


def targets(network: Network, labels: Ints | Floats) -> Ints | Array:
    """Return the desired outputs of the network: classes or, for the squared error, regression targets or one-hot
    vectors of the classes."""
    if network.loss == "cross_entropy" or labels.dtype.kind == "f":
        return labels.reshape(len(labels), -1) if labels.dtype.kind == "f" else labels
    return np.eye(network.n_outputs, dtype=network.dtype)[labels]


def _loss(network: Network, outputs: Array, labels: Ints | Floats) -> float:
    """Return the sum of the losses of `outputs`, with one row per label."""
    if network.loss != "cross_entropy":
        return float(np.square(outputs - targets(network, labels)).mean(axis=1).sum())
    shifted = outputs - outputs.max(axis=1, keepdims=True)
    return float((np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(labels)), labels]).sum())


def _check_variances(network: Network, state: Array | None) -> None:
    if state is None:
        return
    for slot in network.state_slots:
        if slot.name.endswith("running_var") and slot.of(state).min() < 0.0:
            raise DivergedError(
                f"diverged: {slot.name} of the model is negative, because its moving average overshoots; lower the "
                "moving rate (with ElasticAveraging, N alpha must be at most 1)"
            )


@dataclass(frozen=True, eq=False)
class Handover:
    """The state of a training run that another group of workers continues.

    params, statistics  shape (n_params,), (n_state,) or None
    state               of the optimizer; None if there are several, in which case it is reset
    n_updates, n_samples, nbytes, time
                        totals so far; time in s
    history             evaluations so far
    rate_factor         factor of the learning rate from now on
    """

    params: Array
    statistics: Array | None
    state: OptimizerState | None
    n_updates: int
    n_samples: int
    nbytes: float
    time: float
    history: tuple[Row, ...]
    rate_factor: float = 1.0


class Shift(NamedTuple):
    """A group's part of a training run in which groups take turns: its initial state, whether another group may follow,
    and when it begins, s on the clock."""

    begin: Handover | None
    endless: bool
    since: float = 0.0


#: an optimizer's state as a value
State = Value[OptimizerState]


@dataclass(frozen=True, eq=False)
class Task:
    """A learning task: a network, training and held-out samples, and how parameters are updated.

    shards    one array of sample indices per worker; or a single one, from which workers take turns
    networks  of each of the phases, with the parameters of ``network``
    """

    network: Network
    train: DataSet
    held_out: DataSet
    shards: list[BatchStream]
    optimizer: Optimizer
    rate: Schedule
    seed: int
    batching: bool = True
    phases: tuple[Phase, ...] = ()
    networks: tuple[Network, ...] = ()

    @property
    def mergeable(self) -> bool:
        """Whether the network can process the batches of several workers as one.

        This excludes batch normalisation, whose statistics are those of a worker's batch, and dropout.
        """
        kinds = {layer.type for layer in self.network.model.layers}
        draws = "dropout" in kinds or self.network.n_streams > 0
        return self.batching and not self.network.state_slots and not draws


class _Batch(NamedTuple):
    """Samples of one worker's gradient; `time`: when it began, s; `step`: number of the worker's gradient."""

    rank: int
    step: int
    indices: Ints
    time: float
    network: Network


class _Gradient(Value[Array]):
    """A gradient at `params`: the mean over its batches, of one or several workers."""

    __slots__ = ("batches", "params")

    def __init__(
        self, plane: DataPlane, batches: tuple[_Batch, ...], params: Value[Array], compute: Callable[..., Array]
    ) -> None:
        super().__init__(plane, plane.n_values, compute, (params,))
        self.batches = batches
        self.params = params


class Learner:
    """Gradients, updates and evaluations for all workers of a run, as lazy values.

    plane      data plane that creates the values
    task       network, data and optimizer; None in timing-only runs, in which all values are ABSENT
    n_workers  number of workers
    begin      training state taken over from another group of workers; None: the initial state
    """

    def __init__(self, plane: DataPlane, task: Task | None, n_workers: int, begin: Handover | None = None) -> None:
        self.plane = plane
        self.task = task
        self.n_workers = n_workers
        #: losses of the gradients computed since the last :meth:`recent_loss`
        self.losses: list[float] = []
        self._steps = [0] * n_workers
        self._taken = [0] * n_workers
        self._n_drawn = 0
        self._begin = begin
        self._before = 0 if begin is None else begin.n_samples
        self.initial: Value[Array] = ABSENT
        if task is not None:
            self._mergeable = task.mergeable
            network = task.network
            params, state = network.initial_params, network.initial_state if network.state_slots else None
            if begin is not None:
                params, state = begin.params, begin.statistics
            self.initial = plane.constant(params, None if state is None else plane.constant(state))

    def gradient(self, rank: int, params: Value[Array], n_samples: int, now: float) -> Value[Array]:
        """Return the mean gradient of a worker's next `n_samples` samples at `params`, shape (n_params,).

        rank  rank of the worker
        now   simulated time in s
        """
        task = self.task
        if task is None:
            return ABSENT
        shared = len(task.shards) == 1
        source = task.shards[0 if shared else rank]
        first = self._taken[rank]
        if shared:  # workers take turns: `first` samples of each precede, and those of lower ranks in this round
            first = self._before + first * self.n_workers + rank * n_samples
        else:
            first += self._before // self.n_workers
        network = task.network
        if task.phases:
            network = task.networks[phase_at(task.phases, self.local_epoch(rank))[0]]
        batch = _Batch(rank, self._steps[rank], source.indices(first, n_samples), now, network)
        self._taken[rank] += n_samples
        self._steps[rank] += 1
        self._n_drawn += 1
        if task.network.state_slots:
            passed = self.plane.apply(lambda p: self._with_statistics(batch, p), params)
            return self.plane.apply(_first, passed, batch_statistics=(self.plane.apply(_second, passed),))
        return self._gradient((batch,), params)

    def mean(self, gradients: Sequence[Value[Array]]) -> Value[Array]:
        """Return the mean of gradients or of models, all of shape (n,).

        The sum is computed in float64 in the given order and rounded once, regardless of the schedule that transports
        the vectors. Gradients at the same parameters that have not been read yet are instead computed as the gradient
        of one larger batch, which gives the same result up to the rounding of float32 sums.
        """
        first = gradients[0]
        if len(gradients) == 1 or first is ABSENT:
            return first
        # recorded as a decision, because a replay does not know which values had been read
        if self.decision(lambda: float(self._one_batch(gradients))):
            assert isinstance(first, _Gradient)
            return self._gradient(tuple(g.batches[0] for g in gradients if isinstance(g, _Gradient)), first.params)
        return self.plane.mix(lambda *arrays: mean(arrays), *gradients)

    def optimizer_state(self, params: Value[Array]) -> State:
        """Return the initial optimizer state for the parameters, or for a part of them."""
        if self.task is None:
            return ABSENT  # type: ignore[return-value]
        if params is self.initial and self._begin is not None and self._begin.state is not None:
            return self.plane.constant(self._begin.state)
        return self.plane.apply(self.task.optimizer.init, params)

    def update(
        self, params: Value[Array], gradient: Value[Array], state: State, rate: float
    ) -> tuple[Value[Array], State]:
        """Return the parameters and the optimizer state after an update with learning rate `rate`.

        The running statistics of batch normalisation are updated with the statistics of the gradient's batches.
        """
        if self.task is None:
            return ABSENT, state
        optimizer = self.task.optimizer
        after = self.plane.apply(lambda p, g, s: optimizer.update(p, g, s, rate), params, gradient, state)
        statistics = params.statistics
        if statistics is not None:
            statistics = self.plane.merge_statistics(statistics, gradient.batch_statistics)
        return self.plane.apply(_first, after, statistics=statistics), self.plane.apply(_second, after)

    def concatenate(self, parts: Sequence[Value[Array]]) -> Value[Array]:
        """Return the concatenated parts of a vector, with the running statistics of the first part."""
        if len(parts) == 1:
            return parts[0]
        vector: Value[Array] = self.plane.apply(lambda *arrays: np.concatenate(arrays), *parts)
        return vector.with_statistics_of(parts[0])

    def parts(self, n_parts: int) -> list[slice]:
        """Return `n_parts` contiguous slices of the parameter vector, whose sizes differ by at most one."""
        n = self.task.network.n_params if self.task is not None else 0
        bounds = [i * n // n_parts for i in range(n_parts + 1)]
        return [slice(a, b) for a, b in pairwise(bounds)]

    def epoch(self, n_samples: float) -> float:
        """Return the epoch after `n_samples` samples, including those before a handover."""
        return (self._before + n_samples) / self.task.train.n_samples if self.task is not None else 0.0

    def n_local(self, rank: int) -> int:
        """Return the number of samples in a worker's shard; 1 in a timing-only run."""
        return 1 if self.task is None else len(self.task.shards[rank % len(self.task.shards)].shard)

    def local_epoch(self, rank: int) -> float:
        """Return the epoch of one worker, as if all other workers had processed the same number of samples."""
        return self.epoch(self._taken[rank] * self.n_workers)

    def rate(self, n_samples: float) -> float:
        """Return the learning rate after `n_samples` samples."""
        factor = 1.0 if self._begin is None else self._begin.rate_factor
        return factor * float(self.task.rate.rate(self.epoch(n_samples))) if self.task is not None else 0.0

    def settle(self, values: Callable[[], Sequence[Value[Array]]]) -> None:
        """Compute `values` once each worker may have a gradient in them, which bounds the number of pending values."""
        if self._n_drawn >= self.n_workers:
            self._n_drawn = 0
            for value in values():
                value.read()
                if value.statistics is not None:
                    value.statistics.read()

    def decision(self, compute: Callable[[], float]) -> float:
        """Return a number that decides how the run continues; see :meth:`DataPlane.decision`."""
        return self.plane.decision(compute)

    def recent_loss(self) -> float:
        """Return the mean loss of the gradients computed since the last call; NaN if no gradient was computed."""

        def take() -> float:
            losses, self.losses = self.losses, []
            return math.fsum(losses) / len(losses) if losses else math.nan

        return self.decision(take)

    def evaluate(self, params: Value[Array]) -> tuple[float, float]:
        """Return (loss, accuracy) on the held-out samples at `params`, with the running statistics of `params`.

        Raises DdlsimError if `params` have no running statistics although the network uses them.
        """
        results: list[float] = []
        statistics = params.statistics
        if self.task is not None and self.task.network.state_slots and statistics is None:
            raise DdlsimError(
                "the parameters have lost the running statistics that batch normalisation needs; mix parameters with "
                "arithmetic or plane.mix, or restore the statistics with params.with_statistics_of(...)"
            )

        def once(i: int) -> float:
            if not results:
                task, state = self._the_task(), None if statistics is None else statistics.read()
                results.extend(evaluation(task.network, task.held_out, params.read(), state))
            return results[i]

        return self.decision(lambda: once(0)), self.decision(lambda: once(1))

    def spread(self, replicas: Sequence[Value[Array]]) -> float:
        """Return the consensus distance: the root mean square distance of parameter vectors from their mean."""

        def distance() -> float:
            arrays = [replica.read().astype(np.float64) for replica in replicas]
            middle = sum(arrays) / len(arrays)
            return math.sqrt(math.fsum(float(np.square(a - middle).sum()) for a in arrays) / len(arrays))

        return self.decision(distance)

    def _gradient(self, batches: tuple[_Batch, ...], params: Value[Array]) -> Value[Array]:
        value = _Gradient(self.plane, batches, params, lambda p: self._compute(batches, p))
        return self.plane.register(value)

    def _one_batch(self, gradients: Sequence[Value[Array]]) -> bool:
        def alike(g: Value[Array], first: _Gradient) -> bool:
            if not isinstance(g, _Gradient) or not g.pending or g.params is not first.params or len(g.batches) > 1:
                return False
            (batch, *_), (like, *_) = g.batches, first.batches
            return len(batch.indices) == len(like.indices) and batch.network is like.network

        first = gradients[0]
        return self._mergeable and isinstance(first, _Gradient) and all(alike(g, first) for g in gradients)

    def _compute(self, batches: tuple[_Batch, ...], params: Array) -> Array:
        indices = np.concatenate([batch.indices for batch in batches]) if len(batches) > 1 else batches[0].indices
        loss, gradient = self._pass(batches[0], indices, params, None)
        if not math.isfinite(loss):  # find the sample that caused it
            for batch in batches[:-1]:
                if not math.isfinite(self._pass(batch, batch.indices, params, None)[0]):
                    raise _diverged(batch, loss)
            raise _diverged(batches[-1], loss)
        self.losses.append(loss)
        return gradient

    def _with_statistics(self, batch: _Batch, params: Array) -> tuple[Array, BatchStatistics]:
        network = batch.network
        fresh = np.zeros_like(network.initial_state)  # will be momentum * the batch's statistics
        loss, gradient = self._pass(batch, batch.indices, params, fresh)
        if not math.isfinite(loss):
            raise _diverged(batch, loss)
        self.losses.append(loss)
        return gradient, (fresh, network.state_keep)

    def _pass(self, batch: _Batch, indices: Ints, params: Array, state: Array | None) -> tuple[float, Array]:
        task = self._the_task()
        rng = stream(task.seed, batch.rank, f"dropout {batch.step}") if not self._mergeable else None
        network, x = batch.network, task.train.x[indices]
        if network.model.input_shape != x.shape[1:]:
            x = resize(x, *network.model.input_shape[1:])
        return network.loss_and_gradient(params, x, targets(network, task.train.labels[indices]), rng, state)

    def _the_task(self) -> Task:
        assert self.task is not None, "values are computed only where there is something to learn"
        return self.task


def _diverged(batch: _Batch, loss: float) -> DivergedError:
    return DivergedError(
        f"diverged: the loss of worker {batch.rank} is {loss} in its step {batch.step}, which began at "
        f"{batch.time:.6g} s; lower the learning rate"
    )


#: parts of a value that is a pair
_first, _second = itemgetter(0), itemgetter(1)
