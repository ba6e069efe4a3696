"""Where configurations tie in what was asked, the better in the rest is recommended, and no bound leaves it out."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from draws import few, seeds, slow

import ddlsim
from ddlsim import (
    AllReduce,
    AsyncParameterServer,
    ConfigError,
    Experiment,
    LocalSGD,
    Measured,
    Momentum,
    ParameterServer,
    Target,
    TopK,
    Training,
    load_cluster,
    recommend,
)  # fmt: skip
from ddlsim.cluster import Host, star
from ddlsim.planner import Recommendation, search
from ddlsim.planner.bounds import Bound
from ddlsim.planner.candidates import Candidate, candidates
from ddlsim.planner.evaluate import Evaluator
from ddlsim.planner.search import SAME, SIMULATED, Search, Trial, levels, preferred
from ddlsim.planner.target import Figures

#: a step takes 2 s, an exchange 30 us: all numbers of workers cost the same
FAST = load_cluster(star(8, bandwidth="100 Gbit/s", latency="1 us")).with_costs(price="3.6 USD/h")
DEAR = FAST.with_costs(price="7.2 USD/h")
BASE = Experiment(FAST, "lenet5", batch_size=16, compute=Measured("2 s", 16))
SAMPLES = 1e6
STRATEGIES = [LocalSGD(4), ParameterServer(1, "colocated"), AllReduce("recursive_doubling"), AllReduce("ring")]


def plan(target: Target, **changes: object) -> Recommendation:
    given: dict[str, object] = {
        "samples": SAMPLES, "strategies": [AllReduce("ring")], "batch_sizes": [16], "base": BASE,
        "workers": [2, 4, 8], "jobs": 1, **changes,
    }  # fmt: skip
    return recommend(given.pop("clusters", FAST), "lenet5", target, **given)  # type: ignore[arg-type]


def test_the_cheapest_within_a_deadline_is_the_fastest_of_those_that_cost_as_much() -> None:
    """1e6 samples in steps of 16 in 2 s: 17.4 h with 2 workers, 8.7 h with 4, 4.3 h with 8, all at 125 USD."""
    found = plan(Target(deadline="20 h"))
    assert [choice.workers for choice in found.choices] == [8, 4, 2]
    costs = [found.cost(choice.figures) for choice in found.choices]
    assert costs[0] > costs[1] > costs[2]  # by the exchange: a ten-thousandth, which no plan shows
    assert max(costs) / min(costs) < 1.0 + SAME
    text = " ".join(str(found).split())
    assert "a tie: costs as much as 2 others (2 slower)" in text
    assert "workers 4 instead costs as much, takes 2 times as long" in text


def test_the_fastest_is_the_cheapest_of_those_that_take_as_long() -> None:
    cheap = FAST.with_costs(price="1.8 USD/h")
    found = plan(Target(), clusters=[FAST, cheap], workers=[4, 8])
    assert (found.best.workers, found.best.candidate.cluster) == (8, cheap)
    assert "a tie: takes as long as 1 other (1 more expensive)" in " ".join(str(found).split())
    assert "cluster star-8 instead takes as long, costs 2 times as much" in " ".join(str(found).split())


def test_where_price_and_time_tie_energy_decides() -> None:
    cluster = load_cluster(star(8, bandwidth="100 Gbit/s", latency="1 us", host=Host(device="v100", price="2 USD/h")))
    hungry, frugal = (cluster.with_costs(switch_power=watts) for watts in ("2000 W", "100 W"))
    for order in ([hungry, frugal], [frugal, hungry]):
        found = plan(Target(deadline="20 h"), clusters=order, base=BASE.with_(cluster=order[0]), workers=[8])
        assert found.best.candidate.cluster is frugal
    assert "(1 using more energy)" in " ".join(str(found).split())


def test_what_is_simple_is_preferred_and_then_what_was_named_first() -> None:
    """A hundredth of a percent between them: no reason for local steps, servers or a compressor."""
    found = plan(Target(), strategies=STRATEGIES, compressions=[TopK(0.01), None], workers=[8])
    assert found.best.candidate.strategy == "all-reduce (recursive_doubling, ddp)"
    assert found.best.candidate.compression == "none"
    assert "more complex" in " ".join(str(found).split())
    assert "later in the input" in " ".join(str(found).split())


TARGETS = {
    "fastest": Target(), "cheapest": Target(objective="cost"), "deadline": Target(deadline="10 h"),
    "fastest within": Target(deadline="10 h", objective="time"), "budget": Target(budget=126.0),
    "both": Target(deadline="10 h", budget=126.0), "efficiency": Target(efficiency=0.999),
    "efficiency, cheapest": Target(efficiency=0.9, objective="cost"), "throughput": Target(throughput="20 images/s"),
    "impossible": Target(deadline="1 h"), "impossible efficiency": Target(efficiency=1.0),
}  # fmt: skip


def chosen(target: Target, found: Sequence[Trial]) -> Trial:
    """Keep those that tie with the best in one thing after the other; the rule itself, without its machinery."""
    left = [one for one in found if one.figures is not None]
    for level in range(len(levels(target, left[0].candidate, left[0].figures))):  # type: ignore[arg-type]
        value = {one: levels(target, one.candidate, one.figures)[level] for one in left}  # type: ignore[arg-type]
        best = min(left, key=lambda one: (value[one], -one.figures.spread))  # type: ignore[union-attr]
        left = [one for one in left if value[one] == value[best] or abs(value[one] - value[best]) <= max(
            SAME, one.figures.spread, best.figures.spread) * max(abs(value[one]), abs(value[best]))]  # type: ignore[union-attr]  # fmt: skip
    (only,) = left
    return only


@pytest.mark.parametrize("step", ["2 s", slow("1 ms")])
@pytest.mark.parametrize("name", few(TARGETS, 2))
def test_the_choice_is_that_of_an_exhaustive_search(name: str, step: str) -> None:
    """Among workers, strategies and two clusters, with ties everywhere (2 s) and hardly any (1 ms)."""
    target, options = TARGETS[name], {"strategies": STRATEGIES, "workers": [1, 2, 4, 8], "clusters": [DEAR, FAST]}
    found = plan(target, base=BASE.with_(compute=Measured(step, 16)), **options)
    everything = [Trial(one.candidate, SIMULATED, figures=_figures(one.candidate.experiment)) for one in found.found]
    best = chosen(target, everything)
    assert found.best.candidate.number == best.candidate.number
    exact = chosen(target, [one for one in everything if one.candidate.exact])
    assert found.best_exact.candidate.number == exact.candidate.number


@functools.cache
def _figures(experiment: Experiment) -> Figures:
    result = ddlsim.simulate(experiment)
    return Figures(
        result.throughput, result.efficiency, result.cost_rate, SAMPLES / result.throughput, result.known("power")
    )


@pytest.mark.parametrize("seed", seeds(12, 40))
def test_no_bound_leaves_out_what_would_be_preferred(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random throughputs and prices, many within the tolerance of each other, with bounds that just hold."""
    random = np.random.default_rng(seed)
    target = list(TARGETS.values())[seed % len(TARGETS)]
    made, _ = candidates(BASE, [FAST], [1, 2, 4, 8], STRATEGIES, [None], list(range(1, 13)))
    figures, bounds = {}, {}
    for i, candidate in enumerate(made):
        rate = 100.0 * (1.0 + SAME * random.integers(0, 12) / 4.0)
        spread = 0.01 if i == 0 else float(random.choice([0.0, 0.0, 0.002, 0.01])) if seed % 2 else 0.0
        price = 1e-3 * float(random.choice([1.0, 1.0 + 0.5 * SAME, 2.0]))
        figures[candidate] = Figures(rate, rate / 110.0, price, SAMPLES / rate, spread=spread)
        most = rate * (1e3 if i == 0 else float(random.choice([1.0, 1.0 + SAME, 1.1])))
        bounds[candidate] = Figures(most, most / 110.0, price, SAMPLES / most)
    by_hand = SimpleNamespace(of=lambda one: Bound(bounds[one], "by hand", ""))
    monkeypatch.setattr(search, "Bounds", lambda priced, samples: by_hand)

    class Faked(Search):
        def simulate(self, wanted: Sequence[Candidate]) -> list[Trial]:
            return [Trial(one, SIMULATED, figures=figures[one]) for one in wanted]

    found = Faked(target, Evaluator(1), 3, True, SAMPLES).run(made)
    every = preferred([Trial(one, SIMULATED, figures=figures[one]) for one in made], target)
    assert [one.candidate.number for one in found[:3]] == [one.candidate.number for one in every[:3]]
    assert every[0].candidate is chosen(target, every).candidate
    exact, exact_of_all = (next(one for one in these if one.candidate.exact) for these in (found, every))
    assert exact.candidate is exact_of_all.candidate


def test_something_is_left_out_although_ties_are_kept() -> None:
    found = plan(Target(), strategies=STRATEGIES, workers=[1, 2, 3, 4, 5, 6, 7, 8])
    pruned = {one.candidate.workers for one in found.found if one.status == "pruned"}
    assert pruned == {1, 2, 3, 4, 5, 6, 7}  # the first wave has all strategies with 8


def test_a_limit_is_kept_that_is_missed_by_rounding() -> None:
    figures = Figures(1.0, 0.9, 1.0, total_time=3600.0 * (1.0 + 1e-12))
    (miss,) = Target(deadline="1 h").misses(figures)
    assert miss.share == 0.0
    (miss,) = Target(deadline="1 h").misses(dataclasses.replace(figures, total_time=3600.0 * (1.0 + 1e-6)))
    assert miss.share == pytest.approx(1e-6, rel=1e-3)


def test_fewer_devices_come_before_a_simpler_way() -> None:
    """By hand, all else equal: 4 workers with servers before 8 with an all-reduce."""
    made, _ = candidates(BASE, [FAST], [8, 4], [AllReduce("ring"), ParameterServer(1, "colocated")], [None], [16])
    equal = Figures(100.0, 0.9, 1e-3, 1e4)
    ordered = preferred([Trial(one, SIMULATED, figures=equal) for one in made], Target(objective="cost"))
    said = [(one.candidate.workers, type(one.candidate.experiment.strategy).__name__) for one in ordered]
    assert said == list(itertools.product([4, 8], ["AllReduce", "ParameterServer"]))


def test_stability_is_looked_at_where_it_is_asked_for() -> None:
    cluster = load_cluster(star(8, bandwidth="10 Gbit/s", latency="5 us"))
    base = Experiment(cluster, "resnet18", compute=Measured("5 ms", 16))
    strategies = [AllReduce("ring", "none"), AsyncParameterServer(3, "colocated")]
    found, plain = (
        recommend(
            cluster, "resnet18", workers=[8], batch_sizes=[16], strategies=strategies, base=base, jobs=1,
            stability=wanted,
        ) for wanted in (True, False)
    )  # fmt: skip
    by_hand = {
        one.candidate.number: ddlsim.simulate(one.candidate.experiment).stability().throughput_spread
        for one in found.found
    }
    assert {one.candidate.number: one.figures.spread for one in found.found if one.figures} == by_hand
    assert max(by_hand.values()) > 1e-9
    assert "(stable to " in str(found)
    assert "(stable to " not in str(plain)
    spreads = [choice["throughput_spread"] for choice in json.loads(json.dumps(found.to_dict()))["choices"]]
    assert spreads == [choice.spread for choice in found.choices]
    with pytest.raises(ConfigError, match="recommend: stability = 1: must be True or False"):
        recommend(cluster, stability=1)  # type: ignore[arg-type]


def test_an_accuracy_reached_at_the_same_time_goes_to_the_cheaper() -> None:
    """The same machines at two prices learn the same in the same time."""
    cluster = load_cluster("office-1gbe")
    dear, cheap = (cluster.with_costs(price=price) for price in ("2 USD/h", "1 USD/h"))
    training = Training("digits", optimizer=Momentum(0.9), rate=0.05, updates=60, evaluate_every=10)
    for order in ([dear, cheap], [cheap, dear]):
        found = recommend(
            order, "digits-cnn", Target(accuracy=0.3), training=training, workers=[2],
            strategies=[AllReduce("ring")], batch_sizes=[16], jobs=1,
        )  # fmt: skip
        assert found.best.candidate.cluster is cheap
