"""Target accuracies: the finalists are trained, because throughput does not determine how well they learn."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence

from ddlsim.data import load_data
from ddlsim.data.dataset import DataSet
from ddlsim.errors import ConfigError
from ddlsim.learning import Training
from ddlsim.learning.monitor import Row
from ddlsim.planner.candidates import Candidate
from ddlsim.planner.evaluate import Evaluator
from ddlsim.planner.recommendation import Choice, best_of
from ddlsim.planner.search import Trial, levels, spread_of
from ddlsim.planner.target import Miss, Target
from ddlsim.readable import percent
from ddlsim.run.experiment import Experiment
from ddlsim.study.worker import DONE, Outcome
from ddlsim.ties import in_order
from ddlsim.workload.model import Model

#: number of configurations that are trained
N_TRAINED = 6


#: function that returns the experiment that trains a candidate
Lesson = Callable[[Candidate], Experiment]


def lesson(training: Training, model: Model | None, target: Target, max_time: float) -> Lesson:
    """Return a function that trains a candidate until it reaches the target accuracy, with `model` if it differs from
    the timed one. Raises ConfigError if the training might never end."""
    if training.last_epoch is None and training.updates is None and math.isinf(max_time):
        raise ConfigError(
            "recommend: the training would never end if the accuracy were not reached; set epochs or updates of the "
            "training, or max_time of the base experiment"
        )
    data = training.data if isinstance(training.data, DataSet) else load_data(training.data)
    training = dataclasses.replace(training, data=data, target_accuracy=target.accuracy)

    def experiment(candidate: Candidate) -> Experiment:
        timed = candidate.experiment.with_(training=training)
        return timed if model is None else timed.with_(model=model, time_model=timed.model)

    return experiment


def learning_group(candidate: Candidate) -> Hashable:
    """Return a key that is equal for configurations with the same learning curve, of which only the fastest matters.

    Exact configurations are grouped by global batch, others by strategy, compression, workers and batch size.
    """
    if candidate.exact:
        return candidate.global_batch
    return candidate.strategy, candidate.compression, candidate.workers, candidate.batch_size


def _finalists(trials: Sequence[Trial]) -> list[Trial]:
    """Return the fastest configuration of each learning rule, then others by throughput."""
    done = [one for one in trials if one.figures is not None]
    first: dict[Hashable, Trial] = {}
    for one in done:
        rule = "exact" if one.candidate.exact else (one.candidate.strategy, one.candidate.compression)
        first.setdefault(rule, one)
    groups: dict[Hashable, Trial] = {}
    for one in (*first.values(), *done):
        groups.setdefault(learning_group(one.candidate), one)
    return list(groups.values())[:N_TRAINED]


def trained(
    trials: Sequence[Trial], what: Lesson, target: Target, evaluator: Evaluator, n_best: int
) -> tuple[list[Choice], list[str]]:
    """Train the finalists; return the best ones, best first, and notes for the user.

    Raises ConfigError if none of them can be trained.
    """
    chosen = _finalists(trials)
    experiments = [what(one.candidate) for one in chosen]
    outcomes = evaluator.outcomes(experiments)
    choices: list[Choice] = []
    notes: list[str] = []
    for one, experiment, outcome in zip(chosen, experiments, outcomes, strict=True):
        choice = _choice(one, experiment, outcome, target)
        if choice is None:
            notes.append(f"not trained: {one.candidate}: {outcome.error}")
        else:
            choices.append(choice)
    if not choices:
        if evaluator.interrupted:
            raise KeyboardInterrupt
        raise ConfigError(f"recommend: no finalist can be trained: {notes[0]}")
    choices = in_order(choices, lambda choice: _levels(choice, target), lambda choice: spread_of(choice.figures))
    n_groups = len({learning_group(one.candidate) for one in trials if one.figures is not None})
    if n_groups > len(chosen):
        notes.append(
            f"only {len(chosen)} of {n_groups} combinations of update rule and global batch size were trained: the "
            "fastest combination for each rule, then the fastest overall. A smaller batch size may reach the accuracy "
            "sooner"
        )
    others = {choice.candidate: _reason(choice, target) for choice in choices}
    return [dataclasses.replace(c, reasons=_reasons(c, others)) for c in best_of(choices, n_best)], notes


def _choice(one: Trial, experiment: Experiment, outcome: Outcome, target: Target) -> Choice | None:
    history = outcome.record.get("history")
    if outcome.status != DONE or one.figures is None or not isinstance(history, list):
        return None
    seconds = outcome.record["time_to_accuracy"]
    assert isinstance(seconds, float)
    best = max(Row(*row).accuracy for row in history)
    figures = dataclasses.replace(one.figures, total_time=seconds)
    assert target.accuracy is not None
    share = 0.0 if math.isfinite(seconds) else max(target.accuracy / max(best, 1e-9) - 1.0, 1e-9)
    misses = (Miss("accuracy", target.accuracy, best, share), *target.misses(figures))
    return Choice(one.candidate, experiment, figures, misses, accuracy=best)


def _levels(choice: Choice, target: Target) -> tuple[float, ...]:
    accuracy = next(miss.share for miss in choice.misses if miss.what == "accuracy")
    worst = max(miss.share for miss in choice.misses)
    return levels(target, choice.candidate, choice.figures, miss=worst, accuracy_miss=accuracy)


def _reasons(choice: Choice, others: dict[Candidate, str]) -> tuple[str, ...]:
    lines = [f"{candidate}: {reason}" for candidate, reason in others.items() if candidate is not choice.candidate]
    return (f"{others[choice.candidate]}; also trained:", *lines) if lines else (others[choice.candidate],)


def _reason(choice: Choice, target: Target) -> str:
    seconds = choice.figures.total_time
    if seconds is None or math.isinf(seconds):
        return f"reaches {percent(choice.accuracy or 0.0)} at best"
    return f"reaches {percent(target.accuracy or 0.0)} after {seconds:,.4g} s"
