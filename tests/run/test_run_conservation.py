"""Every run adds up, and one that does not has no result: the error names the link or worker and both numbers."""

import dataclasses
import json

import numpy as np
import pytest

import ddlsim
from ddlsim.cluster import Cluster, star, with_detail
from ddlsim.errors import ConservationError
from ddlsim.network import BusyIntervals, Network
from ddlsim.run import conservation, run
from ddlsim.run import simulate as simulate_module
from ddlsim.runtime.loop import Loop
from ddlsim.runtime.recorder import COMMUNICATION, COMPUTE, WAITING, Recorder

STAR = Cluster.from_graph(star(4, bandwidth="1 Gbit/s", latency="10 us"))


def experiment(**more):
    given = {"workers": 3, "steps": 3, "compute": ddlsim.Measured("10 ms", 8), "batch_size": 8, **more}
    return ddlsim.Experiment(STAR, given.pop("model", "lenet5"), **given)


def up(result):
    """The rows of the links from workers to the switch."""
    return result.links[result.links["target"] == "switch"].iloc[: result.n_workers]


# ------------------------------------------------------------ what was wrong


def test_a_saturated_link_is_busy_although_its_flow_has_not_ended():
    """A ring of three: every link carries 2/3 x 102 MB twice a step without a pause; cut in the second step."""
    made = experiment(model="resnet50", strategy=ddlsim.AllReduce("ring", "none"), steps=2, warmup=0)
    step = run(made.with_(steps=1)).end_time
    cut = 1.6 * step
    result = run(made.with_(max_time=cut), keep_spans=True)
    seconds = cut - 2 * 10e-3
    links = up(result)
    assert (links["busy"] * cut).to_numpy() == pytest.approx(seconds, rel=1e-3)  # but for latencies
    assert links["nbytes"].to_numpy() == pytest.approx(seconds * 125e6, rel=1e-3)
    assert (links["utilisation"] <= links["busy"] + 1e-9).all()
    assert result.busy is not None
    logged = np.bincount(result.busy.channel, result.busy.end - result.busy.start, STAR.n_channels)
    assert logged == pytest.approx(result.channel_busy, rel=1e-9)
    assert result.busy.end.max() == cut


def test_bytes_sent_are_those_of_messages_that_have_started():
    """After one step of a centralised exchange the next one has been prepared, but nobody has sent anything."""
    one = run(experiment(strategy=ddlsim.AllReduce("ring", "none"), steps=1, warmup=0))
    nbytes = 4.0 * one.workloads[0].model.n_params
    assert one.nbytes_sent == pytest.approx(4 * nbytes, rel=1e-9)  # 2 (n - 1) of the buffer
    begun = one.end_time + 10e-3 + 2e-6
    cut = run(experiment(strategy=ddlsim.AllReduce("ring", "none"), steps=2, warmup=0, max_time=begun))
    under_way = cut.nbytes_sent - one.nbytes_sent
    assert under_way == pytest.approx(nbytes, rel=1e-9)  # each rank's first message of n_params / 3


def test_a_row_of_the_history_counts_the_bytes_sent_by_then():
    training = ddlsim.Training("digits", rate=0.1, updates=6, evaluate_every=1)
    strategy = ddlsim.AllReduce("ring", "none")
    result = run(experiment(model="digits-cnn", strategy=strategy, training=training))
    step = 4 * result.workloads[0].gradient_nbytes
    assert [row.nbytes for row in result.evaluations] == pytest.approx([i * step for i in range(7)], rel=1e-9)
    assert result.nbytes_sent == pytest.approx(6 * step, rel=1e-9)


def test_a_known_collective_counts_as_far_as_it_has_come():
    """Cut in the middle of the only exchange: half of its bytes, and a link busy for that half."""
    strategy = ddlsim.AllReduce("ring", "none", cost="nccl")
    made = {"model": "resnet50", "strategy": strategy, "warmup": 0}
    whole = run(experiment(**made, steps=1))
    took = whole.end_time - 10e-3
    cut = run(experiment(**made, steps=2, max_time=whole.end_time + 10e-3 + took / 2), keep_spans=True)
    assert cut.nbytes_sent == pytest.approx(1.5 * whole.nbytes_sent, rel=1e-9)
    assert cut.channel_nbytes == pytest.approx(1.5 * whole.channel_nbytes, rel=1e-9)
    assert cut.channel_busy == pytest.approx(1.5 * whole.channel_busy, rel=1e-9)
    assert cut.busy is not None
    logged = np.bincount(cut.busy.channel, cut.busy.end - cut.busy.start, STAR.n_channels)
    assert logged == pytest.approx(cut.channel_busy, rel=1e-9)


def test_bursts_are_bounded_by_their_buckets():
    """Gossip of 0.2 MB on links with large buckets: nothing but bursts, so bytes without busy time."""
    cluster = with_detail(STAR, burst="1 MB")
    result = run(dataclasses.replace(experiment(strategy=ddlsim.DPSGD("ring")), cluster=cluster))
    assert result.channel_nbytes.max() > 0.0
    assert result.channel_busy.max() == 0.0
    assert result.links["utilisation"].max() * result.end_time * 125e6 <= 1e6 + 125e6 * result.end_time


# ------------------------------------------------------------ what would be wrong


def broken(monkeypatch, owner, name, change):
    """Let a method or property of `owner` return something else."""
    original = getattr(owner, name)
    if isinstance(original, property):
        monkeypatch.setattr(owner, name, property(lambda self: change(original.fget(self))))
    else:
        monkeypatch.setattr(owner, name, lambda *args, **more: change(original(*args, **more)))


def message(**more):
    with pytest.raises(ConservationError) as error:
        run(experiment(**more))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_link_that_carries_more_than_it_can(monkeypatch):
    broken(monkeypatch, Loop, "traffic", lambda t: t._replace(nbytes=t.nbytes * 1.01))
    text = message()
    assert text.startswith("link h0 -> switch (nic): carried ")
    assert "but had room for" in text


def test_a_link_that_is_busy_for_longer_than_the_run(monkeypatch):
    broken(monkeypatch, Loop, "traffic", lambda t: t._replace(busy=t.busy + 1.0))
    assert message().startswith("link h0 -> switch (nic): busy 1.0")


def forgetful(busy):
    """The same intervals, the first of which takes no time."""
    first, *parts = (part for part in busy._parts if len(part.rows))
    rows = first.rows.copy()
    rows["end"][0] = rows["start"][0]
    return BusyIntervals([first._replace(rows=rows), *parts], busy._n_channels)


@pytest.mark.parametrize("faults", [(), ddlsim.LinkFault("h4", "switch", 0.0, 1.0), ddlsim.Pause(1e6, 1.0)])
def test_collectives_of_known_time_and_messages_that_do_not_fit_on_a_link(faults):
    cluster = Cluster.from_graph(star(5, bandwidth="0.1 Gbit/s", latency="20 us"))
    strategy = ddlsim.Parallel(pipeline=2, data=2, micro_batch=2, recompute="stage", cost="nccl", overlap="none")
    timing = {"compute": ddlsim.Affine("1 ms", "0.1 ms"), "speed": [1, 2, 1, 0.5]}
    with pytest.raises(ddlsim.ConfigError, match=r"do not contend .*link h\d -> switch .* use cost='simulated'"):
        ddlsim.simulate(cluster, "googlenet", strategy, 96, 4, steps=2, warmup=0, faults=faults, **timing)


def test_a_timeline_that_forgets_an_interval(monkeypatch):
    broken(monkeypatch, Network, "busy_intervals", forgetful)
    with pytest.raises(ConservationError, match=r"link h\d -> switch \(nic\): busy in its timeline .* s, in all .* s"):
        run(experiment(), keep_spans=True)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("delivered", "the network: bytes sent .*, but delivered and in flight"),
        ("left_crossings", "all links: bytes sent x links .*, but carried and still ahead"),
        ("issued", "the network: bytes sent"),
    ],
)
def test_bytes_that_are_lost(monkeypatch, field, text):
    broken(monkeypatch, simulate_module.Network, "accounts", lambda a: a._replace(**{field: getattr(a, field) + 1e3}))
    with pytest.raises(ConservationError, match=text):
        run(experiment())


def test_bytes_that_nobody_asked_for(monkeypatch):
    def change(accounts):
        return accounts._replace(issued=accounts.issued * 2, delivered=accounts.delivered * 2)

    broken(monkeypatch, simulate_module.Network, "accounts", change)
    assert "but asked for" in message()


def test_a_bucket_that_lets_through_more_than_it_holds(monkeypatch):
    def change(accounts):
        return accounts._replace(burst=np.full(STAR.n_channels, 1.0), passed=accounts.passed + 1e9)

    broken(monkeypatch, simulate_module.Network, "accounts", change)
    assert "passed at once" in message()


@pytest.mark.parametrize("what", ["twice", "beyond the end", "backwards"])
def test_a_worker_that_is_booked_twice(monkeypatch, what):
    original = Recorder.worker

    def worker(self, rank, kind, name, start, end):
        original(self, rank, kind, name, start, end)
        if rank == 1 and kind == COMPUTE and name == "forward":
            begin = {"twice": start, "beyond the end": end + 1e3, "backwards": end + 2e-3}[what]
            original(self, rank, WAITING, name, begin, begin + (-1e-3 if what == "backwards" else 1e-3))

    monkeypatch.setattr(Recorder, "worker", worker)
    text = message()
    assert text.startswith("worker 1: compute ")
    assert " s add up to " in text
    assert " s in a run of " in text


def test_idle_is_the_sum_of_the_gaps():
    recorder = Recorder(1)
    recorder.worker(0, COMPUTE, "a", 1.0, 2.0)
    recorder.worker(0, COMMUNICATION, "b", 2.5, 3.0)
    recorder.begin(0, COMPUTE, "c", 4.0)
    recorder.close(6.0)
    assert recorder.seconds == [{"compute": 3.0, "communication": 0.5, "waiting": 0.0, "input": 0.0}]
    assert recorder.idle == [2.5]
    conservation.check_workers(recorder, 6.0)
    with pytest.raises(ConservationError, match=r"worker 0: compute 3, .* input 0 and idle 2\.5 s add up"):
        conservation.check_workers(recorder, 5.0)


def test_updates_out_of_order_or_too_many(monkeypatch):
    original = simulate_module.StopRule.updated

    def early(self, n_samples):
        original(self, n_samples)
        if len(self.recorder.updates) == 2:
            self.recorder.updates[-1] = (0.0, n_samples)

    monkeypatch.setattr(simulate_module.StopRule, "updated", early)
    assert message().startswith("updates: ")

    def twice(self, n_samples):
        original(self, n_samples)
        if len(self.recorder.updates) == 2:
            self.recorder.updates[-1] = (self.loop.now, 2 * n_samples)

    monkeypatch.setattr(simulate_module.StopRule, "updated", twice)
    assert message().startswith("updates: samples ")


def test_a_throughput_that_contradicts_the_updates(monkeypatch):
    from ddlsim.run.result import Result

    monkeypatch.setattr(Result, "throughput", property(lambda self: 1.0))
    assert message().startswith("throughput: samples ")


def test_steps_that_end_out_of_order(monkeypatch):
    from ddlsim.runtime.context import Worker

    monkeypatch.setattr(Worker, "end_step", lambda self: self.recorder.step_end[self.rank].insert(0, self.loop.now))
    assert message(strategy=ddlsim.FedAvg(1.0, local_steps=4)).startswith("worker 0: a step ends at ")


def test_an_interrupt_in_the_middle_of_an_event_still_has_a_result(monkeypatch):
    original, n_left = Recorder.worker, [40]

    def worker(self, *args):
        n_left[0] -= 1
        if n_left[0] == 0:
            raise KeyboardInterrupt
        original(self, *args)

    monkeypatch.setattr(Recorder, "worker", worker)
    training = ddlsim.Training("digits", updates=50)
    result = run(experiment(model="digits-cnn", strategy=ddlsim.KSync(2), training=training))
    assert result.interrupted
    assert json.dumps(result.links["busy"].tolist())
