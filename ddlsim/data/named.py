"""Data sets by name or path."""

from __future__ import annotations

import os
from pathlib import Path

from ddlsim.arguments import checked
from ddlsim.data.clicks import clicks
from ddlsim.data.dataset import DataSet
from ddlsim.data.digits import load_digits
from ddlsim.data.downloaded import read_cifar, read_downloaded
from ddlsim.data.image_folder import read_images
from ddlsim.data.npz import read_npz
from ddlsim.data.sentences import sentences
from ddlsim.data.synthetic import shapes
from ddlsim.errors import ConfigError, unknown_name

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
