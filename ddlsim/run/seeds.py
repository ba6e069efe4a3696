"""The same training run with several seeds: means and confidence intervals."""

from __future__ import annotations

import functools
import math
import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import TYPE_CHECKING, Annotated

import numpy as np

from ddlsim.arguments import Count, Seed, checked, integer, number, one_of
from ddlsim.cluster.cluster import Floats, Ints
from ddlsim.errors import ConfigError, DdlsimError
from ddlsim.learning import Training
from ddlsim.learning.monitor import Row, first_reaching
from ddlsim.printable import shown
from ddlsim.readable import percent
from ddlsim.run.experiment import Experiment
from ddlsim.run.metrics import METRICS
from ddlsim.run.processes import ProcessDied, Processes
from ddlsim.run.simulate import complete, until_interrupt
from ddlsim.text_tables import labelled

if TYPE_CHECKING:
    import pandas as pd

#: columns of the history that can serve as horizontal axis
AXES = ("time", "updates", "epoch", "nbytes")
Axis = Annotated[str, one_of(*AXES)]
Column = Annotated[str, one_of(*Row._fields)]
Confidence = Annotated[float, number(0.0, 1.0, above=True, below=True, hint=" (0.95 is 95 %)")]
Target = Annotated[float, number(0.0, 1.0)]
NSeeds = Annotated[int, integer(1, 100_000)]


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its `confidence` interval by Student's t (NaN for a single seed).

    A time to a target is censored: `n` seeds reached it and ``n_missed`` did not. If any seed missed it, the mean is
    restricted: such a seed counts with the time for which it ran. The true mean is then larger, and ``high`` is inf
    (Royston and Parmar 2013, BMC Medical Research Methodology 13:152). In ``median`` these seeds are later than all
    others (inf if they are half of all seeds or more). Impossible bounds (a time or throughput below 0, an accuracy
    above 1) are clipped.
    """

    mean: float
    low: float
    high: float
    median: float
    n: int
    n_missed: int = 0
    confidence: float = 0.95

    @property
    def typical(self) -> float:
        """The value for comparing runs: the mean if every seed has a value, else the median."""
        return self.median if self.n_missed else self.mean

    def __str__(self) -> str:
        if self.n == 0:
            return f"never, in {self.n_missed} seeds"
        if not self.n_missed:
            return f"{self.mean:.4g} ({percent(self.confidence, 0)}: {self.low:.4g} to {self.high:.4g})"
        low = "" if math.isnan(self.low) else f"{percent(self.confidence, 0)}: at least {self.low:.4g}; "
        reached = f"{low}{self.n} of {self.n + self.n_missed} seeds"
        return f"median {self.median:.4g}, mean at least {self.mean:.4g} ({reached})"


@dataclass(frozen=True)
class SeedRun:
    """Summary of the run with one seed; see :class:`ddlsim.Result` for the fields."""

    seed: int
    history: tuple[Row, ...]
    end_time: float
    throughput: float
    nbytes_sent: float
    mean_staleness: float
    stop_reason: str


@dataclass(frozen=True, eq=False)
class Seeds:
    """The results of an experiment that was run with several seeds, in the order of the seeds.

    interrupted  whether Ctrl-C ended the simulation before all seeds had finished
    """

    experiment: Experiment
    runs: tuple[SeedRun, ...]
    interrupted: bool = False

    @cached_property
    def history(self) -> pd.DataFrame:
        """Table of all evaluations, with the seed and the columns of :attr:`ddlsim.Result.history`."""
        import pandas as pd

        rows = [(run.seed, *row) for run in self.runs for row in run.history]
        return pd.DataFrame(rows, columns=["seed", *Row._fields])

    @checked
    def curve(self, column: Column = "accuracy", x: Axis = "time", confidence: Confidence = 0.95) -> pd.DataFrame:
        """Return the mean of a history column over the seeds, as columns mean, low and high (confidence interval).

        column      column of the history, such as "accuracy"
        x           horizontal axis: "time", "updates", "epoch" or "nbytes"
        confidence  probability of the interval

        Values between evaluations are interpolated linearly. The curve extends to the last evaluation of the longest
        run. A seed whose run has ended keeps its last value; column `n` is the number of seeds whose runs have not
        ended.
        """
        import pandas as pd

        lines = [np.array([(getattr(row, x), getattr(row, column)) for row in run.history]).T for run in self.runs]
        lines = [line[:, np.isfinite(line[1])] for line in lines]
        if not all(line.size for line in lines):
            return pd.DataFrame(columns=["mean", "low", "high", "n"])
        at, mean, half, n = mean_line(lines, confidence)
        columns = {"mean": mean, "low": mean - half, "high": mean + half, "n": n}
        return pd.DataFrame(columns, index=pd.Index(at, name=x))

    @checked
    def accuracy(self, confidence: Confidence = 0.95) -> Interval:
        """Return the final held-out accuracy (moving average) with its confidence interval."""
        n = self._training.moving_average
        ends = [float(np.mean([row.accuracy for row in run.history[-n:]])) for run in self.runs]
        return interval_of(ends, confidence, most=1.0)

    @checked
    def times_to_accuracy(self, target: Target) -> list[float]:
        """Return the simulated time in s until each seed reached `target`; inf: never."""
        rows = [first_reaching(run.history, target, self._training.moving_average) for run in self.runs]
        return [math.inf if row is None else row.time for row in rows]

    @checked
    def time_to_accuracy(self, target: Target, confidence: Confidence = 0.95) -> Interval:
        """Return the mean simulated time in s until `target` was reached, with its confidence interval.

        Seeds that never reach the target are censored at the end of their runs.
        """
        return interval_of(self.times_to_accuracy(target), confidence, limits=[run.end_time for run in self.runs])

    @checked
    def throughput(self, confidence: Confidence = 0.95) -> Interval:
        """Return the throughput of all workers together, in samples/s, with its confidence interval."""
        return interval_of([run.throughput for run in self.runs], confidence)

    @property
    def _training(self) -> Training:
        assert self.experiment.training is not None
        return self.experiment.training

    def __repr__(self) -> str:
        return f"<Seeds: {len(self.runs)} of {self.experiment.strategy.label}, accuracy {self.accuracy()}>"

    def __str__(self) -> str:
        return "\n".join([shown(self._title), *labelled(self._rows())])

    def _repr_html_(self) -> str:
        from ddlsim.notebook import labelled, page

        return page(self._title, labelled(self._rows()))

    @property
    def _title(self) -> str:
        return f"{len(self.runs)} seeds of {self.experiment.strategy.label}{', interrupted' * self.interrupted}"

    def _rows(self) -> list[tuple[str, str]]:
        """Return labels and texts for printing; a row without a label continues the previous one."""
        rows = [("accuracy", str(self.accuracy()))]
        target = self._training.target_accuracy
        if target is not None:
            unit = METRICS["time_to_accuracy"].unit
            rows.append((f"time to {target:g}", f"{self.time_to_accuracy(target)} {unit}"))
        rows.append(("throughput", f"{self.throughput()} {METRICS['throughput'].unit}"))
        if len(self.runs) > 1 and len({run.throughput for run in self.runs}) == 1:
            rows.append(("", "the same for all seeds, because nothing random affects the clock; set jitter=..."))
        return rows


def half_width(values: Floats, confidence: float) -> Floats:
    """Return half the width of the confidence interval of the mean over the first axis."""
    n = len(values)
    if n < 2:
        return np.full(values.shape[1:], math.nan)
    return np.asarray(t_quantile(n - 1, confidence) * values.std(axis=0, ddof=1) / math.sqrt(n))


@functools.lru_cache(maxsize=1024)
def t_quantile(dof: float, level: float = 0.95) -> float:
    """Return the t that the absolute value of a Student-t variable exceeds with probability 1 - `level`.

    dof    degrees of freedom, at least 1; with infinitely many it is a normal distribution
    level  probability of the interval from -t to t

    With t = sqrt(dof) tan(angle) the density is proportional to cos(angle)^(dof - 1), which is integrated by
    Gauss-Legendre quadrature.
    """
    if math.isinf(dof):
        return NormalDist().inv_cdf(0.5 + 0.5 * level)
    nodes, weights = np.polynomial.legendre.leggauss(64)
    norm = math.exp(math.lgamma(0.5 * (dof + 1.0)) - math.lgamma(0.5 * dof)) / math.sqrt(math.pi)
    low, high = 0.0, 0.5 * math.pi
    for _ in range(64):
        angle = 0.5 * (low + high)
        inside = norm * angle * float(weights @ np.cos(0.5 * angle * (nodes + 1.0)) ** (dof - 1.0))
        low, high = (angle, high) if inside < level else (low, angle)
    return math.sqrt(dof) * math.tan(0.5 * (low + high))


def mean_line(lines: Sequence[Floats], confidence: float) -> tuple[Floats, Floats, Floats, Ints]:
    """Return x positions, the mean of the lines there, half the width of its interval, and the number of lines that
    extend so far, each (n_places,).

    lines  each (2, n): increasing x, and values. The result starts where all lines have started; lines keep their last
           value
    """
    at = np.unique(np.concatenate([line[0] for line in lines]))
    at = at[at >= max(line[0, 0] for line in lines)]
    values = np.array([np.interp(at, line[0], line[1]) for line in lines])
    n = np.sum([at <= line[0, -1] for line in lines], axis=0)
    return at, values.mean(axis=0), half_width(values, confidence), n


def interval_of(
    values: Sequence[float], confidence: float, most: float = math.inf, limits: Sequence[float] | float = 0.0
) -> Interval:
    """Return the interval of the mean of `values` between 0 and `most`; inf marks targets that were not reached within
    the `limits`."""
    reached = np.isfinite(values)
    n, n_missed = int(reached.sum()), int((~reached).sum())
    if not n:
        return Interval(math.inf, math.nan, math.nan, math.inf, 0, n_missed, confidence)
    filled = np.where(reached, values, limits) if n_missed else np.array(values)
    mean, half = float(filled.mean()), float(half_width(filled, confidence))
    low, high = (mean - half, mean + half) if math.isnan(half) else (max(mean - half, 0.0), min(mean + half, most))
    return Interval(mean, low, math.inf if n_missed else high, float(np.median(values)), n, n_missed, confidence)


# ---------------------------------------------------------------- simulation


@checked
def simulate_seeds(experiment: Experiment, seeds: NSeeds | Sequence[Seed] = 5, processes: Count | None = None) -> Seeds:
    """Simulate a training run with several seeds in parallel.

    seeds      list of seeds, or a number of consecutive seeds that start with the seed of the experiment
    processes  number of processes; None: one per core; 1: simulate in this process. The results do not depend on the
               number of processes. A script that uses several processes must guard its top-level code with
               ``if __name__ == "__main__":``, because each process imports the script

    On Ctrl-C, the result contains the seeds that have finished, and ``interrupted`` is set. Seeds that reach a target
    early finish early, so times to accuracy of such a result are too low on average.

    Raises ConfigError if the experiment is timing-only (it does not train a model), or if it cannot be pickled and so
    cannot be sent to other processes.
    """
    if experiment.training is None:
        raise ConfigError("simulate_seeds: the experiment has no training; set training=ddlsim.Training(...)")
    chosen = range(experiment.seed, experiment.seed + seeds) if isinstance(seeds, int) else tuple(seeds)
    if not chosen or len(set(chosen)) < len(chosen):
        raise ConfigError(f"seeds = {seeds!r}: must contain at least one seed, without duplicates")
    n_processes = min(len(chosen), os.cpu_count() or 1 if processes is None else processes)
    wanted = [experiment.with_(seed=seed) for seed in chosen]
    seed_runs = map(_one, wanted) if n_processes == 1 else _in_processes(wanted, n_processes)
    runs, interrupted = until_interrupt(_shown(seed_runs, len(wanted)))
    return Seeds(experiment, tuple(runs), interrupted)


def _one(experiment: Experiment) -> SeedRun:
    result = complete(experiment)
    assert result.monitor is not None
    names = ("end_time", "throughput", "nbytes_sent", "mean_staleness", "stop_reason")
    return SeedRun(experiment.seed, tuple(result.evaluations), **{name: getattr(result, name) for name in names})


def _in_processes(experiments: list[Experiment], n_processes: int) -> Iterator[SeedRun]:
    try:
        pickle.dumps(experiments[0])
    except Exception as error:  # pickling calls arbitrary code
        raise ConfigError(f"the experiment cannot be sent to other processes ({error}); use processes=1") from None
    pool = Processes(n_processes, _one, option="processes")
    waiting = [pool.submit(experiment) for experiment in experiments]
    finished = False
    try:
        while waiting:
            yield waiting.pop(0).result()
        finished = True
    except KeyboardInterrupt:
        yield from (future.result() for future in waiting if future.done() and future.exception() is None)
        raise
    except ProcessDied as death:
        raise DdlsimError(f"processes: a process has died: {death}; use fewer processes, or processes=1") from None
    finally:
        pool.close(at_once=not finished)


def _shown(seed_runs: Iterator[SeedRun], n: int) -> Iterator[SeedRun]:
    if not sys.stderr.isatty():
        return seed_runs
    from ddlsim.report.progress import counted

    return counted(seed_runs, n, "seeds")
