"""Input pipelines: data sets on a storage node, caches, decoding on processors, and prefetched batches.

This module describes input pipelines; :mod:`ddlsim.runtime.feed` simulates them.

The formulas for caches assume large data sets and epochs in each of which a randomly chosen one of N equal machines
reads each sample once, in a new random order. x is the share of the data set that fits on one machine, q = 1 - 1/N.

*minio* (Mohan et al. 2021, CoorDL: a cache that never evicts): a machine keeps the first samples that it reads, until
the cache is full. In epoch e, its hit rate is min(x, 1 - q^(e-1)), limited by capacity and samples seen.

*lru*: a sample that a machine read last j epochs ago (with probability q^(j-1) / N), at a share v of that epoch, and
now reads again at a share u of this one, is still cached if at most x other samples were read in between:
1 - (1 - (1-v)/N) q^(j-1) (1 - u/N) <= x. With a = 1 - (1-v)/N and b = 1 - u/N uniform on [q, 1], this is the
probability of a b >= c for c = (1-x) / q^(j-1). On one machine only j = 1 counts, and it is x + (1-x) ln(1-x).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import Annotated, NamedTuple

from ddlsim.arguments import Bandwidth, Bytes, Count, Index, Share, checked, number, one_of, quantity
from ddlsim.errors import ConfigError
from ddlsim.units import si

Policy = Annotated[str, one_of("minio", "lru")]


@checked
@dataclass(frozen=True)
class Cache:
    """A cache of training samples on every machine.

    policy       replacement policy: "minio" keeps the first samples that are read and evicts none of them (CoorDL's
                 MinIO cache); "lru" evicts the least recently used sample, like an operating system's page cache
    size         capacity per machine, in bytes or as a string such as "64 GB"
    on           where samples are cached: "ram", which takes no time to read, or "ssd"
    read         read bandwidth of each machine's SSD in bytes/s; required with ``on="ssd"``
    holds        "encoded": samples are cached as stored in the data set; "decoded": samples are cached after
                 preparation (Shi et al. 2021)
    partitioned  whether each machine caches different samples. A machine then fetches the samples that it lacks from
                 the memory of other machines over the network (CoorDL's partitioned cache)

    Raises ConfigError for invalid or conflicting values.
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
            raise ConfigError(
                "Cache: on = 'ssd' requires the read bandwidth of the SSD; set it, for example read='2 GB/s'"
            )
        if self.on == "ram" and self.read is not None:
            raise ConfigError(f"Cache: read = {self.read!r} applies to SSDs only; set on='ssd', or remove read")
        if self.partitioned and (self.policy != "minio" or self.on != "ram"):
            raise ConfigError("Cache: partitioned requires policy = 'minio' and on = 'ram', as in CoorDL")

    @property
    def nbytes(self) -> float:
        """Size on each machine, in bytes."""
        return si(self.size, "bytes")


@checked
def hit_rate(
    policy: Annotated[str, one_of("minio", "lru")], room: Share, machines: Count = 1, epoch: Index = 0
) -> float:
    """Return the share of a machine's samples that are in its cache, 0 to 1.

    policy    as in :class:`Cache`
    room      share of the data set that fits in the cache of one machine
    machines  number of machines that divide the samples of each epoch among them at random
    epoch     from 1; 0: the steady state, in which caches are as full as possible

    The formulas are in the docstring of this module. Raises ConfigError for values out of range.
    """
    others = 1.0 - 1.0 / machines
    if room == 1.0 and epoch == 0:
        return 1.0
    if policy == "minio":
        return room if epoch == 0 else min(room, 1.0 - others ** (epoch - 1))
    total, passed, j = 0.0, 1.0, 1
    while (epoch == 0 or j < epoch) and passed > 1.0 - room:  # for larger j, samples have been evicted
        total += passed / machines * _both(others, (1.0 - room) / passed, machines)
        passed *= others
        j += 1
    return total


def _both(least: float, bound: float, machines: int) -> float:
    """Return the probability of a b >= `bound` for a and b uniform on [`least`, 1], of length 1/`machines`."""
    if bound <= least * least:
        return 1.0
    if bound >= least:  # a >= bound
        area = 1.0 - bound + (bound * math.log(bound) if bound > 0.0 else 0.0)
    else:  # below bound / least, a needs a large enough b
        edge = bound / least
        area = edge - least - bound * math.log(edge / least) + (1.0 - edge) * (1.0 - least)
    return area * machines * machines


# ---------------------------------------------------------------- published caches


@checked
def minio_cache(size: Bytes) -> Cache:
    """Return CoorDL's MinIO cache, which keeps the first samples that are read and never evicts any of them.

    size  capacity per machine, in bytes or as a string such as "64 GB"

    See Mohan et al., Analyzing and mitigating data stalls in DNN training, VLDB 2021, doi:10.14778/3446095.3446100.
    Raises ConfigError for an invalid size.
    """
    return Cache("minio", size)


@checked
def partitioned_cache(size: Bytes) -> Cache:
    """Return CoorDL's partitioned cache, in which each machine caches different samples.

    size  capacity per machine, in bytes or as a string such as "64 GB"

    A sample that is cached on another machine is fetched from that machine's memory over the network (Mohan et al.,
    VLDB 2021, doi:10.14778/3446095.3446100). Raises ConfigError for an invalid size.
    """
    return Cache("minio", size, partitioned=True)


@checked
def multi_level_cache(ram: Bytes, ssd: Bytes, read: Bandwidth = "2 GB/s") -> tuple[Cache, Cache]:
    """Return the two-level cache of Shi et al.: decoded samples in memory, backed by encoded files on an SSD.

    ram   capacity of the memory cache per machine, in bytes or as a string such as "64 GB"
    ssd   capacity of the SSD cache per machine, in bytes or as a string such as "1 TB"
    read  read bandwidth of each machine's SSD, in bytes/s or as a string such as "2 GB/s"

    The files are copied from remote storage to the SSD during the first epoch. See Shi et al., Towards scalable
    distributed training of deep learning on public cloud clusters, MLSys 2021, arXiv:2010.10458.

    Raises ConfigError for an invalid size or rate.
    """
    return Cache("minio", ram, holds="decoded"), Cache("minio", ssd, on="ssd", read=read)


class DataSize(NamedTuple):
    """Number of samples in a training set, mean stored size of one in bytes, and the source."""

    samples: int
    sample_nbytes: float
    source: str


DATASETS = {
    "imagenet": DataSize(
        1_281_167,
        147_897_477_120 / 1_281_167,
        "ILSVRC 2012: ILSVRC2012_img_train.tar has 147,897,477,120 bytes, JPEG files and their tar headers",
    ),
    "cifar10": DataSize(
        50_000, 3073.0, "Krizhevsky 2009, binary version: 3,072 bytes of pixels and one of the label, not compressed"
    ),
    "coco2017": DataSize(118_287, 18e9 / 118_287, "cocodataset.org, 2017 train images: 118K images, 18 GB, JPEG files"),
}


@checked
@dataclass(frozen=True)
class Input:
    """Input pipeline: samples are read from storage or caches, prepared on CPU cores, and copied to devices.

    dataset        "imagenet", "cifar10" or "coco2017"; determines `samples` and `sample_bytes`. None: set `samples` and
                   `sample_bytes` yourself
    storage        name of the cluster node that stores the data set. All machines share its bandwidth and links. None:
                   every machine has the data set in memory
    samples        number of samples in the data set; required only for caches
    sample_bytes   size in bytes of a sample as stored in the data set
    decoded_bytes  size in bytes of a sample when it is copied to a device; None: 4 bytes per element of the model's
                   input
    prep_seconds   CPU time in seconds to decode and augment a sample; 0: no preparation
    cpu_workers    number of CPU cores per machine that prepare samples. All cores work on the same batch, one batch at
                   a time
    prefetch       number of batches that each worker requests in advance; 0: a batch is requested when it is needed
    cache          a :class:`~ddlsim.workload.input.Cache` on every machine, or a list of them, starting with the one
                   closest to the worker
    read_samples   samples per read operation of the storage: 1 for individual files, more if files contain several
                   samples
    epoch          epoch in which the run begins, counted from 1, which determines how full the caches are. None: the
                   first epoch for training runs, the steady state for timing-only runs

    Raises ConfigError for invalid or conflicting values.
    """

    dataset: Annotated[str, one_of(*DATASETS)] | None = None
    _: KW_ONLY
    storage: str | None = None
    samples: Count | None = None
    sample_bytes: Bytes | None = None
    decoded_bytes: Bytes | None = None
    prep_seconds: Annotated[float | str, quantity("time", "10 ms", zero=True)] = 0.0
    cpu_workers: Count = 4
    prefetch: Index = 2
    cache: Annotated[Cache | Sequence[Cache], "a Cache such as Cache('minio', '64 GB') or a list of Cache objects"] = ()
    read_samples: Count = 1
    epoch: Count | None = None

    def __post_init__(self) -> None:
        if self.dataset is None and self.sample_bytes is None and self.storage is not None:
            raise ConfigError(
                f"Input: storage = {self.storage!r} requires the size of a sample; set dataset='imagenet' or "
                "sample_bytes='110 kB', for example"
            )
        if self.levels and self.storage is None:
            raise ConfigError(
                "Input: cache has no effect if every machine has the data in memory; set storage to the name of a node"
            )
        if self.levels and self.n_samples is None:
            raise ConfigError("Input: cache requires the number of samples; set dataset or samples")
        if self.epoch is not None and not self.levels:
            raise ConfigError(f"Input: epoch = {self.epoch} has no effect without a cache; remove epoch, or set cache")
        self._check_levels()

    def _check_levels(self) -> None:
        for near, far in pairwise(self.levels):
            if "lru" in (near.policy, far.policy):
                raise ConfigError(
                    "Input: cache: 'lru' cannot be combined with other caches; use 'minio', or a single cache"
                )
            if near.partitioned or far.partitioned:
                raise ConfigError(
                    "Input: cache: a partitioned cache cannot be combined with other caches; use it alone"
                )
            if self._held(far) <= self._held(near):
                raise ConfigError(
                    f"Input: the cache of {far.size} has no effect, because the preceding cache of {near.size} holds "
                    f"at least as many samples; enlarge or remove the cache of {far.size}"
                )

    def _held(self, cache: Cache) -> float:
        decoded = si(self.decoded_bytes, "bytes") if self.decoded_bytes is not None else self.stored_nbytes
        return cache.nbytes / (decoded if cache.holds == "decoded" else self.stored_nbytes)

    @property
    def levels(self) -> tuple[Cache, ...]:
        """Caches of a machine, nearest to the worker first."""
        return (self.cache,) if isinstance(self.cache, Cache) else tuple(self.cache)

    @property
    def n_samples(self) -> int | None:
        """Number of samples in the data set, or None if unknown."""
        if self.samples is not None or self.dataset is None:
            return self.samples
        return DATASETS[self.dataset].samples

    @property
    def stored_nbytes(self) -> float:
        """Bytes read per sample."""
        if self.sample_bytes is not None:
            return si(self.sample_bytes, "bytes")
        return 0.0 if self.dataset is None else DATASETS[self.dataset].sample_nbytes

    def decoded_nbytes(self, input_shape: tuple[int, ...]) -> float:
        """Return the bytes copied to a device for one sample of this shape."""
        if self.decoded_bytes is not None:
            return si(self.decoded_bytes, "bytes")
        return 4.0 * math.prod(input_shape)


#: fields per byte of a batch
Passes = Annotated[float, number(0.0, hint=", such as 2")]


@checked
@dataclass(frozen=True)
class Copies:
    """Copying of samples from host memory to the devices of a machine, which share its memory and links.

    prefetch  when the next batch is copied. "device": during the current step (PyTorch with pinned memory and
              non_blocking copies, tf.data's prefetch_to_device, DALI); "host": after the current step, because the copy
              overwrites the current batch (MXNet's Module)
    nbytes    bytes copied per sample; None: 4 bytes per element of the model's input
    prepare   time in seconds that a thread takes to read, decode and augment one sample; 0: no preparation
    threads   number of threads per machine that prepare samples
    cut       number of times that a single loader thread reads or writes a machine's batch to divide it among the
              devices, starting at the end of the forward pass. 0: every device has its own loader
    memory    memory bandwidth of the loader thread in bytes/s
    """

    prefetch: Annotated[str, one_of("device", "host")] = "device"
    nbytes: Annotated[float | str, quantity("bytes", "600 kB")] | None = None
    prepare: Annotated[float | str, quantity("time", "10 ms", zero=True)] = 0.0
    threads: Count = 4
    cut: Passes = 0.0
    memory: Annotated[float | str, quantity("bandwidth", "10 GB/s")] = "10 GB/s"

    def sample_nbytes(self, input_shape: tuple[int, ...]) -> float:
        """Return the bytes copied to a device for one sample of this shape."""
        if self.nbytes is not None:
            return si(self.nbytes, "bytes")
        return 4.0 * math.prod(input_shape)

    def wait(self, copy: float, alone: float, n_samples: int, nbytes: float, passes: tuple[float, float]) -> float:
        """Return the time in seconds per step for which a device waits for samples.

        copy, alone        times in seconds of the copy to the device: while all devices copy, and by itself
        n_samples, nbytes  total number of samples and bytes in the batches of all devices of a machine
        passes             times in seconds of the forward and of the backward pass
        """
        forward, backward = passes
        ready = si(self.prepare, "time") * n_samples / self.threads  # s per batch of the machine
        late = self.cut * nbytes / si(self.memory, "bandwidth") - backward
        if self.prefetch == "host":
            return max(copy, late + alone, ready - forward - backward)
        late = max(late + alone, copy - backward) if self.cut > 0.0 else copy - forward - backward
        return max(0.0, late, ready - forward - backward)


#: MXNet's Module keeps a machine's batch in memory. When the outputs of a step have been read, the engine's only CPU
#: thread divides the next batch. It reads it and writes each part (2 passes) into a new array, whose pages the system
#: clears (1), and which is then copied into the array that the last step has read (apache/mxnet 2829115275,
#: python/mxnet/module, base_module and executor_group; src/storage/storage.cc; MXNET_CPU_WORKER_NTHREADS is 1)
MXNET_INPUT = Copies("host", cut=3.0)
