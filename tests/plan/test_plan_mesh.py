"""Ranks on the axes of a mesh, their groups, where they are put, and what does not fit."""

import itertools

import numpy as np
import pytest

from ddlsim import ConfigError
from ddlsim.cluster import load_cluster, star
from ddlsim.plan import Mesh, make_mesh
from ddlsim.plan.mesh import AXES


def test_tensor_groups_are_nearest_then_replicas_then_stages():
    mesh = Mesh(data=2, pipeline=3, tensor=2)
    assert mesh.n_ranks == 12
    assert mesh.groups("tensor")[:2] == ((0, 1), (2, 3))
    assert mesh.groups("data")[:2] == ((0, 2), (1, 3))
    assert mesh.groups("pipeline")[:2] == ((0, 4, 8), (1, 5, 9))


@pytest.mark.parametrize("order", list(itertools.permutations(AXES)))
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 3, 4), (4, 1, 2)])
def test_groups_are_partitions_and_coordinates_are_inverse(order, sizes):
    mesh = Mesh(*sizes, order=order)
    places = [mesh.coordinates(rank) for rank in range(mesh.n_ranks)]
    assert [mesh.rank(*place) for place in places] == list(range(mesh.n_ranks))
    for axis, size in zip(AXES, sizes, strict=True):
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.n_ranks))
        for group in groups:
            assert len(group) == size
            others = {tuple(getattr(places[rank], other) for other in AXES if other != axis) for rank in group}
            assert len(others) == 1
            assert [getattr(places[rank], axis) for rank in group] == list(range(size))
    nearest = mesh.groups(order[0])
    assert all(np.diff(group).tolist() == [1] * (len(group) - 1) for group in nearest)


def machines(n, per):
    """Return a cluster of machines with so many devices each, whose names do not tell which are together."""
    import networkx as nx

    graph = nx.DiGraph()
    graph.add_node("switch", kind="switch")
    for i in range(n * per):
        graph.add_node(f"gpu{i}", kind="gpu", host=f"host{i % n}")
        for ends in ((f"gpu{i}", "switch"), ("switch", f"gpu{i}")):
            graph.add_edge(*ends, bandwidth=1e9, latency=1e-6)
    return load_cluster(graph)


@pytest.mark.parametrize(("n", "per", "tensor"), [(4, 4, 4), (4, 4, 2), (3, 5, 2), (4, 3, 2)])
def test_tensor_groups_sit_inside_machines(n, per, tensor):
    cluster = machines(n, per)
    mesh = Mesh(data=n * (per // tensor), tensor=tensor)
    nodes = mesh.nodes(cluster)
    assert len(set(nodes.tolist())) == mesh.n_ranks
    for group in mesh.groups("tensor"):
        assert len(set(cluster.host_of[nodes[list(group)]].tolist())) == 1


def test_a_mesh_that_fills_all_devices_crosses_machines_where_it_must():
    cluster = machines(2, 3)
    nodes = Mesh(data=3, tensor=2).nodes(cluster)
    assert sorted(nodes.tolist()) == sorted(cluster.workers.tolist())
    assert np.diff(cluster.host_of[nodes]).astype(bool).sum() == 1


def test_what_does_not_fit():
    near = r"the nearest valid meshes are data=4, pipeline=4, tensor=4; data=8, pipeline=2, tensor=4; "
    with pytest.raises(ConfigError, match=r"pipeline 3 x tensor 4 = 12: must divide the number of ranks, 64; " + near):
        make_mesh(64, pipeline=3, tensor=4)
    with pytest.raises(
        ConfigError, match=r"data 8 x pipeline 2 x tensor 2 = 32: must be the number of ranks, 64; .*data=16"
    ):
        make_mesh(64, data=8, pipeline=2, tensor=2)
    assert make_mesh(64, pipeline=2, tensor=4) == Mesh(8, 2, 4) == make_mesh(64, 8, 2, 4)
    with pytest.raises(
        ConfigError, match="has 6 ranks, but cluster 'star-4' has 4 devices; the nearest valid meshes are data=2"
    ):
        Mesh(data=3, tensor=2).nodes(load_cluster(star(4, bandwidth=1e9, latency=0.0)))
    with pytest.raises(ConfigError, match="rank = 8: must be below 8"):
        Mesh(2, 2, 2).coordinates(8)
    with pytest.raises(ConfigError, match="pipeline = 2: must be below 2"):
        Mesh(2, 2, 2).rank(pipeline=2)
    with pytest.raises(ConfigError, match=r"order = .*once each"):
        Mesh(order=("data", "data", "tensor"))
    with pytest.raises(ConfigError, match="Mesh: tensor = 0"):
        Mesh(tensor=0)
