"""MPT models trained with PyTorch's FSDP: 16 GPUs and more from the rows of one machine of 8.

The rows of one machine give two numbers of each device (``FITTED``): the share of its peak that matrix products and
fused attention reach, by least squares of the logarithms, rows far off counting less (soft L1 beyond 1 %). All else is
the catalogue's. The step of the other rows is simulated with them.

The configuration is that of github.com/mosaicml/llm-foundry (scripts/train/benchmarking, yamls/pretrain) and
mosaicml/composer of October 2023: FULL_SHARD over all GPUs, transformer layers as units, ``limit_all_gathers`` (one
ahead), gradients reduced in every micro-batch (composer/trainer/trainer.py has no ``no_sync`` for FSDP), weights
gathered in bf16, and gradients reduced in fp32 ("DEFAULT") or bf16 ("PURE": get_mixed_precision), Triton's flash
attention, checkpoints that are not re-entrant: since PyTorch 2.1 these stop where nothing more is needed.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from accuracy.rows import Omitted, Row, Table, UnpredictableError, number, show
from ddlsim import FSDP, PerKernel, load_device, load_model, simulate
from ddlsim.strategies import contract
from ddlsim.workload.compute import Workload, make_workload
from ddlsim.workload.devices import Device, Kernels
from ddlsim.workload.precision import ELEMENT_NBYTES

__all__ = ["FITTED", "Point", "alone", "fit", "fitted", "left_out", "predict", "read", "remark", "rows", "table"]

DATA = Path(__file__).with_name("data") / "mosaic_fsdp.csv"
FITTED = ("fraction", "flash")
GPUS = 8  # of a machine
#: a word of the table's title -> device, cluster, bytes/s of NCCL's rings inside a machine (both as in its file)
MACHINES = {
    "H100 80GB": ("h100", "roce-h100", 0.81 * 450e9), "A100 80GB": ("a100-80g", "roce-a100-80g", 0.915 * 300e9),
    "A100 40GB": ("a100-40g", "roce-a100-40g", 0.915 * 300e9),
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """A row of the tables."""

    machine: str
    model: str
    seq: int
    gpus: int
    micro: int
    batch: int
    pure: bool
    checkpoints: bool
    measured: float  # tokens/s

    @property
    def accumulation(self) -> int:
        """Micro-batches of each GPU in a step."""
        return self.batch // (self.gpus * self.micro)

    @property
    def reduced(self) -> str:
        """What gradients are reduced in."""
        return "bf16" if self.pure else "fp32"

    @property
    def strategy(self) -> FSDP:
        """What the GPUs do."""
        recompute = "early-stop" if self.checkpoints else "none"
        return FSDP(stage=3, prefetch=1, micro_batch=self.micro, recompute=recompute)

    def workload(self, device: Device) -> Workload:
        """Return what a GPU computes of a micro-batch."""
        return make_workload(
            load_model(f"mpt-{self.model}+seq={self.seq}"), device, self.micro, compute=PerKernel(flash=True),
            precision="bf16", gradient_dtype=self.reduced, optimizer="adam",
        )  # fmt: skip


def read(path: Path = DATA, omitted: Table | None = None) -> list[Point]:
    """Return all rows; what is not predicted goes to `omitted`."""
    left, found = omitted if omitted is not None else Table(), []
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    for row in csv.DictReader(lines):
        machine = next((name for name in MACHINES if row["section"].startswith(name)), None)
        try:
            if machine is None:
                raise UnpredictableError(f"machines of this kind are not described: {row['section']}")
            if "8" in (row.get("precision") or ""):
                raise UnpredictableError("FP8: no precision of that name is known")
            seq, gpus, micro, batch = (int(number(row, key)) for key in ("seq", "gpus", "micro", "batch"))
            if batch % (gpus * micro):
                raise UnpredictableError(f"{batch} samples are not a number of micro-batches on each GPU")
            found.append(
                Point(machine, row["model"], seq, gpus, micro, batch, row["mp_mode"] == "PURE",
                      row["checkpointing"] == "True", number(row, "tokens_per_s"))
            )  # fmt: skip
        except UnpredictableError as error:
            left.omit(f"{row['section']}_{row['model']}", f"{row['seq']} tokens, {row['gpus']} GPUs", str(error))
    return found


def alone(point: Point, device: Device) -> float:
    """Return the tokens/s of a machine whose exchanges all hide behind computing but the first unit's: its weights are
    gathered before anything computes, and its gradients scattered after everything has."""
    work = point.workload(device)
    plan = contract.of(point.strategy).plan([work], 1, point.accumulation)  # of one GPU: nothing is exchanged
    first = plan.parts[0].nbytes / ELEMENT_NBYTES[point.reduced] * (2.0 + ELEMENT_NBYTES[point.reduced])
    exposed = (GPUS - 1) / GPUS * first / MACHINES[point.machine][2]
    seconds = plan.seconds.sum() - work.optimizer * (1.0 - 1.0 / GPUS) + exposed
    return float(point.batch * point.seq / seconds)


def fit(points: Sequence[Point], device: Device) -> Kernels:
    """Return the kernels that fit rows of one machine best."""
    from scipy.optimize import least_squares

    kernels = device.kernels
    assert kernels is not None

    def with_numbers(numbers: np.ndarray) -> Kernels:
        return replace(kernels, **dict(zip(FITTED, numbers.tolist(), strict=True)))

    def residuals(numbers: np.ndarray) -> np.ndarray:
        changed = replace(device, kernels=with_numbers(numbers))
        return np.array([np.log(alone(point, changed) / point.measured) for point in points])

    found = least_squares(residuals, [0.6, 0.4], bounds=(0.05, 1.0), loss="soft_l1", f_scale=0.01, diff_step=1e-3)
    return with_numbers(found.x)


@functools.cache
def fitted(machine: str, path: Path = DATA) -> Device:
    """Return the device of a machine, with what its rows of one machine say (of :data:`DATA`, if `path` has none)."""
    device = load_device(MACHINES[machine][0])
    for source in (path, DATA):
        points = [point for point in read(source) if point.machine == machine and point.gpus == GPUS]
        if points:
            return replace(device, kernels=fit(points, device))
    raise UnpredictableError("no rows of one machine")


def predict(point: Point, device: Device) -> float:
    """Return the tokens/s of a row, simulated."""
    _, cluster, _ = MACHINES[point.machine]
    result = simulate(
        f"{cluster}+n_hosts={max(point.gpus // GPUS, 1)}", f"mpt-{point.model}+seq={point.seq}", point.strategy,
        workers=point.gpus, batch_size=point.batch, precision="bf16", gradient_dtype=point.reduced, device=device,
        compute=PerKernel(flash=True), optimizer="adam", steps=2, warmup=1,
    )  # fmt: skip
    return result.throughput * point.seq


@functools.cache
def table(path: Path = DATA) -> Table:
    """Return what becomes of the rows of a file: those of one machine calibrate."""
    found = Table()
    for point in read(path, found):
        what = f"{point.seq} tokens, {point.gpus} GPUs, micro-batches of {point.micro}"
        found.add(f"{point.machine}_{point.model}", what, functools.partial(_row, point, what, path))
    return found


def _row(point: Point, what: str, path: Path) -> Row:
    device, calibrates = fitted(point.machine, path), point.gpus == GPUS
    tokens = alone(point, device) if calibrates else predict(point, device)
    return Row(f"{point.machine}_{point.model}", what, point.measured, tokens, "tokens/s", calibrates,
               kind="run/fsdp/gpus")  # fmt: skip


def rows(path: Path = DATA) -> list[Row]:
    """Return all rows: those of one machine calibrate."""
    return table(path).rows


def left_out(path: Path = DATA) -> list[Omitted]:
    """Return the rows that are not predicted."""
    return table(path).omitted


def remark() -> str:
    """Return what was fitted, how far the rows of one machine are off, and whether larger figures are larger."""
    from scipy.stats import spearmanr

    numbers = ", ".join(
        f"{name} {kernels.fraction:.3f} and {kernels.flash:.3f}"
        for name in MACHINES if (kernels := fitted(name).kernels) is not None
    )  # fmt: skip
    found = rows()
    of_one = [abs(row.error) for row in found if row.fitted_on]
    several = [(row, int(row.what.split(", ")[1].split()[0])) for row in found if not row.fitted_on]
    measured, predicted = ([getattr(row, name) / n for row, n in several] for name in ("measured", "predicted"))
    order = spearmanr(measured, predicted).statistic
    return (
        f"Shares of the peak: {numbers}. The {len(of_one)} rows that they are fitted to are {np.mean(of_one):.1%} off "
        f"on average. Rank correlation of the predicted tokens/s of a GPU with the measured: {order:.3f}."
    )


if __name__ == "__main__":
    for name in MACHINES:
        kernels = fitted(name).kernels
        print(name, {number: f"{getattr(kernels, number):.3f}" for number in FITTED})
    show(rows(), left_out())
