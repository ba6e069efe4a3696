"""Links that serve bytes in the order of their arrival: by hand, against frames, and what must always hold."""

import dataclasses

import frames_reference
import numpy as np
import pytest
from network_reference import Paths, run_flows

from ddlsim import collective_time
from ddlsim.cluster import Cluster, load_cluster, star, with_detail
from ddlsim.cluster.details import LinkDetail, collected
from ddlsim.collectives import build
from ddlsim.errors import ConfigError
from ddlsim.network import Network


def fabric(capacity, paths, latency=None, **detail):
    n = len(capacity)
    details = collected([LinkDetail(sharing="fifo", **detail)] * n)
    made = Paths(capacity, latency or [0.0] * n, paths, details=details, reverse_link=np.full(n, -1))
    made.is_switch_port = np.zeros(n, dtype=bool)
    return made


def ends(capacity, paths, starts, nbytes, **detail):
    made = fabric(capacity, paths, **detail)
    return run_flows(Network(made), made, starts, nbytes, check=False)[0].tolist()


def test_messages_of_a_sender_are_served_one_after_the_other():
    """Links of 10 bytes/s. A and B leave the same host at 0 for different ones: A has it for itself until 5 s."""
    assert ends([10.0, 10.0, 10.0], [[0, 1], [0, 2]], [0.0, 0.0], [50.0, 20.0]) == [5.0, 7.0]


def test_bytes_that_arrived_together_leave_together():
    """A (100 bytes) comes from link 0 and B from link 1 at 100 bytes/s each, 0.5 s later, to link 2 of 100 bytes/s.
    What arrives from 0.5 to 1 s, half of it A's, leaves from 0.5 to 1.5 s. B's other half leaves until 2 s.
    """
    assert ends([100.0] * 3, [[0, 2], [1, 2]], [0.0, 0.5], [100.0, 100.0]) == pytest.approx([1.5, 2.0], rel=1e-14)


def test_a_slow_link_delays_no_one_before_it():
    """A goes on over a link of 1 byte/s and has left its host after 1 s, when B gets the host's link."""
    assert ends([10.0, 1.0, 10.0], [[0, 1], [0, 2]], [0.0, 0.0], [10.0, 10.0]) == pytest.approx([10.0, 2.0], rel=1e-14)


def test_a_window_lets_others_pass():
    """Windows are 8 bytes. A (16 bytes) and B (8 bytes) share their first link of 1 byte/s: A's window, B's, the rest
    of A.
    """
    window = {"transport": "tcp-reno", "warm": True, "window": 8.0}
    assert ends([1.0], [[0], [0]], [0.0, 0.0], [16.0, 8.0], **window) == pytest.approx([24.0, 16.0], rel=0.02)
    assert ends([1.0], [[0], [0]], [0.0, 0.0], [16.0, 8.0]) == [16.0, 24.0]


def test_a_connection_hands_messages_over_in_order():
    """B (1 byte) is behind A on the connection of both, and would pass it on one of its own."""
    made = fabric([1.0], [[0]], transport="tcp-reno", warm=True, window=8.0)
    network = Network(made)
    network.send([0, 0], [1, 1], np.array([16.0, 1.0]), 0.0)
    order = []
    while (done := network.advance()) is not None:
        order += [done.time] * len(done.ids)
    assert order == pytest.approx([16.0, 17.0])


def test_a_fault_slows_what_waits():
    """A link of 10 bytes/s has half of its capacity from 1 to 3 s; A (10 bytes) and B (20 bytes) are sent at 0."""
    made = fabric([10.0], [[0], [0]])
    network = Network(made)
    network.will_change([(1.0, 3.0, 0, 0.5)])
    end, _ = run_flows(network, made, [0.0, 0.0], [10.0, 20.0], check=False)
    assert end.tolist() == pytest.approx([1.0, 4.0])
    network = Network(made)
    network.will_change([(1.0, 3.0, 0, 0.5)])
    end, _ = run_flows(network, made, [0.0, 9.0], [20.0, 10.0], check=False)
    assert end.tolist() == pytest.approx([3.0, 10.0])


def random_case(seed):
    """Links, routes (up to 4 hops, in any order), starts and sizes of some messages, without ties."""
    rng = np.random.default_rng(seed)
    n_links, n_messages = int(rng.integers(1, 6)), int(rng.integers(2, 8))
    paths = [rng.permutation(n_links)[: int(rng.integers(1, 5))].tolist() for _ in range(n_messages)]
    starts, nbytes = rng.uniform(0.0, 3.0, n_messages).tolist(), rng.uniform(0.5, 10.0, n_messages).tolist()
    return rng.uniform(1.0, 6.0, n_links).tolist(), paths, starts, nbytes


@pytest.mark.parametrize("seed", range(60))
def test_frames_that_become_smaller_tend_to_it(seed):
    capacity, paths, starts, nbytes = random_case(seed)
    end = np.array(ends(capacity, paths, starts, nbytes))
    coarse, fine = (
        np.abs(np.array(frames_reference.finish_times(capacity, paths, starts, nbytes, n)) - end).max()
        for n in (100, 400)
    )
    assert fine <= max(0.4 * coarse, 1e-9)
    assert fine < 0.1


@pytest.mark.parametrize("seed", range(20))
def test_frames_with_windows_tend_to_it(seed):
    """Two messages, as more come to wait for each other's units, whose order is a matter of infinitely little."""
    capacity, paths, starts, nbytes = (part[:2] if i else part for i, part in enumerate(random_case(seed)))
    units = [32 * (2 + int(n)) for n in nbytes]
    nbytes = [n / 32.0 for n in units]  # whole units of windows of one byte
    end = np.array(ends(capacity, paths, starts, nbytes, transport="tcp-reno", warm=True, window=1.0, unordered=True))
    coarse, fine = (
        np.abs(np.array(frames_reference.finish_times(capacity, paths, starts, nbytes, n, units)) - end).max()
        for n in (2, 8)
    )
    assert fine <= max(0.4 * coarse, 0.002)  # one of 512 units or more may change places


def two_ways(*targets, seed=None, **detail):
    """Time of 1 MB from A to C over links of 1 MB/s; C sends as much to `targets` from 0.1 s on (windows: 32 kB)."""
    plain = load_cluster(star(4, bandwidth=1e6, latency=0.0))
    cluster = with_detail(plain, sharing="fifo", transport="tcp-bbr", warm=True, window="32 kB", **detail)
    network = Network(cluster if seed is None else cluster.sampled(seed))
    first = network.send([cluster.workers[0]], [cluster.workers[2]], np.array([1e6]), 0.0)
    while network.advance(0.1) is not None:
        pass
    for target in targets:
        network.send([cluster.workers[2]], [cluster.workers[target]], np.array([1e6]), 0.1)
    while (done := network.advance()) is not None:
        if first[0] in done.ids:
            return done.time
    return None


def test_acknowledgements_wait_behind_data():
    """Behind one window, acknowledgements of A take as long as A's window; behind two, A is half as fast."""
    assert two_ways(1, 3) == pytest.approx(1.0)
    assert two_ways(queued_acks=True) == pytest.approx(1.0)
    assert two_ways(1, queued_acks=True) == pytest.approx(1.0, abs=0.03)
    assert two_ways(1, 3, queued_acks=True) == pytest.approx(0.1 + 0.9 / 0.5, abs=0.03)


def test_windows_vary_between_messages_and_seeds():
    times = [two_ways(1, 3, queued_acks=True, window_spread=0.4, seed=seed) for seed in (0, 0, 1, 2, 3)]
    assert times[0] == times[1]
    assert len(set(times)) == 4
    assert two_ways(1, 3, queued_acks=True, seed=1) == two_ways(1, 3, queued_acks=True, seed=2)


@pytest.mark.parametrize("seed", range(20))
def test_frames_with_queued_acknowledgements_tend_to_it(seed):
    """Three messages between four hosts on a switch; acknowledgements take the links of the other direction."""
    rng = np.random.default_rng(seed)
    up, down = np.arange(4), np.arange(4, 8)
    capacity = np.tile(rng.uniform(1.0, 6.0, 4), 2).tolist()
    pairs = [rng.permutation(4)[:2] for _ in range(3)]
    paths, back = ([[int(up[a]), int(down[b])] for a, b in each] for each in (pairs, [(b, a) for a, b in pairs]))
    units, starts = (32 * rng.integers(2, 9, 3)).tolist(), rng.uniform(0.0, 1.0, 3).tolist()
    nbytes = [n / 32.0 for n in units]  # whole units of windows of one byte
    detail = {"transport": "tcp-reno", "warm": True, "window": 1.0, "unordered": True}
    made = fabric(capacity, paths, queued_acks=True, **detail)
    made.reverse_link = np.array([*down, *up])
    end = np.array(run_flows(Network(made), made, starts, nbytes, check=False)[0])
    coarse, fine = (
        np.abs(np.array(frames_reference.finish_times(capacity, paths, starts, nbytes, n, units, back)) - end).max()
        for n in (2, 8)
    )
    assert fine <= max(0.4 * coarse, 0.01)  # one of 512 units or more may change places


@pytest.mark.parametrize("seed", range(40))
def test_bytes_are_conserved_at_any_time(seed):
    capacity, paths, starts, nbytes = random_case(seed)
    made = fabric(capacity, paths)
    network = Network(made)
    times = sorted([*starts, *np.random.default_rng(seed).uniform(0.0, 12.0, 20)])
    before = np.zeros(len(capacity))
    for time in times:
        while network.advance(time) is not None:
            pass
        accounts = network.accounts()
        assert accounts.issued == pytest.approx(accounts.delivered + accounts.in_flight)
        carried = accounts.nbytes.sum() + accounts.left_crossings
        assert carried == pytest.approx(accounts.issued_crossings, rel=1e-9)
        assert (accounts.nbytes >= before - 1e-9).all()
        assert (accounts.busy <= time * (1 + 1e-12)).all()
        assert (accounts.nbytes <= accounts.busy * np.array(capacity) * (1 + 1e-9) + 1e-12).all()
        before = accounts.nbytes
        for i in [i for i in range(len(starts)) if starts[i] == time]:
            network.send([2 * i], [2 * i + 1], np.array([nbytes[i]]), time)
    while network.advance() is not None:
        pass
    assert not network.pending
    assert network.accounts().left_crossings == 0.0


def test_a_link_is_not_idle_while_something_waits():
    """However many arrive at whatever rates, the last byte leaves when all bytes have been served without a pause."""
    rng = np.random.default_rng(1)
    rates, nbytes = rng.uniform(2.0, 9.0, 20).tolist(), rng.uniform(1.0, 9.0, 20).tolist()
    end = ends([*rates, 3.0], [[i, 20] for i in range(20)], [0.0] * 20, nbytes)
    assert max(end) == pytest.approx(sum(nbytes) / 3.0, rel=1e-12)


@pytest.mark.parametrize("detail", [{}, {"frame_header": 66.0, "frame_payload": 1448.0, "burst": 4542.0}])
@pytest.mark.parametrize("capacity", [[10.0, 10.0], [7.0, 3.0, 5.0], [3.0, 0.7], [1e15, 3.0]])
def test_a_message_alone_takes_the_time_of_fair_sharing_to_the_last_bit(capacity, detail):
    path = list(range(len(capacity)))
    made = fabric(capacity, [path], [0.1] * len(path), **detail)
    fair = dataclasses.replace(made, details=collected([LinkDetail(**detail)] * len(path)))
    fair.is_switch_port = made.is_switch_port
    for nbytes in (1.0, 12345.678, 1e6):
        both = [run_flows(Network(each), each, [0.3], [nbytes], check=False)[0].tolist() for each in (made, fair)]
        assert both[0] == both[1]


@pytest.mark.parametrize("name", ["ring", "halving_doubling", "binomial_tree(1)"])
def test_collectives_without_contention_take_the_time_of_fair_sharing(name):
    plain = load_cluster(star(8, bandwidth="8 Gbit/s", latency="5 us"))
    queued = with_detail(plain, sharing="fifo")
    assert collective_time(queued, name, 1e6) == pytest.approx(collective_time(plain, name, 1e6), rel=1e-12)


def test_a_route_may_cross_a_channel_twice():
    made = fabric([8.0, 8.0], [[0, 1]])
    made.link_channel = np.array([0, 0])
    assert run_flows(Network(made), made, [0.0], [16.0], check=False)[0].tolist() == [4.0]


def test_messages_of_one_instant_queue_in_the_order_in_which_they_were_sent():
    assert ends([1.0], [[0]] * 4, [0.0] * 4, [1.0, 2.0, 3.0, 4.0]) == pytest.approx([1.0, 3.0, 6.0, 10.0])


def all_to_all(cluster, *, replay):
    network = Network(cluster)
    network.engine.net.counts.replay = replay
    schedule = build("pairwise", 6, kind="all_to_all")
    last = 0.0
    for name in (schedule, build("ring", 6, 1e6)):
        ranks = np.arange(6)
        identity = network.collective(name, cluster.workers, 1e6)
        network.join(np.full(6, identity), ranks, last)
        while (done := network.advance()) is not None:
            last = done.time
    return last, network.engine.net.counts.fast_forwarded, network.channel_nbytes.tolist()


def test_repeated_rounds_are_replayed_where_no_messages_meet():
    cluster = with_detail(Cluster.from_graph(star(6, bandwidth=1e9, latency=5e-6)), sharing="fifo")
    with_it, without = all_to_all(cluster, replay=1), all_to_all(cluster, replay=0)
    assert with_it[1] > 0
    assert without[1] == 0
    assert with_it[0] == without[0]
    assert with_it[2] == pytest.approx(without[2])


def test_many_messages_and_longer_routes_make_arrays_longer():
    """200 messages wait on one link, then come some with a longer route, while the first ones are still there."""
    paths = [[0, 1]] * 200 + [[0, 1, 2, 3, 4, 5, 6, 7]] * 3
    end = ends([1.0] * 8, paths, [0.0] * 200 + [50.0] * 3, [1.0] * 203)
    assert end == pytest.approx([*range(1, 201), 201, 202, 203])


def test_what_queues_do_not_simulate_is_an_error():
    made = fabric([1.0, 1.0], [[0, 1]])
    with pytest.raises(ConfigError, match="several paths"):
        Network(dataclasses.replace(made, shares=[[0.5, 0.5]]))
    with pytest.raises(ConfigError, match="buffer"):
        Network(fabric([1.0, 1.0], [[0, 1]], transport="tcp-reno", buffer=1e4))
