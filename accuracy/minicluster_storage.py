"""Workers that read every batch from one storage host, on the namespaces of :mod:`accuracy.minicluster`.

A worker waits for its oldest batch, asks for the next one, computes (sleeps), and in some rows sums gradients with the
others. What software takes is that of :mod:`accuracy.minicluster_splits`, from ``calibration.csv`` alone: of a message
beside its bytes, of a sleep, and of the calls of a step, which fetch a batch and hand a request over.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from accuracy.minicluster import Measurement, read
from accuracy.minicluster_splits import DATA, QUEUES, details, software
from accuracy.minicluster_training import BATCH, MODEL, Given, workload_of
from accuracy.rows import Row, Table, mean_error, show
from ddlsim.cluster import Cluster, star, with_detail, with_storage
from ddlsim.run import Experiment, Result, run
from ddlsim.strategies import AllReduce, LocalSGD
from ddlsim.workload.input import Input

__all__ = ["bounds", "cluster_of", "rows", "simulated", "table"]

#: steps of a row that are left out, the first ones
LEFT_OUT = 4
REQUEST = 8


def cluster_of(row: Measurement) -> Cluster:
    """Return the workers of a row and the storage host, whose memory is no limit, on one switch."""
    rate, latency = row.mbps * 1e6 / 8, software().message / 2
    graph = star(row.n, bandwidth=rate, latency=latency)
    storage = float(row.extra["storage_mbps"]) * 1e6 / 8
    return with_detail(with_storage(graph, "storage", read="1 PB/s", bandwidth=storage), **details(), **QUEUES)


def simulated(row: Measurement) -> Result:
    """Return the run of a row."""
    told, gradient, prefetch = software(), float(row.extra["gradient_bytes"]), int(row.extra["prefetch"])
    calls = told.send(REQUEST) + told.receive if prefetch else 0.0  # else those are part of the messages
    seconds = float(row.extra["compute_s"]) + told.sleep + calls
    workload = workload_of(seconds, [0.0] * 4, 0.0, gradient or 4.0)
    strategy = Given(AllReduce("ring", "none", rank_order="given") if gradient else LocalSGD(1000), workload)
    source = Input(storage="storage", sample_bytes=row.nbytes / BATCH, prefetch=prefetch)
    steps = int(row.extra["steps"])
    return run(Experiment(
        cluster_of(row), MODEL, strategy, BATCH, row.n, device="desktop-cpu", input=source, steps=steps - LEFT_OUT,
        warmup=LEFT_OUT,
    ))  # fmt: skip


def bounds(row: Measurement) -> tuple[float, float]:
    """Return between which s a step without prefetching must take: max(t + s, n s) and t + n s, s being the fetch alone
    and t computing; where gradients are summed, with the ring alone."""
    alone = dict(row.extra, gradient_bytes="0")
    both = simulated(dataclasses.replace(row, n=1, extra=alone)).step_time
    computing = float(row.extra["compute_s"])
    fetching = both - computing
    ring = 0.0
    if float(row.extra["gradient_bytes"]):
        ready = dict(row.extra, prefetch="4", compute_s="10")  # the fetch hides
        ring = simulated(dataclasses.replace(row, extra=ready)).step_time - 10.0
    link = row.n * (fetching - 2.0 * software().message)  # requests hide behind the answers to others
    return max(both + ring, link), computing + ring + row.n * fetching


def table(folder: Path = DATA) -> Table:
    """Return what becomes of the rows of ``storage.csv``."""
    found = Table()
    for row in read(folder / "storage.csv", found):
        what = f"{row.where}, {row.extra.get('compute_s')} s of computing"
        found.add(row.algorithm, what, partial(_row, row, what))
    return found


def _row(row: Measurement, what: str) -> Row:
    return Row(row.algorithm, what, row.seconds, simulated(row).step_time, "s", False,
               kind="run/all-reduce/storage")  # fmt: skip


def rows(folder: Path = DATA) -> list[Row]:
    """Return the rows beside their predictions."""
    return table(folder).rows


if __name__ == "__main__":
    show(rows(), table().omitted)
    print(f"{mean_error(rows()):.2%}")
