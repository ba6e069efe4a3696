"""Frames in first-come, first-served queues, one event each: what the fluid queues of the engine tend to."""

import heapq
import itertools
from collections import deque


class Frames:
    """Links of bytes/s, each with a queue. A frame that has left a link enters the next one of its route."""

    def __init__(self, rates):
        self.rates = rates
        self.queues = [deque() for _ in rates]
        self.events = []
        self.order = itertools.count()
        self.now = 0.0

    def at(self, time, action, *arguments):
        heapq.heappush(self.events, (time, next(self.order), action, arguments))

    def run(self):
        while self.events:
            self.now, _, action, arguments = heapq.heappop(self.events)
            action(*arguments)

    def enter(self, link, frame):
        self.queues[link].append(frame)
        if len(self.queues[link]) == 1:
            self._serve(link)

    def _serve(self, link):
        self.at(self.now + self.queues[link][0].nbytes / self.rates[link], self._leave, link)

    def _leave(self, link):
        frame = self.queues[link].popleft()
        if self.queues[link]:
            self._serve(link)
        frame.hop += 1
        if frame.hop < len(frame.path):
            self.enter(frame.path[frame.hop], frame)
        else:
            frame.arrives()


class Frame:
    """Bytes on the link number `hop` of a path, and what follows when they arrive."""

    def __init__(self, path, nbytes, arrives):
        self.path, self.nbytes, self.arrives, self.hop = path, nbytes, arrives, 0


class Message:
    """`n_units` units of `n_frames` frames each, of which 32 are under way at most, and one that arrives.

    `back` is the path of acknowledgements, which have no bytes; they take no time if it is empty.
    """

    def __init__(self, frames, path, nbytes, n_frames, n_units=1, back=()):
        self.frames, self.path, self.back = frames, path, back
        self.size, self.n_frames = nbytes / n_units / n_frames, n_frames
        self.left, self.under_way = n_units, n_units * n_frames
        self.arrived, self.flying, self.end = 0, 0, None

    def start(self):
        self._send(32)

    def _send(self, most):
        while self.left and self.flying < most:
            self.left -= 1
            self.flying += 1
            for _ in range(self.n_frames):
                self.frames.enter(self.path[0], Frame(self.path, self.size, self.arrives))

    def arrives(self):
        self.under_way -= 1
        self.arrived += 1
        if self.arrived % self.n_frames == 0:
            if self.back:
                self.frames.enter(self.back[0], Frame(self.back, 0.0, self.acknowledged))
            else:
                self.acknowledged()
        if not self.under_way:
            self.end = self.frames.now

    def acknowledged(self):
        self.flying -= 1
        self._send(33)


def finish_times(capacity, paths, starts, nbytes, n_frames, units=None, back=None):
    """When the last frame of each message arrives; messages of one instant start in order."""
    frames = Frames(capacity)
    units, back = units or [1] * len(paths), back or [()] * len(paths)
    each = zip(paths, nbytes, units, back, strict=True)
    messages = [Message(frames, path, m, n_frames, n, acks) for path, m, n, acks in each]
    for message, start in zip(messages, starts, strict=True):
        frames.at(start, message.start)
    frames.run()
    return [message.end for message in messages]
