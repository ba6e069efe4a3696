"""Data sets in the folders to which their archives unpack: CIFAR-10 and CIFAR-100 (binary and Python versions), and
MNIST and its relatives (Fashion-MNIST, KMNIST, EMNIST) as torchvision stores them.

CIFAR's Python version is a pickle (cs.toronto.edu/~kriz/cifar.html, "Dataset layout / Python"). Reading it runs no
code: a pickle that names anything but NumPy's arrays is refused.

IDX files, the format of MNIST, Fashion-MNIST and EMNIST (yann.lecun.com/exdb/mnist, "file formats").

Big-endian: two zero bytes, a type (8: unsigned byte), the number of dimensions, each size as 32 bits, data.

CIFAR-10 and CIFAR-100 in their binary version (cs.toronto.edu/~kriz/cifar.html, "binary version").

A record is one label byte (CIFAR-100: coarse, then fine) and 3,072 bytes: red, green, blue planes of 32 x 32.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import pickle
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import checked
from ddlsim.data.dataset import DataSet, images_to_floats
from ddlsim.errors import ConfigError


def read_bytes(path: Path) -> bytes:
    """Return the content of `path`, unpacked if its name ends in ``.gz``; ConfigError if it cannot be read."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                return file.read()
        return path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{path}: cannot be read: {reason}") from None


_PIXELS = 3 * 32 * 32
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@checked
def read_cifar(paths: str | Path | Sequence[str | Path], n_classes: int = 10) -> DataSet:
    """Return the images (n, 3, 32, 32) in 0..1 of one or more binary files, in the order given.

    `n_classes` is 10, or 100 for the fine labels of CIFAR-100. Raises ConfigError, naming the file, for a size
    or a label that does not fit.
    """
    if n_classes not in (10, 100):
        raise ConfigError(f"n_classes = {n_classes}: must be 10 or 100")
    files = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    if not files:
        raise ConfigError("paths = []: give at least one CIFAR file")
    n_labels = 1 if n_classes == 10 else 2
    parts = []
    for file in files:
        raw = np.frombuffer(read_bytes(file), np.uint8)
        if not raw.size or raw.size % (_PIXELS + n_labels):
            raise ConfigError(
                f"{file}: {raw.size} bytes are not records of {_PIXELS + n_labels}; is it the binary version "
                f"of CIFAR-{n_classes}?"
            )
        records = raw.reshape(-1, _PIXELS + n_labels)
        if (largest := int(records[:, n_labels - 1].max())) >= n_classes:
            raise ConfigError(f"{file}: label {largest} is above {n_classes - 1}; is it CIFAR-{110 - n_classes}?")
        parts.append(records)
    records = np.concatenate(parts)
    x = images_to_floats(records[:, n_labels:]).reshape(-1, 3, 32, 32)
    names = CIFAR10 if n_classes == 10 else tuple(str(i) for i in range(100))
    return DataSet(f"cifar{n_classes}", x, records[:, n_labels - 1].astype(np.int64), names, str(files[0]))


_UNSIGNED_BYTE = 8


@checked
def read_idx(images: str | Path, labels: str | Path, name: str = "idx") -> DataSet:
    """Return the images (n, 1, height, width) in 0..1 of an IDX file with the labels of another.

    Both may be packed (``.gz``). Raises ConfigError, naming the file, for anything that is not such a file.
    """
    pixels, classes = _read(Path(images), 3), _read(Path(labels), 1)
    if len(pixels) != len(classes):
        raise ConfigError(f"{labels}: {len(classes)} labels do not fit the {len(pixels)} images of {images}")
    names = tuple(str(i) for i in range(int(classes.max()) + 1))
    return DataSet(name, images_to_floats(pixels)[:, None], classes.astype(np.int64), names, str(images))


def _read(path: Path, n_dims: int) -> npt.NDArray[np.uint8]:
    raw = read_bytes(path)
    start = 4 + 4 * n_dims
    if len(raw) < start or raw[:2] != b"\0\0":
        raise ConfigError(f"{path}: is not an IDX file (it must start with two zero bytes and a header)")
    if raw[2] != _UNSIGNED_BYTE or raw[3] != n_dims:
        raise ConfigError(
            f"{path}: holds type {raw[2]} in {raw[3]} dimensions; must be bytes (8) in {n_dims}"
            f"{'; are images and labels exchanged?' if raw[3] in (1, 3) else ''}"
        )
    shape = tuple(int(size) for size in np.frombuffer(raw, ">u4", n_dims, 4))
    if len(raw) - start != math.prod(shape) or not math.prod(shape):
        raise ConfigError(f"{path}: {len(raw) - start} bytes of data do not fit the sizes {shape}; load it again")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


Part = Literal["train", "test"]
#: names in pickles of arrays, which NumPy has moved once
_ARRAYS = {(f"numpy{core}.multiarray", "_reconstruct") for core in (".core", "._core")} | {
    ("numpy.core.numeric", "_frombuffer"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


@checked
def read_downloaded(folder: str | Path, part: Part = "train") -> DataSet | None:
    """Return the training or test samples of a downloaded data set; None for any other folder.

    folder   the folder to which the archive of CIFAR-10, CIFAR-100 or a relative of MNIST unpacks
    part     "train" or "test"

    Raises ConfigError with the name of a file that is damaged or of another format.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"{folder}: no such folder")
    root = root / "raw" if os.path.isdir(root / "raw") else root
    names = sorted(os.listdir(root))
    binary = [name for name in names if name.startswith("data_batch_") and name.endswith(".bin")]
    pickled = [name for name in names if name.startswith("data_batch_") and "." not in name]
    if binary:
        return read_cifar([root / name for name in (binary if part == "train" else ["test_batch.bin"])])
    if {"train.bin", "test.bin"} <= set(names):
        return read_cifar(root / f"{part}.bin", 100)
    if pickled:
        return _pickled([root / name for name in (pickled if part == "train" else ["test_batch"])], CIFAR10)
    if {"train", "test", "meta"} <= set(names):
        return _pickled([root / part], tuple(str(i) for i in range(100)))
    beginning = "train" if part == "train" else "t10k" if any("t10k" in name for name in names) else "test"
    images = [name for name in names if f"{beginning}-images-idx3-ubyte" in name]
    if images:
        return read_idx(root / images[0], root / images[0].replace("images-idx3", "labels-idx1"), root.parent.name)
    return None


class _Arrays(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _ARRAYS:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not read from a pickle")
        return super().find_class(module, name)


def _pickled(files: list[Path], names: tuple[str, ...]) -> DataSet:
    pixels, labels = [], []
    for file in files:
        try:
            batch: Mapping[bytes, object] = _Arrays(io.BytesIO(read_bytes(file)), encoding="bytes").load()
            of_file = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
            pixels.append(np.asarray(of_file["data"], np.uint8).reshape(-1, 3, 32, 32))
            labels.append(np.asarray(of_file.get("fine_labels", of_file.get("labels")), np.int64).reshape(-1))
        except ConfigError:
            raise
        except Exception as error:  # pickles fail in every way
            why = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{file}: is no batch of CIFAR's Python version: {why}") from None
    x, classes = images_to_floats(np.concatenate(pixels)), np.concatenate(labels)
    return DataSet(f"cifar{len(names)}", x, classes, names, str(files[0]))
