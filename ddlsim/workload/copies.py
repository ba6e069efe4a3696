"""How samples come into the devices of a machine, and how long a device waits for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ddlsim.arguments import Count, checked, number, one_of, quantity
from ddlsim.units import si

#: over the bytes of a batch
Passes = Annotated[float, number(0.0, hint=" passes, such as 2")]


@checked
@dataclass(frozen=True)
class Copies:
    """The way of samples into devices, which the devices of a machine share.

    prefetch  "device": the next batch is copied to the device while it computes (PyTorch with pinned memory and
              non_blocking copies, tf.data's prefetch_to_device, DALI); "host": it waits in the machine's memory and is
              copied when the step before it has ended, since it goes where the last one still is (MXNet's Module)
    nbytes    of a sample as it is copied; None: every element of the model's input in 4 bytes
    prepare   s that a thread needs to read, decode and augment a sample; 0: they are ready, or synthetic
    threads   of each machine that do this
    cut       passes over a machine's batch that one thread makes to cut it up for the devices, from the end of the
              forward pass on; 0: every device has a loader of its own
    memory    bytes/s that this thread reads and writes
    """

    prefetch: Annotated[str, one_of("device", "host")] = "device"
    nbytes: Annotated[float | str, quantity("bytes", "600 kB")] | None = None
    prepare: Annotated[float | str, quantity("time", "10 ms", zero=True)] = 0.0
    threads: Count = 4
    cut: Passes = 0.0
    memory: Annotated[float | str, quantity("bandwidth", "10 GB/s")] = "10 GB/s"

    def sample_nbytes(self, input_shape: tuple[int, ...]) -> float:
        """Return the bytes of a sample of this shape on its way to a device."""
        if self.nbytes is not None:
            return si(self.nbytes, "bytes")
        n_elements = 1
        for size in input_shape:
            n_elements *= size
        return 4.0 * n_elements

    def wait(self, copy: float, n_samples: int, nbytes: float, forward: float, backward: float) -> float:
        """Return the s that a device waits for samples in a step.

        copy      s that the copy to the device takes
        n_samples, nbytes  of the batches of all devices of the machine together
        forward, backward  s of the passes
        """
        ready = si(self.prepare, "time") * n_samples / self.threads  # s between batches of the machine
        late = self.cut * nbytes / si(self.memory, "bandwidth") - backward
        if self.prefetch == "host":
            return copy + max(0.0, late, ready - forward - backward - copy)
        late = late + copy if self.cut > 0.0 else copy - forward - backward
        return max(0.0, late, ready - forward - backward)


#: MXNet's Module: the batch of a machine lies in its memory; when the outputs of a step have been read, the engine's
#: one thread for processors cuts the next one up (2 passes), and each part is copied into the array that the last step
#: has read from (apache/mxnet, python/mxnet/module, base_module and executor_group; MXNET_CPU_WORKER_NTHREADS is 1)
MXNET_INPUT = Copies("host", cut=2.0)
