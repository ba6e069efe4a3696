"""Folders of images: one sub-folder a class, or names like ``cat.123.jpg`` as in Dogs vs Cats.

Decoding needs Pillow. Decoded and resized images are cached, because that is most of the work.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import checked
from ddlsim.data.dataset import DataSet, images_to_floats
from ddlsim.errors import ConfigError
from ddlsim.output_files import replacing

_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_MOST_NBYTES = 2 * 10**9  # of decoded bytes; four times as many as floats


@checked
def read_images(
    folder: str | Path, size: int = 32, n_per_class: int | None = None, cache: str | Path | None = None
) -> DataSet:
    """Return the images of a folder as (n, 3, size, size) in 0..1, resized bilinearly, in order of their names.

    Classes are the sub-folders, or, if there are none, what stands before the first dot of each name, sorted.
    `n_per_class` takes the first so many of each. `cache` is a folder for decoded images (default: the
    user's cache folder). Raises ConfigError for a folder without images or a file that cannot be decoded.
    """
    root = Path(folder)
    if not os.path.isdir(root):
        raise ConfigError(f"{root}: is not a folder; give one with a sub-folder per class, or cat.1.jpg names")
    if size < 1 or (n_per_class is not None and n_per_class < 1):
        raise ConfigError(f"{root}: size = {size}, n_per_class = {n_per_class}: must be at least 1")
    found = _by_class(root)
    names = tuple(sorted(found))
    if len(names) < 2:
        raise ConfigError(
            f"{root}: found images of {len(names)} classes; at least 2 sub-folders or name prefixes needed"
        )
    chosen = {name: sorted(found[name])[:n_per_class] for name in names}
    files = [file for name in names for file in chosen[name]]
    if len(files) * 3 * size * size > _MOST_NBYTES:
        raise ConfigError(
            f"{root}: {len(files)} images of {size} x {size} do not fit {_MOST_NBYTES / 1e9:g} GB; "
            "lower size or n_per_class"
        )
    labels = np.repeat(np.arange(len(names)), [len(chosen[name]) for name in names]).astype(np.int64)
    images = _cached(files, size, _cache_folder(cache))
    return DataSet(root.name, images_to_floats(images), labels, names, str(root))


def _by_class(root: Path) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for entry in root.iterdir():
        if entry.is_dir() and (mine := [file for file in entry.rglob("*") if file.suffix.lower() in _SUFFIXES]):
            found[entry.name] = mine
    if not found:
        for entry in root.iterdir():
            if entry.suffix.lower() in _SUFFIXES and entry.name.count(".") >= 2:
                found.setdefault(entry.name.split(".")[0], []).append(entry)
    return found


def _cache_folder(cache: str | Path | None) -> Path:
    if cache is not None:
        return Path(cache)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddlsim"


def _cached(files: Sequence[Path], size: int, folder: Path) -> npt.NDArray[np.uint8]:
    """Return the decoded images, from the cache if no file has changed since they went there."""
    digest = hashlib.sha256(str(size).encode())
    for file in files:
        status = file.stat()
        digest.update(f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    place = folder / f"images-{digest.hexdigest()[:32]}.npy"
    shape = (len(files), 3, size, size)
    try:
        kept = np.load(place, allow_pickle=False)
        if kept.shape == shape and kept.dtype == np.uint8:
            return np.asarray(kept)
    except (OSError, ValueError, EOFError):
        pass  # not there, or damaged: decode again
    images = np.empty(shape, np.uint8)
    for i, file in enumerate(files):
        images[i] = _decode(file, size)
    _write(place, images)
    return images


def _write(place: Path, images: npt.NDArray[np.uint8]) -> None:
    """Write the cache entry whole or not at all; a cache that cannot be written is only slower."""
    with suppress(OSError, ConfigError):
        place.parent.mkdir(parents=True, exist_ok=True)
        with replacing(place) as file:
            np.save(file, images, allow_pickle=False)


def _decode(file: Path, size: int) -> npt.NDArray[np.uint8]:
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError("image folders need Pillow; install it with: pip install pillow") from None
    try:
        with Image.open(file) as image:
            small = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ConfigError(f"{file}: cannot be decoded as an image: {error}") from None
    return np.moveaxis(np.asarray(small, dtype=np.uint8), -1, 0)
