"""Runs whose numbers are compared with those of others: all of them to their end, and perhaps by the clock alone."""

from __future__ import annotations

import dataclasses

from ddlsim.run.experiment import Experiment
from ddlsim.run.result import Result
from ddlsim.run.simulate import run


def complete(experiment: Experiment, *, stability: bool = False) -> Result:
    """Simulate to the end. Raises KeyboardInterrupt on Ctrl-C: what was cut short compares with nothing."""
    result = run(experiment, stability=stability)
    if result.interrupted:
        raise KeyboardInterrupt
    return result


def clock_of(experiment: Experiment) -> Experiment:
    """Return the experiment without what it learns: the clock does not need the values."""
    if experiment.training is None:
        return experiment
    model = experiment.model if experiment.time_model is None else experiment.time_model
    return dataclasses.replace(experiment, training=None, time_model=None, model=model)
