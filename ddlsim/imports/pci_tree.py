"""Conversion of NCCL-style PCI trees (<cpu>, <pci>, <gpu>, <nic> elements) to a :class:`Machine`.

Constants: https://github.com/NVIDIA/nccl, ``src/graph/topo.cc``, ``topo.h``; for AMD's GPUs the same files of
https://github.com/ROCm/rccl. Bandwidths are those that NCCL assumes, per direction, unless an element has the attribute
:data:`RATE`, which other readers set. As in NCCL, all NVSwitches of a machine are merged; PCIe bridges with a single
device below them, and branches without a GPU or NIC, are omitted.

Class, vendor and device determine whether a PCI device computes or is a display (https://pci-ids.ucw.cz). Classes 03
are displays (0302: without a connector, like most accelerators), and class 12 accelerators.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field

from ddlsim.imports.machines import Machine
from ddlsim.imports.text import warn
from ddlsim.imports.xml_tree import Element, walk
from ddlsim.units import as_number

#: vendor -> ranges (first, last) of displays that cannot compute. NVIDIA: before G80 (CUDA), and in chipsets (nForce,
#: MCP); AMD: parts of processors, on-board displays (Rage to R500), GPUs before GCN
_AMD_DISPLAYS = ((0x1100, 0x11FF), (0x1300, 0x1FFF), (0x3000, 0x5FFF), (0x6718, 0x677F), (0x6880, 0x68FF))
_DISPLAYS = {
    "10de": ((0x0000, 0x0190), (0x01A0, 0x03FF), (0x0530, 0x053F), (0x0840, 0x08BF)),
    "1002": (*_AMD_DISPLAYS, (0x7100, 0x72FF), (0x7800, 0x79FF), (0x9000, 0x9FFF)),
}
_INTELS = ((0x0BD0, 0x0BDF), (0x56C0, 0x56C1))  # Max and Flex: the others are integrated or for monitors
_FPGAS = ("10ee", "1172")  # of class 12: Xilinx and Altera


def computes(kind: str, vendor: str, device: str) -> bool:
    """Return whether a device (class "0302", vendor "10de", device "20b0", in lower case) is a GPU or accelerator."""
    if not kind.startswith("03"):
        return kind.startswith("12") and vendor not in _FPGAS
    number = int(device, 16)
    if kind.startswith("0302") or vendor == "8086":
        return kind.startswith("0302") or any(first <= number <= last for first, last in _INTELS)
    return vendor in _DISPLAYS and not any(first <= number <= last for first, last in _DISPLAYS[vendor])


#: attribute for a link's bytes/s, if known; no attribute in a file can have this name
RATE = "rate, bytes/s"
#: names of interfaces that are not network cards: pairs, bridges and tunnels of containers, and the loopback
_VIRTUAL = re.compile(r"(veth|br-|virbr|docker|cni|cali|flannel|tun|tap).*|lo")
#: the kernel's value for links of unknown width (PCI_LNK_WIDTH_UNKNOWN)
_UNKNOWN_WIDTH = "255"
#: prefixes of PCI classes (topo.cc: kvDictPciClass; 0x12 for AMD's accelerators)
GPU_CLASSES, NIC_CLASS = ("0x03", "0x12"), "0x02"
#: GB/s per NVLink and direction, from this compute capability on (topo.h: SM60_NVLINK_BW, ...)
_NVLINK = ((100, 40.1), (90, 20.6), (87, 20.0), (86, 12.0), (80, 20.0), (70, 20.0), (60, 18.0))
#: GB/s per xGMI link and direction, by architecture (rccl: VEGA_, MI200_, GFX94X_XGMI_WIDTH)
_XGMI = {"gfx906": 24.0, "gfx908": 24.0, "gfx90a": 36.0, "gfx940": 48.0, "gfx941": 48.0, "gfx942": 48.0}
#: notation of architectures in files of 2019 to 2022 (rccl: archinfo.cc)
_GCN = {"906": "gfx906", "908": "gfx908", "910": "gfx90a", "940": "gfx940", "941": "gfx941", "942": "gfx942"}
#: units of 100 Mbit/s per PCIe lane by its transfer rate (topo.cc: kvDictPciGen); unknown ones count as the third
_PCIE = {2.5: 15.0, 5.0: 30.0, 8.0: 60.0, 16.0: 120.0, 32.0: 240.0, 64.0: 480.0}
_UNKNOWN_RATE = 8.0
_INSIDE = 5000e9  # bytes/s inside a PCIe switch that appears as several (topo.h: LOC_BW)
#: GB/s between sockets (topo.h); Intel by model id, AMD by family (NCCL's branch dev, commit 2f1c174c)
_INTEL = ((0xCF, 40.0), (0x8F, 22.0), (0x55, 10.0), (0, 6.0))
_AMD = ((26, 32.0), (25, 24.0), (0, 16.0))
_OTHER = {"arm64": 6.0, "ppc64": 32.0}


@dataclass
class PciTree:
    """Converts the elements of machines; collects notes."""

    pcie_latency: float
    nvlink_latency: float
    nic_bandwidth: float | None
    virtual_nics: bool = False
    notes: list[str] = field(default_factory=list)
    _nets: set[tuple[str, str, str]] = field(default_factory=set)  # name, guid and port of the current machine's

    def machine(self, cpus: list[Element]) -> Machine:
        """Return the machine consisting of these <cpu> elements."""
        machine = Machine()
        self._nets = set()
        left_out = dict.fromkeys(
            net["name"]
            for cpu in cpus
            for net in walk(cpu)
            if net.tag == "net" and not self.virtual_nics and _VIRTUAL.fullmatch(net.get("name", ""))
        )
        if left_out:
            self.notes.append(f"skipped virtual interfaces: {', '.join(left_out)}")
            remedy = "set virtual_nics=True (--set virtual_nics=true) to use them"
            warn(f"{cpus[0].source.path}: {self.notes[-1]}; {remedy}")
        gpus: dict[str, tuple[str, Element]] = {}  # bus id -> name, element
        for cpu in cpus:
            name = f"cpu{cpu['numaid']}"
            if name in machine.cpus:
                raise cpu.error(f"numaid = {cpu['numaid']!r} appears twice; was the file merged correctly?")
            machine.cpus.append(name)
            for pci in cpu.find("pci"):
                self._pci(machine, pci, name, float("inf"), gpus)
            for nic in cpu.find("nic"):
                self._nic(machine, nic, name, f"{name}-{len(machine.ports)}", None)
        self._join_switches(machine, cpus)
        for a, b in itertools.combinations(range(len(cpus)), 2):
            bandwidth = min(_socket_bandwidth(cpus[a]), _socket_bandwidth(cpus[b]))
            machine.links.append((machine.cpus[a], machine.cpus[b], "smp", bandwidth, self.pcie_latency))
        self._nvlinks(machine, gpus)
        return machine

    def add_nvswitch(self, machine: Machine, bandwidth: float) -> None:
        """Connect all GPUs by a switch, each with `bandwidth` in bytes/s."""
        machine.switches.append("nvswitch")
        machine.links += [(gpu, "nvswitch", "nvlink", bandwidth, self.nvlink_latency) for gpu in machine.gpus]

    def _pci(
        self, machine: Machine, pci: Element, above: str, limit: float, gpus: dict[str, tuple[str, Element]]
    ) -> None:
        """Add the elements below a <pci>, connected to the node `above`; `limit`: bandwidth of omitted bridges."""
        bandwidth = min(limit, self._pcie_bandwidth(pci))
        useful = [child for child in pci.children if child.tag in ("pci", "gpu", "nic") and _leads_somewhere(child)]
        for child in useful:
            if child.tag == "gpu":
                name = f"gpu{child['dev']}"
                if name in machine.gpus:
                    raise child.error(f"dev = {child['dev']!r} appears twice in one machine; correct it")
                machine.gpus.append(name)
                machine.links.append((name, above, "pcie", bandwidth, self.pcie_latency))
                gpus[bus_id(pci["busid"])] = (name, child)
            elif child.tag == "nic":
                self._nic(machine, child, above, pci["busid"], bandwidth)
        bridges = [child for child in useful if child.tag == "pci"]
        if len(bridges) == 1 and not any(pci.find("pcilink")):
            self._pci(machine, bridges[0], above, bandwidth, gpus)
        elif bridges:
            switch = f"pcie-{bus_id(pci['busid'])}"
            machine.switches.append(switch)
            machine.links.append((switch, above, "pcie", bandwidth, self.pcie_latency))
            for bridge in bridges:
                self._pci(machine, bridge, switch, float("inf"), gpus)

    def _join_switches(self, machine: Machine, cpus: list[Element]) -> None:
        """Connect the parts of a PCIe switch that appears as several: <pcilink>."""
        joined: set[frozenset[str]] = set()
        for element in (element for cpu in cpus for element in walk(cpu)):
            for link in element.find("pcilink"):
                ends = frozenset(f"pcie-{bus_id(busid)}" for busid in (element["busid"], link["target"]))
                if len(ends) == 2 and ends <= set(machine.switches) and ends not in joined:
                    joined.add(ends)
                    a, b = sorted(ends)
                    machine.links.append((a, b, "pcie", _INSIDE, 0.0))

    def _nic(self, machine: Machine, nic: Element, above: str, place: str, bandwidth: float | None) -> None:
        nets = []
        for net in nic.find("net"):
            port = net.get("name", ""), net.get("guid", ""), net.get("port", "")
            is_new = not port[0] or port not in self._nets  # NCCL lists those without a CPU under all CPUs
            if is_new and (self.virtual_nics or not _VIRTUAL.fullmatch(port[0])):
                nets.append(net)
            self._nets.add(port)
        if not nets:
            return
        name = f"nic-{nets[0].get('name', place)}"
        if name in machine.switches:
            name = f"{name}-{place}"
        speeds = [net.integer("speed") * 1e6 / 8 if has_speed(net) else self.nic_bandwidth or 0.0 for net in nets]
        speeds = [speed for speed in speeds if speed]
        machine.switches.append(name)
        if bandwidth is None and not speeds:  # outside the PCIe tree, as fast as its ports
            raise nets[0].error("the speed (Mbit/s) is missing; set nic_bandwidth (--set nic_bandwidth=...)")
        machine.links.append((name, above, "pcie", bandwidth or sum(speeds), self.pcie_latency))
        machine.ports += [(name, speed) for speed in speeds]

    def _pcie_bandwidth(self, pci: Element) -> float:
        """Return the bandwidth of the link above this device in bytes/s: lanes * rate (topo.cc, ncclTopoAddPci)."""
        if RATE in pci.attributes:
            return float(pci[RATE])
        width = pci.get("link_width", "").strip()
        if width and not re.fullmatch(r"[0-9]{1,3}", width):
            raise pci.error(f"link_width = {width!r} is not a number of lanes")
        text = pci.get("link_speed", "").strip()
        rate = as_number(text.partition(" ")[0]) or 0.0
        if rate not in _PCIE:
            device = pci.get("busid", "?")
            self.notes.append(f"unknown link speed of {device} ({text!r}); assuming 8 GT/s, as NCCL does")
            rate = _UNKNOWN_RATE
        bandwidth = (int(width or 0) or 16) * _PCIE[rate] / 80 * 1e9
        if width == _UNKNOWN_WIDTH and _leads_somewhere(pci):
            device, gigabytes = pci.get("busid", "?"), f"{bandwidth / 1e9:.4g}"
            self.notes.append(
                f"link_width of {device} is 255, which means unknown; assuming 255 lanes ({gigabytes} GB/s), as NCCL "
                "does"
            )
        return bandwidth

    def _nvlinks(self, machine: Machine, gpus: dict[str, tuple[str, Element]]) -> None:
        """Add the NVLinks and xGMI links, between GPUs or to one crossbar, and C2C links to the CPU."""
        pairs: dict[tuple[str, str], tuple[str, float]] = {}
        above = {a: b for a, b, kind, _, _ in machine.links if kind == "pcie"}
        for name, gpu in gpus.values():
            capability, cpu = gpu.integer("sm", 0), name
            nvlink = next((bandwidth for least, bandwidth in _NVLINK if capability >= least), 20.0) * 1e9
            while cpu not in machine.cpus:
                cpu = above[cpu]
            for link in gpu.find("nvlink", "xgmi"):
                other = gpus.get(bus_id(link["target"]))
                if other is None and link.get("tclass", "").startswith(GPU_CLASSES):
                    continue  # a GPU outside this job
                peer = "nvswitch" if other is None else other[0]
                if link.get("tclass", "") == "0x068001":
                    peer = machine.cpus[0]
                if peer == name:  # NCCL adds them as well, but no path leads over them (topo.cc, paths.cc)
                    self.notes.append(f"<{link.tag}> of {name} leads to {name} itself and is unused, as in NCCL")
                    continue
                if RATE in link.attributes:
                    one = float(link[RATE])
                else:
                    one = self._xgmi_bandwidth(gpu) if link.tag == "xgmi" else nvlink
                count = link.integer("count")
                if count < 1:
                    raise link.error(f"count = {count} must be at least 1; remove the element")
                pairs[name, peer] = (link.tag, pairs.get((name, peer), ("", 0.0))[1] + count * one)
            for link in gpu.find("c2c"):
                bandwidth = link.integer("bw") * link.integer("count") * 1e6
                machine.links.append((name, cpu, "c2c", bandwidth, self.nvlink_latency))
        for (a, b), (kind, bandwidth) in pairs.items():
            if b == "nvswitch" and b not in machine.switches:
                machine.switches.append(b)
            machine.one_way.append((a, b, kind, bandwidth, self.nvlink_latency))
            if (b, a) not in pairs:  # switches and CPUs do not list their links
                machine.one_way.append((b, a, kind, bandwidth, self.nvlink_latency))

    def _xgmi_bandwidth(self, gpu: Element) -> float:
        name = gpu.get("gcn", "").partition(":")[0]
        architecture = _GCN.get(name, name)
        if architecture not in _XGMI:
            gpu_kind = architecture or "an unnamed architecture"
            self.notes.append(f"unknown xGMI speed of {gpu_kind}; assuming 24 GB/s per link, as RCCL does")
        return _XGMI.get(architecture, 24.0) * 1e9


def has_speed(net: Element) -> bool:
    """Return whether a NIC has a speed; some drivers report -1, which NCCL treats as 10 Gbit/s (topo.cc)."""
    return "speed" in net.attributes and net.integer("speed") > 0


def _leads_somewhere(element: Element) -> bool:
    """Return whether this element is or contains a GPU or a NIC."""
    if element.tag == "gpu":
        return True
    if element.tag == "nic":
        return any(element.find("net"))
    return any(_leads_somewhere(child) for child in element.children if child.tag in ("pci", "gpu", "nic"))


def bus_id(text: str) -> str:
    """Normalise a PCI address: 0000:08:00.0 (NVML writes eight digits of domain)."""
    return text.strip().lower()[-12:]


def _socket_bandwidth(cpu: Element) -> float:
    arch, vendor = cpu.get("arch", ""), cpu.get("vendor", "")
    if arch in _OTHER:
        return _OTHER[arch] * 1e9
    if vendor == "AuthenticAMD":
        family = cpu.integer("familyid", 0)
        if family > 26:  # written as base + 16 * extension (xml.cc until 2026): 143 is 15 + 8, Zen 2
            family = 15 + (family - 15) // 16
        return next((bandwidth for least, bandwidth in _AMD if family >= least), _AMD[-1][1]) * 1e9
    model = cpu.integer("modelid", 0) if cpu.integer("familyid", 6) == 6 else 0
    return next((bandwidth for least, bandwidth in _INTEL if model >= least), _INTEL[-1][1]) * 1e9
