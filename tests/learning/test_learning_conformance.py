"""What every strategy must do. A new strategy adds a line to CASES.

1. With one worker, no jitter and no compression it is plain SGD, bit for bit.
2. It keeps the rules of ``ddlsim.testing.check_strategy``: the same seed gives the same run, another one another.
3. It accounts for every second of every worker and for every byte on the wire.
4. Its clock does not depend on whether values are computed.
5. It learns.
6. A run that is interrupted, saved and continued is bit for bit the run that was not.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from draws import few
from learning_reference import learn, plain_sgd

import ddlsim
from ddlsim.strategies import Strategy, contract
from ddlsim.testing import check_strategy


@dataclass(frozen=True)
class Case:
    """A strategy and what is special about it.

    n_workers  of the runs with several workers
    alone      whether one worker alone is plain SGD (False where the published rule differs from it)
    compresses whether it runs compressed (False where it says why not)
    decides    whether values decide about the clock, so that there is no run without them
    accuracy   that must be reached within 400 updates of 64 samples, or as many samples
    rate       learning rate with several workers
    """

    strategy: Strategy
    n_workers: int = 4
    alone: bool = True
    compresses: bool = True
    decides: bool = False
    accuracy: float = 0.9
    rate: float = 0.1
    name: str = field(default="")

    def __str__(self) -> str:
        return self.name or self.strategy.label


CASES = [
    Case(ddlsim.AllReduce("ring")),
    Case(ddlsim.AllReduce("halving_doubling", overlap="priority"), compresses=False),  # cuts what would be packed
    Case(ddlsim.AllReduce("ring", cost="nccl")),
    Case(ddlsim.ParameterServer(servers=2)),
    Case(ddlsim.AsyncParameterServer()),
    Case(ddlsim.AsyncParameterServer(servers=3, apply_time="10 us")),
    Case(ddlsim.ShardedUpdate()),
    Case(ddlsim.ShardedUpdate(cost="nccl")),
    Case(ddlsim.ShardedUpdate(overlap="layer")),
    Case(ddlsim.FSDP()),
    Case(ddlsim.FSDP(stage=2, micro_batch=2, no_sync=True)),
    Case(ddlsim.Hybrid()),
    Case(ddlsim.Hybrid(micro_batches=2, overlap="ddp")),
    Case(ddlsim.Parallel()),
    Case(ddlsim.Parallel(pipeline=2), alone=False),  # needs a worker for each stage
    Case(ddlsim.Parallel(pipeline=2, order="pipedream"), alone=False),  # likewise
    Case(ddlsim.LocalSGD(4)),
    Case(ddlsim.LocalSGD(4, cost="nccl")),
    Case(ddlsim.LocalSGD(4, start_epoch=1.0), decides=True),  # epochs are passes over data
    Case(ddlsim.AdaComm(8, 2), decides=True),  # the loss says when to average
    Case(ddlsim.BMUF(4)),
    Case(ddlsim.DaSGD(4, 2, 0.25), alone=False),  # merges its own older parameters
    Case(ddlsim.OverlapLocalSGD(4), alone=False),  # pulled back to its own older parameters
    Case(ddlsim.CoCoDSGD(4)),
    Case(ddlsim.DiLoCo(4), alone=False),  # the outer momentum goes on
    Case(ddlsim.DiLoCo(4, outer=ddlsim.SGD(), outer_rate=1.0)),
    Case(ddlsim.SlowMo(4), alone=False),  # the slow momentum goes on
    Case(ddlsim.SlowMo(4, momentum=0.0)),
    Case(ddlsim.QsparseLocalSGD(4, ddlsim.ErrorFeedback(ddlsim.TopK(0.1))), alone=False, compresses=False),  # it does
    Case(ddlsim.HierarchicalLocalSGD(2, 2, block=2)),
    Case(ddlsim.SPARTA(0.1), compresses=False),  # sends other parameters in every step
    Case(ddlsim.DPSGD("ring")),
    Case(ddlsim.CHOCOSGD(0.7)),
    Case(ddlsim.ADPSGD("ring")),
    Case(ddlsim.GossipSGD(0.5)),
    Case(ddlsim.AsyncParameterServer(staleness_scaling="inverse")),
    Case(ddlsim.AsyncParameterServer(servers=2, staleness_scaling=ddlsim.ExponentialPenalty(0.8))),
    Case(ddlsim.AsyncParameterServer(delay_compensation=ddlsim.DelayCompensation(0.04))),
    Case(ddlsim.AsyncParameterServer(servers=2, delay_compensation=ddlsim.DelayCompensation(2.0, adaptive=0.95))),
    Case(ddlsim.AsyncParameterServer(accumulate=3), alone=False),  # the server rounds the sum of three steps
    Case(ddlsim.SoftSync(2), alone=False),  # needs several workers
    Case(ddlsim.SoftSync(4, staleness_scaling=None, servers=2, apply_time="10 us"), alone=False),  # likewise
    Case(ddlsim.StaleSynchronous(2), rate=0.05),
    Case(ddlsim.BackupWorkers(1), n_workers=5, alone=False),  # needs several workers
    Case(ddlsim.BackupWorkers(1, restart=False), n_workers=5, alone=False),  # needs several workers
    Case(ddlsim.KSync(2), alone=False),  # needs several workers
    Case(ddlsim.KBatchSync(3, apply_time="10 us"), alone=False),  # an update is of several batches
    Case(ddlsim.KAsync(2, servers=2), alone=False),  # needs several workers
    Case(ddlsim.KBatchAsync(2), alone=False),  # an update is of several batches
    Case(ddlsim.FedAvg(1.0, local_steps=1)),
    Case(ddlsim.FedAvg(0.5, local_steps=4, servers=2, apply_time="10 us"), alone=False),  # an update is of four steps
    Case(ddlsim.FedBuff(1, buffer=3), alone=False, rate=0.05),  # an update is of three batches
    Case(ddlsim.ElasticAveraging(0.2, 3), alone=False),  # the center lags behind the worker
    Case(ddlsim.ElasticAveraging(0.2, 3, synchronous=False, servers=2), alone=False),  # likewise
]


def each(start):
    """Make a test of every case. A quarter of them, another one for another `start`, is in `make test`."""
    return pytest.mark.parametrize("case", few(CASES, 14, start=start), ids=str)


def some(case, training, **more):
    """A run with jitter."""
    return learn(case.strategy, case.n_workers, training=training, jitter=ddlsim.Lognormal(0.3), **more)


def test_one_worker_is_plain_sgd():
    """The others are held to AllReduce, by the rules below."""
    training = ddlsim.Training("digits", rate=0.1, updates=30, sharding="shared", evaluate_every=10)
    assert learn(ddlsim.AllReduce(), 1, training=training).params.tobytes() == plain_sgd(16, 30).tobytes()


@each(0)
def test_it_keeps_the_rules_that_users_can_check(case):
    """The seed, updates, fabrics, parts of the cluster, compression."""
    check_strategy(
        case.strategy, n_workers=case.n_workers, alone=case.alone, compresses=case.compresses, decides=case.decides
    )


def account_for_seconds(result):
    table = result.workers
    parts = table[["compute", "communication", "waiting", "idle"]]
    assert (parts >= 0.0).all(axis=None)
    np.testing.assert_allclose(parts.sum(axis=1), result.end_time, rtol=1e-9)
    assert (table["idle"] <= 1e-9 * result.end_time).all()  # nobody has nothing to do


def account_for_bytes(result):
    """On a star every message crosses one link up and one down; at the end some are still on their way."""
    links = result.links
    up = links.loc[links["target"] == "switch", "nbytes"].sum()
    down = links.loc[links["source"] == "switch", "nbytes"].sum()
    assert up == pytest.approx(down, rel=1e-9)
    n_nodes = (links["nbytes"] > 0.0).sum()
    under_way = n_nodes * 2 * result.workloads[0].gradient_nbytes
    assert result.nbytes_sent - under_way <= up <= result.nbytes_sent * (1.0 + 1e-9)
    assert up > 0.5 * result.nbytes_sent


@each(1)
def test_the_clock_does_not_depend_on_values(case):
    if case.decides:
        pytest.skip("its values decide about the clock")
    n_updates = 40
    training = ddlsim.Training(rate=case.rate, updates=n_updates, evaluate_every=20)
    times = [t for t, _ in some(case, training).recorder.updates]
    each = contract.of(case.strategy).updates(n_updates, case.n_workers)
    often = math.ceil(n_updates / each)  # steps of all for an update
    timing = ddlsim.simulate(
        "office-1gbe", "digits-cnn", case.strategy, 16, case.n_workers, jitter=ddlsim.Lognormal(0.3),
        steps=n_updates * often, warmup=0, optimizer="sgd",
    )  # fmt: skip
    assert [t for t, _ in timing.recorder.updates][:n_updates] == times


@each(2)
def test_it_learns(case):
    """It stops as soon as it does."""
    training = ddlsim.Training(
        rate=case.rate, epochs=400 * 64 / 1437, evaluate_every=20, sharding="iid", target_accuracy=case.accuracy
    )
    assert some(case, training).accuracy >= case.accuracy


@each(3)
def test_an_interrupted_run_continues_bit_for_bit(case, tmp_path):
    """And of the whole one every second and every byte is accounted for."""
    training = ddlsim.Training(
        rate=case.rate, epochs=30 * 64 / 1437, evaluate_every=7, optimizer=ddlsim.Momentum(0.5), sharding="iid"
    )
    whole = some(case, training)
    account_for_seconds(whole)
    account_for_bytes(whole)

    def interrupt(now, n_updates, epoch, row):
        if n_updates == len(whole.recorder.updates) * 3 // 5:
            raise KeyboardInterrupt

    part = some(case, training, progress=interrupt)
    assert part.interrupted
    part.save(tmp_path / "run.npz")
    again = ddlsim.resume(tmp_path / "run.npz", part.experiment)
    assert again.history.equals(whole.history)
    assert again.recorder.updates == whole.recorder.updates
    assert again.params.tobytes() == whole.params.tobytes()
