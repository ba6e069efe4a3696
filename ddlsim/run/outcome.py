"""`Outcome`: what was counted in a run, and the numbers that are read off it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Count, checked
from ddlsim.cluster import Cluster
from ddlsim.learning.monitor import Monitor
from ddlsim.life import Life
from ddlsim.life.faults import Fault
from ddlsim.network import BusyIntervals
from ddlsim.run.experiment import Experiment
from ddlsim.run.living import has_life, life_of, useful_samples
from ddlsim.runtime.recorder import COMMUNICATION, COMPUTE, INPUT, WAITING, Recorder
from ddlsim.strategies import contract
from ddlsim.workload.compute import Workload, model_flops_utilisation
from ddlsim.workload.input import Input
from ddlsim.workload.memory import Fullest
from ddlsim.workload.stage import Stage, n_copies

if TYPE_CHECKING:
    import pandas as pd

    from ddlsim.run.elastic import Groups
    from ddlsim.run.paces import Paces


def alone(experiment: Experiment, workload: Workload, batches: float) -> float:
    """Return the samples/s of a single worker that makes an update from `batches` batches, whatever its memory."""
    passes = workload.forward_time + workload.backward_time - workload.stall
    seconds = batches * passes + workload.optimizer
    return batches * workload.batch_size / (seconds * experiment.jitter.mean)


def batches_alone(result: Outcome, stages: Sequence[Stage]) -> float:
    """Return from how many batches a worker alone would make an update: a replica from its own of a step; where a model
    is shared out over workers, from those of one copy of the model."""
    strategy, batch_size = contract.of(result.experiment.strategy), result.workloads[0].batch_size
    if not strategy.shares_batch and is_replicated(stages, result.workloads):
        return result.experiment.accumulation
    samples = result.updates_per_step * result.samples_per_update
    copies = strategy.n_replicas(result.n_workers) if strategy.shares_batch else n_copies(stages, result.workloads)
    return samples / copies / batch_size


def is_replicated(stages: Sequence[Stage], workloads: Sequence[Workload]) -> bool:
    """Return whether every worker computes the whole model."""
    return math.isclose(n_copies(stages, workloads), len(workloads), rel_tol=1e-9)


Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def link_names(cluster: Cluster) -> tuple[Ints, dict[str, Any]]:
    """Return the channel of each row of a table of links, (n_rows,), and its first columns: source, target and kind."""
    first = np.unique(cluster.link_channel, return_index=True)[1]
    source, target = ([cluster.node_names[i] for i in ends[first]] for ends in (cluster.link_src, cluster.link_dst))
    kind = [cluster.link_kind[i] for i in first]
    return cluster.link_channel[first], {"source": source, "target": target, "kind": kind}


#: steps whose updates are counted to know those of one: strategies round up, and this has many divisors
MANY_STEPS = 232_792_560


@dataclass(frozen=True, eq=False, repr=False)
class Outcome:
    """The fields of a :class:`~ddlsim.Result`, its tables, and its numbers of time, cost and energy.

    ``workloads`` are what each worker would compute if it had the whole model (a strategy may give it a part of that,
    see :class:`ddlsim.workload.stage.Stage`).
    """

    experiment: Experiment
    cluster: Cluster
    workloads: list[Workload]
    nodes: Ints
    recorder: Recorder
    #: s that were simulated; failures and checkpoints come on top (:attr:`end_time`)
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
    #: the experiment as it was asked for; `experiment` has what a calibrated cluster knows about it put in
    given: Experiment | None = None
    #: how stable the run is was asked for: what is printed and written says it, however long it takes
    wants_stability: bool = False
    #: names of the jobs that ran beside it, in :func:`ddlsim.simulate_jobs`
    company: tuple[str, ...] = ()
    #: of one of several jobs: its share of the cost and power of each machine and switch, (n_nodes,)
    share: Floats | None = None
    #: what :class:`ddlsim.RandomFaults` have brought, by time: SlowDown, Stop and LinkFault, as they can be put down
    drawn_faults: tuple[Fault, ...] = ()
    #: the memory of the fullest worker
    memory: Fullest | None = None

    @property
    def n_workers(self) -> int:
        """Number of workers."""
        return len(self.workloads)

    @cached_property
    def measured_updates(self) -> list[tuple[float, int]]:
        """The updates (time, samples) after the warm-up; the first entry only marks where measuring starts.

        A run that ended sooner is measured from the latest update that was before its last instant.
        """
        warmup = contract.of(self.experiment.strategy).updates(self.experiment.window[0], self.n_workers)
        updates = [(0.0, 0), *self.recorder.updates]
        earlier = sum(time < updates[-1][0] for time, _ in updates)
        return updates[min(warmup, max(earlier - 1, 0)) :]

    @cached_property
    def measured_seconds(self) -> float:
        """Duration of the measured updates, s; for a run that stalls, up to its end."""
        updates = self.measured_updates
        return updates[-1][0] - updates[0][0] + self.recorder.stalled(self.simulated_time)

    @cached_property
    def throughput(self) -> float:
        """Samples per second of all workers together, after the warm-up; those of dropped gradients do not count."""
        return sum(n for _, n in self.measured_updates[1:]) / self.measured_seconds

    # ------------------------------------------------------------ life

    @cached_property
    def life(self) -> Life:
        """The run among failures, checkpoints and restarts, drawn from its seed. All other numbers but goodput,
        end_time, lost_work, availability, the times of what was learned, and costs, are those of the undisturbed run.

        Raises ConfigError without failures and checkpoints.
        """
        return life_of(self)

    @cached_property
    def paces(self) -> Paces:
        """Progress of the run on the clock, with events at known times."""
        from ddlsim.run.paces import Paces

        return Paces(self.experiment, self.cluster, self.nodes.tolist())

    @cached_property
    def undisturbed(self) -> Outcome:
        """The run without events at known times."""
        from ddlsim.run.simulate import run

        return self if self.paces.is_steady else run(self.paces.steady)

    @cached_property
    def groups(self) -> Groups:
        """The groups that the machines of an elastic run form."""
        from ddlsim.run.elastic import Groups

        return Groups(self)

    @checked
    def lives(self, n: Count = 100) -> list[Life]:
        """Return `n` lives of the run, each with failures of its own; the first is :attr:`life`. Raises ConfigError for
        workers that do not stop for each other where failures are part of the run; there simulate other seeds."""
        timeline = self.life.timeline
        return [self.life, *(life_of(self, timeline, life=number) for number in range(1, n))]

    @property
    def goodput(self) -> float:
        """Samples per s of the whole life of the run that counted in the end. Raises ConfigError as :attr:`life`."""
        return useful_samples(self, self.life) / self.life.end

    @property
    def lost_work(self) -> float:
        """s of work that failures took back. Raises ConfigError as :attr:`life`."""
        return self.life.lost

    @property
    def availability(self) -> float:
        """Share of its life in which the run ran. Raises ConfigError as :attr:`life`."""
        return self.life.availability

    @property
    def has_life(self) -> bool:
        """Whether failures or checkpoints take time of the run."""
        return has_life(self.experiment)

    @property
    def end_time(self) -> float:
        """s until the run was over, with all that disturbed it. The history of a training run ends no later."""
        return self.life.end if self.has_life else self.simulated_time

    @property
    def useful_throughput(self) -> float:
        """The goodput where anything disturbs the run, else the throughput."""
        return self.goodput if self.has_life else self.throughput

    @cached_property
    def updates_per_step(self) -> float:
        """Updates that make a step of the run: 1, but where workers update on their own (asynchronous: the staleness of
        updates is counted) as many as the strategy says that one step of all workers makes."""
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

        Of asynchronous workers it is thus the time in which they make one step each, on average. Nothing is said of how
        many samples an update has: those are counted (``steps``), and ``throughput`` is of them.
        """
        return self.updates_per_step * self.measured_seconds / (len(self.measured_updates) - 1)

    @cached_property
    def samples_per_update(self) -> float:
        """Samples that an update after the warm-up is made from, on average."""
        updates = self.measured_updates[1:]
        return sum(n for _, n in updates) / len(updates)

    @cached_property
    def _alone(self) -> list[float]:
        """Samples per second of each worker with the whole model, alone, without any communication."""
        return [alone(self.experiment, workload, self._batches_alone) for workload in self.workloads]

    @cached_property
    def _batches_alone(self) -> float:
        return batches_alone(self, contract.of(self.experiment.strategy).stages_of(self.workloads))

    @property
    def samples_alone(self) -> float:
        """Samples from which the worker alone, to which `speedup` compares, makes an update: those of one copy of the
        model."""
        return self._batches_alone * self.workloads[0].batch_size

    @cached_property
    def single_throughput(self) -> float:
        """Samples per second of the first worker alone, with the whole model, without any communication (and were its
        memory large enough)."""
        return self._alone[0]

    @property
    def speedup(self) -> float:
        """Throughput over that of the first worker alone, which updates after `samples_alone` samples."""
        return self.throughput / self.single_throughput

    @property
    def whole_batch_speedup(self) -> float:
        """Throughput over that of the first worker alone with all samples of an update, as papers on a fixed global
        batch state it (Das et al. 2016); smaller than `speedup` where the update of the weights takes time."""
        workload = self.workloads[0]
        batches = self.samples_per_update * self.updates_per_step / workload.batch_size
        return self.throughput / alone(self.experiment, workload, batches)

    @cached_property
    def efficiency(self) -> float:
        """Throughput over what all workers would reach together if each were alone with the whole model."""
        return self.throughput / sum(self._alone)

    @property
    def fits(self) -> bool:
        """Whether the run fits into the devices' memory. If not, times are those of devices with more memory."""
        return self.memory is None or self.memory.fits

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: the share of their peak FLOP/s that the devices use.

        None if a peak is unknown, or if the user set the time of a step and neither run nor cluster names the devices.
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
        """How the workers spent their time on average: compute, communication, waiting, input (of runs that have one),
        idle; they add up to 1."""
        table = self.device_seconds
        return {name: float(values.mean() / self.simulated_time) for name, values in table.items()}

    @cached_property
    def device_seconds(self) -> dict[str, Floats]:
        """s that each worker's device spent on compute, communication, waiting, input (of runs that have one) and idle,
        each (n_workers,)."""
        kinds = [COMPUTE, COMMUNICATION, WAITING]
        if isinstance(self.experiment.input, Input):
            kinds.append(INPUT)
        table = {kind: np.array([seconds[kind] for seconds in self.recorder.seconds]) for kind in kinds}
        table["idle"] = np.array(self.recorder.idle)
        return table

    @property
    def mean_staleness(self) -> float:
        """Mean staleness of the applied gradients (0 for synchronous strategies)."""
        return float(np.mean(self.recorder.staleness)) if self.recorder.staleness else 0.0

    @cached_property
    def staleness_histogram(self) -> dict[int, int]:
        """Staleness -> number of applied gradients with it (asynchronous strategies)."""
        values, counts = np.unique(np.array(self.recorder.staleness, dtype=np.int64), return_counts=True)
        return dict(zip(values.tolist(), counts.tolist(), strict=True))

    @property
    def nbytes_per_step(self) -> float:
        """Bytes that a worker (or a server for it) puts on the wire in a step, on average."""
        steps = len(self.recorder.updates) / self.updates_per_step
        return self.nbytes_sent / max(steps * self.n_workers, 1.0)

    # ------------------------------------------------------------ cost and energy

    @cached_property
    def cost_rate(self) -> float:
        """What the machines cost, in USD/s; see :mod:`ddlsim.run.costs`. Raises ConfigError for one without price."""
        from ddlsim.run.costs import cost_rate

        return cost_rate(self)

    @cached_property
    def energy(self) -> float:
        """Energy of devices and switches, in J; see :func:`ddlsim.run.costs.energy_assumptions` for what it takes for
        given. Raises ConfigError where the workers' devices are not known."""
        from ddlsim.run.costs import energy

        return energy(self)

    @property
    def cost(self) -> float:
        """What the simulated time costs, in USD. Raises ConfigError for a machine without price."""
        return self.cost_rate * self.end_time

    @property
    def power(self) -> float:
        """Mean power in W. Raises ConfigError where the workers' devices are not known."""
        return self.energy / self.end_time

    # ------------------------------------------------------------ tables

    @cached_property
    def workers(self) -> pd.DataFrame:
        """One row per worker: node, device times in s (compute, communication, waiting, idle), steps."""
        import pandas as pd

        names = [self.cluster.node_names[node] for node in self.nodes]
        steps = [len(ends) for ends in self.recorder.step_end]
        return pd.DataFrame({"node": names, "steps": steps, **self.device_seconds}).rename_axis("worker")

    @cached_property
    def links(self) -> pd.DataFrame:
        """One row per directed link (the two directions of a shared one are a row): kind, nbytes, utilisation."""
        import pandas as pd

        return pd.DataFrame(self.link_columns)

    @cached_property
    def link_columns(self) -> dict[str, Any]:
        """The columns of ``links``, for what would be slower to import pandas than to do without."""
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
        """One row per update: time in s, samples."""
        import pandas as pd

        return pd.DataFrame(self.recorder.updates, columns=["time", "samples"]).rename_axis("update")
