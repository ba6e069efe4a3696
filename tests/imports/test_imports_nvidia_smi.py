"""`nvidia-smi topo -m`: PCIe trees without and with NICs, NVLink meshes and switches; what is refused."""

import pytest

from ddlsim.errors import ConfigError
from ddlsim.imports.nvidia_smi import read_nvidia_smi

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""
PCIE = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
    "GPU0\t X \tPIX\tPXB\tSYS\t0-13,28-41\t0\n"
    "GPU1\tPIX\t X \tPXB\tSYS\t0-13,28-41\t0\n"
    "GPU2\tPXB\tPXB\t X \tSYS\t0-13,28-41\t0\n"
    "GPU3\tSYS\tSYS\tSYS\t X \t14-27,42-55\t1\n" + LEGEND
)
DGX1 = """
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity
GPU0\t X \tNV1\tNV1\tNV2\tPIX\tPHB\t0-19,40-59
GPU1\tNV1\t X \tNV2\tNV1\tPIX\tPHB\t0-19,40-59
GPU2\tNV1\tNV2\t X \tNV2\tPHB\tPIX\t0-19,40-59
GPU3\tNV2\tNV1\tNV2\t X \tPHB\tPIX\t0-19,40-59
NIC0\tPIX\tPIX\tPHB\tPHB\t X \tPHB\t
NIC1\tPHB\tPHB\tPIX\tPIX\tPHB\t X \t

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""


def read(tmp_path, text, **arguments):
    path = tmp_path / "topo.txt"
    path.write_text(text, encoding="utf-8")
    return read_nvidia_smi(path, **arguments)


def links(made):
    """Return {(a, b) with a before b: (kind, GB/s)}, checking that both directions are alike."""
    found = {}
    for a, b, kind, bandwidth in zip(
        made.link_src, made.link_dst, made.link_kind, made.link_bandwidth.tolist(), strict=True
    ):
        ends = tuple(sorted(made.node_names[end].removeprefix("node0.") for end in (a, b)))
        assert found.setdefault(ends, (kind, bandwidth / 1e9)) == (kind, bandwidth / 1e9)
    return found


def test_bridges_below_bridges_below_cpus(tmp_path):
    made = read(tmp_path, PCIE, pcie_bandwidth="10 GB/s", smp_bandwidth="5 GB/s")
    pcie = ("pcie", 10.0)
    assert links(made) == {
        ("gpu0", "pcie0"): pcie, ("gpu1", "pcie0"): pcie, ("pcie0", "upper0"): pcie, ("gpu2", "upper0"): pcie,
        ("cpu0", "upper0"): pcie, ("cpu1", "gpu3"): pcie, ("cpu0", "cpu1"): ("smp", 5.0),
    }  # fmt: skip
    assert len(made.workers) == 4


def test_nvlinks_make_a_mesh_and_nics_show_the_bridges_behind_them(tmp_path):
    """GPUs 0 and 1 share a bridge with mlx5_0, as their NICs tell; 25 GB/s times the bond between each two."""
    made = links(read(tmp_path, DGX1, nvlink_bandwidth="25 GB/s"))
    assert {pair: value for pair, value in made.items() if value[0] == "nvlink"} == {
        (f"gpu{a}", f"gpu{b}"): ("nvlink", 25.0 * n)
        for a, b, n in ((0, 1, 1), (0, 2, 1), (0, 3, 2), (1, 2, 2), (1, 3, 1), (2, 3, 2))
    }
    assert {b for a, b in made if a in ("gpu0", "gpu1", "nic-mlx5_0") and b.startswith("pcie")} == {"pcie0"}
    assert {b for a, b in made if a in ("gpu2", "gpu3", "nic-mlx5_1") and b.startswith("pcie")} == {"pcie1"}
    assert not [pair for pair, value in made.items() if value[0] == "smp"]


def full(n_gpus, bond, affinity=True):
    names = [f"GPU{i}" for i in range(n_gpus)]
    rows = ["\t" + "\t".join(names) + ("\tCPU Affinity" if affinity else "")]
    for i, name in enumerate(names):
        cells = [" X " if i == j else bond for j in range(n_gpus)]
        rows.append("\t".join([name, *cells, *([f"{i * 2 // n_gpus}-7"] if affinity else [])]))
    return "\n".join(rows) + "\n"


def test_more_links_than_a_gpu_has_are_a_switch(tmp_path):
    """8 GPUs with 18 each to 7 others would be 126; all 18 lead into the crossbar: 450 GB/s."""
    made = links(read(tmp_path, full(8, "NV18"), nvlink_bandwidth="25 GB/s"))
    assert {value for pair, value in made.items() if "nvswitch" in pair} == {("nvlink", 450.0)}
    assert sum("nvswitch" in pair for pair in made) == 8
    assert sum("cpu1" in pair for pair in made) == 4 + 1  # by CPU affinity, and the link between the CPUs


@pytest.mark.parametrize(("nvswitch", "n_links"), [(None, 6), (False, 6), (True, 4)], ids=["auto", "mesh", "switch"])
def test_four_gpus_with_four_links_each_are_a_mesh_unless_told(tmp_path, nvswitch, n_links):
    made = links(read(tmp_path, full(4, "NV4", affinity=False), nvlink_bandwidth="25 GB/s", nvswitch=nvswitch))
    assert sum(kind == "nvlink" for kind, _ in made.values()) == n_links
    assert not any("cpu1" in pair for pair in made)  # nothing says that there is a second one


def test_copies_are_joined_by_their_nics(tmp_path):
    made = read(tmp_path, DGX1, nvlink_bandwidth="25 GB/s", n_hosts=2, nic_bandwidth="100 Gbit/s")
    assert made.host_names == ("node0", "node1")
    assert made.link_kind.count("nic") == 2 * 4
    with pytest.raises(ConfigError, match="the speed of a NIC is known; set nic_bandwidth"):
        read(tmp_path, DGX1, nvlink_bandwidth="25 GB/s", n_hosts=2)
    with pytest.raises(ConfigError, match="machines can only be connected if the speed of a NIC is known"):
        read(tmp_path, PCIE, n_hosts=2, nic_bandwidth="100 Gbit/s")


@pytest.mark.parametrize(
    ("device", "rate"), [(None, 12.0), ("v100", 12.0), ("a100-40g", 25.0), ("a100-80g", 25.0), ("h100", 50.0)]
)
def test_the_pcie_generation_follows_the_device(tmp_path, device, rate):
    """A NIC of 200 Gbit/s is not halved by the PCIe of an A100; what is given counts."""
    made = read(tmp_path, PCIE, device=device)
    assert {value for pair, value in links(made).items() if value[0] == "pcie"} == {("pcie", rate)}
    assert ("PCIe 3.0 with 12 GB/s" in " ".join(made.notes)) == (device is None)
    assert links(read(tmp_path, PCIE, device=device, pcie_bandwidth="6 GB/s"))["cpu1", "gpu3"] == ("pcie", 6.0)
    pod = read(tmp_path, DGX1, nvlink_bandwidth="25 GB/s", n_hosts=2, nic_bandwidth="200 Gbit/s", device=device)
    pair = [pod.node("node0.gpu0"), pod.node("node1.gpu0")]
    route = pod.routes(pair[:1], pair[1:]).links
    assert pod.link_bandwidth[route].min() == min(rate, 25.0) * 1e9


def test_soc_is_the_old_name_of_sys(tmp_path):
    assert links(read(tmp_path, PCIE.replace("SYS", "SOC"))) == links(read(tmp_path, PCIE))


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (PCIE.replace("GPU1\tPIX", "GPU1\tPXB"), {}, r"topo\.txt:3: GPU1 - GPU0 is PXB, but GPU0 - GPU1 is PIX"),
        (PCIE.replace("GPU3\tSYS\tSYS\tSYS\t X \t14-27,42-55\t1\n", "GPU3\tSYS\n"), {}, ":5: has 1 of 4 entries"),
        (PCIE.replace("GPU3\tSYS\tSYS\tSYS\t X \t14-27,42-55\t1\n", ""), {}, "the row of GPU3 is missing"),
        (PCIE.replace("PIX", "PIG"), {}, ":2: GPU0 - GPU1 is 'PIG'; must be NV#"),
        (PCIE.replace("GPU0\t X ", "GPU0\tPIX"), {}, ":2: GPU0 - GPU0 is PIX; X must be on the diagonal"),
        (PCIE, {"nvlink_bandwidth": "25 GB/s"}, "nvlink_bandwidth has no effect, because the matrix has no NV#"),
        (PCIE, {"nvswitch": True}, "nvswitch = True has no effect, because the matrix has no NV#; remove nv"),
        (PCIE, {"nic_bandwidth": "1 GB/s"}, "has no effect on a single machine"),
        (PCIE, {"pcie_bandwidth": "12"}, "pcie_bandwidth: '12' has no unit"),
        (DGX1, {}, "the speed of the NVLinks is missing; set nvlink_bandwidth"),
        ("GPU 0: NVIDIA A100\n", {}, "no matrix found"),
    ],
    ids=[
        "asymmetric", "cut", "missing", "unknown", "diagonal", "nvlink", "switch", "nic", "unit", "bond",
        "other",
    ],
)  # fmt: skip
def test_what_is_refused_is_named(tmp_path, text, arguments, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text, **arguments)


#: two GPUs of six NVLinks, one of which is down
STATUS = "".join(
    f"GPU {gpu}: Tesla V100-SXM2-16GB (UUID: GPU-{gpu})\n"
    + "".join(f"\t Link {link}: {'25.781 GB/s' if link < 5 else '<inactive>'}\n" for link in range(6))
    for gpu in range(2)
)
BOND = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV5\t0-7\nGPU1\tNV5\t X \t0-7\n"


@pytest.mark.parametrize("text", [STATUS, BOND + STATUS, "$ nvidia-smi nvlink -s\n" + STATUS + BOND])
def test_the_list_of_nvlinks_says_how_fast_they_are(tmp_path, text):
    path = tmp_path / "smi.txt"
    path.write_text(text)
    made = read_nvidia_smi(path)
    nvlinks = [rate for kind, rate in zip(made.link_kind, made.link_bandwidth, strict=True) if kind == "nvlink"]
    assert nvlinks == pytest.approx([5 * 25.781e9] * 2)


@pytest.mark.parametrize(
    ("text", "facts", "message"),
    [
        (STATUS, {"nvlink_bandwidth": "25 GB/s"}, "the file has the speed of the NVLinks .*; remove nvlink_bandwidth"),
        (STATUS.replace("Link 1: 25", "Link 1: 20"), {}, r":3: GPU0 has a link of 20.781 GB/s, but other links have"),
        (STATUS + STATUS.replace("GPU 0", "GPU 2").replace("GPU 1", "GPU 3"), {}, "the file lists NVLinks, but not"),
    ],
)
def test_lists_of_nvlinks_that_do_not_suffice(tmp_path, text, facts, message):
    path = tmp_path / "smi.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_nvidia_smi(path, **facts)


def test_more_gpus_with_an_nvswitch(tmp_path):
    path = tmp_path / "smi.txt"
    path.write_text(STATUS + STATUS.replace("GPU 0", "GPU 2").replace("GPU 1", "GPU 3"))
    made = read_nvidia_smi(path, nvswitch=True)
    assert "node0.nvswitch" in made.node_names
    assert len(made.workers) == 4
