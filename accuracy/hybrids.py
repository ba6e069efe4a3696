"""Das et al. 2016: hybrids of data and model parallelism on clusters of Xeons, speed-ups over one node.

A node computes by the roofline of the catalogue, which cancels in a speed-up but for its ratio to the network. Small
batches leave some of its cores idle: the rate of a few samples beside that of 16, from a table of another Xeon and
library (PaddlePaddle 0.11 with MKL-DNN on two Xeon Gold 6148, benchmark/IntelOptimizedPaddle.md, inference, as only
that has rows of so small batches; VGG-19 stands for VGG-A, AlexNet for OverFeat-FAST), slows all nodes of a run. One
node has the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from accuracy.published import cases
from accuracy.rows import Omitted, Row, Table, UnpredictableError, mean_error, number, show
from ddlsim import AllReduce, Hybrid, simulate

__all__ = ["Point", "claims", "left_out", "predict", "remark", "rows", "table"]

DATA = Path(__file__).with_name("data") / "cases.yaml"
CASE = "das2016_abstract"
#: images/s of two Xeon Gold 6148 by the size of a batch
SMALL = {
    "vgg-a": {1: 75.07, 2: 88.64, 4: 82.58, 8: 92.29, 16: 96.75},
    "overfeat-fast": {1: 442.91, 2: 656.41, 4: 719.10, 8: 847.68, 16: 850.51},
}
CORI = "cori-haswell+n_groups=1+n_hosts=128"


@dataclass(frozen=True)
class Point:
    """A run: what it was called, and what of it is simulated. The source's abstract states no batch for two of them."""

    name: str
    cluster: str
    model: str
    batch: int
    nodes: int
    speedup: float
    stated: bool


MACHINES = {
    "VGG-A": (CORI, "vgg-a"), "OverFeat-FAST": (CORI, "overfeat-fast"), "CD-DNN": ("endeavor-16", "speech-dnn"),
    "AWS Ethernet cluster": ("aws-10g-16", "vgg-a"),
}  # fmt: skip
#: what is not stated: 256 as on 64 nodes, and a minibatch that is usual for speech
ASSUMED = {"AWS Ethernet cluster": 256, "CD-DNN": 1024}


def read(path: Path = DATA, omitted: Table | None = None) -> list[Point]:
    """Return all runs of the paper's abstract; what is not described goes to `omitted`."""
    left, found = omitted if omitted is not None else Table(), []
    for row in [row for case in cases(path) if claims(case) for row in case.get("measured") or []]:
        name = str(row.get("model"))
        try:
            if name not in MACHINES:
                raise UnpredictableError("neither machine nor model of this name is described")
            batch = number(row, "global_batch") if "global_batch" in row or name not in ASSUMED else ASSUMED[name]
            found.append(
                Point(name, *MACHINES[name], int(batch), int(number(row, "n")), number(row, "speedup"),
                      "global_batch" in row)
            )  # fmt: skip
        except UnpredictableError as error:
            left.omit(CASE, f"{name}, {row.get('n')} nodes", str(error))
    return found


def claims(case: Mapping[str, Any]) -> bool:
    """Whether a case of the data file is predicted here."""
    return case.get("id") == CASE


def rate(model: str, batch: int) -> float:
    """Return how fast a node computes with so many samples, of what it does with 16 or more."""
    table = SMALL.get(model)
    if table is None:
        return 1.0
    return float(np.interp(batch, list(table), list(table.values()))) / table[16]


def predict(point: Point, *, small: bool = True) -> float:
    """Return the speed-up over one node with the whole batch, with the loss of small batches or without."""
    speed = rate(point.model, point.batch // point.nodes) if small else 1.0
    one = simulate(point.cluster, point.model, AllReduce(), batch_size=point.batch, workers=1, steps=3)
    many = simulate(
        point.cluster, point.model, Hybrid("balance"), batch_size=point.batch, workers=point.nodes, steps=3,
        speed=[speed] * point.nodes,
    )  # fmt: skip
    return many.throughput / one.throughput


def _row(point: Point, *, small: bool = True) -> Row:
    what = f"{point.model}, {point.nodes} nodes, batch {point.batch}{'' if point.stated else ' (assumed)'}"
    speedup = predict(point, small=small)
    return Row(CASE, what, point.speedup, speedup, "speed-up", False, unchanged=float(point.nodes),
               kind="run/hybrid")  # fmt: skip


@cache
def table(path: Path = DATA) -> Table:
    """Return what becomes of the rows. Nothing is calibrated on any of them."""
    found = Table()
    for point in read(path, found):
        found.add(CASE, f"{point.name}, {point.nodes} nodes", partial(_row, point))
    return found


def rows(path: Path = DATA) -> list[Row]:
    """Return all rows. Nothing is calibrated on any of them."""
    return table(path).rows


def left_out(path: Path = DATA) -> list[Omitted]:
    """Return the rows that are not predicted."""
    return table(path).omitted


def counts(row: Row) -> bool:
    """Whether a row counts for the target: not that of the speech network, whose batch decides and is not stated."""
    return "speech" not in row.what


def remark() -> str:
    """Return how the result depends on the speed of small batches, and on the batches that are not stated."""
    plain = [row for row in (_row(point, small=False) for point in read()) if counts(row)]
    other = {
        (point.model, batch): predict(Point(point.name, point.cluster, point.model, batch, point.nodes, 1.0, False))
        for point in read() if not point.stated
        for batch in (point.batch // 2, point.batch * 2)
    }  # fmt: skip
    says = ", ".join(f"{value:.1f} ({model}, batch {batch})" for (model, batch), value in other.items())
    return (
        f"If small batches were not slower, the mean error would be {mean_error(plain):.1%}. The authors knew the rows "
        f"when they added this effect. With half or twice the assumed batches, the speed-ups would be {says}."
    )


if __name__ == "__main__":
    show(rows(), left_out())
