"""Summaries, traces and plots of results."""

import gzip
import itertools
import json
import re

import numpy as np
import pytest
from draws import few

import ddlsim
from ddlsim.cluster import star, with_storage
from ddlsim.readable import percent, rate, seconds, si, size
from ddlsim.report import plots
from ddlsim.report.cluster_plot import cluster_plot
from ddlsim.report.summary import scaling_rows, scaling_table
from ddlsim.report.trace import _merged
from ddlsim.run.metrics import METRICS

STRATEGIES = {
    "ring": ddlsim.AllReduce("ring"),
    "priority": ddlsim.AllReduce("ring", overlap="priority"),
    "servers": ddlsim.AsyncParameterServer(2, "colocated", apply_time="1 ms"),
}


@pytest.fixture(scope="module", params=STRATEGIES)
def result(request):
    return ddlsim.simulate(
        "office-1gbe", "cifar-cnn", STRATEGIES[request.param], batch_size=64, workers=4, steps=4,
        jitter=ddlsim.Lognormal(0.2),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (si(4.2264e9, "B/s"), "4.226 GB/s"),
        (si(12.0, "FLOP"), "12 FLOP"),
        (seconds(0.01723), "17.23 ms"),
        (seconds(2.5), "2.5 s"),
        (seconds(3e-6), "3 us"),
        (seconds(0.0), "0 s"),
        (size(102228128.0), "102.2 MB"),
        (rate(40941.6), "40,942 samples/s"),
        (percent(0.9307), "93.1 %"),
    ],
)
def test_numbers_as_people_read_them(text, shown):
    assert text == shown


def test_summary_says_what_matters(result):
    text = str(result)
    for word in ("throughput", "efficiency", "exposed communication", "waiting", "bottleneck", "busy links"):
        assert word in text
    assert ("staleness" in text) == bool(result.recorder.staleness)
    assert max(len(line) for line in text.splitlines()) < 200


def test_json_holds_the_numbers(result, tmp_path):
    data = json.loads(result.to_json(tmp_path / "r.json"))
    assert data == json.loads((tmp_path / "r.json").read_text())
    assert sum(data["shares"].values()) == pytest.approx(1.0)


def test_trace_has_a_track_per_worker_and_busy_link(result, tmp_path):
    path = tmp_path / "trace.json"
    assert result.save_trace(path, whole=True) == ""
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"worker 0", "worker 3"} <= names
    assert any("->" in name for name in names)
    spans = [e for e in events if e["ph"] == "X"]
    assert all(e["dur"] >= 0.0 and e["ts"] >= 0.0 for e in spans)
    spans.sort(key=lambda e: (e["pid"], e["tid"], e["ts"]))
    tracks = itertools.groupby(spans, lambda e: (e["pid"], e["tid"]))
    for _, group in tracks:  # no two events of a track overlap
        track = list(group)
        for a, b in itertools.pairwise(track):
            assert a["ts"] + a["dur"] <= b["ts"] * (1 + 1e-12) + 1e-6
    own = [e for e in spans if e["pid"] == 1]
    total = sum(sum(s.values()) for s in result.recorder.seconds)
    assert sum(e["dur"] for e in own) == pytest.approx(1e6 * total, rel=1e-9)


@pytest.mark.slow
def test_a_trace_has_the_first_steps_and_says_what_it_leaves_out(tmp_path):
    """Of 40 workers and 9 steps: 32 and the first 4, exactly; the whole has everything, compressed if so named."""
    result = ddlsim.simulate("star-1024-10g", "lenet5", batch_size=8, workers=40, steps=8, warmup=1)
    short, whole = tmp_path / "short.json", tmp_path / "whole.json.gz"
    words = result.save_trace(short)
    assert "steps after the first 4, of 9" in words
    assert "8 workers of 40; 64 links of 80" in words
    document = json.loads(short.read_text())
    assert document["otherData"]["left out"] == words
    assert result.save_trace(whole, whole=True) == ""
    assert result.save_trace(tmp_path / "again.json.gz", whole=True) == ""
    assert whole.read_bytes() == (tmp_path / "again.json.gz").read_bytes()  # no clock in it
    everything = json.loads(gzip.decompress(whole.read_bytes()))
    assert everything["otherData"] == {"made by": "ddlsim"}
    some, all_of_it = _by_track(document), _by_track(everything)
    assert len([name for name in some if re.fullmatch(r"worker \d+", name)]) == 32
    assert len([name for name in some if "->" in name]) == 16
    end = 1e6 * max(steps[3] for steps in result.traced.recorder.step_end)
    for name, spans in some.items():
        if name and "->" not in name:
            assert spans == [span for span in all_of_it[name] if span[0] < end]
    (note,) = some[""]
    assert note[:2] == pytest.approx((end, 1e6 * result.end_time - end), rel=1e-12)
    assert note[2] == f"left out: {words}"
    assert short.stat().st_size < 0.5 * len(gzip.decompress(whole.read_bytes()))


def _by_track(document):
    """Return (begin, duration, name) of the events of each track."""
    events = document["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    tracks = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            tracks[names[event["pid"], event["tid"]]].append((event["ts"], event["dur"], event["name"]))
    return tracks


def test_merging_keeps_the_longest_gaps():
    start = np.arange(5000.0)
    end = start + 0.5
    end[99] = start[99] + 0.25  # the longest gap comes after interval 99
    merged_start, merged_end = _merged(start, end, 2000)
    assert len(merged_start) == 2000
    assert end[99] in merged_end
    assert (merged_start[0], merged_end[-1]) == (start[0], end[-1])


def test_plots_are_written_and_labelled(result, tmp_path):
    drawn = {"timeline": result.plot_timeline, "cluster": result.plot_cluster, "steps": result.plot_step_times}
    for name, draw in drawn.items():
        draw(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
    assert result.plot_timeline().get_xlabel() == "simulated time (s)"
    axes = plots.breakdown({"this": result})
    assert axes.get_ylabel().startswith("time of the workers (%)")


def test_scaling_plot_has_a_line_per_series_and_the_ideal():
    experiment = ddlsim.Experiment("office-1gbe", "lenet5", steps=2)
    left, right = plots.scaling({"a": ddlsim.scaling(experiment, [1, 2, 4])})
    assert [line.get_label() for line in left.get_lines()] == ["ideal (linear)", "a"]
    assert right.get_ylabel() == "scaling efficiency (%)"


@pytest.mark.parametrize(
    "name", few(["dgx1-v100", "torus-3d", "fat-tree-k8-10g", "three-regions-wan", "cloud-25g-16x8-v100"], 2)
)
def test_every_kind_of_cluster_can_be_drawn(name, tmp_path):
    cluster_plot(ddlsim.load_cluster(name), tmp_path / "c.png")
    assert (tmp_path / "c.png").stat().st_size > 5000


def test_studies_of_lives_are_judged_by_goodput_and_those_with_input_say_what_waits():
    base = ddlsim.Experiment("office-1gbe", "lenet5", workers=4, steps=3, failures=ddlsim.Failures("2000 h"))
    often = {"often": ddlsim.Checkpoints("5 min", stall="4 min"), "seldom": ddlsim.Checkpoints("5 h", stall="4 min")}
    timelines = ddlsim.Study(base, {"checkpoints": often}).run(jobs=1)
    head, *rows = str(timelines).splitlines()
    assert "goodput/s" in head
    assert METRICS["goodput"].column[1](timelines.summary["goodput"].iloc[0]) in rows[0]
    assert "at the best configuration by goodput (seldom)" in str(timelines)
    assert timelines.summary["throughput"].nunique() == 1

    mixed = ddlsim.Study(base, {"failures": {"none": None, "some": base.failures}}).run(jobs=1)
    assert "by goodput" not in str(mixed), "what nothing disturbs has none"

    cluster = with_storage("office-1gbe", "disk", read="1 MB/s", bandwidth="1 Gbit/s")
    reads = ddlsim.Input(cpu_workers=1, prep_seconds="1 us", sample_bytes="10 kB", storage="disk", samples=1000)
    fed = ddlsim.Study(
        ddlsim.Experiment(cluster, "lenet5", workers=4, steps=3, input=reads), {"batch_size": [8, 16]}
    ).run(jobs=1)
    head, row, *_ = str(fed).splitlines()
    assert "input" in head
    assert percent(fed.summary["input_share"].iloc[0]) in row


def test_a_run_that_fits_opens_with_throughput_and_memory():
    """BERT-large: sequences of 512 tokens; 3 times its forward FLOPs over the V100's 15.7 TFLOP/s in fp32."""
    result = ddlsim.simulate("cloud-25g-16x8-v100", "bert-large", batch_size=8, workers=16, optimizer="adam", steps=2)
    throughput, memory, *_ = str(result).splitlines()
    assert re.fullmatch(r"memory +fits: 19\.29 GB of 34\.36 GB on the fullest worker", memory)
    tokens = 512 * result.throughput
    assert result.tokens_per_second == tokens
    assert throughput.split(None, 1)[1].startswith(
        f"{tokens / 16:,.0f} tokens/s per device, {tokens:,.0f} tokens/s in total ("
    )
    mfu = 3 * ddlsim.load_model("bert-large").flops * result.throughput / (16 * 15.7e12)
    assert result.mfu == pytest.approx(mfu, rel=1e-12)
    assert throughput.endswith(f"MFU {mfu:.1%}".replace("%", " %"))


def test_a_step_time_of_an_unnamed_device_has_no_share_of_a_peak():
    cluster = star(4, bandwidth="10 Gbit/s", latency="10 us")
    timed = ddlsim.Experiment(cluster, "resnet50", batch_size=8, compute=ddlsim.Measured("30 ms", 8), steps=1)
    assert ddlsim.simulate(timed).mfu is None
    assert "MFU" not in str(ddlsim.simulate(timed))
    assert 0 < ddlsim.simulate(timed.with_(device="v100")).mfu < 1
    assert 0 < ddlsim.simulate(timed.with_(compute=None)).mfu < 1


def test_a_run_that_does_not_fit_says_so_first():
    """Its throughput is that of devices with more memory, and is never called the throughput."""
    result = ddlsim.simulate("cloud-25g-16x8-v100", "bert-large", batch_size=128, workers=16, steps=2)
    first, second, *rest = str(result).splitlines()
    assert re.match("memory +does not fit: ", first)
    assert "has 34.4 GB; the largest batch that fits is 17" in first
    assert second.startswith("if it fit ")
    assert not [line for line in rest if line.startswith(("throughput", "warning"))]
    assert repr(result).endswith("if it fitted in memory>")
    assert not result.fits
    assert json.loads(result.to_json())["fits"] is False


def test_tables_never_show_throughputs_of_what_does_not_fit_without_a_word():
    one = ddlsim.Experiment("dgx1-v100", "gpt2-xl", ddlsim.AllReduce(), 64, 4, steps=2, warmup=1)
    results = ddlsim.scaling(one, [2, 4])
    for n, line in zip((2, 4), scaling_table(results).splitlines(), strict=False):
        assert line.startswith(f"{n} workers: does not fit: gpt2-xl with batch size 64 in fp32 needs about")
    assert [row["fits"] for row in scaling_rows(results)] == [False, False]
    jobs = ddlsim.simulate_jobs([ddlsim.Job(one, "a")])
    assert str(jobs).startswith("a: does not fit: gpt2-xl")
    assert "a: does not fit: gpt2-xl" in jobs._repr_html_()
    table = ddlsim.Study(base=one, vary={"batch_size": [1, 64]}).run(jobs=1)
    assert str(table).count("\nwarning of 1: gpt2-xl with batch size") == 2


def test_legends_name_only_what_is_drawn():
    """One worker only computes; two equal ones do not wait for each other."""
    for n, names in ((1, ["compute"]), (2, ["compute", "exposed communication"])):
        run = ddlsim.simulate("office-1gbe", "lenet5", ddlsim.AllReduce(), 8, n, steps=2)
        for axes in (plots.breakdown({"this": run}), run.plot_timeline()):
            named = [text.get_text() for text in axes.figure.legends[0].get_texts()]
            assert named[: len(names)] == names
            assert "waiting" not in named
            assert n == 2 or len(named) == 1
