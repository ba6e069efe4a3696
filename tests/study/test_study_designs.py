"""Which points a study has, what is changed in each, and what is refused."""

import dataclasses
import math
import re

import numpy as np
import pytest
from study_parts import BASE, VARY

import ddlsim
from ddlsim.study import Range, Study, load_study
from ddlsim.study.changes import changed, labels_of
from ddlsim.study.designs import rows_of
from ddlsim.study.fingerprint import Digests, text_of
from ddlsim.study.study import Loader

# ---------------------------------------------------------------- designs


def test_a_grid_has_every_combination_in_order():
    rows = rows_of({"workers": [1, 2], "batch_size": [8, 16, 32]}, "grid", None, 0)
    assert [(r["workers"], r["batch_size"]) for r in rows] == [(1, 8), (1, 16), (1, 32), (2, 8), (2, 16), (2, 32)]


def test_a_list_takes_values_together():
    rows = rows_of({"workers": [1, 2], "batch_size": [8, 16]}, "list", None, 0)
    assert rows == [{"workers": 1, "batch_size": 8}, {"workers": 2, "batch_size": 16}]


def test_nothing_varied_is_one_configuration():
    assert [rows_of({}, design, None, 0) for design in ("grid", "list")] == [[{}], [{}]]


@pytest.mark.parametrize("n_points", [8, 13])
def test_latin_hypercubes_cover_every_field_evenly(n_points):
    """Cut into n_points equal parts, each field's range has one point in each."""
    vary = {"accumulation": Range(0.0, 1.0), "jitter.cv": Range(1.0, 100.0, log=True), "workers": [1, 2, 3, 4]}
    rows = rows_of(vary, "latin-hypercube", n_points, seed=3)
    linear = sorted(int(row["accumulation"] * n_points) for row in rows)
    logarithmic = sorted(int(math.log(row["jitter.cv"], 100.0) * n_points) for row in rows)
    assert linear == logarithmic == list(range(n_points))
    counts = [sum(row["workers"] == w for row in rows) for w in (1, 2, 3, 4)]
    assert max(counts) - min(counts) <= 2
    assert rows == rows_of(vary, "latin-hypercube", n_points, seed=3)
    assert rows != rows_of(vary, "latin-hypercube", n_points, seed=4)


def test_random_designs_draw_from_the_range():
    """The mean of 400 draws of U(2, 4) is 3, give or take 4 * 2 / sqrt(12 * 400) = 0.12."""
    rows = rows_of({"a": Range(2.0, 4.0), "b": ["x", "y"]}, "random", 400, 0)
    values = np.array([row["a"] for row in rows])
    assert values.min() >= 2.0
    assert values.max() <= 4.0
    assert values.mean() == pytest.approx(3.0, abs=0.12)
    assert sum(row["b"] == "x" for row in rows) == pytest.approx(200, abs=40)


def test_whole_ranges_reach_both_ends_alike():
    drawn = [Range(1, 4, integer=True).at((i + 0.5) / 400) for i in range(400)]
    assert [drawn.count(n) for n in (1, 2, 3, 4)] == [100] * 4
    assert all(isinstance(n, int) for n in drawn)


def test_ranges_know_units():
    assert Range("8 Gbit/s", "16 Gbit/s").at(0.5) == "12 Gbit/s"
    wide = Range("1 us", "1 ms", log=True)
    assert [wide.at(share) for share in (0.0, 0.5, 1.0)] == ["1 us", "31.62 us", "1 ms"]
    assert Range(1e-6, 1e-4, log=True).at(0.5) == pytest.approx(1e-5)
    with pytest.raises(ddlsim.ConfigError, match="low is a quantity of time, but high of bandwidth"):
        Range("1 ms", "10 Gbit/s")
    with pytest.raises(ddlsim.ConfigError, match="'1,5 ms' is not a number"):
        Range("1,5 ms", "10 ms")


# ---------------------------------------------------------------- paths


def one(path, value, base=BASE):
    return changed(Loader(Digests()).base(base), {path: value})


def test_fields_of_parts_are_changed():
    base = BASE.with_(strategy=ddlsim.LocalSGD(2), training=ddlsim.Training(epochs=1, optimizer=ddlsim.Momentum(0.5)))
    assert one("batch_size", 8, base).batch_size == 8
    assert one("strategy.period", 4, base).strategy.period == 4
    assert one("training.rate", 0.3, base).training.rate == 0.3
    assert one("training.optimizer.beta", 0.8, base).training.optimizer.beta == 0.8
    assert one("jitter.cv", 0.4, base).jitter.cv == 0.4
    measured = base.with_(compute=ddlsim.Measured("10 ms", 32))
    assert one("compute.step_time", "20 ms", measured).compute.step_time == pytest.approx(0.02)


def test_all_links_of_a_kind_are_changed_and_no_others():
    base = ddlsim.Experiment("cloud-25g-16x8-v100", "resnet50")
    before = ddlsim.load_cluster(base.cluster)
    nic = np.array([kind == "nic" for kind in before.link_kind])
    after = one("cluster.nic.bandwidth", "100 Gbit/s", base).cluster
    assert set(after.link_bandwidth[nic]) == {12.5e9}
    assert np.array_equal(after.link_bandwidth[~nic], before.link_bandwidth[~nic])
    assert set(one("cluster.nic.latency", 1e-5, base).cluster.link_latency[nic]) == {1e-5}
    assert set(one("cluster.nvlink.efficiency", 0.5, base).cluster.link_efficiency[~nic]) == {0.5, 1.0}
    assert (before.details.flow_rate[nic] == 1.7e9).all()
    for rate, value in (("40 Gbit/s", 5e9), ("0 Gbit/s", 0.0)):
        details = one("cluster.nic.flow_rate", rate, base).cluster.details
        assert set(details.flow_rate[nic]) == {value}
        assert set(details.flow_rate[~nic]) == {0.0}


def test_machines_devices_and_prices_are_changed():
    assert one("cluster.speed", 2.0).cluster.speed[:8].tolist() == [2.0] * 8
    assert one("cluster.reduce_bandwidth", "4 GB/s").cluster.reduce_time[0] == pytest.approx(2.5e-10)
    assert one("cluster.price", "3.6 USD/h").cluster.host_price[0] == pytest.approx(0.001)
    device = one("device.memory_bandwidth", "1 TB/s").device
    assert (device.name, device.memory_bandwidth) == ("v100", 1e12)
    faster = one("device.peak_flops.fp32", "30 TFLOP/s").device.peak_flops
    assert faster == {**ddlsim.load_device("v100").peak_flops, "fp32": 3e13}


def test_what_holds_a_field_goes_before_the_field():
    inner = {"strategy.period": 6, "cluster.nic.latency": 0.0}
    made = changed(BASE, {**inner, "strategy": ddlsim.LocalSGD(2), "cluster": "office-1gbe"})
    assert made.strategy.period == 6
    assert made.cluster.name == "office-1gbe"
    assert made.cluster.link_latency.max() == 0.0


FLAPS = ddlsim.RandomFaults("1 min", "5 s", kind="link")
FAULTY = BASE.with_(faults=[FLAPS, ddlsim.Stop(0, "1 s", "2 s")], slowdowns=[ddlsim.Slowdown(0, 1.0, 2.0, 3.0)])


def test_a_field_of_one_of_several_faults_is_changed():
    """By its name, if one fault alone has it, else by the number of the fault."""
    made = changed(FAULTY, {"faults.mtbf": "5 min", "faults.1.duration": "9 s", "slowdowns.factor": 2.0})
    assert made.faults == (dataclasses.replace(FLAPS, mtbf="5 min"), ddlsim.Stop(0, "1 s", "9 s"))
    assert [slow.factor for slow in made.slowdowns] == [2.0]
    assert changed(FAULTY, {"faults": [FLAPS], "faults.0.kind": "slow", "faults.factor": 2.0}).faults[0].factor == 2.0
    background = BASE.with_(workers=2, background=[ddlsim.Job(BASE.with_(workers=2))])
    assert changed(background, {"background.experiment.batch_size": 7}).background[0].experiment.batch_size == 7


def test_random_faults_are_varied():
    slow = ddlsim.RandomFaults("1 min", "5 s", factor=2.0)
    base = BASE.with_(faults=[slow], steps=50, compute=ddlsim.Affine("1 s", 0.0))
    table = Study(base=base, vary={"faults.mtbf": ["20 s", "100 h"]}).run(jobs=1)
    assert table.frame["faults.mtbf"].tolist() == ["20 s", "100 h"]
    assert table.frame["throughput"].nunique() == 2


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "faults.duration",
            "faults.duration: 2 of the 2 items in faults have this field; select one item by its index, as in "
            "faults.0.",
        ),
        ("faults.mtbff", "faults.mtbff: unknown field 'mtbff'; did you mean 'mtbf'?"),
        ("faults.7.mtbf", "faults.7: unknown field '7'"),
        ("faults.0.mtbff", "faults.0.mtbff: unknown field 'mtbff'; did you mean 'mtbf'?"),
    ],
)
def test_fields_of_faults_that_cannot_be_told(path, message):
    with pytest.raises(ddlsim.ConfigError) as error:
        changed(FAULTY, {path: 1.0})
    assert message in str(error.value)


def test_values_are_checked_together_not_one_after_the_other():
    """TopK fits the base, but not the new strategy; with both changed it does not matter in which order."""
    base = BASE.with_(compression=ddlsim.TopK(0.1))
    assert changed(base, {"strategy": ddlsim.LocalSGD(2), "compression": None}).compression is None


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        ({"worker": [1]}, "vary: worker: unknown field 'worker'; did you mean 'workers'?"),
        ({"strategy.algoritm": ["ring"]}, "strategy.algoritm: unknown field 'algoritm'; did you mean 'algorithm'?"),
        ({"cluster.nci.bandwidth": ["1 Gbit/s"]}, "cluster.nci: unknown field 'nci'; did you mean 'nic'?"),
        ({"cluster.nic.bandwith": ["1 Gbit/s"]}, "'bandwith'; did you mean 'bandwidth'?"),
        (
            {"cluster.nic": ["1 Gbit/s"]},
            "cluster.nic: does not say which field of the links to change; use one of cluster.nic.bandwidth",
        ),
        (
            {"cluster.nic.flow_rate": ["1 Gbit/s"]},
            "cluster.nic.flow_rate: these links have no transport that uses connections; set one",
        ),
        ({"compute.step_time": ["1 ms"]}, "compute.step_time: compute = None has no fields"),
        ({"device.peak_flop.fp32": [1e12]}, "'peak_flop'; did you mean 'peak_flops'?"),
        ({"seed": [1, 2]}, "set seeds="),
        ({"workers": 8}, "must be a list of values"),
        ({"workers": []}, "is empty; add at least one value"),
        ({"workers": Range(1, 8)}, "design = 'grid' needs a list of values"),
    ],
    ids=["field", "part", "kind", "link", "whole-kind", "ideal", "none", "device", "seed", "scalar", "empty", "range"],
)
def test_paths_and_values_that_cannot_be_used(vary, message):
    with pytest.raises(ddlsim.ConfigError) as error:
        Study(BASE, vary)._rows  # noqa: B018
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"design": "gird"}, "did you mean 'grid'?"),
        ({"design": "random"}, "must be a positive integer with design"),
        ({"n_points": 3}, "has no effect with design = 'grid'"),
        (
            {"design": "list", "vary": {"workers": [1, 2], "steps": [1]}},
            r"the same number of values for every field, got workers: 2, steps: 1",
        ),
        ({"seeds": 0}, "seeds = 0: must be an integer from 1 to 100000"),
        ({"seeds": [1, 1]}, "list of distinct seeds"),
        ({"vary": {"workers": {2: 2}}}, r"vary\['workers'\]: the name 2 must be a non-empty string"),
        ({"vary": {"workers": {}}}, "is empty; add at least one value"),
        ({"vary": {"workers, steps": [(2, 3), 4]}}, "4 must be a list of 2 values, one per field"),
        ({"vary": {"workers, steps": [(2, 3)], "steps": [4]}}, "vary: the field 'steps' occurs twice"),
        ({"vary": {"workers, setps": [(2, 3)]}}, "did you mean 'steps'?"),
        ({"vary": {"workers, seed": [(2, 3)]}}, "set seeds="),
        ({"base": "cluster"}, "base = 'cluster': must be an Experiment"),
    ],
    ids=[
        "name",
        "n_points",
        "no-effect",
        "lengths",
        "seeds",
        "twice",
        "names",
        "empty",
        "number",
        "again",
        "path",
        "seed",
        "base",
    ],
)
def test_designs_that_cannot_be_used(fields, message):
    with pytest.raises(ddlsim.ConfigError, match=message):
        Study(**{"base": BASE, "vary": {"workers": [1]}, **fields})


# ---------------------------------------------------------------- points


def test_all_configurations_have_the_same_seeds():
    study = Study(BASE.with_(seed=5), VARY, seeds=3)
    assert [point.seed for point in study.points] == [5, 6, 7] * 12
    assert [point.experiment.seed for point in study.points] == [5, 6, 7] * 12
    assert len({point.key for point in study.points}) == 36


def test_a_path_may_lead_somewhere_in_some_configurations_only():
    vary = {"strategy": [ddlsim.AllReduce(), ddlsim.LocalSGD(2)], "strategy.period": [4, 8]}
    frame = Study(BASE, vary).run(jobs=1).frame
    assert frame["status"].tolist() == ["skipped", "skipped", "done", "done"]
    assert frame["error"][0].startswith("strategy.period: unknown field 'period'")


def test_what_does_not_fit_is_skipped_with_the_reason():
    strategies = [ddlsim.AllReduce(), ddlsim.DPSGD()]
    vary = {"workers": [4, 9], "strategy": strategies, "fabric": [None, ddlsim.Fabric("ring", cost="nccl")]}
    table = Study(BASE, vary).run(jobs=1)
    assert table.frame["status"].tolist() == ["done", "done", "done", "skipped"] + ["skipped"] * 4
    assert "fabric has no effect with D-PSGD" in table.frame["error"][3]
    assert "workers = 9: cluster 'eight' has only 8 devices" in table.frame["error"][4]
    assert "skipped 3: workers = 9" in str(table)


def test_a_study_in_which_nothing_fits_is_an_error():
    with pytest.raises(
        ddlsim.ConfigError,
        match="no configuration of the study is valid; the first one failed with: Experiment",
    ):
        Study(BASE, {"batch_size": [0, -1]}).run(jobs=1)


def test_a_base_may_lack_what_is_varied():
    study = Study(BASE.with_(cluster="nowhere"), {"cluster": ["office-1gbe", BASE.cluster]})
    assert [point.experiment.cluster.name for point in study.points] == ["office-1gbe", "eight"]


def test_labels_tell_values_apart():
    strategies = [ddlsim.AllReduce(), ddlsim.AllReduce(rank_order="given"), ddlsim.LocalSGD(2)]
    labels = labels_of([*strategies, None, 8, "x"])
    assert len(set(labels)) == 6
    assert labels[0] == "AllReduce"
    assert labels[1] == "AllReduce(rank_order=given)"
    assert labels[2:] == ["local SGD (2 steps, default)", "none", 8, "x"]


def test_labels_leave_out_what_is_as_usual():
    assert labels_of([ddlsim.PowerSGD(4)]) == ["PowerSGD(4)"]
    assert labels_of([ddlsim.load_stack("megatron"), None]) == ["megatron", "none"]
    assert labels_of([(), (ddlsim.Stop(3, 0.0, 1.0),)]) == ["none", "Stop(3, 0.0, 1.0)"]


def test_values_may_have_names():
    """The table shows the names; what is simulated is the same as without."""
    values = [None, ddlsim.TopK(0.01), ddlsim.Compression(ddlsim.TopK(0.01), cost=ddlsim.CodecCost(encode=1e-9))]
    names = ["dense", "sparse", "sparse, slowly"]
    named = Study(BASE, {"compression": dict(zip(names, values, strict=True)), "workers": [2, 4]})
    plain = Study(BASE, {"compression": values, "workers": [2, 4]})
    assert [point.key for point in named.points] == [point.key for point in plain.points]
    assert [point.settings["compression"] for point in named.points] == [name for name in names for _ in (2, 4)]
    together = Study(BASE, {"workers": [2, 4], "compression": {"a": None, "b": ddlsim.FP16()}}, design="list")
    assert [tuple(point.settings.values()) for point in together.points] == [(2, "a"), (4, "b")]


def test_fields_may_change_together():
    """One column in the table, one setting each in the experiment."""
    study = Study(BASE, {"model, batch_size": [("lenet5", 8), ("alexnet", 16)], "workers": [2, 4]})
    assert [(p.experiment.model.name, p.experiment.batch_size, p.experiment.workers) for p in study.points] == [
        ("lenet5", 8, 2), ("lenet5", 8, 4), ("alexnet", 16, 2), ("alexnet", 16, 4)
    ]  # fmt: skip
    assert [point.settings["model, batch_size"] for point in study.points[1:3]] == ["lenet5, 8", "alexnet, 16"]
    named = Study(BASE, {"model,batch_size": {"small": ("lenet5", 8)}})
    assert named.points[0].settings == {"model,batch_size": "small"}
    assert named.points[0].experiment.batch_size == 8


# ---------------------------------------------------------------- what a point is


def key(**changes):
    digests = Digests()
    return text_of(Loader(digests).loaded(BASE.with_(**changes)), digests)


def test_equal_experiments_have_equal_texts_wherever_they_come_from():
    assert key(model="lenet5") == key(model=ddlsim.load_model("lenet5"))
    assert key(strategy=ddlsim.AllReduce()) == key(strategy=ddlsim.AllReduce("default"))
    assert key(cluster=dataclasses.replace(BASE.cluster, title="another", notes=("a note",))) == key()
    assert key(training=ddlsim.Training("digits", epochs=1)) == key(
        training=ddlsim.Training(ddlsim.load_digits(), epochs=1)
    )


def test_what_is_simulated_otherwise_has_another_text():
    def halved(n):
        return n // 2

    data = ddlsim.load_digits()
    other = dataclasses.replace(data, x=data.x + np.float32(1e-6))
    texts = [
        key(), key(seed=1), key(batch_size=16), key(model="alexnet"), key(jitter=ddlsim.Lognormal(0.2)),
        key(cluster=BASE.cluster.scaled("nic", bandwidth=1.0 + 1e-12)), key(strategy=ddlsim.AllReduce("binomial_tree")),
        key(strategy=ddlsim.AllReduce(lambda n: n)), key(strategy=ddlsim.AllReduce(lambda n: n + 1)),
        key(strategy=ddlsim.AllReduce(lambda n: halved(n))), key(training=ddlsim.Training(data, epochs=1)),
        key(training=ddlsim.Training(other, epochs=1)), key(compression=ddlsim.TopK(0.1)),
    ]  # fmt: skip
    assert len(set(texts)) == len(texts)


# ---------------------------------------------------------------- files

FILE = """
seeds = 2
[base]
cluster = "office-1gbe"
model = "lenet5"
batch_size = 32
steps = 2
[vary]
workers = [2, 4]
strategy = [{ type = "all-reduce", algorithm = "binomial_tree" }, { type = "local-sgd", period = 4 }]
compression = ["none", { type = "error-feedback", inner = { type = "top-k", density = 0.01 } }]
"cluster.nic.bandwidth" = ["1 Gbit/s", "10 Gbit/s"]
"""


def test_a_file_says_the_same_as_python(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(FILE)
    base = ddlsim.Experiment("office-1gbe", "lenet5", batch_size=32, steps=2)
    vary = {
        "workers": [2, 4],
        "strategy": [ddlsim.AllReduce("binomial_tree"), ddlsim.LocalSGD(4)],
        "compression": [None, ddlsim.ErrorFeedback(ddlsim.TopK(0.01))],
        "cluster.nic.bandwidth": ["1 Gbit/s", "10 Gbit/s"],
    }
    read, written = load_study(path), Study(base, vary, seeds=2)
    assert [(p.key, p.settings) for p in read.points] == [(p.key, p.settings) for p in written.points]
    path.write_text(FILE.replace("workers = [2, 4]", '"workers, model" = [[2, "lenet5"], [4, "alexnet"]]'))
    together = {"workers, model": [(2, "lenet5"), (4, "alexnet")], **{k: vary[k] for k in vary if k != "workers"}}
    assert [p.key for p in load_study(path).points] == [p.key for p in Study(base, together, seeds=2).points]
    named = '{ dense = "none", sparse = { type = "error-feedback", inner = { type = "top-k", density = 0.01 } } }'
    path.write_text(re.sub("compression = .*", f"compression = {named}", FILE))
    vary["compression"] = {"dense": None, "sparse": ddlsim.ErrorFeedback(ddlsim.TopK(0.01))}
    read, written = load_study(path), Study(base, vary, seeds=2)
    assert [(p.key, p.settings) for p in read.points] == [(p.key, p.settings) for p in written.points]


def test_a_file_may_name_its_base_and_sample(tmp_path):
    (tmp_path / "base.toml").write_text('cluster = "office-1gbe"\nmodel = "lenet5"\n')
    (tmp_path / "study.toml").write_text(
        'base = "base.toml"\ndesign = "latin-hypercube"\nn_points = 5\ndesign_seed = 1\nseeds = [3]\n[vary]\n'
        "accumulation = { low = 1, high = 9, integer = true }\n"
        '"cluster.nic.latency" = { low = "1 us", high = "1 ms", log = true }\n'
    )
    points = load_study(tmp_path / "study.toml").points
    assert len(points) == 5
    assert {point.seed for point in points} == {3}
    assert {point.experiment.accumulation for point in points} <= set(range(1, 10))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds = 2", "seds = 2", "unknown key 'seds'; did you mean 'seeds'?"),
        ("workers =", "worker =", "did you mean 'workers'?"),
        ('"binomial_tree"', '"mine:tree"', "vary.strategy[0].algorithm = 'mine:tree' would import code"),
        ("density", "dense", "did you mean 'density'?"),
        ("steps = 2", "stesp = 2", "base: unknown key 'stesp'; did you mean 'steps'?"),
        ("[2, 4]", "2", "vary.workers = 2: must be a list of values"),
        ("workers = [2, 4]", "workers = { low = 2 }", "'high' is missing"),
        ("workers = [2, 4]", "workers = [{ low = 2 }]", "a table is not allowed here"),
    ],
    ids=["key", "path", "code", "part", "base", "scalar", "range", "table"],
)
def test_files_that_cannot_be_used(tmp_path, old, new, message):
    path = tmp_path / "study.toml"
    path.write_text(FILE.replace(old, new))
    with pytest.raises(ddlsim.ConfigError) as error:
        load_study(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_grids_have_a_limit():
    words = r"design = 'grid' has 10 x 10 x .* points, above the limit of 100000; use design"
    with pytest.raises(ddlsim.ConfigError, match=words):
        rows_of({f"a{i}": [1, 2] * 5 for i in range(12)}, "grid", None, seed=0)


@pytest.mark.parametrize("more", [{"seeds": 10**12}, {"design": "random", "n_points": 10**12}], ids=["seeds", "points"])
def test_numbers_of_points_have_a_limit(more):
    with pytest.raises(ddlsim.ConfigError, match=" = 1000000000000: must be an integer from 1 to 100000"):
        ddlsim.Study(BASE, {"workers": [2]}, **more)
