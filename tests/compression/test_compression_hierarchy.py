"""HiTopKComm's two levels, and the cost model of encoding."""

import numpy as np
import pytest

from ddlsim.compression import ErrorFeedback, MSTopK, NoCompression, TopK, exchange
from ddlsim.compression.contract import Traits
from ddlsim.compression.cost import (
    FREE,
    SORT_V100,
    CodecCost,
    decode_launches,
    decode_traffic,
    encode_launches,
    encode_traffic,
    measure_cost,
)
from ddlsim.compression.exchange import hierarchical_exchange, shard_sizes
from ddlsim.compression.sketch import CountSketch
from ddlsim.errors import ConfigError
from ddlsim.streams import stream

N = 1000


def run(compressor, n_machines, n_local, n=N, n_steps=1):
    """Return every step's exchange and its gradients."""
    n_workers = n_machines * n_local
    sizes = shard_sizes(n, n_local)
    states = [compressor.init(sizes[rank % n_local], seed=1) for rank in range(n_workers)]
    steps = []
    for step in range(n_steps):
        draws = [stream(step, rank, "gradient").standard_normal(n) for rank in range(n_workers)]
        gradients = [draw.astype(np.float32) for draw in draws]
        rngs = [stream(step, rank, "encode") for rank in range(n_workers)]
        done = hierarchical_exchange(compressor, gradients, states, rngs, n_local)
        states = done.states
        steps.append((done, gradients))
    return steps


@pytest.mark.parametrize(("n_machines", "n_local"), [(1, 1), (1, 4), (4, 1), (3, 4), (2, 7)])
def test_density_one_is_the_mean(n_machines, n_local):
    ((done, gradients),) = run(TopK(1.0), n_machines, n_local)
    np.testing.assert_allclose(done.mean, np.mean(gradients, axis=0), atol=1e-6)


def test_one_worker_per_machine_is_the_flat_exchange():
    ((done, gradients),) = run(TopK(0.1), 4, 1)
    flat = exchange(TopK(0.1), gradients, [None] * 4, [stream(0, r, "encode") for r in range(4)])
    np.testing.assert_array_equal(done.mean, flat.mean)
    np.testing.assert_array_equal(done.sent_between, flat.sent)
    assert done.sent_inside.tolist() == [0.0] * 4


def test_machines_send_n_local_times_fewer_bytes():
    """Shi et al. 2021: per worker (m - 1) * 2 rho d/n * 4 bytes between machines, against (m n - 1) * 2 rho d * 4
    of a flat top-k all-gather, and 2 (n - 1)/n * 4 d inside.
    """
    m, n_local, rho = 4, 5, 0.1
    ((done, gradients),) = run(MSTopK(rho), m, n_local)
    np.testing.assert_allclose(done.sent_between, (m - 1) * 2 * rho * N / n_local * 4)
    np.testing.assert_allclose(done.sent_inside, 2 * (n_local - 1) / n_local * 4 * N)
    flat = exchange(MSTopK(rho), gradients, [None] * 20, [stream(0, 0, "x")] * 20)
    np.testing.assert_allclose(flat.sent, (m * n_local - 1) * 2 * rho * N * 4)


def test_uneven_shards_count_every_byte_once():
    """Reduce-scatter and all-gather of a ring move (n - 1) d elements each per machine, however they are cut."""
    assert shard_sizes(10, 4) == [3, 3, 2, 2]
    ((done, _),) = run(NoCompression(), 1, 4, n=10)
    assert done.sent_inside.sum() == 2 * 3 * 40
    assert done.sent_between.tolist() == [0.0] * 4


def test_error_feedback_on_shards_conserves_mass():
    """Each machine's mean is what is compressed: sum of sent + mean over machines of residuals."""
    m, n_local = 3, 4
    steps = run(ErrorFeedback(MSTopK(0.05)), m, n_local, n_steps=6)
    states = steps[-1][0].states
    residuals = [
        np.concatenate([state.residual for state in states[start : start + n_local]])
        for start in range(0, m * n_local, n_local)
    ]
    sent = np.sum([done.mean for done, _ in steps], axis=0)
    total = np.sum([np.mean(gradients, axis=0) for _, gradients in steps], axis=0)
    np.testing.assert_allclose(sent + np.mean(residuals, axis=0), total, atol=1e-5)


@pytest.mark.parametrize("n_local", [3, 8])
def test_workers_that_do_not_fill_their_machines(n_local):
    vector = np.zeros(4, np.float32)
    with pytest.raises(ConfigError, match=f"n_local = {n_local}: must divide the number of workers, 4"):
        hierarchical_exchange(NoCompression(), [vector] * 4, [None] * 4, [stream(0, 0, "x")] * 4, n_local)


@pytest.mark.parametrize("other", range(4))
def test_workers_with_gradients_of_different_sizes(other):
    gradients = [np.zeros(5 if rank == other else 4, np.float32) for rank in range(4)]
    with pytest.raises(ConfigError, match="gradient"):
        hierarchical_exchange(NoCompression(), gradients, [None] * 4, [stream(0, 0, "x")] * 4, 2)


def test_cost_by_hand():
    """2**20 elements at 5e-10 s * n log2 n: 5e-10 * 20 * 1048576 = 10.49 ms."""
    assert SORT_V100.encode_seconds(2**20) == pytest.approx(5e-10 * 20 * 2**20)
    assert SORT_V100.decode_seconds(2**20) == 0.0
    assert FREE.encode_seconds(10**9) == FREE.decode_seconds(10**9, 8) == 0.0
    cost = CodecCost(encode=1e-9, decode=2e-9, overhead=1e-5)
    assert cost.encode_seconds(1000) == pytest.approx(1.1e-5)
    assert cost.decode_seconds(1000, n_payloads=4) == pytest.approx(4 * 1.2e-5)
    assert SORT_V100.encode_seconds(1) == SORT_V100.encode_seconds(0) == 0.0
    assert SORT_V100.encode_seconds(2) == pytest.approx(5e-10 * 2)


def test_traffic_by_hand():
    """1,000 elements are 4,000 bytes. Encoding passes 2.5 times over them and writes the 800 bytes of the payload;
    decoding reads five payloads, 4,000 bytes in all, passes 3 times over the gradient for each and writes the mean."""
    traits = Traits("all_gather", encode_passes=2.5, decode_passes=3.0, encode_kernels=7)
    assert encode_traffic(traits, 1000, 800.0) == 2.5 * 4000 + 800
    assert decode_traffic(traits, 1000, 4000.0, n_payloads=5) == 5 * 3 * 4000 + 4000 + 4000
    assert decode_traffic(traits, 1000, 800.0) == 3 * 4000 + 800 + 4000
    assert (encode_launches(traits), decode_launches(traits), decode_launches(traits, 5)) == (7, 1, 5)


def test_what_is_sent_as_it_lies_there_costs_nothing():
    plain = NoCompression().traits
    assert (encode_traffic(plain, 1000, 4000.0), decode_traffic(plain, 1000, 4000.0, 5)) == (0.0, 0.0)
    assert (encode_launches(plain), decode_launches(plain, 5)) == (0, 0)


@pytest.mark.parametrize("compressor", [TopK(0.01), CountSketch(0.01, 3, 100)])
def test_measured_cost_is_that_of_this_machine(compressor):
    """Plausible: between 10 ps and 10 us an element, and what it predicts is what it measured."""
    cost = measure_cost(compressor, 20_000, n_repeats=3)
    assert 1e-11 < cost.encode < 1e-5
    assert 1e-12 < cost.decode < 1e-5
    assert cost.encode_seconds(20_000) == pytest.approx(20_000 * cost.encode)


def test_cost_fields_out_of_range():
    with pytest.raises(ConfigError, match=r"CodecCost: decode = -1\.0: must be finite and not negative"):
        CodecCost(decode=-1.0)
