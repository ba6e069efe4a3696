"""torch.distributed transport with gloo (buffers in host memory) or NCCL (on the GPU), started by torchrun."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from ddlsim.errors import ConfigError
from ddlsim.measure.runner import COLLECTIVES
from ddlsim.measure.transport import Action, Transport

T = TypeVar("T")


@dataclass(frozen=True)
class TorchTransport(Transport):
    """The ranks that torchrun started.

    Buffers are sent in the default group with `backend`; barriers and Python objects use the group `control` with gloo,
    so that they need no GPU.
    """

    device: torch.device
    control: dist.ProcessGroup

    def barrier(self) -> None:
        dist.barrier(group=self.control)

    def gather(self, value: T) -> list[T]:
        values = [value] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def one_way(self, n_elements: int, peer: int, first: bool) -> Action:
        buffer = self._buffer(n_elements)
        begin, finish = (dist.send, dist.recv) if first else (dist.recv, dist.send)

        def round_trip() -> None:
            begin(buffer, peer)
            finish(buffer, peer)

        return self._finished(round_trip)

    def both_ways(self, n_elements: int, peer: int) -> Action:
        out, into = self._buffer(n_elements), self._buffer(n_elements)

        def exchange() -> None:
            pair = [dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, into, peer)]
            for work in dist.batch_isend_irecv(pair):
                work.wait()

        return self._finished(exchange)

    def collective(self, operation: str, n_elements: int) -> Action:
        full, part = self._buffer(n_elements), self._buffer(n_elements // self.size)
        out = self._buffer(n_elements if operation == "all_to_all" else 0)
        # names since PyTorch 2.13, and the earlier ones
        gather_all = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        parts = list(full.chunk(self.size)) if self.rank == 0 else None
        actions: dict[str, Action] = {
            "all_reduce": lambda: dist.all_reduce(full),
            "broadcast": lambda: dist.broadcast(full, 0),
            "all_gather": lambda: gather_all(full, part),
            "all_to_all": lambda: dist.all_to_all_single(full, out),
            "reduce_scatter": lambda: scatter_sum(part, full),
            "reduce": lambda: dist.reduce(full, 0),
            "gather": lambda: dist.gather(part, parts, 0),
            "scatter": lambda: dist.scatter(part, parts, 0),
        }
        return self._finished(actions[operation])

    def lacking(self) -> tuple[str, ...]:
        """Try each collective: gloo's depend on PyTorch's version, and missing ones fail on all ranks."""
        lacking = []
        for operation in COLLECTIVES:
            try:
                self.collective(operation, self.size)()
            except (NotImplementedError, RuntimeError):  # PyTorch uses both for "does not support"
                lacking.append(operation)
        return tuple(lacking)

    def memory(self, operation: str, n_elements: int) -> Action:
        into, source = self._buffer(n_elements), self._buffer(n_elements)
        return self._finished((lambda: into.add_(source)) if operation == "reduction" else lambda: into.copy_(source))

    def close(self) -> None:
        self.barrier()  # gloo aborts a rank that communicates with one that has left
        dist.destroy_process_group()

    def _buffer(self, n_elements: int) -> torch.Tensor:
        """Return zeros that were written, so that their pages are allocated."""
        return torch.empty(n_elements, dtype=torch.float32, device=self.device).fill_(0.0)

    def _finished(self, action: Action) -> Action:
        """Return `action` followed by waiting for the GPU."""
        if self.device.type == "cpu":
            return action

        def wait_too() -> None:
            action()
            torch.cuda.synchronize(self.device)

        return wait_too


def connect_torch(backend: str) -> TorchTransport:
    """Return the transport of torchrun's ranks for "gloo", "nccl", or "auto": NCCL if there are GPUs."""
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    if backend == "auto":
        backend = "nccl" if has_nccl else "gloo"
    device, version = torch.device("cpu"), f"torch {torch.__version__}"
    if backend == "nccl":
        if not has_nccl:
            raise ConfigError("backend 'nccl' needs GPUs and a PyTorch build with CUDA; use --backend gloo")
        index, n_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if index >= n_gpus:
            what = f"at least {index + 1} ranks run on a host with {n_gpus} GPUs"
            raise ConfigError(f"{what}; start at most one rank per GPU")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        version += f", NCCL {'.'.join(str(part) for part in torch.cuda.nccl.version())}"
    dist.init_process_group(backend, timeout=timedelta(minutes=5))
    control = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo")
    if control is None:
        raise ConfigError("torchrun did not create a process group; start the benchmarks with torchrun")
    rank, n_ranks, host = dist.get_rank(), dist.get_world_size(), socket.gethostname()
    return TorchTransport(rank, n_ranks, host, backend, f"torch {device.type}", version, device, control)
