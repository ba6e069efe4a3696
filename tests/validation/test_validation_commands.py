"""What a user types."""

import inspect
import json
from pathlib import Path

import pytest

import ddlsim.cli
import ddlsim.cli.calibrate
import ddlsim.cli.run
from ddlsim.validation.sources import read_sources

TABLE = Path(__file__).with_name("two_ranks.csv")
TWO = """
[generator]
type = "star"
n_hosts = 1
bandwidth = "1 Gbit/s"
latency = "50 us"
[host]
n_gpus = 2
inside = "nvlink_mesh"
nvlink_bandwidth = "5 GB/s"
device = "v100"
"""
RUNS = "workers,batch_size,throughput (images/s)\n1,32,6000\n2,32,11000\n"


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Return what runs the command and gives (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.toml").write_text(TWO)
    (tmp_path / "runs.csv").write_text(RUNS)

    def run(*words):
        monkeypatch.setattr("sys.argv", ["ddlsim", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            ddlsim.cli.main()
        out = capsys.readouterr()
        return end.value.code or 0, out.out, out.err

    return run


def test_calibrate_and_validate(call, tmp_path):
    code, out, err = call("calibrate", TABLE, "--cluster", "two.toml", "--out", "calibrated.toml")
    assert code == 0, err
    assert "inside.latency" in out
    assert "wrote calibrated.toml" in err
    code, out, err = call(
        "validate", "runs.csv", "-c", "calibrated.toml", "-m", "digits-cnn", "--plot", "plot.png", "--table", "all.csv"
    )
    assert code == 0, err
    assert "held out: 2 runs" in out
    assert (tmp_path / "plot.png").exists()
    assert (tmp_path / "all.csv").read_text().startswith("place,run,workers")


@pytest.mark.slow
def test_json_for_programs(call):
    code, out, _ = call("calibrate", TABLE, "--cluster", "two.toml", "--json")
    assert code == 0
    assert {p["name"] for p in json.loads(out)["parameters"]} == {
        "inside.latency", "inside.bandwidth", "reduce_bandwidth",
    }  # fmt: skip
    code, out, _ = call("validate", "runs.csv", "-c", "two.toml", "-m", "digits-cnn", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["summary"]["held_out"]["n"] == len(found["rows"]) == 2


@pytest.mark.slow
def test_the_exit_code_tells_whether_the_tolerance_is_kept(call):
    words = ("validate", "runs.csv", "-c", "two.toml", "-m", "digits-cnn")
    code, _, err = call(*words, "--tolerance", "0.1%")
    assert code == 1
    assert "exceeds the tolerance of 0.1 %" in err
    code, out, _ = call(*words, "--tolerance", "0.2", "--fit-on", "workers <= 2")
    assert code == 0
    assert "fitted (workers <= 2): 2 runs" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("calibrate", "none.csv", "-c", "two.toml"), "error: none.csv: no such file"),
        (("calibrate", TABLE, "-c", "two.toml", "-o", "out.json"), "ends in .toml"),
        (("calibrate", TABLE, "-c", "two.toml", "-a", "ring"), "must be kind=algorithm"),
        (("calibrate", TABLE, "-c", "two.toml", "-a", "allreduce=ring"), "did you mean 'all_reduce'"),
        (("calibrate", TABLE, "-c", "two.toml", "-a", "all_reduce=rings"), "algorithm 'rings'; did you mean 'ring'?"),
        (("calibrate", TABLE, "-c", "two.toml", "-a", "scatter=direct"), "algorithms: scatter was not measured"),
        (("calibrate", TABLE, TABLE, "-c", "two.toml"), "is listed twice, so its measurements would count twice"),
        (("calibrate", TABLE, "-c", "two.toml", "--hosts", "2"), r"n_hosts \(--hosts\) has no effect"),
        (("calibrate", TABLE, "-c", "two.toml", "-m", "resnet50"), r"model \(--model\) has no effect"),
        (("calibrate", TABLE, "-c", "two.toml", "--reader", "os:getcwd"), "no effect, because ddlsim reads all files"),
        (("calibrate", TABLE, "-c", "two.toml", "--allow-code"), "--allow-code has no effect without --stack"),
        (("calibrate", "runs.csv", "-c", "two.toml"), "error: runs.csv"),
        (("validate", "none.csv", "-c", "two.toml"), "error: none.csv: no such file"),
        (
            ("validate", "runs.csv", "-c", "two.toml", "-m", "lenet5", "--tolerance", "ten"),
            "must be a positive fraction or percentage, such as 0.1",
        ),
        (
            ("validate", "runs.csv", "-c", "two.toml", "-m", "lenet5", "--tolerance", "10"),
            "--tolerance '10': a fraction must be at most 1; write 10% for a percentage",
        ),
        (("validate", "runs.csv", "-c", "two.toml", "-m", "lenet5", "--fit-on", "worker=1"), "did you mean 'workers'"),
        (
            ("validate", "runs.csv", "-c", "two.toml", "-m", "lenet5", "--fit", "network"),
            "--fit network has no effect without --fit-on",
        ),
        (
            ("validate", "runs.csv", "-c", "two.toml", "-m", "lenet5", "--fit-on", "workers == 1", "--fit", ""),
            r"fit\[0\] = '': must be 'compute' or 'network'",
        ),
    ],
    ids=[
        "no-file",
        "suffix",
        "algorithm",
        "kind",
        "algorithm-name",
        "not-measured",
        "twice",
        "hosts",
        "model",
        "reader",
        "code",
        "runs",
        "no-runs",
        "tolerance",
        "fraction",
        "condition",
        "fit",
        "fit-nothing",
    ],
)
def test_errors_are_one_line(call, words, message):
    import re

    code, _, err = call(*words)
    assert code == 2
    assert re.search(message, err)
    assert len(err.strip().splitlines()) == 1


TOPOLOGY = """\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV2\t0-23\t0
GPU1\tNV2\t X \t0-23\t0
"""
SWEEP = """# nThread 1 nGpus 2 minBytes 8 maxBytes 33554432 step: 8(factor) warmup iters: 5 iters: 20 validation: 1
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
"""


def test_the_software_is_that_of_logs(tmp_path):
    """Tables say it themselves, in each row."""
    us, nbytes = 10.0, 8192
    log = tmp_path / "nccl.log"
    log.write_text(SWEEP + f"{nbytes} {nbytes // 4} float sum -1 {us} 0.8 0.8 0 {us} 0.8 0.8 0\n")
    facts = {"operation": "all_reduce", "n_ranks": 2, "n_hosts": 1}
    found = read_sources([log], **facts, version="NCCL 2.18.3").rows
    assert {row.version for row in found} == {"NCCL 2.18.3"}
    assert {row.version for row in read_sources([log], **facts).rows} == {""}
    with pytest.raises(ddlsim.ConfigError, match=r"version \(--software\) has no effect, because all files"):
        read_sources(found, version="NCCL 2.20")


def test_files_of_runs_may_name_code_if_allowed(call, tmp_path, monkeypatch):
    """The error for code in a file names an option that the command has."""
    (tmp_path / "mine.py").write_text("from ddlsim.collectives.all_reduce import ring as rounds\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "code.csv").write_text("workers,batch_size,throughput (images/s),algorithm\n2,32,100,mine:rounds\n")
    for words in (("validate", "code.csv"), ("calibrate", "code.csv", "--stack", "pytorch")):
        code, _, err = call(*words, "-c", "two.toml", "-m", "lenet5")
        assert (code, "pass --allow-code on the command line" in err) == (2, True)
        assert "would import code" not in call(*words, "-c", "two.toml", "-m", "lenet5", "--allow-code")[2]


def test_steps_that_do_not_grow_with_the_batch_are_pointed_out(call, tmp_path):
    rows = "1,32,300\n1,64,600\n1,128,1400\n"
    (tmp_path / "flat.csv").write_text(f"workers,batch_size,throughput (images/s)\n{rows}")
    code, out, _ = call("validate", "flat.csv", "-c", "two.toml", "-m", "resnet50", "--fit-on", "workers == 1")
    assert code == 0
    assert "+ 0 s x batch size (at its limit, because times do not grow with the batch size" in out


@pytest.mark.slow
def test_from_a_topology_to_a_page(call, tmp_path):
    """Two GPUs joined by two NVLinks of 25 GB/s; their all-reduce takes 10 us and the bytes at 40 GB/s."""
    rows = []
    for nbytes in (2**k for k in range(13, 26, 3)):
        us = 10.0 + nbytes / 40e3
        algbw = nbytes / us / 1e3
        cells = f"{us:.2f} {algbw:.2f} {algbw:.2f} 0"
        rows.append(f"{nbytes} {nbytes // 4} float sum -1 {cells} {cells}")
    (tmp_path / "topo.txt").write_text(TOPOLOGY)
    (tmp_path / "nccl.log").write_text(SWEEP + "\n".join(rows) + "\n")
    code, _, error = call("import", "topo.txt", "--device", "v100", "--out", "cluster.toml")
    assert code == 2
    assert "set --bandwidth" in error
    steps = [
        ("import", "topo.txt", "--device", "v100", "--bandwidth", "25 GB/s", "--out", "cluster.toml"),
        ("calibrate", "nccl.log", "-c", "cluster.toml", "--operation", "all_reduce", "--ranks", "2", "--hosts", "1",
         "--software", "NCCL 2.18.3", "--out", "calibrated.toml"),
        ("run", "calibrated.toml", "-m", "resnet18", "--cost", "calibrated"),
        ("validate", "runs.csv", "-c", "calibrated.toml", "-m", "resnet18", "--fit-on", "workers == 1",
         "--html", "p.html"),
    ]  # fmt: skip
    for words in steps:
        code, out, error = call(*words)
        assert code == 0, (words, error)
    assert "held out: 1 run," in out
    assert 'versions = ["NCCL 2.18.3"]' in (tmp_path / "calibrated.toml").read_text()
    assert "resnet18" in (tmp_path / "p.html").read_text()
    code, _, error = call("calibrate", "nccl.log", "-c", "cluster.toml", "--ranks", "2")
    assert code == 2
    assert "(--hosts)" in error


@pytest.mark.slow
def test_contradictions_come_first(call, tmp_path):
    """NCCL between hosts at 10 Gbit/s, one TCP stream at 2: the first line says so; with --json it is on stderr."""
    lines = ["experiment,operation,n_ranks,n_hosts,nbytes,median_s,backend"]
    lines += [f"collective,all_reduce,2,2,{2**k},{2e-5 + 2**k / 1.25e9},nccl" for k in range(10, 28)]
    lines += ["point_to_point,one_way,2,2,2500000000,10,tcp"]
    (tmp_path / "all.csv").write_text("\n".join(lines) + "\n")
    code, out, _ = call("calibrate", "all.csv", "--cluster", "aws-10g-16+n_hosts=2")
    assert code == 0
    assert out.startswith("warning: 1 measurements by tcp contradict the links between hosts")
    code, out, err = call("calibrate", "all.csv", "--cluster", "aws-10g-16+n_hosts=2", "--json")
    assert code == 0
    assert json.loads(out)["parameters"]
    assert "measurements by tcp contradict" in err


SETTINGS = "--strategy fsdp+stage=2|--precision fp8|--stack megatron|--device b200|--optimizer sgd|--no-flash"


def test_validate_takes_the_settings_of_run(call, tmp_path):
    """All options but those that every row of the file gives, and the outputs of a single run."""
    of_run = inspect.signature(ddlsim.cli.run.run).parameters
    given = {"cluster_or_file", "batch_size", "workers", "steps", "allow_code", "stability", "bottleneck", "as_json"}
    outputs = {name for name in of_run if "Path" in str(of_run[name].annotation)} | {"trace_whole"}
    assert set(of_run) - given - outputs <= set(inspect.signature(ddlsim.cli.calibrate.validate).parameters)
    rows = "workers,batch_size,tokens_per_s,model\n8,8,60000,llama-3-8b+layers=2\n"
    (tmp_path / "llama.csv").write_text(rows)
    known = set()
    for setting in ["", *SETTINGS.split("|")]:
        words = setting.split() if "--strategy" in setting else ["--strategy", "fsdp", *setting.split()]
        code, out, err = call("validate", "llama.csv", "-c", "dgx-h100-pod", "--json", *words)
        assert code == 0, err
        (row,) = json.loads(out)["rows"]
        assert row["measured"] == pytest.approx(60000 / 8192)
        known.add(row["predicted"])
    assert len(known) == 1 + len(SETTINGS.split("|"))  # each option has an effect


def test_validated_runs_have_the_defaults_of_run(call, tmp_path):
    (tmp_path / "llama.csv").write_text("workers,batch_size,tokens_per_s,model\n8,8,60000,llama-3-8b+layers=2\n")
    code, out, _ = call("validate", "llama.csv", "-c", "dgx-h100-pod", "--json", "-s", "fsdp")
    assert code == 0
    result = ddlsim.simulate("dgx-h100-pod", "llama-3-8b+layers=2", ddlsim.FSDP(), 8, 8, steps=4, warmup=1)
    assert result.experiment.precision == "bf16"
    assert json.loads(out)["rows"][0]["predicted"] == pytest.approx(result.throughput)
