"""How often the state of a training is saved, where, and who waits for it."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from ddlsim.arguments import Bandwidth, Bytes, NotNegative, Positive, checked, quantity
from ddlsim.errors import ConfigError
from ddlsim.units import si


@checked
def young_interval(mtbf: Positive, cost: Positive) -> float:
    """Return sqrt(2 C M), the s of work between checkpoints that cost C s where the job fails every M s.

    The first-order optimum (Young 1974, A first order approximation to the optimum checkpoint interval, CACM 17).
    """
    return math.sqrt(2.0 * cost * mtbf)


@checked
def daly_interval(mtbf: Positive, cost: Positive) -> float:
    """Return the s of work between checkpoints that cost C s where the job fails every M s, of higher order.

    sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 18M) - C for C < 2M, M from there on (Daly 2006, A higher order estimate of
    the optimum checkpoint interval for restart dumps, FGCS 22, eq. 37).
    """
    if cost >= 2.0 * mtbf:
        return mtbf
    ratio = math.sqrt(cost / (2.0 * mtbf))
    return math.sqrt(2.0 * cost * mtbf) * (1.0 + ratio / 3.0 + ratio * ratio / 9.0) - cost


@checked
def daly_time(work: Positive, interval: Positive, cost: NotNegative, restart: NotNegative, mtbf: Positive) -> float:
    """Return the expected s for `work` s of training: M e^(R/M) (e^((W+C)/M) - 1) T/W (Daly 2006, eq. 20).

    W is the `interval` between checkpoints, C the `cost` of one, R the `restart` after a failure, M the job's `mtbf`.
    What no number can hold is inf.
    """
    try:
        return mtbf * math.exp(restart / mtbf) * math.expm1((interval + cost) / mtbf) * work / interval
    except OverflowError:
        return math.inf


Time = Annotated[float | str, quantity("time", "30 s", zero=True)]


@checked
@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints of weights and optimizer state, each made at the end of the first step when it is due.

    every         s of training between two of them, such as "10 min"
    to            where they go, over the simulated network: "peers" (each machine to the memory of the next one; Wang
                  et al. 2023, Gemini), or the name of a node of the cluster, such as that of a storage
                  (:func:`ddlsim.cluster.with_storage`), whose disks all machines share. None: what they cost is said
                  by `bandwidth` or by `stall`
    bandwidth     at which all machines together write to their storage, and read from it
    stall         how long the training stands still for each, instead of what `to` or `bandwidth` give
    load          how long it takes to read one, instead of as long as writing it
    nbytes        what is saved of the model, once, instead of its weights and the optimizer's state
    asynchronous  the training waits only for the copy into the machines' memory, and goes on while it is written;
                  until that has ended, the checkpoint before it is the latest (Mohan et al. 2021, CheckFreq)

    Raises ConfigError for values that make no sense.
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
        given = [name for name in ("to", "bandwidth") if getattr(self, name) is not None]
        if len(given) == 2:
            raise ConfigError("Checkpoints: to and bandwidth both say how fast they are written; give one of them")
        if not given and self.stall is None:
            raise ConfigError(
                "Checkpoints: nothing says what they cost; give bandwidth='2 GB/s' of the storage, to='peers' or a "
                "node's name, or stall='30 s'"
            )
        if self.stall is not None and not self.asynchronous and given:
            raise ConfigError(f"Checkpoints: stall and {given[0]} both say what they cost; give one of them")
        if not given and self.asynchronous:
            raise ConfigError(
                "Checkpoints: asynchronous = True, but nothing says how long writing takes; give bandwidth or to"
            )

    @property
    def interval(self) -> float:
        """s of training between two."""
        return si(self.every, "time")


@checked
@dataclass(frozen=True)
class Cost:
    """What a checkpoint costs: s that the training stands still, s until it is safe then, s to read it; its bytes."""

    stall: float
    write: float
    load: float
    nbytes: float = 0.0

    def check(self, every: float) -> None:
        """Raise ConfigError for a checkpoint that takes longer than there is between two."""
        takes = self.stall + self.write
        if takes > every:
            raise ConfigError(
                f"checkpoints: every = {every:.6g} s, but one takes {takes:.6g} s; make fewer, give them more "
                "bandwidth, or save fewer bytes"
            )


NO_CHECKPOINTS = Cost(0.0, 0.0, 0.0)
