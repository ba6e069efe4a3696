"""The closed forms against numbers worked by hand, and in their limits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlsim import AllReduce, Measured, NoOverlap, ParameterServer, load_device, load_model, simulate
from ddlsim.cluster import star
from ddlsim.errors import ConfigError
from ddlsim.planner import guidelines
from ddlsim.workload.memory import memory_of

RATIO = st.floats(1e-6, 10.0)


def test_gpus_by_hand() -> None:
    """Four GPUs at 80 %: R = 0.2 / (3.2 - 1) = 1/11; back again (1 + 1/11) / (1 + 4/11) = 12/15 = 0.8."""
    ratio = guidelines.largest_overhead_ratio(4, 0.8)
    assert ratio == pytest.approx(1 / 11)
    assert guidelines.scaling_efficiency(ratio, 4) == pytest.approx(0.8)
    assert guidelines.largest_n_gpus(ratio, 0.8) == pytest.approx(4.0)


def test_gpus_in_the_limits() -> None:
    assert guidelines.scaling_efficiency(0.0, 1000) == 1.0
    assert guidelines.scaling_efficiency(0.3, 1) == 1.0
    assert guidelines.largest_n_gpus(0.0, 0.9) == math.inf
    assert guidelines.largest_overhead_ratio(2, 0.5) == math.inf  # two GPUs are never below one half
    n = 10**9  # Amdahl: the speed-up ends at (1 + R) / R
    assert n * guidelines.scaling_efficiency(0.25, n) == pytest.approx(5.0)


@given(RATIO, st.floats(0.05, 0.999))
def test_the_largest_number_of_gpus_just_reaches_the_efficiency(ratio: float, efficiency: float) -> None:
    """Seen as a function of a real G, the efficiency at the largest one is the one asked for."""
    n = guidelines.largest_n_gpus(ratio, efficiency)
    assert (1 + ratio) / (1 + n * ratio) == pytest.approx(efficiency)


def test_amdahl_limit_agrees_with_simulation() -> None:
    """The batch of 64 is shared out over G machines on a switch, nothing overlaps, a ring takes 2 (G-1)/G S/B.

    With no latency, T_O at G machines is that time; T_C = 64 * 10 ms. The lemma takes T_O for constant: 2 S/B, the
    limit of large G, so at G = 32 it is too pessimistic by less than 1/31.
    """
    nbytes, bandwidth, n = 4.0 * load_model("lenet5").n_params, 1e6, 32
    result = simulate(
        star(n, bandwidth=bandwidth, latency=0.0), "lenet5", AllReduce("ring", NoOverlap()), 2,
        compute=Measured(0.02, 2), steps=2,
    )  # fmt: skip
    ratio = 2 * nbytes / bandwidth / 0.64
    simulated = 0.64 * (1 + ratio) / (n * result.step_time)
    lemma = guidelines.scaling_efficiency(ratio, n)
    assert lemma < simulated < lemma * n / (n - 1)


def test_servers_by_hand() -> None:
    """2 * 100 MB * 8 / (1 GB/s * 0.4 s) = 4 servers; both directions at once: 2."""
    assert guidelines.n_parameter_servers(100e6, 8, 1e9, 0.4) == 4
    assert guidelines.n_parameter_servers(100e6, 8, 1e9, 0.4, full_duplex=True) == 2
    assert guidelines.n_parameter_servers(100e6, 8, 1e9, 0.399) == 5
    assert guidelines.n_parameter_servers(0.0, 8, 1e9, 0.4) == 1


def test_the_servers_of_the_lemma_take_a_step_of_computing_to_push_and_pull() -> None:
    """Eight workers, as many servers as the lemma says: the simulated exchange takes T_C when nothing overlaps."""
    nbytes, bandwidth, n = 4.0 * load_model("lenet5").n_params, 1e6, 8
    compute = 2 * nbytes * n / bandwidth / 4  # 4 servers fit exactly
    assert guidelines.n_parameter_servers(nbytes, n, bandwidth, compute) == 4
    result = simulate(
        star(n + 4, bandwidth=bandwidth, latency=0.0), "lenet5", ParameterServer(4, overlap="none"), 8, n,
        compute=Measured(compute, 8), steps=2,
    )  # fmt: skip
    assert result.step_time == pytest.approx(2 * compute)


def test_memory() -> None:
    model, device = load_model("resnet50"), load_device("v100")
    n = guidelines.largest_batch(model, device)
    assert memory_of(model, n).total <= device.memory_nbytes < memory_of(model, n + 1).total
    assert guidelines.largest_batch(load_model("gpt2"), load_device("v100"), "fp16") > 0


def test_moving_the_traffic_by_hand() -> None:
    """Wang et al.: 62 % of the time on 25 Gbit/s; on 100: 1 / (0.38 + 0.62/4) = 1.869 (they saw 1.7 on average)."""
    assert guidelines.traffic_share(0.62, 0.38) == pytest.approx(0.62)
    assert guidelines.medium_speedup(0.62, 25.0, 100.0) == pytest.approx(1.0 / 0.535)
    assert guidelines.medium_speedup(0.62, 25.0, 25.0) == 1.0
    assert guidelines.medium_speedup(1.0, 1.0, 7.0) == pytest.approx(7.0)  # nothing but traffic
    assert guidelines.medium_speedup(0.0, 1.0, 7.0) == 1.0


def test_flops_per_byte_by_hand() -> None:
    """Kernel and feature maps cancel: VGG's conv5 at 14 x 14, 8 samples: 2352."""
    conv = next(layer for layer in load_model("vgg-a").layers if layer.name == "conv5.0.conv")
    weights = conv.n_params - 512  # without the bias
    flops = 3 * conv.flops * 8
    assert flops / guidelines.data_parallel_nbytes(weights) == pytest.approx(2352.0)


def test_data_or_model_parallelism() -> None:
    """A dense layer with sends and receives in turn: model parallelism from ofm > mb on."""
    ifm, ofm = 1000, 300
    data = guidelines.data_parallel_nbytes(ifm * ofm, overlap=False)
    assert guidelines.model_parallel_nbytes(ifm, 299) < data
    assert guidelines.model_parallel_nbytes(ifm, 300) == data
    assert guidelines.model_parallel_nbytes(ifm, 301) > data


def test_hybrid_groups_by_hand() -> None:
    """Das et al.: 64 nodes, 256 samples, 4096 outputs: sqrt(2 * 64 * 256 / 4096) = 2.83, so 3 groups."""
    assert guidelines.hybrid_groups(4096 * 4096, 4096, 256, 64) == pytest.approx(math.sqrt(8.0))
    assert guidelines.hybrid_groups(4096 * 4096, 4096, 1, 8) == 1.0  # tiny batch: share the layer out
    assert guidelines.hybrid_groups(9, 50_000, 256, 64) == 64.0  # a convolution: share the data out


@given(st.floats(1.0, 1e8), st.floats(1.0, 1e6), st.floats(1.0, 1e5), st.integers(1, 1000))
def test_the_best_number_of_groups_moves_least(weights: float, inputs: float, batch: float, n: int) -> None:
    def moved(groups: float) -> float:
        inside = guidelines.model_parallel_nbytes(inputs, batch / groups)
        return inside + guidelines.data_parallel_nbytes(weights) * groups / n

    best = guidelines.hybrid_groups(weights, inputs, batch, n)
    for other in (1.0, n / 2 + 0.5, float(n), max(1.0, 0.9 * best), min(float(n), 1.1 * best)):
        assert moved(best) <= moved(other) * (1 + 1e-9)


def test_byteps_in_the_limits() -> None:
    """No helper: a ring's 2 (n-1)/n M/B. As many helpers as machines: M/B. Two of four: 24/(16+8-4) = 1.2 M/B."""
    assert guidelines.byteps_time(1e9, 4, 0, 1e9) == pytest.approx(1.5)
    assert guidelines.byteps_time(1e9, 4, 4, 1e9) == pytest.approx(1.0)
    assert guidelines.byteps_time(1e9, 4, 2, 1e9) == pytest.approx(1.2)
    times = [guidelines.byteps_time(1e9, 16, k, 1e9) for k in range(17)]
    assert times == sorted(times, reverse=True)


def test_local_sgd_by_hand() -> None:
    assert guidelines.local_sgd_speedup(1.0, 4) == pytest.approx(2.0 / 1.25)
    assert guidelines.local_sgd_speedup(0.3, 1) == 1.0
    assert guidelines.local_sgd_speedup(0.3, 10**9) == pytest.approx(1.3)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: guidelines.scaling_efficiency(-0.1, 4), "overhead_ratio = -0.1: must be finite and not negative"),
        (lambda: guidelines.largest_n_gpus(0.1, 1.2), "efficiency = 1.2: must be above 0 and at most 1"),
        (lambda: guidelines.n_parameter_servers(1e6, 0, 1e9, 1.0), "n_workers = 0: must be a positive integer"),
        (lambda: guidelines.medium_speedup(0.5, 0.0, 1.0), "bandwidth = 0.0: must be finite and above 0"),
        (
            lambda: guidelines.byteps_time(1.0, 4, 5, 1.0),
            "n_servers = 5: must be from 0 to the number of machines with workers, 4",
        ),
        (lambda: guidelines.local_sgd_speedup(0.5, 0), "period = 0: must be a positive integer"),
    ],
    ids=["overhead", "efficiency", "workers", "bandwidth", "helpers", "period"],
)
def test_arguments_that_make_no_sense(call, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        call()
