"""Compressed gradients where workers share weights or layers: `FSDP` and `Hybrid` end as replicas would."""

import gc

import numpy as np
import pytest
from draws import few

import ddlsim
from ddlsim import FP16, FSDP, AllReduce, DdpBuckets, Hybrid, Measured, ShardedUpdate, TopK, Training, simulate
from ddlsim import compression as cp
from ddlsim.cluster import star
from ddlsim.runtime.exchange import CollectiveExchange

COMPRESSORS = [
    cp.FP16(), cp.TopK(0.1), cp.ErrorFeedback(cp.TopK(0.05)), cp.SignSGD(), cp.PowerSGD(2), cp.Threshold(0.5),
    cp.GTopK(0.1),
]  # fmt: skip


def learned(strategy, compressor, batch_size, updates=4, model="digits-cnn"):
    training = Training("digits", updates=updates, rate=0.02, evaluate_every=updates)
    return simulate("office-1gbe", model, strategy, batch_size, 4, seed=3, training=training, compression=compressor)


@pytest.mark.parametrize("compressor", few(COMPRESSORS, 2), ids=lambda each: type(each).__name__)
def test_the_values_are_those_of_replicas(compressor):
    """Bit for bit, where the same parts are compressed."""
    whole = learned(AllReduce(overlap="layer"), compressor, 8)
    units = [i for i, layer in enumerate(ddlsim.load_model("digits-cnn").layers) if layer.n_params]
    together = (
        FSDP(stage=1, overlap="layer"), FSDP(stage=2, overlap="layer", micro_batch=2, no_sync=True),
        FSDP(units=units), Hybrid({}), Hybrid({}, micro_batches=4, overlap="layer", cost="nccl"),
    )  # fmt: skip
    for strategy in together:
        if isinstance(strategy, Hybrid) and strategy.cost == "nccl" and compressor in (cp.SignSGD(), cp.GTopK(0.1)):
            continue  # no library has their collectives
        result = learned(strategy, compressor, 32)
        np.testing.assert_array_equal(result.params, whole.params)
        assert any(note.startswith("compression") for note in result.notes)


def test_of_split_layers_the_sums_are_dense():
    """One update: the layers that no worker has a part of are as compressed replicas have them, the others as dense."""
    dense, sparse = (learned(AllReduce(overlap="layer"), each, 8, 1) for each in (None, TopK(0.1)))
    result = learned(Hybrid({"conv2": 2, "dense1": 1}), TopK(0.1), 32, 1)
    assert "compression: the gradients of split layers (conv2) stay uncompressed" in result.notes
    sizes = [layer.n_params for layer in ddlsim.load_model("digits-cnn").layers if layer.n_params]
    first = slice(0, sizes[0])
    np.testing.assert_array_equal(result.params[first], sparse.params[first])
    np.testing.assert_array_equal(result.params[sizes[0] :], dense.params[sizes[0] :])
    assert (sparse.params != dense.params).any()


@pytest.mark.parametrize("strategy", [FSDP(stage=1, overlap="none"), ShardedUpdate(), FSDP(stage=2, overlap="none")])
@pytest.mark.parametrize("compressor", [FP16(), TopK(0.01)])
def test_a_step_by_hand(strategy, compressor):
    """Encode all, reduce-scatter halves (or all-gather payloads), decode a share, gather all."""
    n, cost = 4, ddlsim.CodecCost(encode=1e-9, decode=2e-9, overhead=1e-4)
    cluster = star(n, bandwidth=1e9, latency="10 us")
    result = simulate(
        cluster, "resnet18", strategy, 8 * n if isinstance(strategy, FSDP) else 8, steps=2, device="v100",
        compute=Measured("10 ms", 8), compression=ddlsim.Compression(compressor, cost=cost),
        fabric=ddlsim.Fabric("ring"),
    )  # fmt: skip
    elements = result.workloads[0].gradient_nbytes / 4
    (payload,) = compressor.expected_nbytes(int(elements))
    summed, payloads = ("reduce_scatter", 1) if compressor == FP16() else ("all_gather", n)
    moved = ddlsim.collective_time(cluster, "ring", payload * payloads, kind=summed)
    gathered = ddlsim.collective_time(cluster, "ring", 4.0 * elements, kind="all_gather")
    codec = cost.encode_seconds(int(elements)) + cost.decode_seconds(int(elements) // n, payloads)
    optimizer = result.workloads[0].optimizer
    assert optimizer == 0.0  # in the measured step
    assert result.step_time == pytest.approx(10e-3 + codec + moved + gathered, rel=1e-9)


@pytest.mark.parametrize(("stage", "weights"), [(1, 1.0), (2, 1.0), (3, 2.0)])
def test_half_the_bytes_of_gradients(stage, weights):
    """(N - 1)/N (1/2 + 1 or 2) P: weights are gathered as they are."""
    n = 4
    cluster = star(n, bandwidth=1e9, latency=0.0)
    runs = [
        simulate(cluster, "resnet18", FSDP(stage=stage), 2 * n, steps=steps, compression=FP16(), device="v100")
        for steps in (4, 2)
    ]
    sent = (runs[0].nbytes_sent - runs[1].nbytes_sent) / 2 / n
    gradient = runs[0].workloads[0].gradient_nbytes
    assert sent == pytest.approx((n - 1) / n * (0.5 + weights) * gradient, rel=1e-6)


def test_the_scattering_algorithm_is_that_of_the_strategy():
    """Compressed or not: recursive halving has log2(N) latencies, of two links each, a ring N - 1."""
    times = []
    for how in ("ring", "recursive_halving"):
        sharded = FSDP(stage=1, reduce_scatter=how, all_gather="ring", overlap=DdpBuckets())
        for strategy in (ShardedUpdate(how), sharded):
            batch_size = 8 if isinstance(strategy, ShardedUpdate) else 64
            result = simulate(star(8, bandwidth=1e12, latency="1 ms"), "lenet5", strategy, batch_size, steps=2,
                              compute=Measured("1 ms", 8), compression=FP16())  # fmt: skip
            times.append(result.step_time)
    assert times[0] - times[2] == pytest.approx((7 - 3) * 2e-3, rel=1e-3)
    assert times[1] - times[3] == pytest.approx((7 - 3) * 2e-3, rel=1e-3)


def test_exchanges_between_machines_are_freed_with_their_run():
    simulate("dgx-a100-pod", "resnet50", AllReduce("hierarchical"), 8, 16, steps=1, warmup=0, compression=TopK(0.01))
    gc.collect()
    assert not any(type(each) is CollectiveExchange for each in gc.get_objects())
