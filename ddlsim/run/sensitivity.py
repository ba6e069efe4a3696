"""What-if runs of an experiment: one part 10 % better, or all inputs perturbed (docs/models/network.md, Stability)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddlsim.cluster import Cluster, load_cluster
from ddlsim.errors import ConfigError
from ddlsim.readable import percent
from ddlsim.run.experiment import Experiment
from ddlsim.run.simulate import clock_of, complete
from ddlsim.strategies import contract
from ddlsim.streams import stream
from ddlsim.ties import FLOOR

if TYPE_CHECKING:
    from ddlsim.run.result import Result


CHANGE = 0.10
#: maximum number of simulated steps per variant (with the same random streams), unless workers communicate less often
STEPS = 5


@dataclass(frozen=True)
class Sensitivity:
    """The relative `gain` of throughput if `what` improves by `change` (0.1: 10 %)."""

    what: str
    change: float
    gain: float

    def __str__(self) -> str:
        sign = "-" if self.what.startswith("latency") else "+"
        return f"{sign}{percent(self.change, 0)} {self.what} gives {percent(self.gain, sign='+')} throughput"

    def to_dict(self) -> dict[str, object]:
        """Return the fields as plain values."""
        return dataclasses.asdict(self)


def sensitivities(experiment: Experiment) -> list[Sensitivity]:
    """Simulate the experiment with faster compute, links and connections, and lower latencies; largest gain first.

    KeyboardInterrupt ends it without a result, because an incomplete variant cannot be compared.
    """
    warmup, most = experiment.window
    cycle = contract.of(experiment.strategy).cycle_length
    steps = min(most, cycle * -(-STEPS // cycle))
    base = dataclasses.replace(clock_of(experiment), steps=steps, warmup=min(warmup, 1 if cycle == 1 else cycle))
    try:
        reference = complete(base)
    except ConfigError:
        if experiment.training is None:
            raise
        base, steps = experiment, most  # when workers communicate depends on the training
        reference = complete(base)
    # workers that seldom communicate must do so once
    while reference.n_workers > 1 and not reference.nbytes_sent and steps < most:
        steps = min(most, 2 * steps)
        base = dataclasses.replace(base, steps=steps)
        reference = complete(base)
    cluster = load_cluster(base.cluster)
    n = reference.n_workers
    speed = tuple((1.0 + CHANGE) * s for s in base.speeds(n))
    variants = [("compute speed", dataclasses.replace(base, speed=speed))]
    links = reference.link_columns
    used = dict.fromkeys(kind for kind, nbytes in zip(links["kind"], links["nbytes"], strict=True) if nbytes > 0.0)
    for kind in used:
        wide, near = cluster.scaled(kind, bandwidth=1.0 + CHANGE), cluster.scaled(kind, latency=1.0 - CHANGE)
        variants.append((f"bandwidth of {kind}", base.with_(cluster=wide)))
        variants.append((f"latency of {kind}", base.with_(cluster=near)))
    details = cluster.details
    if details is not None and details.flow_rate.any():
        faster = dataclasses.replace(details, flow_rate=(1.0 + CHANGE) * details.flow_rate)
        variants.append(("rate of connections", base.with_(cluster=dataclasses.replace(cluster, details=faster))))
    gains = [
        Sensitivity(what, CHANGE, complete(variant).throughput / reference.throughput - 1.0)
        for what, variant in variants
    ]
    return sorted(gains, key=lambda s: -s.gain)


@dataclass(frozen=True)
class Stability:
    """Sensitivity of a run to perturbations of its inputs.

    size         largest relative perturbation of an input
    throughputs  samples/s of the run itself, then of each perturbed run
    step_times   step times in s, likewise
    clock_only   True for a training run whose arithmetic was not repeated: its values may depend on the order of
                 updates, too
    """

    size: float
    throughputs: tuple[float, ...]
    step_times: tuple[float, ...]
    clock_only: bool = False

    @property
    def throughput_spread(self) -> float:
        """Difference of the largest and the smallest throughput, relative to the run's own."""
        return _spread(self.throughputs)

    @property
    def step_time_spread(self) -> float:
        """Difference of the longest and the shortest step time, relative to the run's own."""
        return _spread(self.step_times)

    @property
    def is_stable(self) -> bool:
        """Whether the spreads are mere rounding: at most 1e-9, or ten times the perturbation of the inputs."""
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
        inputs = f"with inputs perturbed by {self.size:g} ({n} run{'' if n == 1 else 's'})"
        clock = "; this covers its clock, not the trained model" if self.clock_only else ""
        if self.is_stable:
            return f"throughput is unchanged {inputs}{clock}"
        return (
            f"throughput is stable only to {100.0 * self.throughput_spread:.2g} % {inputs}: the order in which "
            f"messages contend depends on rounding{clock}"
        )


def _spread(values: tuple[float, ...]) -> float:
    return (max(values) - min(values)) / values[0]


def stability_of(result: Result, *, runs: int = 3, size: float = 1e-12, seed: int = 0) -> Stability:
    """Simulate a run `runs` times with perturbed inputs; see :meth:`ddlsim.Result.stability`."""
    experiment, learns = clock_of(result.experiment), result.experiment.training is not None
    itself = complete(experiment) if learns or result.interrupted else result
    others = [complete(moved(experiment, result.n_workers, size, seed, i)) for i in range(runs)]
    trials = [itself, *others]
    return Stability(
        float(size), tuple(one.throughput for one in trials), tuple(one.step_time for one in trials), clock_only=learns
    )


def moved(experiment: Experiment, n_workers: int, size: float, seed: int, run: int) -> Experiment:
    """Return the experiment with every capacity, latency and compute time multiplied by its own factor in 1 +- `size`.

    seed, run  address the random factors; the random numbers of the run itself (jitter, data) stay the same
    """
    random = stream(seed, run, "stability")
    cluster: Cluster = load_cluster(experiment.cluster)
    channel, link, worker = (
        1.0 + size * random.uniform(-1.0, 1.0, n) for n in (cluster.n_channels, cluster.n_links, n_workers)
    )
    speeds = experiment.speeds(n_workers)
    return dataclasses.replace(
        experiment,
        cluster=cluster.with_links(cluster.link_bandwidth * channel[cluster.link_channel], cluster.link_latency * link),
        speed=tuple(speed * factor for speed, factor in zip(speeds, worker.tolist(), strict=True)),
    )
