"""How much communication that runs beside it takes away from compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ddlsim.arguments import checked, number

Slower = Annotated[float, number(1.0, hint=" (1.2: a fifth longer; 1: none)")]


@checked
@dataclass(frozen=True)
class OverlapSlowdown:
    """How many times as long a device computes while it takes part in communication.

    inside   beside exchanges that stay inside a machine
    between  beside those that leave it; while both run, the larger one counts

    The kernels of a GPU's communication library (NCCL: a block per channel) take multiprocessors and memory bandwidth
    from those that compute, from their start to their end, the time included in which they wait for others; threads
    that drive a CPU's communication (Intel's MLSL: endpoints) take cores. Measure two numbers: the time of a pass
    alone, and beside an all-reduce of the same devices that outlasts it; their ratio is the factor. On four GPUs of
    NVIDIA and AMD Lee et al. (Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep
    Learning, 2025) find 1.19 on average.
    """

    inside: Slower = 1.0
    between: Slower = 1.0


#: beside the kernels of a communication library on GPUs, on average (Lee et al. 2025)
BESIDE_KERNELS = OverlapSlowdown(1.19, 1.19)
#: nothing is taken away
NO_SLOWDOWN = OverlapSlowdown()
