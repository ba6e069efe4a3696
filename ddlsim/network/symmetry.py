"""Collectives on large symmetric networks, simulated for one rank of each class.

All ranks enter at one instant, so what happens to a message depends only on its size and latency, the steps that send
and receive it, and the channels that it crosses. Classes of messages, steps and channels that no such difference
separates are found by refining coarse classes until nothing changes (as in tests of graph isomorphism). Members of a
class then have equal times and rates: the max-min fair allocation is unique, so it is the same for all members.

A channel is *open* if the messages that can cross it at the same time cannot fill it, given the narrowest channel of
each. Open channels have no influence on rates, so they separate no classes: the machines of a ring stay alike even
where it crosses a spine. The classes themselves form a network and programs, in which each class is a single channel,
thread or message. The kernel simulates these with the same additions as the members, which share its results.

Classes are compared by hashes of 64 bits. That different members get the same hash is not ruled out, but unlikely: its
probability is below 1e-7 for a million different messages (birthday problem).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ddlsim.cluster.cluster import Routes
from ddlsim.network import kernel
from ddlsim.network import state as st
from ddlsim.network.engine import Engine, Interconnect
from ddlsim.network.program import Program
from ddlsim.network.state import Bools, Floats, Ints
from ddlsim.ties import distinct

_Words = NDArray[np.uint64]
_OPEN = 1.0 - 1e-9  # share of a channel's capacity that messages on open channels can use at most
_PASSES = 16  # refinements after which the search for classes gives up
_ALIKE = 4  # least number of messages per class
_BOUNDLESS = 1e300  # bytes/s, capacity of open channels


class Books(NamedTuple):
    """Traffic counted by the kernel: bytes (as two words) and busy s of each channel, and sums of all messages."""

    nbytes: Floats  # (2, n_channels)
    busy: Floats
    sums: Floats  # (3, 2) bytes issued, bytes times hops, and bytes delivered, as two words each
    n_messages: int
    n_parts: int  # of the log


def course(engine: Engine, instances: list[int], before: Books, now: float) -> tuple[list[Floats], Books] | None:
    """Return the course of collectives that all ranks enter now, on an idle network; None if few ranks are alike.

    The course is, per collective, when each of its ranks ends, in s, and the traffic counted when the network is idle
    again.
    """
    members = _members(engine, instances)
    classes = None if members is None else _classes(members, before, engine.net.channels["capacity"])
    return None if members is None or classes is None else _simulated(engine, members, classes, before, now)


@dataclass(frozen=True, eq=False)
class _Members:
    """The programs of all collectives, numbered throughout. `thread` and `step` are the numbers of the first ones of
    each collective; a message crosses the channels ``channel[hop]`` with ``message[hop]`` its number."""

    shapes: list[Program]
    threads: Ints  # (n_collectives + 1,) number of the first thread of each
    steps: Ints
    first_step: Ints  # (n_threads,) -1: none
    following: Ints  # (n_steps,) next step, -1: none
    repeat: Ints  # (n_steps,)
    thread: Ints  # (n_steps,) to which it belongs
    order: Ints  # (n_steps,) number of steps of the thread before it
    sender: Ints  # (n_messages,) step that sends it
    receiver: Ints
    turn: Ints  # (n_messages,) number of messages that the step sends before it
    size: Floats  # (n_messages,) bytes
    reduced: Floats  # (n_messages,) s per byte to reduce it
    routes: Any  # (n_messages,) records ROUTE
    node: Ints  # (n_threads,) -1: unknown
    message: Ints  # (n_hops,)
    channel: Ints  # (n_hops,)
    is_open: Bools  # (n_channels,)


def _members(engine: Engine, instances: Sequence[int]) -> _Members | None:
    """Return the programs of collectives; None if their messages depend on more than classes express."""
    net, columns = engine.net, dict[str, list[NDArray[Any]]]()
    counts, overheads = net.counts, net.nodes["send_overhead"].any() or net.nodes["recv_overhead"].any()
    if counts.shaped or counts.split or counts.is_fifo or counts.log_on or counts.has_headers or overheads:
        return None
    shapes = [engine.shape(instance) for instance in instances]
    threads = np.cumsum([0, *(shape.n_ranks * shape.n_lanes for shape in shapes)])
    steps = np.cumsum([0, *(len(shape.steps["next"]) for shape in shapes)])
    for i, shape in enumerate(shapes):
        begin = np.flatnonzero(shape.first_step >= 0)[:1]
        table = net.programs["thread"][engine.instance_program[instances[i]]]
        base = net.tables[table + begin] - shape.first_step[begin]
        if not len(begin) or shape.messages["stride"].any():
            return None
        first = int(net.steps["send"][base[0]])
        rows = net.messages[first : first + shape.n_messages]
        sends = shape.steps["send_end"] - shape.steps["send"]
        sender = np.repeat(np.arange(len(sends)), sends)
        node = np.full(shape.n_ranks * shape.n_lanes, -1)
        node[shape.messages["src"]], node[shape.messages["dst"]] = rows["source"], rows["target"]
        thread = np.empty(len(sends), dtype=np.int64)
        thread[sender], thread[shape.messages["step"]] = shape.messages["src"], shape.messages["dst"]
        turn = np.arange(len(sender)) - shape.steps["send"][sender]
        numbers: dict[str, NDArray[Any]] = {"first_step": shape.first_step, "following": shape.steps["next"]}
        numbers |= {"sender": sender, "receiver": shape.messages["step"]}
        plain = {"repeat": shape.steps["repeat"], "node": node, "turn": turn, "routes": net.routes[rows["route"]]}
        plain["size"] = net.instances["nbytes"][instances[i]] * net.weights[rows["weight"]]
        plain["reduced"] = rows["reduce"] * net.nodes["reduce_time"][rows["target"]]
        plain["thread"] = thread + threads[i]
        plain |= {name: np.where(column < 0, -1, column + steps[i]) for name, column in numbers.items()}
        for name, column in plain.items():
            columns.setdefault(name, []).append(column)
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    routes, order = joined["routes"], np.zeros(steps[-1], dtype=np.int64)
    n_hops = (routes["last"] - routes["first"]).astype(np.int64)
    if not n_hops.all() or not joined["size"].all():
        return None
    current, depth = joined["first_step"][joined["first_step"] >= 0], 0
    while len(current):
        order[current], depth = depth, depth + 1
        current = joined["following"][current]
        current = current[current >= 0]
    message = np.repeat(np.arange(len(routes)), n_hops)
    within = np.arange(len(message)) - np.repeat(np.cumsum(n_hops) - n_hops, n_hops)
    channel = net.hops[routes["first"][message] + within].astype(np.int64)
    is_open = _open(net.channels["capacity"], message, channel, joined["sender"], joined["thread"])
    hops = {"message": message, "channel": channel, "is_open": is_open}
    return _Members(shapes, threads, steps, order=order, **hops, **joined)


def _open(capacity: Floats, message: Ints, channel: Ints, sender: Ints, thread: Ints) -> Bools:
    """Return which channels cannot be filled: each thread is in one step at a time."""
    n, most = len(capacity), np.full(len(sender), np.inf)
    np.minimum.at(most, message, capacity[channel])
    steps, which = np.unique(sender[message] * n + channel, return_inverse=True)
    rates = np.bincount(which, most[message])
    threads, which = np.unique(thread[steps // n] * n + steps % n, return_inverse=True)
    largest = np.zeros(len(threads))
    np.maximum.at(largest, which, rates)
    used: Bools = np.bincount(threads % n, largest, n) < _OPEN * capacity
    return used


@dataclass(frozen=True, eq=False)
class _Classes:
    """Classes of threads, steps, messages and channels: the first member of each, and the class of every member. An
    open channel is in a class of those that the same classes of messages cross."""

    threads: tuple[Ints, Ints]
    steps: tuple[Ints, Ints]
    messages: tuple[Ints, Ints]
    channels: tuple[Ints, Ints]  # of the channels in use, otherwise -1


def _classes(of: _Members, before: Books, capacity: Floats) -> _Classes | None:
    """Return the coarsest classes whose members behave alike; None if there are many or they form no network."""
    n_channels, books = len(capacity), (*before.nbytes, before.busy)
    tight = ~of.is_open[of.channel]
    message, channel = of.message[tight], of.channel[tight]
    hop = np.arange(len(message)) - np.searchsorted(message, message)
    collective = np.repeat(np.arange(len(of.shapes)), np.diff(of.threads))
    facts = [of.routes[name] for name in ("latency", "handled", "occupies")]
    plain_message = _mix(of.turn, of.size, of.reduced, *facts)
    plain_step = _mix(collective[of.thread], of.order, of.repeat)
    plain_channel = _mix(capacity, *books)
    steps, channels, threads = plain_step, plain_channel, _mix(collective)
    n_before = 0
    for _ in range(_PASSES):
        crossed = _sums(len(plain_message), message, _mix(channels[channel], hop))
        messages = _mix(plain_message, steps[of.sender], steps[of.receiver], crossed)
        channels = _mix(plain_channel, _sums(n_channels, channel, _mix(messages[message], hop)))
        sent = _sums(len(steps), of.sender, _mix(messages))
        steps = _mix(plain_step, sent, _sums(len(steps), of.receiver, _mix(messages)))
        threads = _mix(collective, _sums(len(threads), of.thread, _mix(steps, of.order)))
        steps = _mix(steps, threads[of.thread])
        by_message = _numbered(messages)  # the other classes follow from those of messages
        n = len(by_message[0])
        if n == n_before or _ALIKE * n > len(messages):
            break
        n_before = n
    if n != n_before:
        return None
    used = _sums(n_channels, of.channel, _mix(by_message[1][of.message]))  # by which classes open channels are crossed
    kinds = np.where(of.is_open, _mix(used, *books), channels)
    in_use = np.flatnonzero(np.bincount(of.channel, minlength=n_channels))
    firsts, which = _numbered(kinds[in_use])
    channel_class = np.full(n_channels, -1)
    channel_class[in_use] = which
    classes = _Classes(_numbered(threads), _numbered(steps), by_message, (in_use[firsts], channel_class))
    return classes if _is_network(of, classes) else None


def _is_network(of: _Members, classes: _Classes) -> bool:
    """Return whether each step sends and receives, and each channel carries, at most one message of a class."""
    (_, steps), (firsts, messages), (_, channels) = classes.steps, classes.messages, classes.channels
    size = np.bincount(messages)
    for step in (of.sender, of.receiver):
        if (np.bincount(steps)[steps[step[firsts]]] != size).any():
            return False
    crossings = np.sort(messages[of.message] * len(channels) + of.channel)
    return bool((crossings[1:] > crossings[:-1]).all())


def _simulated(
    engine: Engine, of: _Members, classes: _Classes, before: Books, now: float
) -> tuple[list[Floats], Books] | None:
    """Return the course of collectives, given that of the classes of their ranks."""
    firsts, class_of = classes.messages
    channels, channel_class = classes.channels
    pairs = distinct(class_of[of.message] * len(channels) + channel_class[of.channel])
    offsets = np.searchsorted(pairs, np.arange(len(firsts) + 1) * len(channels))
    threads, thread_class = classes.threads
    routes = Routes(offsets, pairs % len(channels))
    network = _ClassNetwork(engine, channels, of.is_open, np.maximum(of.node[threads], 0), routes)
    part = Engine(cast(Interconnect, network))
    part.routes_of, part.pairs_of = [[]], [[]]
    part.net.counts.replay_rounds_code = engine.net.counts.replay_rounds_code  # the same rounds are replayed
    used = channel_class >= 0
    words = ("nbytes", "nbytes_low")
    for name, column in zip((*words, "busy"), (*before.nbytes, before.busy), strict=True):
        part.net.channels[name] = column[channels]
    ids, starts = list[int](), list[int]()
    for i in range(len(of.shapes)):
        shape, first, flows = _program(of, classes, i)
        ids.append(part.execution(part.add(shape, first + np.arange(shape.n_ranks), 0, flows), 1.0, 0))
        starts.append(first)
    n_ranks = np.diff([*starts, len(threads)])
    kernel.join(part.table, np.repeat(ids, n_ranks), np.concatenate([np.arange(n) for n in n_ranks]), now)
    ends, start_of = np.full(len(threads), np.nan), dict(zip(ids, starts, strict=True))
    while (status := kernel.advance(part.table, np.inf)) != st.IDLE:
        if status == st.FULL:
            part.make_room()
        n, part.net.counts.n_out = part.net.counts.n_out, 0
        for number, rank in part.net.out[:n][["id", "rank"]].tolist():
            ends[start_of[number] + rank] = part.net.reals.now
    if ends.max() != part.net.reals.now:  # NaN: not ended
        return None
    by_thread = np.split(ends[thread_class], of.threads[1:-1])
    by_rank = [rows.reshape(-1, shape.n_ranks).max(axis=0) for rows, shape in zip(by_thread, of.shapes, strict=True)]
    nbytes, busy = before.nbytes.copy(), before.busy.copy()
    nbytes[:, used] = np.stack([part.net.channels[name][channel_class[used]] for name in words])
    busy[used] = part.net.channels["busy"][channel_class[used]]
    repeat = of.repeat[of.sender]
    number, hops = np.bincount(class_of, repeat), np.bincount(class_of, repeat * of.routes["n_hops"])
    times = (number, hops, number)
    sums = [_added(words, times[i], of.size[firsts]) for i, words in enumerate(before.sums)]
    return by_rank, Books(nbytes, busy, np.array(sums), before.n_messages + int(number.sum()), before.n_parts)


def _program(of: _Members, classes: _Classes, i: int) -> tuple[Program, int, Ints]:
    """Return the program of the classes of a collective, the number of its first thread class, and the numbers of the
    classes of its messages."""
    (threads, thread_class), (steps, step_class), (messages, _) = classes.threads, classes.steps, classes.messages
    own_threads = np.flatnonzero((threads >= of.threads[i]) & (threads < of.threads[i + 1]))
    own_steps = np.flatnonzero((steps >= of.steps[i]) & (steps < of.steps[i + 1]))
    first, first_step = int(own_threads[0]), int(own_steps[0])
    step, thread = steps[own_steps], threads[own_threads]
    senders, receivers = step_class[of.sender[messages]], step_class[of.receiver[messages]]
    flows = np.flatnonzero((senders >= first_step) & (senders < first_step + len(step)))
    flows = flows[np.lexsort((of.turn[messages[flows]], senders[flows]))]
    senders, receivers = senders[flows] - first_step, receivers[flows] - first_step
    one, numbers, n = messages[flows], np.arange(len(flows)), np.arange(len(step) + 1)
    received = np.argsort(receivers, kind="stable")
    of_thread = thread_class[of.thread[step]] - first
    send, recv = np.searchsorted(senders, n), np.searchsorted(receivers[received], n)

    def classes_of(numbers: Ints) -> Ints:
        return np.where(numbers < 0, -1, step_class[numbers] - first_step)

    columns = {"next": classes_of(of.following[step]), "repeat": of.repeat[step]}
    columns |= {"send": send[:-1], "send_end": send[1:], "recv": recv[:-1], "recv_end": recv[1:]}
    sent: dict[str, Ints] = {"src": of_thread[senders], "dst": of_thread[receivers], "step": receivers}
    sent["stride"] = np.zeros_like(numbers)
    sent |= dict.fromkeys(("weight", "route", "counter"), numbers)
    sent["reduce"] = (of.reduced[one] > 0.0).astype(np.int64)
    program = Program(
        n_ranks=len(thread),
        n_lanes=1,
        first_step=_int32(classes_of(of.first_step[thread])),
        steps={name: _int32(column) for name, column in columns.items()},
        messages={name: _int32(column) for name, column in sent.items()},
        recv_message=_int32(received),
        weights=of.size[one],
        headers=np.zeros(len(flows)),
        latency=of.routes["latency"][one],
        handled=of.routes["handled"][one],
        sends_bound=len(flows),
    )
    return program, first, flows


class _ClassNetwork:
    """The channels of classes, each a link, as a network of nodes for the classes of threads."""

    splits, link_seed, details = False, None, None

    def __init__(self, engine: Engine, channels: Ints, is_open: Bools, nodes: Ints, routes: Routes) -> None:
        n, rows = len(channels), engine.net.nodes[nodes]
        self.channel_capacity = np.where(is_open[channels], _BOUNDLESS, engine.net.channels["capacity"][channels])
        self.link_channel, self.link_latency = np.arange(n), np.zeros(n)
        self.send_overhead, self.recv_overhead = rows["send_overhead"], rows["recv_overhead"]
        self.reduce_time = rows["reduce_time"]
        self._routes = routes

    def split_routes(self, src: Ints, dst: Ints, flows: Ints) -> Routes:
        """Return the routes of classes of messages, whose numbers are `flows`."""
        first, n_links = self._routes.offsets[flows], np.diff(self._routes.offsets)[flows]
        offsets = np.concatenate([[0], np.cumsum(n_links)])
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], n_links)
        return Routes(offsets, self._routes.links[np.repeat(first, n_links) + within])


# ---------------------------------------------------------------- numbers


def _mix(*columns: NDArray[Any]) -> _Words:
    """Return a hash of corresponding items."""
    total: _Words = np.full(len(columns[0]), 0x243F6A8885A308D3, dtype=np.uint64)
    for column in columns:
        words = np.ascontiguousarray(column)
        if words.dtype == np.float64:
            words = (words + 0.0).view(np.uint64)  # one zero only
        total = (total ^ words.astype(np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
        total ^= total >> np.uint64(29)
        total *= np.uint64(0x94D049BB133111EB)
        total ^= total >> np.uint64(32)
    return total


def _sums(n: int, places: Ints, words: _Words) -> _Words:
    """Return the sum of the words at each of `n` places, which is a hash of them in any order."""
    total = np.zeros(n, dtype=np.uint64)
    np.add.at(total, places, words)
    return total


def _numbered(words: _Words) -> tuple[Ints, Ints]:
    """Return the first item of each class of equal words, and the class of each item; classes in the order of these."""
    _, first, which = np.unique(words, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return first[order], place[which.reshape(-1)]


def _added(before: Floats, times: NDArray[Any], sizes: Floats) -> tuple[float, float]:
    """Return the exact sum of two words and of sizes, each a number of times, rounded to two words."""
    terms = [word.as_integer_ratio() for word in (*before.tolist(), *sizes.tolist())]
    scale = max(divisor for _, divisor in terms)  # a power of two, like all divisors
    numbers = [1, 1, *times.astype(np.int64).tolist()]
    total = sum(n * number * (scale // divisor) for n, (number, divisor) in zip(numbers, terms, strict=True))
    nearest, divisor = (total / scale).as_integer_ratio()
    return total / scale, (total * divisor - nearest * scale) / (scale * divisor)


def _int32(numbers: NDArray[Any]) -> NDArray[np.int32]:
    return numbers.astype(np.int32)
