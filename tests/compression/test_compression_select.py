"""Which elements are sent, how codes are packed, and the formats of half the width."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ddlsim.compression import (
    BF16,
    FP16,
    RandomK,
    Threshold,
    exchange,
)
from ddlsim.compression.payloads import pack, unpack
from ddlsim.compression.sparse import ms_top_k, top_k
from ddlsim.errors import ConfigError
from ddlsim.streams import stream

finite = st.floats(-1e6, 1e6, width=32)
vectors = hnp.arrays(np.float32, st.integers(1, 80), elements=finite)


def normal(seed, n):
    return stream(seed, 0, "gradient").standard_normal(n).astype(np.float32)


def once(compressor, vector, seed=0):
    """What one worker's gradient becomes."""
    return exchange(compressor, [vector], [compressor.init(vector.size)], [stream(seed, 0, "x")]).mean


# --- selection ---------------------------------------------------------------------------------------------


@given(vectors, st.data())
def test_top_k_leaves_nothing_larger_behind(values, data):
    k = data.draw(st.integers(0, values.size))
    taken = top_k(values, k)
    assert taken.dtype == np.int32
    assert taken.size == k
    assert (np.diff(taken) > 0).all()
    left = np.setdiff1d(np.arange(values.size), taken)
    assert np.abs(values[left]).max(initial=0.0) <= np.abs(values[taken]).min(initial=np.inf)


def test_top_k_takes_the_lowest_of_equals():
    assert top_k(np.array([1, -2, 2, 1, -1], np.float32), 3).tolist() == [0, 1, 2]


@given(vectors, st.data())
def test_top_k_is_a_contraction(values, data):
    """|x - C(x)|^2 <= (1 - k/d) |x|^2 (Stich et al. 2018, lemma A.1)."""
    k = data.draw(st.integers(1, values.size))
    exact = values.astype(np.float64)
    error = exact.copy()
    error[top_k(values, k)] = 0.0
    assert error @ error <= (1.0 - k / values.size) * (exact @ exact) * (1 + 1e-12)


@given(vectors, st.data(), st.integers(1, 30))
def test_ms_top_k_takes_exactly_k(values, data, n_searches):
    """Whatever the ties, the size and the number of searches."""
    k = data.draw(st.integers(0, values.size))
    taken = ms_top_k(values, k, n_searches, stream(1, 0, "x"))
    assert taken.size == k == np.unique(taken).size
    assert (np.diff(taken) > 0).all()


@pytest.mark.parametrize("k", [1, 10, 100, 500])
def test_ms_top_k_is_top_k_when_the_search_is_fine(k):
    """Of 2,000 normal numbers 30 halvings separate any two, above the mean magnitude (about 850 of them)."""
    values = normal(3, 2000)
    np.testing.assert_array_equal(ms_top_k(values, k, 30, stream(1, 0, "x")), top_k(values, k))


def test_ms_top_k_includes_the_k1_largest_and_fills_from_the_band_below():
    """Magnitudes 1..100 (mean 50.5), k = 10, three halvings: thresholds 75.25 (26 reach it), 87.625 (13) and
    93.8125 (7). So the 7 largest are certain; the other 3 are consecutive among the six 88..93.
    """
    values = np.arange(1, 101, dtype=np.float32)
    starts = set()
    for seed in range(60):
        taken = values[ms_top_k(values, 10, 3, stream(seed, 0, "x"))]
        assert taken[3:].tolist() == [94, 95, 96, 97, 98, 99, 100]
        assert np.diff(taken[:3]).tolist() == [1, 1]
        starts.add(int(taken[0]))
    assert starts == {88, 89, 90, 91}


def test_ms_top_k_below_the_mean_takes_from_anywhere_below():
    """The search starts at the mean: with k larger than what reaches it, all that do are taken, and k in all."""
    values = normal(3, 200)
    above = np.flatnonzero(np.abs(values) >= np.abs(values).mean(dtype=np.float64))
    taken = ms_top_k(values, 150, 30, stream(1, 0, "x"))
    assert taken.size == 150
    assert np.isin(above, taken).sum() >= above.size - 1  # the threshold comes within one halving of the mean


def test_threshold_sends_what_reaches_it():
    payload, _ = Threshold(2.0).encode(np.array([1, -2, 3, 0], np.float32), None, stream(0, 0, "x"))
    assert payload.indices.tolist() == [1, 2]
    assert payload.nbytes == 16
    none, _ = Threshold(9.0).encode(np.array([1, -2], np.float32), None, stream(0, 0, "x"))
    assert none.nbytes == 0


def test_random_k_takes_the_same_new_coordinates_on_every_worker():
    compressor, states = RandomK(0.1), [RandomK(0.1).init(100, seed=3)] * 2
    seen = []
    assert [state.step for state in states] == [0, 0]
    for step in range(3):
        pairs = [compressor.encode(normal(r, 100), states[r], stream(step, r, "x")) for r in range(2)]
        (a, b), states = [p for p, _ in pairs], [s for _, s in pairs]
        np.testing.assert_array_equal(a.indices, b.indices)
        seen.append(tuple(a.indices))
        assert [state.step for state in states] == [step + 1] * 2
    assert len(set(seen)) == 3


# --- packing -----------------------------------------------------------------------------------------------


@given(st.integers(1, 32), st.data())
def test_pack_and_unpack_are_inverse(width, data):
    codes = np.array(data.draw(st.lists(st.integers(0, 2**width - 1), max_size=40)), np.uint32)
    packed = pack(codes, width)
    assert packed.nbytes == (codes.size * width + 7) // 8
    np.testing.assert_array_equal(unpack(packed, width, codes.size), codes)


def test_packed_bits_are_where_they_should_be():
    assert pack(np.array([5, 2, 7], np.uint32), 3).tolist() == [0b10101011, 0b10000000]


def test_codes_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="code 8 needs more than width = 3 bits"):
        pack(np.array([8], np.uint32), 3)


# --- half precision ----------------------------------------------------------------------------------------


@given(hnp.arrays(np.float32, 20, elements=st.floats(-(2.0**126), 2.0**126, width=32)))
def test_bf16_rounds_to_8_bits_and_is_idempotent(values):
    rounded = once(BF16(), values)
    tiny = 2.0**-126  # below it float32, and so bfloat16, has fewer bits
    assert (np.abs(rounded.astype(np.float64) - values) <= 2.0**-8 * np.maximum(np.abs(values), tiny)).all()
    np.testing.assert_array_equal(once(BF16(), rounded), rounded)


def test_bf16_rounds_ties_to_even():
    """Between 1 and 1 + 2**-7 the middle goes to 1, between 1 + 2**-7 and 1 + 2**-6 it goes up."""
    values = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8], np.float32)
    assert once(BF16(), values).tolist() == [1.0, 1 + 2.0**-6, -1.0]


@pytest.mark.parametrize(("compressor", "largest"), [(FP16(), 65504.0), (BF16(), 3.3895314e38)])
def test_too_large_for_the_format_is_refused(compressor, largest):
    assert np.abs(once(compressor, np.array([-largest], np.float32)))[0] == np.float32(largest)
    with pytest.raises(ConfigError, match="scale the loss down"):
        once(compressor, np.array([0, largest * 1.001], np.float32))
