"""Ctrl-C leaves what is known so far, at once; mistakes show before a long simulation, not after."""

import json
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import ddlsim
from ddlsim import cli
from ddlsim.errors import DdlsimError
from ddlsim.run.simulate import run
from ddlsim.runtime.context import StopRule
from ddlsim.runtime.loop import Loop

RUN = ["run", "office-1gbe", "-m", "lenet5", "-n", "4", "--steps", "8"]


@pytest.fixture
def interrupted_at(monkeypatch):
    """Press Ctrl-C while the given update is being applied; return the simulations started since."""

    def press(n_updates):
        started = []
        updated, loop_run = StopRule.updated, Loop.run

        def interrupt(stop, n_samples):
            updated(stop, n_samples)
            if len(started) == 1 and len(stop.recorder.updates) == n_updates:
                raise KeyboardInterrupt

        def count(loop, *arguments):
            started.append(loop)
            loop_run(loop, *arguments)

        monkeypatch.setattr(StopRule, "updated", interrupt)
        monkeypatch.setattr(Loop, "run", count)
        return started

    return press


def test_an_interrupted_run_prints_what_it_has_and_simulates_no_more(interrupted_at, tmp_path):
    started = interrupted_at(5)
    printed = CliRunner().invoke(cli.app, [*RUN, "--trace", str(tmp_path / "t.json")])
    assert printed.exit_code == 130
    assert printed.stdout.splitlines()[0].split() == ["interrupted", "after", "5", "updates"]
    assert "not computed" in printed.stdout
    assert len(started) == 1
    assert not list(tmp_path.iterdir())


def test_an_interrupted_run_as_json(interrupted_at):
    interrupted_at(5)
    data = json.loads(CliRunner().invoke(cli.app, [*RUN, "--json"]).stdout)
    assert data["interrupted"] is True
    assert data["bottleneck"] == []
    assert data["throughput"] > 0.0


def test_an_interrupted_result_has_no_bottleneck(interrupted_at):
    interrupted_at(4)
    result = ddlsim.simulate("office-1gbe", "lenet5", batch_size=8, workers=2)
    assert result.interrupted
    assert len(result.recorder.updates) == 4
    with pytest.raises(DdlsimError, match="interrupted"):
        _ = result.bottleneck


def test_before_the_first_update_there_is_nothing_to_show(monkeypatch, capsys):
    def interrupt(loop, *arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(Loop, "run", interrupt)
    monkeypatch.setattr(sys, "argv", ["ddlsim", *RUN])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_an_interrupt_during_the_sensitivities_leaves_the_run(monkeypatch):
    finished = run(ddlsim.Experiment("office-1gbe", "lenet5", workers=4, steps=8))
    loop_run, n_runs = Loop.run, []

    def interrupt(loop, *arguments):
        n_runs.append(loop)
        if len(n_runs) == 3:  # the run, the reference, the first variant
            raise KeyboardInterrupt
        loop_run(loop, *arguments)

    monkeypatch.setattr(Loop, "run", interrupt)
    printed = CliRunner().invoke(cli.app, RUN)
    assert printed.exit_code == 130
    assert len(n_runs) == 3
    shown = next(line for line in printed.stdout.splitlines() if line.startswith("throughput"))
    assert shown in str(finished)
    assert "not computed" in printed.stdout


def test_a_variant_cut_short_is_not_compared(monkeypatch):
    result = ddlsim.simulate("office-1gbe", "lenet5", batch_size=8, workers=2)
    updated = StopRule.updated

    def interrupt(stop, n_samples):
        updated(stop, n_samples)
        if len(stop.recorder.updates) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(StopRule, "updated", interrupt)
    with pytest.raises(KeyboardInterrupt):
        result.sensitivities()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*RUN, "--trace", "no/such/folder/t.json"], ["no/such/folder/t.json", "does not exist", "create it"]),
        ([*RUN, "--write", "w.toml", "--timeline", "t.abc"], ["t.abc: unknown image format", ".png, .pdf"]),
        (
            ["scaling", "office-1gbe", "-n", "1,2", "--plot", "none/s.png"],
            ["none/s.png", "folder 'none' does not exist"],
        ),
        (
            [*RUN, "--timeline", "a.png", "--plot-cluster", "./a.png"],
            ["--plot-cluster a.png: would overwrite the output of --timeline; choose another path"],
        ),
        (["validate", "typo.toml", "-c", "dgx1-v100", "--table", "typo.toml"], ["would overwrite the input typo.toml"]),
        (["calibrate", "m.csv", "-c", "typo.toml", "--out", "typo.toml"], ["would overwrite the input typo.toml"]),
        (["import", "typo.toml", "--out", "typo.toml"], ["would overwrite the input typo.toml"]),
        (["run", "missing.toml"], ["missing.toml: no such file", "ddlsim topologies"]),
        (["run", "typo.toml"], ["typo.toml", "unknown key 'cluser'; did you mean 'cluster'?"]),
        (["run", "seconds.toml"], ["seconds.toml: max_time = 5: must be a string with a unit like '8 h'"]),
    ],
)
def test_mistakes_show_before_anything_is_simulated(arguments, words, monkeypatch, tmp_path, capsys):
    def never(loop, *arguments):
        raise AssertionError("simulated")

    monkeypatch.setattr(Loop, "run", never)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "typo.toml").write_text('cluser = "dgx1-v100"\n')
    (tmp_path / "seconds.toml").write_text('cluster = "dgx1-v100"\nmax_time = 5\n')
    monkeypatch.setattr(sys, "argv", ["ddlsim", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert all(word in message for word in words), message
    assert not (tmp_path / "w.toml").exists()


#: commands with valid arguments; their inputs are not read if an output cannot be written
WRITERS = {
    "run": ["train.toml"],
    "scaling": ["office-1gbe", "-m", "lenet5", "-n", "1"],
    "sweep": ["study.toml"],
    "report": ["study.sqlite"],
    "recommend": ["office-1gbe", "-m", "lenet5"],
    "validate": ["runs.csv", "-c", "office-1gbe"],
    "calibrate": ["runs.csv", "-c", "office-1gbe"],
    "import": ["topology.xml"],
    "lab": ["office-1gbe"],
    "show topology": ["office-1gbe"],
    "show plan": ["step.et"],
}


def _outputs():
    """Yield each command of the program with each of its options that name an output."""
    commands = {"": get_command(cli.app)}
    while commands:
        name, command = commands.popitem()
        commands |= {f"{name} {each}".strip(): sub for each, sub in getattr(command, "commands", {}).items()}
        for option in command.params:
            written = (getattr(option, "help", "") or "").startswith(("Write", "Plot", "Save", "File that stores"))
            if written and not getattr(option, "is_flag", False):
                yield pytest.param(name, option.opts[0], option.help.startswith("Plot"), id=f"{name} {option.opts[0]}")


@pytest.mark.parametrize(("command", "option", "picture"), list(_outputs()))
def test_outputs_are_checked_before_any_work(command, option, picture, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    training = ddlsim.Training("digits", updates=2)
    ddlsim.Experiment("office-1gbe", "digits-cnn", workers=2, training=training).save(tmp_path / "train.toml")
    paths = {"none/file.png": "folder 'none' does not exist"}
    paths |= {"file.abc": "unknown image format"} if picture else {}
    for path, words in paths.items():
        monkeypatch.setattr(sys, "argv", ["ddlsim", *command.split(), *WRITERS[command], option, path])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        assert (exit_.value.code, out, err.count("\n")) == (2, "", 1)
        assert words in err or "cannot write '.png' files" in err


def test_a_picture_that_cannot_be_written_does_not_lose_the_other_outputs(monkeypatch, tmp_path, capsys):
    def fail(result, path):
        raise OSError(28, "No space left on device")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ddlsim.Result, "plot_timeline", fail)
    arguments = ["--timeline", "a.png", "--plot-cluster", "b.png", "--no-bottleneck"]
    monkeypatch.setattr(sys, "argv", ["ddlsim", *RUN, *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    assert "a.png: cannot be written" in capsys.readouterr().err
    assert (tmp_path / "b.png").exists()
