"""`Outcome`: the counters of a run, and the metrics derived from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlsim.arguments import Count, checked
from ddlsim.cluster import Cluster
from ddlsim.cluster.cluster import Floats, Ints
from ddlsim.errors import SuggestsAttributes
from ddlsim.learning.monitor import Monitor
from ddlsim.network import BusyIntervals
from ddlsim.reliability import FailureTimeline
from ddlsim.reliability.faults import Fault
from ddlsim.run.experiment import Experiment
from ddlsim.run.failure_timeline import failure_timeline_of, has_failure_timeline, useful_samples
from ddlsim.runtime.recorder import COMMUNICATION, COMPUTE, INPUT, WAITING, Recorder
from ddlsim.strategies import contract
from ddlsim.workload.compute import Workload, model_flops_utilisation
from ddlsim.workload.input import Input
from ddlsim.workload.memory import Fullest
from ddlsim.workload.stage import Stage, n_copies

if TYPE_CHECKING:
    import pandas as pd

    from ddlsim.run.elastic import Groups
    from ddlsim.run.timed_events import Paces


def alone(experiment: Experiment, workload: Workload, batches: float, n_workers: int) -> float:
    """Return the samples/s of a single worker that makes an update from `batches` batches, ignoring its memory limit.

    n_workers  number in the run; if these accumulate shards of gradients, a single worker accumulates full ones
    """
    if contract.of(experiment.strategy).accumulates_shards(n_workers):
        workload = workload.accumulating(batches)
    passes = workload.forward_time + workload.backward_time - workload.stall
    seconds = batches * passes + workload.optimizer + (0.0 if workload.known else workload.host_time)
    return batches * workload.batch_size / (seconds * experiment.jitter.mean)


def batches_alone(result: Outcome, stages: Sequence[Stage]) -> float:
    """Return the number of batches in an update of a single worker: those of a replica's step or, if the model is split
    over workers, those of one copy of the model."""
    strategy, batch_size = contract.of(result.experiment.strategy), result.workloads[0].batch_size
    if not strategy.shares_batch and is_replicated(stages, result.workloads):
        return result.experiment.accumulation
    samples = result.updates_per_step * result.samples_per_update
    copies = strategy.n_replicas(result.n_workers) if strategy.shares_batch else n_copies(stages, result.workloads)
    return samples / copies / batch_size


def is_replicated(stages: Sequence[Stage], workloads: Sequence[Workload]) -> bool:
    """Return whether every worker computes the full model."""
    return math.isclose(n_copies(stages, workloads), len(workloads), rel_tol=1e-9)


def link_names(cluster: Cluster) -> tuple[Ints, dict[str, Any]]:
    """Return the channel of each row in a table of links, (n_rows,), and its first columns: source, target and kind."""
    first = np.unique(cluster.link_channel, return_index=True)[1]
    source, target = ([cluster.node_names[i] for i in ends[first]] for ends in (cluster.link_src, cluster.link_dst))
    kind = [cluster.link_kind[i] for i in first]
    return cluster.link_channel[first], {"source": source, "target": target, "kind": kind}


#: number of steps from which updates per step are computed: strategies round up, and this has many divisors
MANY_STEPS = 232_792_560


@dataclass(frozen=True, eq=False, repr=False)
class Outcome(SuggestsAttributes):
    """Fields, tables and metrics of a :class:`~ddlsim.Result`: time, cost and energy.

    ``workloads`` describe the computation of each worker with the full model; a strategy may give it only a part (see
    :class:`ddlsim.workload.stage.Stage`).
    """

    experiment: Experiment
    cluster: Cluster
    workloads: list[Workload]
    nodes: Ints
    recorder: Recorder
    #: simulated time in s; failures and checkpoints are added to it (:attr:`end_time`)
    simulated_time: float
    channel_nbytes: Floats
    channel_busy: Floats
    busy: BusyIntervals | None
    n_messages: int
    nbytes_sent: float
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    interrupted: bool
    wall_seconds: float
    stop_reason: str = ""
    monitor: Monitor | None = None
    #: the experiment as requested; in `experiment`, values from a calibrated cluster are filled in
    given: Experiment | None = None
    #: whether stability was requested: it is then printed and written, however long it takes
    wants_stability: bool = False
    #: names of the concurrent jobs, in :func:`ddlsim.simulate_jobs`
    co_located: tuple[str, ...] = ()
    #: for one of several jobs: its share of the cost and power of each machine and switch, (n_nodes,)
    share: Floats | None = None
    #: faults sampled from :class:`ddlsim.RandomFaults`, by time, as Slowdown, Stop and LinkFault
    sampled_faults: tuple[Fault, ...] = ()
    #: the memory of the fullest worker
    memory: Fullest | None = None

    @property
    def n_workers(self) -> int:
        """Number of workers."""
        return len(self.workloads)

    @cached_property
    def measured_updates(self) -> list[tuple[float, int]]:
        """The updates (time, samples) after the warm-up; the first entry only marks the start of the measurement.

        A run that ended earlier is measured from the last update before its final instant. Asynchronous workers are
        measured for at least one cycle of steps, because their updates may come in bursts.
        """
        warmup = contract.of(self.experiment.strategy).updates(self.experiment.window[0], self.n_workers)
        updates = [(0.0, 0), *self.recorder.updates]
        earlier = sum(time < updates[-1][0] for time, _ in updates)
        first = min(warmup, max(earlier - 1, 0))
        if self.recorder.staleness:
            latest = updates[-1][0] - self._shortest_cycle * (1.0 - 1e-9)
            first = min(first, max(sum(time <= latest for time, _ in updates) - 1, 0))
        return updates[first:]

    @property
    def _shortest_cycle(self) -> float:
        """Least time that a worker has taken for its last cycle of steps, s; 0 if none has completed a cycle."""
        cycle = contract.of(self.experiment.strategy).cycle_length
        ends = [[0.0, *own] for own in self.recorder.step_end if len(own) >= cycle]
        return min((own[-1] - own[-1 - cycle] for own in ends), default=0.0)

    @cached_property
    def measured_seconds(self) -> float:
        """Duration of the measured updates, s; for a run that stalls, up to its end."""
        updates = self.measured_updates
        return updates[-1][0] - updates[0][0] + self.recorder.stalled(self.simulated_time)

    @cached_property
    def throughput(self) -> float:
        """Samples per second of all workers together, after the warm-up; those of dropped gradients do not count."""
        return sum(n for _, n in self.measured_updates[1:]) / self.measured_seconds

    # ------------------------------------------------------------ reliability

    @cached_property
    def failure_timeline(self) -> FailureTimeline:
        """The failure timeline of the run, sampled from its seed.

        Only goodput, end_time, lost_work, availability, the times of the training and costs include failures; all other
        metrics refer to the run without failures. Raises ConfigError without failures and checkpoints.
        """
        return failure_timeline_of(self)

    @cached_property
    def paces(self) -> Paces:
        """Progress of the run on the clock, with events at known times."""
        from ddlsim.run.timed_events import Paces

        return Paces(self.experiment, self.cluster, self.nodes.tolist())

    @cached_property
    def undisturbed(self) -> Outcome:
        """The run without events at known times, in complete cycles of steps."""
        from ddlsim.run.simulate import run

        return self if self.paces.is_steady and self.paces.is_whole else run(self.paces.steady)

    @cached_property
    def groups(self) -> Groups:
        """The groups that the machines of an elastic run form."""
        from ddlsim.run.elastic import Groups

        return Groups(self)

    @checked
    def timelines(self, n: Count = 100) -> list[FailureTimeline]:
        """Return `n` failure timelines of the run, each with its own failures; the first is :attr:`failure_timeline`.

        Raises ConfigError for asynchronous workers, whose failures are part of the run; simulate other seeds instead.
        """
        timeline = self.failure_timeline.timeline
        return [self.failure_timeline, *(failure_timeline_of(self, timeline, index=number) for number in range(1, n))]

    @property
    def goodput(self) -> float:
        """Samples per second that counted in the end, over the simulated lifetime.

        Raises ConfigError without failures and checkpoints.
        """
        return useful_samples(self, self.failure_timeline) / self.failure_timeline.end

    @property
    def lost_work(self) -> float:
        """Work undone by failures, in s. Raises ConfigError without failures and checkpoints."""
        return self.failure_timeline.lost

    @property
    def availability(self) -> float:
        """Share of the simulated lifetime in which training ran.

        Raises ConfigError without failures and checkpoints.
        """
        return self.failure_timeline.availability

    @property
    def has_failure_timeline(self) -> bool:
        """Whether failures or checkpoints take time in the run."""
        return has_failure_timeline(self.experiment)

    @property
    def end_time(self) -> float:
        """End of the run in s, failures and checkpoints included. The history of a training run ends no later."""
        return self.failure_timeline.end if self.has_failure_timeline else self.simulated_time

    @property
    def useful_throughput(self) -> float:
        """The goodput if there are failures or checkpoints, else the throughput."""
        return self.goodput if self.has_failure_timeline else self.throughput

    @cached_property
    def updates_per_step(self) -> float:
        """Updates per step: 1 for synchronous strategies.

        For asynchronous ones, it is the number of updates that one step of all workers makes.
        """
        if not self.recorder.staleness:
            return 1.0
        return contract.of(self.experiment.strategy).updates(MANY_STEPS, self.n_workers) / MANY_STEPS

    @cached_property
    def step_times(self) -> Floats:
        """Times between successive updates after the warm-up, in s; an asynchronous worker's own step times."""
        if self.recorder.staleness:
            ends = [np.diff([0.0, *ends]) for ends in self.recorder.step_end]
            return np.concatenate(ends) if ends else np.empty(0)
        return np.diff([t for t, _ in self.measured_updates])

    @property
    def step_time(self) -> float:
        """Mean time of a step after the warm-up, in s: the time between updates, times :attr:`updates_per_step`.

        For asynchronous workers this is the mean time in which each of them makes one step. Updates may have different
        numbers of samples: see ``steps`` and ``throughput``.
        """
        return self.updates_per_step * self.measured_seconds / (len(self.measured_updates) - 1)

    @cached_property
    def samples_per_update(self) -> float:
        """Mean number of samples in an update after the warm-up."""
        updates = self.measured_updates[1:]
        return sum(n for _, n in updates) / len(updates)

    @cached_property
    def _alone(self) -> list[float]:
        """Throughput of each worker by itself with the full model and without communication, in samples/s."""
        return [alone(self.experiment, workload, self._batches_alone, self.n_workers) for workload in self.workloads]

    @cached_property
    def _batches_alone(self) -> float:
        return batches_alone(self, contract.of(self.experiment.strategy).stages_of(self.workloads))

    @property
    def samples_alone(self) -> float:
        """Samples per update of the single worker in `speedup`: those of one copy of the model."""
        return self._batches_alone * self.workloads[0].batch_size

    @cached_property
    def single_throughput(self) -> float:
        """Samples per second of the first worker alone, with the full model and without a memory limit."""
        return self._alone[0]

    @property
    def speedup(self) -> float:
        """Throughput over that of the first worker alone, which updates after `samples_alone` samples."""
        return self.throughput / self.single_throughput

    @property
    def whole_batch_speedup(self) -> float:
        """Throughput over that of the first worker alone with all samples of an update.

        Papers with a fixed global batch report it (Das et al. 2016). It is smaller than `speedup` if the update of the
        weights takes time.
        """
        workload = self.workloads[0]
        batches = self.samples_per_update * self.updates_per_step / workload.batch_size
        return self.throughput / alone(self.experiment, workload, batches, self.n_workers)

    @cached_property
    def efficiency(self) -> float:
        """Throughput over the sum of the workers' throughputs alone, each with the full model."""
        return self.throughput / sum(self._alone)

    @property
    def fits(self) -> bool:
        """Whether the run fits in the devices' memory. If not, times are those of devices with more memory."""
        return self.memory is None or self.memory.fits

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: the share of the peak FLOP/s of the devices that the model uses.

        None if a peak is unknown, or if the step time was set and neither run nor cluster specifies the devices.
        """
        workloads = self.workloads
        named = self.experiment.device or all(self.cluster.device_of[node] for node in self.nodes)
        devices = [each.device for each in workloads if each.device is not None and (named or not each.timed)]
        if len(devices) < len(workloads):
            return None
        return model_flops_utilisation(workloads[0].model, self.throughput, devices, workloads[0].precision)

    @property
    def tokens_per_second(self) -> float | None:
        """Total throughput in tokens per second; None for models without tokens."""
        tokens = self.workloads[0].model.tokens
        return None if tokens is None else tokens * self.throughput

    @cached_property
    def shares(self) -> dict[str, float]:
        """Mean shares of the workers' time, which add up to 1.

        The keys are compute, communication, waiting, input (if simulated) and idle.
        """
        table = self.device_seconds
        return {name: float(values.mean() / self.simulated_time) for name, values in table.items()}

    @cached_property
    def device_seconds(self) -> dict[str, Floats]:
        """Seconds that each worker's device spent on each activity, (n_workers,) each.

        The activities are compute, communication, waiting, input (if simulated) and idle.
        """
        kinds = [COMPUTE, COMMUNICATION, WAITING]
        if isinstance(self.experiment.input, Input):
            kinds.append(INPUT)
        table = {kind: np.array([seconds[kind] for seconds in self.recorder.seconds]) for kind in kinds}
        table["idle"] = np.array(self.recorder.idle)
        return table

    @property
    def mean_staleness(self) -> float:
        """Mean staleness of the applied gradients; 0 for synchronous strategies."""
        return float(np.mean(self.recorder.staleness)) if self.recorder.staleness else 0.0

    @cached_property
    def staleness_histogram(self) -> dict[int, int]:
        """Number of applied gradients for each staleness, in asynchronous strategies."""
        values, counts = np.unique(np.array(self.recorder.staleness, dtype=np.int64), return_counts=True)
        return dict(zip(values.tolist(), counts.tolist(), strict=True))

    @property
    def nbytes_per_step(self) -> float:
        """Mean bytes that a worker (or a server for it) sends per step."""
        steps = len(self.recorder.updates) / self.updates_per_step
        return self.nbytes_sent / max(steps * self.n_workers, 1.0)

    # ------------------------------------------------------------ cost and energy

    @cached_property
    def cost_rate(self) -> float:
        """Cost of the machines in USD/s; see :mod:`ddlsim.run.costs`. Raises ConfigError if a price is missing."""
        from ddlsim.run.costs import cost_rate

        return cost_rate(self)

    @cached_property
    def energy(self) -> float:
        """Energy of devices and switches, in J; :func:`ddlsim.run.costs.energy_assumptions` lists the assumptions.
        Raises ConfigError if the workers' devices are unknown."""
        from ddlsim.run.costs import energy

        return energy(self)

    @property
    def cost(self) -> float:
        """Cost of the simulated time, in USD. Raises ConfigError if a price is missing."""
        return self.cost_rate * self.end_time

    @property
    def power(self) -> float:
        """Mean power in W. Raises ConfigError if the workers' devices are unknown."""
        return self.energy / self.end_time

    # ------------------------------------------------------------ tables

    @cached_property
    def workers(self) -> pd.DataFrame:
        """Table with one row per worker: node, device times in s (compute, communication, waiting, idle), steps."""
        import pandas as pd

        names = [self.cluster.node_names[node] for node in self.nodes]
        steps = [len(ends) for ends in self.recorder.step_end]
        return pd.DataFrame({"node": names, "steps": steps, **self.device_seconds}).rename_axis("worker")

    @cached_property
    def links(self) -> pd.DataFrame:
        """Table with one row per directed link: kind, nbytes, utilisation.

        A half-duplex link has one row for both directions.
        """
        import pandas as pd

        return pd.DataFrame(self.link_columns)

    @cached_property
    def link_columns(self) -> dict[str, Any]:
        """The columns of ``links``, for callers that do not need pandas."""
        channel, columns = link_names(self.cluster)
        capacity = self.cluster.channel_capacity[channel]
        return {
            **columns,
            "nbytes": self.channel_nbytes[channel],
            "utilisation": self.channel_nbytes[channel] / (capacity * self.simulated_time),
            "busy": self.channel_busy[channel] / self.simulated_time,
        }

    @cached_property
    def steps(self) -> pd.DataFrame:
        """Table with one row per update: time in s, samples."""
        import pandas as pd

        return pd.DataFrame(self.recorder.updates, columns=["time", "samples"]).rename_axis("update")
