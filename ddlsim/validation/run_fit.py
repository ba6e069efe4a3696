"""Fit of compute time and network to some of the measured runs, with the uncertainty for the remaining ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ddlsim.cluster.calibrated import Beyond, beyond
from ddlsim.run.prepare import family
from ddlsim.run.seeds import t_quantile
from ddlsim.validation.calibration import Calibration
from ddlsim.validation.compute_fit import ComputeFit, fit_compute
from ddlsim.validation.curves import Interval, interval_at
from ddlsim.validation.links import BANDWIDTH_SD, LATENCY_SD, TYPICAL_LATENCY
from ddlsim.validation.log_fit import Floats, Prior, fit_logs, spread_of, t_factors, wider
from ddlsim.validation.run_model import ComputeKey, Fitted, RunModel
from ddlsim.workload.compute import Affine

FITTABLE = ("compute", "network")
#: prior uncertainty of the compute time: within a factor of 2 with probability 2/3
COMPUTE_SD = 0.7
#: lower limit of a calibration's relative uncertainty, since runs are not benchmarks
LEAST_SD = 0.02


@dataclass(frozen=True, eq=False)
class Knowledge:
    """Basis of predictions: the `fitted` values and their uncertainty.

    names, covariance  parameters of links, and the covariance of their logarithms
    compute_sd         half the width of the 95 % interval (Student's t) of the logarithm of a compute time, in units of
                       that of a standard normal distribution, by model and precision
    scatter            scatter of ln(predicted / measured) of the links' measurements, by class of links (normal)
    spread, dof        scatter of the fitted runs, and its degrees of freedom
    fitted_on          classes of links that these runs use
    workers, batches   measured numbers of workers, and batch sizes by model and precision
    """

    fitted: Fitted = field(default_factory=Fitted)
    names: tuple[str, ...] = ()
    covariance: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    compute_sd: dict[ComputeKey, float] = field(default_factory=dict)
    scatter: Mapping[str, float] = field(default_factory=dict)
    spread: float = 0.0
    dof: float = math.inf
    fitted_on: frozenset[str] = frozenset()
    workers: tuple[int, ...] = ()
    batches: dict[ComputeKey, tuple[int, ...]] = field(default_factory=dict)

    def outside(self, run: RunModel) -> Beyond:
        """Return the extrapolation of a run beyond the measurements."""
        n, batches = run.measured.workers, self.batches.get(run.key, ())
        extrapolation = beyond(n, self.workers, "workers") if n > 1 and self.workers else Beyond()
        return extrapolation + (beyond(run.measured.batch_size, batches, "samples per worker") if batches else Beyond())


def fit_runs(runs: Sequence[RunModel], calibration: Calibration | None, fit: Sequence[str]) -> Knowledge:
    """Fit compute time and links to `runs`, based on the calibration.

    fit   items of :data:`FITTABLE`: "compute" (single-worker runs: c0 + c1 * batch if there are several batch sizes,
          else one factor), "network" (latency and bandwidth of the links that the runs use). Priors are those of the
          calibration or, without one, of :mod:`ddlsim.validation.links`
    """
    knowledge = _calibrated(calibration)
    if not runs:
        return knowledge
    batches = dict(knowledge.batches)
    for run in runs:
        batches[run.key] = (*batches.get(run.key, ()), run.measured.batch_size)
    workers = (*knowledge.workers, *(run.measured.workers for run in runs if run.measured.workers > 1))
    knowledge = dataclasses.replace(knowledge, workers=workers, batches=batches)
    if "compute" in fit:
        knowledge = _with_compute(knowledge, [run for run in runs if run.measured.workers == 1])
    several = [run for run in runs if run.measured.workers > 1]
    return _with_network(knowledge, several, fit) if several else knowledge


def _calibrated(calibration: Calibration | None) -> Knowledge:
    if calibration is None:
        return Knowledge()
    links = [i for i, p in enumerate(calibration.parameters) if "." in p.name]
    sd = {(fit.model, "fp32"): _sd_of(fit) for fit in calibration.compute}
    names = tuple(calibration.parameters[i].name for i in links)
    factors = np.array([calibration.parameters[i].wider for i in links])
    covariance = calibration.covariance[np.ix_(links, links)] * np.outer(factors, factors)
    workers = (*calibration.ranks, *(n for curve in calibration.curves for n in curve.ranks)) if links else ()
    batches = {(fit.model, "fp32"): fit.batch_sizes for fit in calibration.compute}
    return Knowledge(Fitted(), names, covariance, sd, calibration.scatter, workers=workers, batches=batches)


def _with_compute(knowledge: Knowledge, runs: Sequence[RunModel]) -> Knowledge:
    """Fit the compute time of each model and precision to runs of one worker."""
    compute, factors, sd = dict(knowledge.fitted.compute), dict(knowledge.fitted.factors), dict(knowledge.compute_sd)
    for key in dict.fromkeys(run.key for run in runs):
        model_runs = [run for run in runs if run.key == key]
        mean = model_runs[0].experiment.jitter.mean
        passes = [run.measured.step_time / run.measured.accumulation / mean for run in model_runs]
        batches = [run.measured.batch_size for run in model_runs]
        if len(set(batches)) > 1:
            line = fit_compute(key[0], batches, passes)
            compute[key], sd[key] = Affine(line.c0, line.c1), _sd_of(line)
        else:
            logs = np.log([run.measured.step_time / run.step_time(knowledge.fitted) for run in model_runs])
            factors[key] = math.exp(float(logs.mean()))
            spread, dof = spread_of(float(np.sum((logs - logs.mean()) ** 2)), len(logs), 1)
            sd[key] = wider(dof) * spread * math.sqrt(1.0 + 1.0 / len(logs))
    return dataclasses.replace(
        knowledge, fitted=dataclasses.replace(knowledge.fitted, compute=compute, factors=factors), compute_sd=sd
    )


def _sd_of(fit: ComputeFit) -> float:
    """Return the uncertainty of a fitted step time, for the least certain of the measured batch sizes."""
    ends = [fit.interval(size) for size in fit.batch_sizes]
    return max(math.log(high / value) for _, value, high in ends) / t_quantile(math.inf)


def _with_network(knowledge: Knowledge, runs: Sequence[RunModel], fit: Sequence[str]) -> Knowledge:
    """Fit the links, and the compute times of models without single-worker runs, to runs of several workers."""
    names: list[str] = []
    priors: list[Prior] = []
    if "network" in fit:
        before = {name: value for run in runs for name, value in run.parameters.items()}
        for name, value in before.items():
            sd = LATENCY_SD if name.endswith("latency") else BANDWIDTH_SD
            if name in knowledge.names:
                i = knowledge.names.index(name)
                sd = max(math.sqrt(knowledge.covariance[i, i]), LEAST_SD)
            names.append(name)
            priors.append(Prior(value or TYPICAL_LATENCY, sd))
    free = [key for key in dict.fromkeys(run.key for run in runs) if key not in knowledge.compute_sd]
    keys = free if "compute" in fit else []
    priors += [Prior(1.0, COMPUTE_SD)] * len(keys)
    if not priors:
        return knowledge
    measured = np.array([run.measured.step_time for run in runs])

    def fitted(values: Floats) -> Fitted:
        links = dict(zip(names, values[: len(names)].tolist(), strict=True))
        factors = dict(zip(keys, values[len(names) :].tolist(), strict=True))
        return dataclasses.replace(knowledge.fitted, links=links, factors={**knowledge.fitted.factors, **factors})

    link_fit = fit_logs(
        lambda values: np.array([run.step_time(fitted(values)) for run in runs]),
        measured,
        [*names, *(" ".join(key) for key in keys)],
        [prior.value for prior in priors],
        priors,
    )
    n = len(names)
    kept = [i for i, name in enumerate(knowledge.names) if name not in names]  # links that these runs do not use
    covariance = np.zeros((n + len(kept),) * 2)
    covariance[:n, :n], covariance[n:, n:] = link_fit.covariance[:n, :n], knowledge.covariance[np.ix_(kept, kept)]
    used = frozenset(name for run in runs for name in run.link_classes)
    spreads = np.sqrt(np.diag(link_fit.covariance)) * t_factors(link_fit.informed, link_fit.dof) * wider(link_fit.dof)
    compute_sd = knowledge.compute_sd | {key: float(spreads[n + i]) for i, key in enumerate(keys)}
    values = fitted(np.exp(link_fit.logs))
    return dataclasses.replace(
        knowledge, fitted=values, names=(*names, *(knowledge.names[i] for i in kept)), covariance=covariance,
        compute_sd=compute_sd, spread=link_fit.spread, dof=link_fit.dof, fitted_on=used,
        scatter={name: x for name, x in knowledge.scatter.items() if f"{name}.bandwidth" not in names},
    )  # fmt: skip


def interval_of(run: RunModel, knowledge: Knowledge, predicted: float) -> Interval | None:
    """Return the 95 % interval of a measured step time; None if compute time or links are not based on measurements.

    It combines the sensitivities to the compute time and the links' parameters, and widens for more workers or another
    batch size than measured.
    """
    linked = {name.partition(".")[0] for name in knowledge.names}
    if run.key not in knowledge.compute_sd or not linked.issuperset(run.link_classes):
        return None
    step = 0.02
    slope = math.log(run.step_time(knowledge.fitted, compute=math.exp(step)) / predicted) / step
    t_factor = wider(knowledge.dof)
    run_spread = knowledge.spread if knowledge.fitted_on.intersection(run.link_classes) else 0.0
    variance = (t_factor * run_spread) ** 2 + (slope * knowledge.compute_sd[run.key]) ** 2
    base = {**run.parameters, **knowledge.fitted.links}
    slopes, shares = np.zeros(len(knowledge.names)), dict.fromkeys(knowledge.scatter, 0.0)
    for i, name in enumerate(knowledge.names):
        if name.partition(".")[0] in run.link_classes and base.get(name, 0.0) > 0.0:
            links = {**knowledge.fitted.links, name: base[name] * math.exp(step)}
            changed = dataclasses.replace(knowledge.fitted, links=links)
            slopes[i] = math.log(run.step_time(changed) / predicted) / step
            if (link_class := name.partition(".")[0]) in shares and name.endswith((".latency", ".bandwidth")):
                shares[link_class] += abs(slopes[i])
            slopes[i] *= t_factor if name in knowledge.fitted.links else 1.0
    variance += float(slopes @ knowledge.covariance @ slopes)
    variance += sum((min(shares[name], 1.0) * spread) ** 2 for name, spread in knowledge.scatter.items())
    timed = dataclasses.replace(run.experiment, compute=run.experiment.compute or Affine(0.0, predicted))  # fitted
    outside = knowledge.outside(run) + family(timed, run.cluster, run.key[0], run.measured.workers)
    return interval_at(predicted, variance, math.inf, outside)
