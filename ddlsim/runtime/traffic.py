"""What background traffic does on a network: it sends as fast as it may."""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator

import simpy

from ddlsim.life import Background
from ddlsim.runtime.loop import Loop

#: s that a message takes at the traffic's own rate: so long that the latency between two does not matter
MESSAGE_SECONDS = 60.0
Steps = Generator[simpy.Event, object, None]


def flow(background: Background, loop: Loop, source: int, target: int, channel: int, limit: float) -> None:
    """Let traffic flow from the node `source`, whose link has a `channel` that carries at most `limit` bytes/s."""
    loop.env.process(_switch(background, loop, channel))
    loop.env.process(_send(background, loop, source, target, MESSAGE_SECONDS * limit))


def _switch(background: Background, loop: Loop, channel: int) -> Steps:
    """Let the rate change when it does."""
    for (time, share), (until, _) in itertools.pairwise(itertools.chain(background.shares(), [(math.inf, 0.0)])):
        if time > loop.now:
            yield _at(loop, time)
        if until > loop.now:
            loop.network.will_change([(loop.now, until, channel, share)])


def _send(background: Background, loop: Loop, source: int, target: int, nbytes: float) -> Steps:
    """Send one message after the other."""
    first = next(time for time, share in background.shares() if share > 0.0)
    if first > loop.now:
        yield _at(loop, first)
    while True:
        yield loop.send(source, target, nbytes)


def _at(loop: Loop, time: float) -> simpy.Event:
    event = loop.env.event()
    loop.trigger_at(event, time)
    return event
