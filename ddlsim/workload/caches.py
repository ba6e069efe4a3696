"""Caches of samples on the machines, and what share of its samples a machine finds in them.

All of the formulas are for epochs in each of which every sample is read once, in a new random order, by one of N equal
machines drawn at random, and for data sets of many samples. x is the share of the data set for which one machine has
room, q = 1 - 1/N.

*minio* (Mohan et al. 2021, CoorDL: a cache that never evicts): a machine keeps the first samples that it reads, as far
as there is room. In epoch e it finds min(x, 1 - q^(e-1)): what it had room for and has seen before.

*lru*: a sample that a machine read last j epochs ago (with probability q^(j-1) / N), at a share v of that epoch, and
now reads again at a share u of this one, is still there if no more than x other samples came in between:
1 - (1 - (1-v)/N) q^(j-1) (1 - u/N) <= x. With a = 1 - (1-v)/N and b = 1 - u/N uniform on [q, 1], that is the chance of
a b >= c for c = (1-x) / q^(j-1). On one machine only j = 1 counts, and it is x + (1-x) ln(1-x).
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from ddlsim.arguments import Bandwidth, Bytes, Count, Index, Share, checked, one_of
from ddlsim.errors import ConfigError
from ddlsim.units import si

Policy = Annotated[str, one_of("minio", "lru")]


@checked
@dataclass(frozen=True)
class Cache:
    """A cache of samples on every machine.

    policy       "minio": keeps what came first and never evicts (CoorDL's MinIO cache); "lru": evicts what has not been
                 read for longest, as a page cache does
    size         bytes on each machine
    on           "ram", or "ssd", which takes its time to read
    read         bytes/s at which a machine's SSD reads; of "ssd" only
    holds        "encoded" samples, as they are stored, or "decoded" ones, which need no preparation (Shi et al.)
    partitioned  machines keep different samples, and get those that they miss from the memory of the others over the
                 network (CoorDL's partitioned cache)

    Raises ConfigError for values that make no sense, or not together.
    """

    policy: Policy
    size: Bytes
    _: KW_ONLY
    on: Annotated[str, one_of("ram", "ssd")] = "ram"
    read: Bandwidth | None = None
    holds: Annotated[str, one_of("encoded", "decoded")] = "encoded"
    partitioned: bool = False

    def __post_init__(self) -> None:
        if self.on == "ssd" and self.read is None:
            raise ConfigError("Cache: on = 'ssd', but nothing says how fast it reads; give read='2 GB/s'")
        if self.on == "ram" and self.read is not None:
            raise ConfigError(f"Cache: read = {self.read!r} is of SSDs; give on='ssd', or leave it out")
        if self.partitioned and (self.policy != "minio" or self.on != "ram"):
            raise ConfigError("Cache: partitioned goes with policy = 'minio' and on = 'ram', as in CoorDL; change them")

    @property
    def nbytes(self) -> float:
        """Bytes on each machine."""
        return si(self.size, "bytes")


@checked
def hit_rate(
    policy: Annotated[str, one_of("minio", "lru")], room: Share, machines: Count = 1, epoch: Index = 0
) -> float:
    """Return the share of its samples that a machine finds in its cache, 0 to 1.

    policy    as of :class:`Cache`
    room      share of the data set for which one machine has room
    machines  that share the samples of an epoch among them, drawn anew in each
    epoch     from 1; 0: one so late that caches are as full as they get

    The formulas are at the top of this module. Raises ConfigError for values out of range.
    """
    others = 1.0 - 1.0 / machines
    if room == 1.0 and epoch == 0:
        return 1.0
    if policy == "minio":
        return room if epoch == 0 else min(room, 1.0 - others ** (epoch - 1))
    total, passed, j = 0.0, 1.0, 1
    while (epoch == 0 or j < epoch) and passed > 1.0 - room:  # after that too much has come in between
        total += passed / machines * _both(others, (1.0 - room) / passed, machines)
        passed *= others
        j += 1
    return total


def _both(least: float, bound: float, machines: int) -> float:
    """Return the chance that a b >= `bound` for a and b uniform on [`least`, 1], whose length is 1/`machines`."""
    if bound <= least * least:
        return 1.0
    if bound >= least:  # a from the bound on
        area = 1.0 - bound + (bound * math.log(bound) if bound > 0.0 else 0.0)
    else:  # below bound / least only some b will do, above it all
        edge = bound / least
        area = edge - least - bound * math.log(edge / least) + (1.0 - edge) * (1.0 - least)
    return area * machines * machines


# ---------------------------------------------------------------- as others have built them


@checked
def minio_cache(size: Bytes) -> Cache:
    """Return CoorDL's MinIO cache of `size` bytes on each machine (Mohan et al., Analyzing and mitigating data stalls
    in DNN training, VLDB 2021, doi:10.14778/3446095.3446100). Raises ConfigError for a size that makes no sense."""
    return Cache("minio", size)


@checked
def partitioned_cache(size: Bytes) -> Cache:
    """Return CoorDL's partitioned cache of `size` bytes on each machine: what one misses comes from the memory of
    another (Mohan et al. 2021). Raises ConfigError for a size that makes no sense."""
    return Cache("minio", size, partitioned=True)


@checked
def multi_level_cache(ram: Bytes, ssd: Bytes, read: Bandwidth = "2 GB/s") -> tuple[Cache, Cache]:
    """Return the caches of Shi et al., Towards scalable distributed training of deep learning on public cloud clusters
    (MLSys 2021, arXiv 2010.10458): the first epoch copies files from remote storage to an SSD, and decoded samples stay
    in memory.

    ram, ssd  bytes on each machine
    read      bytes/s of the SSD

    Raises ConfigError for values that make no sense.
    """
    return Cache("minio", ram, holds="decoded"), Cache("minio", ssd, on="ssd", read=read)
