"""`calibrate`: fit a cluster to measurements, with the uncertainty of the fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import numpy as np

from ddlsim import printable
from ddlsim.arguments import Count, Positive, checked, number
from ddlsim.cluster import Cluster, ClusterLike, load_cluster
from ddlsim.cluster.calibrated import (
    INSIDE,
    PARAMETERS,
    Beyond,
    beyond,
    current_parameters,
    operation_kind,
    unmeasured,
    with_parameters,
)
from ddlsim.cluster.details import transport_of, with_spread
from ddlsim.errors import ConfigError, unknown_name
from ddlsim.imports.text import LeftOut
from ddlsim.measure import Measurement
from ddlsim.measure.table import OPERATIONS
from ddlsim.readable import count, percent, seconds, si, size
from ddlsim.run.seeds import t_quantile
from ddlsim.schema import refuse_code
from ddlsim.text_tables import aligned
from ddlsim.validation.cases import Case, candidates, chosen_algorithms, fewest_hosts, make_case
from ddlsim.validation.compute_fit import ComputeFit, fit_compute, step_text
from ddlsim.validation.curves import Curve, Interval, curve_time, fit_curve, interval_at
from ddlsim.validation.jitter_fit import JitterFit, fit_jitter
from ddlsim.validation.links import LinkRow, fit_links
from ddlsim.validation.log_fit import Floats, LogFit, fit_noise, minus_log_likelihood, sampled, t_factors, wider
from ddlsim.validation.sources import Reader, read_sources

# ---------------------------------------------------------------- choice of measurements and algorithms

#: backend -> transport; others have their own, and rows without a backend match any
TRANSPORTS = {"icmp": "tcp", "gloo": "tcp", "numpy": ""}
#: preferred transports, if several were measured
PREFERRED = ("nccl", "mpi", "tcp")
#: maximum number of rows for choosing a collective's algorithm, which takes one fit per algorithm
MOST_ROWS = 16
#: mean error of the fitted measurements above which a fit is bad: three times the usual error
BAD_FIT = 0.1

WHERE = {"between": "between hosts", "inside": "inside a host"}


def placed(
    rows: Sequence[Measurement], cluster: Cluster, algorithms: Mapping[str, str] | None
) -> tuple[list[LinkRow], list[str]]:
    """Return the rows of messages with their cases on the cluster, and notes. Collectives use the algorithm set in
    `algorithms`, or else the most likely one; rows that do not fit the cluster are skipped."""
    groups: dict[tuple[str, str, str], list[LinkRow]] = {}
    left_out = LeftOut(ConfigError)
    for row in rows:
        if row.experiment in ("point_to_point", "collective"):
            with left_out:
                link = LinkRow(row, make_case(row, cluster, {row.operation: candidates(row, algorithms)[0]}))
                groups.setdefault((row.operation, row.backend, link.link_class), []).append(link)
    refused = left_out.errors
    if refused and not groups:
        raise refused[0]
    links: list[LinkRow] = []
    notes = [f"{len(refused)} rows left out: {refused[0]}"] if refused else []
    for (operation, backend, link_class), members in groups.items():
        likeliest, why = _likeliest(cluster, members, candidates(members[0].row, algorithms))
        links += likeliest
        notes += [f"{operation} {backend} {WHERE[link_class]}: {why}"] if why else []
    return links, notes


def _likeliest(cluster: Cluster, links: list[LinkRow], options: Sequence[str]) -> tuple[list[LinkRow], str]:
    """Return the rows of one operation for the algorithm whose fit is the most likely, and how it was chosen."""
    usual = links[0].case.algorithm
    if usual == options[-1]:
        return links, ""
    few = sorted(links, key=lambda link: link.row.nbytes)[:: -(-len(links) // MOST_ROWS)]
    seconds = np.array([link.row.median_s for link in few])
    unlikely: dict[str, float] = {}
    for option in dict.fromkeys((usual, *options[1:])):
        try:
            errors = fit_links(cluster, _by(option, few, cluster))[0].errors
        except ConfigError:  # too few sizes, which the fit itself reports
            return links, ""
        unlikely[option] = minus_log_likelihood(errors, seconds, *fit_noise(errors, seconds))
    best = min(unlikely, key=lambda option: unlikely[option])  # among equals, the default
    costs = ", ".join(f"{option} {value:.1f}" for option, value in unlikely.items())
    runs = "" if best == usual else f"; runs use {usual} unless they set algorithm = {best!r}"
    return _by(best, links, cluster), f"fitted as {best}, the most likely one (-ln of the likelihood: {costs}){runs}"


def _by(algorithm: str, links: Sequence[LinkRow], cluster: Cluster) -> list[LinkRow]:
    return [LinkRow(link.row, make_case(link.row, cluster, {link.row.operation: algorithm})) for link in links]


def for_links(links: Sequence[LinkRow], named: set[str]) -> Iterator[tuple[list[LinkRow], list[list[LinkRow]]]]:
    """Yield for each class of links (inside hosts first, as routes between hosts also use them) the rows for its fit,
    and the rows of each other transport."""
    for link_class in ("inside", "between"):
        by_transport: dict[str, list[LinkRow]] = {}
        for row in links:
            if row.link_class == link_class:
                by_transport.setdefault(TRANSPORTS.get(row.row.backend, row.row.backend), []).append(row)
        shared = by_transport.pop("", [])
        order = sorted(by_transport, key=lambda name: PREFERRED.index(name) if name in PREFERRED else len(PREFERRED))
        preferred, *others = [by_transport[name] for name in order] or [[]]
        if shared or preferred:
            yield _purest([*shared, *preferred], named), [_purest(rows, named) for rows in others]


def _purest(rows: list[LinkRow], named: set[str]) -> list[LinkRow]:
    """Return one-way messages of single pairs, else all messages, else collectives; and those with a set algorithm."""
    messages = [row for row in rows if row.row.experiment == "point_to_point"]
    single = [row for row in messages if row.row.operation == "one_way" and row.row.n_pairs == 1]
    first = next((group for group in (single, messages) if len({r.row.nbytes for r in group}) > 1), messages)
    first = first or [row for row in rows if row.row.operation not in named]
    return first + [row for row in rows if row.row.operation in named]


def contradictions(
    before: Cluster, after: Cluster, kept: Sequence[LinkRow], others: Sequence[Sequence[LinkRow]]
) -> Iterator[str]:
    """Yield a warning for each transport whose rows are far from the predictions of the links `after` the fit."""
    for rows in others:
        off = sum(abs(row.case.seconds(after) / row.row.median_s - 1.0) for row in rows) / len(rows)
        if off < BAD_FIT:
            continue
        try:
            values = fit_links(before, rows)[0].values
            alone = f". Fitted separately: {', '.join(f'{name} {shown(name, x)}' for name, x in values.items())}"
        except ConfigError:  # a single message size
            alone = ""
        used, name = (", ".join(dict.fromkeys(r.row.backend for r in group if r.row.backend)) for group in (kept, rows))
        yield (
            f"warning: {len(rows)} measurements by {name} contradict the links {WHERE[kept[0].link_class]}, which were "
            f"fitted to {len(kept)} measurements by {used}: mean error {percent(off)}{alone}. Runs use {used}; for "
            f"{name}, calibrate with --backend {rows[0].row.backend}"
        )


# ---------------------------------------------------------------- calibration

#: maximum number of the worst residuals in the text, and beginning of the most important notes
N_WORST, WARNING = 3, "warning: "
#: minimum size for the reduction rate: smaller buffers are reduced in caches, and starting takes part of the time
LEAST_REDUCTION = 64 * 1024
#: fit of a class of links, parameters that follow from the kind of the links, and the rows of the fit
_Fit: TypeAlias = tuple[LogFit, dict[str, float], list[LinkRow]]


@dataclass(frozen=True)
class Parameter:
    """A fitted parameter, in s or bytes/s, with its 95 % confidence interval from `low` to `high`.

    name      name in :data:`ddlsim.cluster.calibrated.PARAMETERS`
    value     best estimate
    file      value in the cluster file before the fit
    nbytes    smallest and largest message size used in the fit; predictions for other sizes are extrapolations
    informed  share of the information about this parameter that comes from measurements rather than from the prior
    prior     tuple (expected value, factor). With probability 2/3, the true value and the expected value differ by less
              than `factor`; None: no prior
    bounds    lower and upper limit of the fit; None: no limits
    scatter   tuple (spread, dof, absolute) that describes the scatter of the measurements used in the fit, as in
              :class:`Calibration`
    """

    name: str
    value: float
    low: float
    high: float
    file: float
    nbytes: tuple[int, int]
    informed: float = 1.0
    prior: tuple[float, float] | None = None
    bounds: tuple[float, float] | None = None
    scatter: tuple[float, float, float] = (0.0, 1.0, 0.0)

    @property
    def link_class(self) -> str:
        """Location of the links: "between" or "inside" hosts; "" for parameters of hosts."""
        return self.name.rpartition(".")[0]

    @property
    def wider(self) -> float:
        """Ratio of the widths of a t interval and a normal interval, for the degrees of freedom of the fit."""
        return wider(self.scatter[1])


@dataclass(frozen=True)
class Residual:
    """A measurement and its prediction on the calibrated cluster.

    operation  the measured operation
    backend    communication library; "": unknown
    n_ranks    number of ranks
    n_hosts    number of machines
    nbytes     size of the message or buffer in bytes
    measured   measured time in s
    predicted  predicted time in s
    fitted     whether the measurement was used to fit the parameters
    """

    operation: str
    backend: str
    n_ranks: int
    n_hosts: int
    nbytes: int
    measured: float
    predicted: float
    fitted: bool

    @property
    def error(self) -> float:
        """Relative error of the time: predicted over measured, minus 1."""
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True, eq=False)
class Calibration:
    """A calibrated `cluster` with the uncertainty of its parameters.

    parameters   fitted parameters, named as in :data:`ddlsim.cluster.calibrated.PARAMETERS`
    covariance   covariance of the natural logarithms of the n parameters, shape (n, n)
    spread, dof  standard deviation of ln(predicted / measured), and its degrees of freedom. Both refer to inter-host
                 links, or to intra-host links if no inter-host link was measured. `Parameter.scatter` holds the
                 corresponding values for the measurements used to fit that parameter
    absolute     additional scatter in s that does not depend on the message size and therefore matters only for short
                 messages
    ranks        smallest and largest number of ranks in the link measurements
    curves       measured correction factors for simulated operation times, as functions of the message size. They are
                 used only by :meth:`time` and by runs with ``cost = "calibrated"``
    compute      step time as a function of the batch size, for each model
    jitter       distribution of step times; None: not measured
    residuals    measurements that fit on the cluster, each with its prediction (made without the curves)
    sources      files of the measurements
    notes        notes and warnings on the fit
    versions     software versions recorded in the measurements

    Printing the calibration shows a summary; :meth:`save` writes a calibrated cluster file.
    """

    cluster: Cluster
    parameters: tuple[Parameter, ...]
    covariance: Floats
    spread: float
    dof: float
    absolute: float = 0.0
    ranks: tuple[int, int] = (2, 2)
    curves: tuple[Curve, ...] = ()
    compute: tuple[ComputeFit, ...] = ()
    jitter: JitterFit | None = None
    residuals: tuple[Residual, ...] = ()
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()

    @checked
    def time(
        self, operation: str, nbytes: Annotated[float, number(1.0)], n_ranks: Count = 2,
        n_hosts: Count | None = None, *, backend: str = "", algorithm: str | None = None, version: str = "",
        allow_code: bool = False,
    ) -> Interval:  # fmt: skip
        """Predict the time of an operation in :data:`ddlsim.measure.OPERATIONS`, in s.

        The prediction is an interval that contains one further measurement with a probability of 95 %.

        nbytes      size of the message or buffer in bytes
        n_hosts     number of machines; None: as in the measurements with this number of ranks. If there are none, one
                    rank per machine or, on a cluster with fewer machines than ranks, ranks evenly spread over the
                    fewest machines with enough devices
        backend     backend whose curve applies; "" if only one backend was measured
        algorithm   algorithm of a collective, instead of the usual one. The curve is then not used
        version     software version, as in the measurements. The prediction for any other version is an extrapolation
        allow_code  whether the algorithm that the cluster file sets for the curve may be imported code

        If a curve exists for the operation, it is used; otherwise, the operation is simulated on the calibrated
        cluster. Raises ConfigError for an unknown operation, or for more ranks than the cluster has devices.
        """
        operations = [*OPERATIONS["point_to_point"], *OPERATIONS["collective"]]
        if operation not in operations:
            raise unknown_name("operation", operation, operations)
        experiment = "point_to_point" if operation in OPERATIONS["point_to_point"] else "collective"
        same = {r.n_hosts for r in self.residuals if (r.operation, r.n_ranks) == (operation, n_ranks)}
        n_hosts = n_hosts or (same.pop() if len(same) == 1 else fewest_hosts(self.cluster, n_ranks))
        row = Measurement(
            experiment=experiment,
            operation=operation,
            n_ranks=n_ranks,
            median_s=1.0,
            nbytes=round(nbytes),
            backend=backend,
            n_hosts=n_hosts,
        )
        curve = None if algorithm else self._curve(row)
        used = algorithm or (curve.algorithm if curve is not None else "")
        if not (algorithm or allow_code):
            refuse_code(used, "calibration.curves.algorithm")
        algorithms = {operation: used or candidates(row, None)[0]}
        case = LinkRow(row, make_case(row, self.cluster, algorithms))
        kind = operation_kind(operation, case.case.algorithm, transport_of(self.cluster) or backend, nbytes)
        software = Beyond()
        if version and self.versions and version not in self.versions:
            software = unmeasured(f"{version}, measured {', '.join(self.versions)}", kind)
        if curve is not None and not curve.plain:
            outside = software + beyond(nbytes, curve.nbytes, "bytes") + beyond(n_ranks, curve.ranks, "ranks")
            return curve_time(curve, case.case.parts(self.cluster), outside)
        return self.simulated(case.case, software + self._beyond(row, curve, kind))

    def _beyond(self, row: Measurement, curve: Curve | None, kind: str) -> Beyond:
        """Return the extrapolation of an operation's simulation beyond the measurements of the fit."""
        if curve is not None:  # measured, but simulated without a curve
            fitted = row.operation in {r.operation for r in self.residuals if r.fitted}
            misfit = Beyond(self._misfit(row.n_hosts == 1) if fitted else curve.spread**2)
            return misfit + beyond(row.nbytes, curve.nbytes, "bytes") + beyond(row.n_ranks, curve.ranks, "ranks")
        sizes = [end for p in self.parameters for end in p.nbytes if "." in p.name]
        outside = unmeasured(f"{row.operation} was not measured", kind)
        outside += beyond(row.nbytes, sizes, "bytes") if sizes else Beyond()
        return outside + beyond(row.n_ranks, self.ranks, "ranks")

    def _misfit(self, inside: bool) -> float:
        """Return the variance of ln(predicted / measured) of a bad fit. It is model error, not scatter: the link model
        cannot represent the measurements (such as a protocol switch), nor sizes in between."""
        fitted = [r for r in self.residuals if r.fitted and (r.n_hosts == 1) == inside]
        logs = [math.log(r.predicted / r.measured) for r in fitted]
        return sum(log**2 for log in logs) / len(logs) if _bad_fit(fitted) else 0.0

    def _curve(self, row: Measurement) -> Curve | None:
        fitting = [c for c in self.curves if (c.operation, c.inside) == (row.operation, row.n_hosts == 1)]
        fitting = [c for c in fitting if not row.backend or c.backend == row.backend]
        if len(fitting) > 1:
            backends = ", ".join(repr(c.backend) for c in fitting)
            raise ConfigError(f"{row.operation} was measured with several backends; choose one of {backends}")
        return fitting[0] if fitting else None

    def simulated(self, case: Case, outside: Beyond) -> Interval:
        """Return the simulated time of a case, with an interval computed from its sensitivity to each parameter.

        outside  distance of the case from the measurements, which widens the interval
        """
        value = case.seconds(self.cluster)
        slopes = np.zeros(len(self.parameters))
        shares: dict[str, float] = {}  # by class of links; each has the scatter of its own fit
        short = software = 0.0
        now = current_parameters(self.cluster)  # which may have changed
        for i, p in enumerate(self.parameters):
            if self.covariance[i, i] > 0.0:
                step = -1e-3 if PARAMETERS[p.name] == "bandwidth" else 1e-3  # a faster link may not be the bottleneck
                changed = with_parameters(self.cluster, {p.name: now[p.name] * math.exp(step)})
                slopes[i] = math.log(case.seconds(changed) / value) / step
                if p.name.endswith((".latency", ".bandwidth")):
                    shares[p.link_class] = shares.get(p.link_class, 0.0) + abs(slopes[i])
                if p.name.endswith(".latency"):  # each message of a sequence has its own scatter
                    short += max(slopes[i], 0.0) * (p.wider * p.scatter[2]) ** 2 / (value * now[p.name])
                    share = min(p.value / now[p.name], 1.0)  # latency above it was added by hand
                    software += slopes[i] * share
                    slopes[i] *= p.informed + (1.0 - p.informed) * share  # a prior refers to the file's value
                slopes[i] *= p.wider * t_factors(np.array([p.informed]), p.scatter[1])[0]
        outside += Beyond((outside.per_message * software) ** 2)
        variance = float(slopes @ self.covariance @ slopes) + short
        variance += sum((min(shares.get(c, 0.0), 1.0) * spread) ** 2 for c, spread in self.scatter.items())
        return interval_at(value, variance, math.inf, outside)

    @property
    def scatter(self) -> dict[str, float]:
        """Scatter of ln(predicted / measured) for each class of links, scaled for normal 95 % intervals."""
        return {p.link_class: p.wider * p.scatter[0] for p in self.parameters if p.link_class}

    def sampled(self, random: np.random.Generator, *, curves: bool = False, outside: Beyond = INSIDE) -> Cluster:
        """Return the cluster with parameters sampled from their uncertainty.

        curves   True: sample the factors of the curves instead, for runs whose collectives use the curves, because
                 these were fitted together with the best parameters
        outside  distance of the run from the measurements

        In addition to the uncertainty of each parameter, a factor common to all of them represents the scatter around
        the fit and the distance `outside`.
        """
        if curves:
            from ddlsim.validation.calibration_file import attached

            return attached(dataclasses.replace(self, curves=tuple(c.sampled(random) for c in self.curves))).cluster
        if not self.parameters:
            return self.cluster
        moved = sampled(random, self.covariance)
        errors = {link_class: spread * random.standard_normal() for link_class, spread in self.scatter.items()}
        further = math.sqrt(outside.variance) * random.standard_normal() if outside.variance else 0.0
        software = outside.per_message * random.standard_normal() if outside.per_message else 0.0
        values = {}
        now = current_parameters(self.cluster)  # the calibrated values, unless changed since
        for p, move in zip(self.parameters, moved.tolist(), strict=True):
            error = errors.get(p.link_class or "between", 0.0) + further
            slower = {"bandwidth": -error, "time": error}.get(PARAMETERS[p.name], 0.0)
            move *= p.wider * t_factors(np.array([p.informed]), p.scatter[1])[0]
            values[p.name] = now[p.name] * math.exp(move + slower)
            if p.name.endswith(".latency") and software:
                values[p.name] = max(values[p.name] + software * p.value, 0.01 * values[p.name])
        return with_parameters(self.cluster, values)

    @checked
    def compute_of(self, model: str) -> ComputeFit | None:
        """Return the fit of the step times of `model`; None: they were not measured."""
        return next((fit for fit in self.compute if fit.model == model), None)

    @checked
    def save(self, path: str | Path, source: str | Path) -> None:
        """Write a cluster with this calibration to a TOML file.

        path    file to write
        source  path or bundled name of the cluster, with options
        """
        from ddlsim.validation.calibration_file import write_calibration

        write_calibration(self, Path(path), source)

    def __str__(self) -> str:
        _, *parameters = self._cells()
        cells = [(*others, f"(file: {file})") for *others, file in parameters]
        rows = aligned(cells, left=(0, 2, 3), indent=2) if cells else []
        return printable.shown("\n".join([*warnings_of(self), self._title, *rows, *self._lines()]))

    def _repr_html_(self) -> str:
        from ddlsim.notebook import grid, lines, page

        return page(self._title, grid(self._cells(), left=(0,)), lines(self._lines()))

    @property
    def _title(self) -> str:
        return f"calibration of {self.cluster.name}"

    def _cells(self) -> list[tuple[str, str, str, str]]:
        """Return a header and one row per parameter."""
        rows = [("parameter", "value", "interval (95 %)", "file")]
        for p in self.parameters:
            value, low, high, file = (shown(p.name, number) for number in (p.value, p.low, p.high, p.file))
            rows.append((p.name, value, f"[{low}, {high}]", file))
        return rows

    def _lines(self) -> list[str]:
        """Return residuals, curves, compute times, jitter and notes as indented lines."""
        lines = []
        for fitted, what in ((True, "used in the fit"), (False, "not used in the fit")):
            rows = [r for r in self.residuals if r.fitted == fitted]
            if rows:
                mean = sum(abs(r.error) for r in rows) / len(rows)
                worst = sorted(rows, key=lambda r: -abs(r.error))[:N_WORST]
                lines.append(f"  {count(len(rows), 'measurement')} {what}: mean absolute error {percent(mean)}; worst:")
                texts = ((_named(r), seconds(r.measured), percent(r.error, sign="+")) for r in worst)
                lines += [f"    {name}: measured {measured}, {error}" for name, measured, error in texts]
        for c in self.curves:
            factors = ", ".join(f"{f:.3g}" for f in c.per_byte)
            what = f"{c.operation} {c.backend} {'inside a host' if c.inside else 'between hosts'}"
            measured = f"{size(c.nbytes[0])} to {size(c.nbytes[1])}, {_span(c.ranks)} ranks; scatter"
            at = f" from {', '.join(size(s) for s in c.sizes)}" if c.sizes else ""
            if c.plain:
                text = f"{what}: as simulated, measured for {measured}"
            elif c.left_out:
                text = f"curve of {what}: through all {len(c.sizes) + 2} sizes from {measured} between them"
            else:
                text = f"curve of {what}: latency x {c.per_message:.3g}, time of the bytes x {factors}{at}"
                text += f"; valid for {measured}"
            lines.append(f"  {text} {percent(c.spread)}")
        for fit in self.compute:
            batches = _span((fit.batch_sizes[0], fit.batch_sizes[-1]))
            lines.append(
                f"  step of {fit.model}: {step_text(fit.c0, fit.c1)}, measured at batch {batches}, "
                f"scatter {percent(fit.spread)}"
            )
        if self.jitter is not None:
            lines.append(f"  jitter: {self.jitter}")
        lines += [f"  note: {note}" for note in self.notes if not note.startswith(WARNING)]
        return lines


def shown(name: str, value: float) -> str:
    """Return a parameter's value with a unit, as in cluster files."""
    if not math.isfinite(value):
        return "no limit"
    if PARAMETERS[name] == "time":
        return seconds(value)
    if PARAMETERS[name] in ("bytes", "share"):
        return f"{value:.4g}{' B' if PARAMETERS[name] == 'bytes' else ''}"
    return si(8.0 * value, "bit/s") if name != "reduce_bandwidth" else si(value, "B/s")


def warnings_of(calibration: Calibration) -> list[str]:
    """Return the most important warnings: contradictory measurements and bad fits."""
    return sorted((note for note in calibration.notes if note.startswith(WARNING)), key=lambda n: "contradict" not in n)


def _named(row: Residual) -> str:
    backend = f" {row.backend}" if row.backend else ""
    return f"{row.operation}{backend}, {count(row.n_ranks, 'rank')} on {count(row.n_hosts, 'host')}, {size(row.nbytes)}"


def _span(ends: tuple[int, int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


@checked
def calibrate(
    measurements: str | Path | Sequence[str | Path | Measurement],
    cluster: ClusterLike,
    *,
    algorithms: Mapping[str, str] | None = None,
    backend: str | None = None,
    n_hosts: Count | None = None,
    model: str | None = None,
    step_times: Iterable[Positive] = (),
    reader: Reader | None = None,
    operation: str | None = None,
    n_ranks: Count | None = None,
    version: str | None = None,
) -> Calibration:
    """Fit the parameters of a cluster to measurements.

    The fit determines the latency and bandwidth of links inside and between hosts, overheads, and the speed of
    reductions. It also determines correction factors as a function of message size, compute times as a function of
    batch size, and the distribution of step times.

    measurements  files or folders in any format that :mod:`ddlsim.measure` or :mod:`ddlsim.imports` reads, or the rows
                  themselves
    cluster       cluster on which the measurements were made
    algorithms    mapping from each kind of collective to the algorithm that the library used. Collectives with a known
                  algorithm contribute to the fit of the links. Others contribute only if there are no point-to-point
                  measurements; their algorithms are then assumed to be those in :data:`ddlsim.validation.ALGORITHMS` (a
                  ring for all-reduce)
    backend       backend of the rows to use ("mpi", "gloo", "nccl", ...). Rows that do not specify a backend are always
                  used
    n_hosts, model, operation, n_ranks, version   values that the files lack (see :func:`ddlsim.imports.to_measurements`
                  and :func:`ddlsim.imports.read_any`)
    step_times    durations of individual steps of one worker, in s, to which the jitter distribution is fitted
    reader        function that takes a path and returns :class:`~ddlsim.imports.Timing` rows, for other file formats

    Raises ConfigError if the measurements do not fit on the cluster or do not determine the parameters. In the latter
    case, the message lists the measurements to add.
    """
    described = load_cluster(cluster)
    loaded = with_spread(described, 0.0)  # measurements between two machines represent average links
    items = [measurements] if isinstance(measurements, str | Path) else list(measurements)
    contents = read_sources(
        items, n_hosts=n_hosts, model=model, reader=reader, operation=operation, n_ranks=n_ranks, version=version
    )
    rows = [row for row in contents.rows if backend is None or row.backend in (backend, "", "numpy")]
    times = [*contents.step_times, *step_times]
    if not rows and not times:
        backends = sorted({row.backend for row in contents.rows})
        raise ConfigError(f"calibration: no measurements with backend {backend!r}; available: {backends}")
    chosen_algorithms(algorithms)  # raises for an unknown name
    if unused := sorted(set(algorithms or ()) - {row.operation for row in rows}):
        raise ConfigError(f"algorithms: {unused[0]} was not measured, so its algorithm has no effect; leave it out")
    links, notes = placed(rows, loaded, algorithms)
    notes = [*contents.notes, *notes]
    result = loaded
    fits: list[_Fit] = []
    for fitted_rows, others in for_links(links, set(algorithms or ())):
        before, free = result, not any("overhead" in other.names for other, _, _ in fits)
        fit, fixed, fit_notes = fit_links(result, fitted_rows, free)
        result = with_parameters(result, {**fixed, **fit.values})
        fits.append((fit, fixed, fitted_rows))
        notes += [*fit_notes, *contradictions(before, result, fitted_rows, others)]
    reduction = _reduction(rows)
    if reduction is not None:
        result = with_parameters(result, {"reduce_bandwidth": 1.0 / reduction.c1})
    parameters, covariance = _parameters(loaded, fits, reduction)
    chosen = [row for _, _, fitted_rows in fits for row in fitted_rows]
    used, counts = {id(row) for row in chosen}, [row.row.n_ranks for row in chosen] or [2]
    ranks = min(counts), max(counts)
    residuals = tuple(
        Residual(m.operation, m.backend, m.n_ranks, m.n_hosts, m.nbytes, m.median_s, seconds, fitted)
        for m, seconds, fitted in ((row.row, row.case.seconds(result), id(row) in used) for row in links)
    )
    notes += [note for i in (1, 0) for note in _bad_fit([r for r in residuals if r.fitted and (r.n_hosts == 1) == i])]
    versions = tuple(dict.fromkeys(row.row.version for row in links if row.row.version))
    scatter = (fits[-1][0].spread, fits[-1][0].dof, fits[-1][0].absolute) if fits else (0.0, 1.0, 0.0)
    curves = _curves(links, result, {fitted_rows[0].link_class: fit.absolute for fit, _, fitted_rows in fits})
    jitter = fit_jitter(times) if times else None
    sources, texts = (tuple(dict.fromkeys(entries)) for entries in (contents.sources, [*notes, *_mixed(links)]))
    if described.details is not None:
        result = with_spread(result, described.details.spread)
    from ddlsim.validation.calibration_file import attached

    fitted = (parameters, covariance, *scatter, ranks, curves, _compute(rows), jitter, residuals)
    return attached(Calibration(result, *fitted, sources, texts, versions))


def _reduction(rows: Sequence[Measurement]) -> ComputeFit | None:
    """Return the line through the reduction times, for the largest measured number of concurrent ranks."""
    reductions = [row for row in rows if row.operation == "reduction"]
    if not reductions:
        return None
    most = max(row.n_ranks for row in reductions)
    reductions = [row for row in reductions if row.n_ranks == most]
    large = [row for row in reductions if row.nbytes >= LEAST_REDUCTION]
    used = large if len(large) > 1 else reductions
    line = fit_compute("reduction", [row.nbytes for row in used], [row.median_s for row in used])
    return line if line.c1 > 0.0 else None


def _parameters(
    cluster: Cluster, fits: Sequence[_Fit], reduction: ComputeFit | None
) -> tuple[tuple[Parameter, ...], Floats]:
    current = current_parameters(cluster)
    parameters: list[Parameter] = []
    covariance = np.zeros((sum(len(f.names) + len(fixed) for f, fixed, _ in fits) + (reduction is not None),) * 2)
    for fit, fixed, rows in fits:
        n, sizes = len(parameters), [row.row.nbytes for row in rows]
        ends, scatter = (min(sizes), max(sizes)), (fit.spread, fit.dof, fit.absolute)
        covariance[n : n + len(fit.names), n : n + len(fit.names)] = fit.covariance
        for i, (name, value) in enumerate(fit.values.items()):
            prior, informed = (fit.priors[i].value, math.exp(fit.priors[i].sd)), float(fit.informed[i])
            before, around = current.get(name, 0.0), fit.interval(name)
            parameters.append(Parameter(name, value, *around, before, ends, informed, prior, fit.bounds[i], scatter))
        for name, value in fixed.items():  # chosen, not fitted
            parameters.append(Parameter(name, value, value, value, current.get(name, 0.0), ends, scatter=scatter))
    if reduction is not None:
        variance = float(reduction.covariance[1, 1]) / reduction.c1**2
        factor = math.exp(t_quantile(reduction.dof) * math.sqrt(variance))
        value = 1.0 / reduction.c1
        ends = (reduction.batch_sizes[0], reduction.batch_sizes[-1])
        before, name = current["reduce_bandwidth"], "reduce_bandwidth"
        parameters.append(Parameter(name, value, value / factor, value * factor, before, ends))
        covariance[-1, -1] = variance
    return tuple(parameters), covariance


def _bad_fit(residuals: Sequence[Residual]) -> list[str]:
    """Return a warning if the measurements of a fit are far from its predictions."""
    errors = [abs(r.error) for r in residuals]
    if not errors or sum(errors) / len(errors) < BAD_FIT:
        return []
    worst = sorted({r.nbytes for r in residuals if abs(r.error) > 2.0 * BAD_FIT})
    ends = f"{size(worst[0])} to {size(worst[-1])}" if worst else "none"
    return [
        f"warning: poor fit: the mean error is {percent(sum(errors) / len(errors), 0)}, and {len(worst)} sizes "
        f"({ends}) deviate by more than {200.0 * BAD_FIT:.0f} %. Latency, bandwidth, frames and a burst do not explain "
        "these links; check the measurements of these sizes, or use the curve of the operation"
    ]


def _mixed(links: Sequence[LinkRow]) -> list[str]:
    """Return a warning for each backend whose measurements mix several versions in one fit."""
    warnings = []
    for backend in dict.fromkeys(link.row.backend for link in links):
        versions = dict.fromkeys(r.row.version for r in links if r.row.version and r.row.backend == backend)
        if len(versions) > 1:
            warnings.append(f"warning: {len(versions)} software versions fitted together: {'; '.join(versions)}")
    return warnings


def _curves(links: Sequence[LinkRow], cluster: Cluster, absolute: Mapping[str, float]) -> tuple[Curve, ...]:
    """Return the curves of all operations with at least three measured sizes."""
    groups: dict[tuple[str, str, str], list[LinkRow]] = {}
    for row in links:
        if row.row.n_pairs <= 1:
            groups.setdefault((row.row.operation, row.row.backend, row.link_class), []).append(row)
    return tuple(
        fit_curve(group, cluster, group[0].case.algorithm, absolute.get(link_class, 0.0))
        for (_, _, link_class), group in groups.items()
        if len({row.row.nbytes for row in group}) > 2
    )


def _compute(rows: Sequence[Measurement]) -> tuple[ComputeFit, ...]:
    """Return the step times of each model, for the smallest measured number of ranks."""
    fits = []
    steps = [row for row in rows if row.experiment == "step"]
    for model in dict.fromkeys(row.model for row in steps):
        model_steps = [row for row in steps if row.model == model]
        fewest = min(row.n_ranks for row in model_steps)
        model_steps = [row for row in model_steps if row.n_ranks == fewest]
        fits.append(fit_compute(model, [row.batch_size for row in model_steps], [row.median_s for row in model_steps]))
    return tuple(fits)
