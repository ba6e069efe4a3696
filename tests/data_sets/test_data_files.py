"""The user's own files: MNIST-IDX, CIFAR binary, MedMNIST archives, image folders; and damaged ones."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from ddlsim.data import read_cifar, read_idx, read_images, read_npz
from ddlsim.errors import ConfigError

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (6, 5, 4), dtype=np.uint8)
CLASSES = np.array([0, 1, 2, 0, 1, 2], dtype=np.uint8)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def cifar_records(labels: list[int], n_labels: int = 1) -> bytes:
    return b"".join(bytes([0] * (n_labels - 1) + [label]) + bytes([label] * 3072) for label in labels)


def test_idx_plain_and_packed(tmp_path: Path):
    (tmp_path / "images").write_bytes(idx(IMAGES))
    (tmp_path / "labels.gz").write_bytes(gzip.compress(idx(CLASSES)))
    data = read_idx(tmp_path / "images", tmp_path / "labels.gz")
    np.testing.assert_allclose(data.x[:, 0], IMAGES / 255.0, rtol=1e-6)
    assert data.labels.tolist() == CLASSES.tolist()
    assert data.sample_shape == (1, 5, 4)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not an IDX file"),
        (b"\x89PNG" + bytes(40), "not an IDX file"),
        (idx(IMAGES)[:-1], "do not fit the sizes"),
        (idx(CLASSES) + bytes(20), "exchanged"),
        (idx(IMAGES[:5]), "6 labels do not fit the 5 images"),
    ],
)
def test_bad_idx(tmp_path: Path, content: bytes, words: str):
    (tmp_path / "images").write_bytes(content)
    (tmp_path / "labels").write_bytes(idx(CLASSES))
    with pytest.raises(ConfigError, match=words):
        read_idx(tmp_path / "images", tmp_path / "labels")


def test_missing_and_damaged_packed_files(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none: cannot be read: No such file"):
        read_idx(tmp_path / "none", tmp_path / "none")
    (tmp_path / "half.gz").write_bytes(gzip.compress(idx(IMAGES))[:-20])
    with pytest.raises(ConfigError, match=r"half\.gz: cannot be read"):
        read_idx(tmp_path / "half.gz", tmp_path / "half.gz")


def test_cifar10_and_100(tmp_path: Path):
    (tmp_path / "a.bin").write_bytes(cifar_records([3, 9]))
    (tmp_path / "b.bin").write_bytes(cifar_records([0]))
    data = read_cifar([tmp_path / "a.bin", tmp_path / "b.bin"])
    assert data.labels.tolist() == [3, 9, 0]
    assert data.class_names[3] == "cat"
    np.testing.assert_allclose(data.x[:, 2, 31, 31], np.array([3, 9, 0]) / 255.0, rtol=1e-6)
    (tmp_path / "c.bin").write_bytes(cifar_records([99], n_labels=2))
    assert read_cifar(tmp_path / "c.bin", 100).labels.tolist() == [99]


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "0 bytes"), (bytes(3072), "binary version"), (cifar_records([10]), "label 10 is above 9")],
)
def test_bad_cifar(tmp_path: Path, content: bytes, words: str):
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_cifar(tmp_path / "a.bin")


def test_medmnist_archive(tmp_path: Path):
    path = tmp_path / "medmnist.npz"
    colour = RNG.integers(0, 256, (6, 5, 4, 3), dtype=np.uint8)
    np.savez(path, train_images=IMAGES, train_labels=CLASSES[:, None], test_images=colour, test_labels=CLASSES[:, None])
    train, test = read_npz(path), read_npz(path, "test")
    np.testing.assert_allclose(train.x[:, 0], IMAGES / 255.0, rtol=1e-6)
    np.testing.assert_allclose(test.x, np.moveaxis(colour, -1, 1) / 255.0, rtol=1e-6)
    assert train.labels.tolist() == CLASSES.tolist()
    with pytest.raises(ConfigError, match="unknown array 'tset_images'; did you mean 'test_images'"):
        read_npz(path, "tset")


class Trap:
    """Unpickling an instance would raise."""

    def __reduce__(self):
        return (exec, ("raise AssertionError('unpickled')",))


def test_bad_archives(tmp_path: Path):
    path = tmp_path / "bad.npz"
    np.savez(path, images=np.array([Trap(), Trap()], dtype=object), labels=CLASSES)
    with pytest.raises(ConfigError, match="without objects"):
        read_npz(path)
    path.write_bytes(b"PK\x03\x04 damaged")
    with pytest.raises(ConfigError, match=r"bad\.npz: cannot be read"):
        read_npz(path)
    with path.open("wb") as file:
        np.save(file, IMAGES)
    with pytest.raises(ConfigError, match="single array"):
        read_npz(path)
    np.savez(path, images=IMAGES[0], labels=CLASSES)
    with pytest.raises(ConfigError, match=r"images have shape \(5, 4\)"):
        read_npz(path)
    np.savez(path, images=IMAGES, labels=np.zeros((6, 14), np.uint8))
    with pytest.raises(ConfigError, match="several labels"):
        read_npz(path)


def write_images(folder: Path, names: list[str]) -> None:
    image = pytest.importorskip("PIL.Image")
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(np.full((9, 7, 3), 40 * i, np.uint8)).save(folder / name)


@pytest.mark.parametrize(
    "names",
    [
        ["cat/1.png", "cat/2.png", "dog/deep/1.png", "dog/2.bmp"],
        ["cat.1.png", "cat.2.png", "dog.1.png", "dog.10.png"],
    ],
)
def test_image_folders(tmp_path: Path, names: list[str]):
    write_images(tmp_path / "set", names)
    (tmp_path / "set" / "notes.txt").write_text("not an image")
    data = read_images(tmp_path / "set", size=8, cache=tmp_path / "cache")
    assert data.class_names == ("cat", "dog")
    assert data.labels.tolist() == [0, 0, 1, 1]
    assert data.sample_shape == (3, 8, 8)
    assert sorted(np.rint(data.x[:, 1, 4, 4] * 255)) == [0, 40, 80, 120]
    assert read_images(tmp_path / "set", 8, n_per_class=1, cache=tmp_path / "cache").labels.tolist() == [0, 1]


def test_decoded_images_are_cached_until_a_file_changes(tmp_path: Path):
    write_images(tmp_path / "set", ["a/1.png", "b/1.png"])
    first = read_images(tmp_path / "set", 8, cache=tmp_path / "cache")
    (entry,) = (tmp_path / "cache").iterdir()
    np.save(entry, np.full((2, 3, 8, 8), 255, np.uint8))  # only the cache can say this
    assert (read_images(tmp_path / "set", 8, cache=tmp_path / "cache").x == 1).all()
    entry.write_bytes(b"damaged")
    np.testing.assert_array_equal(read_images(tmp_path / "set", 8, cache=tmp_path / "cache").x, first.x)
    write_images(tmp_path / "set", ["c/1.png", "a/1.png", "b/1.png"])
    assert read_images(tmp_path / "set", 8, cache=tmp_path / "cache").n_classes == 3


def test_bad_image_folders(tmp_path: Path):
    with pytest.raises(ConfigError, match="is not a folder"):
        read_images(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="found images of 0 classes"):
        read_images(tmp_path / "empty")
    write_images(tmp_path / "set", ["a/1.png", "b/1.png"])
    (tmp_path / "set" / "a" / "2.jpg").write_bytes(b"not a jpeg")
    with pytest.raises(ConfigError, match=r"2\.jpg: cannot be decoded"):
        read_images(tmp_path / "set", cache=tmp_path / "cache")
    with pytest.raises(ConfigError, match="lower size"):
        read_images(tmp_path / "set", size=100_000)
