"""Human-readable numbers: three or four digits and a unit with a prefix."""

from __future__ import annotations

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def si(value: float, unit: str, digits: int = 4) -> str:
    """Return e.g. "4.226 GB/s" for (4.226e9, "B/s")."""
    for scale, prefix in _PREFIXES:
        if abs(value) >= scale:
            return f"{value / scale:.{digits}g} {prefix}{unit}"
    return f"{value:.{digits}g} {unit}"


def seconds(value: float) -> str:
    """Return a time with a fitting unit, e.g. "17.2 ms"."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {unit}"
    return "0 s" if value == 0.0 else f"{value / 1e-9:.4g} ns"


def duration(value: float) -> str:
    """Return a time in units suitable for long times, too, e.g. "30 days", "1.7 h"."""
    for scale, unit in ((2 * 86_400.0, "days"), (2 * 3600.0, "h"), (2 * 60.0, "min")):
        if abs(value) >= scale:
            return f"{2 * value / scale:.4g} {unit}"
    return seconds(value)


def size(nbytes: float) -> str:
    """Return bytes with a decimal prefix, e.g. "102.2 MB"."""
    return si(nbytes, "B")


def rate(value: float, unit: str = "samples/s") -> str:
    """Return a throughput with thousands separators, e.g. "40,940 samples/s"."""
    return f"{value:,.0f} {unit}" if value >= 1000.0 else f"{value:.4g} {unit}"


def percent(share: float, digits: int = 1, sign: str = "") -> str:
    """Return a share as "93.1 %"; with `sign` "+", positive ones as "+93.1 %"."""
    return f"{100.0 * share:{sign}.{digits}f} %"


def spread(share: float) -> str:
    """Return a share that may be tiny or above 1, as "0.83 %", "3e-13" or "440.0 %"."""
    if share >= 0.95:
        return percent(share)
    return f"{100.0 * share:.2g} %" if share >= 1e-5 or share == 0.0 else f"{share:.0e}"


#: abbreviations in names, in the usual spelling
_ABBREVIATIONS = {
    "nic": "NIC",
    "pcie": "PCIe",
    "nvlink": "NVLink",
    "wan": "WAN",
    "cpu": "CPU",
    "mtbf": "MTBF",
    "mtu": "MTU",
}


def in_words(name: str) -> str:
    """Return a name of the API as words for a label, e.g. "NIC bandwidth" for "nic_bandwidth"."""
    return " ".join(_ABBREVIATIONS.get(word, word) for word in name.replace("_", " ").split())


def count(n: int, noun: str, plural: str = "s") -> str:
    """Return "1 worker" or "3 workers"."""
    return f"{n:,} {noun}{'' if n == 1 else plural}"
