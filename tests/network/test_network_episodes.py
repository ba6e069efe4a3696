"""Episodes that are told again end as when they are simulated, whatever else a run does."""

import random
from collections import Counter

import numpy as np
import pytest

import ddlsim
from ddlsim.cluster import Cluster, Host, star
from ddlsim.errors import DdlsimError
from ddlsim.network import episodes
from ddlsim.run.simulate import run as run_experiment
from ddlsim.strategies import AdaComm
from tests.draws import seeds
from tests.worlds_generator import all_reduce, experiment, laid_out, link_fault, world


@pytest.fixture
def counted(monkeypatch):
    """Count what becomes of episodes; collectives of all sizes are noted, and some episodes are simulated after all."""
    counter: Counter[str] = Counter()
    draw = random.Random(0)
    close, take = episodes.Episodes._close, episodes.Episodes.take

    def closing(self):
        counter["told"] += 1
        return close(self)

    def taking(self):
        ends = take(self)
        if self._told is not None and draw.random() < 0.3:
            counter["simulated"] += 1
            draw.choice((self.simulate, self.interrupt))()
        return ends

    monkeypatch.setattr(episodes.Episodes, "_close", closing)
    monkeypatch.setattr(episodes.Episodes, "take", taking)
    monkeypatch.setattr(episodes, "LARGE", 0)
    return counter


def both(one, counter, monkeypatch):
    """Run an experiment with and without episodes and compare; return whether any was told."""
    before = counter["told"]
    told = run_experiment(one, keep_spans=True)
    any_told = counter["told"] > before
    with monkeypatch.context() as patch:
        patch.setattr(episodes, "LARGE", 1 << 62)
        simulated = run_experiment(one, keep_spans=True)
    assert told.n_messages == simulated.n_messages
    assert told.end_time == pytest.approx(simulated.end_time, rel=1e-9)
    assert told.step_time == pytest.approx(simulated.step_time, rel=1e-9)
    assert told.nbytes_sent == pytest.approx(simulated.nbytes_sent, rel=1e-9)
    for name in ("channel_nbytes", "channel_busy"):
        a, b = getattr(told, name), getattr(simulated, name)
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * b.max(initial=0.0))
    a, b = told.busy.seconds(), simulated.busy.seconds()
    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * b.max(initial=0.0))
    return any_told


def synchronous(seed):
    """Draw a run of replicas that add up their gradients, or of a model in parts; most without jitter."""
    draw = random.Random(f"episodes {seed}")
    one = experiment(draw).with_(compression=None)
    if draw.random() < 0.5:
        one = one.with_(strategy=all_reduce(draw)) if not isinstance(one.strategy, AdaComm) else one
    else:
        one = laid_out(draw, one)
    if draw.random() < 0.7:
        one = one.with_(jitter=ddlsim.NoJitter(), slowdowns=(), speed=None)
    if draw.random() < 0.1:
        one = one.with_(faults=[link_fault(draw, one.cluster)])
    return one if one.training is not None else one.with_(steps=5)


def share_told(numbers, make, counter, monkeypatch):
    n_told = n_run = 0
    for seed in numbers:
        try:
            n_told += both(make(seed), counter, monkeypatch)
            n_run += 1
        except DdlsimError:
            continue  # parts that do not fit together
    print(f"{n_run} runs, episodes told in {n_told}; {dict(counter)}")
    return n_told / max(n_run, 1)


def test_told_as_simulated(counted, monkeypatch):
    assert share_told(range(16), synchronous, counted, monkeypatch) > 0.1
    assert counted["simulated"] > 0


def test_told_with_servers(counted, monkeypatch):
    """Servers have sent everything before the workers have received it, one after the other."""
    tree = star(7, bandwidth="10 Gbit/s", latency="10 us", host=Host(recv_overhead="20 us"))
    tree["switch"]["h0"][0]["latency"] = 3e-5
    slow = ddlsim.Measured(5.0, 8)  # so that all workers enter the collective of the next layer together
    servers = ddlsim.ParameterServer(3)
    one = ddlsim.Experiment(Cluster.from_graph(tree), "resnet18-cifar", servers, 8, 4, compute=slow, steps=1)
    assert both(one, counted, monkeypatch)
    assert counted["simulated"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("share", seeds(0, 5))  # of 100 worlds
def test_many_told_as_simulated(share, counted, monkeypatch):
    numbers = range(100 * share, 100 * share + 50)
    assert share_told(numbers, synchronous, counted, monkeypatch) > 0.1
    share_told(numbers, lambda seed: world(seed).experiment, counted, monkeypatch)
