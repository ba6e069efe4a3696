"""Fabrics: one place for how groups exchange, on all workers or on a part of them."""

from __future__ import annotations

import dataclasses

import pytest

import ddlsim
from ddlsim import DPSGD, AllReduce, ConfigError, Experiment, Fabric, LocalSGD, Measured, ShardedUpdate
from ddlsim.collectives.nccl import bus_bandwidth, nccl_time


def step(strategy, cluster="dgx-a100-pod", workers=16, **more):
    return ddlsim.simulate(
        cluster, "resnet50", strategy, 32, workers, steps=2, warmup=0, compute=Measured("100 ms", 32), **more
    )


def test_a_fabric_becomes_the_strategy_s_own() -> None:
    wanted = Experiment("office-1gbe", "resnet50", LocalSGD(4), fabric=Fabric("double_binary_tree", "given", "nccl"))
    assert wanted.strategy == LocalSGD(4, algorithm="double_binary_tree", rank_order="given", cost="nccl")
    assert wanted.fabric is None
    assert wanted.strategy.label == "local SGD (4 steps, double_binary_tree, nccl cost)"


def test_a_fabric_is_said_once() -> None:
    with pytest.raises(ConfigError, match=r"all-reduce \(hierarchical, ddp\) already has .*; set the fabric only once"):
        Experiment("office-1gbe", "resnet50", AllReduce("hierarchical"), fabric=Fabric("ring", cost="nccl"))
    Experiment("office-1gbe", "resnet50", AllReduce("hierarchical"), fabric=Fabric("hierarchical"))
    with pytest.raises(ConfigError, match=r"fabric has no effect with D-PSGD .*its workers send messages"):
        Experiment("office-1gbe", "resnet50", DPSGD(), fabric=Fabric())


def test_a_sharded_update_has_both_collectives_on_the_fabric() -> None:
    wanted = Experiment("office-1gbe", "resnet50", ShardedUpdate(), fabric=Fabric("ring", "given", "nccl"))
    assert wanted.strategy == ShardedUpdate("ring", "ring", rank_order="given", cost="nccl")
    with pytest.raises(ConfigError, match="torus_2d"):
        Experiment("office-1gbe", "resnet50", ShardedUpdate(), fabric=Fabric("torus_2d"))


@pytest.mark.parametrize("strategy", [AllReduce, ShardedUpdate, lambda **more: LocalSGD(1, **more)])
def test_a_fabric_is_the_same_as_the_strategy_s_fields(strategy) -> None:
    own, given = step(strategy(cost="nccl")), step(strategy(), fabric=Fabric(cost="nccl"))
    assert own.end_time == given.end_time


def test_hierarchical_by_nccl_is_its_three_calls() -> None:
    """Two machines of eight: reduce-scatter inside, eight all-reduces of an eighth side by side, all-gather inside."""
    result = step(AllReduce("hierarchical", "none", cost="nccl"))
    cluster, nbytes = result.cluster, result.workloads[0].gradient_nbytes
    inside = [nccl_time(cluster, nbytes, kind=kind, ranks=8).seconds for kind in ("reduce_scatter", "all_gather")]
    pair = (int(cluster.workers[0]), int(cluster.workers[8]))
    bus = bus_bandwidth(cluster, 2, pair)[0] / 8  # of the machine's cards, which eight pairs share
    between = nccl_time(cluster, nbytes / 8, nodes=pair, bandwidth=bus).seconds
    assert result.step_time == pytest.approx(0.1 + sum(inside) + between, rel=1e-9)
    assert result.n_messages > 0
    halves = [
        nccl_time(cluster, nbytes / 8, kind=kind, nodes=pair, bandwidth=bus).seconds
        for kind in ("reduce_scatter", "all_gather")
    ]
    sharded = step(ShardedUpdate("hierarchical", "hierarchical", cost="nccl"))
    assert sharded.step_time == pytest.approx(0.1 + sum(inside) + sum(halves), rel=1e-9)


def test_bytes_of_hierarchical_by_nccl_are_those_of_the_simulated_one() -> None:
    """Inside 2 (m-1)/m S and between 2 (h-1)/h S/m of every worker, whoever carries them."""
    simulated, by_nccl = (step(AllReduce("hierarchical", "none", cost=cost)) for cost in ("simulated", "nccl"))
    assert by_nccl.nbytes_sent == pytest.approx(simulated.nbytes_sent, rel=1e-9)


def test_a_part_of_the_cluster_is_a_cluster_of_its_own() -> None:
    """Places 4 to 7 of a star are as good as 0 to 3, and have the links of their own machines."""
    first, part = (step(AllReduce(), "office-1gbe", places) for places in ([0, 1, 2, 3], [4, 5, 6, 7]))
    count = step(AllReduce(), "office-1gbe", 4)
    assert first.end_time == part.end_time == count.end_time
    assert first.nodes.tolist() == count.nodes.tolist() != part.nodes.tolist()
    busy = {str(name) for name in part.links.query("nbytes > 0")["src"]} if "src" in part.links else set()
    assert not busy & {"h0", "h1", "h2", "h3"}


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ([0, 99], r"workers = \[0, 99\]: position 99: cluster .* has only 8 devices; positions are 0 to 7"),
        ([0, 0], r"workers = \[0, 0\]: must list at least one position, without duplicates"),
        ([], r"workers = \[\]: must list at least one position, without duplicates"),
        (17, "workers = 17: cluster .* has only 8 devices; use at most 8"),
        ([0, -1], "workers"),
    ],
)
def test_places_that_are_not_there(workers, message) -> None:
    with pytest.raises(ConfigError, match=message):
        step(AllReduce(), "office-1gbe", workers)


def test_a_file_says_fabric_and_places(tmp_path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text(
        'cluster = "office-1gbe"\nmodel = "resnet50"\nworkers = [4, 5, 6]\nsteps = 4\n'
        'strategy = { type = "local-sgd", period = 2 }\nfabric = { algorithm = "double_binary_tree", cost = "nccl" }\n'
    )
    by_file = ddlsim.load_experiment(path)
    assert by_file == Experiment(
        "office-1gbe",
        "resnet50",
        LocalSGD(2),
        workers=(4, 5, 6),
        steps=4,
        fabric=Fabric("double_binary_tree", cost="nccl"),
    )


def test_calls_that_run_side_by_side_are_charged_together() -> None:
    """No shortcut takes less than the tightest link needs for all that it carries."""
    result = step(LocalSGD(1), compression=ddlsim.TopK(0.1), fabric=Fabric("hierarchical", cost="nccl"))
    assert float(result.links["busy"].max()) <= 1.0 + 1e-9
    with pytest.raises(ConfigError, match="the same number of workers on every machine"):
        step(LocalSGD(1), workers=12, fabric=Fabric("hierarchical", cost="nccl"))
    with pytest.raises(
        ConfigError, match="FSDP: a hierarchical algorithm needs the same number of workers on every machine"
    ):
        ddlsim.simulate("dgx-a100-pod", "resnet50", ddlsim.FSDP(reduce_scatter="hierarchical", cost="nccl"), 48, 12)


@pytest.mark.parametrize("strategy", [AllReduce, lambda algorithm: ddlsim.Parallel(data=8, algorithm=algorithm)])
def test_collectives_need_not_be_hashable(strategy) -> None:
    @dataclasses.dataclass
    class Custom:
        name: str

        def __call__(self, n_ranks):
            return ddlsim.collectives.build(self.name, n_ranks)

    def seconds(algorithm) -> float:
        return ddlsim.simulate("cloud-25g-16x8-v100", "resnet50", strategy(algorithm), 32, 8, steps=3).simulated_time

    times = {name: seconds(name) for name in ("ring", "binomial_tree")}
    assert {name: seconds(Custom(name)) for name in times} == times
    assert times["ring"] != times["binomial_tree"]


@pytest.mark.parametrize("workers", [3, 5, 6, 8])
@pytest.mark.parametrize("compression", [None, ddlsim.TopK(0.1), ddlsim.Threshold(0.1), ddlsim.FP16()], ids=str)
@pytest.mark.parametrize(
    "strategy",
    [AllReduce(), AllReduce(cost="nccl"), LocalSGD(2), LocalSGD(2, cost="nccl"), ddlsim.QsparseLocalSGD(2)],
    ids=lambda strategy: strategy.label,
)
def test_the_default_runs_with_any_number_of_workers(strategy, compression, workers) -> None:
    """Also where innermost groups have unequal numbers of workers, and with payloads of unknown size."""
    if isinstance(strategy, ddlsim.QsparseLocalSGD) and compression is not None:
        return
    training = ddlsim.Training("digits", updates=2)
    result = ddlsim.simulate(
        "three-regions-wan", "digits-cnn", strategy, 8, workers, compression=compression, training=training
    )
    assert len(result.recorder.updates) == 2
