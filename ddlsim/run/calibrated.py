"""Compute times from a calibrated cluster, for experiments that do not set their own."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ddlsim.cluster import Cluster
from ddlsim.cluster.calibrated import PER_MESSAGE, Beyond, beyond, deviation
from ddlsim.collectives import KINDS
from ddlsim.run.experiment import Experiment
from ddlsim.run.strategy_names import STRATEGY_CLASSES
from ddlsim.workload.compute import Affine, Measured
from ddlsim.workload.jitter import NoJitter

if TYPE_CHECKING:
    from ddlsim.cluster.calibration_table import ComputeTable


def measured_steps(experiment: Experiment, cluster: Cluster, model: str) -> tuple[ComputeTable | None, str]:
    """Return the calibrated step times for this experiment's `model` on `cluster`, or the reason why there are none.

    They require equal devices in fp32, and apply to one batch size only if a single one was measured. Experiments that
    set their compute time or device do not use them. The reason is "" if nothing was measured.
    """
    table = cluster.calibration
    own = next((fit for fit in table.compute if fit.model == model), None) if table is not None else None
    if own is None or experiment.compute is not None or experiment.device is not None:
        return None, ""
    if experiment.precision not in (None, "fp32"):
        return None, f"the measured step times of {model} are not used: they are for fp32, not {experiment.precision}"
    if len({cluster.device_of[node] for node in cluster.workers.tolist()}) > 1:
        return None, f"the measured step times of {model} are not used: their device is unknown"
    if len(own.batch_sizes) == 1 and own.batch_sizes[0] != experiment.batch(1):
        return (
            None,
            f"the measured step times of {model} are not used: they are for batch size {own.batch_sizes[0]} only",
        )
    return own, ""


def outside(experiment: Experiment, cluster: Cluster, model: str, n_workers: int) -> tuple[Beyond, Beyond]:
    """Return how far a run extrapolates from the calibration of `cluster`: its links, and its compute time."""
    table = cluster.calibration
    links = compute = Beyond()
    if table is None:
        return links, compute
    if n_workers > 1 and any("." in parameter.name for parameter in table.parameters):
        links = beyond(n_workers, [*table.ranks, *(n for curve in table.curves for n in curve.ranks)], "workers")
        if not any(curve.operation in KINDS for curve in table.curves):
            links += Beyond(0.0, ("extrapolated: only messages were measured, no collectives",), PER_MESSAGE)
    own, _ = measured_steps(experiment, cluster, model)
    if own is not None:
        compute = beyond(experiment.batch(n_workers), own.batch_sizes, f"samples of {model}")
    return links, compute


def family(experiment: Experiment, cluster: Cluster, model: str, n_workers: int, fitted_stack: bool = False) -> Beyond:
    """Return the prediction errors of measured runs similar to this one; none for a single worker.

    fitted_stack  whether the compute time comes from a stack that was fitted to measured runs
    """
    measured = measured_steps(experiment, cluster, model)[0] is not None
    given = experiment.compute is not None or measured or fitted_stack
    if n_workers == 1 and given:
        return Beyond()
    names = [name for name, of_class in STRATEGY_CLASSES.items() if of_class == type(experiment.strategy).__name__]
    name = names[0] if names else experiment.strategy.label
    return deviation(f"run/{name}" if given else "run/unmeasured compute time")


def as_measured(experiment: Experiment, cluster: Cluster, model: str) -> tuple[Experiment, tuple[str, ...]]:
    """Return the experiment with the compute time that was measured on `cluster`, if any, and notes for the reader."""
    found, reason = measured_steps(experiment, cluster, model)
    notes = [reason] if reason else []
    table = cluster.calibration
    if table is not None and table.jitter is not None and isinstance(experiment.jitter, NoJitter):
        notes.append(
            f"the calibration contains step-time jitter ({table.jitter.type}, {table.jitter.shape:.3g}), but this run "
            "has no jitter; set jitter, or use ddlsim.predict_interval"
        )
    if found is None:
        return experiment, tuple(notes)
    sizes = found.batch_sizes
    notes.append(f"compute time of {model}: measured on this cluster, for batch sizes {min(sizes)} to {max(sizes)}")
    if len(sizes) == 1:
        step: Affine | Measured = Measured(found.c0 + found.c1 * sizes[0], sizes[0])
    else:
        step = Affine(found.c0, found.c1)
    return dataclasses.replace(experiment, compute=step), tuple(notes)
