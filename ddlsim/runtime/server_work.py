"""What synchronous parameter servers do with a tensor, and how long that takes.

The model is MXNet's (``src/kvstore/kvstore_dist.h``, ``kvstore_dist_server.h``) on ps-lite
(``include/ps/kv_app.h``). A tensor goes from a device to the memory of its machine, and from there to the servers. A
server copies the first push of its part into a buffer, adds each further one, updates the stored parameters when all
have come, and acknowledges the pushes. When all servers have, the worker asks for the result, which a server copies
into every answer; the worker's machine copies the answers together and hands them to the device. Each of these steps
takes a whole part, or tensor, and waits for the one before: what is not cut up does not overlap with itself. Requests
queue for a server's thread while the network goes on with others. What a request costs is memory traffic over the
bandwidth of one core, or of several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ddlsim.arguments import Count, checked, number, quantity
from ddlsim.units import si

#: over the bytes of a tensor
Passes = Annotated[float, number(0.0, hint=" passes, such as 2")]


@checked
@dataclass(frozen=True)
class ServerWork:
    """What a server does with its part of a tensor, in passes: how often it reads or writes all bytes of the part.

    memory       bytes/s that a thread reads and writes: 10 GB/s, about what STREAM (McCalpin 1995) reaches with one
                 thread on a server of the 2010s
    threads      that handle requests, each those of its tensors, and that copy answers together; a tensor belongs to
                 the one that has had the fewest bytes when it first comes (BytePS: GetThreadID in its server)
    together     bytes/s with which pushes and updates are worked on where several cores share each of them (OpenMP), at
                 most the memory's of a socket, such as "60 GB/s"; None: a thread does them like everything else
    first_push   2: a worker's push is read and written to the buffer
    push         3: the buffer and a further worker's push are read, the sum is written
    update       2: the sum is copied over the parameters; 3: SGD; 5: SGD with momentum (two arrays are read and
                 written, one is read)
    pull         2: the parameters are copied into each answer; 0: they are sent as they lie there
    deliver      2: a worker's machine, in one thread of its own, copies the servers' answers together
    whole_below  bytes; a smaller tensor is not cut up but goes whole to one server, each to the next (MXNet:
                 MXNET_KVSTORE_BIGARRAY_BOUND, a million elements, so "4 MB")
    """

    memory: Annotated[float | str, quantity("bandwidth", "10 GB/s")] = "10 GB/s"
    threads: Count = 1
    together: Annotated[float | str, quantity("bandwidth", "60 GB/s")] | None = None
    first_push: Passes = 2.0
    push: Passes = 3.0
    update: Passes = 2.0
    pull: Passes = 2.0
    deliver: Passes = 2.0
    whole_below: Annotated[float | str, quantity("bytes", "4 MB", zero=True)] = 0.0

    def seconds_per_byte(self, *, summing: bool = False) -> float:
        """Return the s that one pass over a byte takes, where it is `summing` what comes with it."""
        shared = self.together if summing and self.together is not None else self.memory
        return 1.0 / si(shared, "bandwidth")

    def bound(self) -> float:
        """Return the bytes from which on tensors are cut up."""
        return si(self.whole_below, "bytes")


#: MXNet's, until 1.4: a thread of ps-lite and the main thread do everything in turn; SGD with momentum, the default of
#: its examples (src/kvstore/kvstore_dist_server.h)
EARLY_MXNET_SERVERS = ServerWork(update=5.0, whole_below="4 MB")
#: MXNet's from 1.5 on: copies between its arrays, sums and updates run on all cores of a socket (ParallelCopy in
#: src/common/utils.h, EvalBinary_ in src/ndarray/ndarray_function-inl.h); answers are still copied by one thread
MXNET_SERVERS = ServerWork(update=5.0, whole_below="4 MB", together="60 GB/s")
#: BytePS's (byteps/server, 0.2): four threads (BYTEPS_SERVER_ENGINE_THREAD), the first push and the answers are not
#: copied, the sum is copied once; workers update, and find answers where they need them (shared memory). Tensors come
#: in slices of BYTEPS_PARTITION_BYTES, 4 MB: Priority("4 MB", ...)
BYTEPS_SERVERS = ServerWork(threads=4, first_push=0.0, update=2.0, pull=0.0, deliver=0.0)
#: TensorFlow's, in a process with 16 cores: every push is copied out of its message (2: TensorFlow issue 6116) and
#: applied by itself (SGD: 3), on as many threads as there are cores (DefaultNumInterOpThreads of
#: tensorflow/core/common_runtime/process_util.cc, unless inter_op_parallelism_threads says otherwise; at most 8 of them
#: read messages, kGrpcWorkerCacheThreadCount of distributed_runtime/rpc/grpc_worker_cache.cc, which is not modelled).
#: Answers are sent as they lie there (EncodeTensorToByteBuffer of grpc_tensor_coding.cc shares a tensor's memory), and
#: copied out of their messages
TENSORFLOW_SERVERS = ServerWork(threads=16, first_push=5.0, push=5.0, update=0.0, pull=0.0)
