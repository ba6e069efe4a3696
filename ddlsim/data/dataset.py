"""Labelled data sets in memory: construction, splitting, standardisation and resizing."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Seed, checked, integer, number, validated_by
from ddlsim.errors import ConfigError
from ddlsim.streams import stream

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


def _labels(value: object, where: str) -> npt.NDArray[Any]:
    """Return integer labels (classes) as int64, and floating-point labels (targets) as float32."""
    array = np.asarray(value)
    if array.dtype.kind not in "iuf":
        raise ConfigError(
            f"{where}: expected integers (classes) or floating-point numbers (targets), got type {array.dtype}"
        )
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int64, copy=False)


@checked
@dataclass(frozen=True, eq=False)
class DataSet:
    """A labelled data set in memory.

    name         short name for reports
    x            the samples as float32, shape (n_samples, *sample_shape). For images, `sample_shape` is (channels,
                 height, width)
    labels       for classification, the class index of each sample, shape (n_samples,); for text, the token that
                 follows each token of a sample, shape (n_samples, tokens); for
                 ``Training(..., loss="mean_squared_error")``, floating-point targets of shape (n_samples,) or
                 (n_samples, n_targets)
    class_names  name of each class; empty for targets
    source       origin of the data, for reports

    Raises ConfigError if shapes do not match, a number is not finite, or a label is not a valid class index.
    """

    name: str
    x: Floats
    labels: Annotated[npt.NDArray[Any], validated_by(_labels)]
    class_names: tuple[str, ...]
    source: str = ""

    def __post_init__(self) -> None:
        n = len(self.x) if self.x.ndim > 1 else 0
        fits = self.labels.shape[:1] == (n,) if self.is_regression else self.labels.shape in ((n,), self.x.shape)
        if n == 0 or not fits:
            raise ConfigError(
                f"data {self.name!r}: samples of shape {self.x.shape} do not match labels of shape "
                f"{self.labels.shape}; expected (n, ...) and (n,) with n at least 1, or (n, tokens) for both"
            )
        check_finite(self.name, self.x)
        if self.is_regression:
            check_finite(self.name, self.labels)
            if self.class_names:
                raise ConfigError(
                    f"data {self.name!r}: labels of type {self.labels.dtype} are regression targets, which have no "
                    "classes; remove class_names"
                )
            return
        if self.labels.min() < 0 or self.labels.max() >= self.n_classes:
            bad = self.labels[(self.labels < 0) | (self.labels >= self.n_classes)][0]
            last = self.n_classes - 1
            raise ConfigError(f"data {self.name!r}: label {bad} is not a class; labels must be from 0 to {last}")

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.sample_shape))
        what = f"{self.labels[0].size} targets" if self.is_regression else f"{self.n_classes} classes"
        return f"<DataSet {self.name!r}: {self.n_samples:,} samples of {shape}, {what}>"

    @property
    def is_regression(self) -> bool:
        """Whether labels are regression targets instead of classes."""
        return self.labels.dtype.kind == "f"

    @property
    def n_samples(self) -> int:
        return len(self.x)

    @property
    def n_classes(self) -> int:
        return len(self.class_names)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return self.x.shape[1:]

    @checked
    def take(self, indices: Ints) -> DataSet:
        """Return a data set with the samples at `indices`, in that order.

        Raises ConfigError for an index out of range.
        """
        if indices.size and not 0 <= indices.min() <= indices.max() < self.n_samples:
            last, lowest, highest = self.n_samples - 1, indices.min(), indices.max()
            raise ConfigError(f"data {self.name!r}: indices must be from 0 to {last}, not from {lowest} to {highest}")
        return replace(self, x=self.x[indices], labels=self.labels[indices])


def check_finite(name: str, samples: Floats) -> None:
    """Raise ConfigError, with the number of the sample, if any number is NaN or infinite."""
    # A sum is finite unless a number is not, or it overflows: then look closer.
    if not np.isfinite(samples.sum(dtype=np.float64)) and not np.isfinite(samples).all():
        bad = int(np.argwhere(~np.isfinite(samples))[0, 0])
        raise ConfigError(f"data {name!r}: sample {bad} contains NaN or infinity; remove the sample")


@checked
def from_arrays(x: npt.ArrayLike, labels: npt.ArrayLike, name: str = "arrays", source: str = "") -> DataSet:
    """Create a :class:`DataSet` from arrays.

    x       samples, shape (n, ...)
    labels  for classification, class indices (integers from 0): one per sample, shape (n,), or one per token, shape (n,
            tokens). For regression, floating-point targets of shape (n,) or (n, n_targets)
    name    short name for reports
    source  origin of the data, for reports

    Classes are named "0", "1", ... up to the largest label. Raises ConfigError if the shapes do not match or a number
    is not finite.
    """
    try:
        with np.errstate(over="ignore"):  # what float32 cannot hold is told below
            samples, classes = np.ascontiguousarray(x, np.float32), _labels(labels, f"data {name!r}: labels")
    except ConfigError:
        raise
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"data {name!r}: samples and labels must be arrays of numbers") from None
    check_finite(name, samples)
    n_classes = int(classes.max()) + 1 if classes.dtype.kind == "i" and classes.size else 0
    return DataSet(name, samples, classes, tuple(str(i) for i in range(n_classes)), source)


def images_to_floats(images: npt.NDArray[np.uint8]) -> Floats:
    """Return 8-bit images as float32 in 0..1."""
    return images.astype(np.float32) / np.float32(255.0)


#: a share of the samples, or a number of them
HeldOut = Annotated[float, number(0.0, above=True)] | Annotated[int, integer(1)]


@checked
def split(data: DataSet, held_out: HeldOut, seed: Seed) -> tuple[DataSet, DataSet]:
    """Split a data set randomly into a training set and a held-out set, and return both.

    held_out  size of the held-out set: a fraction of the samples (float below 1) or a number of samples (int)
    seed      seed of the random split; the same seed always gives the same split

    For classification, every class is split in the same proportion, to within one sample. Raises ConfigError if one of
    the two sets would be empty.
    """
    n = data.n_samples
    count = held_out if isinstance(held_out, int) else round(held_out * n)
    if not 0 < count < n or (isinstance(held_out, float) and not 0.0 < held_out < 1.0):
        raise ConfigError(f"held_out = {held_out}: must leave at least one of the {n} samples in each part")
    order = stream(seed, 0, "held-out split").permutation(n)
    if data.labels.ndim > 1 or data.is_regression:
        return data.take(np.sort(order[count:])), data.take(np.sort(order[:count]))
    # within each class the shuffled samples get evenly spaced ranks; the lowest ranks are held out
    ranks = np.empty(n)
    for label in range(data.n_classes):
        mine = order[data.labels[order] == label]
        ranks[mine] = (np.arange(len(mine)) + 0.5) / max(len(mine), 1)
    chosen = order[np.argsort(ranks[order], kind="stable")]
    return data.take(np.sort(chosen[count:])), data.take(np.sort(chosen[:count]))


@checked
def standardize(data: DataSet, like: DataSet | None = None) -> DataSet:
    """Return the data set shifted and scaled so that each channel has mean 0 and standard deviation 1.

    like  data set whose mean and standard deviation are used, such as the training set when `data` contains held-out
          samples; None: those of `data`
    """
    reference = (data if like is None else like).x
    axes = (0, *range(2, reference.ndim))
    mean = reference.mean(axis=axes, keepdims=True, dtype=np.float64)
    deviation = np.maximum(reference.std(axis=axes, keepdims=True, dtype=np.float64), 1e-8)
    return replace(data, x=((data.x - mean) / deviation).astype(np.float32))


def resize(images: Floats, height: int, width: int) -> Floats:
    """Return images (n, channels, h, w) as (n, channels, height, width), a new array.

    Bilinear, and where images shrink over all pixels that a new one covers, as Pillow's and torchvision's with
    ``antialias``: weights fall linearly from the new pixel's centre.
    """
    rows, columns = _weights(images.shape[2], height), _weights(images.shape[3], width)
    # not with BLAS, whose sums depend on the processor
    resized: Floats = np.einsum("ncil,jl->ncij", np.einsum("ik,nckl->ncil", rows, images), columns)
    return resized


@functools.lru_cache(maxsize=32)
def _weights(before: int, after: int) -> Floats:
    """Return how much of each old pixel is in each new one, shape (after, before); rows sum to 1."""
    scale = before / after
    reach = max(scale, 1.0)
    centres = (np.arange(after) + 0.5) * scale
    weights = np.maximum(0.0, 1.0 - np.abs(np.arange(before) + 0.5 - centres[:, None]) / reach)
    shares: Floats = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    shares.flags.writeable = False
    return shares
