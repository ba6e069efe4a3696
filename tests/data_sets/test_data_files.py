"""The user's own files: MNIST-IDX, CIFAR binary, MedMNIST archives, image folders; and damaged ones."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from ddlsim.data import DataSet, from_arrays, load_data, read_cifar, read_downloaded, read_idx, read_images, read_npz
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
        (idx(IMAGES)[:-1], "do not match the shape"),
        (idx(CLASSES) + bytes(20), "swapped"),
        (idx(IMAGES[:5]), "has 6 labels, but .* has 5 images"),
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
    [(b"", "0 bytes"), (bytes(3072), "binary version"), (cifar_records([10]), "label 10 is not below 10")],
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
    with pytest.raises(ConfigError, match="without pickled objects"):
        read_npz(path)
    path.write_bytes(b"PK\x03\x04 damaged")
    with pytest.raises(ConfigError, match=r"bad\.npz: cannot be read"):
        read_npz(path)
    with path.open("wb") as file:
        np.save(file, IMAGES)
    with pytest.raises(ConfigError, match="single array"):
        read_npz(path)
    np.savez(path, images=IMAGES[0], labels=CLASSES)
    with pytest.raises(ConfigError, match=r"samples of shape \(5, 4\) do not match labels of shape \(6,\)"):
        read_npz(path)
    np.savez(path, images=IMAGES, labels=np.zeros((6, 14), np.uint8))
    with pytest.raises(ConfigError, match=r"labels of shape .* are not supported"):
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
    with pytest.raises(ConfigError, match="contains images of 0 classes"):
        read_images(tmp_path / "empty")
    write_images(tmp_path / "set", ["a/1.png", "b/1.png"])
    (tmp_path / "set" / "a" / "2.jpg").write_bytes(b"not a jpeg")
    with pytest.raises(ConfigError, match=r"2\.jpg: cannot be decoded"):
        read_images(tmp_path / "set", cache=tmp_path / "cache")
    with pytest.raises(ConfigError, match="lower size"):
        read_images(tmp_path / "set", size=100_000)


# ---------------------------------------------------------------- as downloaded


def records(n, n_labels=1, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 10, (n, n_labels), np.uint8), rng.integers(0, 256, (n, 3072), np.uint8)


def downloaded(kind, tmp_path):
    """Make a folder as archives unpack to; return it with its training and test labels."""
    root = tmp_path / kind
    (root / "raw" if kind == "MNIST" else root).mkdir(parents=True)
    (labels, pixels), (tested, others) = records(12), records(4, seed=1)
    if kind == "cifar-10-batches-bin":
        for i in range(2):
            rows = slice(6 * i, 6 * i + 6)
            (root / f"data_batch_{i + 1}.bin").write_bytes(np.hstack([labels[rows], pixels[rows]]).tobytes())
        (root / "test_batch.bin").write_bytes(np.hstack([tested, others]).tobytes())
        (root / "batches.meta.txt").write_text("airplane\n")
    elif kind == "cifar-100-binary":
        (root / "train.bin").write_bytes(np.hstack([labels, labels, pixels]).tobytes())
        (root / "test.bin").write_bytes(np.hstack([tested, tested, others]).tobytes())
    elif kind.startswith("cifar-10"):
        key = b"labels" if kind == "cifar-10-batches-py" else b"fine_labels"
        names = ("data_batch_1", "test_batch") if key == b"labels" else ("train", "test")
        for name, classes, x in zip(names, (labels, tested), (pixels, others), strict=True):
            (root / name).write_bytes(pickle.dumps({b"data": x, key: classes.ravel().tolist()}))
        (root / "meta").write_bytes(b"")
    else:
        raw = root / "raw" if kind == "MNIST" else root
        for name, classes in (("train", labels), ("t10k", tested)):
            images = np.zeros((len(classes), 28, 28), np.uint8)
            pack = gzip.compress if kind == "FashionMNIST" else bytes
            end = ".gz" if kind == "FashionMNIST" else ""
            (raw / f"{name}-images-idx3-ubyte{end}").write_bytes(pack(idx(images)))
            (raw / f"{name}-labels-idx1-ubyte{end}").write_bytes(pack(idx(classes.ravel())))
    return root, labels.ravel(), tested.ravel()


KINDS = ("cifar-10-batches-bin", "cifar-10-batches-py", "cifar-100-binary", "cifar-100-python", "MNIST", "FashionMNIST")


@pytest.mark.parametrize("kind", KINDS)
def test_folders_as_downloaded_are_read(kind, tmp_path):
    root, labels, tested = downloaded(kind, tmp_path)
    train, test = load_data(root), read_downloaded(root, "test")
    assert train.labels.tolist() == labels.tolist()
    assert test.labels.tolist() == tested.tolist()
    assert train.sample_shape == ((3, 32, 32) if "cifar" in kind else (1, 28, 28))
    assert 0.0 <= train.x.min() <= train.x.max() <= 1.0
    if "cifar-10-" in kind:
        assert train.class_names[:2] == ("airplane", "automobile")
        assert np.array_equal(np.rint(255.0 * train.x[3]).ravel(), records(12)[1][3])
    if kind == "MNIST":
        assert load_data(root / "raw").labels.tolist() == labels.tolist()


class Evil:
    def __reduce__(self):
        return (print, ("run",))


def test_a_pickle_runs_nothing(tmp_path, capsys):
    root = tmp_path / "cifar-10-batches-py"
    root.mkdir()
    (root / "data_batch_1").write_bytes(pickle.dumps({b"data": Evil(), b"labels": [1]}))
    with pytest.raises(ConfigError, match=r"data_batch_1 is not a batch .* refers to builtins.print; only NumPy"):
        load_data(root)
    (root / "data_batch_1").write_bytes(b"\x80\x04nonsense")
    with pytest.raises(ConfigError, match="data_batch_1 is not a batch file from the Python version of CIFAR"):
        load_data(root)
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------- tokens, and numbers to predict


def test_tokens_and_targets_come_from_arrays_and_archives(tmp_path):
    tokens, following = np.arange(12).reshape(3, 4), np.arange(1, 13).reshape(3, 4)
    targets = np.array([0.5, -1.0, 2.0])
    for samples, labels in ((tokens, following), (tokens / 2.0, targets), (tokens / 2.0, np.stack([targets] * 2, 1))):
        np.savez(tmp_path / "own.npz", images=samples, labels=labels)
        for data in (from_arrays(samples, labels), load_data(tmp_path / "own.npz")):
            assert np.array_equal(data.labels, labels)
            assert data.is_regression == (labels is not following)
            assert data.n_classes == (13 if labels is following else 0)
    assert repr(from_arrays(tokens, targets)) == "<DataSet 'arrays': 3 samples of 4, 1 targets>"
    assert DataSet("own", tokens, following, tuple(map(str, range(13)))).labels.dtype == np.int64


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([0.5, np.nan, 1.0], "contains NaN or infinity"),
        ([0.5, 1.0], "do not match"),
        ([[0, 1], [1, 0], [1, 1]], "do not match"),
        (["a", "b", "c"], "expected integers"),
        ([True, False, True], "expected integers"),
    ],
)
def test_labels_that_are_none(labels, said):
    with pytest.raises(ConfigError, match=said):
        from_arrays(np.zeros((3, 4)), labels)
