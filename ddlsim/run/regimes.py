"""What workers compute as a run goes on: batches that grow, phases with images of another size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ddlsim.learning import Phase, Training
from ddlsim.run.experiment import Experiment
from ddlsim.workload.compute import Roofline, Workload
from ddlsim.workload.model import Model
from ddlsim.workload.resized import resized
from ddlsim.workload.stage import Stage

#: (batch size, number of the phase)
Regime = tuple[int, int | None]


@dataclass
class Regimes:
    """What all workers compute in each batch size and phase, made when somebody gets there.

    ``stages`` are those that are there already.
    """

    training: Training
    batch_size: int
    make: Callable[[Regime], list[Stage]]
    stages: dict[Regime, list[Stage]] = field(default_factory=dict)

    def at(self, rank: int, epoch: float) -> Workload:
        """Return what a worker computes at an epoch: the same object while that is the same."""
        regime = self.training.regime(epoch, self.batch_size)
        if regime not in self.stages:
            self.stages[regime] = self.make(regime)
        return self.stages[regime][rank].workload


def in_phase(
    make: Callable[[Experiment, Model], Workload], experiment: Experiment, model: Model, phase: Phase
) -> Workload:
    """Return what a worker computes in a phase.

    make  what it computes of a model in an experiment

    The time of a step with the images of the run, if it was measured, is multiplied by the ratio of the roofline's.
    Raises ConfigError for images that the model cannot take.
    """
    if phase.compute is not None:
        experiment = dataclasses.replace(experiment, compute=phase.compute)
    if phase.input_size is None:
        return make(experiment, model)
    other = resized(model, phase.input_size)
    if other is model or phase.compute is not None:
        return make(experiment, other)
    by_roofline = experiment
    if not isinstance(experiment.compute, Roofline):
        by_roofline = dataclasses.replace(experiment, compute=Roofline())
    whole, before, after = make(experiment, model), make(by_roofline, model), make(by_roofline, other)
    measured, expected = (each.forward_time + each.backward_time for each in (whole, before))
    if measured == expected:
        return after
    factor = measured / expected
    ratio = (after.forward_time + after.backward_time) / expected
    return dataclasses.replace(
        after, forward=after.forward * factor, backward=after.backward * factor, optimizer=whole.optimizer,
        basis=f"{whole.basis}, times {ratio:.3g} for images of {phase.input_size} pixels by the roofline",
    )  # fmt: skip


def phase_notes(phases: Sequence[Phase], regimes: Regimes) -> list[str]:
    """Return a line for each phase, with what its first worker computes."""
    lines = []
    for number, phase in enumerate(phases):
        each = regimes.stages[phase.batch or regimes.batch_size, number][0].workload
        size, whole = each.model.input_shape[-1], regimes.stages[regimes.batch_size, None][0].workload
        why = "" if each.basis == whole.basis else f" ({each.basis})"
        lines.append(
            f"phase {number}: {phase.epochs:g} epochs with samples of size {size}, batch {each.batch_size}, "
            f"{each.step_time * 1e3:.4g} ms a step without communication{why}"
        )
    if lines:
        lines.append("speed-up and efficiency are over one worker with the batches and images of the run throughout")
    return lines
