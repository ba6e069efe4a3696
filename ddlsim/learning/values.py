"""Values that are computed when they are read: the value plane of a run.

Strategies handle gradients, parameters and optimizer states as :class:`Value` objects: what they stand for is
an array (or a tuple, or an optimizer's state), what they are is a note of how it will be computed. Nothing that
they refer to is ever changed in place, so a snapshot is a reference.

>>> plane = Plane()
>>> w, g = plane.constant(np.ones(2, np.float32)), plane.constant(np.full(2, 4.0, np.float32))
>>> (w - 0.25 * g).read()
array([0., 0.], dtype=float32)

Being lazy pays three times. A gradient that is thrown away (a cancelled straggler's) is never computed, because
nothing refers to it any more; gradients at the same parameters become one large batch
(:mod:`ddlsim.learning.learner`); and a saved run needs no more than the values that are alive: continuing runs
the clock again from the start, with a :class:`Replay` in the place of the arithmetic.

Without data there is nothing to compute: every operation on :data:`ABSENT` gives ABSENT, and the same
strategies run on sizes alone.

**A model is its parameters and its running statistics** (of batch normalisation, where there is one). A value that
stands for parameters holds the statistics that belong to them, and whatever mixes parameters (the arithmetic of
values, :meth:`Plane.mix`) mixes the statistics by the same formula: no strategy has to think of them. A gradient holds
the statistics of the batches that it was computed from, however it is scaled, summed or cut up; parameters that are
moved by it, and those only, take them in. So a gradient that is thrown away leaves no trace in any statistics.
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
    """One value of a plane, see :meth:`Plane.apply`. Arithmetic with values and numbers makes new values.

    ``statistics`` are the running statistics that belong to parameters, ``batch_statistics`` those of the batches that
    a gradient is made of; None and () for other values, and where the network normalises no batches.
    """

    __slots__ = ("__weakref__", "_compute", "_inputs", "_result", "batch_statistics", "number", "plane", "statistics")

    def __init__(
        self, plane: Plane, number: int, compute: Callable[..., T_co] | None, inputs: tuple[Value[object], ...],
        result: object = None, statistics: Value[Array] | None = None,
        batch_statistics: tuple[Value[BatchStatistics], ...] = (),
    ) -> None:  # fmt: skip
        self.plane = plane
        self.number = number
        self._compute = compute
        self._inputs = inputs
        self._result = result
        self.statistics = statistics
        self.batch_statistics = batch_statistics

    @property
    def pending(self) -> bool:
        """Whether it is still to be computed."""
        return self._compute is not None

    def read(self) -> T_co:
        """Return what it stands for, computing what has not been yet."""
        if self._compute is not None:
            self._evaluate()
        return cast(T_co, self._result)

    def _evaluate(self) -> None:
        """Compute everything that it depends on, in the order in which it was made (recursion would go deep)."""
        found: dict[int, Value[object]] = {}
        stack: list[Value[object]] = [self]
        while stack:
            value = stack.pop()
            if value._compute is not None and value.number not in found:
                found[value.number] = value
                stack.extend(value._inputs)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            for number in sorted(found):
                value = found.pop(number)
                assert value._compute is not None
                value._result = value._compute(*[each._result for each in value._inputs])
                value._compute, value._inputs = None, ()

    def carrying(self, *others: Value[object]) -> Value[T_co]:
        """Return the same content with the statistics of others: of the first one's model, of all their batches."""
        batches = _batches(others)
        if others[0].statistics is None and not batches:
            return self
        return self.plane.apply(_same, self, statistics=others[0].statistics, batch_statistics=batches)

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
        """Return a part of the array, a view. Statistics stay with the first part."""
        if part.start:
            return self.plane.apply(lambda a: a[part], self)
        own, of_batches = self.statistics, self.batch_statistics
        return self.plane.apply(lambda a: a[part], self, statistics=own, batch_statistics=of_batches)


def _same(content: U) -> U:
    return content


def _batches(values: Iterable[Value[object]]) -> tuple[Value[BatchStatistics], ...]:
    """Return the statistics of all batches that values are made of, each once."""
    return tuple({id(batch): batch for value in values for batch in value.batch_statistics}.values())


def absorbed(statistics: Array, *batches: BatchStatistics) -> Array:
    """Return s <- (1 - momentum) s + momentum (1/K) sum_k b_k: running statistics after an update from K batches.

    Summed in float64 in the order given and rounded once.
    """
    total = batches[0][0].astype(np.float64)
    for fresh, _ in batches[1:]:
        total += fresh
    return (statistics * batches[0][1].astype(np.float64) + total / len(batches)).astype(statistics.dtype)


@dataclass(frozen=True)
class Replay:
    """What is known of a saved run, in which values number 0 .. n_values - 1 had been made.

    results  those alive and computed, by number
    pending  the numbers of those alive and not computed
    scalars  every number that was read for a decision, in order
    """

    n_values: int = 0
    results: dict[int, object] = field(default_factory=dict)
    pending: frozenset[int] = frozenset()
    scalars: Sequence[float] = ()


class Plane:
    """Makes values, and numbers them.

    With a `replay`, values that the saved run had made are not computed: those that it still held are as they
    were, the others are never looked at again.
    """

    def __init__(self, replay: Replay | None = None) -> None:
        self.replay = replay or Replay()
        self.n_values = 0
        #: numbers read for decisions (a loss, a size that depends on values), in order
        self.scalars: list[float] = []
        self._alive: WeakValueDictionary[int, Value[object]] = WeakValueDictionary()

    @property
    def replaying(self) -> bool:
        """Whether the run has not got as far as the saved one yet."""
        return self.n_values < self.replay.n_values or len(self.scalars) < len(self.replay.scalars)

    def constant(self, result: U, statistics: Value[Array] | None = None) -> Value[U]:
        """Return a value that is known."""
        return self.register(Value(self, self.n_values, None, (), result, statistics))

    def apply(
        self,
        function: Callable[..., U],
        *inputs: Value[object],
        statistics: Value[Array] | None = None,
        batch_statistics: tuple[Value[BatchStatistics], ...] = (),
    ) -> Value[U]:
        """Return the value of ``function(*inputs)``, which must change none of its arguments.

        It has the statistics given, and none of its inputs': for those there is :meth:`mix`.
        """
        if ABSENT in inputs:
            return cast("Value[U]", ABSENT)
        return self.register(Value(self, self.n_values, function, inputs, None, statistics, batch_statistics))

    def mix(self, function: Callable[..., U], *inputs: Value[object]) -> Value[U]:
        """Return the value of ``function(*inputs)``, arrays; statistics go the same way.

        Of models only, `function` gives the statistics as well. What is added to one model leaves its statistics as
        they are, but for the batches of a gradient, which they take in. Gradients bring the batches of all of them.
        Raises DdlsimError for several models beside others, because their statistics cannot be mixed.
        """
        models = [value.statistics for value in inputs if value.statistics is not None]
        batches = _batches(inputs)
        if not models:
            return self.apply(function, *inputs, batch_statistics=batches)
        if len(models) == len(inputs):
            return self.apply(function, *inputs, statistics=self.apply(cast("Callable[..., Array]", function), *models))
        if len(models) == 1:
            return self.apply(function, *inputs, statistics=self.absorb(models[0], batches))
        what = f"{len(models)} models and {len(inputs) - len(models)} other values are mixed at once"
        why = "their running statistics (batch normalisation) cannot follow"
        raise DdlsimError(f"{what}: {why}; mix the models first, then add the others")

    def absorb(self, statistics: Value[Array], batches: Sequence[Value[BatchStatistics]]) -> Value[Array]:
        """Return running statistics that have taken in those of batches, see :func:`absorbed`."""
        return self.apply(absorbed, statistics, *batches) if batches else statistics

    def register(self, value: Value[U]) -> Value[U]:
        """Number a new value."""
        number = self.n_values
        self.n_values += 1
        if number < self.replay.n_values and number not in self.replay.pending:
            value._compute, value._inputs = None, ()
            value._result = self.replay.results.get(number)
        self._alive[number] = value
        return value

    def scalar(self, compute: Callable[[], float]) -> float:
        """Return a number that decides how the run goes on; a replay knows it already."""
        n = len(self.scalars)
        known = n < len(self.replay.scalars)
        self.scalars.append(self.replay.scalars[n] if known else compute())
        return self.scalars[n]

    def snapshot(self) -> Replay:
        """Return what a later run needs to know to go on from here."""
        alive = list(self._alive.values())
        results = {v.number: v._result for v in alive if not v.pending}
        pending = frozenset(v.number for v in alive if v.pending)
        return Replay(self.n_values, results, pending, tuple(self.scalars))


def weighted_sum(plane: Plane, weights: Sequence[float], values: Sequence[Value[Array]]) -> Value[Array]:
    """Return sum_j weights[j] * values[j] of models, summed in float64 in the order given and rounded once."""

    def add(*arrays: Array) -> Array:
        total = weights[0] * arrays[0].astype(np.float64)
        for weight, array in zip(weights[1:], arrays[1:], strict=True):
            total += weight * array
        return total.astype(arrays[0].dtype)

    return plane.mix(add, *values)


class _Nothing(Plane):
    """The plane of a run without data."""

    def apply(self, *inputs: Any, **statistics: Any) -> Any:
        return ABSENT


class _Absent(Value[Array]):
    """What all values of a run without data are."""

    __slots__ = ()

    def read(self) -> Array:
        what = "training = None: the run has sizes and times only, but something asks for values"
        raise ConfigError(f"{what}; give it data with training=ddlsim.Training(data='digits', ...)")


ABSENT = _Absent(_Nothing(), -1, None, ())
