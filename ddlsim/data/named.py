"""Data sets by name or path."""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Count, Seed, Share, checked, whole
from ddlsim.data.dataset import DataSet, Floats, Ints, from_arrays, images_to_floats
from ddlsim.data.downloaded import read_cifar, read_downloaded
from ddlsim.data.image_folder import read_images
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.streams import stream

# ---------------------------------------------------------------- clicks

N_DENSE = 4
#: values of each categorical feature
FEATURE_ROWS = (60, 40, 20, 12, 6, 3)
_LATENT = 2


@checked
def clicks(n_samples: Count, seed: Seed = 0) -> DataSet:
    """Return `n_samples` of 4 numbers and 6 categorical features, as ids behind them: (n_samples, 10); labels are 1 for
    a click.

    Who clicks is drawn: the logit is a sum of weights of the numbers and the values of features, and of the dot product
    of two hidden vectors, one of each value of the two largest features. Half of all samples are clicks, more or less;
    of values of a feature some are more frequent than others (Zipf's law).
    """
    world, draws = stream(seed, 0, "clicks: the world"), stream(seed, 1, "clicks: the samples")
    numbers = draws.standard_normal((n_samples, N_DENSE))
    logit = numbers @ world.normal(0.0, 0.5, N_DENSE)
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


# ---------------------------------------------------------------- digits

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


# ---------------------------------------------------------------- sentences

CHARACTERS = " .abcdefghijklmnopqrstuvwxyz"
_NOUNS = ("worker", "server", "switch", "cable", "gradient", "model", "packet", "engineer", "cat", "bird")
_ADJECTIVES = ("slow", "fast", "small", "large", "new", "old", "stale", "quiet")
_VERBS = ("wait", "send", "hold", "find", "lose", "move", "need", "see")
_ADVERBS = ("now", "again", "at night", "every day", "too late", "in time")
_TEXTS = 64  # sentences of one random stream: a text does not depend on how long it becomes


@checked
def sentences(n_samples: Count, length: Count = 32, seed: Seed = 0) -> DataSet:
    """Return `n_samples` pieces of `length` characters of a text, as ids (n_samples, length); labels, of the same
    shape, are the characters that follow.

    The text is made by a small grammar in which subject and verb agree: "the old worker sends two birds now. some cats
    wait again. ..." The most frequent character, the blank, is 18 % of it.
    """
    wanted = n_samples * length + 1
    part = 0
    pieces: list[str] = []
    size = 0
    while size < wanted:
        text = "".join(_sentence(draws) for draws in [stream(seed, part, "sentences")] for _ in range(_TEXTS))
        pieces.append(text)
        size += len(text)
        part += 1
    place = {character: i for i, character in enumerate(CHARACTERS)}
    ids = np.array([place[character] for character in "".join(pieces)[:wanted]], dtype=np.int64)
    shape = (n_samples, length)
    names = tuple(CHARACTERS)
    source = "generated: a grammar of simple English sentences"
    return DataSet("sentences", ids[:-1].reshape(shape).astype(np.float32), ids[1:].reshape(shape), names, source)


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
    return f"{article} {adjective}{noun}{_plural(noun) if several else ''}"


def _plural(noun: str) -> str:
    return "es" if noun.endswith("ch") else "s"


def _split(draw: float, words: tuple[str, ...]) -> tuple[str, float]:
    """Return a word, and what is left of the draw, from 0 to 1."""
    at = draw * len(words)
    return words[int(at)], at - int(at)


def _one(words: tuple[str, ...], draw: float) -> str:
    return words[min(int(draw * len(words)), len(words) - 1)]


# ---------------------------------------------------------------- shapes

MAX_PIXELS = 10**10
_CHUNK = 256  # images of one random stream: the first n images of a seed do not depend on how many follow


@checked
def shapes(
    n_samples: Count, size: Annotated[int, whole(8, 4096)] = 32, difficulty: Share = 0.3, seed: Seed = 0
) -> DataSet:
    """Return `n_samples` colour images, shape (n_samples, 3, size, size), values 0..1, classes in turn.

    Class 0 is a striped disc, class 1 a square with a checkerboard of the same area. `difficulty` from 0 to 1
    raises the noise (deviation 0.02 + 0.5 difficulty) and fades the texture (contrast 1 - difficulty).
    Raises ConfigError for sizes below 8 and difficulties outside 0..1.
    """
    if n_samples * size * size > MAX_PIXELS:
        raise ConfigError(f"shapes: {n_samples} images of {size} x {size} do not fit into memory; make fewer")
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


# ---------------------------------------------------------------- NumPy archives, as of MedMNIST


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


# ---------------------------------------------------------------- names and paths

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
