"""Plans as text: descriptions of tasks, and the table of tasks."""

from __future__ import annotations

import numpy as np

from ddlsim.plan import plan as ps
from ddlsim.plan.plan import KINDS, Plan
from ddlsim.readable import count
from ddlsim.text_tables import aligned

#: number of rows of the table that are printed
N_ROWS = 24
#: columns of the table that contain words
LEFT = (1, 2)


def what(plan: Plan, row: int) -> str:
    """Return a description of a task: "backward of layers 3..7, batch 0, step 2"."""
    kind, name = int(plan.kind[row]), int(plan.name[row])
    text = plan.names[name] if name >= 0 else KINDS[kind].replace("_", "-")
    passes = kind in (ps.FORWARD, ps.BACKWARD, ps.BACKWARD_INPUT, ps.BACKWARD_WEIGHT)
    if passes or kind == ps.UPDATE:
        first, last = int(plan.first[row]), int(plan.end[row]) - 1
        text += f" of layer {first}" if first == last else f" of layers {first}..{last}"
    if passes:
        text += f", batch {plan.batch[row]}"
    if kind == ps.SEND:
        text += f" to rank {plan.peer[row]}"
    if kind == ps.RECEIVE:
        text += f" from rank {plan.peer[row]}"
    if kind in (ps.SEND, ps.RECEIVE) and plan.batch[row] >= 0:
        text += f" over the cut before layer {plan.first[row]}, batch {plan.batch[row]}"
    if kind >= ps.ALL_REDUCE and plan.part[row] >= 0:
        text += f" of part {plan.part[row]}"
        text += f", batch {plan.batch[row]}" if plan.batch[row] >= 0 else ""
    return f"{text}, step {plan.step[row]}"


def task(plan: Plan, row: int) -> str:
    """Return a description of a task, with its row and lane."""
    lane = plan.lanes[plan.lane[row]]
    return f"row {row} (rank {lane.rank} {lane.name}: {what(plan, row)})"


def table(plan: Plan) -> str:
    """Return the first rows of a plan, and its totals."""
    return "\n".join([*summary(plan), "", *aligned(cells(plan), LEFT), *more(plan)])


def cells(plan: Plan) -> list[list[str]]:
    """Return the first rows of a plan as cells, below a header; the columns :data:`LEFT` contain words."""
    found = [["row", "lane", "task", "ms", "MB", "needs", "holds MB"]]
    for row in range(min(N_ROWS, len(plan))):
        lane = plan.lanes[plan.lane[row]]
        needs = plan.needs_of(row)
        shown = " ".join(map(str, needs[:4])) + (f" +{len(needs) - 4}" if len(needs) > 4 else "")
        found.append([
            str(row), f"{lane.rank} {lane.name}", what(plan, row), _number(1e3 * plan.seconds[row]),
            _number(plan.nbytes[row] / 1e6), shown, _number(plan.holds[row] / 1e6),
        ])  # fmt: skip
    return found


def more(plan: Plan) -> list[str]:
    """Return a line about the rows that are not shown, if any, and the notes."""
    rest = [f"... and {len(plan) - N_ROWS} more"] if len(plan) > N_ROWS else []
    return [*rest, *(f"note: {note}" for note in plan.notes)]


def _number(value: float) -> str:
    return "" if value == 0.0 else f"{value:.4g}"


def summary(plan: Plan) -> tuple[str, str]:
    """Return the totals of a plan in two lines: its tasks and its lanes."""
    counts = np.bincount(plan.kind, minlength=len(KINDS))
    kinds = ", ".join(f"{n} {name.replace('_', '-')}" for name, n in zip(KINDS, counts.tolist(), strict=True) if n)
    names: dict[str, int] = {}
    for lane, n in zip(plan.lanes, np.bincount(plan.lane, minlength=len(plan.lanes)).tolist(), strict=True):
        names[lane.name] = names.get(lane.name, 0) + n
    lanes = ", ".join(f"{n} on {name!r}" for name, n in names.items())
    ranks, steps = count(plan.n_ranks, "rank"), count(plan.n_steps, "step")
    return f"{count(len(plan), 'task')} of {ranks} in {steps}: {kinds or 'nothing'}", f"lanes: {lanes or 'none'}"
