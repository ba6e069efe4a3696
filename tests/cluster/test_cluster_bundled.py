"""Every bundled cluster loads, is connected and holds sensible numbers with a source beside each."""

import dataclasses
import os
import re
import subprocess
import sys

import networkx as nx
import numpy as np
import pytest
from counting import counted
from draws import rows, slow

from ddlsim.bundled import bundled_files
from ddlsim.cluster import LinkDetail, cluster_names, load_cluster, with_detail
from ddlsim.cluster.generators import star
from ddlsim.errors import ConfigError
from ddlsim.run.collective import collective_time

EXPECTED = {  # workers, hosts
    "aws-10g-16": (16, 16),
    "aws-p2-16xlarge-16": (256, 16),
    "aws-p3-2xlarge": (8, 8),
    "aws-p4de": (256, 32),
    "aws-p5-48xlarge": (256, 32),
    "aws-p5e": (256, 32),
    "aws-p5en": (256, 32),
    "aws-p6-b200": (256, 32),
    "azure-nd-h100-v5": (256, 32),
    "azure-nd-h200-v5": (256, 32),
    "cloud-25g-16x8-v100": (128, 16),
    "cori-haswell": (2004, 2004),
    "dgx-a100-pod": (160, 20),
    "dgx-b200-pod": (256, 32),
    "dgx-b300-pod": (576, 72),
    "dgx-h100-pod": (256, 32),
    "dgx1-v100": (8, 1),
    "dgx1-v100-16": (128, 16),
    "endeavor-16": (16, 16),
    "fat-tree-k8-10g": (128, 128),
    "gb200-nvl72": (576, 8),
    "gb300-nvl72": (576, 8),
    "gcp-a3-high": (256, 32),
    "gcp-a3-mega": (256, 32),
    "hgx-h100-96g": (512, 64),
    "ib-800g-a100": (512, 64),
    "lab-heterogeneous": (11, 7),
    "minicluster": (10, 10),
    "office-1gbe": (8, 8),
    "p40-8": (8, 1),
    "roce-a100-40g": (512, 64),
    "roce-a100-80g": (512, 64),
    "roce-h100": (512, 64),
    "selene": (4480, 560),
    "star-1024-10g": (1024, 1024),
    "theta": (4392, 4392),
    "three-regions-wan": (12, 12),
    "torus-2d": (256, 256),
    "torus-3d": (512, 512),
    "tpu-v4": (256, 256),
    "tpu-v5e": (256, 256),
    "tpu-v5p": (256, 256),
    "tpu-v6e": (256, 256),
    "two-racks-oversubscribed": (32, 32),
    "zenith": (314, 314),
}


def test_the_names():
    assert cluster_names() == sorted(EXPECTED)


#: clusters of more than 2,000 workers take longer to build than all others
EACH = pytest.mark.parametrize("name", [slow(name) if n > 2000 else name for name, (n, _) in EXPECTED.items()])


@EACH
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


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    rows(
        [  # bytes/s per GPU: NVLink, and of its network interfaces
            ("aws-p4de", 300e9, 6.25e9),
            ("aws-p5e", 450e9, 50e9),
            ("aws-p5en", 450e9, 50e9),
            ("aws-p6-b200", 900e9, 50e9),
            ("azure-nd-h100-v5", 450e9, 50e9),
            ("azure-nd-h200-v5", 450e9, 50e9),
            ("dgx-b200-pod", 900e9, 50e9),
            ("dgx-b300-pod", 900e9, 100e9),
            ("gb200-nvl72+n_hosts=2", 900e9, 50e9),
            ("gb300-nvl72+n_hosts=2", 900e9, 100e9),
            ("gcp-a3-high", 450e9, 12.5e9),
            ("gcp-a3-mega", 450e9, 25e9),
            ("hgx-h100-96g", 450e9, 50e9),
        ],
        5,
    ),
)
def test_collectives_of_all_gpus_get_what_their_links_carry(name, inside, outside):
    """A gather of 16 GB over all GPUs is limited by NVLinks, which rings over n GPUs of a machine use n - 1 times of n,
    or by its interfaces; an all-reduce is, too, unless NVSwitches add up. The rest of the time is latency."""
    cluster = load_cluster(name)
    n, kinds = len(cluster.workers), np.array(cluster.link_kind)
    local = n // len(cluster.host_names)
    nvlink, nic = (np.flatnonzero(kinds == kind)[0] for kind in ("nvlink", "nic"))
    assert cluster.link_bandwidth[nvlink] == inside
    leaving = (kinds == "nic") & (cluster.host_of[cluster.link_src] == cluster.host_of[cluster.workers[0]])
    assert cluster.link_bandwidth[leaving].sum() / local == pytest.approx(outside)
    in_ring = inside * cluster.link_efficiency[nvlink] * local / (local - 1)
    bus = min(in_ring, outside * local * cluster.link_efficiency[nic])
    seconds = collective_time(cluster, "default", "16 GB", kind="all_gather")
    assert 0.8 * bus < 16e9 * (n - 1) / n / seconds < 1.01 * bus
    assert 2 * 16e9 * (n - 1) / n / collective_time(cluster, "default", "16 GB") > 0.8 * bus


def test_a_rack_of_gb200_is_one_nvlink_domain():
    """72 GPUs exchange by NVLink alone; parts of racks have one adapter for each GPU."""
    rack = load_cluster("gb200-nvl72+n_hosts=1")
    routes = rack.routes(rack.workers, np.roll(rack.workers, -1))
    assert {rack.link_kind[link] for link in routes.links} == {"nvlink"}
    part = load_cluster("gb200-nvl72+n_hosts=4+n_gpus=64")
    assert (len(part.workers), len(part.host_names)) == (256, 4)
    across = part.split_routes(part.workers[:64], part.workers[64:128])
    assert len(set(across.links[[part.link_kind[link] == "nic" for link in across.links]].tolist())) == 2 * 64


def test_keys_can_be_set():
    pod = load_cluster("dgx-h100-pod+n_leaves=24")
    assert (pod.name, len(pod.workers), len(pod.host_names)) == ("dgx-h100-pod+n_leaves=24", 768, 96)
    assert pod.title.endswith("8 x NDR on rails, but n_leaves=24")
    star = load_cluster("star-1024-10g+n_hosts=3+bandwidth=25 Gbit/s+device=k80+price=2 USD/h")
    assert (len(star.workers), set(star.link_bandwidth)) == (3, {3.125e9})
    assert {star.device_of[worker] for worker in star.workers} == {"k80"}
    assert star.host_price is not None
    assert star.host_price.tolist() == [2 / 3600] * 3
    assert load_cluster("star-1024-10g").link_bandwidth[0] == 1.25e9


def test_links_can_be_told_what_they_do():
    office = load_cluster("office-1gbe+transport=tcp-reno+window=64 KiB+connections=2+warm=true")
    told = LinkDetail(transport="tcp-reno", connections=2, window=65536.0, warm=True)
    assert {office.details.of(link) for link in range(office.n_links)} == {told}
    mixed = load_cluster("lab-heterogeneous+transport=roce")  # links named one by one, those between machines
    inside = mixed.host_of[mixed.link_src] == mixed.host_of[mixed.link_dst]
    assert ((mixed.details.transport == "roce") == ~inside).all()
    shaped = load_cluster("minicluster+burst=9 kB")
    assert shaped.details.of(0) == dataclasses.replace(load_cluster("minicluster").details.of(0), burst=9e3)


TRANSPORTS = {
    "tcp-cubic": ["aws-10g-16", "aws-p2-16xlarge-16", "aws-p3-2xlarge", "cloud-25g-16x8-v100", "three-regions-wan"],
    "infiniband": [
        "dgx-a100-pod",
        "azure-nd-h100-v5",
        "azure-nd-h200-v5",
        "dgx-b200-pod",
        "dgx-b300-pod",
        "dgx-h100-pod",
        "dgx1-v100",
        "dgx1-v100-16",
        "endeavor-16",
        "gb200-nvl72",
        "gb300-nvl72",
        "ib-800g-a100",
        "selene",
    ],
    "roce": ["hgx-h100-96g", "roce-a100-40g", "roce-a100-80g", "roce-h100"],
    "efa": ["aws-p4de", "aws-p5-48xlarge", "aws-p5e", "aws-p5en", "aws-p6-b200"],
    "tcpx": ["gcp-a3-high"],
    "fastrak": ["gcp-a3-mega"],
}


@EACH
def test_links_between_hosts_name_what_they_are(name):
    """Those of machines that exist do; the others say that they are ideal, or that they are one machine."""
    cluster = load_cluster(name)
    source, target = cluster.host_of[cluster.link_src], cluster.host_of[cluster.link_dst]
    between = (source != target) | (source < 0)
    told = [transport for transport, names in TRANSPORTS.items() if name in names]
    if told:
        assert set(cluster.details.transport[between]) == set(told)
        assert set(cluster.details.transport[~between]) <= {""}
        assert cluster.details.has_effects == (told == ["tcp-cubic"])  # the others' messages share links as flows do
        ideal = load_cluster(f"{name}+transport=ideal").details  # frames stay
        assert (ideal is None) == (name != "aws-10g-16")
        assert ideal is None or (not ideal.transport.any() and ideal.frame_header.any())
        again = with_detail(cluster, transport="ideal").details
        assert again is None if ideal is None else (again.frame_header == ideal.frame_header).all()
    else:
        assert cluster.details is None or not cluster.details.transport.any()
        assert name == "p40-8" or "transport" in " ".join(cluster.notes)


def test_transports_can_be_switched():
    """Another transport has nothing of what the file says of the first, but what the name says; frames stay."""
    cloud = load_cluster("cloud-25g-16x8-v100")
    nic = int(np.flatnonzero(cloud.details.transport)[0])
    assert cloud.details.of(nic) == LinkDetail(transport="tcp-cubic", flow_rate=1.7e9)
    assert load_cluster(cloud.name + "+transport=ideal").details is None
    with pytest.raises(ConfigError, match=r"flow_rate = 625000000\.0 has no effect without a transport"):
        load_cluster(cloud.name + "+flow_rate=5 Gbit/s+transport=ideal")
    reno = load_cluster(cloud.name + "+flow_rate=5 Gbit/s+transport=tcp-reno")
    assert reno.details.of(nic) == LinkDetail(transport="tcp-reno", flow_rate=0.625e9)
    assert load_cluster(cloud.name + "+transport=tcp-cubic").details.of(nic) == cloud.details.of(nic)
    framed = with_detail(cloud, transport="tcp-cubic", mtu="9001 B", flow_rate="5 Gbit/s", kinds=["nic"])
    assert with_detail(framed, transport="ideal").details.of(nic) == LinkDetail(frame_header=90.0, frame_payload=8949.0)
    regions = load_cluster("three-regions-wan+transport=ideal")
    assert (regions.details, load_cluster("three-regions-wan").details.connections.max()) == (None, 16)
    assert load_cluster("three-regions-wan+transport=tcp-cubic").details.connections.max() == 16


def test_a_transport_in_a_file_can_be_ideal(tmp_path):
    path = tmp_path / "mine.toml"
    text = bundled_files("topologies")["cloud-25g-16x8-v100"].read_text()
    path.write_text(re.sub(r"(?m)^flow_rate.*$", "", text.replace('"tcp-cubic"', '"ideal"')))
    assert load_cluster(path).details is None
    load_cluster("cloud-25g-16x8-v100").save(path)  # [[edges]], which name it one by one
    assert load_cluster(path).details.flow_rate.max() == 1.7e9
    assert load_cluster(f"{path}+transport=ideal").details is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("office-1gbe+transport=tcp", r"link\.transport = 'tcp': must be one of ideal"),
        ("office-1gbe+window=64 KiB", r"link: window = 65536\.0 has no effect without a transport"),
        ("star-1024-10g+nhosts=4", r"\+nhosts=4: unknown key 'nhosts'; did you mean 'n_hosts'"),
        ("star-1024-10g+n_hosts=four", r"generator.n_hosts = 'four': must be an integer"),
        ("star-1024-10g+n_hosts=0", r"n_hosts = 0: must be an integer from 1"),
        ("star-1024-10g+bandwidth=9 apples", r"generator.bandwidth: '9 apples' has the unknown unit"),
        ("star-1024-10g+n_gpus=2+inside=nvswitch", r"inside = 'nvswitch' requires nvlink_bandwidth"),
        ("zenith+big", r"\+big: expected \+key=value with a key of \[generator\], \[host\] or \[link\]"),
        ("lab-heterogeneous+n_hosts=3", r"\+n_hosts=3: only keys of files with \[generator\] can be overridden"),
        ("selen+n_leaves=8", r"unknown cluster 'selen'; did you mean 'selene'"),
    ],
)
def test_keys_that_cannot_be_set(name, message):
    with pytest.raises(ConfigError, match=message):
        load_cluster(name)


def test_files_whose_names_have_a_plus(tmp_path):
    folder = tmp_path / "a+b"
    folder.mkdir()
    path = folder / "c+d.toml"
    path.write_text(bundled_files("topologies")["office-1gbe"].read_text())
    assert load_cluster(path).name == "c+d"
    cluster = load_cluster(f"{path}+n_hosts=3+price=2 USD/h")
    assert (cluster.name, len(cluster.workers)) == ("c+d+n_hosts=3+price=2 USD/h", 3)


def test_graph_files_have_no_keys_to_set(tmp_path):
    path = tmp_path / "mine.json"
    load_cluster("office-1gbe").save(path)
    assert len(load_cluster(path).workers) == 8
    with pytest.raises(ConfigError, match=r"mine.json: \+n_hosts=3: only keys of .toml files with \[generator\]"):
        load_cluster(f"{path}+n_hosts=3")


def test_loading_takes_work_in_proportion_to_the_machines():
    """Twice the machines are twice the calls: 256 more cost half of what 512 more do. (Quadratic: a quarter.)"""
    calls = {}
    for n in (8, 256, 512, 1024):
        cluster, calls[n] = counted(lambda n=n: load_cluster(star(n, bandwidth="10 Gbit/s", latency="5 us")))
        assert len(cluster.workers) == n
    assert calls[512] - calls[256] == pytest.approx((calls[1024] - calls[512]) / 2, rel=0.02)
    large, n_calls = counted(lambda: load_cluster(bundled_files("topologies")["star-1024-10g"]))
    assert len(large.workers) == 1024
    assert n_calls < 1000 * 1024


def test_a_bundled_cluster_is_built_once(monkeypatch, tmp_path):
    """Runs of a study name the same cluster; a file that has changed is read again."""
    assert load_cluster("office-1gbe") is load_cluster("office-1gbe")
    assert load_cluster("office-1gbe+n_hosts=3") is not load_cluster("office-1gbe")
    path = tmp_path / "mine.toml"
    path.write_text(bundled_files("topologies")["office-1gbe"].read_text())
    monkeypatch.setattr("ddlsim.cluster.catalogue.bundled_files", lambda folder: {"mine": path})
    before = load_cluster("mine")
    path.write_text(path.read_text().replace("n_hosts = 8", "n_hosts = 9"))
    os.utime(path, ns=(0, 1))
    assert (len(before.workers), len(load_cluster("mine").workers)) == (8, 9)


@pytest.mark.slow
def test_the_largest_machines_are_built_in_proportion_to_their_links():
    """6,144 GPUs of 24 units take 24 times the calls of a unit (and a part that is the same)."""
    path = bundled_files("topologies")["dgx-h100-pod"]
    calls = {n: counted(lambda n=n: load_cluster(f"{path}+n_leaves={8 * n}"))[1] for n in (1, 2, 4, 8)}
    assert calls[8] - calls[4] == pytest.approx(2 * (calls[4] - calls[2]), rel=0.05)
    assert calls[8] < 8.5 * calls[1]


def test_alike_links_of_another_type_are_checked():
    """1 and True are equal, but only one of them is a bandwidth."""
    graph = nx.DiGraph()
    graph.add_edge("a", "b", bandwidth=1)
    graph.add_edge("b", "a", bandwidth=True)
    with pytest.raises(ConfigError, match=r"edge 'b' -> 'a': bandwidth = True: must be a number"):
        load_cluster(graph)
    graph.add_edge("b", "a", bandwidth=[1])
    with pytest.raises(ConfigError, match=r"edge 'b' -> 'a': bandwidth = \[1\]: must be a number"):
        load_cluster(graph)


def test_importing_clusters_is_cheap():
    program = "import sys, ddlsim.cluster; print(sorted({'networkx', 'pydantic', 'numba'} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_a_folder_that_is_missing():
    with pytest.raises(ConfigError, match="'nowhere' was not found"):
        bundled_files("nowhere")
