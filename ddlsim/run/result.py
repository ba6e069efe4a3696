"""`Result`: the prediction for a run, and the numbers behind it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np

import ddlsim
from ddlsim.arguments import Count, NotNegative, Seed, Share, checked, integer, number, one_of
from ddlsim.errors import ConfigError, DdlsimError
from ddlsim.learning import Array, Value
from ddlsim.learning.monitor import Monitor, Row, first_reaching
from ddlsim.output_files import write_text
from ddlsim.plan import Plan
from ddlsim.run.costs import energy_assumptions
from ddlsim.run.outcome import Outcome
from ddlsim.strategies import contract
from ddlsim.workload.jitter import NoJitter

if TYPE_CHECKING:
    import matplotlib.axes
    import pandas as pd

    from ddlsim.report.published import Comparison
    from ddlsim.run.sensitivity import Sensitivity, Stability
    from ddlsim.validation.intervals import RunInterval


def _stack(result: Result) -> dict[str, object] | None:
    """Return the software stack as a dictionary, or None if times do not depend on it."""
    workload = result.workloads[0]
    if workload.known or not (workload.by_kernel or workload.summed):
        return None
    stack = {name: getattr(workload.stack, name) for name in ("name", "title", "release")}
    return {**stack, "assumed": result.assumes_stack}


def _history(result: Result) -> list[dict[str, float | None]]:
    """The history as plain values; missing ones (a loss before the first gradient) are None, not NaN."""
    rows = result.evaluations if result.monitor is not None else []
    return [{name: None if value != value else value for name, value in row._asdict().items()} for row in rows]


#: maximum messages and worker steps of runs that are simulated 20 more times when printed
QUICK_MESSAGES, QUICK_STEPS = 100_000, 500
#: maximum worker steps of runs under a fitted stack that are simulated 3 more times when printed
STACK_STEPS = 100_000
#: maximum messages of runs whose stability is computed, by 3 more runs, even if not requested
STABILITY_MESSAGES = 20_000


@dataclass(frozen=True, eq=False, repr=False)
class Result(Outcome):
    """The result of a simulated run. Times are in s, sizes in bytes, and rates per s.

    ``print(result)`` shows a summary. Single values, such as ``result.throughput``, are properties. ``workers``,
    ``links`` and ``steps`` are pandas DataFrames, and ``to_json`` exports everything.
    """

    @cached_property
    def plan(self) -> Plan:
        """The task graph of one step without disturbances, or of one cycle if steps differ or workers are asynchronous.

        Use ``print``, ``plan.check`` and ``plan.execute`` to inspect the plan or run it on a cluster
        (docs/models/plans.md). Raises ConfigError for a custom strategy whose processes decide at run time what to do
        next.
        """
        from ddlsim.run.simulate import plan_of_run

        return plan_of_run(self.experiment)

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
        known = self.cached_sensitivities
        return {
            "ddlsim": ddlsim.__version__,
            "experiment": self.experiment.manifest(),
            "workers": self.n_workers,
            "fits": self.fits,
            "memory": None if self.memory is None else self.memory._asdict(),
            "throughput": self.throughput,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "stack": _stack(self),
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
            "bottleneck": None if known is None else [s.to_dict() for s in known],
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "interrupted": self.interrupted,
            "nbytes_sent": self.nbytes_sent,
            "failure_timeline": self.failure_timeline.to_dict() if self.has_failure_timeline else None,
            "goodput": self.goodput if self.has_failure_timeline else None,
            "cost": self.known("cost"),
            "energy": self.known("energy"),
            "energy_assumptions": energy_assumptions(self),
            "stop_reason": self.stop_reason,
            "history": _history(self),
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
        figures = f"{self.throughput:.4g} samples/s, efficiency {self.efficiency:.1%}"
        return f"<Result: {self.n_workers} workers, {figures}{fits}>"

    @cached_property
    def traced(self) -> Result:
        """This run with all activity recorded for a timeline.

        If the activity was not recorded, the run is simulated again.
        """
        if self.busy is not None:
            return self
        self.require_single_job("a timeline")
        from ddlsim.run.simulate import run

        return run(self.experiment, keep_spans=True)

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
