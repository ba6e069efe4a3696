"""Runs that would go on for ever, of strategies whose workers do not all enter what others wait for."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest
from draws import slow

import ddlsim
from ddlsim.cluster import star
from ddlsim.errors import DeadlockError
from ddlsim.runtime import RunContext, communicator
from ddlsim.runtime import context as context_module
from ddlsim.runtime.communicator import Communicator
from ddlsim.runtime.context import Process, Worker

CLUSTER = star(3, bandwidth="1 Gbit/s", latency="1 us")


@dataclass(frozen=True, kw_only=True)
class LeavesOneOut(ddlsim.WithFabric):
    """All but the last worker average in pairs, and bring something to a mean of all without waiting for it, which
    would make an update; the last one only computes."""

    brings: bool = True
    label = "leaves one out"

    def start(self, context: RunContext) -> None:
        everybody = communicator(context, self)
        pair = everybody.part([0, 1])
        for each in context.workers:
            context.loop.env.process(self.work(each, everybody, pair))

    def work(self, worker: Worker, everybody: Communicator, pair: Communicator) -> Process:
        for step in range(10**9 if worker.rank < 2 else 3):
            yield from worker.gradient()
            if worker.rank < 2:
                if self.brings:
                    everybody.enter(step, worker, 1e3)
                yield pair.enter(step, worker, 1e3)
            worker.end_step()
        yield from worker.block(worker.loop.env.event(), "what nobody brings")


@pytest.mark.parametrize("cost", ["simulated", slow("nccl")])
def test_collectives_that_wait_for_a_worker_end_the_run(cost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[Communicator.__module__], "MOST_OPEN", 20)
    strategy = LeavesOneOut(cost=cost)
    with pytest.raises(DeadlockError) as caught:
        ddlsim.simulate(CLUSTER, "lenet5", strategy, compute=ddlsim.Measured("1 ms", 32), device="v100")
    text = str(caught.value)
    assert text.startswith("LeavesOneOut: 20 collectives are open at 0.02")
    assert (
        "1 of 3 workers have not entered the first of them: worker 2 has entered 0 collectives, others up to 2" in text
    )
    assert "\n" not in text


def test_steps_without_an_update_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_module, "MOST_STEPS", 10)
    with pytest.raises(DeadlockError) as caught:
        ddlsim.simulate(CLUSTER, "lenet5", LeavesOneOut(brings=False), compute=ddlsim.Measured("1 ms", 32))
    text = str(caught.value)
    assert text.startswith(
        "no update since 0 s, in 30 steps of workers: worker 2 has completed 3 steps and waits for what nobody"
    )
    assert "\n" not in text


def test_with_every_update_the_count_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two collectives and eight steps of every worker in a run, one and two at a time."""
    monkeypatch.setattr(context_module, "MOST_STEPS", 2)
    monkeypatch.setattr(sys.modules[Communicator.__module__], "MOST_OPEN", 1)
    result = ddlsim.simulate(CLUSTER, "lenet5", ddlsim.LocalSGD(4), steps=8, warmup=0)
    assert len(result.recorder.updates) == 8
