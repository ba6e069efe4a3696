"""Experiments as text: the file and the program that say a run make the same run when they are read back."""

import dataclasses
import json
import sys
import tomllib
from pathlib import Path

import pytest
from bundled_strategies import BUNDLED, VARIANTS
from draws import seeds
from typer.testing import CliRunner
from worlds_generator import world

import ddlsim
from ddlsim.bundled import relative_name
from ddlsim.cli import app
from ddlsim.cluster import star
from ddlsim.errors import ConfigError
from ddlsim.run.files import SCHEMA
from ddlsim.schema import Source


def toml_of(experiment):
    return experiment.to_toml()


def python_of(experiment):
    return SCHEMA.expression(experiment, "")


def _in_words(seed):
    """Return a random experiment, on a cluster and with models that have names."""
    experiment = world(seed).experiment
    changes = {"cluster": "office-1gbe"}
    for field, name in (("model", "lenet5"), ("time_model", "resnet18")):
        if isinstance(getattr(experiment, field), ddlsim.Model):
            changes[field] = name
    return dataclasses.replace(experiment, **changes)


def test_sampled_faults_survive_the_way_through_text(tmp_path):
    faults = [
        ddlsim.RandomFaults("2 ms", "1 ms", kind=kind, factor=2.0 if kind == "slow" else None)
        for kind in ("slow", "stop", "link")
    ]
    result = ddlsim.simulate("office-1gbe", "digits-cnn", batch_size=8, workers=4, steps=20, faults=faults)
    experiment = result.experiment.with_(faults=result.sampled_faults)
    assert {type(fault) for fault in experiment.faults} == {ddlsim.Slowdown, ddlsim.Stop, ddlsim.LinkFault}
    experiment.save(tmp_path / "e.toml")
    assert ddlsim.load_experiment(tmp_path / "e.toml").faults == experiment.faults


@pytest.mark.parametrize("seed", seeds(4, 20))
def test_random_experiments_survive_the_way_through_text(seed, tmp_path):
    experiment = _in_words(seed)
    text = toml_of(experiment)
    (tmp_path / "run.toml").write_text(text)
    assert toml_of(ddlsim.load_experiment(tmp_path / "run.toml")) == text
    program = python_of(experiment)
    again = eval(program, {"ddlsim": ddlsim})
    assert python_of(again) == program
    assert toml_of(again) == text


@pytest.mark.parametrize("seed", seeds(8, 20))
def test_structure_undoes_unstructure(seed):
    experiment = _in_words(seed)
    for full in (False, True):
        table = SCHEMA.table(experiment, full=full)
        again = SCHEMA.structure(ddlsim.Experiment, json.loads(json.dumps(table)), "here")
        assert SCHEMA.table(again, full=full) == table
        assert SCHEMA.structure(ddlsim.Experiment, SCHEMA.table(again, full=full), "here") == again


@pytest.mark.parametrize("name", [*BUNDLED, *VARIANTS])
def test_every_strategy_survives_the_way_through_text(name, tmp_path):
    one = (BUNDLED | VARIANTS)[name]
    experiment = ddlsim.Experiment("office-1gbe", "lenet5", one.strategy, one.batch_size)
    experiment.save(tmp_path / "run.toml")
    again = ddlsim.load_experiment(tmp_path / "run.toml")
    assert again.strategy.label == one.strategy.label
    assert toml_of(again) == toml_of(experiment)


def test_text_leaves_out_defaults_and_says_quantities_with_units():
    experiment = ddlsim.Experiment(
        "office-1gbe", "resnet18", ddlsim.AllReduce("ring", overlap=ddlsim.DdpBuckets(cap=1e6)), workers=4,
        compute=ddlsim.Measured(0.4, 32), max_time=3600.0,
    )  # fmt: skip
    assert toml_of(experiment) == (
        'cluster = "office-1gbe"\nmodel = "resnet18"\nworkers = 4\nmax_time = "1 h"\n\n[strategy]\n'
        'type = "all-reduce"\nalgorithm = "ring"\noverlap = { type = "ddp", cap = "1 MB" }\n\n[compute]\n'
        'type = "measured"\nstep_time = "0.4 s"\nbatch_size = 32\n'
    )
    assert experiment.to_python().startswith("import ddlsim\n\nresult = ddlsim.simulate(\n    cluster='office-1gbe',\n")


@pytest.mark.parametrize("name", ["run.toml", "run.py"])
def test_save_writes_a_file_or_a_program(name, tmp_path):
    experiment = ddlsim.Experiment("office-1gbe", "lenet5", workers=2, steps=1)
    experiment.save(tmp_path / name)
    text = (tmp_path / name).read_text()
    if name.endswith("toml"):
        assert ddlsim.load_experiment(tmp_path / name) == experiment
    else:
        program = {}
        exec(text.replace("print(result)", ""), program)
        assert program["result"].step_time == ddlsim.simulate(experiment).step_time


def test_a_saved_file_names_other_files_from_its_own_folder(tmp_path, monkeypatch):
    """Loaded from any working directory, it means the same files, and no others of the same names beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "images" / "a").mkdir(parents=True)
    (tmp_path / "images" / "racks").write_text("")
    text = 'title = "x"\ninput = [1, 8, 8]\nlayers = [{ type = "flatten" }, { type = "dense", units = "$n" }]\n'
    (tmp_path / "in" / "model.toml").write_text(text + "[parameters]\nn = 3\n")
    (tmp_path / "out" / "model.toml").write_text(text + "[parameters]\nn = 300\n")  # which is not meant
    ddlsim.load_device("v100").save("in/v100-lab.toml")
    (tmp_path / "in" / "cluster.toml").write_text(
        '[generator]\ntype = "star"\nn_hosts = 2\nbandwidth = "1 GB/s"\nlatency = "1 us"\n[host]\ndevice = "v100"\n'
    )
    (tmp_path / "in" / "run.toml").write_text('cluster = "cluster.toml"\nmodel = "model.toml+n=7"\n')
    loaded = ddlsim.load_experiment("in/run.toml").with_(device="in/v100-lab.toml")
    step_time = ddlsim.simulate(loaded).step_time
    loaded.save("out/run.toml")
    table = tomllib.loads((tmp_path / "out" / "run.toml").read_text())
    assert {key: table[key] for key in ("cluster", "model", "device")} == {
        "cluster": "../in/cluster.toml", "model": "../in/model.toml+n=7", "device": "../in/v100-lab.toml",
    }  # fmt: skip
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert ddlsim.simulate(ddlsim.load_experiment("../out/run.toml")).step_time == step_time
    monkeypatch.chdir(tmp_path)
    result = ddlsim.simulate("in/cluster.toml", "in/model.toml")
    monkeypatch.chdir(tmp_path / "other")  # paths of loaded objects start from where they were loaded
    result.experiment.save("again.toml")
    monkeypatch.chdir(tmp_path)
    assert ddlsim.simulate(ddlsim.load_experiment("other/again.toml")).step_time == result.step_time
    for name, written in (
        ("images/a", "../images/a"),  # a folder
        ("images/racks", "../images/racks"),  # a file without suffix, such as a cluster of another tool
        ("office-1gbe+n_hosts=4", "office-1gbe+n_hosts=4"),
        ("nowhere.toml", "nowhere.toml"),
        (str(tmp_path / "in" / "model.toml"), str(tmp_path / "in" / "model.toml")),
    ):
        assert relative_name(name, Path("out")) == written
    assert Source(Path("images")).located(relative_name("images/a", Path("images"))) == Path("images/a")


def test_only_toml_and_python_are_written(tmp_path):
    for name in ("run.json", "run"):
        with pytest.raises(ConfigError, match=r"use \.toml or \.py"):
            ddlsim.Experiment("office-1gbe").save(tmp_path / name)


def test_what_text_cannot_say_is_refused():
    cluster = ddlsim.load_cluster(star(2, bandwidth="1 Gbit/s", latency="5 us"))
    for write in (toml_of, python_of):
        with pytest.raises(ConfigError, match=r"cluster: is an object without a text form; save it"):
            write(ddlsim.Experiment(cluster))

    class Slow(ddlsim.Lognormal):
        """A distribution of one's own."""

    with pytest.raises(ConfigError, match=r"jitter = .*: cannot be written to a file"):
        toml_of(ddlsim.Experiment("office-1gbe", jitter=Slow(0.1)))


def test_the_command_line_writes_what_it_runs(tmp_path):
    path = tmp_path / "run.toml"
    arguments = ["run", "office-1gbe", "-m", "lenet5", "-n", "2", "--steps", "1", "-s", "local-sgd+period=2"]
    outcome = CliRunner().invoke(app, [*arguments, "--write", str(path)])
    assert outcome.exit_code == 0, outcome.output
    assert ddlsim.load_experiment(path).strategy == ddlsim.LocalSGD(period=2)


@pytest.mark.parametrize("cluster", ["office-1gbe", "cloud-25g-16x8-v100+spread=0.2", "mine.toml"])
def test_the_experiment_of_a_result_names_what_it_was_loaded_from(cluster, tmp_path, monkeypatch):
    """As the experiment that was given, also after changes of other fields; what is made from it has no name."""
    monkeypatch.chdir(tmp_path)
    ddlsim.load_cluster("office-1gbe").save("mine.toml")
    for given in (cluster, ddlsim.load_cluster(cluster)):
        result = ddlsim.simulate(given, "lenet5", ddlsim.AllReduce(), workers=2, steps=1, seed=3)
        result.experiment.with_(steps=2).save("folder.toml")
        again = ddlsim.load_experiment("folder.toml")
        assert (str(again.cluster), again.model, again.steps) == (cluster, "lenet5", 2)
        assert ddlsim.simulate(again.with_(steps=1)).step_time == result.step_time
        assert f"cluster={cluster!r}" in result.experiment.to_python()
    with pytest.raises(ConfigError, match="cluster: is an object"):
        result.experiment.with_(cluster=dataclasses.replace(result.cluster)).to_toml()


def test_the_experiment_of_a_result_names_the_model_of_another_tool(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = json.dumps({"model_type": "llama", "vocab_size": 100, **sizes})
    Path("config.json").write_text(text, encoding="utf-8")
    result = ddlsim.simulate("office-1gbe", "config.json+seq=16", ddlsim.AllReduce(), workers=2, steps=1)
    result.experiment.save("again.toml")
    again = ddlsim.load_experiment("again.toml")
    assert str(again.model) == "config.json+seq=16"
    assert ddlsim.simulate(again).step_time == result.step_time


@pytest.mark.skipif(sys.platform == "win32", reason="folders in use cannot be removed")
def test_the_working_directory_may_have_been_removed(tmp_path, monkeypatch):
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    result = ddlsim.simulate("office-1gbe", "lenet5", ddlsim.AllReduce(), workers=2, steps=1)
    assert 'cluster = "office-1gbe"' in result.experiment.to_toml()
