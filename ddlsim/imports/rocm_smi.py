"""Reader for ``rocm-smi --showtopo``: links between the AMD GPUs of a machine, as tables or (``--json``) as pairs.

Format: https://github.com/ROCm/rocm_smi_lib (showWeightTopology and its siblings). XGMI over one hop is a link; over
more, it leads through other GPUs. PCIe leads to the CPU of the NUMA node.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path

from ddlsim.arguments import checked
from ddlsim.cluster import Cluster
from ddlsim.cluster.quantity import Places, Quantity, nonnegative, positive
from ddlsim.imports.json_values import parse_json
from ddlsim.imports.machines import Machine, assemble, nic_rate, pcie_rate
from ddlsim.imports.text import SourceText, read_text

_TITLE = re.compile(r"={3,}\s*(?P<title>[A-Z][\w ]+?)\s*={3,}")
_ROW = re.compile(r"GPU([0-9]{1,4})((?:\s+\S+)+)$")
_NUMA = re.compile(r"GPU ?\[?([0-9]{1,4})\]?\s*: \(Topology\) Numa Node: (-?[0-9]{1,4})")
_PAIR = re.compile(r"\(Topology\) (Link type|Hops) between DRM devices ([0-9]{1,4}) and ([0-9]{1,4})", re.IGNORECASE)
_LINKS, _HOPS = "Link Type between two GPUs", "Hops between two GPUs"


@dataclass
class _Tables:
    """Type and hops of the connection of each pair (smaller number first), and the NUMA node of each GPU."""

    source: SourceText
    gpus: set[int] = field(default_factory=set)
    links: dict[tuple[int, int], str] = field(default_factory=dict)
    hops: dict[tuple[int, int], str] = field(default_factory=dict)
    numa: dict[int, int] = field(default_factory=dict)

    def add(self, line: int | None, title: str, a: int, b: int, cell: str) -> None:
        """Add a cell of table `title` for two GPUs; raise an error if the two halves of a table differ."""
        self.gpus |= {a, b}
        table, pair = (self.links if title == _LINKS else self.hops), (min(a, b), max(a, b))
        if a != b and table.setdefault(pair, cell) != cell:
            both = f"GPU{a} - GPU{b} is {cell}, but GPU{b} - GPU{a} is {table[pair]}"
            raise self.source.error(line, f"{both}; correct one")


@checked
def read_rocm_smi(
    path: str | Path, *, xgmi_bandwidth: Quantity | None = None, pcie_bandwidth: Quantity | None = None,
    smp_bandwidth: Quantity = "16 GB/s", nic_bandwidth: Quantity | None = None, n_hosts: Places = 1,
    device: str | None = None, pcie_latency: Quantity = "1 us", xgmi_latency: Quantity = "0.7 us",
    network_latency: Quantity = "1 us",
) -> Cluster:  # fmt: skip
    """Read the topology of a machine from saved ``rocm-smi --showtopo`` output.

    Returns a cluster of `n_hosts` such machines, connected to one switch.

    path             file with the output of ``rocm-smi --showtopo``
    xgmi_bandwidth   bandwidth per direction between two GPUs with an XGMI link; required if there are such links
    pcie_bandwidth   bandwidth of every GPU's PCIe link; None: 16 lanes of the device's PCIe generation, or of PCIe 3.0
                     if the device is unknown
    smp_bandwidth    bandwidth between NUMA nodes; the default is RCCL's value for AMD CPUs (topo.h, AMD_BW)
    nic_bandwidth    bandwidth of the machine's only NIC, which is attached to the first NUMA node; required if there
                     are several hosts
    device           GPU model, as named in the device catalogue
    pcie_latency, xgmi_latency, network_latency
                     latency of each link of that kind

    Raises ConfigError, giving the file, line and reason, if the table of link types is missing, truncated or
    inconsistent, if a link is unknown, or if a bandwidth is missing.
    """
    tables = _read(read_text(path, log=True))
    source, gpus = tables.source, sorted(tables.gpus)
    machine = Machine(gpus=[f"gpu{gpu}" for gpu in gpus])
    cpu_of = {gpu: f"cpu{max(tables.numa.get(gpu, 0), 0)}" for gpu in gpus}  # -1: the machine has only one
    machine.cpus = sorted(set(cpu_of.values()))
    pcie = pcie_rate(pcie_bandwidth, device)
    latency = nonnegative(pcie_latency, "time", "pcie_latency")
    smp = positive(smp_bandwidth, "bandwidth", "smp_bandwidth")
    machine.links = [(f"gpu{gpu}", cpu_of[gpu], "pcie", pcie, latency) for gpu in gpus]
    machine.links += [(a, b, "smp", smp, latency) for a, b in itertools.combinations(machine.cpus, 2)]
    joined = [pair for pair, kind in sorted(tables.links.items()) if kind == "XGMI"]
    if joined and xgmi_bandwidth is None:
        hint = "RCCL assumes 24 GB/s per link, 36 on MI200, 48 on MI300"
        what = "the speed of XGMI is missing; set xgmi_bandwidth (--bandwidth), the total of all links between two GPUs"
        raise source.error(None, f"{what} ({hint})")
    if not joined and xgmi_bandwidth is not None:
        raise source.error(None, "xgmi_bandwidth has no effect, because there is no XGMI; remove it")
    if joined:
        xgmi = positive(xgmi_bandwidth, "bandwidth", "xgmi_bandwidth")
        near = nonnegative(xgmi_latency, "time", "xgmi_latency")
        direct = [pair for pair in joined if tables.hops.get(pair, "1") == "1"]
        machine.links += [(f"gpu{a}", f"gpu{b}", "xgmi", xgmi, near) for a, b in direct]
    rate = nic_rate(nic_bandwidth, n_hosts, source.path)
    if rate is not None:
        machine.switches.append("nic")
        machine.links.append(("nic", machine.cpus[0], "pcie", pcie, latency))
        machine.ports = [("nic", rate)]
    return assemble(source.path, [machine] * n_hosts, device, network_latency, source.notes)


def _read(source: SourceText) -> _Tables:
    tables = _Tables(source)
    (_read_pairs if source.text.lstrip().startswith("{") else _read_tables)(tables)
    if not tables.links and len(tables.gpus) != 1:
        hint = "save the output of rocm-smi --showtopo (with or without --json)"
        raise source.error(None, f"no table of link types found; {hint}")
    for pair in itertools.combinations(sorted(tables.gpus), 2):
        kind, hops = tables.links.get(pair), tables.hops.get(pair, "1")
        if kind not in ("XGMI", "PCIE") or not re.fullmatch(r"[0-9]{1,3}|N/A", hops):
            what = "is missing" if kind is None else f"is {kind!r} over {hops!r} hops; must be XGMI or PCIE"
            raise source.error(None, f"GPU{pair[0]} - GPU{pair[1]} {what}; is the table complete?")
    return tables


def _read_tables(tables: _Tables) -> None:
    title = ""
    columns: list[int] = []
    for number, line in tables.source.lines():
        if match := _TITLE.search(line):
            title, columns = match["title"], []
        elif match := _NUMA.search(line):
            tables.numa[int(match[1])] = int(match[2])
        elif title in (_LINKS, _HOPS) and re.fullmatch(r"\s*(?:GPU[0-9]{1,4}\s*)+", line):
            columns = [int(name[3:]) for name in line.split()]
        elif columns and (match := _ROW.match(line.strip())):
            cells = match[2].split()
            if len(cells) != len(columns):
                raise tables.source.error(number, f"has {len(cells)} of {len(columns)} entries; is the table complete?")
            for column, cell in zip(columns, cells, strict=True):
                tables.add(number, title, int(match[1]), column, cell)


def _read_pairs(tables: _Tables) -> None:
    """Read ``--json``: pairs under "system" (one half of each table), NUMA nodes under "card0", "card1", ..."""
    root = parse_json(tables.source)
    for name in root.value if isinstance(root.value, dict) else ():
        part = root[name]
        if (card := re.fullmatch(r"card([0-9]{1,4})", name)) and "(Topology)" in str(part.value):
            tables.gpus.add(int(card[1]))
            if part.has("(Topology) Numa Node"):
                tables.numa[int(card[1])] = round(part["(Topology) Numa Node"].number())
        elif name == "system" and isinstance(part.value, dict):
            for key, value in part.value.items():
                if match := _PAIR.fullmatch(key):
                    title = _LINKS if match[1].lower() == "link type" else _HOPS
                    tables.add(None, title, int(match[2]), int(match[3]), str(value))
