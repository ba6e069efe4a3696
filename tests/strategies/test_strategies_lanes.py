"""What the kernel's lanes do is what processes do, to the last bit: times, staleness, spans, seconds, values."""

import dataclasses
import random

import networkx as nx
import numpy as np
import pytest
import together_reference as processes
from draws import seeds
from lanes_reference import start_adpsgd, start_choco, start_downpour, start_dpsgd, start_gossip_sgd

import ddlsim
from ddlsim import (
    ADPSGD,
    CHOCOSGD,
    DPSGD,
    AsyncParameterServer,
    BackupWorkers,
    Compression,
    Dirichlet,
    ElasticAveraging,
    FedAvg,
    FedBuff,
    GossipSGD,
    KAsync,
    KBatchAsync,
    Lognormal,
    Momentum,
    Slowdown,
    SoftSync,
    StaleSynchronous,
    Training,
)  # fmt: skip
from ddlsim.compression import ErrorFeedback, TopK
from ddlsim.run import run
from ddlsim.strategies import DelayCompensation

CLUSTERS = ["two-racks-oversubscribed", "cloud-25g-16x8-v100", "minicluster"]
SIMPLE = [TopK(0.1), ddlsim.Threshold(0.05)]


def surroundings(rng, seed, compressors):
    """Return a small random experiment's fields, all but the strategy."""
    fields = {"workers": rng.choice([1, 2, 3, 5, 8]), "batch_size": 8, "seed": seed, "warmup": 0}
    if rng.random() < 0.6:
        fields["jitter"] = Lognormal(rng.choice([0.05, 0.5]))
    if rng.random() < 0.3:
        fields["accumulation"] = rng.choice([2, 3])
    if rng.random() < 0.4:
        fields["speed"] = [1.0 + 0.5 * (3 * rank % 4) for rank in range(fields["workers"])]
    if rng.random() < 0.4:
        longest = Slowdown(rng.randrange(fields["workers"]), "1 ms", "0.3 s", rng.choice([1.5, 3.0]))
        fields["slowdowns"] = [longest, Slowdown(0, "50 ms", "0.1 s", 2.0)]
    if rng.random() < 0.3:
        fields["compression"] = rng.choice(compressors)
    threshold = isinstance(fields.get("compression"), ddlsim.Threshold)
    if threshold or rng.random() < 0.4:
        fields["model"] = "digits-cnn"
        fields["training"] = Training(
            "digits", updates=25, evaluate_every=rng.choice([1, 7]), charge_evaluation=rng.random() < 0.5
        )
    else:
        fields["model"] = rng.choice(["alexnet", "resnet50", "lenet5"])
        fields["steps"] = rng.choice([1, 2, 7])
    return fields


def asynchronous(seed):
    """Return a small random experiment with asynchronous servers."""
    rng = random.Random(seed)
    placement = rng.choice(["own", "colocated"])
    fields = surroundings(rng, seed, [*SIMPLE, ErrorFeedback(TopK(0.05)), Compression(TopK(0.1), down=TopK(0.2))])
    cluster = CLUSTERS[0] if placement == "own" else rng.choice(CLUSTERS)
    accumulate = rng.choice([1, 1, 2])
    strategy = AsyncParameterServer(
        rng.choice([1, 2, 3]) if placement == "own" else 1,
        placement, rng.choice([0.0, "1 ms", "30 ms"]), accumulate,
        rng.choice([None, "inverse"]), DelayCompensation() if accumulate == 1 and rng.random() < 0.3 else None,
    )  # fmt: skip
    return ddlsim.Experiment(cluster, fields.pop("model"), strategy, **fields)


def assert_same(experiment, start, monkeypatch):
    result = run(experiment, keep_spans=True)
    with monkeypatch.context() as patch:
        patch.setattr(type(experiment.strategy), "start", start)
        expected = run(experiment, keep_spans=True)
    for name in ("end_time", "nbytes_sent", "n_messages", "stop_reason"):
        assert getattr(result, name) == getattr(expected, name), name
    for name in ("updates", "staleness", "step_end", "seconds", "idle", "booked"):
        assert getattr(result.recorder, name) == getattr(expected.recorder, name), name
    assert sorted(result.recorder.spans) == sorted(expected.recorder.spans)
    assert (result.channel_busy == expected.channel_busy).all()
    if result.monitor is not None:
        assert repr(result.monitor.history) == repr(expected.monitor.history)
        model = result.monitor.evaluated.read()
        assert (model == expected.monitor.evaluated.read()).all()
    silent = run(experiment)
    assert silent.recorder.updates == result.recorder.updates
    return result


def gossip(seed):
    """Return a small random experiment with neighbours, and its process."""
    rng = random.Random(seed)
    fields = surroundings(rng, seed, SIMPLE)
    n = fields["workers"]
    ways = rng.choice([(1,), (1, 2), (2,)])
    circulant = sum((np.roll(np.eye(n), k, axis=1) for k in ways), np.eye(n)) / (1 + len(ways))
    pairs = nx.Graph((i, i + 1) for i in range(0, n - 1, 2))
    pairs.add_nodes_from(range(n))
    graph = rng.choice(["ring", "complete", pairs, nx.path_graph(n), circulant.tolist()])
    strategy = rng.choice([DPSGD(graph), CHOCOSGD(0.5, graph)])
    experiment = ddlsim.Experiment(rng.choice(CLUSTERS), fields.pop("model"), strategy, **fields)
    return experiment, start_dpsgd if isinstance(strategy, DPSGD) else start_choco


def together(seed):
    """Return a small random experiment with servers that act together, and its process."""
    rng = random.Random(seed)
    placement = rng.choice(["own", "colocated"])
    fields = surroundings(rng, seed, [*SIMPLE, ErrorFeedback(TopK(0.05)), Compression(TopK(0.1), down=TopK(0.2))])
    n = fields["workers"]
    where = {"servers": rng.choice([1, 2, 3]) if placement == "own" else 1, "placement": placement}
    where["apply_time"] = rng.choice([0.0, "1 ms", "30 ms"])
    k, scaling = rng.randint(1, n), rng.choice([None, "inverse"])
    strategy, start = rng.choice([
        (KAsync(k, **where), processes.start_k_async),
        (KBatchAsync(k, **where), processes.start_k_batch_async),
        (BackupWorkers(k - 1, restart=False, **where), processes.start_backup_workers),
        (SoftSync(k, scaling, **where), processes.start_soft_sync),
        (StaleSynchronous(rng.choice([0, 1, 3, np.inf]), **where), processes.start_stale_synchronous),
        (FedBuff(rng.choice([1, 3]), k, scaling, outer=Momentum(0.3), **where), processes.start_fed_buff),
        (FedAvg(rng.choice([0.3, 0.6, 1.0]), rng.choice([1, 3]), **where), processes.start_fed_avg),
        (ElasticAveraging(0.9 / n, rng.choice([1, 3]), rng.random() < 0.5, **where), processes.start_elastic),
    ])  # fmt: skip
    if isinstance(strategy, ElasticAveraging | FedAvg) and isinstance(fields.get("compression"), ErrorFeedback):
        fields["compression"] = TopK(0.1)  # models take no feedback twice
    cluster = CLUSTERS[0] if placement == "own" else rng.choice(CLUSTERS)
    return ddlsim.Experiment(cluster, fields.pop("model"), strategy, **fields), start


def freely(seed):
    """Return a small random experiment with gossip without steps in common, and its process."""
    rng = random.Random(seed)
    fields = surroundings(rng, seed, SIMPLE)
    n = fields["workers"]
    if rng.random() < 0.5 and n > 1:
        graph = rng.choice(["bipartite", nx.path_graph(n), *(["ring"] if n % 2 == 0 else [])])
        strategy, start = ADPSGD(graph), start_adpsgd
    else:
        graph = rng.choice(["complete", nx.path_graph(n)])
        strategy, start = GossipSGD(rng.choice([0.1, 0.5, 1.0]), graph), start_gossip_sgd
    return ddlsim.Experiment(rng.choice(CLUSTERS), fields.pop("model"), strategy, **fields), start


def assert_same_when_cut(experiment, start, seed, monkeypatch):
    result = assert_same(experiment, start, monkeypatch)
    first = result.recorder.updates[0][0]
    cut = first + random.Random(seed).random() * (result.end_time - first)
    if cut < result.end_time:
        assert_same(dataclasses.replace(experiment, max_time=cut), start, monkeypatch)


@pytest.mark.parametrize("seed", seeds(4, 24))
def test_servers(seed, monkeypatch):
    assert_same_when_cut(asynchronous(seed), start_downpour, seed, monkeypatch)


@pytest.mark.parametrize("seed", seeds(4, 24))
def test_neighbours(seed, monkeypatch):
    assert_same_when_cut(*gossip(seed), seed, monkeypatch)


def test_neighbours_on_a_directed_ring_with_a_straggler(monkeypatch):
    """Worker 3 sends to the straggler, worker 2, and waits for it only through the rest of the ring."""
    circulant = (np.eye(6) + np.roll(np.eye(6), 1, axis=1)) / 2
    where = {"cluster": "minicluster", "model": "resnet50", "workers": 6, "steps": 9}
    slow = [Slowdown(2, 0.0, 1e9, 9.0)]
    experiment = ddlsim.Experiment(**where, strategy=DPSGD(circulant.tolist()), slowdowns=slow, jitter=Lognormal(0.1))
    assert_same(experiment, start_dpsgd, monkeypatch)


@pytest.mark.parametrize("seed", seeds(6, 42))
def test_servers_that_act_together(seed, monkeypatch):
    assert_same_when_cut(*together(seed), seed, monkeypatch)


@pytest.mark.parametrize("seed", seeds(4, 24))
def test_gossip_without_steps_in_common(seed, monkeypatch):
    assert_same_when_cut(*freely(seed), seed, monkeypatch)


@pytest.mark.parametrize("seed", seeds(2, 12))
def test_clients_with_shards_of_their_own_sizes(seed, monkeypatch):
    """An epoch is a number of steps of its own for each of them, which falls as batches grow."""
    rng = random.Random(seed)
    fields = surroundings(rng, seed, SIMPLE) | {"model": "digits-cnn"}
    fields.pop("steps", None)
    growing = [None, ddlsim.GrowingBatch(8, (0.2,))][seed % 2]
    fields["training"] = Training("digits", updates=4, sharding=Dirichlet(1.0), growing_batch=growing)
    strategy = FedAvg(0.5, epochs=rng.choice([0.1, 0.3]), placement="colocated")
    experiment = ddlsim.Experiment(CLUSTERS[1], fields.pop("model"), strategy, **fields)
    assert_same(experiment, processes.start_fed_avg, monkeypatch)
