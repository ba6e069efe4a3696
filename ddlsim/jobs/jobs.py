"""`Jobs`: the results of several jobs on one cluster."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ddlsim.arguments import Count, NotNegative, checked
from ddlsim.cluster import Cluster
from ddlsim.cluster.cluster import Floats
from ddlsim.errors import ConfigError, SuggestsAttributes, unknown_name
from ddlsim.output_files import write_text
from ddlsim.printable import shown
from ddlsim.readable import count, seconds, si
from ddlsim.reliability import Background
from ddlsim.run.experiment import Job, machine_names
from ddlsim.run.result import Result, link_names
from ddlsim.run.simulate import complete

if TYPE_CHECKING:
    import matplotlib.axes
    import pandas as pd


class Ran(NamedTuple):
    """A job that has run: its devices, and when it arrived, started and ended.

    places  positions in ``cluster.workers``
    came    arrival, s on the cluster's clock, like ``start`` and ``end``
    result  its result, with times counted from its start
    """

    job: Job
    name: str
    places: tuple[int, ...]
    came: float
    start: float
    end: float
    result: Result


@dataclass(frozen=True, eq=False, repr=False)
class Jobs(SuggestsAttributes):
    """The results of :func:`ddlsim.simulate_jobs`. Times are in s, sizes in bytes.

    runs            one run per job, in the order of the jobs
    traffic         the background traffic
    goodputs        average rate of each background flow, in bytes/s
    cluster         the shared cluster
    end_time        time at which the last job ended
    channel_nbytes  bytes carried by each channel, shape (n_channels,)
    channel_busy    time during which each channel carried data, shape (n_channels,)
    interrupted     whether the simulation was stopped with Ctrl-C

    Printing the results does not start a simulation. Reading :attr:`alone`, or any value derived from it, simulates
    each job on its own.
    """

    runs: tuple[Ran, ...]
    traffic: tuple[Background, ...]
    goodputs: tuple[float, ...]
    cluster: Cluster
    end_time: float
    channel_nbytes: Floats
    channel_busy: Floats
    interrupted: bool = False

    def __len__(self) -> int:
        return len(self.runs)

    @property
    def names(self) -> list[str]:
        """Names of the jobs."""
        return [ran.name for ran in self.runs]

    def __getitem__(self, name: str) -> Result:
        """Return the result of a job. Raises ConfigError for an unknown name."""
        for ran in self.runs:
            if ran.name == name:
                return ran.result
        raise unknown_name("job", name, self.names, "jobs")

    @checked
    def concurrent_step_time(self, name: str) -> float:
        """Return a job's mean step time while all jobs run, in s.

        The mean is over the steps after the warm-up that lie entirely in the time when all jobs run. If there are none,
        it is over all steps of the job. Raises ConfigError for an unknown name.
        """
        (ran,) = [ran for ran in self.runs if ran.result is self[name]]
        first, last = max(ran.start for ran in self.runs), min(ran.end for ran in self.runs)
        times = ran.start + np.array([time for time, _ in ran.result.measured_updates])
        inside = (times[:-1] >= first * (1.0 - 1e-12)) & (times[1:] <= last * (1.0 + 1e-12))
        steps = np.diff(times)[inside]
        return float(steps.mean()) * ran.result.updates_per_step if len(steps) else ran.result.step_time

    # ------------------------------------------------------------ against each alone

    @cached_property
    def alone(self) -> dict[str, Result]:
        """Baselines: the result of each job if it runs alone on the same devices. They are simulated on first use."""
        return {ran.name: complete(ran.result.experiment) for ran in self.runs}

    @cached_property
    def slowdowns(self) -> dict[str, float]:
        """Slowdown of each job: its step time (for training jobs, its total time) relative to its baseline."""

        def slowdown(result: Result, alone: Result) -> float:
            learns = result.experiment.training is not None
            return result.end_time / alone.end_time if learns else alone.throughput / result.throughput

        return {ran.name: slowdown(ran.result, self.alone[ran.name]) for ran in self.runs}

    @property
    def fairness(self) -> float:
        """Jain's fairness index of the jobs' speeds relative to their baselines (Jain, Chiu and Hawe 1984).

        The index is 1 if all jobs are slowed down equally, and 1 / n if one of n jobs gets everything.
        """
        speeds = np.array([1.0 / slowdown for slowdown in self.slowdowns.values()])
        return float(speeds.sum() ** 2 / (len(speeds) * (speeds**2).sum()))

    # ------------------------------------------------------------ tables

    @cached_property
    def table(self) -> pd.DataFrame:
        """Table with one row per job. The baselines are simulated on first use.

        Columns: workers, machines, start, end and waited (in s; waited is the time until devices were free), step_time
        and step_time_alone (in s), throughput (in samples/s), slowdown.
        """
        import pandas as pd

        rows = [
            {
                "job": ran.name,
                "workers": len(ran.places),
                "machines": ", ".join(self.machines(ran)),
                "start": ran.start,
                "end": ran.end,
                "waited": ran.start - ran.came,
                "step_time": ran.result.step_time,
                "step_time_alone": self.alone[ran.name].step_time,
                "throughput": ran.result.throughput,
                "slowdown": self.slowdowns[ran.name],
            }
            for ran in self.runs
        ]
        return pd.DataFrame(rows).set_index("job")

    def machines(self, ran: Ran) -> list[str]:
        """Return the names of the machines on which a job ran."""
        return machine_names(self.cluster, ran.places)

    @cached_property
    def links(self) -> pd.DataFrame:
        """Table with one row per directed link.

        Columns: source, target, kind, the bytes of each job, the bytes of all background traffic, utilisation (share of
        the capacity), busy (share of the time).
        """
        import pandas as pd

        cluster = self.cluster
        channel, columns = link_names(cluster)
        shares: dict[str, Floats] = {ran.name: ran.result.channel_nbytes[channel] for ran in self.runs}
        carried = self.channel_nbytes[channel]
        columns |= shares
        if self.traffic:
            columns["background"] = np.maximum(carried - sum(shares.values()), 0.0)
        columns["utilisation"] = carried / (cluster.channel_capacity[channel] * self.end_time)
        columns["busy"] = self.channel_busy[channel] / self.end_time
        return pd.DataFrame(columns)

    # ------------------------------------------------------------ output

    def to_dict(self) -> dict[str, object]:
        """Return the results as a dictionary of plain values.

        It contains slowdowns only if the baselines have been simulated.
        """
        return {
            "cluster": self.cluster.name,
            "end_time": self.end_time,
            "jobs": [
                {
                    "name": ran.name,
                    "places": list(ran.places),
                    "came": ran.came,
                    "start": ran.start,
                    "end": ran.end,
                    **({"slowdown": self.slowdowns[ran.name]} if self._knows_alone else {}),
                    "result": ran.result.to_dict(),
                }
                for ran in self.runs
            ],
            "background": [
                {"name": flow.label, "goodput": goodput}
                for flow, goodput in zip(self.traffic, self.goodputs, strict=True)
            ],
        }

    @checked
    def to_json(self, path: str | Path | None = None) -> str:
        """Return the results as JSON text, and write it to `path` if given."""
        text = json.dumps(self.to_dict(), indent=2)
        if path is not None:
            write_text(path, text + "\n")
        return text

    def rows(self) -> list[list[str]]:
        """Return the table as lists of strings, with the headings first.

        It includes baselines only if they have been simulated.
        """
        waits = any(ran.start > ran.came for ran in self.runs)
        alone = ["alone", "slowdown"] * self._knows_alone
        rows = [["job", "workers", "start", *["waited"] * waits, "end", "step", *alone, "samples/s"]]
        for ran in self.runs:
            times = [seconds(ran.start), *[seconds(ran.start - ran.came)] * waits, seconds(ran.end)]
            times.append(seconds(ran.result.step_time))
            if self._knows_alone:
                times += [seconds(self.alone[ran.name].step_time), f"{self.slowdowns[ran.name]:.3f}"]
            rows.append([ran.name, str(len(ran.places)), *times, f"{ran.result.throughput:.4g}"])
        return rows

    @property
    def _knows_alone(self) -> bool:
        return "alone" in self.__dict__

    def remarks(self) -> list[str]:
        """Return the lines below the table: background traffic, and fairness if the baselines have been simulated."""
        flows = zip(self.traffic, self.goodputs, strict=True)
        lines = [f"background {flow.label}: {si(8.0 * goodput, 'bit/s')} on average" for flow, goodput in flows]
        if not self._knows_alone:
            lines.append("no baselines yet: jobs.slowdowns simulates each job alone and adds them to this table")
        elif len(self.runs) > 1:
            lines.append(f"fairness {self.fairness:.3f} (Jain's index of speeds relative to the baselines)")
        return lines

    def __str__(self) -> str:
        from ddlsim.text_tables import aligned

        texts = [*self._misfits, shown(self._title), *aligned(self.rows(), left={0}), *map(shown, self.remarks())]
        return "\n".join(texts)

    @property
    def _misfits(self) -> list[str]:
        results = ((ran.name, ran.result) for ran in self.runs)
        return [shown(f"{name}: does not fit: {one.warnings[0]}") for name, one in results if not one.fits]

    @property
    def _title(self) -> str:
        until = f"until {seconds(self.end_time)}{', interrupted' * self.interrupted}"
        return f"{count(len(self.runs), 'job')} on {self.cluster.name}, {until}"

    def _repr_html_(self) -> str:
        from ddlsim.notebook import grid, lines, page

        return page(self._title, lines(self._misfits), grid(self.rows(), left={0}), lines(self.remarks()))

    def __repr__(self) -> str:
        return f"<Jobs: {', '.join(self.names)} on {self.cluster.name}, {self.end_time:.6g} s>"

    @checked
    def plot_timeline(
        self,
        path: str | Path | None = None,
        *,
        start: NotNegative | None = None,
        end: NotNegative | None = None,
        n_workers: Count = 4,
    ) -> matplotlib.axes.Axes:
        """Draw the activity of the jobs between `start` and `end` (s), one band per job.

        See :func:`ddlsim.report.gantt.jobs_timeline`. Raises ConfigError unless the jobs were simulated with
        ``timeline=True``.
        """
        from ddlsim.report.gantt import jobs_timeline

        if not self.runs[0].result.recorder.keep_spans:
            raise ConfigError("plot_timeline: the timeline was not recorded; use simulate_jobs(..., timeline=True)")
        bands = [(ran.name, ran.start, ran.result) for ran in self.runs]
        return jobs_timeline(bands, path, start=start, end=end, n_workers=n_workers)
