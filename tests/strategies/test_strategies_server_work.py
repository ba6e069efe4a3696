"""What servers with work take, against timelines by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from strategies_reference import uniform_star

import ddlsim
from ddlsim import Measured, ParameterServer, Priority, Result, ServerWork, load_cluster, simulate
from ddlsim.cluster import MultiGpu, star
from ddlsim.errors import ConfigError
from ddlsim.runtime.server_work import BYTEPS_SERVERS, EARLY_MXNET_SERVERS, MXNET_SERVERS, TENSORFLOW_SERVERS

EXACT = {"rel": 1e-9, "abs": 0.0}
BANDWIDTH, ALPHA = 1.25e9, 40e-6  # of uniform_star: bytes/s, s over two links
PACE = 1 / 0.5e9  # s per byte of a pass: slower than the network, so that a server's thread is what counts
COMPUTE = 0.05
ONCE = Priority("1 GB", 1000)  # everything leaves, whole, as soon as it is ready


def one_tensor(folder: Path, n_tensors: int = 1) -> str:
    """A file of a model whose layers have a million weights each, and no bias."""
    path = folder / "model.toml"
    layer = '{ type = "dense", units = 1000, bias = false }'
    path.write_text(f'title = "Layers"\ninput = [1000]\nlayers = [{", ".join([layer] * n_tensors)}]\n')
    return str(path)


def steps(model: str, strategy: ParameterServer, workers: int, machines: int, n: int = 2) -> Result:
    cluster = uniform_star(machines)
    return simulate(cluster, model, strategy, 1, workers, steps=n, warmup=0, compute=Measured(COMPUTE, 1))


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("k", [1, 2])
def test_one_tensor(n: int, k: int, tmp_path: Path) -> None:
    """N workers push S/k to each server at the same time; the server copies the first part (2 passes), adds the
    others (3 each) and updates (5); acknowledgement and request are latencies; its copies for N answers (2 each)
    are slower than the network, so that only the last answer's way counts; the worker copies all together (2)."""
    work = ServerWork(1 / PACE, update=5.0)
    result = steps(one_tensor(tmp_path), ParameterServer(k, overlap="none", work=work), n, n + k, n=1)
    part = 4e6 / k
    push = ALPHA + max(n * part, 4e6) / BANDWIDTH
    server = (2 + 3 * (n - 1) + 5) * part * PACE + 2 * ALPHA + 2 * n * part * PACE
    pull = ALPHA + k * part / BANDWIDTH + 2 * 4e6 * PACE
    assert result.step_times == pytest.approx([COMPUTE + push + server + pull], **EXACT)


def test_servers_without_work_only_acknowledge(tmp_path: Path) -> None:
    """No passes at all: the pushes and pulls of servers that take no time, and the two latencies between them."""
    work = ServerWork(first_push=0, push=0, update=0, pull=0, deliver=0)
    model = one_tensor(tmp_path)
    for servers in (1, 2):
        free = steps(model, ParameterServer(servers, overlap="none"), 3, 5)
        acknowledged = steps(model, ParameterServer(servers, overlap="none", work=work), 3, 5)
        assert acknowledged.step_time == pytest.approx(free.step_time + 2 * ALPHA, **EXACT)
        assert acknowledged.channel_nbytes == pytest.approx(free.channel_nbytes, **EXACT)


@pytest.mark.parametrize(("unsplit_below", "busy"), [("5 MB", 1), ("4 MB", 2), (0.0, 2)])
def test_small_tensors_go_whole_to_one_server(unsplit_below: str | float, busy: int, tmp_path: Path) -> None:
    """One tensor of 4 MB and two servers: below the bound one of them does everything."""
    work = ServerWork(1 / PACE, unsplit_below=unsplit_below)
    result = steps(one_tensor(tmp_path), ParameterServer(2, overlap="none", work=work), 1, 3, n=1)
    part = 4e6 / busy
    expected = COMPUTE + 4 * ALPHA + 2 * 4e6 / BANDWIDTH + (2 + 2 + 2) * part * PACE + 2 * 4e6 * PACE
    assert result.step_times == pytest.approx([expected], **EXACT)


def test_small_tensors_take_turns_at_the_servers(tmp_path: Path) -> None:
    """Two whole tensors of 4 MB; the second layer's is ready while the first computes the fifth and last part of the
    step (forward 1 + 1, backward 2 + 1, as images need no gradient).

    One server: it handles both pushes (2 to copy, 2 to update, each), then both pulls (2 each); the worker copies the
    last answer (2). Two servers: each handles a push and a pull; the worker copies both answers, one after the other.
    """
    one, two = (
        steps(
            one_tensor(tmp_path, 2),
            ParameterServer(k, overlap=ONCE, work=ServerWork(1 / PACE, unsplit_below="5 MB")), 1, 1 + k, n=1,
        ).step_time
        for k in (1, 2)
    )  # fmt: skip
    ways = 0.8 * COMPUTE + 2 * (ALPHA + 4e6 / BANDWIDTH)
    assert one == pytest.approx(ways + (4 + 4 + 2 + 2 + 2) * 4e6 * PACE, **EXACT)
    assert two == pytest.approx(ways + 2 * ALPHA + (4 + 2 + 2 + 2) * 4e6 * PACE, **EXACT)


def test_slices_overlap_with_themselves(tmp_path: Path) -> None:
    """A tensor waits at each stop until it is there as a whole; slices go on one by one."""
    model = one_tensor(tmp_path)
    whole, sliced = (
        steps(model, ParameterServer(2, "colocated", overlap, work=ServerWork("2 GB/s")), 2, 2, n=4).step_times[1:-1]
        for overlap in (ONCE, Priority("0.25 MB", 16))
    )
    assert sliced.mean() < 0.97 * whole.mean()


def test_through_the_memory_of_a_machine(tmp_path: Path) -> None:
    """Two GPUs of one machine: one hands its gradients to the other (S/B_p over two PCIe links), this one copies the
    sum to the CPU, where the server is, and back; the server and the machine's own thread work in between."""
    host = MultiGpu(n_gpus=2, pcie_bandwidth=12e9, pcie_latency=1e-6, n_pcie_switches=1)
    cluster = load_cluster(star(1, bandwidth=BANDWIDTH, latency=20e-6, host=host))
    strategy = ParameterServer(1, "colocated", "none", local_reduction=True, work=ServerWork(1 / PACE))
    result = simulate(
        cluster, one_tensor(tmp_path), strategy, 1, steps=2, warmup=0, compute=Measured(COMPUTE, 1), device="v100"
    )
    copy = 2e-6 + 4e6 / 12e9
    assert result.step_times == pytest.approx([COMPUTE + 4 * copy + (2 + 2 + 2 + 2) * 4e6 * PACE] * 2, **EXACT)


def test_work_changes_nothing_of_what_is_learned() -> None:
    def learned(work: ServerWork | None) -> Result:
        return simulate(
            uniform_star(4), "digits-cnn", ParameterServer(2, work=work), 16, 2,
            training=ddlsim.Training("digits", rate=0.1, updates=3), compute=Measured(0.01, 16),
        )  # fmt: skip

    with_work, without = learned(ServerWork("1 GB/s")), learned(None)
    assert with_work.end_time > without.end_time
    assert (with_work.params == without.params).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ServerWork(push=-1), "ServerWork: push = -1: must be finite and not negative, such as 2"),
        (lambda: ServerWork(memory="10 GB"), "10 GB"),
        (lambda: ServerWork(memory=0.0), "ServerWork: memory = 0.0: must be finite and above 0"),
        (lambda: ParameterServer(work="10 GB/s"), "work = '10 GB/s': must be a ServerWork"),  # type: ignore[arg-type]
    ],
    ids=["passes", "size", "zero", "text"],
)
def test_errors(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


def test_compression_has_a_cost_of_its_own() -> None:
    with pytest.raises(ConfigError, match="work is the cost of processing uncompressed gradients"):
        simulate(uniform_star(3), "cifar-cnn", ParameterServer(work=ServerWork()), 8, 2, compression=ddlsim.FP16())


# ---------------------------------------------------------------- several threads


@pytest.mark.parametrize(("threads", "turns"), [(1, 3), (2, 2), (3, 1), (8, 1)])
def test_tensors_belong_to_threads(threads: int, turns: int, tmp_path: Path) -> None:
    """Three whole tensors of one worker, ready at once: with one thread a server copies, updates and answers them one
    after the other (2 + 2 + 2 passes each) and the machine copies each answer (2); with two the first and the third
    have a thread, with three each has its own. The network takes next to nothing."""
    work = ServerWork(1 / PACE, threads=threads)
    host = load_cluster(star(2, bandwidth=1e12, latency=0.0))
    model, buckets = one_tensor(tmp_path, 3), ONCE
    result = simulate(host, model, ParameterServer(1, overlap=buckets, work=work), 1, 1, steps=1, warmup=0,
                      compute=Measured(1e-9, 1))  # fmt: skip
    # all pushes (4 passes a tensor), then the pulls (2); each is copied when it has come (2)
    assert result.step_time == pytest.approx((turns * (4 + 2) + 2) * 4e6 * PACE, rel=2e-3)


def test_cores_that_share_a_sum(tmp_path: Path) -> None:
    """Pushes and the update (2 + 3 + 5 passes) are four times as fast, answers and their copies are not."""
    works = [ServerWork(1 / PACE, together=rate, update=5.0) for rate in (None, 4 / PACE)]
    model = one_tensor(tmp_path)
    alone, shared = (steps(model, ParameterServer(overlap="none", work=work), 2, 3, n=1).step_time for work in works)
    assert alone - shared == pytest.approx(0.75 * (2 + 3 + 5) * 4e6 * PACE, **EXACT)


def test_as_fast_together_as_alone_changes_nothing(tmp_path: Path) -> None:
    model, strategies = (
        one_tensor(tmp_path, 2),
        [
            ParameterServer(2, "colocated", Priority("1 MB", 4), work=ServerWork("2 GB/s", together=rate))
            for rate in (None, "2 GB/s")
        ],
    )
    one, other = (steps(model, strategy, 3, 3).step_times.tolist() for strategy in strategies)
    assert one == other


@pytest.mark.parametrize("work", [EARLY_MXNET_SERVERS, MXNET_SERVERS, BYTEPS_SERVERS, TENSORFLOW_SERVERS])
def test_servers_of_systems_are_slower_than_those_that_take_no_time(work: ServerWork, tmp_path: Path) -> None:
    model = one_tensor(tmp_path, 2)
    strategies = [ParameterServer(2, "colocated", ONCE, work=each) for each in (None, work)]
    free, taken = (steps(model, strategy, 4, 4).step_time for strategy in strategies)
    assert free < taken < 4 * free
