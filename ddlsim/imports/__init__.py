"""Reading what clusters already have: measurements, traces, logs, topologies. Start with :func:`read_any`.

Every reader is a function of a path that returns frozen dataclasses or a :class:`~ddlsim.cluster.Cluster`, or raises
:class:`~ddlsim.errors.ConfigError` with file, line and reason. The formats are told in docs/formats/. Names are loaded
when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddlsim.imports.astra import read_astra
    from ddlsim.imports.convert import to_measurements
    from ddlsim.imports.horovod import HorovodTimeline, read_horovod
    from ddlsim.imports.kineto import KinetoTrace, fastest_over_ranks, read_kineto
    from ddlsim.imports.kineto_layers import LayerTime
    from ddlsim.imports.kineto_profile import profile_workload
    from ddlsim.imports.mllog import MlperfRun, read_mllog
    from ddlsim.imports.nccl_tests import read_nccl_tests
    from ddlsim.imports.nccl_topology import read_nccl_topology
    from ddlsim.imports.network_tools import read_iperf3, read_ping
    from ddlsim.imports.nvidia_smi import read_nvidia_smi
    from ddlsim.imports.osu import read_osu
    from ddlsim.imports.simgrid import read_simgrid
    from ddlsim.imports.sniff import kind_of, read_any
    from ddlsim.imports.throughput import read_throughput
    from ddlsim.imports.timing import Timing

_HOME = {
    "HorovodTimeline": "horovod", "KinetoTrace": "kineto", "LayerTime": "kineto_layers", "MlperfRun": "mllog",
    "Timing": "timing", "fastest_over_ranks": "kineto", "kind_of": "sniff",
    "profile_workload": "kineto_profile", "read_any": "sniff",
    "read_astra": "astra", "read_horovod": "horovod", "read_iperf3": "network_tools", "read_kineto": "kineto",
    "read_mllog": "mllog", "read_nccl_tests": "nccl_tests", "read_nccl_topology": "nccl_topology",
    "read_nvidia_smi": "nvidia_smi", "read_osu": "osu", "read_ping": "network_tools", "read_simgrid": "simgrid",
    "read_throughput": "throughput", "to_measurements": "convert",
}  # fmt: skip

__all__ = [
    "HorovodTimeline", "KinetoTrace", "LayerTime", "MlperfRun", "Timing", "fastest_over_ranks", "kind_of",
    "profile_workload", "read_any",
    "read_astra", "read_horovod", "read_iperf3", "read_kineto", "read_mllog", "read_nccl_tests", "read_nccl_topology",
    "read_nvidia_smi", "read_osu", "read_ping", "read_simgrid", "read_throughput", "to_measurements",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'ddlsim.imports' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ddlsim.imports.{_HOME[name]}"), name)
