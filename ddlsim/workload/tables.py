"""Embedding tables, model-parallel: how much of them a device holds, and the exchange that runs leave out.

Data-parallel workers share out the tables of a recommendation model, each table whole on one device (Naumov et al.
2019, arXiv:1906.00091, section 4). In the forward pass the holder of a table sends every other worker the vectors that
it has looked up for that worker's samples; in the backward pass it gets their gradients back: two all-to-alls a step.
They are no part of a gradient exchange, and nothing else simulates them.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from ddlsim.workload.model import Model
from ddlsim.workload.precision import ELEMENT_NBYTES, FP32_NBYTES

if TYPE_CHECKING:  # compute needs this module
    from ddlsim.workload.compute import Workload


def held_params(model: Model, n_workers: int) -> int:
    """Return the parameters on the fullest device: all but the tables, and its share of these.

    Tables go, the largest first, to the device that holds least so far (Graham 1969: at most 4/3 of the best split).
    """
    held = [0] * n_workers
    tables = [n for layer in model.layers if layer.model_parallel for _, n in layer.tensors]
    for elements in sorted(tables, reverse=True):
        heapq.heapreplace(held, held[0] + elements)
    return model.n_params - sum(tables) + max(held)


def table_exchange_nbytes(model: Model, batch_size: int, n_workers: int, precision: str = "fp32") -> float:
    """Return the bytes that a worker sends to the others in one all-to-all of what its tables answer, on average.

    N workers need B * width numbers each, and (N - 1) / N of them lie with others.
    """
    width = sum(layer.activation_nbytes / FP32_NBYTES for layer in model.layers if layer.model_parallel)
    return ELEMENT_NBYTES[precision] * width * batch_size * (n_workers - 1) / n_workers


def exchange_left_out(workload: Workload, n_workers: int, accumulation: int = 1) -> str | None:
    """Return what to say of a run of `n_workers` whose tables' exchange is not simulated, None if it has none."""
    model = workload.model
    nbytes = accumulation * table_exchange_nbytes(model, workload.batch_size, n_workers, workload.precision)
    if nbytes == 0.0:
        return None
    layers = [layer for layer in model.layers if layer.model_parallel]
    names, n_tables = ", ".join(layer.name for layer in layers), sum(len(layer.tensors) for layer in layers)
    return (
        f"{model.name}: the exchange of {names} is not simulated, so steps come out too short: with its {n_tables} "
        f"tables shared out over {n_workers} workers, each would send some {nbytes / 1e6:.3g} MB of looked-up vectors "
        "to the others in the forward pass and as much of their gradients in the backward pass of a step (all-to-all), "
        f"beside {workload.gradient_nbytes / 1e6:.3g} MB of gradients that are simulated"
    )
