"""What every compressor must do. A new one adds a line to CASES."""

import dataclasses
import itertools

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
from ddlsim.testing import check_compressor

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


#: fields of payloads that every worker has already, so that they do not travel
AGREED = {"CountSketch": ["indices"], "RandomK": ["indices"], "PowerSGD": ["left"]}


@every
def test_satisfies_the_protocol(compressor):
    assert isinstance(compressor, Compressor)
    with pytest.raises(dataclasses.FrozenInstanceError):
        compressor.density = 0.5


@every
@pytest.mark.parametrize("n", [N, 1024])
def test_keeps_the_contract_that_users_are_held_to(compressor, n):
    if n != N and "PowerSGD" in name(compressor):
        pytest.skip("its shapes fix n")
    inner = getattr(compressor, "inner", compressor)
    check_compressor(compressor, n=n, agreed=AGREED.get(type(inner).__name__, ()))
    assert (compressor.expected_nbytes(n) is None) == ("Threshold" in name(compressor))


@dataclasses.dataclass(frozen=True)
class Wrong(FP16):
    """A compressor with one mistake."""

    mistake: str = ""

    def encode(self, gradient, state, rng):
        if self.mistake == "takes anything":
            gradient = np.nan_to_num(gradient).astype(np.float32)
        payload, state = super().encode(gradient, state, rng)
        if self.mistake == "changes":
            gradient *= 0.5
        if self.mistake == "view":
            state = gradient[:3]
        if self.mistake == "chance":
            payload = dataclasses.replace(payload, values=payload.values + np.float16(next(NUMBERS)))
        return payload, state

    def decode(self, payload):
        vector = super().decode(payload)
        if self.mistake == "type":
            return vector.astype(np.float64)
        return vector[:-1] if self.mistake == "short" else vector

    def expected_nbytes(self, n, step=0):
        return (4 * n,) if self.mistake == "bytes" else super().expected_nbytes(n, step)


NUMBERS = itertools.count()


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("changes", "encode modifies the gradient or the state; work on copies"),
        ("view", "a payload or state is a view of the gradient"),
        ("type", r"decode returns float64\(203,\); must return a finite float32 vector"),
        ("short", r"decode returns float32\(202,\)"),
        ("bytes", r"expected_nbytes\(203, 0\) = \(812,\), but \(406,\) bytes are sent"),
        ("chance", "uses random numbers that do not come from its rng"),
        ("takes anything", "encode accepts a NaN; call check_gradient"),
    ],
)
def test_the_contract_tells_what_is_wrong(mistake, said):
    check_compressor(Wrong())
    with pytest.raises(ConfigError, match=f"Wrong: {said}"):
        check_compressor(Wrong(mistake))


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
        for field in AGREED.get(type(getattr(compressor, "inner", compressor)).__name__, []):
            agreed = [arrays(getattr(payload, field)) for payload in payloads]
            for other in agreed[1:]:
                for mine, theirs in zip(agreed[0], other, strict=True):
                    np.testing.assert_array_equal(mine, theirs)
        mean = aggregate(compressor, payloads)
        states = [settle(compressor, p, mean, s) for p, s in zip(payloads, states, strict=True)]


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
    with pytest.raises(ConfigError, match=r"2 of 203 elements are NaN or infinite .*the first is element 17.*clip"):
        compressor.encode(vector, compressor.init(N, seed=7), stream(1, 0, "encode"))


@every
def test_wrong_type_or_shape_is_refused(compressor):
    state = compressor.init(N, seed=7)
    for wrong in (gradient(1).astype(np.float64), gradient(1).reshape(7, 29)):
        with pytest.raises(ConfigError, match="expected a flat float32 vector"):
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
    rtol = {"FP16": 2.0**-11, "BF16": 2.0**-8}.get(name(compressor).removeprefix("ErrorFeedback(inner=")[:4], 1e-5)
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
    with pytest.raises(ConfigError, match=r"an all-reduce cannot sum its payloads, because .*; use its own collective"):
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
