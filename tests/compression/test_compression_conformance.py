"""What every compressor must do. A new one adds a line to CASES."""

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ddlsim.compression import (
    BF16,
    DGC,
    FP16,
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
    Threshold,
    TopK,
    aggregate,
    average,
    exchange,
    sent_nbytes,
    settle,
)
from ddlsim.compression.contract import Compressor
from ddlsim.errors import ConfigError
from ddlsim.streams import stream

N = 203  # not a multiple of 8, so that packing has a remainder
SHAPES = {"conv": (6, 3, 3, 3), "bias": (6,), "dense": (5, 7)}

PLAIN = [
    NoCompression(),
    FP16(),
    BF16(),
    TopK(0.1),
    MSTopK(0.1),
    RandomK(0.1),
    RandomK(0.1, rescale=True),
    Threshold(0.5),
    DGC(steps_per_stage=3),
    GTopK(0.1),
    CountSketch(0.1, rows=5, columns=31),
    QSGD(4),
    QSGD(1, bucket_size=64),
    QSGD(16, bucket_size=64),
    TernGrad(),
    TernGrad(clip_sigmas=2.5),
    Natural(),
    SignSGD(),
    OneBit(),
    PowerSGD(2, SHAPES),
]
CASES = PLAIN + [ErrorFeedback(inner) for inner in PLAIN if not inner.traits.no_feedback]
#: these decode a vector of zeros to something else: one bit has no third value
NO_ZERO = (SignSGD,)


def name(compressor):
    return repr(compressor).replace(" ", "")[:60]


every = pytest.mark.parametrize("compressor", CASES, ids=name)


def gradient(seed, n=N):
    return stream(seed, 0, "gradient").standard_normal(n).astype(np.float32)


def messages(compressor, vector, state, rng):
    """All payloads that one worker alone sends for `vector`, and its next state."""
    payload, state = compressor.encode(vector, state, rng)
    sent = [payload]
    if compressor.traits.n_rounds == 2:
        payload, state = compressor.follow_up(average(compressor, sent), state)
        sent.append(payload)
    return sent, settle(compressor, payload, compressor.decode(payload), state)


def arrays(value):
    """Every array of a payload or state, in order."""
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, tuple):
        return [array for part in value for array in arrays(part)]
    if dataclasses.is_dataclass(value):
        return [array for f in dataclasses.fields(value) for array in arrays(getattr(value, f.name))]
    return []


#: arrays that every worker has already, so that they do not travel
AGREED = {"AlignedPayload": ["indices"], "LowRankPayload": ["left"]}


def travelling(payload):
    agreed = AGREED.get(type(payload).__name__, [])
    fields = [f.name for f in dataclasses.fields(payload) if f.name not in agreed]
    return [array for field in fields for array in arrays(getattr(payload, field))]


@every
def test_satisfies_the_protocol(compressor):
    assert isinstance(compressor, Compressor)
    with pytest.raises(dataclasses.FrozenInstanceError):
        compressor.density = 0.5


@every
def test_round_trip_keeps_shape_and_type_and_changes_no_argument(compressor):
    vector, state = gradient(1), compressor.init(N, seed=7)
    before, memory = vector.copy(), [array.copy() for array in arrays(state)]
    sent, _ = messages(compressor, vector, state, stream(1, 0, "encode"))
    decoded = compressor.decode(sent[-1])
    assert decoded.shape == (N,)
    assert decoded.dtype == np.float32
    assert np.isfinite(decoded).all()
    np.testing.assert_array_equal(vector, before)
    for array, old in zip(arrays(state), memory, strict=True):
        np.testing.assert_array_equal(array, old)


@every
def test_payload_shares_no_memory_with_the_gradient(compressor):
    vector = gradient(1)
    sent, state = messages(compressor, vector, compressor.init(N, seed=7), stream(1, 0, "encode"))
    for array in arrays(sent[-1]) + arrays(state):
        assert not np.shares_memory(array, vector)


@every
def test_decode_sees_only_the_payload(compressor):
    """A compressor built anew, in principle elsewhere, decodes the bytes of the payload alone."""
    sent, _ = messages(compressor, gradient(1), compressor.init(N, seed=7), stream(1, 0, "encode"))
    elsewhere = pickle.loads(pickle.dumps(compressor))
    received = pickle.loads(pickle.dumps(sent[-1]))
    np.testing.assert_array_equal(elsewhere.decode(received), compressor.decode(sent[-1]))


@every
@pytest.mark.parametrize("n", [N, 1024])
def test_nbytes_are_those_of_the_buffers_and_as_expected(compressor, n):
    if n != N and "PowerSGD" in name(compressor):
        pytest.skip("its shapes fix n")
    state, rng = compressor.init(n, seed=7), stream(1, 0, "encode")
    for step in range(20):  # DGC's size changes with the step
        sent, state = messages(compressor, gradient(step, n), state, rng)
        for payload in sent:
            assert payload.nbytes == sum(len(array.tobytes()) for array in travelling(payload))
        expected = compressor.expected_nbytes(n, step)
        if "Threshold" in name(compressor):
            assert expected is None
        else:
            assert tuple(payload.nbytes for payload in sent) == expected


@every
def test_agreed_arrays_are_the_same_on_every_worker(compressor):
    """What is not counted must not carry anything of a worker's own."""
    states = [compressor.init(N, seed=7) for _ in range(3)]
    for step in range(3):
        firsts = [compressor.encode(gradient(10 * step + r), states[r], stream(r, 0, "x")) for r in range(3)]
        payloads, states = [p for p, _ in firsts], [s for _, s in firsts]
        if compressor.traits.n_rounds == 2:
            combined = average(compressor, payloads)
            seconds = [compressor.follow_up(combined, state) for state in states]
            payloads, states = [p for p, _ in seconds], [s for _, s in seconds]
        for field in AGREED.get(type(payloads[0]).__name__, []):
            agreed = [arrays(getattr(payload, field)) for payload in payloads]
            for other in agreed[1:]:
                for mine, theirs in zip(agreed[0], other, strict=True):
                    np.testing.assert_array_equal(mine, theirs)
        mean = aggregate(compressor, payloads)
        states = [settle(compressor, p, mean, s) for p, s in zip(payloads, states, strict=True)]


@every
def test_same_streams_same_bytes(compressor):
    def run():
        states = [compressor.init(N, seed=7) for _ in range(3)]
        for step in range(3):
            rngs = [stream(5, rank, f"encode {step}") for rank in range(3)]
            done = exchange(compressor, [gradient(10 * step + r) for r in range(3)], states, rngs)
            states = done.states
        return [done.mean, *(array for state in states for array in arrays(state))]

    for first, second in zip(run(), run(), strict=True):
        assert first.tobytes() == second.tobytes()


@every
def test_zero_gradient_stays_zero(compressor):
    if isinstance(compressor, NO_ZERO):
        pytest.skip("one bit has no third value")
    zero, state = np.zeros(N, np.float32), compressor.init(N, seed=7)
    for _ in range(2):
        done = exchange(compressor, [zero], [state], [stream(1, 0, "encode")])
        np.testing.assert_array_equal(done.mean, zero)
        state = done.states[0]
    back = exchange(compressor, [gradient(1)], [state], [stream(1, 0, "encode")])
    assert np.any(back.mean != 0.0)  # and it does not blind the compressor


@every
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_is_refused(compressor, bad):
    vector = gradient(1)
    vector[[17, 40]] = bad
    with pytest.raises(ConfigError, match=r"2 of 203 elements are NaN or infinite, the first at 17.*clip"):
        compressor.encode(vector, compressor.init(N, seed=7), stream(1, 0, "encode"))


@every
def test_wrong_type_or_shape_is_refused(compressor):
    state = compressor.init(N, seed=7)
    for wrong in (gradient(1).astype(np.float64), gradient(1).reshape(7, 29)):
        with pytest.raises(ConfigError, match="must be a flat float32 vector"):
            compressor.encode(wrong, state, stream(1, 0, "encode"))


@every
def test_aggregate_is_the_mean_of_what_each_worker_sent(compressor):
    """Except for the two whose collective is not a mean, which have tests of their own."""
    if compressor.traits.collective in ("majority_vote", "gtopk_tree"):
        pytest.skip("not a mean")
    states = [compressor.init(N, seed=7) for _ in range(4)]
    firsts = [compressor.encode(gradient(r), states[r], stream(r, 0, "x")) for r in range(4)]
    payloads = [payload for payload, _ in firsts]
    if compressor.traits.n_rounds == 2:
        combined = average(compressor, payloads)
        payloads = [compressor.follow_up(combined, state)[0] for _, state in firsts]
    mean = np.mean([compressor.decode(payload) for payload in payloads], axis=0)
    # half precision rounds the mean once more: 11 and 8 bits
    rtol = {"FP16": 2.0**-11, "BF16": 2.0**-8}.get(
        name(compressor).removeprefix("ErrorFeedback(inner=")[:4], 1e-5
    )
    np.testing.assert_allclose(aggregate(compressor, payloads), mean, rtol=rtol, atol=2e-6)


@every
def test_one_worker_receives_what_it_sent(compressor):
    vector, state = gradient(3), compressor.init(N, seed=7)
    sent, _ = messages(compressor, vector, state, stream(1, 0, "encode"))
    done = exchange(compressor, [vector], [state], [stream(1, 0, "encode")])
    np.testing.assert_allclose(done.mean, compressor.decode(sent[-1]), rtol=1e-6, atol=1e-6)
    assert done.sent.tolist() == [0.0]


@every
def test_only_linear_payloads_are_summed(compressor):
    states = [compressor.init(N, seed=7) for _ in range(2)]
    payloads = [compressor.encode(gradient(r), states[r], stream(r, 0, "x"))[0] for r in range(2)]
    if compressor.traits.collective == "all_reduce":
        assert average(compressor, payloads).nbytes == payloads[0].nbytes
        return
    with pytest.raises(ConfigError, match=r"cannot be summed by an all-reduce: .*; use its own collective"):
        average(compressor, payloads)


vectors = hnp.arrays(np.float32, st.just(N), elements=st.floats(-1e4, 1e4, width=32))


@settings(max_examples=8, deadline=None)
@given(data=st.lists(vectors, min_size=1, max_size=4))
@pytest.mark.parametrize("compressor", [c for c in CASES if isinstance(c, ErrorFeedback)], ids=name)
def test_error_feedback_conserves_mass(compressor, data):
    """Sum of what was sent + residual = sum of the gradients, up to float32."""
    state, sent = compressor.init(N, seed=7), np.zeros(N)
    for step, vector in enumerate(data):
        done = exchange(compressor, [vector], [state], [stream(step, 0, "x")])
        state = done.states[0]
        sent += done.mean
    total = np.sum(data, axis=0, dtype=np.float64)
    # values pile up before they are sent, so the rounding is relative to the largest
    size = 1e-30 + len(data) * max(np.linalg.norm(vector.astype(np.float64)) for vector in data)
    tolerance = 1e-3 if "FP16" in name(compressor) else 1e-5
    np.testing.assert_allclose(sent + state.residual, total, rtol=0, atol=tolerance * size)


IDENTITIES = [
    (TopK(1.0), 0.0),
    (MSTopK(1.0), 0.0),
    (RandomK(1.0), 0.0),
    (RandomK(1.0, rescale=True), 0.0),
    (Threshold(0.0), 0.0),
    (DGC(steps_per_stage=1, sparsities=(0.0,)), 0.0),
    (GTopK(1.0), 1e-6),
    (CountSketch(1.0, rows=1, columns=4), 0.0),
    (QSGD(2**30), 1e-6),
    (PowerSGD(100, SHAPES), 1e-5),
]


@pytest.mark.parametrize(("compressor", "tolerance"), IDENTITIES, ids=name)
def test_nothing_left_out_is_no_compression(compressor, tolerance):
    """k = d, s -> infinity, full rank, sparsity 0."""
    states = [compressor.init(N, seed=7) for _ in range(4)]
    for step in range(3):
        given_ = [gradient(10 * step + rank) for rank in range(4)]
        plain = exchange(NoCompression(), given_, [None] * 4, [stream(0, 0, "x")] * 4).mean
        done = exchange(compressor, given_, states, [stream(step, rank, "x") for rank in range(4)])
        states = done.states
        np.testing.assert_allclose(done.mean, plain, rtol=0, atol=tolerance)


@every
@pytest.mark.parametrize("n_workers", [1, 2, 5, 8])
def test_bytes_sent_follow_from_payloads(compressor, n_workers):
    states = [compressor.init(N, seed=7) for _ in range(n_workers)]
    rngs = [stream(r, 0, "x") for r in range(n_workers)]
    done = exchange(compressor, [gradient(r) for r in range(n_workers)], states, rngs)
    total = done.nbytes.sum()
    factor = {
        "all_gather": n_workers - 1,
        "gtopk_tree": 2 * (n_workers - 1) / n_workers,
        "all_reduce": 2 * (n_workers - 1) / n_workers,
        "majority_vote": 2 * (n_workers - 1) / n_workers,
    }[compressor.traits.collective]
    assert done.sent.sum() == pytest.approx(factor * total)
    assert done.sent.shape == (n_workers,)


def test_top_k_traffic_grows_with_the_workers():
    """At 75 % sparsity and 32 workers an all-gather moves 32 * 0.25 = 8 times what a dense ring does."""
    (sparse,), (dense,) = TopK(0.25).expected_nbytes(4096), NoCompression().expected_nbytes(4096)
    ratio = sent_nbytes("all_gather", [sparse] * 32) / sent_nbytes("all_reduce", [dense] * 32)
    np.testing.assert_allclose(ratio, 8.0)
