"""`read_any`: every kind by its content, whatever the file is called; everything survives a round trip."""

import json
import re
import subprocess
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest

import ddlsim.imports
from ddlsim.cluster import Cluster, load_cluster
from ddlsim.errors import ConfigError
from ddlsim.imports import HorovodTimeline, KinetoTrace, MlperfRun, Timing, detect_kind, read_any, to_measurements
from ddlsim.imports.detect import KINDS
from ddlsim.measure import read_measurements
from ddlsim.plan import Plan

NCCL = (
    "# Collective test starting: all_reduce_perf\n"
    "#  Rank  0 Group  0 Pid   6899 on     node-a device  0 [0000:04:00] NVIDIA H100 80GB HBM3\n"
    "#  Rank  1 Group  0 Pid   6900 on     node-a device  1 [0000:05:00] NVIDIA H100 80GB HBM3\n"
    "#     size      count    type  redop  root     time   algbw   busbw #wrong     time   algbw   busbw #wrong\n"
    "   1048576     262144   float    sum    -1   101.90   10.29   10.29      0   102.40   10.24   10.24      0\n"
)
STEP = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 1, "dur": 5}
SAMPLES = {
    "nccl-tests": NCCL,
    "osu": "# OSU MPI Latency Test v5.6\n# Size          Latency (us)\n8                       1.13\n",
    "iperf3": json.dumps({"start": {"version": "iperf 3.9"}, "end": {"sum_received": {"bytes": 8, "seconds": 1}}}),
    "ping": "PING h (10.0.0.2) 56(84) bytes of data.\n64 bytes from h: icmp_seq=1 ttl=64 time=0.3 ms\n",
    "kineto": json.dumps({"schemaVersion": 1, "traceEvents": [STEP]}),
    "horovod": json.dumps(
        [{"ph": phase, "name": name, "ts": ts, "pid": 1} for phase, name, ts in (
            ("B", "NEGOTIATE_ALLREDUCE", 1), ("E", "", 2), ("B", "ALLREDUCE", 3), ("E", "", 9))]
    ),
    "mllog": ':::MLLOG {"time_ms": 1, "key": "run_start", "value": null}\n',
    "nccl-topology": (
        '<system version="1"><cpu numaid="0"><pci busid="0000:47:00.0"><gpu dev="0" sm="80"/></pci></cpu></system>'
    ),
    "nvidia-smi": "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPIX\t0-7\nGPU1\tPIX\t X \t0-7\n",
    "rocm-smi": "= Link Type between two GPUs =\n GPU0 GPU1\nGPU0 0 PCIE\nGPU1 PCIE 0\n".replace("=", "===="),
    "lstopo": (
        '<topology><object type="Machine"><object type="PCIDev" pci_busid="0000:01:00.0" '
        'pci_type="0302 [10de:1db1] [10de:1212] a1"/></object></topology>'
    ),
    "simgrid": (
        '<?xml version="1.0"?>\n<platform version="4.1"><cluster id="c" prefix="n" suffix="" radical="0-3" speed="1Gf" '
        'bw="1GBps" lat="1us"/></platform>'
    ),
    "astra": "topology: [ Ring ]\nnpus_count: [ 4 ]\nbandwidth: [ 50 ]\nlatency: [ 500 ]\n",
    "graphml": (
        '<graphml><key id="d" for="edge" attr.name="LinkSpeedRaw"/><graph><node id="a"/><node id="b"/>'
        '<edge source="a" target="b"><data key="d">1000000000</data></edge></graph></graphml>'
    ),
    "throughput": "gpus,images/s\n8,100\n",
    "goal": "num_ranks 2\nrank 0 {\nl1: calc 7\n}\nrank 1 {\n}\n",
    # lengths, then {version 0.0.4} and {name, type COMM_COLL_NODE, comm_type, comm_size}
    "chakra": "\x07\n\x050.0.4\x25\x12\x03sum\x18\x07R\x0d\n\tcomm_typeH\x00R\x0d\n\tcomm_sizeH\x08",
}  # fmt: skip
TYPES = {
    "kineto": KinetoTrace, "horovod": HorovodTimeline, "mllog": MlperfRun, "nccl-topology": Cluster,
    "nvidia-smi": Cluster, "rocm-smi": Cluster, "lstopo": Cluster, "simgrid": Cluster, "astra": Cluster,
    "graphml": Cluster, "goal": Plan, "chakra": Plan,
}  # fmt: skip


def write(tmp_path, text, name="output.log"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_there_is_a_sample_of_every_kind():
    assert sorted(SAMPLES) == sorted(KINDS)


@pytest.mark.parametrize("kind", sorted(SAMPLES))
def test_every_kind_is_known_by_its_content(tmp_path, kind):
    path = write(tmp_path, SAMPLES[kind])
    assert detect_kind(path) == kind
    result = read_any(path)
    assert isinstance(result, TYPES.get(kind, tuple))
    if isinstance(result, tuple):
        assert result
        assert all(isinstance(row, Timing) and row.place.startswith(str(path)) for row in result)


@pytest.mark.parametrize("kind", sorted(set(SAMPLES) - {"throughput", "astra"}))
def test_every_kind_cut_in_the_middle_is_refused_or_shorter_but_never_a_traceback(tmp_path, kind):
    text = SAMPLES[kind]
    whole = read_any(write(tmp_path, text))
    for end in range(0, len(text), 7):
        path = write(tmp_path, text[:end], "cut")
        error = None
        try:
            assert isinstance(read_any(path), type(whole))
        except ConfigError as raised:
            error = str(raised)
        assert error is None or (str(path) in error and "\n" not in error)


@pytest.mark.parametrize("suffix", [".toml", ".json", ".graphml"])
@pytest.mark.parametrize("kind", sorted(kind for kind, made in TYPES.items() if made is Cluster))
def test_imported_clusters_survive_saving_and_loading(tmp_path, kind, suffix):
    made = read_any(write(tmp_path, SAMPLES[kind]))
    made.save(tmp_path / f"saved{suffix}")
    again = load_cluster(tmp_path / f"saved{suffix}")
    for field in ("node_names", "node_kind", "link_kind", "sources", "notes", "routing", "host_names"):
        assert getattr(again, field) == getattr(made, field)
    for field in ("link_src", "link_dst", "link_channel", "link_bandwidth", "link_latency", "host_of", "speed"):
        assert np.array_equal(getattr(again, field), getattr(made, field))


@pytest.mark.parametrize("kind", ["nccl-tests", "osu", "iperf3", "ping", "throughput"])
def test_imported_timings_survive_the_table_of_measurements(tmp_path, kind):
    timings = read_any(write(tmp_path, SAMPLES[kind]))
    rows = to_measurements(
        [replace(row, n_samples=8 * row.n_ranks) if row.operation == "step" else row for row in timings],
        n_hosts=1, model="resnet50",
    )  # fmt: skip
    path = tmp_path / "table.jsonl"
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows), encoding="utf-8")
    assert read_measurements(path) == rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "output.log: is empty"),
        ("Dear all,\nplease find the results attached.\n", "begins with 'Dear all, please find"),
        ("a,b\n1,2\n", "which matches none of nccl-tests, osu, iperf3"),
        ('{"hello": 1}', "which matches none of"),
        ("<html/>", "which matches none of"),
        ('<topology version="2.0">\n<object type="Machine"/></topology>', "no GPU found (PCI devices of class 03 or"),
        ("===== Link Type between two GPUs =====\n  GPU0\n", "no table of link types"),
        ('{"workload_graph": [{"Id": 1}]}', "seems to be the JSON of Chakra's feeder"),
        ('{"scheduling-policy": "LIFO"}', "seems to be another file of ASTRA-sim"),
        ("[ ID] Interval       Transfer     Bandwidth\n", "seems to be iperf without totals, or iperf 2"),
        ("graph [\n  directed 0\n  node [\n    id 0\n  ]\n]\n", "seems to be GML, which has no reader; save it as"),
        ("#bytes     #iterations    BW peak[Gb/sec]\n", "seems to be perftest (ib_write_bw)"),
        ("# tree\nSwitchName=s0 Nodes=tux[0-5]\n", "seems to be Slurm's topology.conf, which has no reader; write"),
        ('#\nvendid=0x2c9\nSwitch\t36 "S-0002"\t# "leaf"\n', "seems to be the output of ibnetdiscover"),
        ('{"schema": "1.0.1", "pid": 5, "nodes": []}', "seems to be an execution trace of PyTorch"),
        ("h:1:1 [0] NCCL INFO Bootstrap : Using eth0\n", "a log of NCCL_DEBUG without results"),
    ],
    ids=[
        "empty",
        "letter",
        "table",
        "json",
        "xml",
        "lstopo",
        "rocm-smi",
        "feeder",
        "astra-sim",
        "iperf",
        "gml",
        "perftest",
        "slurm",
        "ibnetdiscover",
        "pytorch",
        "nccl-debug",
    ],
)
def test_what_is_nothing_is_refused_with_what_was_tried(tmp_path, text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_any(write(tmp_path, text))


def test_a_kind_can_be_forced_and_errors_say_how_the_file_was_read(tmp_path):
    path = write(tmp_path, SAMPLES["osu"])
    with pytest.raises(ConfigError, match=r"no reply and no summary of ping found; .* \(read as ping\)"):
        read_any(path, kind="ping")
    with pytest.raises(ConfigError, match="did you mean 'iperf3'"):
        read_any(path, kind="iperf")


def test_every_name_of_the_package_can_be_had():
    for name in ddlsim.imports.__all__:
        assert getattr(ddlsim.imports, name).__module__.startswith("ddlsim.imports")
    with pytest.raises(AttributeError, match="read_all"):
        _ = ddlsim.imports.read_all


def test_reading_measurements_loads_neither_networkx_nor_yaml(tmp_path):
    path = write(tmp_path, SAMPLES["osu"])
    code = (
        f"import sys, ddlsim.imports; ddlsim.imports.read_osu({str(path)!r}); "
        "print([name for name in ('networkx', 'yaml', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
