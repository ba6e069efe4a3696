"""`Phase`: part of a training run with images, batches and a learning rate of its own (progressive resizing)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ddlsim.arguments import Count, NotNegative, Positive, checked
from ddlsim.optim import Constant, Schedule
from ddlsim.workload.compute import Affine, Measured, Roofline


@checked
@dataclass(frozen=True)
class Phase:
    """Some epochs of a training run, in which the workers' images, batches or learning rate are others.

    Small images first, larger ones later: most epochs then take a fraction of the time (Howard et al. 2018, fast.ai's
    DAWNBench entry: 128, 224 and 288 pixels). What is not given is that of the run.

    epochs      how many epochs the phase takes; the last one goes on if the run does
    input_size  height and width of the images, which the samples are resized to; the model must pool its last images to
                a fixed size, as resnet50 does. With a ``time_model`` it is that model's, and the learning one's are
                resized in the same proportion. Evaluations are at the model's own size
    batch       samples per worker and (micro-)step
    rate        learning rate: a number, or a schedule over the epochs of the phase, from 0
    compute     where compute times come from: Measured, Affine or Roofline. Without it, a measured time of the run's
                own input size is multiplied by the ratio of the roofline's times
    """

    epochs: Positive
    input_size: Count | None = None
    batch: Count | None = None
    rate: NotNegative | Schedule | None = None
    compute: Measured | Affine | Roofline | None = None


def total_epochs(phases: Sequence[Phase]) -> float:
    """Return the epoch at which the last of the phases ends."""
    return float(sum(phase.epochs for phase in phases))


def phase_at(phases: Sequence[Phase], epoch: float) -> tuple[int, float]:
    """Return which phase an epoch is in, and the epoch at which that begins."""
    begins = [0.0, *itertools.accumulate(float(phase.epochs) for phase in phases)]
    last = len(phases) - 1
    index = next((i for i in range(last) if epoch < begins[i + 1] - 1e-9), last)
    return index, begins[index]


@dataclass(frozen=True)
class PhasedRate:
    """The learning rate of each phase, where it has one; otherwise that of the run."""

    phases: tuple[Phase, ...]
    otherwise: Schedule

    def rate(self, epoch: float) -> float:
        index, begin = phase_at(self.phases, epoch)
        own = self.phases[index].rate
        if own is None:
            return self.otherwise.rate(epoch)
        schedule = Constant(float(own)) if isinstance(own, int | float) else own
        return schedule.rate(epoch - begin)
