"""Slowdown of computation by concurrent communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ddlsim.arguments import checked, number

Slower = Annotated[float, number(1.0, hint=" (1.2: 20 % longer; 1: no slowdown)")]


@checked
@dataclass(frozen=True)
class OverlapSlowdown:
    """Factors by which a device's compute time grows while the device communicates.

    inside   during communication inside a machine
    between  during communication between machines; if both kinds are active, the larger factor applies

    On GPUs, the kernels of a communication library occupy multiprocessors (one block per NCCL channel) and memory
    bandwidth from start to end, including the time in which they wait for other ranks. On CPUs, communication threads
    occupy cores (the endpoints of Intel's MLSL). To measure a factor, time a pass alone and during an all-reduce that
    outlasts it on the same devices, and divide the second time by the first. Lee et al. (Characterizing
    Compute-Communication Overlap in GPU-Accelerated Distributed Deep Learning, 2025) measured 1.19 on average, on four
    GPUs of NVIDIA and AMD.
    """

    inside: Slower = 1.0
    between: Slower = 1.0


#: beside the kernels of a communication library on GPUs, on average (Lee et al. 2025)
BESIDE_KERNELS = OverlapSlowdown(1.19, 1.19)
#: nothing is taken away
NO_SLOWDOWN = OverlapSlowdown()
