"""The command line: what it prints, and how it fails."""

import dataclasses
import json
import sys

import pytest
import typer
from draws import slow
from typer.testing import CliRunner

import ddlsim
from ddlsim import cli
from ddlsim.errors import DdlsimError

EXPERIMENT = """
cluster = "office-1gbe"
model = "lenet5"
workers = 4
batch_size = 32
steps = 3

[strategy]
type = "all-reduce"
overlap = { type = "ddp", cap = "1 MiB" }

[jitter]
type = "lognormal"
cv = 0.05
"""


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def fails(monkeypatch, capsys, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["ddlsim", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert "Traceback" not in captured.err
    return captured.err


def test_run_names_throughput_and_bottleneck(tmp_path):
    trace, plot = tmp_path / "t.json", tmp_path / "t.png"
    outputs = ("--trace", str(trace), "--timeline", str(plot))
    text = run("run", "office-1gbe", "-m", "lenet5", "-n", "4", "--steps", "5", *outputs)
    assert "throughput" in text
    assert "% throughput" in text
    assert json.loads(trace.read_text())["traceEvents"]
    assert plot.stat().st_size > 1000


def test_run_says_what_a_trace_leaves_out(tmp_path):
    trace = str(tmp_path / "t.json.gz")
    arguments = ["run", "office-1gbe", "-m", "lenet5", "--steps", "5", "--no-bottleneck", "--trace", trace]
    short, whole = (CliRunner().invoke(cli.app, [*arguments, *more]).stderr for more in ([], ["--trace-whole"]))
    assert f"{trace} does not contain anything that begins after" in short
    assert "; use --trace-whole to include all" in short
    assert whole.endswith(f"wrote {trace}\n")


def test_run_json_is_the_result():
    data = json.loads(run("run", "office-1gbe", "-m", "lenet5", "-n", "4", "--steps", "3", "--json"))
    result = ddlsim.simulate("office-1gbe", "lenet5", workers=4, steps=3)
    assert data["throughput"] == result.throughput


def test_run_with_nccls_estimate():
    data = json.loads(run("run", "office-1gbe", "-m", "lenet5", "-n", "4", "--steps", "3", "--cost", "nccl", "--json"))
    result = ddlsim.simulate("office-1gbe", "lenet5", ddlsim.AllReduce(cost="nccl"), workers=4, steps=3)
    assert data["throughput"] == result.throughput
    assert data["experiment"]["strategy"]["cost"] == "nccl"
    assert data["shares"] == result.shares
    assert data["experiment"]["model"] == "lenet5"


def test_experiment_file_and_options_on_top(tmp_path):
    path = tmp_path / "e.toml"
    path.write_text(EXPERIMENT)
    first = json.loads(run("run", str(path), "--json"))
    assert first["workers"] == 4
    assert first["experiment"]["jitter"] == {"type": "lognormal", "cv": 0.05}
    assert json.loads(run("run", str(path), "-n", "2", "--json"))["workers"] == 2


def test_scaling_table_and_json(tmp_path):
    plot = tmp_path / "s.png"
    text = run("scaling", "office-1gbe", "-m", "lenet5", "-n", "1,2,4", "--steps", "2", "--plot", str(plot))
    lines = text.splitlines()
    assert [line.split()[0] for line in lines] == ["workers", "1", "2", "4"]
    assert plot.stat().st_size > 1000
    rows = json.loads(run("scaling", "office-1gbe", "-m", "lenet5", "-n", "1,4", "--steps", "2", "--json"))
    assert [row["workers"] for row in rows] == [1, 4]
    assert rows[0]["efficiency"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("command", "names"),
    [
        slow("topologies", ddlsim.cluster_names),
        slow("models", ddlsim.model_names),
        ("devices", ddlsim.device_names),
    ],
)
def test_lists_name_everything(command, names):
    text = run(command)
    assert all(name in text for name in names())
    assert [row["name"] for row in json.loads(run(command, "--json"))] == list(names())


def test_devices_print_the_prices_of_one():
    text = run("devices", "gb200")
    assert "GB200 NVL72 data sheet" in text
    assert ["oci", "BM.GPU.GB200.4", "4", "64.00", "16.00", "2026-09"] in [
        line.split()[:6] for line in text.splitlines()
    ]
    assert {row["cloud"] for row in json.loads(run("devices", "gb200", "--json"))} == {"oci", "coreweave"}
    assert "cloud" not in run("devices", "p40")  # no price, no table


def test_algorithms():
    assert "halving_doubling" in run("algorithms")
    assert {row["kind"] for row in json.loads(run("algorithms", "--json"))} >= {"all_reduce", "all_to_all"}


def test_show_model():
    assert "25,557,032 parameters" in run("show", "model", "resnet50")
    data = json.loads(run("show", "model", "lenet5", "--json"))
    assert sum(layer["parameters"] for layer in data["layers"]) == data["parameters"] == 61_706


@pytest.mark.slow
def test_show_plan(tmp_path):
    path = tmp_path / "x.goal"
    path.write_text(
        "num_ranks 2\nrank 0 {\nl1: calc 1000000\nl2: send 1000b to 1\nl2 requires l1\n}\n"
        "rank 1 {\nrecv 1000b from 0\n}\n"
    )
    text = run("show", "plan", str(path))
    assert "3 tasks of 2 ranks in 1 step: 1 compute, 1 send, 1 receive" in text
    assert "critical path 0.001 s" in text
    plots = tmp_path / "graph.png", tmp_path / "gantt.png"
    run("show", "plan", str(path), "--plot", str(plots[0]))
    assert "on dgx1-v100: 0.0010" in run("show", "plan", str(path), "--on", "dgx1-v100", "--plot", str(plots[1]))
    assert all(plot.stat().st_size > 1000 for plot in plots)
    data = json.loads(run("show", "plan", str(path), "--on", "dgx1-v100", "--json"))
    assert data["critical_path_s"] == 1e-3 < data["seconds"]
    for rank in range(2):  # an all-reduce of 8 bytes
        (tmp_path / f"t.{rank}.et").write_bytes(
            b"\x07\n\x050.0.4\x25\x12\x03sum\x18\x07R\x0d\n\tcomm_typeH\x00R\x0d\n\tcomm_sizeH\x08"
        )
    assert "2 tasks of 2 ranks in 1 step: 2 all-reduce" in run("show", "plan", str(tmp_path / "t.et"))


@pytest.mark.slow
def test_a_transport_is_switched_off_in_one_word(tmp_path):
    """On the command line, in a file and in Python, both ways: nine GPUs in two machines, between which TCP is slow."""
    path, times = tmp_path / "alexnet.toml", {}
    for name, says in (("cloud-25g-16x8-v100", True), ("cloud-25g-16x8-v100+transport=ideal", False)):
        text = run("run", name, "-m", "alexnet", "-n", "9", "-b", "64", "--steps", "1")
        assert ("13.6 of the nic's 23.54 Gbit/s" in text) == says
        assert ("transport tcp-cubic (13.6 Gbit/s each)" in run("show", "topology", name)) == says
        path.write_text(f'cluster = "{name}"\nmodel = "alexnet"\nworkers = 9\nbatch_size = 64\nsteps = 1\n')
        times[name] = ddlsim.simulate(name, "alexnet", batch_size=64, workers=9, steps=1).step_time
        assert ddlsim.run.run(ddlsim.load_experiment(path)).step_time == times[name]
    tcp, ideal = times.values()
    assert tcp > 1.4 * ideal


def test_show_topology(tmp_path):
    plot = tmp_path / "c.png"
    assert "8 x v100" in run("show", "topology", "dgx1-v100", "--plot", str(plot))
    assert plot.stat().st_size > 1000
    data = json.loads(run("show", "topology", "dgx1-v100", "--json"))
    again = tmp_path / "again.json"
    again.write_text(json.dumps(data))
    assert ddlsim.load_cluster(again).n_links == ddlsim.load_cluster("dgx1-v100").n_links


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "office-1gb"], ["unknown cluster 'office-1gb'", "did you mean 'office-1gbe'?"]),
        (["run", "office-1gbe", "-m", "lenet6"], ["unknown model 'lenet6'", "did you mean 'lenet5'?"]),
        (["run", "office-1gbe", "-n", "99"], ["workers = 99", "has only 8 devices", "use at most 8"]),
        (["run", "office-1gbe", "-a", "rnig"], ["unknown", "'rnig'", "did you mean 'ring'?"]),
        (["run", "office-1gbe", "--overlap", "dpp"], ["unknown overlap 'dpp'", "did you mean 'ddp'?"]),
        (["run", "office-1gbe", "-s", "all-redcue"], ["unknown strategy", "did you mean 'all-reduce'?"]),
        (["run", "office-1gbe", "--cost", "calibrated"], ["is not calibrated; measure all_reduce"]),
        (["run", "office-1gbe", "--cost", "ncl"], ["cost = 'ncl'", "did you mean 'nccl'"]),
        (["run", "office-1gbe", "-s", "softsync", "--cost", "nccl"], ["--cost has no effect"]),
        (["run", "office-1gbe", "-s", "all-reduce", "--servers", "2"], ["--servers has no effect", "--algorithm"]),
        (["run", "office-1gbe", "--servers", "9", "--placement", "colocated"], ["servers = 9", "8 machines"]),
        (["run", "office-1gbe", "--batch-size", "0"], ["batch_size = 0", "positive integer"]),
        (["run", "office-1gbe", "--precision", "fp61"], ["precision = 'fp61'", "fp16"]),
        (["scaling", "office-1gbe", "-n", "1,x"], ["--workers = '1,x'", "such as 8,16,32"]),
        (["run", "office-1gbe", "--trace-whole"], ["--trace-whole has no effect", "add --trace trace.json.gz"]),
        (["run", "nothing.toml"], ["nothing.toml"]),
        (["show", "model", "vgg166"], ["unknown model 'vgg166'", "did you mean 'vgg16'?"]),
        (["show", "topology", "dgx1", "--plot", "x.png"], ["unknown cluster 'dgx1'"]),
        (["show", "plan", "nowhere.et"], ["nowhere.et: no such file, and there is no nowhere.0.et in its folder"]),
        (["show", "plan", "pyproject.toml"], ["pyproject.toml"]),
        (["run", "office-1gbe", "-m", "lenet5", "--steps", "1", "--trace", "/no/such/dir/t.json"], ["t.json"]),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_exit_code_2(monkeypatch, capsys, arguments, words):
    if "--trace" in arguments:  # here the result is printed before the file fails
        monkeypatch.setattr(sys, "argv", ["ddlsim", *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        assert exit_.value.code == 2
        message = capsys.readouterr().err
    else:
        message = fails(monkeypatch, capsys, *arguments)
    assert message.startswith("error: ")
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("workers = 4", "wrokers = 4", ["unknown key 'wrokers'", "did you mean 'workers'?"]),
        ('type = "all-reduce"', 'type = "allreduce"', ["strategy", "did you mean 'all-reduce'?"]),
        ("cap =", "cpa =", ["strategy.overlap", "unknown key 'cpa'", "did you mean 'cap'?"]),
        ("1 MiB", "1", ["strategy.overlap", "has no unit"]),
        ("cv = 0.05", "cv = -1.0", ["jitter", "cv = -1.0", "above 0"]),
        ("cv = 0.05", "", ["jitter", "'cv' is missing"]),
        ("batch_size = 32", 'batch_size = "32"', ["batch_size", "integer"]),
        ("[jitter]", "[jitter", ["not valid TOML"]),
        ("steps = 3", "steps = 0", ["steps = 0", "positive integer"]),
        ("overlap = {", 'algorithm = "os:abort"\noverlap = {', ["strategy.algorithm = 'os:abort'", "allow_code=True"]),
    ],
)
def test_mistakes_in_an_experiment_file(tmp_path, monkeypatch, capsys, old, new, words):
    path = tmp_path / "e.toml"
    path.write_text(EXPERIMENT.replace(old, new, 1))
    if "TOML" in words[0]:  # not recognised as an experiment, so read as a topology: the message names the file
        words = ["e.toml", "TOML"]
    message = fails(monkeypatch, capsys, "run", str(path))
    assert message.startswith(f"error: {path}") or "TOML" in message
    assert all(word in message for word in words), message


def test_interrupted_scaling_keeps_what_is_done(monkeypatch):
    done = []

    def scaling(experiment, counts):
        if done:
            raise KeyboardInterrupt
        done.append(counts)
        return [ddlsim.simulate(experiment.with_(workers=counts[0]))]

    monkeypatch.setattr(ddlsim, "scaling", scaling, raising=False)
    result = CliRunner().invoke(cli.app, ["scaling", "office-1gbe", "-m", "lenet5", "-n", "1,2,4", "--steps", "2"])
    assert result.exit_code == 130
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["workers", "1"]


def test_a_closed_output_is_no_error(monkeypatch):
    """As in ``ddlsim fits lenet5 v100 >&-``."""
    monkeypatch.setattr("sys.argv", ["ddlsim", "fits", "lenet5", "v100"])
    monkeypatch.setattr("sys.stdout", None)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0


def test_version():
    assert run("--version").strip() == ddlsim.__version__


def test_run_leaves_out_what_would_help():
    arguments = ["run", "office-1gbe", "-m", "lenet5", "-n", "2", "--steps", "2", "--no-bottleneck"]
    printed = CliRunner().invoke(cli.app, arguments)
    assert printed.exit_code == 0
    assert "bottleneck    call result.sensitivities() to simulate" in printed.stdout


def test_beginnings_of_options_suggest_them():
    """Of all commands. Fields of experiments without an option are set in a file; other words suggest nothing."""
    application = typer.main.get_command(cli.app)
    commands = application.commands

    def command_line(words):
        application.main(words, prog_name="ddlsim", standalone_mode=False)

    for name, command in commands.items():
        options = [word for each in command.params for word in each.opts if word.startswith("--")]
        for word in (option[:n] for option in options for n in range(7, len(option))):
            if word not in options and len(word.rstrip("-")) == len(word):
                with pytest.raises(DdlsimError, match="no such option") as error:
                    command_line([name, word])
                assert f"did you mean '{word}" in str(error.value)
    fields = {each.name for each in dataclasses.fields(ddlsim.Experiment)}
    options = {word[2:].replace("-", "_") for each in commands["run"].params for word in each.opts}
    for word in ["compress", *sorted(fields - options - {"cluster"})]:
        with pytest.raises(DdlsimError, match=f"set {word}[a-z]* in an experiment file .ddlsim run FILE.toml.; see"):
            command_line(["run", "office-1gbe", f"--{word.replace('_', '-')}", "1"])
    for word in ("network", "comm", "bandwidth"):
        with pytest.raises(DdlsimError, match=f"no such option: --{word}; see ddlsim run -h"):
            command_line(["run", "office-1gbe", f"--{word}", "1"])


def test_equal_devices_are_an_option(tmp_path):
    """The pace of the slowest device, which stacks that were fitted to few have by default, is turned off."""
    words = ["dgx-h100-pod", "-m", "llama-3-8b+layers=2", "-s", "fsdp", "-b", "16"]
    common = [*words, "--steps", "2", "--json", "--no-bottleneck", "-n", "16"]
    slowest, equal = (json.loads(run("run", *common, *more)) for more in ((), ("--spread", "0")))
    assert any("set speed=Spread(0) (--spread 0) for equal devices" in note for note in slowest["notes"])
    assert not any("Spread" in note for note in equal["notes"])
    assert equal["throughput"] > slowest["throughput"]
    (row,) = json.loads(run("scaling", *words, "--steps", "2", "--json", "-n", "16", "--spread", "0"))
    assert row["throughput"] == equal["throughput"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run"], "ddlsim run: missing argument 'cluster_or_file'; see ddlsim run -h"),
        (["run", "office-1gbe", "--modle", "lenet5"], "no such option: --modle"),
        (["run", "office-1gbe", "--batch-size"], "option '--batch-size' requires an argument; see ddlsim -h"),
        (["show", "modle"], "no such command 'modle'"),
        (
            ["show", "model", "--num-layers", "24"],
            "--num-layers; to pass Megatron-LM arguments, write ddlsim show model -- '--num-layers ...'; see",
        ),
        (
            ["run", "x", "-n", "8.5"],
            "invalid value for '--workers' / '-n': '8.5': must be a valid integer; see ddlsim run",
        ),
        (["--nope"], "ddlsim: no such option: --nope; see ddlsim -h"),
        (["devices", "v100", "h100"], "extra argument"),
    ],
)
def test_words_that_a_command_does_not_take_are_one_line(monkeypatch, capsys, arguments, text):
    said = fails(monkeypatch, capsys, *arguments)
    assert said.startswith("error: ddlsim")
    assert text in said


LLAMA = ("dgx-h100-pod", "-m", "llama-3-8b", "-s", "fsdp")


@pytest.mark.slow
def test_software_attention_and_precision_of_a_run(tmp_path):
    options = ("--stack", "megatron", "--precision", "fp8", "--flash", "--steps", "1")
    data = json.loads(run("run", *LLAMA, "-n", "8", *options, "--no-bottleneck", "--json"))
    experiment = ddlsim.Experiment(
        "dgx-h100-pod", "llama-3-8b", ddlsim.FSDP(), workers=8, stack="megatron", precision="fp8", flash=True, steps=1
    )
    assert data["throughput"] == ddlsim.simulate(experiment).throughput
    assert data["stack"]["name"] == "megatron"
    path = tmp_path / "run.toml"
    run("run", *LLAMA, "-n", "8", *options, "--no-bottleneck", "--write", str(path))
    assert 'stack = "megatron"' in path.read_text()
    assert ddlsim.load_experiment(path) == experiment
    rows = json.loads(run("scaling", *LLAMA, "-n", "8,16", *options, "--json"))
    assert rows[0]["throughput"] == data["throughput"]


def test_an_old_attention_needs_the_memory_that_it_needed():
    text = run("run", *LLAMA, "-n", "64", "--no-flash", "--steps", "1", "--no-bottleneck")
    assert text.startswith("memory        does not fit: llama-3-8b")


def test_stacks_are_listed_with_what_they_set():
    rows = json.loads(run("stacks", "--json"))
    assert [row["name"] for row in rows] == ddlsim.stack_names()
    one = json.loads(run("stacks", "megatron", "--json"))
    assert one == rows[ddlsim.stack_names().index("megatron")]
    stack = ddlsim.load_stack("megatron")
    assert one["sets"]["gemm"] == stack.gemm
    text = run("stacks", "megatron")
    assert text.startswith(f"{stack.title}, {stack.release}\n  source  ")
    assert f"attention         {', '.join(stack.attention)}" in text
    assert stack.title in run("stacks")


def test_an_unknown_stack_is_one_line(monkeypatch, capsys):
    text = fails(monkeypatch, capsys, "run", *LLAMA, "-n", "8", "--stack", "megatrom")
    assert "unknown stack 'megatrom'; did you mean 'megatron'" in text


def test_memory_of_a_language_model_is_that_of_its_software():
    data = json.loads(run("fits", "llama-3-8b", "h100", "-b", "1", "--shards", "64", "--json"))
    assert "zero=1, shards=64" in [remedy["change"] for remedy in data["remedies"] if remedy["fits"]]
    old = json.loads(run("fits", "llama-3-8b", "h100", "--shards", "64", "--no-flash", "--json"))
    assert old["total"] > data["total"] + 50e9
    other = json.loads(run("fits", "llama-3-8b", "h100", "--shards", "64", "--stack", "megatron", "--json"))
    assert other["memory"]["buffers"] < data["memory"]["buffers"]


def test_software_without_effect_is_noted():
    text = run("run", "office-1gbe", "-m", "lenet5", "--stack", "megatron", "--flash", "--no-bottleneck")
    assert "stack has no effect on the simulated times: roofline of desktop-cpu" in text
    assert "flash has no effect: lenet5 has no attention" in text
    text = run(
        "run", "cloud-25g-16x8-v100", "-m", "gpt2", "-n", "2", "--steps", "1", "--stack", "megatron", "--no-bottleneck"
    )
    assert "launches and fixed times count, not the rates of kernels or the memory: roofline of v100" in text
    assert "no effect" not in run("run", *LLAMA, "-n", "8", "--steps", "1", "--stack", "megatron", "--no-bottleneck")


def test_precision_and_flash_that_times_do_not_depend_on_are_noted():
    text = run("run", "dgx-h100-pod", "-m", "resnet50", "-n", "8", "--precision", "fp8", "--no-bottleneck")
    assert "fp8 is simulated at the speed of bf16: kernels of h100" in text
    text = run("run", "dgx1-v100", "-m", "gpt2", "-b", "1", "--steps", "1", "--flash", "--no-bottleneck")
    assert "flash affects only memory, not the simulated times: roofline of v100" in text
    text = run(
        "run", "gb200-nvl72", *LLAMA[1:], "-n", "8", "--steps", "1", "--stack", "megatron-2024", "--no-bottleneck"
    )
    assert "no fused kernel of stack megatron-2024 is known on gb200; set flash=True to assume a fused kernel" in text


def test_a_device_shows_its_rates():
    """What products and fused attention reach of the peak, and where that comes from."""
    out = run("devices", "h100")
    assert "fp8 1979 (matrix products reach 73 %)" in out
    assert "flash-2 32 % forward" in out
    assert "ddlsim.measure --only kernels" in out
    assert "convolutional networks" in run("devices", "v100")
