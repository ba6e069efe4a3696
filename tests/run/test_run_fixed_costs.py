"""Fixed costs of a software stack: every step and every collective takes what the stack says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddlsim import (
    DPSGD,
    FSDP,
    AllReduce,
    AsyncParameterServer,
    CoCoDSGD,
    ConfigError,
    FedAvg,
    KSync,
    LocalSGD,
    Lognormal,
    Measured,
    NoJitter,
    Parallel,
    ParameterServer,
    Priority,
    Stack,
    load_stack,
    simulate,
    stack_names,
)
from ddlsim.cluster import MultiGpu, star

BASE = load_stack("pytorch")
STEP, CALL = 10e-3, 1e-3
TWO = star(2, bandwidth="10 Gbit/s", latency=25e-6, host=MultiGpu(2, device="v100"))
CONV: dict[str, Any] = {"cluster": TWO, "model": "resnet50", "batch_size": 32}
GPT: dict[str, Any] = {"cluster": "roce-h100+n_hosts=2", "model": "gpt2+layers=4", "batch_size": 32, "workers": 16}


def step_time(stack: Stack, strategy: Any, cluster: Any, model: str, **options: Any) -> float:
    return simulate(cluster, model, strategy, stack=stack, **options).step_time


@pytest.mark.parametrize(
    ("strategy", "options", "calls"),
    [
        (AllReduce("ring", "none"), CONV, 1.0),
        (AllReduce("ring", "none"), CONV | {"accumulation": 4}, 1.0),
        (AllReduce("ring", "none"), CONV | {"compute": Measured("0.2 s", 32)}, 1.0),
        (AllReduce("ring", Priority("4 MB", 4)), CONV | {"cluster": "dgx1-v100"}, 0.0),
        (ParameterServer(2, "colocated", "none", local_reduction=True), CONV, 1.0),
        (LocalSGD(4), CONV, 0.25),
        (CoCoDSGD(4), CONV, 0.0),
        (FSDP(micro_batch=1), GPT, None),
        (Parallel(tensor=4, pipeline=2, micro_batch=2), GPT, None),
        (Parallel(pipeline=4, micro_batch=1), GPT, None),
    ],
)
def test_every_step_and_collective_takes_its_cost(strategy: Any, options: dict[str, Any], calls: float | None) -> None:
    """A step takes a host's time once, whatever its micro-batches and stages; a collective on the critical path its
    call (several of a step, with FSDP and tensor parallelism)."""
    before = step_time(BASE, strategy, **options)
    longer = step_time(replace(BASE, step_time=STEP), strategy, **options) - before
    assert longer == pytest.approx(STEP, rel=0.02)
    longer = step_time(replace(BASE, call_time=CALL), strategy, **options) - before
    if calls is None:
        assert longer > 2.0 * CALL
    else:
        assert longer == pytest.approx(calls * CALL, rel=0.02, abs=1e-9)


@pytest.mark.parametrize("strategy", [Parallel(tensor=4, micro_batch=1), Parallel(tensor=2, pipeline=2, micro_batch=1)])
def test_one_rank_stands_for_a_tensor_group_all_the_same(strategy: Parallel) -> None:
    """Jitter, however small, executes every rank by itself."""
    options = GPT | {"stack": replace(load_stack("megatron"), step_time=STEP, call_time=CALL), "batch_size": 16}
    folded, every = (simulate(strategy=strategy, jitter=jitter, **options) for jitter in (NoJitter(), Lognormal(1e-9)))
    assert folded.step_time == pytest.approx(every.step_time, rel=1e-6)
    assert folded.nbytes_sent == every.nbytes_sent


def test_queues_and_asynchronous_workers_say_what_they_leave_out() -> None:
    stack = replace(BASE, step_time=STEP, call_time=CALL)
    queued = simulate(strategy=AllReduce("ring", Priority("4 MB", 4)), stack=stack, **CONV)
    assert any("does not delay collectives launched by a queue" in note for note in queued.notes)
    loose = simulate(strategy=AsyncParameterServer(1, "colocated"), stack=stack, **CONV)
    (note,) = (each for each in loose.notes if "fixed times" in each)
    assert note.startswith(
        "the fixed times of stack pytorch (10 ms per update and 1 ms per collective) are not included"
    )
    assert note.endswith("not all workers take each step together; expect longer steps")
    only = simulate(strategy=DPSGD(), stack=replace(BASE, step_time=STEP), **CONV)
    assert any("stack pytorch (10 ms per update) are not included, because with D-PSGD" in note for note in only.notes)


@pytest.mark.parametrize(
    "strategy", [FedAvg(0.5, local_steps=2, placement="colocated"), KSync(2, placement="colocated")]
)
def test_times_that_a_strategy_leaves_out_are_not_expected_of_one_worker(strategy: Any) -> None:
    """A small network computes faster than its host updates it."""
    run = {"cluster": "dgx1-v100", "model": "cifar-cnn", "batch_size": 2, "steps": 2, "strategy": strategy}
    loose, free = (simulate(**run, stack=each) for each in (replace(BASE, step_time="1 s"), BASE))
    assert loose.step_time == free.step_time
    assert loose.efficiency == free.efficiency < 1.0


def test_the_measured_step_of_one_worker_has_its_own_cost() -> None:
    """One worker takes what was measured; several take more. A step that was not measured is longer for one, too."""
    stack = replace(BASE, step_time=STEP)
    alone = CONV | {"workers": 1, "compute": Measured("0.2 s", 32)}
    assert step_time(stack, AllReduce("ring"), **alone) == pytest.approx(0.2)
    one = GPT | {"workers": 1, "batch_size": 2, "cluster": "roce-h100+n_hosts=1"}
    before = step_time(BASE, AllReduce("ring"), **one)
    assert step_time(stack, AllReduce("ring"), **one) == pytest.approx(before + STEP)


@pytest.mark.parametrize("fields", [{}, {"fuses_accumulation": True, "main_gradients": "fp32"}, {"step_time": STEP}])
@pytest.mark.parametrize("strategy", [FSDP(micro_batch=1), FSDP(stage=1, micro_batch=1), Parallel(micro_batch=1)])
def test_speedups_are_relative_to_a_run_of_one_worker(strategy: Any, fields: dict[str, Any]) -> None:
    """One worker has a speedup of 1; that of several is relative to the same micro-batches on one of them."""
    options = GPT | {"cluster": "dgx-h100-pod", "stack": replace(BASE, **fields), "strategy": strategy}
    one, four = (simulate(**options | {"workers": n, "batch_size": 4 * n}) for n in (1, 4))
    assert one.speedup == pytest.approx(1.0, rel=1e-12)
    assert four.single_throughput == pytest.approx(one.throughput, rel=1e-12)


def test_releases_of_a_framework() -> None:
    """A bundled release differs in what its documentation says; an unknown one is refused, naming the bundled ones."""
    newest, release = load_stack("megatron"), load_stack("megatron@25.11")
    assert release.forward_launch < newest.forward_launch == load_stack("megatron@25.09").forward_launch
    assert (release.gemm, release.elementwise) == (newest.gemm, newest.elementwise)
    assert "Transformer Engine 2.9" in release.release
    assert {"megatron@25.09", "megatron@25.11"} < set(stack_names())
    with pytest.raises(ConfigError, match=r"is not bundled; the releases are megatron, megatron@25.09, megatron@25.11"):
        load_stack("megatron@24.01")
    small = {"cluster": "roce-h100+n_hosts=1", "model": "gpt2+seq=128", "batch_size": 8, "workers": 8}
    times = [step_time(load_stack(name), Parallel(), **small) for name in ("megatron@25.11", "megatron@25.09")]
    assert times[0] < times[1]
