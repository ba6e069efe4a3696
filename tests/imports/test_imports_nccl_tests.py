"""nccl-tests: tables of several ages, with launchers' prefixes, and JSON; what is refused, with the line.

Expected values by hand: size in bytes as printed, time_us * 1e-6.
"""

import json
import re

import pytest

from ddlsim.errors import ConfigError
from ddlsim.imports import read_any
from ddlsim.imports.nccl_tests import bus_factor, read_nccl_tests

HEAD = """\
# nccl-tests version 2.17.6 nccl-headers=22807 nccl-library=22807
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 4 minBytes 1048576 maxBytes 8388608 step: 8(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid   6899 on     node-a device  0 [0000:04:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   6900 on     node-a device  1 [0000:05:00] NVIDIA H100 80GB HBM3
#  Rank  2 Group  0 Pid   6733 on     node-b device  0 [0000:04:00] NVIDIA H100 80GB HBM3
#  Rank  3 Group  0 Pid   6734 on     node-b device  1 [0000:05:00] NVIDIA H100 80GB HBM3
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
"""  # noqa: E501
ROWS = """\
     1048576        262144     float     sum      -1   101.90   10.29   15.43       0   102.40   10.24   15.36       0
     8388608       2097152     float     sum      -1    153.2   54.76   82.13       0    151.0   55.55   83.33     N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 49.0625
"""
OLD = """\
# nThread 1 nGpus 2 minBytes 8 maxBytes 8 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#   Rank  0 Pid  12345 on       dgx device  0 [0x06] Tesla V100-SXM2-16GB
#   Rank  1 Pid  12345 on       dgx device  1 [0x07] Tesla V100-SXM2-16GB
#
#                                             out-of-place                       in-place
#       size         count    type     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)             (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        131072   float    22.12   47.40   23.70  1e+00    21.80   48.10   24.05  0e+00
"""


def write(tmp_path, text, name="all_reduce.txt"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_table_gives_two_rows_for_every_size(tmp_path):
    path = write(tmp_path, HEAD + ROWS)
    rows = read_nccl_tests(path)
    assert [(row.nbytes, row.variant) for row in rows] == [
        (1048576, "out-of-place"), (1048576, "in-place"), (8388608, "out-of-place"), (8388608, "in-place")
    ]  # fmt: skip
    first = rows[0]
    assert (first.operation, first.n_ranks, first.n_hosts, first.n_reps) == ("all_reduce", 4, 2, 20)
    assert first.seconds == pytest.approx(101.9e-6, rel=1e-12)
    assert first.dtype == "float32"
    assert first.place == f"{path}:14"
    assert first.bandwidth * bus_factor("all_reduce", 4) == pytest.approx(15.43e9, rel=1e-3)


@pytest.mark.parametrize(
    "prefix",
    [
        "[1,0]<stdout>:",
        "[1,0]<stdout>: ",
        "[prterun-a-7@1,0]<stdout>: ",
        "Mon Nov 23 00:21:41 2026[1,0]<stdout>:",
        " 0: ",
        "node-a: ",
        "nccl-0  | ",
        "2024-05-01T10:11:12.123Z ",
        "\x1b[32m",
    ],
    ids=["mpirun", "mpirun-space", "mpirun-5", "mpirun-date", "srun", "pdsh", "compose", "date", "colour"],
)
def test_prefixes_of_launchers_change_nothing(tmp_path, prefix):
    plain = read_nccl_tests(write(tmp_path, HEAD + ROWS))
    prefixed = "".join(prefix + line for line in (HEAD + ROWS).splitlines(keepends=True))
    path = write(tmp_path, prefixed, "prefixed.txt")
    assert [row.seconds for row in read_nccl_tests(path)] == [row.seconds for row in plain]
    assert {row.n_ranks for row in read_nccl_tests(path)} == {4}


def test_tables_before_2021_have_an_error_column_and_no_redop(tmp_path):
    """busbw of an all-gather among 2 ranks is algbw / 2; 1e+00 there is a deviation, not a count of wrong values."""
    out, inside = read_nccl_tests(write(tmp_path, OLD), operation="all_gather")
    assert (out.n_ranks, out.n_hosts, out.nbytes) == (2, 1, 1048576)
    assert (out.seconds, inside.seconds) == pytest.approx((22.12e-6, 21.80e-6), rel=1e-12)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("15.43       0", "15.43      12", r":14: 12 wrong values \(out-of-place\)"),
        ("    time   algbw   busbw  #wrong     time", " cputime   algbw   busbw  #wrong  cputime", ":12: contains CPU"),
        ("all_reduce_perf", "all_gather_perf", ":14: busbw = 15.43: expected 0.75 times algbw = 10.29"),
        ("all_reduce_perf", "hypercube_perf", ":2: hypercube_perf has no corresponding collective"),
        ("#  Rank", "#  rank", ":14: the number of ranks is unknown, because there are no '# Rank' lines"),
    ],
    ids=["wrong", "cputime", "bus", "program", "ranks"],
)
def test_what_is_refused_is_named_with_its_line(tmp_path, old, new, message):
    assert old in HEAD + ROWS
    with pytest.raises(ConfigError, match=message):
        read_nccl_tests(write(tmp_path, (HEAD + ROWS).replace(old, new)))


@pytest.mark.parametrize(
    ("old", "new", "n", "message"),
    [
        ("   102.40   10.24   15.36       0", "   102.40 NCCL", 2, r"skipped 1 entry; .*:14: has 11 of 13"),
        ("101.90", "0.00", 3, r"skipped 1 entry; first error: .*:14: time = '0.00' must be above 0"),
        ("101.90", "10a.90", 3, r"skipped 1 entry; first error: .*:14: time = '10a.90' is not a number"),
        ("10.29   15.43", "inf   inf", 3, r"skipped 1 entry; first error: .*:14: algbw = 'inf' must be from 0 to"),
        ("102.40   10.24   15.36", "-nan   -nan   -nan", 3, r":14: time = '-nan' must be from 0"),
    ],
    ids=["cut", "zero", "word", "inf", "nan"],
)
def test_a_row_that_cannot_be_used_does_not_cost_the_others(tmp_path, old, new, n, message):
    assert old in ROWS
    path = write(tmp_path, HEAD.replace("all_reduce_perf", "it") + ROWS.replace(old, new).replace("N/A", "  0"))
    with pytest.warns(UserWarning, match=message):
        rows = read_nccl_tests(path)
    assert [row.operation for row in rows] == ["all_reduce"] * n
    with pytest.raises(ConfigError, match=":14: time = 'x' is not a number"):
        read_nccl_tests(write(tmp_path, HEAD + ROWS.splitlines()[0].replace("101.90", "x").replace("102.40", "x")))


@pytest.mark.parametrize(
    ("halves", "variant"), [("out", "out-of-place"), ("in", "in-place")], ids=["first-half", "blank-first-half"]
)
def test_runs_of_one_variant(tmp_path, halves, variant):
    """OCCL's nccl-tests print the out-of-place half alone; a trace replay leaves its 32 characters blank (util.cu)."""
    rows = re.findall(r"^((?: +\S+){5})((?: +\S+){4})(.*)", ROWS, re.MULTILINE)[:2]
    text = "".join(f"{about}{out if halves == 'out' else ' ' * 32 + inside}\n" for about, out, inside in rows)
    for named in (HEAD, HEAD.replace("all_reduce_perf", "it")):
        found = read_nccl_tests(write(tmp_path, named + text))
        assert [(row.operation, row.variant) for row in found] == [("all_reduce", variant)] * 2
        assert found[0].seconds == pytest.approx(101.9e-6 if halves == "out" else 102.4e-6)
    with pytest.warns(
        UserWarning,
        match=r":14: 1 rows contain only the in-place or only the out-of-place result",
    ):
        assert len(read_nccl_tests(write(tmp_path, HEAD + rows[0][0] + rows[0][1] + "\n" + ROWS))) == 5


#: a row of rccl-tests (src/common.cu, Reporter::addResult)
RCCL = {
    "numCycle": 0, "name": "AllReduce", "nodes": 2, "ranks": 16, "ranksPerNode": 8, "gpusPerRank": 1, "size": 1048576,
    "type": "float", "redop": "sum", "inPlace": 0, "time": 101.9, "algBw": 10.290245, "busBw": 19.29421, "wrong": "0",
}  # fmt: skip
ALONE = {key: value for key, value in RCCL.items() if key not in ("nodes", "ranks", "ranksPerNode", "gpusPerRank")}
OLDER = {key: value for key, value in RCCL.items() if key != "numCycle"}


def as_csv(rows, left_out=()):
    named = {"name": "collective", "inPlace": "inplace", "algBw": "algbw", "busBw": "busbw", "wrong": "#wrong"}
    lines = [", ".join(named.get(key, key) for key in rows[0] if key not in left_out)]
    lines += [", ".join(f'"{v}"' if isinstance(v, str) else str(v) for v in row.values()) for row in rows]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("text", "ranks", "hosts"),
    [
        (json.dumps([RCCL, {**RCCL, "inPlace": 1}]), 16, 2),
        ("\n".join(json.dumps(row) for row in (OLDER, {**OLDER, "inPlace": 1})), 16, 2),
        (json.dumps([{**ALONE, "gpus": 16}, {**ALONE, "gpus": 16, "inPlace": 1}]), 16, 1),
        (json.dumps([{**RCCL, "nodes": 1, "ranks": 4, "gpusPerRank": 4, "inPlace": i} for i in (0, 1)]), 16, 0),
        (as_csv([RCCL, {**RCCL, "inPlace": 1}]), 16, 2),
        (as_csv([OLDER, {**OLDER, "inPlace": 1}], left_out=("nodes",)), 16, 2),
        (as_csv([{**ALONE, "gpus": 16}, {**ALONE, "gpus": 16, "inPlace": 1}]), 16, 1),
    ],
    ids=["list", "lines", "one-process", "one-group", "csv", "csv-without-nodes", "csv-one-process"],
)
def test_what_rccl_tests_write(tmp_path, text, ranks, hosts):
    rows = read_any(write(tmp_path, text, "rccl.out"))
    assert [row.variant for row in rows] == ["out-of-place", "in-place"]
    assert {row.operation for row in rows} == {"all_reduce"}
    assert {(row.n_ranks, row.n_hosts, row.nbytes, row.dtype) for row in rows} == {(ranks, hosts, 1048576, "float32")}
    assert {row.seconds for row in rows} == {101.9e-6}


def test_a_reduce_scatter_of_older_rccl_tests_tells_one_ranks_part(tmp_path):
    """algBw 10.29 GB/s in 101.9 us are 1 MiB, of which every one of 16 ranks receives 64 KiB."""
    row = {**RCCL, "name": "ReduceScatter", "busBw": 9.647105, "size": 65536}
    (timing,) = read_any(write(tmp_path, json.dumps(row), "x.json"))
    assert (timing.operation, timing.nbytes) == ("reduce_scatter", 1048576)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wrong": "12"}, "12 wrong values"), ({"name": "AlltoAllv"}, "AlltoAllv has no corresponding collective"),
        ({"busBw": 5.0}, "busbw = 5: expected 1.875 times algbw = 10.29"), ({"time": "nan"}, "must be a finite number"),
    ],
)  # fmt: skip
def test_rows_of_rccl_tests_that_cannot_be_used(tmp_path, changes, message):
    for text in (json.dumps({**RCCL, **changes}), as_csv([{**RCCL, **changes}])):
        with pytest.raises(ConfigError, match=message):
            read_any(write(tmp_path, text, "x.out"))
    with pytest.warns(UserWarning, match="skipped 1 entry"):
        assert len(read_any(write(tmp_path, json.dumps([RCCL, {**RCCL, "time": "nan"}]), "x.json"))) == 1


def test_several_documents_in_one_file(tmp_path):
    """``cat`` of two runs' files; one without the out-of-place variant, one with a value that is no number."""
    first, second = document(), document(out_of_place=None, in_place={"time": 2.0, "alg_bw": 5.0, "bus_bw": 7.5})
    text = json.dumps(first) + "\n" + json.dumps(second)
    assert len(read_any(write(tmp_path, text, "x.json"))) == 3
    with pytest.warns(UserWarning, match=r"skipped 1 entry; .*out_of_place\.time: must be a finite number"):
        assert len(read_any(write(tmp_path, text.replace("101.9", "-nan"), "x.json"))) == 2


def test_an_output_without_rows_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"all_reduce\.txt: no rows of nccl-tests"):
        read_nccl_tests(write(tmp_path, HEAD))
    with pytest.raises(ConfigError, match="did you mean 'all_reduce'"):
        read_nccl_tests(write(tmp_path, HEAD), operation="allreduce")


def document(**changes):
    result = {
        "size": 1048576, "count": 262144, "type": "bfloat16", "redop": "sum", "root": "    -1",
        "out_of_place": {"time": 101.9, "alg_bw": 10.29024, "bus_bw": 15.43536, "nwrong": 0.0},
        "in_place": {"time": 102.4, "alg_bw": 10.24, "bus_bw": 15.36, "nwrong": None},
        "actual_iterations": 20, "experiment_name": "x",
    }  # fmt: skip
    result.update(changes)
    device = {"rank": 0, "group": 0, "pid": 1, "hostname": "node-a", "device": 0, "device_info": "H100"}
    return {
        "version": 2, "args": ["./build/all_reduce_perf", "-J", "x.json"], "env": ["HOME=/root"],
        "config": {"nthreads": 1, "iterations": 20, "devices": [{**device, "rank": i} for i in range(4)]},
        "results": [result], "out_of_bounds": {"count": 0, "okay": "true"},
    }  # fmt: skip


def test_json_and_table_say_the_same(tmp_path):
    rows = read_nccl_tests(write(tmp_path, json.dumps(document()), "x.json"))
    assert [(row.seconds, row.nbytes, row.n_ranks, row.n_hosts) for row in rows] == [
        (pytest.approx(101.9e-6), 1048576, 4, 1), (pytest.approx(102.4e-6), 1048576, 4, 1)
    ]  # fmt: skip
    assert rows[0].dtype == "bfloat16"
    assert rows[0].place.endswith("x.json: results[0].out_of_place")


@pytest.mark.parametrize(
    ("ranks", "hosts"), [([0], 1), ([0, 2], 2), ([0, 1, 2, 3], 2)], ids=["one-process", "two-processes", "all-listed"]
)
def test_json_lists_one_device_per_process(tmp_path, ranks, hosts):
    made = document()
    per_process = 4 // len(ranks) if len(ranks) < 4 else 2
    names = ["node-a"] * len(ranks) if hosts == 1 else [f"node-{i * 2 // len(ranks)}" for i in range(len(ranks))]
    devices = [{"rank": rank, "group": 0, "hostname": name} for rank, name in zip(ranks, names, strict=True)]
    made["config"] = {"nthreads": 1, "ngpus": per_process, "iterations": 20, "devices": devices}
    row = read_nccl_tests(write(tmp_path, json.dumps(made), "x.json"))[0]
    assert (row.n_ranks, row.n_hosts) == (4, hosts)


def test_per_iteration_times_give_a_median(tmp_path):
    each = {"min_us": 99.0, "max_us": 140.0, "avg_us": 101.9, "p50_us": 100.0}
    row = read_nccl_tests(write(tmp_path, json.dumps(document(out_of_place_per_iter=each)), "x.json"))[0]
    assert (row.statistic, row.seconds, row.min_s, row.max_s) == (
        "median", pytest.approx(1e-4), pytest.approx(99e-6), pytest.approx(140e-6)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out_of_place": {"time": 1.0, "alg_bw": 1.0, "bus_bw": 1.5, "nwrong": 3.0}}, "3 wrong values"),
        ({"out_of_place": {"cpu_time": 1.0}}, "contains CPU times"),
        ({"out_of_place": {}}, "the key 'time' is missing"),
    ],
    ids=["wrong", "cpu", "missing"],
)
def test_bad_json_names_the_place(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        read_nccl_tests(write(tmp_path, json.dumps(document(**changes)), "x.json"))


def test_cut_json_names_the_line(tmp_path):
    text = json.dumps(document(), indent=1)
    with pytest.raises(ConfigError, match=r"x\.json:\d+: not valid JSON"):
        read_nccl_tests(write(tmp_path, text[:-40], "x.json"))


def headless(operation, n_ranks, old=False, checked=True, listed=None):
    """Return a log without the program's name, as nccl-tests writes it (`old`: each program has its own heading)."""
    listed = range(n_ranks) if listed is None else listed
    lines = [f"#  Rank {rank:2d} Pid {rank} on host{rank * 2 // n_ranks} device {rank} [0x00] GPU" for rank in listed]
    reduces = operation in ("all_reduce", "reduce_scatter", "reduce")
    rooted = operation in ("broadcast", "reduce", "gather")
    in_parts = operation in ("all_gather", "reduce_scatter", "all_to_all", "gather")
    columns = ["redop"] * (reduces or operation == "all_to_all") + ["root"] * rooted if old else ["redop", "root"]
    lines.append(f"#  size  count  type  {'  '.join(columns)}" + "  time  algbw  busbw  error" * 2)
    redop = "sum" if reduces or (operation == "p2p" and not old) else "" if old else "none"
    cells = {"redop": redop, "root": "0" if rooted else "-1"}
    for size in (0, 4096 * n_ranks, 2**20 * n_ranks):
        count = size // 4 // (n_ranks if in_parts else 1)
        seconds = 30e-6 + size / 40e9
        bus = size / seconds * bus_factor(operation, n_ranks) / 1e9
        times = f" {seconds * 1e6:.1f} {size / seconds / 1e9:.2f} {bus:.2f}"
        in_place = "0e+00" if checked and operation not in ("all_to_all", "p2p") else "N/A"
        about = "  ".join(cells[name] for name in columns)
        lines.append(f"   {size}  {count}  float  {about} {times} {'0e+00' if checked else 'N/A'} {times} {in_place}")
    return "\n".join([*lines, "# Out of bounds values : 0 OK"])


OPERATIONS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "p2p"]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("old", [True, False], ids=["2020", "one-heading"])
def test_the_rows_tell_the_operation_where_no_line_names_the_program(tmp_path, operation, old):
    rows = read_nccl_tests(write(tmp_path, headless(operation, 8, old)))
    assert {(row.operation, row.n_ranks, row.n_hosts) for row in rows} == {(operation, 8, 2)}
    assert [row.nbytes for row in rows[::2]] == [0, 8 * 4096, 8 * 2**20]


@pytest.mark.parametrize(
    ("operation", "n_ranks", "message"),
    [
        ("all_gather", 8, "consistent with all_gather and all_to_all"),
        ("all_reduce", 2, "consistent with all_reduce and p2p"),
    ],
)
def test_rows_that_fit_two_operations_are_asked_about(tmp_path, operation, n_ranks, message):
    path = write(tmp_path, headless(operation, n_ranks, checked=False), "job.log")
    with pytest.raises(ConfigError, match=message):
        read_nccl_tests(path)
    assert read_nccl_tests(path, operation=operation)[0].operation == operation


@pytest.mark.parametrize(("name", "operation"), [("all_gather_16.log", "all_gather"), ("x-alltoall.txt", "all_to_all")])
def test_the_files_name_decides_between_operations_that_fit_alike(tmp_path, name, operation):
    path = write(tmp_path, headless(operation, 8, checked=False), name)
    with pytest.warns(UserWarning, match=f"all_gather and all_to_all; assuming {operation}"):
        assert read_nccl_tests(path)[0].operation == operation


def test_what_the_rows_look_like_is_suggested_where_no_ranks_are_listed(tmp_path):
    path = write(tmp_path, headless("all_reduce", 16, listed=[]))
    with pytest.raises(ConfigError, match="that of all_reduce among 16"):
        read_nccl_tests(path)
    assert read_nccl_tests(path, n_ranks=16)[0].operation == "all_reduce"


@pytest.mark.parametrize(
    ("listed", "hosts"), [([0, 7, 8, 15], 2), ([0, 15], 0), ([15], 0)], ids=["ends", "across", "last"]
)
def test_a_cut_list_of_ranks_counts_to_its_last(tmp_path, listed, hosts):
    row = read_nccl_tests(write(tmp_path, headless("all_reduce", 16, listed=listed)))[0]
    assert (row.n_ranks, row.n_hosts) == (16, hosts)


def test_several_runs_in_one_file_are_told_apart(tmp_path):
    text = headless("all_gather", 8) + "\n" + headless("all_reduce", 4) + "\n" + HEAD + ROWS
    rows = read_nccl_tests(write(tmp_path, text))
    assert list(dict.fromkeys((row.operation, row.n_ranks) for row in rows)) == [
        ("all_gather", 8), ("all_reduce", 4)
    ]  # fmt: skip


def test_rccl_tests_can_leave_out_of_place_out(tmp_path):
    text = HEAD.replace("out-of-place                       in-place", "in-place").replace(
        "    time   algbw   busbw  #wrong     time   algbw   busbw  #wrong", "    time   algbw   busbw  #wrong"
    )
    rows = read_nccl_tests(write(tmp_path, text + "  1048576  262144  float  sum  -1  101.90  10.29  15.43  0\n"))
    assert [row.variant for row in rows] == ["in-place"]


@pytest.mark.parametrize("program", ["hypercube", "alltoallv"])
def test_programs_without_a_collective_of_equal_parts_are_refused(tmp_path, program):
    with pytest.raises(ConfigError, match=f":2: {program}_perf has no corresponding collective"):
        read_nccl_tests(write(tmp_path, (HEAD + ROWS).replace("all_reduce_perf", f"{program}_perf")))


def test_commands_in_a_document_do_not_name_the_output_below_them(tmp_path):
    text = "Run all_reduce_perf, then\n$ srun alltoall_perf -b 8\nwhich prints\n" + headless("all_reduce", 8)
    assert read_nccl_tests(write(tmp_path, text, "README.md"))[0].operation == "all_reduce"
