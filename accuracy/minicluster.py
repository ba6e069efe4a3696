"""Ten network namespaces on one machine with shaped links: real TCP and known algorithms, predicted from its facts.

Rates are those that were set. :func:`ddlsim.calibrate` finds all else of the links in ``p2p.csv``: latency, frames,
bucket, acknowledgements. Besides these the only rows read are the training steps of a single worker, for the seconds of
computing, and of ``delay.csv`` the smallest message without a delay, for the latency of its switch; the rest is
predicted.
Rows of less than 64 KiB and two-way traffic under cubic, which loses itself in queues, are predicted and marked.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from accuracy.rows import Omitted, Row, Table, UnpredictableError, number, show
from ddlsim import calibrate
from ddlsim.cluster import Cluster, racks, star, with_detail
from ddlsim.cluster.calibrated import beyond, deviation, operation_kind, unmeasured, with_parameters
from ddlsim.collectives import Schedule, build
from ddlsim.collectives.push_pull import push_pull
from ddlsim.measure import Measurement as Measurements
from ddlsim.validation import Calibration
from ddlsim.validation.cases import Case

__all__ = [
    "DATA",
    "Measurement",
    "calibration",
    "cluster_of",
    "collective_rows",
    "collective_table",
    "left_out",
    "p2p_rows",
    "p2p_table",
    "predicted",
    "read",
    "rows",
    "summary",
]  # fmt: skip

DATA = Path(__file__).parents[1] / "tests" / "accuracy" / "data" / "minicluster"
SMALL = 65536
#: round trips of a row of messages; 0: one way
ROUND_TRIPS = {"oneway": 0, "one_way": 0, "roundtrip_single": 1, "roundtrip_train20_per_iter": 20}
SINGLE = ("oneway", "roundtrip_single", "one_way")  # the last one as minicluster2 calls it
#: algorithm of the data -> (kind, name here, whether `bytes` are one rank's block instead of the whole buffer)
ALGORITHMS = {
    "own_ring_allreduce": ("all_reduce", "ring", False),
    "own_binomial_tree_allreduce": ("all_reduce", "binomial_tree(1)", False),
    "own_ring_on_torch_sendrecv": ("all_reduce", "ring", False),
    "own_halving_doubling_allreduce": ("all_reduce", "halving_doubling(far)", False),
    "own_alltoall": ("all_to_all", "direct", False),
    "gloo_all_reduce": ("all_reduce", "gloo_ring", False),
    "gloo_broadcast": ("broadcast", "gloo_broadcast", False),
    "gloo_reduce": ("reduce", "gloo_reduce", False),
    "gloo_all_gather": ("all_gather", "gloo_all_gather", True),
    "gloo_gather": ("gather", "gloo_gather", True),
    "gloo_scatter": ("scatter", "gloo_scatter", True),
    "gloo_reduce_scatter": ("reduce_scatter", "gloo_reduce_scatter", False),
    "gloo_all_to_all": ("all_to_all", "gloo_all_to_all", False),
}
#: in these, data flow one way at a time on every link
ONE_WAY = ("oneway", "roundtrip", "own_binomial_tree", "gloo_broadcast", "gloo_gather", "gloo_scatter", "ps_sync")


@dataclass(frozen=True)
class Measurement:
    """A row of the data. `nbytes` bytes, `mbps` Mbit/s of a host's link in each direction, `seconds` the median."""

    experiment: str
    algorithm: str
    n: int
    nbytes: float
    mbps: float
    extra: dict[str, str]
    seconds: float

    @property
    def name(self) -> str:
        """The algorithm, and what the row has besides its size."""
        known = ("slow_host", "order", "trunk_mbps", "extra_oneway_delay_us", "shards", "switch_buffer", "cc")
        more = [f"{key}={self.extra[key]}" for key in known if self.extra.get(key, "none") != "none"]
        return " ".join([f"{self.experiment}: {self.algorithm}", *more])

    @property
    def where(self) -> str:
        """Hosts, size and rate."""
        return f"{self.n} x {self.nbytes / 1024:.6g} KiB, {self.mbps:g} Mbit/s"


def read(path: Path, omitted: Table | None = None) -> list[Measurement]:
    """Return the rows of one CSV file; what says no time goes to `omitted`."""
    left, found = omitted if omitted is not None else Table(), []
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            try:
                found.append(
                    Measurement(
                        row["experiment"], row["algorithm"], int(number(row, "n")), number(row, "bytes", zero=True),
                        number(row, "link_mbps"),
                        dict(part.split("=", 1) for part in (row["extra"] or "").split(";") if "=" in part),
                        number(row, "median_s"),
                    )
                )  # fmt: skip
            except UnpredictableError as error:
                where = f"{row['n']} x {row['bytes']} B, {row['link_mbps']} Mbit/s"
                left.omit(f"{row['experiment']}: {row['algorithm']}", where, str(error))
    return found


@cache
def calibration(mbps: float, path: Path = DATA / "p2p.csv") -> tuple[Calibration, float]:
    """Return what :func:`ddlsim.calibrate` makes of the messages between two hosts in a file, at the measured rate that
    is next to `mbps`, and that rate."""
    rows = [row for row in read(path) if row.algorithm in SINGLE]
    by_rate = {rate: [row for row in rows if row.mbps == rate] for rate in {row.mbps for row in rows}}
    rates = [rate for rate, own in by_rate.items() if len(own) >= 8]
    nearest = min(sorted(rates), key=lambda rate: abs(math.log(rate / mbps)))
    measured = [
        Measurements(
            experiment="point_to_point", operation="one_way", n_ranks=2, n_hosts=2, nbytes=int(row.nbytes),
            median_s=row.seconds / (2 if ROUND_TRIPS[row.algorithm] else 1),
        )
        for row in by_rate[nearest]
    ]  # fmt: skip
    graph = star(2, bandwidth=nearest * 1e6 / 8, latency="10 us")
    return calibrate(measured, Cluster.from_graph(graph)), nearest


def parameters(row: Measurement) -> dict[str, float]:
    """Return the calibrated parameters for the links of a row, of whose rate and switch they are."""
    found, measured_rate = calibration(row.mbps)
    values = {parameter.name: parameter.value for parameter in found.parameters}
    values["between.bandwidth"] *= row.mbps / measured_rate
    if "extra_oneway_delay_us" in row.extra:
        values["between.latency"] = switch_latency() + _delay(row)
    return values


def cluster_of(row: Measurement, n_hosts: int) -> Cluster:
    """Return the hosts of a row: a star, or racks with a trunk; one host may have a slower link."""
    rate, latency = row.mbps * 1e6 / 8, "10 us"  # which the calibration replaces
    if "racks" in row.extra:
        n_racks, per_rack = (int(part) for part in row.extra["racks"].split("x"))
        trunk = float(row.extra["trunk_mbps"]) * 1e6 / 8
        graph = racks(n_racks, per_rack, bandwidth=rate, latency=latency, trunk_bandwidth=trunk, trunk_latency=0.0)
    else:
        graph = star(n_hosts, bandwidth=rate, latency=latency)
    plain = Cluster.from_graph(graph)
    cluster = with_parameters(plain, parameters(row)) if n_hosts > 1 else plain
    if "switch_buffer" in row.extra and cluster.details is not None:
        cluster = with_detail(cluster, **cluster.details.of(0).written(), **transport(row))
    slow = row.extra.get("slow_host", "none")
    if slow == "none":
        return cluster
    rank, _, mbps = slow.removeprefix("rank").partition("@")
    node = cluster.workers[int(rank)]
    mine = (cluster.link_src == node) | (cluster.link_dst == node)
    return dataclasses.replace(cluster, link_bandwidth=np.where(mine, float(mbps) * 1e6 / 8, cluster.link_bandwidth))


def transport(row: Measurement) -> dict[str, Any]:
    """Return the transport of a row that says how large the buffers of its switch are, for :func:`with_detail`.

    What says cubic ran BBR: see the README of the data.
    """
    kind = "tcp-reno" if row.extra.get("cc") == "reno" else "tcp-bbr"
    return {"transport": kind, "warm": True, "buffer": row.extra["switch_buffer"]}


def _delay(row: Measurement) -> float:
    return float(row.extra.get("extra_oneway_delay_us", "nan")) * 1e-6


@cache
def switch_latency() -> float:
    """Return the s that the smallest message takes through the user-space switch of ``delay.csv`` without a delay."""
    rows = [row for row in read(DATA / "delay.csv") if (row.algorithm, row.nbytes, _delay(row)) == ("oneway", 1, 0.0)]
    return rows[0].seconds


def places(row: Measurement) -> list[int]:
    """Return the host of each rank: in order, or from the racks in turn."""
    if row.extra.get("order") != "interleaved":
        return list(range(row.n))
    n_racks, per_rack = (int(part) for part in row.extra["racks"].split("x"))
    return [rack * per_rack + i for i in range(per_rack) for rack in range(n_racks)][: row.n]


def servers_schedule(row: Measurement) -> tuple[Schedule, int]:
    """Return what workers and servers of a row exchange, and how many servers there are."""
    shards = int(row.extra.get("shards", "1"))
    both = push_pull(row.n, shards)
    push, pull = both.lanes[0]
    if row.algorithm.endswith("push_pull"):
        return both, shards
    return dataclasses.replace(both, lanes=((pull if row.algorithm.endswith("pull") else push,),)), shards


def case_of(row: Measurement) -> tuple[Cluster, Case]:
    """Return the hosts of a row of messages, collectives or parameter servers, and what they exchange.

    Raises :class:`UnpredictableError` for another algorithm.
    """
    if row.algorithm in ROUND_TRIPS:
        cluster = cluster_of(row, 2)
        return cluster, Case(row.nbytes, tuple(cluster.workers.tolist()), schedule=_messages(row))
    if row.algorithm.startswith("ps_sync"):
        schedule, shards = servers_schedule(row)
        cluster = cluster_of(row, row.n + shards)
        nodes = cluster.workers[[*places(row), *range(len(cluster.workers) - shards, len(cluster.workers))]]
        return cluster, Case(row.nbytes, tuple(nodes.tolist()), schedule=schedule)
    if row.algorithm not in ALGORITHMS:
        raise UnpredictableError("no algorithm of this name is described")
    kind, name, of_block = ALGORITHMS[row.algorithm]
    nbytes = row.nbytes * row.n if of_block else row.nbytes
    cluster, schedule = cluster_of(row, row.n), build(name, row.n, nbytes, kind=kind)
    return cluster, Case(nbytes, tuple(cluster.workers[places(row)].tolist()), schedule=schedule)


def predicted(row: Measurement) -> float:
    """Return the predicted s of a row of messages, collectives or parameter servers."""
    cluster, case = case_of(row)
    return case.seconds(cluster) / max(ROUND_TRIPS.get(row.algorithm, 1), 1)


def interval(row: Measurement) -> tuple[float, float]:
    """Return between which s a row is with 95 % probability: of what the calibration has not seen."""
    (found, _), (cluster, case) = calibration(row.mbps), case_of(row)
    outside = beyond(row.n, found.ranks, "ranks") + beyond(case.nbytes, found.parameters[0].nbytes, "bytes")
    outside += deviation(kind_of(row)) if row.algorithm in ROUND_TRIPS else unmeasured(row.algorithm, kind_of(row))
    each = max(ROUND_TRIPS.get(row.algorithm, 1), 1)
    around = dataclasses.replace(found, cluster=cluster).simulated(case, outside)
    return around.low / each, around.high / each


def kind_of(row: Measurement) -> str:
    """Return what kind of prediction a row is, for its interval: the operation, and who controls congestion (BBR where
    the data say cubic, see :func:`transport`)."""
    control = "tcp-reno" if row.extra.get("cc") == "reno" else "tcp-bbr"
    if row.algorithm in ROUND_TRIPS:
        return operation_kind("one_way" if row.algorithm in SINGLE else "round_trips", "", control, row.nbytes)
    name = "torch_ring" if "torch" in row.algorithm else ALGORITHMS.get(row.algorithm, ("", "push_pull"))[1]
    if row.algorithm.startswith("ps_sync") and row.extra.get("slow_host", "none") != "none":
        name = "push_pull_with_a_slow_host"
    return operation_kind("", name, control, row.nbytes)


def _messages(row: Measurement) -> Schedule:
    """Return a message, or so many that go there and back in a row."""
    there = build("binomial", 2, kind="broadcast")
    back = dataclasses.replace(there.lanes[0][0], src=np.array([1]), dst=np.array([0]))
    n = ROUND_TRIPS[row.algorithm]
    return dataclasses.replace(there, lanes=(n * (*there.lanes[0], back),)) if n else there


def hint(row: Measurement) -> str:
    """Return what is known about a row that explains a difference."""
    if row.nbytes < SMALL:
        return "below 64 KiB"
    if row.extra.get("cc", "cubic") == "cubic" and not row.algorithm.startswith(ONE_WAY):
        return "two-way under cubic"
    if row.algorithm.startswith("ps_sync") and row.extra.get("slow_host", "none") != "none":
        return "slow host among servers' workers"
    return ""


def _row(row: Measurement, fitted: bool, note: str, intervals: bool) -> Row:
    around = interval(row) if intervals and not fitted else None
    return Row(row.name, row.where, row.seconds, predicted(row), "s", fitted, note, interval=around,
               kind=kind_of(row) if intervals else "")  # fmt: skip


def p2p_table(path: Path = DATA / "p2p.csv", intervals: bool = False) -> Table:
    """Return the messages between two hosts: single ones, which calibrate the links, and trains of twenty."""
    found = Table()
    for row in read(path, found):
        single = row.algorithm in SINGLE
        note = "calibrates the links" if single else hint(row)
        found.add(row.name, row.where, partial(_row, row, single, note, intervals))
    return found


def collective_table(folder: Path = DATA, intervals: bool = False) -> Table:
    """Return collectives, parameter servers, racks, a slow host, and the same with longer delays."""
    found = Table()
    for name in ("collectives", "ps", "topology", "delay"):
        for row in read(folder / f"{name}.csv", found):
            fitted = row.experiment == "delay" and row.algorithm == "oneway" and row.nbytes == 1 and _delay(row) == 0.0
            note = "gave the latency of the switch of the rows with delays" if fitted else hint(row)
            found.add(row.name, row.where, partial(_row, row, fitted, note, intervals))
    return found


def p2p_rows() -> list[Row]:
    """Return the messages between two hosts."""
    return p2p_table().rows


def collective_rows(folder: Path = DATA) -> list[Row]:
    """Return collectives, parameter servers, racks, a slow host, and the same with longer delays."""
    return collective_table(folder).rows


def left_out() -> list[Omitted]:
    """Return the rows of messages and collectives that are not predicted."""
    return p2p_table().omitted + collective_table().omitted


def rows() -> list[Row]:
    """Return everything measured on the namespaces beside its prediction."""
    from accuracy import minicluster_training

    return p2p_rows() + collective_rows() + minicluster_training.rows()


def summary(found: list[Row]) -> Iterator[str]:
    """Yield a line per family and note: how many rows, median and mean of the absolute error."""
    families: dict[str, list[float]] = {}
    for row in found:
        family = row.case.split(" cc=")[0].split(" switch_buffer")[0]
        note = "" if row.note.startswith("histograms") else row.note
        key = f"{family} ({note})" if note else family
        families.setdefault(key, []).append(abs(row.error))
    for family, errors in families.items():
        middle, mean = statistics.median(errors), statistics.mean(errors)
        yield f"{family:90} {len(errors):3}  median {middle:6.1%}  mean {mean:6.1%}"


if __name__ == "__main__":
    show(rows(), left_out())
    print("\n".join(summary(rows())))
