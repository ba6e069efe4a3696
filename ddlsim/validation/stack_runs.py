"""What a software stack is fitted to: runs, traces of a run, and collectives that were measured by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ddlsim.cluster import load_cluster
from ddlsim.cluster.cluster import ClusterLike
from ddlsim.errors import ConfigError
from ddlsim.imports import KinetoTrace, Timing, fastest_over_ranks, read_any, to_measurements
from ddlsim.measure import Measurement
from ddlsim.plan import Plan
from ddlsim.readable import size
from ddlsim.strategies import contract
from ddlsim.validation.cases import candidates, fewest_hosts, make_case
from ddlsim.validation.log_fit import LogFit, Prior, fit_logs
from ddlsim.validation.run_model import DEFAULT_STRATEGY, strategy_in
from ddlsim.validation.run_table import MeasuredRun, read_runs
from ddlsim.workload.stacks import Stack

#: a file, or a row of one
Source = str | Path | MeasuredRun | Measurement
#: time of a call before it is fitted, s, and within which factor it is expected two times out of three
CALL, CALL_SD = 10e-6, 3.0


def read_sources(
    sources: str | Path | Sequence[Source], cluster: ClusterLike | None, strategy: str | None, batch_size: int | None
) -> tuple[list[MeasuredRun], list[Measurement]]:
    """Return the runs and the collectives of files and rows; all traces are of one run.

    Raises ConfigError for files of other kinds, for arguments that a trace needs or that only a trace would use.
    """
    runs: list[MeasuredRun] = []
    collectives: list[Measurement] = []
    timings: list[Timing] = []
    traces: dict[Path, KinetoTrace] = {}
    for source in [sources] if isinstance(sources, str | Path) else sources:
        if isinstance(source, MeasuredRun):
            runs.append(source)
        elif isinstance(source, Measurement):
            collectives.append(source)
        elif Path(source).suffix == ".csv":
            runs += read_runs(source)
        elif isinstance(found := read_any(source), KinetoTrace):
            traces[Path(source)] = found
        elif isinstance(found, Plan):
            runs.append(_run(found.n_ranks, _of_plan(found, cluster), Path(source), strategy, batch_size, 0))
        elif isinstance(found, tuple) and found and isinstance(found[0], Timing):
            timings += found
        else:
            raise ConfigError(f"{source}: has no run, trace or collective; leave it out")
    if traces:
        path, first = next(iter(traces.items()))
        steps = [step.seconds for trace in traces.values() for step in trace.steps]
        if not steps:
            raise ConfigError(f"{path}: has no ProfilerStep; trace with torch.profiler.profile(schedule=...)")
        runs.append(_run(first.n_ranks, float(np.median(steps)), path, strategy, batch_size, first.batch_size))
        if len(traces) == first.n_ranks > 1:  # of fewer, waiting for other ranks cannot be told from the call
            timings += [each for each in fastest_over_ranks(list(traces.values())) if each.nbytes]
    for timing in timings:
        n_hosts = None if cluster is None else fewest_hosts(load_cluster(cluster), timing.n_ranks)
        collectives += to_measurements([timing], n_hosts=n_hosts)
    return runs, [row for row in collectives if row.experiment == "collective"]


def _of_plan(plan: Plan, cluster: ClusterLike | None) -> float:
    """Return the seconds of a traced step, whose exchanges take their time on the cluster."""
    if cluster is None:
        raise ConfigError("a Chakra trace needs a cluster for its exchanges; give cluster=")
    return plan.execute(cluster).seconds / plan.n_steps


def _run(
    n_ranks: int, seconds: float, path: Path, strategy: str | None, batch_size: int | None, traced: int
) -> MeasuredRun:
    """Return a traced step as a measured run; a rank had `traced` samples, 0 if the trace says none."""
    if not traced and batch_size is None:
        raise ConfigError(f"{path}: does not say its batch size; give it (--batch), or trace with record_shapes=True")
    run = MeasuredRun(workers=n_ranks, batch_size=1, throughput=1.0, strategy=strategy, place=str(path))
    shared = contract.of(strategy_in(run, DEFAULT_STRATEGY)).shares_batch
    run = replace(run, batch_size=batch_size or traced * (n_ranks if shared else 1), shared_batch=shared)
    return replace(run, throughput=run.samples / seconds)


def fit_calls(rows: Sequence[Measurement], cluster: ClusterLike | None, stack: Stack) -> LogFit:
    """Return the fit of the time of a call, which simulated collectives take in addition.

    Raises ConfigError without a cluster, or room on it, and for one size, which tells no fixed time from slower links.
    """
    if cluster is None:
        raise ConfigError("calibrate --stack: collectives need the cluster that was measured; give cluster=")
    if len({row.nbytes for row in rows}) < 2:
        raise ConfigError(
            f"calibrate --stack: one size of collectives ({size(rows[0].nbytes)}) does not tell a time per call from "
            "slower links; measure a second one, such as 8 KiB"
        )
    loaded, measured = load_cluster(cluster), np.array([row.median_s for row in rows])
    cases = [make_case(row, loaded, {row.operation: candidates(row, None)[0]}) for row in rows]
    simulated, prior = np.array([case.seconds(loaded) for case in cases]), Prior(stack.call_time or CALL, CALL_SD)
    return fit_logs(lambda values: simulated + values[0], measured, ["call_time"], [prior.value], [prior])
