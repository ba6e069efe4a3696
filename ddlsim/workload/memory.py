"""How much device memory a training step needs, and whether it is there."""

from __future__ import annotations

import math

from ddlsim.workload.devices import Device
from ddlsim.workload.model import Model
from ddlsim.workload.precision import ELEMENT_NBYTES, FP32_NBYTES
from ddlsim.workload.stage import Stage
from ddlsim.workload.tables import held_params

__all__ = ["activation_nbytes", "check_memory", "training_nbytes"]

#: Bytes per parameter. Full precision: weight, gradient, momentum of 4 bytes. Mixed precision (Micikevicius
#: et al. 2018, arXiv:1710.03740): fp16 weight and gradient, fp32 master weight and momentum: 2 + 2 + 4 + 4.
PARAMETER_NBYTES = 12.0
#: those of them that are the optimizer's state, by the bytes of an element of the weights
STATE_NBYTES = {4.0: 4.0, 2.0: 8.0}


def training_nbytes(model: Model, batch_size: int, precision: str = "fp32", n_workers: int = 1) -> float:
    """Return the bytes of parameters, gradients, momentum and the stored activations of `batch_size` samples.

    Embedding tables, whose gradients are not exchanged, are shared out over the workers: those of the device that holds
    most of them count (:mod:`ddlsim.workload.tables`). Everything else (of a part of a model, where it is one) is on
    the device.

    Every layer that does not work in place keeps its output until the backward pass. Convolution workspaces,
    the framework's own memory and the allocator's waste are not counted (0.5 to 2 GB on a GPU).
    """
    return PARAMETER_NBYTES * held_params(model, n_workers) + activation_nbytes(model, precision) * batch_size


def activation_nbytes(model: Model, precision: str) -> float:
    """Return the bytes of a sample's stored activations."""
    return model.activation_nbytes * ELEMENT_NBYTES[precision] / FP32_NBYTES


def check_memory(stage: Stage, device: Device, n_workers: int = 1, activations: float | None = None) -> str | None:
    """Return None if what one of `n_workers` holds fits `device`'s memory, else a line with the numbers and the
    largest batch.

    activations  bytes that it holds of them at most, where a plan says so
    """
    workload = stage.workload
    model, precision = workload.model, workload.precision
    elsewhere = (1.0 - stage.state) * STATE_NBYTES[ELEMENT_NBYTES[precision]] * held_params(model, n_workers)
    fixed = training_nbytes(model, 0, precision, n_workers) - elsewhere
    if activations is None:
        activations = stage.batches * workload.batch_size * activation_nbytes(model, precision)
    needed = fixed + activations
    if needed <= device.memory_nbytes:
        return None
    per_sample = activations / workload.batch_size
    largest = math.floor((device.memory_nbytes - fixed) / per_sample) if per_sample > 0.0 else 0
    remedy = f"the largest batch that fits is {largest}" if largest > 0 else "no batch fits"
    need, have = needed / 1e9, device.memory_nbytes / 1e9
    apart = held_params(model, n_workers) < model.n_params
    shared = f" with its tables shared out over {n_workers} workers" if apart else ""
    several = f"{stage.batches} x " if stage.batches > 1 else ""
    return (
        f"{model.name} with batch size {several}{workload.batch_size} in {precision} needs about "
        f"{need:.1f} GB{shared} but {device.name} has {have:.1f} GB; {remedy}"
    )
