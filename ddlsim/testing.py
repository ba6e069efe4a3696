"""Contract tests for custom parts. ddlsim's own tests run them on the bundled parts.

Each raises :class:`~ddlsim.errors.ConfigError` in one line with the rule that is violated. For collectives, use
:func:`ddlsim.collectives.check`. The buckets of an overlap are checked whenever they are built.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Count, checked, integer
from ddlsim.compression import TopK, average, exchange, settle
from ddlsim.compression.contract import AnyCompressor, full
from ddlsim.compression.exchange import title
from ddlsim.errors import ConfigError
from ddlsim.learning import Training
from ddlsim.nn.layer_rules import held_to_rules
from ddlsim.nn.layer_rules import need as _need
from ddlsim.nn.layer_rules import same as _same
from ddlsim.optim import Optimizer
from ddlsim.run.result import Result
from ddlsim.run.simulate import simulate
from ddlsim.runtime import Fabric, Strategy
from ddlsim.strategies import AllReduce, contract
from ddlsim.streams import stream
from ddlsim.workload.jitter import Lognormal

Array = npt.NDArray[Any]
#: cluster for runs of a strategy: eight machines on a switch
CLUSTER = "office-1gbe"


def _arrays(value: object) -> list[Array]:
    """Return every array in a payload or a state, in order."""
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, Mapping):
        value = tuple(value.values())
    elif dataclasses.is_dataclass(value):
        value = tuple(getattr(value, field.name) for field in dataclasses.fields(value))
    return [array for part in value for array in _arrays(part)] if isinstance(value, tuple | list) else []


@checked
def check_compressor(compressor: object, *, n: Count = 203, steps: Count = 20, agreed: Sequence[str] = ()) -> None:
    """Check that a compressor fulfils its contract on vectors of `n` elements.

    Raises ConfigError unless all of these hold:

    - Decoding needs only the payload and returns a finite float32 vector (n,).
    - Arguments are not modified.
    - In each of `steps` exchanges, the reported bytes equal those of the buffers, and the expected ones.
    - Equal random streams give equal bytes.
    - Gradients that cannot be compressed (NaN, float64) raise an error.

    agreed   fields of the payload that all workers know in advance and that are not sent
    """
    coder = cast(AnyCompressor, compressor)
    owner, vector, state = title(coder), _gradient(n, 1), coder.init(n, 7)
    before = [array.copy() for array in (vector, *_arrays(state))]
    sent, after = _messages(coder, vector, state, 0)
    _need(_same(before, [vector, *_arrays(state)]), owner, "encode modifies the gradient or the state; work on copies")
    shared = any(np.shares_memory(array, vector) for array in (*_arrays(sent[-1]), *_arrays(after)))
    _need(not shared, owner, "a payload or state is a view of the gradient, which will change; copy the values instead")
    decoded = coder.decode(sent[-1])
    right = decoded.shape == (n,) and decoded.dtype == np.float32 and bool(np.isfinite(decoded).all())
    _need(right, owner, f"decode returns {decoded.dtype}{decoded.shape}; must return a finite float32 vector ({n},)")
    elsewhere = dataclasses.replace(cast(Any, coder)) if dataclasses.is_dataclass(coder) else coder  # a new instance
    received = copy.deepcopy(sent[-1])
    _need(_same([elsewhere.decode(received)], [decoded]), owner, "decode depends on more than the payload")
    for step in range(steps):
        sent, state = _messages(coder, _gradient(n, step), state, step)
        for payload in sent:
            names = [field.name for field in dataclasses.fields(payload) if field.name not in agreed]
            size = sum(array.nbytes for name in names for array in _arrays(getattr(payload, name)))
            _need(
                payload.nbytes == size,
                owner,
                f"nbytes of a payload is {payload.nbytes}, but its buffers have {size} bytes",
            )
        expected, sizes = coder.expected_nbytes(n, step), tuple(payload.nbytes for payload in sent)
        rule = f"expected_nbytes({n}, {step}) = {expected}, but {sizes} bytes are sent; return None if values decide"
        _need(expected is None or tuple(expected) == sizes, owner, rule)
    _need(_same(_exchanged(coder, n), _exchanged(coder, n)), owner, "uses random numbers that do not come from its rng")
    broken = _gradient(n, 1)
    broken[n // 2] = np.nan
    for wrong, what in ((broken, "a NaN"), (vector.astype(np.float64), "a float64 vector")):
        _need(_refused(coder, wrong, n), owner, f"encode accepts {what}; call check_gradient(gradient) first")


def _gradient(n: int, seed: int) -> npt.NDArray[np.float32]:
    return stream(seed, 0, "gradient").standard_normal(n).astype(np.float32)


def _refused(coder: AnyCompressor, vector: Array, n: int) -> bool:
    try:
        coder.encode(vector, coder.init(n, 7), stream(1, 0, "encode"))
    except ConfigError:
        return True
    return False


def _messages(coder: AnyCompressor, vector: Array, state: object, step: int) -> tuple[list[Any], object]:
    """Return all payloads that one worker sends for `vector`, and its next state."""
    payload, state = coder.encode(vector, state, stream(1, 0, f"encode {step}"))
    sent = [payload]
    if coder.traits.n_rounds == 2:
        payload, state = full(coder).follow_up(average(coder, sent), state)
        sent.append(payload)
    return sent, settle(coder, payload, coder.decode(payload), state)


def _exchanged(coder: AnyCompressor, n: int) -> list[Array]:
    """Return the vectors that three workers hold after three exchanges."""
    states = [coder.init(n, 7) for _ in range(3)]
    for step in range(3):
        rngs = [stream(5, rank, f"encode {step}") for rank in range(3)]
        done = exchange(coder, [_gradient(n, 10 * step + rank) for rank in range(3)], states, rngs)
        states = done.states
    return [done.mean, *(array for state in states for array in _arrays(state))]


@checked
def check_optimizer(rule: object, *, n: Count = 6) -> None:
    """Check that an update rule is pure, preserves shape and type, and counts its updates.

    Raises ConfigError otherwise.
    """
    optimizer, owner = cast(Optimizer, rule), type(rule).__name__
    for dtype in (np.float32, np.float64):
        rng = np.random.default_rng(1)
        params: Any = rng.normal(size=n).astype(dtype)
        state = optimizer.init(params)
        still, _ = optimizer.update(params, np.ones(n, dtype), state, 0.0)
        _need(
            np.array_equal(still, params),
            owner,
            "the first update changes the parameters although the learning rate is 0",
        )
        for step in range(1, 4):
            gradient: Any = rng.normal(size=n).astype(dtype)
            before = [array.copy() for array in (params, gradient, *state.moments)]
            after, new = optimizer.update(params, gradient, state, 0.1)
            kept = _same(before, [params, gradient, *state.moments])
            _need(kept, owner, "modifies an argument in place; return new arrays")
            again, _ = optimizer.update(params, gradient, state, 0.1)
            _need(_same([after], [again]), owner, "two updates with the same arguments differ")
            for name, array in (("parameters", after), *((f"moments[{i}]", m) for i, m in enumerate(new.moments))):
                rule_ = f"{name} of type {params.dtype} become {array.dtype}{array.shape}; preserve type and shape"
                _need(array.dtype == params.dtype and array.shape == params.shape, owner, rule_)
            _need(new.n_updates == step, owner, f"n_updates is {new.n_updates} after {step} updates")
            params, state = after, new


@checked
def check_layer(layer: object, in_shape: tuple[Count, ...], *, n: Count = 3) -> None:
    """Check that a layer fulfils the contract of custom layers.

    Raises ConfigError unless all of these hold:

    - Its gradients agree with central differences of its outputs in float64: per sample, or for a whole batch in
      training if the layer has buffers.
    - Its shapes and tensors are those of its cost.
    - Its random numbers come from `rng` only.

    :func:`ddlsim.simulate` performs the same check before it trains such a layer.
    """
    held_to_rules(layer, in_shape, n)


@checked
def check_strategy(
    strategy: object,
    *,
    n_workers: Annotated[int, integer(2, 8)] = 4,
    alone: bool = True,
    compresses: bool = True,
    decides: bool = False,
) -> None:
    """Check that a strategy fulfils the contract of all strategies, with half a second of training runs.

    Raises ConfigError unless all of these hold:

    - Runs with the same seed are equal, runs with different seeds are not.
    - It promises no more updates than its steps make.
    - It runs on a part of the cluster and, if it has collectives, with another fabric.

    Every run also checks that bytes, seconds and updates are consistent.

    alone       whether training with one worker equals plain SGD bit for bit
    compresses  whether it supports compression
    decides     whether its control flow depends on values, so that it must train in all of these runs
    """
    rule, owner, updates = cast(Strategy, strategy), type(strategy).__name__, contract.of(strategy).updates

    def learned(rule: Strategy, n: int, seed: int) -> Result:
        training = Training("digits", rate=0.1, updates=30, sharding="shared", evaluate_every=10)
        return simulate(CLUSTER, "digits-cnn", rule, 16, n, training=training, jitter=Lognormal(0.3), seed=seed)

    def timed(**more: Any) -> Result:
        model, training = "lenet5", None
        if decides:
            model = "digits-cnn"
            training = Training("digits", updates=updates(4, n_workers), sharding="shared")
        more = {"workers": n_workers, "steps": 3, **more}
        return simulate(CLUSTER, model, rule, 8, warmup=1, training=training, **more)

    first, again, other = (learned(rule, n_workers, seed) for seed in (1, 1, 2))
    same = first.history.equals(again.history) and _same([first.params], [again.params])
    _need(same, owner, "two runs with the same seed differ; draw from ddlsim's streams")
    _need(not first.history.equals(other.history), owner, "two runs with different seeds are equal")
    samples = [n for _, n in timed().recorder.updates]
    said, most = f"updates(4, {n_workers}) is {updates(4, n_workers)}", 4 * 8 * n_workers
    before_last = f"but the updates before the last use {sum(samples[:-1])} samples"
    _need(sum(samples[:-1]) < most, owner, f"{said}, {before_last}; 4 steps of {n_workers} workers have only {most}")
    if alone:
        plain, here = (learned(algorithm, 1, 1).params for algorithm in (AllReduce(), rule))
        same = plain is not None and here is not None and _same([plain], [here])
        _need(same, owner, "with one worker, it differs from plain SGD (set alone=False if it is supposed to differ)")
    if compresses:
        timed(compression=TopK(0.1))
    timed(workers=list(range(8 - n_workers, 8)))
    if contract.of(strategy).collectives().fabric == Fabric():
        timed(fabric=Fabric("binomial_tree", "given"))
