"""Where samples come from: a data set on a storage node, caches on the way, processors that decode, batches ahead.

Nothing runs here: :mod:`ddlsim.runtime.feed` brings the batches in a run, :mod:`ddlsim.workload.caches` says what is
found in a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import Annotated, NamedTuple, cast

from ddlsim.arguments import Bytes, Count, Index, Rule, by, checked, quantity
from ddlsim.arguments.annotations import rule_of
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.units import si
from ddlsim.workload.caches import Cache


class DataSize(NamedTuple):
    """Samples of a training set, bytes of one as stored (a mean), and who says so."""

    samples: int
    sample_nbytes: float
    source: str


DATASETS = {
    "imagenet": DataSize(
        1_281_167, 147_897_477_120 / 1_281_167,
        "ILSVRC 2012: ILSVRC2012_img_train.tar has 147,897,477,120 bytes, JPEG files and their tar headers",
    ),
    "cifar10": DataSize(
        50_000, 3073.0, "Krizhevsky 2009, binary version: 3,072 bytes of pixels and one of the label, not compressed"
    ),
    "coco2017": DataSize(118_287, 18e9 / 118_287, "cocodataset.org, 2017 train images: 118K images, 18 GB, JPEG files"),
}  # fmt: skip


def _levels(value: object, where: str) -> object:
    return value if isinstance(value, Cache) else _CACHES(value, where)


def _known(value: object, where: str) -> object:
    if not isinstance(value, str) or value not in DATASETS:
        raise unknown_name("data set", str(value), DATASETS, where)
    return value


_CACHES = cast(Rule, rule_of(tuple[Annotated[Cache, "a Cache('minio', '64 GB')"], ...]))
CachesLike = Annotated[Cache | Sequence[Cache], by(_levels)]


@checked
@dataclass(frozen=True)
class Input:
    """How workers come by their samples: read from storage and caches, prepared on processors, copied to the device.

    dataset        "imagenet", "cifar10" or "coco2017", which say the three sizes below; None: they are given
    storage        node of the cluster that has the data; machines that read from it share its bandwidth and its links.
                   None: the data lie in the memory of every machine
    samples        of the data set; only caches need to know
    sample_bytes   of one as it is stored and read
    decoded_bytes  of one as it is copied to a device; None: every element of the model's input in 4 bytes
    prep_seconds   s that a core needs to decode and augment one; 0: they are ready
    cpu_workers    cores of each machine that do this, together, for one batch of the machine after the other
    prefetch       batches that each worker has asked for ahead of the one that it computes; 0: it asks for each when it
                   needs it
    cache          a :class:`~ddlsim.workload.caches.Cache` on every machine, or several, the nearest first
    read_samples   samples that one operation of the storage reads: 1 for files, more where they are packed together
    epoch          from 1, in which the run begins, which is what is in the caches then. None: the first one where
                   workers learn, otherwise one late enough for caches to be as full as they get

    Raises ConfigError for values that make no sense, or not together.
    """

    dataset: Annotated[str, by(_known)] | None = None
    _: KW_ONLY
    storage: str | None = None
    samples: Count | None = None
    sample_bytes: Bytes | None = None
    decoded_bytes: Bytes | None = None
    prep_seconds: Annotated[float | str, quantity("time", "10 ms", zero=True)] = 0.0
    cpu_workers: Count = 4
    prefetch: Index = 2
    cache: CachesLike = ()
    read_samples: Count = 1
    epoch: Count | None = None

    def __post_init__(self) -> None:
        if self.dataset is None and self.sample_bytes is None and self.storage is not None:
            raise ConfigError(
                f"Input: storage = {self.storage!r}, but nothing says what is read from it; give dataset='imagenet', "
                "or sample_bytes='110 kB'"
            )
        if self.levels and self.storage is None:
            raise ConfigError(
                "Input: cache has no effect on data that lie in every machine; give storage, a node's name"
            )
        if self.levels and self.n_samples is None:
            raise ConfigError("Input: cache needs to know how much there is to be cached; give dataset, or samples")
        if self.epoch is not None and not self.levels:
            raise ConfigError(f"Input: epoch = {self.epoch} says what is in caches, and there are none; leave it out")
        self._check_levels()

    def _check_levels(self) -> None:
        for near, far in pairwise(self.levels):
            if "lru" in (near.policy, far.policy):
                raise ConfigError("Input: cache: of several none can be 'lru', as it changes what others are asked for")
            if near.partitioned or far.partitioned:
                raise ConfigError("Input: cache: a partitioned one goes alone, with nothing but the storage behind it")
            if self._held(far) <= self._held(near):
                raise ConfigError(
                    f"Input: cache of {far.size} behind one of {near.size} is never asked: it holds no more samples; "
                    "make it larger, or leave it out"
                )

    def _held(self, cache: Cache) -> float:
        decoded = si(self.decoded_bytes, "bytes") if self.decoded_bytes is not None else self.stored_nbytes
        return cache.nbytes / (decoded if cache.holds == "decoded" else self.stored_nbytes)

    @property
    def levels(self) -> tuple[Cache, ...]:
        """The caches of a machine, the nearest first."""
        return (self.cache,) if isinstance(self.cache, Cache) else tuple(self.cache)

    @property
    def n_samples(self) -> int | None:
        """Samples of the data set, None where nobody has said."""
        if self.samples is not None or self.dataset is None:
            return self.samples
        return DATASETS[self.dataset].samples

    @property
    def stored_nbytes(self) -> float:
        """Bytes that are read for a sample."""
        if self.sample_bytes is not None:
            return si(self.sample_bytes, "bytes")
        return 0.0 if self.dataset is None else DATASETS[self.dataset].sample_nbytes

    def decoded_nbytes(self, input_shape: tuple[int, ...]) -> float:
        """Return the bytes of a sample of this shape on its way to a device."""
        if self.decoded_bytes is not None:
            return si(self.decoded_bytes, "bytes")
        n_elements = 1
        for size in input_shape:
            n_elements *= size
        return 4.0 * n_elements
