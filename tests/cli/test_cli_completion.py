"""What a shell offers at the tabulator: the names that commands take, at little cost."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ddlsim
from ddlsim import cli
from ddlsim.cli import completion

ROOT = Path(__file__).parents[2]


def offered(line: str) -> list[str]:
    """Return the words that fish is told at the end of a line."""
    asked = {"_DDLSIM_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = CliRunner().invoke(cli.app, env=asked | {"_TYPER_COMPLETE_ARGS": f"ddlsim {line}"}, prog_name="ddlsim")
    assert done.exit_code == 0, done.output
    return done.stdout.split()


CLUSTERS, MODELS, DEVICES = ddlsim.cluster_names(), ddlsim.model_names(), ddlsim.device_names()


@pytest.mark.parametrize(
    ("line", "names"),
    {
        "run ": CLUSTERS, "scaling ": CLUSTERS, "recommend ": CLUSTERS, "lab ": CLUSTERS, "show topology ": CLUSTERS,
        "recommend dgx1-v100 ": CLUSTERS, "show plan step.et --on ": CLUSTERS, "calibrate a.log --cluster ": CLUSTERS,
        "validate runs.csv -c ": CLUSTERS, "run dgx1-v100 --model ": MODELS, "run dgx1-v100 -m ": MODELS,
        "recommend dgx1-v100 -m ": MODELS, "show model ": MODELS, "fits ": MODELS, "calibrate a.log --model ": MODELS,
        "validate runs.csv -m ": MODELS, "import run.log -m ": MODELS, "fits lenet5 ": DEVICES,
        "import topo.xml --device ": DEVICES, "run dgx1-v100 -a ": ["auto", *ddlsim.algorithm_names()],
        "run dgx1-v100 --precision ": completion.PRECISIONS, "fits lenet5 v100-32g --optimizer ": completion.OPTIMIZERS,
        "run dgx1-v100 --overlap ": completion.OVERLAPS, "run dgx1-v100 --cost ": completion.COSTS,
        "run dgx1-v100 --placement ": completion.PLACEMENTS,
    }.items(),
)  # fmt: skip
def test_all_names_are_offered(line, names):
    assert offered(line) == list(names)


def test_the_words_are_those_that_the_commands_take():
    from ddlsim.run import files
    from ddlsim.runtime.fabric import COSTS

    assert offered("run dgx1-v100 -s ") == sorted(files.STRATEGIES)
    assert list(completion.OVERLAPS) == list(files.OVERLAPS)
    assert list(completion.OPTIMIZERS) == list(files.OPTIMIZERS)
    assert completion.COSTS == COSTS
    for precision in completion.PRECISIONS:
        ddlsim.Experiment("office-1gbe", precision=precision)
    for placement in completion.PLACEMENTS:
        ddlsim.ParameterServer(placement=placement)


def test_what_is_typed_chooses():
    assert offered("run office") == [name for name in CLUSTERS if name.startswith("office")]


@pytest.mark.parametrize("line", ["run my-clus", "run my.toml+ban", "run dgx1-v100 -m mine.to", "run no-such+tr"])
def test_what_nobody_knows_is_left_to_the_shell(line):
    assert offered(line) == []


def test_keys_of_a_cluster_are_offered_as_they_are_set():
    assert "cloud-25g-16x8-v100+bandwidth=25Gbit/s" in offered("run cloud-25g-16x8-v100+")
    assert offered("run cloud-25g-16x8-v100+n_hosts=4+transport=i") == [
        "cloud-25g-16x8-v100+n_hosts=4+transport=ideal",
        "cloud-25g-16x8-v100+n_hosts=4+transport=infiniband",
    ]


@pytest.mark.parametrize("name", ["office-1gbe", "cloud-25g-16x8-v100", "dgx1-v100"])
def test_every_setting_that_is_offered_can_be_set(name):
    for context in offered(f"run {name}+"):
        if "transport=" not in context:  # not every one suits every file
            ddlsim.load_cluster(context)


def test_a_file_that_cannot_be_read_offers_nothing(monkeypatch, tmp_path):
    (tmp_path / "broken.toml").write_text("title = ", encoding="utf-8")
    monkeypatch.setattr(completion, "bundled_files", lambda folder: {"broken": tmp_path / "broken.toml"})
    assert completion.clusters("") == ["broken"]
    assert completion.clusters("broken+") == []


def test_nothing_heavy_is_loaded_for_it():
    code = """
import os, sys
from ddlsim.cli import main

sys.argv = ["ddlsim"]
for words in ("run ", "run dgx1-v100+", "run dgx1-v100 -m ", "fits lenet5 ", "run x -s ", "run x -a "):
    os.environ["_TYPER_COMPLETE_ARGS"] = f"ddlsim {words}"
    try:
        main()
    except SystemExit:
        print(words, *sys.modules, file=sys.stderr)
"""
    asked = {"_DDLSIM_COMPLETE": "complete_zsh", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True, check=True)
    assert done.stdout.count("_arguments") == len(done.stderr.splitlines()) == 6
    heavy = {"networkx", "numba", "pandas", "scipy", "matplotlib", "simpy"}  # typer loads pydantic by itself
    assert not heavy & set(done.stderr.split())


@pytest.mark.posix
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(tmp_path):
    """The whole way: bash loads what `--show-completion` prints, and calls it as if the tabulator had been pressed."""
    program = tmp_path / "ddlsim"
    program.write_text(f"#!{sys.executable}\nfrom ddlsim.cli import main\nmain()\n", encoding="utf-8")
    program.chmod(0o755)
    script = (
        'eval "$(ddlsim --show-completion bash)"; COMP_WORDS=(ddlsim run office); COMP_CWORD=2; '
        '_ddlsim_completion ddlsim; echo "${COMPREPLY[@]}"'
    )
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [name for name in CLUSTERS if name.startswith("office")], done.stderr
