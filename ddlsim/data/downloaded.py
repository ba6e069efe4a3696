"""Data sets in the folders to which their archives unpack: CIFAR-10 and CIFAR-100 (binary and Python versions), and
MNIST and its relatives (Fashion-MNIST, KMNIST, EMNIST) as torchvision stores them.

CIFAR's Python version is a pickle (cs.toronto.edu/~kriz/cifar.html, "Dataset layout / Python"). Reading it runs no
code: a pickle that names anything but NumPy's arrays is refused.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from ddlsim.arguments import checked
from ddlsim.data.cifar import CIFAR10, read_cifar
from ddlsim.data.dataset import DataSet, images_to_floats
from ddlsim.data.files_common import read_bytes
from ddlsim.data.idx import read_idx
from ddlsim.errors import ConfigError

Part = Literal["train", "test"]
#: names in pickles of arrays, which NumPy has moved once
_ARRAYS = {(f"numpy{core}.multiarray", "_reconstruct") for core in (".core", "._core")} | {
    ("numpy.core.numeric", "_frombuffer"), ("numpy._core.numeric", "_frombuffer"), ("numpy", "ndarray"),
    ("numpy", "dtype"), ("_codecs", "encode"),
}  # fmt: skip


@checked
def read_downloaded(folder: str | Path, part: Part = "train") -> DataSet | None:
    """Return the training or test samples of a downloaded data set; None for any other folder.

    folder   the folder to which the archive of CIFAR-10, CIFAR-100 or a relative of MNIST unpacks
    part     "train" or "test"

    Raises ConfigError with the name of a file that is damaged or of another format.
    """
    root = Path(folder)
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
