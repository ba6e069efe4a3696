"""Build a cluster out of network namespaces, veth pairs, bridges and `tc`; leave nothing of it behind.

Every place of it is a network namespace. Both ends of each cable are inside namespaces, so the computer's
own network never sees them, and removing the namespaces removes everything. A namespace's name begins with
``ddlsim-PID-START-`` (process id and when that process started), so what a killed run left is recognised.
"""

from __future__ import annotations

import atexit
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ddlsim.errors import ConfigError
from ddlsim.lab.cabling import Cabling, Port

_NAME = re.compile(r"ddlsim-(\d+)-(\d+)-\S+")
_TOOLS = ("ip", "tc")
#: bytes that wait at a port before frames are dropped: what a port of a data-centre switch has, about
QUEUE = 512 * 1024
_ETHERNET = 14
_MOST_SEGMENTS = 40  # 64 KiB, the kernel's own limit, in frames of Ethernet
_ENDING = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
_serial = itertools.count()


@dataclass(frozen=True)
class Built:
    """A cluster that stands: the namespace and the IP address of each of its hosts, in rank order."""

    namespaces: tuple[str, ...]
    addresses: tuple[str, ...]

    def inside(self, rank: int, command: Sequence[str]) -> list[str]:
        """Return `command` so that it runs on the host of `rank`."""
        return [_tool("ip"), "netns", "exec", self.namespaces[rank], *command]


def check_computer() -> None:
    """Raise :class:`ConfigError`, saying what is missing, unless a laboratory can be built here."""
    if sys.platform != "linux":
        raise ConfigError(f"lab: needs Linux (network namespaces), this is {sys.platform}; use a virtual machine")
    for tool in _TOOLS:
        if not shutil.which(_tool(tool)):
            raise ConfigError(f"lab: the program {tool!r} is missing; install iproute2")
    if os.geteuid() != 0:
        raise ConfigError("lab: needs root to make network namespaces; start it with sudo")
    _probe("tbf rate 1mbit burst 3100 limit 3100")


def has_netem() -> bool:
    """Return whether this kernel can delay frames (if :func:`check_computer` finds nothing missing)."""
    try:
        _probe("netem delay 1ms")
    except ConfigError:
        return False
    return True


def _probe(discipline: str) -> None:
    """Raise :class:`ConfigError` unless a port in a namespace can have this queueing discipline."""
    name = _prefix() + "probe"
    try:
        _run("ip", f"netns add {name}\nlink add name p0 netns {name} type veth peer name p1 netns {name}\n")
        _run("tc", f"qdisc add dev p0 root {discipline}\n", name)
    finally:
        with undisturbed():
            _remove([name])


@contextmanager
def built(cabling: Cabling, queue: int = QUEUE) -> Iterator[Built]:
    """Build `cabling` for as long as the context lasts; `queue` bytes may wait at a port before frames are dropped.

    Everything is removed at the end, also after an error, SIGINT, SIGTERM or SIGHUP; what a run left that was killed is
    removed before (:func:`clean`). Raises :class:`ConfigError` when the kernel refuses, naming what it lacks.
    """
    clean()
    prefix = _prefix()
    spaces = [f"{prefix}{'host' if i < cabling.n_hosts else 'switch'}{i}" for i in range(len(cabling.place_names))]
    atexit.register(_remove, spaces)
    try:
        with _signals_raise():
            try:
                yield _build(cabling, spaces, queue)
            finally:
                with undisturbed():
                    _remove(spaces)
    finally:
        atexit.unregister(_remove)


def clean() -> list[str]:
    """Remove the namespaces of runs that are no more, with what runs in them, and return their names."""
    left = []
    for name in _existing():
        match = _NAME.fullmatch(name)
        if match and _started(int(match[1])) != int(match[2]):
            left.append(name)
            _kill_inside(name)  # a namespace lasts, without its name, as long as a process is in it
    _remove(left)
    return left


def _kill_inside(space: str) -> None:
    done = subprocess.run([_tool("ip"), "netns", "pids", space], text=True, capture_output=True, check=False)
    for pid in done.stdout.split():
        with suppress(OSError, ValueError):
            os.kill(int(pid), signal.SIGKILL)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep signals waiting, so that an impatient second Ctrl-C does not cut the tidying short."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the program through its `finally` clauses."""

    def stop(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return
    before = {number: signal.signal(number, stop) for number in _ENDING if number != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _build(cabling: Cabling, spaces: Sequence[str], queue: int) -> Built:
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
            settings[place] += _port_settings(name, port, cabling.mtu)
            shapes[place] += _shaped(name, port, cabling.mtu, queue)
        commands.append(f"link add {ends[0]} type veth peer {ends[1]}")
    _run("ip", "\n".join(commands))
    addresses = tuple(f"10.77.0.{rank + 1}" for rank in range(cabling.n_hosts))
    for place, space in enumerate(spaces):
        address = addresses[place] if place < cabling.n_hosts else None
        _run("ip", "\n".join([*settings[place], *_joined(n_ports[place], address, cabling.mtu)]), space)
        _run("tc", "\n".join(shapes[place]), space)
    return Built(tuple(spaces[: cabling.n_hosts]), addresses)


def _port_settings(name: str, port: Port, mtu: int) -> list[str]:
    """Return the `ip` commands for a port. The kernel hands on at most a burst of frames in one piece."""
    n_segments = max(port.burst // (2 * (mtu + _ETHERNET)), 1)
    return [f"link set {name} mtu {mtu} gso_max_segs {min(n_segments, _MOST_SEGMENTS)}", f"link set {name} up"]


def _joined(n_ports: int, address: str | None, mtu: int) -> list[str]:
    """Return the `ip` commands that join the ports of a place by a bridge, unless it is a host with one port."""
    lines, own = ["link set lo up"], "port0"
    if address is None or n_ports != 1:
        own = "bridge0"
        lines += [f"link add {own} mtu {mtu} type bridge stp_state 0 mcast_snooping 0", f"link set {own} up"]
        lines += [f"link set port{i} master {own}" for i in range(n_ports)]
    return lines if address is None else [*lines, f"addr add {address}/24 dev {own}"]


def _shaped(name: str, port: Port, mtu: int, queue: int) -> list[str]:
    """Return the `tc` commands that give a port its rate, and its delay if it has one."""
    bucket = f"tbf rate {round(port.rate * 8)}bit burst {port.burst} limit {max(queue, 2 * port.burst)}"
    if not port.delay:
        return [f"qdisc add dev {name} root {bucket}"]
    n_frames = (queue + round(port.rate * port.delay)) // mtu  # that wait, and that are under way
    return [
        f"qdisc add dev {name} root handle 1: netem delay {round(port.delay * 1e6)}us limit {2 * n_frames}",
        f"qdisc add dev {name} parent 1:1 handle 10: {bucket}",
    ]


def _tool(name: str) -> str:
    """Return where a program is; sbin is not on everybody's path."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])) or name


def _run(tool: str, lines: str, space: str = "") -> None:
    """Give `tool` a batch of commands inside a namespace. Raises ConfigError in one line if it refuses one."""
    command = [_tool(tool), *(["-n", space] if space else []), "-batch", "-"]
    done = subprocess.run(command, input=lines, text=True, capture_output=True, check=False)
    if done.returncode == 0:
        return
    said = next((line for line in done.stderr.splitlines() if line.strip()), f"exit code {done.returncode}")
    remedy = "is this kernel built with network namespaces, veth, bridge and tbf?"
    if "not permitted" in said or "Permission" in said:
        remedy = "in a container, start it with --privileged"
    raise ConfigError(f"lab: {tool}: {said.strip()}; {remedy}")


def _prefix() -> str:
    return f"ddlsim-{os.getpid()}-{_started(os.getpid())}-{next(_serial)}-"


def _started(pid: int) -> int:
    """Return when a process started, in ticks since the computer did; -1 if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    except OSError:
        return -1


def _existing() -> list[str]:
    done = subprocess.run([_tool("ip"), "netns", "list"], text=True, capture_output=True, check=False)
    return [line.split()[0] for line in done.stdout.splitlines() if line.strip()]


def _remove(spaces: Sequence[str]) -> None:
    """Remove those of the namespaces that exist. Their ends of cables go with them."""
    for name in set(_existing()).intersection(spaces):
        subprocess.run([_tool("ip"), "netns", "delete", name], capture_output=True, check=False)
