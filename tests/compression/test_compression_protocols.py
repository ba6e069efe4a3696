"""DGC, gTop-k, Count-Sketch and PowerSGD against hand calculations and theory; bad fields."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ddlsim.compression import (
    DGC,
    QSGD,
    CountSketch,
    ErrorFeedback,
    GTopK,
    MSTopK,
    PowerSGD,
    RandomK,
    TernGrad,
    Threshold,
    TopK,
    aggregate,
    average,
    exchange,
    sent_nbytes,
)
from ddlsim.compression.payloads import SparsePayload
from ddlsim.compression.sketch import _hashes, _median
from ddlsim.compression.sparse import merge_top_k, top_k
from ddlsim.errors import ConfigError
from ddlsim.streams import stream

finite = st.floats(-1e6, 1e6, width=32)


def normal(seed, n):
    return stream(seed, 0, "gradient").standard_normal(n).astype(np.float32)


def once(compressor, vector, seed=0):
    """What one worker's gradient becomes."""
    return exchange(compressor, [vector], [compressor.init(vector.size)], [stream(seed, 0, "x")]).mean


# --- DGC ---------------------------------------------------------------------------------------------------


def test_dgc_warm_up_stages():
    """Lin et al. 2018, section 3.3: 75 %, 93.75 %, 98.4375 %, 99.6 %, 99.9 %."""
    compressor = DGC(steps_per_stage=2)
    sizes = [compressor.expected_nbytes(100_000, step)[0] // 8 for step in range(12)]
    assert sizes == [25000, 25000, 6250, 6250, 1562, 1562, 400, 400, 100, 100, 100, 100]
    assert compressor.expected_nbytes(100_000) == (8 * 25000,)  # the first, unless it is said


def test_dgc_by_hand():
    """Two elements, half sent, m = 1/2. Step 1: g = (4, 1): u = v = (4, 1), send 4, keep u = v = (0, 1).
    Step 2: g = (1, 1): u = (1, 1.5), v = (1, 2.5): send 2.5 at element 1, keep u = v = (1, 0).
    """
    compressor = DGC(steps_per_stage=1, momentum=0.5, sparsities=(0.5,))
    state = compressor.init(2)
    payload, state = compressor.encode(np.array([4, 1], np.float32), state, stream(0, 0, "x"))
    assert (payload.indices.tolist(), payload.values.tolist()) == ([0], [4.0])
    assert (state.velocity.tolist(), state.unsent.tolist()) == ([0, 1], [0, 1])
    payload, state = compressor.encode(np.array([1, 1], np.float32), state, stream(0, 0, "x"))
    assert (payload.indices.tolist(), payload.values.tolist()) == ([1], [2.5])
    assert (state.velocity.tolist(), state.unsent.tolist()) == ([1, 0], [1, 0])


def test_dgc_sends_all_of_the_momentum_sum_of_a_single_gradient():
    """Momentum correction: without masking in the way, a gradient g at one step amounts to g / (1 - m) in all.
    The element that is never chosen keeps growing to that sum before it goes.
    """
    compressor = DGC(steps_per_stage=1, momentum=0.5, sparsities=(0.5,))
    state, zero = compressor.init(2), np.zeros(2, np.float32)
    _, state = compressor.encode(np.array([8, 1], np.float32), state, stream(0, 0, "x"))
    for _ in range(30):  # element 0 is kept larger, so element 1 accumulates
        _, state = compressor.encode(np.array([8, 0], np.float32), state, stream(0, 0, "x"))
    payload, _ = compressor.encode(zero, state, stream(0, 0, "x"))
    assert payload.values[0] == pytest.approx(2.0)


# --- gTop-k ------------------------------------------------------------------------------------------------


def sparse(n, pairs):
    return SparsePayload(n, np.array(sorted(pairs), np.int32), np.array([pairs[i] for i in sorted(pairs)], np.float32))


def test_merging_adds_and_keeps_the_k_largest():
    merged = merge_top_k(sparse(9, {0: 3, 4: 2}), sparse(9, {4: 2.5, 7: -3.5}))
    assert (merged.indices.tolist(), merged.values.tolist()) == ([4, 7], [4.5, -3.5])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(0, 1000))
def test_g_top_k_is_k_sparse_and_exact_for_two_workers(n_workers, seed):
    compressor, n = GTopK(0.1), 60
    gradients = [normal(seed + r, n) for r in range(n_workers)]
    payloads = [compressor.encode(g, None, stream(0, 0, "x"))[0] for g in gradients]
    mean = aggregate(compressor, payloads)
    assert np.count_nonzero(mean) <= 6
    if n_workers == 2:
        total = np.sum([compressor.decode(p) for p in payloads], axis=0)
        np.testing.assert_allclose(np.sort(np.abs(mean * 2))[-6:], np.sort(np.abs(total))[-6:], rtol=1e-6)


def test_g_top_k_with_feedback_keeps_what_the_root_drops():
    """Two workers: sum of what all received + residuals = sum of all gradients, exactly as for one worker."""
    compressor, n = ErrorFeedback(GTopK(0.1)), 60
    states, received, given_ = [compressor.init(n)] * 2, np.zeros(n), np.zeros(n)
    for step in range(20):
        gradients = [normal(2 * step + r, n) for r in range(2)]
        done = exchange(compressor, gradients, states, [stream(0, r, "x") for r in range(2)])
        states = done.states
        received += 2.0 * done.mean
        given_ += np.sum(gradients, axis=0)
    np.testing.assert_allclose(received + states[0].residual + states[1].residual, given_, atol=1e-4)


def test_g_top_k_loses_what_a_branch_drops_at_a_coordinate_that_survives():
    """k = 1, coordinate 0. Workers 0 and 1 send 2 at 0 and 3 at 1: their merge drops the 2. Workers 2 and 3
    send 5 at 0 each: 10 there, which the root keeps. Worker 0 sees coordinate 0 in the result, takes its 2
    for sent, and it is gone (Shi et al. 2019, algorithm 4, has the same).
    """
    compressor = ErrorFeedback(GTopK(0.5))
    gradients = [np.array(g, np.float32) for g in ([2, 0], [0, 3], [5, 0], [5, 0])]
    done = exchange(compressor, gradients, [compressor.init(2)] * 4, [stream(0, 0, "x")] * 4)
    assert (4.0 * done.mean).tolist() == [10.0, 0.0]
    assert [state.residual.tolist() for state in done.states] == [[0, 0], [0, 3], [0, 0], [0, 0]]


def test_g_top_k_tree_sends_logarithmically():
    """Binomial tree of 8: rank 0 answers 3 children; an odd rank sends once up; 7 edges, both ways."""
    assert sent_nbytes("gtopk_tree", [10.0] * 8).tolist() == [30, 10, 20, 10, 30, 10, 20, 10]


# --- Count-Sketch ------------------------------------------------------------------------------------------


def test_sketch_is_linear_and_finds_the_heavy_hitters_of_the_sum():
    """20 elements are 1 on every worker; 20 others are +2 on half the workers and -2 on the rest, so that they
    are the largest of every gradient and vanish from the sum. Local top-k sends the wrong ones.
    """
    n, heavy, distractors = 5000, np.arange(20) * 199 + 3, np.arange(20) * 211 + 90
    compressor = CountSketch(20 / n, rows=7, columns=500)
    gradients = []
    for rank in range(4):
        gradient = 0.01 * normal(rank, n)
        gradient[heavy] += 1.0
        gradient[distractors] = 2.0 if rank % 2 else -2.0
        gradients.append(gradient)
        np.testing.assert_array_equal(top_k(gradient, 20), distractors)
    states = [compressor.init(n, seed=1)] * 4
    firsts = [compressor.encode(g, s, stream(0, 0, "x")) for g, s in zip(gradients, states, strict=True)]
    combined = average(compressor, [p for p, _ in firsts])
    whole, _ = compressor.encode(np.mean(gradients, axis=0), states[0], stream(0, 0, "x"))
    np.testing.assert_allclose(combined.table, whole.table, atol=1e-5)
    done = exchange(compressor, gradients, states, [stream(0, 0, "x")] * 4)
    np.testing.assert_array_equal(np.flatnonzero(done.mean), heavy)
    np.testing.assert_allclose(done.mean[heavy], np.mean(gradients, axis=0)[heavy], rtol=1e-6)  # exact values
    assert done.nbytes[0].tolist() == [4.0 * 7 * 500] * 4
    assert done.nbytes[1].tolist() == [4.0 * 20] * 4


def test_hashes_are_shared_so_nobody_can_change_them():
    hashes = _hashes(50, rows=3, columns=7, seed=1)
    assert all(a is b for a, b in zip(hashes, _hashes(50, rows=3, columns=7, seed=1), strict=True))
    for array in hashes:
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 0


@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 9), st.just(6)), elements=finite))
def test_median_of_rows(rows):
    np.testing.assert_array_equal(_median(list(rows)), np.median(rows, axis=0))


def test_sketch_estimates_within_the_count_sketch_bound():
    """|estimate - g| <= 2 |g| / sqrt(columns) with high probability (one row: Chebyshev, 3/4; the median of 7
    rows fails only if 4 do: at most 7 %, and normally far less).
    """
    n = 3000
    compressor, vector = CountSketch(0.01, rows=7, columns=300), normal(1, n)
    state = compressor.init(n, seed=2)
    sketch, _ = compressor.encode(vector, state, stream(0, 0, "x"))
    error = np.abs(compressor.estimate(sketch, state) - vector)
    assert (error > 2 * np.linalg.norm(vector) / np.sqrt(300)).mean() < 0.07


# --- PowerSGD ----------------------------------------------------------------------------------------------


def low_rank(seed, rows, columns, rank):
    rng = stream(seed, 0, "matrix")
    factors = rng.standard_normal((rows, rank)), rng.standard_normal((rank, columns))
    return (factors[0] @ factors[1]).astype(np.float32)


def test_power_sgd_is_exact_on_matrices_of_its_rank():
    matrix = low_rank(1, 20, 30, 3)
    np.testing.assert_allclose(once(PowerSGD(3, {"w": (20, 30)}), matrix.ravel()), matrix.ravel(), atol=2e-5)


def test_power_sgd_converges_to_the_truncated_svd():
    """Warm start: repeated on one matrix it is subspace iteration, whose limit is the best rank-r matrix."""
    matrix = normal(2, 20 * 30).reshape(20, 30) + 3 * low_rank(1, 20, 30, 2)
    u, s, v = np.linalg.svd(matrix.astype(np.float64))
    best = (u[:, :2] * s[:2]) @ v[:2]
    compressor = PowerSGD(2, {"w": (20, 30)})
    state, errors = compressor.init(600, seed=1), []
    for _ in range(30):
        done = exchange(compressor, [matrix.ravel()], [state], [stream(0, 0, "x")])
        state = done.states[0]
        errors.append(np.linalg.norm(done.mean.reshape(20, 30) - best))
    assert errors[-1] < 1e-3 < errors[0]


def test_power_sgd_on_the_mean_of_workers_equals_power_sgd_of_the_mean():
    """Linear (Vogels et al. 2019, section 3): N workers get what one with the mean gradient would get."""
    shapes = {"conv": (8, 3, 3, 3), "bias": (8,), "dense": (10, 12)}
    n, compressor = 216 + 8 + 120, PowerSGD(2, shapes)
    states, single = [compressor.init(n, seed=1)] * 4, compressor.init(n, seed=1)
    for step in range(4):
        gradients = [normal(10 * step + r, n) for r in range(4)]
        together = exchange(compressor, gradients, states, [stream(0, 0, "x")] * 4)
        alone = exchange(compressor, [np.mean(gradients, axis=0)], [single], [stream(0, 0, "x")])
        states, single = together.states, alone.states[0]
        np.testing.assert_allclose(together.mean, alone.mean, atol=1e-4)
    np.testing.assert_allclose(together.mean[216:224], np.mean(gradients, axis=0)[216:224], rtol=1e-5)


def test_power_sgd_bytes():
    """r (rows + columns) floats per matrix, vectors whole: conv is 8 x 27, dense 10 x 12."""
    shapes = {"conv": (8, 3, 3, 3), "bias": (8,), "dense": (10, 12)}
    assert PowerSGD(2, shapes).expected_nbytes(344) == (4 * 2 * (8 + 10), 4 * (2 * (27 + 12) + 8))


def test_power_sgd_names_a_wrong_total():
    with pytest.raises(ConfigError, match="shapes have 6 elements, but the gradient has 7; list the shapes"):
        PowerSGD(1, {"w": (2, 3)}).init(7)


# --- fields ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TopK(0.0), "TopK: density = 0.0: must be above 0 and at most 1"),
        (lambda: MSTopK(1.5), "MSTopK: density = 1.5"),
        (lambda: MSTopK(0.5, n_searches=0), "MSTopK: n_searches = 0: must be a positive integer"),
        (lambda: Threshold(-1.0), "Threshold: minimum = -1.0"),
        (lambda: RandomK(float("nan")), "RandomK: density = nan"),
        (lambda: GTopK(-0.1), "GTopK: density = -0.1"),
        (lambda: CountSketch(0.1, 0, 5), "CountSketch: rows = 0"),
        (lambda: CountSketch(0.1, 5, 0), "CountSketch: columns = 0"),
        (lambda: QSGD(0), "QSGD: n_levels = 0"),
        (lambda: QSGD(2**31), "QSGD: n_levels = 2147483648"),
        (lambda: QSGD(1, bucket_size=0), "QSGD: bucket_size = 0"),
        (lambda: TernGrad(clip_sigmas=0.0), "TernGrad: clip_sigmas = 0.0"),
        (lambda: DGC(0), "DGC: steps_per_stage = 0"),
        (lambda: DGC(1, momentum=1.0), "DGC: momentum = 1.0"),
        (lambda: DGC(1, momentum=-0.1), "DGC: momentum = -0.1"),
        (lambda: DGC(1, sparsities=(1.0,)), "DGC: sparsities[0] = 1.0"),
        (lambda: DGC(1, sparsities=(0.5, -0.1)), "DGC: sparsities[1] = -0.1"),
        (lambda: DGC(1, sparsities=()), "DGC: sparsities is empty"),
        (lambda: PowerSGD(0, {}), "PowerSGD: rank = 0"),
        (lambda: PowerSGD(1, {"w": (0, 3)}), "PowerSGD: shapes"),
    ],
)
def test_fields_out_of_range_are_named(build, message):
    with pytest.raises(ConfigError) as caught:
        build()
    assert message in str(caught.value)
    assert "must be" in str(caught.value)


@pytest.mark.parametrize(
    ("compressor", "n_sent"),
    [
        (TopK(1e-9), 1),
        (TopK(1.0), 40),
        (MSTopK(0.1, n_searches=1), 4),
        (DGC(1, momentum=0.0), 10),
        (DGC(1, momentum=0.999, sparsities=(0.0,)), 40),
        (DGC(1, sparsities=(0.999,)), 1),
        (Threshold(0.0), 40),
        (CountSketch(0.5, 1, 1), 20),
        (QSGD(1, bucket_size=1), 40),
        (QSGD(2**31 - 1), 40),
        (TernGrad(clip_sigmas=1e-3), 40),
        (PowerSGD(1, {"w": (40, 1)}), 40),
    ],
    ids=repr,
)
def test_fields_at_their_limits_are_taken(compressor, n_sent):
    """... and the gradient (1, 2, ..., 40) arrives with as many elements as may."""
    gradient = np.arange(1, 41, dtype=np.float32)
    assert np.count_nonzero(once(compressor, gradient)) <= n_sent
    if isinstance(compressor, TopK | MSTopK | DGC | Threshold | CountSketch):
        assert np.count_nonzero(once(compressor, gradient)) == n_sent


def test_a_gradient_whose_sum_is_too_large_for_its_type_is_finite():
    """2 x 3e38 is above the largest float32, 3.4e38; the elements are not."""
    vector = np.array([3e38, 3e38, 1.0], np.float32)
    np.testing.assert_array_equal(once(TopK(1.0), vector), vector)


def test_gradient_of_another_size_than_the_state():
    compressor = ErrorFeedback(TopK(0.1))
    with pytest.raises(
        ConfigError, match=r"gradient has 5 elements, but the state is for 4; pass the state that init\(5\) returns"
    ):
        compressor.encode(np.zeros(5, np.float32), compressor.init(4), stream(0, 0, "x"))


def test_nothing_to_aggregate():
    with pytest.raises(ConfigError, match="TopK: payloads is empty"):
        aggregate(TopK(0.1), [])


def test_payloads_of_different_steps_do_not_average():
    compressor = RandomK(0.5)
    payloads = [compressor.encode(normal(0, n), compressor.init(n), stream(0, 0, "x"))[0] for n in (4, 8)]
    with pytest.raises(ConfigError, match="the payloads have different sizes"):
        average(compressor, payloads)


@pytest.mark.parametrize("missing", ["states", "rngs"])
def test_every_worker_needs_a_state_and_a_stream(missing):
    given_ = {"states": [None] * 2, "rngs": [stream(0, 0, "x")] * 2}
    given_[missing] = given_[missing][:1]
    with pytest.raises(ConfigError, match=r"2 gradients, . states and . random generators; pass one of each"):
        exchange(TopK(0.5), [normal(0, 4)] * 2, **given_)


@pytest.mark.parametrize("sizes", [[], [4, 5]])
def test_workers_must_have_gradients_of_one_size(sizes):
    gradients = [normal(0, n) for n in sizes]
    with pytest.raises(ConfigError, match=r"TopK: expected one or more gradients of the same size, got sizes \[.*\]"):
        exchange(TopK(0.5), gradients, [None] * len(sizes), [stream(0, 0, "x")] * len(sizes))
