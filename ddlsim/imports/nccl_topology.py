"""Reader for topologies detected by NCCL (``NCCL_TOPO_DUMP_FILE``, the format of ``NCCL_TOPO_FILE``).

Format and constants: https://github.com/NVIDIA/nccl, ``src/graph/xml.cc``, ``topo.cc``, ``topo.h``; for AMD's GPUs the
same files of https://github.com/ROCm/rccl. The file has counts and generations; :mod:`ddlsim.imports.pci_tree` has the
bandwidths that NCCL assumes. NCCL has no latencies; the defaults are those of :class:`~ddlsim.cluster.MultiGpu`.

Clouds distribute files that NCCL completes on the machine (``NCCL_TOPO_FILE``): without ``<gpu>``, but with PCI devices
of class 0x03.... (GPU) and 0x02.... (NIC), or without a class. They lack NVLinks and the speeds of NICs; these, and the
number of GPUs, are arguments.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path

from ddlsim.arguments import Count, checked
from ddlsim.cluster import Cluster
from ddlsim.cluster.quantity import Places, Quantity, nonnegative, positive
from ddlsim.imports.machines import assemble
from ddlsim.imports.pci_tree import GPU_CLASSES, NIC_CLASS, PciTree, bus_id, computes, has_speed
from ddlsim.imports.text import read_text, warn
from ddlsim.imports.xml_tree import Element, parse_xml, walk

#: tag -> allowed children (xml.cc, the handlers)
_TAGS = {"system": {"cpu"}, "cpu": {"pci", "nic"}, "pci": {"pci", "gpu", "nic", "pcilink"}, "nic": {"net"}}
_TAGS |= {"gpu": {"nvlink", "xgmi", "c2c"}} | {tag: set() for tag in ("net", "pcilink", "nvlink", "xgmi", "c2c")}


@checked
def read_nccl_topology(
    path: str | Path, *, n_hosts: Places = 1, device: str | None = None, pcie_latency: Quantity = "1 us",
    nvlink_latency: Quantity = "0.7 us", network_latency: Quantity = "1 us", nvlink_bandwidth: Quantity | None = None,
    nic_bandwidth: Quantity | None = None, n_gpus: Count | None = None, ignore_unknown: bool = False,
    virtual_nics: bool = False,
) -> Cluster:  # fmt: skip
    """Read the topology of a machine from an NCCL topology file (XML).

    Returns a cluster of `n_hosts` such machines, connected to one switch.

    device             GPU model, as named in the device catalogue; required to predict compute times
    nvlink_bandwidth   total bandwidth between a GPU and the NVSwitch, for files without <gpu> elements
    nic_bandwidth      bandwidth of NICs whose speed is missing from the file or is not positive (some drivers report 0
                       or less)
    n_gpus             number of GPUs, for files in which PCI devices have no class: the first `n_gpus` devices are
                       taken to be GPUs, and the others to be NICs
    ignore_unknown     whether to skip elements that NCCL does not define; a warning says how many were skipped
    virtual_nics       whether to include virtual interfaces of containers and bridges (veth..., br-..., docker0, lo,
                       ...)
    pcie_latency, nvlink_latency, network_latency
                       latency of each link of that kind

    An interface that is listed under several CPUs is assigned to the first of them. Nodes are named node0.gpu0 (the
    NVML index), node0.cpu0 (the NUMA node), node0.pcie-BUSID and node0.nic-NAME. If a file was merged from the files of
    several hosts, the cluster contains all of them. Links to the switch have the speed of the NICs.

    Raises ConfigError, giving the file, line and reason, if the file is invalid or a required value is missing.
    """
    source = read_text(path)
    root = parse_xml(source)
    if root.tag != "system":
        raise root.error("not an NCCL topology; the first element must be <system>")
    notes = _known_tags(root, ignore_unknown)
    if not any(element.tag == "gpu" for element in walk(root)):
        if _complete(root, n_gpus) and nvlink_bandwidth is None:
            devices = "PCI devices of class 0x03" if n_gpus is None else f"the first {n_gpus} PCI devices"
            notes.append(f"no <gpu> and no NVLinks found; {devices} are assumed to be GPUs connected by PCIe only")
            warn(f"{source.path}: {notes[-1]}; set nvlink_bandwidth (--bandwidth) if there is an NVSwitch")
    elif nvlink_bandwidth is not None or n_gpus is not None:
        name, what = ("n_gpus", "GPUs") if n_gpus is not None else ("nvlink_bandwidth", "NVLinks")
        raise root.error(f"the file lists the {what}; remove {name}")
    nic = None if nic_bandwidth is None else positive(nic_bandwidth, "bandwidth", "nic_bandwidth")
    if nic is not None and all(has_speed(element) for element in walk(root) if element.tag == "net"):
        raise root.error("the file has the speeds of all NICs; remove nic_bandwidth")
    latencies = nonnegative(pcie_latency, "time", "pcie_latency"), nonnegative(nvlink_latency, "time", "nvlink_latency")
    reader = PciTree(*latencies, nic, virtual_nics)
    hosts: dict[str, list[Element]] = defaultdict(list)
    for cpu in root.find("cpu"):
        hosts[cpu.get("host_hash", "")].append(cpu)
    machines = [reader.machine(cpus) for cpus in hosts.values()]
    if not any(machine.gpus for machine in machines):
        classless = len(_classless(root))
        hint = f" ({classless} <pci> have no class; set n_gpus if GPUs are the first)" if classless else ""
        remedy = "dump the topology from a run that uses GPUs"
        raise root.error(f"no <gpu> and no <pci> of class 0x03 found{hint}; {remedy}")
    if n_hosts != 1 and len(machines) > 1:
        raise root.error(f"the file describes {len(machines)} machines; remove n_hosts")
    machines = machines if len(machines) > 1 else [machines[0]] * n_hosts
    if nvlink_bandwidth is not None:
        nvlink = positive(nvlink_bandwidth, "bandwidth", "nvlink_bandwidth")
        for machine in {id(machine): machine for machine in machines}.values():
            reader.add_nvswitch(machine, nvlink)
    notes = ["using the bandwidths that NCCL assumes (src/graph/topo.h)", *notes, *dict.fromkeys(reader.notes)]
    return assemble(source.path, machines, device, network_latency, notes)


def _known_tags(root: Element, ignore_unknown: bool) -> list[str]:
    """Raise an error for elements unknown to NCCL, or count them; their connections would be lost silently."""
    pairs = ((element.tag, child) for element in walk(root) if element.tag in _TAGS for child in element.children)
    unknown = [(tag, child) for tag, child in pairs if child.tag not in _TAGS[tag]]
    for tag, child in unknown if not ignore_unknown else ():
        hint = f"known elements in <{tag}>: {', '.join(sorted(_TAGS[tag])) or 'none'}"
        raise child.error(f"unknown element; {hint}; set ignore_unknown=True (--ignore-unknown) to skip it")
    counts = Counter(child.tag for _, child in unknown)
    notes = [f"skipped {n} <{tag}>, which NCCL does not define" for tag, n in counts.items()]
    for note in notes:
        warn(f"{root.source.path}: {note}")
    return notes


def _classless(root: Element) -> list[Element]:
    return [node for node in walk(root) if node.tag == "pci" and not node.children and "class" not in node.attributes]


def _complete(root: Element, n_gpus: int | None) -> int:
    """Add the elements that NCCL would add to the PCI devices of a file without <gpu>; return the number of GPUs.

    GPUs are numbered by bus id, as in NVML.
    """
    leaves = [element for element in walk(root) if element.tag == "pci" and not element.children]
    if n_gpus is not None:
        classless = _classless(root)
        if n_gpus > len(classless):
            raise root.error(f"n_gpus = {n_gpus} exceeds the {len(classless)} <pci> without class; lower it")
        for place, leaf in enumerate(classless):
            leaf.attributes["class"] = GPU_CLASSES[0] if place < n_gpus else NIC_CLASS
    gpus = []
    for leaf in leaves:  # displays do not count, as far as the file identifies them
        words = [leaf.get(name, "").lower().removeprefix("0x") for name in ("class", "vendor", "device")]
        is_known = all(re.fullmatch("[0-9a-f]{4,6}", word) for word in words)
        if leaf.get("class", "").startswith(GPU_CLASSES) and (not is_known or computes(*words)):
            gpus.append(leaf)
    for number, leaf in enumerate(sorted(gpus, key=lambda leaf: bus_id(leaf["busid"]))):
        leaf.children.append(Element(leaf.source, leaf.line, "gpu", {"dev": str(number)}))
    for leaf in leaves:
        if leaf.get("class", "").startswith(NIC_CLASS):
            nic = Element(leaf.source, leaf.line, "nic", {})
            nic.children.append(Element(leaf.source, leaf.line, "net", {"name": bus_id(leaf["busid"])}))
            leaf.children.append(nic)
    return len(gpus)
