"""Quantisers and signs: expectations, variance bounds, and whether error feedback may wrap them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ddlsim.compression import (
    DGC,
    QSGD,
    ErrorFeedback,
    Natural,
    OneBit,
    RandomK,
    SignSGD,
    TernGrad,
    TopK,
    aggregate,
    exchange,
)
from ddlsim.errors import ConfigError
from ddlsim.streams import stream

finite = st.floats(-1e6, 1e6, width=32)
vectors = hnp.arrays(np.float32, st.integers(1, 80), elements=finite)


def normal(seed, n):
    return stream(seed, 0, "gradient").standard_normal(n).astype(np.float32)


def once(compressor, vector, seed=0):
    """What one worker's gradient becomes."""
    return exchange(compressor, [vector], [compressor.init(vector.size)], [stream(seed, 0, "x")]).mean


# --- unbiased quantisers -----------------------------------------------------------------------------------

UNBIASED = [
    (RandomK(0.25, rescale=True), lambda d: 1 / 0.25 - 1),
    (QSGD(4, bucket_size=64), lambda d: min(64 / 16, 8 / 4)),
    (QSGD(1, bucket_size=64), lambda d: 8.0),
    (TernGrad(), None),
    (Natural(), lambda d: 1 / 8),
]


@pytest.mark.parametrize(("compressor", "variance"), UNBIASED, ids=[repr(c)[:30] for c, _ in UNBIASED])
def test_mean_is_the_gradient_and_variance_within_its_bound(compressor, variance):
    """The mean of m samples is within 5 standard errors everywhere; E|Q - g|^2 <= variance * |g|^2.

    QSGD: min(d/s^2, sqrt(d)/s) (Alistarh et al. 2017, lemma 3.1); natural: 1/8 (Horvath et al. 2019, theorem
    1); random-k: d/k - 1.
    """
    assert compressor.traits.unbiased
    m, vector = 3000, normal(5, 64)
    state, rng = compressor.init(64, seed=1), stream(2, 0, "x")
    samples = np.empty((m, 64))
    for i in range(m):
        payload, state = compressor.encode(vector, state, rng)
        samples[i] = compressor.decode(payload)
    deviation = samples.std(axis=0)
    assert (np.abs(samples.mean(axis=0) - vector) <= 5 * deviation / np.sqrt(m) + 1e-6).all()
    assert (deviation > 0).any()
    if variance is not None:
        error = ((samples - vector) ** 2).sum(axis=1).mean()
        assert error <= variance(64) * (vector.astype(np.float64) ** 2).sum() * 1.03


def test_natural_gives_powers_of_two_next_to_the_value():
    values = np.array([3.0, -0.3, 4.0, 1e-40, 2.0**-140, -3.3e38], np.float32)
    allowed = [{2, 4}, {-0.25, -0.5}, {4}, {0, 2.0**-126}, {0, 2.0**-126}, {-(2.0**127)}]
    got = [once(Natural(), values, seed) for seed in range(50)]
    for i, choices in enumerate(allowed):
        found = {float(vector[i]) for vector in got}
        assert found <= choices
        assert found == choices or values[i] in (np.float32(1e-40), np.float32(2.0**-140))  # rarely up


def test_tern_grad_has_three_values_and_clips_when_asked():
    vector = normal(1, 1000)
    assert set(np.unique(once(TernGrad(), vector)).tolist()) <= {
        -float(np.abs(vector).max()), 0.0, float(np.abs(vector).max())}  # fmt: skip
    clipped = np.abs(once(TernGrad(clip_sigmas=2.5), vector)).max()
    assert clipped == pytest.approx(2.5 * vector.std(dtype=np.float64), rel=1e-6)
    assert not TernGrad(clip_sigmas=2.5).traits.unbiased


@pytest.mark.parametrize(("n_levels", "width"), [(1, 2), (2, 3), (3, 3), (4, 4), (7, 4), (127, 8), (2**30, 32)])
def test_qsgd_width_holds_all_codes(n_levels, width):
    """2 s + 1 codes."""
    assert QSGD(n_levels).width == width == int(np.ceil(np.log2(2 * n_levels + 1)))


def test_qsgd_of_one_element_is_exact_to_a_rounding():
    assert once(QSGD(1), np.array([-0.7], np.float32))[0] == pytest.approx(-0.7, rel=3e-7)


# --- signs -------------------------------------------------------------------------------------------------


@given(st.lists(hnp.arrays(np.float32, 13, elements=finite), min_size=1, max_size=7))
def test_majority_vote_is_the_sign_of_the_sum_of_signs(gradients):
    compressor = SignSGD()
    payloads = [compressor.encode(g, None, stream(0, 0, "x"))[0] for g in gradients]
    votes = np.sum([np.where(g >= 0, 1, -1) for g in gradients], axis=0)
    np.testing.assert_array_equal(aggregate(compressor, payloads), np.where(votes >= 0, 1, -1))
    assert compressor.combine(payloads).nbytes == 2  # and the answer takes one bit per element, too


@given(vectors)
def test_one_bit_levels_are_the_best_for_their_signs(values):
    """No other pair of levels has a smaller squared error: both errors are orthogonal to their indicator."""
    error = once(OneBit(), values).astype(np.float64) - values
    scale = np.abs(values).max(initial=0.0) * values.size
    assert abs(error[values >= 0].sum()) <= 1e-6 * scale + 1e-30
    assert abs(error[values < 0].sum()) <= 1e-6 * scale + 1e-30


def test_a_level_of_no_elements_is_zero():
    """The mean of 1, 2, 6 is 3; nothing is below zero, so that level is never read."""
    for sign in (1.0, -1.0):
        payload, _ = OneBit().encode(np.array([1, 2, 6], np.float32) * np.float32(sign), None, stream(0, 0, "x"))
        assert payload.levels.tolist() == ([0.0, 3.0] if sign > 0 else [-3.0, 0.0])


def test_error_feedback_refuses_what_it_would_spoil():
    for inner, why in [
        (SignSGD(), "signs have no magnitude"),
        (DGC(steps_per_stage=1), "keeps what it has not sent"),
        (RandomK(0.1, rescale=True), "set rescale = False"),
        (ErrorFeedback(TopK(0.1)), "wrap it once"),
        (QSGD(22), r"error can be 1.03 times .* raise n_levels above sqrt\(bucket_size\) = 22.6"),
    ]:
        with pytest.raises(ConfigError, match=why):
            ErrorFeedback(inner)


def test_the_residual_of_a_quantiser_that_is_no_contraction_explodes():
    """Why ErrorFeedback refuses QSGD with few levels: e <- x - C(x), x = g + e, written out."""
    compressor, residual, rng = QSGD(1, bucket_size=64), np.zeros(640, np.float32), stream(1, 0, "x")
    for step in range(60):
        corrected = normal(step, 640) + residual
        payload, _ = compressor.encode(corrected, None, rng)
        residual = corrected - compressor.decode(payload)
    assert np.linalg.norm(residual) > 1e3 * np.sqrt(640)


@pytest.mark.parametrize("compressor", [QSGD(23), TernGrad(), Natural(), TopK(0.05), OneBit()])
def test_the_residual_of_a_contraction_stays_bounded(compressor):
    feedback, rng = ErrorFeedback(compressor), stream(1, 0, "x")
    state = feedback.init(640)
    for step in range(200):
        _, state = feedback.encode(normal(step, 640), state, rng)
    assert np.linalg.norm(state.residual) < 40 * np.sqrt(640)  # top-k keeps 1/density = 20 gradients
