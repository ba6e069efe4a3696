"""Which PCI devices compute, and which are a board's, a processor's or a monitor's display: by class, vendor, device.

Numbers: the PCI ID database, https://pci-ids.ucw.cz. Classes 03 are displays (0302: without a connector, as most
accelerators are), 12 accelerators.
"""

from __future__ import annotations

#: vendor -> first and last of the displays that do not compute. NVIDIA: before G80 (CUDA), and in chipsets (nForce,
#: MCP); AMD: parts of processors, boards' own (Rage to R500), what came before GCN
_DISPLAYS = {
    "10de": ((0x0000, 0x0190), (0x01A0, 0x03FF), (0x0530, 0x053F), (0x0840, 0x08BF)),
    "1002": ((0x1100, 0x11FF), (0x1300, 0x1FFF), (0x3000, 0x5FFF), (0x6718, 0x677F), (0x6880, 0x68FF), (0x7100, 0x72FF),
             (0x7800, 0x79FF), (0x9000, 0x9FFF)),
}  # fmt: skip
_INTELS = ((0x0BD0, 0x0BDF), (0x56C0, 0x56C1))  # Max and Flex: the others are parts of processors, or for monitors
_FPGAS = ("10ee", "1172")  # of class 12: Xilinx and Altera


def computes(kind: str, vendor: str, device: str) -> bool:
    """Return whether a device (class "0302", vendor "10de", device "20b0", in lower case) is a GPU or the like."""
    if not kind.startswith("03"):
        return kind.startswith("12") and vendor not in _FPGAS
    number = int(device, 16)
    if kind.startswith("0302") or vendor == "8086":
        return kind.startswith("0302") or any(first <= number <= last for first, last in _INTELS)
    return vendor in _DISPLAYS and not any(first <= number <= last for first, last in _DISPLAYS[vendor])
