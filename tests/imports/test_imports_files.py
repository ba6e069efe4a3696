"""Files as such: compressed, of another encoding, missing, binary; and the way into the table of measurements."""

import gzip

import pytest

from ddlsim.errors import ConfigError
from ddlsim.imports.mllog import read_mllog
from ddlsim.imports.osu import read_osu
from ddlsim.imports.text import read_text
from ddlsim.imports.timing import Timing, to_measurements

LATENCY = "# OSU MPI Latency Test v5.6\n# Size          Latency (us)\n8                       1.13\n"


@pytest.mark.parametrize(
    "data",
    [
        LATENCY.encode(),
        gzip.compress(LATENCY.encode()),
        LATENCY.encode("utf-16"),
        LATENCY.replace("\n", "\r\n").encode(),
        LATENCY.encode("utf-8-sig"),
    ],
    ids=["plain", "gzip", "utf-16", "windows", "mark"],
)
def test_encodings_and_compression(tmp_path, data):
    path = tmp_path / "osu.txt"
    path.write_bytes(data)
    assert read_osu(path)[0].nbytes == 8


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x7fELF\x00\x00", "zero bytes"),
        (b"\xc3\x28", "invalid UTF-8|not a text file"),
        (gzip.compress(b"x" * 5000)[:20], "cannot be read"),
    ],
    ids=["binary", "encoding", "cut"],
)
def test_files_that_are_no_text(tmp_path, data, message):
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        read_text(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere: no such file"):
        read_text(tmp_path / "nowhere")


def timing(**changes):
    row = {"tool": "nccl-tests", "operation": "all_reduce", "n_ranks": 4, "n_hosts": 2, "nbytes": 1e6, "seconds": 1e-3}
    return Timing(**{**row, **changes})


def test_timings_become_rows_of_the_projects_table():
    """A round trip of 200 us is 100 us one way; a step of 256 samples among 4 ranks has a batch of 64."""
    rows = to_measurements(
        [
            timing(dtype="float16", variant="in-place"),
            timing(tool="ping", operation="round_trip", n_ranks=2, seconds=2e-4, min_s=1e-4, statistic="median"),
            timing(tool="table", operation="step", n_samples=256.0, nbytes=0.0, n_hosts=0),
        ],
        n_hosts=1,
        model="resnet50",
    )
    assert [(row.experiment, row.operation, row.n_hosts) for row in rows] == [
        ("collective", "all_reduce", 2), ("point_to_point", "one_way", 2), ("step", "training", 1)
    ]  # fmt: skip
    assert (rows[0].backend, rows[0].dtype) == ("nccl", "float16")
    assert rows[0].note == "nccl-tests; in-place; mean, not median"
    assert (rows[1].median_s, rows[1].min_s) == pytest.approx((1e-4, 5e-5))
    assert (rows[2].batch_size, rows[2].model) == (64, "resnet50")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (timing(n_hosts=0, place="a.txt:3"), "a.txt:3: the number of machines is unknown; set n_hosts"),
        (timing(n_ranks=0), "the number of ranks is unknown"),
        (timing(operation="barrier"), "barrier .* cannot be represented"),
        (timing(tool="osu", operation="stream"), "stream .* cannot be represented"),
        (timing(nbytes=0.0), "the message size of .* is missing or 0"),
        (timing(operation="step"), "the batch size of the training step is unknown"),
        (timing(operation="step", n_samples=64.0), "the model of the training step is unknown"),
    ],
    ids=["hosts", "ranks", "barrier", "stream", "size", "batch", "model"],
)
def test_what_the_table_does_not_hold_is_refused(row, message):
    with pytest.raises(ConfigError, match=message):
        to_measurements([row])


def test_a_broken_byte_in_a_log_is_replaced_and_said(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(LATENCY.replace("v5.6", "v5.6\n# Größe").encode("latin-1"))
    assert read_osu(path)[0].nbytes == 8
    assert read_text(path, log=True).notes == (f"{path}: 2 invalid characters replaced, the first in line 2 (byte 32)",)
    with pytest.raises(ConfigError, match=r"log: line 2: invalid UTF-8 \(byte 32, 0xf6\)"):
        read_text(path)


def test_notes_of_a_log_reach_the_result(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b'\xff\n:::MLLOG {"time_ms": 1, "key": "run_start", "value": null}\n')
    assert "1 invalid characters replaced, the first in line 1" in read_mllog(path).notes[0]


def test_many_broken_bytes_are_no_log(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(LATENCY.encode() + b"\xff" * 50)
    with pytest.raises(ConfigError, match="invalid UTF-8"):
        read_text(path, log=True)


@pytest.mark.parametrize("change", [
    {"nbytes": -1.0}, {"nbytes": float("nan")}, {"seconds": 0.0}, {"seconds": 1e-320}, {"seconds": float("inf")},
    {"n_ranks": -1}, {"min_s": -1.0}, {"n_samples": float("nan")},
], ids=str)  # fmt: skip
def test_no_reader_can_return_what_cannot_be(change):
    with pytest.raises(ConfigError, match=r"a.txt:3: .*remove this entry"):
        timing(place="a.txt:3", **change)


def test_xml_may_declare_an_encoding_of_one_byte(tmp_path):
    path = tmp_path / "x.xml"
    path.write_bytes('<?xml version="1.0" encoding="ISO-8859-1"?>\n<a b="Zürich"/>'.encode("latin-1"))
    assert "Zürich" in read_text(path).text
