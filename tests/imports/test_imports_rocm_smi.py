"""rocm-smi --showtopo: tables and JSON of four GPUs in two pairs; what is refused."""

import json

import pytest

from ddlsim.errors import ConfigError
from ddlsim.imports.rocm_smi import read_rocm_smi


def kind(a, b):
    return "0" if a == b else "XGMI" if a // 2 == b // 2 else "PCIE"


def hops(a, b):
    return 0 if a == b else 1 if a // 2 == b // 2 else 3


def table(title, cell, n=4):
    rows = ["".join([f"GPU{a}   ", *(f"{cell(a, b)}            " for b in range(n))]) for a in range(n)]
    return "\n".join([f"===== {title} =====", "       " + "         ".join(f"GPU{b}" for b in range(n)), *rows, "", ""])


NUMA = "===== Numa Nodes =====\n" + "".join(
    f"GPU[{gpu}]\t\t: (Topology) Numa Node: {gpu // 2}\nGPU[{gpu}]\t\t: (Topology) Numa Affinity: {gpu // 2}\n"
    for gpu in range(4)
)
TABLES = (
    "\n\n===== ROCm System Management Interface =====\n"
    + table("Weight between two GPUs", lambda a, b: 15 * (a != b))
    + table("Hops between two GPUs", hops) + table("Link Type between two GPUs", kind) + NUMA
    + "===== End of ROCm SMI Log =====\n"
)  # fmt: skip
SYSTEM = {
    f"(Topology) {what} between DRM devices {a} and {b}": str(cell(a, b))
    for a in range(4) for b in range(a + 1, 4) for what, cell in (("Hops", hops), ("Link type", kind))
}  # fmt: skip
PAIRS = json.dumps({"system": SYSTEM} | {f"card{gpu}": {"(Topology) Numa Node": str(gpu // 2)} for gpu in range(4)})


def read(tmp_path, text=TABLES, **facts):
    path = tmp_path / "topo.txt"
    path.write_text(text, encoding="utf-8")
    return read_rocm_smi(path, **facts)


def links(made):
    names = made.node_names
    ends = zip(made.link_src, made.link_dst, made.link_kind, made.link_bandwidth.tolist(), strict=True)
    return {(names[a], names[b]): (kind, rate) for a, b, kind, rate in ends}


@pytest.mark.parametrize("text", [TABLES, PAIRS, "".join(f"node7: {line}\n" for line in TABLES.splitlines())])
def test_pairs_joined_by_xgmi_meet_at_their_cpus(tmp_path, text):
    made = links(read(tmp_path, text, xgmi_bandwidth="50 GB/s"))
    assert made["node0.gpu0", "node0.gpu1"] == made["node0.gpu3", "node0.gpu2"] == ("xgmi", 50e9)
    assert ("node0.gpu1", "node0.gpu2") not in made
    assert made["node0.gpu2", "node0.cpu1"] == ("pcie", 12e9)
    assert made["node0.cpu0", "node0.cpu1"] == ("smp", 16e9)
    assert len(made) == 2 * (2 + 4 + 1)


def test_xgmi_over_several_hops_is_no_link(tmp_path):
    """All four say XGMI, but only neighbours in a pair are one hop apart."""
    made = links(read(tmp_path, TABLES.replace("PCIE", "XGMI"), xgmi_bandwidth="50 GB/s"))
    assert sum(kind == "xgmi" for kind, _ in made.values()) == 4


def test_several_machines_have_a_nic_each(tmp_path):
    made = links(read(tmp_path, xgmi_bandwidth="50 GB/s", n_hosts=2, nic_bandwidth="200 Gbit/s"))
    assert made["node1.nic", "network"] == ("nic", 25e9)
    assert ("node1.nic", "node1.cpu0") in made


@pytest.mark.parametrize(
    ("text", "facts", "message"),
    [
        (TABLES, {}, r"topo\.txt: the speed of XGMI is missing; set xgmi_bandwidth \(--bandwidth\)"),
        (TABLES.replace("XGMI", "PCIE"), {"xgmi_bandwidth": 1e9}, "xgmi_bandwidth has no effect, because there is no"),
        (TABLES, {"xgmi_bandwidth": 1e9, "n_hosts": 2}, "the speed of a NIC is known; set nic_bandwidth"),
        (TABLES, {"xgmi_bandwidth": 1e9, "nic_bandwidth": 1e9}, "has no effect on a single machine"),
        (TABLES.replace("GPU1   XGMI", "GPU1   PCIE"), {}, r":\d+: GPU1 - GPU0 is PCIE, but GPU0 - GPU1 is XGMI"),
        (TABLES.replace("PCIE            PCIE            0", "PCIE            0"), {}, r":\d+: has 3 of 4 entries"),
        (TABLES.replace("XGMI", "QPI "), {}, "GPU0 - GPU1 is 'QPI' over '1' hops; must be XGMI or PCIE"),
        (table("Weight between two GPUs", hops), {}, "no table of link types found; save the output of rocm-smi"),
        (TABLES[: TABLES.index("GPU1   XGMI")], {}, "GPU1 - GPU2 is missing; is the table complete?"),
    ],
)
def test_what_is_refused_is_named(tmp_path, text, facts, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text, **facts)
