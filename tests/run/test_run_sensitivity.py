"""What limits a run: simulated improvements by 10 % agree with the closed forms."""

from __future__ import annotations

import pytest

from ddlsim import (
    AdaComm,
    AllReduce,
    Experiment,
    FedAvg,
    LocalSGD,
    Lognormal,
    Measured,
    NoOverlap,
    Result,
    Training,
    simulate,
)
from ddlsim.cluster import MultiGpu, load_cluster, star, with_detail
from ddlsim.collectives import cost
from ddlsim.run import run
from ddlsim.runtime import RunContext

BANDWIDTH, LATENCY, N = 1.25e9, 20e-6, 8


def ring_run(step: float, model: str = "alexnet", latency: float = LATENCY) -> Result:
    """Eight machines on one switch: t = t_c + 2 (N-1) alpha + 2 (N-1)/N S/B exactly."""
    return simulate(
        star(N, bandwidth=BANDWIDTH, latency=latency), model, AllReduce("ring", NoOverlap()), 8, steps=2,
        warmup=0, compute=Measured(step, 8),
    )  # fmt: skip


def gains(result: Result) -> dict[str, float]:
    return {s.what: s.gain for s in result.sensitivities()}


@pytest.mark.parametrize("step", [0.001, 0.3, 30.0])
def test_gains_follow_from_the_formula(step: float) -> None:
    result = ring_run(step)
    nbytes = 4.0 * result.workloads[0].model.n_params

    def seconds(compute: float = 1.0, bandwidth: float = 1.0, latency: float = 1.0) -> float:
        return step / compute + cost.ring(N, nbytes, 2 * LATENCY * latency, 1 / (BANDWIDTH * bandwidth))

    assert gains(result) == {
        "compute speed": pytest.approx(seconds() / seconds(compute=1.1) - 1, rel=1e-6),
        "bandwidth of nic": pytest.approx(seconds() / seconds(bandwidth=1.1) - 1, rel=1e-6),
        "latency of nic": pytest.approx(seconds() / seconds(latency=0.9) - 1, rel=1e-6),
    }


def test_connections_that_limit_are_the_bottleneck() -> None:
    """Half of the link: 10 % more of that is 10 % less time for the bytes, and the link itself changes nothing."""
    cluster = load_cluster(star(N, bandwidth=BANDWIDTH, latency=LATENCY))
    half = with_detail(cluster, transport="tcp-cubic", warm=True, flow_rate=BANDWIDTH / 2)
    result = simulate(half, "alexnet", AllReduce("ring", NoOverlap()), 8, steps=2, warmup=0, compute=Measured(0.01, 8))
    nbytes = 4.0 * result.workloads[0].model.n_params
    before, after = (0.01 + cost.ring(N, nbytes, 2 * LATENCY, 2 / (k * BANDWIDTH)) for k in (1.0, 1.1))
    assert gains(result)["rate of connections"] == pytest.approx(before / after - 1, rel=1e-6)
    assert gains(result)["bandwidth of nic"] == pytest.approx(0.0, abs=1e-9)
    assert str(result.bottleneck).startswith("+10 % rate of connections gives +9")
    said = (
        "tcp-cubic: 1 connection between two workers reaches 5 of the nic's 10 Gbit/s, so more bandwidth has no effect"
    )
    assert f"{said}; override with +flow_rate=..." in str(result)
    ideal = with_detail(half, transport="ideal")
    plain = simulate(ideal, "alexnet", AllReduce("ring", NoOverlap()), 8, steps=2, warmup=0, compute=Measured(0.01, 8))
    assert "transport" not in str(plain)
    assert "rate of connections" not in gains(plain)


def test_the_bottleneck_is_named() -> None:
    # 0.3422 s of 0.3527 s are bandwidth: 0.3527 / (0.0106 + 0.3422 / 1.1) = 1.097
    assert str(ring_run(0.01).bottleneck) == "+10 % bandwidth of nic gives +9.7 % throughput"
    compute = ring_run(100.0).bottleneck
    assert (compute.what, compute.change) == ("compute speed", 0.1)
    assert compute.gain == pytest.approx(0.1, rel=0.01)
    slow_start = ring_run(1e-6, "digits-cnn", latency=0.01).bottleneck
    assert slow_start.what == "latency of nic"
    assert str(slow_start).startswith("-10 % latency of nic gives +11.1 % throughput")  # 1 / 0.9


def test_gains_are_listed_best_first_and_only_for_links_in_use() -> None:
    host = MultiGpu(n_gpus=4, inside="nvlink_mesh", nvlink_bandwidth="20 GB/s", device="v100")
    one_machine = simulate(star(1, bandwidth=1e9, latency=1e-6, host=host), "alexnet", steps=1, warmup=0)
    found = gains(one_machine)
    assert set(found) == {"compute speed", "bandwidth of nvlink", "latency of nvlink"}
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_everything_equal_and_idle() -> None:
    """One worker: compute is all there is, and it gives exactly 10 %."""
    result = simulate(
        star(1, bandwidth=1e9, latency=1e-6), "lenet5", batch_size=8, steps=2, warmup=0, compute=Measured(0.1, 8)
    )
    assert gains(result) == {"compute speed": pytest.approx(0.1, rel=1e-9)}


def test_the_same_random_numbers_are_used() -> None:
    """With jitter, compute-bound: exactly 10 % all the same, as every variant draws the same factors."""
    experiment = Experiment(
        star(4, bandwidth=1e15, latency=0.0), "digits-cnn", AllReduce("ring", "none"), 8, steps=3, warmup=1,
        compute=Measured(1.0, 8), jitter=Lognormal(0.5), seed=3,
    )  # fmt: skip
    assert gains(run(experiment))["compute speed"] == pytest.approx(0.1, rel=1e-6)


def test_unequal_workers_all_become_faster() -> None:
    """The slowest of unequal workers decides; it must become 10 % faster, not equal to the others."""
    result = simulate(
        star(4, bandwidth=1e15, latency=0.0), "digits-cnn", AllReduce("ring", "none"), 8, steps=2, warmup=0,
        compute=Measured(1.0, 8), speed=[1.0, 0.25, 2.0, 0.5],
    )  # fmt: skip
    assert gains(result)["compute speed"] == pytest.approx(0.1, rel=1e-6)


def test_gains_count_what_is_seldom_sent() -> None:
    """Local SGD over 8 steps: 8 t_c and one ring. A variant of five steps would not see any exchange."""
    result = simulate(
        star(N, bandwidth=BANDWIDTH, latency=LATENCY), "alexnet", LocalSGD(8, algorithm="ring"), 8, steps=8, warmup=0,
        compute=Measured(0.01, 8),
    )  # fmt: skip
    nbytes = 4.0 * result.workloads[0].model.n_params

    def seconds(bandwidth: float = 1.0) -> float:
        return 8 * 0.01 + cost.ring(N, nbytes, 2 * LATENCY, 1 / (BANDWIDTH * bandwidth))

    assert gains(result)["bandwidth of nic"] == pytest.approx(seconds() / seconds(1.1) - 1, rel=1e-6)


def test_workers_of_ones_own_that_seldom_talk_are_simulated_until_they_do() -> None:
    """A strategy that does not say its period: eight steps of 1 us and an average of 0.35 s are all network."""

    class Seldom:
        label = "seldom"

        def updates(self, steps: int, n_workers: int) -> int:
            return steps

        def start(self, context: RunContext) -> None:
            LocalSGD(8).start(context)

    result = simulate(
        star(N, bandwidth=BANDWIDTH, latency=LATENCY), "alexnet", Seldom(), 8, steps=16, compute=Measured(1e-6, 8)
    )
    assert result.bottleneck.what == "bandwidth of nic"


def test_printing_simulates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    result = ring_run(0.3)
    _ = result.speedup, result.known_stability  # what the summary of a short run works out, once
    monkeypatch.setattr("ddlsim.run.sensitivity.complete", lambda experiment: pytest.fail("simulated"))
    assert "bottleneck    call result.sensitivities() to simulate" in str(result)
    assert result.cached_sensitivities is None
    monkeypatch.undo()
    result.sensitivities()
    assert "bottleneck    +10 % " in str(result)


@pytest.mark.parametrize("strategy", [AdaComm(2, 2), FedAvg(0.5, epochs=0.02)])
def test_strategies_that_need_values_learn_in_every_variant(strategy: AdaComm | FedAvg) -> None:
    result = simulate(
        "office-1gbe", "digits-cnn", strategy, 8, 2, compute=Measured(0.01, 8), training=Training("digits", updates=6)
    )
    assert 0.05 < gains(result)["compute speed"] < 0.1 + 1e-9
