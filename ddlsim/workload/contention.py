"""Slowdown of computation by concurrent communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ddlsim.arguments import checked, number

Slower = Annotated[float, number(1.0, hint=" (1.2: 20 % longer; 1: no slowdown)")]


@checked
@dataclass(frozen=True)
class OverlapSlowdown:
    """Factors by which computation takes longer while the device communicates.

    inside   factor while the device communicates inside a machine; 1: no slowdown
    between  factor while the device communicates between machines; 1: no slowdown

    If both kinds of communication are active, the larger factor applies.

    On GPUs, the kernels of a communication library occupy multiprocessors (one block per NCCL channel) and memory
    bandwidth from start to end, even while they wait for other ranks. On CPUs, communication threads occupy cores (the
    endpoints of Intel's MLSL). To measure a factor, time a pass on its own, and again during an all-reduce on the same
    devices that outlasts it; the factor is the second time divided by the first. Lee et al. (Characterizing
    Compute-Communication Overlap in GPU-Accelerated Distributed Deep Learning, 2025) measured an average factor of 1.19
    on four GPUs from NVIDIA and AMD.
    """

    inside: Slower = 1.0
    between: Slower = 1.0


#: beside the kernels of a communication library on GPUs, on average (Lee et al. 2025)
BESIDE_KERNELS = OverlapSlowdown(1.19, 1.19)
#: nothing is taken away
NO_SLOWDOWN = OverlapSlowdown()
