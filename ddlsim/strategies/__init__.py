"""The distributed training algorithms. A strategy is a frozen dataclass with `label`, `updates` and `start`."""

from ddlsim.strategies.all_reduce import AllReduce, schedule_time
from ddlsim.strategies.asynchronous import AsyncParameterServer
from ddlsim.strategies.asynchronous_gossip import ADPSGD, GossipSGD
from ddlsim.strategies.delayed_averaging import CoCoDSGD, DaSGD, OverlapLocalSGD
from ddlsim.strategies.gossip import DPSGD
from ddlsim.strategies.local_sgd import BMUF, AdaComm, LocalSGD
from ddlsim.strategies.overlap import DdpBuckets, HorovodFusion, NoOverlap, PerLayer, Priority
from ddlsim.strategies.parameter_server import ParameterServer
from ddlsim.strategies.setting import Setting, Strategy
from ddlsim.strategies.sharded_update import ShardedUpdate

__all__ = [
    "ADPSGD",
    "BMUF",
    "DPSGD",
    "AdaComm",
    "AllReduce",
    "AsyncParameterServer",
    "CoCoDSGD",
    "DaSGD",
    "DdpBuckets",
    "GossipSGD",
    "HorovodFusion",
    "LocalSGD",
    "NoOverlap",
    "OverlapLocalSGD",
    "ParameterServer",
    "PerLayer",
    "Priority",
    "Setting",
    "ShardedUpdate",
    "Strategy",
    "schedule_time",
]
