"""Work of a study's processes: simulate points, and record the metrics that the table shows."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.run.experiment import Experiment
from ddlsim.run.metrics import record
from ddlsim.strategies import AllReduce, ParameterServer
from ddlsim.study.serialization import Parcel, opened
from ddlsim.workload.model import load_model

if TYPE_CHECKING:
    from ddlsim.run.result import Result

#: status of a point: simulated; invalid combination; error
DONE, SKIPPED, FAILED = "done", "skipped", "failed"
#: time in s after which a process hands in its results, so that they are stored soon
HAND_IN = 0.3


@dataclass(frozen=True)
class Outcome:
    """Outcome of a point.

    status   DONE, SKIPPED or FAILED
    error    why it was skipped or failed
    record   numbers of the result (:func:`record_of`)
    seconds  wall-clock time of the simulation
    """

    status: str
    error: str = ""
    record: dict[str, object] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Answer:
    """A worker's answer: outcomes of the first points of a parcel, or the digests of missing parts."""

    outcomes: tuple[Outcome, ...] = ()
    missing: tuple[str, ...] = ()


def simulate_some(work: Parcel) -> Answer:
    """Simulate the experiments in a parcel with :func:`simulate_all`."""
    content = opened(work)
    return Answer(missing=content) if isinstance(content, tuple) else simulate_all(content, work.stability)


def simulate_all(experiments: Sequence[Experiment], stability: bool) -> Answer:
    """Simulate experiments one after the other, and return the outcomes so far after about :data:`HAND_IN` s."""
    started = time.perf_counter()
    outcomes: list[Outcome] = []
    for experiment in experiments:
        outcomes.append(simulate_one(experiment, stability=stability))
        if time.perf_counter() - started > HAND_IN:
            break
    return Answer(tuple(outcomes))


def simulate_one(experiment: Experiment, *, stability: bool = False) -> Outcome:
    """Return the outcome of an experiment in any case: invalid ones are skipped, and any other error is a failure.

    With `stability`, the record includes how stable its throughput is, after three more runs."""
    from ddlsim.run.simulate import complete

    started = time.perf_counter()
    try:
        outcome = Outcome(DONE, record=record_of(complete(experiment, stability=stability)))
    except ConfigError as error:
        outcome = Outcome(SKIPPED, str(error))
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        outcome = Outcome(FAILED, f"{type(error).__name__}: {error} (in {place.name}, line {place.lineno})")
    return Outcome(outcome.status, outcome.error, outcome.record, time.perf_counter() - started)


def warm_up(experiments: Sequence[Experiment]) -> None:
    """Load the compiled code that experiments need, or compile it for the cache on disk.

    Runs tiny substitutes: two workers on a switch, and the trained networks with two samples.
    """
    from ddlsim.cluster import star
    from ddlsim.nn.network import build_network
    from ddlsim.run.simulate import run

    cluster = star(3, bandwidth="1 Gbit/s", latency="1 us")
    for strategy in (AllReduce("ring"), ParameterServer(1)):
        run(Experiment(cluster, "lenet5", strategy, workers=2, steps=1, warmup=0))
    learning = {(id(e.model), e.training.loss): e for e in experiments if e.training is not None}
    for (_, loss), experiment in learning.items():
        with suppress(ConfigError):  # the experiment itself reports the error
            network = build_network(load_model(experiment.model), 0, loss=loss)
            x, params, state = np.zeros((2, *network.model.input_shape)), network.initial_params, network.initial_state
            network.loss_and_gradient(params, x, np.zeros(2, np.int64), np.random.default_rng(0), state.copy())
            network.predict(params, x, state)


def record_of(result: Result) -> dict[str, object]:
    """Return the numbers of a result that a study keeps, as plain values; a target that was not reached is inf."""
    from ddlsim.run.costs import cost_assumptions, energy_assumptions

    rows = result.evaluations if result.monitor is not None else []
    lists = {"cost": cost_assumptions, "energy": energy_assumptions}
    texts = {name: ", ".join(list_of(result)) for name, list_of in lists.items() if result.known(name) is not None}
    return {
        "n_workers": result.n_workers,
        **record(result),
        "stop_reason": result.stop_reason,
        "notes": [*result.notes, *(f"{name}: {assumed}" for name, assumed in texts.items() if assumed)],
        "warnings": list(result.warnings),
        **({"history": [list(row) for row in rows]} if rows else {}),
    }
