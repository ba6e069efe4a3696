"""Write docs/accuracy.md, its pictures and deviations/learned.toml: `python -m accuracy.report` (`make accuracy`)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path

from matplotlib.ticker import LogLocator, NullFormatter

from accuracy.deviations import FILE, halves, scored, series_left_out, words, written
from accuracy.families import FAMILIES, Family
from accuracy.rows import Omitted, Row, covered, mean_error, skill
from ddlsim.output_files import write_text
from ddlsim.report.drawing import COLOURS, MARKERS, figure, save

__all__ = ["main", "page", "picture"]

MANY = 100  #: rows above which a section has a line per case instead
SHOWN = 6  #: misses of one cause that are named
DOCS = Path(__file__).parents[1] / "docs"
HEAD = """# Accuracy

What ddlsim predicts beside what was measured, failures included. This page is generated: `make accuracy` (some minutes)
simulates everything again and writes this page and its pictures; the command at each section prints its rows. The
measurements lie in `accuracy/data/`, with their sources (repository, commit and path; or title).

Each section says which rows calibrate it. All others are predictions, and only these count: "mean" is the mean of
|predicted - measured| / measured. Constants that are not calibrated are data-sheet values and those of NCCL's topology
model (`accuracy/machines.py`), the same for all cases.

No constant was tuned to a row that counts. But the mechanisms were modelled by people who knew these rows; choices that
rows suggested are listed [below](#choices-made-after-seeing-rows). Cases the authors have not seen are better judges.
Every figure of the data files is predicted, or listed at the [end](#what-is-not-predicted) with the reason.

| measurements | target | mean | median | worst | predictions | |
| --- | --- | --- | --- | --- | --- | --- |
"""
SKILL_HEAD = """
Beside the errors: what they would be if everything stayed as it was calibrated (the step time of one machine or device,
perfect scaling where the batch of a device changes, no gain of a technique), how many times smaller they are than that
(skill), the error of what is added to it (the sum of |predicted - measured| over that of |measured - unchanged|), and
how many of the 95 % intervals have the measured figure in them, with the median of half their width
([how often intervals hold](#how-often-intervals-hold)).

| measurements | mean error | if nothing changed | skill | error of what is added | intervals cover | half their width |
| --- | --- | --- | --- | --- | --- | --- |
"""
INTERVALS = """
## How often intervals hold

Intervals claim 95 %. Where no measurement of the same operation says how far off a prediction is, they rest on how far
predictions of the same kind were off ([learned deviations](calibration.md#learned-deviations),
`deviations/learned.toml`, which `python -m accuracy.deviations` and `make accuracy` write). No series is judged by
itself above: its intervals rest on all other series, as for an unseen system or algorithm. Over
all series, rows that do not count included: {series}.

If half of the rows, drawn at random, judge the other half, as for further settings of the systems and algorithms
here: {halves}.

Curves through measured sizes (NCCL sweeps) are judged by sizes that were left out.
"""
CHOICES = """
## Choices made after seeing rows

Each has a physical or documented reason, but its authors had seen the rows that it improves:

- Weak scaling: TensorFlow's replicated variables are reduced after the backward pass (six rows here suggested it; of a
  model unknown to the authors the row became worse). MXNet's servers work at 10 GB/s, one thread's memory traffic
  (since 1.5 at 60 GB/s where its code uses all cores: the version is that of ByteScheduler's Dockerfile), and its
  devices copy at a rate that the one-machine row gives. That devices of a machine share their input and are not equally
  fast was looked for because rows of one machine were too fast; both figures are those of code and of others.
- Strong scaling: the fixed part c0 of a series of two rows is that of other series of its model.
- Gains: nothing overlaps in the DGC case, and a backbone stands in for its detector; ByteScheduler's batch of 32 is not
  stated, its credit is the best of two, and its machines copy at a rate calibrated on their one-machine row.
- NCCL sweeps are linear in the size between two calibrated sizes. Gloo on AWS: connections, window and slow start are
  Linux's and AWS's, which of them count was seen in point-to-point rows only. Intervals: that curves through all sizes
  deviate by half of what leaving a size out gives, which kinds of prediction there are, and that a kind counts as
  twenty rows of the one below it, was chosen on visible rows.
- Mini-cluster: rows below 64 KiB and two-way rows under cubic do not count; asynchronous workers of equal speed start
  spread over a cycle, as together they were off by 12 to 38 %, and at random if their pushes do not fit into a cycle
  one after the other, as spread they were 28 % too fast. Which windows count in an incast was seen in other pushes
  between namespaces (`incast.csv`).
- DLRM: all wait for the GPU with the bottom MLP, and products are made in waves. torchgpipe: when activations are
  computed again. Memory: which activations stay was read in PyTorch's formulas because the row of U-Net (6, 72) did not
  fit. Das: small batches lose speed, and two batches that are not stated.
- DeepSpeed: gradients are summed after all passes and stages wait while tensors travel (its code says so).
- Software stacks. Which numbers a stack has (a share of the rate of products, traffic of element-wise work) was seen
  in the visible rows; `python -m accuracy.stacks fit` fits them. After rows had been seen: operands of MXFP8 are read
  twice (its rows are slower than per-tensor FP8), NVFP4 keeps 15 % of the layers in bf16 (NVIDIA's paper; the row was
  25 % too fast), slices of TPUs sum after the backward pass and hide collectives of tensor groups (MaxText's
  configuration and XLA's papers; rows were 12 % off both ways), Megatron-Bridge keeps gradients in bf16 and
  recomputes as many layers as memory needs (the layout says neither), Megatron of March 2024 has FlashAttention-2,
  power limits an H100 at 500 W by a square root, and LLM Foundry has a stack beside PyTorch's FSDP.
"""
TAIL = """
## What is not predicted

| case | figures | reason |
| --- | --- | --- |
"""


def beside(family: Family, rows: Sequence[Row], left_out: Mapping[int, Row]) -> str:
    """Return a family's line of the second table, "" where nothing is known beside the errors; with the intervals
    that its series have if they are `left_out` of what is learned (by id of the row)."""
    counted = [left_out.get(id(row), row) for row in predictions(family, rows)]
    judged = [row for row in counted if isfinite(row.unchanged)]
    (naive, added), intervals = skill(counted), covered(counted)
    if not judged and intervals is None:
        return ""
    error = mean_error(judged or counted)
    parts = [f"{naive:.1%}", f"{naive / error:.1f}", f"{added:.0%}"] if judged else ["", "", ""]
    parts += [f"{part:.0%}" if i == 0 else f"{part:.1%}" for i, part in enumerate(intervals)] if intervals else ["", ""]
    return f"| [{family.title}](#{anchor(family.title)}) | {error:.1%} | {' | '.join(parts)} |\n"


def not_predicted(omitted: Sequence[Omitted]) -> str:
    """Return a table of what is not predicted, a line per case and reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for each in omitted:
        whats = groups.setdefault((each.case, each.reason), [])
        whats += [each.what] if each.what not in whats else []
    return "".join(f"| {case} | {'; '.join(whats)} | {reason} |\n" for (case, reason), whats in groups.items())


def predictions(family: Family, rows: Sequence[Row]) -> list[Row]:
    """Return the rows that count for a family's target."""
    return [row for row in rows if not row.fitted_on and family.counts(row)]


def summary(family: Family, rows: Sequence[Row]) -> str:
    """Return a family's line of the first table."""
    counted = predictions(family, rows)
    title = f"| [{family.title}](#{anchor(family.title)}) | {family.limit:.0%} |"
    if not counted:
        fitted = statistics.fmean(abs(row.error) for row in rows)
        return f"{title} | | | 0 | not judged: calibrated on all {len(rows)} rows, {fitted:.1%} there |\n"
    errors = [abs(row.error) for row in counted]
    worst = max(counted, key=lambda row: abs(row.error))
    ratios, near, wrong = judged(rows)
    strict = len(near) == len(ratios) and not wrong  # of techniques each gain must be right, not only their mean
    reached = "reached" if mean_error(counted) <= family.limit and strict else "**missed**"
    if ratios and not strict:
        reached += f": {len(near)} of {len(ratios)} gains within 15 %"
    return (
        f"{title} {mean_error(counted):.1%} "
        f"| {statistics.median(errors):.1%} | {worst.error:+.1%} | {len(counted)} | {reached} |\n"
    )


def anchor(title: str) -> str:
    """Return the anchor that Markdown makes of a heading."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c == "-")


def section(family: Family, rows: Sequence[Row]) -> str:
    """Return a family's part of the page."""
    parts = [
        f"\n## {family.title}\n\n`python -m accuracy.{family.script}`. Calibrated on: {family.calibration}\n\n",
        f"![measured against predicted](pictures/accuracy_{family.key}.png)\n\n",
    ]
    if len(rows) > MANY:
        return "".join(parts) + by_case(family, rows) + misses(family, rows)
    parts.append("| case | | measured | predicted | unit | error |\n| --- | --- | --- | --- | --- | --- |\n")
    for row in rows:
        error = "calibrated" if row.fitted_on else f"{row.error:+.1%}"
        what = f"{row.what} ({row.note})" if row.note else row.what
        parts.append(f"| {row.case} | {what} | {row.measured:.4g} | {row.predicted:.4g} | {row.unit} | {error} |\n")
    remark = family.remark()
    return "".join(parts) + (f"\n{remark}\n" if remark else "") + gains(rows) + misses(family, rows)


def by_case(family: Family, rows: Sequence[Row]) -> str:
    """Return a table with a line per case and note, for families of very many rows."""
    cases: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        note = "" if row.note.startswith("histograms") else row.note
        cases.setdefault((row.case, note), []).append(row)
    lines = ["| case | | rows | median | mean | worst | |\n| --- | --- | --- | --- | --- | --- | --- |\n"]
    for (case, note), members in cases.items():
        errors = [abs(row.error) for row in members]
        worst = max((row.error for row in members), key=abs)
        counts = "" if any(family.counts(r) and not r.fitted_on for r in members) else "does not count"
        lines.append(
            f"| {case} | {note} | {len(members)} | {statistics.median(errors):.1%} | {statistics.mean(errors):.1%} "
            f"| {worst:+.1%} | {counts} |\n"
        )
    return "".join(lines)


def judged(rows: Sequence[Row]) -> tuple[list[Row], list[Row], list[Row]]:
    """Return the ratios that are predictions, those whose gain (ratio - 1) is within 15 % of the measured one, and
    those whose gain has the wrong sign."""
    ratios = [row for row in rows if row.unit == "x" and not row.fitted_on]
    near = [row for row in ratios if abs(row.predicted - row.measured) <= 0.15 * abs(row.measured - 1.0)]
    return ratios, near, [row for row in ratios if (row.predicted - 1.0) * (row.measured - 1.0) < 0.0]


def gains(rows: Sequence[Row]) -> str:
    """Return how near gains are, where rows are ratios."""
    ratios, near, wrong = judged(rows)
    if not ratios:
        return ""
    names = ", ".join(f"{row.case} {row.what} ({row.measured:.3g}, predicted {row.predicted:.3g})" for row in wrong)
    return (
        f"\nThe errors are those of ratios. Of the gains, ratio - 1, {len(near)} of {len(ratios)} are within 15 % of "
        f"the measured gain. The direction is wrong in {len(wrong)}{': ' + names if wrong else ''}.\n"
    )


def misses(family: Family, rows: Sequence[Row]) -> str:
    """Return the predictions that are further off than the family's target (of gains: off the measured gain), with
    what explains them."""
    ratios, near, _ = judged(rows)
    by_cause: dict[str, list[Row]] = {}
    for row in predictions(family, rows):
        if row not in near if row in ratios else abs(row.error) > family.limit:
            by_cause.setdefault(family.cause(row), []).append(row)
    if not by_cause:
        return "\nNo prediction is further off than the target for the mean.\n"
    target = "the target for the mean" if not ratios else f"{family.limit:.0%} of the measured gain"
    lines = [f"\nFurther off than {target}:\n\n"]
    for cause, missed in by_cause.items():
        named = sorted(missed, key=lambda row: -abs(row.error))[:SHOWN]
        where = "; ".join(f"{row.case}, {row.what} ({row.error:+.1%})" for row in named)
        where += f"; and {len(missed) - SHOWN} more" if len(missed) > SHOWN else ""
        lines.append(f"- {where}: {cause}.\n")
    return "".join(lines)


def picture(family: Family, rows: Sequence[Row], path: Path) -> None:
    """Draw predicted against measured of a family, and below it the errors, each with the target's band."""
    made = figure(6.0, 5.6)
    above, below = made.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    low = 0.8 * min(min(row.measured, row.predicted) for row in rows)
    high = 1.25 * max(max(row.measured, row.predicted) for row in rows)
    line = [low, high]
    above.plot(line, line, color="#555555", linewidth=0.8)
    within = [[(1.0 + sign * family.limit) * x for x in line] for sign in (-1, 1)]
    above.fill_between(line, within[0], within[1], color="#dddddd", label=f"within {family.limit:.0%}")
    below.axhline(0.0, color="#555555", linewidth=0.8)
    below.axhspan(-100 * family.limit, 100 * family.limit, color="#dddddd")
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(group(row.case), []).append(row)
    if len(groups) > len(MARKERS):  # more than a legend can tell apart: machines alone
        groups = {}
        for row in rows:
            groups.setdefault(row.case.partition("_")[0], []).append(row)
    for i, (name, members) in enumerate(groups.items()):
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        for fitted in (False, True):
            chosen = [row for row in members if row.fitted_on == fitted]
            x = [row.measured for row in chosen]
            faces = "none" if fitted else colour
            above.scatter(x, [r.predicted for r in chosen], s=26, marker=marker, facecolors=faces, edgecolors=colour)
            below.scatter(x, [100 * r.error for r in chosen], s=26, marker=marker, facecolors=faces, edgecolors=colour)
        above.scatter([], [], marker=marker, color=colour, label=name)
    above.scatter([], [], marker="o", facecolors="none", edgecolors="#555555", label="open: calibrated")
    above.set(xscale="log", yscale="log", xlim=line, ylim=line, ylabel=f"predicted ({rows[0].unit})")
    below.set(xlabel=f"measured ({rows[0].unit})", ylabel="error (%)")
    for axis in (below.xaxis, above.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 300.0 else (1.0,)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    above.set_title(family.title, fontsize=10 if len(family.title) <= 66 else 8)
    above.legend(fontsize=7, loc="upper left")
    save(made, path)


def group(case: str) -> str:
    """Return the system that a case is of: the first words of its name."""
    if ":" in case:
        return case.split(":")[0].removesuffix("_series2")
    words = case.replace("-", "_").split("_")
    return " ".join(words[:2]) if "_" in case else case


def page(measured: Sequence[tuple[Family, list[Row]]]) -> str:
    """Return the page."""
    table = "".join(summary(family, rows) for family, rows in measured)
    every = [each for family, rows in measured for each in scored(family.key, rows)]
    left_out = {id(each.row): row for each, row in zip(every, series_left_out(every), strict=True)}
    skills = "".join(beside(family, rows, left_out) for family, rows in measured)
    held = INTERVALS.format(series=words(every, series_left_out), halves=words(every, halves))
    omitted = [each for family, _ in measured for each in family.left_out()]
    sections = "".join(section(family, rows) for family, rows in measured)
    return HEAD + table + SKILL_HEAD + skills + held + CHOICES + sections + TAIL + not_predicted(omitted)


def main() -> None:
    """Simulate everything and write page, pictures and what is learned."""
    measured = [(family, family.rows()) for family in FAMILIES]
    for family, rows in measured:
        same_unit = [row for row in rows if row.unit == rows[0].unit]
        picture(family, same_unit, DOCS / "pictures" / f"accuracy_{family.key}.png")
    write_text(DOCS / "accuracy.md", page(measured))
    write_text(FILE, written([each for family, rows in measured for each in scored(family.key, rows)]))


if __name__ == "__main__":
    main()
