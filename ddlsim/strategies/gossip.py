"""Decentralised SGD on a graph of workers: synchronous (D-PSGD, CHOCO-SGD), or asynchronous with random partners.

AD-PSGD averages pairs of models; GoSGD pushes weighted models (push-sum).
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import checked, number, validated_by
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.learning import ABSENT, Array, Value, weighted_sum
from ddlsim.network import lanes as ls
from ddlsim.runtime import Message, Messages, RunContext, Worker
from ddlsim.runtime.lanes import OPTIMIZER, Lanes, Op, gradient
from ddlsim.runtime.replica import replicas_of
from ddlsim.streams import stream

# ---------------------------------------------------------------- graphs of ranks, and doubly stochastic matrices


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
        networkx_graph: Graph = graph  # type: ignore[assignment]
        if networkx_graph.is_directed():
            raise ConfigError(
                f"{where} is directed, but neighbours exchange messages in both directions; use graph.to_undirected()"
            )
        return networkx_graph
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
    return [sorted(peers) for peers in near]


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
    for i, peers in enumerate(near):
        matrix[i, peers] = [1.0 / (1.0 + max(len(peers), len(near[j]))) for j in peers]
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


#: a graph of workers, or the weights of their averages
Mixing = Annotated[
    str | Graph | Weights | Sequence[Sequence[float]] | npt.NDArray[np.float64],
    validated_by(functools.partial(check_graph, weights=True)),
]


def checked_graph(graph: Mixing) -> str | Graph | Weights:
    """Return the immutable form of a graph with the type :data:`Mixing`."""
    return check_graph(graph, "graph", weights=True)


class _Peers:
    """Workers that compute gradients and send each other their models, compressed if the run compresses.

    packs  whether messages are encoded
    draws  random stream of each worker, for its choices
    """

    def __init__(self, context: RunContext, owner: str) -> None:
        self.context, self.messages = context, Messages(context, owner=owner, peers=True)
        self.packs, self.replicas = self.messages.choice is not None, replicas_of(context)
        self.draws = [stream(context.seed, worker.rank, "gossip") for worker in context.workers]

    def encode(self) -> list[Op]:
        """Return the operations that encode a worker's model."""
        return [Op(ls.ASK if self.packs else ls.NOTE, follow=self._packed), Op(ls.WORK, "encode")]

    def run(self, ops: Sequence[Op], samples: int, **how: Any) -> None:
        """Run the operations repeatedly on all workers (:class:`~ddlsim.runtime.lanes.Lanes`)."""
        nbytes = self.context.workers[0].workload.gradient_nbytes
        self.lanes = Lanes(self.context, ops, nbytes, samples, self.messages, **how)

    def _step(self, worker: Worker) -> None:
        self.replicas[worker.rank].step_freely(worker.drawn)

    def _packed(self, worker: Worker) -> None:
        """Encode a worker's model."""
        raise NotImplementedError


class Neighbours(_Peers):
    """Workers that send each other their models: in every step, worker i receives the models that have a weight in row
    i of ``matrix``, (N, N).

    public   every worker's latest model as its neighbours hold it
    arriving messages in flight, or received but not yet used, by sender, receiver and the sender's step count
    """

    def __init__(self, context: RunContext, matrix: npt.NDArray[np.float64], owner: str) -> None:
        super().__init__(context, owner)
        self.matrix, ranks = matrix, range(len(matrix))
        self.senders = [[j for j in np.flatnonzero(matrix[i]).tolist() if j != i] for i in ranks]
        self.receivers = [[j for j in np.flatnonzero(matrix[:, i]).tolist() if j != i] for i in ranks]
        self.public: list[Value[Array]] = [ABSENT for _ in ranks]
        self.arriving: dict[tuple[int, int, int], Message] = {}

    # ------------------------------------------------------------ operations

    def send(self) -> list[Op]:
        """Return the operations that encode a worker's model and send it."""
        return [*self.encode(), Op(ls.POST)]

    def receive(self, step: str) -> list[Op]:
        """Return the operations that wait until all messages that a worker sends or receives in a `step` (its name in
        waits) have arrived."""
        come = Op(ls.AWAIT, "neighbours", waits=f"its neighbours' parameters of step {step}")
        return [come, *([Op(ls.ASK, follow=self._come)] if self.packs else []), Op(ls.WORK, "decode")]

    def go(self, ops: Sequence[Op]) -> None:
        """Run the operations repeatedly on all workers."""
        samples, sends = self.context.workers[0].samples_per_step * len(self.matrix), self.matrix != 0.0
        # a worker waits for its receivers directly, or through chains of at most all workers that wait for each other
        depth = 2 if (sends == sends.T).all() else len(sends)
        self.run(ops, samples, peers=self.receivers, depth=depth)

    # ------------------------------------------------------------ values

    def models(self, worker: Worker) -> dict[int, Value[Array]]:
        """Remove and return the received models of a worker's neighbours; add its own, as the neighbours hold it."""
        me = worker.rank
        count = self._count(worker)
        return {me: self.public[me]} | {j: self.arriving.pop((j, me, count)).value for j in self.senders[me]}

    def _count(self, worker: Worker) -> int:
        return len(worker.recorder.step_end[worker.rank])

    def _packed(self, worker: Worker) -> None:
        me, message = worker.rank, self.messages.model(worker, worker.params)
        self.public[me] = message.value
        for j in self.receivers[me]:
            self.arriving[me, j, self._count(worker)] = message
        self.lanes.set_message(worker, message.seconds, message.sizes * len(self.receivers[me]))

    def _come(self, worker: Worker) -> None:
        messages = [self.arriving[j, worker.rank, self._count(worker)] for j in self.senders[worker.rank]]
        seconds = sum(self.messages.decode_seconds(worker, message) for message in messages)
        self.lanes.set_seconds(worker, "decode", seconds)


class _Mixed:
    """A strategy whose workers mix their models with those of their neighbours in a graph."""

    graph: Mixing

    def kept_models(self, n_workers: int, compressed: bool) -> float:
        """Return the number of models that each device keeps in addition: if messages are compressed, the public copies
        of its own model and of its neighbours', of which they are changes (``neighbor_hat_params`` in the authors' code
        of CHOCO-SGD)."""
        matrix = mixing_matrix(type(self).__name__, checked_graph(self.graph), n_workers)
        near = ((matrix != 0.0) & ~np.eye(n_workers, dtype=np.bool_)).sum(axis=1)
        return compressed * (1.0 + float(near.max()))


@checked
@dataclass(frozen=True)
class DPSGD(_Mixed):
    """D-PSGD: decentralised parallel SGD (Lian et al. 2017, arXiv:1705.09056, algorithm 1).

    In every step, each worker averages its model with the models of its neighbours and applies its own gradient:

    x_i <- sum_j W_ij x_j - eta g_i(x_i)

    Only neighbours in the graph communicate. As in the paper, workers exchange models while they compute gradients, so
    a step takes as long as the slower of exchange and computation. A worker's step ends when all messages that it sends
    and receives have been delivered.

    graph  neighbours of each worker: "ring" (in rank order, with weights of 1/3), "complete", "bipartite", a networkx
           graph whose nodes are the ranks (with Metropolis-Hastings weights), or the weight matrix W itself. For N
           workers, W must be a doubly stochastic matrix of shape (N, N), in which row i holds the weights that worker i
           uses
    """

    graph: Mixing = "ring"

    @property
    def label(self) -> str:
        """Label for tables and plots: the graph."""
        return f"D-PSGD ({describe(checked_graph(self.graph))})"

    def start(self, context: RunContext) -> None:
        """Start all workers, and note how fast they reach consensus."""
        matrix = mixing_matrix("DPSGD", checked_graph(self.graph), len(context.workers))
        if said := agreement("D-PSGD", matrix):
            context.notes.append(said)
        neighbours = Neighbours(context, matrix, "DPSGD")

        def mix(worker: Worker) -> None:
            me, replica = worker.rank, neighbours.replicas[worker.rank]
            models = neighbours.models(worker) | {me: worker.params}
            sources = np.flatnonzero(matrix[me]).tolist()
            mixed = weighted_sum(worker.learner.plane, matrix[me, sources].tolist(), [models[j] for j in sources])
            worker.params, replica.state = replica.after(mixed, worker.drawn)
            replica.count()

        step = [OPTIMIZER, Op(ls.STEP, follow=mix, number=ls.COMMON)]
        neighbours.go([*neighbours.send(), *gradient(context), *neighbours.receive("{begun}"), *step])


@checked
@dataclass(frozen=True)
class CHOCOSGD(_Mixed):
    """CHOCO-SGD: decentralised SGD with compressed messages (Koloskova, Stich and Jaggi 2019, arXiv:1902.00340).

    In every step, worker i sends the compressed change q_i of its model to its neighbours (algorithm 2):

    x_i <- x_i - eta g_i(x_i)
    q_i = Q(x_i - y_i);   y_j <- y_j + q_j for worker i and all of its neighbours j
    x_i <- x_i + gamma sum_j W_ij (y_j - y_i)

    y_i is the public copy of x_i, which all neighbours hold. It starts as the initial model (in the paper, as 0). Q is
    the compressor of the run, as in ``simulate(..., compression=TopK(0.01))``; without a compressor, y_i = x_i. The
    run's optimizer computes the local steps. Messages depend on the gradient, so they cannot overlap its computation.

    gamma  consensus step size: 1 without compression; the stronger the compression, the smaller it should be. If only
           the largest 1 % of the elements are sent, the paper uses a tuned gamma of 0.04; its theorem 4 gives a safe
           value
    graph  neighbours of each worker and their weights W, as for :class:`~ddlsim.DPSGD`
    """

    gamma: Annotated[float, number(0.0, 1.0, above=True, hint=", e.g. 1.0 without compression")]
    graph: Mixing = "ring"

    @property
    def label(self) -> str:
        """Label for tables and plots: the step size and the graph."""
        return f"CHOCO-SGD ({self.gamma:g}, {describe(checked_graph(self.graph))})"

    def start(self, context: RunContext) -> None:
        """Start all workers and, without compression, note how fast they reach consensus."""
        matrix = mixing_matrix("CHOCOSGD", checked_graph(self.graph), len(context.workers))
        towards = self.gamma * (matrix - np.eye(len(matrix)))
        if context.compression is None and (said := agreement("CHOCO-SGD", np.eye(len(matrix)) + towards)):
            context.notes.append(said)
        neighbours = Neighbours(context, matrix, "CHOCOSGD")

        def step(worker: Worker) -> None:
            replica = neighbours.replicas[worker.rank]
            worker.params, replica.state = replica.after(worker.params, worker.drawn)
            replica.count()

        def mix(worker: Worker) -> None:
            public = neighbours.models(worker)
            weights = [1.0, *towards[worker.rank, list(public)].tolist()]
            worker.params = weighted_sum(worker.learner.plane, weights, [worker.params, *public.values()])

        local = [*gradient(context), OPTIMIZER, Op(ls.NOTE, follow=step)]
        mixing = [*neighbours.receive("{ended}"), Op(ls.STEP, follow=mix, number=ls.COMMON)]
        neighbours.go([*local, *neighbours.send(), *mixing])


class _Pairwise:
    """A strategy whose workers send their models to single neighbours in a graph."""

    graph: str | Graph

    def kept_models(self, n_workers: int, compressed: bool) -> float:
        """Return the number of models that each device keeps in addition: if messages are compressed, a copy of its own
        model as each neighbour has it, from which its messages differ, and one of each neighbour's model."""
        return compressed * 2.0 * max(map(len, neighbours(type(self).__name__, self.graph, n_workers)))


@checked
@dataclass(frozen=True)
class ADPSGD(_Pairwise):
    """AD-PSGD: asynchronous decentralised parallel SGD (Lian et al. 2018, arXiv:1710.06952, algorithm 1).

    While worker i computes a gradient at x_i', a copy of its model x_i, it averages x_i with the model of a random
    neighbour j. Then it applies the gradient:

    x_i, x_j <- (x_i + x_j) / 2   atomically;   x_i <- x_i - eta g_i(x_i')

    The graph must be bipartite, as in the paper. Workers on one side of the graph send their parameters and wait for
    the average. Workers on the other side reply while they compute and never wait, so there is no deadlock. The
    staleness of a gradient is the number of updates, by any worker, between the start of its computation and its
    application.

    graph  neighbours of each worker: "ring" (for an even number of workers), "bipartite" (edges between all even and
           all odd ranks), or a bipartite networkx graph whose nodes are the ranks
    """

    graph: Annotated[str | Graph, validated_by(check_graph)] = "bipartite"

    @property
    def label(self) -> str:
        """Label for tables and plots: the graph."""
        return f"AD-PSGD ({describe(self.graph)})"

    def updates(self, steps: int, n_workers: int) -> int:
        """Return the number of updates in `steps` steps of every worker: one per local step of each worker."""
        return steps * n_workers

    def start(self, context: RunContext) -> None:
        """Start all workers. Raises ConfigError for a graph that is not bipartite."""
        near = neighbours("ADPSGD", self.graph, len(context.workers))
        asks = bipartition("ADPSGD", self.graph, near)
        _Pairs(context, [partners if asks[rank] else [] for rank, partners in enumerate(near)])


class _Pairs(_Peers):
    """Workers of a bipartite graph. In every step, those with `partners` request an average with a random one."""

    def __init__(self, context: RunContext, partners: Sequence[Sequence[int]]) -> None:
        super().__init__(context, "ADPSGD")
        self.partners = partners
        self.sent: dict[int, Message] = {}
        asking = [*self.encode(), Op(ls.DISPATCH, "average with", number=1)]
        ops = [
            Op(ls.CHOOSE, number=len(asking)),
            *asking,
            *gradient(context),
            Op(ls.JOIN, "averaging", waits="the average with its neighbour"),
            *([Op(ls.ASK, follow=self._come)] if self.packs else []),
            Op(ls.WORK, "decode"),
            OPTIMIZER,
            Op(ls.STEP, follow=self._step, number=ls.AGED),
        ]
        samples = context.workers[0].samples_per_step
        self.run(ops, samples, choose=self._choose, served=self._average, batch=0)

    def _choose(self, worker: Worker) -> int:
        partners = self.partners[worker.rank]
        return partners[int(self.draws[worker.rank].integers(len(partners)))] if partners else -1

    def _packed(self, worker: Worker) -> None:
        to = self.lanes.chosen(worker)
        message = self.sent[worker.rank] = self.messages.model(worker, worker.params, to=to)
        self.lanes.set_message(worker, message.seconds, message.sizes)

    def _average(self, worker: Worker, rank: int, staleness: int, complete: bool) -> None:
        """Average at the partner, and send the average back (compressing it takes none of the partner's compute time).

        While a worker waits for the average, no other worker changes its parameters, so both models can be set at once.
        """
        partner, message, mine = self.context.workers[rank], self.sent[worker.rank], worker.params
        back, theirs = self.messages.model(partner, partner.params, to=worker.rank), partner.params
        partner.params = 0.5 * (message.value + theirs)
        worker.params = partner.params if back.value is theirs else 0.5 * (mine + back.value)
        self.sent[worker.rank] = back
        self.lanes.set_service(worker, back.seconds)
        self.lanes.set_answers(worker, back.sizes)

    def _come(self, worker: Worker) -> None:
        if (back := self.sent.get(worker.rank)) is not None:
            self.lanes.set_seconds(worker, "decode", self.messages.decode_seconds(worker, back))


class _Push(NamedTuple):
    """Parameters and their weight, in flight."""

    message: Message
    weight: float


@checked
@dataclass(frozen=True)
class GossipSGD(_Pairwise):
    """GoSGD: asynchronous SGD with sum-weight gossip (Blot et al. 2016, arXiv:1611.09726).

    In every step, a worker merges the models that have arrived into its own and takes a local step. Then, with
    probability p, it halves the weight of its model and pushes the model and the weight to a random neighbour. Workers
    do not wait for each other, but a worker does not push again until its previous push has been delivered. Merges and
    pushes preserve the weighted sum of all models, including those in flight.

    probability  p, the probability that a worker pushes its model after a step; above 0 and at most 1
    graph        possible receivers of each worker: "complete" (any worker, as in the paper), "ring", "bipartite", or a
                 networkx graph whose nodes are the ranks
    """

    probability: Annotated[float, number(0.0, 1.0, above=True, hint=" (0.1 is 10 %)")] = 0.1
    graph: Annotated[str | Graph, validated_by(check_graph)] = "complete"

    @property
    def label(self) -> str:
        """Label for tables and plots: probability and graph."""
        return f"gossip SGD (p = {self.probability:g}, {describe(self.graph)})"

    def updates(self, steps: int, n_workers: int) -> int:
        """Return the number of updates in `steps` steps of every worker: one per local step of each worker."""
        return steps * n_workers

    def start(self, context: RunContext) -> None:
        """Start all workers."""
        Gossip(self, context)


class Gossip(_Peers):
    """Workers that occasionally push to one of their neighbours, `near`.

    weights   weight of each worker's parameters
    inbox     received pushes of each worker
    outgoing  each worker's push in flight
    """

    def __init__(self, strategy: GossipSGD, context: RunContext) -> None:
        super().__init__(context, "GossipSGD")
        n = len(context.workers)
        self.probability, self.near = strategy.probability, neighbours("GossipSGD", strategy.graph, n)
        self.weights, self.outgoing = [1.0 / n] * n, dict[int, _Push]()
        self.inbox, self._coming = ([list[_Push]() for _ in range(n)] for _ in range(2))
        pushing = [Op(ls.JOIN, "push", waits="its last push"), *self.encode(), Op(ls.DISPATCH, "push to")]
        ops = [
            Op(ls.ASK, follow=self._come),
            Op(ls.WORK, "decode"),
            Op(ls.NOTE, follow=self._merge),
            *gradient(context),
            OPTIMIZER,
            Op(ls.STEP, follow=self._step, number=ls.EACH),
            Op(ls.CHOOSE, number=len(pushing)),
            *pushing,
        ]
        notes = [f"in each step, a rank pushes its model with probability {self.probability:g}"]
        samples = context.workers[0].samples_per_step
        self.run(ops, samples, choose=self._choose, served=self._arrived, batch=0, notes=notes)

    def _choose(self, worker: Worker) -> int:
        near, draws = self.near[worker.rank], self.draws[worker.rank]
        return near[int(draws.integers(len(near)))] if near and draws.random() < self.probability else -1

    def _come(self, worker: Worker) -> None:
        """Begin to merge all received messages."""
        coming, self.inbox[worker.rank] = self.inbox[worker.rank], []
        self._coming[worker.rank] = coming
        seconds = sum(self.messages.decode_seconds(worker, push.message) for push in coming)
        self.lanes.set_seconds(worker, "decode", seconds)

    def _merge(self, worker: Worker) -> None:
        """x <- (w x + w_s x_s) / (w + w_s);  w <- w + w_s   for all messages taken."""
        for push in self._coming[worker.rank]:
            weight = self.weights[worker.rank]
            total = weight + push.weight
            shares = [weight / total, push.weight / total]
            worker.params = weighted_sum(worker.learner.plane, shares, [worker.params, push.message.value])
            self.weights[worker.rank] = total

    def _packed(self, worker: Worker) -> None:
        """w <- w / 2;  send (x, w), as they are now."""
        self.weights[worker.rank] /= 2.0
        message = self.messages.model(worker, worker.params, to=self.lanes.chosen(worker))
        self.outgoing[worker.rank] = _Push(message, self.weights[worker.rank])
        self.lanes.set_message(worker, message.seconds, message.sizes)

    def _arrived(self, worker: Worker, rank: int, staleness: int, complete: bool) -> None:
        self.inbox[rank].append(self.outgoing.pop(worker.rank))
