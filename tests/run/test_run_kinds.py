"""What the reader is told where workers have devices of several kinds, and where a file is of another kind."""

from collections.abc import Callable
from pathlib import Path

import pytest

import ddlsim
from ddlsim.data import from_arrays
from ddlsim.planner.decide import load_question
from ddlsim.study import load_study

MEASURED = ddlsim.Measured("100 ms", 8)
NOTE = "the given compute time applies to k80 and m60 and p100 alike; set speed=[...] if they differ"


def test_every_kind_of_device_has_its_compute_time_in_the_summary() -> None:
    text = str(ddlsim.simulate("lab-heterogeneous", "resnet18", batch_size=8, steps=1, warmup=0))
    about = text[text.index("compute time") :].splitlines()
    assert [line[13:].split(":")[0].strip() for line in about[:3]] == ["p100", "k80", "m60"]


@pytest.mark.parametrize(
    ("more", "noted"),
    [
        pytest.param({"compute": MEASURED}, True, id="one time"),
        pytest.param({"compute": MEASURED, "speed": [1.0] * 11}, False, id="speeds"),
        pytest.param({"compute": MEASURED, "device": "p100"}, False, id="one device"),
        pytest.param({}, False, id="by device"),
    ],
)
def test_one_compute_time_for_several_devices_is_noted(more: dict[str, object], noted: bool) -> None:
    base = ddlsim.Experiment("lab-heterogeneous", "resnet18", batch_size=8, steps=1, warmup=0)
    assert (NOTE in ddlsim.simulate(base.with_(**more)).notes) == noted


EXPERIMENT, STUDY = 'cluster = "office-1gbe"\nseed = 1', "[vary]"
JOBS, MODEL, CLUSTER = "cluster = 'office-1gbe'\njobs = []", "layers = []", "[generator]"


@pytest.mark.parametrize(
    ("load", "text", "message"),
    [
        (ddlsim.load_experiment, MODEL, r"x\.toml: describes a model \(key 'layers'\); use ddlsim run CLUSTER --model"),
        (ddlsim.load_experiment, STUDY, r"describes a study \(key 'vary'\); run it with ddlsim sweep FILE"),
        (ddlsim.load_experiment, JOBS, r"describes several jobs \(key 'jobs'\); run them with ddlsim run FILE"),
        (load_study, EXPERIMENT, r"describes an experiment \(key 'cluster'\); run it with ddlsim run FILE"),
        (load_study, JOBS, "describes several jobs"),
        (ddlsim.load_cluster, EXPERIMENT, r"x\.toml: describes an experiment \(key 'cluster'\)"),
        (ddlsim.load_cluster, STUDY, "describes a study"),
        (ddlsim.load_model, EXPERIMENT, "describes an experiment"),
        (ddlsim.load_model, CLUSTER, r"describes a cluster \(key 'generator'\); use ddlsim run FILE"),
        (ddlsim.load_device, MODEL, "describes a model"),
        (load_question, EXPERIMENT, "describes an experiment"),
        (ddlsim.load_jobs, STUDY, "describes a study"),
    ],
)
def test_a_file_of_another_kind_is_named(
    load: Callable[[Path], object], text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(ddlsim.ConfigError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('strategy = "fsdp+stage=2"', r'strategy = .*: must be a table; write strategy = { type = "fsdp", stage = 2 }'),
        ('compression = "bf16"', r'write compression = { type = "bf16" }'),
        ('strategy = "fsdb"', "must be a strategy such as"),
    ],
)
def test_the_name_of_a_type_is_no_table(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(f'cluster = "office-1gbe"\n{text}\n')
    with pytest.raises(ddlsim.ConfigError, match=message):
        ddlsim.load_experiment(path)


def test_large_parts_show_themselves_in_a_line() -> None:
    assert repr(ddlsim.load_model("lenet5")) == "<Model 'lenet5': 61,706 parameters, 12 layers>"
    data = from_arrays([[1.0, 2.0]] * 3, [0, 1, 1], "pairs")
    assert repr(data) == "<DataSet 'pairs': 3 samples of 2, 2 classes>"


def test_a_note_says_whose_throughput_it_is() -> None:
    """One worker computes five times as fast as the other, and does not wait for it."""
    base = ddlsim.Experiment(
        "office-1gbe", "lenet5", ddlsim.AsyncParameterServer(), batch_size=8, workers=2, compute=MEASURED, steps=18
    )
    (note,) = ddlsim.simulate(base.with_(speed=[1.0, 0.2])).notes
    assert note.startswith("worker 0 made 33 steps while worker 1 made 6: throughput")
    (note,) = ddlsim.simulate(base.with_(speed=[0.1, 1.0], steps=4)).notes
    assert note.startswith("worker 1 made 10 steps while worker 0 made 1 (take more steps): throughput")
    assert not ddlsim.simulate(base.with_(speed=[1.0, 0.7])).notes
    assert not ddlsim.simulate(base.with_(speed=[1.0, 0.2], strategy=ddlsim.AllReduce())).notes


def test_a_table_shows_itself_in_a_line() -> None:
    base = ddlsim.Experiment("office-1gbe", "lenet5", steps=1)
    table = ddlsim.Study(base=base, vary={"workers": [2, 3]}).run(jobs=1)
    assert repr(table) == "<Table of 2 points (2 done) over workers>"
