"""Write the pages of the accuracy, their pictures and deviations/learned.toml: `make accuracy`."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path

from matplotlib.ticker import LogLocator, NullFormatter

from accuracy.deviations import FILE, halves, scored, series_left_out, words, written
from accuracy.families import FAMILIES, Family
from accuracy.rows import Omitted, Row, bias, covered, mean_error, skill
from ddlsim.output_files import write_text
from ddlsim.report.drawing import COLOURS, MARKERS, figure, save

__all__ = ["main", "page", "picture"]

MANY = 100  #: rows above which a section has a line per case instead
SHOWN = 6  #: misses of one cause that are named
NEAR, SHARE = 0.15, 0.6  #: error of a gain and its arms that is near, share of gains that must be
DOCS = Path(__file__).parents[1] / "docs"
HEAD = """# Accuracy

{verdict}

| measurements | goal | mean error | bias | median | worst | rows | if nothing changed | skill | intervals cover | |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
READING = """
## How to read the table

- **Rows** are measured figures that nothing was calibrated on. Each family says which of its rows calibrate it; those
  count nowhere. A goal is reached if the mean error of the rows is within it. Of families that scale out, rows inside
  one machine stand in a line of their own and are not judged; of gains, six in ten must be within 15 %, the gain
  (ratio - 1) and the steps without and with the technique.
- **Mean error** is the mean of |predicted - measured| / measured, **bias** the mean with its sign: of times, above 0
  is too slow; of rates, too fast.
- **If nothing changed** is the error of a rule of thumb: everything stays as it was calibrated (the step time of one
  machine or device, perfect scaling where the batch of a device changes, no gain of a technique). **Skill** is that
  error over ours; below 1 the rule is better.
- **Intervals cover**: how many 95 % intervals have the measured figure in them ([below](#how-often-intervals-hold)).

Constants that are not calibrated are data-sheet values and those of NCCL's topology model (`accuracy/machines.py`),
the same for all cases. No constant was tuned to a row that counts. But the mechanisms were modelled by people who knew
these rows; [choices that rows suggested](#choices-made-after-seeing-rows) are listed. Cases the authors have not seen
are better judges.

The measurements lie in `accuracy/data/`, with their sources. `make accuracy` (some minutes) simulates everything again
and writes this page, the pages of the families and their pictures. Figures of the data files that are not predicted are
[listed with the reason](accuracy/not_predicted.md).
"""
INTERVALS = """
## How often intervals hold

Intervals claim 95 %. Where no measurement of the same operation says how far off a prediction is, they rest on how far
predictions of the same kind were off ([learned deviations](calibration.md#learned-deviations),
`deviations/learned.toml`). No series is judged by itself: its intervals rest on all other series, as for an unseen
system or algorithm. Over all series, rows that do not count included: {series}.

If half of the rows, drawn at random, judge the other half, as for further settings of the systems and algorithms
here: {halves}.

Curves through measured sizes (NCCL sweeps) are judged by sizes that were left out.
"""
CHOICES = """
## Choices made after seeing rows

Each has a physical or documented reason, but its authors had seen the rows that it improves:

- Weak scaling: that TensorFlow's replicated variables are reduced after the backward pass, which six rows here
  suggested, was withdrawn: other rows refute it. Fixed times of updates (Paddle in mixed precision, TensorFlow's
  distributed sessions) come from rows of eight devices. MXNet's servers work at 10 GB/s, one thread's memory traffic
  (since 1.5 at 60 GB/s where its code uses all cores: the version is that of ByteScheduler's Dockerfile), and its
  devices copy at a rate that the one-machine row gives. That devices of a machine share their input and are not equally
  fast was looked for because rows of one machine were too fast; both figures are those of code and of others.
- Strong scaling: the fixed part c0 of a series of two rows is that of other series of its model.
- Gains: nothing overlaps in the DGC case, and a backbone stands in for its detector; ByteScheduler's batch of 32 is not
  stated, its credit is the best of two, and its machines copy at a rate calibrated on their one-machine row.
- NCCL sweeps are linear in the size between two calibrated sizes. Gloo on AWS: connections, window and slow start are
  Linux's and AWS's, which of them count was seen in point-to-point rows only. NCCL on AWS: that unshaped interfaces are
  unequal was looked for because these rows were too fast, the more machines the more; their spread is that of others'
  measurements, and which direction has it follows these. Intervals: that curves through all sizes
  deviate by half of what leaving a size out gives, which kinds of prediction there are, and that a kind counts as
  twenty rows of the one below it, was chosen on visible rows.
- Mini-cluster: rows below 64 KiB and two-way rows under cubic do not count; asynchronous workers of equal speed start
  spread over a cycle, as together they were off by 12 to 38 %, and at random if their pushes do not fit into a cycle
  one after the other, as spread they were 28 % too fast. Which windows count in an incast was seen in other pushes
  between namespaces (`incast.csv`), and how often BBR times out in longer ones (`incast_bbr.csv`).
- DLRM: all wait for the GPU with the bottom MLP, and products are made in waves. torchgpipe: when activations are
  computed again. Memory: which activations stay was read in PyTorch's formulas because the row of U-Net (6, 72) did not
  fit, and what the allocator reserves is simulated because AmoebaNet-D's rows were 35 and 54 % too low. Das: small
  batches lose speed, and two batches that are not stated.
- DeepSpeed: gradients are summed after all passes and stages wait while tensors travel (its code says so).
- Software stacks. Which numbers a stack has (a share of the rate of products, traffic of element-wise work) was seen
  in the visible rows; `python -m accuracy.stacks fit` fits them. After rows had been seen: operands of MXFP8 are read
  twice (its rows are slower than per-tensor FP8), NVFP4 keeps 15 % of the layers in bf16 (NVIDIA's paper; the row was
  25 % too fast), slices of TPUs sum after the backward pass and hide collectives of tensor groups (MaxText's
  configuration and XLA's papers; rows were 12 % off both ways), Megatron-Bridge keeps gradients in bf16 and
  recomputes as many layers as memory needs (the layout says neither), Megatron of March 2024 has FlashAttention-2,
  power limits an H100 at 500 W by a square root, and LLM Foundry has a stack beside PyTorch's FSDP. torchtitan's
  layouts with tensor groups and pipelines were 4 to 41 % off in speed or memory; since then they shard weights over
  replicas, have as many micro-batches as stages, and recompute without last products, as its code does by default. Its
  peak memory was multiplied by a fitted number; now it consists of what PyTorch's code keeps.
"""
NOT_PREDICTED = """# What is not predicted

Figures of the data files behind the [accuracy page](../accuracy.md) that no prediction stands beside.

| case | figures | reason |
| --- | --- | --- |
"""


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


def summary(family: Family, rows: Sequence[Row], left_out: Mapping[int, Row] | None = None) -> str:
    """Return a family's lines of the table: the rows that are judged, and apart from them those inside one machine.

    left_out  rows by their id, with the intervals that their series have if they are left out of what is learned
    """
    counted = predictions(family, rows)
    if left_out is not None:
        counted = [left_out.get(id(row), row) for row in counted]
    inside = [row for row in counted if row.inside]
    judged_rows = [row for row in counted if not row.inside] or inside
    title = f"[{family.title}](accuracy/{family.key}.md)"
    if not judged_rows:
        fitted = statistics.fmean(abs(row.error) for row in rows)
        words = f"not judged: calibrated on all {len(rows)} rows, {fitted:.1%} there"
        return f"| {title} | {family.limit:.0%} {'| ' * 5}| 0 {'| ' * 3}| {words} |\n"
    line = f"| {title} | {family.limit:.0%} {_figures(judged_rows)} | {verdict(family, rows)} |\n"
    if len(inside) in (0, len(counted)):
        return line
    return f"{line}| - inside one machine | {_figures(inside)} | not judged |\n"


def verdict(family: Family, rows: Sequence[Row]) -> str:
    """Return whether a family reaches its goal, as an outsider would judge it."""
    counted = predictions(family, rows)
    out = [row for row in counted if not row.inside] or counted
    ratios, near, wrong = judged(rows)
    enough = len(near) >= SHARE * len(ratios)  # most gains must be right in both arms, not only on average
    reached = "reached" if mean_error(out) <= family.limit and enough else "**missed**"
    if ratios:
        reached += f": {len(near)} of {len(ratios)} gains and both steps within 15 %, the sign of {len(wrong)} wrong"
    return reached


def _figures(rows: Sequence[Row]) -> str:
    """Return the cells of a line: errors, their number, and what they are beside a rule of thumb."""
    errors = [abs(row.error) for row in rows]
    worst = max((row.error for row in rows), key=abs)
    comparable = [row for row in rows if isfinite(row.unchanged)]
    naive = skill(rows)[0]
    beside = f"{naive:.1%} | {naive / mean_error(comparable):.1f}" if comparable else "| "
    intervals = covered(rows)
    return (
        f"| {mean_error(rows):.1%} | {bias(rows):+.1%} | {statistics.median(errors):.1%} | {worst:+.1%} | {len(rows)} "
        f"| {beside} | {'' if intervals is None else f'{intervals[0]:.0%}'}"
    )


def section(family: Family, rows: Sequence[Row]) -> str:
    """Return a family's page."""
    parts = [
        f"# {family.title}\n\n",
        f"[All families](../accuracy.md). `python -m accuracy.{family.script}` prints these rows.\n\n",
        f"Calibrated on: {family.calibration}\n\n",
        f"![measured against predicted](../pictures/accuracy_{family.key}.png)\n\n",
    ]
    if len(rows) > MANY:
        return "".join(parts) + by_case(family, rows) + misses(family, rows)
    arms = " without | with |" if any(row.arms for row in rows) else ""
    parts.append(f"| case | | measured | predicted | unit | error |{arms}\n")
    parts.append(f"| --- | --- | --- | --- | --- | --- |{' --- | --- |' if arms else ''}\n")
    for row in rows:
        error = "calibrated" if row.fitted_on else f"{row.error:+.1%}"
        what = f"{row.what} ({row.note})" if row.note else row.what
        parts.append(f"| {row.case} | {what} | {row.measured:.4g} | {row.predicted:.4g} | {row.unit} | {error} |")
        parts.append("".join(f" {each:+.1%} |" for each in row.arm_errors) + "\n")
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
    """Return the ratios that are predictions, those whose gain (ratio - 1) is within 15 % of the measured one and whose
    steps without and with the technique are as well, and those whose gain has the wrong sign."""
    ratios = [row for row in rows if row.unit == "x" and not row.fitted_on]
    near = [row for row in ratios if _gain_is_near(row) and _arms_are_near(row)]
    return ratios, near, [row for row in ratios if (row.predicted - 1.0) * (row.measured - 1.0) < 0.0]


def _gain_is_near(row: Row) -> bool:
    return abs(row.predicted - row.measured) <= NEAR * abs(row.measured - 1.0)


def _arms_are_near(row: Row) -> bool:
    return max(map(abs, row.arm_errors), default=0.0) <= NEAR


def gains(rows: Sequence[Row]) -> str:
    """Return how near gains are, in the steps without and with the technique, where rows are ratios."""
    ratios, near, wrong = judged(rows)
    if not ratios:
        return ""
    names = ", ".join(f"{row.case} {row.what} ({row.measured:.3g}, predicted {row.predicted:.3g})" for row in wrong)
    exact, steps = sum(map(_gain_is_near, ratios)), sum(map(_arms_are_near, ratios))
    arms = [(name, [row.arm_errors[i] for row in ratios if row.arms]) for i, name in enumerate(("without", "with"))]
    biases = " and ".join(
        f"{statistics.mean(map(abs, errors)):.1%} {name} (bias {statistics.mean(errors):+.1%})"
        for name, errors in arms
        if errors
    )
    return (
        "\nThe errors are those of ratios, and of the steps without and with the technique. "
        f"Of {len(ratios)} gains, ratio - 1, {exact} are within 15 % of the measured gain, {steps} within 15 % in both "
        f"steps, {len(near)} in all three; steps are off by {biases} on average. The direction is wrong in "
        f"{len(wrong)}{': ' + names if wrong else ''}.\n"
    )


def misses(family: Family, rows: Sequence[Row]) -> str:
    """Return the predictions that are further off than the family's target (of gains: off in an arm), with
    what explains them."""
    ratios, near, _ = judged(rows)
    by_cause: dict[str, list[Row]] = {}
    for row in predictions(family, rows):
        if row not in near if row in ratios else abs(row.error) > family.limit:
            by_cause.setdefault(family.cause(row), []).append(row)
    if not by_cause:
        return "\nNo prediction is further off than the target for the mean.\n"
    target = "the target for the mean" if not ratios else f"{NEAR:.0%}, the gain or one of its two steps"
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
    """Return the page that sums up."""
    every = [each for family, rows in measured for each in scored(family.key, rows)]
    left_out = {id(each.row): row for each, row in zip(every, series_left_out(every), strict=True)}
    table = "".join(summary(family, rows, left_out) for family, rows in measured)
    held = INTERVALS.format(series=words(every, series_left_out), halves=words(every, halves))
    return HEAD.format(verdict=answer(measured)) + table + READING + held + CHOICES


def answer(measured: Sequence[tuple[Family, list[Row]]]) -> str:
    """Return the first sentences: how many families reach their goals, and which miss them by most."""
    counted = [(family, predictions(family, rows), rows) for family, rows in measured]
    counted = [(family, found, rows) for family, found, rows in counted if found]
    missed = [(family, found) for family, found, rows in counted if not verdict(family, rows).startswith("reached")]
    missed.sort(key=lambda each: -mean_error(each[1]) / each[0].limit)
    worst = "; ".join(
        f"[{family.title}](accuracy/{family.key}.md), {mean_error(found):.0%}" for family, found in missed[:3]
    )
    return (
        f"{len(counted) - len(missed)} of {len(counted)} families of measurements are predicted within their goals "
        f"({sum(len(found) for _, found, _ in counted):,} rows that nothing was calibrated on). Furthest off: {worst}."
    )


def main() -> None:
    """Simulate everything and write pages, each when its rows are there, pictures and what is learned."""
    (DOCS / "accuracy").mkdir(exist_ok=True)
    measured: list[tuple[Family, list[Row]]] = []
    for family in FAMILIES:
        print(f"{len(measured) + 1} of {len(FAMILIES)}: {family.title}", file=sys.stderr, flush=True)
        rows = family.rows()
        same_unit = [row for row in rows if row.unit == rows[0].unit]
        picture(family, same_unit, DOCS / "pictures" / f"accuracy_{family.key}.png")
        write_text(DOCS / "accuracy" / f"{family.key}.md", section(family, rows))
        measured.append((family, rows))
    write_text(DOCS / "accuracy.md", page(measured))
    omitted = [each for family, _ in measured for each in family.left_out()]
    write_text(DOCS / "accuracy" / "not_predicted.md", NOT_PREDICTED + not_predicted(omitted))
    write_text(FILE, written([each for family, rows in measured for each in scored(family.key, rows)]))


if __name__ == "__main__":
    main()
