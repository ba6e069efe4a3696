"""NCCL's topology file: bandwidths as NCCL counts them, bridges, NVSwitch, NICs, several machines; what is refused."""

import warnings

import pytest

import ddlsim
from ddlsim.errors import ConfigError
from ddlsim.imports.nccl_topology import read_nccl_topology

#: two GPUs and a NIC below a PCIe switch of CPU 0, joined by four NVLinks; a NIC of its own at CPU 1
SMALL = """<system version="1">
  <cpu host_hash="0x1" numaid="0" affinity="ffff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="85">
    <pci busid="0000:40:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">
      <pci busid="0000:41:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">
        <pci busid="0000:47:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
          <gpu dev="0" sm="80" rank="0" gdr="1">
            <nvlink target="0000:48:00.0" count="4" tclass="0x030200"/>
          </gpu>
        </pci>
        <pci busid="0000:48:00.0" class="0x030200" link_speed="8 GT/s" link_width="8">
          <gpu dev="1" sm="80" rank="1" gdr="1">
            <nvlink target="0000:47:00.0" count="4" tclass="0x030200"/>
          </gpu>
        </pci>
        <pci busid="0000:49:00.0" class="0x020700" link_speed="16.0 GT/s PCIe" link_width="16">
          <nic>
            <net name="mlx5_0" dev="0" speed="200000" port="1" latency="0.000000" guid="0x1" maxconn="131072" gdr="1"/>
          </nic>
        </pci>
        <pci busid="0000:4a:00.0" class="0x010802" link_speed="16.0 GT/s PCIe" link_width="4"/>
      </pci>
    </pci>
  </cpu>
  <cpu host_hash="0x1" numaid="1" affinity="ffff0000" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="85">
    <nic>
      <net name="eth0" dev="1" speed="10000" port="0" guid="0x0" maxconn="65536" gdr="0"/>
    </nic>
  </cpu>
</system>
"""


def read(tmp_path, text=SMALL, **arguments):
    path = tmp_path / "topo.xml"
    path.write_text(text, encoding="utf-8")
    return read_nccl_topology(path, **arguments)


def links(made):
    return {
        (made.node_names[a], made.node_names[b]): (kind, bandwidth)
        for a, b, kind, bandwidth in zip(
            made.link_src, made.link_dst, made.link_kind, made.link_bandwidth.tolist(), strict=True
        )
    }


def test_a_machine_as_nccl_counts_it(tmp_path):
    """Gen 4 x16: 16 * 120 / 80 = 24 GB/s; gen 3 x8: 6 GB/s; 4 NVLinks of sm 80: 80 GB/s; Skylake sockets 10 GB/s.

    The root port has one bridge below it and goes; the bridge stays, with GPUs and NIC below; the disk goes.
    """
    made = read(tmp_path, device="a100")
    switch = "node0.pcie-0000:41:00.0"
    expected = {
        (switch, "node0.cpu0"): ("pcie", 24e9), ("node0.gpu0", switch): ("pcie", 24e9),
        ("node0.gpu1", switch): ("pcie", 6e9), ("node0.nic-mlx5_0", switch): ("pcie", 24e9),
        ("node0.gpu0", "node0.gpu1"): ("nvlink", 80e9), ("node0.cpu0", "node0.cpu1"): ("smp", 10e9),
        ("node0.nic-eth0", "node0.cpu1"): ("pcie", 1.25e9),
    }  # fmt: skip
    assert links(made) == {**expected, **{(b, a): value for (a, b), value in expected.items()}}
    assert [made.node_names[node] for node in made.workers] == ["node0.gpu0", "node0.gpu1"]
    assert made.device_of[made.node("node0.gpu1")] == "a100"
    assert made.host_names == ("node0",)


def test_copies_are_joined_at_the_speed_of_their_nics(tmp_path):
    made = read(tmp_path, n_hosts=3, network_latency="5 us")
    assert len(made.workers) == 6
    joined = {pair[0]: value for pair, value in links(made).items() if pair[1] == "network"}
    assert joined == {
        f"node{i}.nic-{name}": ("nic", speed) for i in range(3) for name, speed in (("mlx5_0", 25e9), ("eth0", 1.25e9))
    }  # fmt: skip
    assert made.n_links == 3 * 14 + 2 * 6
    there = made.routes([made.node("node0.gpu0")], [made.node("node2.gpu1")])[0]
    assert made.link_latency[there].sum() == pytest.approx(2 * (1e-6 + 1e-6 + 5e-6))


CPU = """  <cpu host_hash="0x1" numaid="{i}" affinity="ff" arch="x86_64" vendor="AuthenticAMD" familyid="25">
    <pci busid="0000:{i}1:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
      <gpu dev="{i}" sm="80" rank="{i}" gdr="1"/>
    </pci>
    <nic>
{nets}
    </nic>
  </cpu>
"""
NET = '<net name="{name}" dev="0" speed="{speed}" port="{port}" guid="{guid}" maxconn="65536" gdr="0"/>'


def with_nets(n_cpus, *nets):
    listed = "\n".join(NET.format(**{"speed": 10000, "port": 0, "guid": "0x0", **net}) for net in nets)
    return "<system version='1'>\n" + "".join(CPU.format(i=i, nets=listed) for i in range(n_cpus)) + "</system>\n"


@pytest.mark.parametrize("n_cpus", [1, 2, 4, 8])
def test_an_interface_listed_under_every_cpu_is_one(tmp_path, n_cpus):
    """100 MB over 10 Gbit/s take 80 ms, wherever eth0 is listed."""
    made = read(tmp_path, with_nets(n_cpus, {"name": "eth0"}), n_hosts=2)
    assert sum(kind == "nic" for kind in made.link_kind) == 2 * 2
    for algorithm in ("default", "ring", "nccl"):
        seconds = ddlsim.collective_time(made, algorithm, "100 MB")
        assert 0.08 <= seconds <= 0.17  # of several ranks a machine up to 2 (n-1)/n of the buffer pass it


@pytest.mark.parametrize(("nets", "n_ports"), [
    (({"name": "mlx5_0", "guid": "0xa"}, {"name": "mlx5_1", "guid": "0xb"}), 2),
    (({"name": "mlx5_0", "guid": "0xa", "port": 1}, {"name": "mlx5_0", "guid": "0xa", "port": 2}), 2),  # one card
    (({"name": "eth0", "guid": "0xa"}, {"name": "eth0", "guid": "0xb"}), 2),
    (({"name": "eth0", "guid": "0xa"}, {"name": "eth0", "guid": "0xa"}), 1),
])  # fmt: skip
def test_ports_that_differ_stay_several(tmp_path, nets, n_ports):
    made = read(tmp_path, with_nets(2, *nets), n_hosts=2)
    assert sum(kind == "nic" for kind in made.link_kind) == 2 * 2 * n_ports


def test_virtual_interfaces_are_named_and_left_out(tmp_path):
    names = ("veth268d912", "br-3c276cd5dbc3", "docker0", "cali1a2b", "tunl0", "flannel.1", "lo")
    virtual = ({"name": name, "guid": f"0x1{i}"} for i, name in enumerate(names))
    text = with_nets(2, {"name": "bond0", "guid": "0x9"}, *virtual)
    with pytest.warns(UserWarning, match="skipped virtual interfaces: " + ", ".join(names)) as caught:
        made = read(tmp_path, text, n_hosts=2)
    assert len(caught) == 1
    assert [name for name in made.node_names if "nic" in name] == ["node0.nic-bond0", "node1.nic-bond0"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = read(tmp_path, text, n_hosts=2, virtual_nics=True)
    assert sum(kind == "nic" for kind in kept.link_kind) == 2 * 2 * (1 + len(names))


def test_a_run_over_links_of_unknown_width_says_so(tmp_path):
    """255 lanes are what NCCL counts where the kernel does not know the width: 255 x 120 / 80 = 382.5 GB/s."""
    text = SMALL.replace('link_width="16">\n          <gpu', 'link_width="255">\n          <gpu')
    made = read(tmp_path, text, n_hosts=2)
    note = "link_width of 0000:47:00.0 is 255, which means unknown; assuming 255 lanes (382.5 GB/s), as NCCL does"
    assert note in made.notes
    result = ddlsim.simulate(made, "lenet5", batch_size=32, workers=4, compute=ddlsim.Measured("1 ms", 32), steps=2)
    assert note in result.notes
    assert not any("255" in note for note in read(tmp_path).notes)


def test_all_nvswitches_are_one(tmp_path):
    """5 + 4 NVLinks of sm 90, 20.6 GB/s each, to two switches: 185.4 GB/s into one crossbar."""
    text = SMALL.replace('sm="80"', 'sm="90"').replace(
        '<nvlink target="0000:48:00.0" count="4" tclass="0x030200"/>',
        '<nvlink target="0000:f5:00.0" count="5" tclass="0x068000"/><nvlink target="0000:f4:00.0" count="4"/>',
    )
    made = links(read(tmp_path, text))
    assert made["node0.gpu0", "node0.nvswitch"] == ("nvlink", pytest.approx(185.4e9))
    assert made["node0.nvswitch", "node0.gpu0"] == ("nvlink", pytest.approx(185.4e9))


@pytest.mark.parametrize(
    ("cpu", "bandwidth"),
    [
        ('arch="arm64"', 6e9), ('arch="ppc64"', 32e9), ('arch="x86_64" vendor="AuthenticAMD" familyid="25"', 24e9),
        ('arch="x86_64" vendor="AuthenticAMD" familyid="23"', 16e9),
        ('arch="x86_64" vendor="AuthenticAMD" familyid="143"', 16e9),
        ('arch="x86_64" vendor="AuthenticAMD" familyid="175"', 24e9),
        ('arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143"', 22e9),
        ('arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="79"', 6e9),
    ],
    ids=["arm", "power", "zen3", "zen2", "zen2-as-nccl-wrote-it", "zen3-as-nccl-wrote-it", "sapphire-rapids",
         "broadwell"],
)  # fmt: skip
def test_sockets(tmp_path, cpu, bandwidth):
    text = SMALL.replace('arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="85"', cpu)
    assert links(read(tmp_path, text))["node0.cpu0", "node0.cpu1"] == ("smp", bandwidth)


def test_an_unknown_rate_counts_as_nccl_counts_it_and_is_noted(tmp_path):
    made = read(tmp_path, SMALL.replace('link_speed="8 GT/s" link_width="8"', 'link_speed="Unknown" link_width=""'))
    assert links(made)["node0.gpu1", "node0.pcie-0000:41:00.0"] == ("pcie", 12e9)
    assert "unknown link speed of 0000:48:00.0 ('Unknown'); assuming 8 GT/s, as NCCL does" in made.notes


def test_grace_hopper_has_c2c(tmp_path):
    end = 'tclass="0x030200"/>\n          </gpu>'
    text = SMALL.replace(end, end.replace("</gpu>", '<c2c bw="44712" count="10"/></gpu>'), 1)
    assert links(read(tmp_path, text))["node0.gpu0", "node0.cpu0"] == ("c2c", pytest.approx(447.12e9))


def test_a_fused_file_gives_all_machines(tmp_path):
    second = SMALL.replace("0x1", "0x2").split("\n", 1)[1]
    text = SMALL.replace("</system>\n", second)
    made = read(tmp_path, text)
    assert made.host_names == ("node0", "node1")
    with pytest.raises(ConfigError, match="the file describes 2 machines; remove n_hosts"):
        read(tmp_path, text, n_hosts=2)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('dev="1" sm', 'dev="0" sm', r"topo\.xml:11: <gpu>: dev = '0' appears twice"),
        ('numaid="1"', 'numaid="0"', r":24: <cpu>: numaid = '0' appears twice"),
        ('link_width="8"', 'link_width="x8"', r":10: <pci>: link_width = 'x8' is not a number"),
        ('count="4"', 'count="four"', r":7: <nvlink>: count = 'four' is not an integer"),
        ('target="0000:48:00.0" ', "", r":7: <nvlink>: the attribute 'target' is missing"),
        ("<gpu", "<gpv", "not valid XML"),
        ("<system", "<graphs", "not valid XML"),
    ],
)
def test_what_is_refused_is_named_with_its_line(tmp_path, old, new, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, SMALL.replace(old, new, 1))


def test_other_xml_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="the first element must be <system>"):
        read(tmp_path, "<platform/>")
    with pytest.raises(ConfigError, match="no <gpu> and no <pci>"):
        read(tmp_path, '<system version="1"><cpu numaid="0"/></system>')


AMD = """\
<system version="2">
  <cpu numaid="0" arch="x86_64" vendor="AuthenticAMD" familyid="143" modelid="49">
    <pci busid="0000:c1:00.0" class="0x038000" link_speed="16 GT/s" link_width="16">
      <gpu dev="0" sm="104" gcn="GCN" arch="38911" rank="0" gdr="1">
        <xgmi target="0000:c6:00.0" count="4" tclass="0x038000"/>
        <xgmi target="0000:d1:00.0" count="1" tclass="0x120000"/>
      </gpu>
    </pci>
    <pci busid="0000:c6:00.0" class="0x038000" link_speed="16 GT/s" link_width="16">
      <gpu dev="1" sm="104" gcn="GCN" arch="38911" rank="1" gdr="1">
        <xgmi target="0000:c1:00.0" count="4" tclass="0x038000"/>
      </gpu>
    </pci>
  </cpu>
</system>
"""


@pytest.mark.parametrize(
    ("gcn", "one"), [("906", 24e9), ("gfx908", 24e9), ("910", 36e9), ("gfx90a:sramecc+:xnack-", 36e9), ("gfx942", 48e9)]
)
def test_xgmi_links_join_amd_gpus(tmp_path, gcn, one):
    made = links(read(tmp_path, AMD.replace("GCN", gcn)))
    assert made["node0.gpu0", "node0.gpu1"] == made["node0.gpu1", "node0.gpu0"] == ("xgmi", 4 * one)
    assert made["node0.gpu0", "node0.cpu0"][0] == "pcie"  # 0000:d1:00.0 is a GPU that the job did not use
    assert len(made) == 6


def test_xgmi_of_an_unknown_architecture_is_noted(tmp_path):
    assert (
        "unknown xGMI speed of gfx950; assuming 24 GB/s per link, as RCCL does"
        in read(tmp_path, AMD.replace("GCN", "gfx950")).notes
    )


def test_unknown_links_are_refused_or_counted(tmp_path):
    text = AMD.replace("GCN", "910").replace("<xgmi", "<uplink")
    with pytest.raises(ConfigError, match=r":5: <uplink>: unknown element; known elements in <gpu>: c2c, nvlink, xgmi"):
        read(tmp_path, text)
    with pytest.warns(UserWarning, match="skipped 3 <uplink>, which NCCL does not define"):
        made = read(tmp_path, text, ignore_unknown=True)
    assert "skipped 3 <uplink>, which NCCL does not define" in made.notes


def test_a_link_to_itself_is_unused_and_noted(tmp_path):
    """As in Azure's file of the NC A100 v4 series, whose GPUs see themselves at the other end of their NVLinks."""
    made = read(tmp_path, AMD.replace("0000:d1:00.0", "0000:c1:00.0"))
    assert "<xgmi> of gpu0 leads to gpu0 itself and is unused, as in NCCL" in made.notes
    plain = read(tmp_path, AMD.replace('<xgmi target="0000:d1:00.0"', '<xgmi target="0000:ff:00.0"'))
    assert links(made) == links(plain)
    assert all(source != target for source, target in links(made))


TEMPLATE = """\
<system version="1">
  <cpu numaid="0" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="85">
    <pci busid="ffff:ff:01.0" class="0x060400" link_speed="8 GT/s" link_width="16">
      <pci busid="0000:10:1d.0" class="0x030200" link_speed="8 GT/s" link_width="16"/>
      <pci busid="0000:10:1c.0" class="0x030200" link_speed="8 GT/s" link_width="16"/>
      <pci busid="0000:10:1b.0" class="0x020000" link_speed="8 GT/s" link_width="16"/>
    </pci>
  </cpu>
</system>
"""


def test_a_clouds_file_names_gpus_by_their_class(tmp_path):
    with pytest.warns(UserWarning, match=r"no <gpu> and no NVLinks.*set nvlink_bandwidth \(--bandwidth\) if"):
        made = read(tmp_path, TEMPLATE)
    assert sorted(name for name, kind in zip(made.node_names, made.node_kind, strict=True) if kind == "gpu") == [
        "node0.gpu0", "node0.gpu1"
    ]  # fmt: skip
    assert links(made)["node0.gpu0", "node0.pcie-ffff:ff:01.0"] == ("pcie", 12e9)
    assert ("node0.nic-0000:10:1b.0", "node0.pcie-ffff:ff:01.0") in links(made)


@pytest.mark.parametrize(
    ("vendor", "device", "n"), [("0x1a03", "0x2000", 1), ("0x1002", "0x515e", 1), ("0x10de", "0x20b0", 2)]
)
def test_displays_in_a_clouds_file_are_no_gpus(tmp_path, vendor, device, n):
    text = TEMPLATE.replace('1d.0" class="0x030200"', f'1d.0" class="0x030000" vendor="{vendor}" device="{device}"')
    made = read(tmp_path, text, nvlink_bandwidth="300 GB/s")
    assert made.node_kind.count("gpu") == n


def test_what_a_clouds_file_leaves_out_is_given(tmp_path):
    made = read(tmp_path, TEMPLATE, nvlink_bandwidth="300 GB/s", nic_bandwidth="100 Gbit/s", n_hosts=2)
    assert links(made)["node1.gpu1", "node1.nvswitch"] == ("nvlink", 300e9)
    assert links(made)["node0.nic-0000:10:1b.0", "network"] == ("nic", 12.5e9)
    with pytest.raises(ConfigError, match="machines can only be connected if the speed of a NIC is known"):
        read(tmp_path, TEMPLATE, nvlink_bandwidth="300 GB/s", n_hosts=2)


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (TEMPLATE.replace(' class="0x030200"', ""), {}, r"2 <pci> have no class; set n_gpus if GPUs are the first"),
        (TEMPLATE.replace(' class="0x030200"', ""), {"n_gpus": 3}, "n_gpus = 3 exceeds the 2 <pci> without class"),
        (SMALL, {"n_gpus": 2}, "the file lists the GPUs; remove n_gpus"),
        (AMD, {"nvlink_bandwidth": "1 GB/s"}, "the file lists the NVLinks; remove nvlink_bandwidth"),
        (SMALL, {"nic_bandwidth": "1 GB/s"}, "the file has the speeds of all NICs; remove nic_bandwidth"),
    ],
)
def test_facts_that_a_file_has_or_lacks_are_asked_for(tmp_path, text, arguments, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text, **arguments)


def test_a_clouds_file_without_classes_is_told_how_many_are_gpus(tmp_path):
    """The file's order counts, which leaves the third device to be the NIC."""
    devices = "".join(f'<pci busid="0000:00:{bus}.0"/>' for bus in ("1a", "1b", "15"))
    with pytest.warns(UserWarning, match="the first 2 PCI devices are assumed to be GPUs connected by PCIe only"):
        made = read(tmp_path, f'<system version="1"><cpu numaid="0">{devices}</cpu></system>', n_gpus=2)
    assert made.node_kind.count("gpu") == 2
    assert ("node0.nic-0000:00:15.0", "node0.cpu0") in links(made)


@pytest.mark.parametrize("speed", ["-1", "0"])
def test_nics_whose_driver_knows_no_speed_are_as_fast_as_said(tmp_path, speed):
    text = SMALL.replace("200000", speed).replace('"10000"', f'"{speed}"')
    made = read(tmp_path, text, nic_bandwidth="100 Gbit/s", n_hosts=2)
    assert links(made)["node0.nic-mlx5_0", "network"][1] == 12.5e9


def test_pci_switches_that_are_one(tmp_path):
    """NCCL's <pcilink>: two bridges of one Broadcom switch, joined inside (LOC_BW), each with a GPU below it."""
    bridge = """<pci busid="0000:{0}1:00.0" class="0x060400" link_speed="16 GT/s" link_width="16">
      <pcilink target="0000:{1}1:00.0"/>
      <pci busid="0000:{0}2:00.0" class="0x060400" link_speed="16 GT/s" link_width="16">
        <pci busid="0000:{0}3:00.0" class="0x030200" link_speed="16 GT/s" link_width="16"><gpu dev="{0}" sm="80"/></pci>
      </pci></pci>"""
    cpu = '<cpu numaid="0" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="85">'
    text = f'<system version="1">{cpu}{bridge.format(1, 2)}{bridge.format(2, 1)}</cpu></system>'
    made = links(read(tmp_path, text))
    assert made["node0.pcie-0000:11:00.0", "node0.pcie-0000:21:00.0"] == ("pcie", 5000e9)
    assert made["node0.gpu1", "node0.pcie-0000:11:00.0"] == ("pcie", 24e9)
