"""Reader for hwloc topologies (``lstopo machine.xml``, versions 1 to 2): packages, PCI bridges, GPUs, NICs.

Format: https://www.open-mpi.org/projects/hwloc/doc/ and ``hwloc2.dtd``. ``pci_type`` is class and vendor,
``pci_link_speed`` the current GB/s in each direction. The payload share of PCIe is NCCL's (``topo.cc``: 0.75 of 0.985
GB/s per lane of 8 GT/s), so that files of both tools yield the same cluster. NVLinks and xGMI are in matrices of
bandwidths (MB/s); without these, their bandwidth is an argument.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ddlsim.arguments import checked
from ddlsim.cluster import Cluster
from ddlsim.cluster.quantity import Places, Quantity, nonnegative, positive
from ddlsim.imports.machines import assemble, nic_rate, pcie_rate
from ddlsim.imports.pci_tree import RATE, PciTree, bus_id, computes
from ddlsim.imports.text import read_text, warn
from ddlsim.imports.xml_tree import Element, parse_xml, walk
from ddlsim.readable import percent

_PACKAGES = ("Package", "Socket")
#: payload share of the link's speed: a lane of PCIe 3.0 carries 8 GT/s in a 128b/130b code
_CARRIED = 0.75 / (8 * 128 / 130 / 8)
_SLOW = 4.0  # GB/s, 16 lanes of PCIe 1: links of idle GPUs
_TYPE = re.compile(r"([0-9a-fA-F]{4}) \[([0-9a-fA-F]{4}):([0-9a-fA-F]{4})\].*")
_ARCHITECTURES = {"aarch64": "arm64", "arm64": "arm64", "ppc64le": "ppc64", "ppc64": "ppc64"}
_MATRICES = ("NVLinkBandwidth", "XGMIBandwidth")
_OPEN_FABRICS = ("3", "32")  # osdev_type of hwloc 1 and 2, and of 3


@checked
def read_lstopo(
    path: str | Path, *, nvlink_bandwidth: Quantity | None = None, pcie_bandwidth: Quantity | None = None,
    nic_bandwidth: Quantity | None = None, n_hosts: Places = 1, device: str | None = None,
    pcie_latency: Quantity = "1 us", nvlink_latency: Quantity = "0.7 us", network_latency: Quantity = "1 us",
) -> Cluster:  # fmt: skip
    """Read the topology of a machine from an hwloc XML file.

    Returns a cluster of `n_hosts` such machines, connected to one switch.

    nvlink_bandwidth   total bandwidth between a GPU and the NVSwitch, for files without an NVLink matrix
    pcie_bandwidth     bandwidth of PCIe links whose speed is not in the file; None: the bandwidth of 16 lanes of the
                       device's PCIe generation
    nic_bandwidth      bandwidth of every NIC; required if there are several hosts. If the machine has RDMA devices,
                       only these count as NICs.
    device             GPU model, as named in the device catalogue
    pcie_latency, nvlink_latency, network_latency
                       latency of each link of that kind

    PCI devices of classes 03 and 12 are GPUs, except those that can only drive a display
    (:mod:`ddlsim.imports.pci_tree`). GPUs are numbered by bus id. If a machine contains several kinds of GPUs, a
    warning lists them.

    Raises ConfigError, giving the file, line and reason, if the file is invalid or a required value is missing.
    """
    root = parse_xml(read_text(path))
    if root.tag != "topology" or not any(root.find("object")):
        raise root.error("not an hwloc topology; the first element must be <topology> with <object>")
    machines = [element for element in walk(root) if element.get("type", "") == "Machine"]
    if len(machines) != 1:
        raise root.error(f"contains {len(machines)} machines; must contain exactly one")
    usual = pcie_rate(pcie_bandwidth, device)
    nic = nic_rate(nic_bandwidth, n_hosts, root.source.path)
    latencies = nonnegative(pcie_latency, "time", "pcie_latency"), nonnegative(nvlink_latency, "time", "nvlink_latency")
    tree = PciTree(*latencies, nic)
    reader = _Reader(machines[0], usual)
    n_links = reader.add_links(root)
    if n_links and nvlink_bandwidth is not None:
        raise root.error("the file lists the NVLinks; remove nvlink_bandwidth")
    machine = tree.machine(reader.cpus)
    if not machine.gpus:
        displays = f", but {reader.n_displays} displays" if reader.n_displays else ""
        hint = "run lstopo on a machine with GPUs, with I/O devices included"
        raise root.error(f"no GPU found (PCI devices of class 03 or 12){displays}; {hint}")
    if nvlink_bandwidth is not None:
        tree.add_nvswitch(machine, positive(nvlink_bandwidth, "bandwidth", "nvlink_bandwidth"))
    if reader.n_slow:
        tree.notes.append(f"the PCIe links of {reader.n_slow} GPUs run at {_SLOW:g} GB/s or less")
        warn(f"{path}: {tree.notes[-1]}, probably because the GPUs are idle; run lstopo while they are busy")
    if len(reader.kinds) > 1:
        kinds = ", ".join(f"{n} of {kind}" for kind, n in reader.kinds.items())
        tree.notes.append(f"the GPUs are of several kinds (vendor:device): {kinds}")
        warn(f"{path}: {tree.notes[-1]}; all GPUs are used unless workers selects a subset")
    if nvlink_bandwidth is None and not n_links and reader.n_accelerators > 1:
        tree.notes.append("the file lists no NVLink or xGMI links, so the GPUs are connected by PCIe only")
        warn(f"{path}: {tree.notes[-1]}; set nvlink_bandwidth if there is an NVSwitch")
    note = f"PCIe carries {percent(_CARRIED, 0)} of the links' speed, as NCCL counts (src/graph/topo.cc)"
    notes = [note, *reader.notes, *tree.notes]
    return assemble(root.source.path, [machine] * n_hosts, device, network_latency, notes)


def _info(element: Element, name: str) -> str:
    return next((info.get("value", "") for info in element.find("info") if info.get("name", "") == name), "")


def _devices(element: Element) -> Iterator[Element]:
    """Yield the operating system's devices of a PCI device."""
    return (child for child in element.find("object") if child["type"] == "OSDev")


class _Reader:
    """Converts hwloc's objects to the elements of a PCI tree, with a <cpu> per package; collects notes."""

    def __init__(self, machine: Element, usual: float) -> None:
        self.usual = usual
        self.n_accelerators = self.n_slow = self.n_displays = 0
        self.notes: list[str] = []
        self.kinds: Counter[str] = Counter()  # vendor:device of the GPUs
        self.nodes: dict[str, tuple[str, str]] = {}  # gp_index -> bus id, subtype
        self.gpus: dict[str, Element] = {}  # bus id -> <gpu>
        self.packages = [element for element in walk(machine) if element.get("type", "") in _PACKAGES] or [machine]
        self.numbers = {id(package): i for i, package in enumerate(self.packages)}
        arch = _info(machine, "Architecture")
        self.cpus: list[Element] = []
        for i, package in enumerate(self.packages):
            about = {"numaid": str(i), "arch": _ARCHITECTURES.get(arch, arch), "vendor": _info(package, "CPUVendor")}
            for key, name in (("familyid", "CPUFamilyNumber"), ("modelid", "CPUModelNumber")):
                if re.fullmatch("[0-9]{1,9}", text := _info(package, name)):
                    about[key] = text
            self.cpus.append(Element(package.source, package.line, "cpu", about))
        parts = [part for part in walk(machine) if part.get("type", "") == "OSDev"]
        self.rdma = any(part.get("osdev_type", "") in _OPEN_FABRICS for part in parts)
        unplaced = self._visit(machine, [])
        if unplaced and len(self.packages) > 1:
            self.notes.append(f"cannot tell which CPU package {unplaced} PCI roots belong to; assuming the first")
        for number, busid in enumerate(sorted(self.gpus)):
            self.gpus[busid].attributes["dev"] = str(number)

    def _visit(self, element: Element, above: list[Element]) -> int:
        """Convert the PCI devices below an object; return the number of their roots that belong to no package."""
        unplaced = 0
        for child in element.find("object"):
            if child["type"] in ("Bridge", "PCIDev"):
                near = self._package([element, *reversed(above)])
                unplaced += near is None
                self.cpus[near or 0].children += self._pci(child)
            else:
                unplaced += self._visit(child, [*above, element])
        return unplaced

    def _package(self, outwards: list[Element]) -> int | None:
        """Return the package that contains an object, or the only one inside it; None if there are several."""
        within = ([self.numbers[id(part)] for part in walk(outer) if id(part) in self.numbers] for outer in outwards)
        inside = next(filter(None, within), [])  # a package contains only itself
        return inside[0] if len(inside) == 1 else None

    def _pci(self, element: Element) -> list[Element]:
        """Return a bridge or device as <pci>; for a host bridge, its children."""
        inside = (child for child in element.find("object") if child["type"] in ("Bridge", "PCIDev"))
        below = [part for child in inside for part in self._pci(child)]
        if "pci_busid" not in element.attributes:
            return below
        busid = bus_id(element["pci_busid"])
        match = _TYPE.fullmatch(element.get("pci_type", ""))
        if match is None:
            raise element.error(f"pci_type = {element.get('pci_type', '')!r} is not like '0302 [10de:20b0] [...] a1'")
        pci = Element(element.source, element.line, "pci", {"busid": busid, RATE: repr(self._rate(element))}, below)
        for node in (element, *_devices(element)):
            self.nodes[node.get("gp_index", "")] = (busid, node.get("subtype", ""))
        kind, vendor, device = (word.lower() for word in match.groups())
        if computes(kind, vendor, device):
            self.kinds[f"{vendor}:{device}"] += 1
            self.gpus[busid] = Element(element.source, element.line, "gpu", {})
            self.n_accelerators += not kind.startswith("0300")
            self.n_slow += 0 < float(element.get("pci_link_speed", "0")) <= _SLOW
            pci.children.append(self.gpus[busid])
        elif kind.startswith("03"):
            self.n_displays += 1
            self.notes.append(f"skipped a display controller: {vendor}:{device} at PCI address {busid}")
        elif kind.startswith("02"):
            fabrics = [part for part in _devices(element) if part.get("osdev_type", "") in _OPEN_FABRICS]
            names = [part.get("name", "?") for part in (fabrics if self.rdma else _devices(element))]
            nic = Element(element.source, element.line, "nic", {})
            nic.children += [Element(element.source, element.line, "net", {"name": name}) for name in names[:1]]
            pci.children.append(nic)
        return [pci]

    def _rate(self, element: Element) -> float:
        """Return the bandwidth of the link above a device in bytes/s."""
        text = element.get("pci_link_speed", "0")
        if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,9})?", text):
            raise element.error(f"pci_link_speed = {text!r} is not a number of GB/s")
        return float(text) * 1e9 * _CARRIED or self.usual

    def add_links(self, root: Element) -> int:
        """Add the matrices' NVLinks and xGMI links to the GPUs; return the number of connected pairs."""
        n_links = 0
        for matrix in walk(root):
            if not matrix.tag.startswith("distances2") or matrix.get("name", "") not in _MATRICES:
                continue
            indexes = [word.rpartition(":")[2] for part in matrix.find("indexes") for word in part.text.split()]
            values = [word for part in matrix.find("u64values") for word in part.text.split()]
            if len(values) != len(indexes) ** 2 or not all(re.fullmatch("[0-9]{1,15}", word) for word in values):
                raise matrix.error(f"has {len(values)} values for {len(indexes)} devices; is the file complete?")
            tag = "nvlink" if matrix["name"] == _MATRICES[0] else "xgmi"
            for place, value in enumerate(values):
                (a, _), (b, what) = (self.nodes.get(indexes[i], ("", "")) for i in divmod(place, len(indexes)))
                gpu = self.gpus.get(a)
                if gpu is None or a == b or int(value) == 0 or (b not in self.gpus and what != "NVSwitch"):
                    continue
                link = {"target": b, "count": "1", RATE: repr(float(value) * 1e6)}
                gpu.children.append(Element(matrix.source, matrix.line, tag, link))
                n_links += 1
        return n_links
