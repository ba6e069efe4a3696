"""The data plane of a run: values that are computed when they are read.

Strategies handle gradients, parameters and optimizer states as :class:`Value` objects. A value stands for an array, a
tuple or an optimizer's state, and records how to compute it. Nothing is ever changed in place, so a snapshot is a
reference.

>>> plane = DataPlane()
>>> w, g = plane.constant(np.ones(2, np.float32)), plane.constant(np.full(2, 4.0, np.float32))
>>> (w - 0.25 * g).read()
array([0., 0.], dtype=float32)

The section "Control plane and data plane" of docs/architecture.md explains the purposes of lazy evaluation,
:class:`Replay` and :data:`ABSENT`.

**A model is its parameters and its running statistics** (of batch normalisation). The value of parameters holds their
running statistics, and every operation that mixes parameters (arithmetic of values, :meth:`DataPlane.mix`) mixes the
statistics by the same formula, so strategies need not handle them. A gradient holds the statistics of the batches that
it was computed from, however it is scaled, summed or split. Only parameters that are updated with the gradient take
them in, so a dropped gradient does not affect any statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from ddlsim.errors import ConfigError, DdlsimError

Array = npt.NDArray[np.floating]
#: (momentum * statistics of a batch, 1 - momentum), element by element, both of shape (n_state,)
BatchStatistics = tuple[Array, Array]
T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")


class Value(Generic[T_co]):
    """A lazy value: an array, a tuple or an optimizer state that is computed when it is first read.

    Values are created by :meth:`DataPlane.apply` and :meth:`DataPlane.constant`, and by arithmetic with other values
    and numbers.

    plane             data plane that created the value
    number            index of the value in the order of creation
    compute           function that computes the content from the `inputs`; None: the content is `result`
    statistics        batch-norm running statistics that belong to parameters; None for other values, and for networks
                      without batch normalisation
    batch_statistics  statistics of the batches from which a gradient was computed; () for other values
    """

    __slots__ = ("__weakref__", "_compute", "_inputs", "_result", "batch_statistics", "number", "plane", "statistics")

    def __init__(
        self,
        plane: DataPlane,
        number: int,
        compute: Callable[..., T_co] | None,
        inputs: tuple[Value[object], ...],
        result: object = None,
        statistics: Value[Array] | None = None,
        batch_statistics: tuple[Value[BatchStatistics], ...] = (),
    ) -> None:
        self.plane = plane
        self.number = number
        self._compute = compute
        self._inputs = inputs
        self._result = result
        self.statistics = statistics
        self.batch_statistics = batch_statistics

    @property
    def pending(self) -> bool:
        """Whether the value has not been computed yet."""
        return self._compute is not None

    def read(self) -> T_co:
        """Return the content of the value, computing it first if necessary."""
        if self._compute is not None:
            self._evaluate()
        return cast(T_co, self._result)

    def _evaluate(self) -> None:
        """Compute all pending inputs in the order in which they were created (recursion could become too deep)."""
        pending: dict[int, Value[object]] = {}
        stack: list[Value[object]] = [self]
        while stack:
            value = stack.pop()
            if value._compute is not None and value.number not in pending:
                pending[value.number] = value
                stack.extend(value._inputs)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            for number in sorted(pending):
                value = pending.pop(number)
                assert value._compute is not None
                value._result = value._compute(*[source._result for source in value._inputs])
                value._compute, value._inputs = None, ()

    def with_statistics_of(self, *others: Value[object]) -> Value[T_co]:
        """Return a value with the same content and the statistics of other values.

        Running statistics are those of the first of the `others`; batch statistics are those of all of them.
        """
        batches = _batches(others)
        if others[0].statistics is None and not batches:
            return self
        return self.plane.apply(lambda a: a, self, statistics=others[0].statistics, batch_statistics=batches)

    def __add__(self, other: Value[T_co]) -> Value[T_co]:
        return self.plane.mix(lambda a, b: a + b, self, other)

    def __sub__(self, other: Value[T_co]) -> Value[T_co]:
        return self.plane.mix(lambda a, b: a - b, self, other)

    def __mul__(self, factor: float) -> Value[T_co]:
        return self.plane.mix(lambda a: factor * a, self)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Value[T_co]:
        return self.plane.mix(lambda a: a / divisor, self)

    def __getitem__(self, part: slice) -> Value[T_co]:
        """Return a part of the array, a view. Statistics remain with the first part."""
        if part.start:
            return self.plane.apply(lambda a: a[part], self)
        statistics, batch_statistics = self.statistics, self.batch_statistics
        return self.plane.apply(lambda a: a[part], self, statistics=statistics, batch_statistics=batch_statistics)


def _batches(values: Iterable[Value[object]]) -> tuple[Value[BatchStatistics], ...]:
    """Return the distinct batch statistics of all values."""
    return tuple({id(batch): batch for value in values for batch in value.batch_statistics}.values())


def absorbed(statistics: Array, *batches: BatchStatistics) -> Array:
    """Return s <- (1 - momentum) s + momentum (1/K) sum_k b_k: running statistics after an update from K batches.

    The sum is computed in float64, in the given order, and rounded once.
    """
    total = batches[0][0].astype(np.float64)
    for fresh, _ in batches[1:]:
        total += fresh
    return (statistics * batches[0][1].astype(np.float64) + total / len(batches)).astype(statistics.dtype)


@dataclass(frozen=True)
class Replay:
    """The content of a saved run.

    n_values  number of values created so far, numbered from 0
    results   contents of the live values that have been computed, by number
    pending   numbers of the live values that have not been computed
    scalars   all numbers read for decisions, in order
    """

    n_values: int = 0
    results: dict[int, object] = field(default_factory=dict)
    pending: frozenset[int] = frozenset()
    scalars: Sequence[float] = ()


class DataPlane:
    """The data plane of a run, which creates lazy values and numbers them from 0.

    replay  contents of a saved run to resume; None: a new run. Values that had been computed before the run was saved
            are not computed again. Those that are still in use get their saved contents; the others are no longer
            needed
    """

    def __init__(self, replay: Replay | None = None) -> None:
        self.replay = replay or Replay()
        self.n_values = 0
        #: numbers read for decisions (a loss, a size that depends on values), in order
        self.scalars: list[float] = []
        self._alive: WeakValueDictionary[int, Value[object]] = WeakValueDictionary()

    @property
    def replaying(self) -> bool:
        """Whether the run has not yet reached the point at which it was saved."""
        return self.n_values < self.replay.n_values or len(self.scalars) < len(self.replay.scalars)

    def constant(self, result: U, statistics: Value[Array] | None = None) -> Value[U]:
        """Return a value whose content is known."""
        return self.register(Value(self, self.n_values, None, (), result, statistics))

    def apply(
        self,
        function: Callable[..., U],
        *inputs: Value[object],
        statistics: Value[Array] | None = None,
        batch_statistics: tuple[Value[BatchStatistics], ...] = (),
    ) -> Value[U]:
        """Return the lazy value of ``function(*inputs)``. The function must not change its arguments.

        The result has only the statistics that are passed here, not those of the inputs; use :meth:`mix` to keep them.
        """
        if ABSENT in inputs:
            return cast("Value[U]", ABSENT)
        return self.register(Value(self, self.n_values, function, inputs, None, statistics, batch_statistics))

    def mix(self, function: Callable[..., U], *inputs: Value[object]) -> Value[U]:
        """Return the lazy value of ``function(*inputs)`` for arrays, with the matching running statistics.

        If all inputs are models, `function` is also applied to their statistics. If one input is a model, its
        statistics are kept and updated with those of the gradients' batches. If no input is a model, the result has the
        batch statistics of all inputs. Raises DdlsimError if several models are mixed with other values.
        """
        models = [value.statistics for value in inputs if value.statistics is not None]
        batches = _batches(inputs)
        if not models:
            return self.apply(function, *inputs, batch_statistics=batches)
        if len(models) == len(inputs):
            return self.apply(function, *inputs, statistics=self.apply(cast("Callable[..., Array]", function), *models))
        if len(models) == 1:
            return self.apply(function, *inputs, statistics=self.merge_statistics(models[0], batches))
        n_others = len(inputs) - len(models)
        raise DdlsimError(
            f"the running statistics (batch normalisation) of {len(models)} models cannot be mixed together with "
            f"{n_others} other values; mix the models first, then add the other values"
        )

    def merge_statistics(self, statistics: Value[Array], batches: Sequence[Value[BatchStatistics]]) -> Value[Array]:
        """Return running statistics updated with the statistics of `batches`; see :func:`absorbed`."""
        return self.apply(absorbed, statistics, *batches) if batches else statistics

    def register(self, value: Value[U]) -> Value[U]:
        """Assign the next number to a new value, and return the value."""
        number = self.n_values
        self.n_values += 1
        if number < self.replay.n_values and number not in self.replay.pending:
            value._compute, value._inputs = None, ()
            value._result = self.replay.results.get(number)
        self._alive[number] = value
        return value

    def decision(self, compute: Callable[[], float]) -> float:
        """Return a number on which the course of the run depends, such as a loss or a size.

        While a saved run is replayed, the number is read from the saved run instead of being computed.
        """
        n = len(self.scalars)
        is_saved = n < len(self.replay.scalars)
        self.scalars.append(self.replay.scalars[n] if is_saved else compute())
        return self.scalars[n]

    def snapshot(self) -> Replay:
        """Return the contents that a later run needs to resume from this point."""
        alive = list(self._alive.values())
        results = {v.number: v._result for v in alive if not v.pending}
        pending = frozenset(v.number for v in alive if v.pending)
        return Replay(self.n_values, results, pending, tuple(self.scalars))


def weighted_sum(plane: DataPlane, weights: Sequence[float], values: Sequence[Value[Array]]) -> Value[Array]:
    """Return the weighted sum of models, sum_j weights[j] * values[j].

    plane    data plane that creates the result
    weights  one weight per model
    values   the models, each of shape (n_params,). Their running statistics are summed with the same weights

    The terms are added in float64 in the given order, and the sum is rounded once.
    """

    def add(*arrays: Array) -> Array:
        total = weights[0] * arrays[0].astype(np.float64)
        for weight, array in zip(weights[1:], arrays[1:], strict=True):
            total += weight * array
        return total.astype(arrays[0].dtype)

    return plane.mix(add, *values)


class _Nothing(DataPlane):
    """The data plane of a run without data."""

    def apply(self, *inputs: Any, **statistics: Any) -> Any:
        return ABSENT


class _Absent(Value[Array]):
    """The value of everything in a run without data."""

    __slots__ = ()

    def read(self) -> Array:
        raise ConfigError(
            "a timing-only run has no values to read; set training=ddlsim.Training(data='digits', ...) to compute them"
        )


ABSENT = _Absent(_Nothing(), -1, None, ())
