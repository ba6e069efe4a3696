"""Fixed costs of a software stack: every step and every collective takes what the stack says."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
from bundled_strategies import BUNDLED, N_WORKERS

from ddlsim import (
    FSDP,
    AllReduce,
    AsyncParameterServer,
    CoCoDSGD,
    ConfigError,
    KSync,
    LocalSGD,
    Lognormal,
    Measured,
    NoJitter,
    Parallel,
    ParameterServer,
    Priority,
    Stack,
    WithFabric,
    load_stack,
    simulate,
    stack_names,
)
from ddlsim.cluster import MultiGpu, star
from ddlsim.runtime import Averaging, RunContext, communicator
from ddlsim.runtime.communicator import Communicator
from ddlsim.runtime.context import Process, Worker

BASE = load_stack("pytorch")
STEP, CALL = 10e-3, 1e-3
TWO = star(2, bandwidth="10 Gbit/s", latency=25e-6, host=MultiGpu(2, device="v100"))
CONV: dict[str, Any] = {"cluster": TWO, "model": "resnet50", "batch_size": 32}
GPT: dict[str, Any] = {"cluster": "roce-h100+n_hosts=2", "model": "gpt2+layers=4", "batch_size": 32, "workers": 16}


@dataclass(frozen=True, kw_only=True)
class AveragesModels(WithFabric):
    """Processes average models in every step: by a collective that they enter themselves, or by `Averaging`."""

    averaging: bool
    label = "averages models"

    def start(self, context: RunContext) -> None:
        group = communicator(context, self)
        average = Averaging(group) if self.averaging else None
        for each in context.workers:
            context.loop.env.process(self.work(each, group, average))

    def work(self, worker: Worker, group: Communicator, average: Averaging | None) -> Process:
        for step in itertools.count():
            yield from worker.gradient()
            yield from worker.optimizer_step()
            if average is None:
                yield from worker.block(group.enter(step, worker, worker.workload.gradient_nbytes), "average")
            else:
                worker.params = yield from average.mean(worker, step, worker.params)
            if worker.rank == 0:
                worker.stop.updated(worker.samples_per_step * group.n_ranks)
            worker.end_step()


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


@pytest.mark.parametrize("name", [name for name, bundled in BUNDLED.items() if not bundled.needs_data])
def test_the_host_works_in_every_step_of_every_strategy(name: str) -> None:
    """Beside steps this long, messages do not delay each other. A round of FedAvg has two local steps."""
    bundled = BUNDLED[name]
    options: dict[str, Any] = {
        "cluster": star(8, bandwidth="10 Gbit/s", latency="1 us"), "model": bundled.model, "workers": N_WORKERS,
        "batch_size": bundled.batch_size, "device": "v100", "steps": 12, "warmup": 4,
    }  # fmt: skip
    free, loose = (simulate(strategy=bundled.strategy, stack=replace(BASE, step_time=s), **options) for s in (0.0, 0.5))
    n_steps = 2 if name == "FedAvg" else 1
    assert loose.step_time - free.step_time == pytest.approx(0.5 * n_steps, rel=1e-4)
    assert loose.shares["idle"] == pytest.approx(free.shares["idle"], abs=1e-3)


@pytest.mark.parametrize(
    "strategy", [AsyncParameterServer(1, "colocated"), KSync(2, placement="colocated"), AllReduce("ring")]
)
def test_the_host_works_once_for_all_micro_batches(strategy: Any) -> None:
    options = {"cluster": "dgx1-v100", "model": "digits-cnn", "batch_size": 8, "strategy": strategy, "accumulation": 3}
    free, loose = (simulate(stack=replace(BASE, step_time=s), **options).step_time for s in (0.0, 0.5))
    assert loose - free == pytest.approx(0.5, rel=1e-4)


def test_collectives_that_take_no_time_per_call_are_noted() -> None:
    stack = replace(BASE, call_time=CALL)
    queued = simulate(strategy=AllReduce("ring", Priority("4 MB", 4)), stack=stack, **CONV)
    assert any("does not delay collectives launched by a queue" in note for note in queued.notes)
    own = [simulate(strategy=AveragesModels(averaging=averaging), stack=stack, **CONV) for averaging in (False, True)]
    assert any("call_time of stack pytorch is not included, because" in note for note in own[0].notes)
    assert not any("call_time" in note for note in own[1].notes)
    assert own[1].step_time - own[0].step_time == pytest.approx(CALL, rel=0.02)
    servers = simulate(strategy=AsyncParameterServer(1, "colocated"), stack=stack, **CONV)
    assert not any("call_time" in note for note in servers.notes)


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
