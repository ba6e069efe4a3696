"""Memory-bound work of synchronous parameter servers on a tensor, and its time.

The model is MXNet's (``src/kvstore/kvstore_dist.h``, ``kvstore_dist_server.h``) on ps-lite
(``include/ps/kv_app.h``). A tensor goes from a device to the memory of its machine, and from there to the servers. A
server copies the first push of its part into a buffer, adds each further one, updates the stored parameters when all
have arrived, and acknowledges the pushes. When all servers have acknowledged, the worker requests the result, which a
server copies into every answer; the worker's machine copies the answers together and hands them to the device. Each of
these steps handles a whole part, or tensor, and waits for the step before: without splitting there is no overlap within
a tensor. Requests queue for a server's thread while the network carries others. The time of a request is its memory
traffic over the bandwidth of one core, or of several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ddlsim.arguments import Count, checked, number, quantity
from ddlsim.units import si

#: per byte of a tensor
Passes = Annotated[float, number(0.0, hint=", such as 2")]


@checked
@dataclass(frozen=True)
class ServerWork:
    """Memory-bound work of a parameter server, measured in passes over the bytes of a tensor.

    One pass reads or writes each byte once.

    memory       memory bandwidth of one thread, for reads and writes combined. The default is close to the
                 single-thread result of STREAM (McCalpin 1995) on a server of the 2010s
    threads      number of threads that handle requests and copy replies. Every tensor is handled by one thread. As in
                 BytePS (GetThreadID), a new tensor is assigned to the thread that has the fewest bytes so far
    together     combined memory bandwidth of the cores that process one push or update in parallel (with OpenMP), such
                 as "60 GB/s". It should not exceed the memory bandwidth of a socket. None: a single thread processes
                 each push or update
    first_push   number of passes for the first push of a tensor in a step: 2 if the push is read and written to the
                 buffer
    push         number of passes for each later push: 3 if the buffer and the push are read and their sum is written
    update       number of passes for an update: 2 if the sum is copied to the parameters, 3 for SGD, 5 for SGD with
                 momentum (two arrays are read and written, one is read)
    pull         number of passes for each reply: 2 if the parameters are copied into it, 0 if they are sent without a
                 copy
    deliver      number of passes on the worker's machine: 2 if a separate thread copies the replies of all servers into
                 one tensor
    unsplit_below  size in bytes below which a tensor is not split but sent to one server, in round-robin order (MXNet:
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
    unsplit_below: Annotated[float | str, quantity("bytes", "4 MB", zero=True)] = 0.0

    def seconds_per_byte(self, *, summing: bool = False) -> float:
        """Return the time in s of one pass over a byte.

        summing  True: the time for pushes and updates; False: the time for all other work
        """
        shared = self.together if summing and self.together is not None else self.memory
        return 1.0 / si(shared, "bandwidth")

    def bound(self) -> float:
        """Return the size in bytes from which on tensors are split."""
        return si(self.unsplit_below, "bytes")


#: MXNet until 1.4: one thread of ps-lite and the main thread do everything in turn; SGD with momentum, the default of
#: its examples (src/kvstore/kvstore_dist_server.h)
EARLY_MXNET_SERVERS = ServerWork(update=5.0, unsplit_below="4 MB")
#: MXNet from 1.5 on: copies between its arrays, sums and updates run on all cores of a socket (ParallelCopy in
#: src/common/utils.h, EvalBinary_ in src/ndarray/ndarray_function-inl.h); replies are still copied by one thread
MXNET_SERVERS = ServerWork(update=5.0, unsplit_below="4 MB", together="60 GB/s")
#: BytePS (byteps/server, 0.2): four threads (BYTEPS_SERVER_ENGINE_THREAD); the first push and the replies are not
#: copied, the sum is copied once; workers update, and read replies from shared memory. Tensors are sent in slices of
#: BYTEPS_PARTITION_BYTES, 4 MB: Priority("4 MB", ...)
BYTEPS_SERVERS = ServerWork(threads=4, first_push=0.0, update=2.0, pull=0.0, deliver=0.0)
#: TensorFlow in a process with 16 cores: every push is copied out of its message (2: TensorFlow issue 6116) and applied
#: separately (SGD: 3), on as many threads as there are cores (DefaultNumInterOpThreads of
#: tensorflow/core/common_runtime/process_util.cc, unless inter_op_parallelism_threads is set; at most 8 of them read
#: messages, kGrpcWorkerCacheThreadCount of distributed_runtime/rpc/grpc_worker_cache.cc, which is not modelled).
#: Replies are sent from the tensor's memory (EncodeTensorToByteBuffer of grpc_tensor_coding.cc), and copied out of
#: their messages
TENSORFLOW_SERVERS = ServerWork(threads=16, first_push=5.0, push=5.0, update=0.0, pull=0.0)
