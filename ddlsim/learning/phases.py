"""`Phase`: a part of a training run with its own image size, batch size and learning rate (progressive resizing)."""

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
    """A part of a training run with its own image size, batch size or learning rate.

    Progressive resizing, for example, starts with small images, so that most epochs take less time than with full-size
    images (Howard et al. 2018, fast.ai's DAWNBench entry, with 128, 224 and 288 pixels). Fields that are None keep the
    value set for the run.

    epochs      length of the phase in epochs. The last phase continues until the run ends
    input_size  height and width in pixels to which samples are resized. The model must pool its final feature maps to a
                fixed size, as resnet50 does. If the run has a ``time_model``, this is the input size of that model, and
                images for the trained model are resized in the same proportion. Evaluations always use the original
                size
    batch       number of samples per worker per (micro-)step
    rate        learning rate: a number, or a schedule over the epochs since the start of the phase
    compute     source of compute times: Measured, Affine or Roofline. None: the run's measured time, scaled by the
                ratio of the roofline times for the two input sizes
    """

    epochs: Positive
    input_size: Count | None = None
    batch: Count | None = None
    rate: NotNegative | Schedule | None = None
    compute: Measured | Affine | Roofline | None = None


def phase_at(phases: Sequence[Phase], epoch: float) -> tuple[int, float]:
    """Return the index of the phase at an epoch, and the epoch at which that phase begins."""
    begins = [0.0, *itertools.accumulate(float(phase.epochs) for phase in phases)]
    last = len(phases) - 1
    index = next((i for i in range(last) if epoch < begins[i + 1] - 1e-9), last)
    return index, begins[index]


@dataclass(frozen=True)
class PhasedRate:
    """Learning-rate schedule over phases: the rate of each phase, or that of the run if the phase has none."""

    phases: tuple[Phase, ...]
    otherwise: Schedule

    def rate(self, epoch: float) -> float:
        index, begin = phase_at(self.phases, epoch)
        rate = self.phases[index].rate
        if rate is None:
            return self.otherwise.rate(epoch)
        schedule = Constant(float(rate)) if isinstance(rate, int | float) else rate
        return schedule.rate(epoch - begin)
