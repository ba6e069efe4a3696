"""Four AWS p3.2xlarge behind a shaped network: all-reduce predicted from point-to-point rows.

The rows (``data/aws_p3_tc_shaped.csv``: BinhangYuan/tc_cluster_setting, PyTorch 1.9) were measured with ``tc`` on the
receiving side: a delay, and a rate. :func:`ddlsim.calibrate` reads the messages between two machines of each library
without shaping; delays and rates that were set are facts, as in a cluster file that says them. All other rows are
predicted, over links that name TCP as their transport:

frames       MTU 9,001 (EC2 user guide); Ethernet, IPv4 and TCP with timestamps as ``tc`` counts them
connections  gloo has one for each pair of ranks, NCCL on AWS 16 (NCCL's documentation of NCCL_SOCKET_NTHREADS and
             NCCL_NSOCKS_PERTHREAD)
window       Linux's, and so is slow start (docs/models/transport.md)
spread       of interfaces that nobody has shaped, :data:`SPREAD`; the messages between two machines are of the very
             pair that calibrates, so they have none

NCCL chooses among its algorithms; gloo runs its ring of segments, two in flight, each of which is a rendezvous
(:mod:`ddlsim.collectives.gloo`) whose notifications queue behind the other segment's data.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import NormalDist, mean

from accuracy.rows import Omitted, Row, Table, UnpredictableError, number, show
from ddlsim import calibrate, load_cluster
from ddlsim.cluster import Cluster, star, with_detail
from ddlsim.cluster.calibrated import current_parameters, deviation, operation_kind, with_parameters
from ddlsim.cluster.details import with_spread
from ddlsim.measure import Measurement as Measured
from ddlsim.spread import WHISKERS, Spread
from ddlsim.units import parse
from ddlsim.validation import Calibration, Interval

__all__ = [
    "CONNECTIONS",
    "DATA",
    "Measurement",
    "calibration",
    "left_out",
    "machines",
    "parameters",
    "predicted",
    "read",
    "rows",
    "table",
]  # fmt: skip

DATA = Path(__file__).with_name("data") / "aws_p3_tc_shaped.csv"
HEADER, PAYLOAD = 14.0 + 20.0 + 32.0, 9001.0 - 52.0  # bytes of a frame
NOMINAL = 10e9 / 8  # bytes/s of an interface that nobody has shaped: "up to 10 Gigabit"
BASE_DELAY = 50e-6  # s one way: 0.1 ms of ping time inside a placement group
CONNECTIONS = {"gloo": 1, "nccl": 16}
#: Rates of EC2 machines of one kind: some 80 % of 1,710 paths between them had 0.9 to 1.1 Gbit/s, and what limits a
#: path is its sender (LaCurts, Deng, Goyal and Balakrishnan, "Choreo: network-aware task placement for cloud
#: applications", IMC 2013). 10 % are 1.2816 standard deviations of a normal distribution, so one is 7.8 %. Gloo's one
#: connection gets 5 Gbit/s (EC2 user guide: a flow outside a placement group), which every interface carries.
DEVIATION = 0.1 / NormalDist().inv_cdf(0.9)
SPREAD = {"gloo": 0.0, "nccl": WHISKERS * DEVIATION}
ALGORITHMS = {"gloo": "gloo_ring", "nccl": "nccl"}


@dataclass(frozen=True)
class Measurement:
    """A row of the file, in bytes and s; `rate` is inf where it was not shaped."""

    operation: str
    backend: str
    n_nodes: int
    nbytes: float
    delay: float
    rate: float  # bytes/s
    seconds: float

    @property
    def calibrates(self) -> bool:
        """Whether it is a message between two machines as they are."""
        return self.operation == "p2p" and self.delay == 0.0 and math.isinf(self.rate)


def read(path: Path = DATA, omitted: Table | None = None) -> list[Measurement]:
    """Return the rows of the file; what says no time goes to `omitted`. "MB" there is MiB."""
    left = omitted if omitted is not None else Table()
    found = []
    with path.open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            what = f"{line['size_mib']} MiB, {line['shaped_delay_ms']} ms, {line['shaped_gbit_s'] or 'not shaped'}"
            try:
                found.append(
                    Measurement(
                        line["operation"], line["library"], int(number(line, "n_nodes")),
                        number(line, "size_mib") * 2**20, float(line["shaped_delay_ms"] or 0.0) * 1e-3,
                        parse(line["shaped_gbit_s"] + " Gbit/s", "bandwidth") if line["shaped_gbit_s"] else math.inf,
                        number(line, "measured_ms") * 1e-3,
                    )
                )  # fmt: skip
            except UnpredictableError as error:
                left.omit(f"{line['library']} {line['operation']}", what, str(error))
    return found


def machines(library: str, n_nodes: int, delay: float = 0.0, rate: float = math.inf) -> Cluster:
    """Return the machines as a cluster file would describe them: what was set, and nothing that was measured here."""
    spread = SPREAD[library] if n_nodes > 2 and math.isinf(rate) else 0.0  # a shaped rate is below all interfaces'
    latency = (delay + BASE_DELAY) / 2.0  # of each of the two links on the way
    return with_detail(
        load_cluster(star(n_nodes, bandwidth=min(rate, NOMINAL), latency=latency)), transport="tcp-cubic",
        connections=CONNECTIONS[library], frame_header=HEADER, frame_payload=PAYLOAD,
        spread=spread,
    )  # fmt: skip


@cache
def calibration(library: str, path: Path = DATA) -> Calibration:
    """Return what :func:`ddlsim.calibrate` makes of a library's messages between two machines as they are.

    Of a library that the file has none of, those of :data:`DATA`. Raises :class:`UnpredictableError` for others.
    """
    if library not in CONNECTIONS:
        raise UnpredictableError(f"how many connections {library} opens is not known")
    own = [row for row in read(path) if row.calibrates and row.backend == library]
    if len({row.nbytes for row in own}) < 2:
        return calibration(library)
    measured = [
        Measured(
            experiment="point_to_point", operation="one_way", n_ranks=2, n_hosts=2, nbytes=int(row.nbytes),
            median_s=row.seconds, backend=library,
        )
        for row in own
    ]  # fmt: skip
    return calibrate(measured, machines(library, 2))


def parameters(library: str, path: Path = DATA) -> dict[str, float]:
    """Return what was calibrated, by name."""
    return {parameter.name: parameter.value for parameter in calibration(library, path).parameters}


def predicted(row: Measurement, path: Path = DATA, spread: float | None = None) -> Interval:
    """Return the s of a message or an all-reduce: the calibrated interface behind the delay and the rate of a row.

    spread  of unshaped interfaces, instead of that of :data:`SPREAD`
    """
    found, values = calibration(row.backend, path), parameters(row.backend, path)
    if row.operation not in ("p2p", "all_reduce"):
        raise UnpredictableError(f"which algorithm {row.backend} uses for {row.operation} is not known")
    shaped = machines(row.backend, row.n_nodes, row.delay, row.rate)
    most = current_parameters(shaped)["between.bandwidth"]  # of a shaped rate, what frames leave
    values |= {"between.latency": values["between.latency"] + row.delay,
               "between.bandwidth": min(values["between.bandwidth"], most)}  # fmt: skip
    cluster = with_parameters(shaped, values)
    if spread is not None and math.isinf(row.rate):
        cluster = with_spread(cluster, spread)
    here = dataclasses.replace(found, cluster=cluster)
    if row.operation == "p2p":
        return here.time("one_way", row.nbytes)
    return here.time("all_reduce", row.nbytes, row.n_nodes, algorithm=ALGORITHMS[row.backend], backend=row.backend)


def deviation_told(nodes: Callable[[int], bool], path: Path = DATA) -> float | None:
    """Return the standard deviation of interfaces that NCCL's unshaped all-reduces tell whose number of nodes is chosen
    by `nodes`, None without any: their times over those of equal interfaces are those of the slowest of so many."""
    told = []
    for row in read(path):
        if (row.operation, row.backend, row.rate, row.delay) == ("all_reduce", "nccl", math.inf, 0.0) and nodes(
            row.n_nodes
        ):
            slowest = Spread(WHISKERS * 1e-6).relative_times(row.n_nodes)[-1]
            told.append((row.seconds / predicted(row, path, spread=0.0).value - 1.0) / ((slowest - 1.0) / 1e-6))
    return mean(told) if told else None


def kind_of(row: Measurement) -> str:
    """Return what kind of prediction a row is, for its interval."""
    return operation_kind("one_way", "" if row.operation == "p2p" else ALGORITHMS[row.backend], "tcp-cubic", row.nbytes)


@cache
def table(path: Path = DATA) -> Table:
    """Return what becomes of a file's rows, in ms."""
    found = Table()
    for row in read(path, found):
        shaped = f"{row.rate * 8e-9:g} Gbit/s" if math.isfinite(row.rate) else "not shaped"
        what = f"{row.nbytes / 2**20:g} MiB, {row.delay * 1e3:g} ms, {shaped}"
        case = f"{row.backend} {row.operation.replace('_', '-')} ({row.n_nodes} nodes)"
        found.add(case, what, partial(_row, row, path, case, what))
    return found


def _row(row: Measurement, path: Path, case: str, what: str) -> Row:
    time = predicted(row, path)
    low, high = time.low * 1e3, time.high * 1e3
    if row.operation == "p2p":  # a delay or a rate that no message was measured with
        logs = math.log(time.value / time.low), math.log(time.high / time.value)
        low, high = deviation(kind_of(row)).around(time.value * 1e3, *logs)
    around = None if row.calibrates else (low, high)
    seconds = row.seconds * 1e3, time.value * 1e3
    return Row(case, what, *seconds, "ms", row.calibrates, interval=around, kind=kind_of(row))


def left_one_out(path: Path = DATA) -> str:
    """Return the standard deviations, and the error of each number of nodes with that of the other numbers."""
    unshaped = [row for row in read(path) if row.operation == "all_reduce" and math.isinf(row.rate)]
    found = [f"{DEVIATION:.1%} in the source and {deviation_told(lambda n: True, path) or 0.0:.1%} in these rows"]
    for n in sorted({row.n_nodes for row in unshaped if row.backend == "nccl"}):
        others = deviation_told(lambda nodes, n=n: nodes != n, path)
        if others is not None:
            own = [row for row in unshaped if (row.backend, row.n_nodes) == ("nccl", n)]
            errors = [predicted(row, path, WHISKERS * others).value / row.seconds - 1.0 for row in own]
            found.append(f"with the {others:.1%} of the other rows, {n} nodes are {mean(errors):+.1%} off")
    return "; ".join(found)


def rows(path: Path = DATA) -> list[Row]:
    """Return all rows, in ms; messages between two machines as they are calibrate."""
    return table(path).rows


def left_out(path: Path = DATA) -> list[Omitted]:
    """Return the rows of the file that are not predicted."""
    return table(path).omitted


if __name__ == "__main__":
    for library in CONNECTIONS:
        print(calibration(library))
    print(left_one_out())
    show(rows(), left_out())
