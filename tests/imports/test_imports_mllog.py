"""MLPerf logs: present and first rounds, prefixes, repeated lines of several ranks; what is refused."""

import json
import math

import pytest

from ddlsim.errors import ConfigError
from ddlsim.imports.mllog import read_mllog


def entry(time_ms, key, value=None, kind="POINT_IN_TIME", **metadata):
    body = {"namespace": "", "time_ms": time_ms, "event_type": kind, "key": key, "value": value,
            "metadata": {"file": "train.py", "lineno": 7, **metadata}}  # fmt: skip
    return f":::MLLOG {json.dumps(body)}"


LINES = [
    "Loading data ...",
    entry(1000, "submission_benchmark", "resnet"),
    entry(1000, "global_batch_size", 3264),
    entry(1000, "train_samples", 1281167),
    entry(2000, "run_start"),
    entry(2000, "epoch_start", epoch_num=1),
    entry(22000, "epoch_stop", epoch_num=1),
    entry(22500, "tracked_stats", {"throughput": 65280.0}, epoch_num=1),
    entry(23000, "eval_accuracy", 0.5, epoch_num=1),
    entry(44000, "throughput", 32640.0),
    entry(45000, "eval_accuracy", 0.76, epoch_num=2),
    entry(52000, "run_stop", status="success"),
]


def write(tmp_path, lines):
    path = tmp_path / "result_0.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("prefix", ["", " 0: ", "[1,0]<stdout>:", "node-1 | INFO "], ids=["no", "srun", "mpi", "other"])
def test_a_run(tmp_path, prefix):
    """Score 50 s. A step of 3264 at 65280 images/s is 50 ms; epoch 1 took 20 s for 1,281,167 images."""
    path = write(tmp_path, [prefix + line for line in LINES])
    run = read_mllog(path, n_ranks=8)
    assert (run.benchmark, run.status, run.run_s) == ("resnet", "success", pytest.approx(50.0))
    assert run.accuracies == ((pytest.approx(21.0), 1, 0.5), (pytest.approx(43.0), 2, 0.76))
    assert run.epochs == ((1, pytest.approx(20.0)),)
    assert [(row.operation, row.seconds, row.n_samples, row.n_ranks) for row in run.timings] == [
        ("step", pytest.approx(0.05), 3264, 8), ("step", pytest.approx(0.1), 3264, 8),
        ("epoch", pytest.approx(20.0), 1281167, 8),
    ]  # fmt: skip
    assert run.timings[0].place == f"{path}:8"
    assert run.timings[0].throughput == pytest.approx(65280.0)


def test_lines_of_several_ranks_count_once(tmp_path):
    doubled = [line for line in LINES for _ in range(2) if "throughput" not in line]
    assert read_mllog(write(tmp_path, doubled)).accuracies == read_mllog(write(tmp_path, LINES)).accuracies


def test_blocks_stand_for_epochs(tmp_path):
    lines = [entry(0, "block_start", first_epoch_num=1, epoch_count=4), entry(8000, "block_stop", first_epoch_num=1)]
    assert read_mllog(write(tmp_path, lines)).epochs == ((1, pytest.approx(2.0)),)


def test_without_a_batch_the_throughput_is_right(tmp_path):
    (row,) = read_mllog(write(tmp_path, [entry(0, "throughput", 200.0)])).timings
    assert (row.n_samples, row.throughput) == (1.0, pytest.approx(200.0))


def test_the_first_rounds_had_lines_of_their_own(tmp_path):
    lines = [
        ":::MLPv0.5.0 resnet 1541711427.5 (main.py:5) run_start",
        ':::MLPv0.5.0 resnet 1541711500.5 (main.py:9) eval_accuracy: {"epoch": 4, "value": 0.32}',
        ':::MLPv0.5.0 resnet 1541711527.5 (main.py:12) run_stop: {"success": true}',
    ]
    run = read_mllog(write(tmp_path, lines))
    assert (run.run_s, run.accuracies) == (pytest.approx(100.0), ((pytest.approx(73.0), 4, 0.32),))


V06 = [
    ':::MLL 0.0 submission_benchmark: {"value": "transformer", "metadata": {"lineno": 0, "file": "N/A"}}',
    '0: :::MLL 1558641112.5 global_batch_size: {"value": 512, "metadata": {"lineno": 5, "file": "t.py"}}',
    ':::MLL 1558641200.0 run_start: {"value": null, "metadata": {"lineno": 7, "file": "t.py"}}',
    ':::MLL 1558641210.0 epoch_start: {"value": null, "metadata": {"epoch_num": 1, "file": "t.py"}}',
    ':::MLL 1558641260.0 epoch_stop: {"value": null, "metadata": {"epoch_num": 1, "file": "t.py"}}',
    ':::MLL 1558641270.0 eval_accuracy: {"value": "25.125", "metadata": {"epoch_num": 1, "file": "t.py"}}',
    ':::MLL 1558641300.5 run_stop: {"value": null, "metadata": {"status": "success", "file": "t.py"}}',
]


def test_round_0_6_had_shorter_lines(tmp_path):
    run = read_mllog(write(tmp_path, V06))
    assert (run.benchmark, run.status, run.global_batch_size) == ("transformer", "success", 512)
    assert (run.run_s, run.accuracies) == (pytest.approx(100.5), ((pytest.approx(70.0), 1, 25.125),))
    assert run.epochs == ((1, pytest.approx(50.0)),)


def test_lines_with_dates_and_per_cents(tmp_path):
    lines = [
        "MLPerf: resnet [06/13/19 23:59:50], run_start",
        "MLPerf: resnet [06/13/19 23:59:51], preproc_num_train_examples: 1281167",
        'MLPerf: resnet [06/14/19 00:00:19], eval_accuracy: {"value": 14.48800%, "epoch": 3}',
        "MLPerf: resnet [06/14/19 00:00:30], run_stop",
        "MLPerf: resnet [06/14/19 00:00:30], Total runtime: 0.66 minutes",
    ]
    run = read_mllog(write(tmp_path, lines))
    assert (run.benchmark, run.run_s, run.train_samples) == ("resnet", pytest.approx(40.0), 1281167)
    assert run.accuracies == ((pytest.approx(29.0), 3, pytest.approx(0.14488)),)
    with pytest.raises(ConfigError, match=r":1: '31/13/19 23:59:50' is not a date"):
        read_mllog(write(tmp_path, [lines[0].replace("06/13", "31/13")]))


@pytest.mark.parametrize(
    ("value", "metrics"), [({"BBOX": 0.25, "SEGM": 0.25}, ("BBOX", "SEGM")), ([0.25, 0.25], ("0", "1")), (0.25, ("",))]
)
def test_two_accuracies_at_a_time(tmp_path, value, metrics):
    run = read_mllog(write(tmp_path, [entry(0, "run_start"), entry(5000, "eval_accuracy", value, epoch_num=2)]))
    assert run.metrics == metrics
    assert run.accuracies == ((5.0, 2, 0.25),) * len(metrics)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*LINES, entry(60000, "run_start")], r"result_0\.txt:13: a second run starts \(the first ended in line 12\)"),
        ([*LINES[:8], entry(30000, "run_start"), LINES[-1]], r":9: a second .* \(the first was killed after line 7\)"),
        ([LINES[1][:-5]], ":1: not valid JSON after :::MLLOG"),
        ([LINES[1].replace('"key":', '"key"')], ":1: not valid JSON after :::MLLOG"),
        ([entry(0, "throughput", "fast")], r":1: value: must be a finite number, not 'fast'"),
        ([entry(0, "throughput", 0)], ":1: value: 0 must be above 0"),
        ([entry(0, "global_batch_size", 2.5)], "must be an integer"),
        ([entry("now", "run_start")], "time_ms.* must be a finite number"),
        (["hello"], "no ':::MLLOG"),
    ],
    ids=["second", "after a killed one", "cut", "json", "text", "zero", "fraction", "time", "other"],
)
def test_what_is_refused_is_named_with_its_line(tmp_path, lines, message):
    with pytest.raises(ConfigError, match=message):
        read_mllog(write(tmp_path, lines))


@pytest.mark.parametrize(
    "mixed",
    [[LINES[1] + LINES[2], *LINES[3:]], [LINES[1] + " INFO: warm", *LINES[2:]]],
    ids=["two in a line", "words behind"],
)
def test_lines_that_ranks_wrote_at_once(tmp_path, mixed):
    run = read_mllog(write(tmp_path, mixed))
    assert (run.benchmark, run.global_batch_size, run.run_s) == ("resnet", 3264, pytest.approx(50.0))


def test_v06_lines_joined_and_values_left_open(tmp_path):
    """Two entries of v0.6 in one line; a batch that is null is not said, an accuracy that is null none."""
    first = ':::MLL 10.0 submission_benchmark: {"value": "gnmt", "metadata": {}}'
    second = ':::MLL 10.0 global_batch_size: {"value": null, "metadata": {}}'
    accuracy = ':::MLL {} eval_accuracy: {{"value": {}, "metadata": {{"iteration": 4}}}}'
    more = [accuracy.format(11, "null"), accuracy.format(12, 2.5)]
    run = read_mllog(write(tmp_path, [first + second, *more]))
    assert (run.benchmark, run.global_batch_size, run.accuracies) == ("gnmt", 0, ((2.0, 4, 2.5),))


@pytest.mark.parametrize(
    "line", [':::MLLOG {"time_ms": 1, "key": "seed", "value": 7, "meta', ":::MLL 3.0 seed: {'value': None}"]
)
def test_broken_entries_that_do_not_count_are_noted(tmp_path, line):
    run = read_mllog(write(tmp_path, [*LINES, line]))
    assert run.run_s == pytest.approx(50.0)
    assert "skipped 1 invalid entries with the keys seed" in run.notes[0]


def test_v05_says_whether_the_run_was_a_success(tmp_path):
    lines = [":::MLPv0.5.0 ssd 1.0 (a.py:1) run_start", ':::MLPv0.5.0 ssd 9.0 (a.py:2) run_stop: {"success": true}']
    run = read_mllog(write(tmp_path, lines))
    assert (run.benchmark, run.status, run.run_s) == ("ssd", "success", 8.0)


def test_evaluations_after_run_stop_count_when_training_got_there(tmp_path):
    """Checkpoints evaluated offline: that of 20 s counts at 20 s, however often it is logged; that of 60 s, after the
    run stopped, is left out. As stable diffusion's logs of v4.1, which name the metric and log at 684 s of 321 s."""
    lines = [
        entry(0, "run_start"), entry(20000, "block_stop", "step", samples_count=512),
        entry(40000, "block_stop", "step", samples_count=1024), entry(60000, "block_stop", "step", samples_count=1536),
        entry(684000, "eval_accuracy", 0.18645724561065435, samples_count=512, metric="CLIP"),
        entry(685000, "eval_accuracy", 79.5, samples_count=512, metric="FID"),
        entry(686000, "eval_accuracy", 74.0, samples_count=1024, metric="FID"),
        entry(40000, "eval_accuracy", 0.1864572456106543, samples_count=512, metric="CLIP"),
        entry(40000, "run_stop", status="success"),
    ]  # fmt: skip
    run = read_mllog(write(tmp_path, lines))
    assert run.accuracies == ((20.0, 512, 79.5), (40.0, 512, 0.1864572456106543), (40.0, 1024, 74.0))
    assert run.metrics == ("FID", "CLIP", "FID")
    assert "2 evaluations were logged after run_stop" in run.notes[0]
    unknown = read_mllog(write(tmp_path, [*lines, entry(700000, "eval_accuracy", 70.0, samples_count=7)]))
    assert unknown.accuracies[-1] == (40.0, 7, 70.0)
    late = entry(700000, "eval_accuracy", 70.0, samples_count=1536, metric="FID")
    with pytest.warns(UserWarning, match="skipped 1 entry; first error: .*:10: value: evaluates a point after"):
        assert read_mllog(write(tmp_path, [*lines, late])).accuracies == run.accuracies


def test_a_run_that_was_killed_has_no_time(tmp_path):
    run = read_mllog(write(tmp_path, LINES[:-1]))
    assert (run.status, math.isnan(run.run_s), len(run.accuracies)) == ("killed", True, 2)
    assert run.notes[0].endswith("ends 43 s after run_start without run_stop; was the run killed?")
    cut = [*LINES[:-1], LINES[-1][:-20]]  # in the middle of its last line
    with pytest.warns(UserWarning, match="skipped 1 entry; first error: .*:12: not valid JSON after :::MLLOG"):
        assert read_mllog(write(tmp_path, cut)).status == "killed"


def test_power_logs_are_no_runs(tmp_path):
    """As the logging library's power_measurement.py writes them (mlperf_logging/mllog/examples/power)."""
    lines = [entry(0, "power_measurement_start"), *(entry(1000 * i, "power_reading", 300.0) for i in range(9)),
             entry(9000, "power_measurement_stop")]  # fmt: skip
    with pytest.raises(ConfigError, match=r"result_0\.txt: this is an MLPerf power log; read the corresponding"):
        read_mllog(write(tmp_path, lines))
    with pytest.raises(ConfigError, match=r"no ':::MLLOG \{...\}' lines of a run"):
        read_mllog(write(tmp_path, [entry(0, "seed", 3)]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (entry(30000, "eval_accuracy", float("nan"), epoch_num=3), "value: must be a finite number"),
        (entry(30000, "eval_accuracy", 1.5).replace("1.5", "-nan"), "value: must be a finite number"),
        (entry(30000, "throughput", "fast"), "value: must be a finite number, not 'fast'"),
        (entry(30000, "throughput", 0), "value: 0 must be above 0"),
        (entry("now", "eval_accuracy", 0.5), "time_ms: must be a finite number, not 'now'"),
        (':::MLLOG {"namespace": ""}', "the key 'key' is missing"),
        (":::MLLOG", "truncated: no {...} follows"),
        ("MLPerf: resnet [31/13/19 23:59:50], eval_start", "'31/13/19 23:59:50' is not a date"),
    ],
)
def test_an_entry_that_cannot_be_used_does_not_cost_the_run(tmp_path, line, message):
    path = write(tmp_path, [*LINES, line])
    with pytest.warns(UserWarning, match=f"skipped 1 entry; first error: .*:13: {message}"):
        run = read_mllog(path)
    assert (run.run_s, len(run.accuracies), len(run.timings)) == (pytest.approx(50.0), 2, 3)


def test_numbers_as_c_prints_them(tmp_path):
    lines = [line.replace('"lineno": 7', '"lineno": 7, "loss": inf, "grad": -nan') for line in LINES]
    assert read_mllog(write(tmp_path, lines)).run_s == pytest.approx(50.0)
