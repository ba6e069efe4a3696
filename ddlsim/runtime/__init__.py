"""What strategies are written with: the event loop, workers, groups, and what carries bytes and values between them."""

from ddlsim.runtime.communicator import Communicator, communicator
from ddlsim.runtime.exchange import Averaging, Exchange
from ddlsim.runtime.fabric import Fabric, WithFabric
from ddlsim.runtime.outer import Outer
from ddlsim.runtime.replica import Replica, local_sgd, local_steps, start_replicas
from ddlsim.runtime.rounds import Rounds
from ddlsim.runtime.setting import Setting, Strategy
from ddlsim.runtime.shards import Shards
from ddlsim.runtime.wires import Parcel, Wires
from ddlsim.runtime.worker import Process, Worker
from ddlsim.workload.buckets import Bucket

__all__ = [
    "Averaging",
    "Bucket",
    "Communicator",
    "Exchange",
    "Fabric",
    "Outer",
    "Parcel",
    "Process",
    "Replica",
    "Rounds",
    "Setting",
    "Shards",
    "Strategy",
    "Wires",
    "WithFabric",
    "Worker",
    "communicator",
    "local_sgd",
    "local_steps",
    "start_replicas",
]
