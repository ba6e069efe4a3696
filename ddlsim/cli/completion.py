"""Shell completion of bundled names and of option values.

A shell starts ddlsim for every completion, so this module imports nothing heavy and reads files without loading them.
Words without a completion are left to the shell, which offers files.
"""

from __future__ import annotations

from pathlib import Path

from ddlsim.bundled import bundled_files
from ddlsim.errors import DdlsimError
from ddlsim.plain import read_toml
from ddlsim.workload.precision import ELEMENT_NBYTES

#: tables of a cluster file whose keys "+key=value" can set
_SETTABLE = ("generator", "host", "link")
#: values of options, listed here because the modules that define them are slow to import
COSTS = ("simulated", "calibrated", "nccl")
OVERLAPS = ("none", "layer", "ddp", "horovod", "priority", "while-waiting")
PLACEMENTS = ("own", "colocated")
PRECISIONS = tuple(ELEMENT_NBYTES)
OPTIMIZERS = ("sgd", "momentum", "adam", "lars", "lamb")


def clusters(incomplete: str) -> list[str]:
    """Return the names of the bundled clusters or, after a plus, the keys that can be set, with current values."""
    name, plus, _ = incomplete.rpartition("+")
    files = bundled_files("topologies")
    if not plus:
        return sorted(files)
    bundled = name.partition("+")[0]
    return [f"{name}+{context}" for context in _settings(files[bundled])] if bundled in files else []


def _settings(path: Path) -> list[str]:
    """Return "key=value" for all settings of a cluster file, and for the other transports."""
    from ddlsim.cluster.details import PROTOCOLS

    try:
        file = read_toml(path)
    except DdlsimError:  # the command itself will report it
        return []
    settings: list[str] = []
    for place in _SETTABLE:
        table = file.get(place)
        values = table if isinstance(table, dict) else {}
        for key, value in values.items():
            if key != "type" and not isinstance(value, list | dict):
                text = str(value).lower() if isinstance(value, bool) else str(value)
                settings.append(f"{key}={text.replace(' ', '')}")  # the shell would require spaces to be quoted
    return sorted({*settings, *(f"transport={name}" for name in ("ideal", *PROTOCOLS))})


def models(incomplete: str) -> list[str]:
    """Return the names of the bundled models."""
    from ddlsim.workload.model_names import bundled_names

    return bundled_names()


def devices(incomplete: str) -> list[str]:
    """Return the names in the device catalogue."""
    from ddlsim.workload.devices import device_names

    return device_names()


def stacks(incomplete: str) -> list[str]:
    """Return the names of the software stacks."""
    from ddlsim.workload.stacks import stack_names

    return stack_names()


def algorithms(incomplete: str) -> list[str]:
    """Return the names of the all-reduces, and "auto", which selects the fastest."""
    from ddlsim.collectives.lookup import algorithm_names

    return ["auto", *algorithm_names()]


def strategies(incomplete: str) -> list[str]:
    """Return the names of the strategies."""
    from ddlsim.run.strategy_names import STRATEGY_CLASSES

    return sorted(STRATEGY_CLASSES)
