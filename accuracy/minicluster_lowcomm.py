"""Strategies that communicate less, on the namespaces of :mod:`accuracy.minicluster`.

Local SGD and neighbours are runs of the library's strategies: hosts compute (sleep), and average models by a ring or
with their neighbours. Gossip between pairs, top-k pairs and low-rank factors are plans. Links and software are those of
:mod:`accuracy.minicluster_splits`, from ``calibration.csv`` alone; nothing is taken from the rows that are predicted.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np

from accuracy.minicluster import Measurement, read
from accuracy.minicluster_splits import DATA, cluster_of, software
from accuracy.minicluster_training import BATCH, LAYERS, MODEL, Given, workload_of
from accuracy.rows import Row, Table, UnpredictableError, mean_error, number, show
from ddlsim.plan import Draft
from ddlsim.run import Experiment, run
from ddlsim.strategies import CHOCOSGD, DPSGD, LocalSGD, OverlapLocalSGD, Strategy

__all__ = ["gossip_rows", "predicted", "rows", "table"]

#: steps, or rounds, of a run, of which the first is left out
STEPS = 8
#: exchanges of an active host, and those that are left out (the first ones)
CYCLES, LEFT_OUT = 24, 2


def _strategy(row: Measurement) -> tuple[Strategy, int]:
    """Return the strategy of a row, and its local steps per round."""
    period = int(row.extra.get("local_steps", 1))
    if row.algorithm == "local_blocking":
        return LocalSGD(period, algorithm="ring", rank_order="given"), period
    if row.algorithm == "local_overlapped":
        return OverlapLocalSGD(period, algorithm="ring", rank_order="given"), period
    if row.algorithm == "neighbour_ring_blocking":  # CHOCO-SGD's messages follow the gradient
        return CHOCOSGD(1.0, "ring"), 1
    return DPSGD("ring"), 1  # exchanges models while the gradient is computed


def _run(row: Measurement) -> float:
    """Return the s of a round of a strategy."""
    strategy, period = _strategy(row)
    seconds = float(row.extra["compute_s"]) + software().sleep
    workload = workload_of(seconds, [0.0] * len(LAYERS), 0.0, row.nbytes)
    # presumably, both messages are handed over alternately, in pieces of 16 KiB, and so share the link; chosen after
    # seeing the rows, which would be 15.6 % too long in order of arrival
    cluster = cluster_of(row, 0.0, {}) if row.experiment == "neighbours" else cluster_of(row, 0.0)
    result = run(Experiment(
        cluster, MODEL, Given(strategy, workload), BATCH, row.n, device="desktop-cpu",
        steps=STEPS * period, warmup=0,
    ))  # fmt: skip
    ends = [time for time, _ in result.recorder.updates][period - 1 :: period]
    return float(np.median(np.diff(ends)))


def _gossip(row: Measurement) -> float:
    """Return the mean s of the cycles of all active hosts: compute, send to a random passive host, and wait for as many
    bytes from it."""
    draft, told, seconds = Draft(), software(), float(row.extra["compute_s"])
    passive = range(1, row.n, 2)
    ends: dict[int, list[int]] = {}
    for host in range(0, row.n, 2):
        source = random.Random(1000 * int(row.extra["seed"]) + host)
        ends[host], latest = [], []
        for cycle in range(CYCLES):
            partner = source.choice(passive)
            computing = source.expovariate(1.0 / seconds) if row.extra["compute"] == "exp" else seconds
            done = draft.work(host, computing + told.sleep, "compute", needs=latest)
            there = draft.message(host, partner, row.nbytes, needs=[done], lanes=("send", f"from {host}"))[1]
            back = draft.message(
                partner, host, row.nbytes, needs=[there], lanes=(f"to {host} {cycle}", f"from {partner} {cycle}")
            )  # fmt: skip
            latest = [back[1]]
            ends[host] += latest
    schedule = draft.plan().execute(cluster_of(row, 0.0), rank_order="given")
    cycles = [np.diff(schedule.end[rows], prepend=0.0)[LEFT_OUT:] for rows in ends.values()]
    return float(np.mean(cycles))


def _top_k(row: Measurement) -> float:
    draft, group = Draft(), range(row.n)
    seconds = sum(float(row.extra[key]) + software().sleep for key in ("compute_s", "selection_s"))
    draft.collective("all_gather", group, row.nbytes * row.n, [[draft.work(rank, seconds)] for rank in group])
    return draft.plan().execute(cluster_of(row, 0.0), rank_order="given").seconds


def _low_rank(row: Measurement) -> float:
    draft, group = Draft(), range(row.n)
    needs: list[list[int]] = [[] for _ in group]
    for work, nbytes in (("compute_s", "p_bytes"), ("orthogonalise_s", "q_bytes")):
        seconds = float(row.extra[work]) + software().sleep
        done = [[draft.work(rank, seconds, needs=needs[rank])] for rank in group]
        needs = [[each] for each in draft.all_reduce(group, float(row.extra[nbytes]), done)]
    return draft.plan().execute(cluster_of(row, 0.0), rank_order="given").seconds


PROGRAMS: dict[str, Callable[[Measurement], float]] = {
    "local_sgd": _run, "neighbours": _run, "gossip": _gossip, "top_k": _top_k, "low_rank": _low_rank,
}  # fmt: skip
#: algorithm -> the strategy to which it belongs, as files name it
STRATEGIES = {
    "local_blocking": "local-sgd", "local_overlapped": "overlap-local-sgd", "neighbour_ring_blocking": "choco-sgd",
    "neighbour_ring_overlapped": "dpsgd", "pairwise_async": "adpsgd",
}  # fmt: skip


def predicted(row: Measurement) -> float:
    """Return the s of a row."""
    return PROGRAMS[row.experiment](row)


@cache
def table(folder: Path = DATA) -> Table:
    """Return what becomes of the rows of ``lowcomm.csv``."""
    found = Table()
    for row in read(folder / "lowcomm.csv", found):
        words = {"local_steps": "local steps", "compute_s": "s of computing", "compute": "compute times"}
        more = [f"{row.extra[key]} {word}" for key, word in words.items() if key in row.extra]
        case, what = f"{row.experiment}: {row.algorithm}", ", ".join([row.where, *more])
        found.add(case, what, partial(_row, row, case, what))
    return found


def _row(row: Measurement, case: str, what: str) -> Row:
    if row.experiment not in PROGRAMS:
        raise UnpredictableError("no program of this name is described")
    try:
        measured = number(row.extra, "mean_step_s") if row.experiment == "gossip" else row.seconds
        seconds = predicted(row)
    except (KeyError, ValueError) as error:  # what a program needs and the row does not say
        raise UnpredictableError(f"the row does not state {error}") from None
    kind = f"run/{STRATEGIES.get(row.algorithm, 'all-reduce')}/tcp-reno"
    return Row(case, what, measured, seconds, "s", False, kind=kind)


def rows() -> list[Row]:
    """Return local SGD, neighbours and compressed exchanges beside their predictions."""
    return [row for row in table().rows if not row.case.startswith("gossip")]


def gossip_rows() -> list[Row]:
    """Return gossip between pairs beside its predictions."""
    return [row for row in table().rows if row.case.startswith("gossip")]


if __name__ == "__main__":
    show(rows(), table().omitted)
    show(gossip_rows())
    print(f"{mean_error(rows()):.2%} and {mean_error(gossip_rows()):.2%}")
