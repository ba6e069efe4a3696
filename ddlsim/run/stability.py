"""How stable a prediction is: the same run with its inputs moved by far less than anybody knows them.

Which flow begins first, and who queues before whom, can hang on the last bit of an input; where messages cross several
links that others use too, one changed order changes the next. A run like that is chaotic: its throughput is only as
sure as the spread of the runs beside it. Moved are the capacity of every channel, the latency of every link and the
compute time of every worker, each by its own factor within 1 +- `size`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddlsim.cluster import Cluster, load_cluster
from ddlsim.run.complete import clock_of, complete
from ddlsim.run.experiment import Experiment
from ddlsim.streams import stream
from ddlsim.ties import FLOOR

if TYPE_CHECKING:
    from ddlsim.run.result import Result


@dataclass(frozen=True)
class Stability:
    """How far a run's numbers move when its inputs are moved.

    size         largest relative move of an input
    throughputs  samples/s: of the run itself, then of each moved run
    step_times   s, likewise
    clock_only   the run learns, and only its clock was moved: what it learns may depend on the order of updates, too
    """

    size: float
    throughputs: tuple[float, ...]
    step_times: tuple[float, ...]
    clock_only: bool = False

    @property
    def throughput_spread(self) -> float:
        """Distance of the largest from the smallest throughput, as a share of the run's own."""
        return _spread(self.throughputs)

    @property
    def step_time_spread(self) -> float:
        """Distance of the longest from the shortest step time, as a share of the run's own."""
        return _spread(self.step_times)

    @property
    def is_stable(self) -> bool:
        """Whether the spreads are rounding, not chaos: at most 1e-9, or ten times the inputs' own moves."""
        return max(self.throughput_spread, self.step_time_spread) <= max(FLOOR, 10.0 * self.size)

    def to_dict(self) -> dict[str, object]:
        """Return the spreads and the numbers behind them as plain values."""
        return {
            "throughput_spread": self.throughput_spread,
            "step_time_spread": self.step_time_spread,
            "is_stable": self.is_stable,
            **{name: list(v) if isinstance(v, tuple) else v for name, v in dataclasses.asdict(self).items()},
        }

    def __str__(self) -> str:
        n = len(self.throughputs) - 1
        inputs = f"with inputs moved by {self.size:g} ({n} run{'' if n == 1 else 's'})"
        clock = "; its clock alone, not what it learns" if self.clock_only else ""
        if self.is_stable:
            return f"throughput stays the same {inputs}{clock}"
        return (
            f"throughput is stable to {100.0 * self.throughput_spread:.2g} % only, {inputs}: the order in which "
            f"messages contend hangs on rounding{clock}"
        )


def _spread(values: tuple[float, ...]) -> float:
    return (max(values) - min(values)) / values[0]


def stability_of(result: Result, *, runs: int = 3, size: float = 1e-12, seed: int = 0) -> Stability:
    """Simulate a run `runs` times with moved inputs; see :meth:`ddlsim.Result.stability`."""
    experiment, learns = clock_of(result.experiment), result.experiment.training is not None
    itself = complete(experiment) if learns or result.interrupted else result
    others = [complete(moved(experiment, result.n_workers, size, seed, i)) for i in range(runs)]
    found = [itself, *others]
    return Stability(
        float(size), tuple(one.throughput for one in found), tuple(one.step_time for one in found), clock_only=learns
    )


def moved(experiment: Experiment, n_workers: int, size: float, seed: int, run: int) -> Experiment:
    """Return the experiment with every capacity, latency and compute time moved by its own factor in 1 +- `size`.

    seed, run  address the random numbers; those of the run itself (jitter, data) stay as they are
    """
    random = stream(seed, run, "stability")
    cluster: Cluster = load_cluster(experiment.cluster)
    channel, link, worker = (1.0 + size * random.uniform(-1.0, 1.0, n) for n in (
        cluster.n_channels, cluster.n_links, n_workers
    ))  # fmt: skip
    speeds = experiment.speeds(n_workers)
    return dataclasses.replace(
        experiment,
        cluster=cluster.with_links(cluster.link_bandwidth * channel[cluster.link_channel], cluster.link_latency * link),
        speed=tuple(speed * factor for speed, factor in zip(speeds, worker.tolist(), strict=True)),
    )
