"""Devices in files of the user's own."""

import json
from dataclasses import replace

import numpy as np
import pytest
from draws import rows
from typer.testing import CliRunner

import ddlsim
from ddlsim import cli
from ddlsim.cluster import catalogue
from ddlsim.collectives import nccl
from ddlsim.errors import ConfigError
from ddlsim.run.prepare import place
from ddlsim.study.fingerprint import Digests, text_of

CLUSTER = """
[generator]
type = "star"
n_hosts = 2
bandwidth = "25 Gbit/s"
latency = "1 us"
[host]
device = "{device}"
"""


@pytest.fixture
def slow(tmp_path):
    """A V100 of half the speed, in a file."""
    v100 = ddlsim.load_device("v100")
    half = replace(v100, name="half", peak_flops={name: rate / 2 for name, rate in v100.peak_flops.items()}, curves=())
    half.save(tmp_path / "v100-slow.toml")
    return half


@pytest.mark.parametrize("name", ["v100", "h100", "desktop-cpu"])
def test_every_field_comes_back(tmp_path, name):
    device = ddlsim.load_device(name)
    device.save(tmp_path / "mine.toml")
    assert ddlsim.load_device(tmp_path / "mine.toml") == device
    assert ddlsim.load_device(str(tmp_path / "mine.toml")) == device
    if name == "v100":
        assert 'fp16 = "125 TFLOP/s"' in (tmp_path / "mine.toml").read_text()


def test_a_file_without_a_name_is_called_after_itself(tmp_path, slow):
    path = tmp_path / "lab.toml"
    path.write_text((tmp_path / "v100-slow.toml").read_text().replace('name = "half"\n', ""))
    assert ddlsim.load_device(path) == replace(slow, name="lab")


def test_a_file_that_changes_is_read_again(tmp_path, slow):
    path = tmp_path / "v100-slow.toml"
    assert ddlsim.load_device(path).power_w == 300.0
    replace(slow, power_w=250.0).save(path)
    assert ddlsim.load_device(path).power_w == 250.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('title = "x"\npower = "3 W"', "mine.toml: unknown key 'power'"),
        ('title = "x"', "mine.toml: key 'peak_flops' is missing; add peak_flops = ..."),
        ("title = ", "mine.toml: not valid TOML"),
        (None, "mine.toml: no such file"),
    ],
    ids=["unknown", "missing", "syntax", "none"],
)
def test_mistakes_are_one_line(tmp_path, text, message):
    if text is not None:
        (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")) as caught:
        ddlsim.load_device(tmp_path / "mine.toml")
    assert "\n" not in str(caught.value)


def test_a_rate_needs_its_unit(tmp_path, slow):
    path = tmp_path / "v100-slow.toml"
    path.write_text(path.read_text().replace('"900 GB/s"', "900e9"))
    with pytest.raises(
        ConfigError, match=r"v100-slow.toml: memory_bandwidth = 900000000000.0: must be a string with a"
    ):
        ddlsim.load_device(path)


def test_everywhere_that_takes_a_name(tmp_path, slow, monkeypatch):
    """In Python, in experiments and clusters relative to their folder, and on the command line."""
    (tmp_path / "cluster.toml").write_text(CLUSTER.format(device="v100-slow.toml"))
    (tmp_path / "fast.toml").write_text(CLUSTER.format(device="v100"))
    (tmp_path / "run.toml").write_text('cluster = "fast.toml"\nmodel = "alexnet"\ndevice = "v100-slow.toml"\n')
    of_cluster = ddlsim.Experiment(tmp_path / "cluster.toml", "alexnet")
    of_file = ddlsim.load_experiment(tmp_path / "run.toml")
    in_python = ddlsim.Experiment(tmp_path / "fast.toml", "alexnet", device=slow)
    expected = ddlsim.simulate(in_python).throughput
    assert ddlsim.simulate(of_cluster).throughput == ddlsim.simulate(of_file).throughput == expected
    of_file.save(tmp_path / "again.toml")
    assert ddlsim.simulate(ddlsim.load_experiment(tmp_path / "again.toml")).throughput == expected
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ["run", "cluster.toml", "-m", "alexnet"], ["run", "fast.toml", "-m", "alexnet", "--device", "v100-slow.toml"]
    ):  # fmt: skip
        done = CliRunner().invoke(cli.app, [*arguments, "--json", "--no-bottleneck"], catch_exceptions=False)
        assert json.loads(done.stdout)["throughput"] == pytest.approx(expected)
    done = CliRunner().invoke(cli.app, ["fits", "alexnet", "v100-slow.toml"])
    assert done.exit_code == 0, done.output


def test_nccl_goes_by_the_name_of_the_file(tmp_path, slow):
    (tmp_path / "cluster.toml").write_text(CLUSTER.format(device="v100-slow.toml"))
    (tmp_path / "fast.toml").write_text(CLUSTER.format(device="v100"))
    sites = [nccl.site(ddlsim.load_cluster(tmp_path / name), (1, 2)) for name in ("cluster.toml", "fast.toml")]
    assert sites[0] == sites[1]


@pytest.mark.parametrize(
    ("cluster", "device"),
    rows([("dgx-h100-pod", "h800"), ("dgx-h100-pod+device=h800", None), ("hgx-h100-96g", "h800")], 1),
)
def test_the_nvlinks_of_an_h800_are_slower(cluster, device):
    """An H800 has 200 GB/s of NVLink in each direction (arXiv:2412.19437) on clusters of the H100 (450 GB/s), too."""
    split = ddlsim.Parallel(tensor=8, sequence=True)
    found = ddlsim.simulate(cluster, "llama-3-8b", split, 8, workers=8, device=device, steps=1, warmup=0)
    slow = ddlsim.simulate(
        f"{cluster}+nvlink_bandwidth=200 GB/s", "llama-3-8b", split, 8, workers=8, device=device, steps=1, warmup=0
    )
    assert found.step_time == pytest.approx(slow.step_time, rel=1e-12)
    assert (
        found.step_time
        > 1.2
        * ddlsim.simulate(
            cluster.partition("+")[0], "llama-3-8b", split, 8, workers=8, device="h100", steps=1, warmup=0
        ).step_time
    )
    assert found.sensitivities()[0].gain > 0.01


@pytest.mark.parametrize("given", ["option", "path", "graph"])
def test_an_explicit_bandwidth_of_nvlinks_is_kept(given, tmp_path):
    """Files and graphs state their bandwidths explicitly, too, also the file of a bundled cluster."""
    fast = "dgx-h100-pod+nvlink_bandwidth=450 GB/s"
    if given != "option":
        fast = ddlsim.load_cluster(fast)
        fast.save(tmp_path / "dgx-h100-pod.toml")
        fast = tmp_path / "dgx-h100-pod.toml" if given == "path" else fast.to_graph()

    def seconds(device):
        split = ddlsim.Parallel(tensor=8, sequence=True)
        return ddlsim.simulate(fast, "llama-3-8b", split, 8, workers=8, device=device, steps=1, warmup=0).step_time

    assert seconds("h800") == pytest.approx(seconds("h100"), rel=1e-3)  # 1.4 with 200 GB/s


MIXED = """
[[hosts]]
name = "fast"
device = "h100"
n_gpus = 2
inside = "nvswitch"
nvlink_bandwidth = "450 GB/s"
[[hosts]]
name = "slow"
device = "h800"
n_gpus = 2
inside = "nvswitch"
nvlink_bandwidth = "450 GB/s"
[[switches]]
name = "switch"
[[links]]
between = ["fast", "switch"]
bandwidth = "400 Gbit/s"
latency = "1 us"
[[links]]
between = ["slow", "switch"]
bandwidth = "400 Gbit/s"
latency = "1 us"
"""


def test_devices_limit_their_own_nvlinks_only(tmp_path, monkeypatch):
    """On a bundled cluster with several devices; and studies store limited runs apart from those on a file's links."""
    (tmp_path / "mixed.toml").write_text(MIXED)
    monkeypatch.setattr(catalogue, "bundled_files", lambda folder: {"mixed": tmp_path / "mixed.toml"})
    names = "mixed", tmp_path / "mixed.toml"
    found = []
    for name in names:
        cluster = place(ddlsim.Experiment(name, "alexnet", batch_size=4)).cluster
        rates = np.where(np.array(cluster.link_kind) == "nvlink", cluster.link_bandwidth, np.nan)
        found.append([np.unique(rates[cluster.host_of[cluster.link_src] == host])[0] for host in (0, 1)])
    assert found == [[450e9, 200e9], [450e9, 450e9]]
    runs = [ddlsim.Experiment(ddlsim.load_cluster(name), ddlsim.load_model("alexnet")) for name in names]
    assert len({text_of(run, Digests()) for run in runs}) == 2


@pytest.mark.parametrize("device", ["h100", "a100-80g", None])
def test_another_device_does_not_keep_the_nvlink_limit_of_the_last_one(device: str | None) -> None:
    """An H800 limits NVLinks of the pod to 200 GB/s; ``with_`` replaces the device and its limit."""
    few = {"workers": 2, "steps": 1, "warmup": 0}
    slow = ddlsim.simulate("dgx-h100-pod", "resnet50", device="h800", **few)  # type: ignore[arg-type]
    for experiment in (slow.experiment, slow.given or slow.experiment):
        changed = ddlsim.simulate(experiment.with_(device=device))
        fresh = ddlsim.simulate("dgx-h100-pod", "resnet50", device=device, **few)  # type: ignore[arg-type]
        assert changed.cluster.link_bandwidth.tolist() == fresh.cluster.link_bandwidth.tolist()
        assert changed.step_time == fresh.step_time
