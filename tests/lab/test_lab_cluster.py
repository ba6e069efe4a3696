"""The real thing, where the machine allows it: namespaces are built, measured and removed, whatever happens."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddlsim.cluster import Cluster, star
from ddlsim.errors import ConfigError
from ddlsim.lab import check_computer, clean, compare, parse_operations
from ddlsim.lab.laboratory import has_netem
from ddlsim.measure import read_measurements

REPOSITORY = Path(__file__).parents[2]
FILE = """
title = "Three machines on a 100 Mbit/s switch"

[generator]
type = "star"
n_hosts = 3
bandwidth = "100 Mbit/s"
latency = "30 us"
efficiency = 0.9415
"""


@pytest.fixture(scope="module", autouse=True)
def _allowed():
    try:
        check_computer()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture
def start(tmp_path):
    """Return what starts the command with more arguments; what a test leaves running is killed."""
    file = tmp_path / "three.toml"
    file.write_text(FILE, encoding="utf-8")
    running = []

    def begin(*arguments):
        command = [sys.executable, "-c", "from ddlsim.cli import main; main()", "lab", str(file), *arguments]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        process.communicate()
    clean()


def namespaces_of(process):
    listed = subprocess.run(["ip", "netns", "list"], text=True, capture_output=True, check=True).stdout
    return sorted(line.split()[0] for line in listed.splitlines() if line.startswith(f"ddlsim-{process.pid}-"))


def ranks_of(process):
    """Return the processes inside the namespaces of a laboratory."""
    found = []
    for name in namespaces_of(process):
        listed = subprocess.run(["ip", "netns", "pids", name], text=True, capture_output=True, check=False).stdout
        found += [int(word) for word in listed.split()]
    return found


def wait_for(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


def alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


ENDLESS = ("--operations", "all_reduce:ring", "--sizes", "64 KiB", "--repetitions", "100000")


def started(start):
    process = start(*ENDLESS)
    ranks = []

    def all_there():
        ranks[:] = ranks_of(process)  # one that begins another program is not seen for a moment
        return len(ranks) == 3

    wait_for(all_there)
    return process, ranks


def test_it_measures_and_leaves_nothing(start, tmp_path):
    """A token bucket of 12.3 MB/s that has saved up 4.5 kB cannot pass 256 KiB and its headers faster than
    (262144 * 1514 / 1448 - 4542) / 12.305e6 = 21.9 ms. A ring sends 4/3 of a buffer over each link, a server takes
    two and gives two."""
    operations = "point_to_point:one_way,all_reduce:ring,parameter_server"
    process = start("--operations", operations, "--sizes", "256 KiB", "--repetitions", "2", "--out", "lab.csv")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert namespaces_of(process) == []
    links = subprocess.run(["ip", "-br", "link"], text=True, capture_output=True, check=True).stdout
    assert "port0" not in links
    assert "bridge0" not in links
    message, ring, served = read_measurements(tmp_path / "lab.csv")
    assert (message.operation, message.n_ranks, message.nbytes) == ("one_way", 2, 262144)
    assert (ring.operation, ring.n_hosts, ring.backend, ring.n_repetitions) == ("all_reduce", 3, "lab ring", 2)
    assert served.backend == "lab parameter_server"
    rate = 12.5e6 * 1514 / 1538
    frames = 262144 * 1514 / 1448
    for row, share in ((message, 1), (ring, 4 / 3), (served, 4)):
        assert row.min_s > (share * frames - 4 * 4542) / rate
        assert row.min_s < 5 * share * frames / rate
    lines = output.splitlines()
    assert lines[0].split() == ["operation", "bytes", "measured", "spread", "predicted", "error"]
    assert [line.split()[0] for line in lines[1:]] == operations.split(",")
    assert "wrote lab.csv" in errors


def test_latency_is_there():
    """A message crosses two links of 5 ms."""
    if not has_netem():
        pytest.skip("this kernel has no netem")
    cluster = Cluster.from_graph(star(2, bandwidth="100 Mbit/s", latency="5 ms"))
    (found,) = compare(cluster, parse_operations("point_to_point:one_way"), [4], 3)
    assert 9.9e-3 < found.row.median_s < 15e-3


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"])
def test_an_interrupt_leaves_nothing(start, number, code):
    process, ranks = started(start)
    clean()  # somebody else's cleaning does not touch a laboratory that is alive
    assert len(namespaces_of(process)) == 4
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code
    assert "Traceback" not in errors
    assert namespaces_of(process) == []
    assert not any(alive(rank) for rank in ranks)


def test_a_dead_rank_ends_the_laboratory(start):
    process, ranks = started(start)
    os.kill(ranks[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert errors.splitlines()[-1].startswith("error: rank ")
    assert "Traceback" not in errors
    assert namespaces_of(process) == []
    assert not any(alive(rank) for rank in ranks)


def test_what_a_killed_laboratory_leaves_is_removed_by_clean(start):
    process, ranks = started(start)
    process.kill()
    process.communicate()
    wait_for(lambda: not any(alive(rank) for rank in ranks))
    assert len(namespaces_of(process)) == 4
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", "from ddlsim.cli import main; main()", "lab", "--clean"]
    done = subprocess.run(command, text=True, capture_output=True, env=environment, check=True)
    assert done.stdout.startswith("removed ")
    assert namespaces_of(process) == []


def test_what_a_killed_laboratory_leaves_is_removed_when_the_next_one_starts(start):
    """That of one which still runs is left alone, and so are other namespaces."""
    running, ranks = started(start)
    killed, _ = started(start)
    name = f"{namespaces_of(killed)[0]}x"  # with a process in it, which does not end with its laboratory
    subprocess.run(["ip", "netns", "add", name], check=True)
    subprocess.run(["ip", "netns", "add", "ddlsim-others"], check=True)
    with subprocess.Popen(["ip", "netns", "exec", name, "sleep", "600"]) as sleeper:
        try:
            killed.kill()
            killed.communicate()
            assert len(namespaces_of(killed)) == 5
            next_one = start("--operations", "all_reduce:ring", "--sizes", "64 KiB", "--repetitions", "1")
            _, errors = next_one.communicate(timeout=60)
            assert next_one.returncode == 0, errors
            assert "note: removed 5 network namespaces left by killed runs\n" in errors
            assert namespaces_of(killed) == []
            assert sleeper.wait(timeout=30) == -signal.SIGKILL
            assert len(namespaces_of(running)) == 4
            assert all(alive(rank) for rank in ranks)
            listed = subprocess.run(["ip", "netns", "list"], text=True, capture_output=True, check=True).stdout
            assert "ddlsim-others" in listed.split()
        finally:
            sleeper.kill()
            subprocess.run(["ip", "netns", "delete", "ddlsim-others"], check=True)
