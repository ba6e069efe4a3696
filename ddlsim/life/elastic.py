"""Going on with fewer workers when machines fail, and with more when they are back."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from ddlsim.arguments import Count, checked, one_of, quantity
from ddlsim.units import si


@checked
@dataclass(frozen=True)
class Elastic:
    """A group of workers that forms anew when machines fail, and when they are back (PyTorch's torchrun, Horovod's
    Elastic).

    Survivors go on from the parameters and the optimizer's state that they hold (where each has a state of its own, as
    in local SGD, it begins anew); what is lost is the step under way. The new group shares out the samples anew, from
    where the epoch was. A machine that is back joins at the end of a step, and gets the model from another one. Where
    all fail at once, nobody holds it any more: the training goes back to its latest checkpoint, or begins again.

    Workers that hold parts of a model or of the optimizer's state (FSDP, ZeRO, pipelines) lose them with a machine.
    They go back to the latest checkpoint, which the new group reads; before a machine joins, one is made.

    min_workers  with fewer the training waits until machines are back
    rejoin       until a new group runs: rendezvous, communicators
    rate         what becomes of the learning rate with n workers instead of the N at the start: "same"; "linear", n / N
                 times (Goyal et al. 2017); "square-root" of that (Krizhevsky 2014)
    batch        "worker": each worker keeps its batch size, so the global batch shrinks; "global": the survivors divide
                 the global batch into equal whole numbers of samples
    """

    min_workers: Count = 1
    _: KW_ONLY
    rejoin: Annotated[float | str, quantity("time", "30 s", zero=True)] = 30.0
    rate: Annotated[str, one_of("same", "linear", "square-root")] = "same"
    batch: Annotated[str, one_of("worker", "global")] = "worker"

    @property
    def seconds(self) -> float:
        """s until a new group runs."""
        return si(self.rejoin, "time")

    def rate_factor(self, n_workers: int, n_at_start: int) -> float:
        """Return what the learning rate is multiplied with."""
        share = n_workers / n_at_start
        return {"same": 1.0, "linear": share, "square-root": math.sqrt(share)}[self.rate]

    def batch_size(self, batch_size: int, n_workers: int, n_at_start: int) -> int:
        """Return the samples of each worker in a step."""
        return batch_size if self.batch == "worker" else max(1, batch_size * n_at_start // n_workers)
