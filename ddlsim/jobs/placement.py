"""Search for placements and start times with which jobs slow each other down least."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ddlsim.arguments import Count, Seed, checked
from ddlsim.cluster import Cluster, load_cluster
from ddlsim.cluster.cluster import ClusterLike
from ddlsim.errors import ConfigError
from ddlsim.jobs.jobs import Jobs
from ddlsim.jobs.simulate import JobLike, simulate_jobs
from ddlsim.printable import shown
from ddlsim.reliability import Background
from ddlsim.run.experiment import Job, machine_names, placed
from ddlsim.run.simulate import complete
from ddlsim.streams import stream
from ddlsim.ties import tie
from ddlsim.units import si

if TYPE_CHECKING:
    import pandas as pd

#: tried starts of a job, as fractions of the longest step
SHIFTS = 8
Places = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Placement:
    """A placement that was tried.

    how        how it was generated
    places     positions of each job's devices in ``cluster.workers``
    starts     start of each job, in s
    slowdowns  step time of each job, relative to the job alone on neighbouring devices
    """

    how: str
    places: Places
    starts: tuple[float, ...]
    slowdowns: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean slowdown, by which placements are compared."""
        return float(np.mean(self.slowdowns))


@dataclass(frozen=True, eq=False, repr=False)
class Placements:
    """The results of :func:`ddlsim.place`.

    cluster      cluster on which the jobs were placed
    given        jobs and background traffic, as passed by the caller
    tried        all simulated placements, in order
    best         the placement with the smallest mean slowdown
    interrupted  whether Ctrl-C ended the search early
    """

    cluster: Cluster
    given: tuple[Job | Background, ...]
    tried: tuple[Placement, ...]
    best: Placement
    interrupted: bool = False

    @property
    def jobs(self) -> list[Job | Background]:
        """The jobs with the best devices and start times, as arguments for :func:`ddlsim.simulate_jobs`."""
        moved = _moved([job for job in self.given if isinstance(job, Job)], self.best.places, self.best.starts)
        return [*moved, *(flow for flow in self.given if isinstance(flow, Background))]

    @cached_property
    def table(self) -> pd.DataFrame:
        """Table with one row per simulated placement, the best first.

        Columns: how the placement was generated, mean slowdown, worst slowdown, and the slowdown of each job.
        """
        import pandas as pd

        names = [job.name for job in self.given if isinstance(job, Job)]
        ranked = sorted(self.tried, key=lambda placement: placement.mean)
        rows = [(placement.how, placement.mean, max(placement.slowdowns), *placement.slowdowns) for placement in ranked]
        return pd.DataFrame(rows, columns=["how", "mean", "worst", *names])

    def rows(self) -> list[list[str]]:
        """Return the best placement of each kind as lists of strings, headings first."""
        kinds: dict[str, Placement] = {}
        for placement in sorted(self.tried, key=lambda placement: placement.mean):
            kinds.setdefault(placement.how, placement)
        rows = ([how, f"{placement.mean:.3f}", f"{max(placement.slowdowns):.3f}"] for how, placement in kinds.items())
        return [["placement", "mean slowdown", "worst"], *rows]

    def where(self) -> list[str]:
        """Return one line per job: its machines and start time in the best placement."""
        lines = []
        for job in (item for item in self.jobs if isinstance(item, Job)):
            names = ", ".join(machine_names(self.cluster, job.listed))
            lines.append(f"{job.name}: on {names}, from {si(job.start, 'time'):.6g} s")
        return lines

    @property
    def _title(self) -> str:
        until = ", interrupted" * self.interrupted
        return f"{len(self.tried)} placements tried on {self.cluster.name}{until}; best: {self.best.how}"

    def __str__(self) -> str:
        from ddlsim.text_tables import aligned

        return "\n".join([shown(self._title), *aligned(self.rows(), left={0}), *map(shown, self.where())])

    def _repr_html_(self) -> str:
        from ddlsim.notebook import grid, lines, page

        return page(self._title, grid(self.rows(), left={0}), lines(self.where()))

    def __repr__(self) -> str:
        return f"<Placements: {len(self.tried)} tried, best {self.best.how}, mean slowdown {self.best.mean:.4f}>"


@checked
def place(
    jobs: Sequence[JobLike],
    cluster: ClusterLike | None = None,
    *,
    tries: Count = 30,
    shift: bool = False,
    seed: Seed = 0,
) -> Placements:
    """Search for the placement of concurrent jobs that minimizes their mean slowdown.

    jobs     jobs and background traffic, as for :func:`ddlsim.simulate_jobs`. Background traffic and jobs that list
             their devices are not moved
    cluster  cluster for all jobs; None: the first job's cluster
    tries    number of placements to simulate: packed, spread, some random ones, then variations of the best placement
             that move one worker or swap two
    shift    whether to also try delaying the start of jobs by fractions of a step, so that the communication phases of
             jobs that share a link interleave (Rajasekaran et al. 2024, "CASSINI: Network-Aware Job Scheduling in
             Machine Learning Clusters", NSDI)
    seed     seed of the random placements

    The slowdown of a job is its step time (for training jobs, the duration of the run) while all jobs run, divided by
    its step time on neighbouring devices of an otherwise empty cluster. On Ctrl-C, the best of the placements tried so
    far is returned. Raises ConfigError if the jobs do not fit on the cluster together.
    """
    real_jobs = [job for job in jobs if isinstance(job, Job)]
    if not real_jobs:
        raise ConfigError("place: jobs: must contain at least one ddlsim.Job")
    loaded = load_cluster(real_jobs[0].experiment.cluster if cluster is None else cluster)
    loaded = loaded.sampled(real_jobs[0].experiment.seed)
    real_jobs = [
        dataclasses.replace(job, experiment=job.experiment.with_(cluster=loaded), name=job.name or f"job {number}")
        for number, job in enumerate(real_jobs, 1)
    ]
    search = _Search(loaded, real_jobs, [flow for flow in jobs if isinstance(flow, Background)], seed)
    interrupted = False
    try:
        search.places(tries)
        if shift:
            search.shifts()
    except KeyboardInterrupt:
        if not search.tried:
            raise
        interrupted = True
    return Placements(loaded, (*real_jobs, *search.traffic), tuple(search.tried), search.best, interrupted)


def _moved(jobs: Sequence[Job], places: Places, starts: Sequence[float]) -> list[Job]:
    return [
        dataclasses.replace(job, experiment=job.experiment.with_(workers=len(devices)), placement=devices, start=start)
        for job, devices, start in zip(jobs, places, starts, strict=True)
    ]


class _Search:
    """A search in progress: the placements tried, and the best of them."""

    def __init__(self, cluster: Cluster, jobs: Sequence[Job], traffic: Sequence[Background], seed: int) -> None:
        self.cluster, self.jobs, self.traffic, self.seed = cluster, list(jobs), list(traffic), seed
        self.tried: list[Placement] = []
        self._seen: set[tuple[Places, tuple[float, ...]]] = set()
        self.starts = tuple(si(job.start, "time") for job in jobs)
        self.fixed = [job.listed for job in jobs]
        self.free = set(range(len(cluster.workers))).difference(*self.fixed)
        everywhere = range(len(cluster.workers))
        packed = [placed(cluster, everywhere, job.n_workers(len(everywhere)), "packed") for job in jobs]
        alone = [complete(job.experiment.with_(workers=devices)) for job, devices in zip(jobs, packed, strict=True)]
        #: time of a step in s or, for training runs, the duration of the run
        self.alone = [one.step_time if one.experiment.training is None else one.end_time for one in alone]

    @property
    def best(self) -> Placement:
        least = min(placement.mean for placement in self.tried)
        return next(placement for placement in self.tried if tie(placement.mean, least))  # the first of those that tie

    def places(self, tries: int) -> None:
        """Try `tries` placements, or all if there are fewer."""
        rng = stream(self.seed, 0, "places")
        movable = [number for number, devices in enumerate(self.fixed) if not devices]
        for how in ("packed", "spread"):
            self._try(how, self._placed(how, 0), self.starts)
        for draw in range(max(0, tries - 2) // 3 if movable else 0):
            self._try("random", self._placed("random", 1 + draw), self.starts)
        misses = 0
        while movable and len(self.tried) < tries and misses < 100:
            changed = self._changed(self.best.places, movable, rng)
            before = len(self.tried)
            self._try("improved", changed, self.starts)
            misses = 0 if len(self.tried) > before else misses + 1

    def shifts(self) -> None:
        """Try to delay one job after the other by fractions of the longest step."""
        step = max(seconds * slow for seconds, slow in zip(self.alone, self.best.slowdowns, strict=True))
        places, starts = self.best.places, list(self.starts)
        for number in range(1, len(self.jobs)):
            begin = starts[number]
            for part in range(1, SHIFTS):
                later = [*starts[:number], begin + part * step / SHIFTS, *starts[number + 1 :]]
                self._try("shifted", places, tuple(later))
            starts = list(self.best.starts)

    # ------------------------------------------------------------ inside

    def _try(self, how: str, places: Places, starts: tuple[float, ...]) -> None:
        if (places, starts) in self._seen:
            return
        self._seen.add((places, starts))
        jobs: Jobs = simulate_jobs([*_moved(self.jobs, places, starts), *self.traffic], self.cluster)
        if jobs.interrupted:
            raise KeyboardInterrupt
        times = [
            jobs.concurrent_step_time(ran.name) if ran.result.experiment.training is None else ran.result.end_time
            for ran in jobs.runs
        ]
        slow = tuple(seconds / alone for seconds, alone in zip(times, self.alone, strict=True))
        self.tried.append(Placement(how, places, starts, slow))

    def _placed(self, how: str, draw: int) -> Places:
        free, places = set(self.free), []
        for job, devices in zip(self.jobs, self.fixed, strict=True):
            chosen = devices
            if not devices:
                n = job.n_workers(len(self.cluster.workers))
                try:
                    chosen = tuple(placed(self.cluster, free, n, how, self.seed + draw))
                except ConfigError as error:
                    raise ConfigError(f"place: job {job.name!r}: {error}; all jobs must run at the same time") from None
            free -= set(chosen)
            places.append(chosen)
        return tuple(places)

    def _changed(self, places: Places, movable: Sequence[int], rng: np.random.Generator) -> Places:
        """Return places with one worker moved, in an order that suits the links."""
        order = {place: i for i, place in enumerate(self.cluster.locality_order(self.cluster.workers).tolist())}
        job_of = {place: number for number in movable for place in places[number]}
        free = self.free - set(job_of)
        number = movable[int(rng.integers(len(movable)))]
        here = places[number][int(rng.integers(len(places[number])))]
        others = sorted((free | set(job_of)) - set(places[number]))
        if not others:
            return places
        there = others[int(rng.integers(len(others)))]
        swap = {here: there, there: here}
        changed = [
            tuple(sorted((swap.get(place, place) for place in group), key=order.__getitem__)) if i in movable else group
            for i, group in enumerate(places)
        ]
        return tuple(changed)
