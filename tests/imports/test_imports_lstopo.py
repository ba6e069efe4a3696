"""lstopo's XML: packages, bridges, GPUs, NICs and matrices of NVLinks, as hwloc 1 and 2 write them; what is refused."""

import pytest

from ddlsim.errors import ConfigError
from ddlsim.imports.lstopo import read_lstopo

#: a GPU and an InfiniBand NIC below a bridge of package 0, beside the board's display; a GPU at package 1
MACHINE = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0">
 <object type="Machine" os_index="0" gp_index="1">
  <info name="Architecture" value="x86_64"/>
  <object type="Package" os_index="0" gp_index="3">
   <info name="CPUVendor" value="GenuineIntel"/>
   <info name="CPUFamilyNumber" value="6"/>
   <info name="CPUModelNumber" value="85"/>
   <object type="NUMANode" os_index="0" gp_index="4" local_memory="1"/>
   <object type="Core" os_index="0" gp_index="5"><object type="PU" os_index="0" gp_index="6"/></object>
   <object type="Bridge" gp_index="10" bridge_type="0-1" depth="0" bridge_pci="0000:[00-19]">
    <object type="Bridge" gp_index="11" bridge_type="1-1" bridge_pci="0000:[17-19]" pci_busid="0000:16:00.0"
            pci_type="0604 [8086:2030] [0000:0000] 04" pci_link_speed="15.753846">
     <object type="PCIDev" gp_index="12" pci_busid="0000:18:00.0" pci_type="0302 [10de:1db1] [10de:1212] a1"
             pci_link_speed="15.753846">
      <object type="OSDev" gp_index="31" name="nvml0" subtype="NVML" osdev_type="1"/>
     </object>
     <object type="PCIDev" gp_index="13" pci_busid="0000:19:00.0" pci_type="0207 [15b3:1013] [15b3:0008] 00"
             pci_link_speed="7.876923">
      <object type="OSDev" gp_index="32" name="ib0" osdev_type="2"/>
      <object type="OSDev" gp_index="33" name="mlx5_0" osdev_type="3"/>
     </object>
    </object>
    <object type="PCIDev" gp_index="14" pci_busid="0000:03:00.0" pci_type="0300 [1a03:2000] [1a03:2000] 30"/>
    <object type="PCIDev" gp_index="15" pci_busid="0000:04:00.0" pci_type="0200 [8086:1521] [8086:1521] 01"
            pci_link_speed="2.000000"><object type="OSDev" name="eno1" osdev_type="2"/></object>
   </object>
  </object>
  <object type="Package" os_index="1" gp_index="103">
   <info name="CPUVendor" value="GenuineIntel"/>
   <info name="CPUModelNumber" value="85"/>
   <object type="Bridge" gp_index="110" bridge_type="0-1" depth="0" bridge_pci="0000:[86-89]">
    <object type="PCIDev" gp_index="112" pci_busid="0000:88:00.0" pci_type="0302 [10de:1db1] [10de:1212] a1"
            pci_link_speed="0.000000">
     <object type="OSDev" gp_index="131" name="nvml1" subtype="NVML" osdev_type="1"/>
    </object>
   </object>
  </object>
 </object>
 MATRIX
</topology>
"""
NVLINKS = """<distances2 type="OSDev" nbobjs="2" kind="9" name="NVLinkBandwidth" indexing="gp">
  <indexes length="7">31 131 </indexes><u64values length="30">1000000 50000 50000 1000000 </u64values></distances2>"""
BARE, JOINED = MACHINE.replace("MATRIX", ""), MACHINE.replace("MATRIX", NVLINKS)
#: hwloc 1: sockets in NUMA nodes, the bridge beside a socket; no speeds
OLD = """<?xml version="1.0"?><!DOCTYPE topology SYSTEM "hwloc.dtd"><topology><object type="Machine" os_index="0">
  <object type="NUMANode" os_index="0"><object type="Socket" os_index="0"/></object>
  <object type="NUMANode" os_index="1"><object type="Socket" os_index="1"/>
    <object type="Bridge" os_index="0" bridge_type="0-1" depth="0" bridge_pci="0000:[00-02]">
      <object type="PCIDev" os_index="4096" pci_busid="0000:01:00.0" pci_type="0300 [1002:1234] [1002:0000] a1"/>
    </object></object></object></topology>"""


def read(tmp_path, text=JOINED, **facts):
    path = tmp_path / "machine.xml"
    path.write_text(text, encoding="utf-8")
    return read_lstopo(path, **facts)


def links(made):
    names = made.node_names
    ends = zip(made.link_src, made.link_dst, made.link_kind, made.link_bandwidth.tolist(), strict=True)
    return {(names[a], names[b]): (kind, pytest.approx(rate, rel=1e-6)) for a, b, kind, rate in ends}


def test_a_machine_is_as_nccl_would_count_it(tmp_path):
    """PCIe 3.0 x16 (15.75 GB/s) carries 12 GB/s, x8 6; a link of unknown speed 12; Skylake sockets 10; NVLinks 50."""
    made = read(tmp_path)
    assert made.node_kind.count("gpu") == 2
    one_way = {
        ("gpu0", "pcie-0000:16:00.0"): ("pcie", 12e9), ("nic-mlx5_0", "pcie-0000:16:00.0"): ("pcie", 6e9),
        ("pcie-0000:16:00.0", "cpu0"): ("pcie", 12e9), ("gpu1", "cpu1"): ("pcie", 12e9),
        ("cpu0", "cpu1"): ("smp", 10e9), ("gpu0", "gpu1"): ("nvlink", 50e9),
    }  # fmt: skip
    both = {pair: value for (a, b), value in one_way.items() for pair in ((a, b), (b, a))}
    assert links(made) == {(f"node0.{a}", f"node0.{b}"): value for (a, b), value in both.items()}
    assert "PCIe carries 76 % of the links' speed" in made.notes[0]


def test_several_machines_meet_at_their_rdma_devices(tmp_path):
    made = read(tmp_path, n_hosts=2, nic_bandwidth="100 Gbit/s")
    assert links(made)["node1.nic-mlx5_0", "network"] == ("nic", 12.5e9)
    assert not any("eno1" in name for name in made.node_names)


def test_an_nvswitch_that_the_file_does_not_have_is_given(tmp_path):
    with pytest.warns(
        UserWarning, match="the file lists no NVLink or xGMI links, so the GPUs are connected by PCIe only"
    ):
        read(tmp_path, BARE)
    assert links(read(tmp_path, BARE, nvlink_bandwidth="300 GB/s"))["node0.gpu1", "node0.nvswitch"][1] == 300e9


def test_hwloc_1_has_sockets_and_no_speeds(tmp_path):
    made = links(read(tmp_path, OLD, pcie_bandwidth="8 GB/s"))
    assert made["node0.gpu0", "node0.cpu1"] == ("pcie", 8e9)


def test_a_package_that_is_not_told_is_the_first_and_idle_gpus_are_noted(tmp_path):
    group = '<object type="Package" os_index="1"/><object type="Group"'
    text = JOINED.replace('<object type="Package" os_index="1"', group)
    with pytest.warns(
        UserWarning, match="the PCIe links of 1 GPUs run at 4 GB/s or less, probably because the GPUs are"
    ):
        made = read(tmp_path, text.replace("0.000000", "4.000000"))
    assert ("node0.gpu1", "node0.cpu0") in links(made)
    assert "cannot tell which CPU package 1 PCI roots belong to; assuming the first" in made.notes


@pytest.mark.parametrize(
    ("text", "facts", "message"),
    [
        (JOINED.replace("0302", "0108"), {}, r"xml:3: <topology>: no GPU found \(PCI devices of class 03 or 12\)"),
        (JOINED, {"nvlink_bandwidth": 1e9}, "the file lists the NVLinks; remove nvlink_bandwidth"),
        (JOINED, {"nic_bandwidth": 1e9}, "has no effect on a single machine; set n_hosts or remove nic_bandwidth"),
        (JOINED, {"n_hosts": 2}, "machines can only be connected if the speed of a NIC is known"),
        (JOINED.replace("50000 50000", "50000"), {}, "<distances2>: has 3 values for 2 devices; is the file complete"),
        (JOINED.replace("0302 [", "GPU ["), {}, r"<object>: pci_type = 'GPU .* is not like '0302 \[10de:20b0\]"),
        (JOINED.replace("15.753846", "fast"), {}, "pci_link_speed = 'fast' is not a number of GB/s"),
        (JOINED.replace('type="Machine"', 'type="System"'), {}, "contains 0 machines; must contain exactly one"),
        ("<topology/>", {}, "not an hwloc topology"),
        (JOINED[:900], {}, "not valid XML"),
    ],
)
def test_what_is_refused_is_named_with_its_line(tmp_path, text, facts, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text, **facts)


@pytest.mark.parametrize(
    "display",
    [
        "0300 [1002:515e]", "0300 [1002:4752]", "0300 [1002:164e]", "0380 [1002:5940]", "0300 [1002:9615]",
        "0300 [1002:15d8]", "0300 [102b:0532]", "0300 [8086:3e98]", "0380 [8086:9bc5]", "0300 [10de:0391]",
        "0300 [10de:0848]", "0380 [1af4:1050]", "1200 [10ee:500c]",
    ],
    ids=["ES1000", "Rage XL", "Raphael", "RV280 secondary", "RS780", "Picasso", "Matrox", "UHD", "UHD 0380",
         "GeForce 7600", "MCP78", "virtio", "Alveo"],
)  # fmt: skip
def test_displays_are_no_gpus(tmp_path, display):
    """Two V100s and a board's, a processor's or an old card's display (pci.ids) are two workers; alone it is none."""
    made = read(tmp_path, JOINED.replace("0300 [1a03:2000]", display))
    assert len(made.workers) == 2
    if display.startswith("03"):
        assert any(f"skipped a display controller: {display[6:15]}" in note for note in made.notes)
        alone = JOINED.replace("0302 [10de:1db1]", display)
        with pytest.raises(ConfigError, match=r"no GPU found \(PCI devices of class 03 or 12\), but 3 displays"):
            read(tmp_path, alone)


@pytest.mark.parametrize(
    "device",
    ["0300 [1002:6798]", "0380 [1002:7408]", "1200 [1002:74a1]", "0300 [10de:1eb8]", "0380 [8086:0bd5]",
     "1200 [1da3:1020]"],
    ids=["HD 7970", "MI250X", "MI300X", "T4", "Max 1550", "Gaudi"],
)  # fmt: skip
def test_gpus_of_several_kinds_are_counted_aloud(tmp_path, device):
    with pytest.warns(UserWarning, match=rf"of several kinds \(vendor:device\): 2 of 10de:1db1, 1 of {device[6:15]}"):
        made = read(tmp_path, JOINED.replace("0300 [1a03:2000]", device))
    assert len(made.workers) == 3
