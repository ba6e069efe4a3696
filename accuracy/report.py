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
from ddlsim.readable import count
from ddlsim.report.drawing import COLOURS, MARKERS, figure, saved

__all__ = ["main", "page", "picture"]

MANY = 100  #: rows above which a section has a line per case instead
SHOWN = 6  #: misses of one cause that are listed
NEAR, SHARE = 0.15, 0.6  #: error of a gain and its arms that is near, share of gains that must be
SMALL = 0.03  #: a gain is small if this error of a step changes it by NEAR
DOCS = Path(__file__).parents[1] / "docs"
HEAD = """# Accuracy

{verdict}

| measurements | goal | mean error | bias | median | worst | rows | rule of thumb | skill | coverage | result |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
READING = """
## How to read the table

- **Rows** is the number of measured values that are judged. Values used for calibration are not counted; each family's
  page says which ones these are.
- **Result.** A goal is reached if the mean error of the counted rows does not exceed it. For families about scaling
  across machines, single-machine rows are listed on a separate line and do not count towards the goal. Gains of
  techniques must meet a second condition: in at least 60 % of the rows, the errors in the gain (ratio - 1) and in the
  step times without and with the technique must all be within 15 %.
- **Mean error** is the mean of `|predicted - measured| / measured`. **Bias** is the mean of
  `(predicted - measured) / measured`. A positive bias means that predicted times are too long or that predicted rates
  are too high.
- **Rule of thumb** is the mean error of naive predictions. Weak scaling: the calibrated step time of one machine or
  device holds at every scale. Strong scaling: the step time is proportional to the batch per device. Techniques: they
  save no time. **Skill** is the error of the naive predictions divided by ddlsim's error. If the skill is below 1, the
  naive predictions are better.
- **Coverage** is the share of measured values that fall within their 95 % prediction intervals ([see
  below](#how-often-intervals-hold)).

Constants that are not calibrated come from data sheets and from NCCL's topology model (`accuracy/machines.py`). They
are the same in all cases, and none was tuned to fit any of the counted rows. However, the authors had seen these rows
when they designed the models, and the rows influenced some [modelling choices](#choices-made-after-seeing-rows). Cases
that the authors had not seen would be a better test.

The measurements and their sources are in `accuracy/data/`. `make accuracy` reruns all simulations, which
takes about 20 minutes. It then regenerates this page, along with a page and a plot for each family. A [separate
page](accuracy/not_predicted.md) lists measured values that ddlsim does not predict, with the reasons.
"""
INTERVALS = """
## How often intervals hold

Prediction intervals are meant to contain 95 % of the measured values. If the operation itself has not been measured,
its interval is based on the errors in earlier predictions of the same kind ([learned
deviations](calibration.md#learned-deviations), `deviations/learned.toml`).

**New systems.** The intervals for each series are computed from the other series only, as if its system or algorithm
were new. Over all series, including values that are not counted above, {series}.

**New settings of these systems.** The rows are divided at random into two halves, and the intervals for each half are
computed from the other half. With these intervals, {halves}.

Curves through measured sizes (NCCL sweeps) are tested on sizes that were left out of the fit.
"""
CHOICES = """
## Choices made after seeing rows

Each of the following choices has a physical or documented reason, but was made after the authors had seen the rows that
it improves.

**Weak scaling**

- Six rows suggested that TensorFlow reduces replicated variables only after the backward pass. This assumption was
  withdrawn, because other rows contradict it.
- Updates in Paddle with mixed precision and in TensorFlow's distributed sessions are assumed to take a fixed time,
  which is derived from the rows with eight devices.
- MXNet's servers are assumed to use a single thread that moves 10 GB/s through memory. From version 1.5 on, they are
  assumed to reach 60 GB/s in operations that use all cores. The MXNet version used with ByteScheduler comes from
  ByteScheduler's Dockerfile. The copy rate between MXNet's devices is calibrated on the single-machine row.
- The devices of a machine are assumed to share an input pipeline and to differ in speed. Both effects were examined
  because the predicted single-machine steps were too short. Their magnitudes come from source code and from other
  publications. Two details of MXNet's pipeline were added later: the pages of its loader's arrays are cleared, and
  copies overlap with the loader. Without them, AlexNet's error on 32 to 256 GPUs would be -24 instead of -9 %.
- Paddle's machines are assumed to send through host memory, because their topology rules out GPUDirect. This was found
  when VGG-16 was known to be predicted 20 % too fast. The rate comes from other machines.

**Strong scaling**

- If a series has only two rows, the fixed part of its step time is taken from other series with the same model.

**Gains of techniques**

- In the DGC case, communication is assumed not to overlap with computation, and the object detector is represented by
  its backbone network.
- The source of the ByteScheduler rows does not state the batch size, which is assumed to be 32. Two values of the
  scheduler's credit are simulated, and the faster one counts. The copy rate within a machine is calibrated on the
  single-machine row.
- For 1-bit Adam, the single-machine step was first taken as the compute time of a device. The steps with
  compression were then predicted 11 to 20 % too long. The compute time now comes from the throughput of one GPU, which
  the source states, and DeepSpeed's compression takes the passes over memory that its code contains. Without these
  passes, the compressed step of 8 GPUs would be 17.2 instead of 13.5 % too short. Dense steps were predicted 2 to 25 %
  too short before and are predicted 9 to 30 % too short now.
- As in weak scaling, the GPUs of ByteScheduler and 1-bit Adam differ in speed by the default of `Spread()`.

**Transformers**

- The time in which micro-batches add up their gradients was modelled after the rows of Megatron-LM on A100 were known,
  which were predicted too fast. It follows from the framework's code and from the memory bandwidth. The 363 rows of one
  machine neither confirm nor refute it: with it they are fitted within 5.7 instead of 5.6 %.
- Synchronous training is assumed to wait for the slowest GPU (`measured_on` of the stack) where it is fitted to one
  machine: `megatron-2021` and `llm-foundry`. The common bias of Megatron-LM's rows on A100 was known, and so was that
  LLM Foundry's rows improve, before their pages adopted it. The variation is the default of `Spread`.
- Checkpoints of whole blocks in rows of fms-fsdp follow its code. Its rows do not say how many blocks; every second one
  is assumed.
- The stack `fms-fsdp` was added after its rows were known. Its element-wise kernels were measured on one H100. Its
  share of the rate of matrix products is fitted to the row of Llama 2 7B on A100.
- The copies in PyTorch's FSDP, Adam as `foreach`, whole-block recomputation in LLM Foundry's rows of A100 40GB
  (PyTorch 1.13.1) and the parts of torchtitan that are listed below follow the frameworks' code. The rows were known.
  The stacks were then fitted again, and the numbers are those of the least-squares fits, rounded to two digits. LLM
  Foundry's rows of one machine are described within 3.8 instead of 4.6 %. Earlier numbers were rounded more coarsely,
  after the rows of several machines had been seen.
- The A100's tiles, Megatron's loss and measured all-reduces of tensor groups were adopted together after all rows were
  known, and all stacks that use the A100 were fitted again. Only fitted rows and measured products decided. With tiles,
  LLM Foundry's rows of one machine give the stack similar numbers on A100 (`gemm` 0.99, `elementwise` 2.2) and on H100
  (0.94, 2.5); with one tile, those on A100 were 0.89 and 1.1. Adam's 60 bytes per parameter contradict the fitted steps
  and were left out, although Megatron-LM on A100 would be 4.4 instead of 4.9 % off. Mean errors before and after:
  LLM Foundry on several machines 4.1 and 3.8 %, own runs 5.6 and 5.1 %, fms-fsdp 5.5 and 6.5 %, Megatron-DeepSpeed on
  several machines 8.8 and 8.1 %, Megatron-LM 6.3 and 4.9 %, its table 5 3.1 and 3.6 %, large runs 8.7 and 9.1 %.

**Collectives**

- In NCCL sweeps, times between two calibrated sizes are interpolated linearly in the size.
- The last step of NCCL's rings inside a machine was modelled after other measurements, of vTrain's and Vidur's
  repositories, but the rows of eight A100 were known.
- The launches of one thread were modelled after NCCL's source, but the rows of all three sweeps were known. Two numbers
  are fitted to the smaller sizes of one sweep.
- Gloo on AWS is simulated with the number of connections, the TCP window and the slow start of Linux and AWS. Only
  point-to-point rows were used to decide which of these settings matter.
- For NCCL on AWS, network interfaces of unequal speed were examined because the times predicted without rate limits
  were too short, and increasingly so with more machines. The spread of the interface speeds comes from other
  measurements. Because of the NCCL rows, this spread is applied to one direction only.

**Intervals**

- If a curve passes through all measured sizes, its deviation is taken to be half of the error at a size left out of the
  fit.
- Predictions are grouped into a hierarchy of kinds. When the errors of a kind are estimated, the kind one level up
  counts as much as twenty rows.

**Mini-cluster**

- Messages smaller than 64 KiB, and two-way traffic under CUBIC, are not counted.
- In the simulation, the start times of equally fast asynchronous workers are spread over one cycle. When all workers
  started together, the error was 12 to 38 %. If the combined pushes of all workers take longer than one cycle, the
  workers start at random times instead. Spreading their start times over one cycle made the predictions 28 % too fast.
- Two choices are based on additional measurements of pushes between namespaces: which windows matter in an incast
  (`incast.csv`), and how often BBR times out (longer pushes, `incast_bbr.csv`).
- Windows of BBR that vary between messages, and acknowledgements that wait behind data, were modelled when the rows of
  servers were known. The windows come from ten other configurations of servers, which are predicted within 2.9 instead
  of 11.1 %. They lower the mean error of the 13 update rates from 4.6 to 2.7 %, but four workers with small messages
  become 4.5 instead of 1.6 % too slow.
- Links serve messages in order of arrival, with two exceptions, which share links fairly. Answers of servers are handed
  over in pieces by several threads in turns. For messages to two neighbours, the source does not describe the order;
  fair sharing was chosen because it reduces the mean error from 15.6 to 5.0 %. A limit of 128 KiB per connection in the
  sender's queue (TCP small queues) would reduce it to 2.5 %, but was rejected: it raises the error for pipelines from
  0.6 to 0.9 % and that for gossip from 0.4 to 3.9 %.

**Other models**

- For DLRM, all GPUs are assumed to wait for the GPU that holds the bottom MLP, matrix products are computed in waves of
  tiles, and the GPU waits for launches outside of the CUDA graph (without these, the error would be 13.9 %).
- For torchgpipe, the rule for recomputing activations was chosen after the authors had seen the rows.
- For peak memory, the set of activations that stay in memory was derived from PyTorch's formulas, because an earlier
  prediction for U-Net (6, 72) was wrong. The memory that the allocator reserves is simulated, because two predictions
  for AmoebaNet-D were 35 % and 54 % too low.
- For hybrids on Xeons, small batches are assumed to take more time per sample. Two batch sizes are assumptions, because
  the source does not state them.
- For DeepSpeed, gradients are reduced after all passes, and stages wait while tensors are in flight, as in DeepSpeed's
  code.

**Software stacks**

- The rows of families that use a software stack showed which parameters describe such a stack, for example the fraction
  of the peak rate that matrix products reach, or the memory traffic of element-wise operations.
  `python -m accuracy.stacks fit` fits these parameters.
- MXFP8 kernels are assumed to read their operands twice, because the MXFP8 rows are slower than the rows with
  per-tensor FP8.
- With NVFP4, 15 % of the layers are assumed to stay in bf16, as in NVIDIA's paper. Without this rule, the prediction
  was 25 % too fast.
- On TPU slices, gradients are assumed to be reduced after the backward pass, and the collectives of tensor groups are
  assumed to be hidden by computation, as in MaxText's configuration and the papers on XLA. Under earlier assumptions,
  some predictions were 12 % too high and others 12 % too low.
- Megatron-Bridge is assumed to keep gradients in bf16 and to recompute as many layers as memory requires, because the
  published layouts specify neither.
- The March 2024 version of Megatron is simulated with FlashAttention-2.
- The speed of a power-limited H100 is assumed to be proportional to the square root of its power limit minus 120 W.
- LLM Foundry is simulated with its own software stack instead of the one for PyTorch FSDP.
- For torchtitan's layouts with tensor and pipeline parallelism, earlier predictions of speed or memory were off by 4 to
  41 %. Such layouts are now simulated with torchtitan's defaults: weights are sharded over replicas, there are as many
  micro-batches as stages, and recomputation skips the last matrix products. Peak memory is the sum of the tensors that
  PyTorch's code keeps, without the fitted factor that was used before.
- Because Llama 3.1 405B under torchtitan was predicted 11 % too fast (16 % with FSDP's copies), the code was searched
  for causes: the table of the interleaved schedule, async tensor parallelism without overlap of some reduce-scatters,
  FP8 products that add up in full precision, and gathers in 8 bits. As the stack is fitted to runs of 8 and 64 GPUs,
  GPUs are as slow as the slowest one is expected to be (`measured_on` of the stack).
"""
NOT_PREDICTED = """# What is not predicted

This table lists the figures in the data files of the [accuracy page](../accuracy.md) that are not predicted.

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
        words = f"not judged: all {len(rows)} rows are calibrated (mean error {fitted:.1%})"
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
        reached += f": {len(near)} of {len(ratios)} gains with both steps within 15 %, {len(wrong)} with the wrong sign"
    return reached


def _figures(rows: Sequence[Row]) -> str:
    """Return the cells of a line: errors, their number, the rule of thumb, and the coverage of intervals."""
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
        "See [all families](../accuracy.md). To recompute the rows below, run "
        f"`python -m accuracy.{family.script}`.\n\n",
        f"**Calibration.** {family.calibration}\n\n",
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


def _is_small(row: Row) -> bool:
    return row.measured * SMALL >= NEAR * abs(row.measured - 1.0)


def gains(rows: Sequence[Row]) -> str:
    """Return a paragraph about the errors of gains and of their two steps, "" if no row is a ratio."""
    ratios, near, wrong = judged(rows)
    if not ratios:
        return ""
    names = ", ".join(
        f"{row.case} {row.what} (measured gain {row.measured - 1:+.1%}, predicted gain {row.predicted - 1:+.1%})"
        for row in wrong
    )
    exact, steps, small = (sum(map(is_so, ratios)) for is_so in (_gain_is_near, _arms_are_near, _is_small))
    arms = [
        (name, [row.arm_errors[i] for row in ratios if row.arms])
        for i, name in enumerate(("without the technique", "with it"))
    ]
    biases = " and ".join(
        f"{statistics.mean(map(abs, errors)):.1%} {name} (bias {statistics.mean(errors):+.1%})"
        for name, errors in arms
        if errors
    )
    mean = f" The mean error in the step times is {biases}." if biases else ""
    return (
        "\nEach row contains the throughput with the technique divided by the throughput without it. The last three "
        "columns list the errors in this ratio, in the step time without the technique, and in the step time with it. "
        f"The gain is the ratio minus 1. Of {len(ratios)} predicted gains, {exact} are within {NEAR:.0%} of the "
        "measured gains. "
        f"In {count(steps, 'row')}, both predicted step times are within {NEAR:.0%} of the measured ones. The gain and "
        f"both step times are within {NEAR:.0%} in {count(len(near), 'row')}.{mean} The predicted gain has the wrong "
        f"sign in {count(len(wrong), 'row')}{': ' + names if wrong else ''}. In {count(small, 'row')}, the gain is so "
        f"small that an error of {SMALL:.0%} in one of its step times changes it by {NEAR:.0%} or more.\n"
    )


def misses(family: Family, rows: Sequence[Row]) -> str:
    """Return a table of the predictions that miss the family's goal (for gains: in the gain or in one of its steps),
    grouped by the explanation."""
    ratios, near, _ = judged(rows)
    by_cause: dict[str, list[Row]] = {}
    for row in predictions(family, rows):
        if row not in near if row in ratios else abs(row.error) > family.limit:
            by_cause.setdefault(family.cause(row), []).append(row)
    if not by_cause:
        return f"\nNo prediction has an error above {family.limit:.0%}, the goal for the mean error.\n"
    which = (
        f"The goal is a mean error of at most {family.limit:.0%}. The following table explains the errors of "
        "individual rows that exceed this value:"
        if not ratios
        else f"The following table explains errors of more than {NEAR:.0%} in the gain or in a step time:"
    )
    lines = [f"\n{which}\n\n| explanation | rows |\n| --- | --- |\n"]
    for cause, missed in by_cause.items():
        named = sorted(missed, key=lambda row: -abs(row.error))[:SHOWN]
        where = "; ".join(f"{row.case}, {row.what} ({row.error:+.1%})" for row in named)
        where += f"; and {len(missed) - SHOWN} more" if len(missed) > SHOWN else ""
        lines.append(f"| {cause} | {where} |\n")
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
    if any(row.fitted_on for row in rows):
        above.scatter([], [], marker="o", facecolors="none", edgecolors="#555555", label="open: calibrated")
    above.set(xscale="log", yscale="log", xlim=line, ylim=line, ylabel=f"predicted ({rows[0].unit})")
    below.set(xlabel=f"measured ({rows[0].unit})", ylabel="error (%)")
    for axis in (below.xaxis, above.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 300.0 else (1.0,)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    above.set_title(family.title, fontsize=10 if len(family.title) <= 66 else 8)
    above.legend(fontsize=7, loc="upper left")
    saved(above, path)


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
    """Return the first sentences: how many families reach their goals, and the largest misses relative to the goal."""
    counted = [(family, predictions(family, rows), rows) for family, rows in measured]
    counted = [(family, found, rows) for family, found, rows in counted if found]
    missed = [(family, found) for family, found, rows in counted if not verdict(family, rows).startswith("reached")]
    missed.sort(key=lambda each: -mean_error(each[1]) / each[0].limit)
    worst = [f"[{family.title}](accuracy/{family.key}.md) ({mean_error(found):.0%})" for family, found in missed[:3]]
    return (
        f"ddlsim meets its accuracy goals for {len(counted) - len(missed)} of {len(counted)} families of measurements. "
        f"These families contain {sum(len(found) for _, found, _ in counted):,} measured values that were not used for "
        "calibration."
        + (
            f" The following families have the largest mean errors relative to their goals: {'; '.join(worst)}."
            if worst
            else ""
        )
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
