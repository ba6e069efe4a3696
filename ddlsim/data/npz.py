"""NumPy archives laid out like MedMNIST: ``train_images``, ``train_labels``, ``val_...``, ``test_...``
(Yang et al. 2023, Scientific Data 10, 41)."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import checked
from ddlsim.data.dataset import DataSet, from_arrays, images_to_floats
from ddlsim.errors import ConfigError, unknown_name


@checked
def read_npz(path: str | Path, part: str = "train") -> DataSet:
    """Return one part ("train", "val" or "test") of an archive; a plain one has ``images`` and ``labels``.

    Images are (n, height, width) or (n, height, width, 3), bytes (scaled to 0..1) or floats; samples (n, features) are
    taken as they are. Labels are classes, (n,), (n, 1) or of tokens (n, tokens), or floating-point targets.
    Archives with Python objects are refused. Raises ConfigError, naming file and array.
    """
    file = Path(path)
    try:
        # opened here, because np.load leaves a damaged archive open
        with file.open("rb") as raw:
            archive = np.load(raw, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ConfigError(f"{file}: is a single array; give an .npz archive of images and labels")
            names = archive.files
            prefix = "" if "images" in names and part == "train" else f"{part}_"
            for key in ("images", "labels"):
                if prefix + key not in names:
                    raise unknown_name("array", prefix + key, names, str(file))
            images, labels = archive[f"{prefix}images"], archive[f"{prefix}labels"]
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{file}: cannot be read as an .npz archive without objects: {reason}") from None
    samples = _channels_first(images, f"{file}: {prefix}images")
    return from_arrays(samples, _flat(labels, images, file), file.stem, str(file))


def _flat(labels: npt.NDArray[np.generic], images: npt.NDArray[np.generic], file: Path) -> npt.NDArray[np.generic]:
    if labels.dtype.kind == "f" or (images.ndim == 2 and labels.shape == images.shape):
        return labels
    if labels.ndim == 2 and labels.shape[1] > 1:
        raise ConfigError(f"{file}: labels of shape {labels.shape}: several labels a sample cannot be learned here")
    return labels.reshape(-1)


def _channels_first(images: npt.NDArray[np.generic], where: str) -> npt.NDArray[np.generic]:
    if images.ndim == 2:
        return images
    colour = images.ndim == 4 and images.shape[-1] in (1, 3)
    if not colour and images.ndim != 3:
        raise ConfigError(f"{where} have shape {images.shape}; must be (n, height, width) or (n, height, width, 3)")
    if images.dtype.kind not in "iuf":
        raise ConfigError(f"{where} have type {images.dtype}; must be numbers")
    scaled = images_to_floats(images.astype(np.uint8)) if images.dtype == np.uint8 else images
    return np.moveaxis(scaled, -1, 1) if colour else scaled[:, None]
