"""Simulated stand-ins for the machines of published runs, from what a case states and from rates that NCCL assumes.

A case rarely says how fast a transfer really is. NCCL's topology model does, for whole classes of hardware
(NVIDIA/nccl, ``src/graph/topo.h``): 12 GB/s for PCIe 3.0 x16, 18 and 20 GB/s for an NVLink of a P100 and a V100, 6 GB/s
between the sockets of a Broadwell machine, 12 GB/s for a network interface of 100 Gbit/s; and so do the hops of its
tuner (``src/graph/tuning.cc``): 5.7 us a PCIe hop, 3.4 us an NVLink hop, 14 us a network hop (ring, Simple).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accuracy.rows import UnpredictableError, number
from ddlsim.cluster import MultiGpu
from ddlsim.strategies import Priority

__all__ = [
    "FIRST_COME", "HOST_EFFICIENCY", "NVLINK", "PCIE", "RDMA_EFFICIENCY", "TCP_EFFICIENCY", "device_of", "host_of",
    "nic_efficiency",
]  # fmt: skip

#: a case as it stands in the file: texts and numbers in nested tables
Case = Mapping[str, Any]

RDMA_EFFICIENCY = 12.0 / 12.5  # NET_BW of 12 GB/s for 100 Gbit/s
TCP_EFFICIENCY = 0.99  # 8949 payload bytes in a jumbo frame of 9039 on the wire (MTU 9001, AWS EC2 user guide)
ETHERNET_EFFICIENCY = 1448 / 1538  # payload bytes in a frame with its preamble and gap (MTU 1500)
#: Only the CPU joins this source's network interfaces to the GPUs ("NODE" in benchmark/paddle/README.md), so NCCL does
#: not use GPUDirect (ncclTopoCheckGdr in src/graph/paths.cc: up to PXB). Elsewhere, NCCL reached 8.2 GB/s through host
#: memory and PCIe 3.0 x16 (a6000_all_gather in sweeps.yaml)
THROUGH_HOST, HOST_EFFICIENCY = "PaddlePaddle/FleetX", 8.2 / 12.5

#: MXNet's engine runs operations when what they depend on is there: a tensor leaves, whole, as soon as it is ready, and
#: the next forward pass starts with the layers whose tensors have come back
FIRST_COME = Priority("1 GB", 1000)

NVLINK = {"p100": "18 GB/s", "v100": "20 GB/s", "a100": "240 GB/s"}  # per link; NVSwitch: 12 links of 20 GB/s
PCIE = "12 GB/s"
BETWEEN_SOCKETS = "6 GB/s"
PCIE_LATENCY = 5.7e-6 / 2  # two links make a hop
NVLINK_LATENCY = 3.4e-6


def device_of(case: Case) -> str:
    """Return the catalogue's name of a case's device; of GPUs that it does not have, "v100".

    The seconds of computing are measured ones wherever this is used: the name only says how a machine's NVLinks go.
    Raises :class:`UnpredictableError` for processors.
    """
    worker = case.get("worker")
    text = f"{worker.get('device', '') if isinstance(worker, Mapping) else ''} {case.get('system')}".lower()
    for name in ("k80", "p100", "p40", "v100", "a100", "h100"):
        if name in text:
            return name
    if any(word in text for word in ("xeon", "knl", "power7", "cpu", "phi ")):
        raise UnpredictableError("processors: none of the machines with GPUs that are described")
    return "v100"


def nic_efficiency(case: Case) -> float:
    """Return the share of a network interface's nominal rate that payload gets."""
    text = " ".join(str(value) for value in case["topology"].values()).lower()
    if case["source"].get("repo") == THROUGH_HOST and "infiniband" in text:
        return HOST_EFFICIENCY
    if any(word in text for word in ("infiniband", "rdma", "roce", "edr", "hdr", "mlx5")):
        return RDMA_EFFICIENCY
    return TCP_EFFICIENCY if "aws" in text else ETHERNET_EFFICIENCY


def host_of(case: Case) -> MultiGpu:
    """Return one machine of a case. Raises :class:`UnpredictableError` where too little is stated."""
    topology = case["topology"]
    n_gpus, device = int(number(topology, "gpus_per_node")), device_of(case)
    inside = str(topology.get("intra") or "").lower()
    n_nics = 4 if topology.get("nic_gbps") == 400 else 1  # a DGX-1 has four ports of 100 Gbit/s
    if "nvlink" in inside and "pcie or" not in inside and (device not in NVLINK or ("nvswitch" not in inside
                                                                                    and n_gpus != 8)):  # fmt: skip
        raise UnpredictableError(f"how the NVLinks of {n_gpus} {device} lead is not stated")
    if "nvswitch" in inside:
        bandwidth: str | float = 120e9 if "nvswitch 1" in inside else NVLINK[device]  # DGX-2: 6 links of 20 GB/s
        return MultiGpu(
            n_gpus, "nvswitch", device, nvlink_bandwidth=bandwidth, nvlink_latency=NVLINK_LATENCY / 2,
            n_pcie_switches=n_gpus if topology.get("nic_gbps") == 1600 else 1,
            n_nics=n_gpus if topology.get("nic_gbps") == 1600 else 1, pcie_bandwidth="24 GB/s",
        )  # fmt: skip
    if "nvlink" in inside and "pcie or" not in inside:
        return MultiGpu(
            8, "hybrid_cube_mesh", device, nvlink_bandwidth=NVLINK[device], nvlink_latency=NVLINK_LATENCY,
            n_pcie_switches=4, n_nics=n_nics, pcie_bandwidth=PCIE,
        )  # fmt: skip
    two_sockets = n_gpus > 4 and (topology.get("nodes_max") or 1) == 1  # else the servers of both sockets are one node
    return MultiGpu(
        n_gpus, "pcie_tree", device, n_pcie_switches=2 if n_gpus > 4 else 1, pcie_bandwidth=PCIE,
        pcie_latency=PCIE_LATENCY, cpu_bandwidth=BETWEEN_SOCKETS if two_sockets else None,
    )  # fmt: skip
