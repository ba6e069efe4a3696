"""OSU micro-benchmarks: latencies, bandwidths, collectives with one rank's part; what is refused."""

import pytest

from ddlsim.errors import ConfigError
from ddlsim.imports.osu import read_osu

LATENCY = """\
# OSU MPI Latency Test v5.6
# Size          Latency (us)
0                       1.13
1                       1.15
1024                    2.50
"""
FULL = """\

# OSU MPI-CUDA Allreduce Latency Test v7.0
# Datatype: MPI_INT.
# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations
16777216             8630.58           8619.50           8642.46         10
"""
VALIDATED = "# OSU MPI Latency Test v7.0\n# Size       Avg Latency(us)        Validation\n1024     2.50        Pass\n"


def write(tmp_path, text):
    path = tmp_path / "osu.txt"
    path.write_text(text, encoding="utf-8")
    return path


def test_latency_is_one_way_in_microseconds(tmp_path):
    path = write(tmp_path, LATENCY)
    rows = read_osu(path)
    assert [(row.nbytes, row.operation, row.n_ranks) for row in rows] == [
        (0, "p2p", 2), (1, "p2p", 2), (1024, "p2p", 2)
    ]  # fmt: skip
    assert rows[2].seconds == pytest.approx(2.5e-6, rel=1e-12)
    assert rows[2].place == f"{path}:5"


@pytest.mark.parametrize("age", ["# Size    Bi-Bandwidth (MB/s)", "# Size      Bandwidth (MB/s)"], ids=["v3", "v5"])
def test_bandwidth_is_decimal_and_bidirectional_adds_both_ways(tmp_path, age):
    """4 MiB each way at 20,000e6 bytes/s together: 2 * 4194304 / 2e10 s."""
    (row,) = read_osu(write(tmp_path, f"# OSU MPI Bi-Directional Bandwidth Test v3.0\n{age}\n4194304  20000.00\n"))
    assert row.operation == "bidirectional"
    assert row.seconds == pytest.approx(2 * 4194304 / 2e10, rel=1e-12)


def test_message_rates_count_all_pairs(tmp_path):
    """3 pairs, 3e9 bytes/s together: 1e9 each, so 1000 bytes take 1 us."""
    text = """# OSU MPI Multiple Bandwidth / Message Rate Test v5.6.2
# [ pairs: 3 ] [ window size: 64 ]
# Size                  MB/s        Messages/s
1000                 3000.00        3000000.00
"""
    (row,) = read_osu(write(tmp_path, text))
    assert (row.operation, row.variant, row.seconds) == ("stream", "3 pairs", pytest.approx(1e-6, rel=1e-12))


def test_full_output_has_extremes_and_several_tests_fit_into_one_file(tmp_path):
    rows = read_osu(write(tmp_path, LATENCY + FULL), n_ranks=4)
    assert len(rows) == 4
    last = rows[-1]
    assert (last.operation, last.n_ranks, last.n_reps) == ("all_reduce", 4, 10)
    assert (last.min_s, last.seconds, last.max_s) == pytest.approx((8619.5e-6, 8630.58e-6, 8642.46e-6))


def test_sizes_of_parts_become_whole_buffers(tmp_path):
    text = "# OSU MPI Allgather Latency Test v7.4\n# Datatype: MPI_CHAR.\n# Size       Avg Latency(us)\n1024     9.0\n"
    assert read_osu(write(tmp_path, text), n_ranks=8)[0].nbytes == 8 * 1024


def test_a_barrier_has_no_size(tmp_path):
    path = write(tmp_path, "# OSU MPI Barrier Latency Test v5.8\n# Avg Latency(us)\n     12.57\n")
    (row,) = read_osu(path, n_ranks=4)
    assert (row.operation, row.nbytes, row.seconds) == ("barrier", 0, pytest.approx(12.57e-6))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FULL, r"osu\.txt:5: OSU does not print the number of processes of"),
        (FULL.replace("Allreduce", "Alreduce"), r":2: unknown test 'Alreduce Latency'"),
        (LATENCY.replace("MPI Latency", "MPI_Put Latency"), ":1: MPI_Put 'Latency' is a one-sided test"),
        (FULL.replace("Allreduce", "Non-blocking Allreduce"), ":2: .* measures overlap"),
        (
            "# OSU MPI Bandwidth Test v7.5\n# Size      Bandwidth (MB/s)        Validation\n8     7.7     Fail\n",
            ":3: validation failed",
        ),
        ("hello\n", "no rows of an OSU benchmark"),
    ],
    ids=["ranks", "unknown", "one-sided", "nonblocking", "validation", "other"],
)
def test_what_is_refused_is_named_with_its_line(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read_osu(write(tmp_path, text))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1.15", "1.15NCCL INFO", r":4: Latency \(us\) = '1.15NCCL' is not a number"),
        ("2.50", "0.00", r":5: Latency \(us\) = '0.00' must be above 0"),
        ("2.50", "-nan", r":5: Latency \(us\) = '-nan' must be from 0"),
        ("1024                    2.50", "1024", ":5: has 1 of 2 columns"),
    ],
    ids=["mixed", "zero", "nan", "cut"],
)
def test_a_row_that_cannot_be_used_does_not_cost_the_others(tmp_path, old, new, message):
    n_rows = len(read_osu(write(tmp_path, LATENCY)))
    with pytest.warns(UserWarning, match=f"skipped 1 entry; first error: .*{message}"):
        assert len(read_osu(write(tmp_path, LATENCY.replace(old, new)))) == n_rows - 1


@pytest.mark.parametrize(
    ("text", "operation"),
    [
        (LATENCY + "0.12user 0.05system 0:02.30elapsed\n2 nodes were used\n", "p2p"),
        (LATENCY.replace("OSU MPI", "OMB-Py MPI").replace("(us)", "[us]"), "p2p"),
        (LATENCY.replace("MPI Latency", "MPI Multi-process Latency"), "p2p"),
        (FULL.replace("Allreduce", "Gatherv"), "gather"),
        (FULL.replace("Allreduce", "All-to-Allv Personalized Exchange"), "all_to_all"),
        ("".join(f"[0] {line}\n" for line in LATENCY.splitlines()), "p2p"),
        (VALIDATED, "p2p"),
        (FULL.replace("   Min Lat", "   P50 Tail Lat(us)   Min Lat"), "all_reduce"),
    ],
    ids=["words behind", "python", "processes", "gatherv", "alltoallv", "mpiexec", "validated", "tail"],
)
def test_what_versions_and_launchers_add(tmp_path, text, operation):
    row = read_osu(write(tmp_path, text), n_ranks=2)[-1]
    assert (row.operation, row.seconds) == (operation, pytest.approx(2.5e-6 if operation == "p2p" else 8630.58e-6))
