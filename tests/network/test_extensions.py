"""The kernel's extensions are compiled for the networks that need them, and for no others."""

import numpy as np
import pytest

from ddlsim.cluster import Cluster, star, with_detail
from ddlsim.collectives import all_reduce
from ddlsim.network import Network

EXTENSIONS = ("work_queues", "shape", "change")


def enabled(network):
    return [getattr(network.engine.net.counts, f"{name}_code") != 0 for name in EXTENSIONS]


@pytest.mark.parametrize(
    ("details", "expected"),
    [
        ({}, [False, False, False]),
        ({"sharing": "fifo"}, [True, True, False]),
        ({"transport": "tcp-cubic"}, [False, True, False]),
        ({"sharing": "fifo", "transport": "tcp-cubic"}, [True, True, False]),
    ],
)
def test_networks_enable_what_their_links_need(details, expected):
    cluster = Cluster.from_graph(star(3, bandwidth="1 GB/s", latency="1 us"))
    assert enabled(Network(with_detail(cluster, **details) if details else cluster)) == expected


def test_changes_enable_their_extension():
    network = Network(Cluster.from_graph(star(3, bandwidth="1 GB/s", latency="1 us")))
    network.will_change(links=[])
    assert enabled(network) == [False, False, False]
    network.will_change(links=[(1.0, 2.0, 0, 0.5)])
    assert enabled(network) == [False, False, True]


def test_replays_need_their_extension_from_a_number_of_repeated_messages(monkeypatch):
    """A ring of 4 ranks has 2 rounds of 4 messages, each repeated twice: 16 messages in repetitions."""
    monkeypatch.setattr("ddlsim.network.engine.REPLAYED_FROM", 40)
    cluster = Cluster.from_graph(star(4, bandwidth="1 GB/s", latency="1 us"))
    network, ring = Network(cluster), all_reduce.ring(4)
    seen = []
    for i in range(4):
        collective = network.collective(ring, cluster.workers, 1e6)
        network.join([collective] * 4, np.arange(4), float(i))
        while network.advance(i + 0.5) is not None:
            pass
        seen.append((bool(network.engine.net.counts.replay_rounds_code), network.n_replayed))
    assert seen == [(False, 0), (False, 0), (True, 4), (True, 8)]
