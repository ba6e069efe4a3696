"""Communication graphs of decentralised SGD: graphs of ranks, and doubly stochastic matrices of weights."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ddlsim.errors import ConfigError, unknown_name

Floats = npt.NDArray[np.float64]
#: (N, N), row i contains worker i's weights of all workers' parameters
Weights = tuple[tuple[float, ...], ...]
NAMES = ("bipartite", "complete", "ring")
_TOLERANCE = 1e-9
#: maximum number of workers for which eigenvalues are computed (about a second)
MAX_WORKERS = 1024


class Graph(Protocol):
    """A graph whose nodes are the ranks, such as a ``networkx.Graph``."""

    @property
    def nodes(self) -> Iterable[object]: ...

    @property
    def edges(self) -> Iterable[tuple[object, ...]]: ...

    def is_directed(self) -> bool: ...


def check_graph(graph: object, where: str, *, weights: bool = False) -> str | Graph | Weights:
    """Return `graph` in immutable form, a matrix as tuples (matrices only if `weights` are allowed).

    Raises ConfigError for an unknown name, a directed graph, and a matrix that is not doubly stochastic.
    """
    if isinstance(graph, str):
        if graph not in NAMES:
            raise unknown_name("graph", graph, NAMES, where.partition(":")[0])
        return graph
    if hasattr(graph, "edges") and hasattr(graph, "is_directed"):
        found: Graph = graph  # type: ignore[assignment]
        if found.is_directed():
            raise ConfigError(
                f"{where} is directed, but neighbours exchange messages in both directions; use graph.to_undirected()"
            )
        return found
    if not weights:
        kind = type(graph).__name__
        raise ConfigError(f"{where}: expected one of {', '.join(NAMES)}, or a networkx graph of ranks; got {kind}")
    return _check_weights(where, graph)


def _check_weights(where: str, graph: object) -> Weights:
    """Return a matrix as tuples if its rows and columns sum to 1 and no element is negative."""
    try:
        matrix = np.array(graph, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        kind = type(graph).__name__
        raise ConfigError(
            f"{where}: expected one of {', '.join(NAMES)}, a networkx graph of ranks, or a matrix of weights; got "
            f"{kind}"
        ) from None
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise ConfigError(f"{where} has shape {matrix.shape}; a matrix of weights must have shape (workers, workers)")
    if not np.isfinite(matrix).all() or matrix.min() < 0.0:
        raise ConfigError(f"{where} contains {matrix.min():g}; weights must be finite and not negative")
    for axis, line in ((1, "row"), (0, "column")):
        sums = matrix.sum(axis=axis)
        worst = int(np.abs(sums - 1.0).argmax())
        if abs(sums[worst] - 1.0) > _TOLERANCE:
            raise ConfigError(
                f"{where}: {line} {worst} sums to {sums[worst]:.9g}; rows and columns must sum to 1, because otherwise "
                "the mean of the models would drift"
            )
    return tuple(tuple(row) for row in matrix.tolist())


def describe(graph: str | Graph | Weights) -> str:
    """Return the part of a label that describes a graph."""
    if isinstance(graph, str):
        return graph
    return "matrix" if isinstance(graph, tuple) else "graph"


def neighbours(owner: str, graph: str | Graph, n_workers: int) -> list[list[int]]:
    """Return each rank's neighbours, ascending. "ring" is in rank order; "bipartite" connects every even rank with
    every odd one. Raises ConfigError unless a graph's nodes are the ranks."""
    ranks = range(n_workers)
    if not isinstance(graph, str):
        return _listed(owner, graph, n_workers)
    if graph == "ring":
        return [sorted({(i - 1) % n_workers, (i + 1) % n_workers} - {i}) for i in ranks]
    step = 2 if graph == "bipartite" else 1
    return [[j for j in ranks if j != i and (step == 1 or (i + j) % step)] for i in ranks]


def _listed(owner: str, graph: Graph, n_workers: int) -> list[list[int]]:
    nodes = set(graph.nodes)
    if nodes != set(range(n_workers)):
        last = n_workers - 1
        raise ConfigError(
            f"{owner}: graph must have one node per worker, numbered from 0 to {last}, but it has {len(nodes)} nodes "
            "with other labels; relabel them with networkx.convert_node_labels_to_integers, or pass a graph of the "
            "right size"
        )
    near: list[set[int]] = [set() for _ in range(n_workers)]
    for edge in graph.edges:
        i, j = (int(str(node)) for node in edge[:2])
        if i != j:
            near[i].add(j)
            near[j].add(i)
    return [sorted(found) for found in near]


def mixing_matrix(owner: str, graph: str | Graph | Weights, n_workers: int) -> Floats:
    """Return W (N, N), doubly stochastic. Raises ConfigError for the wrong number of workers.

    A graph has Metropolis-Hastings weights (Xiao, Boyd and Kim 2007, JPDC 67(1)):
    W_ij = 1 / (1 + max(d_i, d_j)) for neighbours i and j of degrees d_i and d_j, and W_ii = 1 - sum_j W_ij. On a ring
    these are 1/3 each, on the complete graph 1/N.
    """
    if isinstance(graph, tuple):
        if len(graph) != n_workers:
            raise ConfigError(f"{owner}: graph is a matrix for {len(graph)} workers, but the run has {n_workers}")
        return np.array(graph)
    near = neighbours(owner, graph, n_workers)
    matrix = np.zeros((n_workers, n_workers))
    for i, found in enumerate(near):
        matrix[i, found] = [1.0 / (1.0 + max(len(found), len(near[j]))) for j in found]
        matrix[i, i] = 1.0 - matrix[i].sum()
    return matrix


def contraction(matrix: Floats) -> float:
    """Return |lambda_2(W)|, the factor by which the workers' disagreement shrinks per step if the gradients are 0."""
    if len(matrix) == 1:
        return 0.0
    symmetric = np.array_equal(matrix, matrix.T)
    values = np.linalg.eigvalsh(matrix) if symmetric else np.linalg.eigvals(matrix)
    return float(np.sort(np.abs(values))[-2])


def agreement(owner: str, matrix: Floats) -> str:
    """Return a note on how fast the workers reach consensus; empty above :data:`MAX_WORKERS` workers (too slow)."""
    if not 1 < len(matrix) <= MAX_WORKERS:
        return ""
    rate = contraction(matrix)
    if rate > 1.0 - _TOLERANCE:
        return f"{owner}: |lambda_2(W)| = 1, so some workers never reach consensus; connect the parts of the graph"
    halved = math.log(0.5) / math.log(max(rate, sys.float_info.min))
    return f"{owner}: |lambda_2(W)| = {rate:.6g}, so without gradients, disagreement halves every {halved:.3g} steps"


def bipartition(owner: str, graph: str | Graph, near: Sequence[Sequence[int]]) -> list[bool]:
    """Return whether each rank is on the same side as the lowest rank of its component.

    Raises ConfigError if the graph is not bipartite.
    """
    side: dict[int, bool] = {}
    n_workers = len(near)
    for first in range(n_workers):
        reached = [first] if first not in side else []
        side.setdefault(first, True)
        for i in reached:  # grows during the loop
            for j in near[i]:
                if j not in side:
                    side[j] = not side[i]
                    reached.append(j)
                elif side[j] == side[i]:
                    raise ConfigError(
                        f"{owner}: graph = {describe(graph)!r} with {n_workers} workers is not bipartite (the edge "
                        f"between ranks {i} and {j} closes an odd cycle), so exchanges could deadlock; use "
                        "graph='bipartite', or a ring with an even number of workers"
                    )
    return [side[rank] for rank in range(len(near))]
