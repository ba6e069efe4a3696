"""Routing where tables and buffers are at their limits: switches with very many links, very long routes."""

import numpy as np
import pytest

from ddlsim.cluster import Cluster, leaf_spine, line

RATE = {"bandwidth": 1e9, "latency": 1e-6}


@pytest.mark.parametrize("n_spines", [1, 63, 64, 65, 130])
def test_a_leaf_may_have_more_trunks_than_a_word_has_bits(n_spines):
    """Hosts 0..149 are on leaf 0, 150..299 on leaf 1; D-mod-k takes trunk (number of the host) mod n_spines."""
    src, dst = np.zeros(150, dtype=int), np.arange(150, 300)
    spine_of = {}
    for policy in ("shortest", "ecmp", "d-mod-k"):
        cluster = Cluster.from_graph(leaf_spine(2, 150, n_spines, routing=policy, **RATE))
        first_spine = cluster.node("spine0")
        routes = cluster.routes(cluster.workers[src], cluster.workers[dst])
        assert np.diff(routes.offsets).tolist() == [4] * 150
        spine_of[policy] = cluster.link_dst[routes.links.reshape(150, 4)[:, 1]] - first_spine
    assert spine_of["shortest"].tolist() == [0] * 150
    assert spine_of["d-mod-k"].tolist() == [host % n_spines for host in range(150, 300)]
    # 150 balls into n boxes: expect n (1 - (1 - 1/n)^150) boxes hit; a fair hash stays within 15 % of that
    expected = n_spines * (1 - (1 - 1 / n_spines) ** 150)
    assert len(set(spine_of["ecmp"].tolist())) == pytest.approx(expected, rel=0.15)
    assert spine_of["ecmp"].max() < n_spines


def test_routes_may_be_long():
    cluster = Cluster.from_graph(line(300, **RATE))
    ends = cluster.workers[[0, -1]]
    routes = cluster.routes([*ends, ends[0]], [*ends[::-1], cluster.workers[7]])
    assert np.diff(routes.offsets).tolist() == [299, 299, 7]
    for i in range(3):
        nodes = cluster.link_src[routes[i]]
        assert (cluster.link_dst[routes[i]][:-1] == nodes[1:]).all()
