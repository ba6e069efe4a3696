"""Pipelines and other split steps on the namespaces of :mod:`accuracy.minicluster`, as plans that are executed.

Hosts compute for given seconds, and send and sum given bytes. ``calibration.csv`` gives what software takes: of a
message beside its bytes, of handing one over and of fetching one that has arrived (all three by the size, between which
they are interpolated), and of a sleep. Nothing is taken from the rows that are predicted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from accuracy.minicluster import Measurement, calibration, read
from accuracy.rows import Row, Table, UnpredictableError, mean_error, show
from ddlsim.cluster import Cluster, star, with_detail
from ddlsim.plan import Draft, Plan

__all__ = ["DATA", "Software", "hybrid_rows", "passes", "pipeline_rows", "predicted", "software", "table"]

DATA = Path(__file__).parents[1] / "tests" / "accuracy" / "data" / "minicluster2"
LARGE = 16384


@cache
def details() -> dict[str, float]:
    """Return frames, bucket and acknowledgements, as calibrated on the messages of :mod:`accuracy.minicluster`, whose
    links are of the same kind: ``calibration.csv`` has fewer sizes."""
    values = {parameter.name: parameter.value for parameter in calibration(100.0)[0].parameters}
    keys = ("frame_header", "frame_payload", "burst", "reverse_load")
    return {key: values.get(f"between.{key}", 0.0) for key in keys}


#: how the hosts' kernels queue what is sent. Bytes leave a token bucket and a switch port in the order in which they
#: came (tc-tbf(8), tc-bfifo(8)). After the warm-up Reno's window is twice what a connection has had under way
#: (tcp_is_cwnd_limited in Linux' include/net/tcp.h), which small queues hold at two buffers of 64 KiB
#: (tcp_small_queue_check), 91 segments of 1,448 bytes: 182 segments. It doubles when it first holds a message back, as
#: nothing is lost: 364. Of 91, 182, 364 segments and no window, that is best for jobs and 1F1B together (2.7/1.4,
#: 2.0/0.2, 0.9/0.7, 0.9/1.6 % error).
QUEUES: dict[str, Any] = {"sharing": "fifo", "transport": "tcp-reno", "warm": True, "window": 364 * 1448.0}


def wire(nbytes: float) -> float:
    """Return the bytes on the wire of a message."""
    return nbytes + details()["frame_header"] * ceil(nbytes / details()["frame_payload"])


@dataclass(frozen=True)
class Software:
    """Seconds of a message beside its bytes and of a sleep beside its own; of the calls that hand a message over
    (bytes, s) and that fetch one (of which all but the last bytes have been copied when it is there)."""

    message: float
    sleep: float
    sends: tuple[tuple[float, float], ...]
    receive: float

    def send(self, nbytes: float) -> float:
        """Seconds that a host is busy with handing a message over."""
        return float(np.interp(nbytes, *zip(*self.sends, strict=True)))


@cache
def software() -> Software:
    """Return what ``calibration.csv`` says."""
    rows = read(DATA / "calibration.csv")

    def of(algorithm: str) -> list[Measurement]:
        return [row for row in rows if row.algorithm == algorithm]

    beside = [
        row.seconds - max(0.0, wire(row.nbytes) - details()["burst"]) / (row.mbps * 1e6 / 8)
        for row in of("one_way") if row.nbytes >= LARGE
    ]  # fmt: skip
    sends = tuple((row.nbytes, row.seconds) for row in of("send_call") if row.mbps == 100.0)
    (sleeps,) = of("compute_20x5ms")
    smallest = min(of("receive_call"), key=lambda row: row.nbytes)
    return Software(statistics.median(beside), (sleeps.seconds - 0.1) / 20, sends, smallest.seconds)


def cluster_of(row: Measurement, taken: float, queues: Mapping[str, Any] = QUEUES) -> Cluster:
    """Return the hosts of a row, of whose messages' software so many s are in the plan."""
    graph = star(row.n, bandwidth=row.mbps * 1e6 / 8, latency=(software().message - taken) / 2)
    return with_detail(Cluster.from_graph(graph), **details(), **queues)


# ---------------------------------------------------------------- pipelines


def passes(schedule: str, n_stages: int, micro_batches: int, stage: int) -> list[tuple[str, int]]:
    """Return what a stage does: "F", "B" and, where the backward pass is split, "W" of micro-batches."""
    m, every = micro_batches, range(micro_batches)
    if schedule == "gpipe":
        return [("F", k) for k in every] + [("B", k) for k in every]
    warm_up = min(n_stages - 1 - stage, m)
    order, summed = [("F", k) for k in range(warm_up)], 0
    for k in every:
        if warm_up + k < m:
            order.append(("F", warm_up + k))
        order.append(("B", k))
        if schedule == "zb" and (k + 1 - summed > stage or warm_up + k >= m):
            order.append(("W", summed))
            summed += 1
    return order + [("W", k) for k in range(summed, m) if schedule == "zb"]


class Pipeline:
    """The rows of pipelines in a draft: replica d's stage s is on host s + stages * d."""

    def __init__(self, draft: Draft, row: Measurement, n_stages: int, first: int) -> None:
        self.draft, self.row, self.n, self.first = draft, row, n_stages, first
        self.arrived: dict[tuple[str, int, int], int] = {}  # kind, stage, micro-batch -> its message's receive
        extra = row.extra
        self.seconds = {kind: [float(s) for s in extra[f"{name}_s"].split("/")]
                        for kind, name in (("F", "forward"), ("B", "backward"))}  # fmt: skip
        self.schedule, self.m = row.algorithm.split("_")[1], int(extra["micro_batches"])
        self.latest = [-1] * n_stages
        left = [passes(self.schedule, n_stages, self.m, stage) for stage in range(n_stages)]
        while any(left):  # a stage goes on while it has what it needs: rows of a lane are in its order
            for stage in range(n_stages):
                while left[stage] and self._ready(stage, *left[stage][0]):
                    self._add(stage, *left[stage].pop(0))

    def _comes(self, stage: int, kind: str) -> bool:
        return (kind == "F" and stage > 0) or (kind == "B" and stage < self.n - 1)

    def _ready(self, stage: int, kind: str, micro: int) -> bool:
        return not self._comes(stage, kind) or (kind, stage, micro) in self.arrived

    def _add(self, stage: int, kind: str, micro: int) -> None:
        draft, told, rank = self.draft, software(), self.first + stage
        if self._comes(stage, kind):
            draft.work(rank, told.receive, needs=[self.arrived[kind, stage, micro]])
        seconds = self.seconds["F" if kind == "F" else "B"][stage]
        if kind != "F" and self.schedule == "zb":
            seconds /= 2
        done = draft.work(rank, seconds + told.sleep, f"{kind} {micro}")
        self.latest[stage] = done
        to = stage + (1 if kind == "F" else -1)
        if kind == "W" or not 0 <= to < self.n:
            return
        self.latest[stage] = draft.work(rank, told.send(self.row.nbytes), "send")
        lanes = (f"to {to}", f"from {stage}")
        self.arrived[kind, to, micro] = draft.message(
            rank, self.first + to, self.row.nbytes, needs=[done], lanes=lanes
        )[1]  # fmt: skip


def _pipeline(row: Measurement) -> Plan:
    draft = Draft()
    replicas = int(row.extra.get("replicas", 1))
    n_stages = row.n // replicas
    copies = [Pipeline(draft, row, n_stages, d * n_stages) for d in range(replicas)]
    if replicas > 1:
        nbytes = float(row.extra["gradient_bytes"])
        for stage in range(n_stages):
            group = [stage + n_stages * d for d in range(replicas)]
            draft.all_reduce(group, nbytes, [[copy.latest[stage]] for copy in copies])
    return draft.plan()


# ---------------------------------------------------------------- other splits


def _tensor_parallel(row: Measurement) -> Plan:
    draft, group = Draft(), range(row.n)
    needs: list[list[int]] = [[] for _ in group]
    for name in ("forward", "backward"):
        for _ in range(int(row.extra["layers"])):
            seconds = float(row.extra[f"layer_{name}_s"]) + software().sleep
            done = [[draft.work(rank, seconds, needs=needs[rank])] for rank in group]
            needs = [[sum_row] for sum_row in draft.all_reduce(group, row.nbytes, done)]
    return draft.plan()


def _sharded(row: Measurement) -> Plan:
    draft, group, n = Draft(), range(row.n), int(row.extra["buckets"])
    forward, backward = (float(row.extra[f"bucket_{name}_s"]) + software().sleep for name in ("forward", "backward"))
    blocking = row.algorithm.endswith("blocking")
    latest: list[list[int]] = [[] for _ in group]
    gathers = [] if blocking else [draft.collective("all_gather", group, row.nbytes) for _ in range(n)]
    for bucket in range(n):
        gathered = draft.collective("all_gather", group, row.nbytes, latest) if blocking else gathers[bucket]
        latest = [[draft.work(rank, forward, needs=[gathered[rank]])] for rank in group]
    for _ in range(n):
        latest = [[draft.work(rank, backward, needs=latest[rank])] for rank in group]
        scattered = draft.collective("reduce_scatter", group, row.nbytes, latest)
        latest = [[each] for each in scattered] if blocking else latest
    return draft.plan()


def _bucketed(row: Measurement) -> Plan:
    draft, group, n = Draft(), range(row.n), int(row.extra["buckets"])
    forward, backward = (float(row.extra[f"bucket_{name}_s"]) + software().sleep for name in ("forward", "backward"))
    for rank in group:
        for _ in range(n):
            draft.work(rank, forward)
    for _ in range(n):
        draft.all_reduce(group, row.nbytes, [[draft.work(rank, backward)] for rank in group])
    return draft.plan()


PLANS: dict[str, Callable[[Measurement], Plan]] = {
    "pipeline": _pipeline, "pipeline_x_data": _pipeline, "tensor_parallel": _tensor_parallel,
    "sharded_data": _sharded, "bucketed_data": _bucketed,
}  # fmt: skip


def predicted(row: Measurement) -> float:
    """Return the s of a row."""
    fetched = row.experiment.startswith("pipeline")  # what fetching takes is in the plan
    cluster = cluster_of(row, software().receive if fetched else 0.0)
    return PLANS[row.experiment](row).execute(cluster, rank_order="given").seconds


def table(name: str, folder: Path = DATA) -> Table:
    """Return what becomes of the rows of a file of `folder`."""
    found = Table()
    for row in read(folder / f"{name}.csv", found):
        more = [f"{row.extra[key]} {word}" for key, word in (("micro_batches", "micro-batches"), ("layers", "layers"),
                ("buckets", "buckets"), ("stages", "stages")) if key in row.extra]  # fmt: skip
        case, what = f"{row.experiment}: {row.algorithm}", ", ".join([row.where, *more])
        found.add(case, what, partial(_row, row, case, what))
    return found


def _row(row: Measurement, case: str, what: str) -> Row:
    if row.experiment not in PLANS:
        raise UnpredictableError("no split of this name is described")
    software()  # whose file must be whole
    try:
        seconds = predicted(row)
    except (KeyError, ValueError) as error:  # what a plan needs and the row does not say
        raise UnpredictableError(f"the row does not state {error}") from None
    strategy = {"sharded_data": "fsdp", "bucketed_data": "all-reduce"}.get(row.experiment, "parallel")
    return Row(case, what, row.seconds, seconds, "s", False, kind=f"run/{strategy}/tcp-reno")


def pipeline_rows(folder: Path = DATA) -> list[Row]:
    """Return pipelines beside their predictions."""
    return table("pipeline", folder).rows


def hybrid_rows(folder: Path = DATA) -> list[Row]:
    """Return pipelines in replicas, tensor parallelism, shards and buckets beside their predictions."""
    return table("hybrid", folder).rows


if __name__ == "__main__":
    print(software())
    show(pipeline_rows(), table("pipeline").omitted)
    show(hybrid_rows(), table("hybrid").omitted)
    print(f"{mean_error(pipeline_rows()):.2%} and {mean_error(hybrid_rows()):.2%}")
