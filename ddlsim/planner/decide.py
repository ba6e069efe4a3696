"""`recommend`: from clusters, a model and a target to a plan."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from ddlsim.arguments import Count, Positive, checked
from ddlsim.cluster import Cluster, ClusterLike, load_cluster
from ddlsim.compression import Compression
from ddlsim.compression.choice import compression_of
from ddlsim.compression.contract import AnyCompressor
from ddlsim.errors import ConfigError
from ddlsim.learning import Training
from ddlsim.planner.advice import advice
from ddlsim.planner.bounds import price_rate
from ddlsim.planner.candidates import BATCH_SIZES, COMPRESSIONS, Candidate, candidates
from ddlsim.planner.crossovers import crossovers
from ddlsim.planner.evaluate import Evaluator
from ddlsim.planner.learned import Lesson, learning_group, lesson, trained
from ddlsim.planner.plan import Choice, Plan, choices_of
from ddlsim.planner.preference import tie_reason
from ddlsim.planner.reasons import reasons
from ddlsim.planner.reliability import reliability
from ddlsim.planner.search import Found, Search
from ddlsim.planner.target import Target
from ddlsim.run.experiment import CompressionLike, Experiment, StrategyLike, TrainingLike
from ddlsim.run.prepare import prepare
from ddlsim.run.sensitivity import sensitivities
from ddlsim.strategies import Splits, Strategy
from ddlsim.strategies.splits import text_of_senseless
from ddlsim.units import si
from ddlsim.workload.model import Model, ModelLike, load_model
from ddlsim.workload.spread import Spread
from ddlsim.workload.stage import shares_batch

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
        crossings, remarks = crossovers(found, best, counts, evaluator)
        rules = advice(best, target.efficiency or EFFICIENCY, evaluator)
    gains = tuple(sensitivities(best.experiment)) if best.workers > 1 and not best.sizes else ()
    notes += reliability(best)
    notes += [*more, *remarks, *_notes(choices, options, senseless, what), *prepare(best.experiment).left_out]
    return Plan(target, tuple(choices), tuple(found), tuple(crossings), gains, rules, tuple(notes), priced)


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


def _choices(
    found: list[Found], what: Lesson | None, search: Search, n_best: int
) -> tuple[list[Choice], list[str]]:
    if not any(one.figures is not None for one in found):
        whole = not any(shares_batch(one.candidate.experiment.strategy) for one in found)
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
