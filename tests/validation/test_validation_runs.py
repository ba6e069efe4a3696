"""Measured runs against predictions: fit some, predict the rest, say why not."""

import dataclasses
import itertools
import math
import sys

import pytest
from draws import rows

import ddlsim
from ddlsim.cluster.calibrated import learned, with_parameters
from ddlsim.errors import ConfigError
from ddlsim.measure import Measurement
from ddlsim.run.seeds import t_quantile
from ddlsim.validation import MeasuredRun, calibrate, read_runs, validate
from ddlsim.validation.comparison import parse_condition
from ddlsim.validation.run_fit import Knowledge
from ddlsim.validation.run_table import NUMBERS, TEXTS

OFFICE = "office-1gbe"


def simulated(cluster, workers, batch_size, algorithm="ring", c0="40 ms", c1="6 ms", **more):
    """Return what a run would have measured on `cluster` with steps of 40 ms + 6 ms x batch."""
    run = ddlsim.simulate(
        cluster, "resnet18", ddlsim.AllReduce(algorithm), batch_size, workers, compute=ddlsim.Affine(c0, c1), steps=4,
        warmup=1, **more,
    )  # fmt: skip
    return MeasuredRun(workers=workers, batch_size=batch_size, throughput=run.throughput, algorithm=algorithm)


@pytest.fixture(scope="module")
def truth():
    """The office at 95 MB/s of payload instead of the file's 117.7."""
    return with_parameters(ddlsim.load_cluster(OFFICE), {"between.bandwidth": 0.95e8})


@pytest.fixture(scope="module")
def runs(truth):
    algorithms = {1: ("ring",), 2: ("ring",), 4: ("ring", "parameter_server"), 8: ("ring", "parameter_server")}
    return [simulated(truth, n, b, a) for b in (16, 32) for n, names in algorithms.items() for a in names]


@pytest.fixture(scope="module")
def found(runs):
    return validate(runs, OFFICE, "resnet18", fit_on="workers <= 2")


def test_fitting_a_few_runs_predicts_the_rest(found):
    fit, held = found.summary(fitted=True), found.summary(fitted=False)
    assert (fit.n, held.n) == (4, 8)
    assert held.mean_absolute < 0.01
    assert held.in_interval == 1.0
    assert (held.options, held.right) == (4, 4)
    assert held.kendall_tau == pytest.approx(1.0)
    assert found.known.fitted.links["between.bandwidth"] == pytest.approx(0.95e8, rel=0.02)
    (line,) = found.known.fitted.compute.values()
    assert (line.c0, line.c1) == pytest.approx((0.040, 0.006), rel=1e-3)
    assert found.within(0.01)
    assert "held out: 8 runs" in str(found)
    assert "extrapolated: 4 workers (measured: 2)\nextrapolated: 8 workers (measured: 2)" in str(found)
    assert {row.interval.notes for row in found.rows if row.fitted} == {()}


def test_errors_are_those_of_the_numbers():
    """Without any fit or calibration: hand-made measurements around the prediction."""
    plain = validate([MeasuredRun(workers=1, batch_size=32, throughput=1.0)], OFFICE, "resnet18", explain=0)
    predicted = plain.rows[0].predicted
    rows = [MeasuredRun(workers=1, batch_size=32, throughput=predicted * f) for f in (0.8, 1.0, 1.25)]
    found = validate(rows, OFFICE, "resnet18", explain=0)
    s = found.summary(fitted=False)
    errors = [1 / 0.8 - 1, 0.0, 1 / 1.25 - 1]
    assert found.table["error"].tolist() == pytest.approx(errors)
    assert s.mean_absolute == pytest.approx(sum(map(abs, errors)) / 3) == found.error
    assert s.geometric_mean == pytest.approx(math.exp(2 * math.log(1.25) / 3) - 1)
    assert s.worst == pytest.approx(0.25)
    assert s.in_interval is None  # nothing says how sure the file is
    assert s.options == 0
    assert found.summary(fitted=True) is None
    assert not found.within(0.1)
    assert found.within(0.2)


def test_a_measured_value_in_a_wrong_unit_has_a_large_error(tmp_path):
    path = written(tmp_path, "workers,batch_size,throughput (images/s)\n2,32,1e30\n2,32,100\n")
    summary = ddlsim.validate(path, "office-1gbe", "resnet18").summary(fitted=False)
    assert summary.worst == -1.0
    assert summary.geometric_mean > 1e13


def test_the_order_of_options_is_judged():
    plain = validate([MeasuredRun(workers=4, batch_size=32, throughput=1.0, overlap=o) for o in ("none", "ddp")],
                     OFFICE, "resnet18", explain=0)  # fmt: skip
    slow, fast = (row.predicted for row in plain.rows)
    assert slow < fast
    for throughputs, right in (((slow, fast), 1), ((fast, slow), 0)):
        rows = [
            MeasuredRun(workers=4, batch_size=32, throughput=t, overlap=o)
            for t, o in zip(throughputs, ("none", "ddp"), strict=True)
        ]
        s = validate(rows, OFFICE, "resnet18", explain=0).summary(fitted=False)
        assert (s.options, s.right) == (1, right)
        assert s.kendall_tau == pytest.approx(1.0 if right else -1.0)


@pytest.mark.parametrize(
    ("changes", "what", "factor"),
    rows(
        [
            ({"c0": "60 ms", "c1": "9 ms"}, "compute time", 1.5),
            ({"bandwidth": 0.7}, "bandwidth", 0.7),
            ({"jitter": 0.3}, "waiting", 0.3),
        ],
        1,
    ),
    ids=["compute", "bandwidth", "waiting"],
)
def test_the_cause_of_an_error_is_found(truth, changes, what, factor):
    """One thing is different from what is assumed: among the causes it stands with its true size."""
    steps = {key: value for key, value in changes.items() if key in ("c0", "c1")}
    cluster = truth.scaled("nic", bandwidth=changes.get("bandwidth", 1.0))
    jitter = ddlsim.Lognormal(changes["jitter"]) if "jitter" in changes else ddlsim.NoJitter()
    if what == "waiting":
        measured = ddlsim.simulate(
            cluster, "resnet18", ddlsim.AllReduce(), 64, 8, compute=ddlsim.Affine("40 ms", "6 ms"), jitter=jitter,
            steps=40, warmup=1,
        )  # fmt: skip
        row = MeasuredRun(workers=8, batch_size=64, throughput=measured.throughput)
    else:
        row = simulated(cluster, 8, 64, **steps)
    alone = simulated(truth, 1, 64)
    found = validate([alone, row], truth, "resnet18", fit_on="workers == 1")
    (cause,) = [c for c in found.rows[1].causes if c.what == what]
    assert cause.factor == pytest.approx(factor, rel=0.1)
    assert "explained by" in str(found)


def test_small_errors_are_not_explained(found):
    assert not any(row.causes for row in found.rows)


def test_a_calibrated_file_gives_step_times_and_intervals(truth, tmp_path):
    from ddlsim.measure import Measurement

    messages = [
        Measurement(experiment="point_to_point", operation="one_way", n_ranks=2, n_hosts=2, nbytes=s,
                    median_s=100e-6 + s / 0.95e8)
        for s in (8, 65_536, 1_048_576, 16_777_216)
    ]  # fmt: skip
    steps = [
        Measurement(experiment="step", operation="training", n_ranks=1, n_hosts=1, batch_size=b, model="resnet18",
                    median_s=0.040 + 0.006 * b)
        for b in (8, 32, 64)
    ]  # fmt: skip
    path = tmp_path / "calibrated.toml"
    calibrate([*messages, *steps], OFFICE).save(path, OFFICE)
    found = validate([simulated(truth, n, 32) for n in (1, 4, 8)], path, "resnet18")
    s = found.summary(fitted=False)
    assert s.n == 3
    assert s.mean_absolute < 0.01
    assert s.in_interval == 1.0


@pytest.mark.parametrize("nodes", [None, 4], ids=["first", "spread"])
def test_runs_whose_all_reduces_follow_the_measured_curve(truth, nodes):
    """All-reduces take 1.4 times as long as a ring of messages: only the curve knows."""
    sizes = [2**k for k in range(10, 27, 4)]
    rows = [
        Measurement(
            experiment="collective", operation="all_reduce", n_ranks=4, n_hosts=4, nbytes=s,
            median_s=1.4 * ddlsim.collective_time(truth, "ring", s, ranks=4),
        )
        for s in sizes
    ]  # fmt: skip
    messages = [
        Measurement(
            experiment="point_to_point", operation="one_way", n_ranks=2, n_hosts=2, nbytes=s,
            median_s=ddlsim.collective_time(truth, "binomial", s, kind="broadcast", ranks=2),
        )
        for s in sizes
    ]  # fmt: skip
    calibrated = calibrate([*messages, *rows], OFFICE).cluster
    compute = ddlsim.Measured("50 ms", 16)
    strategy = ddlsim.AllReduce(overlap="none", cost="calibrated")
    run = ddlsim.simulate(calibrated, "resnet18", strategy, 16, 4, compute=compute)
    step = 0.050 + 1.4 * ddlsim.collective_time(truth, "ring", run.workloads[0].gradient_nbytes, ranks=4)
    assert run.step_time == pytest.approx(step, rel=0.01)
    errors = {}
    for cost in ("calibrated", "simulated"):
        alone = MeasuredRun(workers=1, batch_size=16, throughput=16 / 0.050)
        four = MeasuredRun(
            workers=4, batch_size=16, throughput=64 / step, overlap="none", algorithm="ring", cost=cost, nodes=nodes
        )
        found = validate([alone, four], calibrated, "resnet18", fit_on="workers == 1", fit=("compute",), explain=0)
        errors[cost] = found.rows[1].error
    assert abs(errors["calibrated"]) < 0.01
    assert errors["simulated"] > 0.2


def test_no_interval_where_the_network_is_only_assumed(runs):
    found = validate(runs, OFFICE, "resnet18", fit_on="workers == 1", explain=0)
    assert [row.interval is not None for row in found.rows] == [row.run.workers == 1 for row in found.rows]


def test_fitting_the_compute_time_only(runs):
    found = validate(runs, OFFICE, "resnet18", fit_on="workers <= 2", fit=["compute"], explain=0)
    assert found.known.fitted.links == {}
    assert found.error > 0.1
    with pytest.raises(ConfigError, match="did you mean 'network'"):
        validate(runs, OFFICE, "resnet18", fit_on="workers <= 2", fit=["networks"])


@pytest.mark.slow
def test_one_batch_size_and_no_single_worker_fit_a_factor(runs):
    small = [run for run in runs if run.batch_size == 32]
    for condition in ("workers == 1", "workers >= 2"):
        found = validate(small, OFFICE, "resnet18", fit_on=condition, explain=0)
        (factor,) = found.known.fitted.factors.values()
        assumed = ddlsim.simulate(OFFICE, "resnet18", batch_size=32, workers=1).step_time
        assert factor * assumed == pytest.approx(0.232, rel=0.02 if condition == "workers == 1" else 0.5)
    assert isinstance(found.known, Knowledge)


def test_nodes_spread_the_workers(tmp_path):
    """Two workers on two of the machines with 8 GPUs exchange over the network, on one by NVLink."""
    rows = [MeasuredRun(workers=2, batch_size=32, throughput=1.0, nodes=n) for n in (None, 1, 2)]
    first, one, two = validate(rows, "cloud-25g-16x8-v100", "vgg16", explain=0).rows
    assert first.predicted == one.predicted > 1.1 * two.predicted


def test_the_plot_is_drawn(found, tmp_path):
    axes = found.plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "measured = predicted", "within 10 %", "fitted", "held out",
    ]  # fmt: skip


def test_rows_without_a_strategy_share_the_batch_of_the_default_one(tmp_path):
    """As rows that name it do, whether the file has rates or times; rows made by hand have to agree."""
    named, default = "workers,batch_size,strategy,{}\n4,32,fsdp,{}\n", "workers,batch_size,{}\n4,32,{}\n"
    for head, cell in (("step_time (ms)", 100), ("throughput (images/s)", 320)):
        found = [
            validate(written(tmp_path, text.format(head, cell)), OFFICE, "lenet5", strategy=strategy, explain=0).rows[0]
            for text, strategy in ((named, None), (default, ddlsim.FSDP()))
        ]
        assert found[0].run.step_time == found[1].run.step_time == pytest.approx(0.1 if "ms" in head else 32 / 320)
        assert found[0].predicted == found[1].predicted
    run = MeasuredRun(workers=4, batch_size=32, throughput=320.0)
    with pytest.raises(ConfigError, match="shared_batch = False: the batch_size of FSDP is the total of all workers"):
        validate([run], OFFICE, "lenet5", strategy=ddlsim.FSDP())
    with pytest.raises(ConfigError, match="base must not contain training"):
        validate([run], OFFICE, "lenet5", base=ddlsim.Experiment(OFFICE, training=ddlsim.Training("digits", epochs=1)))


@pytest.mark.parametrize(("name", "value", "remedy"), [
    ("accumulation", 4, "set it in the runs' column accumulation"),
    ("workers", 2, "set it in the runs' column workers"),
    ("batch_size", 64, "set it in the runs' column batch_size"),
    ("steps", 50, "the number of simulated steps is fixed; leave it out"),
    ("warmup", 0, "the number of simulated steps is fixed; leave it out"),
    ("failures", ddlsim.Failures("5000 h"), "the throughput without failures is compared; leave it out"),
])  # fmt: skip
def test_fields_of_a_base_without_effect_are_refused(name, value, remedy):
    run = MeasuredRun(workers=4, batch_size=32, throughput=320.0)
    with pytest.raises(ConfigError, match=rf"validate: base.{name} = .* has no effect, because .*{remedy}"):
        validate([run], OFFICE, "lenet5", base=ddlsim.Experiment(OFFICE, **{name: value}))


# ------------------------------------------------------------ files and conditions


def written(tmp_path, text):
    path = tmp_path / "runs.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "text",
    [
        "workers,batch_size,step_time (ms)\n4,32,500\n",
        "# a comment\nworkers,batch_size,step_time\n4,32,500 ms\n",
        "workers,batch_size,throughput [images/s],note\n4,32,256,a note\n",
        "workers,batch_size,accumulation,throughput\n4,16,2,256 samples/s\n",
    ],
    ids=["head", "cell", "brackets", "accumulation"],
)
def test_units_stand_in_the_head_or_in_the_cells(tmp_path, text):
    (run,) = read_runs(written(tmp_path, text))
    assert run.throughput == pytest.approx(256.0)
    assert run.step_time == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("workers,batch_size,step_time\n4,32,500\n", "line 2: column step_time: '500' has no unit"),
        ("workers,batch_size,step_time (images/s)\n4,32,500\n", "line 2: column step_time: .* not a time"),
        ("workers,batch_size,throughput (ms)\n4,32,500\n", "line 2: column throughput: .* is a time, not a rate"),
        ("workers,batch_size,troughput (images/s)\n4,32,5\n", "line 1: unknown column 'troughput'; did you mean"),
        ("workers,throughput (images/s)\n4,5\n", "line 1: column 'batch_size' is missing"),
        (
            "workers,batch_size\n4,5\n",
            "line 1: must have exactly one of the columns throughput, tokens_per_s, step_time",
        ),
        ("workers (n),batch_size,step_time (s)\n4,5,1\n", r"column 'workers \(n\)': workers takes no unit"),
        ("workers,workers,batch_size,step_time (s)\n4,4,5,1\n", "column 'workers' occurs twice"),
        ("workers,batch_size,step_time (s)\n4,5\n", "line 2: found 2 cells for 3 columns"),
        ("workers,batch_size,step_time (s)\n4.5,5,1\n", r"line 2: column workers: '4\.5' must be an integer"),
        ("workers,batch_size,step_time (s)\n,5,1\n", "line 2: column workers: is empty"),
        ("workers,batch_size,step_time (s)\n0,5,1\n", "line 2: workers = 0: must be a positive integer"),
        ("workers,batch_size,step_time (s)\n1,5,-1\n", "line 2: column step_time: '-1': must be above 0"),
        ("workers,batch_size,step_time (s)\n1,5,nan\n", "line 2: column step_time"),
        ("workers,batch_size,step_time (s)\n", r"runs\.csv: line 1: has the names of columns, but no run follows"),
        ("workers,batch_size,nodes,step_time (s)\n1,5,2,1\n", "nodes = 2: must be at most the number of workers, 1"),
    ],
    ids=itertools.count(),
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as error:
        read_runs(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            "9,32,resnet18,,5",
            "line 2: column workers: the run used 9 workers, but cluster 'office-1gbe' has only 8 devices",
        ),
        ("2,32,,,5", "line 2: column model is missing"),
        ("2,32,resnet81,,5", "line 2: unknown model 'resnet81'; did you mean 'resnet18'"),
        ("2,32,resnet18,ringg,5", "line 2: AllReduce: unknown all_reduce algorithm 'ringg'; did you mean 'ring'"),
        ("2,900000,resnet18,,5", "none of 1 run can be simulated: .*line 2: resnet18 .* needs about .* GB"),
    ],
    ids=["workers", "no-model", "model", "algorithm", "memory"],
)
def test_a_run_that_does_not_fit_the_cluster_is_refused(tmp_path, row, message):
    path = written(tmp_path, f"workers,batch_size,model,algorithm,step_time (s)\n{row}\n")
    with pytest.raises(ConfigError, match=message) as error:
        validate(path, OFFICE)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("fit_on", [None, "workers <= 2"])
def test_runs_that_do_not_fit_in_memory_are_declined_and_counted(tmp_path, fit_on):
    """Neither the errors nor the fit include them, and every table lists all runs."""
    kept = ["1,32,,5", "8,32,,5"]
    path = written(tmp_path, "\n".join(["workers,batch_size,algorithm,step_time (s)", *kept, "2,900000,,5", ""]))
    found, without = (
        validate(each, OFFICE, "resnet18", fit_on=fit_on, explain=0) for each in (path, read_runs(path)[:2])
    )
    assert [row.predicted for row in found.rows] == [row.predicted for row in without.rows]
    assert (found.error, found.summary(fitted=False)) == (without.error, without.summary(fitted=False))
    (declined,) = found.declined
    assert "line 4: resnet18 with batch size 900000 in fp32 needs about" in declined.reason
    assert found.table["used"].tolist() == [*without.table["used"], "declined"]
    assert math.isnan(found.table["predicted"].iloc[-1])
    assert found.table["notes"].iloc[-1] == declined.reason
    assert f"declined: 1 of 3 runs, which the errors do not include\n{declined.label}: {declined.reason}" in str(found)
    with pytest.raises(ConfigError, match="no run that satisfies this condition can be simulated"):
        validate(path, OFFICE, "resnet18", fit_on="batch_size > 32")


def test_strategies_are_named_as_in_experiment_files():
    with pytest.raises(ConfigError, match="did you mean 'all-reduce'"):
        validate([MeasuredRun(workers=2, batch_size=8, throughput=1.0, strategy="allreduce")], OFFICE, "lenet5")
    run = MeasuredRun(workers=2, batch_size=8, throughput=1.0, strategy="parameter-server", algorithm="ring")
    with pytest.raises(ConfigError, match="column algorithm: ParameterServer has no setting of this name"):
        validate([run], OFFICE, "lenet5")


ROW = dict.fromkeys((*NUMBERS, *TEXTS)) | {"workers": 4, "batch_size": 32, "algorithm": "ring"}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("workers <= 4", True), ("workers < 4", False), ("workers==4 and batch_size > 16", True),
        ("workers = 4 and batch_size > 32", False), ("algorithm == ring", True), ("algorithm != 'ring'", False),
        ("model == resnet50", False), ("model != resnet50", True), ('algorithm == "ring"', True), ("nodes > 1", False),
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_conditions_compare(text, holds):
    assert parse_condition(text, NUMBERS, TEXTS).holds(ROW) is holds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("worker <= 4", "unknown column 'worker'; did you mean 'workers'"),
        ("workers", "'workers' is not a comparison"),
        ("workers <= 4 or batch_size == 1", "is not a comparison"),
        ("workers <= four", "workers is a number, but 'four' is not"),
        ("algorithm < ring", "can only be compared with == or !="),
        ("__import__('os').system('true')", "is not a comparison"),
        ("", "is not a comparison"),
    ],
    ids=itertools.count(),
)
def test_nothing_but_comparisons_is_a_condition(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_condition(text, NUMBERS, TEXTS)


def test_a_condition_that_no_run_fulfils_is_refused(runs):
    with pytest.raises(ConfigError, match="no run satisfies this condition"):
        validate(runs, OFFICE, "resnet18", fit_on="workers > 64")
    with pytest.raises(ConfigError, match="pass at least one measured run"):
        validate([], OFFICE, "resnet18")


@pytest.mark.parametrize("column", ["algorithm", "overlap"])
def test_a_table_of_runs_imports_no_code(tmp_path, monkeypatch, column):
    (tmp_path / "evil_of_runs.py").write_text("from ddlsim.collectives.all_reduce import ring as it\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "runs.csv"
    path.write_text(f"workers,batch_size,throughput (samples/s),{column}\n2,32,100,evil_of_runs:it\n")
    with pytest.raises(ConfigError, match=rf"runs.csv: line 2: column.{column} = 'evil_of_runs:it' would import code"):
        validate(path, OFFICE, "resnet18")
    assert "evil_of_runs" not in sys.modules
    assert getattr(read_runs(path, allow_code=True)[0], column) == "evil_of_runs:it"


# ------------------------------------------------------------ what a fit does not cover

TWO_MACHINES = "dgx1-v100-16"


def messages(noise=0.0, classes=(1, 2)):
    """Return one-way messages inside a machine and between two, every other one between them `noise` too slow."""
    found = []
    for n_hosts in classes:
        seconds, rate = (2e-6, 2e10) if n_hosts == 1 else (5e-6, 9e9)
        found += [
            Measurement(
                experiment="point_to_point", operation="one_way", n_ranks=2, n_hosts=n_hosts, nbytes=s,
                median_s=(seconds + s / rate) * (1.0 + noise * (i % 2) * (n_hosts == 2)),
            )
            for i, s in enumerate((8, 2**12, 2**16, 2**20, 2**24, 2**26))
        ]  # fmt: skip
    return found


def steps_of(workers, cluster=TWO_MACHINES, batch_size=32):
    run = ddlsim.simulate(cluster, "resnet50", ddlsim.AllReduce("ring"), batch_size, workers,
                          compute=ddlsim.Measured("0.1 s", batch_size), steps=4, warmup=1)  # fmt: skip
    return MeasuredRun(workers=workers, batch_size=batch_size, throughput=run.throughput, algorithm="ring")


@pytest.fixture(scope="module")
def machine_runs():
    return [steps_of(n) for n in (1, 2, 4, 16)]


@pytest.mark.slow
def test_a_fit_inside_one_machine_keeps_what_is_known_between_machines(machine_runs):
    """The README's command, with runs of up to four workers on machines of eight GPUs."""
    calibration = calibrate(messages(), TWO_MACHINES)
    found = validate(machine_runs, TWO_MACHINES, "resnet50", fit_on="workers <= 4", calibration=calibration, explain=0)
    assert {"between.latency", "between.bandwidth", "inside.latency", "inside.bandwidth"} == set(found.known.names)
    assert all(row.interval is not None for row in found.rows)
    kept = [found.known.names.index(f"between.{what}") for what in ("latency", "bandwidth")]
    before = [p.name for p in calibration.parameters].index("between.latency")
    assert found.known.covariance[kept[0], kept[0]] >= calibration.covariance[before, before] > 0.0
    assert found.known.scatter.keys() == {"between"}
    assert found.summary(fitted=False).in_interval == 1.0
    compute = validate(machine_runs, TWO_MACHINES, "resnet50", fit_on="workers == 1", explain=0,
                       calibration=calibration)  # fmt: skip
    assert compute.known.scatter.keys() == {"between", "inside"}
    assert all(row.interval is not None for row in compute.rows)


@pytest.mark.slow
def test_a_wrong_fit_of_links_does_not_widen_runs_that_do_not_use_them(machine_runs):
    """Messages between machines at odds by a factor of four: runs on one machine are as sure as before."""
    widths = {}
    for noise in (0.0, 3.0):
        found = validate(machine_runs, TWO_MACHINES, "resnet50", fit_on="workers == 1", explain=0,
                         calibration=calibrate(messages(noise), TWO_MACHINES))  # fmt: skip
        widths[noise] = [math.log(row.interval.high / row.interval.low) for row in found.rows]
    assert widths[3.0][:3] == pytest.approx(widths[0.0][:3], rel=0.02)
    assert widths[3.0][3] > widths[0.0][3]


@pytest.mark.slow
def test_runs_deviate_as_measured_runs_with_their_strategy_did(machine_runs):
    found = validate(machine_runs, TWO_MACHINES, "resnet50", fit_on="workers <= 4", explain=0,
                     calibration=calibrate(messages(), TWO_MACHINES))  # fmt: skip
    faster, slower = learned()["run/all-reduce"]
    interval, one = found.rows[3].interval, found.rows[0].interval
    assert interval.value / interval.low >= math.exp(slower)
    assert interval.high / interval.value >= math.exp(faster)
    assert one.high / one.low < interval.high / interval.low


def test_few_runs_of_one_worker_give_the_interval_of_students_t(runs):
    """A factor from n runs with a scatter has n - 1 degrees of freedom; that of a further run includes the mean's."""
    (single,) = [run for run in runs if (run.workers, run.batch_size) == (1, 16)]
    for n in (2, 4):
        factors = [1.25 ** (1 if i % 2 else -1) for i in range(n)]
        noisy = [dataclasses.replace(single, throughput=factor * single.throughput) for factor in factors]
        row = validate(noisy, OFFICE, "resnet18", fit_on="workers == 1", explain=0).rows[0]
        scatter = math.log(1.25) * math.sqrt(n / (n - 1))
        least = t_quantile(n - 1) * scatter * math.sqrt(1 + 1 / n)
        assert math.log(row.interval.high / row.predicted) == pytest.approx(least, rel=0.1)
