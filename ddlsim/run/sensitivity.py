"""What would help: the experiment simulated again with one thing 10 % better."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ddlsim.cluster import Cluster, load_cluster
from ddlsim.errors import ConfigError
from ddlsim.run.complete import clock_of, complete
from ddlsim.run.experiment import Experiment
from ddlsim.strategies import contract

CHANGE = 0.10
#: steps that each variant simulates (with the same random streams), at most and unless workers talk less often
STEPS = 5


@dataclass(frozen=True)
class Sensitivity:
    """Improving `what` by `change` (0.1: 10 %) raises the throughput by the share `gain`."""

    what: str
    change: float
    gain: float

    def __str__(self) -> str:
        sign = "-" if self.what.startswith("latency") else "+"
        return f"{sign}{self.change:.0%} {self.what} gives {self.gain:+.1%} throughput"

    def to_dict(self) -> dict[str, object]:
        """Return the fields as plain values."""
        return dataclasses.asdict(self)


def sensitivities(experiment: Experiment) -> list[Sensitivity]:
    """Simulate the experiment with faster compute, links and connections, and lower latencies; the best first.

    KeyboardInterrupt ends it without a result: a variant that was cut short has nothing to compare.
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
        base, steps = experiment, most  # when workers talk depends on what they learn
        reference = complete(base)
    # workers that seldom talk have to talk once
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
        variants.append((f"bandwidth of {kind}", _with_cluster(base, cluster.scaled(kind, bandwidth=1.0 + CHANGE))))
        variants.append((f"latency of {kind}", _with_cluster(base, cluster.scaled(kind, latency=1.0 - CHANGE))))
    details = cluster.details
    if details is not None and details.flow_rate.any():
        faster = dataclasses.replace(details, flow_rate=(1.0 + CHANGE) * details.flow_rate)
        variants.append(("rate of connections", _with_cluster(base, dataclasses.replace(cluster, details=faster))))
    found = [
        Sensitivity(what, CHANGE, complete(variant).throughput / reference.throughput - 1.0)
        for what, variant in variants
    ]
    return sorted(found, key=lambda s: -s.gain)


def _with_cluster(experiment: Experiment, cluster: Cluster) -> Experiment:
    return dataclasses.replace(experiment, cluster=cluster)
