"""How good a model is on samples that it has not learned from."""

from __future__ import annotations

import math

import numpy as np

from ddlsim.data.dataset import DataSet, Floats, Ints
from ddlsim.errors import DdlsimError
from ddlsim.learning.values import Array
from ddlsim.nn.network import Network

#: samples that are evaluated at once
CHUNK = 1024


class DivergedError(DdlsimError):
    """A loss is NaN or infinite; the message says when and at which worker."""


def evaluation(network: Network, data: DataSet, params: Array, state: Array | None) -> tuple[float, float]:
    """Return (mean loss, accuracy) of the samples, or of tokens if each has a label. The accuracy of a regression is
    NaN.

    params  (n_params,)
    state   (n_state,) the running statistics that belong to them; None where the network normalises no batches

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
    """Return what the network should answer: the classes, or for the squared error the targets, which are 1 for the
    class of a sample that has one, else 0."""
    if network.loss == "cross_entropy" or labels.dtype.kind == "f":
        return labels.reshape(len(labels), -1) if labels.dtype.kind == "f" else labels
    return np.eye(network.n_outputs, dtype=network.dtype)[labels]


def _loss(network: Network, outputs: Array, labels: Ints | Floats) -> float:
    """Return the sum of the losses of `outputs`, a row for each label."""
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
                f"diverged: {slot.name} of the model is negative: its moving average overshoots, as that of a center "
                "does which elastic springs move by alpha N > 1; move it by less"
            )
