"""What the form says becomes an experiment, what a screen exports is that experiment, errors are one line."""

import contextlib
import io
import re
import runpy

import pytest

import ddlsim
from ddlsim.run.files import COMPRESSORS, STRATEGIES
from ddlsim.run.metrics import METRICS

pytest.importorskip("panel")

from ddlsim.explore import explore
from ddlsim.explore.app import PLACEHOLDER, _widget, settings_of
from ddlsim.explore.components import files_of
from ddlsim.explore.screens.run import described
from ddlsim.explore.screens.what_if import differences, files
from ddlsim.explore.setup import FIELDS, Setup


def test_the_form_begins_with_a_run_of_its_defaults():
    assert Setup().experiment() == ddlsim.Experiment("cloud-25g-16x8-v100")


QUICK = ("all-reduce", "fsdp", "k-sync")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in sorted(STRATEGIES)]
)
def test_every_strategy_can_be_chosen_and_exported(name, tmp_path):
    setup = Setup()
    setup.choose_strategy(name)
    experiment = setup.experiment()
    assert type(experiment.strategy) is STRATEGIES[name]
    toml, program = files_of(experiment)
    path = tmp_path / "run.toml"
    path.write_text(toml.text)
    assert ddlsim.load_experiment(path) == experiment
    compile(program.text, "run.py", "exec")


@pytest.mark.parametrize("name", sorted(COMPRESSORS))
def test_every_compressor_can_be_chosen(name):
    setup = Setup()
    setup.choose_compression(name)
    compression = setup.experiment().compression
    assert compression is None if name == "none" else type(compression.compressor) is COMPRESSORS[name]


def test_all_fields_reach_the_experiment():
    setup = Setup(cluster=" office-1gbe+n_hosts=4 ", model="lenet5", workers=3, batch_size=8, accumulation=2, seed=7)
    setup.param.update(jitter=0.1, steps=4, precision="fp16", strategy="local-sgd", settings={"period": 2})
    setup.choose_compression("top-k")
    assert setup.experiment() == ddlsim.Experiment(
        "office-1gbe+n_hosts=4", "lenet5", ddlsim.LocalSGD(period=2), 8, 3, accumulation=2, seed=7, steps=4,
        precision="fp16", jitter=ddlsim.Lognormal(0.1), compression=ddlsim.TopK(0.01),
    )  # fmt: skip


def test_what_the_form_leaves_open_is_left_to_the_run():
    setup = Setup(cluster="dgx-h100-pod", model="llama-3-8b")
    setup.choose_strategy("fsdp")
    assert setup.experiment() == ddlsim.Experiment("dgx-h100-pod", "llama-3-8b", ddlsim.FSDP())
    setup.param.update(stack="megatron", precision="mxfp8", gradient_dtype="fp32")
    expected = ddlsim.Experiment(
        "dgx-h100-pod", "llama-3-8b", ddlsim.FSDP(), stack="megatron", precision="mxfp8", gradient_dtype="fp32"
    )
    assert setup.experiment() == expected


def test_other_fields_are_lines_of_an_experiment_file(tmp_path):
    setup = Setup(others=PLACEHOLDER)  # what the form shows as an example
    assert setup.experiment() == ddlsim.Experiment(
        setup.cluster, max_time="720 h", failures=ddlsim.Failures("5000 h"),
        checkpoints=ddlsim.Checkpoints("1 h", to="peers"),
    )  # fmt: skip
    fault = 'type = "stop", ranks = [3], start = "1 s", duration = "2 s"'
    setup.others = f'faults = [{{ {fault} }}]\n[jitter]\ntype = "pareto"\na = 3.0'
    experiment = setup.experiment()
    assert (type(experiment.faults[0]), type(experiment.jitter)) == (ddlsim.Stop, ddlsim.Pareto)
    toml, _ = files_of(experiment)
    (tmp_path / "run.toml").write_text(toml.text)
    assert ddlsim.load_experiment(tmp_path / "run.toml") == experiment


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_size = 3", "other fields: batch_size has its own field in the form; use that field"),
        ("max_tme = 3", "other fields: unknown key 'max_tme'; did you mean 'max_time'?"),
        ("faults = [{", "other fields: not valid TOML: "),
        ('[compute]\ntype = "os:abort"', "would import code"),
        ("[checkpoints]", "other fields: checkpoints: key 'every' is missing"),
    ],
)
def test_other_fields_that_cannot_be_used_are_a_line(text, message):
    with pytest.raises(ddlsim.ConfigError, match=re.escape(message)) as error:
        Setup(others=text).experiment()
    assert "\n" not in str(error.value)


def test_the_numbers_of_a_life_are_shown_and_compared():
    setup = Setup(cluster="office-1gbe", model="lenet5", steps=2)
    a = ddlsim.simulate(setup.experiment())
    setup.others = PLACEHOLDER
    b = ddlsim.simulate(setup.experiment())
    assert "goodput" not in described(a)
    assert f'<div>goodput</div><div class="v">{METRICS["goodput"].write(b.goodput)}</div>' in described(b)
    rows = dict(re.findall(r"<tr><td>([^<]*)</td>(.*?)</tr>", differences(a, b)))
    assert METRICS["availability"].write(b.availability) in rows["availability"]
    assert f"{b.energy / a.energy:,.4g} times" in rows["energy of the run"]


@pytest.mark.parametrize(("machine", "fits"), [("dgx-h100-pod", True), ("dgx-a100-pod+device=a100-40g", False)])
def test_the_first_lines_are_those_of_the_summary(machine, fits):
    result = ddlsim.simulate(Setup(cluster=machine, model="llama-3.1-8b", strategy="fsdp", workers=8).experiment())
    assert result.fits == fits
    page, said = described(result), dict(line.split(maxsplit=1) for line in str(result).splitlines() if line[0] != " ")
    rows = dict(re.findall(r"<tr><td>([^<]*)</td><td>(.*?)</td></tr>", page))
    assert set(rows) == ({"throughput", "memory"} if fits else {"if it fit"}) | {"software", "published"}
    assert rows["software"] == said["software"]
    assert fits or page.count(result.warnings[0][:30]) == 1


def test_settings_are_written_as_in_files():
    setup = Setup(strategy="hybrid", settings={"groups": '{ type = "distribution" }'})
    with pytest.raises(ddlsim.ConfigError, match=r"hybrid\.groups: key 'data' is missing"):
        setup.experiment()
    setup.param.update(strategy="async-parameter-server", settings={"apply_time": "2 ms", "servers": 2})
    assert setup.experiment().strategy == ddlsim.AsyncParameterServer(servers=2, apply_time="2 ms")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accumulation": None}, "accumulation is empty; enter a number"),
        ({"batch_size": 0}, "Experiment: batch_size = 0: must be a positive integer"),
        ({"cluster": " "}, "cluster is empty; choose one, or enter the path of a file"),
        ({"strategy": "all-reduc"}, "unknown strategy 'all-reduc'; did you mean 'all-reduce'?"),
        ({"settings": {"algorithm": "rign"}}, "rign"),
        ({"settings": {"k": 3}}, "k"),
        ({"strategy": "k-sync", "settings": {}}, "k"),
        ({"jitter": -1.0}, "cv = -1"),
        ({"settings": {"algorithm": "os:_exit"}}, "all-reduce.algorithm = 'os:_exit' would import code"),
        ({"settings": {"algorithm": "hierarchical(os:_exit, ring)"}}, "would import code"),
        ({"settings": {"overlap": {"type": "os:_exit"}}}, "all-reduce.overlap.type = 'os:_exit' would import code"),
        ({"settings": {"overlap": '{ type = "os:_exit" }'}}, "all-reduce.overlap.type = 'os:_exit' would import code"),
        ({"settings": {"overlap": {"type": "while-waiting", "overlap": "os:_exit"}}}, "would import code"),
        ({"compression": "error-feedback", "compression_settings": {"inner": {"type": "os:_exit"}}}, "import code"),
        ({"strategy": "os:_exit"}, "unknown strategy 'os:_exit'"),
        ({"compression": "os:_exit"}, "unknown compression 'os:_exit'"),
        ({"others": 'fabric = { algorithm = "os:_exit" }'}, "fabric.algorithm = 'os:_exit' would import code"),
        ({"others": 'background = [{ experiment = { cluster = "office-1gbe", fabric = { algorithm = "os:_exit" } } }]'},
         "fabric.algorithm = 'os:_exit' would import code"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_one_line(change, message):
    setup = Setup(**change)
    with pytest.raises(ddlsim.DdlsimError) as caught:
        setup.experiment()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_first_choice_of_a_setting_is_what_the_class_does():
    found = {context.name: context for context in settings_of(ddlsim.AllReduce)}
    assert found["overlap"].choices[0] == "ddp"
    assert {"none", "layer", "horovod"} < set(found["overlap"].choices)
    assert "ring" in found["algorithm"].choices
    found = {context.name: context for context in settings_of(ddlsim.Parallel)}
    assert found["pipeline"].kind == "count"
    assert found["pipeline"].about == "number of pipeline stages"
    assert found["sequence"].kind == "flag"
    assert "pipedream" in found["order"].choices


@pytest.mark.parametrize(("field", "kinds"), [("settings", STRATEGIES), ("compression_settings", COMPRESSORS)])
def test_what_a_setting_begins_with_is_one_of_its_choices(field, kinds):
    """Otherwise the browser takes another one, and with it FSDP was refused."""
    for kind in kinds.values():
        for setting in settings_of(kind):
            if setting.kind == "choice":
                widget = _widget(Setup(), field, setting)
                assert widget.value in widget.options.values()


def test_the_choices_are_all_words_of_a_rule():
    found = {context.name: context for context in settings_of(ddlsim.FSDP)}
    assert found["recompute"].choices == ("none", "selective", "dots-saveable", "operators", "full", "early-stop")
    found = {context.name: context for context in settings_of(ddlsim.DPSGD)}
    assert set(found["graph"].choices) == {"ring", "bipartite", "complete"}


def test_a_screen_hears_of_changes_while_it_is_shown():
    setup, heard = Setup(screen="run"), []
    setup.when_shown("run", lambda: heard.append(setup.batch_size))
    setup.batch_size = 64
    setup.screen = "cluster"
    setup.batch_size = 128
    assert heard == [None, 64]
    setup.screen = "run"
    setup.screen = "cluster"
    setup.screen = "run"  # nothing has changed meanwhile
    assert heard == [None, 64, 128]


def test_a_setup_can_be_taken_again():
    setup = Setup(batch_size=8)
    setup.choose_strategy("k-sync")
    other = Setup()
    other.take(setup.state())
    assert {name: getattr(other, name) for name in FIELDS} == setup.state()
    assert other.experiment() == setup.experiment()


@pytest.mark.slow
def test_two_runs_are_compared_by_the_program_as_on_the_screen(tmp_path):
    a = ddlsim.Experiment("office-1gbe", "lenet5", steps=2)
    b = a.with_(batch_size=64)
    *_, program = files(a, b)
    (tmp_path / program.name).write_text(program.text)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(tmp_path / program.name))
    first, second = ddlsim.simulate(a), ddlsim.simulate(b)
    assert f"step time: {1e3 * first.step_time:.4g} ms -> {1e3 * second.step_time:.4g} ms" in printed.getvalue()


def test_without_panel_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ddlsim.ConfigError) as caught:
        explore("office-1gbe", browser=False)
    reason = "cannot start the explorer without panel, which is not installed"
    assert str(caught.value) == f"{reason}: pip install 'ddlsim[explore]'"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cluster": "office-1gbee"}, "unknown cluster 'office-1gbee'; did you mean 'office-1gbe'?"),
        ({"model": "lenet6"}, "unknown model 'lenet6'; did you mean 'lenet5'?"),
        ({"port": 70000}, "explore: port = 70000: must be an integer from 0 to 65535"),
    ],
)
def test_what_cannot_be_shown_first_is_said_before_anything_is_served(arguments, message):
    with pytest.raises(ddlsim.ConfigError) as caught:
        explore(**{"browser": False, **arguments})
    assert str(caught.value) == message
