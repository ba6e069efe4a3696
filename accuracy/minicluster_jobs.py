"""Jobs that share a trunk, and one beside a flow of somebody else, on the namespaces of :mod:`accuracy.minicluster`.

Two racks of hosts are joined by one trunk of their links' rate. Every step of a job computes (sleeps), then sums a
buffer over its hosts by a ring; the second job starts some time after the first. Software is that of
:mod:`accuracy.minicluster_splits`, from ``calibration.csv`` alone. A row is the mean of the steps that lie wholly
inside the time when all jobs run, as it is of the measured ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import networkx as nx

from accuracy.minicluster import Measurement, read
from accuracy.minicluster_splits import DATA, QUEUES, details, software
from accuracy.minicluster_training import BATCH, LAYERS, MODEL, Given, workload_of
from accuracy.rows import Row, Table, UnpredictableError, mean_error, number, show
from ddlsim.cluster import Cluster, with_detail
from ddlsim.jobs import Jobs, simulate_jobs
from ddlsim.reliability import Background
from ddlsim.run import Experiment
from ddlsim.run.experiment import Job
from ddlsim.strategies import AllReduce

__all__ = ["background_rows", "cluster_of", "rows", "shared_rows", "simulated", "table"]

#: hosts of each rack
RACKS = (0, 1, 2, 3, 8), (4, 5, 6, 7, 9)
#: steps that a job makes, the longest job of a row
STEPS = 14


@cache
def cluster_of(mbps: float) -> Cluster:
    """Return the hosts on two switches with a trunk between."""
    rate, latency = mbps * 1e6 / 8, software().message / 2
    graph = nx.Graph(name="two-racks")
    for rack, hosts in enumerate(RACKS):
        graph.add_node(f"switch{rack}", kind="switch")
        for host in hosts:
            graph.add_node(f"h{host}", kind="host")
            graph.add_edge(f"h{host}", f"switch{rack}", bandwidth=rate, latency=latency, kind="nic")
    graph.add_edge("switch0", "switch1", bandwidth=rate, latency=0.0, kind="trunk")
    return with_detail(Cluster.from_graph(graph), **details(), **QUEUES)


def simulated(rows: Sequence[Measurement]) -> Jobs:
    """Return the jobs of the rows of one case, and the flow beside them if there is one."""
    cluster, traffic = cluster_of(rows[0].mbps), []
    place = {cluster.node_names[node]: i for i, node in enumerate(cluster.workers.tolist())}
    alone = [float(row.extra.get("alone_mean_step_s", row.seconds)) for row in rows]
    jobs = []
    for row, step in zip(rows, alone, strict=True):
        workload = workload_of(float(row.extra["compute_s"]) + software().sleep, [0.0] * len(LAYERS), 0.0, row.nbytes)
        strategy = Given(AllReduce("ring", "none", "given"), workload)
        hosts = [place[f"h{host}"] for host in row.extra["order"].split("-")]
        experiment = Experiment(
            cluster, MODEL, strategy, BATCH, hosts, device="desktop-cpu", warmup=1,
            steps=round(STEPS * max(alone) / step) - 1,
        )  # fmt: skip
        jobs.append(Job(experiment, f"job {len(jobs) + 1}", start=float(row.extra.get("offset_s", 0.0))))
    if "background_from" in rows[0].extra:
        limit = rows[0].extra["background_limit_mbps"]
        ends = (f"h{rows[0].extra[f'background_{end}']}" for end in ("from", "to"))
        traffic.append(Background(*ends, None if limit == "none" else f"{limit} Mbit/s"))
    return simulate_jobs([*jobs, *traffic])


def _cases(folder: Path, found: Table) -> list[list[Measurement]]:
    """Return the rows of each case, those of all its jobs together."""
    cases: dict[str, list[Measurement]] = {}
    for row in read(folder / "jobs.csv", found):
        key = row.extra.get("case", row.where)
        if row.experiment == "job_alone":
            key = f"{key} {len(cases)}"
        cases.setdefault(key, []).append(row)
    return list(cases.values())


def table(folder: Path = DATA) -> Table:
    """Return what becomes of the rows of ``jobs.csv``."""
    found = Table()
    for case in _cases(folder, found):
        made: list[Jobs] = []
        for number_, row in enumerate(case, 1):
            what = _what(row)
            found.add(row.experiment, what, partial(_row, case, number_, row, what, made))
    return found


def _what(row: Measurement) -> str:
    beside = ""
    if "background_from" in row.extra:
        limit = row.extra["background_limit_mbps"]
        beside = ", beside a greedy flow" if limit == "none" else f", beside {limit} Mbit/s"
    if "offset_share" in row.extra:
        beside = f", job {row.extra.get('job')}, begun {row.extra['offset_share']} steps after the first"
    return f"{row.where}, {row.extra.get('compute_s')} s of computing{beside}"


def _row(case: Sequence[Measurement], number_: int, row: Measurement, what: str, made: list[Jobs]) -> Row:
    if any(key not in row.extra for key in ("order", "compute_s")):
        raise UnpredictableError("the row does not state its hosts and its computing")
    if not made:
        made.append(simulated(case))
    measured = number(row.extra, "mean_step_s")
    alone = number(row.extra, "alone_mean_step_s") if "alone_mean_step_s" in row.extra else float("nan")
    step = made[0].concurrent_step_time(f"job {number_}")
    kind = f"run/all-reduce/{'background' if row.experiment == 'background' else 'shared'}"
    return Row(row.experiment, what, measured, step, "s", False, unchanged=alone, kind=kind)


@cache
def rows(folder: Path = DATA) -> list[Row]:
    """Return the rows beside their predictions."""
    return table(folder).rows


def shared_rows() -> list[Row]:
    """Return those of jobs, alone and together."""
    return [row for row in rows() if row.case != "background"]


def background_rows() -> list[Row]:
    """Return those of a job beside a flow."""
    return [row for row in rows() if row.case == "background"]


if __name__ == "__main__":
    show(rows(), table().omitted)
    for kind in ("job_alone", "2_jobs", "3_jobs", "background"):
        if own := [row for row in rows() if row.case == kind]:
            print(f"{kind}: {mean_error(own):.2%} mean, {max(abs(row.error) for row in own):.1%} at most")
