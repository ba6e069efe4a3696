"""Ranges of recommended configurations on devices with disputed rates, and whether they affect the ranking.

Published runs of a device can disagree on the share of its peak that matrix products reach (``Kernels.spread``). Such
configurations are also simulated at the lowest and the highest of these rates. All configurations on one device share
its true rate, so they are compared at the same end; configurations on different devices are compared at opposite ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ddlsim.planner.candidates import Candidate
from ddlsim.planner.evaluate import Evaluator
from ddlsim.planner.search import Trial, beats_bound, figures_of, spread_of
from ddlsim.planner.target import Figures, Target
from ddlsim.run.experiment import Experiment
from ddlsim.run.prepare import DEFAULT_DEVICE, with_defaults
from ddlsim.study.worker import DONE
from ddlsim.workload.compute import PerKernel
from ddlsim.workload.devices import Device, load_device
from ddlsim.workload.model import load_model
from ddlsim.workload.products import has_kernels


class Range(NamedTuple):
    """The figures of a configuration at the lowest and the highest rate of its device, named `device`."""

    low: Figures
    high: Figures
    device: str


def ranges(
    trials: Sequence[Trial], evaluator: Evaluator, *, priced: bool, samples: float | None
) -> Mapping[Candidate, Range]:
    """Simulate configurations at both ends of their device's disputed rates; omit those without disputed rates."""
    devices = {one.candidate: device_of(one.candidate) for one in trials}
    asked = [(one, device, ends) for one, device in devices.items() if device and (ends := disputed(device))]
    outcomes = evaluator.outcomes([_at(one, device, end) for one, device, ends in asked for end in ends])
    range_of: dict[Candidate, Range] = {}
    for (candidate, device, _), *pair in zip(asked, outcomes[::2], outcomes[1::2], strict=True):
        if all(end.status == DONE for end in pair):
            low, high = (figures_of(candidate, end, priced=priced, samples=samples) for end in pair)
            range_of[candidate] = Range(low, high, device.name)
    return range_of


def may_win(best: Trial, other: Trial, range_of: Mapping[Candidate, Range], target: Target) -> bool:
    """Whether another configuration beats the best one at some point of their ranges."""
    mine, its = _ends(best, range_of), _ends(other, range_of)
    together = mine.device == its.device
    pairs = [(mine.low, its.low), (mine.high, its.high)] if together else [(mine.low, its.high)]
    return any(
        beats_bound(target.rank(theirs), target.rank(ours), max(spread_of(ours), spread_of(theirs)))
        for ours, theirs in pairs
    )


def _ends(trial: Trial, range_of: Mapping[Candidate, Range]) -> Range:
    assert trial.figures is not None
    return range_of.get(trial.candidate, Range(trial.figures, trial.figures, ""))


def device_of(candidate: Candidate) -> Device | None:
    """Return the device of all workers if their times depend on its kernels, else None."""
    experiment, cluster = candidate.experiment, candidate.cluster
    nodes = cluster.workers[: candidate.workers].tolist()
    names = {cluster.device_of[node] or DEFAULT_DEVICE for node in nodes} if experiment.device is None else set()
    if len(names) > 1 or not isinstance(experiment.compute, PerKernel | None):
        return None
    device, model = load_device(experiment.device or names.pop()), load_model(experiment.model)
    precision = str(with_defaults(experiment, model, device).precision)
    return device if has_kernels(model, device, precision) else None


def disputed(device: Device | None) -> tuple[float, float] | None:
    """Return the lowest and the highest rate relative to the catalogue's; None if published runs agree."""
    spread = (1.0, 1.0) if device is None or device.kernels is None else device.kernels.spread
    return None if spread == (1.0, 1.0) else spread


def _at(candidate: Candidate, device: Device, factor: float) -> Experiment:
    """Return the experiment on a device with another rate of matrix products; where the rate is the catalogue's, the
    experiment itself, which has been simulated."""
    assert device.kernels is not None
    gemm = {kind: min(factor * share, 1.0) for kind, share in device.kernels.gemm.items()}
    if gemm == device.kernels.gemm:
        return candidate.experiment
    return candidate.experiment.with_(
        device=dataclasses.replace(device, kernels=dataclasses.replace(device.kernels, gemm=gemm))
    )
