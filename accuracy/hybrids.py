"""Das et al. 2016: hybrids of data and model parallelism on clusters of Xeons, speed-ups over one node.

A node computes by the roofline of the catalogue, which cancels in a speed-up but for its ratio to the network. Small
batches leave some of its cores idle: the rate of a few samples beside that of 16, from a table of another Xeon and
library (PaddlePaddle 0.11 with MKL-DNN on two Xeon Gold 6148, benchmark/IntelOptimizedPaddle.md, inference, as only
that has rows of so small batches; VGG-19 stands for VGG-A, AlexNet for OverFeat-FAST), slows all nodes of a run. One
node has the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from accuracy.rows import Row, mean_error, show
from ddlsim import AllReduce, Hybrid, simulate

__all__ = ["Point", "predict", "remark", "rows"]

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


def read() -> list[Point]:
    """Return all runs of the paper's abstract."""
    cases = yaml.safe_load(DATA.read_text(encoding="utf-8"))["cases"]
    case = next(each for each in cases if each["id"] == CASE)
    return [
        Point(each["model"], *MACHINES[each["model"]], each.get("global_batch", ASSUMED.get(each["model"])), each["n"],
              float(each["speedup"]), "global_batch" in each)
        for each in case["measured"]
    ]  # fmt: skip


def rate(model: str, batch: int) -> float:
    """Return how fast a node computes with so many samples, of what it does with 16 or more."""
    table = SMALL.get(model)
    return 1.0 if table is None else table[min(batch, 16)] / table[16]


def predict(point: Point, *, small: bool = True) -> float:
    """Return the speed-up over one node, with the loss of small batches or without."""
    speed = rate(point.model, point.batch // point.nodes) if small else 1.0
    one = simulate(point.cluster, point.model, AllReduce(), batch_size=point.batch, workers=1, steps=3)
    many = simulate(
        point.cluster, point.model, Hybrid("balance"), batch_size=point.batch, workers=point.nodes, steps=3,
        speed=[speed] * point.nodes,
    )  # fmt: skip
    return many.throughput / one.throughput


def _row(point: Point, *, small: bool = True) -> Row:
    what = f"{point.model}, {point.nodes} nodes, batch {point.batch}{'' if point.stated else ' (assumed)'}"
    return Row(CASE, what, point.speedup, predict(point, small=small), "speed-up", False)


def rows() -> list[Row]:
    """Return all rows. Nothing is calibrated on any of them."""
    return [_row(point) for point in read()]


def counts(row: Row) -> bool:
    """Whether a row counts for the target: not that of the speech network, whose batch decides and is not stated."""
    return "speech" not in row.what


def remark() -> str:
    """Return what it depends on the small batches, and on the batches that are not stated."""
    plain = [row for row in (_row(point, small=False) for point in read()) if counts(row)]
    other = {
        (point.model, batch): predict(Point(point.name, point.cluster, point.model, batch, point.nodes, 1.0, False))
        for point in read() if not point.stated
        for batch in (point.batch // 2, point.batch * 2)
    }  # fmt: skip
    says = ", ".join(f"{value:.1f} ({model}, batch {batch})" for (model, batch), value in other.items())
    return (
        f"Without the loss of small batches the mean would be {mean_error(plain):.1%}. The rows were known when it was "
        f"added. With half and twice the batches that are assumed: {says}."
    )


if __name__ == "__main__":
    show(rows())
