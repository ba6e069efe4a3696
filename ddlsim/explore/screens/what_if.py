"""*What-if*: a baseline run A, a modified run B, and their differences."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import panel as pn

import ddlsim
from ddlsim.explore.components import ComputedCard, Exports, File, gains, html, message, table
from ddlsim.explore.jobs import Jobs, Progress
from ddlsim.explore.screens.run import tell_first
from ddlsim.explore.setup import FIELDS, Setup
from ddlsim.readable import in_words, percent
from ddlsim.run.experiment import Experiment
from ddlsim.run.files import SCHEMA
from ddlsim.run.metrics import METRICS, Metric, record
from ddlsim.run.result import Result

NAME = "what-if"
TITLE = "What if"
#: factor above which differences are not shown in percent
MOST = 10.0


def screen(setup: Setup, jobs: Jobs) -> pn.viewable.Viewable:
    """Return the screen: A is the run shown when the screen is opened, until another one is kept."""
    kept: dict[str, object] = setup.state()
    shown: list[tuple[Result, Result]] = []
    cached: dict[str, tuple[Experiment, Result]] = {}  # A is simulated only once
    problem, body = html(), html()
    keep = pn.widgets.Button(label="Keep the current run as A")
    keep.button_type = "primary"
    back = pn.widgets.Button(label="Back to A")
    exports = Exports(lambda: files(_experiment(kept), setup.experiment()))

    def wanted() -> Callable[[Progress], Any] | None:
        pair = next(iter(shown), None)
        return None if pair is None else lambda progress: html(helpful(*pair, progress))

    card = ComputedCard("Possible improvements of A and B", jobs, wanted)

    def done(pair: tuple[Result, Result, str]) -> None:
        shown[:] = [pair[:2]]
        cached["A"] = _experiment(kept), pair[0]
        problem.object = ""
        body.object = f"{_changes(kept, setup.state())}{pair[2]}"
        card.stale()
        exports.stale()

    def failed(text: str) -> None:
        shown.clear()
        problem.object, body.object = message(text).object, ""
        card.stale()
        exports.stale()

    def refresh() -> None:
        jobs.ask(NAME, lambda: partial(both, _experiment(kept), setup.experiment(), cached.get("A")), done, failed)

    def take(*_: object) -> None:
        kept.clear()
        kept.update(setup.state())
        refresh()

    keep.on_click(take)
    back.on_click(lambda _: setup.take(kept))
    setup.when_shown(NAME, refresh)
    bar = jobs.bar(NAME, lambda: failed("cancelled; change a field to simulate again"))
    help_text = html("Run A is stored. Change any field of the form to define run B.")
    return pn.Column(
        help_text, pn.FlexBox(keep, back), bar, problem, body, card.card, exports.card, sizing_mode="stretch_width"
    )


def _experiment(state: dict[str, object]) -> Experiment:
    setup = Setup()
    setup.take(state)
    return setup.experiment()


def both(
    a: Experiment, b: Experiment, cached: tuple[Experiment, Result] | None, progress: Progress
) -> tuple[Result, Result, str]:
    """Return both results, without simulating A again if it is `cached`, and their differences as HTML."""
    tell_first(progress)
    first = cached[1] if cached is not None and cached[0] == a else ddlsim.simulate(a)
    progress.check()
    second = first if b == a else ddlsim.simulate(b)
    return first, second, differences(first, second)


def differences(a: Result, b: Result) -> str:
    """Return all metrics of both runs, and their differences, as HTML."""
    rows, records = [], (record(a), record(b))
    for name, metric in METRICS.items():
        values = records[0].get(name), records[1].get(name)
        texts = ["" if value is None else metric.write(value) for value in values]
        if texts != ["", ""]:
            rows.append([metric.heading, *texts, _change(metric, *values)])
    return table(("", "A", "B", "B against A"), rows)


def _change(metric: Metric, a: float | None, b: float | None) -> str:
    if a is None or b is None:
        return ""
    if metric.write(a) == metric.write(b):
        return "same"
    if metric.drawn_in == "%":
        return f"{100.0 * (b - a):+.1f} points"
    if not a or b / a >= MOST:
        return f"{b / a:,.4g} times" if a else ""
    return percent(b / a - 1.0, sign="+")


def _changes(a: dict[str, object], b: dict[str, object]) -> str:
    rows = [[in_words(name), _shown_setting(a[name]), _shown_setting(b[name])] for name in FIELDS if a[name] != b[name]]
    if not rows:
        return "<div>B is A so far.</div>"
    return f"<h3>Changes</h3>{table(('', 'A', 'B'), rows, 3)}<h3>Effects</h3>"


def _shown_setting(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} = {json.dumps(item)}" for key, item in value.items()) or "defaults"
    return "all devices" if value is None else str(value)


def helpful(a: Result, b: Result, progress: Progress) -> str:
    """Return the effects of parts that are 10 % better on two runs as HTML."""
    parts = []
    for name, result in (("A", a), ("B", b)):
        parts.append(f"<h3>{name}</h3>{gains(result.sensitivities())}")
        progress.check()
    return "".join(parts)


def files(a: Experiment, b: Experiment) -> list[File]:
    """Return both experiments as files, and a program with the same comparison."""
    program = f"""import ddlsim
from ddlsim.run.metrics import METRICS, record

a = ddlsim.simulate({SCHEMA.expression(a, "")})
b = ddlsim.simulate({SCHEMA.expression(b, "")})
records = [record(a), record(b)]
for name, metric in METRICS.items():
    values = [each.get(name) for each in records]
    if None not in values:
        print(f"{{metric.heading}}: {{metric.write(values[0])}} -> {{metric.write(values[1])}}")
"""
    return [File("a.toml", a.to_toml()), File("b.toml", b.to_toml()), File("what_if.py", program)]
