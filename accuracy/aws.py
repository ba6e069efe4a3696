"""Four AWS p3.2xlarge behind a shaped network: all-reduce predicted from point-to-point rows.

The rows (``data/aws_p3_tc_shaped.csv``: BinhangYuan/tc_cluster_setting, PyTorch 1.9) were measured with ``tc`` on the
receiving side: a delay, and a rate. What a point-to-point transfer needs to be explained, and how it is known:

rate         share of the shaped rate that is payload, and the rate of the unshaped interface: fitted to
             point-to-point rows
flow limit   AWS limits one connection (about 5 Gbit/s, EC2 user guide, "network bandwidth"); gloo has one per pair
             of ranks, NCCL on AWS 16 (NCCL's documentation of NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD): fitted
             to gloo's point-to-point rows
window       bytes in flight on a connection, at most window / RTT: fitted to gloo's point-to-point rows; Linux's
             default is 3 MiB (half of the 6 MiB of tcp_rmem)
slow start   10 segments of 8,949 bytes at first (RFC 6928; jumbo frames), doubled every round trip: not fitted

The all-reduces then run in the simulated network, over links that name TCP as their transport (connections, limit and
window as above; messages of a connection in order): NCCL as a ring, gloo as its ring of segments, two in flight, each
of which is a rendezvous (:mod:`ddlsim.collectives.gloo`) whose notifications queue behind the other segment's data.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from scipy.optimize import least_squares

from accuracy.rows import Omitted, Row, Table, UnpredictableError, number, show
from ddlsim import collective_time, load_cluster
from ddlsim.cluster import star, with_detail
from ddlsim.units import parse

__all__ = ["DATA", "Measurement", "Transport", "calibrate", "left_out", "predict", "read", "rows", "table"]

DATA = Path(__file__).with_name("data") / "aws_p3_tc_shaped.csv"
MSS = 8949.0  # payload bytes in a jumbo frame
INITIAL_WINDOW = 10 * MSS
BASE_DELAY = 50e-6  # s one way: 0.1 ms of ping time inside a placement group
CONNECTIONS = {"gloo": 1, "nccl": 16}


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


@dataclass(frozen=True)
class Transport:
    """What point-to-point rows say about a library on these machines: bytes/s, bytes."""

    n_connections: int
    efficiency: float  #: payload per shaped byte
    unshaped: float  #: bytes/s of an unshaped interface, whatever the number of connections
    flow_limit: float  #: bytes/s of one connection
    window: float  #: bytes of one connection in flight

    def bandwidth(self, delay: float, rate: float) -> float:
        """Return the bytes/s of a long transfer."""
        flows = self.n_connections * min(self.flow_limit, self.window / round_trip(delay))
        return min(self.efficiency * rate, self.unshaped, flows)

    def slow_start(self, delay: float, rate: float) -> float:
        """Return the s by which a transfer is later than at full rate: the window doubles every round trip."""
        needed = self.bandwidth(delay, rate) * round_trip(delay) / self.n_connections
        n_doublings = max(0.0, math.log2(needed / INITIAL_WINDOW))
        return (n_doublings - (1.0 - math.exp2(-n_doublings))) * round_trip(delay)

    def seconds(self, row: Measurement) -> float:
        """Return the s of a point-to-point transfer."""
        start = row.delay + BASE_DELAY + self.slow_start(row.delay, row.rate)
        return start + row.nbytes / self.bandwidth(row.delay, row.rate)


def round_trip(delay: float) -> float:
    """Return the s of a round trip when each machine delays what it receives."""
    return 2.0 * (delay + BASE_DELAY)


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


def calibrate(measured: Sequence[Measurement]) -> dict[str, Transport]:
    """Return each library's transport, fitted to its point-to-point rows (least squares of relative errors).

    NCCL's many connections show the interface's rate, gloo's single one the limits of a connection; either has its
    own share of payload.
    """
    own = {library: [r for r in measured if (r.operation, r.backend) == ("p2p", library)] for library in CONNECTIONS}

    def nccl(x: list[float]) -> Transport:
        return Transport(CONNECTIONS["nccl"], x[0], x[1] * 1e9, math.inf, math.inf)

    many = nccl(_fit(own["nccl"], nccl, [0.99, 1.2]))

    def gloo(x: list[float]) -> Transport:
        return Transport(CONNECTIONS["gloo"], x[0], many.unshaped, x[1] * 1e9, x[2] * 2**20)

    single = gloo(_fit(own["gloo"], gloo, [0.99, 0.62, 3.0]))
    return {"nccl": replace(many, flow_limit=single.flow_limit, window=single.window), "gloo": single}


def _fit(
    measured: Sequence[Measurement], model: Callable[[list[float]], Transport], start: list[float]
) -> list[float]:
    def errors(x: list[float]) -> list[float]:
        transport = model(x)
        return [math.log(transport.seconds(row) / row.seconds) for row in measured]

    found = least_squares(errors, start, bounds=(0.01, math.inf), loss="soft_l1", f_scale=0.02).x
    return [float(x) for x in found]


def predict(transport: Transport, library: str, row: Measurement) -> float:
    """Return the s of an all-reduce in the simulated network."""
    bandwidth = min(transport.efficiency * row.rate, transport.unshaped)
    latency = (row.delay + BASE_DELAY) / 2.0  # of each of the two links on the way
    cluster = with_detail(
        load_cluster(star(row.n_nodes, bandwidth=bandwidth, latency=latency)), transport="tcp-cubic", warm=True,
        connections=transport.n_connections, flow_rate=transport.flow_limit, window=transport.window,
    )  # fmt: skip
    algorithm = "gloo_ring" if library == "gloo" else "nccl"
    return transport.slow_start(row.delay, row.rate) + collective_time(cluster, algorithm, row.nbytes)


@cache
def table(path: Path = DATA) -> Table:
    """Return what becomes of a file's rows: point-to-point ones as fitted, all-reduces as predicted, in ms.

    A library without point-to-point rows in the file is calibrated on those of :data:`DATA`.
    """
    found = Table()
    measured = read(path, found)
    p2p = [row for row in measured if row.operation == "p2p"]
    p2p += [row for row in read() if row.operation == "p2p" and row.backend not in {known.backend for known in p2p}]
    transports = calibrate(p2p)
    for row in measured:
        shaped = f"{row.rate * 8e-9:g} Gbit/s" if math.isfinite(row.rate) else "not shaped"
        what = f"{row.nbytes / 2**20:g} MiB, {row.delay * 1e3:g} ms, {shaped}"
        case = f"{row.backend} {row.operation.replace('_', '-')} ({row.n_nodes} nodes)"
        found.add(case, what, partial(_row, row, transports, case, what))
    return found


def _row(row: Measurement, transports: Mapping[str, Transport], case: str, what: str) -> Row:
    if row.backend not in transports:
        raise UnpredictableError(f"how many connections {row.backend} opens is not known")
    if row.operation not in ("p2p", "all_reduce"):
        raise UnpredictableError(f"which algorithm {row.backend} uses for {row.operation} is not known")
    transport, fitted = transports[row.backend], row.operation == "p2p"
    seconds = transport.seconds(row) if fitted else predict(transport, row.backend, row)
    return Row(case, what, row.seconds * 1e3, seconds * 1e3, "ms", fitted)


def rows(path: Path = DATA) -> list[Row]:
    """Return point-to-point rows as fitted, all-reduces as predicted, in ms."""
    return table(path).rows


def left_out(path: Path = DATA) -> list[Omitted]:
    """Return the rows of the file that are not predicted."""
    return table(path).omitted


if __name__ == "__main__":
    for library, transport in calibrate(read()).items():
        print(library, transport)
    show(rows(), left_out())
