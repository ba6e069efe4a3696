"""Windows and macOS: what ddlsim asks of the system is what all have, or it says that it needs Linux.

No such computer is at hand here. These tests take from Python what Windows does not have, and look at names of files.
"""

import ntpath
import os
import re
import subprocess
import sys
from pathlib import Path, PureWindowsPath

import pytest
from documentation import FILES

from ddlsim.errors import ConfigError
from ddlsim.lab import laboratory

ROOT = Path(__file__).parents[1]
#: https://docs.python.org/3/library/os.html and .../signal.html, "Availability: Unix"; modules of Unix alone. Left in
#: place is what Python itself calls where sys.platform says linux (os.uname, signal.pthread_sigmask).
WITHOUT = """
import asyncio, multiprocessing.popen_spawn_posix, os, pathlib, shutil, signal, subprocess, sys, tempfile
sys.modules |= dict.fromkeys(("fcntl", "grp", "pty", "pwd", "resource", "termios"))
OF_OS = "fchmod fchown fork getpgid geteuid killpg mkfifo nice sched_getaffinity sched_yield setsid statvfs"
OF_SIGNAL = "SIGALRM SIGCHLD SIGHUP SIGKILL SIGQUIT SIGUSR1 SIGUSR2 SIGXFSZ alarm pthread_kill setitimer sigwait"
for owner, names in ((os, OF_OS), (signal, OF_SIGNAL)):
    for name in names.split():
        delattr(owner, name)
"""
WORK = """
import importlib, pkgutil, warnings
warnings.filterwarnings("error", category=EncodingWarning, module="ddlsim")  # where the system would choose one
import ddlsim, ddlsim.cli

for module in pkgutil.walk_packages(ddlsim.__path__, "ddlsim."):
    try:
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        assert error.name in ("mpi4py", "torch"), error
training = ddlsim.Training("digits", updates=3, rate=0.1)
result = ddlsim.simulate("office-1gbe", "digits-cnn", batch_size=8, workers=2, training=training)
result.save_trace("trace.json")
result.save("run.npz")
result.cluster.save("cluster.json")
ddlsim.load_cluster("cluster.json")
print(result, result.to_json())
study = ddlsim.Study(ddlsim.Experiment("office-1gbe", "lenet5", steps=1, warmup=0), {"workers": [1, 2]})
study.run("study.sqlite", jobs=1).save_html("report.html")
"""


@pytest.mark.slow
def test_a_run_and_a_study_need_nothing_that_only_unix_has(tmp_path):
    """Nor is the encoding of files left to the system, which on Windows is not UTF-8."""
    command = [sys.executable, "-X", "warn_default_encoding", "-c", WITHOUT + WORK]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"trace.json", "run.npz", "cluster.json", "study.sqlite", "report.html"}


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_the_laboratory_says_that_it_needs_linux(platform, monkeypatch):
    monkeypatch.setattr(laboratory.sys, "platform", platform)
    with pytest.raises(ConfigError) as raised:
        laboratory.check_computer()
    assert str(raised.value) == f"the lab needs Linux (network namespaces), not {platform}; use a virtual machine"


def _is_reserved(name):
    """Whether Windows forbids a path; Python 3.13 moved the question."""
    if sys.version_info >= (3, 13):
        return ntpath.isreserved(name)
    return PureWindowsPath(name).is_reserved()


def test_all_systems_can_have_the_files_of_this_repository():
    """Windows forbids some characters and names, and neither it nor macOS tells capitals from small letters."""
    for name in FILES:
        assert not _is_reserved(name), name
        assert not re.search(r'[<>:"|?*\\]|[. ](/|$)', name), name
        assert len(name) < 150, name  # of 260, with the folder that it is in
    assert len({name.lower() for name in FILES}) == len(FILES)
