"""`recommend`: from clusters, a model and a target to a plan.

The keys of TOML files with questions are its arguments:

.. code-block:: toml

    clusters = ["dgx1-v100-16"]          # bundled, or paths beside this file
    model = "bert-base"
    workers = [16]
    batch_sizes = [64]
    strategies = [{ type = "splits", stage = [1, 3] }, { type = "all-reduce" }]

    [target]                             # the fields of Target
    throughput = "500 samples/s"

    [base]                               # everything else, as in an experiment file
    precision = "fp16"
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ddlsim.arguments import Count, Positive, checked
from ddlsim.cluster import Cluster, ClusterLike, load_cluster
from ddlsim.cluster.machines import machines_of
from ddlsim.compression import Compression
from ddlsim.compression.choice import compression_of
from ddlsim.compression.contract import AnyCompressor
from ddlsim.errors import ConfigError, listed
from ddlsim.learning import Training
from ddlsim.plain import read_toml
from ddlsim.planner.advice import advice
from ddlsim.planner.bounds import price_rate
from ddlsim.planner.candidates import BATCH_SIZES, COMPRESSIONS, Candidate, candidates
from ddlsim.planner.crossovers import crossovers
from ddlsim.planner.evaluate import Evaluator
from ddlsim.planner.learned import Lesson, learning_group, lesson, trained
from ddlsim.planner.plan import Choice, Plan, choices_of
from ddlsim.planner.ranges import device_of, disputed, may_win, ranges
from ddlsim.planner.search import SAME, Found, Search, beats_bound, preferred, spread_of, tie_reason
from ddlsim.planner.target import Figures, Target
from ddlsim.readable import count, duration, percent
from ddlsim.run.checkpoint_intervals import best_checkpoint_interval
from ddlsim.run.experiment import CompressionLike, Experiment, StrategyLike, TrainingLike
from ddlsim.run.files import SCHEMA
from ddlsim.run.living import has_life
from ddlsim.run.prepare import prepare
from ddlsim.run.result import Result
from ddlsim.run.sensitivity import sensitivities
from ddlsim.run.simulate import run
from ddlsim.schema import Source
from ddlsim.spread import Spread
from ddlsim.strategies import Splits, Strategy, contract
from ddlsim.strategies.splits import SIZES, text_of_senseless
from ddlsim.units import si
from ddlsim.workload.model import Model, ModelLike, load_model
from ddlsim.workload.stacks import default_stack

#: spares that are tried
SPARES = (0, 1, 2, 4, 8)
#: lives of each, and of each interval
LIVES = 20


def reliability(candidate: Candidate) -> list[str]:
    """Return what a plan should say about the failures of its best configuration, nothing where there are none."""
    experiment = candidate.experiment
    if not has_life(experiment):
        return []
    result = run(experiment)
    lost = 1.0 - _effective(result)
    share = f"failures and checkpoints take {percent(lost)} of the best's time"
    return [f"throughputs are what counts in the end: {share}", *_interval(experiment), *_spares(experiment, result)]


def _effective(result: Result) -> float:
    lives = [result.life] if result.life.finished else result.lives(LIVES)
    return sum(life.effective for life in lives) / len(lives)


def _interval(experiment: Experiment) -> list[str]:
    try:
        found = best_checkpoint_interval(experiment, lives=LIVES)
    except ConfigError:  # nothing is saved, nothing fails by chance, or saving is free
        return []
    best = max(found.tried, key=lambda one: one.effective)
    return [
        f"save every {duration(found.simulated)} ({percent(best.effective)} of the time counts then; Daly: "
        f"{duration(found.daly)}), where it is asked for every {duration(_every(experiment))}"
    ]


def _every(experiment: Experiment) -> float:
    assert experiment.checkpoints is not None
    return experiment.checkpoints.interval


def _spares(experiment: Experiment, result: Result) -> list[str]:
    """Return how many spare machines pay: what counts for each machine that is there, working or ready."""
    failures = experiment.failures
    if failures is None or not failures.takes_machines or failures.per == "switch" or failures.trace is not None:
        return []
    machines = max(machines_of(result.cluster, result.nodes.tolist())) + 1
    paid = {}
    for spares in sorted({*SPARES, failures.spares}):
        with_spares = dataclasses.replace(failures, spares=spares)
        effective = _effective(run(experiment.with_(failures=with_spares)))
        paid[spares] = effective * machines / (machines + spares)
    best = max(paid, key=lambda spares: paid[spares])
    if best == failures.spares or math.isclose(paid[best], paid[failures.spares], rel_tol=1e-3):
        return [f"{count(failures.spares, 'spare machine')}: no other number brings more per machine that is there"]
    gain, many = percent(paid[best] / paid[failures.spares] - 1.0), count(best, "spare machine")
    return [f"with {many} instead of {failures.spares} each machine that is there brings {gain} more"]


_DIMENSIONS = (
    "cluster", "workers", "strategy", "compression", "batch_size", *(each for each in SIZES if each != "data"),
)  # fmt: skip
_NAMES = {"batch_size": "batch", "micro_batch": "micro-batch"}


def reasons(
    best: Found, found: Sequence[Found], target: Target, simulate: Callable[[Candidate], Found]
) -> tuple[str, ...]:
    """Return where the time goes, and for each thing that is varied the best other value with its consequence.

    simulate  tells the figures of a configuration that the search has left out; of splits of a model what a bound
              says of them is told
    """
    lines = []
    if best.shares is not None:
        shares = {name: share for name, share in best.shares.items() if share >= SAME}
        lines.append("time goes to " + ", ".join(f"{name} {percent(share)}" for name, share in shares.items()))
    for dimension in _DIMENSIONS:
        near = [other for other in found if _differs_in(best, other, dimension)]
        if best.candidate.sizes:  # whose simulation takes long: what a bound says is enough
            other, figures = _best_known(near, target)
        else:
            other = _best_of(near, target, simulate)
            figures = None if other is None else other.figures
        if other is not None:
            value = other.candidate.settings[dimension]
            name = _NAMES.get(dimension, dimension)
            at_best = " at best" if other.figures is None else ""
            lines.append(f"{name} {value} instead {_consequence(best.figures, figures, target)}{at_best}")
    return tuple(lines)


def _best_known(near: Sequence[Found], target: Target) -> tuple[Found | None, Figures | None]:
    """Return the best of some configurations and its figures, or the best that it can have."""
    ranked = [(other, figures) for other in near if (figures := other.figures or other.bound) is not None]
    return min(ranked, key=lambda pair: (target.rank(pair[1]), pair[0].candidate.number), default=(None, None))


def _best_of(near: Sequence[Found], target: Target, simulate: Callable[[Candidate], Found]) -> Found | None:
    """Return the best of some configurations; those that were left out are simulated as long as one may be it."""

    done = [(other, other.figures) for other in near if other.figures is not None]
    open_ = [(target.rank(other.bound), other.candidate) for other in near if other.bound is not None]
    for rank, candidate in sorted(open_, key=lambda item: (item[0], item[1].number)):
        spread = max((spread_of(figures) for _, figures in done), default=0.0)
        if any(beats_bound(target.rank(figures), rank, spread) for _, figures in done):
            continue
        tried = simulate(candidate)
        done += [(tried, tried.figures)] if tried.figures is not None else []
    return next(iter(preferred([other for other, _ in done], target)), None)


def _differs_in(one: Found, other: Found, dimension: str) -> bool:
    a, b = one.candidate.settings, other.candidate.settings
    # one rank alone has no sequence parallelism, one stage no cut
    follow = ("sequence", "stage", "cut", "p2p") if dimension in ("tensor", "pipeline") else ()
    return [name for name in _DIMENSIONS if a.get(name) != b.get(name) and name not in follow] == [dimension]


def _consequence(best: Figures | None, other: Figures | None, target: Target) -> str:
    """Say what it means to take the other one."""
    assert best is not None
    assert other is not None
    (missed, mine), (misses, its) = target.rank(best), target.rank(other)
    if misses > missed:
        worst = max(target.misses(other), key=lambda miss: miss.share)
        return f"misses the {worst.what} by {percent(worst.share)}"
    if missed > misses:  # nearer to the target: a better choice that is listed before
        return f"misses the target by {percent(misses)} only"
    takes, costs = ("takes", "as long", "longer", "less time"), ("costs", "as much", "more", "less")
    asked, rest = (costs, takes) if target.wants_cheapest else (takes, costs)
    time = best.throughput / other.throughput
    second = time if target.wants_cheapest else time * other.cost_rate / best.cost_rate
    text = _change(its / mine, *asked)
    if abs(its / mine - 1.0) < SAME and math.isfinite(second) and abs(second - 1.0) >= SAME:
        text += f", {_change(second, *rest)}"
    return text


def _change(ratio: float, verb: str, same: str, more: str, less: str) -> str:
    """Say what a ratio means: "takes 3.1 % longer"."""
    change = ratio - 1.0
    if not math.isfinite(change) or abs(change) < SAME:
        return f"{verb} {same}"
    if change < 0.0:
        return f"{verb} {percent(-change)} {less}"
    return f"{verb} {percent(change)} {more}" if change < 0.995 else f"{verb} {ratio:.3g} times {same}"


#: efficiency that the rule on the number of GPUs is asked for where the target names none
EFFICIENCY = 0.9


@checked
def recommend(
    clusters: ClusterLike | Sequence[ClusterLike],
    model: ModelLike = "resnet50",
    target: Target = Target(),  # noqa: B008  (frozen)
    *,
    samples: Positive | None = None,
    training: TrainingLike | None = None,
    learning_model: ModelLike | None = None,
    workers: Sequence[Count] | None = None,
    strategies: Sequence[Splits | StrategyLike] | None = None,
    compressions: Sequence[CompressionLike | None] | None = None,
    batch_sizes: Sequence[Count] | None = None,
    base: Experiment | None = None,
    n_best: Count = 3,
    stability: bool = False,
    jobs: Count | None = None,
    progress: Callable[[int], None] | None = None,
) -> Plan:
    """Search clusters, numbers of workers, strategies, compressors and batch sizes for what meets a target best.

    clusters        one or several to choose from: names, paths, graphs or clusters (with prices, where costs matter)
    model           what is trained, as far as its sizes and compute times go
    target          what is wanted: a :class:`~ddlsim.Target`
    samples         that the training has to process (epochs * data set size), for a deadline or a budget
    training        what is learned, for an accuracy: the finalists are trained with real gradients
    learning_model  the (small) model that learns, if it is another one than `model`
    workers         numbers of workers to try; None: powers of two, and all of each cluster
    strategies      to try; None: four all-reduces, a server on each machine, local SGD over 8 steps.
                    :class:`~ddlsim.Splits` among them stands for ways to share the model out over workers
    compressions    to try (of the usual strategies not with local SGD, which costs accuracy itself); None: none, 16
                    bits, top 1 % with error feedback (none alone where strategies are given)
    batch_sizes     per worker, with :class:`~ddlsim.Splits` of all together; None: 32, 64 and 128
    base            an experiment with everything else: precision, jitter, compute, accumulation, seed, ...
    n_best          how many configurations to return
    stability       whether to look how stable each throughput is, by three more runs; what differs by less than that
                    ties, and what ties in time or cost is decided by the rest (docs/planning.md)
    jobs            processes (None: a core each; a script must then do its work under ``if __name__ == "__main__":``)
    progress        called with the number of simulations that have ended

    What no bound excludes is simulated. Throughputs are those of a few steps; samples are worth the same whatever the
    batch and the strategy, except where an accuracy is asked for. Raises ConfigError for what does not fit.
    """
    loaded = _clusters(clusters)
    what = _lesson(target, training, learning_model, base, samples)
    template = _template(base, load_model(model), loaded[0])
    packed = _compressions(compressions, strategies)
    options, senseless = candidates(template, loaded, workers, strategies, packed, batch_sizes or BATCH_SIZES)
    priced, notes = _priced(options, target)
    with Evaluator(jobs, progress) as evaluator:
        search = Search(target, evaluator, n_best if what is None else 1, priced, samples, stability=stability)
        if what is not None:
            search = dataclasses.replace(search, group=learning_group)
        found = search.run(options)
        choices, more = _choices(found, what, search, n_best)
        best = choices[0].candidate
        counts = [option.workers for option in options if option.cluster is best.cluster]
        choices, rivals = _with_ranges(choices, found, search) if what is None else (choices, None)
        crossings, remarks = crossovers(found, best, counts, evaluator)
        rules = advice(best, target.efficiency or EFFICIENCY, evaluator)
    gains = tuple(sensitivities(best.experiment)) if best.workers > 1 and not best.sizes else ()
    notes += reliability(best)
    notes += [*more, *remarks, *_notes(choices, options, senseless, what), *prepare(best.experiment).left_out]
    notes += _software(choices)
    return Plan(target, tuple(choices), tuple(found), tuple(crossings), gains, rules, tuple(notes), priced, rivals)


def _with_ranges(
    choices: list[Choice], found: Sequence[Found], search: Search
) -> tuple[list[Choice], tuple[str, ...] | None]:
    """Return the choices with their ranges, and the configurations that may be better than the best within them.

    Compared are the choices and the best of every other cluster. None: nothing of their devices is disputed.
    """
    by_candidate = {one.candidate: one for one in found}
    finalists = [by_candidate[choice.candidate] for choice in choices]
    places: dict[str, list[Found]] = {}
    for one in found:
        places.setdefault(one.candidate.place, []).append(one)
    if all(disputed(device_of(near[0].candidate)) is None for near in places.values()):
        return choices, None
    chosen = {one.candidate.place for one in finalists}
    for near in [near for place, near in places.items() if place not in chosen]:
        other = _best_of(near, search.target, lambda candidate: search.simulate([candidate])[0])
        finalists += [] if other is None else [other]
    known = ranges(finalists, search.evaluator, priced=search.priced, samples=search.samples)
    best, *others = finalists
    rivals = [str(other.candidate) for other in others if may_win(best, other, known, search.target)]
    choices = [dataclasses.replace(choice, range=known.get(choice.candidate)) for choice in choices]
    return choices, tuple(rivals) if known else None


def _software(choices: Sequence[Choice]) -> list[str]:
    """Return the software stacks that were assumed for the choices, where their times depend on them."""
    names = {
        default_stack(type(choice.experiment.strategy).__name__, device): None
        for choice in choices
        if choice.experiment.stack is None and (device := device_of(choice.candidate)) is not None
    }
    text = f"software assumed: {listed(names)}; set another by --stack, or stack= of the base"
    return [text] if names else []


def _clusters(given: ClusterLike | Sequence[ClusterLike]) -> list[Cluster]:
    several = [given] if isinstance(given, str) or not isinstance(given, Sequence) else list(given)
    if not several:
        raise ConfigError("recommend: clusters is empty; give at least one to choose from")
    return [load_cluster(one) for one in several]


def _template(base: Experiment | None, model: Model, cluster: Cluster) -> Experiment:
    if base is None:
        return Experiment(cluster, model)
    if base.training is not None:
        raise ConfigError("recommend: base has a training; give it to recommend as training=")
    if base.speed is not None and not isinstance(base.speed, Spread):
        raise ConfigError("recommend: base has a speed per worker, but their number varies; give the cluster speeds")
    return base.with_(cluster=cluster, model=model, time_model=None, compression=None)


def _lesson(
    target: Target,
    training: Training | None,
    model: str | Path | Model | None,
    base: Experiment | None,
    samples: float | None,
) -> Lesson | None:
    """Return what is to be learned. Raises ConfigError where what is given does not fit the target."""
    if target.accuracy is None:
        for name, value in (("training", training), ("learning_model", model)):
            if value is not None:
                raise ConfigError(f"recommend: {name} has no effect without an accuracy: target=Target(accuracy=0.95)")
        if target.needs_total and samples is None:
            raise ConfigError(
                "recommend: a deadline or a budget is about a whole training: give samples=epochs * data set size, or "
                "an accuracy and a training"
            )
        return None
    if training is None:
        raise ConfigError("recommend: an accuracy needs training=ddlsim.Training(...), which says what is learned")
    if samples is not None:
        raise ConfigError("recommend: samples has no effect beside an accuracy: the training ends when it is reached")
    learns = None if model is None else load_model(model)
    return lesson(training, learns, target, float("inf") if base is None else si(base.max_time, "time"))


def _compressions(
    given: Sequence[Compression | AnyCompressor | None] | None, strategies: Sequence[Splits | Strategy] | None
) -> list[Compression | None]:
    if given is None:
        return list(COMPRESSIONS) if strategies is None else [None]
    if not given:
        raise ConfigError("recommend: compressions is empty; give [None] to send gradients as they are")
    return [compression_of(one) for one in given]


def _priced(options: Sequence[Candidate], target: Target) -> tuple[bool, list[str]]:
    """Return whether all machines have prices, and what to note if not. Raises ConfigError if a budget needs them."""
    largest: dict[int, Candidate] = {}
    for option in options:
        known = largest.setdefault(id(option.cluster), option)
        if option.workers > known.workers:
            largest[id(option.cluster)] = option
    for option in largest.values():
        try:
            price_rate(option)
        except ConfigError as error:
            if target.budget is not None:
                raise ConfigError(f"recommend: a budget needs prices (--price on the command line); {error}") from None
            several = len({candidate.place for candidate in options}) > 1
            return False, [
                f"costs are device-hours, as machines of {option.place} have no price"
                + ("; one hour counts as much as another, whatever the device" if several else "")
            ]
    return True, []


def _choices(found: list[Found], what: Lesson | None, search: Search, n_best: int) -> tuple[list[Choice], list[str]]:
    if not any(one.figures is not None for one in found):
        whole = not any(contract.of(one.candidate.experiment.strategy).shares_batch for one in found)
        hint = "; to share the model out over workers give strategies=[ddlsim.Splits()] (--split)" if whole else ""
        raise ConfigError(f"recommend: no configuration can be simulated; the first: {found[0].reason}{hint}")
    target = search.target
    if what is not None:
        return trained(found, what, target, search.evaluator, n_best)
    by_candidate = {one.candidate: one for one in found}

    def simulate(candidate: Candidate) -> Found:
        return search.simulate([candidate])[0]

    choices = [
        dataclasses.replace(choice, reasons=reasons(by_candidate[choice.candidate], found, target, simulate))
        for choice in choices_of(found, target, n_best)
    ]
    if tied := tie_reason(by_candidate[choices[0].candidate], found, target):
        choices[0] = dataclasses.replace(choices[0], reasons=(*choices[0].reasons, tied))
    return choices, []


def _notes(
    choices: list[Choice], options: Sequence[Candidate], senseless: Counter[str], what: Lesson | None
) -> list[str]:
    notes = []
    best = choices[0]
    near = [miss.what for miss in best.misses if miss.share == 0.0 and abs(miss.value / miss.limit - 1.0) < best.spread]
    if near:
        notes.append(f"the best keeps the {' and the '.join(near)} by less than its throughput is stable to")
    if what is None and not all(choice.exact for choice in choices):
        notes.append(
            "* learns otherwise than plain SGD (compressed, local steps, ...) and may need more samples; give an "
            "accuracy and a training to find out"
        )
    batches = {option.global_batch for option in options}
    if what is None and len(batches) > 1:
        notes.append(
            f"global batches from {min(batches):,} to {max(batches):,} are taken to need as many samples; large ones "
            "often need more"
        )
    if senseless:
        notes.append(f"{senseless.total()} combinations make no sense: {text_of_senseless(senseless)}")
    return notes


@checked
def load_question(source: str | Path, *, allow_code: bool = False) -> dict[str, Any]:
    """Return what the TOML file `source` asks: the arguments of :func:`~ddlsim.recommend` that it names, by name.

    As in experiment files, "package.module:Name" is refused unless `allow_code`. Raises
    :class:`~ddlsim.errors.ConfigError` in one line: file, field, value, rule and remedy.
    """
    path = Path(source)
    table = read_toml(path)
    clusters, base, compressions = table.get("clusters"), table.get("base"), table.get("compressions")
    if isinstance(base, dict):
        first = clusters[0] if isinstance(clusters, list) and clusters else clusters or ""
        table["base"] = {"cluster": first, "model": table.get("model", "resnet50"), **base}
    if isinstance(compressions, list):
        table["compressions"] = [None if each == "none" else each for each in compressions]
    return SCHEMA.arguments(recommend, table, str(path), Source(path.parent, allow_code), ": ")
