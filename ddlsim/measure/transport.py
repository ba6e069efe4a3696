"""The interface of the libraries that the benchmarks measure, and the choice among them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TypeAlias, TypeVar

from ddlsim.errors import ConfigError, unknown_name

T = TypeVar("T")
#: an operation to be timed: prepared (buffers, connections), and finished when it returns
Action: TypeAlias = Callable[[], object]
#: all buffers are float32
ITEM_NBYTES = 4

BACKENDS = ("auto", "mpi", "gloo", "nccl")


@dataclass(frozen=True)
class Transport(ABC):
    """Interface of a library for one rank. Buffers are float32; actions return when this rank's part is finished.

    rank, size  index of this rank, and number of ranks
    host        name of this rank's machine
    backend     library that moves the bytes: "mpi", "gloo" or "nccl"
    compute     library that reduces and copies buffers: "numpy", "torch cpu" or "torch cuda"
    version     the library and its version
    """

    rank: int
    size: int
    host: str
    backend: str
    compute: str
    version: str

    @abstractmethod
    def barrier(self) -> None:
        """Return when all ranks have called it."""

    @abstractmethod
    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank, to every rank."""

    @abstractmethod
    def one_way(self, n_elements: int, peer: int, first: bool) -> Action:
        """Return a round trip with `peer`: send and receive if `first`, else receive and send."""

    @abstractmethod
    def both_ways(self, n_elements: int, peer: int) -> Action:
        """Return an exchange with `peer`: both send and receive concurrently."""

    @abstractmethod
    def collective(self, operation: str, n_elements: int) -> Action:
        """Return a collective by name; the root of reduce, gather, broadcast and scatter is rank 0.

        `n_elements` is a multiple of the number of ranks: the buffer per rank, which for all_gather, gather and scatter
        is the full one.
        """

    def lacking(self) -> tuple[str, ...]:
        """Return the collectives that the library does not support; all ranks must call this together."""
        return ()

    @abstractmethod
    def memory(self, operation: str, n_elements: int) -> Action:
        """Return a reduction (a += b) or a copy of a buffer, in the memory of buffers."""

    def close(self) -> None:  # noqa: B027  # MPI is finalised when Python exits
        """Leave the group of ranks."""

    def abort(self) -> None:  # noqa: B027  # torchrun ends the other ranks if one fails
        """End the other ranks, too, after an error on this one."""


def connect(backend: str) -> Transport:
    """Return the transport of this process: torch.distributed under torchrun, otherwise MPI.

    Under torchrun, "auto" selects NCCL if there are GPUs, otherwise gloo. Raises ConfigError for an unknown backend,
    and for a missing library or launcher.
    """
    if backend not in BACKENDS:
        raise unknown_name("backend", backend, BACKENDS)
    under_torchrun = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
    if backend == "mpi" or (backend == "auto" and not under_torchrun):
        if find_spec("mpi4py") is None:
            hint = "pip install 'ddlsim[measure]' and use mpirun, or use torchrun"
            raise ConfigError(f"mpi4py is not installed; {hint}")
        from ddlsim.measure.mpi import connect_mpi

        return connect_mpi()
    if find_spec("torch") is None:
        raise ConfigError(f"backend {backend!r} needs PyTorch, which is not installed: pip install torch, or use mpi")
    if not under_torchrun:
        how = "start with: torchrun --nproc-per-node 2 -m ddlsim.measure ..."
        raise ConfigError(f"backend {backend!r} needs torchrun; {how}")
    from ddlsim.measure.torch_dist import connect_torch

    return connect_torch(backend)
