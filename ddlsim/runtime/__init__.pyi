"""The public names, and where they live: read by type checkers, and by the package when it is imported."""

from .communicator import Communicator as Communicator, communicator as communicator
from .codec import Bucket as Bucket, Message as Message, Messages as Messages
from .exchange import Averaging as Averaging, Exchange as Exchange
from .fabric import Fabric as Fabric, WithFabric as WithFabric
from .replica import Outer as Outer, Replica as Replica, start_replicas as start_replicas
from .servers import Servers as Servers
from .context import Process as Process, RunContext as RunContext, Strategy as Strategy, Worker as Worker
