"""`ddlsim import`, and the way of an administrator: topology, measurements, runs, a page."""

import pytest

import ddlsim
import ddlsim.cli

TOPO = """\
\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV4\t0-15\t0
GPU1\tNV4\t X \t0-15\t0
"""


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Return what runs the command and gives (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "topo.txt").write_text(TOPO)

    def run(*words):
        monkeypatch.setattr("sys.argv", ["ddlsim", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            ddlsim.cli.main()
        out = capsys.readouterr()
        return end.value.code or 0, out.out, out.err

    return run


def nccl_tests():
    """Return an all-reduce on two GPUs: 20 us and 80 GB/s, as nccl-tests prints it."""
    head = "# nThread 1 nGpus 2\n"
    head += "".join(f"#  Rank  {i} Group  0 Pid 7 on host device {i} [00] V100\n" for i in (0, 1))
    lines = [head + "#  size  count  type  redop  root  time  algbw  busbw  #wrong  time  algbw  busbw  #wrong"]
    for size in (2**16, 2**20, 2**26):
        seconds = 20e-6 + size / 80e9
        one = f"{seconds * 1e6:.2f} {size / seconds / 1e9:.2f} {size / seconds / 1e9:.2f} 0"
        lines.append(f"  {size}  {size // 4}  float  sum  -1  {one}  {one}")
    return "\n".join(lines)


@pytest.mark.slow
def test_from_a_topology_to_a_page(call, tmp_path):
    """What docs/calibration.md shows, in one go."""
    (tmp_path / "nccl.log").write_text(nccl_tests())
    (tmp_path / "runs.csv").write_text("workers,batch_size,throughput (images/s)\n1,32,6000\n2,32,11000\n")
    code, out, err = call("import", "topo.txt", "--bandwidth", "25 GB/s", "--device", "v100", "--out", "cluster.toml")
    assert (code, err) == (0, "wrote cluster.toml\n")
    assert "2 workers" in out or "2 x" in out or "v100" in out
    code, out, err = call("import", "nccl.log", "--operation", "all_reduce", "--out", "measured.csv")
    assert (code, err) == (0, "wrote measured.csv\n")
    assert out == "6 rows of all_reduce among 2 ranks\n"
    code, out, err = call("calibrate", "measured.csv", "-c", "cluster.toml", "--out", "calibrated.toml")
    assert code == 0, err
    code, out, err = call("validate", "runs.csv", "-c", "calibrated.toml", "-m", "digits-cnn", "--html", "report.html")
    assert code == 0, err
    page = (tmp_path / "report.html").read_text()
    assert "<h1>runs.csv on calibrated.toml</h1>" in page
    assert page.count("<tr") == 3
    assert 60e9 < ddlsim.load_cluster("calibrated.toml").link_bandwidth.max() < 120e9


GOAL = """num_ranks 2

rank 0 {
l1: calc 100
l2: send 10b to 1
l2 requires l1
}

rank 1 {
l1: recv 10b from 0
l2: calc 100
l2 requires l1
}
"""


def test_what_is_imported_is_what_the_file_names(call, tmp_path):
    code, _, err = call("import", "topo.txt")
    assert code == 2
    assert err == (
        "error: topo.txt: the speed of the NVLinks is missing; set --bandwidth, for example "
        "'25 GB/s' for NVLink 2 to 4, or add the output of nvidia-smi nvlink -s (read as nvidia-smi)\n"
    )
    options = ("--bandwidth", "25 GB/s", "--set", "pcie_bandwidth=24 GB/s", "--out", "c.json")
    assert call("import", "topo.txt", *options)[0] == 0
    assert sorted(set(ddlsim.load_cluster("c.json").link_bandwidth)) == [24e9, 100e9]
    assert ddlsim.load_cluster("topo.txt+bandwidth=25 GB/s+pcie_bandwidth=24 GB/s").n_links == 6


def test_an_imported_cluster_is_run_by_its_file(call):
    assert call("import", "topo.txt", "--bandwidth", "25 GB/s", "--device", "v100", "--out", "cluster.toml")[0] == 0
    code, out, _ = call("run", "cluster.toml", "--model", "digits-cnn", "--steps", "2")
    assert code == 0
    assert "2 on topo" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nope.txt",), "nope.txt: no such file"),
        (
            ("topo.txt", "--operation", "all_reduce"),
            "--operation has no effect, because topo.txt is read as nvidia-smi (accepted: --device, --hosts, --latency",
        ),
        (("topo.txt",), "the speed of the NVLinks is missing; set --bandwidth, for example"),
        (("topo.txt", "--bandwidth", "25 GB/s", "--hosts", "2"), "use --set nic_bandwidth=..., or --hosts 1 (read as"),
        (
            ("topo.txt", "--bandwidth", "25 GB/s", "--set", "nic_bandwidth=1 GB/s"),
            "--set nic_bandwidth='1 GB/s' has no effect on a single machine; set --hosts or remove --set nic_b",
        ),
        (("topo.txt", "--ranks", "2"), "--ranks has no effect, because topo.txt is read as nvidia-smi"),
        (("topo.txt", "--set", "ranks=2"), "--set ranks has no effect, because topo.txt is read as nvidia-smi"),
        (("topo.txt", "--bandwidth", "25 GB/s", "--device", "v1000"), "unknown device 'v1000'; did you mean 'v100'?"),
        (("topo.txt", "--set", "pcie"), "--set 'pcie': must be name=value"),
        (("topo.txt", "--kind", "nvidia"), "unknown kind 'nvidia'; did you mean 'nvidia-smi'?"),
        (
            ("topo.txt", "--bandwidth", "25 GB/s", "-m", "alexnet"),
            "--model has no effect, because topo.txt is nvidia-smi",
        ),
        (
            ("topo.txt", "--bandwidth", "25 GB/s", "--device", "v100", "-o", "c.txt"),
            "cannot write '.txt' files; use .toml, .json or",
        ),
        (("ping.txt", "-o", "c.toml"), "measurements are written as a CSV table; choose a name that ends in .csv"),
        (("astra.yml", "--hosts", "2"), "--hosts has no effect, because astra.yml is astra; leave --hosts out"),
        (("ping.txt", "-o", "c.csv"), "none"),
        (("ping.txt", "-o", "c.csv", "--hosts", "1"), "--hosts has no effect, because ping.txt contains the number of"),
        (("ping.txt", "-o", "c.csv", "-m", "alexnet"), "--model has no effect, because ping.txt contains no training"),
        (("own.csv",), "own.csv: is already a table of measurements; pass it to ddlsim calibrate"),
        (("own.toml",), "own.toml: is a TOML file, ddlsim's own format; use it directly"),
        (("goal.txt", "-o", "goal.csv"), "--out goal.csv: a plan is written as Chakra traces; choose a name that ends"),
        (("none.et",), "none.et: no such file, and there is no none.0.et"),
        (("times.csv",), "times.csv:1: the column 'seconds' is not a throughput"),
    ],
)
def test_what_cannot_be_imported_is_one_line(call, tmp_path, words, message):
    (tmp_path / "ping.txt").write_text("PING h (10.0.0.2) 56(84) bytes of data.\n64 bytes from h: time=0.3 ms\n")
    (tmp_path / "own.csv").write_text("# mine\nexperiment,operation,n_ranks,n_hosts,nbytes,median_s\n")
    (tmp_path / "own.toml").write_text('model = "resnet50"\nn_ranks = 2\n')
    (tmp_path / "goal.txt").write_text(GOAL)
    (tmp_path / "times.csv").write_text("ranks,seconds\n2,0.5\n")
    (tmp_path / "astra.yml").write_text("topology: Ring\nnpus_count: 4\nbandwidth: 50\nlatency: 500\n")
    code, _, err = call("import", *words)
    if message == "none":
        assert (code, err) == (0, "wrote c.csv\n")
    else:
        assert (code, err.count("\n")) == (2, 1)
        assert message in err


def test_an_imported_plan_is_read_by_the_name_it_was_written_by(call, tmp_path):
    (tmp_path / "goal.txt").write_text(GOAL)
    code, out, err = call("import", "goal.txt", "-o", "step.et")
    assert (code, err) == (0, "wrote step.0.et, step.1.et\n")
    assert sorted(path.name for path in tmp_path.glob("*.et")) == ["step.0.et", "step.1.et"]
    for words in (("import", "step.et"), ("import", "step.0.et")):
        again = call(*words)
        assert again[0] == 0
        assert again[1] == out


def test_a_cluster_says_what_to_append_to_the_path(call):
    """A run has no --bandwidth; the message says what it takes instead."""
    code, _, err = call("run", "topo.txt", "-m", "digits-cnn")
    assert code == 2
    assert "set nvlink_bandwidth (append +bandwidth=... to the path)" in err
    code, _, err = call("run", "topo.txt+bandwidth=25 GB/s+n_hosts=2", "-m", "digits-cnn")
    assert code == 2
    assert "set nic_bandwidth (append +nic_bandwidth=... to the path)" in err


@pytest.mark.slow
def test_what_is_left_out_is_a_warning_of_one_line(call, tmp_path, monkeypatch):
    """Warnings are errors in these tests, but not where somebody types."""
    monkeypatch.setattr("warnings.filters", [])
    (tmp_path / "net.graphml").write_text(
        '<graphml><key id="k" for="node" attr.name="colour7"/><graph><node id="a"><data key="k">1</data></node>'
        '<node id="b"/><edge source="a" target="b"/></graph></graphml>'
    )
    code, _, err = call("import", "net.graphml", "--bandwidth", "1 Gbit/s", "--ignore-unknown", "--latency", "1 ms")
    assert code == 0
    assert err == (
        "warning: net.graphml: skipped: 1 attributes 'colour7'\nnote: skipped: 1 attributes 'colour7'\n"
        "note: the file gives no speed for 1 of 1 edges; assuming 1 Gbit/s for them\n"
    )
