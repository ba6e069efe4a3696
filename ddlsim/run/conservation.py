"""Conservation checks of every result: bytes, seconds and updates must add up (docs/models/network.md, Accounts).

Each check compares numbers that different parts of the program have counted. In addition, no run may be faster than
computing without communication, unless there is a known cause (:func:`superlinear_causes`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.cluster.cluster import Bools, Floats
from ddlsim.errors import ConfigError, ConservationError
from ddlsim.network import Accounts, Network
from ddlsim.run.notes import superlinear_causes
from ddlsim.runtime.loop import Loop
from ddlsim.runtime.recorder import Recorder

if TYPE_CHECKING:
    from ddlsim.run.result import Result


#: relative tolerance; rounding errors of sums of millions of numbers are smaller
ROUNDING = 1e-9


def check_result(result: Result, loop: Loop, n_samples: int) -> None:
    """Raise :class:`ConservationError` unless the `result` of a run of `loop` adds up.

    Raises ConfigError if it does not because collectives of known cost, which bypass the network, leave no capacity for
    simulated messages.

    n_samples  samples in the updates, as counted by the rule that ends the run

    If a run shares its network with others, bytes are checked after all have ended (:func:`check_network`).
    """
    check_workers(result.recorder, result.simulated_time)
    _check_updates(result, n_samples)
    accounts, carried = loop.network.accounts(), (result.channel_nbytes, result.channel_busy, result.simulated_time)
    shared = loop.network.is_shared
    if not shared:
        _equal("clock: the network has run until", loop.network.now, "the run until", result.simulated_time, "s")
        _conserved(accounts)
        sent, asked = accounts.issued, loop.nbytes_asked
        if loop.network.n_live == 0 or sent > asked:  # a collective in progress has more to send
            _equal("the network: bytes sent", sent, "asked for", asked, "bytes")
    try:
        if shared:
            _check_room(result.cluster, _of_links(accounts, result.cluster.n_channels), *carried)
        else:
            check_links(result.cluster, accounts, *carried)
    except ConservationError as error:
        if loop.stands_for:
            raise ConfigError(
                "tensor groups are executed as single ranks and do not contend with other simulated messages, so "
                f"their combined traffic exceeds the capacity of a link ({str(error).partition(_REPORT)[0]}); use "
                "fewer micro-batches or workers, so that all ranks are executed"
            ) from None
        if not (loop.beside.busy.any() and accounts.busy.any()):
            raise
        raise ConfigError(
            "cost: fixed-time collectives do not contend with simulated messages, so their combined traffic exceeds "
            f"the capacity of a link ({str(error).partition(_REPORT)[0]}); use cost='simulated'"
        ) from None
    if result.busy is not None and not shared:
        seconds, busy = result.busy.seconds(), result.channel_busy
        off = np.abs(seconds - busy) > ROUNDING * result.simulated_time
        _links(result.cluster, off, "busy in its timeline", seconds, "in all", busy, "s")


def check_network(cluster: Cluster, network: Network) -> None:
    """Raise :class:`ConservationError` unless the traffic of all jobs on a network adds up.

    The bytes on the links of `cluster` must equal the sum over all jobs; channels after those belong to background
    traffic.
    """
    accounts, n = network.accounts(), cluster.n_channels
    traffic = [network.traffic_of(client) for client in network.clients]
    _equal("all clients: bytes sent", sum(sent for _, sent, _ in traffic), "the network", accounts.issued, "bytes")
    _conserved(accounts)
    nbytes = np.sum([carried for carried, _, _ in traffic], axis=0)
    off = np.abs(nbytes - accounts.nbytes) > ROUNDING * np.maximum(accounts.issued, 1.0)
    _links(cluster, off[:n], "carried", accounts.nbytes[:n], "but all clients have put on it", nbytes[:n], "bytes")
    of_links = _of_links(accounts, n)
    check_links(cluster, of_links, of_links.nbytes, of_links.busy, network.now)


def _of_links(accounts: Accounts, n: int) -> Accounts:
    names = ("nbytes", "busy", "passed", "capacity", "burst")
    return accounts._replace(**{name: getattr(accounts, name)[:n] for name in names})


def _conserved(accounts: Accounts) -> None:
    """Raise :class:`ConservationError` unless all bytes sent are delivered, on a link, or still ahead."""
    arrived = accounts.delivered + accounts.in_flight
    _equal("the network: bytes sent", accounts.issued, "delivered and in flight", arrived, "bytes")
    carried = float(accounts.nbytes.sum()) + accounts.left_crossings
    _equal("all links: bytes sent x links", accounts.issued_crossings, "carried and still ahead", carried, "bytes")


def check_links(cluster: Cluster, accounts: Accounts, nbytes: Floats, busy: Floats, seconds: float) -> None:
    """Raise :class:`ConservationError` unless every channel has carried at most its capacity, in a run of `seconds`.

    nbytes, busy  (n_channels,) bytes carried and s during which each carried something
    """
    slack = ROUNDING * seconds
    _check_room(cluster, accounts, nbytes, busy, seconds)
    if not accounts.passed.any():
        return
    idle = np.maximum(seconds - busy, 0.0)
    bucket = accounts.burst > 0.0
    filled = np.where(bucket, accounts.burst + accounts.capacity * (idle + slack), 0.0)
    # a link without a bucket can pass on bytes released at once by other buckets on the route
    held = np.where(bucket, filled, float(accounts.passed[bucket].sum())) * (1.0 + ROUNDING)
    _links(cluster, accounts.passed > held, "passed at once", accounts.passed, "but its bucket had", held, "bytes")


def _check_room(cluster: Cluster, accounts: Accounts, nbytes: Floats, busy: Floats, seconds: float) -> None:
    """Raise :class:`ConservationError` unless each channel's bytes fit its capacity in its busy time."""
    slack = ROUNDING * seconds
    _links(cluster, ~((busy >= 0.0) & (busy <= seconds + slack)), "busy", busy, "in a run of", seconds, "s")
    room = accounts.capacity * busy + accounts.passed
    over = nbytes - room > accounts.capacity * slack + ROUNDING * accounts.passed
    _links(cluster, over | ~(nbytes >= 0.0), "carried", nbytes, "but had room for", room, "bytes")


def check_workers(recorder: Recorder, seconds: float) -> None:
    """Raise :class:`ConservationError` unless the time of every worker adds up to the `seconds` of the run."""
    for rank, booked in enumerate(recorder.seconds):
        idle = recorder.idle[rank]
        total = sum(booked.values()) + idle
        if not (abs(total - seconds) <= ROUNDING * seconds and all(part >= 0.0 for part in booked.values())):
            parts = ", ".join(f"{kind} {part:.9g}" for kind, part in booked.items())
            raise ConservationError(
                f"worker {rank}: {parts} and idle {idle:.9g} s add up to {total:.12g} s in a run of {seconds:.12g} s"
                f"{_REPORT}"
            )
    for rank, ends in enumerate(recorder.step_end):
        if not _ordered(ends, seconds):
            wrong = [end for before, end in pairwise([0.0, *ends]) if not before <= end <= seconds]
            raise ConservationError(
                f"worker {rank}: a step ends at {wrong[0]:.12g} s, after the end of a later step or of the "
                f"run at {seconds:.12g} s{_REPORT}"
            )


def _check_updates(result: Result, n_samples: int) -> None:
    times, samples = zip(*result.recorder.updates, strict=True)
    if result.efficiency > 1.0 + ROUNDING and not superlinear_causes(result):
        raise ConservationError(
            f"efficiency {result.efficiency:.6g}: {result.n_workers} workers reach "
            f"{result.throughput:.6g} samples/s, more than is possible without communication{_REPORT}"
        )
    if not _ordered(times, result.simulated_time):
        raise ConservationError(
            f"updates: the times of {len(times)} updates, up to {times[-1]:.12g} s, are not in order or "
            f"exceed the end at {result.simulated_time:.12g} s{_REPORT}"
        )
    _equal("updates: samples", sum(samples), "learned from", n_samples, "samples")
    if result.measured_seconds > 0.0:
        learned = sum(samples[len(samples) - len(result.measured_updates) + 1 :])
        _equal("throughput: samples", result.throughput * result.measured_seconds, "of the updates", learned, "samples")


def _ordered(times: Sequence[float], end: float) -> bool:
    return all(map(operator.le, [0.0, *times], [*times, end]))


_REPORT = "; this is a bug in ddlsim or in a custom strategy: please report it with the experiment"


def _equal(what: str, left: float, than: str, right: float, unit: str) -> None:
    if not math.isclose(left, right, rel_tol=ROUNDING, abs_tol=ROUNDING):
        raise ConservationError(f"{what} {left:.12g}, but {than} {right:.12g} {unit}{_REPORT}")


def _links(
    cluster: Cluster, wrong: Bools, what: str, value: Floats, than: str, limit: Floats | float,
    unit: str,
) -> None:  # fmt: skip
    """Raise an error for the first `wrong` channel, if any, with its `value` and the `limit` that it violates."""
    if not wrong.any():
        return
    channel = int(np.argmax(wrong))
    link = int(np.flatnonzero(cluster.link_channel == channel)[0])
    source, target = (cluster.node_names[ends[link]] for ends in (cluster.link_src, cluster.link_dst))
    bound = float(np.broadcast_to(limit, value.shape)[channel])
    raise ConservationError(
        f"link {source} -> {target} ({cluster.link_kind[link]}): {what} {value[channel]:.12g} {unit}, {than} "
        f"{bound:.12g} {unit}{_REPORT}"
    )
