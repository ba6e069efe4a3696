"""Calibration from what clusters have already: benchmark output, ping, traces."""

import json

import pytest

import ddlsim
from ddlsim.cluster.calibrated import with_parameters
from ddlsim.errors import ConfigError
from ddlsim.validation import calibrate

PING = """PING 10.0.0.2 (10.0.0.2) 56(84) bytes of data.
64 bytes from 10.0.0.2: icmp_seq=1 ttl=64 time=0.180 ms
64 bytes from 10.0.0.2: icmp_seq=2 ttl=64 time=0.180 ms

--- 10.0.0.2 ping statistics ---
2 packets transmitted, 2 received, 0% packet loss, time 1001ms
rtt min/avg/max/mdev = 0.180/0.180/0.180/0.000 ms
"""
IPERF = {
    "start": {"test_start": {"protocol": "TCP", "num_streams": 1}}, "intervals": [],
    "end": {"sum_sent": {"bytes": 1.1e9, "seconds": 10.0}, "sum_received": {"bytes": 1.1e9, "seconds": 10.0}},
}  # fmt: skip
NCCL = """# Collective test starting: all_reduce_perf
# nThread 1 nGpus 8 minBytes 1024 maxBytes 8388608 step: 8(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
"""


def test_ping_and_iperf_give_latency_and_bandwidth(tmp_path):
    """Half of 180 us less the 64 B; 1.1 GB in 10 s. No other file has to be written."""
    (tmp_path / "ping.log").write_text(PING)
    (tmp_path / "iperf.json").write_text(json.dumps(IPERF))
    found = calibrate([tmp_path / "ping.log", tmp_path / "iperf.json"], "office-1gbe")
    values = {p.name: p.value for p in found.parameters}
    assert values["between.latency"] == pytest.approx(90e-6 - 64 / 1.1e8, rel=0.01)
    assert values["between.bandwidth"] == pytest.approx(1.1e8, rel=0.01)
    assert found.sources == (str(tmp_path / "ping.log"), str(tmp_path / "iperf.json"))
    alone = calibrate(tmp_path / "iperf.json", "office-1gbe")  # so long that latency does not matter
    assert alone.parameters[1].value == pytest.approx(1.1e8, rel=0.01)
    assert any(note.startswith("between.latency comes mainly from the cluster file") for note in alone.notes)


@pytest.mark.slow
def test_a_log_of_nccl_tests_calibrates_the_links_inside(tmp_path):
    """A ring of 8 on links of 2 us and 200 GB/s, printed as nccl-tests prints it (times to 0.01 us)."""
    cluster = ddlsim.load_cluster("dgx-a100-pod")
    truth = with_parameters(cluster, {"inside.latency": 4e-6, "inside.bandwidth": 2e11})
    devices = "".join(f"#  Rank {r:2} Group  0 Pid 1 on     node-a device {r:2} [0000:04:00] A100\n" for r in range(8))
    lines = []
    for k in range(10, 31, 4):
        us = 1e6 * ddlsim.collective_time(truth, "ring", 2**k, ranks=8, rank_order="topology")
        algbw = 2**k / us / 1e3
        cells = f"{us:8.2f} {algbw:7.2f} {1.75 * algbw:7.2f}       0"
        lines.append(f"{2**k:12} {2**k // 4:12}     float     sum      -1 {cells} {cells}")
    path = tmp_path / "nccl.log"
    first, rest = NCCL.split("\n", 1)
    path.write_text(f"{first}\n{devices}{rest}" + "\n".join(lines) + "\n")
    found = calibrate(path, cluster)
    values = {p.name: p.value for p in found.parameters}
    assert values == pytest.approx({"inside.latency": 4e-6, "inside.bandwidth": 2e11}, rel=0.01)
    assert found.time("all_reduce", 2**24, 8, 1).value == pytest.approx(
        ddlsim.collective_time(truth, "ring", 2**24, ranks=8, rank_order="topology"), rel=0.01
    )


def test_steps_of_a_trace_give_the_jitter(tmp_path):
    steps = [0.1, 0.11, 0.09, 0.13, 0.1] * 6
    events = [
        {"ph": "X", "cat": "cpu", "name": f"ProfilerStep#{i}", "pid": 1, "tid": 1, "ts": 2e5 * i, "dur": 1e6 * s}
        for i, s in enumerate(steps)
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    found = calibrate(path, "office-1gbe")
    assert found.jitter.n_samples == 30
    assert found.jitter.base_s * found.jitter.jitter.mean == pytest.approx(0.106, rel=0.01)
    assert found.parameters == ()
    assert found.cluster.link_latency.tolist() == ddlsim.load_cluster("office-1gbe").link_latency.tolist()


def test_a_topology_is_nothing_to_calibrate_with(tmp_path):
    path = tmp_path / "network.yml"
    path.write_text("topology: [ Ring ]\nnpus_count: [ 4 ]\nbandwidth: [ 50.0 ]\nlatency: [ 500.0 ]\n")
    with pytest.raises(ConfigError, match="which contains nothing to calibrate with"):
        calibrate(path, "office-1gbe")
