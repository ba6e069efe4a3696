"""The distributed training algorithms. A strategy is a frozen dataclass with `label`, `updates` and `start`."""

from ddlsim.strategies.all_reduce import AllReduce, schedule_time
from ddlsim.strategies.asynchronous import AsyncParameterServer
from ddlsim.strategies.overlap import DdpBuckets, HorovodFusion, NoOverlap, PerLayer, Priority
from ddlsim.strategies.parameter_server import ParameterServer
from ddlsim.strategies.setting import Setting, Strategy

__all__ = [
    "AllReduce",
    "AsyncParameterServer",
    "DdpBuckets",
    "HorovodFusion",
    "NoOverlap",
    "ParameterServer",
    "PerLayer",
    "Priority",
    "Setting",
    "Strategy",
    "schedule_time",
]
