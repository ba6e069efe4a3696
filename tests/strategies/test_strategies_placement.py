"""Where servers stand, in which order ranks form a ring, and which algorithm "auto" takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from draws import rows
from strategies_reference import uniform_star

import ddlsim
from ddlsim import AllReduce, Measured, Result, algorithm_names, collective_time, load_cluster, simulate
from ddlsim.cluster import racks, star
from ddlsim.plan.schedules import fastest
from ddlsim.runtime.servers import server_nodes

B = 1.25e9


def test_colocated_servers_are_spread_and_own_ones_come_first() -> None:
    cluster = uniform_star(8)
    names = [str(name) for name in cluster.node_names]

    def places(workers: int, servers: int, placement: str) -> list[str]:
        nodes = cluster.workers[:workers].tolist()
        return [names[node] for node in server_nodes(cluster, nodes, servers, placement)]

    assert places(8, 2, "colocated") == ["h0", "h4"]
    assert places(6, 3, "colocated") == ["h0", "h2", "h4"]
    assert places(3, 3, "colocated") == ["h0", "h1", "h2"]
    assert places(5, 2, "own") == ["h5", "h6"]


def two_racks_run(order: object) -> Result:
    """Two racks of four; the trunk between them is as fast as one machine; no latency."""
    cluster = load_cluster(racks(2, 4, bandwidth=B, latency=0.0, trunk_bandwidth=B))
    strategy = AllReduce("ring", "none", order)  # type: ignore[arg-type]
    return simulate(cluster, "alexnet", strategy, 8, steps=1, warmup=0, compute=Measured(0.1, 8))


INTERLEAVED = (0, 4, 1, 5, 2, 6, 3, 7)


@pytest.mark.parametrize(
    ("order", "crossings"), [("given", 1), ("topology", 1), (INTERLEAVED, 4), ((4, 5, 0, 1, 2, 3, 6, 7), 1)], ids=str
)
def test_a_ring_crosses_the_trunk_as_often_as_its_order_says(order: object, crossings: int) -> None:
    """All messages of a step have S/p bytes; the trunk carries as many of them each way as the ring crosses it:
    t = 2 (p-1) * crossings * S/p / B."""
    result = two_racks_run(order)
    nbytes = 4.0 * result.workloads[0].model.n_params
    assert result.step_time == pytest.approx(0.1 + 2 * 7 * crossings * nbytes / 8 / B, rel=1e-9)


@pytest.mark.parametrize(("model", "n"), [("digits-cnn", 8), ("alexnet", 8), ("cifar-cnn", 5), ("alexnet", 6)])
def test_auto_takes_the_fastest(model: str, n: int) -> None:
    """On equal terms (one exchange, nothing else going on) no single algorithm beats "auto"."""

    def step(algorithm: str) -> Result:
        return simulate(
            uniform_star(n), model, AllReduce(algorithm, "none"), 8, n, steps=1, warmup=0, compute=Measured(0.01, 8)
        )

    auto = step("auto")
    (note,) = auto.notes
    chosen = note.removeprefix("auto: ").split(" ")[0]
    times = {name: step(name).step_time for name in algorithm_names() if name != "parameter_server"}
    assert auto.step_time == times[chosen] == min(times.values())
    assert max(times.values()) - 0.01 > 1.2 * (auto.step_time - 0.01)  # there was something to choose


@pytest.mark.parametrize(
    ("model", "strategy"),
    rows(
        [
            ("gpt2", ddlsim.Parallel(tensor=2, pipeline=2)),
            ("gpt2", ddlsim.Parallel(pipeline=2)),
            ("vgg16", ddlsim.Hybrid()),
        ],
        1,
    ),
)
def test_auto_takes_the_fastest_in_plans(model: str, strategy: Any) -> None:
    """Where replicas sum few sizes at a time, the run takes as long as with the faster of rings and doubling."""

    def run(algorithm: str) -> Result:
        fabric = ddlsim.Fabric(algorithm)
        return simulate("dgx-h100-pod", model, strategy, 32, 8, fabric=fabric, steps=1, warmup=1)

    auto = run("auto")
    assert any(note.startswith("auto: ") for note in auto.notes)
    assert auto.step_time <= 1.001 * min(run(name).step_time for name in ("ring", "halving_doubling"))


def test_auto_takes_the_first_by_name_of_those_that_tie() -> None:
    """Between two ranks a ring in pieces takes as long as recursive doubling, but for the last bit of a sum."""
    cluster = load_cluster(star(4, bandwidth="1 Gbit/s", latency="3 us"))
    nodes, nbytes = cluster.workers[:2].tolist(), 1e7 / 3.0
    times = {name: collective_time(cluster, name, nbytes, ranks=2) for name in ("pipelined_ring", "recursive_doubling")}
    assert times["pipelined_ring"] > times["recursive_doubling"]
    assert times["pipelined_ring"] == pytest.approx(times["recursive_doubling"], rel=1e-14)
    assert fastest(cluster, nodes, np.arange(2), nbytes, []) == "pipelined_ring"
