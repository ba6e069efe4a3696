"""Checkpoint intervals: Young's and Daly's formulas compared with simulated failure timelines."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ddlsim.arguments import Count, checked
from ddlsim.errors import ConfigError
from ddlsim.readable import duration, percent, seconds
from ddlsim.reliability import daly_interval, simulate_failures, young_interval
from ddlsim.reliability.failures import units
from ddlsim.run.experiment import Experiment
from ddlsim.run.failure_timeline import timeline_of
from ddlsim.run.simulate import complete
from ddlsim.text_tables import aligned, labelled
from ddlsim.units import si

if TYPE_CHECKING:
    import pandas as pd

#: candidate intervals, relative to Daly's
TRIED = tuple(np.geomspace(0.25, 4.0, 13).tolist())


class Tried(NamedTuple):
    """A simulated interval between checkpoints in s, the effective share of the time, and its standard error."""

    interval: float
    effective: float
    error: float


@dataclass(frozen=True)
class CheckpointIntervals:
    """Checkpoint intervals from theory and simulation. Times in s.

    mtbf       mean time between failures of the job
    cost       s for which a checkpoint stops the training
    young      sqrt(2 C M) (Young 1974)
    daly       higher-order approximation (Daly 2006)
    tried      simulated intervals, each with the same failures
    """

    mtbf: float
    cost: float
    young: float
    daly: float
    tried: tuple[Tried, ...]

    @property
    def simulated(self) -> float:
        """The interval with the largest effective share among those `tried`.

        Its neighbours may be equally good within their errors.
        """
        return max(self.tried, key=lambda one: one.effective).interval

    @property
    def table(self) -> pd.DataFrame:
        """Table with one row per interval: interval (s), effective (share of the time), error (standard error)."""
        import pandas as pd

        return pd.DataFrame(list(self.tried))

    def _rows(self) -> list[tuple[str, str]]:
        return [
            ("job failures", f"every {duration(self.mtbf)}"),
            ("checkpoint cost", seconds(self.cost)),
            ("Young", duration(self.young)),
            ("Daly", duration(self.daly)),
            ("simulated", duration(self.simulated)),
        ]

    def _cells(self) -> list[tuple[str, str, str]]:
        tried = [(duration(one.interval), percent(one.effective), f"{100.0 * one.error:.2g} %") for one in self.tried]
        return [("every", "effective", "+-"), *tried]

    def __str__(self) -> str:
        return "\n".join([*labelled(self._rows()), "", *aligned(self._cells())])

    def _repr_html_(self) -> str:
        from ddlsim.notebook import grid, page
        from ddlsim.notebook import labelled as laid_out

        return page("Checkpoint intervals", laid_out(self._rows()), grid(self._cells()))


@checked
def best_checkpoint_interval(experiment: Experiment, *, n_timelines: Count = 100) -> CheckpointIntervals:
    """Find the best checkpoint interval by simulation, and compare it with the optima of Young's and Daly's formulas.

    experiment   experiment with `checkpoints`, whose interval is ignored, and with `failures`, whose `mtbf` must be set
    n_timelines  number of failure timelines to simulate for each candidate interval

    Up to thirteen candidates between 0.25 and 4 times Daly's interval are simulated. Checkpoints are written only at
    the ends of steps. The formulas assume exponentially distributed failures. The simulation also supports
    Weibull-distributed failures, and includes repair times and the time spent waiting for machines. Raises ConfigError
    if failures or checkpoints are missing, or if checkpoints cost no time.
    """
    failures, checkpoints = experiment.failures, experiment.checkpoints
    if failures is None or failures.mtbf is None or math.isinf(si(failures.mtbf, "time")) or checkpoints is None:
        raise ConfigError(
            "best_checkpoint_interval: the experiment needs random failures and checkpoints, such as "
            "failures=Failures('50000 h'), checkpoints=Checkpoints('10 min', bandwidth='2 GB/s')"
        )
    result = complete(experiment.with_(checkpoints=replace(checkpoints, every=math.inf)))
    parts = units(failures, result.cluster, result.nodes.tolist(), result.channel_nbytes)
    start = timeline_of(result)
    mtbf = si(failures.mtbf, "time") / len(parts)
    if not start.cost.stall:
        raise ConfigError(
            "best_checkpoint_interval: checkpoints cost nothing, so writing one after every step is best; set their "
            "cost"
        )
    daly = daly_interval(mtbf, start.cost.stall)
    least = max(start.cost.stall + start.cost.write, float(start.end_of(np.array(1))))
    tried = []
    for every in sorted({max(share * daly, least) for share in TRIED}):
        timeline = replace(start, every=every)
        timelines = [
            simulate_failures(timeline, failures, parts, timeline.length, seed=experiment.seed, index=index)
            for index in range(n_timelines)
        ]
        shares = np.array([lifetime.effective for lifetime in timelines])
        error = float(shares.std(ddof=1) / math.sqrt(n_timelines)) if n_timelines > 1 else math.nan
        tried.append(Tried(every, float(shares.mean()), error))
    return CheckpointIntervals(mtbf, start.cost.stall, young_interval(mtbf, start.cost.stall), daly, tuple(tried))
