"""Bundled and generated data sets, and readers of files: archives, image folders, CIFAR and MNIST."""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import os
import pickle
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Count, Seed, Share, checked, integer
from ddlsim.data.dataset import DataSet, Floats, Ints, from_arrays, images_to_floats
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.output_files import replacing
from ddlsim.streams import stream

_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_MOST_NBYTES = 2 * 10**9  # of decoded bytes; four times as many as floats


@checked
def read_images(
    folder: str | Path, size: Count = 32, n_per_class: Count | None = None, cache: str | Path | None = None
) -> DataSet:
    """Read a folder of images as an array of shape (n, 3, size, size) with values from 0 to 1.

    Each sub-folder is a class. Without sub-folders, the class is the part of the file name before the first dot, as in
    cat.1.jpg. Samples are sorted by class and file name. Images are resized with bilinear interpolation.

    size         height and width of the resized images
    n_per_class  maximum number of images per class (the first ones are used); None: all images
    cache        folder in which decoded images are cached; None: the user's cache folder

    Raises ConfigError if the folder contains no images, or if a file cannot be decoded.
    """
    root = Path(folder)
    if not os.path.isdir(root):
        raise ConfigError(
            f"{root} is not a folder; expected a folder with a sub-folder per class, or with file names such as "
            "cat.1.jpg"
        )
    by_class = _by_class(root)
    names = tuple(sorted(by_class))
    if len(names) < 2:
        n_classes = f"{len(names)} class" if len(names) == 1 else f"{len(names)} classes"
        raise ConfigError(
            f"{root}: contains images of {n_classes}, but at least 2 classes are needed; use a sub-folder per class, "
            "or file names such as cat.1.jpg"
        )
    chosen = {name: sorted(by_class[name])[:n_per_class] for name in names}
    files = [file for name in names for file in chosen[name]]
    if len(files) * 3 * size * size > _MOST_NBYTES:
        limit = f"{_MOST_NBYTES / 1e9:g} GB"
        raise ConfigError(
            f"{root}: {len(files)} images of {size} x {size} pixels exceed the limit of {limit}; lower size or "
            "n_per_class"
        )
    labels = np.repeat(np.arange(len(names)), [len(chosen[name]) for name in names]).astype(np.int64)
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddlsim"
    images = _cached(files, size, usual if cache is None else Path(cache))
    return DataSet(root.name, images_to_floats(images), labels, names, str(root))


def _by_class(root: Path) -> dict[str, list[Path]]:
    by_class: dict[str, list[Path]] = {}
    for entry in root.iterdir():
        if entry.is_dir() and (mine := [file for file in entry.rglob("*") if file.suffix.lower() in _SUFFIXES]):
            by_class[entry.name] = mine
    if not by_class:
        for entry in root.iterdir():
            if entry.suffix.lower() in _SUFFIXES and entry.name.count(".") >= 2:
                by_class.setdefault(entry.name.split(".")[0], []).append(entry)
    return by_class


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
    with suppress(OSError, ConfigError):  # a cache that cannot be written is only slower
        place.parent.mkdir(parents=True, exist_ok=True)
        with replacing(place) as kept_file:
            np.save(kept_file, images, allow_pickle=False)
    return images


def _decode(file: Path, size: int) -> npt.NDArray[np.uint8]:
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError("reading image folders needs Pillow; install it with: pip install pillow") from None
    try:
        with Image.open(file) as image:
            small = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ConfigError(f"{file}: cannot be decoded as an image: {error}") from None
    return np.moveaxis(np.asarray(small, dtype=np.uint8), -1, 0)


def read_bytes(path: Path) -> bytes:
    """Return the content of `path`, decompressed if its name ends in ``.gz``. Raises ConfigError if it is
    unreadable."""
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
    """Read images from one or more files in CIFAR's binary format.

    paths      one path, or several paths, whose samples are concatenated in this order
    n_classes  10 for CIFAR-10, or 100 for the fine labels of CIFAR-100

    The images have shape (n, 3, 32, 32) and values from 0 to 1. Each record of a file consists of a label byte (in
    CIFAR-100, a coarse and a fine label) followed by 32 x 32 bytes each of red, green and blue
    (cs.toronto.edu/~kriz/cifar.html).

    Raises ConfigError, giving the name of the file, if its size or a label is wrong.
    """
    if n_classes not in (10, 100):
        raise ConfigError(f"n_classes = {n_classes}: must be 10 or 100")
    files = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    if not files:
        raise ConfigError("paths is empty; pass at least one CIFAR file")
    n_labels = 1 if n_classes == 10 else 2
    n_bytes, parts = _PIXELS + n_labels, []
    for file in files:
        raw = np.frombuffer(read_bytes(file), np.uint8)
        if not raw.size or raw.size % n_bytes:
            raise ConfigError(
                f"{file}: its size, {raw.size} bytes, is not a multiple of {n_bytes}; check that it is the binary "
                f"version of CIFAR-{n_classes}"
            )
        records = raw.reshape(-1, n_bytes)
        if (largest := int(records[:, n_labels - 1].max())) >= n_classes:
            what = f"label {largest} is not below {n_classes}"
            raise ConfigError(f"{file}: {what}; check whether it is a file of CIFAR-{110 - n_classes}")
        parts.append(records)
    records = np.concatenate(parts)
    x = images_to_floats(records[:, n_labels:]).reshape(-1, 3, 32, 32)
    names = CIFAR10 if n_classes == 10 else tuple(str(i) for i in range(100))
    return DataSet(f"cifar{n_classes}", x, records[:, n_labels - 1].astype(np.int64), names, str(files[0]))


@checked
def read_idx(images: str | Path, labels: str | Path, name: str = "idx") -> DataSet:
    """Read images and labels from two files in IDX format, the format of MNIST and its variants.

    images, labels  paths of the two files, which may be compressed (``.gz``)
    name            short name of the data set for reports

    The images have shape (n, 1, height, width) and values from 0 to 1. An IDX file consists of two zero bytes, a type
    (8 for unsigned bytes), the number of dimensions, each dimension's size as a big-endian 32-bit integer, and the data
    (yann.lecun.com/exdb/mnist). Raises ConfigError, giving the name of the file, if a file has any other format.
    """
    pixels, classes = _read(Path(images), 3), _read(Path(labels), 1)
    if len(pixels) != len(classes):
        raise ConfigError(f"{labels} has {len(classes)} labels, but {images} has {len(pixels)} images")
    names = tuple(str(i) for i in range(int(classes.max()) + 1))
    return DataSet(name, images_to_floats(pixels)[:, None], classes.astype(np.int64), names, str(images))


def _read(path: Path, n_dims: int) -> npt.NDArray[np.uint8]:
    raw = read_bytes(path)
    start = 4 + 4 * n_dims
    if len(raw) < start or raw[:2] != b"\0\0":
        raise ConfigError(f"{path} is not an IDX file, which must start with two zero bytes and a header")
    if raw[2] != 8 or raw[3] != n_dims:
        expected = f"bytes (type 8) in {n_dims} dimensions"
        expected += "; are images and labels swapped?" if raw[3] in (1, 3) else ""
        raise ConfigError(f"{path}: contains data of type {raw[2]} in {raw[3]} dimensions; expected {expected}")
    shape, n_bytes = tuple(int(size) for size in np.frombuffer(raw, ">u4", n_dims, 4)), len(raw) - start
    if n_bytes != math.prod(shape) or not n_bytes:
        raise ConfigError(f"{path}: {n_bytes} bytes of data do not match the shape {shape}; download the file again")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


Part = Literal["train", "test"]
#: names in pickles of arrays, which NumPy has moved once
_ARRAYS = {(f"numpy{core}.multiarray", "_reconstruct") for core in (".core", "._core")}
_ARRAYS |= {(f"numpy{core}.numeric", "_frombuffer") for core in (".core", "._core")}
_ARRAYS |= {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}


@checked
def read_downloaded(folder: str | Path, part: Part = "train") -> DataSet | None:
    """Read the training or test samples from the downloaded files of CIFAR-10, CIFAR-100, MNIST or a variant of MNIST.

    folder  folder with the contents of the downloaded archive
    part    "train" or "test"

    Returns None if the folder does not contain any of these data sets. Raises ConfigError, giving the name of the file,
    if a file is damaged or has another format.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"{folder}: no such folder; pass the folder of an unpacked data set")
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
    """Reads CIFAR's Python version without running code: it may name NumPy's arrays alone."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _ARRAYS:
            raise pickle.UnpicklingError(f"the pickle refers to {module}.{name}; only NumPy arrays are allowed in it")
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
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{file} is not a batch file from the Python version of CIFAR: {reason}") from None
    x, classes = images_to_floats(np.concatenate(pixels)), np.concatenate(labels)
    return DataSet(f"cifar{len(names)}", x, classes, names, str(files[0]))


N_DENSE = 4
#: values of each categorical feature
FEATURE_ROWS = (60, 40, 20, 12, 6, 3)
_LATENT = 2


@checked
def clicks(n_samples: Count, seed: Seed = 0) -> DataSet:
    """Generate a synthetic data set of clicks for recommendation models. Label 1 is a click, and label 0 is no click.

    n_samples  number of samples
    seed       seed of the random numbers

    Each sample contains 4 real numbers followed by the ids of 6 categorical features, shape (n_samples, 10). The values
    of a categorical feature follow Zipf's law. The logit of the click probability is the sum of three terms: a weighted
    sum of the real numbers, one weight per categorical value, and the dot product of two hidden vectors. Each of the
    two categorical features with the most values has one hidden vector per value. About half of the samples are clicks.
    """
    world, draws = stream(seed, 0, "clicks: the world"), stream(seed, 1, "clicks: the samples")
    numbers = draws.standard_normal((n_samples, N_DENSE))
    logit = (numbers * world.normal(0.0, 0.5, N_DENSE)).sum(axis=1)
    ids = np.empty((n_samples, len(FEATURE_ROWS)), dtype=np.int64)
    hidden = []
    for feature, rows in enumerate(FEATURE_ROWS):
        shares = 1.0 / np.arange(1, rows + 1)
        ids[:, feature] = draws.choice(rows, n_samples, p=shares / shares.sum())
        logit += world.normal(0.0, 1.0, rows)[ids[:, feature]]
        hidden.append(world.normal(0.0, 1.2, (rows, _LATENT))[ids[:, feature]])
    logit += (hidden[0] * hidden[1]).sum(axis=1)
    labels = (draws.random(n_samples) < 1.0 / (1.0 + np.exp(np.median(logit) - logit))).astype(np.int64)
    x = np.concatenate([numbers, ids], axis=1).astype(np.float32)
    return DataSet("clicks", x, labels, ("no click", "click"), "generated: clicks drawn from a factorisation model")


_FILE = Path(__file__).parent / "files" / "digits.npz"
_SOURCE = (
    "E. Alpaydin and C. Kaynak (1998), Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, "
    "https://doi.org/10.24432/C50P49, CC BY 4.0"
)


def load_digits() -> DataSet:
    """Load the bundled data set of 1,797 handwritten digits in 10 classes.

    The images are greyscale, shape (1797, 1, 8, 8), with values from 0 to 1 in steps of 1/16. They are the test set (13
    writers) of Alpaydin and Kaynak 1998; see ``files/README.md`` in the folder of this module.
    """
    if not _FILE.is_file():
        raise ConfigError(f"the data file {_FILE} is missing; reinstall ddlsim")
    with np.load(_FILE, allow_pickle=False) as file:
        images, labels = file["images"], file["labels"]
    x = images.astype(np.float32)[:, None] / np.float32(16.0)
    return DataSet("digits", x, labels.astype(np.int64), tuple("0123456789"), _SOURCE)


CHARACTERS = " .abcdefghijklmnopqrstuvwxyz"
_NOUNS = ("worker", "server", "switch", "cable", "gradient", "model", "packet", "engineer", "cat", "bird")
_ADJECTIVES = ("slow", "fast", "small", "large", "new", "old", "stale", "quiet")
_VERBS = ("wait", "send", "hold", "find", "lose", "move", "need", "see")
_ADVERBS = ("now", "again", "at night", "every day", "too late", "in time")
_TEXTS = 64  # sentences of one random stream: a text does not depend on how long it becomes


@checked
def sentences(n_samples: Count, length: Count = 32, seed: Seed = 0) -> DataSet:
    """Generate a synthetic data set of text for models that predict the next character.

    n_samples  number of samples
    length     number of characters per sample
    seed       seed of the random numbers

    A small grammar with subject-verb agreement generates the text: "the old worker sends two birds now. some cats wait
    again. ..." Each sample is a contiguous piece of the text, given as character ids, shape (n_samples, length). The
    label at each position is the id of the next character, so labels have the same shape. The most frequent character,
    the space, makes up 18 % of the text.
    """
    part, size, pieces = 0, 0, list[str]()
    while size < n_samples * length + 1:
        pieces += [_sentence(draws) for draws in [stream(seed, part, "sentences")] for _ in range(_TEXTS)]
        size, part = sum(map(len, pieces)), part + 1
    place = {character: i for i, character in enumerate(CHARACTERS)}
    ids = np.array([place[character] for character in "".join(pieces)[: n_samples * length + 1]], dtype=np.int64)
    before, after = ids[:-1].astype(np.float32), ids[1:]
    shape, source = (n_samples, length), "generated: a grammar of simple English sentences"
    return DataSet("sentences", before.reshape(shape), after.reshape(shape), tuple(CHARACTERS), source)


def _sentence(draws: np.random.Generator) -> str:
    """Return: subject verb [object] [adverb] full stop, blank."""
    choice = draws.random(8)
    several = choice[0] < 0.5
    verb = _one(_VERBS, choice[1]) + ("" if several else "s")
    words = [_phrase(choice[2:4], several=several), verb]
    if choice[4] < 0.7:
        words.append(_phrase(choice[5:7], several=choice[4] < 0.35))
    if choice[7] < 0.6:
        words.append(_one(_ADVERBS, choice[7] / 0.6))
    return " ".join(words) + ". "


def _phrase(choice: np.ndarray[tuple[int], np.dtype[np.float64]], *, several: bool) -> str:
    article, rest = _split(choice[0], ("some", "two", "the") if several else ("a", "one", "the"))
    noun, again = _split(choice[1], _NOUNS)
    adjective = f"{_one(_ADJECTIVES, again)} " if rest < 0.5 else ""
    if article == "a" and (adjective or noun)[0] in "aeiou":
        article = "an"
    return f"{article} {adjective}{noun}{('es' if noun.endswith('ch') else 's') if several else ''}"


def _split(draw: float, words: tuple[str, ...]) -> tuple[str, float]:
    """Return a word, and what is left of the draw, from 0 to 1."""
    at = draw * len(words)
    return words[int(at)], at - int(at)


def _one(words: tuple[str, ...], draw: float) -> str:
    return words[min(int(draw * len(words)), len(words) - 1)]


MAX_PIXELS = 10**10
_CHUNK = 256  # images of one random stream: the first n images of a seed do not depend on how many follow


@checked
def shapes(
    n_samples: Count, size: Annotated[int, integer(8, 4096)] = 32, difficulty: Share = 0.3, seed: Seed = 0
) -> DataSet:
    """Generate colour images of discs and squares, shape (n_samples, 3, size, size), with values from 0 to 1.

    Class 0 is a striped disc, and class 1 is a square of the same area with a checkerboard pattern. The classes
    alternate.

    n_samples   number of images
    size        height and width of the images in pixels, at least 8
    seed        seed of the random numbers
    difficulty  number from 0 to 1: a higher difficulty increases the noise (standard deviation 0.02 + 0.5 * difficulty)
                and lowers the contrast of the texture (1 - difficulty)
    """
    if n_samples * size * size > MAX_PIXELS:
        what = f"{n_samples} images of {size} x {size} pixels"
        raise ConfigError(f"shapes: {what} are too large; lower n_samples or size")
    labels = np.arange(n_samples, dtype=np.int64) % 2
    x = np.empty((n_samples, 3, size, size), np.float32)
    for start in range(0, n_samples, _CHUNK):
        part = slice(start, start + _CHUNK)
        draws = stream(seed, start // _CHUNK, "synthetic shapes")
        x[part] = _draw(labels[part], size, difficulty, draws)
    source = "procedural: discs with stripes and squares with checkerboards"
    return DataSet("shapes", x, labels, ("disc", "square"), source)


def _draw(labels: Ints, size: int, difficulty: float, draws: np.random.Generator) -> Floats:
    """Return the images of one chunk. All randomness is drawn for a whole chunk, whatever its length."""
    n = len(labels)

    def uniform(low: float, high: float, *shape: int) -> Floats:
        values = draws.uniform(low, high, (_CHUNK, *shape))[:n].astype(np.float32)
        return values.reshape(n, *shape, *(1,) * (3 - len(shape)))

    radius, angle = uniform(0.22, 0.36), uniform(0.0, math.pi)
    centre_y, centre_x = uniform(0.36, 0.64), uniform(0.36, 0.64)
    frequency, phase = uniform(4.0, 6.0), uniform(0.0, 2.0 * math.pi)
    back, front = uniform(0.0, 1.0, 3), uniform(0.0, 1.0, 3)
    slope = uniform(-0.3, 0.3)
    grid = (np.arange(size, dtype=np.float32) + 0.5) / size
    y, x = grid[:, None] - centre_y, grid[None, :] - centre_x  # (n, 1, size, 1), (n, 1, 1, size)
    u, v = np.cos(angle) * x + np.sin(angle) * y, np.cos(angle) * y - np.sin(angle) * x
    square = (labels == 1)[:, None, None, None]
    half = radius * np.float32(math.sqrt(math.pi) / 2.0)  # of the square with the area of the disc
    inside = np.where(square, np.maximum(abs(u), abs(v)) < half, u * u + v * v < radius * radius)
    wave_u = np.sin(2.0 * math.pi * frequency * u + phase)
    wave_v = np.sin(2.0 * math.pi * frequency * v + phase)
    texture = np.where(square, np.sign(wave_u * wave_v), np.sign(wave_u)) * 0.35 * (1.0 - difficulty)
    # the object is at least 0.25 lighter or darker than what is behind it, in every channel
    front = np.where(abs(front - back) < 0.25, np.where(back > 0.5, back - 0.4, back + 0.4), front)
    image = np.where(inside, front + texture, back + slope * y)
    noise = draws.standard_normal((_CHUNK, 3, size, size), dtype=np.float32)[:n]
    noisy: Floats = (image + np.float32(0.02 + 0.5 * difficulty) * noise).astype(np.float32)
    return np.clip(noisy, 0.0, 1.0)


@checked
def read_npz(path: str | Path, part: str = "train") -> DataSet:
    """Read a data set from a NumPy archive with the arrays ``images`` and ``labels``.

    part  "train", "val" or "test", for archives with arrays like ``train_images`` and ``train_labels``

    Images have shape (n, height, width) or (n, height, width, 3) and contain either floats or bytes; bytes are scaled
    to values from 0 to 1. Samples of shape (n, features) are used unchanged. Labels may be one class per sample (shape
    (n,) or (n, 1)), one class per token (shape (n, tokens)), or floating-point targets.

    Raises ConfigError if an array has an unsuitable shape or dtype, or if the archive contains Python objects. The
    message gives the names of the file and the array.
    """
    file = Path(path)
    try:
        # opened here, because np.load leaves a damaged archive open
        with file.open("rb") as raw:
            archive = np.load(raw, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ConfigError(f"{file} is a single array; expected an .npz archive with images and labels")
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
        raise ConfigError(f"{file}: cannot be read as an .npz archive without pickled objects: {reason}") from None
    samples = _channels_first(images, f"{file}: {prefix}images")
    return from_arrays(samples, _flat(labels, images, file), file.stem, str(file))


def _flat(labels: npt.NDArray[np.generic], images: npt.NDArray[np.generic], file: Path) -> npt.NDArray[np.generic]:
    if labels.dtype.kind == "f" or (images.ndim == 2 and labels.shape == images.shape):
        return labels
    if labels.ndim == 2 and labels.shape[1] > 1:
        hint = "use one label per sample or token"
        raise ConfigError(f"{file}: labels of shape {labels.shape} are not supported; {hint}")
    return labels.reshape(-1)


def _channels_first(images: npt.NDArray[np.generic], where: str) -> npt.NDArray[np.generic]:
    if images.ndim == 2:
        return images
    colour = images.ndim == 4 and images.shape[-1] in (1, 3)
    if not colour and images.ndim != 3:
        raise ConfigError(f"{where} have shape {images.shape}; expected (n, height, width) or (n, height, width, 3)")
    if images.dtype.kind not in "iuf":
        raise ConfigError(f"{where} have dtype {images.dtype}; expected numbers")
    scaled = images_to_floats(images.astype(np.uint8)) if images.dtype == np.uint8 else images
    return np.moveaxis(scaled, -1, 1) if colour else scaled[:, None]


_SHAPES_SIZE = 32
#: what load_data makes of a name; the images are those of the model "shapes-cnn"
_MAKERS: dict[str, Callable[[], DataSet]] = {
    "digits": load_digits,
    "shapes": lambda: shapes(2000, _SHAPES_SIZE),
    "sentences": lambda: sentences(4000),
    "clicks": lambda: clicks(8000),
}
DATA_NAMES = tuple(_MAKERS)


@checked
def load_data(source: str | Path) -> DataSet:
    """Load a data set by name, or from a file or folder.

    `source` is one of the following:

    - a name: "digits", "shapes", "sentences" or "clicks";
    - an ``.npz`` archive (:func:`~ddlsim.data.read_npz`);
    - a ``.bin`` file of CIFAR-10 (:func:`~ddlsim.data.read_cifar`);
    - a folder with the downloaded files of CIFAR or MNIST, whose training samples are loaded
      (:func:`~ddlsim.data.read_downloaded` also reads the test samples);
    - a folder of images, either with one sub-folder per class or with file names like cat.123.jpg. Images are resized
      to 32 x 32 (use :func:`~ddlsim.data.read_images` for other sizes).

    Raises ConfigError for any other source.
    """
    if source in _MAKERS:
        return _MAKERS[str(source)]()
    path = Path(source)
    if os.path.isdir(path):
        return read_downloaded(path) or read_images(path, size=_SHAPES_SIZE)
    if path.suffix == ".npz":
        return read_npz(path)
    if path.suffix == ".bin":
        return read_cifar(path)
    if os.path.exists(path):
        raise ConfigError(f"data = {str(source)!r}: expected a file that ends in .npz or .bin, or a folder of images")
    if path.suffix or len(path.parts) != 1:
        hint = f"use an existing path, or one of {', '.join(DATA_NAMES)}"
        raise ConfigError(f"data = {str(source)!r}: no such file or folder; {hint}")
    raise unknown_name("data", str(source), DATA_NAMES)
