"""`Recommendation`: the recommended configurations of :func:`ddlsim.recommend`, with all figures behind them."""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ddlsim.errors import ConfigError
from ddlsim.planner.candidates import Candidate
from ddlsim.planner.crossovers import Crossover
from ddlsim.planner.ranges import Range
from ddlsim.planner.search import OUT, PRUNED, SIMULATED, UNTRIED, Trial
from ddlsim.planner.target import Figures, Miss, Target
from ddlsim.printable import shown
from ddlsim.readable import count, in_words, percent, rate, seconds, size, spread
from ddlsim.run.experiment import Experiment
from ddlsim.run.metrics import METRICS
from ddlsim.run.sensitivity import Sensitivity
from ddlsim.text_tables import aligned
from ddlsim.ties import FLOOR

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Guideline:
    """A rule of thumb.

    name       question that it answers
    source     origin of the rule
    says       its answer for this configuration
    simulated  answer of the simulation, or "n/a" with the reason
    """

    name: str
    source: str
    says: str
    simulated: str


@dataclass(frozen=True, eq=False)
class Choice:
    """A recommended configuration.

    candidate   the configuration, with the values of all searched fields
    experiment  the simulated experiment; ``ddlsim.simulate(choice.experiment)`` repeats the simulation
    figures     throughput, efficiency, and cost rate (USD/s, or number of devices if machines have no price)
    misses      comparison of the configuration with each constraint of the target; it is satisfied if ``share`` is 0
    reasons     reasons for this choice
    accuracy    accuracy reached; None: the configuration was not trained
    range       `figures` for the lowest and the highest plausible compute rates of a device, if published runs disagree
                on these rates; None: they agree, or the range was not simulated
    """

    candidate: Candidate
    experiment: Experiment
    figures: Figures
    misses: tuple[Miss, ...]
    reasons: tuple[str, ...] = ()
    accuracy: float | None = None
    range: Range | None = None

    @property
    def meets_target(self) -> bool:
        """Whether every constraint of the target is satisfied."""
        return all(miss.share == 0.0 for miss in self.misses)

    @property
    def exact(self) -> bool:
        """Whether training gives the same result as one worker with the global batch: no compression or local steps."""
        return self.candidate.exact

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.candidate.workers

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.figures.throughput

    @property
    def efficiency(self) -> float:
        """Throughput as a fraction of the throughput of the same workers without communication."""
        return self.figures.efficiency

    @property
    def spread(self) -> float:
        """Relative change of the throughput if the inputs change very slightly; 0: not measured."""
        return self.figures.spread

    def __str__(self) -> str:
        return str(self.candidate)


@dataclass(frozen=True, eq=False, repr=False)
class Recommendation:
    """The result of :func:`ddlsim.recommend`: the best configurations for a target, and the outcomes of all others.

    target         constraints and objective of the search
    choices        best configurations, starting with the best one. They always include the best configuration without
                   compression or local steps
    found          outcome of every configuration: its throughput, efficiency and cost, or the reason why it was not
                   simulated
    crossovers     worker counts at which one strategy becomes faster than another
    sensitivities  for each component, such as a link or device, the relative gain in the throughput of the best choice
                   if that component were improved by 10 %
    guidelines     rules of thumb for the best choice
    notes          assumptions behind the result, and its limitations
    priced         True: costs are in USD; False: costs are in device-hours
    rivals         configurations that may be better than the best one, because published runs disagree on the rates of
                   their devices; None: no such device
    interrupted    whether Ctrl-C ended the search, or the analysis of the best choice, early
    """

    target: Target
    choices: tuple[Choice, ...]
    found: tuple[Trial, ...]
    crossovers: tuple[Crossover, ...]
    sensitivities: tuple[Sensitivity, ...]
    guidelines: tuple[Guideline, ...]
    notes: tuple[str, ...]
    priced: bool
    rivals: tuple[str, ...] | None = None
    interrupted: bool = False

    @property
    def best(self) -> Choice:
        """The best choice."""
        return self.choices[0]

    @property
    def best_exact(self) -> Choice:
        """The best choice without compression or local steps. Raises ConfigError if there is none."""
        for choice in self.choices:
            if choice.exact:
                return choice
        raise ConfigError(
            "the recommendation contains only configurations with compression or local steps; include other strategies "
            "in the search"
        )

    @property
    def certain(self) -> bool | None:
        """Whether the best choice is the best for all plausible device rates; None: published runs agree."""
        return None if self.rivals is None else not self.rivals

    @property
    def meets_target(self) -> bool:
        """Whether the best choice satisfies every constraint of the target."""
        return self.best.meets_target

    @cached_property
    def table(self) -> pd.DataFrame:
        """DataFrame with one row per configuration, the simulated ones first.

        Columns are the searched fields, exact, status, throughput (samples/s), efficiency, time (s, for the complete
        training run), cost (USD or device-hours, for the complete training run or a million samples), miss (largest
        relative amount by which a constraint is violated), step_time (s, for an update with the global batch), mfu,
        memory (bytes on the worker that needs most, if the model is split), shares of time, and reason.
        """
        import pandas as pd

        return pd.DataFrame([self._row(trial) for trial in self.found])

    def _row(self, trial: Trial) -> dict[str, object]:
        figures = trial.figures
        candidate = trial.candidate
        numbers = dict.fromkeys(("throughput", "efficiency", "time", "cost", "miss", "step_time", "mfu"), math.nan)
        if figures is not None:
            time = math.nan if figures.total_time is None else figures.total_time
            numbers = {
                "throughput": figures.throughput,
                "efficiency": figures.efficiency,
                "time": time,
                "cost": self.cost(figures),
                "miss": self.target.rank(figures)[0],
                "step_time": candidate.global_batch / figures.throughput,
                "mfu": math.nan if (mfu := candidate.mfu(figures.throughput)) is None else mfu,
            }
        numbers["memory"] = math.nan if trial.held is None else trial.held
        shares = trial.shares or dict.fromkeys(("compute", "communication", "waiting", "idle"), math.nan)
        row: dict[str, object] = {**candidate.settings, "exact": candidate.exact, "status": trial.status}
        return {**row, **numbers, **shares, "reason": trial.reason}

    def cost(self, figures: Figures) -> float:
        """Return the cost in USD, or in device-hours if machines have no price.

        The cost is that of the complete training run, or of a million samples if the length of the run is unknown.
        """
        seconds = 1e6 / figures.throughput if figures.total_time is None else figures.total_time
        return seconds * figures.cost_rate / (1.0 if self.priced else 3600.0)

    def to_dict(self) -> dict[str, object]:
        """Return the recommendation as a dictionary of plain values."""
        return {
            "meets_target": self.meets_target,
            "interrupted": self.interrupted,
            "certain": self.certain,
            "rivals": None if self.rivals is None else list(self.rivals),
            "cost_unit": "USD" if self.priced else "device-hours",
            "choices": [self._choice(choice) for choice in self.choices],
            "crossovers": [vars(crossing) for crossing in self.crossovers],
            "sensitivities": [sensitivity.to_dict() for sensitivity in self.sensitivities],
            "guidelines": [vars(guideline) for guideline in self.guidelines],
            "notes": list(self.notes),
            "configurations": [
                {name: None if value != value or value == math.inf else value for name, value in self._row(f).items()}
                for f in self.found
            ],
        }

    def _choice(self, choice: Choice) -> dict[str, object]:
        figures = choice.figures
        finite = figures.total_time is not None and math.isfinite(figures.total_time)
        cost = self.cost(figures)
        ends = None if choice.range is None else (choice.range.low, choice.range.high)
        speed: dict[str, object] = {"throughput": figures.throughput, "throughput_spread": figures.spread}
        speed["throughput_range"] = None if ends is None else [end.throughput for end in ends]
        speed["cost_range"] = None if ends is None else [self.cost(end) for end in ends]
        spent = {"time": figures.total_time if finite else None, "cost": cost if math.isfinite(cost) else None}
        missed = {miss.what: miss.share for miss in choice.misses if 0.0 < miss.share < math.inf}
        outcome = {"accuracy": choice.accuracy, "missed": missed, "reasons": list(choice.reasons)}
        exact = {**choice.candidate.settings, "exact": choice.exact}
        return {**exact, **speed, "efficiency": figures.efficiency, **spent, **outcome}

    def __str__(self) -> str:
        layouts = aligned(layout_cells(self))
        middle = [("", ""), *(("" if i else "splits", line) for i, line in enumerate(layouts))] if layouts else []
        rows = [*choice_rows(self), *middle, *advice_rows(self)]
        return shown("\n".join(line for label, content in rows for line in _lines(label, content, content in layouts)))

    def _repr_html_(self) -> str:
        from ddlsim.notebook import grid, labelled, lines, page

        layouts = layout_cells(self)
        between = [lines(["splits"]), grid(layouts)] if layouts else []
        return page("Recommended", labelled(choice_rows(self)), *between, labelled(advice_rows(self)))

    def __repr__(self) -> str:
        return f"<Recommendation: {self.best}, {self.best.throughput:.4g} samples/s>"


def choices_of(trials: Sequence[Trial], target: Target, n_best: int) -> list[Choice]:
    """Return the first `n_best` simulated configurations, best first, and the best exact one if it is missing."""
    choices = (
        Choice(one.candidate, one.candidate.experiment, one.figures, tuple(target.misses(one.figures)))
        for one in trials
        if one.figures is not None
    )
    return best_of(list(choices), n_best)


def best_of(choices: list[Choice], n_best: int) -> list[Choice]:
    """Return the first `n_best` choices, and the first exact one if it is not among them."""
    exact = next((i for i, choice in enumerate(choices) if choice.exact), 0)
    return choices[:n_best] + choices[max(exact, n_best) : exact + 1]


#: number of sensitivities, and of reasons for skipped configurations, in the text
N_SENSITIVITIES, N_SKIPPED = 4, 3
#: number of splits of the model in the text
N_LAYOUTS = 8
#: fields with a column of their own, next to the sizes of splits, if they vary
LAYOUT_KEYS = ("cluster", "compression", "batch_size")
#: gains below this share count as none
NOTHING = 0.001
#: reasons that differ only in numbers are shown once
_NUMBER = re.compile(r"\d[\d,.]*")
WIDTH = 118


def choice_rows(plan: Recommendation) -> list[tuple[str, str]]:
    """Return labels and texts about the target and the recommendation. A row without a label continues the previous
    one, and an empty row starts a new paragraph."""
    rows = [("target", _target(plan.target)), ("searched", _searched(plan)), *_verdict(plan), *_certainty(plan)]
    stated: set[str] = set()
    for i, choice in enumerate(plan.choices):
        title = ("best" if i == 0 else f"{i + 1}.") + ("" if choice.exact else " *")
        rows += [("", ""), (title, str(choice)), ("", _figures(plan, choice)), *_range(plan, choice)]
        new = [reason for reason in choice.reasons if reason not in stated]  # the others are shown above
        rows += [("why" if j == 0 else "", reason) for j, reason in enumerate(new)]
        stated.update(new)
    return rows


def advice_rows(plan: Recommendation) -> list[tuple[str, str]]:
    """Return labels and texts, like :func:`choice_rows`, on what would change the recommendation, and the notes."""
    rows = [("", "")] if plan.crossovers or plan.sensitivities else []
    rows += [("crossovers" if i == 0 else "", str(crossing)) for i, crossing in enumerate(plan.crossovers)]
    rows += [("sensitivity" if i == 0 else "", line) for i, line in enumerate(_sensitivities(plan))]
    rows += [("", "")] if plan.guidelines else []
    for guideline in plan.guidelines:
        rows += [("rule", f"{guideline.name} ({guideline.source}): {guideline.says}")]
        rows += [("", f"simulated: {guideline.simulated}")]
    return [*rows, ("", ""), *_skipped(plan), *(("note", note) for note in plan.notes)]


def _sensitivities(plan: Recommendation) -> list[str]:
    """Describe the gains from faster components."""
    shown = [str(part) for part in plan.sensitivities if abs(part.gain) >= NOTHING][:N_SENSITIVITIES]
    rest = len(plan.sensitivities) - len(shown)
    small = all(abs(part.gain) < NOTHING for part in plan.sensitivities[len(shown) :])  # in descending order of gain
    if rest and small:
        shown.append(f"no {'other ' if shown else ''}part that is 10 % better changes it by {percent(NOTHING)} or more")
    return shown


def layout_cells(plan: Recommendation) -> list[tuple[str, ...]]:
    """Return a table of the fastest splits of the model, with its header; empty if the model was not split."""
    splits = [one for one in plan.found if one.figures is not None and one.candidate.sizes][:N_LAYOUTS]
    if not splits:
        return []
    several = [name for name in LAYOUT_KEYS if len({one.candidate.settings[name] for one in plan.found}) > 1]
    head = ("tensor", "pipeline", "data", "micro-batch", "order", "recompute", "s/step", "MFU", "memory", "bubble")
    rows: list[tuple[str, ...]] = [(*(in_words(name) for name in several), *head)]
    for one in splits:
        assert one.figures is not None
        sizes, candidate = one.candidate.sizes, one.candidate
        chunks = f" x {sizes['interleave']}" if sizes["interleave"] != 1 else ""
        order = f"stage {sizes['stage']}" if sizes["order"] == "-" else f"{sizes['order']}{chunks}"
        mfu, waits = candidate.mfu(one.figures.throughput), (one.shares or {}).get("waiting")
        layout = (str(sizes[name]) for name in ("tensor", "pipeline", "data", "micro_batch"))
        step = f"{candidate.global_batch / one.figures.throughput:.4g}"
        used = ("" if mfu is None else percent(mfu), "" if one.held is None else size(one.held))
        cells = (*layout, order, str(sizes["recompute"]), step, *used, "" if waits is None else percent(waits))
        rows.append((*(str(candidate.settings[name]) for name in several), *cells))
    return rows


def _lines(label: str, content: str, as_it_is: bool = False) -> list[str]:
    if not content:
        return [""]
    if as_it_is:
        return [f"{label:<13} {content}"]
    lines = textwrap.wrap(
        content.replace(" %", "\0%"),
        WIDTH,
        initial_indent=f"{label:<13} ",
        subsequent_indent=" " * 14,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in lines]


def _target(target: Target) -> str:
    parts = []
    if isinstance(target.deadline, int | float):
        parts.append(f"done in {_long(target.deadline)}")
    if target.budget is not None:
        parts.append(f"for at most {target.budget:,.6g} USD")
    if target.efficiency is not None:
        parts.append(f"efficiency of at least {percent(target.efficiency)}")
    if isinstance(target.throughput, int | float):
        parts.append(f"at least {rate(target.throughput)}")
    if target.accuracy is not None:
        parts.append(f"{percent(target.accuracy)} accuracy")
    order = "the cheapest first" if target.wants_cheapest else "the fastest first"
    return ", ".join([*parts, order])


def _long(value: float) -> str:
    """Format a time in the unit that suits planning."""
    if not math.isfinite(value):
        return "never"
    for scale, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if value >= 2.0 * scale:
            return f"{value / scale:.3g} {unit}"
    return seconds(value)


def _searched(plan: Recommendation) -> str:
    status = Counter(trial.status for trial in plan.found)
    words = {PRUNED: "excluded by a bound", OUT: "do not fit", UNTRIED: "not simulated"}
    parts = [f"{count(status[SIMULATED], 'configuration')} simulated"]
    parts += [f"{status[state]} {text}" for state, text in words.items() if status[state]]
    parts += ["interrupted: crossovers, sensitivities and rules may be missing"] if plan.interrupted else []
    return ", ".join(parts)


def _verdict(plan: Recommendation) -> list[tuple[str, str]]:
    if plan.meets_target:
        return []
    missed = " and ".join(_missed(miss) for miss in plan.best.misses if miss.share > 0.0)
    label, so_far = ("not met", " simulated so far") if plan.interrupted else ("impossible", "")
    return [(label, f"no configuration{so_far} meets the target; the nearest misses {missed}")]


def _missed(miss: Miss) -> str:
    if miss.what == "deadline":
        values = _long(miss.value), _long(miss.limit)
    elif miss.what == "budget":
        values = f"{miss.value:,.4g} USD", f"{miss.limit:,.4g} USD"
    else:
        write = METRICS[miss.what].write
        values = write(miss.value), write(miss.limit)
    share = f" by {percent(miss.share)}" if math.isfinite(miss.share) else ""
    return f"the {miss.what}{share}: {values[0]} instead of {values[1]}"


def _figures(plan: Recommendation, choice: Choice) -> str:
    figures = choice.figures
    stable = f" (stable to {spread(figures.spread)})" if figures.spread > FLOOR else ""
    parts = [rate(figures.throughput) + stable, f"efficiency {percent(figures.efficiency)}"]
    has_total = figures.total_time is not None
    if figures.total_time is not None:
        parts.append(f"done in {_long(figures.total_time)}" if math.isfinite(figures.total_time) else "never done")
    if choice.accuracy is not None:
        parts.append(f"{percent(choice.accuracy)} accuracy")
    cost = plan.cost(figures)
    if math.isfinite(cost):
        unit = "USD" if plan.priced else "device-hours"
        parts.append(f"{cost:,.4g} {unit}" + ("" if has_total else " per million samples"))
    return ", ".join(parts)


def _range(plan: Recommendation, choice: Choice) -> list[tuple[str, str]]:
    """Return throughput and cost at both ends of the disputed rates."""
    if choice.range is None:
        return []
    low, high, device = choice.range
    text = f"{low.throughput:,.4g} to {rate(high.throughput)}"
    if math.isfinite(plan.cost(low)):
        text += f", {plan.cost(high):,.4g} to {plan.cost(low):,.4g} {'USD' if plan.priced else 'device-hours'}"
    return [("", f"{text}: published runs on {device} disagree")]


def _certainty(plan: Recommendation) -> list[tuple[str, str]]:
    """Describe whether the best choice remains the best within the ranges."""
    if plan.rivals is None:
        return []
    text = "certain: the best stays the best, although published runs on these devices disagree"
    if plan.rivals:
        better = "; ".join(plan.rivals)
        text = f"uncertain, because published runs on these devices disagree; may be better: {better}"
    return [("ranking", text)]


def _skipped(plan: Recommendation) -> Iterator[tuple[str, str]]:
    """Return the most frequent reasons for skipped configurations."""
    alike: dict[str, list[str]] = {}
    for trial in plan.found:
        if trial.status == OUT:
            alike.setdefault(_NUMBER.sub("#", trial.reason), []).append(trial.reason)
    by_count = sorted(alike.values(), key=lambda reasons: -len(reasons))
    for i, reasons in enumerate(by_count[:N_SKIPPED]):
        such_as = "for example: " if len(set(reasons)) > 1 else ""
        yield ("do not fit" if i == 0 else "", f"{len(reasons)} x {such_as}{reasons[0]}")
    if len(by_count) > N_SKIPPED:
        yield "", f"{sum(map(len, by_count[N_SKIPPED:]))} more: see plan.table"
