"""Learning-rate schedules at points worked by hand."""

from __future__ import annotations

import pytest

from ddlsim.errors import ConfigError
from ddlsim.optim import (
    Constant,
    Cosine,
    GrowingBatch,
    Polynomial,
    Steps,
    WarmUp,
    linear_scaling,
    square_root_scaling,
)


@pytest.mark.parametrize(
    ("schedule", "epoch", "expected"),
    [
        (Constant(0.1), 7, 0.1),
        (Steps(1.0, (30, 60)), 29.99, 1.0),
        (Steps(1.0, (30, 60)), 30, 0.1),
        (Steps(1.0, (30, 60), 0.5), 99, 0.25),
        (Steps(1.0, (0.25, 0.5)), 0.25, 0.1),  # in the first epoch
        (Cosine(1.0, 10), 0, 1.0),
        (Cosine(1.0, 10), 5, 0.5),
        (Cosine(1.0, 9, 0.1), 3, 0.1 + 0.9 * 0.75),  # cos(pi / 3) = 1/2
        (Cosine(1.0, 10, 0.1), 11, 0.1),
        (Polynomial(1.0, 10), 5, 0.25),
        (Polynomial(1.0, 10, 1.0, 0.2), 5, 0.6),
        (Polynomial(1.0, 10), 12, 0.0),
        (WarmUp(Constant(0.8), 5, 0.1), 0, 0.1),
        (WarmUp(Constant(0.8), 5, 0.1), 2.5, 0.45),
        (WarmUp(Steps(0.8, (5, 7)), 5), 6, 0.08),
        (WarmUp(Cosine(1.0, 10), 5), 2.5, 0.25),
    ],
)
def test_rate(schedule, epoch: float, expected: float):
    assert schedule.rate(epoch) == pytest.approx(expected)


def test_scaling_with_workers():
    assert linear_scaling(0.1, 8) == pytest.approx(0.8)
    assert square_root_scaling(0.1, 16) == pytest.approx(0.4)
    assert linear_scaling(0.1, 1) == square_root_scaling(0.1, 1) == 0.1


def test_growing_batch_keeps_the_noise_scale_of_a_falling_rate():
    """The rate divided by the batch is the same whether the rate falls by 5 or the batch grows by 5."""
    growing, falling = GrowingBatch(128, (60, 120), 5), Steps(0.1, (60, 120), 0.2)
    for epoch in (0, 59.9, 60, 119, 120, 500):
        assert 0.1 / growing.batch_size(epoch) == pytest.approx(falling.rate(epoch) / 128)
    assert GrowingBatch(128, (1, 2, 3), 2, largest=300).batch_size(2) == 300


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Steps(0.1, (3, 2)), "milestones"),
        (lambda: Steps(0.1, (3, 3)), "milestones"),
        (lambda: Steps(0.1, (0, 3)), "milestones"),
        (lambda: Steps(0.1, (-1,)), "milestones"),
        (lambda: Steps(0.1, ()), "milestones"),
        (lambda: Cosine(0.1, 0), "n_epochs = 0"),
        (lambda: WarmUp(Constant(1), -1), "n_epochs = -1"),
        (lambda: Polynomial(-1, 5), "base = -1"),
        (lambda: GrowingBatch(0, (1,)), "base = 0"),
        (lambda: GrowingBatch(8, (1,), largest=4), "largest = 4"),
        (lambda: linear_scaling(0.1, 0), "n_workers = 0"),
    ],
)
def test_bad_settings_are_named(make, words: str):
    with pytest.raises(ConfigError, match=words):
        make()
