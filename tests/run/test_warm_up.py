"""Compiling ahead leaves nothing to compile."""

import json

import pytest
from typer.testing import CliRunner

import ddlsim
from ddlsim import cli, compiler
from ddlsim.compile_messages import teller
from ddlsim.errors import ConfigError


@pytest.fixture
def compiled():
    """The names of what is compiled during a test."""
    names = []
    teller.listeners.append(note := lambda name, part: names.append(name))
    yield names
    teller.listeners.remove(note)


def test_everything_is_compiled_and_kept(compiled):
    seen = []
    warmth = ddlsim.warm_up(lambda *now: seen.append(now))
    done = [seconds for _, seconds, _ in seen]
    assert done == sorted(done)
    assert 0.0 < done[-1] < seen[-1][2]
    assert list(warmth.compiled) == compiled
    files = [file.name for file in compiler.files()]
    names = [f"{kernel.py_func.__module__}.{kernel.py_func.__name__}" for kernel in compiler.kernels()]
    assert len(names) > 45
    inner = {"ddlsim.nn.map_kernels._inside", "ddlsim.nn.row_kernels._narrow_product"}  # called by other kernels
    assert [name for name in sorted({*names} - inner) if not any(file.startswith(f"{name}-") for file in files)] == []
    del compiled[:]
    assert ddlsim.warm_up().compiled == ()
    for strategy in (ddlsim.AllReduce(), ddlsim.LocalSGD(period=2), ddlsim.AsyncParameterServer(), ddlsim.ADPSGD()):
        training = ddlsim.Training("shapes", updates=2)
        ddlsim.simulate("office-1gbe", "shapes-cnn", strategy, batch_size=4, workers=4, training=training)
    assert compiled == []


@pytest.mark.slow
def test_the_command_says_where_and_how_much():
    ddlsim.warm_up()
    lines = CliRunner().invoke(cli.app, ["warm-up"], catch_exceptions=False).stdout.splitlines()
    assert lines[0].startswith("warm: nothing to compile; ")
    assert " MB in" in lines[0]
    said = json.loads(CliRunner().invoke(cli.app, ["warm-up", "--json"], catch_exceptions=False).stdout)
    assert said["folders"] == [line.strip() for line in lines[1:]]
    assert said["compiled"] == []


def test_where_nothing_can_be_kept_there_is_no_use(monkeypatch):
    monkeypatch.setattr(teller, "remark", "no folder for compiled code is writable; set NUMBA_CACHE_DIR")
    with pytest.raises(ConfigError, match="warm-up: compiled code cannot be stored: no folder"):
        ddlsim.warm_up()
