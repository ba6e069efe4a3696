"""How much device memory a training step needs, and whether it is there."""

from __future__ import annotations

import math

from ddlsim.workload.devices import Device
from ddlsim.workload.layer_times import ELEMENT_NBYTES
from ddlsim.workload.model import Model

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


def check_memory(model: Model, device: Device, batch_size: int, precision: str = "fp32") -> str | None:
    """Return None if a step fits `device`'s memory, else one line with the numbers and the largest batch."""
    need = training_nbytes(model, batch_size, precision)
    if need <= device.memory_nbytes:
        return None
    fixed = training_nbytes(model, 0, precision)
    largest = math.floor((device.memory_nbytes - fixed) / (training_nbytes(model, 1, precision) - fixed))
    remedy = f"the largest batch that fits is {largest}" if largest > 0 else "no batch fits"
    return (
        f"{model.name} with batch size {batch_size} in {precision} needs about {need / 1e9:.1f} GB "
        f"but {device.name} has {device.memory_nbytes / 1e9:.1f} GB; {remedy}"
    )
