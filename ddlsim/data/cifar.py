"""CIFAR-10 and CIFAR-100 in their binary version (cs.toronto.edu/~kriz/cifar.html, "binary version").

A record is one label byte (CIFAR-100: coarse, then fine) and 3,072 bytes: red, green, blue planes of 32 x 32.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ddlsim.arguments import checked
from ddlsim.data.dataset import DataSet, images_to_floats
from ddlsim.data.files_common import read_bytes
from ddlsim.errors import ConfigError

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
