"""Data sets by name or path."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from ddlsim.arguments import checked
from ddlsim.data.dataset import DataSet, read_npz
from ddlsim.data.downloaded import read_cifar, read_downloaded
from ddlsim.data.image_folder import read_images
from ddlsim.data.synthetic import clicks, sentences, shapes
from ddlsim.errors import ConfigError, unknown_name

_FILE = Path(__file__).parent / "files" / "digits.npz"
_SOURCE = (
    "E. Alpaydin and C. Kaynak (1998), Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, "
    "https://doi.org/10.24432/C50P49, CC BY 4.0"
)


def load_digits() -> DataSet:
    """Return 1,797 grey digits of 8 x 8 pixels, shape (1797, 1, 8, 8), values 0..1 in steps of 1/16.

    They are the test part (13 writers) of Alpaydin and Kaynak 1998; see ``files/README.md`` beside this module.
    """
    if not _FILE.is_file():
        raise ConfigError(f"{_FILE} is missing; reinstall ddlsim")
    with np.load(_FILE, allow_pickle=False) as file:
        images, labels = file["images"], file["labels"]
    x = images.astype(np.float32)[:, None] / np.float32(16.0)
    return DataSet("digits", x, labels.astype(np.int64), tuple("0123456789"), _SOURCE)


DATA_NAMES = ("digits", "shapes", "sentences", "clicks")
#: images that load_data makes of the synthetic set, and their size: those of the model "shapes-cnn"
_N_SHAPES, _SHAPES_SIZE = 2000, 32
_N_PIECES = 4000
_N_CLICKS = 8000


@checked
def load_data(source: str | Path) -> DataSet:
    """Return a data set by name ("digits", "shapes", "sentences", "clicks") or from a file or folder.

    ``.npz``            an archive (:func:`~ddlsim.data.read_npz`)
    ``.bin``            CIFAR-10 binary (:func:`~ddlsim.data.read_cifar`)
    a folder            CIFAR or MNIST as downloaded: the training samples (:func:`~ddlsim.data.read_downloaded`, which
                        reads the test samples, too); else images, one folder a class or named like cat.123.jpg,
                        resized to 32 x 32 (:func:`~ddlsim.data.read_images` for other sizes)

    Raises ConfigError for anything else.
    """
    if source == "digits":
        return load_digits()
    if source == "shapes":
        return shapes(_N_SHAPES, _SHAPES_SIZE)
    if source == "sentences":
        return sentences(_N_PIECES)
    if source == "clicks":
        return clicks(_N_CLICKS)
    path = Path(source)
    if os.path.isdir(path):
        return read_downloaded(path) or read_images(path, size=_SHAPES_SIZE)
    if path.suffix == ".npz":
        return read_npz(path)
    if path.suffix == ".bin":
        return read_cifar(path)
    if os.path.exists(path):
        raise ConfigError(f"data = {str(source)!r}: must end in .npz or .bin, or be a folder of images")
    if path.suffix or len(path.parts) != 1:
        names = ", ".join(DATA_NAMES)
        raise ConfigError(f"data = {str(source)!r}: no such file or folder; give a path or one of {names}")
    raise unknown_name("data", str(source), DATA_NAMES)
