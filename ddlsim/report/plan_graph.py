"""Drawings of plans: the graph of task dependencies, with the longest chain."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlsim.errors import ConfigError
from ddlsim.extras import needs
from ddlsim.plan import KINDS
from ddlsim.plan.order import Order
from ddlsim.plan.plan import ALL_REDUCE, RECEIVE, SEND
from ddlsim.report.drawing import drawn, saved, single, some_of, style_legend
from ddlsim.report.gantt import STYLES

with needs("matplotlib"):
    from matplotlib.axes import Axes
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Patch, Rectangle

if TYPE_CHECKING:
    from ddlsim.plan.plan import Bools, Floats, Ints, Plan

#: maximum number of tasks that are drawn, and of tasks with a label
MOST, LABELLED = 400, 120
CRITICAL, NEED, TOGETHER = "#cc3311", "#999999", "#555555"
#: colour of the critical path
EDGE: Any = {"edgecolor": CRITICAL, "linewidth": 1.6}
_SHORT = {"forward": "F", "backward": "B", "backward_input": "B", "backward_weight": "W", "update": "U", "send": "S"}
_SHORT |= {"receive": "R", "all_reduce": "AR", "reduce_scatter": "RS", "all_gather": "AG", "broadcast": "Bc"}
_SHORT |= {"reduce": "Re", "gather": "Ga", "scatter": "Sc", "all_to_all": "A2A", "push_pull": "PP"}


def graph(plan: Plan, path: str | Path | None = None, *, n_ranks: int = 4) -> Axes:
    """Draw the tasks of at most `n_ranks` evenly spread ranks, and write the figure to `path` if given.

    Every lane is a row; a task is to the right of its predecessors. Grey arrows are dependencies, dotted lines connect
    the members of a collective and the ends of a message, and the critical path of computations is red. If there are
    more than 400 tasks, only the first are drawn. Raises ConfigError for a plan without tasks.
    """
    if not len(plan):
        raise ConfigError("plot: the plan has no tasks, so there is nothing to draw")
    ranks = some_of(plan.n_ranks, n_ranks)
    order = Order(plan)
    level = np.array(order.ends([1.0] * order.n_events))[order.event] - 1.0
    mine = np.flatnonzero(np.isin(plan.rank, ranks))
    mine = np.sort(mine[np.argsort(level[mine], kind="stable")[:MOST]])
    shown = np.zeros(len(plan), dtype=np.bool_)
    shown[mine] = True
    lanes = [i for i in np.argsort(plan.lane_rank, kind="stable").tolist() if (plan.lane[mine] == i).any()]
    _, level[mine] = np.unique(level[mine], return_inverse=True)  # no gaps for tasks of other ranks
    x, y, heights = level, *_places(plan, mine, lanes, level)
    width = float(x[mine].max()) + 1.0
    picture, axes = single(min(max(2.5 + 0.55 * width, 7.0), 24.0), 1.6 + 0.42 * float(heights.sum()))
    _rows(axes, plan, lanes, heights, width)
    chain, steps = _longest_chain(plan, order)
    _arrows(axes, plan, order, shown, x, y, steps)
    _joints(axes, plan, mine, x, y)
    for row in mine.tolist():
        colour, hatch = STYLES[KINDS[plan.kind[row]]]
        edge: Any = EDGE if row in chain else {"edgecolor": "white", "linewidth": 0.5}
        corner = x[row] - 0.36, y[row] - 0.3
        axes.add_patch(Rectangle(corner, 0.72, 0.6, facecolor=colour, hatch=hatch, zorder=3, **edge))
        if len(mine) <= LABELLED:
            look: Any = {"fontsize": 6, "ha": "center", "va": "center", "zorder": 4}
            box = {"facecolor": "white", "alpha": 0.65, "pad": 0.6, "edgecolor": "none"}
            axes.text(x[row], y[row], drawn(_label(plan, row)), bbox=box, **look)
    kinds = [KINDS[kind] for kind in np.unique(plan.kind[mine]).tolist()]
    longest = Patch(facecolor="white", label="longest chain of work", **EDGE)
    styles = [(*STYLES[kind], kind.replace("_", "-")) for kind in kinds]
    style_legend(picture, styles, min(len(styles) + 1, 6), longest)
    axes.set_title(_title(plan, mine, ranks), fontsize=9)
    return saved(axes, path)


def _places(plan: Plan, mine: Ints, lanes: list[int], level: Floats) -> tuple[Floats, Floats]:
    """Return each task's vertical position, (n,), and each lane's height: tasks of unordered lanes are stacked."""
    lane = np.full(len(plan.lanes), -1)
    lane[lanes] = np.arange(len(lanes))
    floor = np.zeros(len(plan))
    met: dict[tuple[int, float], int] = {}
    for row in mine.tolist():
        place = (int(lane[plan.lane[row]]), float(level[row]))
        floor[row] = met[place] = met.get(place, -1) + 1
    heights = np.ones(len(lanes))
    np.maximum.at(heights, lane[plan.lane[mine]], floor[mine] + 1.0)
    begin = np.cumsum(heights) - heights
    return np.where(lane[plan.lane] >= 0, begin[lane[plan.lane]], 0.0) + floor, heights


def _rows(axes: Axes, plan: Plan, lanes: list[int], heights: Floats, width: float) -> None:
    """Draw the rows of the lanes, shaded by rank."""
    begin = np.cumsum(heights) - heights
    for number, (lane, start, height) in enumerate(zip(lanes, begin.tolist(), heights.tolist(), strict=True)):
        if np.unique(plan.lane_rank[lanes[: number + 1]]).size % 2 == 0:
            axes.axhspan(start - 0.5, start + height - 0.5, color="#f2f2f2", zorder=0)
        name = drawn(f"rank {plan.lanes[lane].rank} {plan.lanes[lane].name}")
        axes.text(-0.7, start + (height - 1.0) / 2, name, fontsize=8, ha="right", va="center")
    axes.set_xlim(-0.6, width - 0.3)
    axes.set_ylim(float(heights.sum()) - 0.4, -0.6)
    axes.axis("off")


def _arrows(
    axes: Axes, plan: Plan, order: Order, shown: Bools, x: Floats, y: Floats, steps: set[tuple[int, int]]
) -> None:
    """Draw the dependencies, except between the two ends of a message."""
    before, after = order.pairs
    visible = shown[before] & shown[after] & ~((plan.kind[before] == SEND) & (plan.kind[after] == RECEIVE))
    for a, b in zip(before[visible].tolist(), after[visible].tolist(), strict=True):
        height, colour, width = (2, CRITICAL, 1.3) if (a, b) in steps else (1, NEED, 0.6)
        arrow = {"arrowstyle": "->", "color": colour, "linewidth": width, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (x[b] - 0.36, y[b]), (x[a] + 0.36, y[a]), zorder=height, arrowprops=arrow)


def _joints(axes: Axes, plan: Plan, mine: Ints, x: Floats, y: Floats) -> None:
    """Connect the members of each collective, and the ends of each message."""
    lines = []
    for is_one in (plan.kind[mine] >= ALL_REDUCE, np.isin(plan.kind[mine], (SEND, RECEIVE))):
        rows = mine[is_one]
        rows = rows[np.lexsort((y[rows], plan.key[rows]))]
        same = plan.key[rows[1:]] == plan.key[rows[:-1]]
        lines += [((x[a], y[a]), (x[b], y[b])) for a, b in zip(rows[:-1][same], rows[1:][same], strict=True)]
    axes.add_collection(LineCollection(lines, colors=TOGETHER, linewidths=1.0, linestyles="dotted", zorder=2))


def _longest_chain(plan: Plan, order: Order) -> tuple[set[int], set[tuple[int, int]]]:
    """Return the rows of the tasks on the critical path of computations, and the dependencies between them.

    Of a collective, it contains the member that arrives last and the one that waits for it.
    """
    seconds = np.zeros(order.n_events)
    np.maximum.at(seconds, order.event, plan.seconds)
    end = np.array(order.ends(seconds.tolist()))[order.event]
    before, after = order.ends_after
    row = int(np.argmax(end))
    chain, steps = {row}, set[tuple[int, int]]()
    while True:
        members = np.flatnonzero(order.event == order.event[row])
        waited = np.isin(after, members)
        if not waited.any():
            return chain, steps
        last = np.flatnonzero(waited)[np.argmax(end[before[waited]])]
        row = int(before[last])
        chain |= {int(after[last]), row}
        steps.add((row, int(after[last])))


def _label(plan: Plan, row: int) -> str:
    kind = KINDS[plan.kind[row]]
    text = _SHORT.get(kind, plan.names[plan.name[row]][:6] if plan.name[row] >= 0 else "")
    if plan.end[row] > plan.first[row]:
        last = plan.end[row] - 1
        return f"{text} {plan.first[row]}" if plan.first[row] == last else f"{text} {plan.first[row]}-{last}"
    return f"{text} {plan.part[row]}" if plan.part[row] >= 0 else text


def _title(plan: Plan, mine: Ints, ranks: list[int]) -> str:
    path = f"critical path {plan.critical_path():.4g} s without what travels"
    text = f"{len(plan):,} tasks of {plan.n_ranks} ranks; {path}"
    n = int(np.isin(plan.rank, ranks).sum())
    if n < len(plan):
        text += f"\nranks {', '.join(map(str, ranks))} are drawn"
    return text + (f"\nthe first {len(mine):,} of their {n:,} tasks" if len(mine) < n else "")
