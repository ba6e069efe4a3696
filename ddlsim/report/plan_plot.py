"""The execution of a plan as a Gantt chart: what each lane did when."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes

from ddlsim.errors import ConfigError
from ddlsim.plan import KINDS
from ddlsim.report.drawing import bars, drawn, save, single, some_of, style_legend

if TYPE_CHECKING:
    from ddlsim.plan import Execution

#: kind of task -> (colour, hatch)
STYLES = {
    "forward": ("#88bbee", ""),
    "backward": ("#4477aa", ""),
    "backward_input": ("#66aacc", ""),
    "backward_weight": ("#225588", ""),
    "update": ("#228833", ""),
    "compute": ("#aaaaaa", ""),
    "send": ("#ccbb44", "//"),
    "receive": ("#ddcc88", "\\\\"),
    "all_reduce": ("#ee9944", "//"),
    "reduce_scatter": ("#ee7733", "//"),
    "all_gather": ("#ccaa33", "\\\\"),
    "broadcast": ("#cc6677", "\\\\"),
    "reduce": ("#aa4499", "//"),
    "gather": ("#998833", "//"),
    "scatter": ("#bb8866", "\\\\"),
    "all_to_all": ("#882255", "xx"),
    "push_pull": ("#ee9944", "xx"),
}


def gantt(execution: Execution, path: str | Path | None = None, *, n_ranks: int = 8) -> Axes:
    """Draw what the lanes of at most `n_ranks` ranks, evenly spread, did, and write it to `path` if given.

    Raises ConfigError for a plan without tasks.
    """
    plan = execution.plan
    if not len(plan):
        raise ConfigError("plot: the plan has no tasks; there is nothing to draw")
    ranks = some_of(plan.n_ranks, n_ranks)
    lanes = [i for i in np.argsort(plan.lane_rank, kind="stable").tolist() if plan.lane_rank[i] in ranks]
    made, axes = single(9.0, 1.5 + 0.25 * len(lanes))
    for height, lane in enumerate(lanes):
        for number, kind in enumerate(KINDS):
            rows = np.flatnonzero((plan.lane == lane) & (plan.kind == number) & (execution.end > execution.start))
            starts, ends = execution.start[rows], execution.end[rows]
            pieces = [(start, end - start) for start, end in zip(starts, ends, strict=True)]
            bars(axes, pieces, height - 0.36, 0.72, STYLES[kind])
    names = [f"rank {plan.lanes[lane].rank} {plan.lanes[lane].name}" for lane in lanes]
    axes.set_yticks(range(len(lanes)), [drawn(name) for name in names], fontsize=8)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(0.0, max(execution.seconds, 1e-12))
    axes.set_xlabel("simulated time (s)")
    present = [KINDS[number] for number in np.unique(plan.kind[execution.end > execution.start])]
    style_legend(made, [(*STYLES[kind], kind.replace("_", "-")) for kind in present], len(present))
    axes.set_title(f"{len(plan):,} tasks of {plan.n_ranks} ranks: {execution.seconds:.4g} s", fontsize=9)
    save(made, path)
    return axes
