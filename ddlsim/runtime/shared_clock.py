"""Several runs on one network: the run with the earliest event advances, up to the next event of another run.

Each run has its own loop, so its events keep their own order; runs interact only through the bandwidth of shared
channels. Runs that share no channel give the same results, bit for bit, as when simulated separately.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ddlsim.errors import DdlsimError, DeadlockError
from ddlsim.network import Network
from ddlsim.reliability import Background
from ddlsim.runtime.loop import Loop, Pause
from ddlsim.runtime.worker import Process

#: turns between two deadlock checks
TURNS = 1000


@dataclass(frozen=True, eq=False)
class Client:
    """One of the runs.

    name    for messages
    loop    its loop, with its own view of the network
    latest  s at which it ends in any case
    ended   called when it has ended, by its own rule or at `latest`, or with the error that ended it
    pause   called before its time goes on; returns whether it should stop
    """

    name: str
    loop: Loop
    latest: float
    ended: Callable[[DdlsimError | None], None]
    pause: Pause | None = None


class SharedClock:
    """Runs the clients on a `network` in turn. Later clients start at times known in advance."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._clients: dict[int, Client] = {}
        self._faces: dict[int, Network] = {network.client: network}
        self._next: dict[int, float] = {}  # time of each client's next event outside the network, s
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._n_coming = itertools.count()

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Call an action at a time (s), before all other events of that time."""
        heapq.heappush(self._coming, (time, next(self._n_coming), action))

    def add(self, client: Client) -> None:
        """Add a client that begins now."""
        number = client.loop.network.client
        self._clients[number], self._faces[number] = client, client.loop.network
        self._look(number)

    def run(self, done: Callable[[], bool]) -> None:
        """Run all clients until `done` returns true.

        Raises :class:`~ddlsim.errors.DeadlockError` if a client that has not ended has no further events.
        """
        turns = itertools.count(1)
        while not done():
            if next(turns) % TURNS == 0:
                self._look_for_the_stuck()
            coming = self._coming[0][0] if self._coming else np.inf
            waiting = self.network.waiting_clients
            if waiting and waiting[0] not in self._clients:
                self._faces[waiting[0]].drop()  # its run has ended
            elif waiting:
                self._faces[waiting[0]].collect()
                self._go(waiting[0], coming)
            elif not self._clients:
                if coming == np.inf:
                    raise DeadlockError("no event is left, but some runs have not ended")
                self.network.advance(coming)
                if not self.network.others_wait:
                    self._begin()
            else:
                number = min(self._next, key=self._next.__getitem__)
                if coming <= self._next[number] and coming <= self.network.now:
                    self._begin()
                else:
                    self._go(number, coming)

    def _look_for_the_stuck(self) -> None:
        """Raise DeadlockError for a client that waits with nothing in flight while others continue."""
        waiting = self.network.waiting_clients
        for number, client in self._clients.items():
            if self._next[number] == np.inf and not self.network.is_under_way(number) and number not in waiting:
                waits = client.loop.who_waits
                raise DeadlockError(
                    f"{client.name}: deadlock at {self.network.now:.6g} s: no event of this run is left, although "
                    f"other runs continue{'; ' * bool(waits)}{waits}"
                )

    def _begin(self) -> None:
        _, _, action = heapq.heappop(self._coming)
        action()

    def _go(self, number: int, coming: float) -> None:
        """Run a client up to the next event of another client."""
        client = self._clients[number]
        self._next[number] = np.inf  # until :meth:`_look` updates it
        limit = min(*self._next.values(), coming, client.latest)
        if limit == np.inf and len(self._clients) > 1:  # return at some time, to check on the others
            limit = self.network.now + 600.0
        driver, error = client.loop.driver, None
        try:
            driver.go(limit, client.pause)
        except DdlsimError as raised:
            error = raised
        late = client.loop.now >= client.latest and not self.network.others_wait
        if driver.over or error is not None or late:
            del self._clients[number], self._next[number]
            driver.close()
            client.ended(error)
        else:
            self._look(number)

    def _look(self, number: int) -> None:
        client = self._clients[number]
        self._next[number] = min(client.loop.driver.next(), client.latest)


# ---------------------------------------------------------------- background traffic, which sends as fast as it may

#: duration of a message at the traffic's own rate, s: so long that the latency in between is negligible
MESSAGE_SECONDS = 60.0


def flow(background: Background, loop: Loop, source: int, target: int, channel: int, limit: float) -> None:
    """Let traffic flow from the node `source`, whose link has a `channel` that carries at most `limit` bytes/s."""
    loop.env.process(_switch(background, loop, channel))
    loop.env.process(_send(background, loop, source, target, MESSAGE_SECONDS * limit))


def _switch(background: Background, loop: Loop, channel: int) -> Process:
    """Change the rate at its times."""
    for (time, share), (until, _) in itertools.pairwise(itertools.chain(background.shares(), [(math.inf, 0.0)])):
        if time > loop.now:
            yield loop.at(time)
        if until > loop.now:
            loop.network.will_change([(loop.now, until, channel, share)])


def _send(background: Background, loop: Loop, source: int, target: int, nbytes: float) -> Process:
    """Send one message after the other."""
    first = next(time for time, share in background.shares() if share > 0.0)
    if first > loop.now:
        yield loop.at(first)
    while True:
        yield loop.send(source, target, nbytes)
