"""Random and transient slowness: a synchronous step is as slow as its slowest worker."""

from __future__ import annotations

import math

import numpy as np
import pytest
from draws import seeds
from strategies_reference import ring_time, uniform_star

from ddlsim import (
    AllReduce,
    AsyncParameterServer,
    Exponential,
    Lognormal,
    Measured,
    Pareto,
    Result,
    ShiftedExponential,
    Slowdown,
    Trace,
    Uniform,
    simulate,
)
from ddlsim.workload import order_statistics
from ddlsim.workload.jitter import Jitter, NoJitter

N, STEPS = 8, 600
NONE = NoJitter()


def run(
    n: int = N,
    steps: int = STEPS,
    jitter: Jitter = NONE,
    slowdowns: tuple[Slowdown, ...] = (),
    speed: list[float] | None = None,
    seed: int = 0,
    accumulation: int = 1,
) -> Result:
    """One-second steps of a network so small that its exchange (closed form) is under a millisecond."""
    return simulate(
        uniform_star(n), "digits-cnn", AllReduce("ring", "none"), 8, n, steps=steps, warmup=0,
        compute=Measured(1.0, 8), jitter=jitter, slowdowns=slowdowns, speed=speed, seed=seed,
        accumulation=accumulation,
    )  # fmt: skip


def exchange(result: Result) -> float:
    return ring_time(result.n_workers)(4.0 * result.workloads[0].model.n_params)


EXPECTED_MAXIMUM = [
    pytest.param(Exponential(), order_statistics.exponential(N), id="exponential"),
    pytest.param(
        ShiftedExponential(0.3), order_statistics.shifted_exponential(N, mean_extra=0.3), id="shifted-exponential"
    ),
    pytest.param(Lognormal(0.4), order_statistics.lognormal(N, cv=0.4), id="lognormal"),
    pytest.param(Uniform(0.5, 1.5), order_statistics.uniform(N, low=0.5, high=1.5), id="uniform"),
    pytest.param(Pareto(4.0), order_statistics.pareto(N, a=4.0), id="pareto"),
]


@pytest.mark.parametrize("seed", seeds(1, 2))
@pytest.mark.parametrize(("jitter", "expected"), EXPECTED_MAXIMUM)
def test_mean_step_is_the_expected_maximum(jitter: Jitter, expected: float, seed: int) -> None:
    """E[t] = E[max of N] + exchange, within 4 standard errors of the mean of 600 steps."""
    result = run(jitter=jitter, seed=seed)
    times = result.step_times - exchange(result)
    error = times.std(ddof=1) / math.sqrt(len(times))
    assert error < 0.05 * expected
    assert abs(times.mean() - expected) < 4 * error
    # and the others wait for it: computing takes the mean of one, waiting the rest
    compute = result.workers["compute"].mean() / STEPS
    assert compute == pytest.approx(jitter.mean, rel=0.06)
    waiting = result.workers["waiting"].mean() / STEPS
    assert compute + waiting + exchange(result) == pytest.approx(result.step_times.mean(), rel=1e-9)


def test_accumulation_averages_out_jitter() -> None:
    """Each micro-step draws its own factor: the step is the maximum of N sums of a. For a = 16 exponentials it
    is below a times the maximum of one, and above a."""
    result = run(jitter=Exponential(), accumulation=16, steps=60)
    per_micro_step = (result.step_times - exchange(result)).mean() / 16
    # sums of 16 are nearly normal: E[max of 8] = 1 + 1.42 / sqrt(16)
    assert per_micro_step == pytest.approx(order_statistics.normal(N, mean=1.0, sd=0.25), rel=0.08)
    assert per_micro_step < 0.6 * order_statistics.exponential(N)


def test_one_worker_steps_are_its_factors() -> None:
    """With a trace of two values only these two step times occur, about equally often."""
    result = run(1, 200, jitter=Trace([1.0, 3.0]))
    values, counts = np.unique(result.step_times.round(9), return_counts=True)
    assert values.tolist() == [1.0, 3.0]
    assert abs(counts[0] - 100) < 4 * math.sqrt(50)


def test_slow_down_stretches_exactly_the_steps_it_covers() -> None:
    """Worker 2 takes 3 times as long from step 3 on, for exactly two stretched steps."""
    c = exchange(run(4, 1))
    step = 1.0 + c
    slow = Slowdown(2, start=3 * step, duration=2 * 3.0 + c, factor=3.0)
    times = run(4, 8, slowdowns=(slow,)).step_times
    assert times == pytest.approx([step] * 3 + [3.0 + c] * 2 + [step] * 3, rel=1e-9)


def test_slow_down_within_a_step() -> None:
    """A quarter of the step passes, then 1 s at half speed does half of it, then the last quarter: 1.5 s."""
    result = run(4, 3, slowdowns=(Slowdown([0], 0.25, 1.0, 2.0),))
    c = exchange(result)
    assert result.step_times == pytest.approx([1.5 + c, 1.0 + c, 1.0 + c], rel=1e-9)
    # the others wait half a second, in the first step
    assert result.workers["waiting"].tolist() == pytest.approx([0.0, 0.5, 0.5, 0.5], abs=1e-9)


def test_slowdowns_add_up() -> None:
    """All workers slowed at different times: each interval shows up once, in its own step."""
    c = exchange(run(4, 1))
    step = 1.0 + c
    slow = tuple(Slowdown(rank, 2 * rank * (step + 0.25), 0.5, 2.0) for rank in range(4))
    times = run(4, 8, slowdowns=slow).step_times
    # half a second at half speed does a quarter of a second's work: 0.25 s are lost, four times
    assert times.sum() == pytest.approx(8 * step + 4 * 0.25, rel=1e-9)


def test_synchronous_steps_take_as_long_as_the_slowest() -> None:
    result = run(4, 3, speed=[1.0, 0.5, 2.0, 1.25])
    assert result.step_times == pytest.approx([1.0 / 0.5 + exchange(result)] * 3, rel=1e-9)
    assert result.workers["compute"].tolist() == pytest.approx([3.0, 6.0, 1.5, 2.4], rel=1e-9)


def test_synchronous_and_asynchronous_under_unequal_speeds() -> None:
    """The reason for asynchronous SGD: N/max(t_i) against sum(1/t_i)."""
    speed = [1.0, 0.5, 2.0, 1.25]
    synchronous = run(4, 20, speed=speed)
    asynchronous = simulate(
        uniform_star(5, bandwidth=1e15, latency=0.0), "digits-cnn", AsyncParameterServer(), 8, 4, steps=200,
        warmup=0, compute=Measured(1.0, 8), speed=speed,
    )  # fmt: skip
    assert synchronous.throughput == pytest.approx(8 * 4 * 0.5, rel=1e-3)
    assert asynchronous.throughput == pytest.approx(8 * sum(speed), rel=0.01)
    assert asynchronous.efficiency == pytest.approx(1.0, rel=0.01)
