"""The plan of a run's step."""

from __future__ import annotations

from collections.abc import Sequence

from ddlsim.errors import ConfigError
from ddlsim.plan import Plan
from ddlsim.run.experiment import Experiment
from ddlsim.strategies.plans import plan_of
from ddlsim.workload.compute import Workload

__all__ = ["plan_of_run"]


def plan_of_run(experiment: Experiment, workloads: Sequence[Workload], steps: int = 1) -> Plan:
    """Return what the workers of a run do in its first `steps` steps, without jitter and slow-downs.

    Raises ConfigError where that is not a table yet.
    """
    if experiment.compression is not None:
        raise ConfigError("plan: the step with compression is not a table yet; leave compression out to see it")
    return plan_of(experiment.strategy, workloads, steps, experiment.accumulation)
