"""Printed summary of a result in about fifteen lines, and tables of several results."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ddlsim.readable import count, duration, percent, rate, seconds, si, size, spread
from ddlsim.run.costs import cost_assumptions, energy_assumptions
from ddlsim.run.failure_timeline import has_failure_timeline
from ddlsim.run.metrics import METRICS
from ddlsim.strategies import contract
from ddlsim.text_tables import aligned, labelled
from ddlsim.workload.jitter import NoJitter
from ddlsim.workload.precision import LOW_PRECISIONS

if TYPE_CHECKING:
    from ddlsim.run.result import Result

#: label and text of a row
Line = tuple[str, str]
#: maximum number of links and sensitivities shown
N_LINKS = 3
N_SENSITIVITIES = 4


def summary(result: Result) -> str:
    """Return the text that ``print(result)`` shows."""
    return "\n".join(labelled(summary_rows(result)))


def summary_rows(result: Result, *, simulate: bool = True) -> list[Line]:
    """Return the labels and texts of the summary; a row without a label continues the previous one.

    simulate  whether to simulate small runs several more times for their stability and interval; False: values that are
              not known yet are omitted
    """
    experiment = result.experiment
    shares = ((METRICS[f"{kind}_share"], share) for kind, share in result.shares.items())
    links = [f"{ends} ({kind}): {share} used, {n}" for ends, kind, share, n in busiest_links(result, N_LINKS)]
    staleness = result.recorder.staleness
    rows = [
        ("throughput" if result.fits else "if it fit", _throughput(result)),
        *_memory(result),
        ("time goes to", ", ".join(f"{metric.heading} {metric.write(share)}" for metric, share in shares)),
        *[("bottleneck" if i == 0 else "", text) for i, text in enumerate(_bottleneck(result, simulate))],
        *_software(result),
        *([] if result.published is None else [("published", str(result.published))]),
        ("workers", f"{result.n_workers} on {result.cluster.name}"),
        ("strategy", experiment.strategy.label),
        ("model", _model(result)),
        *_stability(result, simulate),
        ("step time", _step_time(result)),
        *_interval(result, simulate),
        ("speed-up", _speedup(result)),
        *([("staleness", f"mean {result.mean_staleness:.4g}, at most {max(staleness)} updates")] if staleness else []),
        *_transport(result),
        *_failures(result),
        ("bytes sent", f"{size(result.nbytes_per_step)} per worker and step"),
        *_costs(result),
        *_learning(result),
        *[("busy links" if i == 0 else "", text) for i, text in enumerate(links or ["none"])],
        *[("compute time" if i == 0 else "", text) for i, text in enumerate(_compute_times(result))],
        *[("note", note) for note in result.notes],
        *[("warning", warning) for warning in result.warnings[not result.fits :]],
    ]
    if not result.fits:
        rows.insert(0, rows.pop(1))
    if result.interrupted:
        rows.insert(0, ("interrupted", f"after {count(len(result.recorder.updates), 'update')}"))
    return rows


def _memory(result: Result) -> Iterator[Line]:
    """Yield a warning if the run does not fit into the devices' memory."""
    memory = result.memory
    if memory is not None and result.fits:
        yield "memory", f"fits: {size(memory.needed)} of {size(memory.capacity)} on the fullest worker"
    elif memory is not None:
        yield "memory", f"does not fit: {result.warnings[0]}"


def _throughput(result: Result) -> str:
    """Return tokens/s per device (samples/s for other models), the total throughput, and the MFU."""
    tokens, mfu = result.tokens_per_second, result.mfu
    total, unit = (result.throughput, "samples/s") if tokens is None else (tokens, "tokens/s")
    text = f"{rate(total / result.n_workers, unit)} per device, {rate(total, unit)} in total"
    text += "" if tokens is None else f" ({rate(result.throughput)})"
    peak = " of the bf16 peak" if result.experiment.precision in LOW_PRECISIONS else ""
    return text if mfu is None else f"{text}, MFU {percent(mfu)}{peak}"


def _software(result: Result) -> Iterator[Line]:
    """Yield the software stack, if times depend on it, and how to change an assumed one."""
    workload = result.workloads[0]
    if (workload.by_kernel or workload.summed) and not workload.known:
        stack = workload.stack
        how = " (assumed; --stack or stack= sets another, see ddlsim stacks)" if result.assumes_stack else ""
        yield "software", f"{stack.title} ({stack.release}); stack {stack.name}{how}"
    assumed = workload.precision == "tf32" and (result.given or result.experiment).precision is None
    why = " (the default of convolutional networks; --precision fp32 computes all in fp32)" if assumed else ""
    if not workload.summed and assumed and not workload.known:
        yield "software", f"tf32{why}"
    if workload.summed and not workload.by_kernel:
        software, precision = workload.stack, workload.precision
        if precision == "tf32" and not software.tf32_dense:
            precision = "tf32 in convolutions, fp32 in dense layers"
        precision += why
        other = "" if software.memory_format != "nchw" else " (stack pytorch-channels-last: channels_last)"
        yield "", f"{precision}; memory format {software.memory_format.replace('nchw', 'NCHW')}{other}"


def _model(result: Result) -> str:
    experiment, workload = result.experiment, result.workloads[0]
    micro = f" x {experiment.accumulation} micro-steps" if experiment.accumulation > 1 else ""
    gradients = f"{size(workload.gradient_nbytes)} of {experiment.gradient_dtype} gradients"
    batch = f"batch {experiment.batch_size}{micro} per worker"
    samples = result.updates_per_step * result.samples_per_update
    if workload.batch_size != experiment.batch_size:
        batch = f"batch {experiment.batch_size} in micro-batches of {workload.batch_size}"
    elif not math.isclose(samples, experiment.batch_size * experiment.accumulation * result.n_workers, rel_tol=0.01):
        batch = f"batch {experiment.batch_size}{micro}, {samples:,.4g} samples a step"
    return f"{workload.model.name}, {batch}, {experiment.precision}, {gradients}"


def _step_time(result: Result) -> str:
    times = result.step_times
    text = seconds(result.step_time)
    if len(times) > 1 and np.ptp(times) > 1e-6 * times.mean():
        low, high = np.percentile(times, [5, 95])
        text += f" (5 % to 95 %: {seconds(low)} to {seconds(high)})"
    return text


def _stability(result: Result, simulate: bool) -> Iterator[Line]:
    """Yield the stability of the throughput, if it is unstable or was requested."""
    stability = result.known_stability if simulate else vars(result).get("known_stability")
    if stability is not None and (result.wants_stability or not stability.is_stable):
        yield "stability", str(stability)


def _interval(result: Result, simulate: bool) -> Iterator[Line]:
    """Yield the prediction interval of the throughput, if there is one."""
    if not result.uncertain or result.interrupted:
        return
    causes = [] if result.cluster.calibration is None else ["the calibration"]
    causes += ["the fit of the stack"] if result.fitted_stack else []
    causes += [] if isinstance(result.experiment.jitter, NoJitter) else ["jitter"]
    interval = result.quick_interval if simulate else vars(result).get("quick_interval")
    if interval is None:
        yield "interval", f"from {' and '.join(causes)}: call result.interval() to simulate it"
        return
    low, high = rate(interval.throughput.low), rate(interval.throughput.high)
    causes += ["errors of similar predictions"] if result.n_workers > 1 else []
    yield "interval", f"{low} to {high} ({percent(interval.throughput.level, 0)}), from {' and '.join(causes)}"
    yield from (("note", note) for note in interval.throughput.notes)


def _speedup(result: Result) -> str:
    efficiency, one = f"efficiency {percent(result.efficiency)}", result.samples_alone
    if not contract.of(result.experiment.strategy).shares_batch or one >= result.samples_per_update:
        return f"{result.speedup:.4g} over one worker, {efficiency}"
    return (
        f"{result.speedup:.4g} over one worker with a batch of {one:.6g}, {result.whole_batch_speedup:.4g} over one "
        f"with a batch of {result.samples_per_update:.6g}, {efficiency}"
    )


def _failures(result: Result) -> Iterator[Line]:
    """Yield the effects of failures and checkpoints on the run."""
    if not result.has_failure_timeline:
        if has_failure_timeline(result.experiment):
            yield "goodput", "not computed, because the run was interrupted"
        return
    timeline = result.failure_timeline
    text = f"{rate(result.goodput)} over {duration(timeline.end)} with {count(len(timeline.events), 'failure')}"
    if timeline.groups:
        sizes = [workers for _, workers in timeline.groups]
        text += f", {min(sizes)} to {max(sizes)} workers"
    yield "goodput", text
    yield "time split", timeline.breakdown


def _transport(result: Result) -> Iterator[Line]:
    """Yield the bandwidth between two workers that the transport of the used links allows, if it limits anything."""
    details = result.cluster.details
    if details is None or not details.has_effects:
        return
    nbytes = result.channel_nbytes[result.cluster.link_channel]
    used = np.flatnonzero((nbytes > 0.0) & (details.transport != ""))
    if not len(used):
        return
    limit = details.connection_limit[used]
    link = int(used[limit.argmin()])
    detail, narrow = details.of(link), float(limit.min())
    connections = f"{count(detail.connections, 'connection')} between two workers"
    carries = result.cluster.channel_capacity[result.cluster.link_channel[link]]
    if narrow < carries:
        verb = "reaches" if detail.connections == 1 else "reach"
        kind = result.cluster.link_kind[link]
        share = f"{verb} {narrow * 8e-9:.4g} of the {kind}'s {carries * 8e-9:.4g} Gbit/s"
        text = f"{detail.transport}: {connections} {share}, so more bandwidth has no effect"
        yield "transport", f"{text}; override with +flow_rate=..., or use +transport=ideal"
    else:
        yield "transport", f"{detail.transport}: {connections}; use +transport=ideal to ignore its limits"


def _costs(result: Result) -> Iterator[Line]:
    """Yield the known costs and power of a run, and those per million samples."""
    million = 1e6 / result.useful_throughput if result.useful_throughput else math.inf
    price, power = result.known("cost_rate"), result.known("power")
    if price is not None:
        about = ": ".join(filter(None, ["USD per million samples", ", ".join(cost_assumptions(result))]))
        yield "costs", f"{3600.0 * price:.4g} USD/h, {million * price:.4g} {about}"
    if power is not None:
        about = ": ".join(filter(None, ["kWh per million samples", ", ".join(energy_assumptions(result))]))
        yield "energy", f"{si(power, 'W')}, {million * power / 3.6e6:.4g} {about}"


def _learning(result: Result) -> Iterator[Line]:
    if result.monitor is None or not result.evaluations:
        return
    last = result.evaluations[-1]
    accuracy = "" if math.isnan(last.accuracy) else f"accuracy {percent(last.accuracy)}, "  # NaN for regression
    text = (
        f"{accuracy}loss {last.loss:.4g} on held-out samples after "
        f"{count(last.updates, 'update')}, {last.epoch:.3g} epochs, {seconds(last.time)}"
    )
    yield "learned", text
    yield "ended by", textwrap.shorten(result.stop_reason, 100, placeholder=" ...")


def busiest_links(result: Result, n: int) -> list[tuple[str, str, str, str]]:
    """Return the busiest links: (ends, kind, utilisation, bytes) as texts."""
    links = result.link_columns
    rows = zip(*(links[name] for name in ("utilisation", "source", "target", "kind", "nbytes")), strict=True)
    used = sorted((row for row in rows if row[-1] > 0.0), key=lambda row: (-row[0], row[1]))
    return [(f"{a} -> {b}", kind, percent(share), size(nbytes)) for share, a, b, kind, nbytes in used[:n]]


def _compute_times(result: Result) -> list[str]:
    """Return the origin of compute times, with the device if there are several."""
    devices: dict[str, str] = {}
    for node, workload in zip(result.nodes, result.workloads, strict=True):
        devices.setdefault(workload.basis, result.cluster.device_of[node] or "others")
    texts = [textwrap.shorten(basis, 150, placeholder=" ...") for basis in devices]
    return texts if len(texts) == 1 else [f"{name}: {text}" for name, text in zip(devices.values(), texts, strict=True)]


def _bottleneck(result: Result, simulate: bool) -> list[str]:
    sensitivities = result.cached_sensitivities
    if result.interrupted:
        return ["not computed, because the run was interrupted"]
    if not sensitivities:
        return ["call result.sensitivities() to simulate the effect of parts that are 10 % better"]
    stability = result.known_stability if simulate else vars(result).get("known_stability")
    least = max(0.001, 0.0 if stability is None else stability.throughput_spread)
    if sensitivities[0].gain < least:
        unsure = "" if least == 0.001 else ", the stability of the throughput"
        return [f"none: no single part that is 10 % better gains {spread(least)}{unsure}"]
    return [str(s) for s in sensitivities[:N_SENSITIVITIES] if s is sensitivities[0] or s.gain >= least]


#: metrics in a table of several results; the rows have all shares of time
_SCALING = ("throughput", "step_time", "speedup", "efficiency")
_SHARES = ("compute_share", "communication_share", "waiting_share")


def scaling_rows(results: Sequence[Result]) -> list[dict[str, float | None]]:
    """Return one row per result: workers, whether it fits, throughput, step time, speed-up, efficiency and shares of
    time."""
    metrics = ({name: METRICS[name].of(r) for name in _SCALING} for r in results)
    return [{"workers": r.n_workers, "fits": r.fits, **m, **r.shares} for r, m in zip(results, metrics, strict=True)]


def scaling_table(results: Sequence[Result]) -> str:
    """Return the results as lines of an aligned table, preceded by warnings on those that do not fit in memory."""
    misfits = [f"{count(r.n_workers, 'worker')}: does not fit: {r.warnings[0]}" for r in results if not r.fits]
    metrics = [METRICS[name] for name in (*_SCALING, *_SHARES)]
    header = ("workers", *(metric.column[0] for metric in metrics))
    rows = [(str(r.n_workers), *(metric.column[1](metric.of(r) or 0.0) for metric in metrics)) for r in results]
    return "\n".join([*misfits, *aligned([header, *rows])])
