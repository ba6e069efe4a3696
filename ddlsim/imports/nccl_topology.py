"""The topology that NCCL detects (``NCCL_TOPO_DUMP_FILE``, the format of ``NCCL_TOPO_FILE``) into a cluster.

Shape and constants: https://github.com/NVIDIA/nccl, ``src/graph/xml.cc``, ``topo.cc``, ``topo.h``; for AMD's GPUs the
same files of https://github.com/ROCm/rccl. The file has counts and generations; bandwidths are those that NCCL itself
assumes, per direction: NVLinks by compute capability, xGMI by architecture, PCIe lanes by generation (80 % of the raw
rate and less), sockets by CPU model. NCCL knows no latencies; those of :class:`~ddlsim.cluster.MultiGpu` stand in. As
in NCCL, all NVSwitches of a machine are one; a PCIe bridge with a single device below it is left out, and so is what
leads to no GPU or NIC.

Clouds hand out files that NCCL completes on the machine (``NCCL_TOPO_FILE``): no ``<gpu>``, but PCI devices of class
0x03.... (GPU) and 0x02.... (NIC), or without class at all. They say nothing of NVLinks and NICs' speeds: those, and how
many devices are GPUs, are arguments.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from ddlsim.arguments import Count, checked
from ddlsim.cluster import Cluster
from ddlsim.cluster.quantity import Places, Quantity, nonnegative, positive
from ddlsim.imports.machines import Machine, assemble, copies
from ddlsim.imports.text import read_text, warn
from ddlsim.imports.xml_tree import Element, parse_xml, walk

#: GB/s of one NVLink and direction, from this compute capability on (topo.h: SM60_NVLINK_BW, ...)
_NVLINK = ((100, 40.1), (90, 20.6), (87, 20.0), (86, 12.0), (80, 20.0), (70, 20.0), (60, 18.0))
#: GB/s of one xGMI link and direction, by architecture (rccl: VEGA_, MI200_, GFX94X_XGMI_WIDTH)
_XGMI = {"gfx906": 24.0, "gfx908": 24.0, "gfx90a": 36.0, "gfx940": 48.0, "gfx941": 48.0, "gfx942": 48.0}
#: how files of 2019 to 2022 write an architecture (rccl: archinfo.cc)
_GCN = {"906": "gfx906", "908": "gfx908", "910": "gfx90a", "940": "gfx940", "941": "gfx941", "942": "gfx942"}
#: tag -> what may stand in it (xml.cc, the handlers)
_TAGS = {
    "system": {"cpu"}, "cpu": {"pci", "nic"}, "pci": {"pci", "gpu", "nic", "pcilink"}, "nic": {"net"},
    "gpu": {"nvlink", "xgmi", "c2c"}, "net": set[str](), "pcilink": set(), "nvlink": set(), "xgmi": set(), "c2c": set(),
}  # fmt: skip
#: beginnings of PCI classes (topo.cc: kvDictPciClass; 0x12 is what AMD's accelerators are)
_GPU_CLASSES, _NIC_CLASS = ("0x03", "0x12"), "0x02"
#: units of 100 Mbit/s per PCIe lane by its transfer rate (topo.cc: kvDictPciGen); unknown ones count as the third
_PCIE = {2.5: 15.0, 5.0: 30.0, 8.0: 60.0, 16.0: 120.0, 32.0: 240.0, 64.0: 480.0}
_UNKNOWN_RATE = 8.0
_INSIDE = 5000e9  # bytes/s inside a PCIe switch that shows itself as several (topo.h: LOC_BW)
#: GB/s between sockets (topo.h); Intel by model id, AMD by family (NCCL's branch dev, commit 2f1c174c)
_INTEL = ((0xCF, 40.0), (0x8F, 22.0), (0x55, 10.0), (0, 6.0))
_AMD = ((26, 32.0), (25, 24.0), (0, 16.0))
_OTHER = {"arm64": 6.0, "ppc64": 32.0}


@checked
def read_nccl_topology(
    path: str | Path, *, n_hosts: Places = 1, device: str | None = None, pcie_latency: Quantity = "1 us",
    nvlink_latency: Quantity = "0.7 us", network_latency: Quantity = "1 us", nvlink_bandwidth: Quantity | None = None,
    nic_bandwidth: Quantity | None = None, n_gpus: Count | None = None, ignore_unknown: bool = False,
) -> Cluster:  # fmt: skip
    """Return the machine in `path` as a cluster, or `n_hosts` of them joined by one switch at their NICs' speed.

    device             key of the device catalogue for the GPUs, if compute times are to be predicted
    nvlink_bandwidth   of all NVLinks of a GPU, which meet in an NVSwitch; for files that name no <gpu>
    nic_bandwidth      of every NIC whose speed the file leaves out (or gives as 0 or less, like some NICs' drivers)
    n_gpus             for files whose PCI devices have no class: so many of them, in the file's order, are GPUs, the
                       others NICs
    ignore_unknown     leave out elements that NCCL does not know, with a warning that counts them

    Nodes are called node0.gpu0 (the NVML number), node0.cpu0 (the NUMA node), node0.pcie-BUSID, node0.nic-NAME. A file
    fused over several hosts gives them all. Raises ConfigError with file, line and reason.
    """
    source = read_text(path)
    root = parse_xml(source)
    if root.tag != "system":
        raise root.error("is no topology of NCCL; the first element must be <system>")
    notes = _known_tags(root, ignore_unknown)
    if not any(element.tag == "gpu" for element in walk(root)):
        if _complete(root, n_gpus) and nvlink_bandwidth is None:
            which = "PCI devices of class 0x03" if n_gpus is None else f"the first {n_gpus} PCI devices"
            notes.append(f"names no <gpu> and no NVLinks: {which} are the GPUs, joined by PCIe alone")
            warn(f"{source.path}: {notes[-1]}; give nvlink_bandwidth if they have an NVSwitch")
    elif nvlink_bandwidth is not None or n_gpus is not None:
        name, what = ("n_gpus", "GPUs") if n_gpus is not None else ("nvlink_bandwidth", "NVLinks")
        raise root.error(f"says which {what} there are; leave {name} out")
    nic = None if nic_bandwidth is None else positive(nic_bandwidth, "bandwidth", "nic_bandwidth")
    if nic is not None and all(_has_speed(element) for element in walk(root) if element.tag == "net"):
        raise root.error("says how fast the NICs are; leave nic_bandwidth out")
    reader = _Reader(
        nonnegative(pcie_latency, "time", "pcie_latency"), nonnegative(nvlink_latency, "time", "nvlink_latency"), nic
    )
    hosts: dict[str, list[Element]] = {}
    for cpu in root.find("cpu"):
        hosts.setdefault(cpu.get("host_hash", ""), []).append(cpu)
    machines = [reader.machine(cpus) for cpus in hosts.values()]
    if not any(machine.gpus for machine in machines):
        classless = len(_classless(root))
        hint = f" ({classless} <pci> have no class; give n_gpus if the first so many are GPUs)" if classless else ""
        raise root.error(f"has no <gpu> and no <pci> of class 0x03{hint}; dump the topology from a run that uses GPUs")
    if n_hosts != 1 and len(machines) > 1:
        raise root.error(f"describes {len(machines)} machines already; leave n_hosts out")
    machines = machines if len(machines) > 1 else copies(machines[0], n_hosts)
    if nvlink_bandwidth is not None:
        nvlink = positive(nvlink_bandwidth, "bandwidth", "nvlink_bandwidth")
        for machine in {id(machine): machine for machine in machines}.values():
            machine.switches.append("nvswitch")
            machine.links += [(gpu, "nvswitch", "nvlink", nvlink, reader.nvlink_latency) for gpu in machine.gpus]
    notes = ["bandwidths are those that NCCL assumes (src/graph/topo.h)", *notes, *dict.fromkeys(reader.notes)]
    return assemble(source.path, machines, device, network_latency, notes)


def _known_tags(root: Element, ignore_unknown: bool) -> list[str]:
    """Refuse elements that NCCL does not know, or count them: what they join would be missing in silence."""
    unknown: dict[str, int] = {}
    for element in walk(root):
        for child in element.children:
            if element.tag in _TAGS and child.tag not in _TAGS[element.tag]:
                if not ignore_unknown:
                    hint = f"NCCL has {', '.join(sorted(_TAGS[element.tag])) or 'nothing'} in <{element.tag}>"
                    raise child.error(f"is unknown here; {hint}; ignore_unknown=True (--ignore-unknown) leaves it out")
                unknown[child.tag] = unknown.get(child.tag, 0) + 1
    notes = [f"left out {n} <{tag}>, which NCCL does not know" for tag, n in unknown.items()]
    for note in notes:
        warn(f"{root.source.path}: {note}")
    return notes


def _classless(root: Element) -> list[Element]:
    """Return the PCI devices that say nothing of what they are."""
    return [each for each in walk(root) if each.tag == "pci" and not each.children and "class" not in each.attributes]


def _has_speed(net: Element) -> bool:
    """Return whether a NIC says its speed; some drivers give -1, for which NCCL takes 10 Gbit/s (topo.cc)."""
    return "speed" in net.attributes and net.integer("speed") > 0


def _complete(root: Element, n_gpus: int | None) -> int:
    """Give the PCI devices of a file without <gpu> the elements that NCCL would add; return how many are GPUs.

    GPUs count by their bus ids, as NVML counts.
    """
    leaves = [element for element in walk(root) if element.tag == "pci" and not element.children]
    if n_gpus is not None:
        classless = _classless(root)
        if n_gpus > len(classless):
            raise root.error(f"has {len(classless)} <pci> without class; n_gpus = {n_gpus} must not be more")
        for place, leaf in enumerate(classless):
            leaf.attributes["class"] = _GPU_CLASSES[0] if place < n_gpus else _NIC_CLASS
    gpus = [leaf for leaf in leaves if leaf.get("class", "").startswith(_GPU_CLASSES)]
    for number, leaf in enumerate(sorted(gpus, key=lambda leaf: _bus_id(leaf["busid"]))):
        leaf.children.append(Element(leaf.source, leaf.line, "gpu", {"dev": str(number)}))
    for leaf in leaves:
        if leaf.get("class", "").startswith(_NIC_CLASS):
            nic = Element(leaf.source, leaf.line, "nic", {})
            nic.children.append(Element(leaf.source, leaf.line, "net", {"name": _bus_id(leaf["busid"])}))
            leaf.children.append(nic)
    return len(gpus)


class _Reader:
    """Walks the elements of the machines; collects notes."""

    def __init__(self, pcie_latency: float, nvlink_latency: float, nic_bandwidth: float | None) -> None:
        self.pcie_latency = pcie_latency
        self.nvlink_latency = nvlink_latency
        self.nic_bandwidth = nic_bandwidth
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
        self._join_switches(machine, cpus)
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
        if len(bridges) == 1 and not any(pci.find("pcilink")):
            self._pci(machine, bridges[0], above, bandwidth, gpus)
        elif bridges:
            switch = f"pcie-{_bus_id(pci['busid'])}"
            machine.switches.append(switch)
            machine.links.append((switch, above, "pcie", bandwidth, self.pcie_latency))
            for bridge in bridges:
                self._pci(machine, bridge, switch, float("inf"), gpus)

    def _join_switches(self, machine: Machine, cpus: list[Element]) -> None:
        """Join what is one PCIe switch and shows itself as several: <pcilink>."""
        joined: set[frozenset[str]] = set()
        for element in (element for cpu in cpus for element in walk(cpu)):
            for link in element.find("pcilink"):
                ends = frozenset(f"pcie-{_bus_id(busid)}" for busid in (element["busid"], link["target"]))
                if len(ends) == 2 and ends <= set(machine.switches) and ends not in joined:
                    joined.add(ends)
                    a, b = sorted(ends)
                    machine.links.append((a, b, "pcie", _INSIDE, 0.0))

    def _nic(self, machine: Machine, nic: Element, above: str, place: str, bandwidth: float | None) -> None:
        nets = list(nic.find("net"))
        if not nets:
            return
        name = f"nic-{nets[0].get('name', place)}"
        if name in machine.switches:
            name = f"{name}-{place}"
        speeds = [speed for net in nets if (speed := self._net_speed(net)) is not None]
        machine.switches.append(name)
        if bandwidth is None and not speeds:  # beside the PCIe tree, as fast as its ports
            raise nets[0].error("does not say its speed (Mbit/s); give nic_bandwidth")
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

    def _net_speed(self, net: Element) -> float | None:
        """Return bytes/s; the file has Mbit/s. None where neither file nor caller says it."""
        return net.integer("speed") * 1e6 / 8 if _has_speed(net) else self.nic_bandwidth

    def _nvlinks(self, machine: Machine, gpus: dict[str, tuple[str, Element]]) -> None:
        """Add the NVLinks and xGMI: to each other, or all to one crossbar; and C2C to the CPU."""
        pairs: dict[tuple[str, str], tuple[str, float]] = {}
        for name, gpu in gpus.values():
            for link in gpu.find("nvlink", "xgmi"):
                other = gpus.get(_bus_id(link["target"]))
                if other is None and link.get("tclass", "").startswith(_GPU_CLASSES):
                    continue  # a GPU that this job does not use
                peer = "nvswitch" if other is None else other[0]
                if link.get("tclass", "") == "0x068001":
                    peer = machine.cpus[0]
                if peer == name:
                    raise link.error("leads from a GPU to itself; dump the topology again, or remove it")
                one = self._xgmi_bandwidth(gpu) if link.tag == "xgmi" else _nvlink_bandwidth(gpu)
                count = link.integer("count")
                if count < 1:
                    raise link.error(f"count = {count} must be at least 1; remove the element")
                pairs[name, peer] = (link.tag, pairs.get((name, peer), ("", 0.0))[1] + count * one)
            for link in gpu.find("c2c"):
                bandwidth = link.integer("bw") * link.integer("count") * 1e6
                machine.links.append((name, _cpu_of(machine, name), "c2c", bandwidth, self.nvlink_latency))
        for (a, b), (kind, bandwidth) in pairs.items():
            if b == "nvswitch" and b not in machine.switches:
                machine.switches.append(b)
            machine.one_way.append((a, b, kind, bandwidth, self.nvlink_latency))
            if (b, a) not in pairs:  # switches and CPUs do not list theirs
                machine.one_way.append((b, a, kind, bandwidth, self.nvlink_latency))

    def _xgmi_bandwidth(self, gpu: Element) -> float:
        name = gpu.get("gcn", "").partition(":")[0]
        architecture = _GCN.get(name, name)
        if architecture not in _XGMI:
            which = architecture or "an unnamed architecture"
            self.notes.append(f"xGMI of {which} unknown: 24 GB/s a link, as RCCL does")
        return _XGMI.get(architecture, 24.0) * 1e9


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
        if family > 26:  # written as base + 16 * extension (xml.cc until 2026): 143 is 15 + 8, Zen 2
            family = 15 + (family - 15) // 16
        return next((bandwidth for least, bandwidth in _AMD if family >= least), _AMD[-1][1]) * 1e9
    model = cpu.integer("modelid", 0) if cpu.integer("familyid", 6) == 6 else 0
    return next((bandwidth for least, bandwidth in _INTEL if model >= least), _INTEL[-1][1]) * 1e9
