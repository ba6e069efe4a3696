"""`Result`: what a run predicts, with the numbers behind it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import numpy.typing as npt

from ddlsim.arguments import Count, NotNegative, Seed, Share, checked, number, one_of, whole
from ddlsim.cluster import Cluster
from ddlsim.errors import ConfigError, DdlsimError
from ddlsim.learning import Array, Value
from ddlsim.learning.monitor import Monitor, Row, first_reaching
from ddlsim.network import BusyIntervals
from ddlsim.output_files import write_text
from ddlsim.plan import Plan
from ddlsim.run.alone import alone, batches_alone
from ddlsim.run.experiment import Experiment
from ddlsim.run.plain_result import plain_result
from ddlsim.run.plans import plan_of_run
from ddlsim.runtime.recorder import COMMUNICATION, COMPUTE, WAITING, Recorder
from ddlsim.workload.compute import Workload
from ddlsim.workload.jitter import NoJitter
from ddlsim.workload.stage import stages_of

if TYPE_CHECKING:
    import matplotlib.axes
    import pandas as pd

    from ddlsim.run.sensitivity import Sensitivity
    from ddlsim.run.stability import Stability
    from ddlsim.validation.intervals import RunInterval

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
#: messages and steps of workers up to which a run is so short that printing it simulates it 20 times more
QUICK_MESSAGES, QUICK_STEPS = 100_000, 500
#: messages up to which it is simulated 3 times more to see how stable it is, where nobody has asked
STABILITY_MESSAGES = 20_000
#: steps whose updates are counted to know those of one: strategies round up, and this has many divisors
MANY_STEPS = 232_792_560


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """The outcome of a simulated run. Times in s, sizes in bytes, rates per s.

    ``workloads`` are what each worker would compute if it had the whole model (a strategy may give it a part of that,
    see :class:`ddlsim.workload.stage.Stage`).

    ``print(result)`` shows the summary with the bottleneck; the properties have the numbers, ``workers``,
    ``links`` and ``steps`` are pandas tables, ``to_json`` everything that a program would read.
    """

    experiment: Experiment
    cluster: Cluster
    workloads: list[Workload]
    nodes: Ints
    recorder: Recorder
    end_time: float
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

    @cached_property
    def plan(self) -> Plan:
        """The first step as a table of undisturbed tasks: ``print`` it, ``check`` it, ``execute`` it on a cluster.

        Raises ConfigError where the step is not a table yet: see docs/models/plans.md.
        """
        return plan_of_run(self.experiment, self.workloads)

    # ------------------------------------------------------------ headline numbers

    @property
    def n_workers(self) -> int:
        """Number of workers."""
        return len(self.workloads)

    @cached_property
    def measured_updates(self) -> list[tuple[float, int]]:
        """The updates (time, samples) after the warm-up; the first entry only marks where measuring starts.

        A run that ended sooner is measured from the latest update that was before its last instant.
        """
        warmup = self.experiment.strategy.updates(self.experiment.warmup, self.n_workers)
        updates = [(0.0, 0), *self.recorder.updates]
        earlier = sum(time < updates[-1][0] for time, _ in updates)
        return updates[min(warmup, max(earlier - 1, 0)) :]

    @cached_property
    def throughput(self) -> float:
        """Samples per second of all workers together, after the warm-up; those of dropped gradients do not count."""
        updates = self.measured_updates
        return sum(n for _, n in updates[1:]) / (updates[-1][0] - updates[0][0])

    @cached_property
    def updates_per_step(self) -> float:
        """Updates that make a step of the run: 1, but where workers update on their own (asynchronous: the staleness of
        updates is counted) as many as the strategy says that one step of all workers makes."""
        if not self.recorder.staleness:
            return 1.0
        return self.experiment.strategy.updates(MANY_STEPS, self.n_workers) / MANY_STEPS

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
        updates = self.measured_updates
        return self.updates_per_step * (updates[-1][0] - updates[0][0]) / (len(updates) - 1)

    @cached_property
    def samples_per_update(self) -> float:
        """Samples that an update after the warm-up is made from, on average."""
        updates = self.measured_updates[1:]
        return sum(n for _, n in updates) / len(updates)

    @cached_property
    def _alone(self) -> list[float]:
        """Samples per second of each worker with the whole model, alone, without any communication."""
        batches = batches_alone(self, stages_of(self.experiment.strategy, self.workloads))
        return [alone(self.experiment, workload, batches) for workload in self.workloads]

    @cached_property
    def single_throughput(self) -> float:
        """Samples per second of the first worker alone, with the whole model, without any communication (and were its
        memory large enough)."""
        return self._alone[0]

    @property
    def speedup(self) -> float:
        """Throughput over that of the first worker alone."""
        return self.throughput / self.single_throughput

    @cached_property
    def efficiency(self) -> float:
        """Throughput over what all workers would reach together if each were alone with the whole model."""
        return self.throughput / sum(self._alone)

    @cached_property
    def shares(self) -> dict[str, float]:
        """How the workers spent their time on average: compute, communication, waiting, idle; they add up to 1."""
        table = self._seconds()
        return {name: float(values.mean() / self.end_time) for name, values in table.items()}

    def _seconds(self) -> dict[str, Floats]:
        kinds = (COMPUTE, COMMUNICATION, WAITING)
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

    @checked
    def known(self, quantity: Annotated[str, one_of("cost_rate", "cost", "energy", "power")]) -> float | None:
        """Return "cost_rate", "cost", "energy" or "power", or None where nobody has given prices or powers."""
        try:
            return float(getattr(self, quantity))
        except ConfigError:
            return None

    # ------------------------------------------------------------ learning

    @property
    def _monitor(self) -> Monitor:
        if self.monitor is None:
            raise ConfigError("the run has learned nothing: give it training=ddlsim.Training(...)")
        return self.monitor

    @cached_property
    def history(self) -> pd.DataFrame:
        """One row per evaluation: time (s), updates, samples, epoch, rate, train_loss, loss, accuracy, nbytes,
        staleness, consensus; see :class:`ddlsim.learning.monitor.Row`. Raises ConfigError without training."""
        import pandas as pd

        return pd.DataFrame(self._monitor.history, columns=list(Row._fields))

    @property
    def evaluations(self) -> list[Row]:
        """The rows of the history. Raises ConfigError without training."""
        return self._monitor.history

    @property
    def accuracy(self) -> float:
        """Held-out accuracy at the end, the mean of the last `moving_average` evaluations."""
        training = self.experiment.training
        n = training.moving_average if training is not None else 1
        return float(np.mean([row.accuracy for row in self._monitor.history[-n:]]))

    @checked
    def time_to_accuracy(self, target: Share) -> float:
        """Return the simulated s until the held-out accuracy (by its moving average) reached `target`, or inf."""
        training = self.experiment.training
        row = first_reaching(self._monitor.history, target, training.moving_average if training is not None else 1)
        return float("inf") if row is None else row.time

    @cached_property
    def params(self) -> Array:
        """The parameters that the run hands over, shape (n_params,): those of the history's last row."""
        return self._handed_over.read()

    @cached_property
    def statistics(self) -> Array | None:
        """The running statistics of batch normalisation that belong to ``params``, shape (n_state,), which
        ``Network.predict`` takes as its `state`; None where the network has none."""
        statistics = self._handed_over.statistics
        return None if statistics is None else statistics.read()

    @property
    def _handed_over(self) -> Value[Array]:
        if self._monitor.learner.plane.replaying:
            raise DdlsimError("the run was interrupted before it had got as far as the saved one; continue that again")
        return self._monitor.evaluated

    @property
    def can_be_saved(self) -> bool:
        """Whether :meth:`save` can write it: a training run that has not diverged and was not stopped at once."""
        return self.monitor is not None and self.monitor.checkpoint is not None

    @checked
    def save(self, path: str | Path) -> None:
        """Write the run as it is now to a file that ``ddlsim.resume(path, experiment)`` continues, bit for bit.

        Raises ConfigError without training, if the run was stopped in the middle of a computation, or if the
        file cannot be written.
        """
        from ddlsim.run.resume import save

        save(self, path)

    # ------------------------------------------------------------ tables

    @cached_property
    def workers(self) -> pd.DataFrame:
        """One row per worker: node, device times in s (compute, communication, waiting, idle), steps."""
        import pandas as pd

        names = [self.cluster.node_names[node] for node in self.nodes]
        steps = [len(ends) for ends in self.recorder.step_end]
        return pd.DataFrame({"node": names, "steps": steps, **self._seconds()}).rename_axis("worker")

    @cached_property
    def links(self) -> pd.DataFrame:
        """One row per directed link (the two directions of a shared one are a row): kind, nbytes, utilisation."""
        import pandas as pd

        cluster = self.cluster
        first = np.unique(cluster.link_channel, return_index=True)[1]
        channel = cluster.link_channel[first]
        names = cluster.node_names
        capacity = cluster.channel_capacity[channel]
        return pd.DataFrame(
            {
                "source": [names[i] for i in cluster.link_src[first]],
                "target": [names[i] for i in cluster.link_dst[first]],
                "kind": [cluster.link_kind[i] for i in first],
                "nbytes": self.channel_nbytes[channel],
                "utilisation": self.channel_nbytes[channel] / (capacity * self.end_time),
                "busy": self.channel_busy[channel] / self.end_time,
            }
        )

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row per update: time in s, samples."""
        import pandas as pd

        return pd.DataFrame(self.recorder.updates, columns=["time", "samples"]).rename_axis("update")

    # ------------------------------------------------------------ why

    @cached_property
    def sensitivities(self) -> list[Sensitivity]:
        """What 10 % better compute, links or latencies would bring, each simulated; the best first.

        Empty for a run that was interrupted: who stops one does not want to wait for more of them.
        """
        if self.interrupted:
            return []
        from ddlsim.run.sensitivity import sensitivities

        return sensitivities(self.experiment)

    @property
    def bottleneck(self) -> Sensitivity:
        """The part whose improvement by 10 % brings most. Raises DdlsimError if the run was interrupted."""
        if self.interrupted:
            raise DdlsimError("the run was interrupted, so its bottleneck is not known; simulate it to its end")
        return self.sensitivities[0]

    # ------------------------------------------------------------ how sure

    @property
    def uncertain(self) -> bool:
        """Whether anything says how far off the prediction may be: the cluster's calibration, or jitter."""
        return self.cluster.calibration is not None or not isinstance(self.experiment.jitter, NoJitter)

    @checked
    def interval(self, *, n_draws: Count = 20, level: float = 0.95, seed: Seed = 0) -> RunInterval:
        """Return intervals of throughput and step time: the run is simulated `n_draws` times more, with values drawn
        from the uncertainty of the cluster's calibration and other seeds of its jitter.

        As :func:`ddlsim.predict_interval`, but of this run as it is: jitter that the calibration knows, and the run has
        not, is left out. Of a training run only the clock is simulated. Raises ConfigError where nothing is
        uncertain.
        """
        from ddlsim.validation.intervals import interval_of

        return interval_of(self, n_draws=n_draws, level=level, seed=seed)

    @cached_property
    def quick_interval(self) -> RunInterval | None:
        """The :meth:`interval` where it is known soon, for printing; None for large or certain runs."""
        if not self._is_quick(QUICK_MESSAGES) or not self.uncertain:
            return None
        return self.interval()

    def _is_quick(self, n_messages: int) -> bool:
        """Whether to simulate it again some times takes little: a rule on what it did, not on how long that took."""
        n_steps = self.n_workers * (self.experiment.steps + self.experiment.warmup)
        small = self.n_messages <= n_messages and n_steps <= QUICK_STEPS
        return small and not self.interrupted and self.monitor is None

    @checked
    def stability(
        self,
        *,
        runs: Annotated[int, whole(1, 1000)] = 3,
        size: Annotated[float, number(1e-15, 0.01, hint=", such as 1e-12")] = 1e-12,
        seed: Seed = 0,
    ) -> Stability:
        """Return how far throughput and step time move when the inputs do: the run is simulated `runs` times more, with
        every link's capacity and latency and every worker's compute time moved by its own factor within 1 +- `size`.

        Where messages contend over several links the answer may be far more than `size`; no later digit of this result
        means anything then. Of a run that learns only the clock is moved. The random numbers of the moves, addressed by
        `seed`, are not those of the run. Raises ConfigError for arguments that make no sense.
        """
        from ddlsim.run.stability import stability_of

        return stability_of(self, runs=runs, size=size, seed=seed)

    @cached_property
    def known_stability(self) -> Stability | None:
        """The :meth:`stability` where it was asked for (``simulate(..., stability=True)``) or is cheap: at most 20,000
        messages and 500 steps of workers, of a run that learns nothing. None where nothing is claimed."""
        if self.interrupted or not (self.wants_stability or self._is_quick(STABILITY_MESSAGES)):
            return None
        return self.stability()

    # ------------------------------------------------------------ output

    def to_dict(self) -> dict[str, object]:
        """Return the numbers and the manifest as plain values."""
        return plain_result(self)

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

    def __repr__(self) -> str:
        return f"<Result: {self.n_workers} workers, {self.throughput:.4g} samples/s, efficiency {self.efficiency:.1%}>"

    @cached_property
    def traced(self) -> Result:
        """This run with everything recorded for a timeline (simulated again if it was not)."""
        if self.busy is not None:
            return self
        from ddlsim.run.simulate import run

        return run(self.experiment, keep_spans=True)

    @checked
    def save_trace(self, path: str | Path) -> None:
        """Write a trace that Perfetto and chrome://tracing open: a track per worker, server and busy link."""
        from ddlsim.report.trace import save_trace

        save_trace(self.traced, path)

    @checked
    def plot_timeline(
        self,
        path: str | Path | None = None,
        *,
        start: NotNegative | None = None,
        end: NotNegative | None = None,
        n_workers: Count = 16,
    ) -> matplotlib.axes.Axes:
        """Draw what the workers did when; see :func:`ddlsim.report.plots.timeline`."""
        from ddlsim.report.plots import timeline

        return timeline(self.traced, path, start=start, end=end, n_workers=n_workers)

    @checked
    def plot_learning(
        self, path: str | Path | None = None, *, x: str = "time"
    ) -> tuple[matplotlib.axes.Axes, matplotlib.axes.Axes]:
        """Draw accuracy and losses over "time", "updates", "epoch" or "nbytes"; see
        :func:`ddlsim.report.learning.plot_learning`."""
        from ddlsim.report.learning import plot_learning

        return plot_learning({self.experiment.strategy.label: self}, path, x=x)

    @checked
    def plot_cluster(self, path: str | Path | None = None) -> matplotlib.axes.Axes:
        """Draw the cluster with its links coloured by use; see :mod:`ddlsim.report.cluster_plot`."""
        from ddlsim.report.cluster_plot import cluster_plot

        return cluster_plot(self, path)

    @checked
    def plot_step_times(self, path: str | Path | None = None) -> matplotlib.axes.Axes:
        """Draw the distribution of the step times; see :func:`ddlsim.report.plots.step_times`."""
        from ddlsim.report.plots import step_times

        return step_times(self, path)
