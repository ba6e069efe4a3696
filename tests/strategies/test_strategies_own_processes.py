"""A user's simpy process next to a run: ``context.loop.env`` is the run's clock, whatever executes its workers."""

from dataclasses import dataclass

import numpy as np
import pytest
from bundled_strategies import some

from ddlsim import (
    Affine,
    AllReduce,
    simulate,
)
from ddlsim.cluster import Host, star


def beside(strategy, process):
    """Return the strategy with a process that starts with its workers."""

    @dataclass(frozen=True)
    class Beside(type(strategy)):
        def start(self, context):
            super().start(context)
            context.loop.env.process(process(context))

    return Beside(**vars(strategy))


def run(strategy):
    cluster = star(6, bandwidth=1e9, latency=1e-6, host=Host(device="v100"))
    return simulate(cluster, "lenet5", strategy, 32, 4, steps=6, warmup=0, compute=Affine("1 ms", 0.0))


STRATEGIES = some(
    "ddp layer local overlap-local fsdp server backup neighbours ad-psgd gossip asynchronous k-async stale"
)


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_who_only_looks_changes_nothing_and_sees_every_instant(strategy):
    seen = []

    def look(context):
        while True:
            yield context.loop.env.timeout(1e-4)
            seen.append((context.loop.env.now, len(context.recorder.updates)))

    plain, watched = run(strategy), run(beside(strategy, look))
    assert watched.end_time == plain.end_time
    assert watched.nbytes_sent == plain.nbytes_sent
    times, updates = np.array(seen).T
    assert times == pytest.approx(1e-4 * np.arange(1, len(times) + 1))
    assert 0.0 <= plain.end_time - times[-1] <= 1e-4 * (1.0 + 1e-9)
    assert updates[-1] >= 5


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_messages_of_ones_own_are_on_the_network(strategy):
    """While workers compute, a message has its links to itself; later it shares them with theirs."""
    sent = []

    def send(context):
        while True:
            begin = context.loop.env.now
            yield context.loop.send(context.workers[0].node, context.workers[1].node, 1e4)
            sent.append(context.loop.env.now - begin)

    run(beside(strategy, send))
    assert min(sent) == pytest.approx(2e-6 + 1e4 / 1e9, rel=1e-6)
    assert len(sent) > 100


def test_both_are_slower_on_a_shared_link():
    def send(context):
        while True:
            yield context.loop.send(context.workers[0].node, context.workers[1].node, 1e6)

    plain, shared = (run(strategy) for strategy in (AllReduce("ring"), beside(AllReduce("ring"), send)))
    assert shared.end_time > plain.end_time + 1e-4
    assert shared.nbytes_sent > plain.nbytes_sent + 1e6
