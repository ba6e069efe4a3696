"""Bundled and synthetic data, splits, shards and the order of batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlsim.data import (
    BatchStream,
    by_class,
    dirichlet,
    from_arrays,
    iid,
    load_digits,
    shapes,
    split,
    standardize,
)
from ddlsim.errors import ConfigError

LABELS = np.repeat(np.arange(5), [40, 10, 30, 5, 15])


def test_digits_are_those_of_the_uci_set():
    """1,797 images with the published class counts; the first is a 0 whose first row is 0 0 5 13 9 1 0 0."""
    digits = load_digits()
    assert digits.x.shape == (1797, 1, 8, 8)
    assert digits.x.dtype == np.float32
    assert np.bincount(digits.labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert (digits.x[0, 0, 0] * 16).tolist() == [0, 0, 5, 13, 9, 1, 0, 0]
    assert "CC BY 4.0" in digits.source


def test_split_is_stratified_disjoint_and_addressed_by_seed():
    digits = load_digits()
    marked = from_arrays(np.arange(1797.0)[:, None], digits.labels)
    train, held_out = split(marked, 0.2, seed=3)
    assert (train.n_samples, held_out.n_samples) == (1438, 359)
    assert sorted([*train.x[:, 0], *held_out.x[:, 0]]) == list(range(1797))
    counts, whole = np.bincount(held_out.labels), np.bincount(digits.labels)
    assert (abs(counts - 0.2 * whole) <= 1).all()
    assert (split(marked, 0.2, seed=3)[1].x == held_out.x).all()
    assert not np.array_equal(split(marked, 0.2, seed=4)[1].x, held_out.x)
    assert split(marked, 5, seed=0)[1].n_samples == 5


def test_standardize_uses_the_statistics_of_the_training_set():
    rng = np.random.default_rng(0)
    train = from_arrays(rng.normal([[[3.0]], [[-1.0]]], [[[2.0]], [[0.5]]], (500, 2, 4, 4)), np.arange(500) % 2)
    made = standardize(train)
    np.testing.assert_allclose(made.x.mean(axis=(0, 2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(made.x.std(axis=(0, 2, 3)), 1, atol=1e-5)
    one = train.take(np.array([7]))
    np.testing.assert_allclose(standardize(one, train).x, made.x[7:8])


def test_synthetic_images_are_a_prefix_of_larger_sets_and_fade_with_difficulty():
    many = shapes(600, size=16, seed=1)
    np.testing.assert_array_equal(shapes(300, size=16, seed=1).x, many.x[:300])
    assert many.x.dtype == np.float32
    assert many.x.min() >= 0
    assert many.x.max() <= 1
    assert np.bincount(many.labels).tolist() == [300, 300]
    assert not np.array_equal(shapes(300, size=16, seed=2).x, many.x[:300])

    def roughness(difficulty: float) -> float:  # differences of neighbouring pixels outside the object: noise
        return float(np.diff(shapes(100, 16, difficulty).x[..., 0, :], axis=-1).std())

    assert roughness(0.0) < roughness(0.4) < roughness(1.0)


@given(n_workers=st.integers(1, 20), seed=st.integers(0, 50))
def test_shards_hold_every_sample_once(n_workers: int, seed: int):
    for shards in (
        iid(LABELS, n_workers, seed),
        by_class(LABELS, n_workers),
        dirichlet(LABELS, n_workers, 1.0, seed),
    ):
        assert len(shards) == n_workers
        assert sorted(np.concatenate(shards)) == list(range(100))
        assert min(len(shard) for shard in shards) >= 1


def test_shards_by_class_see_few_classes_and_iid_ones_many():
    digits = load_digits().labels
    assert max(len(set(digits[shard])) for shard in by_class(digits, 10)) <= 3  # classes are not equally large
    assert min(len(set(digits[shard])) for shard in iid(digits, 10, 0)) == 10


def test_dirichlet_goes_from_one_class_to_all_as_alpha_grows():
    """The largest class share of a shard, averaged: near 1 for small alpha, near 1/10 for large."""
    digits = load_digits().labels

    def dominance(alpha: float) -> float:
        shards = dirichlet(digits, 10, alpha, seed=0)
        return float(np.mean([np.bincount(digits[shard]).max() / len(shard) for shard in shards]))

    assert dominance(0.05) > 0.6
    assert dominance(1000.0) < 0.15
    assert dominance(0.05) > dominance(0.5) > dominance(1000.0)


@given(n=st.integers(1, 30), size=st.integers(1, 40), seed=st.integers(0, 9))
def test_every_pass_of_a_batch_stream_is_a_permutation(n: int, size: int, seed: int):
    shard = np.arange(100, 100 + n)
    batches = BatchStream(shard, seed, rank=1)
    order = np.concatenate([batches.batch(step, size) for step in range(3 * n // size + 1)])
    for first in range(0, len(order) - n + 1, n):
        assert sorted(order[first : first + n]) == list(shard)
    late = BatchStream(shard, seed, rank=1)  # asked for a late batch first, it gives the same
    np.testing.assert_array_equal(late.batch(2, size), batches.batch(2, size))


def test_workers_that_take_turns_see_what_one_worker_sees():
    shard = np.arange(50)
    one, several = BatchStream(shard, 0), [BatchStream(shard, 0) for _ in range(4)]
    for step in range(6):
        parts = [worker.indices((step * 4 + rank) * 8, 8) for rank, worker in enumerate(several)]
        np.testing.assert_array_equal(np.concatenate(parts), one.batch(step, 32))


def test_streams_of_ranks_and_seeds_differ():
    orders = {tuple(BatchStream(np.arange(20), seed, rank).batch(0, 20)) for seed in (0, 1) for rank in (0, 1)}
    assert len(orders) == 4


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: from_arrays(np.zeros((3, 2)), [0, 1]),
            r"samples of shape \(3, 2\) do not match labels of shape \(2,\)",
        ),
        (lambda: from_arrays(np.zeros((2, 2)), [0j, 1j]), "type complex128"),
        (lambda: from_arrays(np.zeros((2, 2)), [0, -1]), "label -1"),
        (lambda: from_arrays([[1.0], [np.nan]], [0, 1]), "sample 1 contains NaN"),
        (lambda: split(load_digits(), 1797, 0), "held_out = 1797"),
        (lambda: split(load_digits(), 1.5, 0), "held_out = 1.5"),
        (lambda: shapes(10, size=4), "size = 4"),
        (lambda: shapes(10, difficulty=2.0), "difficulty = 2.0"),
        (lambda: iid(LABELS, 101, 0), "n_workers = 101"),
        (lambda: dirichlet(LABELS, 4, 0.0, 0), "alpha = 0.0"),
        (lambda: dirichlet(LABELS, 90, 0.01, 0), "raise alpha"),
        (lambda: BatchStream(np.arange(0), 0), "empty"),
        (lambda: BatchStream(np.arange(3), 0).batch(-1, 2), "first = -2"),
    ],
)
def test_bad_arguments_are_named(make, words: str):
    with pytest.raises(ConfigError, match=words):
        make()
