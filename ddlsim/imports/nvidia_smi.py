"""Reader for ``nvidia-smi topo -m`` and ``nvidia-smi nvlink -s``.

The matrix contains the type of connection between devices, not its speed: NV#: a bond of # NVLinks; PIX: the same PCIe
bridge; PXB: several bridges; PHB and NODE: the same CPU; SYS (SOC before driver 384): another CPU. NV# hides the PCIe
connection of two GPUs, which is inferred from their connections to NICs and from the CPU affinity. If a GPU would need
more NVLinks than any GPU has, the bonds are one crossbar, an NVSwitch.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ddlsim.arguments import checked
from ddlsim.cluster import Cluster
from ddlsim.cluster.quantity import Places, Quantity, nonnegative, positive
from ddlsim.imports.machines import Machine, assemble, nic_rate, pcie_rate
from ddlsim.imports.text import SourceText, read_text

_KINDS = ("PIX", "PXB", "PHB", "NODE", "SYS", "SOC")
_HEADING = re.compile(r"^\s*GPU0\s")
MAX_NVLINKS = 18  # per GPU: 4 (P100), 6 (V100), 12 (A100), 18 (H100, B200)


@dataclass(frozen=True)
class _Matrix:
    """The devices in order, the connection of each pair, and the CPU affinity of the GPUs."""

    source: SourceText
    names: tuple[str, ...]
    cells: dict[tuple[str, str], str]
    affinity: dict[str, str]

    def gpus(self) -> list[str]:
        return [name for name in self.names if name.startswith("GPU")]

    def bond(self, a: str, b: str) -> int:
        """Return the number of NVLinks between two devices."""
        cell = self.cells[a, b]
        return int(cell[2:]) if cell.startswith("NV") else 0


@checked
def read_nvidia_smi(
    path: str | Path, *, nvlink_bandwidth: Quantity | None = None, pcie_bandwidth: Quantity | None = None,
    smp_bandwidth: Quantity = "10 GB/s", nic_bandwidth: Quantity | None = None, n_hosts: Places = 1,
    device: str | None = None, nvswitch: bool | None = None, pcie_latency: Quantity = "1 us",
    nvlink_latency: Quantity = "0.7 us", network_latency: Quantity = "1 us",
) -> Cluster:  # fmt: skip
    """Read the topology of a machine from saved ``nvidia-smi topo -m`` output.

    Returns a cluster of `n_hosts` such machines, connected to one switch.

    path               file with the output of ``nvidia-smi topo -m``
    nvlink_bandwidth   bandwidth of one NVLink per direction (25 GB/s for NVLink 2 to 4); required if the matrix lists
                       NVLinks, unless the file also contains the output of ``nvidia-smi nvlink -s``
    pcie_bandwidth     bandwidth of every PCIe link; None: 16 lanes of the device's PCIe generation, or of PCIe 3.0 if
                       the device is unknown
    smp_bandwidth      bandwidth between CPUs; the default is NCCL's value for Intel CPUs since Skylake (topo.h,
                       SKL_QPI_BW)
    nic_bandwidth      bandwidth of every NIC; required if there are several hosts
    device             GPU model, as named in the device catalogue
    nvswitch           whether the NVLinks connect the GPUs to a switch; None: only if a GPU would otherwise have more
                       than 18 NVLinks
    pcie_latency, nvlink_latency, network_latency
                       latency of each link of that kind

    Raises :class:`~ddlsim.errors.ConfigError`, giving the file, line and reason, for a truncated or asymmetric matrix,
    an unknown entry, or a missing bandwidth.
    """
    source = read_text(path, log=True)
    n_links, speed = _listed_links(source)
    if speed is not None and nvlink_bandwidth is not None:
        what = "the file has the speed of the NVLinks (nvidia-smi nvlink -s)"
        raise source.error(None, f"{what}; remove nvlink_bandwidth")
    nvlink_bandwidth = speed if nvlink_bandwidth is None else nvlink_bandwidth
    has_matrix = any(_HEADING.match(line) for _, line in source.lines())
    matrix = _read(source) if has_matrix or not n_links else _assumed(source, n_links, nvswitch)
    machine = Machine(gpus=[name.lower() for name in matrix.gpus()])
    pcie = pcie_rate(pcie_bandwidth, device)
    latency = nonnegative(pcie_latency, "time", "pcie_latency")
    _add_pcie(matrix, machine, pcie, latency)
    smp = positive(smp_bandwidth, "bandwidth", "smp_bandwidth")
    machine.links += [(a, b, "smp", smp, latency) for a, b in itertools.combinations(machine.cpus, 2)]
    _add_nvlinks(matrix, machine, nvlink_bandwidth, nonnegative(nvlink_latency, "time", "nvlink_latency"), nvswitch)
    nics = [name for name in matrix.names if not name.startswith("GPU")]
    rate = nic_rate(nic_bandwidth, n_hosts, source.path)
    if rate is not None:
        machine.ports = [(_label(nic), rate) for nic in nics]
    guessed = ("assuming PCIe 3.0 with 12 GB/s; set device or pcie_bandwidth to change that",)
    notes = source.notes + guessed * (pcie_bandwidth is None and device is None)
    return assemble(source.path, [machine] * n_hosts, device, network_latency, notes)


def _read(source: SourceText) -> _Matrix:
    names: list[str] = []
    cells: dict[tuple[str, str], str] = {}
    affinity: dict[str, str] = {}
    rows: dict[str, int] = {}
    aliases: dict[str, str] = {}
    for number, line in source.lines():
        if not names and _HEADING.match(line):
            names = re.split(r"CPU Affinity|NUMA Affinity", line)[0].split()
        elif match := re.match(r"\s*(NIC\d+):\s+(\S+)\s*$", line):
            aliases[match[1]] = match[2]
        elif names and (words := line.split()) and words[0] in names and words[0] not in rows:
            rows[words[0]] = number
            if len(words) < 1 + len(names):
                raise source.error(number, f"has {len(words) - 1} of {len(names)} entries; is the matrix complete?")
            for name, cell in zip(names, words[1:], strict=False):
                if (words[0] == name) != (cell == "X"):
                    raise source.error(
                        number, f"{words[0]} - {name} is {cell}; X must be on the diagonal, and only there"
                    )
                if cell != "X" and cell not in _KINDS and not re.fullmatch(r"NV[1-9][0-9]?", cell):
                    raise source.error(number, f"{words[0]} - {name} is {cell!r}; must be NV#, {', '.join(_KINDS)}")
                cells[words[0], name] = cell
            if words[0].startswith("GPU"):
                affinity[words[0]] = words[1 + len(names)] if len(words) > 1 + len(names) else ""
    if not names:
        hint = "save the output of nvidia-smi topo -m"
        raise source.error(None, f"no matrix found (a line GPU0 GPU1 ... CPU Affinity); {hint}")
    for name in names:
        if name not in rows:
            raise source.error(None, f"the row of {name} is missing; is the matrix complete?")
    for a, b in itertools.combinations(names, 2):
        if cells[a, b] != cells[b, a]:
            raise source.error(rows[b], f"{b} - {a} is {cells[b, a]}, but {a} - {b} is {cells[a, b]}; correct one")
    renamed = {name: aliases.get(name, name) for name in names}
    pairs = {(renamed[a], renamed[b]): cell for (a, b), cell in cells.items()}
    return _Matrix(source, tuple(renamed.values()), pairs, affinity)


def _listed_links(source: SourceText) -> tuple[dict[str, int], float | None]:
    """Return the number of active NVLinks of each GPU listed by ``nvidia-smi nvlink -s``, and the bytes/s of one."""
    n_links: dict[str, int] = {}
    speed: float | None = None
    gpu = ""
    for number, line in source.lines():
        if match := re.match(r"\s*GPU ([0-9]{1,3}): ", line):
            gpu = f"GPU{match[1]}"
        elif gpu and (match := re.match(r"\s*Link [0-9]{1,3}: ([0-9]{1,5}(?:\.[0-9]{1,6})?) GB/s", line)):
            one = float(match[1]) * 1e9
            if one <= 0 or one != (speed or one):
                what = f"{gpu} has a link of {match[1]} GB/s, but other links have {(speed or 0) / 1e9:g} GB/s"
                raise source.error(number, f"{what}; remove these lines and set nvlink_bandwidth")
            speed, n_links[gpu] = one, n_links.get(gpu, 0) + 1
    return n_links, speed


def _assumed(source: SourceText, n_links: dict[str, int], nvswitch: bool | None) -> _Matrix:
    """Return the assumed matrix of GPUs whose links lead to the only other GPU, or to an NVSwitch."""
    names = tuple(n_links)
    if len(set(n_links.values())) > 1 or (len(names) != 2 and not nvswitch):
        hint = "add the output of nvidia-smi topo -m, or set nvswitch=True"
        raise source.error(None, f"the file lists NVLinks, but not where they lead; {hint}")
    cells = {(a, b): "X" if a == b else f"NV{n_links[a]}" for a, b in itertools.product(names, names)}
    return _Matrix(source, names, cells, dict.fromkeys(names, ""))


def _label(name: str) -> str:
    return name.lower() if name.startswith("GPU") else f"nic-{name}"


def _groups(names: Iterable[str], pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return the groups of names connected by the pairs, in order."""
    import networkx as nx

    graph: nx.Graph[str] = nx.Graph(pairs)
    order = {name: i for i, name in enumerate(names)}
    graph.add_nodes_from(order)
    groups = (sorted(members, key=order.__getitem__) for members in nx.connected_components(graph))
    return sorted(groups, key=lambda members: order[members[0]])


def _add_pcie(matrix: _Matrix, machine: Machine, bandwidth: float, latency: float) -> None:
    """Add CPUs, bridges and NICs: devices below a bridge (PIX), bridges below a bridge (PXB), and these below a CPU."""
    kinds = (("PIX",), ("PIX", "PXB"), ("PIX", "PXB", "PHB", "NODE"))
    low, high, same_cpu = ([pair for pair, cell in matrix.cells.items() if cell in among] for among in kinds)
    for a, b in itertools.combinations(matrix.gpus(), 2):  # NVLinks hide the PCIe connection
        ends = matrix.affinity[a], matrix.affinity[b]
        if matrix.bond(a, b) and (ends[0] == ends[1] or not {"", "N/A"}.isdisjoint(ends)):
            same_cpu.append((a, b))
    machine.switches += [_label(name) for name in matrix.names if not name.startswith("GPU")]
    above: dict[str, str] = {}
    for number, members in enumerate(_groups(matrix.names, same_cpu)):
        machine.cpus.append(f"cpu{number}")
        above.update(dict.fromkeys(members, f"cpu{number}"))
    for level, pairs in (("upper", high), ("pcie", low)):
        lower = _groups(matrix.names, low)
        for number, members in enumerate(_groups(matrix.names, pairs)):
            inside = [group for group in lower if set(group) <= set(members)]
            if len(members) < 2 or (level == "upper" and len(inside) < 2):
                continue
            bridge = f"{level}{number}"
            machine.switches.append(bridge)
            machine.links.append((bridge, above[members[0]], "pcie", bandwidth, latency))
            above.update(dict.fromkeys(members, bridge))
    machine.links += [(_label(name), above[name], "pcie", bandwidth, latency) for name in matrix.names]


def _add_nvlinks(
    matrix: _Matrix, machine: Machine, bandwidth: Quantity | None, latency: float, nvswitch: bool | None
) -> None:
    gpus, error = matrix.gpus(), matrix.source.error
    totals = {gpu: sum(matrix.bond(gpu, other) for other in gpus) for gpu in gpus}
    if not any(totals.values()):
        if nvswitch:
            raise error(None, "nvswitch = True has no effect, because the matrix has no NV#; remove nvswitch")
        if bandwidth is not None:
            raise error(None, "nvlink_bandwidth has no effect, because the matrix has no NV#; remove nvlink_bandwidth")
        return
    if bandwidth is None:
        hint = "for example '25 GB/s' for NVLink 2 to 4, or add the output of nvidia-smi nvlink -s"
        raise error(None, f"the speed of the NVLinks is missing; set nvlink_bandwidth (--bandwidth), {hint}")
    one = positive(bandwidth, "bandwidth", "nvlink_bandwidth")
    if nvswitch if nvswitch is not None else max(totals.values()) > MAX_NVLINKS:
        machine.switches.append("nvswitch")
        for gpu in gpus:  # every bond uses all links from the GPU to the switch
            n_links = max(matrix.bond(gpu, other) for other in gpus)
            if n_links:
                machine.links.append((gpu.lower(), "nvswitch", "nvlink", n_links * one, latency))
        return
    for a, b in itertools.combinations(gpus, 2):
        if matrix.bond(a, b):
            machine.links.append((a.lower(), b.lower(), "nvlink", matrix.bond(a, b) * one, latency))
