"""Several runs on one network: whoever comes next goes on, up to where somebody else does something.

Each has a loop of its own, and so events in an order of its own; they meet on the channels only. What one does never
depends on what others do at the same instant, but for the bandwidth: runs that share no channel are, bit for bit, what
they are alone.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ddlsim.errors import DdlsimError, DeadlockError
from ddlsim.network import Network
from ddlsim.runtime.loop import Loop, Pause


@dataclass(frozen=True, eq=False)
class Party:
    """One of the runs.

    name    for messages
    loop    its loop, with a face of the network of its own
    latest  s at which it ends in any case
    ended   is called when it has ended, by its own rule or at `latest`, or with the error that ended it
    pause   is asked whether it should stop, before its time goes on
    """

    name: str
    loop: Loop
    latest: float
    ended: Callable[[DdlsimError | None], None]
    pause: Pause | None = None


class SharedClock:
    """Lets parties on a `network` go on, each in its turn. Those who come later begin at times that are known."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._parties: dict[int, Party] = {}
        self._faces: dict[int, Network] = {network.party: network}
        self._next: dict[int, float] = {}  # s, when each party does something by itself
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._n_coming = itertools.count()

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Do something at a time (s), before anything else that happens then."""
        heapq.heappush(self._coming, (time, next(self._n_coming), action))

    def add(self, party: Party) -> None:
        """Let a party take part from now on, which begins now."""
        number = party.loop.network.party
        self._parties[number], self._faces[number] = party, party.loop.network
        self._look(number)

    def run(self, done: Callable[[], bool]) -> None:
        """Let all go on until `done` says so.

        Raises :class:`~ddlsim.errors.DeadlockError` if nothing is left to happen although it does not.
        """
        while not done():
            coming = self._coming[0][0] if self._coming else np.inf
            waiting = self.network.waiting_parties
            if waiting and waiting[0] not in self._parties:
                self._faces[waiting[0]].drop()  # its run has ended
            elif waiting:
                self._faces[waiting[0]].collect()
                self._go(waiting[0], coming)
            elif not self._parties:
                if coming == np.inf:
                    raise DeadlockError("nothing is left to happen, but not everything has ended")
                self.network.advance(coming)
                if not self.network.waiting_parties:
                    self._begin()
            else:
                number = min(self._next, key=self._next.__getitem__)
                if coming <= self._next[number] and coming <= self.network.now:
                    self._begin()
                else:
                    self._go(number, coming)

    def _begin(self) -> None:
        _, _, action = heapq.heappop(self._coming)
        action()

    def _go(self, number: int, coming: float) -> None:
        """Let a party go on, up to the next time that somebody else acts."""
        party = self._parties[number]
        others = min((time for other, time in self._next.items() if other != number), default=np.inf)
        driver, error = party.loop.driver, None
        try:
            driver.go(min(others, coming, party.latest), party.pause)
        except DdlsimError as raised:
            error = raised
        late = party.loop.now >= party.latest and not self.network.waiting_parties
        if driver.over or error is not None or late:
            del self._parties[number], self._next[number]
            driver.close()
            party.ended(error)
        else:
            self._look(number)

    def _look(self, number: int) -> None:
        party = self._parties[number]
        self._next[number] = min(party.loop.driver.next(), party.latest)
