"""The topology that NCCL detects (``NCCL_TOPO_DUMP_FILE``, the format of ``NCCL_TOPO_FILE``) into a cluster.

Shape and constants: https://github.com/NVIDIA/nccl, ``src/graph/xml.cc``, ``topo.cc``, ``topo.h``. The file has counts
and generations; bandwidths are those that NCCL itself assumes, per direction: NVLinks by compute capability, PCIe
lanes by generation (80 % of the raw rate and less), sockets by CPU model. NCCL knows no latencies; those of
:class:`~ddlsim.cluster.MultiGpu` stand in. As in NCCL, all NVSwitches of a machine are one; a PCIe bridge with a
single device below it is left out, and so is what leads to no GPU or NIC.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from ddlsim.arguments import checked
from ddlsim.cluster import Cluster
from ddlsim.cluster.quantity import Places, Quantity, nonnegative
from ddlsim.imports.machines import Machine, assemble, copies
from ddlsim.imports.text import read_text
from ddlsim.imports.xml_tree import Element, parse_xml

#: GB/s of one NVLink and direction, from this compute capability on (topo.h: SM60_NVLINK_BW, ...)
_NVLINK = ((100, 40.1), (90, 20.6), (87, 20.0), (86, 12.0), (80, 20.0), (70, 20.0), (60, 18.0))
#: units of 100 Mbit/s per PCIe lane by its transfer rate (topo.cc: kvDictPciGen); unknown ones count as the third
_PCIE = {2.5: 15.0, 5.0: 30.0, 8.0: 60.0, 16.0: 120.0, 32.0: 240.0, 64.0: 480.0}
_UNKNOWN_RATE = 8.0
#: GB/s between sockets (topo.h); Intel by model id, AMD by family
_INTEL = ((0xCF, 40.0), (0x8F, 22.0), (0x55, 10.0), (0, 6.0))
_AMD = ((26, 32.0), (25, 24.0), (0, 16.0))
_OTHER = {"arm64": 6.0, "ppc64": 32.0}


@checked
def read_nccl_topology(
    path: str | Path, *, n_hosts: Places = 1, device: str | None = None, pcie_latency: Quantity = "1 us",
    nvlink_latency: Quantity = "0.7 us", network_latency: Quantity = "1 us",
) -> Cluster:  # fmt: skip
    """Return the machine in `path` as a cluster, or `n_hosts` of them joined by one switch at their NICs' speed.

    device   key of the device catalogue for the GPUs, if compute times are to be predicted

    Nodes are called node0.gpu0 (the NVML number), node0.cpu0 (the NUMA node), node0.pcie-BUSID, node0.nic-NAME. A file
    fused over several hosts gives them all. Raises ConfigError with file, line and reason.
    """
    source = read_text(path)
    root = parse_xml(source)
    if root.tag != "system":
        raise root.error("is no topology of NCCL; the first element must be <system>")
    latencies = (("pcie_latency", pcie_latency), ("nvlink_latency", nvlink_latency))
    reader = _Reader(*(nonnegative(latency, "time", what) for what, latency in latencies))
    hosts: dict[str, list[Element]] = {}
    for cpu in root.find("cpu"):
        hosts.setdefault(cpu.get("host_hash", ""), []).append(cpu)
    machines = [reader.machine(cpus) for cpus in hosts.values()]
    if not any(machine.gpus for machine in machines):
        raise root.error("has no <gpu>; dump the topology from a run that uses the GPUs")
    if n_hosts != 1 and len(machines) > 1:
        raise root.error(f"describes {len(machines)} machines already; leave n_hosts out")
    machines = machines if len(machines) > 1 else copies(machines[0], n_hosts)
    notes = ["bandwidths are those that NCCL assumes (src/graph/topo.h)", *dict.fromkeys(reader.notes)]
    return assemble(source.path, machines, device, network_latency, notes)


class _Reader:
    """Walks the elements of the machines; collects notes."""

    def __init__(self, pcie_latency: float, nvlink_latency: float) -> None:
        self.pcie_latency = pcie_latency
        self.nvlink_latency = nvlink_latency
        self.notes: list[str] = []

    def machine(self, cpus: list[Element]) -> Machine:
        """Return the machine that these <cpu> elements make."""
        machine = Machine()
        gpus: dict[str, tuple[str, Element]] = {}  # bus id -> name, element
        for cpu in cpus:
            name = f"cpu{cpu['numaid']}"
            if name in machine.cpus:
                raise cpu.error(f"numaid = {cpu['numaid']!r} appears twice; is the file fused correctly?")
            machine.cpus.append(name)
            for pci in cpu.find("pci"):
                self._pci(machine, pci, name, float("inf"), gpus)
            for nic in cpu.find("nic"):
                self._nic(machine, nic, name, f"{name}-{len(machine.ports)}", None)
        for a, b in itertools.combinations(range(len(cpus)), 2):
            bandwidth = min(_socket_bandwidth(cpus[a]), _socket_bandwidth(cpus[b]))
            machine.links.append((machine.cpus[a], machine.cpus[b], "smp", bandwidth, self.pcie_latency))
        self._nvlinks(machine, gpus)
        return machine

    def _pci(
        self, machine: Machine, pci: Element, above: str, limit: float, gpus: dict[str, tuple[str, Element]]
    ) -> None:
        """Add what is below a <pci>, joined to the node `above`; `limit` is that of bridges left out in between."""
        bandwidth = min(limit, self._pcie_bandwidth(pci))
        useful = [child for child in pci.children if child.tag in ("pci", "gpu", "nic") and _leads_somewhere(child)]
        for child in useful:
            if child.tag == "gpu":
                name = f"gpu{child['dev']}"
                if name in machine.gpus:
                    raise child.error(f"dev = {child['dev']!r} appears twice in one machine; correct it")
                machine.gpus.append(name)
                machine.links.append((name, above, "pcie", bandwidth, self.pcie_latency))
                gpus[_bus_id(pci["busid"])] = (name, child)
            elif child.tag == "nic":
                self._nic(machine, child, above, pci["busid"], bandwidth)
        bridges = [child for child in useful if child.tag == "pci"]
        if len(bridges) == 1:
            self._pci(machine, bridges[0], above, bandwidth, gpus)
        elif bridges:
            switch = f"pcie-{_bus_id(pci['busid'])}"
            machine.switches.append(switch)
            machine.links.append((switch, above, "pcie", bandwidth, self.pcie_latency))
            for bridge in bridges:
                self._pci(machine, bridge, switch, float("inf"), gpus)

    def _nic(self, machine: Machine, nic: Element, above: str, place: str, bandwidth: float | None) -> None:
        nets = list(nic.find("net"))
        if not nets:
            return
        name = f"nic-{nets[0].get('name', place)}"
        if name in machine.switches:
            name = f"{name}-{place}"
        speeds = [_net_speed(net) for net in nets]
        machine.switches.append(name)
        machine.links.append((name, above, "pcie", bandwidth or sum(speeds), self.pcie_latency))
        machine.ports += [(name, speed) for speed in speeds]

    def _pcie_bandwidth(self, pci: Element) -> float:
        """Return bytes/s of the link above this device: lanes * rate, as NCCL counts (topo.cc, ncclTopoAddPci)."""
        width = pci.get("link_width", "").strip()
        if width and not re.fullmatch(r"[0-9]{1,3}", width):
            raise pci.error(f"link_width = {width!r} is not a number of lanes")
        text = pci.get("link_speed", "").strip()
        try:
            rate = float(text.split()[0]) if text else 0.0
        except ValueError:
            rate = 0.0
        if rate not in _PCIE:
            device = pci.get("busid", "?")
            self.notes.append(f"link speed of {device} unknown ({text!r}): taken as 8 GT/s, as NCCL does")
            rate = _UNKNOWN_RATE
        return (int(width or 0) or 16) * _PCIE[rate] / 80 * 1e9

    def _nvlinks(self, machine: Machine, gpus: dict[str, tuple[str, Element]]) -> None:
        """Add the NVLinks: to each other, or all to one crossbar; and C2C to the CPU."""
        pairs: dict[tuple[str, str], float] = {}
        for name, gpu in gpus.values():
            one = _nvlink_bandwidth(gpu)
            for link in gpu.find("nvlink"):
                other = gpus.get(_bus_id(link["target"]))
                if other is None and link.get("tclass", "").startswith("0x03"):
                    continue  # a GPU that this job does not use
                peer = "nvswitch" if other is None else other[0]
                if link.get("tclass", "") == "0x068001":
                    peer = machine.cpus[0]
                pairs[name, peer] = pairs.get((name, peer), 0.0) + link.integer("count") * one
            for link in gpu.find("c2c"):
                bandwidth = link.integer("bw") * link.integer("count") * 1e6
                machine.links.append((name, _cpu_of(machine, name), "c2c", bandwidth, self.nvlink_latency))
        for (a, b), bandwidth in pairs.items():
            if b == "nvswitch" and b not in machine.switches:
                machine.switches.append(b)
            machine.one_way.append((a, b, "nvlink", bandwidth, self.nvlink_latency))
            if (b, a) not in pairs:  # switches and CPUs do not list theirs
                machine.one_way.append((b, a, "nvlink", bandwidth, self.nvlink_latency))


def _leads_somewhere(element: Element) -> bool:
    """Return whether there is a GPU or a NIC at or below this element."""
    if element.tag == "gpu":
        return True
    if element.tag == "nic":
        return any(element.find("net"))
    return any(_leads_somewhere(child) for child in element.children if child.tag in ("pci", "gpu", "nic"))


def _bus_id(text: str) -> str:
    """Return a PCI address in one spelling: 0000:08:00.0 (NVML writes eight digits of domain)."""
    return text.strip().lower()[-12:]


def _cpu_of(machine: Machine, name: str) -> str:
    """Return the CPU above a device."""
    above = {a: b for a, b, kind, _, _ in machine.links if kind == "pcie"}
    while name not in machine.cpus:
        name = above[name]
    return name


def _nvlink_bandwidth(gpu: Element) -> float:
    capability = gpu.integer("sm", 0)
    return next((bandwidth for least, bandwidth in _NVLINK if capability >= least), 20.0) * 1e9


def _socket_bandwidth(cpu: Element) -> float:
    arch, vendor = cpu.get("arch", ""), cpu.get("vendor", "")
    if arch in _OTHER:
        return _OTHER[arch] * 1e9
    if vendor == "AuthenticAMD":
        family = cpu.integer("familyid", 0)
        return next((bandwidth for least, bandwidth in _AMD if family >= least), _AMD[-1][1]) * 1e9
    model = cpu.integer("modelid", 0) if cpu.integer("familyid", 6) == 6 else 0
    return next((bandwidth for least, bandwidth in _INTEL if model >= least), _INTEL[-1][1]) * 1e9


def _net_speed(net: Element) -> float:
    """Return bytes/s; the file has Mbit/s."""
    speed = net.integer("speed")
    if speed <= 0:
        raise net.error(f"speed = {speed} (Mbit/s) must be above 0; write the NIC's rate")
    return speed * 1e6 / 8
