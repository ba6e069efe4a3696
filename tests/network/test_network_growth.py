"""The arrays grow while things are under way, and nothing is lost; the same run gives the same bits."""

import dataclasses

import numpy as np
import pytest
from network_reference import Paths, assert_max_min, finish_times, run_flows

from ddlsim import compiler
from ddlsim.cluster import Cluster, star
from ddlsim.collectives import Schedule, build, messages
from ddlsim.network import Network, kernel


def test_many_flows_on_one_channel_move_its_list_and_repack_the_pool():
    """Hundreds of flows come one by one through channel 0 and leave by size; others use other channels."""
    rng = np.random.default_rng(3)
    n = 400
    paths = [[0, 1 + i % 7] if i % 5 else [1 + i % 7] for i in range(n)]
    fabric = Paths([5.0] * 8, [0.0] * 8, paths)
    starts = (0.01 * np.arange(n)).tolist()
    nbytes = rng.exponential(1.0, n).tolist()
    end, _ = run_flows(Network(fabric), fabric, starts, nbytes, check=False)
    np.testing.assert_allclose(end, finish_times(fabric, starts, nbytes), rtol=1e-9)


def test_a_longer_route_than_any_before_while_flows_are_under_way():
    """Routes of 1, 2, 3, 5, 9 and 17 links appear one after the other; earlier flows still run."""
    lengths = [1, 1, 2, 3, 5, 9, 17, 17]
    paths = [list(range(n)) for n in lengths]
    fabric = Paths([10.0] * 17, [0.0] * 17, paths)
    starts = [float(i) for i in range(len(lengths))]
    nbytes = [30.0] * len(lengths)
    end, n_checked = run_flows(Network(fabric), fabric, starts, nbytes)
    assert n_checked > 3 * len(lengths)
    np.testing.assert_allclose(end, finish_times(fabric, starts, nbytes), rtol=1e-10)


def test_slots_grow_in_the_middle_of_an_instant():
    """A rank sends 300 empty messages in 300 rounds without waiting for anybody: with no latency that is one
    instant in which all of them queue at the receiver, who takes them one overhead after the other."""
    cluster = Cluster.from_graph(star(2, bandwidth="10 Gbit/s", latency="0 s"))
    cluster = dataclasses.replace(cluster, recv_overhead=np.full(3, 1e-6))
    schedule = Schedule(2, 1, ((messages([0], [1], reduce=False, repeat=300),),))
    network = Network(cluster)
    collective = network.collective(schedule, cluster.workers, 0.0)
    network.join([collective, collective], [0, 1], 0.0)
    first = network.advance()
    assert (first.time, first.ranks.tolist()) == (0.0, [0])
    last = network.advance()
    assert last.ranks.tolist() == [1]
    assert last.time == pytest.approx(300e-6, rel=1e-9)
    assert network.n_messages == 300


def test_whole_numbers_of_seconds_and_bytes_need_no_second_kernel():
    """Each further combination of types would be compiled for seconds."""
    cluster = Cluster.from_graph(star(2, bandwidth="10 Gbit/s", latency="10 us"))
    network = Network(cluster)
    network.join([network.collective(build("ring", 2), cluster.workers, 1e6)] * 2, [0, 1], 0)
    network.send([0], [1], np.array([1e6]), 0)
    network.send([0, 1], [1, 0], np.array([1_000_000, 1_000_000]), 0)
    while network.advance(1) is not None:
        pass
    for compiled in (kernel.advance, kernel.join, kernel.send_one):
        assert len({path.name for path in compiled.store.files()} if compiler.LOADS else compiled.signatures) == 1


def test_a_burst_of_messages_after_few():
    cluster = Cluster.from_graph(star(40, bandwidth="10 Gbit/s", latency="10 us"))
    network = Network(cluster)
    network.send([0], [1], np.array([1e6]), 0.0)
    src, dst = np.divmod(np.arange(1600), 40)
    network.send(src, dst, np.full(1600, 1e5), 1e-4)
    assert len(network.advance(2e-4).ids) == 40  # those to themselves
    assert network.advance(2e-4) is None
    assert assert_max_min(network, cluster.channel_capacity) == 1561
    n_done = 40
    while (done := network.advance()) is not None:
        n_done += len(done.ids)
    assert n_done == 1601
    assert not network.pending
    assert network.channel_nbytes.sum() == pytest.approx(2 * (1e6 + 1560 * 1e5), rel=1e-12)


def test_the_same_run_gives_the_same_bits():
    rng = np.random.default_rng(7)
    paths = [rng.choice(20, 4, replace=False).tolist() for _ in range(150)]
    fabric = Paths(rng.uniform(1.0, 2.0, 20).tolist(), [0.1] * 20, paths)
    starts, nbytes = rng.choice([0.0, 0.5], 150).tolist(), rng.exponential(1.0, 150).tolist()
    first, _ = run_flows(Network(fabric), fabric, starts, nbytes, check=False)
    again, _ = run_flows(Network(fabric), fabric, starts, nbytes, check=False)
    assert first.tolist() == again.tolist()


def test_completions_of_one_instant_have_a_written_order():
    """Messages as they were sent, then collectives by id and rank."""
    cluster = Cluster.from_graph(star(8, bandwidth="10 Gbit/s", latency="10 us"))
    schedule = Schedule(4, 1, ((messages([3, 2, 1, 0], [2, 3, 0, 1], reduce=False),),))
    network = Network(cluster)
    ids = [network.collective(schedule, cluster.workers[o : o + 4], 1e6) for o in (0, 4)]
    network.join([ids[1]] * 4 + [ids[0]] * 4, [3, 2, 1, 0] * 2, 0.0)
    handles = network.send([2, 1], [2, 1], np.zeros(2), 0.0)
    done = network.advance()
    assert (done.time, done.ids.tolist()) == (0.0, handles.tolist())
    done = network.advance()
    assert done.ids.tolist() == [ids[0]] * 4 + [ids[1]] * 4
    assert done.ranks.tolist() == [0, 1, 2, 3] * 2
