"""The metrics of a run: one list for studies, reports, plots and the planner."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Literal, TypeAlias

from ddlsim.readable import duration, percent, rate, seconds, si, size, spread
from ddlsim.ties import FLOOR

if TYPE_CHECKING:
    from ddlsim.run.result import Result

Write: TypeAlias = Callable[[float], str]
_Of: TypeAlias = "Callable[[Result], float | None]"


@dataclass(frozen=True)
class Metric:
    """A number that describes a run.

    name              name in tables and JSON
    unit              unit of the number, "" for shares and counts
    of                the number in a result; None if prices or powers that it needs are unknown
    heading, write    heading in tables for people, and the formatter of a value with its unit
    larger_is_better  whether the largest value is the best
    of_clock          whether it is a time, a rate, or derived from these, and thus as stable as the throughput
    kind              which runs have it: all ("run"), training runs ("learning"), those with a target accuracy
                      ("target"), those whose stability was requested ("stability"), those with failures or
                      checkpoints ("failure_timeline"), those that simulate their input ("input")
    factor, drawn_in  factor of a value on an axis, and its unit there
    narrow            heading and formatter for narrow tables of text
    """

    name: str
    unit: str
    of: _Of
    heading: str
    write: Write
    larger_is_better: bool = False
    of_clock: bool = False
    kind: Literal["run", "learning", "target", "stability", "failure_timeline", "input"] = "run"
    factor: float = 1.0
    drawn_in: str = ""
    narrow: tuple[str, Write] | None = None

    @property
    def column(self) -> tuple[str, Write]:
        """Heading and formatter for narrow tables."""
        return self.narrow or (self.heading, self.write)

    @property
    def axis(self) -> str:
        """Label of an axis; metrics per sample are plotted per million samples."""
        unit = self.drawn_in or self.unit
        name = self.heading if self.name.endswith("_per_sample") else self.name.replace("_", " ")
        return f"{name} ({unit})" if unit else name

    @property
    def remedy(self) -> str:
        """Text on what a run needs to have this metric, after a colon; empty if all runs have it."""
        if "cost" in self.name:
            return ": set prices, cluster.with_costs(price='3.06 USD/h'), or vary 'cluster.price': ['3.06 USD/h']"
        if "energy" in self.name:
            return ": set the workers' device, device='v100' in the experiment"
        if self.kind == "stability":
            return ": set stability=True in the study (--stability)"
        if self.kind == "failure_timeline":
            return ": set in the base experiment failures=ddlsim.Failures('50000 h') or checkpoints"
        if self.kind == "input":
            return ": set input in the base experiment, such as ddlsim.Input('imagenet', storage='nfs0')"
        if self.kind != "run":
            return ": set training in the base experiment (with a target_accuracy that is reached)"
        return ""


def record(result: Result) -> dict[str, float | None]:
    """Return all metrics of a result, by name; times to targets that were not reached are inf."""
    monitor, training = result.monitor, result.experiment.training
    learns = training is not None and monitor is not None and bool(result.evaluations)
    kinds = {
        "run": True,
        "learning": learns,
        "target": learns and training is not None and training.target_accuracy is not None,
        "stability": result.wants_stability and result.known_stability is not None,
        "failure_timeline": result.has_failure_timeline,
        "input": "input" in result.shares,
    }
    return {name: metric.of(result) for name, metric in METRICS.items() if kinds[metric.kind]}


def _number(digits: str, unit: str = "", factor: float = 1.0) -> Write:
    return lambda value: f"{factor * value:{digits}} {unit}".rstrip()


def _money(unit: str = "", factor: float = 1.0) -> Write:
    return lambda value: f"{factor * value:{',.0f' if abs(factor * value) >= 1000.0 else '.4g'}} {unit}".rstrip()


def _share(kind: str, heading: str, *, larger_is_better: bool = False, narrow: str = "") -> Metric:
    """Return the metric of one activity's share of the workers' time."""
    return Metric(
        f"{kind}_share", "", lambda result: result.shares[kind], heading, percent, larger_is_better=larger_is_better,
        factor=100.0, drawn_in="%", narrow=(narrow or heading, percent),
    )  # fmt: skip


def _used(quantity: Literal["cost_rate", "power"], seconds: Callable[[Result], float | None]) -> _Of:

    def value(result: Result) -> float | None:
        rate = result.known(quantity)
        duration = None if rate is None else seconds(result)
        return None if rate is None or duration is None else rate * duration

    return value


def _of_sample(result: Result) -> float | None:
    return 1.0 / result.useful_throughput if result.useful_throughput else None


def _to_accuracy(result: Result) -> float:
    assert result.experiment.training is not None
    assert result.experiment.training.target_accuracy is not None
    return result.time_to_accuracy(result.experiment.training.target_accuracy)


def _last(column: str) -> _Of:
    return lambda result: getattr(result.evaluations[-1], column)


def _spread(result: Result) -> float | None:
    return None if result.known_stability is None else result.known_stability.throughput_spread


def _stable_to(share: float) -> str:
    return "rounding" if share <= FLOOR else spread(share)


_KWH = 1.0 / 3.6e6
#: name -> metric, in the order in which reports show them
METRICS = {
    metric.name: metric
    for metric in (
        Metric("throughput", "samples/s", attrgetter("throughput"), "throughput", rate,
               larger_is_better=True, of_clock=True, narrow=("samples/s", _number(",.1f"))),
        Metric("goodput", "samples/s", attrgetter("goodput"), "goodput", rate,
               larger_is_better=True, kind="failure_timeline", narrow=("goodput/s", _number(",.1f"))),
        Metric("lost_work", "s", attrgetter("lost_work"), "lost work", duration, kind="failure_timeline"),
        Metric("availability", "", attrgetter("availability"), "availability", percent,
               larger_is_better=True, kind="failure_timeline", factor=100.0, drawn_in="%"),
        Metric("throughput_spread", "", _spread, "stable to", _stable_to, kind="stability"),
        Metric("step_time", "s", attrgetter("step_time"), "step time", seconds, of_clock=True),
        Metric("speedup", "", attrgetter("speedup"), "speed-up", _number(".4g"),
               larger_is_better=True, of_clock=True, narrow=("speed-up", _number(".2f"))),
        Metric("efficiency", "", attrgetter("efficiency"), "efficiency", percent,
               larger_is_better=True, of_clock=True, factor=100.0, drawn_in="%"),
        Metric("accuracy", "", attrgetter("accuracy"), "accuracy", percent,
               larger_is_better=True, kind="learning", factor=100.0, drawn_in="%"),
        Metric("time_to_accuracy", "s", _to_accuracy, "time to target", seconds,
               of_clock=True, kind="target", narrow=("to target", seconds)),
        Metric("cost_to_accuracy", "USD", _used("cost_rate", _to_accuracy), "cost to target", _money("USD"),
               of_clock=True, kind="target", narrow=("USD to target", _money())),
        Metric("energy_to_accuracy", "J", _used("power", _to_accuracy), "energy to target", _number(".4g", "kWh", _KWH),
               of_clock=True, kind="target"),
        Metric("cost_per_sample", "USD", _used("cost_rate", _of_sample), "cost per million samples",
               _money("USD", 1e6), of_clock=True, factor=1e6, drawn_in="USD",
               narrow=("USD/million", _money(factor=1e6))),
        Metric("energy_per_sample", "J", _used("power", _of_sample), "energy per million samples",
               _number(".4g", "kWh", 1e6 * _KWH), of_clock=True, factor=1e6 * _KWH, drawn_in="kWh",
               narrow=("kWh/million", _number(".4g", "", 1e6 * _KWH))),
        _share("compute", "compute", larger_is_better=True),
        _share("communication", "exposed communication", narrow="communication"),
        _share("waiting", "waiting"),
        dataclasses.replace(_share("input", "waiting for input", narrow="input"), kind="input"),
        _share("idle", "idle"),
        Metric("mean_staleness", "updates", attrgetter("mean_staleness"), "mean staleness", _number(".3g", "updates")),
        Metric("nbytes_per_step", "bytes", attrgetter("nbytes_per_step"), "bytes sent per worker and step", size),
        Metric("loss", "", _last("loss"), "loss", _number(".4g"), kind="learning"),
        Metric("updates", "", _last("updates"), "updates", _number(",.0f"), kind="learning"),
        Metric("epochs", "", _last("epoch"), "epochs", _number(".4g"), kind="learning"),
        Metric("simulated_time", "s", attrgetter("simulated_time"), "simulated time", seconds, of_clock=True),
        Metric("cost", "USD", methodcaller("known", "cost"), "cost of the run", _money("USD"), of_clock=True,
               narrow=("USD/run", _money())),
        Metric("energy", "J", methodcaller("known", "energy"), "energy of the run", partial(si, unit="J"),
               of_clock=True),
        Metric("n_messages", "", attrgetter("n_messages"), "messages", _number(",.0f")),
    )
}  # fmt: skip
