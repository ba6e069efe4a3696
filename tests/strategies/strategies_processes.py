"""Synchronous strategies as simpy processes, one for each worker: what the steps that the kernel executes are held to.

Slow and plain: a worker's whole life is one function. What carries the buckets is the library's own.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import simpy

from ddlsim.learning import Array, Value
from ddlsim.plan.plan import ALL_GATHER
from ddlsim.runtime.communicator import Communicator
from ddlsim.runtime.context import Process, RunContext, Worker
from ddlsim.runtime.exchange import Exchange, OfKinds
from ddlsim.strategies import HorovodFusion, NoOverlap, Priority, ShardedUpdate, all_reduce
from ddlsim.strategies.overlap import buckets_of, overlap_named
from ddlsim.units import si
from ddlsim.workload.buckets import Bucket


@contextmanager
def processes(strategy: Any) -> Any:
    """Let runs of a strategy go by processes in place of its plan."""

    def start(context: RunContext, program: object, exchanges: OfKinds, model: Model, make: object, owner: str) -> None:
        made, overlap = exchanges.exchanges, overlap_named(strategy.overlap)
        first = next(iter(made.values()))
        members, group = first.communicator, Group(first.communicator, lambda _: first)
        model.group = group
        if isinstance(overlap, HorovodFusion):
            group.coordinator = Fused(group, si(overlap.threshold, "bytes"), si(overlap.cycle_time, "time"))
        elif isinstance(overlap, Priority):
            group.coordinator = MostUrgent(group, overlap.in_flight)
        context.model = lambda: group.params
        gather = Group(members, lambda _: made.get(ALL_GATHER, group.carrier))
        for worker in members.workers:
            if isinstance(strategy, ShardedUpdate):
                life = Member(worker, group, gather, overlap).work()
            elif group.coordinator is not None:
                pipelined = isinstance(overlap, Priority)
                life = coordinated(worker, group, buckets_of(overlap, worker.workload), pipelined=pipelined)
            else:
                life = in_order(worker, group, buckets_of(overlap, worker.workload))
            context.loop.env.process(life)

    with patch.multiple(all_reduce, TableRun=start, CommonModel=Model):
        yield


class Model:
    """The model whose gradients the exchanges carry: that of a group."""

    group: Group

    def __init__(self, context: RunContext) -> None:
        """Nothing is known of the group yet."""

    def gradient(self, step: int, place: int) -> Value[Array]:
        return self.group.gradient(step, place)


@dataclass
class Operation:
    """One exchange of a bucket: how many are ready, and when the last of them was (s)."""

    n_ready: int = 0
    last_ready: float = 0.0


@dataclass
class Group:
    """Members of a communicator that hold the same parameters and average their gradients in every step.

    ``new_carrier`` makes what carries the buckets; ``coordinator`` says which travels next, if not in order.
    """

    communicator: Communicator
    new_carrier: Callable[[Group], Exchange]
    coordinator: Any = None
    operations: dict[tuple[int, int], Operation] = field(default_factory=dict)
    steps_done: dict[int, int] = field(default_factory=dict)
    #: samples that the updates made so far have learned from
    n_samples: int = 0

    def __post_init__(self) -> None:
        context = self.communicator.context
        self.loop, self.recorder, self.learner = context.loop, context.recorder, context.learner
        self.workers = self.communicator.workers
        self.n_workers = len(self.workers)
        #: the parameters of all replicas, after the latest step that has been averaged
        self.params: Value[Array] = self.learner.initial
        self._state = self.learner.optimizer_state(self.params)
        self._contributed: dict[int, dict[int, Value[Array]]] = {}
        self._after: dict[int, Value[Array]] = {}
        self.carrier = self.new_carrier(self)

    def contribute(self, step: int, rank: int, gradient: Value[Array]) -> None:
        """A worker's gradient of a step will be part of its mean."""
        self._contributed.setdefault(step, {})[self.communicator.place[rank]] = gradient

    def gradient(self, step: int, place: int) -> Value[Array]:
        """Return a member's gradient of a step that has not been averaged yet."""
        return self._contributed[step][place]

    def parameters(self, step: int, samples: int) -> Value[Array]:
        """Return what every worker holds after a step: w <- w - eta * (1/N) sum_i g_i, updated once for all.

        `samples` is what each worker has contributed. All workers have contributed to the step when a part of
        its mean has arrived anywhere.
        """
        if step not in self._after:
            mean = self.carrier.mean(step, [self.gradient(step, place) for place in range(self.n_workers)])
            del self._contributed[step]
            rate = self.learner.rate(self.n_samples)
            self.params, self._state = self.learner.update(self.params, mean, self._state, rate)
            self._after[step] = self.params
            self._after.pop(step - 3, None)  # nobody lags so far behind
            self.n_samples += samples * self.n_workers
        return self._after[step]

    def operation(self, step: int, bucket: int) -> Operation:
        """Return the exchange of a bucket in a step, made when first asked for."""
        return self.operations.setdefault((step, bucket), Operation())

    def ready(self, step: int, bucket: int) -> bool:
        """A worker's gradients of a bucket are ready; return whether all workers' are now."""
        operation = self.operation(step, bucket)
        operation.n_ready += 1
        operation.last_ready = self.loop.now
        return operation.n_ready == self.n_workers

    def finish_step(self, step: int) -> bool:
        """A worker has all averaged gradients of a step; return whether it was the last one."""
        self.steps_done[step] = self.steps_done.get(step, 0) + 1
        if self.steps_done[step] < self.n_workers:
            return False
        del self.steps_done[step]
        for key in [key for key in self.operations if key[0] == step]:
            del self.operations[key]
        return True


def _after(event: simpy.Event, callback: Callable[[simpy.Event], None]) -> None:
    assert event.callbacks is not None
    event.callbacks.append(callback)


class Coordinator:
    def __init__(self, group: Group) -> None:
        self.group = group
        self.env = group.loop.env
        self.latest_ready = 0.0
        self._arrival: dict[tuple[int, int], list[simpy.Event | None]] = {}
        self._ready_at: dict[int, float] = {}

    def last_ready(self, step: int) -> float:
        return self._ready_at.get(step, 0.0)

    def _announced(self, step: int, index: int, rank: int) -> tuple[simpy.Event, bool]:
        key = (step, index)
        arrivals = self._arrival.setdefault(key, [None] * self.group.n_workers)
        event = self.env.event()
        arrivals[self.group.communicator.place[rank]] = event
        everywhere = self.group.ready(step, index)
        if everywhere:
            self.latest_ready = self._ready_at[step] = self.group.loop.now
            self._ready_at.pop(step - 2, None)
        return event, everywhere

    def _launch(self, parts: list[tuple[int, int]], nbytes: float) -> simpy.Event:
        """Exchange buckets as one buffer; workers get their parts when it ends for them."""
        carry, step, which = self.group.carrier.carry, parts[0][0], [part for _, part in parts]
        ends = [carry(worker, step, which, nbytes) for worker in self.group.workers]
        start = self.env.now
        for place, end in enumerate(ends):
            _after(end, functools.partial(self._arrived, parts, place, start))
        finished = self.env.all_of(ends)
        _after(finished, functools.partial(self._forget, parts))
        return finished

    def _arrived(self, parts: list[tuple[int, int]], place: int, start: float, _: simpy.Event) -> None:
        for key in parts:
            event = self._arrival[key][place]
            assert event is not None
            event.succeed()
        name = f"{len(parts)} buckets of step {parts[0][0]}"
        self.group.recorder.background(f"{self.group.workers[place].name} network", name, start, self.env.now)

    def _forget(self, parts: list[tuple[int, int]], _: simpy.Event) -> None:
        for key in parts:
            del self._arrival[key]


class Fused(Coordinator):
    """Horovod's tensor fusion: once a cycle take what is ready everywhere, in this order, in fused buffers."""

    def __init__(self, group: Group, threshold: float, cycle_time: float) -> None:
        super().__init__(group)
        self.threshold = threshold
        self.cycle_time = cycle_time
        self._queue: list[tuple[int, int, float]] = []
        self._running = False

    def announce(self, step: int, index: int, bucket: Bucket, rank: int) -> simpy.Event:
        event, everywhere = self._announced(step, index, rank)
        if everywhere:
            self._queue.append((step, index, self.group.carrier.buffer_nbytes(index, bucket.nbytes)))
            if not self._running:
                self._running = True
                self.env.process(self._cycles())
        return event

    def _cycles(self) -> Process:
        while self._queue:
            cycles = self.env.now / self.cycle_time
            tick = math.ceil(cycles - 1e-9 * max(cycles, 1.0)) * self.cycle_time  # on a tick, up to rounding
            yield self.env.timeout(max(tick - self.env.now, 0.0))
            batch, self._queue = self._queue, []
            while batch:
                parts: list[tuple[int, int]] = []
                nbytes = 0.0
                while batch and (not parts or nbytes + batch[0][2] <= self.threshold):
                    step, index, size = batch.pop(0)
                    parts.append((step, index))
                    nbytes += size
                yield self._launch(parts, nbytes)
        self._running = False


class MostUrgent(Coordinator):
    """The ready bucket of lowest priority number goes next; at most `in_flight` travel at a time."""

    def __init__(self, group: Group, in_flight: int) -> None:
        super().__init__(group)
        self.credit = in_flight
        self._heap: list[tuple[int, int, int, float]] = []  # step, priority, index, nbytes

    def announce(self, step: int, index: int, bucket: Bucket, rank: int) -> simpy.Event:
        event, everywhere = self._announced(step, index, rank)
        if everywhere:
            heapq.heappush(self._heap, (step, bucket.priority, index, bucket.nbytes))
            self._start()
        return event

    def _start(self) -> None:
        while self.credit > 0 and self._heap:
            step, _, index, nbytes = heapq.heappop(self._heap)
            self.credit -= 1
            _after(self._launch([(step, index)], nbytes), self._returned)

    def _returned(self, _: simpy.Event) -> None:
        self.credit += 1
        self._start()


# ---------------------------------------------------------------- buckets in order, rank by rank


def in_order(worker: Worker, group: Group, buckets: tuple[Bucket, ...]) -> Process:
    """Exchange buckets first come first served: a rank starts one when it is ready and the last one is over."""
    carrier = group.carrier
    step = 0
    n_layers = len(worker.workload.forward)
    while True:
        yield from worker.begin_step()
        group.contribute(step, worker.rank, worker.draw())
        yield from worker.forward()
        arrivals: list[simpy.Event] = []
        layer = n_layers
        for i, bucket in enumerate(buckets):
            yield from worker.backward(layer, bucket.ready_layer)
            layer = bucket.ready_layer
            yield from worker.compute(carrier.encode_seconds(worker, step, i), "encode")
            group.ready(step, i)
            last = arrivals[-1] if arrivals else None
            arrivals.append(worker.loop.env.process(_exchange(worker, group, step, i, bucket, last)))
        yield from worker.backward(layer, 0)
        yield from _collect(worker, group, step, arrivals)
        yield from worker.optimizer_step()
        worker.params = group.parameters(step, worker.samples_per_step)
        worker.end_step()
        if group.finish_step(step):
            worker.stop.updated(worker.samples_per_step * group.n_workers)
        step += 1


def _exchange(worker: Worker, group: Group, step: int, index: int, bucket: Bucket, wire: simpy.Event | None) -> Process:
    if wire is not None:
        yield wire
    start = worker.loop.now
    yield group.carrier.carry(worker, step, [index], bucket.nbytes)
    worker.recorder.background(f"{worker.name} network", f"bucket {index}", start, worker.loop.now)


def _collect(worker: Worker, group: Group, step: int, arrivals: list[simpy.Event]) -> Process:
    """Wait for the means of all buckets, and decode each when it has arrived."""
    for i, arrival in enumerate(arrivals):
        if group.carrier.decodes or i + 1 == len(arrivals):
            start = worker.loop.now
            yield from worker.block(arrival, f"the gradients of step {step}")
            worker.book(start, group.operation(step, i).last_ready, group.carrier.what)
            yield from worker.compute(group.carrier.decode_seconds(worker, step, i), "decode")


# ---------------------------------------------------------------- buckets that a coordinator orders


def coordinated(worker: Worker, group: Group, buckets: tuple[Bucket, ...], *, pipelined: bool) -> Process:
    """Announce buckets to the group's coordinator; it says when they travel.

    With `pipelined`, the next forward pass goes on layer by layer as their gradients arrive; otherwise it
    starts when all have arrived.
    """
    coordinator = group.coordinator
    n_layers = len(worker.workload.forward)
    arrived: list[simpy.Event] = []  # of the previous step, by bucket
    step = 0
    while True:
        if arrived and pipelined and worker.accumulation > 1:  # the first micro-step needs all parameters
            for i, event in enumerate(arrived if group.carrier.decodes else []):
                yield from _decoded(worker, group, step - 1, i, event, f"the parameters of step {step}")
            start = worker.loop.now
            yield from worker.block(worker.loop.env.all_of(arrived), f"the parameters of step {step}")
            worker.book(start, coordinator.latest_ready, group.carrier.what)
        yield from worker.begin_step()
        decoded = functools.partial(_decoded, worker, group, step - 1)
        decodes = group.carrier.decodes and worker.accumulation == 1
        yield from _forward(worker, buckets, arrived if pipelined else [], coordinator, decoded if decodes else None)
        if step > 0:  # by now all of the last step has arrived
            worker.params = group.parameters(step - 1, worker.samples_per_step)
        group.contribute(step, worker.rank, worker.draw())
        arrived = []
        layer = n_layers
        for i, bucket in enumerate(buckets):
            yield from worker.backward(layer, bucket.ready_layer)
            layer = bucket.ready_layer
            yield from worker.compute(group.carrier.encode_seconds(worker, step, i), "encode")
            arrived.append(coordinator.announce(step, i, bucket, worker.rank))
        yield from worker.backward(layer, 0)
        if pipelined:
            worker.loop.env.process(_finish(worker, group, step, arrived, worker.samples_per_step))
        else:
            if group.carrier.decodes:
                for i in range(len(buckets)):
                    yield from _decoded(worker, group, step, i, arrived[i], f"the gradients of step {step}")
            start = worker.loop.now
            yield from worker.block(worker.loop.env.all_of(arrived), f"the gradients of step {step}")
            worker.book(start, coordinator.last_ready(step), group.carrier.what)
            yield from worker.optimizer_step()
            yield from _finish(worker, group, step, [], worker.samples_per_step)
        step += 1


def _decoded(worker: Worker, group: Group, step: int, i: int, arrival: simpy.Event, what: str) -> Process:
    """Wait for the mean of a bucket, and decode it."""
    if not arrival.processed:
        start = worker.loop.now
        yield from worker.block(arrival, what)
        worker.book(start, group.operation(step, i).last_ready, group.carrier.what)
    yield from worker.compute(group.carrier.decode_seconds(worker, step, i), "decode")


def _forward(
    worker: Worker, buckets: tuple[Bucket, ...], arrived: list[simpy.Event], coordinator: Coordinator,
    decoded: Callable[..., Process] | None,
) -> Process:  # fmt: skip
    """Compute the forward pass, each layer as soon as its parameters of the previous step are complete."""
    if not arrived:
        yield from worker.forward()
        return
    needed: dict[int, list[tuple[int, simpy.Event]]] = {}
    for i, (bucket, event) in enumerate(zip(buckets, arrived, strict=True)):
        needed.setdefault(bucket.first_layer, []).append((i, event))
    done = 0
    forward = worker.workload.forward
    for layer in sorted(needed):
        yield from worker.compute(float(forward[done:layer].sum()), "forward")
        done = layer
        for i, event in needed[layer] if decoded is not None else []:
            yield from decoded(i, event, f"the parameters of layer {layer}")
        missing = [event for _, event in needed[layer] if not event.processed]
        if missing:
            start = worker.loop.now
            yield from worker.block(worker.loop.env.all_of(missing), f"the parameters of layer {layer}")
            worker.book(start, coordinator.latest_ready, coordinator.group.carrier.what)
    yield from worker.compute(float(forward[done:].sum()), "forward")
    yield from worker.optimizer_step()


def _finish(worker: Worker, group: Group, step: int, arrived: list[simpy.Event], n_samples: int) -> Process:
    if arrived:
        yield worker.loop.env.all_of(arrived)
    group.parameters(step, n_samples)
    worker.end_step()
    if group.finish_step(step):
        worker.stop.updated(n_samples * group.n_workers)


# ---------------------------------------------------------------- updates in shards


def once(first: Callable[[], Process], later: Callable[[], Process]) -> Callable[[], Process]:
    """Return what does `first` when it is called for the first time, and `later` from then on."""
    calls = iter([first])
    return lambda: next(calls, later)()


@dataclass
class Member:
    """One worker. Its collectives run one after the other, as on NCCL's stream: the last one is `latest`.

    What all workers do to their shards, element by element, is what is done to the whole once: `scatter` does.
    """

    worker: Worker
    scatter: Group
    gather: Group
    policy: object
    step: int = 0
    #: samples in the gradient of the step; the batch may have grown when the step ends, beside the next one
    n_samples: int = 0
    latest: simpy.Event | None = None
    #: the all-gathers of the step before, by bucket
    gathered: list[simpy.Event] = field(default_factory=list)

    def work(self) -> Process:
        worker = self.worker
        overlaps = not isinstance(self.policy, NoOverlap)
        while True:
            buckets = buckets_of(self.policy, worker.workload)  # type: ignore[arg-type]
            if not overlaps:
                yield from self._wait_for(self.gathered, "parameters", self.gather, "all-gather")
            forward = functools.partial(self._forward, buckets)
            with patch.object(worker, "forward", once(forward, worker.forward)):
                yield from worker.begin_step()
            yield from forward() if worker.accumulation == 1 else worker.forward()
            if self.step > 0:
                worker.params = self.scatter.parameters(self.step - 1, self.n_samples)
            self.n_samples = worker.samples_per_step
            self.scatter.contribute(self.step, worker.rank, worker.draw())
            layer = len(worker.workload.forward)
            for i, bucket in enumerate(buckets):
                yield from worker.backward(layer, bucket.ready_layer)
                layer = bucket.ready_layer
                yield from worker.compute(self.scatter.carrier.encode_seconds(worker, self.step, i), "encode")
                scattered = self._enter(self.scatter, i, bucket, self.scatter.carrier.what)
            yield from worker.backward(layer, 0)
            yield from self._wait_for([scattered], "gradients", self.scatter, self.scatter.carrier.what)
            for i in range(len(buckets)):
                yield from worker.compute(self.scatter.carrier.decode_seconds(worker, self.step, i), "decode")
            yield from worker.compute(worker.workload.optimizer / self.scatter.n_workers, "optimizer")
            arrivals = [self._enter(self.gather, i, buckets[i], "all-gather") for i in reversed(range(len(buckets)))]
            self.gathered = arrivals[::-1]
            worker.loop.env.process(self._finish(self.step, self.n_samples, arrivals[-1]))
            self.step += 1

    def _forward(self, buckets: Sequence[Bucket]) -> Process:
        """Compute the first forward pass of a step, as far as updated parameters have arrived."""
        worker, done = self.worker, 0
        for layer in sorted({bucket.first_layer for bucket in buckets} if self.gathered else ()):
            yield from worker.compute(float(worker.workload.forward[done:layer].sum()), "forward")
            done = layer
            needed = [e for bucket, e in zip(buckets, self.gathered, strict=True) if bucket.first_layer == layer]
            yield from self._wait_for(needed, f"parameters of layer {layer}", self.gather, "all-gather")
        if done:
            yield from worker.compute(float(worker.workload.forward[done:].sum()), "forward")
        else:
            yield from worker.forward()

    def _enter(self, group: Group, index: int, bucket: Bucket, what: str) -> simpy.Event:
        """Put a bucket behind what this worker has on its stream; return the event of its end."""
        group.ready(self.step, index)
        self.latest = self.worker.loop.env.process(self._travel(group, self.step, index, bucket, what, self.latest))
        return self.latest

    def _travel(
        self, group: Group, step: int, index: int, bucket: Bucket, what: str, before: simpy.Event | None
    ) -> Process:
        worker = self.worker
        if before is not None:
            yield before
        start = worker.loop.now
        yield group.carrier.carry(worker, step, [index], bucket.nbytes)
        worker.recorder.background(f"{worker.name} network", f"{what} of bucket {index}", start, worker.loop.now)

    def _wait_for(self, events: Sequence[simpy.Event], values: str, group: Group, what: str) -> Process:
        missing = [event for event in events if not event.processed]
        if missing:
            worker, start = self.worker, self.worker.loop.now
            step = self.step if group is self.scatter else self.step - 1
            operations = [operation for (at, _), operation in group.operations.items() if at == step]
            yield from worker.block(worker.loop.env.all_of(missing), f"the {values} of step {step}")
            worker.book(start, max(operation.last_ready for operation in operations), what)

    def _finish(self, step: int, n_samples: int, last: simpy.Event) -> Process:
        yield last
        worker = self.worker
        self.scatter.parameters(step, n_samples)
        worker.end_step()
        self.gather.finish_step(step)
        if self.scatter.finish_step(step):
            worker.stop.updated(n_samples * self.scatter.n_workers)
