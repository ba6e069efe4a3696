"""How much device memory a training step needs, and whether it is there."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ddlsim.workload.devices import Device
from ddlsim.workload.layer_times import ELEMENT_NBYTES
from ddlsim.workload.model import Model

if TYPE_CHECKING:  # compute needs this module
    from ddlsim.workload.compute import Workload

__all__ = ["check_memory", "training_nbytes"]

#: Bytes per parameter. Full precision: weight, gradient, momentum of 4 bytes. Mixed precision (Micikevicius
#: et al. 2018, arXiv:1710.03740): fp16 weight and gradient, fp32 master weight and momentum: 2 + 2 + 4 + 4.
PARAMETER_NBYTES = 12.0


def training_nbytes(model: Model, batch_size: int, precision: str = "fp32") -> float:
    """Return the bytes of parameters, gradients, momentum and the batch's stored activations.

    Every layer that does not work in place keeps its output until the backward pass. Convolution workspaces,
    the framework's own memory and the allocator's waste are not counted (0.5 to 2 GB on a GPU).
    """
    activation = model.activation_nbytes * ELEMENT_NBYTES[precision] / 4.0
    return PARAMETER_NBYTES * model.n_params + activation * batch_size


def check_memory(workload: Workload, device: Device) -> str | None:
    """Return None if the step fits `device`'s memory, else a line with the numbers and the largest batch."""
    if workload.memory_nbytes <= device.memory_nbytes:
        return None
    fixed = training_nbytes(workload.model, 0, workload.precision)
    per_sample = training_nbytes(workload.model, 1, workload.precision) - fixed
    largest = math.floor((device.memory_nbytes - fixed) / per_sample) if per_sample > 0.0 else 0
    remedy = f"the largest batch that fits is {largest}" if largest > 0 else "no batch fits"
    need, have = workload.memory_nbytes / 1e9, device.memory_nbytes / 1e9
    return (
        f"{workload.model.name} with batch size {workload.batch_size} in {workload.precision} needs about "
        f"{need:.1f} GB but {device.name} has {have:.1f} GB; {remedy}"
    )
