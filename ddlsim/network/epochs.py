"""Time intervals with constant routes, when links are down."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np

from ddlsim.cluster.cluster import Routes
from ddlsim.network.changes import REROUTE
from ddlsim.network.state import Ints, Records


class Around(Protocol):
    """Routes around links that are down (:class:`ddlsim.cluster.routing.Detours`)."""

    def routes(self, src: Ints, dst: Ints, usual: Routes) -> Routes: ...


class Fabric(Protocol):
    """Provides the routes around links that are down (implemented by ``ddlsim.cluster.Cluster``)."""

    def around(self, down: Iterable[int]) -> Around: ...


class Epochs:
    """Time intervals in which the same links are avoided. Epoch 0 begins with the run and avoids none."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._avoided: list[tuple[float, float, frozenset[int]]] = []
        self._detours: list[Around | None] = [None]
        #: (start in s, number) of each later epoch
        self.starts: list[tuple[float, int]] = []

    def avoid(self, avoided: Iterable[tuple[float, float, frozenset[int]]]) -> None:
        """Avoid links during intervals, tuples (start in s, end in s, links), in addition to earlier calls."""
        self._avoided += avoided
        edges = sorted({edge for start, end, _ in self._avoided for edge in (start, end)})
        self.starts = [(edge, number) for number, edge in enumerate(edges, 1)]
        self._detours = [None]
        for edge in edges:
            down = frozenset[int]().union(*(links for start, end, links in self._avoided if start <= edge < end))
            self._detours.append(self._fabric.around(sorted(down)) if down else None)

    @staticmethod
    def begun(changes: Records) -> int:
        """Return the number of the current epoch, given the changes applied so far."""
        return int(np.count_nonzero(changes["kind"] == REROUTE))

    def routes(self, epoch: int, src: Ints, dst: Ints, usual: Routes) -> Routes:
        """Return the routes of an epoch; `usual` are those of epoch 0."""
        detours = self._detours[epoch]
        return usual if detours is None else detours.routes(src, dst, usual)

    def later(self, epoch: int, src: Ints, dst: Ints, usual: Routes) -> Iterator[tuple[int, Ints, Routes]]:
        """For each later epoch, yield its number, the indices of the routes that differ from the epoch before, and all
        routes."""
        before = self.routes(epoch, src, dst, usual)
        for number in range(epoch + 1, len(self._detours)):
            routes = self.routes(number, src, dst, usual)
            others = [i for i in range(len(src)) if not all(map(np.array_equal, before.path(i), routes.path(i)))]
            if others:
                yield number, np.array(others, dtype=np.int64), routes
            before = routes
