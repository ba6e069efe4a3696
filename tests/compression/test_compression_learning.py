"""Compression on problems that are solved by hand or in closed form: who converges and who does not."""

import numpy as np
import pytest
from draws import rows

from ddlsim.compression import (
    DGC,
    QSGD,
    CountSketch,
    ErrorFeedback,
    GTopK,
    MSTopK,
    Natural,
    NoCompression,
    OneBit,
    PowerSGD,
    RandomK,
    SignSGD,
    TernGrad,
    TopK,
    exchange,
)
from ddlsim.streams import stream


def descend(compressor, gradient_of, w, rate, n_steps, n_workers=1, seed=0):
    """Return the trajectory of distributed gradient descent; gradient_of(w, rank, rng) is worker rank's."""
    states = [compressor.init(w.size, seed=seed)] * n_workers
    rngs = [stream(seed, rank, "encode") for rank in range(n_workers)]
    path = [w]
    for _ in range(n_steps):
        gradients = [gradient_of(w, rank, rngs[rank]).astype(np.float32) for rank in range(n_workers)]
        done = exchange(compressor, gradients, states, rngs)
        states = done.states
        w = w - np.float32(rate) * done.mean
        path.append(w)
    return np.array(path)


def tug(w, rank, rng):
    """Three linear losses whose mean, (w0 + w1 + w2) / 3, falls along (1, 1, 1) (Beznosikov et al. 2020, ex. 1).

    Each worker's largest element has the opposite sign: a_i = -3 at its own axis and 2 at the others, plus
    w / 8 from the quadratic that all share.
    """
    a = np.full(3, 2.0)
    a[rank] = -3.0
    return a + w / 8.0


def test_top_1_without_feedback_runs_the_wrong_way():
    """The optimum is at w_i = -8/3, where (1 + 3 w_i / 8) / 3 = 0. Top-1 makes worker i send only its -3 + w_i/8,
    so w rises, until at w_i = 4 the magnitudes 3 - w_i/8 and 2 + w_i/8 tie and it goes no further.
    """
    start, best = np.zeros(3, np.float32), -8.0 / 3.0
    wrong = descend(TopK(1 / 3), tug, start, 0.2, 500, n_workers=3)[-1]
    right = descend(ErrorFeedback(TopK(1 / 3)), tug, start, 0.2, 500, n_workers=3)[-200:].mean(axis=0)
    np.testing.assert_allclose(wrong, 4.0, atol=0.5)
    np.testing.assert_allclose(right, best, atol=0.1)


def test_scaled_sign_without_feedback_stalls_where_it_meets_opposed_noise():
    """One-dimensional in spirit (Karimireddy et al. 2019, counterexample 1): the gradient is 4 with
    probability 1/4 and -1 otherwise, mean +1/4, so w must fall; the sign says -1 three times in four, so bare
    signs make it rise. With its error fed back a 1-bit compressor follows the mean.
    """

    def noisy(w, rank, rng):
        return np.where(rng.random(w.size) < 0.25, 4.0, -1.0)

    start = np.zeros(64, np.float32)
    assert descend(SignSGD(), noisy, start, 0.01, 400)[-1].mean() > 1.0  # 0.01 * 400 * 1/2 = 2 expected
    fed_back = descend(ErrorFeedback(OneBit()), noisy, start, 0.01, 400)[-1].mean()
    assert fed_back == pytest.approx(-1.0, abs=0.25)  # 0.01 * 400 * 1/4 = 1


def logistic(n_workers=4, n=200, d=40):
    """Return the workers' data, and the loss and gradient of ridge logistic regression on it."""
    rng = stream(3, 0, "data")
    truth = rng.standard_normal(d)
    x = rng.standard_normal((n_workers, n, d))
    y = np.sign(x @ truth + rng.standard_normal((n_workers, n)))

    def gradient(w, rank, _):
        margin = y[rank] * (x[rank] @ w)
        return -(x[rank].T @ (y[rank] / (1 + np.exp(margin)))) / n + 0.01 * w

    def loss(w):
        return np.logaddexp(0, -y * (x @ w)).mean() + 0.005 * (w @ w)

    return gradient, loss


GRADIENT, LOSS = logistic()
START = np.zeros(40, np.float32)


@pytest.fixture(scope="module")
def best():
    return LOSS(descend(NoCompression(), GRADIENT, START, 1.0, 400, n_workers=4)[-1])


ENDS = {}


def ended(compressor):
    """The loss after 600 steps, worked out once."""
    if repr(compressor) not in ENDS:
        ENDS[repr(compressor)] = LOSS(descend(compressor, GRADIENT, START, 0.4, 600, n_workers=4)[-1])
    return ENDS[repr(compressor)]


CONVERGE = [
    (ErrorFeedback(TopK(0.05)), 1e-3),
    (ErrorFeedback(MSTopK(0.05)), 1e-3),
    (ErrorFeedback(RandomK(0.1)), 1e-3),
    (ErrorFeedback(GTopK(0.1)), 3e-3),
    (ErrorFeedback(CountSketch(0.1, rows=5, columns=20)), 1e-3),
    (ErrorFeedback(OneBit()), 1e-3),
    (ErrorFeedback(PowerSGD(1, {"w": (5, 8)})), 1e-3),
    (DGC(steps_per_stage=50, momentum=0.5, sparsities=(0.75, 0.95)), 3e-3),
    (QSGD(16), 1e-3),
    (TernGrad(), 2e-3),
    (Natural(), 1e-3),
]


@pytest.mark.parametrize(("compressor", "gap"), rows(CONVERGE, 4), ids=lambda x: repr(x).replace(" ", "")[:40])
def test_logistic_regression_reaches_the_uncompressed_loss(best, compressor, gap):
    assert LOSS(START) == pytest.approx(np.log(2))
    assert ended(compressor) < best + gap


@pytest.mark.parametrize("compressor", [TopK(0.05), OneBit()])
def test_without_feedback_they_stop_short_on_the_same_problem(best, compressor):
    """Same k, same steps: at the optimum the workers' gradients do not vanish, only their mean does, and what
    each sends of its own does not average to 0. The gap is at least ten times that with feedback.
    """
    without, fed_back = (ended(each) - best for each in (compressor, ErrorFeedback(compressor)))
    assert without > 5e-3
    assert without > 10 * fed_back
