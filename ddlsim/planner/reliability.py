"""What failures cost the best configuration, and what to do about them: how often to save, how many spares."""

from __future__ import annotations

import dataclasses
import math

from ddlsim.errors import ConfigError
from ddlsim.planner.candidates import Candidate
from ddlsim.readable import count, duration, percent
from ddlsim.run.checkpoint_intervals import best_checkpoint_interval
from ddlsim.run.experiment import Experiment
from ddlsim.run.living import has_life
from ddlsim.run.parts import machines_of
from ddlsim.run.result import Result
from ddlsim.run.simulate import run

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
