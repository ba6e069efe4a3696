"""Workers that hold a part of the model: a pipeline written by a user, and what its result says."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import simpy

from ddlsim import AllReduce, ConfigError, Experiment, ShardedUpdate, load_cluster, simulate
from ddlsim.cluster import Host, star
from ddlsim.plan import Draft, Plan
from ddlsim.runtime import RunContext
from ddlsim.runtime.context import Worker
from ddlsim.strategies import contract
from ddlsim.workload.compute import Workload, make_workload
from ddlsim.workload.devices import load_device
from ddlsim.workload.memory import check_memory, kept_nbytes
from ddlsim.workload.model import load_model
from ddlsim.workload.stage import Stage, n_copies

Process = Generator[simpy.Event, object, None]
LATENCY, BANDWIDTH = 10e-6, 12e9
CLUSTER = load_cluster(star(4, bandwidth=BANDWIDTH, latency=LATENCY, host=Host(device="v100")))
ENDS = (0, 62, 123, 184, 246)  # layers of bert-large on each of 4 devices


@dataclass(frozen=True)
class GPipe:
    """Huang et al. 2019: all micro-batches forward through all stages, then all back; messages have `nbytes`."""

    micro_batches: int = 8
    nbytes: float = 4e6
    ends: tuple[int, ...] = ENDS

    @property
    def label(self) -> str:
        return f"GPipe ({self.micro_batches} micro-batches)"

    def updates(self, steps: int, n_workers: int) -> int:
        return steps

    def stage(self, workload: Workload, rank: int, n_workers: int) -> Stage:
        return Stage(workload.cut(self.ends[rank], self.ends[rank + 1]), self.micro_batches)

    def start(self, context: RunContext) -> None:
        workers, env = context.workers, context.loop.env
        arrived = {
            (way, rank, micro): simpy.Store(env)
            for way in ("forward", "backward") for rank in range(len(workers)) for micro in range(self.micro_batches)
        }  # fmt: skip
        ended = simpy.Store(env)

        def deliver(worker: Worker, way: str, rank: int, micro: int) -> Process:
            yield context.loop.send(worker.node, workers[rank].node, self.nbytes)
            arrived[way, rank, micro].put(True)

        def work(worker: Worker) -> Process:
            last = len(workers) - 1
            while True:
                yield from worker.begin_step()
                for way in ("forward", "backward"):
                    here, there = (worker.rank, worker.rank + 1) if way == "forward" else (worker.rank, worker.rank - 1)
                    for micro in range(self.micro_batches):
                        if here != (0 if way == "forward" else last):
                            start = worker.loop.now
                            yield from worker.block(arrived[way, here, micro].get(), f"micro-batch {micro}")
                            worker.book(start, worker.loop.now, way)
                        if way == "forward":
                            yield from worker.forward()
                        else:
                            yield from worker.backward(len(worker.workload.forward), 0)
                        if 0 <= there <= last:
                            env.process(deliver(worker, way, there, micro))
                yield from worker.optimizer_step()
                worker.end_step()
                yield ended.put(True)
                if len(ended.items) == len(workers):
                    ended.items.clear()
                    worker.stop.updated(self.micro_batches * worker.workload.batch_size)

        for worker in workers:
            env.process(work(worker))


def step_of(stages: list[Workload], micro_batches: int, message: float) -> float:
    """Seconds of a step, by the recursion that one would write on paper."""
    free = np.zeros(len(stages))
    ready = np.zeros(micro_batches)
    for way in ("forward", "backward"):
        order = range(len(stages)) if way == "forward" else range(len(stages) - 1, -1, -1)
        for nth, rank in enumerate(order):
            for micro in range(micro_batches):
                start = max(free[rank], ready[micro] + (message if nth else 0.0))
                free[rank] = start + (stages[rank].forward_time if way == "forward" else stages[rank].backward_time)
                ready[micro] = free[rank]
        ready[:] = 0.0
    return float(max(end + stage.optimizer for end, stage in zip(free, stages, strict=True)))


def test_a_pipeline_has_its_own_step_time_throughput_and_efficiency() -> None:
    """One copy of the model on 4 devices: 8 micro-batches of 4 an update, and no word of what does not fit."""
    strategy = GPipe(8)
    result = simulate(CLUSTER, "bert-large", strategy, batch_size=4, steps=1, warmup=0)
    stages = [stage.workload for stage in contract.of(strategy).stages_of(result.workloads)]
    seconds = step_of(stages, 8, 2 * LATENCY + strategy.nbytes / BANDWIDTH)
    assert result.step_time == pytest.approx(seconds, rel=1e-9)
    assert result.throughput == pytest.approx(32 / seconds, rel=1e-9)
    whole = result.workloads[0]
    alone = 32 / (8 * (whole.forward_time + whole.backward_time) + whole.optimizer)
    assert result.single_throughput == pytest.approx(alone, rel=1e-12)
    assert result.speedup == pytest.approx(32 / seconds / alone, rel=1e-9)
    assert result.efficiency == pytest.approx(result.speedup / 4, rel=1e-9)
    # every device computes what its share of the model takes, and the slowest stage all the time but for the bubble
    busy = sum(8 * (s.forward_time + s.backward_time) + s.optimizer for s in stages)
    assert result.efficiency == pytest.approx(busy / 4 / seconds, rel=1e-9) == result.shares["compute"]
    assert result.nbytes_per_step == pytest.approx(2 * 3 * 8 * strategy.nbytes / 4)
    assert result.warnings == ()
    assert "batch 4, 32 samples a step" in str(result)


def test_two_steps_of_a_pipeline_take_twice_as_long() -> None:
    """Messages of one step are not taken for those of the next; and the sensitivities find what a stage computes."""
    result = simulate(CLUSTER, "bert-large", GPipe(4), batch_size=4, steps=2, warmup=1)
    assert result.step_times == pytest.approx(result.step_time, rel=1e-9)
    assert result.bottleneck.what == "compute speed"


def test_memory_is_looked_at_for_what_a_worker_holds() -> None:
    """The whole of BERT-large with 32 samples is too much for 17 GB, a quarter of it with as many is not."""
    whole = simulate(CLUSTER, "bert-large", AllReduce(), batch_size=32, steps=1, warmup=0)
    assert "bert-large with batch size 32 in fp32 needs about" in whole.warnings[0]
    assert simulate(CLUSTER, "bert-large", GPipe(8), batch_size=4, steps=1, warmup=0).warnings == ()
    many = simulate(CLUSTER, "bert-large", GPipe(64), batch_size=4, steps=1, warmup=0)
    (warning,) = many.warnings  # of the fullest stage
    assert re.match(r"bert-large, layers \d+ to \d+ with batch size 64 x 4 in fp32 needs about", warning)
    assert "; 3 further parts of the model do not fit, either; see ddlsim.fits for ways to save memory" in warning


@dataclass(frozen=True)
class OneAtATime(GPipe):
    """A pipeline whose plan says that a stage holds two micro-batches at most."""

    def plan(self, workloads: Sequence[Workload], steps: int = 1, accumulation: int = 1) -> Plan:
        draft = Draft()
        for rank, workload in enumerate(workloads):
            stage = self.stage(workload, rank, len(workloads)).workload
            nbytes = stage.model.activation_nbytes * stage.batch_size
            for kind in ("forward", "forward", "backward", "forward", "backward", "backward"):
                draft.work(rank, 0.1, kind=kind, holds=nbytes if kind == "forward" else -nbytes)
        return draft.plan()


def test_what_a_stage_holds_is_what_its_plan_says() -> None:
    """64 micro-batches do not fit, the two of them that the plan keeps at the same time do; six larger ones do not."""
    many = OneAtATime(64)
    assert simulate(CLUSTER, "bert-large", many, batch_size=4, steps=1, warmup=0).warnings == ()
    large = simulate(CLUSTER, "bert-large", many, batch_size=48, steps=1, warmup=0)
    stages = [stage.workload.model for stage in contract.of(many).stages_of(large.workloads)]
    needed = max(12 * stage.n_params + 2 * 48 * stage.activation_nbytes for stage in stages)
    assert f"needs about {needed / 1e9:.1f} GB, but v100" in large.warnings[0]


@pytest.mark.parametrize(("precision", "whole", "share"), [("fp32", 12, 8 + 4 / 8), ("fp16", 12, 4 + 8 / 8)])
def test_sharded_updates_hold_a_share_of_the_optimizers_state(precision: str, whole: float, share: float) -> None:
    """ZeRO stage 1: fp32 weights and momentum, or momentum alone, are on one of 8 workers each."""
    workload = make_workload(load_model("bert-large"), load_device("v100"), 1, precision=precision)
    n, stored = workload.model.n_params, kept_nbytes(workload.model.layers, precision)[0]
    for stage, nbytes in ((Stage(workload), whole * n), (ShardedUpdate().stage(workload, 3, 8), share * n)):
        fits = dataclasses.replace(load_device("v100"), memory_nbytes=(nbytes + stored) * (1 + 1e-9))
        assert check_memory(stage, fits, 8) is None
        assert check_memory(stage, dataclasses.replace(fits, memory_nbytes=nbytes + stored - 1e3), 8) is not None


def test_the_cuts_of_a_workload_are_the_whole() -> None:
    whole = make_workload(load_model("bert-large"), load_device("v100"), 4)
    cuts = [whole.cut(first, end) for first, end in itertools.pairwise(ENDS)]
    for name in ("forward_time", "backward_time", "optimizer", "gradient_nbytes", "step_time"):
        assert sum(getattr(cut, name) for cut in cuts) == pytest.approx(getattr(whole, name), rel=1e-12)
    assert sum(cut.model.n_params for cut in cuts) == whole.model.n_params
    assert np.concatenate([cut.tensor_nbytes for cut in cuts]).tolist() == whole.tensor_nbytes.tolist()
    assert np.concatenate([cut.tensor_layer + end for cut, end in zip(cuts, ENDS, strict=False)]).tolist() == (
        whole.tensor_layer.tolist()
    )
    assert n_copies([Stage(cut) for cut in cuts] * 2, [whole] * 8) == pytest.approx(2.0)


def test_a_stage_that_is_none_is_refused() -> None:
    class Wrong(AllReduce):
        def stage(self, workload: Workload, rank: int, n_workers: int) -> Workload:
            return workload

    with pytest.raises(ConfigError, match=r"Wrong.stage returned Workload.* for rank 0; it must return a Stage"):
        simulate(Experiment(CLUSTER, "lenet5", Wrong(), 8))
    workload = make_workload(load_model("lenet5"), load_device("v100"), 4)
    with pytest.raises(ConfigError, match="cut: first = 3, end = 3: must be increasing, and at most"):
        workload.cut(3, 3)
