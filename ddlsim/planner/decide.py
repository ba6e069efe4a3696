"""`recommend`: the best configurations for clusters, a model and a target.

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
from typing import Annotated, Any

from ddlsim.arguments import Count, Positive, checked
from ddlsim.cluster import Cluster, ClusterLike, load_cluster
from ddlsim.cluster.groups import machines_of
from ddlsim.compression.choice import compression_of
from ddlsim.errors import ConfigError, listed
from ddlsim.learning import Training
from ddlsim.plain import read_toml
from ddlsim.planner.advice import advice
from ddlsim.planner.bounds import price_rate
from ddlsim.planner.candidates import BATCH_SIZES, COMPRESSIONS, Candidate, candidates
from ddlsim.planner.crossovers import Crossover, crossovers
from ddlsim.planner.evaluate import Evaluator
from ddlsim.planner.learned import Lesson, learning_group, lesson, trained
from ddlsim.planner.ranges import device_of, disputed, may_win, ranges
from ddlsim.planner.recommendation import Choice, Recommendation, choices_of
from ddlsim.planner.search import LARGEST_WAVE, SAME, Search, Trial, beats_bound, preferred, spread_of, tie_reason
from ddlsim.planner.target import Figures, Target
from ddlsim.readable import count, duration, percent
from ddlsim.run.checkpoint_intervals import best_checkpoint_interval
from ddlsim.run.experiment import CompressionLike, Experiment, StrategyLike, TrainingLike
from ddlsim.run.failure_timeline import has_failure_timeline
from ddlsim.run.files import SCHEMA
from ddlsim.run.prepare import prepare
from ddlsim.run.result import Result
from ddlsim.run.sensitivity import sensitivities
from ddlsim.run.simulate import complete
from ddlsim.schema import Source
from ddlsim.spread import Spread
from ddlsim.strategies import Splits, contract
from ddlsim.strategies.splits import SIZES, text_of_invalid
from ddlsim.units import si
from ddlsim.workload.model import Model, ModelLike, load_model
from ddlsim.workload.stacks import default_stack

#: numbers of spare machines to try
SPARES = (0, 1, 2, 4, 8)
#: number of sampled failure timelines for each, and for each checkpoint interval
N_TIMELINES = 20


def reliability(candidate: Candidate) -> list[str]:
    """Return notes about failures of the best configuration; none without failures."""
    experiment = candidate.experiment
    if not has_failure_timeline(experiment):
        return []
    result = complete(experiment)
    lost = 1.0 - _effective(result)
    share = f"failures and checkpoints take {percent(lost)} of the time of the best configuration"
    return [f"throughputs are goodputs: {share}", *_interval(experiment), *_spares(experiment, result)]


def _effective(result: Result) -> float:
    timelines = [result.failure_timeline] if result.failure_timeline.finished else result.timelines(N_TIMELINES)
    return sum(timeline.effective for timeline in timelines) / len(timelines)


def _interval(experiment: Experiment) -> list[str]:
    try:
        intervals = best_checkpoint_interval(experiment, n_timelines=N_TIMELINES)
    except ConfigError:  # no checkpoints, no random failures, or free checkpoints
        return []
    assert experiment.checkpoints is not None
    now, best = experiment.checkpoints.interval, max(intervals.tried, key=lambda one: one.effective)
    return [
        f"checkpoint every {duration(intervals.simulated)} instead of every {duration(now)} (then "
        f"{percent(best.effective)} of the time is useful; Daly's formula: every {duration(intervals.daly)})"
    ]


def _spares(experiment: Experiment, result: Result) -> list[str]:
    """Return a note on the best number of spare machines, by goodput per machine including spares."""
    failures = experiment.failures
    if failures is None or not failures.takes_machines or failures.per == "switch" or failures.trace is not None:
        return []
    machines = max(machines_of(result.cluster, result.nodes.tolist())) + 1
    paid = {}
    for spares in sorted({*SPARES, failures.spares}):
        with_spares = dataclasses.replace(failures, spares=spares)
        effective = _effective(complete(experiment.with_(failures=with_spares)))
        paid[spares] = effective * machines / (machines + spares)
    best = max(paid, key=lambda spares: paid[spares])
    if best == failures.spares or math.isclose(paid[best], paid[failures.spares], rel_tol=1e-3):
        return [f"{count(failures.spares, 'spare machine')}: no other number gives more goodput per machine"]
    gain, many = percent(paid[best] / paid[failures.spares] - 1.0), count(best, "spare machine")
    return [f"with {many} instead of {failures.spares}, goodput per machine, spares included, is {gain} higher"]


_DIMENSIONS = (
    "cluster",
    "workers",
    "strategy",
    "compression",
    "batch_size",
    *(name for name in SIZES if name != "data"),
)
_NAMES = {"batch_size": "batch", "micro_batch": "micro-batch"}


def reasons(best: Trial, trials: Sequence[Trial], search: Search) -> tuple[str, ...]:
    """Return how the best configuration spends its time, and for each searched field the best alternative value.

    Alternatives that the search pruned are simulated; for splits of a model, their bounds are used instead.
    """
    target = search.target
    lines = []
    if best.shares is not None:
        shares = {name: share for name, share in best.shares.items() if share >= SAME}
        lines.append("time goes to " + ", ".join(f"{name} {percent(share)}" for name, share in shares.items()))
    for dimension in _DIMENSIONS:
        near = [other for other in trials if _differs_in(best, other, dimension)]
        if best.candidate.sizes:  # simulating a split takes long, and its bound is sufficient
            other, figures = _best_known(near, search)
        elif (other := _best_of(near, search)) is not None:
            figures = other.figures
        if other is not None:
            value = other.candidate.settings[dimension]
            name = _NAMES.get(dimension, dimension)
            at_best = " at the least" if other.figures is None else ""
            lines.append(f"{name} {value} instead {_consequence(best.figures, figures, target)}{at_best}")
    return tuple(lines)


def _best_known(near: Sequence[Trial], search: Search) -> tuple[Trial | None, Figures | None]:
    """Return the best of some configurations that fits, with its figures, or with a bound on them."""
    ranked = [(other, figures) for other in near if (figures := other.figures or other.bound) is not None]
    ranked.sort(key=lambda pair: (search.target.rank(pair[1]), pair[0].candidate.number))
    fitting = (pair for pair in ranked if pair[0].figures or not search.misfit(pair[0].candidate))
    return next(fitting, (None, None))


def _best_of(near: Sequence[Trial], search: Search) -> Trial | None:
    """Return the best of some configurations, simulating pruned ones for as long as one may be the best."""
    target = search.target
    done = [(other, other.figures) for other in near if other.figures is not None]
    open_ = [(target.rank(other.bound), other.candidate) for other in near if other.bound is not None]
    for rank, candidate in sorted(open_, key=lambda item: (item[0], item[1].number)):
        spread = max((spread_of(figures) for _, figures in done), default=0.0)
        if any(beats_bound(target.rank(figures), rank, spread) for _, figures in done) or search.misfit(candidate):
            continue
        (tried,) = search.simulate([candidate])
        done += [(tried, tried.figures)] if tried.figures is not None else []
    return next(iter(preferred([other for other, _ in done], target)), None)


def _differs_in(one: Trial, other: Trial, dimension: str) -> bool:
    a, b = one.candidate.settings, other.candidate.settings
    # one rank alone has no sequence parallelism, one stage no cut
    follow = ("sequence", "stage", "cut", "p2p") if dimension in ("tensor", "pipeline") else ()
    return [name for name in _DIMENSIONS if a.get(name) != b.get(name) and name not in follow] == [dimension]


def _consequence(best: Figures | None, other: Figures | None, target: Target) -> str:
    """Describe the effect of choosing the other configuration instead."""
    assert best is not None
    assert other is not None
    (missed, mine), (misses, its) = target.rank(best), target.rank(other)
    if misses > missed:
        worst = max(target.misses(other), key=lambda miss: miss.share)
        return f"misses the {worst.what} by {percent(worst.share)}"
    if missed > misses:  # closer to the target, but listed later
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
    """Describe a ratio, as in "takes 3.1 % longer"."""
    change = ratio - 1.0
    if not math.isfinite(change) or abs(change) < SAME:
        return f"{verb} {same}"
    if change < 0.0:
        return f"{verb} {percent(-change)} {less}"
    return f"{verb} {percent(change)} {more}" if change < 0.995 else f"{verb} {ratio:.3g} times {same}"


#: target efficiency of the rule on the number of GPUs, if the target has none
EFFICIENCY = 0.9


@checked
def recommend(
    clusters: Annotated[
        ClusterLike | Sequence[ClusterLike],
        "a cluster (a name, path, networkx graph or Cluster object) or a list of clusters",
    ],
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
) -> Recommendation:
    """Find the clusters, worker counts, strategies, compressors and batch sizes that best meet a target.

    clusters        one or more clusters to choose from: names, paths, graphs or Cluster objects. Costs in USD require
                    clusters whose machines have prices
    model           model that determines sizes and compute times
    target          :class:`~ddlsim.Target` with the constraints and the objective of the search
    samples         number of samples in the complete training run (epochs * data set size); required if the target has
                    a deadline or budget
    training        training settings; required if the target has an accuracy. The best candidates are then trained with
                    real gradients
    learning_model  model that is trained, often a small one; None: `model`
    workers         worker counts to try; None: powers of two, and the total number of workers in each cluster
    strategies      strategies to try; None: four variants of AllReduce, one parameter server per machine, and local SGD
                    with 8 local steps. :class:`~ddlsim.Splits` represents all ways to split the model over workers
    compressions    compressors to try; None: no compression, 16 bits, and the largest 1 % of the elements with error
                    feedback (only no compression if `strategies` is set). By default, compressors are not combined with
                    local SGD, which already costs accuracy
    batch_sizes     batch sizes to try, per worker or, with :class:`~ddlsim.Splits`, global; None: 32, 64 and 128
    base            experiment with all other settings: precision, jitter, compute, accumulation, seed, ...
    n_best          number of configurations to return
    stability       whether to measure how stable each throughput is, with three more runs. Configurations that differ
                    by less than this are ties, which other criteria decide (docs/planning.md)
    jobs            number of processes; None: one per core. A script that uses several processes must guard its
                    top-level code with ``if __name__ == "__main__":``
    progress        function that is called with the number of finished simulations

    Configurations that cannot be among the best, according to a bound on their throughput, are not simulated.
    Throughputs are measured over a few simulated steps. Without a target accuracy, all samples count equally,
    regardless of batch size and strategy. On Ctrl-C, the best of the configurations simulated so far are returned, with
    ``interrupted`` set. Raises ConfigError for incompatible arguments, and if no configuration can be
    simulated.
    """
    several = [clusters] if isinstance(clusters, str) or not isinstance(clusters, Sequence) else list(clusters)
    if not several:
        raise ConfigError("recommend: clusters is empty; pass at least one cluster")
    loaded = [load_cluster(one) for one in several]
    what = _lesson(target, training, learning_model, base, samples)
    template = _template(base, load_model(model), loaded[0])
    if compressions is not None and not compressions:
        raise ConfigError("recommend: compressions is empty; use [None] for no compression")
    packed = [None] if compressions is None else [compression_of(one) for one in compressions]
    if compressions is None and strategies is None:
        packed = list(COMPRESSIONS)
    options, invalid = candidates(template, loaded, workers, strategies, packed, batch_sizes or BATCH_SIZES)
    priced, notes = _priced(options, target)
    with Evaluator(jobs, progress, min(len(options), LARGEST_WAVE)) as evaluator:
        search = Search(target, evaluator, n_best if what is None else 1, priced, samples, stability=stability)
        if what is not None:
            search = dataclasses.replace(search, group=learning_group)
        trials = search.run(options)
        rivals: tuple[str, ...] | None = None
        choices, choice_notes = _choices(trials, what, search, n_best)
        best = choices[0].candidate
        counts = [option.workers for option in options if option.cluster is best.cluster]
        if what is None:
            choices, rivals = evaluator.attempt(lambda: _with_ranges(choices, trials, search), (choices, None))
        crossings: Sequence[Crossover]
        remarks: Sequence[str]
        crossings, remarks = evaluator.attempt(lambda: crossovers(trials, best, counts, evaluator), ([], []))
        rules = evaluator.attempt(lambda: advice(best, target.efficiency or EFFICIENCY, evaluator), ())
    varied = best.workers > 1 and not best.sizes
    gains = evaluator.attempt(lambda: tuple(sensitivities(best.experiment)) if varied else (), ())
    notes += evaluator.attempt(lambda: reliability(best), [])
    notes += [*choice_notes, *remarks, *_notes(choices, options, invalid, what), *prepare(best.experiment).left_out]
    notes += _software(choices)
    return Recommendation(
        target, tuple(choices), tuple(trials), tuple(crossings), gains, rules, tuple(notes), priced, rivals,
        evaluator.interrupted,
    )  # fmt: skip


def _with_ranges(
    choices: list[Choice], trials: Sequence[Trial], search: Search
) -> tuple[list[Choice], tuple[str, ...] | None]:
    """Return the choices with their ranges, and the rivals that may be better than the best one within them.

    Rivals are the other choices and the best configuration of every other cluster. None: no device rates are disputed.
    """
    by_candidate = {one.candidate: one for one in trials}
    finalists = [by_candidate[choice.candidate] for choice in choices]
    places: dict[str, list[Trial]] = {}
    for one in trials:
        places.setdefault(one.candidate.place, []).append(one)
    if all(disputed(device_of(near[0].candidate)) is None for near in places.values()):
        return choices, None
    chosen = {one.candidate.place for one in finalists}
    for near in [near for place, near in places.items() if place not in chosen]:
        other = _best_of(near, search)
        finalists += [] if other is None else [other]
    range_of = ranges(finalists, search.evaluator, priced=search.priced, samples=search.samples)
    best, *others = finalists
    rivals = [str(other.candidate) for other in others if may_win(best, other, range_of, search.target)]
    choices = [dataclasses.replace(choice, range=range_of.get(choice.candidate)) for choice in choices]
    return choices, tuple(rivals) if range_of else None


def _software(choices: Sequence[Choice]) -> list[str]:
    """Return notes on the software stacks assumed for the choices, if their times depend on them."""
    names = {
        default_stack(type(choice.experiment.strategy).__name__, device): None
        for choice in choices
        if choice.experiment.stack is None and (device := device_of(choice.candidate)) is not None
    }
    text = f"assumed software stack: {listed(names)}; set another with --stack, or with stack= of the base"
    return [text] if names else []


def _template(base: Experiment | None, model: Model, cluster: Cluster) -> Experiment:
    if base is None:
        return Experiment(cluster, model)
    if base.training is not None:
        raise ConfigError("recommend: base must not contain training settings; pass training=... to recommend instead")
    if base.speed is not None and not isinstance(base.speed, Spread):
        raise ConfigError(
            "recommend: base has a speed per worker, but the number of workers varies; set speeds in the cluster"
        )
    return base.with_(cluster=cluster, model=model, time_model=None, compression=None)


def _lesson(
    target: Target,
    training: Training | None,
    model: str | Path | Model | None,
    base: Experiment | None,
    samples: float | None,
) -> Lesson | None:
    """Return the training of the finalists. Raises ConfigError if the arguments do not match the target."""
    if target.accuracy is None:
        for name, value in (("training", training), ("learning_model", model)):
            if value is not None:
                raise ConfigError(
                    f"recommend: {name} has no effect without a target accuracy; set target=Target(accuracy=0.95)"
                )
        if target.needs_total and samples is None:
            raise ConfigError(
                "recommend: a deadline or a budget requires the length of the training; set samples=epochs * data set "
                "size, or a target accuracy and training=..."
            )
        return None
    if training is None:
        raise ConfigError("recommend: a target accuracy needs training=ddlsim.Training(...)")
    if samples is not None:
        raise ConfigError(
            "recommend: samples has no effect with a target accuracy, because the training ends when it reaches the "
            "target; remove samples"
        )
    learns = None if model is None else load_model(model)
    return lesson(training, learns, target, float("inf") if base is None else si(base.max_time, "time"))


def _priced(options: Sequence[Candidate], target: Target) -> tuple[bool, list[str]]:
    """Whether all machines have prices, and notes if not. Raises ConfigError if a budget requires them."""
    places = dict.fromkeys(option.place for option in options)
    for place in places:
        try:
            price_rate(max((option for option in options if option.place == place), key=lambda one: one.workers))
        except ConfigError as error:
            if target.budget is not None:
                raise ConfigError(f"recommend: a budget needs prices (--price on the command line): {error}") from None
            note = f"costs are in device-hours, because machines of {place} have no price"
            return False, [note + ("; all devices count the same" if len(places) > 1 else "")]
    return True, []


def _choices(trials: list[Trial], what: Lesson | None, search: Search, n_best: int) -> tuple[list[Choice], list[str]]:
    if not any(one.figures is not None for one in trials):
        if search.evaluator.interrupted:
            raise KeyboardInterrupt
        unsplit = not any(contract.of(one.candidate.experiment.strategy).shares_batch for one in trials)
        hint = "; to split the model over workers, set strategies=[ddlsim.Splits()] (--split)" if unsplit else ""
        reason = trials[0].reason
        raise ConfigError(f"recommend: no configuration can be simulated; the first one failed with: {reason}{hint}")
    target = search.target
    if what is not None:
        return trained(trials, what, target, search.evaluator, n_best)
    by_candidate = {one.candidate: one for one in trials}
    choices = [
        dataclasses.replace(choice, reasons=reasons(by_candidate[choice.candidate], trials, search))
        for choice in choices_of(trials, target, n_best)
    ]
    if tied := tie_reason(by_candidate[choices[0].candidate], trials, target):
        choices[0] = dataclasses.replace(choices[0], reasons=(*choices[0].reasons, tied))
    return choices, []


def _notes(
    choices: list[Choice], options: Sequence[Candidate], invalid: Counter[str], what: Lesson | None
) -> list[str]:
    notes = []
    best = choices[0]
    near = [miss.what for miss in best.misses if miss.share == 0.0 and abs(miss.value / miss.limit - 1.0) < best.spread]
    if near:
        limits = " and the ".join(near)
        notes.append(
            f"the best configuration meets the {limits} by a margin smaller than the variation in its throughput under "
            "tiny changes to the inputs"
        )
    if what is None and not all(choice.exact for choice in choices):
        notes.append(
            "configurations marked with * learn differently from plain SGD (compression, local steps, ...) and may "
            "need more samples; set a target accuracy and training=... to find out"
        )
    batches = {option.global_batch for option in options}
    if what is None and len(batches) > 1:
        smallest, largest = min(batches), max(batches)
        notes.append(
            "training is assumed to need the same total number of samples at every global batch size from "
            f"{smallest:,} to {largest:,}; large batches often need more"
        )
    if invalid:
        n_invalid = invalid.total()
        notes.append(f"{n_invalid} combinations are not valid: {text_of_invalid(invalid)}")
    return notes


@checked
def load_question(source: str | Path, *, allow_code: bool = False) -> dict[str, Any]:
    """Load the arguments of :func:`~ddlsim.recommend` from a TOML file, and return them as a mapping.

    source      path of the file (see :mod:`ddlsim.planner.decide` for its keys)
    allow_code  whether the file may contain "package.module:Name", which imports and runs code, as in experiment files

    Raises :class:`~ddlsim.errors.ConfigError` for an invalid file; the message contains the file, field, value and
    rule, and suggests a correction.
    """
    path = Path(source)
    table = read_toml(path)
    clusters, base, compressions = table.get("clusters"), table.get("base"), table.get("compressions")
    if isinstance(base, dict):
        first = clusters[0] if isinstance(clusters, list) and clusters else clusters or ""
        table["base"] = {"cluster": first, "model": table.get("model", "resnet50"), **base}
    if isinstance(compressions, list):
        table["compressions"] = [None if compression == "none" else compression for compression in compressions]
    return SCHEMA.arguments(recommend, table, str(path), Source(path.parent, allow_code), ": ")
