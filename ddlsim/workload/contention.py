"""Slowdown of computation by concurrent communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol

from ddlsim.arguments import checked, number

Slower = Annotated[float, number(1.0, hint=" (1.2: 20 % longer; 1: no slowdown)")]

#: instead of a number of channels: an exchange between devices in the same machine, and one between machines that does
#: not use NCCL's channels (parameter servers)
IN_MACHINE, OTHER = 0, -1


class Contention(Protocol):
    """Slowdown of a device's computation while it communicates."""

    def beside(self, channels: int) -> float:
        """Return the factor by which computation takes longer during an exchange.

        channels  number of channels of NCCL that the exchange uses between machines; or :data:`IN_MACHINE`,
                  :data:`OTHER`
        """


@checked
@dataclass(frozen=True)
class OverlapSlowdown:
    """Factors by which computation takes longer while the device communicates.

    inside   factor while the device communicates with devices in the same machine; 1: no slowdown
    between  factor while the device communicates with other machines; 1: no slowdown

    If both kinds of communication are active, the larger factor applies.

    On GPUs, the kernels of a communication library occupy multiprocessors (one block per NCCL channel) and memory
    bandwidth from start to end, even while they wait for other ranks. On CPUs, communication threads such as the
    endpoints of Intel's MLSL occupy cores. To measure a factor, time a pass on its own, and again while an all-reduce
    runs on the same devices during the entire pass. The factor is the second time divided by the first. Lee et al.
    (Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep Learning, 2025) measured an
    average factor of 1.19 on four GPUs from NVIDIA and AMD.
    """

    inside: Slower = 1.0
    between: Slower = 1.0

    def beside(self, channels: int) -> float:
        """Return the factor during an exchange, regardless of its number of channels (:class:`Contention`)."""
        return self.inside if channels == IN_MACHINE else self.between


#: average during a communication library's kernels on GPUs (Lee et al. 2025)
BESIDE_KERNELS = OverlapSlowdown(1.19, 1.19)
#: no slowdown
NO_SLOWDOWN = OverlapSlowdown()
