"""Input of a stack fit: training runs, traces of a run, and collectives measured separately."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ddlsim.cluster import load_cluster
from ddlsim.cluster.cluster import ClusterLike
from ddlsim.errors import ConfigError
from ddlsim.imports import KinetoTrace, fastest_over_ranks, read_any, to_measurements
from ddlsim.measure import Measurement
from ddlsim.measure.table import OPERATIONS
from ddlsim.plan import Plan
from ddlsim.strategies import contract
from ddlsim.validation.cases import candidates, make_case
from ddlsim.validation.log_fit import LogFit, Prior, fit_logs
from ddlsim.validation.run_model import DEFAULT_STRATEGY, strategy_in
from ddlsim.validation.run_table import MeasuredRun, read_runs
from ddlsim.validation.sources import read_sources
from ddlsim.workload.stacks import Stack

COLLECTIVES = OPERATIONS["collective"]
#: a file, or a row of one
Source = str | Path | MeasuredRun | Measurement
#: time of a call before it is fitted, s, and within which factor it is expected two times out of three
CALL, CALL_SD = 10e-6, 3.0


def read_stack_sources(
    sources: str | Path | Sequence[Source], cluster: ClusterLike | None, strategy: str | None, batch_size: int | None
) -> tuple[list[MeasuredRun], list[Measurement]]:
    """Return the runs and the collectives of files and rows; all traces of PyTorch's profiler are of one run.

    Raises ConfigError for files that cannot be used, for traces that lack something, and for a strategy or a batch
    without any trace.
    """
    machine = None if cluster is None else load_cluster(cluster)
    alone = 1 if machine is not None and len(machine.host_names) == 1 else None
    runs: list[MeasuredRun] = []
    collectives: list[Measurement] = []
    kineto: dict[str, KinetoTrace] = {}
    traced: dict[str, tuple[int, float, int]] = {}  # ranks, s per step, samples of a rank (0: not known)
    for source in [sources] if isinstance(sources, str | Path) else sources:
        if isinstance(source, MeasuredRun):
            runs.append(source)
        elif isinstance(source, Measurement):
            collectives.append(source)
        elif Path(source).suffix == ".csv":
            runs += read_runs(source)
        elif isinstance(found := read_any(source), KinetoTrace):
            kineto[str(source)] = found
        elif not isinstance(found, Plan):
            collectives += read_sources([source], n_hosts=alone).rows
        elif machine is None:
            raise ConfigError(f"{source}: contains communication, which requires a cluster; set cluster=")
        else:
            traced[str(source)] = found.n_ranks, found.execute(machine).seconds / found.n_steps, 0
    for path, first in list(kineto.items())[:1]:
        steps = [step.seconds for trace in kineto.values() for step in trace.steps]
        if not steps:
            raise ConfigError(f"{path}: contains no ProfilerStep; trace with torch.profiler.profile(schedule=...)")
        traced[path] = first.n_ranks, float(np.median(steps)), first.batch_size
        if len(kineto) == first.n_ranks > 1 and machine is not None:  # else waiting for other ranks is in the times
            widest = int(np.bincount(machine.host_of[machine.workers]).max())
            known = [t for t in fastest_over_ranks(list(kineto.values())) if t.nbytes and t.operation in COLLECTIVES]
            collectives += [m for t in known for m in to_measurements([t], n_hosts=-(-t.n_ranks // widest))]
    if not traced and (strategy is not None or batch_size is not None):
        raise ConfigError(
            "strategy and batch_size apply only to traces, but no trace was given; remove them (for runs, they are "
            "read from the columns of the same names)"
        )
    for place, (n_ranks, seconds, samples) in traced.items():
        if not samples and batch_size is None:
            raise ConfigError(f"{place}: contains no batch size; set it (--batch), or trace with record_shapes=True")
        run = MeasuredRun(workers=n_ranks, batch_size=1, throughput=1.0, strategy=strategy, place=place)
        shared = contract.of(strategy_in(run, DEFAULT_STRATEGY)).shares_batch
        run = replace(run, batch_size=batch_size or samples * (n_ranks if shared else 1), shared_batch=shared)
        runs.append(replace(run, throughput=run.samples / seconds))
    return runs, [row for row in collectives if row.experiment == "collective"]


def fit_calls(rows: Sequence[Measurement], cluster: ClusterLike | None, stack: Stack) -> LogFit | None:
    """Return the fit of the time of a call, which simulated collectives take in addition; None for fewer than two
    sizes, which tell no fixed time from slower links.

    Raises ConfigError without a cluster, or room on it.
    """
    if len({row.nbytes for row in rows}) < 2:
        return None
    if cluster is None:
        raise ConfigError("calibrate --stack: set cluster= to the cluster on which the collectives were measured")
    loaded, measured = load_cluster(cluster), np.array([row.median_s for row in rows])
    cases = [make_case(row, loaded, {row.operation: candidates(row, None)[0]}) for row in rows]
    simulated, prior = np.array([case.seconds(loaded) for case in cases]), Prior(stack.call_time or CALL, CALL_SD)
    return fit_logs(lambda values: simulated + values[0], measured, ["call_time"], [prior.value], [prior])
