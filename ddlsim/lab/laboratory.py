"""Build a cluster from network namespaces, run operations on it, and compare their times with predictions."""

from __future__ import annotations

import atexit
import itertools
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType

import numpy as np

import ddlsim
from ddlsim.cluster import Cluster
from ddlsim.collectives import Schedule, build
from ddlsim.collectives.all_gather import ring as exchange
from ddlsim.collectives.broadcast import binomial
from ddlsim.collectives.combine import on_ranks
from ddlsim.collectives.push_pull import push_pull
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.lab.cabling import CUBIC, KERNEL_LATENCY, Cabling, Port, plan
from ddlsim.lab.rank import ITEM_NBYTES, PATIENCE, Failed, LabError, Prepare, congestion_control
from ddlsim.measure.table import OPERATIONS, Measurement
from ddlsim.network import schedule_time

_NAME = re.compile(r"ddlsim-(\d+)-(\d+)-\S+")
#: bytes that wait at a port before frames are dropped: about the buffer of a port of a data-centre switch
QUEUE = 512 * 1024
_ETHERNET = 14
_MOST_SEGMENTS = 40  # 64 KiB, the kernel's limit, in Ethernet frames
_ENDING = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
_serial = itertools.count()


def check_computer() -> None:
    """Raise :class:`ConfigError` if this machine cannot run a network lab (see :mod:`ddlsim.lab`).

    A lab requires Linux, the iproute2 tools, root privileges, and a kernel with network namespaces and the token bucket
    filter.
    """
    if sys.platform != "linux":
        raise ConfigError(f"the lab needs Linux (network namespaces), not {sys.platform}; use a virtual machine")
    for tool in ("ip", "tc"):
        if not shutil.which(_tool(tool)):
            raise ConfigError(f"the lab needs the program {tool!r}, which is missing; install iproute2")
    if os.geteuid() != 0:
        raise ConfigError("the lab needs root to create network namespaces; start it with sudo")
    _probe("tbf rate 1mbit burst 3100 limit 3100")


def has_netem() -> bool:
    """Return whether this kernel can delay frames; call it after :func:`check_computer`."""
    try:
        _probe("netem delay 1ms")
    except ConfigError:
        return False
    return True


def _probe(discipline: str) -> None:
    """Raise :class:`ConfigError` unless a port in a namespace supports this queueing discipline."""
    name = _prefix() + "probe"
    try:
        _run("ip", f"netns add {name}\nlink add name p0 netns {name} type veth peer name p1 netns {name}\n")
        _run("tc", f"qdisc add dev p0 root {discipline}\n", name)
    finally:
        with undisturbed():
            _remove([name])


@contextmanager
def built(cabling: Cabling, queue: int = QUEUE) -> Iterator[list[str]]:
    """Build `cabling` for as long as the context lasts, and return the namespaces of the hosts in rank order; `queue`
    bytes may wait at a port before frames are dropped.

    Everything is removed at the end, also after an error, SIGINT, SIGTERM or SIGHUP. Leftovers of killed runs are
    removed first (:func:`clean`). Raises :class:`ConfigError` if the kernel lacks a feature, naming it.
    """
    clean()
    prefix = _prefix()
    spaces = [f"{prefix}{'host' if i < cabling.n_hosts else 'switch'}{i}" for i in range(len(cabling.place_names))]
    atexit.register(_remove, spaces)
    try:
        with _signals_raise():
            try:
                _build(cabling, spaces, queue)
                yield spaces[: cabling.n_hosts]
            finally:
                with undisturbed():
                    _remove(spaces)
    finally:
        atexit.unregister(_remove)


def clean() -> list[str]:
    """Remove network namespaces left behind by earlier lab runs, and return their names.

    Processes that run in these namespaces are stopped.
    """
    left = []
    for name in _existing():
        match = _NAME.fullmatch(name)
        if match and _started(int(match[1])) != int(match[2]):
            left.append(name)
            # a namespace without a name persists as long as a process is in it
            done = subprocess.run([_tool("ip"), "netns", "pids", name], text=True, capture_output=True, check=False)
            for pid in done.stdout.split():
                with suppress(OSError, ValueError):
                    os.kill(int(pid), signal.SIGKILL)
    _remove(left)
    return left


@contextmanager
def undisturbed() -> Iterator[None]:
    """Block signals, so that a second Ctrl-C does not interrupt the cleanup."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Convert SIGTERM and SIGHUP to exceptions, so that `finally` clauses run."""

    def stop(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
        return
    before = {number: signal.signal(number, stop) for number in _ENDING if number != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def _build(cabling: Cabling, spaces: Sequence[str], queue: int) -> None:
    n_ports = [0] * len(spaces)
    commands = [f"netns add {space}" for space in spaces]
    settings: list[list[str]] = [[] for _ in spaces]
    shapes: list[list[str]] = [[] for _ in spaces]
    for cable in cabling.cables:
        ends = []
        for place, port in ((cable.a, cable.there), (cable.b, cable.back)):
            name = f"port{n_ports[place]}"
            n_ports[place] += 1
            ends.append(f"name {name} netns {spaces[place]}")
            # the kernel combines at most a burst of frames into one segment
            n_segments = min(max(port.burst // (2 * (cabling.mtu + _ETHERNET)), 1), _MOST_SEGMENTS)
            settings[place] += [f"link set {name} mtu {cabling.mtu} gso_max_segs {n_segments}", f"link set {name} up"]
            shapes[place] += _shaped(name, port, cabling.mtu, queue)
        commands.append(f"link add {ends[0]} type veth peer {ends[1]}")
    _run("ip", "\n".join(commands))
    for place, space in enumerate(spaces):
        address = _address(place) if place < cabling.n_hosts else None
        _run("ip", "\n".join([*settings[place], *_joined(n_ports[place], address, cabling.mtu)]), space)
        _run("tc", "\n".join(shapes[place]), space)


def _joined(n_ports: int, address: str | None, mtu: int) -> list[str]:
    """Return the `ip` commands that connect the ports of a place by a bridge, unless it is a host with one port."""
    lines, device = ["link set lo up"], "port0"
    if address is None or n_ports != 1:
        device = "bridge0"
        lines += [f"link add {device} mtu {mtu} type bridge stp_state 0 mcast_snooping 0", f"link set {device} up"]
        lines += [f"link set port{i} master {device}" for i in range(n_ports)]
    return lines if address is None else [*lines, f"addr add {address}/24 dev {device}"]


def _shaped(name: str, port: Port, mtu: int, queue: int) -> list[str]:
    """Return the `tc` commands that set a port's rate, and its delay if it has one."""
    bucket = f"tbf rate {round(port.rate * 8)}bit burst {port.burst} limit {max(queue, 2 * port.burst)}"
    if not port.delay:
        return [f"qdisc add dev {name} root {bucket}"]
    n_frames = (queue + round(port.rate * port.delay)) // mtu  # waiting, and in flight
    return [
        f"qdisc add dev {name} root handle 1: netem delay {round(port.delay * 1e6)}us limit {2 * n_frames}",
        f"qdisc add dev {name} parent 1:1 handle 10: {bucket}",
    ]


def _tool(name: str) -> str:
    """Return the path of a program; sbin may be missing from the search path."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])) or name


def _run(tool: str, lines: str, space: str = "") -> None:
    """Run a batch of commands of `tool` in a namespace. Raises a one-line ConfigError if it rejects one."""
    command = [_tool(tool), *(["-n", space] if space else []), "-batch", "-"]
    done = subprocess.run(command, input=lines, text=True, capture_output=True, check=False)
    if done.returncode == 0:
        return
    error = next((line for line in done.stderr.splitlines() if line.strip()), f"exit code {done.returncode}")
    remedy = "check that this kernel has network namespaces, veth, bridge and tbf"
    if "not permitted" in error or "Permission" in error:
        remedy = "in a container, start it with --privileged"
    raise ConfigError(f"lab: {tool} failed: {error.strip()}; {remedy}")


def _prefix() -> str:
    return f"ddlsim-{os.getpid()}-{_started(os.getpid())}-{next(_serial)}-"


def _started(pid: int) -> int:
    """Return the start time of a process in ticks since boot; -1 if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    except OSError:
        return -1


def _existing() -> list[str]:
    done = subprocess.run([_tool("ip"), "netns", "list"], text=True, capture_output=True, check=False)
    return [line.split()[0] for line in done.stdout.splitlines() if line.strip()]


def _remove(spaces: Sequence[str]) -> None:
    """Remove the existing ones of the namespaces, with their ends of cables."""
    for name in set(_existing()).intersection(spaces):
        subprocess.run([_tool("ip"), "netns", "delete", name], capture_output=True, check=False)


#: commas outside parentheses, as in hierarchical(ring, ring)
_COMMA = re.compile(r",(?![^(]*\))")


@dataclass(frozen=True)
class Operation:
    """An operation of the measurement table, and how to execute it.

    experiment, operation  as in :class:`~ddlsim.measure.Measurement`
    algorithm  of a collective: a name, or "package.module:function"; "" for a message; "parameter_server"
    n_servers  number of parameter servers, on the last machines; otherwise 0
    """

    label: str
    experiment: str
    operation: str
    algorithm: str = ""
    n_servers: int = 0

    @property
    def factor(self) -> int:
        """Size of the schedule's buffer divided by the table's: an exchange uses one half per direction."""
        return 2 if self.operation == "both_ways" else 1


def parse_operations(text: str) -> list[Operation]:
    """Parse a list of operations such as "all_reduce:ring, point_to_point:one_way, parameter_server:2".

    Raises :class:`ConfigError` for unknown operations. Names of collective algorithms are checked later, by
    :func:`schedule_of`.
    """
    words = [word.strip() for word in _COMMA.split(text)]
    if not all(words):
        raise ConfigError(f"--operations {text!r}: is empty between commas; write all_reduce:ring,parameter_server")
    return [_parsed(word) for word in words]


def _parsed(word: str) -> Operation:
    kind, _, detail = word.partition(":")
    if kind == "parameter_server":
        if detail and not (detail.isascii() and detail.isdigit() and int(detail) > 0):
            raise ConfigError(
                f"--operations {word}: {detail!r} is not a number of servers; write, for example, parameter_server:2"
            )
        return Operation(word, "collective", "all_reduce", kind, int(detail or 1))
    if kind == "point_to_point":
        if detail not in OPERATIONS[kind]:
            raise unknown_name("point_to_point operation", detail, OPERATIONS[kind], f"--operations {word}")
        return Operation(word, kind, detail)
    if kind not in OPERATIONS["collective"]:
        names = (*OPERATIONS["collective"], "point_to_point", "parameter_server")
        raise unknown_name("operation", kind, names, f"--operations {word}")
    if not detail:
        raise ConfigError(
            f"--operations {word}: the algorithm is missing; write, for example, {kind}:ring (ddlsim algorithms lists "
            "all)"
        )
    return Operation(word, "collective", kind, detail)


def schedule_of(operation: Operation, n_ranks: int, nbytes: int) -> Schedule:
    """Return the schedule of `operation` on `n_ranks` machines; custom schedules are checked.

    Raises :class:`ConfigError` for an unknown algorithm, or one that does not support `n_ranks` ranks.
    """
    if operation.experiment == "point_to_point":
        pair = binomial(2) if operation.operation == "one_way" else exchange(2)
        return on_ranks(pair, np.arange(2), n_ranks)
    if operation.n_servers:
        if operation.n_servers >= n_ranks:
            raise ConfigError(
                f"--operations {operation.label}: {n_ranks} machines are too few for {operation.n_servers} servers and "
                "a worker; use fewer servers"
            )
        return push_pull(n_ranks - operation.n_servers, operation.n_servers)
    return build(operation.algorithm, n_ranks, nbytes, list(range(n_ranks)), operation.operation)


def predicted(cluster: Cluster, schedule: Schedule, nbytes: int) -> float:
    """Return the predicted time of `schedule` on the workers of `cluster`, in s."""
    return schedule_time(cluster, schedule, cluster.workers.tolist(), float(nbytes))


#: delay in s until the common start: ranks must have received the order by then
_LEAD, _LEAD_PER_RANK = 3e-3, 0.3e-3
#: a rank gives up after this many times the expected duration without any transfer
_SLOWER = 10.0
#: maximum start skew in good repetitions, in s and as a share of the time; maximum number of retries per repetition
_LATE, _LATE_SHARE = 50e-6, 0.01
_RETAKEN = 2


#: note for rows whose ranks could not start together
BUSY = "; ranks began late: the computer is busy"


@dataclass(frozen=True)
class Comparison:
    """Measured and predicted time of an operation at a given size.

    label      the operation and its algorithm, such as "all_reduce:ring"
    row        the measurement, as a row of the measurement table
    predicted  predicted time in s
    """

    label: str
    row: Measurement
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of the predicted time: predicted over measured median, minus 1."""
        return self.predicted / self.row.median_s - 1.0


@dataclass(frozen=True)
class Repetition:
    """Time in s from the common start until the last rank had its result, and until the last one had started."""

    seconds: float
    lateness: float

    @property
    def is_good(self) -> bool:
        """Whether all ranks started together."""
        return self.lateness <= max(_LATE, _LATE_SHARE * self.seconds)


@dataclass(frozen=True)
class Ranks:
    """The processes, one per host, accessed through their pipes."""

    pipes: tuple[Connection, ...]
    names: tuple[str, ...]

    def tell(self, order: object) -> None:
        """Send the same order to all ranks."""
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send(order)
            except OSError:
                raise self._silent(rank) from None

    def hear(self, seconds: float) -> list[object]:
        """Return one answer per rank. Raises LabError for a rank that failed, died, or did not answer in time."""
        answers: dict[int, object] = {}
        deadline = time.monotonic() + seconds
        while len(answers) < len(self.pipes):
            missing = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers}
            ready = wait(list(missing), max(deadline - time.monotonic(), 0.0))
            if not ready:
                rank = min(missing.values())
                raise LabError(f"rank {rank} did not answer within {seconds:.3g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                answers[missing[pipe]] = self._answer(pipe, missing[pipe])
        return [answers[rank] for rank in range(len(self.pipes))]

    def _answer(self, pipe: Connection, rank: int) -> object:
        try:
            answer = pipe.recv()
        except (EOFError, OSError):
            raise self._silent(rank) from None
        if isinstance(answer, Failed):
            raise LabError(f"rank {rank} ({self.names[rank]}): {answer.reason}")
        return answer

    def _silent(self, rank: int) -> LabError:
        name = self.names[rank]
        return LabError(f"rank {rank} ({name}) ended unexpectedly; check whether another program killed it")

    def meet(self) -> None:
        """Exchange the listening addresses among the ranks."""
        self.tell(self.hear(PATIENCE))

    def repeat(self, order: Prepare, n_repetitions: int, limit: float) -> list[Repetition]:
        """Return `n_repetitions` repetitions, after a warm-up repetition.

        A repetition that started late on some rank, because another program used its core, is repeated, up to twice as
        many as wanted. The ones with the smallest delay are returned. A repetition fails after `limit` s.
        """
        self.tell(order)
        self.hear(PATIENCE + limit)
        self._once(limit)  # opens TCP's windows and allocates memory
        taken: list[Repetition] = []
        while sum(r.is_good for r in taken) < n_repetitions and len(taken) < (1 + _RETAKEN) * n_repetitions:
            taken.append(self._once(limit))
        return sorted(taken, key=lambda r: 0.0 if r.is_good else r.lateness / r.seconds)[:n_repetitions]

    def _once(self, limit: float) -> Repetition:
        start = time.monotonic() + _LEAD + _LEAD_PER_RANK * len(self.pipes)
        self.tell(start)
        entered, ended = np.max(np.array(self.hear(PATIENCE + limit)), axis=0).tolist()
        return Repetition(ended - start, entered - start)


def compare(
    cluster: Cluster, operations: Sequence[Operation], sizes: Sequence[int], n_repetitions: int = 5, queue: int = QUEUE
) -> Generator[Comparison, None, None]:
    """Emulate a cluster with network namespaces, and yield the measured and predicted time of every operation and size.

    operations     operations to measure, as returned by :func:`parse_operations`
    sizes          payload sizes in bytes, as in the measurement table; multiples of 4
    n_repetitions  number of measured repetitions for each operation and size
    queue          capacity in bytes of the queue at each machine or switch port; frames that do not fit are dropped

    The namespaces are removed when the iterator ends or is closed. Raises :class:`ConfigError` if the cluster, an
    operation or this machine is not supported; this is checked before anything is built. Raises :class:`LabError` if a
    process fails or returns a wrong result.
    """
    cabling = plan(cluster)
    if queue < 2 * cabling.mtu:
        raise ConfigError(f"queue = {queue} bytes: must hold at least two frames of {cabling.mtu} bytes")
    if n_repetitions < 1:
        raise ConfigError(f"repetitions = {n_repetitions}: must be at least 1")
    for size in sizes:
        if size < ITEM_NBYTES or size % ITEM_NBYTES:
            raise ConfigError(
                f"size = {size}: must be a positive multiple of {ITEM_NBYTES} bytes, because buffers are float32"
            )
    tasks = [
        (operation, size, schedule_of(operation, cabling.n_hosts, size)) for operation in operations for size in sizes
    ]
    check_computer()
    longest = max(port.delay for cable in cabling.cables for port in (cable.there, cable.back))
    if longest and not has_netem():
        latency, limit = f"{(longest + KERNEL_LATENCY) * 1e6:.4g} us", f"{2e6 * KERNEL_LATENCY:.0f} us"
        raise ConfigError(
            f"lab: cluster {cluster.name!r}: a link latency of {latency} requires netem, which is not available in "
            f"this kernel; run modprobe sch_netem, or use latencies of at most {limit}"
        )
    wanted, tcp = cabling.congestion, congestion_control(cabling.congestion)
    if tcp != wanted != CUBIC:
        raise ConfigError(
            f"lab: cluster {cluster.name!r}: its links use the transport tcp-{wanted}, which is not available in this "
            f"kernel; run modprobe tcp_{wanted}, or add +transport=tcp-{tcp}"
        )
    names = cabling.place_names[: cabling.n_hosts]
    with built(cabling, queue) as spaces, _ranks_started(spaces, names, wanted) as ranks:
        ranks.meet()
        for operation, size, schedule in tasks:
            nbytes = size * operation.factor
            seconds = predicted(cluster, schedule, nbytes)
            order = Prepare(schedule, nbytes, operation.n_servers, PATIENCE + _SLOWER * seconds)
            taken = ranks.repeat(order, n_repetitions, _SLOWER * seconds)
            row = measured(cluster, operation, size, len(ranks.pipes), taken, tcp)
            yield Comparison(operation.label, row, seconds)


def measured(
    cluster: Cluster, operation: Operation, size: int, n_hosts: int, taken: Sequence[Repetition], tcp: str = CUBIC
) -> Measurement:
    """Return the measurement table's row for the repetitions; `tcp` is the congestion control."""
    n_ranks = 2 if operation.experiment == "point_to_point" else n_hosts
    low, first, median, third, high = np.quantile([r.seconds for r in taken], [0.0, 0.25, 0.5, 0.75, 1.0]).tolist()
    return Measurement(
        operation.experiment, operation.operation, n_ranks, n_ranks, median, size, low, high, first, third, len(taken),
        backend=f"lab {operation.algorithm}".strip(),
        version=f"ddlsim {ddlsim.__version__}, Linux {platform.release()}, TCP {tcp}",
        note=f"{operation.label} on {cluster.name}" + (BUSY if any(not r.is_good for r in taken) else ""),
    )  # fmt: skip


@contextmanager
def _ranks_started(spaces: Sequence[str], names: Sequence[str], congestion: str) -> Iterator[Ranks]:
    # -P: the current directory must not affect the imports of the ranks
    command = [sys.executable, "-P", "-m", "ddlsim.lab"]
    home = str(Path(ddlsim.__file__).parents[1])
    path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        pipes = []
        try:
            for rank, space in enumerate(spaces):
                ours, theirs = Pipe()
                stack.callback(ours.close)
                pipes.append(ours)
                with theirs:
                    pipe = theirs.fileno()
                    order = [_tool("ip"), "netns", "exec", space, *command]
                    order += [str(pipe), str(rank), _address(rank), congestion]
                    # own session: Ctrl-C goes to the laboratory only, which ends its ranks itself
                    process = subprocess.Popen(order, pass_fds=[pipe], env=environment, start_new_session=True)
                    processes.append(process)
            yield Ranks(tuple(pipes), tuple(names))
        finally:
            with undisturbed():
                for process in processes:
                    process.kill()
                for process in processes:
                    process.wait()
