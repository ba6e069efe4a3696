"""MPI transport (mpi4py) on NumPy buffers. Importing this module starts MPI."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from ddlsim.errors import ConfigError
from ddlsim.measure.transport import Action, Transport

T = TypeVar("T")
Buffer: TypeAlias = npt.NDArray[np.float32]


def _buffer(n_elements: int) -> Buffer:
    """Return zeros in allocated memory: with np.zeros, all pages would share one zero page until they are written."""
    buffer = np.empty(n_elements, np.float32)
    buffer.fill(0.0)
    return buffer


@dataclass(frozen=True)
class MpiTransport(Transport):
    """The ranks of ``MPI.COMM_WORLD``."""

    comm: MPI.Intracomm

    def barrier(self) -> None:
        self.comm.Barrier()

    def gather(self, value: T) -> list[T]:
        values: list[T] = self.comm.allgather(value)
        return values

    def one_way(self, n_elements: int, peer: int, first: bool) -> Action:
        comm, buffer = self.comm, _buffer(n_elements)
        begin, finish = (comm.Send, comm.Recv) if first else (comm.Recv, comm.Send)

        def round_trip() -> None:
            begin(buffer, peer)
            finish(buffer, peer)

        return round_trip

    def both_ways(self, n_elements: int, peer: int) -> Action:
        out, into = _buffer(n_elements), _buffer(n_elements)
        return lambda: self.comm.Sendrecv(out, peer, recvbuf=into, source=peer)

    def collective(self, operation: str, n_elements: int) -> Action:
        comm, full = self.comm, _buffer(n_elements)
        if operation == "all_reduce":
            return lambda: comm.Allreduce(MPI.IN_PLACE, full)
        if operation == "broadcast":
            return lambda: comm.Bcast(full)
        if operation == "all_to_all":
            out = _buffer(n_elements)
            return lambda: comm.Alltoall(out, full)
        part = _buffer(n_elements // self.size)
        if operation == "all_gather":
            return lambda: comm.Allgather(part, full)
        if operation == "reduce_scatter":
            return lambda: comm.Reduce_scatter_block(full, part)
        root = self.rank == 0
        if operation == "reduce":
            return lambda: comm.Reduce(MPI.IN_PLACE if root else full, full if root else None)
        at_root = full if root else None
        if operation == "gather":
            return lambda: comm.Gather(part, at_root)
        return lambda: comm.Scatter(at_root, part)

    def memory(self, operation: str, n_elements: int) -> Action:
        into, source = _buffer(n_elements), _buffer(n_elements)
        return (lambda: np.add(into, source, out=into)) if operation == "reduction" else lambda: np.copyto(into, source)

    def abort(self) -> None:
        self.comm.Abort(2)


def connect_mpi() -> MpiTransport:
    """Return the transport of MPI's world. Raises ConfigError if mpirun belongs to another MPI."""
    comm = MPI.COMM_WORLD
    vendor, numbers = MPI.get_vendor()
    version = f"{vendor} {'.'.join(str(number) for number in numbers)}"
    started = next((os.environ[name] for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE") if name in os.environ), "1")
    if comm.size == 1 and started.isdigit() and int(started) > 1:
        what = f"mpirun started {started} ranks, but mpi4py's {version} sees only itself"
        raise ConfigError(f"{what}; use the mpirun of the MPI library that mpi4py was built with")
    return MpiTransport(comm.rank, comm.size, MPI.Get_processor_name(), "mpi", "numpy", version, comm)
