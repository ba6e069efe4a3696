"""AdaComm's step program does what one process per worker does, to the last bit."""

import random

import pytest
from draws import seeds
from test_strategies_lanes import CLUSTERS, SIMPLE, surroundings

import ddlsim
from ddlsim.cluster import star
from ddlsim.run import run
from ddlsim.runtime import Averaging, Worker, communicator, start_replicas
from ddlsim.strategies.local_sgd import _AdaptivePeriod


def start(strategy, context):
    """AdaComm.start."""
    first_loss = context.learner.evaluate(context.learner.initial)[0]
    rule = _AdaptivePeriod(strategy, context, [strategy.period], first_loss, strategy.period)
    average = Averaging(communicator(context, strategy), rule.adapt)
    start_replicas(context, lambda replica: work(replica, average, rule))


def work(replica, average, rule):
    """Make as many local steps as the rule says, average, and wait for it, for ever."""
    worker = replica.worker
    while True:
        for left in reversed(range(rule.period)):
            yield from replica.local_step()
            if left == 0:
                worker.params = yield from average.mean(worker, replica.step, worker.params)
            replica.end_step()


@pytest.mark.parametrize("seed", seeds(4, 24))
def test_a_program_whose_averages_are_chosen(seed, monkeypatch):
    rng = random.Random(seed)
    fields = surroundings(rng, seed, SIMPLE) | {"model": "digits-cnn"}
    fields.pop("steps", None)
    growing, rate = rng.choice([
        (None, 0.05), (None, 0.5), (ddlsim.GrowingBatch(8, (0.1, 0.3)), ddlsim.Cosine(0.05, 0.5)),
    ])  # fmt: skip
    fields["training"] = ddlsim.Training("digits", updates=60, rate=rate, evaluate_every=7, growing_batch=growing)
    interval = rng.choice([1, 2, "20 ms"])
    strategy = ddlsim.AdaComm(rng.choice([1, 4, 9]), interval, cost=rng.choice(["simulated", "simulated", "nccl"]))
    experiment = ddlsim.Experiment(rng.choice(CLUSTERS), fields.pop("model"), strategy, **fields)
    result = compare(experiment, monkeypatch)
    first = result.recorder.updates[0][0]
    cut = first + rng.random() * (result.end_time - first)
    compare(experiment.with_(max_time=cut), monkeypatch)


def test_the_period_grows_where_training_diverges(monkeypatch):
    cluster = star(3, bandwidth="1 Gbit/s", latency="5 us")
    training = ddlsim.Training("digits", updates=60, rate=50.0, evaluate_every=30)
    fields = {"compute": ddlsim.Affine("1 ms", "200 us"), "speed": [1.0, 1.0, 0.02], "training": training}
    experiment = ddlsim.Experiment(cluster, "digits-cnn", ddlsim.AdaComm(1, 1), 8, 3, **fields)
    result = compare(experiment, monkeypatch)
    assert result.n_messages < 12 * 60 / 3  # 12 an average, of which there are few


def compare(experiment, monkeypatch):
    """Return the result, which is that of processes."""
    result = run(experiment)
    with monkeypatch.context() as patch:
        patch.setattr(ddlsim.AdaComm, "start", start)
        patch.setattr(Worker, "backward", lambda self, *layers: self.compute(self.workload.backward_time, "backward"))
        expected = run(experiment)
    for name in ("end_time", "nbytes_sent", "n_messages"):
        assert getattr(result, name) == getattr(expected, name), name
    for name in ("updates", "step_end", "idle"):
        assert getattr(result.recorder, name) == getattr(expected.recorder, name), name
    # gradients of workers that are ahead may have been computed by then, or not
    histories = [[repr(row._replace(train_loss=0.0)) for row in each.monitor.history] for each in (result, expected)]
    assert histories[0] == histories[1]
    assert (result.monitor.evaluated.read() == expected.monitor.evaluated.read()).all()
    return result
