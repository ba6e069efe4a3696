"""Servers that act together: each has an equal part of the parameters; workers push to and pull from all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import simpy

from ddlsim.runtime.servers import WithServers, server_nodes
from ddlsim.runtime.setting import Setting
from ddlsim.runtime.wires import Parcel, Wires
from ddlsim.runtime.worker import Process, Worker, all_of
from ddlsim.units import si


def communicate(worker: Worker, event: simpy.Event, what: str) -> Process:
    """Block the worker until `event`, booked as communication."""
    start = worker.loop.now
    yield from worker.block(event, what)
    worker.book(start, start, what)


def wait(worker: Worker, event: simpy.Event, what: str) -> Process:
    """Block the worker until `event`, booked as waiting for others."""
    start = worker.loop.now
    yield from worker.block(event, what)
    worker.book(start, worker.loop.now, what)


@dataclass
class Shards:
    """Servers with an equal part of the parameters each. One worker at a time has its ``turn`` at them."""

    setting: Setting
    nodes: list[int]
    apply_time: float
    owner: str
    models: bool = False
    turn: simpy.Resource = field(init=False)
    wires: Wires = field(init=False)

    def __post_init__(self) -> None:
        self.turn = simpy.Resource(self.setting.loop.env)
        self.wires = Wires(self.setting, len(self.nodes), owner=self.owner, models=self.models)

    @classmethod
    def of(cls, strategy: WithServers, setting: Setting, *, models: bool = False) -> Shards:
        """Place the strategy's servers, to which workers send gradients or `models`.

        Raises ConfigError if there are not enough machines."""
        nodes = server_nodes(setting.cluster, setting.nodes, strategy.servers, strategy.placement)
        return cls(setting, nodes, si(strategy.apply_time, "time"), type(strategy).__name__, models)

    def up(self, worker: Worker, parcel: Parcel) -> simpy.Event:
        """Send what a worker has packed; the event is when all servers have their part."""
        sends = zip(self.nodes, parcel.sizes, strict=True)
        return all_of(worker.loop, [worker.loop.send(worker.node, node, nbytes) for node, nbytes in sends])

    def down(self, worker: Worker, parcel: Parcel) -> simpy.Event:
        """Send an answer; the event is when the worker has all of it."""
        sends = zip(self.nodes, parcel.sizes, strict=True)
        return all_of(worker.loop, [worker.loop.send(node, worker.node, nbytes) for node, nbytes in sends])

    def push(self, worker: Worker, parcel: Parcel) -> Process:
        """Encode and send what a worker has packed, and wait until all servers have it."""
        yield from worker.compute(parcel.seconds, "encode")
        yield from communicate(worker, self.up(worker, parcel), "push")

    def pull(self, worker: Worker, parcel: Parcel) -> Process:
        """Send an answer to a worker, who waits for it and decodes it."""
        yield from communicate(worker, self.down(worker, parcel), "pull")
        yield from worker.compute(parcel.seconds, "decode")

    def show_update(self, begin: float) -> None:
        """Show an update that began at `begin` and ends now, on every server's track."""
        for i in range(len(self.nodes)):
            self.setting.recorder.background(f"server {i}", "update", begin, self.setting.loop.now)
