"""IDX files, the format of MNIST, Fashion-MNIST and EMNIST (yann.lecun.com/exdb/mnist, "file formats").

Big-endian: two zero bytes, a type (8: unsigned byte), the number of dimensions, each size as 32 bits, data.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import checked
from ddlsim.data.dataset import DataSet, images_to_floats
from ddlsim.data.files_common import read_bytes
from ddlsim.errors import ConfigError

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
