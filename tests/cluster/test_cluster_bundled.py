"""Every bundled cluster loads, is connected and holds sensible numbers with a source beside each."""

import re
import subprocess
import sys

import numpy as np
import pytest
from counting import counted

from ddlsim.bundled import bundled_files, find_bundled
from ddlsim.cluster import cluster_names, load_cluster
from ddlsim.cluster.generators import star
from ddlsim.errors import ConfigError

EXPECTED = {  # workers, hosts
    "aws-p2-16xlarge-16": (256, 16),
    "aws-p3-2xlarge": (8, 8),
    "cloud-25g-16x8-v100": (128, 16),
    "dgx-a100-pod": (160, 20),
    "dgx-h100-pod": (256, 32),
    "dgx1-v100": (8, 1),
    "dgx1-v100-16": (128, 16),
    "fat-tree-k8-10g": (128, 128),
    "lab-heterogeneous": (11, 7),
    "minicluster": (10, 10),
    "office-1gbe": (8, 8),
    "star-1024-10g": (1024, 1024),
    "theta": (4392, 4392),
    "three-regions-wan": (12, 12),
    "torus-2d": (256, 256),
    "torus-3d": (512, 512),
    "two-racks-oversubscribed": (32, 32),
    "zenith": (314, 314),
}


def test_the_names():
    assert cluster_names() == sorted(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_bundled_cluster(name):
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.title
    assert (len(cluster.workers), len(cluster.host_names)) == EXPECTED[name]
    assert len(cluster.servers) > 0
    cluster.check_connected(np.arange(cluster.n_nodes))
    assert (cluster.link_bandwidth > 0).all()
    assert (cluster.link_latency > 0).all()
    assert ((cluster.link_efficiency > 0) & (cluster.link_efficiency <= 1)).all()
    assert all(cluster.device_of[worker] for worker in cluster.workers)
    ring = cluster.routes(cluster.workers, np.roll(cluster.workers, -1))
    assert np.diff(ring.offsets).min() > 0
    assert name in cluster.summary()


@pytest.mark.parametrize("name", EXPECTED)
def test_every_measured_number_has_a_comment(name):
    """A quantity needs a comment beside it, unless the same quantity with one stands above it in the file."""
    explained = set()
    for row in bundled_files("topologies")[name].read_text().splitlines():
        if re.match(r"\w*(bandwidth|latency|efficiency|overhead) *=", row):
            quantity, _, comment = row.partition("#")
            assert comment.strip() or quantity.strip() in explained, row
            explained.add(quantity.strip())


def test_known_figures():
    """The p2 NIC carries 20 Gbit/s; a DGX-1's GPUs have 150 GB/s of NVLink; the racks' trunk is 40 Gbit/s."""
    p2 = load_cluster("aws-p2-16xlarge-16")
    nics = [link for link in range(p2.n_links) if p2.link_kind[link] == "nic"]
    assert set(p2.link_bandwidth[nics]) == {2.5e9}
    dgx = load_cluster("dgx1-v100")
    from_first = (dgx.link_src == 0) & (np.array(dgx.link_kind) == "nvlink")
    assert dgx.link_bandwidth[from_first].sum() == 150e9
    two = load_cluster("two-racks-oversubscribed")
    trunk = two.link_kind.index("trunk")
    assert two.link_bandwidth[trunk] == 5e9


def test_loading_takes_work_in_proportion_to_the_machines():
    """Twice the machines are twice the calls: 256 more cost half of what 512 more do. (Quadratic: a quarter.)"""
    calls = {}
    for n in (8, 256, 512, 1024):
        cluster, calls[n] = counted(lambda n=n: load_cluster(star(n, bandwidth="10 Gbit/s", latency="5 us")))
        assert len(cluster.workers) == n
    assert calls[512] - calls[256] == pytest.approx((calls[1024] - calls[512]) / 2, rel=0.02)
    large, n_calls = counted(lambda: load_cluster("star-1024-10g"))
    assert len(large.workers) == 1024
    assert n_calls < 1000 * 1024


def test_importing_clusters_is_cheap():
    program = (
        "import sys, ddlsim.cluster; print(sorted({'networkx', 'pydantic', 'numba'} & set(sys.modules)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert output.strip() == "[]"


def test_unknown_bundled_file():
    with pytest.raises(ConfigError, match=r"unknown cluster 'zenit'; did you mean 'zenith'\?"):
        find_bundled("topologies", "zenit", "cluster")
    with pytest.raises(ConfigError, match="'nowhere' is missing"):
        bundled_files("nowhere")
