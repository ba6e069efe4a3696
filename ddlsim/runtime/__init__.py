"""Building blocks of strategies: the event loop, workers, communicators, and exchanges of bytes and values."""

from ddlsim.runtime.communicator import Communicator as Communicator, communicator as communicator
from ddlsim.runtime.codec import Message as Message, Messages as Messages
from ddlsim.runtime.exchange import Averaging as Averaging, Exchange as Exchange
from ddlsim.runtime.fabric import Fabric as Fabric, WithFabric as WithFabric
from ddlsim.runtime.replica import Outer as Outer, Replica as Replica, start_replicas as start_replicas
from ddlsim.runtime.servers import Servers as Servers
from ddlsim.runtime.context import RunContext as RunContext, Strategy as Strategy
from ddlsim.runtime.worker import Process as Process, Worker as Worker
from ddlsim.workload.buckets import Bucket as Bucket
