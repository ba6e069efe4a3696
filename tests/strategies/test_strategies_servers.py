"""Parameter servers: synchronous steps, asynchronous rates and staleness against closed forms."""

from __future__ import annotations

import itertools

import networkx as nx
import numpy as np
import pytest
from strategies_reference import layer_parts, uniform_star, wait_free_end

from ddlsim import (
    AsyncParameterServer,
    Cluster,
    Exponential,
    Fabric,
    Gamma,
    Lognormal,
    Measured,
    OverlapSlowdown,
    ParameterServer,
    Result,
    ServerWork,
    Training,
    Uniform,
    load_cluster,
    simulate,
)
from ddlsim.cluster import MultiGpu, star
from ddlsim.collectives.push_pull import push_pull
from ddlsim.errors import ConfigError
from ddlsim.workload.jitter import Jitter

EXACT = {"rel": 1e-9, "abs": 0.0}
BANDWIDTH, ALPHA = 1.25e9, 40e-6  # of uniform_star: bytes/s, s over two links


def unequal_star(n_workers: int, n_servers: int, worker_bandwidth: float, server_bandwidth: float) -> Cluster:
    """Machines on one switch; the ones after the workers have their own bandwidth."""
    graph = star(n_workers + n_servers, bandwidth=worker_bandwidth, latency=20e-6)
    for a, b, data in graph.edges(data=True):
        if {a, b} & {f"h{i}" for i in range(n_workers, n_workers + n_servers)}:
            data["bandwidth"] = server_bandwidth
    assert isinstance(graph, nx.MultiDiGraph)
    return load_cluster(graph)


# ---------------------------------------------------------------- synchronous


@pytest.mark.parametrize("work", [None, ServerWork("1 GB/s", 2, first_push=0.0, push=0.0, update=0.0, pull=0.0)])
def test_workers_of_a_machine_scatter_and_gather_on_a_fabric(work: ServerWork | None) -> None:
    """n GPUs on a PCIe switch of V, m machines and a server with B: 2 (n - 1)/n S/V inside, m S/B each way; with work
    each share is copied to the CPU and back, and two threads copy answers, 2 passes of S/n, n/2 times."""
    n, m, inside, between = 4, 3, 4e9, 1e9
    host = MultiGpu(n, pcie_bandwidth=inside, cpu_bandwidth=1e15, pcie_latency=0.0)
    cluster = star(m + 1, bandwidth=between, latency=0.0, host=host)
    common = {"batch_size": 8, "workers": n * m, "steps": 2, "warmup": 0, "compute": Measured(0.05, 8)}
    for fabric in (Fabric("ring"), Fabric("halving_doubling")):
        result = simulate(cluster, "cifar-cnn", ParameterServer(overlap="none", work=work), fabric=fabric, **common)
        nbytes = 4.0 * result.workloads[0].model.n_params
        deliver = 0.0 if work is None else 2 * nbytes / n / inside + n / 2 * 2 * nbytes / n / 1e9
        expected = 0.05 + 2 * (n - 1) / n * nbytes / inside + 2 * m * nbytes / between + deliver
        assert result.step_times == pytest.approx([expected] * 2, rel=1e-6)
    learning = {"training": Training("digits", updates=3), "batch_size": 8, "workers": n * m}
    one, other = (
        simulate(cluster, "digits-cnn", ParameterServer(fabric=fabric), **learning) for fabric in (None, Fabric("nccl"))
    )
    assert one.params.tolist() == other.params.tolist()
    with pytest.raises(ConfigError, match=r"needs the same number of workers on each machine, not \[1, 4\]"):
        simulate(cluster, "cifar-cnn", ParameterServer(fabric=Fabric()), workers=5, batch_size=8)
    with pytest.raises(ConfigError, match="both sum gradients inside machines; set only one of them"):
        ParameterServer(local_reduction=True, fabric=Fabric())


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("server_bandwidth", [BANDWIDTH, 4 * BANDWIDTH, 20 * BANDWIDTH])
def test_own_machines(n: int, k: int, server_bandwidth: float) -> None:
    """Each direction takes alpha + max(S/B_w, N S/(k B_s))."""
    result = simulate(
        unequal_star(n, k, BANDWIDTH, server_bandwidth), "cifar-cnn", ParameterServer(k, overlap="none"), 8, n,
        steps=2, warmup=0, compute=Measured(0.05, 8),
    )  # fmt: skip
    nbytes = 4.0 * result.workloads[0].model.n_params
    direction = ALPHA + max(nbytes / BANDWIDTH, n * nbytes / (k * server_bandwidth))
    assert result.step_times == pytest.approx([0.05 + 2 * direction] * 2, **EXACT)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_colocated_on_all_machines_costs_what_a_ring_carries(n: int) -> None:
    """2 alpha + 2 (N-1)/N S/B: the bytes of a ring all-reduce, without its latencies."""
    result = simulate(
        uniform_star(n), "alexnet", ParameterServer(n, "colocated", "none"), 8, n, steps=2, warmup=0,
        compute=Measured(0.05, 8),
    )  # fmt: skip
    nbytes = 4.0 * result.workloads[0].model.n_params
    expected = 0.05 + 2 * ALPHA + 2 * (n - 1) / n * nbytes / BANDWIDTH
    assert result.step_times == pytest.approx([expected] * 2, **EXACT)


@pytest.mark.parametrize("n", [2, 5])
def test_layers_leave_as_they_are_ready(n: int) -> None:
    """Wait-free backpropagation through servers: the same recurrence with the servers' exchange time."""
    result = simulate(
        uniform_star(n + 2), "googlenet", ParameterServer(2), 8, n, steps=2, warmup=0, compute=Measured(0.1, 8)
    )
    work = result.workloads[0]

    def exchange(nbytes: float) -> float:
        return 2 * (ALPHA + max(nbytes, n * nbytes / 2) / BANDWIDTH)

    expected = work.forward_time + wait_free_end(layer_parts(work), work.backward_time, exchange)
    assert result.step_times == pytest.approx([expected] * 2, **EXACT)


@pytest.mark.parametrize("m", [2, 4])
def test_local_reduction(m: int) -> None:
    """Two GPUs a machine: one hands its gradients to the other over PCIe (two links), this one pushes and pulls
    for both, and hands the result back: 2 (2 a_p + S/B_p) + 2 ((m-1)/m S/B + latencies)."""
    host = MultiGpu(n_gpus=2, pcie_bandwidth=12e9, pcie_latency=1e-6, n_pcie_switches=1)
    cluster = load_cluster(star(m, bandwidth=BANDWIDTH, latency=20e-6, host=host))
    strategy = ParameterServer(m, "colocated", "none", local_reduction=True)
    result = simulate(
        cluster, "alexnet", strategy, 8, 2 * m, steps=2, warmup=0, compute=Measured(0.05, 8), device="v100"
    )
    nbytes = 4.0 * result.workloads[0].model.n_params
    inside = 2e-6 + nbytes / 12e9
    between = 2 * 20e-6 + 2 * 1e-6 + (m - 1) / m * nbytes / BANDWIDTH  # the CPU is one PCIe link away
    assert result.step_times == pytest.approx([0.05 + 2 * inside + 2 * between] * 2, **EXACT)
    # without it every GPU pushes by itself: twice the bytes on the interface
    alone = simulate(
        cluster, "alexnet", ParameterServer(m, "colocated", "none"), 8, 2 * m, steps=1, warmup=0,
        compute=Measured(0.05, 8), device="v100",
    )  # fmt: skip
    assert alone.step_time > 0.05 + 4 * (m - 1) / m * nbytes / BANDWIDTH


def test_local_reduction_in_a_star() -> None:
    """Three GPUs of four hand theirs to the first one over its PCIe link, and get the result over it: 2 (2 a + 3 S/B);
    the only server is on its own machine: two more messages to the CPU next to it, 2 (a + S/B)."""
    host = MultiGpu(n_gpus=4, pcie_bandwidth=12e9, pcie_latency=1e-6)
    cluster = load_cluster(star(1, bandwidth=BANDWIDTH, latency=20e-6, host=host))
    strategy = ParameterServer(1, "colocated", "none", local_reduction="star")
    result = simulate(cluster, "alexnet", strategy, 8, steps=1, warmup=0, compute=Measured(0.05, 8), device="v100")
    nbytes = 4.0 * result.workloads[0].model.n_params
    inside = 2 * (2e-6 + 3 * nbytes / 12e9)
    # GPU -> PCIe switch -> CPU
    assert result.step_times == pytest.approx([0.05 + inside + 2 * (2e-6 + nbytes / 12e9)], **EXACT)


def test_unknown_way_of_local_reduction() -> None:
    with pytest.raises(ConfigError, match="local_reduction = 'ring': must be False, True, 'tree' or 'star'"):
        ParameterServer(local_reduction="ring")


@pytest.mark.parametrize("star", [False, True])
@pytest.mark.parametrize("hosts", [None, [0, 0, 0, 1, 1, 2], [0, 1, 0, 1, 0, 1], [0] * 6, list(range(6))])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_push_and_pull_average_all_gradients(k: int, hosts: list[int] | None, star: bool) -> None:
    """Every worker ends with every worker's contribution exactly once (the servers contribute nothing: their
    own buffers must not get into the sum)."""
    schedule = push_pull(6, k, hosts, star=star)
    contributions = np.zeros((6 + k, k, 6), dtype=np.int64)
    contributions[np.arange(6), :, np.arange(6)] = 1
    for lane in schedule.lanes:
        for round in lane:
            for _ in range(round.repeat):
                before = contributions.copy()
                owner, chunk = schedule.chunks(round)
                src, dst = round.src[owner], round.dst[owner]
                if round.reduce:
                    np.add.at(contributions, (dst, chunk), before[src, chunk])
                else:
                    contributions[dst, chunk] = before[src, chunk]
    np.testing.assert_array_equal(contributions[:6], np.ones((6, k, 6)))


# ---------------------------------------------------------------- asynchronous


def async_run(
    n: int, *, compute: float = 0.1, servers: int = 1, updates: int = 200, jitter: Jitter | None = None,
    speed: list[float] | None = None, apply_time: float | str = 0.0, server_bandwidth: float = 1e15,
    model: str = "cifar-cnn", warmup: int = 0, seed: int = 0,
) -> Result:  # fmt: skip
    more: dict[str, Jitter] = {} if jitter is None else {"jitter": jitter}
    return simulate(
        unequal_star(n, servers, BANDWIDTH, server_bandwidth), model,
        AsyncParameterServer(servers, apply_time=apply_time), 8, n, steps=updates // n, warmup=warmup,
        compute=Measured(compute, 8), speed=speed, seed=seed, **more,
    )  # fmt: skip


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("speed", [[1.0] * 4, [1.0, 2.0, 0.5, 1.3]], ids=["equal", "unequal"])
def test_everybody_goes_at_its_own_rate(speed: list[float], servers: int) -> None:
    """With servers that are never busy, worker i's step takes t_i + 2 (alpha + S/B), whatever the others do,
    and the throughput is the sum of their rates."""
    result = async_run(4, speed=speed, servers=servers, apply_time=0.0, updates=400)
    nbytes = 4.0 * result.workloads[0].model.n_params
    cycles = [0.1 / s + 2 * (ALPHA + nbytes / BANDWIDTH) for s in speed]
    for ends, cycle in zip(result.recorder.step_end, cycles, strict=True):
        assert ends == pytest.approx(cycle * np.arange(1, len(ends) + 1), rel=1e-9)
    rate = sum(8 / cycle for cycle in cycles)
    assert result.throughput == pytest.approx(rate, rel=0.02)  # the run ends between updates


def test_apply_time_is_part_of_the_cycle() -> None:
    result = async_run(1, apply_time="30 ms", updates=5)
    nbytes = 4.0 * result.workloads[0].model.n_params
    cycle = 0.1 + 2 * (ALPHA + nbytes / BANDWIDTH) + 0.03
    assert result.recorder.step_end[0] == pytest.approx(cycle * np.arange(1, 5), rel=1e-9)


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16])
def test_a_server_of_fixed_service_time_saturates(n: int) -> None:
    """Closed queue of fixed times (asymptotic bounds of operational analysis, met exactly by D/D/1): update rate
    min(N/(cycle + a), 1/a)."""
    apply_time = 0.02
    result = async_run(n, apply_time=apply_time, updates=100 * n, warmup=20)
    nbytes = 4.0 * result.workloads[0].model.n_params
    cycle = 0.1 + 2 * (ALPHA + nbytes / BANDWIDTH) + apply_time
    assert result.throughput / 8 == pytest.approx(min(n / cycle, 1 / apply_time), rel=1e-9)
    # waiting is time in the queue only: none while the server has time to spare
    assert (result.workers["waiting"].sum() > 1.0) == (n / cycle > 1 / apply_time)


@pytest.mark.parametrize(
    "jitter", [Exponential(), Gamma(1.5), Uniform(0.5, 1.5), Lognormal(0.3)], ids=lambda j: type(j).__name__
)
@pytest.mark.parametrize("apply_time", [0.0, 0.02])
def test_jitter_stays_below_the_bounds_of_fixed_times(jitter: Jitter, apply_time: float) -> None:
    """N/(mean cycle) and 1/a bound the rate of any closed network (operational analysis)."""
    n = 8
    result = async_run(n, jitter=jitter, apply_time=apply_time, updates=800, seed=3)
    nbytes = 4.0 * result.workloads[0].model.n_params
    cycle = 0.1 * jitter.mean + 2 * (ALPHA + nbytes / BANDWIDTH) + apply_time
    bound = n / cycle if apply_time == 0.0 else min(n / cycle, 1 / apply_time)
    assert 0.8 * bound < result.throughput / 8 < 1.03 * bound


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_staleness_of_equal_fixed_times(n: int) -> None:
    """After the first round every gradient is N - 1 updates old; in the first round the i-th is i old."""
    staleness = async_run(n, updates=20 * n).recorder.staleness
    assert staleness == [*range(n), *([n - 1] * (len(staleness) - n))]


@pytest.mark.parametrize(
    ("jitter", "speed"),
    [
        (Exponential(), None),
        (Uniform(0.5, 1.5), None),
        (Gamma(2.0), None),
        (None, [1.0, 3.1, 0.37, 1.7, 0.9, 0.21, 2.3, 1.1]),
        (Exponential(), [1.0, 20.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ],
    ids=["exponential", "uniform", "gamma", "unequal", "one-20-times-as-fast"],
)
@pytest.mark.parametrize("apply_time", [0.0, 0.004])
def test_mean_staleness_is_the_number_of_others(
    jitter: Jitter | None, speed: list[float] | None, apply_time: float
) -> None:
    """Between two updates of one worker the others make N - 1 in the mean, whatever the distributions."""
    n = 8
    result = async_run(n, jitter=jitter, speed=speed, apply_time=apply_time, updates=2400)
    assert result.mean_staleness == pytest.approx(n - 1, rel=0.02)  # but for the ends of the run
    assert sum(result.staleness_histogram.values()) == len(result.recorder.staleness)


def test_staleness_of_exponential_times_is_geometric() -> None:
    """P(tau = s) = 1/N (1 - 1/N)^s without memory: each update is anybody's with the same probability."""
    n = 4
    result = async_run(n, jitter=Exponential(), updates=4000, model="digits-cnn", compute=10.0)
    counts = result.staleness_histogram
    total = sum(counts.values())
    for s in range(6):
        p = (1 - 1 / n) ** s / n
        z = (counts[s] - total * p) / np.sqrt(total * p * (1 - p))
        assert abs(z) < 4


def test_updates_count_once_per_gradient_over_all_shards() -> None:
    one, three = (async_run(4, servers=k, updates=40) for k in (1, 3))
    assert len(one.recorder.updates) == len(three.recorder.updates) == 40
    assert len(three.recorder.staleness) >= 3 * 40


def test_a_congested_server_limits_the_rate() -> None:
    """Fixed times keep all in step: they share the server's interface on the way in, then on the way out,
    N/(t_c + 2 (alpha + N S/B)). Random times use both directions at once, at most B/S updates a second."""
    fixed = async_run(8, model="alexnet", server_bandwidth=BANDWIDTH, updates=160, warmup=2)
    nbytes = 4.0 * fixed.workloads[0].model.n_params
    lock_step = 8 / (0.1 + 2 * (ALPHA + 8 * nbytes / BANDWIDTH))
    assert fixed.throughput / 8 == pytest.approx(lock_step, rel=1e-9)
    spread = async_run(
        8, model="alexnet", server_bandwidth=BANDWIDTH, updates=160, warmup=2, jitter=Exponential(), compute=0.5
    )
    assert lock_step < spread.throughput / 8 <= BANDWIDTH / nbytes * (1 + 1e-9)


def test_order_of_workers_does_not_matter() -> None:
    """The same speeds, dealt differently: the same update times."""
    speeds = [1.0, 2.0, 0.7]
    times = []
    for order in itertools.permutations(speeds):
        result = async_run(3, speed=list(order), updates=60)
        times.append([time for time, _ in result.recorder.updates])
    for other in times[1:]:
        assert other == pytest.approx(times[0], rel=1e-9)


@pytest.mark.parametrize(
    ("cluster", "workers", "option", "note"),
    [
        ("office-1gbe", 4, {"fabric": Fabric("nccl")}, "fabric has no effect: every machine has one worker"),
        (
            "office-1gbe",
            4,
            {"strategy": ParameterServer(1, "colocated", local_reduction=True)},
            "local_reduction has no effect",
        ),
        (
            "office-1gbe",
            4,
            {"overlap_slowdown": OverlapSlowdown(inside=1.5)},
            "overlap_slowdown has no effect",
        ),
        ("dgx1-v100", 8, {"overlap_slowdown": OverlapSlowdown(between=1.5)}, "overlap_slowdown has no effect: all"),
    ],
)
def test_options_for_machines_without_such_workers_are_noted(
    cluster: Cluster | str, workers: int, option: dict[str, object], note: str
) -> None:
    given = {
        "model": "lenet5",
        "workers": workers,
        "batch_size": 8,
        "steps": 2,
        "strategy": ParameterServer(1, "colocated"),
    }
    plain, found = (simulate(cluster, **each) for each in (given, given | option))  # type: ignore[arg-type]
    assert found.step_times.tolist() == plain.step_times.tolist()
    assert [text for text in found.notes if text not in plain.notes and text.startswith(note)]
