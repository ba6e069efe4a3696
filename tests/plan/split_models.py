"""Models and references that tests of split models need."""

import itertools
import math

import networkx as nx
import numpy as np

from ddlsim.workload.compute import Workload
from ddlsim.workload.model import Layer, Model


def chain(forward, backward, *, batch_size=1, weights=100, width=50, optimizer=0.0, stored=None):
    """Return the workload of dense layers with these seconds; each makes `width` numbers of a sample."""
    n = len(forward)
    stored = [4.0 * width] * n if stored is None else stored
    layers = tuple(
        Layer(f"layer{i}", "dense", (width,), (width,), weights, 1.0, 2.0, 4.0 * width, (("weight", weights),),
              stored_nbytes=stored[i])
        for i in range(n)
    )  # fmt: skip
    model = Model("chain", "a chain", (width,), layers, False, ())
    return Workload(
        model, batch_size, "fp32", "by hand", np.array(forward, dtype=float), np.array(backward, dtype=float),
        optimizer, np.full(n, 4.0 * weights), np.arange(n), np.full(n, 4.0 * weights), 1e12, 0.0,
    )  # fmt: skip


def longest_path(order, forward, backward, weight, message=0.0):
    """Return the seconds of a table of passes by the longest path of its graph, made apart from any plan.

    forward, backward, weight  s of each chunk; with W passes `backward` is what is left for B
    """
    graph = nx.DiGraph()
    where = {each[1]: rank for rank, passes in enumerate(order) for each in passes}
    apart = {(each[1], each[2]) for passes in order for each in passes if each[0] == "W"}
    n_chunks = max(where) + 1

    def seconds(each):
        kind, chunk, micro = each
        if kind == "F":
            return forward[chunk]
        if kind == "W":
            return weight[chunk]
        return backward[chunk] - (weight[chunk] if (chunk, micro) in apart else 0.0)

    for rank, passes in enumerate(order):
        for first, second in itertools.pairwise(passes):
            graph.add_edge(tuple(first), tuple(second), weight=seconds(first))
        graph.add_edge(tuple(passes[-1]), f"end of {rank}", weight=seconds(passes[-1]))
        for kind, chunk, micro in passes:
            step = {"F": 1, "B": -1}.get(kind)
            if step is not None and 0 <= chunk + step < n_chunks:
                travels = message if where[chunk] != where[chunk + step] else 0.0
                first, second = (kind, chunk, micro), (kind, chunk + step, micro)
                graph.add_edge(first, second, weight=seconds(first) + travels)
    path = nx.dag_longest_path(graph)
    return math.fsum(graph.edges[a, b]["weight"] for a, b in itertools.pairwise(path))
