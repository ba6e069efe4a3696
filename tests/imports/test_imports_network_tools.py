"""iperf3 -J and ping, of several ages and systems."""

import json

import pytest

from ddlsim.errors import ConfigError
from ddlsim.imports import read_any
from ddlsim.imports.network_tools import read_iperf3, read_ping


def iperf(end, **test):
    start = {"version": "iperf 3.18", "test_start": {"protocol": "TCP", "num_streams": 1, "reverse": 0, **test}}
    return json.dumps({"start": start, "intervals": [], "end": end}, indent=1)


def total(nbytes, seconds=10.0, **more):
    return {"start": 0, "seconds": seconds, "bytes": nbytes, "bits_per_second": nbytes * 8 / seconds, **more}


def write(tmp_path, text, name="out.txt"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_what_was_received_counts_not_what_was_sent(tmp_path):
    (row,) = read_iperf3(write(tmp_path, iperf({"sum_sent": total(1.25e9), "sum_received": total(1.2e9)})))
    assert (row.operation, row.nbytes, row.seconds, row.bandwidth) == ("stream", 1.2e9, 10.0, 1.2e8)
    assert row.variant == "to server"


def test_both_directions_and_parallel_streams(tmp_path):
    end = {"sum_received": total(1e9), "sum_received_bidir_reverse": total(2e9)}
    rows = read_iperf3(write(tmp_path, iperf(end, num_streams=4, bidir=1)))
    assert [(row.variant, row.bandwidth) for row in rows] == [
        ("to server, 4 streams", 1e8), ("from server, 4 streams", 2e8)
    ]  # fmt: skip
    assert {row.operation for row in rows} == {"bidirectional"}


def test_old_udp_output_has_only_what_was_sent_and_the_loss(tmp_path):
    (row,) = read_iperf3(write(tmp_path, iperf({"sum": total(1e9, lost_percent=10.0, jitter_ms=0.1)}, protocol="UDP")))
    assert row.nbytes == pytest.approx(9e8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({"start": {}, "error": "unable to connect to server"}), "iperf3 failed: unable to connect"),
        (iperf({"sum_received": total(0)}), r"end\.sum_received: nothing was received"),
        (iperf({}), "'sum_received' and 'sum' are both missing"),
        ("iperf 3.9\n[  5] 0.00-1.00 sec\n", "no line of totals that ends in 'receiver' found; measure with iperf3 -J"),
        ('warning: x\n{"start": {},\n "end": ', r"out\.txt:3: not valid JSON"),
    ],
    ids=["error", "nothing", "empty", "text", "cut"],
)
def test_bad_iperf3_files_are_refused(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read_iperf3(write(tmp_path, text))


LINUX = """\
PING 10.0.0.2 (10.0.0.2) 56(84) bytes of data.
64 bytes from 10.0.0.2: icmp_seq=1 ttl=64 time=0.300 ms
64 bytes from 10.0.0.2: icmp_seq=2 ttl=64 time=0.100 ms
64 bytes from node2.local (10.0.0.2): icmp_seq=3 ttl=64 time=0.120 ms

--- 10.0.0.2 ping statistics ---
3 packets transmitted, 3 received, 0% packet loss, time 2031ms
rtt min/avg/max/mdev = 0.100/0.173/0.300/0.090 ms
"""
MACOS = """\
PING node2 (10.0.0.2): 1400 data bytes

--- node2 ping statistics ---
5 packets transmitted, 5 packets received, 0.0% packet loss
round-trip min/avg/max/stddev = 0.2/0.25/0.4/0.05 ms
"""


def test_the_median_of_the_replies_is_robust_against_the_first(tmp_path):
    path = write(tmp_path, LINUX)
    (row,) = read_ping(path)
    assert (row.operation, row.nbytes, row.statistic, row.n_reps) == ("round_trip", 64, "median", 3)
    assert (row.min_s, row.seconds, row.max_s) == pytest.approx((1.0e-4, 1.2e-4, 3.0e-4))
    assert row.place == f"{path}:8"


@pytest.mark.parametrize("tail", ["max/stddev = 0.2/0.25/0.4/0.05 ms", "max = 0.2/0.25/0.4 ms"], ids=["bsd", "busybox"])
def test_a_summary_alone_gives_the_mean(tmp_path, tail):
    rows = read_ping(write(tmp_path, MACOS.replace("max/stddev = 0.2/0.25/0.4/0.05 ms", tail)))
    assert [(row.statistic, row.nbytes, row.variant) for row in rows] == [("mean", 1408, "node2")]
    assert rows[0].seconds == pytest.approx(2.5e-4)


def test_an_interrupted_ping_and_several_hosts(tmp_path):
    rows = read_ping(write(tmp_path, "\n".join(LINUX.splitlines()[:4]) + "\n" + MACOS))
    assert [row.variant for row in rows] == ["10.0.0.2", "node2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LINUX.replace("3 received", "0 received"), r"out\.txt:7: no reply to 3 packets to 10\.0\.0\.2"),
        (LINUX.splitlines()[-1], ":1: the first line of ping .* is missing before this summary"),
        ("hello", "no reply and no summary of ping"),
    ],
    ids=["lost", "headless", "other"],
)
def test_bad_pings_are_refused(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read_ping(write(tmp_path, text))


STREAM = """\
[  5]   0.00-2.00   sec  2.19 GBytes  9.40 Gbits/sec    0             sender
[  5]   0.00-2.04   sec  2.00 GBytes  9.19 Gbits/sec                  receiver
"""


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (STREAM, [("stream", "to server", 2 * 2**30)]),
        (
            "Connecting to host a\nReverse mode, remote host a is sending\n" + STREAM,
            [("stream", "from server", 2 * 2**30)],
        ),
        (
            STREAM + STREAM.replace("[  5]", "[  7]") + STREAM.replace("[  5]", "[SUM]").replace("2.00 G", "4.00 G"),
            [("stream", "to server, 2 streams", 4 * 2**30)],
        ),
        (
            STREAM.replace("[  5]", "[  5][TX-C]") + STREAM.replace("[  5]", "[  7][RX-C]").replace("2.00 G", "512 M"),
            [("bidirectional", "to server", 2 * 2**30), ("bidirectional", "from server", 2**29)],
        ),
    ],
    ids=["one", "reverse", "sum", "both"],
)
def test_what_iperf3_prints_for_people(tmp_path, text, rows):
    found = read_iperf3(write(tmp_path, text))
    assert [(row.operation, row.variant, row.nbytes) for row in found] == rows
    assert {row.seconds for row in found} == {2.04}


def test_several_runs_and_streamed_json(tmp_path):
    one = iperf({"sum_received": total(1e9)})
    two = one + "\n" + iperf({"sum_received": total(2e9)})
    assert [row.nbytes for row in read_iperf3(write(tmp_path, two))] == [1e9, 2e9]
    parts = [{"event": name, "data": part} for name, part in json.loads(one).items()]
    assert read_iperf3(write(tmp_path, "\n".join(map(json.dumps, parts))))[0].nbytes == 1e9


def streamed(*runs):
    """Return what ``--json-stream`` writes: a line for each part of each run."""
    parts = [{"event": name, "data": part} for run in runs for name, part in json.loads(run).items()]
    return "\n".join(map(json.dumps, parts)) + "\n"


def test_all_runs_of_a_stream_count(tmp_path):
    runs = [iperf({"sum_received": total(n * 1e9)}) for n in (1, 2, 3)]
    assert [row.nbytes for row in read_iperf3(write(tmp_path, streamed(*runs)))] == [1e9, 2e9, 3e9]
    killed = json.dumps({"start": {}, "interval": {}})  # no end
    with pytest.warns(UserWarning, match="skipped 1 entry; first error: .*the key 'end' is missing"):
        assert len(read_iperf3(write(tmp_path, streamed(runs[0], killed, runs[1])))) == 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (json.dumps({"start": {}, "error": "unable to connect to server"}), "iperf3 failed: unable to connect"),
        (iperf({"sum_received": total(0)}), "nothing was received"),
        (iperf({"sum_received": total(1e9, seconds=-1.0)}), r"seconds: -1.0 must not be negative"),
        (iperf({"sum_received": total(1e9)}).replace("10.0", "-nan"), "seconds: must be a finite number"),
        (iperf({"sum_received": total(1e9)})[:-20], "not valid JSON"),
    ],
    ids=["error", "nothing", "negative", "nan", "cut"],
)
def test_a_run_that_cannot_be_used_does_not_cost_the_others(tmp_path, bad, message):
    good = iperf({"sum_received": total(1e9)})
    with pytest.warns(UserWarning, match=f"skipped 1 entry; first error: .*{message}"):
        assert [row.nbytes for row in read_iperf3(write(tmp_path, f"{good}\n{good}\n{bad}"))] == [1e9, 1e9]
    with pytest.raises(ConfigError, match=message):
        read_iperf3(write(tmp_path, bad))


def test_numbers_that_are_none_where_nobody_needs_them(tmp_path):
    """iperf3 writes ``-nan`` (0 / 0) for a jitter or a CPU's share, and ``inf`` for others."""
    text = iperf({"sum_received": total(1e9), "cpu_utilization_percent": {"host_total": 1.5, "remote_user": 2.5}})
    text = text.replace("1.5", "-nan").replace("2.5", "inf")
    assert read_any(write(tmp_path, text, "x.json"))[0].nbytes == 1e9
    assert read_any(write(tmp_path, streamed(iperf({"sum_received": total(1e9)})), "x.json"))[0].nbytes == 1e9


def test_printed_runs_and_pings_that_cannot_be_used_are_counted(tmp_path):
    text = f"Connecting to host a\n{STREAM}Connecting to host b\n[  5] 0.00-1.00 sec\nConnecting to host c\n{STREAM}"
    with pytest.warns(UserWarning, match="skipped 1 entry; first error: .*:4: no line of totals"):
        assert len(read_iperf3(write(tmp_path, text))) == 2
    with pytest.warns(UserWarning, match="skipped 1 entry; first error: .*:3: time = '0.000' must be above 0"):
        assert read_ping(write(tmp_path, LINUX.replace("0.100 ms", "0.000 ms")))[0].n_reps == 2
    lost = LINUX.splitlines(keepends=True)[0] + "3 packets transmitted, 0 received, 100% packet loss\n"
    with pytest.warns(UserWarning, match="skipped 1 entry; first error: .*no reply to 3 packets to 10.0.0.2"):
        assert [row.variant for row in read_ping(write(tmp_path, lost + MACOS))] == ["node2"]
