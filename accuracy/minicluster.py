"""Ten network namespaces on one machine with shaped links: real TCP and known algorithms, predicted from its facts.

Rates, buckets and frame sizes are those that were set; the latency is half a ping-pong's. The only rows read for that,
and for the seconds of computing, are ``p2p.csv``, the training steps of a single worker, and of ``delay.csv`` the
smallest message without a delay (the latency of its switch); the rest is predicted.
Rows of less than 64 KiB and two-way traffic under cubic, which loses itself in queues, are predicted and marked.
"""

from __future__ import annotations

import csv
import dataclasses
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from accuracy.rows import Omitted, Row, Table, UnpredictableError, number, show
from ddlsim.cluster import Cluster, racks, star, with_detail
from ddlsim.collectives import Schedule, build
from ddlsim.collectives.push_pull import push_pull
from ddlsim.network import schedule_time

__all__ = [
    "DATA", "Measurement", "cluster_of", "collective_rows", "collective_table", "left_out", "p2p_rows", "p2p_table",
    "predicted", "read", "rows", "summary",
]  # fmt: skip

DATA = Path(__file__).parents[1] / "tests" / "accuracy" / "data" / "minicluster"
LATENCY = 70e-6  # one way: half the median ping-pong of small messages after idling
#: a frame of 1514 bytes carries 1448 beside Ethernet's 14, IPv4's 20 and TCP's 32; every second one is acknowledged
#: by a frame of 66; tc's token bucket filter was set to a burst of three frames
TCP = {"frame_header": 66.0, "frame_payload": 1448.0, "burst": 4542.0, "reverse_load": 66.0 / (2 * 1514)}
SMALL = 65536
#: round trips of a row of messages; 0: one way
ROUND_TRIPS = {"oneway": 0, "roundtrip_single": 1, "roundtrip_train20_per_iter": 20}
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


def cluster_of(row: Measurement, n_hosts: int) -> Cluster:
    """Return the hosts of a row: a star, or racks with a trunk; one host may have a slower link."""
    rate = row.mbps * 1e6 / 8
    latency = LATENCY
    if "extra_oneway_delay_us" in row.extra:
        latency = switch_latency() + _delay(row)
    if "racks" in row.extra:
        n_racks, per_rack = (int(part) for part in row.extra["racks"].split("x"))
        trunk = float(row.extra["trunk_mbps"]) * 1e6 / 8
        graph = racks(n_racks, per_rack, bandwidth=rate, latency=latency / 2, trunk_bandwidth=trunk, trunk_latency=0.0)
    else:
        graph = star(n_hosts, bandwidth=rate, latency=latency / 2)
    cluster = with_detail(Cluster.from_graph(graph), **TCP)
    slow = row.extra.get("slow_host", "none")
    if slow == "none":
        return cluster
    rank, _, mbps = slow.removeprefix("rank").partition("@")
    node = cluster.workers[int(rank)]
    mine = (cluster.link_src == node) | (cluster.link_dst == node)
    return dataclasses.replace(cluster, link_bandwidth=np.where(mine, float(mbps) * 1e6 / 8, cluster.link_bandwidth))


def _delay(row: Measurement) -> float:
    return float(row.extra.get("extra_oneway_delay_us", "nan")) * 1e-6


@cache
def switch_latency() -> float:
    """Return the s that the smallest message takes through the user-space switch of ``delay.csv`` without a delay."""
    rows = [row for row in read(DATA / "delay.csv") if (row.algorithm, row.nbytes, _delay(row)) == ("oneway", 1, 0.0)]
    return rows[0].seconds if rows else LATENCY


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


def predicted(row: Measurement) -> float:
    """Return the predicted s of a row of messages, collectives or parameter servers.

    Raises :class:`UnpredictableError` for another algorithm.
    """
    if row.algorithm in ROUND_TRIPS:
        return _message(row)
    if row.algorithm.startswith("ps_sync"):
        schedule, shards = servers_schedule(row)
        cluster = cluster_of(row, row.n + shards)
        nodes = cluster.workers[[*places(row), *range(len(cluster.workers) - shards, len(cluster.workers))]]
        return schedule_time(cluster, schedule, nodes.tolist(), row.nbytes)
    if row.algorithm not in ALGORITHMS:
        raise UnpredictableError("no algorithm of this name is described")
    kind, name, of_block = ALGORITHMS[row.algorithm]
    nbytes = row.nbytes * row.n if of_block else row.nbytes
    cluster = cluster_of(row, row.n)
    return schedule_time(cluster, build(name, row.n, nbytes, kind=kind), cluster.workers[places(row)].tolist(), nbytes)


def _message(row: Measurement) -> float:
    """Return the s of a message, or of one of so many that go there and back in a row."""
    there = build("binomial", 2, kind="broadcast")
    n = ROUND_TRIPS[row.algorithm]
    if n:
        back = dataclasses.replace(there.lanes[0][0], src=np.array([1]), dst=np.array([0]))
        there = dataclasses.replace(there, lanes=(n * (*there.lanes[0], back),))
    cluster = cluster_of(row, 2)
    return schedule_time(cluster, there, cluster.workers.tolist(), row.nbytes) / max(n, 1)


def hint(row: Measurement) -> str:
    """Return what is known about a row that explains a difference."""
    if row.nbytes < SMALL:
        return "below 64 KiB"
    if row.extra.get("cc", "cubic") == "cubic" and not row.algorithm.startswith(ONE_WAY):
        return "two-way under cubic"
    if row.algorithm.startswith("ps_sync") and row.extra.get("slow_host", "none") != "none":
        return "slow host among servers' workers"
    return ""


def p2p_table(path: Path = DATA / "p2p.csv") -> Table:
    """Return the messages between two hosts: single ones, from which the latency comes, and trains of twenty."""
    found = Table()
    for row in read(path, found):
        single = row.algorithm in ("oneway", "roundtrip_single")
        note = "gave the latency" if single else hint(row)
        found.add(row.name, row.where, lambda row=row, single=single, note=note: Row(
            row.name, row.where, row.seconds, predicted(row), "s", single, note
        ))  # fmt: skip
    return found


def collective_table(folder: Path = DATA) -> Table:
    """Return collectives, parameter servers, racks, a slow host, and the same with longer delays."""
    found = Table()
    for name in ("collectives", "ps", "topology", "delay"):
        for row in read(folder / f"{name}.csv", found):
            fitted = row.experiment == "delay" and row.algorithm == "oneway" and row.nbytes == 1 and _delay(row) == 0.0
            note = "gave the latency of the switch of the rows with delays" if fitted else hint(row)
            found.add(row.name, row.where, lambda row=row, fitted=fitted, note=note: Row(
                row.name, row.where, row.seconds, predicted(row), "s", fitted, note
            ))  # fmt: skip
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
