"""Any plan as the steps of a run: the same times, bytes and bookings as the bundled strategies that have it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

import ddlsim
from ddlsim.errors import DdlsimError
from ddlsim.plan import StepProgram, data_parallel, sharded
from ddlsim.plan.program import N_STEPS
from ddlsim.plan.schedules import Schedules
from ddlsim.run.simulate import run as run_experiment
from ddlsim.runtime.context import Factors, RunContext
from ddlsim.runtime.exchange import OfGroups
from ddlsim.runtime.table_run import CommonModel, TableRun
from ddlsim.streams import stream
from ddlsim.workload.buckets import ddp_buckets
from ddlsim.workload.compute import Workload

Builder = Callable[[Sequence[Workload]], StepProgram]
KINDS = ["compute", "communication", "waiting", "idle"]


@dataclass(frozen=True)
class Table:
    """Runs a plan."""

    build: Builder
    label: str = "a table"

    def updates(self, steps: int, n_workers: int) -> int:
        return steps

    def start(self, context: RunContext) -> None:
        each = context.workloads
        program = self.build(each)
        schedules = Schedules(program.unroll(1), "ring", context.cluster, np.array(context.nodes), "topology")
        exchanges = OfGroups(context, context.workers, program.groups, schedules)
        TableRun(context, program, exchanges, CommonModel(context))


CASES = {
    "ddp": (data_parallel, ddlsim.AllReduce()),
    "sharded": (lambda each: sharded(each, buckets=ddp_buckets), ddlsim.ShardedUpdate(overlap="ddp")),
}
RUNS = {
    "plain": {},
    "jitter": {"jitter": ddlsim.Lognormal(0.2)},
    "slow": {"slowdowns": [ddlsim.Slowdown([1], 0.1, 0.3, 4.0)], "speed": [1.0, 0.5, 1.0, 1.0]},
    "cut short": {"jitter": ddlsim.Lognormal(0.2), "max_time": 2.0},
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("case", CASES)
def test_a_table_is_the_strategy_that_has_it(case: str, run: str):
    build, strategy = CASES[case]
    experiment = ddlsim.Experiment("lab-heterogeneous", "resnet50", strategy, workers=4, batch_size=8, steps=9,
                                   **RUNS[run])  # fmt: skip
    expected, table = (run_experiment(each) for each in (experiment, experiment.with_(strategy=Table(build))))
    np.testing.assert_array_equal(table.step_times, expected.step_times)
    assert table.end_time == expected.end_time
    assert table.nbytes_sent == expected.nbytes_sent
    np.testing.assert_allclose(table.workers[KINDS[0]], expected.workers[KINDS[0]], rtol=1e-12)
    if case == "ddp":
        np.testing.assert_allclose(table.workers[KINDS], expected.workers[KINDS], rtol=1e-12, atol=1e-12)


def test_spans_are_what_is_booked():
    experiment = ddlsim.Experiment("office-1gbe", "resnet50", Table(CASES["ddp"][0]), workers=3, batch_size=8, steps=4)
    result = run_experiment(experiment, keep_spans=True)
    for rank in range(3):
        for kind in KINDS[:3]:
            own = [s for s in result.recorder.spans if (s.track, s.kind) == (f"worker {rank}", kind)]
            seconds = sum(span.end - span.start for span in own)
            assert seconds == pytest.approx(result.workers[kind][rank], rel=1e-9, abs=1e-12)


def test_steps_that_differ_are_refused():
    def uneven(each: Sequence[Workload]) -> StepProgram:
        plan = data_parallel(each).unroll(N_STEPS)
        seconds = plan.seconds.copy()
        seconds[-2] += 1.0
        return StepProgram.of(dataclasses.replace(plan, seconds=seconds))

    with pytest.raises(DdlsimError, match="the steps after the first one differ"):
        ddlsim.simulate("office-1gbe", "resnet50", Table(uneven), workers=2, batch_size=8)


def test_one_plan_is_of_one_batch_size():
    training = ddlsim.Training("digits", updates=5, phases=(ddlsim.Phase(1, batch=8),))
    table = Table(data_parallel)
    with pytest.raises(ddlsim.ConfigError, match="growing_batch and phases change the step time"):
        ddlsim.simulate("office-1gbe", "digits-cnn", table, 8, training=training)


@dataclasses.dataclass(frozen=True)
class AsRecorded(ddlsim.AllReduce):
    """Workers take twice as long in every step, whatever the jitter of the run."""

    def start(self, context):
        for worker in context.workers:
            worker.factors = Factors(ddlsim.Trace([2.0]), stream(0, worker.rank, "compute"))
        super().start(context)


def test_factors_of_workers_count_without_jitter():
    plain, slower = (
        ddlsim.simulate("office-1gbe", "lenet5", strategy, batch_size=8, workers=1, compute=ddlsim.Measured("10 ms", 8))
        for strategy in (ddlsim.AllReduce(), AsRecorded())
    )
    assert slower.step_time == pytest.approx(2 * plain.step_time, rel=1e-9)
