"""Workers that stand still for a while, on the namespaces of :mod:`accuracy.minicluster`, as faults of a run.

A process is stopped (SIGSTOP) and goes on later; its kernel sends and receives meanwhile. Rows of rings are whole runs
of some steps, rows of servers count the updates in some seconds. Links and software are those of
:mod:`accuracy.minicluster_splits`; of the rows that are predicted nothing is read but what was done.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from accuracy.minicluster import Measurement, read
from accuracy.minicluster_splits import DATA, cluster_of, software
from accuracy.minicluster_training import LAYERS, MODEL, Given, workload_of
from accuracy.rows import Row, Table, UnpredictableError, number, show
from ddlsim.cluster import Cluster
from ddlsim.reliability import Stop
from ddlsim.run import Experiment, Result, run
from ddlsim.strategies import AllReduce, AsyncParameterServer, ParameterServer, Strategy

__all__ = ["failure_rows", "failure_table"]

RING, SERVERS = "ring_every_step", {"ps_async": AsyncParameterServer(), "ps_sync": ParameterServer(overlap="none")}
BATCH = 128


def _stops(row: Measurement) -> tuple[Stop, ...]:
    extra = row.extra
    if extra["stopped_worker"] == "none":
        return ()
    return (Stop(int(extra["stopped_worker"]), float(extra["stop_at_s"]), float(extra["stopped_s"])),)


def _simulated(row: Measurement, strategy: Strategy, cluster: Cluster, **options: float) -> Result:
    workload = workload_of(float(row.extra["compute_s"]) + software().sleep, [0.0] * len(LAYERS), 0.0, row.nbytes)
    experiment = Experiment(cluster, MODEL, Given(strategy, workload), BATCH, row.n, device="desktop-cpu", warmup=0)
    return run(experiment.with_(faults=_stops(row), **options))


def _ring(row: Measurement, case: str, what: str) -> Row:
    steps = int(row.extra["steps"])
    result = _simulated(row, AllReduce("ring", "none", "given"), cluster_of(row, 0.0), steps=steps)
    alone = number(row.extra, "stopped_s", zero=True) or float("nan")
    return Row(case, what, row.seconds, result.end_time, "s", False, unchanged=alone, kind="run/all-reduce/stopped")


def _server(row: Measurement, case: str, what: str) -> Row:
    """A server's threads hand answers over in pieces of 16 KiB, in turns, so answers to all share its link."""
    end = float(row.extra["duration_s"])
    beside = Measurement(row.experiment, row.algorithm, row.n + 1, row.nbytes, row.mbps, row.extra, row.seconds)
    result = _simulated(row, SERVERS[row.algorithm], cluster_of(beside, 0.0, {}), max_time=end, steps=10**6)
    return Row(case, what, number(row.extra, "updates"), len(result.recorder.updates), "updates", False,
               kind="run/parameter-server/stopped")  # fmt: skip


def failure_table(folder: Path = DATA) -> Table:
    """Return what becomes of the rows of stopped workers."""
    found = Table()
    for row in read(folder / "failures.csv", found):
        stopped = f"stopped for {row.extra.get('stopped_s')} s in {row.extra.get('stop_in', 'the run')}"
        case = f"{row.experiment}: {row.algorithm}"
        found.add(case, f"{row.where}, {stopped}", partial(_row, row, case, f"{row.where}, {stopped}"))
    return found


def _row(row: Measurement, case: str, what: str) -> Row:
    try:
        if row.algorithm == RING:
            return _ring(row, case, what)
        if row.algorithm in SERVERS:
            return _server(row, case, what)
    except (KeyError, ValueError) as error:  # what a run needs and the row does not say
        raise UnpredictableError(f"the row does not state {error}") from None
    raise UnpredictableError("no workers of this name are described")


def failure_rows(folder: Path = DATA) -> list[Row]:
    """Return whole runs and updates of stopped workers beside their predictions."""
    return failure_table(folder).rows


if __name__ == "__main__":
    show(failure_rows(), failure_table().omitted)
