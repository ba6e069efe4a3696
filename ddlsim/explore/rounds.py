"""A collective, round by round: the data on every rank after each round, and its times on a cluster."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ddlsim.cluster import Cluster, load_cluster
from ddlsim.cluster.details import route_overhead
from ddlsim.collectives import Collective, Schedule, State, build, cost, states
from ddlsim.collectives.lookup import bound_arguments, find, parameters_of
from ddlsim.collectives.states import beginning
from ddlsim.errors import ConfigError
from ddlsim.explore.jobs import Progress
from ddlsim.imports.nccl_tests import bus_factor
from ddlsim.network import schedule_time
from ddlsim.readable import count, seconds
from ddlsim.report.animation import messages_of
from ddlsim.schema import refuse_code
from ddlsim.units import si

#: limits of what is displayed
MOST_RANKS, MOST_CHUNKS, MOST_ROUNDS = 64, 256, 1000


@dataclass(frozen=True)
class Question:
    """The collective to display.

    algorithm   a name, optionally with arguments: "parameter_server(4)"
    n_segments  number of segments of pipelined algorithms; None: 512 KiB each
    nbytes      buffer per rank, such as "100 MB"
    """

    cluster: str
    kind: str = "all_reduce"
    algorithm: str = "ring"
    n_ranks: int = 8
    nbytes: str = "100 MB"
    n_segments: int | None = 4


@dataclass(frozen=True)
class ClosedForm:
    """A textbook result: the `formula`, its `time` in s, and whether the ranks' network satisfies its assumptions.

    alpha, beta  latency (s) and time per byte (s) of the slowest pair of ranks
    """

    formula: str
    time: float
    alpha: float
    beta: float
    uniform: bool


@dataclass(frozen=True)
class Played:
    """A schedule with its states and times.

    states         before the first round and after each
    times          (n_rounds + 1,) time in s at which all ranks have finished the first n rounds, if no more followed
    closed_form    None if there is none
    bus_bandwidth  bytes/s as reported by nccl-tests, comparable with link bandwidths; nan if nothing is sent
    """

    question: Question
    schedule: Schedule
    states: Sequence[State]
    times: Sequence[float]
    closed_form: ClosedForm | None
    bus_bandwidth: float

    @property
    def n_rounds(self) -> int:
        """Number of rounds."""
        return len(self.states) - 1


def takes_segments(algorithm: str, kind: str) -> bool:
    """Return whether the number of segments of an algorithm can be set."""
    refuse_code(algorithm, "algorithm")
    function = find(algorithm, kind)
    return "n_segments" in set(parameters_of(function)) - set(bound_arguments(function))


def collective(question: Question) -> str | Collective:
    """Return the algorithm as an argument of :func:`ddlsim.collective_time`. Raises ConfigError for an unknown one."""
    refuse_code(question.algorithm, "algorithm")
    if question.n_segments is None or not takes_segments(question.algorithm, question.kind):
        return question.algorithm
    return functools.partial(find(question.algorithm, question.kind), n_segments=question.n_segments)


def play(question: Question, progress: Progress) -> Played:
    """Return the states and times of a collective. Raises ConfigError if it is unknown or too large."""
    if question.n_ranks > MOST_RANKS:
        raise ConfigError(f"ranks = {question.n_ranks}: must be at most {MOST_RANKS} to show every rank")
    cluster = load_cluster(question.cluster)
    available = len(cluster.workers)
    if not 1 <= question.n_ranks <= available:
        rule = f"must be 1 to {available}, the number of workers of cluster {cluster.name!r}"
        raise ConfigError(f"ranks = {question.n_ranks}: {rule}")
    nodes = cluster.workers[: question.n_ranks].tolist()
    size = si(question.nbytes, "bytes")
    hosts = cluster.host_of[nodes].tolist()
    schedule = build(collective(question), question.n_ranks, size, hosts, question.kind, (cluster, nodes))
    if schedule.n_chunks > MOST_CHUNKS * schedule.copies:
        what = f"{schedule.n_chunks} chunks, more than the {MOST_CHUNKS} that can be shown"
        hint = "use fewer segments, or a smaller size"
        raise ConfigError(f"{question.algorithm} cuts {question.nbytes} in {what}; {hint}")
    played = list(islice(states(schedule), MOST_ROUNDS + 2))
    if len(played) > MOST_ROUNDS + 1:
        raise ConfigError(f"the schedule has more than {MOST_ROUNDS} rounds; use fewer segments")
    times = [0.0]
    for n_rounds in range(1, len(played)):
        progress.check()
        progress.update(n_rounds / len(played), f"round {n_rounds} of {len(played) - 1}")
        times.append(schedule_time(cluster, beginning(schedule, n_rounds), nodes, size))
    bus = bus_factor(question.kind, question.n_ranks) * size / times[-1] if times[-1] > 0.0 else np.nan
    return Played(question, schedule, played, times, closed_form(question, cluster, nodes, size), float(bus))


def closed_form(question: Question, cluster: Cluster, nodes: Sequence[int], nbytes: float) -> ClosedForm | None:
    """Return the closed form of an algorithm without arguments, with the slowest pair's latency and bandwidth."""
    kind = "" if question.kind == "all_reduce" else f"{question.kind}_"
    function: Callable[..., float] | None = getattr(cost, f"{kind}{question.algorithm}", None)
    if function is None or len(nodes) < 2:
        return None
    alphas, betas = zip(*_pairs(cluster, nodes), strict=True)
    values = {"n_ranks": len(nodes), "nbytes": nbytes, "alpha": max(alphas), "beta": max(betas), "n_servers": 1}
    values |= {"gamma": float(cluster.reduce_time[nodes].max()), "n_segments": question.n_segments or 1}
    parameters = inspect.signature(function).parameters
    if not set(parameters) <= set(values):
        return None  # hierarchies and tori have two networks, not those of a pair
    try:
        time = function(**{name: values[name] for name in parameters})
    except ConfigError:  # exact only for powers of two
        return None
    uniform = np.ptp(alphas) <= 1e-9 * max(alphas) and np.ptp(betas) <= 1e-9 * max(betas)
    formula = (inspect.getdoc(function) or "").splitlines()[0].rstrip(".")
    return ClosedForm(formula, time, max(alphas), max(betas), bool(uniform))


def _pairs(cluster: Cluster, nodes: Sequence[int]) -> Iterator[tuple[float, float]]:
    """Yield latency (s) and time per byte (s) between each two ranks, on an idle network."""
    src, dst = (grid.ravel() for grid in np.meshgrid(nodes, nodes, indexing="ij"))
    routes = cluster.split_routes(src[src != dst], dst[src != dst])
    src, dst = src[src != dst], dst[src != dst]
    threads = route_overhead(cluster.details, routes)
    for i, (start, end) in enumerate(zip(routes.offsets[:-1], routes.offsets[1:], strict=True)):
        links, share = routes.links[start:end], routes.share[start:end]
        overhead = float(cluster.send_overhead[src[i]] + cluster.recv_overhead[dst[i]] + threads[i])
        slowest = float((cluster.channel_capacity[cluster.link_channel[links]] / share).min())
        yield overhead + float(share @ cluster.link_latency[links]), 1.0 / slowest


def in_words(played: Played, number: int) -> str:
    """Describe round `number` in a sentence."""
    state = played.states[number]
    done, n_ranks = int(state.done.sum()), len(state.done)
    status = f"{'every rank is' if done == n_ranks else f'{done} of {n_ranks} ranks are'} complete"
    if not number:
        return f"Before the first round: {status}."
    sent = messages_of(state)
    most = max(len(chunks) for *_, chunks in sent) if sent else 0
    per_message = "no chunk" if not most else "a chunk" if most == 1 else f"up to {most} chunks"
    added = sum(added for _, _, added, _ in sent)
    how = "added" if added == len(sent) else "overwritten" if not added else "partly added, partly overwritten"
    took = played.times[number] - played.times[number - 1]
    move = f"{count(len(sent), 'message')} of {per_message}{f', {how}' if state.reduces else ''}"
    ends = f"ends after {seconds(played.times[number])}"
    return f"Round {number} of {played.n_rounds}: {move}; {seconds(took)}, {ends}; {status}."
