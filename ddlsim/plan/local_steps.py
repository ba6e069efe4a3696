"""Local steps and averages as a step program: every rank updates its own model, and ranks periodically average them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddlsim.errors import ConfigError
from ddlsim.plan.plan import ALL_REDUCE, BACKWARD, COMPUTE, FORWARD, UPDATE, Chosen, Every, Part, Plan
from ddlsim.plan.program import N_STEPS, Row, StepProgram, step_of, template_of
from ddlsim.plan.transforms import DECODE, ENCODE
from ddlsim.workload.compute import Workload
from ddlsim.workload.memory import kept_nbytes

#: names of tasks: a rank's contribution to an average is complete; the average has been used
BRING, MERGE = "bring", "merge"
#: largest distance between a contribution to an average and its use, in steps; each of these steps is written out
MOST_DELAY = 100_000


@dataclass(frozen=True)
class Average:
    """An all-reduce that starts in some steps, and whose result ranks use `delay` steps later.

    steps     in which it starts; chosen steps have no delay
    delay     0: ranks wait for it in the same step
    first     the first step in which an average is used; None: `delay` steps after the first start. Earlier ones do not
              wait
    at_begin  whether it starts before the local step instead of after it
    gradients whether it averages gradients, before the update
    share     bytes, as a fraction of all parameters
    groups    ranks that average together; None: all
    """

    steps: Every | Chosen
    delay: int = 0
    first: int | None = None
    at_begin: bool = False
    gradients: bool = False
    share: float = 1.0
    groups: Sequence[Sequence[int]] | None = None

    @property
    def arrivals(self) -> Every | Chosen:
        """The steps in which ranks wait for an average."""
        steps, late = self.steps, self.delay
        if isinstance(steps, Chosen):
            return steps
        return steps._replace(offset=steps.offset + late, begin=steps.begin + late, end=steps.end + late)

    @property
    def merges(self) -> Every | Chosen:
        """The steps in which ranks use an average."""
        arrivals = self.arrivals
        return arrivals if self.first is None or isinstance(arrivals, Chosen) else arrivals._replace(begin=self.first)


def local_steps(
    workloads: Sequence[Workload], averages: Sequence[Average], accumulation: int = 1, *, codes: bool = False
) -> StepProgram:
    """Return the program of ranks that make local steps and periodic averages (Stich 2019, arXiv:1805.09767).

    workloads     of each rank
    accumulation  number of micro-batches per rank and step
    codes         whether averages are encoded and decoded

    Average i is part i of the program. :meth:`Plan.check` rejects its plans, because it requires that gradients are
    summed over ranks. Raises ConfigError if there are no workloads.
    """
    if not workloads:
        raise ConfigError("local_steps: workloads is empty; provide one per rank")
    if (longest := max((average.delay for average in averages), default=0)) > MOST_DELAY:
        raise ConfigError(f"local_steps: delay = {longest:,}: must be at most {MOST_DELAY:,} steps")
    n = len(workloads)
    return StepProgram.replicated(
        workloads,
        lambda work: _template(work, averages, accumulation, codes=codes),
        accumulation,
        [[range(n)] if average.groups is None else average.groups for average in averages],
    )


def _template(workload: Workload, averages: Sequence[Average], accumulation: int, *, codes: bool) -> Plan:
    n_layers = len(workload.forward)
    stored = kept_nbytes(workload.model.layers, workload.precision)[0] * workload.batch_size
    cycles: list[Every | Chosen] = []
    rows: list[Row] = []
    joined: dict[int, int] = {}  # row of each average's collective
    names = (ENCODE, DECODE, BRING, MERGE)

    def number(every: Every | Chosen) -> int:
        if every not in cycles:
            cycles.append(every)
        return cycles.index(every) + 1

    def add(kind: int, seconds: float = 0.0, lane: str = "compute", **more: object) -> int:
        rows.append(Row(0, lane, kind, seconds, **more))  # type: ignore[arg-type]  # its fields
        return len(rows) - 1

    def bring(i: int) -> None:
        average = averages[i]
        every = number(average.steps)
        after = len(rows) - 1
        if average.at_begin:
            after = add(COMPUTE, name=names.index(BRING), every=every)
        if codes:
            after = add(COMPUTE, name=names.index(ENCODE), part=i, every=every)
        nbytes = average.share * workload.gradient_nbytes
        joined[i] = add(
            ALL_REDUCE, lane=f"stream {i}" if i else "stream", nbytes=nbytes, part=i, group=i, number=i, every=every,
            needs=[after],
        )  # fmt: skip

    def merge(i: int) -> None:
        average, begin = averages[i], len(rows)
        needs = [] if average.delay else [joined[i]]
        arrivals = number(average.arrivals)
        if codes:
            add(COMPUTE, name=names.index(DECODE), part=i, every=arrivals, needs=needs)
        add(UPDATE, name=names.index(MERGE), part=i, every=number(average.merges), needs=needs)
        if average.delay:
            late.append((i, range(begin, len(rows))))

    late: list[tuple[int, range]] = []
    of_gradients = [i for i, average in enumerate(averages) if average.gradients]
    after = [i for i, average in enumerate(averages) if not average.gradients]
    for i in after:
        if averages[i].at_begin:
            bring(i)
    for micro in range(accumulation):
        add(FORWARD, workload.forward_time, micro=micro, end=n_layers, holds=stored)
        add(BACKWARD, workload.backward_time, micro=micro, end=n_layers, holds=-stored)
    for i in of_gradients:
        bring(i)
        merge(i)
    add(UPDATE, workload.optimizer, end=n_layers)
    for i in after:
        if averages[i].delay == 0 and not averages[i].at_begin:
            bring(i)
        merge(i)
        if averages[i].delay and not averages[i].at_begin:
            bring(i)
    for i, late_rows in late:
        for row in late_rows:
            rows[row].needs.append((joined[i], averages[i].delay))
    lanes = {(0, "compute"): 0}
    step = step_of(rows, lanes)
    n_steps = max([N_STEPS, *(average.delay + 2 for average in averages)])
    return template_of(
        [step] * n_steps,
        lanes,
        groups=[(0,)] * len(averages),
        parts=[Part(average.share * workload.gradient_nbytes, 0, n_layers) for average in averages],
        n_layers=n_layers,
        names=names,
        cycles=tuple(cycles),
    )
