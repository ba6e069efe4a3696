"""Frames, token buckets and acknowledgements, against figures worked by hand."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from ddlsim.cluster import Cluster, racks, star, with_detail
from ddlsim.collectives import build
from ddlsim.network import Network

RATE = 100e6 / 8
LATENCY = 70e-6
BURST = 4542.0
TCP = {"frame_header": "66 B", "frame_payload": "1448 B", "burst": "4542 B", "reverse_load": 66 / 3028}


def shaped(n_hosts=4, **details):
    graph = star(n_hosts, bandwidth="100 Mbit/s", latency="35 us")
    return with_detail(Cluster.from_graph(graph), **details) if details else Cluster.from_graph(graph)


def wire(nbytes):
    return nbytes + 66 * math.ceil(nbytes / 1448)


def ends(cluster, sends):
    """Return when each message ends; `sends` lists (start, source host, target host, bytes)."""
    network = Network(cluster)
    end, number = {}, {}
    sends = sorted(enumerate(sends), key=lambda item: item[1][0])
    for _, batch in itertools.groupby(sends, key=lambda item: item[1][0]):
        batch = list(batch)
        now = batch[0][1][0]
        while (done := network.advance(now)) is not None:
            end.update(dict.fromkeys(done.ids.tolist(), done.time))
        source, target = ([cluster.workers[s[k]] for _, s in batch] for k in (1, 2))
        ids = network.send(source, target, np.array([s[3] for _, s in batch]), now)
        number.update({i: n for (i, _), n in zip(batch, ids.tolist(), strict=True)})
    while (done := network.advance()) is not None:
        end.update(dict.fromkeys(done.ids.tolist(), done.time))
    return [end[number[i]] for i in range(len(number))], network


@pytest.mark.parametrize("nbytes", [1, 1448, 1449, 4344, 4345, 65536, 4194304])
def test_a_message_alone(nbytes):
    """T(m) = latency + max(0, m + 66 ceil(m / 1448) - burst) / rate."""
    (took,), _ = ends(shaped(**TCP), [(0.0, 0, 1, nbytes)])
    assert took == pytest.approx(LATENCY + max(0.0, wire(nbytes) - BURST) / RATE, rel=1e-12)


def test_the_bucket_fills_while_the_link_idles():
    """The second message starts to flow when the links have been idle for 70 us, the third after 1 s."""
    cluster = shaped(burst="4542 B")
    first = LATENCY + (10000 - BURST) / RATE
    second = first + LATENCY + (10000 - LATENCY * RATE) / RATE
    times, _ = ends(cluster, [(0.0, 0, 1, 10000), (first, 0, 1, 10000), (second + 1.0, 0, 1, 10000)])
    assert times == pytest.approx([first, second, second + 1.0 + first], rel=1e-12)


def test_small_messages_empty_the_bucket_together():
    """Three times 2000 B within the same 100 us: 4542 B pass at once, then what has come in meanwhile."""
    start = [0.0, 30e-6, 60e-6]
    times, network = ends(shaped(burst="4542 B"), [(t, 0, 1, 2000) for t in start])
    left = BURST - 2000 + 0.0  # full, so nothing comes in before the first
    left = min(left + 30e-6 * RATE, BURST) - 2000
    left = min(left + 30e-6 * RATE, BURST)
    assert times == pytest.approx([t + LATENCY for t in start[:2]] + [60e-6 + LATENCY + (2000 - left) / RATE])
    assert network.channel_nbytes.sum() == pytest.approx(2 * 6000)


def test_the_bucket_of_every_link_on_the_way_counts():
    """Host 1 has just been sent 4542 B at once, so that its bucket is empty when host 2 sends to it."""
    times, _ = ends(shaped(burst="4542 B"), [(0.0, 0, 1, 4542), (0.0, 2, 1, 10000), (0.0, 2, 3, 4542)])
    # 2 -> 1 starts first on host 2's link, but finds nothing at host 1; 2 -> 3 then finds a busy link
    assert times[0] == pytest.approx(LATENCY)
    assert times[2] == pytest.approx(LATENCY + 2 * 4542 / RATE)
    assert times[1] == pytest.approx(LATENCY + (10000 + 4542) / RATE)


def test_a_narrower_link_without_a_bucket_lets_nothing_through_at_once():
    graph = racks(2, 1, bandwidth="100 Mbit/s", latency="10 us", trunk_bandwidth="50 Mbit/s")
    cluster = with_detail(Cluster.from_graph(graph), burst="4542 B", kinds=["nic"])
    (took,), _ = ends(cluster, [(0.0, 0, 1, 10000)])
    assert took == pytest.approx(30e-6 + 10000 / (RATE / 2))


@pytest.mark.parametrize("load", [0.02, 66 / 3028, 0.5])
def test_steady_two_way_traffic_leaves_room_for_acknowledgements(load):
    """Data and acknowledgements fill each direction: x (1 + load) = rate."""
    times, _ = ends(shaped(reverse_load=load), [(0.0, 0, 1, 1e6), (0.0, 1, 0, 1e6)])
    assert times == pytest.approx([LATENCY + 1e6 * (1 + load) / RATE] * 2, rel=1e-12)


def test_acknowledgements_come_and_go_with_the_traffic_that_they_answer():
    """0 -> 1 is alone for 0.02 s, then shares with 1 -> 0 until that has sent its 1e5 B, then is alone again."""
    load = 0.25
    times, _ = ends(shaped(reverse_load=load), [(0.0, 0, 1, 1e6), (0.02, 1, 0, 1e5)])
    shared = 1e5 * (1 + load) / RATE
    assert times[1] == pytest.approx(0.02 + LATENCY + shared, rel=1e-12)
    before = 0.02 * RATE
    after = (1e6 - before - 1e5) / RATE
    assert times[0] == pytest.approx(0.02 + LATENCY + shared + after, rel=1e-9)


def test_half_duplex_links_carry_their_own_acknowledgements():
    graph = star(2, bandwidth="100 Mbit/s", latency="35 us", shared=True)
    cluster = with_detail(Cluster.from_graph(graph), reverse_load=0.25)
    times, _ = ends(cluster, [(0.0, 0, 1, 1e6)])
    assert times == pytest.approx([LATENCY + 1.25e6 / RATE], rel=1e-12)


def test_a_ring_step_by_hand():
    """Every step sends 16 KiB both ways; between steps the links idle for one latency."""
    took = 16384 + 66 * 12
    step = took * (1 + TCP["reverse_load"]) / RATE
    cluster = shaped(**TCP)
    network = Network(cluster)
    ring = network.collective(build("ring", 4), cluster.workers, 65536.0)
    network.join([ring] * 4, range(4), 0.0)
    while (done := network.advance()) is not None:
        last = done.time
    # the bucket holds wire bytes, which pass at once and so take no acknowledgements' share
    factor = 1 + TCP["reverse_load"]
    first = LATENCY + step - BURST * factor / RATE
    later = LATENCY + step - LATENCY * RATE * factor / RATE
    assert last == pytest.approx(first + 5 * later, rel=1e-9)


def rates_by_filling(cluster, network):
    """Max-min rates of the flows under way, by progressive filling over the present capacities."""
    flows, rates = network.rates()
    busy = {c for hops in flows for c in hops}
    back = {int(cluster.link_channel[k]): int(cluster.link_channel[r]) for k, r in enumerate(cluster.reverse_link)}
    load = 0.25
    left = {c: cluster.channel_capacity[c] / (1 + load if back[c] in busy else 1) for c in busy}
    open_flows = dict(enumerate(flows))
    expected = np.zeros(len(flows))
    while open_flows:
        users = {c: [f for f, hops in open_flows.items() if c in hops] for c in left}
        tight = min((c for c in users if users[c]), key=lambda c: left[c] / len(users[c]))
        share = left[tight] / len(users[tight])
        for flow in users[tight]:
            expected[flow] = share
            for c in open_flows.pop(flow):
                left[c] -= share
    return rates, expected


def test_rates_stay_max_min_fair_while_capacities_change():
    cluster = Cluster.from_graph(racks(3, 3, bandwidth="100 Mbit/s", latency="0 us", trunk_bandwidth="150 Mbit/s"))
    cluster = with_detail(cluster, reverse_load=0.25)
    rng = np.random.default_rng(5)
    network = Network(cluster)
    now, seen = 0.0, 0
    for _ in range(300):
        now += rng.exponential(2e-3)
        while network.advance(now) is not None:
            pass
        a, b = rng.choice(len(cluster.workers), 2, replace=False)
        network.send([cluster.workers[a]], [cluster.workers[b]], np.array([rng.exponential(3e4)]), now)
        network.advance(now)
        rates, expected = rates_by_filling(cluster, network)
        np.testing.assert_allclose(rates, expected, rtol=1e-9)
        seen = max(seen, len(rates))
    assert seen > 5


def test_without_details_nothing_changes():
    plain, other = shaped(), dataclasses.replace(shaped(), details=None)
    assert plain.details is None
    sends = [(0.0, 0, 1, 1e5), (1e-3, 2, 1, 3e5)]
    assert ends(plain, sends)[0] == ends(other, sends)[0]
