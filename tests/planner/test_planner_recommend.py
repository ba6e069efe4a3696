"""Plans: the choice of an exhaustive search, limits that are kept or said to be missed, crossovers, and the text."""

from __future__ import annotations

import functools
import json
import math

import pytest
from draws import few

import ddlsim
from ddlsim import AllReduce, Experiment, LocalSGD, Measured, Momentum, ParameterServer, Target, TopK, Training
from ddlsim.cluster import MultiGpu, load_cluster, star, two_racks
from ddlsim.errors import ConfigError
from ddlsim.planner import Recommendation, recommend

STRATEGIES = [AllReduce("ring"), AllReduce("recursive_doubling"), ParameterServer(1, "colocated"), LocalSGD(4)]
#: 8 machines that cost 3.6 USD/h each; a step of 16 samples takes 20 ms
SWITCH = load_cluster(star(8, bandwidth="1 Gbit/s", latency="100 us")).with_costs(price="3.6 USD/h")
BASE = Experiment(SWITCH, "lenet5", batch_size=16, compute=Measured("20 ms", 16))
SAMPLES = 1e6


def plan(target: Target = Target(), **changes: object) -> Recommendation:  # noqa: B008
    given: dict[str, object] = {
        "samples": SAMPLES, "strategies": STRATEGIES, "batch_sizes": [16], "compressions": [None, TopK(0.01)],
        "base": BASE, "workers": [1, 2, 4, 6, 8], "jobs": 1, **changes,
    }  # fmt: skip
    return recommend(given.pop("clusters", SWITCH), "lenet5", target, **given)  # type: ignore[arg-type]


@functools.cache
def everything() -> list[ddlsim.Result]:
    """Simulate all there is."""
    return [
        ddlsim.simulate(BASE.with_(workers=workers, strategy=strategy, compression=compression, warmup=4, steps=4))
        for workers in (1, 2, 4, 6, 8) for strategy in STRATEGIES for compression in (None, TopK(0.01))
        if compression is None or workers > 1
    ]  # fmt: skip


def exhaustive(target: Target) -> list[tuple[float, float]]:
    """Put everything in order by what the target says: the worst miss, then hours or USD."""
    ranks = []
    for result in everything():
        hours = SAMPLES / result.throughput / 3600
        usd = hours * 3.6 * result.n_workers
        limits = [
            (hours * 3600, target.deadline), (usd, target.budget),
            (target.efficiency, target.efficiency and result.efficiency),
            (target.throughput, target.throughput and result.throughput),
        ]  # fmt: skip
        miss = max([0.0, *(value / limit - 1 for value, limit in limits if value and limit)])
        ranks.append((miss, usd if target.wants_cheapest else hours))
    return sorted(ranks)


TARGETS = {
    "fastest": Target(),
    "cheapest": Target(objective="cost"),
    "deadline": Target(deadline="4 min"),
    "budget": Target(budget=1.28),
    "both": Target(deadline="5 min", budget=1.33),
    "efficiency": Target(efficiency=0.9),
    "throughput": Target(throughput="3000 images/s"),
    "impossible": Target(deadline="1 min"),
}


@pytest.mark.parametrize("name", few(TARGETS, 2))
def test_the_choice_is_that_of_an_exhaustive_search(name: str) -> None:
    target = TARGETS[name]
    found, wanted = plan(target), exhaustive(target)
    rows = found.table[found.table["status"] == "simulated"]
    assert len(found.table) == len(wanted)
    for (_, row), rank in zip(rows.head(3).iterrows(), wanted, strict=False):
        value = row["cost"] if target.wants_cheapest else row["time"] / 3600
        assert (row["miss"], value) == (pytest.approx(rank[0], abs=1e-9), pytest.approx(rank[1]))
    assert found.meets_target == (wanted[0][0] == 0.0)
    exact = found.table[(found.table["status"] == "simulated") & found.table["exact"]]
    assert found.best_exact.throughput == exact["throughput"].iloc[0]


def test_bounds_leave_out_what_cannot_win() -> None:
    table = plan().table
    pruned = table[table["status"] == "pruned"]
    assert len(pruned) >= 5
    assert pruned["reason"].str.startswith("at most ").all()
    assert "pruned" not in set(table.loc[table["workers"] == 8, "status"])  # these are the best


def test_reasons_name_the_best_other_value() -> None:
    """Also where the search has left it out: for each thing that is varied, simulate all that differ in it only."""
    found = plan(workers=[2, 3, 4, 6, 8], strategies=STRATEGIES[:3])
    best = found.best.candidate
    near: dict[str, list[tuple[float, object]]] = {}
    for one in found.found:
        differs = [name for name, value in one.candidate.settings.items() if value != best.settings[name]]
        if len(differs) == 1:
            rate = ddlsim.simulate(one.candidate.experiment).throughput
            near.setdefault(differs[0], []).append((rate, one.candidate.settings[differs[0]]))
    assert set(near) == {"workers", "strategy", "compression"}
    assert any(one.status == "pruned" for one in found.found)
    reasons = [reason for reason in found.best.reasons[1:] if not reason.startswith("a tie: ")]
    assert len(reasons) == 3
    for reason, name in zip(reasons, ("workers", "strategy", "compression"), strict=True):
        rate, value = max(near[name])
        assert reason.startswith(f"{name} {value} instead takes ")
        slower = found.best.throughput / rate - 1.0
        said = f"{100.0 * slower:.1f} % longer" if slower < 0.995 else f"{1.0 + slower:.3g} times as long"
        assert reason.endswith("as long" if slower < 0.0005 else said)


def test_limits_are_kept() -> None:
    found = plan(Target(deadline="5 min", budget=1.33))
    assert found.meets_target
    figures = found.best.figures
    assert figures.total_time is not None
    assert figures.total_cost is not None
    assert figures.total_time <= 300
    assert figures.total_cost <= 1.33
    result = ddlsim.simulate(found.best.experiment)
    assert result.throughput == found.best.throughput
    assert result.cost_rate == pytest.approx(figures.cost_rate)


def test_an_impossible_target_says_by_how_much_it_is_missed() -> None:
    """Eight workers without any communication take 1e6 / (8 * 16 / 20 ms) = 156 s; 78 s is half of that."""
    found = plan(Target(deadline=78.125))
    assert not found.meets_target
    (miss,) = found.best.misses
    assert miss.what == "deadline"
    assert miss.share == pytest.approx(miss.value / 78.125 - 1)
    assert 1.0 <= miss.share < 1.2
    text = " ".join(str(found).split())
    assert f"no configuration meets the target; the nearest misses the deadline by {100 * miss.share:.1f} %" in text


def test_oversubscribed_racks_want_neighbours_in_the_ring() -> None:
    """Between two racks a ring in the order of the racks crosses the trunk once each way, one that alternates always;
    recursive doubling sends everything across it."""
    racks = two_racks(4, bandwidth="10 Gbit/s", latency="5 us", oversubscription=4.0)
    alternating = AllReduce("ring", rank_order=[0, 4, 1, 5, 2, 6, 3, 7])
    strategies = [alternating, AllReduce("recursive_doubling"), AllReduce("ring")]
    found = plan(clusters=racks, strategies=strategies, compressions=None, workers=[8], base=None, batch_sizes=[32])
    assert found.best.experiment.strategy == strategies[2]


def test_machines_of_many_gpus_want_the_hierarchy() -> None:
    host = MultiGpu(n_gpus=4, inside="nvlink_mesh", nvlink_bandwidth="50 GB/s", device="v100")
    cluster = star(4, bandwidth="1 Gbit/s", latency="50 us", host=host)
    strategies = [AllReduce(name, "none") for name in ("ring", "recursive_doubling", "hierarchical")]
    found = plan(clusters=cluster, strategies=strategies, compressions=None, workers=[16], batch_sizes=[16])
    assert found.best.candidate.strategy == "all-reduce (hierarchical, none)"
    best = max(
        ddlsim.simulate(cluster, "lenet5", strategy, 16, compute=Measured("20 ms", 16)).throughput
        for strategy in strategies
    )
    assert found.best.throughput == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("tried", ["compression", "local"])
def test_a_slow_network_wants_fewer_bytes(tried: str) -> None:
    """On 10 Mbit/s an exchange takes 0.34 s, a step 20 ms; the best exact configuration stands beside the winner."""
    slow = star(4, bandwidth="10 Mbit/s", latency="50 us")
    strategies = [AllReduce("ring"), LocalSGD(64)] if tried == "local" else [AllReduce("ring")]
    compressions = None if tried == "local" else [None, TopK(0.001)]
    found = plan(clusters=slow, strategies=strategies, compressions=compressions, workers=[4], samples=None)
    if tried == "local":
        assert found.best.experiment.strategy == LocalSGD(64)
    else:
        assert found.best.candidate.compression.startswith("TopK")
    assert not found.best.exact
    assert found.best_exact.candidate.strategy == "all-reduce (ring, ddp)"
    assert "learn differently from plain SGD" in " ".join(str(found).split())


def test_crossovers_agree_with_direct_simulation() -> None:
    """A ring needs 2 (n-1) latencies, a binomial tree 2 log2 n but more bytes: short messages, many workers."""
    many = load_cluster(star(64, bandwidth="10 Gbit/s", latency="20 us"))
    strategies = [AllReduce("ring", "none"), AllReduce("binomial_tree", "none")]
    found = plan(
        clusters=many, strategies=strategies, compressions=None, workers=[4, 8, 64], samples=None,
        base=Experiment(many, "lenet5", compute=Measured("1 ms", 16)),
    )  # fmt: skip
    (crossing,) = found.crossovers
    assert crossing.faster == "all-reduce (binomial_tree, none)"
    assert crossing.exact
    assert crossing.workers == crossing.before + 1
    assert 8 < crossing.workers < 64
    for workers, ahead in ((crossing.before, False), (crossing.workers, True)):
        ring, tree = (
            ddlsim.simulate(many, "lenet5", s, 16, workers, compute=Measured("1 ms", 16)).throughput for s in strategies
        )
        assert (tree > ring) is ahead


@pytest.mark.slow
def test_the_number_of_processes_does_not_matter() -> None:
    one, two = (plan(jobs=jobs, workers=[2, 4], strategies=STRATEGIES[:2]) for jobs in (1, 2))
    assert one.table.equals(two.table)
    assert str(one) == str(two)


def test_batches_that_do_not_fit_the_memory_are_left_out() -> None:
    found = recommend("two-racks-oversubscribed", "vgg16", workers=[2], strategies=[AllReduce()],
                      batch_sizes=[8, 4096], jobs=1)  # fmt: skip
    (skipped,) = found.table.loc[found.table["status"] == "skipped", "reason"]
    assert "vgg16 with batch size 4096 in fp32 needs about" in skipped
    assert "1 x vgg16 with batch size 4096" in " ".join(str(found).split())


def test_a_plan_says_what_no_run_of_the_model_simulates() -> None:
    given = {"workers": [4], "strategies": [AllReduce()], "batch_sizes": [64], "jobs": 1}
    notes = recommend("office-1gbe", "dlrm", **given).notes  # type: ignore[arg-type]
    (note,) = [note for note in notes if "is not simulated" in note]
    assert note.startswith("dlrm: the all-to-all of branch2.embedding_bag1 is not simulated, so steps are too short")
    assert not [note for note in plan(workers=[4]).notes if "is not simulated" in note]


@pytest.mark.slow
def test_several_clusters() -> None:
    """The second cluster has a hundredfold network and is ten times as dear: fastest or cheapest decides."""
    fast = load_cluster(star(8, bandwidth="100 Gbit/s", latency="1 us")).with_costs(price="36 USD/h")
    slow = load_cluster(star(8, bandwidth="100 Mbit/s", latency="50 us")).with_costs(price="3.6 USD/h")
    for target, cluster in ((Target(objective="time"), fast), (Target(objective="cost"), slow)):
        assert plan(target, clusters=[slow, fast], workers=[8]).best.candidate.cluster is cluster


def test_clusters_of_the_same_name_are_told_apart() -> None:
    faster = SWITCH.scaled("nic", bandwidth=10.0)
    found = plan(clusters=[SWITCH, faster], workers=[8], compressions=None)
    assert set(found.table["cluster"]) == {"star-8", "star-8 (2)"}
    assert str(found.best).startswith("8 workers of star-8 (2)")


@pytest.mark.slow
def test_usual_strategies_have_a_server_on_each_machine() -> None:
    found = plan(strategies=None, compressions=[None], workers=[1, 2, 4, 8])
    servers = [f.candidate for f in found.found if f.candidate.strategy == "parameter server (1 per machine)"]
    assert {c.workers: c.experiment.strategy.servers for c in servers} == {2: 2, 4: 4, 8: 8}  # type: ignore[attr-defined]
    assert servers[0].at(8).strategy == ParameterServer(8, "colocated")


def test_accuracy() -> None:
    """Momentum SGD on the digits: both ways are trained; the winner's time is that of its own simulation."""
    training = Training("digits", optimizer=Momentum(0.9), rate=0.05, updates=150, evaluate_every=10)
    found = recommend(
        "office-1gbe", "resnet18", Target(accuracy=0.85, deadline="1 h"), training=training,
        learning_model="digits-cnn", workers=[4], strategies=[AllReduce("ring"), LocalSGD(4)], batch_sizes=[16],
        base=Experiment("office-1gbe", "resnet18", compute=Measured("200 ms", 16)), jobs=1,
    )  # fmt: skip
    assert found.meets_target
    assert found.best.accuracy is not None
    assert found.best.accuracy >= 0.85
    times = [choice.figures.total_time for choice in found.choices]
    assert times == sorted(times)  # type: ignore[type-var]
    assert ddlsim.simulate(found.best.experiment).time_to_accuracy(0.85) == times[0]
    assert "reaches 85.0 % after" in str(found)
    assert {choice.candidate.strategy for choice in found.choices} == {
        "all-reduce (ring, ddp)", "local SGD (4 steps, default)",
    }  # fmt: skip


def test_an_accuracy_that_is_not_reached() -> None:
    training = Training("digits", rate=1e-6, updates=4, evaluate_every=2)
    found = recommend(
        "office-1gbe", "digits-cnn", Target(accuracy=0.99), training=training, workers=[2],
        strategies=[AllReduce("ring")], batch_sizes=[4], jobs=1,
    )  # fmt: skip
    assert not found.meets_target
    assert found.best.figures.total_time == math.inf
    assert "no configuration meets the target; the nearest misses the accuracy" in " ".join(str(found).split())


def test_output() -> None:
    found = plan(Target(efficiency=0.5), workers=[2, 8])
    text = str(found)
    for words in ("best", "why", "rule", "number of GPUs", "simulated:", "sensitivity", "configurations simulated"):
        assert words in text
    assert max(len(line) for line in text.splitlines()) <= 118
    values = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert values["cost_unit"] == "USD"
    assert values["choices"][0]["throughput"] == found.best.throughput
    assert len(values["configurations"]) == len(found.table)


@pytest.mark.parametrize(
    ("target", "changes", "text"),
    [
        (
            Target(deadline="1 h"),
            {"samples": None},
            "a deadline or a budget requires the length of the training; set samples=",
        ),
        (Target(budget=9.0), {"clusters": "office-1gbe", "base": None}, "a budget needs prices .*: cost: machine"),
        (Target(accuracy=0.9), {"samples": None}, "a target accuracy needs training="),
        (Target(), {"training": Training(epochs=1)}, "training has no effect without a target accuracy"),
        (Target(), {"workers": [9]}, "no cluster has enough devices"),
        (Target(), {"clusters": []}, "clusters is empty"),
        (Target(), {"n_best": 0}, "n_best = 0: must be a positive integer"),
        (Target(), {"clusters": "office-1gb"}, "did you mean 'office-1gbe'"),
        (
            Target(accuracy=0.9),
            {"samples": None, "training": Training(target_loss=0.1)},
            "the training would never end",
        ),
    ],
    ids=["samples", "prices", "training", "accuracy", "workers", "clusters", "n_best", "name", "end"],
)
def test_what_does_not_fit(target: Target, changes: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        plan(target, **changes)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"deadline": "5 GB"}, "'5 GB' is a size, not a time"),
        ({"budget": -1.0}, "Target: budget = -1.0: must be finite and above 0"),
        ({"efficiency": 90}, "Target: efficiency = 90: must be above 0 and at most 1"),
        ({"objective": "fame"}, "Target: objective = 'fame': must be 'time'"),
    ],
    ids=["deadline", "budget", "efficiency", "objective"],
)
def test_targets_that_make_no_sense(fields: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Target(**fields)  # type: ignore[arg-type]


@pytest.mark.slow
def test_failures_decide_and_the_plan_says_how_to_live_with_them():
    """By goodput 16 GPUs that fail seldom; the interval is near Daly's, and a spare pays where repairs take hours."""
    failures = ddlsim.Failures("300 h", per="host", repair="5 h", restart="5 min")
    base = ddlsim.Experiment(
        "cloud-25g-16x8-v100", "resnet50", failures=failures, checkpoints=ddlsim.Checkpoints("2 h", stall="10 s")
    )
    plan = ddlsim.recommend(
        "cloud-25g-16x8-v100", "resnet50", base=base, workers=[32, 128], strategies=[ddlsim.AllReduce()],
        batch_sizes=[64],
    )  # fmt: skip
    best = ddlsim.simulate(plan.best.candidate.experiment)
    assert plan.best.throughput == pytest.approx(best.goodput)
    assert plan.best.throughput < 0.95 * best.throughput
    notes = [
        note
        for note in plan.notes
        if "throughputs are goodputs" in note or "checkpoint every" in note or "spare" in note
    ]
    assert len(notes) == 3
    assert "with " in notes[2]
    assert "instead of 0" in notes[2]
    plain = ddlsim.recommend(
        "cloud-25g-16x8-v100", "resnet50", workers=[32], strategies=[ddlsim.AllReduce()], batch_sizes=[64]
    )
    assert not any("throughputs are goodputs" in note for note in plain.notes)
