"""Local steps and now and then an average as a plan: every rank updates its own model, and ranks average them."""

from __future__ import annotations

from collections.abc import Sequence

from ddlsim.arguments import Count, checked
from ddlsim.errors import ConfigError
from ddlsim.plan.draft import Draft
from ddlsim.plan.plan import Part, Plan
from ddlsim.plan.program import StepProgram
from ddlsim.workload.compute import Workload
from ddlsim.workload.memory import activation_nbytes


@checked
def local_steps(workloads: Sequence[Workload], period: Count, steps: Count = 1, accumulation: Count = 1) -> Plan:
    """Return the plan of ranks that make `steps` steps by themselves, and all-reduce their parameters after every
    `period` of them (Stich 2019, arXiv:1805.09767, algorithm 1).

    workloads     of each rank
    accumulation  micro-batches of each rank in a step

    No gradients are summed over ranks, so :meth:`Plan.check`, which proves that they are, refuses it. Raises
    ConfigError for no workloads.
    """
    if not workloads:
        raise ConfigError("local_steps: workloads is empty; give one for each rank")
    program = StepProgram.replicated(workloads, lambda work: _alone(work, period, steps, accumulation), accumulation)
    return program.unroll(steps)


def _alone(workload: Workload, period: int, steps: int, accumulation: int) -> Plan:
    """Return the rows of one rank, as if it were alone."""
    layers = (0, len(workload.forward))
    stored = activation_nbytes(workload.model, workload.precision) * workload.batch_size
    draft = Draft(layers[1], [Part(workload.gradient_nbytes, *layers)])
    needs: list[int] = []
    for step in range(steps):
        for batch in range(accumulation):
            draft.work(
                0, workload.forward_time, kind="forward", step=step, batch=batch, layers=layers, needs=needs,
                holds=stored,
            )  # fmt: skip
            needs = []
            draft.work(0, workload.backward_time, kind="backward", step=step, batch=batch, layers=layers, holds=-stored)
        needs = [draft.work(0, workload.optimizer, kind="update", layers=layers, step=step)]
        if (step + 1) % period == 0:
            needs = draft.all_reduce([0], workload.gradient_nbytes, [needs], step=step)
    return draft.plan()
