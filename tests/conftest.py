"""What all tests need: signals as they are in a terminal, and an order in which kernels are compiled once."""

import functools
import gc
import os
import signal
from pathlib import Path

import hypothesis
import pytest
import typer.testing

HERE = Path(__file__).parent
#: folders whose tests do not need the event kernel, which takes a while to compile
WITHOUT_KERNEL = (
    "cluster",
    "collectives",
    "compression",
    "data",
    "data_sets",
    "imports",
    "measure",
    "nn",
    "optim",
    "workload",
)


#: whole programs, reports and clusters: the second part of the tests, `make test-slow`
SLOW = (
    "accuracy",
    "explore",
    "lab",
    "measure",
    "published",
    "test_examples.py",
    "test_page_commands.py",
    "test_study_arrays.py",
    "test_study_executors.py",
    "test_study_page.py",
    "test_study_search.py",
)


def pytest_configure():
    """Take SIGINT again where a shell has started the tests in the background; say nothing while kernels are compiled.

    Such a shell makes them ignore it, and with them every process that they start and interrupt. What is written to
    stderr is looked at, and must not depend on what is in the cache.
    """
    os.environ["DDLSIM_QUIET"] = "1"
    # how long an example takes depends on the machine and on what else it does
    hypothesis.settings.register_profile("any speed", hypothesis.settings(), deadline=None)
    hypothesis.settings.load_profile("any speed")
    # Typer builds all commands anew for each command line, which takes longer than most of them.
    typer.main.get_command = typer.testing._get_command = functools.cache(typer.main.get_command)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect tests without the garbage collector, which takes half of the time and finds nothing: all of it stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # nor is it looked through while tests run
        gc.set_threshold(20_000, 10, 10)  # syntax trees, for example, are many objects without cycles
        gc.enable()


@functools.cache
def is_slow(path):
    return any(part in SLOW for part in path.relative_to(HERE).parts)


@functools.cache
def folder_of(path):
    return path.relative_to(HERE).parts[0]


def pytest_ignore_collect(collection_path, config):
    """Do not import what has no test of the part that is run: that takes a quarter of a minute."""
    marks = config.getoption("markexpr")
    if marks == "not slow" and is_slow(collection_path):
        return True
    if marks == "slow" and collection_path.name.startswith("test_") and collection_path.is_file():
        text = collection_path.read_text(encoding="utf-8")
        return True if not (is_slow(collection_path) or "mark.slow" in text or "from draws import" in text) else None
    return None


def pytest_collection_modifyitems(items):
    """Let the second half begin with tests that need no event kernel.

    pytest-xdist gives each of two processes a half: the first compiles the kernel, the second finds it in the cache
    when it comes to need it, instead of compiling it at the same time.
    """
    for item in items:
        if is_slow(item.path):
            item.add_marker("slow")
        if os.name != "posix" and item.get_closest_marker("posix"):
            item.add_marker(pytest.mark.skip(reason="needs signals, pipes or permissions as Unix has them"))
    without = [item for item in items if folder_of(item.path) in WITHOUT_KERNEL]
    others = [item for item in items if folder_of(item.path) not in WITHOUT_KERNEL]
    middle = len(items) // 2
    items[:] = [*others[:middle], *without, *others[middle:]]
