"""`Result`: the prediction for a run, and the numbers behind it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

import ddlsim
from ddlsim.arguments import Count, NotNegative, Seed, Share, checked, integer, number, one_of
from ddlsim.cluster import Cluster
from ddlsim.cluster.cluster import Floats, Ints
from ddlsim.errors import ConfigError, DdlsimError, SuggestsAttributes
from ddlsim.learning import Array, Value
from ddlsim.learning.monitor import Monitor, Row, first_reaching
from ddlsim.network import BusyIntervals
from ddlsim.output_files import write_text
from ddlsim.plan import Plan
from ddlsim.readable import percent
from ddlsim.reliability.faults import Fault
from ddlsim.run import costs
from ddlsim.run.experiment import Experiment
from ddlsim.run.failure_timeline import failure_timeline_of, has_failure_timeline, useful_samples
from ddlsim.run.notes import delay_warnings, unsent_warnings
from ddlsim.runtime.recorder import COMMUNICATION, COMPUTE, INPUT, WAITING, Recorder
from ddlsim.strategies import contract
from ddlsim.workload.compute import Workload, model_flops_utilisation
from ddlsim.workload.input import Input
from ddlsim.workload.jitter import NoJitter
from ddlsim.workload.memory import Fullest
from ddlsim.workload.stage import Stage, for_each, n_copies

if TYPE_CHECKING:
    import matplotlib.axes
    import pandas as pd

    from ddlsim.reliability import FailureTimeline
    from ddlsim.report.published import Comparison
    from ddlsim.run.elastic import Groups
    from ddlsim.run.prepare import Prepared
    from ddlsim.run.sensitivity import Sensitivity, Stability
    from ddlsim.run.timed_events import Paces
    from ddlsim.validation.intervals import RunInterval


def alone(experiment: Experiment, workload: Workload, batches: float, n_workers: int) -> float:
    """Return the samples/s of a single worker that makes an update from `batches` batches, ignoring its memory limit.

    n_workers  number in the run; if these accumulate shards of gradients, a single worker accumulates full ones
    """
    if contract.of(experiment.strategy).accumulates_shards(n_workers):
        workload = workload.accumulating(batches)
    passes = workload.forward_time + workload.backward_time - workload.stall
    seconds = batches * passes + workload.optimizer + (0.0 if workload.known else workload.host_time)
    return batches * workload.batch_size / (seconds * experiment.jitter.mean)


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


#: maximum messages and worker steps of runs that are simulated 20 more times when printed
QUICK_MESSAGES, QUICK_STEPS = 100_000, 500
#: maximum worker steps of runs under a fitted stack that are simulated 3 more times when printed
STACK_STEPS = 100_000
#: maximum messages of runs whose stability is computed, by 3 more runs, even if not requested
STABILITY_MESSAGES = 20_000


@dataclass(frozen=True, eq=False, repr=False)
class Result(SuggestsAttributes):
    """The result of a simulated run. Times are in s, sizes in bytes, and rates per s.

    ``print(result)`` shows a summary. Single values, such as ``result.throughput``, are properties. ``workers``,
    ``links`` and ``steps`` are pandas DataFrames, and ``to_json`` exports everything.

    experiment       the experiment, with the values that a calibrated cluster sets filled in; `given`: as requested
    workloads        computation of each worker with the full model; a strategy may give it only a part
                     (:class:`ddlsim.workload.stage.Stage`)
    nodes            node of each worker in `cluster`, shape (n_workers,)
    simulated_time   length of the run without failures and checkpoints, which :attr:`end_time` includes
    channel_nbytes, channel_busy
                     bytes carried by each channel of the cluster, and time during which it carried data, (n_channels,)
    n_messages, nbytes_sent
                     number of messages and bytes that all workers and servers sent during the run
    notes            sentences about assumptions and observations
    interrupted      whether the run was stopped with Ctrl-C
    wall_seconds     time that the simulation itself took
    stop_reason      condition that ended a training run, such as "epochs"
    sampled_faults   faults sampled from :class:`ddlsim.RandomFaults`, by time, as Slowdown, Stop and LinkFault
    """

    experiment: Experiment
    cluster: Cluster
    workloads: list[Workload]
    nodes: Ints
    recorder: Recorder
    simulated_time: float
    channel_nbytes: Floats
    channel_busy: Floats
    busy: BusyIntervals | None
    n_messages: int
    nbytes_sent: float
    notes: tuple[str, ...]
    prepared: Prepared
    interrupted: bool
    wall_seconds: float
    stop_reason: str = ""
    monitor: Monitor | None = None
    given: Experiment | None = None
    #: whether stability was requested: it is then printed and written, however long it takes
    wants_stability: bool = False
    #: names of the concurrent jobs, in :func:`ddlsim.simulate_jobs`
    co_located: tuple[str, ...] = ()
    #: for one of several jobs: its share of the cost and power of each machine and switch, (n_nodes,)
    share: Floats | None = None
    sampled_faults: tuple[Fault, ...] = ()

    @property
    def n_workers(self) -> int:
        """Number of workers."""
        return len(self.workloads)

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about probable mistakes; the first one, if the run does not fit in memory, is about that."""
        return (
            *self.prepared.warnings,
            *self.prepared.left_out,
            *unsent_warnings(self.n_workers, self.nbytes_sent),
            *delay_warnings(self.experiment.training, self.recorder.staleness, self.stop_reason),
        )

    @property
    def memory(self) -> Fullest | None:
        """Memory of the worker that needs the most; None for a training in phases."""
        return self.prepared.fullest

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
        if self.has_own_steps:
            latest = updates[-1][0] - self._shortest_cycle * (1.0 - 1e-9)
            first = min(first, max(sum(time <= latest for time, _ in updates) - 1, 0))
        return updates[first:]

    @property
    def _shortest_cycle(self) -> float:
        """Least time that a worker has taken for its last cycle of steps, s; 0 if none has completed a cycle."""
        cycle = contract.of(self.experiment.strategy).cycle_length
        ends = [[0.0, *times] for times in self.recorder.step_end if len(times) >= cycle]
        return min((times[-1] - times[-1 - cycle] for times in ends), default=0.0)

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
    def undisturbed(self) -> Result:
        """The run without events at known times, in complete cycles of steps."""
        from ddlsim.run.simulate import complete

        return self if self.paces.is_steady and self.paces.is_whole else complete(self.paces.steady)

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
        """Whether failures or checkpoints take time in the run; False if it was interrupted before they were added."""
        unfinished = self.interrupted and self.monitor is None and self.recorder.down is None
        return has_failure_timeline(self.experiment) and not unfinished

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
        """Number of updates that one step of all workers makes: 1 for synchronous strategies."""
        if not self.has_own_steps:
            return 1.0
        return contract.of(self.experiment.strategy).updates(MANY_STEPS, self.n_workers) / MANY_STEPS

    @property
    def has_own_steps(self) -> bool:
        """Whether workers are asynchronous: updates have a staleness, or workers that do not wait for each other make
        several updates per step."""
        strategy = contract.of(self.experiment.strategy)
        several = strategy.is_asynchronous and strategy.updates(MANY_STEPS, self.n_workers) > MANY_STEPS
        return bool(self.recorder.staleness) or several

    @cached_property
    def step_times(self) -> Floats:
        """Times between successive updates after the warm-up, in s; an asynchronous worker's own step times."""
        if self.has_own_steps:
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
        return for_each(self.workloads, lambda w: alone(self.experiment, w, self._batches_alone, self.n_workers))

    @cached_property
    def _batches_alone(self) -> float:
        """Number of batches in an update of a single worker: those of a replica's step or, if the model is split over
        workers, those of one copy of the model."""
        strategy = contract.of(self.experiment.strategy)
        stages = strategy.stages_of(self.workloads)
        if not strategy.shares_batch and is_replicated(stages, self.workloads):
            return self.experiment.accumulation
        copies = strategy.n_replicas(self.n_workers) if strategy.shares_batch else n_copies(stages, self.workloads)
        samples = self.updates_per_step * self.samples_per_update
        return samples / copies / self.workloads[0].batch_size

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
        devices = [w.device for w in workloads if w.device is not None and (named or not w.timed)]
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
        return costs.cost_rate(self)

    @cached_property
    def energy(self) -> float:
        """Energy of devices and switches, in J; :func:`ddlsim.run.costs.energy_assumptions` lists the assumptions.
        Raises ConfigError if the workers' devices are unknown."""
        return costs.energy(self)

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

    # ------------------------------------------------------------ plan and comparisons

    @cached_property
    def plan(self) -> Plan:
        """The task graph of one step without disturbances, or of one cycle if steps differ or workers are asynchronous.

        A note of the plan names what it leaves out of this run: waiting for input, jitter, slowdowns, faults, failures.
        Use ``print``, ``plan.check`` and ``plan.execute`` to inspect the plan or run it on a cluster
        (docs/models/plans.md). Raises ConfigError for a custom strategy whose processes decide at run time what to do
        next.
        """
        from ddlsim.run.simulate import plan_of_run

        plan, experiment = plan_of_run(self.experiment), self.experiment
        parts = {"waiting for input": isinstance(experiment.input, Input), "slowdowns": experiment.slowdowns}
        parts |= {"jitter": not isinstance(experiment.jitter, NoJitter), "faults": experiment.faults}
        parts |= {"failures": experiment.failures, "background traffic": experiment.background}
        if omitted := [name for name, value in parts.items() if value]:
            plan = replace(plan, notes=(*plan.notes, f"the plan leaves out of the run: {', '.join(omitted)}"))
        return plan

    @property
    def plan_nodes(self) -> list[int]:
        """The node of each rank of the :attr:`plan`, first workers and then servers, for ``plan.execute``."""
        return list(contract.of(self.experiment.strategy).plan_nodes(self.cluster, self.nodes.tolist()))

    @checked
    def known(self, quantity: Annotated[str, one_of("cost_rate", "cost", "energy", "power")]) -> float | None:
        """Return the "cost_rate", "cost", "energy" or "power" of the run, or None if prices or powers are unknown."""
        try:
            return float(getattr(self, quantity))
        except ConfigError:
            return None

    @property
    def assumes_stack(self) -> bool:
        """Whether the run uses the default software stack because the experiment sets none."""
        return (self.given or self.experiment).stack is None

    @cached_property
    def published(self) -> Comparison | None:
        """The most similar published run of a similar transformer on the same kind of device; None: there is none."""
        from ddlsim.report.published import nearest

        return nearest(self)

    # ------------------------------------------------------------ learning

    @property
    def _monitor(self) -> Monitor:
        if self.monitor is None:
            raise ConfigError("this is a timing-only run; for a training run, set training=ddlsim.Training(...)")
        return self.monitor

    @cached_property
    def history(self) -> pd.DataFrame:
        """Table with one row per evaluation.

        Columns: time (s), updates, samples, epoch, rate, train_loss, loss, accuracy, nbytes, staleness, consensus; see
        :class:`ddlsim.learning.monitor.Row`. Raises ConfigError without training.
        """
        import pandas as pd

        return pd.DataFrame(self.evaluations, columns=list(Row._fields))

    @cached_property
    def evaluations(self) -> list[Row]:
        """The rows of the history. If there are failures or checkpoints, their times include these.

        Raises ConfigError without training.
        """
        rows = self._monitor.history
        if not self.has_failure_timeline:
            return rows
        if self.experiment.elastic is not None:
            return list(self.failure_timeline.history)
        times = self.failure_timeline.first_reached(np.array([row.time for row in rows])).tolist()
        return [
            row._replace(time=time) for row, time in zip(rows, times, strict=True) if time <= self.failure_timeline.end
        ]

    @property
    def accuracy(self) -> float:
        """Final held-out accuracy: the mean of the last `moving_average` evaluations."""
        training = self.experiment.training
        n = training.moving_average if training is not None else 1
        return float(np.mean([row.accuracy for row in self.evaluations[-n:]]))

    @checked
    def time_to_accuracy(self, target: Share) -> float:
        """Return the simulated time in s until the held-out accuracy (moving average) reached `target`; inf: never."""
        training = self.experiment.training
        row = first_reaching(self.evaluations, target, training.moving_average if training is not None else 1)
        return float("inf") if row is None else row.time

    @cached_property
    def params(self) -> Array:
        """The parameters of the trained model at the last evaluation in the history, shape (n_params,)."""
        return self._handed_over.read()

    @cached_property
    def statistics(self) -> Array | None:
        """The running statistics of batch normalisation that belong to ``params``, shape (n_state,).

        The value is None if the network has none. Pass it to ``Network.predict`` as `state`.
        """
        statistics = self._handed_over.statistics
        return None if statistics is None else statistics.read()

    @property
    def _handed_over(self) -> Value[Array]:
        if self.experiment.elastic is not None and self.failure_timeline.model is not None:
            return self.failure_timeline.model
        if self._monitor.learner.plane.replaying:
            raise DdlsimError(
                "the run was interrupted before it reached the state of the saved run; resume the saved run again"
            )
        return self._monitor.evaluated

    @property
    def can_be_saved(self) -> bool:
        """Whether :meth:`save` is possible.

        It is possible for training runs that have not diverged and were not stopped in the middle of a computation.
        """
        one_group = self.experiment.elastic is None
        return one_group and self.monitor is not None and self.monitor.checkpoint is not None

    @checked
    def save(self, path: str | Path) -> None:
        """Save the run to a file, from which ``ddlsim.resume(path, experiment)`` continues with bit-identical results.

        Raises ConfigError without training, if the run was stopped in the middle of a computation, or if the file
        cannot be written.
        """
        from ddlsim.run.resume import save

        save(self, path)

    # ------------------------------------------------------------ causes

    def sensitivities(self) -> list[Sensitivity]:
        """Simulate the run with compute, links or latencies improved by 10 %, and return the gains in descending order.

        This takes several times as long as simulating a few steps of the run. Afterwards, ``print(result)`` and
        :meth:`to_json` include the gains. The list is empty for an interrupted run.
        """
        return self._sensitivities

    @cached_property
    def _sensitivities(self) -> list[Sensitivity]:
        from ddlsim.run.sensitivity import sensitivities

        self.require_single_job("sensitivities")
        return [] if self.interrupted else sensitivities(self.experiment)

    @property
    def cached_sensitivities(self) -> list[Sensitivity] | None:
        """The :meth:`sensitivities` if they have been computed; None otherwise.

        Reading this does not start a simulation.
        """
        return self.__dict__.get("_sensitivities")

    @property
    def bottleneck(self) -> Sensitivity:
        """The part that gains the most throughput if it is improved by 10 %: the first of :meth:`sensitivities`.

        The gains are simulated on first use. Raises DdlsimError if the run was interrupted.
        """
        if self.interrupted:
            raise DdlsimError("the run was interrupted, so its bottleneck is unknown; let the run complete")
        return self.sensitivities()[0]

    # ------------------------------------------------------------ uncertainty

    @property
    def uncertain(self) -> bool:
        """Whether the result has a source of uncertainty: a calibrated cluster, a fitted stack, or jitter."""
        return self.fitted_stack or self._sampled

    @property
    def _sampled(self) -> bool:
        """Whether the interval comes from many simulations."""
        return self.cluster.calibration is not None or not isinstance(self.experiment.jitter, NoJitter)

    @property
    def fitted_stack(self) -> bool:
        """Whether the compute time comes from a software stack that was fitted to measured runs."""
        workload = self.workloads[0]
        return workload.by_kernel and not workload.known and workload.stack.spread != (1.0, 1.0)

    @checked
    def interval(self, *, n_draws: Count = 20, level: float = 0.95, seed: Seed = 0) -> RunInterval:
        """Return prediction intervals of throughput and step time.

        n_draws  number of further simulations, each with sampled values and a different seed of the jitter
        level    probability that the measured value lies in the interval
        seed     seed of the samples

        The values are sampled from the uncertainty of the cluster's calibration. Past prediction errors for this
        strategy widen the interval at both ends. Unlike :func:`ddlsim.predict_interval`, this method does not add
        calibrated jitter to a run without jitter. Training runs are simulated without computing gradients. Raises
        ConfigError if nothing is uncertain.
        """
        from ddlsim.validation.intervals import interval_of

        return interval_of(self, n_draws=n_draws, level=level, seed=seed)

    @cached_property
    def quick_interval(self) -> RunInterval | None:
        """The :meth:`interval`, if it can be computed quickly. None for large runs, and if nothing is uncertain."""
        limits = (QUICK_MESSAGES, QUICK_STEPS) if self._sampled else (math.inf, STACK_STEPS)
        return self.interval() if self.uncertain and self._is_quick(*limits) else None

    def _is_quick(self, n_messages: float, most_steps: int = QUICK_STEPS) -> bool:
        """Whether some more simulations of the run are cheap, judged by its size and not by the time it took."""
        n_steps = self.n_workers * sum(self.experiment.window)
        small = self.n_messages <= n_messages and n_steps <= most_steps
        return small and not self.interrupted and self.monitor is None and not self.co_located

    def require_single_job(self, what: str) -> None:
        """Raise ConfigError if the run had co-located jobs.

        Methods that simulate the run again call this first. `what` is their name, for the message.
        """
        if self.co_located:
            raise ConfigError(
                f"{what}: not available for a run of simulate_jobs, because repeating the run would leave out the "
                "other jobs; simulate the run with the other jobs as background=[...]"
            )

    @checked
    def stability(
        self,
        *,
        runs: Annotated[int, integer(1, 1000)] = 3,
        size: Annotated[float, number(1e-15, 0.01, hint=", such as 1e-12")] = 1e-12,
        seed: Seed = 0,
    ) -> Stability:
        """Return by how much throughput and step time change if the inputs change slightly.

        runs  number of further simulations
        size  largest relative change of the inputs
        seed  seed of the changes, which are independent of the random numbers of the run

        Each simulation multiplies every link's capacity and latency and every worker's compute time by a random factor
        within 1 +- `size`. If messages contend over several links, the spread of the results may be far larger than
        `size`; further digits of the result are then meaningless. Training runs are simulated without computing
        gradients. Raises ConfigError for invalid arguments.
        """
        from ddlsim.run.sensitivity import stability_of

        self.require_single_job("stability")
        return stability_of(self, runs=runs, size=size, seed=seed)

    @cached_property
    def known_stability(self) -> Stability | None:
        """The :meth:`stability` if it was requested (``simulate(..., stability=True)``) or is cheap, otherwise None.

        It is cheap for timing-only runs with up to 20,000 messages and 500 worker steps.
        """
        if self.interrupted or not (self.wants_stability or self._is_quick(STABILITY_MESSAGES)):
            return None
        return self.stability()

    # ------------------------------------------------------------ output

    def to_dict(self) -> dict[str, object]:
        """Return the numbers and the manifest as plain values; "bottleneck" is None if it was not requested."""
        gains, workload, stack = self.cached_sensitivities, self.workloads[0], dict[str, object]()
        if (workload.by_kernel or workload.summed) and not workload.known:  # times depend on the stack
            stack = {name: getattr(workload.stack, name) for name in ("name", "title", "release")}
            stack["assumed"] = self.assumes_stack
        rows = [row._asdict() for row in self.evaluations] if self.monitor is not None else []
        return {
            "ddlsim": ddlsim.__version__,
            "experiment": self.experiment.manifest(),
            "workers": self.n_workers,
            "fits": self.fits,
            "memory": None if self.memory is None else self.memory._asdict(),
            "throughput": self.throughput,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "stack": stack or None,
            "published": None if self.published is None else self.published.to_dict(),
            "step_time": self.step_time,
            "speedup": self.speedup,
            "efficiency": self.efficiency,
            "shares": self.shares,
            "mean_staleness": self.mean_staleness,
            "staleness": {str(k): v for k, v in self.staleness_histogram.items()},
            "step_times": self.step_times.tolist(),
            "interval": None if self.quick_interval is None else self.quick_interval.to_dict(),
            "stability": None if self.known_stability is None else self.known_stability.to_dict(),
            "simulated_time": self.simulated_time,
            "n_messages": self.n_messages,
            "compute": self.workloads[0].basis,
            "bottleneck": None if gains is None else [s.to_dict() for s in gains],
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "interrupted": self.interrupted,
            "nbytes_sent": self.nbytes_sent,
            "failure_timeline": self.failure_timeline.to_dict() if self.has_failure_timeline else None,
            "goodput": self.goodput if self.has_failure_timeline else None,
            "cost": self.known("cost"),
            "energy": self.known("energy"),
            "cost_assumptions": costs.cost_assumptions(self),
            "energy_assumptions": costs.energy_assumptions(self),
            "stop_reason": self.stop_reason,
            # missing values (a loss before the first gradient) are None, not NaN
            "history": [{name: None if value != value else value for name, value in row.items()} for row in rows],
        }

    @checked
    def to_json(self, path: str | Path | None = None) -> str:
        """Return the result as JSON text, and write it to `path` if given."""
        text = json.dumps(self.to_dict(), indent=2)
        if path is not None:
            write_text(path, text + "\n")
        return text

    def __str__(self) -> str:
        from ddlsim.report.summary import summary

        return summary(self)

    def _repr_html_(self) -> str:
        from ddlsim.notebook import labelled, page
        from ddlsim.report.summary import summary_rows

        return page("Result", labelled(summary_rows(self, simulate=False)))

    def __repr__(self) -> str:
        fits = "" if self.fits else " if it fitted in memory"
        figures = f"{self.throughput:.4g} samples/s, efficiency {percent(self.efficiency)}"
        return f"<Result: {self.n_workers} workers, {figures}{fits}>"

    @cached_property
    def traced(self) -> Result:
        """This run with all activity recorded for a timeline.

        If the activity was not recorded, the run is simulated again.
        """
        if self.busy is not None:
            return self
        self.require_single_job("a timeline")
        from ddlsim.run.simulate import complete

        return complete(self.experiment, keep_spans=True)

    @checked
    def save_trace(self, path: str | Path, *, whole: bool = False) -> str:
        """Write a trace for Perfetto and chrome://tracing, and return a description of the parts that it omits.

        The trace has one track per worker, server and busy link. If `whole` is True, it contains all steps, workers and
        links; see :func:`ddlsim.report.trace.save_trace`.
        """
        from ddlsim.report.trace import save_trace

        return save_trace(self.traced, path, whole=whole)

    @checked
    def plot_timeline(
        self,
        path: str | Path | None = None,
        *,
        start: NotNegative | None = None,
        end: NotNegative | None = None,
        n_workers: Count = 16,
    ) -> matplotlib.axes.Axes:
        """Draw the activity of the workers over time; see :func:`ddlsim.report.gantt.timeline`."""
        from ddlsim.report.gantt import timeline

        return timeline(self.traced, path, start=start, end=end, n_workers=n_workers)

    @checked
    def plot_learning(
        self, path: str | Path | None = None, *, x: str = "time"
    ) -> tuple[matplotlib.axes.Axes, matplotlib.axes.Axes]:
        """Plot accuracy and losses over "time", "updates", "epoch" or "nbytes".

        See :func:`ddlsim.report.learning.plot_learning`.
        """
        from ddlsim.report.learning import plot_learning

        return plot_learning({self.experiment.strategy.label: self}, path, x=x)

    @checked
    def plot_cluster(self, path: str | Path | None = None) -> matplotlib.axes.Axes:
        """Draw the cluster with its links coloured by utilisation; see :mod:`ddlsim.report.cluster_plot`."""
        from ddlsim.report.cluster_plot import cluster_plot

        return cluster_plot(self, path)

    @checked
    def plot_step_times(self, path: str | Path | None = None) -> matplotlib.axes.Axes:
        """Draw the distribution of the step times; see :func:`ddlsim.report.plots.step_times`."""
        from ddlsim.report.plots import step_times

        return step_times(self, path)
