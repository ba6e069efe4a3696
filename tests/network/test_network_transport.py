"""Rendezvous, connections in order, their limits and windows: by hand, and against an oracle that shares no code."""

import dataclasses
import heapq

import numpy as np
import pytest
from draws import seeds
from transport_reference import rounds_on_a_star

from ddlsim.cluster import Cluster, star, with_detail
from ddlsim.collectives import Round, Schedule, all_reduce, all_to_all
from ddlsim.collectives.gloo import gloo_ring
from ddlsim.network import Network
from ddlsim.network.network import schedule_time

RATE, PATH = 1e9, 2e-3  # bytes/s; s from host to host
MIB = 2.0**20


def cluster(n_hosts=4, **details):
    plain = Cluster.from_graph(star(n_hosts, bandwidth=RATE, latency=PATH / 2))
    return with_detail(plain, **details) if details else plain


def ends(network, hosts, sends, now=0.0):
    """Return when messages (source, target, bytes), all sent at `now`, end."""
    source, target = ([hosts[s[k]] for s in sends] for k in (0, 1))
    ids = network.send(source, target, np.array([s[2] for s in sends], dtype=float), now)
    end = {}
    while (done := network.advance()) is not None:
        end.update(dict.fromkeys(done.ids.tolist(), done.time))
    return [end[i] for i in ids.tolist()]


def alone(nbytes, **details):
    where = cluster(**details)
    return ends(Network(where), where.workers, [(0, 1, nbytes)])[0]


# ---------------------------------------------------------------- rendezvous


def test_a_message_above_the_limit_asks_first():
    asking = {"transport": "infiniband", "rendezvous": "64 KiB"}
    assert alone(65536, **asking) == pytest.approx(PATH + 65536 / RATE, rel=1e-12)
    assert alone(65537, **asking) == pytest.approx(3 * PATH + 65537 / RATE, rel=1e-12)
    assert alone(65537, transport="infiniband") == pytest.approx(PATH + 65537 / RATE, rel=1e-12)


def test_a_large_message_waits_for_its_receiver():
    """Host 1 is busy with host 2 in round 0; host 0 sends to it in round 1, and has asked long since."""
    rounds = [[(2, 1, 8e6)], [(0, 1, 1e6)]]
    for limit, expected in ((0.0, max(PATH + 9e6 / RATE, 0.0)), (1.0, 3 * PATH + 8e6 / RATE + 2 * PATH + 1e6 / RATE)):
        took = time_of(rounds, 3, transport="infiniband", rendezvous=limit)
        assert took == pytest.approx(expected, rel=1e-12)


def time_of(rounds, n_hosts, nbytes=None, **details):
    lane = tuple(
        Round(np.array([m[0] for m in r]), np.array([m[1] for m in r]), np.zeros(len(r), dtype=np.int64),
              np.ones(len(r), dtype=np.int64), reduce=False) for r in rounds
    )  # fmt: skip
    sizes = [np.array([[m[2] for m in r]], dtype=float) for r in rounds]
    where = cluster(n_hosts, **details)
    network = Network(where)
    number = network.collective(Schedule(n_hosts, 1, (lane,)), where.workers, sizes)
    network.join([number] * n_hosts, range(n_hosts), 0.0)
    end = 0.0
    while (done := network.advance()) is not None:
        end = done.time
    accounts = network.accounts()
    assert accounts.in_flight == 0.0
    assert accounts.nbytes.sum() == pytest.approx(2 * sum(m[2] for r in rounds for m in r))
    assert (accounts.nbytes <= accounts.capacity * accounts.busy * (1 + 1e-9)).all()
    return end


@pytest.mark.parametrize("seed", range(12))
def test_random_rounds_as_the_oracle_says(seed):
    """Whatever the rounds, with every combination of rendezvous, order and limits: ends agree to rounding."""
    draw = np.random.default_rng(seed)
    n_hosts = int(draw.integers(3, 6))
    rounds = []
    for _ in range(int(draw.integers(2, 7))):
        pairs = [(s, t) for s in range(n_hosts) for t in range(n_hosts) if s != t]
        chosen = draw.permutation(len(pairs))[: draw.integers(1, 6)]
        # a pair may come twice in a round: its second message is behind the first
        rounds.append([(*pairs[p], float(draw.integers(1, 4e6))) for p in [*chosen, chosen[0]]])
    for rendezvous in (0.0, 1e6):
        for ordered in (True, False):
            for flow_rate in (0.0, 0.31 * RATE):
                details = {"transport": "infiniband", "rendezvous": rendezvous, "unordered": not ordered}
                took = time_of(rounds, n_hosts, **details, flow_rate=flow_rate)
                expected = rounds_on_a_star(
                    n_hosts, rounds, RATE, PATH, rendezvous=rendezvous, ordered=ordered, limit=flow_rate or np.inf
                )
                assert took == pytest.approx(expected, rel=1e-11), (rendezvous, ordered, flow_rate)


def test_repeated_rounds_wait_for_their_own_receiver():
    """A ring is two rounds, repeated; every step of every rank adds a round trip, as all enter it together."""
    n, nbytes = 5, 5e6
    for repeats in (all_reduce.ring(n),):
        took = schedule_time(cluster(n, transport="infiniband", rendezvous=1e5), repeats, cluster(n).workers, nbytes)
        assert took == pytest.approx(2 * (n - 1) * (3 * PATH + nbytes / n / RATE), rel=1e-12)


def test_random_sizes_make_eager_ranks_drift_apart():
    """Pairwise all-to-all of 128 hosts, sizes between half and one and a half: with rendezvous partners stay together,
    eager ranks run ahead and meet at the same receivers. (256 hosts in SimGrid: 0.551 and 0.288 s.)"""
    n = 128
    schedule = all_to_all.pairwise(n)
    draw = np.random.default_rng(0)
    sizes = [draw.uniform(0.5e6, 1.5e6, (r.repeat, len(r.src))) for r in schedule.lanes[0]]

    def took(limit):
        plain = Cluster.from_graph(star(n, bandwidth="10 Gbit/s", latency="10 us"))
        where = with_detail(plain, transport="infiniband", rendezvous=limit)
        network = Network(where)
        number = network.collective(schedule, where.workers, sizes)
        network.join([number] * n, range(n), 0.0)
        while (done := network.advance()) is not None:
            end = done.time
        return end

    eager, asking = took(0.0), took(65536.0)
    mean = np.mean(np.concatenate(sizes)) / 1.25e9
    assert asking < 1.5 * (n - 1) * mean
    assert eager > 1.5 * asking


# ---------------------------------------------------------------- order


def test_messages_of_a_connection_come_one_after_the_other():
    sends = [(0, 1, 3e6), (0, 1, 48.0), (0, 2, 1e6)]
    plain, ordered = cluster(), cluster(transport="infiniband")
    assert ends(Network(plain), plain.workers, sends)[1] == pytest.approx(PATH + 3 * 48 / RATE, rel=1e-9)
    took = ends(Network(ordered), ordered.workers, sends)
    assert took[0] == pytest.approx(PATH + 4e6 / RATE)  # shares host 0's link with the message to host 2
    assert took[1] == pytest.approx(took[0] + 48 / RATE)
    assert took[2] == pytest.approx(PATH + 2e6 / RATE)
    shared = cluster(transport="infiniband", unordered=True)
    assert ends(Network(shared), shared.workers, sends) == ends(Network(plain), plain.workers, sends)


def test_the_way_back_is_a_connection_of_its_own():
    where = cluster(transport="infiniband")
    took = ends(Network(where), where.workers, [(0, 1, 3e6), (1, 0, 48.0)])
    assert took[1] == pytest.approx(PATH + 48 / RATE)


# ---------------------------------------------------------------- rates and windows


def test_a_connection_has_a_limit_and_several_have_more():
    tcp = {"transport": "tcp-cubic", "warm": True}
    window = 3 * MIB / (2 * PATH)
    assert alone(1e7, **tcp) == pytest.approx(PATH + 1e7 / window, rel=1e-12)
    assert alone(1e7, **tcp, window="1 MiB") == pytest.approx(PATH + 1e7 / (window / 3), rel=1e-12)
    assert alone(1e7, **tcp, connections=2) == pytest.approx(PATH + 1e7 / RATE, rel=1e-12)
    assert alone(1e7, **tcp, flow_rate="1 Gbit/s", connections=3) == pytest.approx(PATH + 1e7 / 375e6, rel=1e-12)
    assert alone(1e7, transport="roce") == pytest.approx(PATH + 1e7 / RATE, rel=1e-12)


def test_what_a_limit_leaves_is_for_others():
    where = cluster(transport="infiniband", flow_rate=0.25 * RATE)
    took = ends(Network(where), where.workers, [(0, 1, 1e6), (0, 2, 1e6), (3, 2, 1e6)])
    assert took == pytest.approx([PATH + 4e6 / RATE] * 3, rel=1e-12)
    network = Network(where)
    ends(network, where.workers, [(0, 1, 1e6)])
    assert network.n_channels == where.n_channels == len(network.channel_nbytes) == len(network.channel_busy)


@pytest.mark.parametrize(
    ("loss", "trip", "reno", "cubic"), [(1e-4, 2e-3, 86.6, 86.6), (1e-6, 2e-3, 866.0, 866.0), (1e-5, 0.1, 273.9, 626.7)]
)
def test_losses_close_the_window(loss, trip, reno, cubic):
    """Reno sqrt(1.5 / p), cubic the larger of that and 1.054 (RTT / p)^(3/4), in segments of 1448 bytes; two links lose
    twice what one does."""
    plain = Cluster.from_graph(star(2, bandwidth=RATE, latency=trip / 4))
    for kind, segments in (("tcp-reno", reno), ("tcp-cubic", cubic)):
        where = with_detail(plain, transport=kind, loss=loss, warm=True, window="1 GB")
        (took,) = ends(Network(where), where.workers, [(0, 1, 1e7)])
        assert took == pytest.approx(trip / 2 + 1e7 * trip / (segments * 1448), rel=1e-3)
    deaf = with_detail(plain, transport="tcp-bbr", loss=loss, warm=True, window="1 GB")
    assert ends(Network(deaf), deaf.workers, [(0, 1, 1e7)]) == pytest.approx([trip / 2 + 1e7 / RATE])


def test_the_window_opens_by_doubling():
    """14,480 bytes at first: 1e5 bytes take the rounds of 14,480, 28,960 and 57,920; the sender pauses twice."""
    limit = 3 * MIB / (2 * PATH)
    late = 2 * (2 * PATH) - (14480 + 28960) / limit
    assert alone(1e5, transport="tcp-cubic") == pytest.approx(PATH + late + 1e5 / limit, rel=1e-12)
    assert alone(14480, transport="tcp-cubic") == pytest.approx(PATH + 14480 / limit, rel=1e-12)
    assert alone(1e5, transport="tcp-cubic", warm=True) == pytest.approx(PATH + 1e5 / limit, rel=1e-12)


def test_a_window_stays_open_and_closes_in_idleness():
    where = cluster(transport="tcp-reno", window="100 kB")
    network = Network(where)
    limit = 1e5 / (2 * PATH)
    (first,) = ends(network, where.workers, [(0, 1, 1e6)])
    (second,) = ends(network, where.workers, [(0, 1, 1e6)], now=first)
    assert second - first == pytest.approx(PATH + 1e6 / limit, rel=1e-9)
    assert first > PATH + 1e6 / limit + PATH
    timeout = 0.2 + 2 * PATH
    for n_halvings in (1, 2):
        now = second + n_halvings * timeout
        (second,) = ends(network, where.workers, [(0, 1, 1e6)], now=now)
        window, late = 14480 * 8 / 2.0**n_halvings, 0.0  # it had opened to 115,840, the first above 100,000
        while window < 1e5:
            late += 2 * PATH * (1 - window / 1e5)
            window *= 2
        assert second - now == pytest.approx(PATH + late + 1e6 / limit, rel=1e-9)


# ---------------------------------------------------------------- order while windows open

FIFO = {"sharing": "fifo"}


@pytest.mark.parametrize("sharing", [{}, FIFO])
def test_a_message_does_not_start_before_the_one_before_it(sharing):
    """100 kB open the window from 14,480 to 57,920 bytes in two pauses, the next 100 kB pause once more: with fair
    shares after the first message has arrived, in queues after it has started. A third message, 30 kB, does not pause.
    """
    where = cluster(transport="tcp-cubic", **sharing)
    limit = 3 * MIB / (2 * PATH)
    took = ends(Network(where), where.workers, [(0, 1, 1e5), (0, 1, 1e5), (0, 1, 3e4)])
    first = PATH + 2 * (2 * PATH) - (14480 + 28960) / limit
    second = first + 2 * PATH - 57920 / limit + (0.0 if sharing else 1e5 / limit)
    expected = [first + 1e5 / limit, second + 1e5 / limit, second + 1.3e5 / limit]
    assert took == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("details", [FIFO, {"unordered": True}, FIFO | {"unordered": True}])
def test_a_window_does_not_close_while_messages_are_under_way(details):
    """After a second of idleness, 1 MB starts in slow start. 100 kB follow shortly before that message ends."""
    where = cluster(transport="tcp-reno", window="100 kB", **details)
    network, limit = Network(where), 1e5 / (2 * PATH)
    now = 1.0 + ends(network, where.workers, [(0, 1, 1e6)])[0]
    late = sum(2 * PATH * (1 - 14480 * 2**i / 1e5) for i in range(3))
    network.send(where.workers[:1], where.workers[1:2], np.array([1e6]), now)
    later = now + late + 1e6 / limit - 2e-3
    assert network.advance(later) is None
    (end,) = ends(network, where.workers, [(0, 1, 1e5)], now=later)
    assert end == pytest.approx(now + PATH + late + 1.1e6 / limit, rel=1e-9)


def test_a_bucket_lets_nothing_pass_the_message_before_it():
    """Hosts 2 and 3 send 4 MB each to host 1, so bytes arrive at its link at 2 GB/s and leave it at 1 GB/s. Host 0,
    with 0.5 GB/s and a bucket, sends 100 kB after 2 ms, 10 kB of them at once, and 5 kB after 3 ms. The bucket is full
    again, but the first message has not arrived: the second one enters the queue behind it."""
    graph = star(4, bandwidth=RATE, latency=PATH / 2)
    for *pair, edge in graph.edges(data=True):
        edge["bandwidth"] = RATE / 2 if "h0" in pair else RATE
    where = with_detail(Cluster.from_graph(graph), transport="infiniband", sharing="fifo")
    burst = np.where(where.link_src == where.workers[0], 1e4, 0.0)
    where = dataclasses.replace(where, details=dataclasses.replace(where.details, burst=burst))
    network, end, ids = Network(where), {}, []
    for now, sources, nbytes in ((0.0, [2, 3], 4e6), (2e-3, [0], 1e5), (3e-3, [0], 5e3)):
        assert network.advance(now) is None
        n = len(sources)
        ids += network.send(where.workers[sources], where.workers[[1] * n], np.full(n, nbytes), now).tolist()
    while (done := network.advance()) is not None:
        end.update(dict.fromkeys(done.ids.tolist(), done.time))
    first = (2 * (2e6 + 180e3) + 9e4) / RATE  # bytes that are at the link of host 1 with its last one
    second = (2 * (3e6 + 10e3) + 9.5e4) / RATE
    assert [end[i] for i in ids[2:]] == pytest.approx([PATH + first, PATH + second], rel=1e-9)


@pytest.mark.parametrize("seed", seeds(60, 600))
def test_messages_of_a_connection_arrive_in_the_order_in_which_they_were_sent(seed):
    draw = np.random.default_rng(seed)
    details = {
        "transport": str(draw.choice(["tcp-cubic", "tcp-reno", "tcp-bbr", "infiniband"])),
        "warm": bool(draw.random() < 0.2),
        "burst": float(draw.choice([0.0, 1e4])),
    }
    if details["transport"].startswith("tcp"):
        details |= {"window": float(draw.choice([0.0, 3e4, 1e5])), "loss": float(draw.choice([0.0, 1e-4]))}
    if seed % 2:
        details |= FIFO
    elif details["transport"].startswith("tcp"):
        details["buffer"] = float(draw.choice([0.0, 8e3]))  # windows are lost, and sent again after a time-out
    where = with_detail(cluster(), **details)
    where = dataclasses.replace(where, send_overhead=draw.choice([0.0, 2e-5], where.n_nodes))
    network = Network(where)
    end, sent, now = {}, [], 0.0
    for _ in range(40):
        now += float(draw.choice([0.0, 1e-4, 5e-3, 0.3], p=[0.4, 0.3, 0.25, 0.05]))
        while (done := network.advance(now)) is not None:
            end.update(dict.fromkeys(done.ids.tolist(), done.time))
        source = int(draw.integers(0, 3))
        target = (source + int(draw.integers(1, 3))) % 3
        nbytes = draw.choice([48.0, 3e4, 1e5, 1e6], 1)
        (number,) = network.send(where.workers[[source]], where.workers[[target]], nbytes, now).tolist()
        sent.append(((source, target), number))
    while (done := network.advance()) is not None:
        end.update(dict.fromkeys(done.ids.tolist(), done.time))
    for pair in {pair for pair, _ in sent}:
        times = [end[number] for other, number in sent if other == pair]
        assert times == sorted(times), (pair, details)


# ---------------------------------------------------------------- nothing else changes


def test_a_transport_that_does_nothing_changes_nothing():
    """Unordered, warm, without rendezvous or a limit that binds, messages are the flows of ideal links."""
    for schedule in (all_reduce.ring(4), all_to_all.pairwise(4), all_reduce.halving_doubling(4)):
        ideal = schedule_time(cluster(), schedule, cluster().workers, 3e6)
        idle = cluster(transport="roce", unordered=True, flow_rate=1e15)  # that it does nothing shows in the kernel
        assert schedule_time(idle, schedule, idle.workers, 3e6) == pytest.approx(ideal, rel=1e-14)
        named = cluster(transport="infiniband", unordered=True)  # here at once: it costs no time either
        assert schedule_time(named, schedule, named.workers, 3e6) == ideal
    acting = {"transport": "roce"}, {"transport": "tcp-reno", "unordered": True}, {"transport": "roce", "burst": 1e4}
    assert all(
        with_detail(cluster(), **told).details.has_effects for told in (*acting, {"burst": 1e4}, {"reverse_load": 0.1})
    )
    told = {"transport": "roce", "unordered": True}
    assert not with_detail(cluster(), **told).details.has_effects
    assert with_detail(cluster(), **told, rendezvous=1e4).details.has_effects


def test_frames_and_buckets_go_with_a_transport():
    where = cluster(transport="tcp-cubic", warm=True, frame_header="90 B", frame_payload="1448 B", burst="4 kB")
    (took,) = ends(Network(where), where.workers, [(0, 1, 1448e3)])
    assert took == pytest.approx(PATH + (1538e3 - 4000) / (3 * MIB / (2 * PATH)), rel=1e-12)


def test_recording_knows_links_only():
    where = cluster(transport="infiniband", flow_rate=0.25 * RATE)
    network = Network(where, record=True)
    ends(network, where.workers, [(s, t, 1e6) for s in range(4) for t in range(4) if s != t])
    assert network.busy_intervals().seconds() == pytest.approx(network.channel_busy)


# ---------------------------------------------------------------- gloo


def seconds_per_segment(latency, segment):
    """Gloo's ring as its source has it, on equal ranks: a rank's two segments and the notifications of its neighbour
    stand in one queue before it, first come first served, and leave it a latency later at the earliest."""
    last, events = 0.0, [(0.0, 0, False), (0.0, 1, False)]
    number, n_segments = 2, 192
    while n_segments:
        time, _, are_data = heapq.heappop(events)
        last = max(time + latency, last) + segment * are_data
        n_segments -= are_data
        heapq.heappush(events, (last, number, not are_data))
        number += 1
    return last / 192


@pytest.mark.parametrize("ratio", [0.02, 0.3, 0.62, 1.0, 3.0])
def test_gloo_queues_behind_its_own_data(ratio):
    """Latency from far below to far above a segment's time; without order, notifications pass at once."""
    n, segment = 4, MIB / RATE
    plain = Cluster.from_graph(star(n, bandwidth=RATE, latency=ratio * segment / 2))
    ordered = with_detail(plain, transport="tcp-cubic", warm=True, window="1 GB")
    schedule = gloo_ring(n, 256)  # 128 MiB: 32 segments a chunk, 192 in all
    took = [schedule_time(where, schedule, where.workers.tolist(), 128 * MIB) / 192 for where in (plain, ordered)]
    expected = seconds_per_segment(ratio * segment, segment)
    assert expected == pytest.approx(max(1 + ratio / 2, ratio + 0.5) * segment, rel=0.01)
    assert took[1] == pytest.approx(expected, rel=0.025)
    assert took[0] <= took[1]
    if 0.3 <= ratio <= 0.62:
        assert took[0] < 0.93 * expected
