"""Ways to share a model out: what is tried, bounds that no simulation beats, and the search against trying all."""

import gc
import itertools
import sys
import weakref
from collections import Counter

import networkx as nx
import numpy as np
import pytest
from draws import few, seeds
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import ddlsim
from ddlsim import FSDP, ConfigError, Experiment, Fabric, Hybrid, Parallel, Splits, recommend
from ddlsim.cli import app
from ddlsim.cluster import MultiGpu, load_cluster, star
from ddlsim.plan import ORDERS, Mesh, balanced_chunks, pipeline
from ddlsim.plan.bounds import Carriers
from ddlsim.plan.pipeline import Costs, Outline, activations_held, outlined
from ddlsim.planner.bounds import Bounds
from ddlsim.planner.candidates import candidates, nature_of
from ddlsim.planner.decide import reasons
from ddlsim.planner.search import PRUNED, SIMULATED, Search, Trial
from ddlsim.planner.target import Figures
from ddlsim.workload.compute import make_workload
from ddlsim.workload.devices import load_device
from ddlsim.workload.model import load_model

CLUSTER = "dgx1-v100-16"
#: of strategies with a step program
LIMITS = ("what computing cannot hide", "bytes that must travel")


def options(strategies, workers=16, batch=32, cluster=CLUSTER, model="bert-base", **changes):
    loaded = load_cluster(cluster)
    base = Experiment(loaded, model, **changes)
    return candidates(base, [loaded], [workers], strategies, [None], [batch])


SOME = [
    Parallel(pipeline=4, micro_batch=2),
    Parallel(pipeline=2, interleave=3, sharded=True),
    Parallel(pipeline=8, order="gpipe", recompute="stage"),
    Parallel(pipeline=4, order="zb-1p"),
    Parallel(pipeline=4, order="zb-v", overlap="none"),
    Parallel(tensor=4, pipeline=2, sequence=True, sharded=True, recompute="full"),
    Parallel(tensor=2, pipeline=4, interleave=3, recompute="selective", overlap="layer"),
    Parallel(tensor=4),
    Parallel(tensor=4, sequence=True, tp_comm_overlap=True),
    Parallel(sharded=True, micro_batch=2),
    Parallel(tensor=4, sequence=True, sharded="full", recompute="full"),
    Parallel(pipeline=4, micro_batch=2, sharded="full"),
    Parallel(sharded="full", micro_batch=2),
]


@pytest.mark.parametrize("bandwidth", few([None, "0.2 Gbit/s"], 0))
def test_no_simulation_beats_its_bound(bandwidth):
    cluster = CLUSTER if bandwidth is None else f"{CLUSTER}+bandwidth={bandwidth}"
    found, _ = options(SOME, cluster=cluster)
    bounds = Bounds()
    ratios = []
    for each in found:
        bound = bounds.of(each)
        assert bound.limit in LIMITS
        result = ddlsim.simulate(each.experiment)
        ratios.append(result.throughput / bound.figures.throughput)
        assert result.throughput <= bound.figures.throughput
        assert result.efficiency <= bound.figures.efficiency
    if bandwidth is None:  # and it is no empty one
        assert np.mean(ratios) > 0.8
        assert max(ratios) > 0.95


@pytest.mark.parametrize("batches", [(64, 2), (2, 64)])
@pytest.mark.parametrize("stack", ["torchtitan", "megatron"])
def test_bounds_do_not_depend_on_those_before(batches, stack):
    """Configurations with other numbers of micro-batches share placements, not the time in which gradients add up."""
    strategies = [Parallel(data=2, sharded="full"), Parallel(data=2), Parallel(pipeline=2, data=1)]
    found = [
        each
        for batch in batches
        for each in options(strategies, 2, batch, "dgx-h100-pod", "gpt2+layers=4", stack=stack)[0]
    ]
    bounds = Bounds()
    for each in found:
        bound, result = bounds.of(each).figures, ddlsim.simulate(each.experiment)
        assert bound == Bounds().of(each).figures
        assert result.throughput <= bound.throughput
        assert result.efficiency <= bound.efficiency


@pytest.mark.parametrize("routing", ["shortest", "spray"])
@pytest.mark.parametrize("strategy", [Parallel(pipeline=2, micro_batch=2), FSDP(micro_batch=2)], ids=["PP", "FSDP"])
def test_nor_where_messages_take_several_paths(strategy, routing):
    """Four machines with a port in each of four planes: sprayed, a message is four times as fast as a port."""
    graph = nx.Graph(routing=routing)
    for plane, host in itertools.product(range(4), range(4)):
        graph.add_node(f"plane{plane}", kind="switch")
        graph.add_edge(f"h{host}", f"plane{plane}", bandwidth="0.2 Gbit/s", latency=0.0)
    found, _ = options([strategy], workers=4, batch=16, model="bert-base", device="v100", cluster=graph)
    bound, result = Bounds().of(found[0]), ddlsim.simulate(found[0].experiment)
    assert result.throughput <= bound.figures.throughput
    assert result.throughput > 0.5 * bound.figures.throughput or routing == "shortest"  # counts all ports of a machine


@pytest.mark.parametrize("share", seeds(1, 3))  # of 12 examples
@given(st.data())
@settings(max_examples=4, deadline=None)
def test_no_simulation_of_stage_3_beats_its_bound(share, data):
    hosts, devices = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    assume(hosts * devices > 1)
    host = MultiGpu(devices, pcie_bandwidth="8 GB/s")
    cluster = star(hosts, bandwidth=data.draw(st.sampled_from(["0.3 Gbit/s", "5 Gbit/s"])), latency=0.0, host=host)
    workers = hosts * devices
    strategy = FSDP(
        micro_batch=1, reshard=data.draw(st.booleans()), no_sync=data.draw(st.booleans()),
        prefetch=data.draw(st.integers(0, 2)),
        shard=data.draw(st.sampled_from([None, *(n for n in range(1, workers + 1) if workers % n == 0)])),
    ).on_fabric(Fabric(data.draw(st.sampled_from(["ring", "nccl_ring"]))))  # fmt: skip
    found, _ = options([strategy], workers=workers, batch=workers * data.draw(st.integers(1, 2)), cluster=cluster,
                       model="lenet5", device="v100")  # fmt: skip
    bound, result = Bounds().of(found[0]), ddlsim.simulate(found[0].experiment)
    assert bound.limit in LIMITS
    assert result.throughput <= bound.figures.throughput


@pytest.mark.parametrize("bandwidth", ["0.2 Gbit/s", "800 Gbit/s"])
def test_the_bound_of_stage_3_is_no_empty_one(bandwidth):
    """Bytes bind on the slow network, passes on the fast one."""
    strategies = [FSDP(micro_batch=4), FSDP(micro_batch=4, shard=2), FSDP(micro_batch=4, reshard=False)]
    found, _ = options(strategies, workers=4, batch=16, model="bert-base", device="v100",
                       cluster=star(4, bandwidth=bandwidth, latency=0.0))  # fmt: skip
    ratios = [ddlsim.simulate(each.experiment).throughput / Bounds().of(each).figures.throughput for each in found]
    assert max(ratios) <= 1.0
    assert min(ratios) > 0.6
    assert max(ratios) > 0.93


def test_what_is_held_is_what_the_plan_holds():
    workload = make_workload(load_model("bert-base"), load_device("v100"), 2)
    chunks_of = {n: balanced_chunks(workload, n) for n in (2, 4, 8)}
    for order, ranks, n_chunks, micro_batches in [
        *((name, 4, 4 * per_rank, m) for (name, (per_rank, _)), m in itertools.product(ORDERS.items(), (8, 20))
          if 4 * per_rank in chunks_of),
        ("1f1b", 2, 8, 18), ("1f1b", 4, 8, 40),
    ]:  # fmt: skip
        chunks = chunks_of[n_chunks]
        for again in (False, True):
            held = activations_held(Outline(order, Mesh(1, ranks), micro_batches, n_chunks, recompute=again), chunks)
            plan = pipeline(chunks, Mesh(1, ranks), micro_batches, order, recompute=again).unroll(1)
            assert held == pytest.approx(plan.peak_memory(), rel=1e-12)


def test_what_does_not_fit_is_told_as_a_run_tells_it():
    found, _ = options([Parallel(pipeline=2, micro_batch=16)], batch=2048, model="bert-large")
    later = Bounds().of(found[0]).fit
    assert later is not None
    fit = later()
    assert fit.warning
    assert ddlsim.simulate(found[0].experiment).warnings[0].startswith(fit.warning)
    assert f"{fit.held / 1e9:.1f} GB, but v100" in fit.warning


@pytest.mark.slow
def test_the_search_finds_what_trying_all_finds():
    splits = Splits(micro_batch=(1, 2), recompute=("none", "full"), stage=(0, 1))
    plan = recommend(CLUSTER, "bert-base", strategies=[splits], workers=[16], batch_sizes=[64], jobs=1)
    status = plan.table["status"].value_counts()
    assert status["pruned"] > status["simulated"]
    found, _ = options([splits], batch=64)
    bounds = Bounds()
    least = plan.best.throughput * (1.0 - 0.0005)
    best = [ddlsim.simulate(each.experiment).throughput
            for each in found if bounds.of(each).figures.throughput > least]  # fmt: skip
    assert plan.best.throughput >= max(best) * (1.0 - 0.0005)
    row = plan.table.iloc[0]
    assert row["step_time"] == pytest.approx(64 / row["throughput"])
    model = load_model("bert-base")
    peak = 16 * load_device("v100").peak_flops["fp32"]
    assert row["mfu"] == pytest.approx(3 * model.flops * row["throughput"] / peak)
    assert 1e9 < row["memory"] < 32e9
    text = str(plan)
    assert "micro-batch 2 instead takes" in text
    assert "tensor  pipeline  data" in text
    assert plan.to_dict()["choices"][0]["tensor"] == row["tensor"]


def test_alternatives_that_do_not_fit_are_no_reasons():
    """By hand: micro-batches of 2 would be the best alternative, but exceed the memory."""

    class Known(Search):
        def misfit(self, candidate):
            return "too large" * (candidate.sizes["micro_batch"] == 2)

    split = Splits(tensor=(1,), pipeline=(2,), micro_batch=(1, 2, 4), interleave=(1,), recompute=("none",))
    found, _ = options([split], batch=64)
    rates = {1: 100.0, 2: 99.0, 4: 80.0}
    figures = [Figures(rates[each.sizes["micro_batch"]], 0.9, 16.0) for each in found]
    trials = [Trial(each, PRUNED, bound=most) for each, most in zip(found, figures, strict=True)]
    trials[0] = Trial(found[0], SIMULATED, figures=figures[0])
    assert reasons(trials[0], trials, Known(ddlsim.Target(), None, 3, False, None)) == (
        "micro-batch 4 instead takes 25.0 % longer at the least",
    )


def test_what_is_tried():
    found, invalid = options([Splits()], batch=48)
    sizes = [each.sizes for each in found]
    assert {each["tensor"] for each in sizes} == {1, 2, 4}  # 12 heads, 8 devices in a machine
    assert {each["pipeline"] for each in sizes} == {1, 2, 4, 8}  # 12 layers
    assert all(each["tensor"] * each["pipeline"] * each["data"] == 16 for each in sizes)
    assert {each["interleave"] for each in sizes if each["pipeline"] == 4} == {1, 3}
    assert {each["sequence"] for each in sizes if each["tensor"] == 1} == {False}
    assert len({tuple(each.items()) for each in sizes}) == len(sizes)
    assert set(invalid) == {"the batch size is not a multiple of data x micro_batch"}


def test_every_recomputation_of_the_strategies_is_tried():
    ways = ("none", "selective", "dots-saveable", "operators", "full", "early-stop")
    splits = Splits(tensor=(1, 2), pipeline=(1,), micro_batch=(2,), recompute=ways, stage=(1, 3))
    tried = list(splits.layouts(load_cluster("dgx-h100-pod"), load_model("gpt2"), 16, 64, Counter()))
    for kind in (FSDP, Parallel):
        assert {way.recompute for way in tried if isinstance(way, kind)} == set(ways)


def test_stages_cuts_and_sends_are_tried_too():
    splits = Splits(tensor=(1, 2), pipeline=(1, 2), micro_batch=(2,), recompute=("none", "full"), stage=(0, 1, 2, 3),
                    shard=(8, 16), cut=("balanced", "layers"), p2p=("overlapped", "in turns"))  # fmt: skip
    found, invalid = options([splits], batch=64)
    ways = [each.experiment.strategy for each in found]
    assert len(set(ways)) == len(ways)
    sharded = [way for way in ways if isinstance(way, FSDP)]
    assert {(way.stage, way.shard, way.recompute) for way in sharded} == {
        (stage, shard, again) for stage, shard in ((2, None), (3, None), (3, 8)) for again in ("none", "full")
    }
    split = [way for way in ways if isinstance(way, Parallel)]
    assert {(way.cut, way.p2p) for way in split if way.pipeline == 1} == {("balanced", "overlapped")}
    assert {(way.cut, way.p2p) for way in split if way.pipeline == 2} == {
        (cut, p2p) for cut in splits.cut for p2p in splits.p2p
    }
    assert {way.sharded for way in split} == {False, True, "full"}
    assert invalid["stage 2 of ZeRO needs tensor = 1 and pipeline = 1"] == 3 * 2
    assert all(each.exact for each in found)
    assert {each.sizes["stage"] for each in found} == {0, 1, 2, 3}
    assert "stage 3 in groups of 8" in str(next(each for each in found if each.sizes["shard"] == 8))


@pytest.mark.parametrize("strategy", [
    FSDP(recompute="full"), FSDP(shard=8), FSDP(stage=2, micro_batch=4), Hybrid({"fc6": 4}),
    Parallel(tensor=8, pipeline=8, sequence=True, tp_comm_overlap=True),
])  # fmt: skip
def test_what_is_for_other_models_and_workers_is_exact_all_the_same(strategy):
    nature = nature_of(strategy)
    assert (nature.synchronous, nature.exact) == (True, True)


def test_the_search_over_stages():
    splits = Splits(tensor=(1,), pipeline=(1, 2), micro_batch=(2,), recompute=("none",), stage=(1, 3), shard=(8, 16))
    plan = recommend(CLUSTER, "bert-base", strategies=[splits], workers=[16], batch_sizes=[64], jobs=1)
    assert set(plan.table["stage"]) == {1, 3}
    assert set(plan.table["status"]) <= {"simulated", "pruned"}
    assert "stage 3" in str(plan)


@pytest.mark.slow
def test_splits_name_the_cluster_and_the_batch_where_there_are_several():
    splits = Splits(tensor=(1,), pipeline=(1, 2), micro_batch=(2,), recompute=("none",))

    def head(clusters, batches):
        plan = recommend(clusters, "bert-base", strategies=[splits], workers=[8], batch_sizes=batches, jobs=1)
        lines = str(plan).splitlines()
        first = next(i for i, line in enumerate(lines) if line.startswith("splits"))
        return lines[first].split()[1:], lines[first + 1].split()

    names, row = head(["dgx1-v100", "dgx1-v100-16"], [32])
    assert names[:3] == ["cluster", "tensor", "pipeline"]
    assert row[0].startswith("dgx1-v100")
    names, _ = head(["dgx1-v100", "dgx1-v100-16"], [32, 64])
    assert names[:4] == ["cluster", "batch", "size", "tensor"]
    assert head("dgx1-v100", [32])[0][0] == "tensor"


def test_what_does_not_go_together_is_counted():
    found, invalid = options([Splits(tensor=(2, 3), pipeline=(2, 4), data=(4,), micro_batch=(1, 5))], batch=32)
    assert {each.sizes["tensor"] for each in found} == {2}
    assert invalid["tensor x pipeline x data is not the number of workers"] == 3
    assert invalid["the batch size is not a multiple of data x micro_batch"] == 1
    split = Splits(order=("zb-1p",), recompute=("full",), tensor=(1,))
    with pytest.raises(ConfigError, match=r"is valid: .* x Parallel: orders with separate weight gradients"):
        options([split])


@pytest.mark.parametrize(("name", "value", "text"), [
    ("tensor", (), "Splits: tensor is empty"), ("tensor", (0,), "tensor"), ("recompute", ("some",), "recompute"),
    ("order", ("1f1",), "1f1b"),
])  # fmt: skip
def test_bad_splits_are_refused(name, value, text):
    with pytest.raises(ConfigError, match=text):
        Splits(**{name: value})


def test_a_model_that_fits_nowhere_points_to_splits():
    with pytest.raises(ConfigError, match=r"no configuration can be simulated.*strategies=\[ddlsim.Splits\(\)\]"):
        recommend(CLUSTER, "gpt3-6.7b", workers=[2], batch_sizes=[64], jobs=1)


@pytest.mark.slow
def test_on_the_command_line(tmp_path):
    table = tmp_path / "plan.csv"
    done = CliRunner().invoke(app, [
        "recommend", CLUSTER, "-m", "bert-base", "-n", "16", "-b", "32", "--tensor", "1,2", "--pipeline", "4",
        "--micro-batch", "2", "--interleave", "1,3", "--recompute", "none,full", "--precision", "fp16", "-j", "1",
        "--optimizer", "adam", "--csv", str(table),
    ])  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "MFU" in done.output
    lines = table.read_text().splitlines()
    assert len(lines) == 1 + 8
    assert "micro_batch" in lines[0]


def test_least_of_one_stage_by_hand():
    """Two replicas on a slow link, nothing overlaps: 2 (d - 1) / d of the bytes after the last pass."""
    cluster = star(2, bandwidth=1e8, latency=0.0)
    found, _ = options([Parallel(overlap="none")], workers=2, batch=4, cluster=cluster, model="lenet5", device="v100")
    bound, result = Bounds().of(found[0]), ddlsim.simulate(found[0].experiment)
    work = result.workloads[0]
    seconds = 2 * (work.forward_time + work.backward_time) + work.optimizer
    exposed = work.gradient_nbytes / 1e8
    assert 4 / bound.figures.throughput == pytest.approx(seconds + exposed, rel=1e-6)
    assert np.isclose(result.step_time, seconds + exposed, rtol=1e-3)


def test_only_the_latest_of_large_templates_is_kept(monkeypatch):
    """The outlines of a search would take more than 1 GB together."""
    monkeypatch.setattr(sys.modules["ddlsim.plan.pipeline"], "MOST_PASSES", 5)
    costs = Costs(*(np.ones(2) for _ in range(6)))
    kept = []
    for n in (2, 3, 4, 2):
        kept.append(weakref.ref(outlined(Outline("1f1b", Mesh(1, 2), n, 2), costs).graph))
    gc.collect()
    assert [each() is not None for each in kept] == [True, False, True, True]  # 2 is small
    assert kept[0]() is kept[3]()


def test_two_stages_by_hand():
    """docs/planning.md: 9 ms a step from the first stage's end, and 8 ms where the second one ended the step before."""
    costs = Costs(np.full(2, 1e-3), np.full(2, 2e-3), np.zeros(2), np.zeros(2), np.ones(2), np.zeros(2))
    program = outlined(Outline("1f1b", Mesh(1, 2), 2, 2), costs)
    assert program.bound(1, 2) == pytest.approx((8e-3, 0.0))
    assert program.bound(1, 3) == pytest.approx((17e-3, 0.0))
    again = outlined(Outline("1f1b", Mesh(1, 2), 2, 2, recompute=True), costs)
    assert again.bound(1, 3).chains == pytest.approx(23e-3)


def test_sums_begin_when_the_pass_beside_them_can_begin():
    """Two stages and two replicas, f = 1 ms and g = 2 ms each, one micro-batch: from the end of a step the last stage
    goes forward and back, 3 ms, before the gradients of the first one leave, which take 10 ms at 100 MB/s."""
    cluster = load_cluster(star(4, bandwidth=1e8, latency=0.0))
    gradient = np.array([1e6, 1.0])
    costs = Costs(np.full(2, 1e-3), np.full(2, 2e-3), np.zeros(2), np.zeros(2), gradient, np.zeros(2))
    carriers = Carriers(cluster, cluster.workers[:4], together=True)
    assert outlined(Outline("1f1b", Mesh(2, 2), 1, 2), costs).bound(1, 2, carriers).chains == pytest.approx(13e-3)
    after = outlined(Outline("1f1b", Mesh(2, 2), 1, 2, overlap=False), costs)
    assert after.bound(1, 2, carriers).chains == pytest.approx(15e-3)
