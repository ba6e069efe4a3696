"""How much a study costs besides its simulations: points per second, overhead per point, parallel efficiency; JSON.

The overhead is the processor time of a study of very short points, with a store on disk, over that of simulating the
same experiments in a loop; medians of turns, so that other work on the machine does not matter. The parallel
efficiency is the share of the time of all processes in which they simulated, whatever the machine was busy with
meanwhile: once of the whole study, once from when its first point begins. How much faster the machine itself does two
things at once is not in it::

    python benchmarks/study.py [--processes 2] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import resource
import sqlite3
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path

import ddlsim
from ddlsim.study import Study
from ddlsim.study.worker import simulate_one

SHORT = Study(
    ddlsim.Experiment("star-1024-10g", "lenet5", steps=1, warmup=0, workers=1),
    {"batch_size": list(range(1, 501))},
    seeds=2,
)
LONG = Study(
    ddlsim.Experiment("cloud-25g-16x8-v100", "resnet50", batch_size=64, jitter=ddlsim.Lognormal(0.1)),
    {"workers": [16, 32, 64, 128], "cluster.nic.bandwidth": ["10 Gbit/s", "25 Gbit/s", "50 Gbit/s", "100 Gbit/s"]},
    seeds=6,
)


def spent() -> float:
    """Return the processor time of this process and of its children that have ended, in s."""
    mine, theirs = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return mine.ru_utime + mine.ru_stime + theirs.ru_utime + theirs.ru_stime


def measured(study: Study, jobs: int) -> float:
    """Return the processor time of a study with a store on disk, in s."""
    with tempfile.TemporaryDirectory() as folder:
        before = spent()
        study.run(Path(folder) / "study.sqlite", jobs=jobs)
        return spent() - before


def loop(study: Study) -> float:
    """Return the processor time of simulating the points of a study one after the other, in s."""
    before = spent()
    for point in study.points:
        assert point.experiment is not None
        simulate_one(point.experiment)
    return spent() - before


def short(n_processes: int, rounds: int) -> dict[str, float]:
    """Return the overhead per point, in ms, and points per second."""
    loop(SHORT)
    measured(SHORT, n_processes)
    turns = []
    for _ in range(rounds):
        # new studies, because one keeps what it has worked out about its points
        one, many = (Study(SHORT.base, SHORT.vary, seeds=SHORT.seeds) for _ in "ab")
        start = measured(Study(SHORT.base, {"workers": [1, 2]}), n_processes)
        turns.append((loop(SHORT), measured(one, 1), measured(many, n_processes) - start))
    n = len(SHORT.points)
    alone, here, there = (statistics.median(column) for column in zip(*turns, strict=True))
    return {
        "short_points": n,
        "short_point_ms": 1e3 * alone / n,
        "overhead_per_point_1_process_ms": 1e3 * (here - alone) / n,
        f"overhead_per_point_{n_processes}_processes_ms": 1e3 * (there - alone) / n,
        "points_per_cpu_second_1_process": n / here,
    }


def long(n_processes: int) -> dict[str, float]:
    """Return which share of the processes' time is spent on simulating."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "study.sqlite"
        began = time.time()
        LONG.run(path, jobs=n_processes)
        ended = time.time()
        with closing(sqlite3.connect(path)) as store:
            rows = store.execute("SELECT finished, seconds FROM points ORDER BY finished").fetchall()
    n, total = len(rows), sum(seconds for _, seconds in rows)
    first = rows[0][0] - rows[0][1] - began
    return {
        "long_points": n,
        "long_point_mean_s": total / n,
        "long_wall_s": ended - began,
        "parallel_efficiency": total / (n_processes * (ended - began)),
        "parallel_efficiency_without_start": total / (n_processes * (ended - began - first)),
        "first_point_after_s": first,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What a study costs besides its simulations; JSON.")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    print(json.dumps({**short(given.processes, given.rounds), **long(given.processes)}, indent=2))


if __name__ == "__main__":
    main()
