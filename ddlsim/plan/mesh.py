"""`Mesh`: ranks on the axes of data, pipeline and tensor parallelism, and their groups along each axis."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from ddlsim.arguments import Count, Index, checked
from ddlsim.cluster import Cluster
from ddlsim.errors import ConfigError
from ddlsim.plan.plan import Ints

Axis = Literal["data", "pipeline", "tensor"]
#: axes of the array of ranks, in order
AXES: tuple[Axis, ...] = ("data", "pipeline", "tensor")
#: number of configurations that an error names
N_NEAR = 3


class Coordinates(NamedTuple):
    """Coordinates of a rank on each axis."""

    data: int
    pipeline: int
    tensor: int


@checked
@dataclass(frozen=True)
class Mesh:
    """A mesh of ``data * pipeline * tensor`` ranks.

    data      number of replicas of the model
    pipeline  number of pipeline stages in each replica
    tensor    number of ranks over which each stage is split
    order     the three axes in the order in which ranks are numbered, starting with the axis that varies fastest. By
              default, as in Megatron-LM (Narayanan et al. 2021, arXiv:2104.04473), consecutive ranks form a tensor
              group, followed by the replicas of the stage and then by the next stage

    >>> Mesh(data=2, pipeline=2, tensor=2).groups("pipeline")
    ((0, 4), (1, 5), (2, 6), (3, 7))
    """

    data: Count = 1
    pipeline: Count = 1
    tensor: Count = 1
    order: tuple[Axis, ...] = ("tensor", "data", "pipeline")

    def __post_init__(self) -> None:
        if sorted(self.order) != sorted(AXES):
            raise ConfigError(f"Mesh: order = {self.order}: must contain {', '.join(AXES)}, once each, in any order")

    @property
    def n_ranks(self) -> int:
        """Number of ranks."""
        return self.data * self.pipeline * self.tensor

    @cached_property
    def ranks(self) -> Ints:
        """Ranks by their coordinates, (data, pipeline, tensor)."""
        outermost_first = self.order[::-1]
        numbers = np.arange(self.n_ranks).reshape([getattr(self, axis) for axis in outermost_first])
        return np.ascontiguousarray(numbers.transpose([outermost_first.index(axis) for axis in AXES]))

    @checked
    def rank(self, data: Index = 0, pipeline: Index = 0, tensor: Index = 0) -> int:
        """Return the rank at the given coordinates. Raises ConfigError outside the mesh."""
        for axis, place in zip(AXES, (data, pipeline, tensor), strict=True):
            size = getattr(self, axis)
            if place >= size:
                raise ConfigError(f"Mesh.rank: {axis} = {place}: must be below {size}, the size of this axis")
        return int(self.ranks[data, pipeline, tensor])

    @checked
    def coordinates(self, rank: Index) -> Coordinates:
        """Return the coordinates of a rank. Raises ConfigError for a rank outside the mesh."""
        if rank >= self.n_ranks:
            raise ConfigError(f"Mesh.coordinates: rank = {rank}: must be below {self.n_ranks}")
        return Coordinates(*np.argwhere(self.ranks == rank)[0].tolist())

    @checked
    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that differ only in the coordinate on `axis`, ordered by first rank."""
        along = np.moveaxis(self.ranks, AXES.index(axis), -1).reshape(-1, getattr(self, axis))
        return tuple(map(tuple, along[np.argsort(along[:, 0])].tolist()))

    def nodes(self, cluster: Cluster) -> Ints:
        """Return a placement of the ranks on nodes of a cluster, (n_ranks,), with consecutive ranks near each other.

        As far as possible, each group along the first axis stays inside one machine. Raises ConfigError for a cluster
        with too few devices.
        """
        workers = cluster.workers
        if len(workers) < self.n_ranks:
            near = _near(len(workers), self)
            raise ConfigError(
                f"Mesh: {self} has {self.n_ranks} ranks, but cluster {cluster.name!r} has {len(workers)} devices; the "
                f"nearest valid meshes are {near}"
            )
        places = workers[cluster.locality_order(workers)]
        host = cluster.host_of[places]
        host = np.where(host >= 0, host, len(cluster.host_names) + places)
        group = getattr(self, self.order[0])
        of_hosts = np.split(places, np.flatnonzero(np.diff(host)) + 1)
        grouped = np.concatenate([host_places[: len(host_places) // group * group] for host_places in of_hosts])
        return (grouped if len(grouped) >= self.n_ranks else places)[: self.n_ranks]

    def __str__(self) -> str:
        return f"data={self.data}, pipeline={self.pipeline}, tensor={self.tensor}"


@checked
def make_mesh(
    n_ranks: Count,
    data: Count | None = None,
    pipeline: Count = 1,
    tensor: Count = 1,
    order: tuple[Axis, ...] = ("tensor", "data", "pipeline"),
) -> Mesh:
    """Return a mesh of `n_ranks` ranks.

    n_ranks   number of ranks
    data      number of replicas of the model; None: ``n_ranks / (pipeline * tensor)``
    pipeline  number of pipeline stages in each replica
    tensor    number of ranks over which each stage is split
    order     order of the axes in the numbering of the ranks, as for :class:`Mesh`

    Raises ConfigError if the product of the sizes is not `n_ranks`; the message suggests the nearest valid meshes.
    """
    inside = pipeline * tensor
    replicas = data if data is not None else max(n_ranks // inside, 1)
    if replicas * inside != n_ranks:
        wanted = Mesh(replicas, pipeline, tensor, order)
        product = f"data {data} x " if data is not None else ""
        must = "must be" if data is not None else "must divide"
        raise ConfigError(
            f"Mesh: {product}pipeline {pipeline} x tensor {tensor} = {(data or 1) * inside}: {must} the number of "
            f"ranks, {n_ranks}; the nearest valid meshes are {_near(n_ranks, wanted)}"
        )
    return Mesh(replicas, pipeline, tensor, order)


def _near(n_ranks: int, wanted: Mesh) -> str:
    """Name the meshes of `n_ranks` ranks that are nearest to `wanted`."""

    def distance(mesh: Mesh) -> tuple[float, ...]:
        data, pipeline, tensor = (abs(math.log(getattr(mesh, axis) / getattr(wanted, axis))) for axis in AXES)
        return (round(pipeline + tensor + 0.1 * data, 9), tensor, pipeline)  # the number of replicas counts least

    divisors = [i for i in range(1, n_ranks + 1) if n_ranks % i == 0]
    meshes = [Mesh(n_ranks // (p * t), p, t) for t in divisors for p in divisors if n_ranks % (p * t) == 0]
    return "; ".join(map(str, sorted(meshes, key=distance)[:N_NEAR]))
