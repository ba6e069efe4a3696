"""A model whose gradients are computed: flat parameters in, loss and flat gradient out.

>>> from ddlsim.nn.network import build_network
>>> network = build_network("digits-cnn", seed=0)
>>> loss, gradient = network.loss_and_gradient(network.initial_params, images, labels)   # doctest: +SKIP
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Seed, by, checked
from ddlsim.errors import ConfigError, shown
from ddlsim.nn.build import Builder
from ddlsim.nn.layer_rules import held_to_rules
from ddlsim.nn.layers import Chain, Pure
from ddlsim.nn.loss import Loss, check_labels, classes, each_label, loss_of
from ddlsim.nn.parameters import initial_values, kept_shares
from ddlsim.nn.pass_state import Array, Buffers, Pass, Slot
from ddlsim.workload.model import Model, ModelLike, load_model

#: samples that go through the network at once: their activations should fit the second-level cache, and
#: memory stays bounded whatever the batch. Batch normalisation needs the whole batch together.
_CHUNK = 64


_Numbers = TypeVar("_Numbers", bound=npt.NDArray[np.generic])


@dataclass(frozen=True, eq=False)
class Network:
    """A network that runs; made by :func:`build_network`.

    ``slots`` name the tensors in the flat vector of ``n_params`` elements, ``state_slots`` those in the vector
    of running statistics. A network keeps working arrays: give each thread its own.
    """

    model: Model
    loss: Loss
    dtype: np.dtype[np.floating]
    slots: tuple[Slot, ...]
    state_slots: tuple[Slot, ...]
    initial_params: Array  # (n_params,), read-only
    initial_state: Array  # running means 0 and variances 1, read-only
    state_keep: Array  # (n_state,), 1 - momentum: how much of the running statistics a batch leaves, read-only
    vocabulary: int  # samples are whole numbers below it; 0: they are any numbers
    ids: tuple[int, ...]  # below which the last numbers of a sample are whole
    n_streams: int  # layers of users that draw random numbers, each from a stream of its own
    _chain: Chain
    _buffers: Buffers

    @property
    def n_params(self) -> int:
        """Elements of the flat parameter vector."""
        return len(self.initial_params)

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of what the network returns for one sample: (classes,), or (tokens, classes)."""
        return self.model.layers[-1].out_shape

    @property
    def n_outputs(self) -> int:
        """Numbers that the network returns for one sample."""
        return math.prod(self.out_shape)

    @property
    def n_classes(self) -> int:
        """Among how many classes the network chooses, for a sample or for each of its tokens."""
        return classes(self.out_shape)

    def random_batch(self, n: int, rng: np.random.Generator) -> tuple[Array, npt.NDArray[np.int64]]:
        """Return `n` samples without a meaning and their classes: standard normal numbers, tokens, ids."""
        shape = (n, *self.model.input_shape)
        if self.vocabulary:
            x = rng.integers(self.vocabulary, size=shape).astype(self.dtype)
        else:
            x = rng.standard_normal(shape, self.dtype)
        for place, rows in enumerate(reversed(self.ids), start=1):
            x[:, -place] = rng.integers(rows, size=n)
        return x, rng.integers(self.n_classes, size=(n, *each_label(self.out_shape)))

    def check_layers(self) -> None:
        """Raise ConfigError for what :func:`ddlsim.testing.check_layer` finds in the layers that users have written."""
        for layer in self._chain.all():
            if isinstance(layer, Pure):
                try:
                    held_to_rules(layer.rule, layer.in_shape)
                except ConfigError as error:
                    raise ConfigError(f"model {self.model.name!r}: layer {layer.name!r}: {error}") from None

    def views(self, params: Array) -> dict[str, Array]:
        """Return the named tensors of a flat vector (parameters or gradient) as views, in order."""
        return {slot.name: slot.of(params) for slot in self.slots}

    def loss_and_gradient(
        self,
        params: Array,
        x: npt.ArrayLike,
        labels: npt.ArrayLike,
        rng: np.random.Generator | None = None,
        state: Array | None = None,
    ) -> tuple[float, Array]:
        """Return the mean loss over the batch and its gradient, a new vector of shape (n_params,).

        params  (n_params,)              never changed
        x       (n, *model.input_shape)  samples
        labels  (n,) classes; (n, tokens) where outputs are (tokens, classes); (n, n_outputs) targets for the mean
                squared error
        rng     draws dropout masks, and spawns the streams of users' layers; needed if the network has any of these
        state   (n_state,) running statistics of batch normalisation, updated in place where given

        Raises ConfigError for arrays that do not fit.
        """
        self._check_vector("params", params, self.n_params)
        if state is not None:
            self._check_vector("state", state, len(self.initial_state))
        batch = self._samples(x)
        n = len(batch)
        wanted = _writable(check_labels(self.loss, labels, n, self.out_shape, self.dtype))
        gradient, loss, params = np.zeros(self.n_params, self.dtype), 0.0, self._own(params)
        for part in self._parts(n, whole=bool(self.state_slots)):
            streams = () if rng is None or not self.n_streams else rng.spawn(self.n_streams)
            run = Pass(params, len(batch[part]), True, gradient, state, rng, streams)
            outputs = self._chain.forward(batch[part], run)
            share, slope = loss_of(self.loss, outputs, wanted[part], n, self._buffers)
            self._chain.backward(slope, run)
            loss += share
        return loss, gradient

    def predict(self, params: Array, x: npt.ArrayLike, state: Array | None = None) -> Array:
        """Return the outputs (logits) for samples `x` (n, *input_shape), a new array of shape (n, n_outputs).

        A network with batch normalisation needs `state`, the running statistics. Dropout does nothing here.
        """
        self._check_vector("params", params, self.n_params)
        if state is None and self.state_slots:
            raise ConfigError("state = None: the network normalises by running statistics; pass them as state")
        if state is not None:
            self._check_vector("state", state, len(self.initial_state))
        batch = self._samples(x)
        outputs, params = np.empty((len(batch), self.n_outputs), self.dtype), self._own(params)
        for part in self._parts(len(batch), whole=False):
            run = Pass(params, len(batch[part]), False, state=state)
            outputs[part] = self._chain.forward(batch[part], run)
        return outputs

    def _samples(self, x: npt.ArrayLike) -> Array:
        array = np.ascontiguousarray(x, self.dtype)
        if array.ndim == 0 or array.shape[1:] != self.model.input_shape or not len(array):
            raise ConfigError(
                f"samples of shape {array.shape} do not fit model {self.model.name!r}; "
                f"give (n, {', '.join(map(str, self.model.input_shape))}) with n at least 1"
            )
        return _writable(array.reshape(len(array), -1))

    def _own(self, params: Array) -> Array:
        """Return a copy of `params`: one type for compiled code, whatever the caller's array allows."""
        copy = self._buffers.get("params", 1, self.n_params).reshape(-1)
        copy[:] = params
        return copy

    def _check_vector(self, name: str, vector: Array, size: int) -> None:
        if vector.shape != (size,) or vector.dtype != self.dtype:
            raise ConfigError(
                f"{name} of shape {vector.shape} and type {vector.dtype} do not fit model {self.model.name!r}; "
                f"give ({size},) of {self.dtype}"
            )

    def _parts(self, n: int, *, whole: bool) -> Iterator[slice]:
        step = n if whole else _CHUNK
        return (slice(start, min(start + step, n)) for start in range(0, n, step))


def _float_type(value: Any, where: str) -> np.dtype[np.floating]:
    try:
        kind = np.dtype(value) if isinstance(value, str | type | np.dtype) else None
    except (TypeError, ValueError):
        kind = None
    for known in (np.dtype(np.float32), np.dtype(np.float64)):
        if kind is not None and kind == known:
            return known
    raise ConfigError(f"{where} = {shown(value)}: networks compute in float32 or float64; choose one of them")


@checked
def build_network(
    model: ModelLike,
    seed: Seed,
    dtype: Annotated[npt.DTypeLike, by(_float_type)] = np.float32,
    loss: Loss = "cross_entropy",
) -> Network:
    """Return the network of a model (name, file or :class:`Model`) with parameters drawn for `seed`.

    Weights that feed ReLU or GELU start normal with variance 2 / fan_in (He et al. 2015, arXiv:1502.01852,
    equation 10), others uniform with variance 2 / (fan_in + fan_out) (Glorot and Bengio 2010, equation 16);
    biases start at 0. Each tensor has a random stream of its own. Raises ConfigError for a model that cannot
    be trained here, a type other than float32 and float64, and an unknown loss.
    """
    kind = cast("np.dtype[np.floating]", np.dtype(dtype))  # one of the two, see _float_type
    description = load_model(model)
    builder = Builder(description, kind)
    chain = builder.whole()
    return Network(
        description, loss, kind, tuple(p.slot for p in builder.parameters), tuple(p.slot for p in builder.state),
        initial_values(builder.parameters, seed, kind), initial_values(builder.state, seed, kind),
        kept_shares(builder.state, kind), builder.vocabulary, tuple(builder.ids), builder.n_streams, chain,
        Buffers(kind),
    )  # fmt: skip


def _writable(array: _Numbers) -> _Numbers:
    """Return `array`, or a copy if it is read-only, which would be another type for compiled code."""
    return array if array.flags.writeable else array.copy()
