"""Which connection carries the messages of a route, and what its transport does with them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from ddlsim.cluster.details import LinkDetail, LinkDetails
from ddlsim.cluster.transports import LEAST_TIMEOUT, PROTOCOLS, window_under_loss

#: a row of state.WAY, and one of state.CONNECTION
Way = tuple[float, float, float, float, float, float, float, int, int]
Connection = tuple[float, float, int, int, int, int]
_BY_ITSELF: Way = (0.0, 0.0, 0.0, math.inf, math.inf, 0.0, 0.0, -1, -1)


class _Terms(NamedTuple):
    """What a connection does: see docs/models/transport.md. `limit`: bytes/s, inf if the path is narrower."""

    rendezvous: float
    round_trip: float
    full: float
    initial: float
    timeout: float
    least: float
    single: float
    limit: float
    ordered: int


class Ways:
    """The connections of a network: one (or a bundle that acts as one) per pair of nodes and path between them."""

    def __init__(self, n_channels: int, details: LinkDetails) -> None:
        self._n_channels = n_channels  # so far, those of connections included
        self._n = 0
        alike: dict[LinkDetail, int] = {}
        self._kind = [alike.setdefault(details.of(link), len(alike)) for link in range(len(details.transport))]
        self._details = list(alike)
        self._of: dict[Hashable, Way] = {}
        self._terms: dict[Hashable, _Terms | None] = {}
        #: rows for connections, and limits (bytes/s) for channels, that have been added and not been taken
        self.connections: list[Connection] = []
        self.limits: list[float] = []

    def of(self, pair: Sequence[int], links: Sequence[int], latency: float, rate: float) -> Way:
        """Return the way between a pair of nodes along `links`, of `latency` s and, at its narrowest, `rate` bytes/s.

        Messages of the same pair and links are carried by the same connection.
        """
        key = (*pair, *links)
        way = self._of.get(key)
        if way is None:
            kinds = tuple([self._kind[link] for link in links])
            alike = (kinds, latency, rate)
            if alike not in self._terms:
                self._terms[alike] = _terms([self._details[kind] for kind in kinds], latency, rate)
            way = self._of[key] = self._new(self._terms[alike])
        return way

    def _new(self, terms: _Terms | None) -> Way:
        if terms is None:
            return _BY_ITSELF
        channel = -1
        if terms.limit < math.inf:
            channel = self._n_channels
            self._n_channels += 1
            self.limits.append(terms.limit)
        self.connections.append((terms.initial, 0.0, -1, -1, 0, terms.ordered))
        self._n += 1
        return (*terms[:7], self._n - 1, channel)


def _terms(details: Sequence[LinkDetail], latency: float, rate: float) -> _Terms | None:
    """Return what a connection over links of these details does: that of the first that names a transport; None: none.

    Rates are the least of all links, a segment is lost if any of them loses it.
    """
    named = [detail for detail in details if detail.transport]
    if not named:
        return None
    first, round_trip = named[0], 2.0 * latency
    protocol = PROTOCOLS[first.transport]
    usual = protocol.frame(protocol.mtu)[1]
    segment = min((detail.frame_payload for detail in details if detail.frame_payload), default=usual)
    frame = segment + max(detail.frame_header for detail in details)
    loss = 1.0 - math.prod(1.0 - detail.loss for detail in named)
    window = min(first.window or protocol.window, window_under_loss(first.transport, loss, round_trip, segment))
    each = min((detail.flow_rate for detail in named if detail.flow_rate), default=math.inf)
    limit = first.connections * min(each, window / round_trip if round_trip else math.inf)
    return _Terms(
        rendezvous=first.rendezvous,
        round_trip=round_trip,
        full=min(limit, rate) * round_trip,
        initial=math.inf if first.warm else first.connections * protocol.segments * segment,
        timeout=round_trip + LEAST_TIMEOUT,
        least=first.connections * protocol.least * frame,
        single=first.connections * frame,
        limit=limit if limit < rate else math.inf,
        ordered=int(not first.unordered),
    )
