"""Every command that a documentation page shows is run, in order, or stands below with the reason why not."""

import itertools
import os
import re
import shlex
import subprocess
import sys
import tomllib
import warnings
from collections import defaultdict
from pathlib import Path

import page_files
import pytest
import typer
from documentation import ROOT
from page_commands import Command, commands, of_help, of_pages, of_prose
from typer.main import get_command

import ddlsim.cli
from ddlsim.errors import ConfigError
from ddlsim.lab.laboratory import check_computer

#: commands that are not run as they stand: what they begin with -> what is run instead (None: nothing), and why
INSTEAD = {
    "make ": (None, "the targets are looked up below; .ci/run makes them in a clean clone"),
    "pip install ": (None, "installs; what the extras are called is looked up below"),
    "python3 -m venv ": (None, "environments are made in .ci/run"),
    "python -m venv ": (None, "environments are made in .ci/run"),
    "ddlsim --": (None, "changes or shows the start-up file of a shell; tests/cli/test_cli_completion.py"),
    "ddlsim explore": (None, "starts a server; its page is run by test_explore_docs.py"),
    "jupyter ": (None, "starts a server; the notebooks are executed by their own tests"),
    "torchrun ": (None, "needs PyTorch, for which tests/measure/torch_example.py stands"),
    "python -m tests.mutation": (None, "takes hours"),
    "python -m ddlsim.measure --only kernels": (None, "needs PyTorch; tests/measure/test_measure_command.py runs it"),
    "mpirun -n 8 python -m ddlsim.measure --out measured/": (
        "mpirun -n 2 python -m ddlsim.measure --out measured/ --budget '4 s' --max-size '1 MiB'",
        "eight ranks on two cores take minutes",
    ),
    **dict.fromkeys(("docs/tutorial.md", "docs/which_algorithm.md"), (None, "run by test_guides.py")),
    "docs/write_your_own/": (None, "run by test_write_your_own.py, with the files of these pages"),
}
#: what a file of that name is where a page reads it; where it says more in one of them
FILES = {
    "study.toml": page_files.STUDY,
    "study.sqlite": lambda path: play(f"ddlsim sweep study.toml --out {path}"),
    "jobs.toml": page_files.JOBS,
    "my-cluster.toml": page_files.CLUSTER,
    "calibrated.toml": page_files.CLUSTER,
    "question.toml": page_files.QUESTION,
    "runs.csv": page_files.RUNS,
    "gpu-runs.csv": page_files.GPU_RUNS,
    "conv-runs.csv": page_files.CONV_RUNS,
    "rank0.json": page_files.TRACE,
    "training.toml": page_files.TRAINING,
    "config.json": page_files.CONFIG,
    "pretrain.sh": page_files.MEGATRON,
    "tensors.csv": "name,shape,dtype\nfc.weight,1000x512,float32\nfc.bias,1000,float32\n",
    "nccl-tests.log": page_files.nccl_tests(8, named=True),
    "nccl.log": page_files.nccl_tests(8, named=False),
    "docs/formats/imports.md nccl.log": page_files.nccl_tests(16, named=False),
    "iperf.json": page_files.iperf3(9.4e9),
    "topo.txt": page_files.nvidia_smi(8),
    "topo.xml": page_files.NCCL_TOPOLOGY,
    "zoo.graphml": page_files.GRAPHML,
    "measured/": lambda path: copy(path, "tests/validation/two_ranks.csv"),
    "step.goal": lambda path: step().to_goal(path),
    "step.0.et": lambda path: step().to_chakra("step.et"),
}
#: options that name what a command writes
WRITES = {"--out", "-o", "--html", "--plot", "--csv", "--trace", "--timeline", "--table", "--save", "--write"}

BLOCKS = list(of_pages())
PAGES = defaultdict(list)
for each in (*BLOCKS, *of_prose(), *of_help()):
    if "--help" not in each.page or each.text not in {shown.text for shown in BLOCKS}:
        PAGES[each.page].append(each)


def words_of(command: Command) -> list[str]:
    return shlex.split(command.text.removeprefix("sudo "))


def instead(command: Command) -> str | None:
    """Return what is run for a command."""
    for beginning, (text, _) in INSTEAD.items():
        if command.text.startswith(beginning) or command.page.startswith(beginning):
            return text
    return command.text


def misuse(command: Command) -> str | None:
    """Return what is wrong with the words behind `ddlsim`: no such command or option, an argument is missing."""
    known, words = commands(), words_of(command)[1:]
    if words[0].startswith("-"):
        options = {"--help", "-h", *(option for each in get_command(ddlsim.cli.app).params for option in each.opts)}
        return None if words[0] in options else f"ddlsim has no option {words[0]}"
    name = next((name for name in (" ".join(words[:2]), *words[:1]) if name in known), None)
    if name is None:
        return f"there is no command {words[0]!r}"
    options = {option for parameter in known[name].params for option in parameter.opts + parameter.secondary_opts}
    for word in words:
        if word.startswith("-") and not re.match(r"-\d", word) and word.partition("=")[0] not in {*options, "--help"}:
            return f"ddlsim {name} has no option {word}"
    return None


def is_whole(command: Command) -> bool:
    """Whether it can be run as it stands; in prose many only name a command and an option."""
    known, words = commands(), words_of(command)[1:]
    name = next((name for name in (" ".join(words[:2]), words[0]) if name in known), None)
    if name is None or "--help" in words:
        return False
    arguments = words[len(name.split()) :]
    if any(re.fullmatch(r"[A-Z]+|\.\.\.|\|", word) for word in arguments):
        return False
    if not arguments and known[name].params and name in ("explore", "lab", "warm-up"):
        return False
    try:
        known[name].make_context(name, list(arguments))
    except typer.Exit:
        return True
    except Exception as error:
        if type(error).__module__.startswith(("click", "typer")):
            return False
        raise
    return True


def play(text: str) -> str:
    """Run a command here, as `ddlsim` would; others as a program. Returns what it printed."""
    words = shlex.split(text.removeprefix("sudo "))
    if words[0] != "ddlsim":
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
        done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr
    before = sys.argv
    sys.argv = words
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            ddlsim.cli.main()
    except SystemExit as end:
        code = end.code
    else:
        code = 0
    finally:
        sys.argv = before
    assert code in ((0, None, 1) if "--tolerance" in words else (0, None)), text  # 1: the tolerance is not kept
    return ""


def step():
    """Return the plan of a small step."""
    return ddlsim.simulate("dgx1-v100", "resnet18", ddlsim.AllReduce("ring"), batch_size=32, workers=2, steps=1).plan


def has_laboratory() -> bool:
    """Whether `ddlsim lab` can work here: Linux, root, iproute2, a kernel with all that it needs."""
    try:
        check_computer()
    except ConfigError:
        return False
    return True


def copy(path: Path, source: str) -> None:
    text = (ROOT / source).read_text(encoding="utf-8")
    if path.suffix:
        path.write_text(text, encoding="utf-8")
    else:
        path.mkdir()
        (path / "measurements.csv").write_text(text, encoding="utf-8")


def provide(page: str, words: list[str]) -> None:
    """Write the files that a command reads and no earlier one has written."""
    if words[:2] == ["ddlsim", "lab"]:  # which has one worker per machine
        Path("my-cluster.toml").write_text(page_files.SMALL_CLUSTER, encoding="utf-8")
    for before, word in itertools.pairwise(words):
        made = FILES.get(f"{page} {word}", FILES.get(word))
        if made is None or before in WRITES or Path(word).exists():
            continue
        if callable(made):
            provide(page, ["", "study.toml"])
            made(Path(word))
        else:
            Path(word).write_text(made, encoding="utf-8")


def runs(page: str) -> list[str]:
    """Return what is run of a page."""
    whole = (each for each in PAGES[page] if each in BLOCKS or not each.text.startswith("ddlsim ") or is_whole(each))
    return list(dict.fromkeys(text for each in sorted(whole, key=lambda c: c.line) if (text := instead(each))))


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md" and runs(page)])
def test_the_commands_of_a_page_run(page, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for text in runs(page):
        words = shlex.split(text.removeprefix("sudo "))
        if (words[:2] == ["ddlsim", "lab"] or "lab.csv" in words) and not has_laboratory():
            continue  # needs Linux, root, and a kernel with network namespaces
        provide(page, words)
        capfd.readouterr()
        printed = play(text)
        shown = capfd.readouterr()
        assert printed or shown.out or shown.err, text
        assert "Traceback" not in shown.err, text


def test_commands_exist_with_their_options():
    """Also those that only name a command and an option; in the changelog they may be gone."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    wrong = []
    for command in (*BLOCKS, *of_help(), *of_prose()):
        words = words_of(command)
        if command.page == "CHANGELOG.md":
            continue
        if words[0] == "ddlsim" and (reason := misuse(command)):
            wrong.append(f"{command}: {reason}")
        if words[0] == "make" and not re.search(rf"^{words[1]}:", makefile, re.MULTILINE):
            wrong.append(f"{command}: no such target")
        for names in re.findall(r"\[([\w,]+)\]", command.text) if words[0] == "pip" else ():
            wrong += [f"{command}: no extra {name!r}" for name in names.split(",") if name not in extras]
    assert wrong == []


def test_what_is_not_run_is_shown_somewhere():
    shown = [each.text for each in BLOCKS] + [each.page for each in BLOCKS]
    for beginning in INSTEAD:
        assert any(text.startswith(beginning) for text in shown), beginning
