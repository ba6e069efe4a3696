"""Checkpoint intervals, destinations and costs."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from ddlsim.arguments import Bandwidth, Bytes, NotNegative, Positive, checked, quantity
from ddlsim.errors import ConfigError
from ddlsim.units import si


@checked
def young_interval(mtbf: Positive, cost: Positive) -> float:
    """Return Young's optimal checkpoint interval, sqrt(2 C M), in s of work.

    mtbf  M, the mean time between failures of the job, in s
    cost  C, the time in s that training stops for a checkpoint

    This is the first-order optimum (Young 1974, A first order approximation to the optimum checkpoint interval, CACM
    17).
    """
    return math.sqrt(2.0 * cost * mtbf)


@checked
def daly_interval(mtbf: Positive, cost: Positive) -> float:
    """Return Daly's optimal checkpoint interval in s of work, a higher-order refinement of :func:`young_interval`.

    mtbf  mean time between failures of the job, in s
    cost  time in s that training stops for a checkpoint

    With C the cost and M the mtbf, the interval is sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 18M) - C for C < 2M, and M
    otherwise (Daly 2006, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22, eq.
    37).
    """
    if cost >= 2.0 * mtbf:
        return mtbf
    ratio = math.sqrt(cost / (2.0 * mtbf))
    return math.sqrt(2.0 * cost * mtbf) * (1.0 + ratio / 3.0 + ratio * ratio / 9.0) - cost


@checked
def daly_time(work: Positive, interval: Positive, cost: NotNegative, restart: NotNegative, mtbf: Positive) -> float:
    """Return the expected time to complete a training run with failures and checkpoints, in s (Daly 2006, eq. 20).

    work      duration of the training without failures and checkpoints, in s
    interval  work between checkpoints, in s
    cost      time that training stops for a checkpoint, in s
    restart   time to restart after a failure, in s
    mtbf      mean time between failures of the job, in s

    If T, W, C, R and M denote these arguments (in this order), the expected time is M e^(R/M) (e^((W+C)/M) - 1) T/W.
    Returns inf if the result overflows.
    """
    try:
        return mtbf * math.exp(restart / mtbf) * math.expm1((interval + cost) / mtbf) * work / interval
    except OverflowError:
        return math.inf


Time = Annotated[float | str, quantity("time", "30 s", zero=True)]


@checked
@dataclass(frozen=True)
class Checkpoints:
    """Periodic checkpoints of the weights and the optimizer state.

    Training pauses for a checkpoint at the end of the first step that ends after the checkpoint is due.

    every         training time between checkpoints, in s or as a string such as "10 min"
    to            destination of checkpoints sent over the simulated network: "peers" (each machine writes to the memory
                  of the next machine; Wang et al. 2023, Gemini), or the name of a node, such as shared storage
                  (:func:`ddlsim.cluster.with_storage`). None: `bandwidth` or `stall` determines the cost
    bandwidth     combined bandwidth of all machines to and from a storage system outside the simulated network
    stall         time in s that training pauses for each checkpoint; None: computed from `to` or `bandwidth`
    load          time in s to read a checkpoint; None: the same as the time to write it
    nbytes        size of one copy of a checkpoint in bytes; None: the size of the weights and the optimizer state
    asynchronous  whether training pauses only for the copy to host memory, and continues while the checkpoint is
                  written. Until the write has finished, the previous checkpoint is the latest one (Mohan et al. 2021,
                  CheckFreq)

    Raises ConfigError if the cost of a checkpoint is missing or specified twice.
    """

    every: Annotated[float | str, quantity("time", "10 min", infinite=True)]
    _: KW_ONLY
    to: str | None = None
    bandwidth: Bandwidth | None = None
    stall: Time | None = None
    load: Time | None = None
    nbytes: Bytes | None = None
    asynchronous: bool = False

    def __post_init__(self) -> None:
        names = [name for name in ("to", "bandwidth") if getattr(self, name) is not None]
        if len(names) == 2:
            raise ConfigError("Checkpoints: 'to' and 'bandwidth' both determine the write speed; set only one of them")
        if not names and self.stall is None:
            raise ConfigError(
                "Checkpoints: the cost of a checkpoint is unknown; set bandwidth='2 GB/s' for the storage, "
                "to='peers' or a node's name, or stall='30 s'"
            )
        if self.stall is not None and not self.asynchronous and names:
            other = names[0]
            raise ConfigError(
                f"Checkpoints: 'stall' and {other!r} both determine the cost of a checkpoint; set only one of them"
            )
        if not names and self.nbytes is not None:
            raise ConfigError(f"Checkpoints: nbytes = {self.nbytes!r} has no effect with 'stall'; remove one of them")
        if not names and self.asynchronous:
            raise ConfigError("Checkpoints: asynchronous = True: the write time is unknown; set 'bandwidth' or 'to'")

    @property
    def interval(self) -> float:
        """Training time between checkpoints, in s."""
        return si(self.every, "time")


@checked
@dataclass(frozen=True)
class Cost:
    """Cost of a checkpoint: pause of the training, further time to write it, time to read it (s), and bytes."""

    stall: float
    write: float
    load: float
    nbytes: float = 0.0

    def check(self, every: float) -> None:
        """Raise ConfigError if a checkpoint takes longer than the interval `every`."""
        takes = self.stall + self.write
        if takes > every:
            raise ConfigError(
                f"checkpoints: every = {every:.6g} s, but a checkpoint takes {takes:.6g} s; increase the "
                "interval or the bandwidth, or save fewer bytes"
            )


NO_CHECKPOINTS = Cost(0.0, 0.0, 0.0)
