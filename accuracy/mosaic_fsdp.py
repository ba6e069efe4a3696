"""MPT models trained with PyTorch's FSDP: 16 and 32 GPUs, from the rows of one machine of 8.

The stack is "llm-foundry". The rows of one machine give four numbers of the catalogue (``python -m
accuracy.mosaic_fsdp``, by least squares of the logarithms, rows far off counting less: soft L1 beyond 1 %): the stack's
share of the rate of matrix products and its element-wise traffic, and of A100 and H100 the rate of Triton's attention.
The rows of more GPUs are simulated out of the box.

The configuration is that of github.com/mosaicml/llm-foundry (scripts/train/benchmarking, yamls/pretrain) and
mosaicml/composer of October 2023: FULL_SHARD over all GPUs, transformer layers as units, ``limit_all_gathers`` (one
ahead), gradients reduced in every micro-batch (composer/trainer/trainer.py has no ``no_sync`` for FSDP), weights
gathered in bf16, and gradients reduced in fp32 ("DEFAULT") or bf16 ("PURE": get_mixed_precision), Triton's flash
attention, checkpoints that are not re-entrant: since PyTorch 2.1 these stop where nothing more is needed. The rows of
A100 40GB are older: PyTorch 1.13.1 recomputes whole blocks.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from accuracy.rows import Omitted, Row, Table, UnpredictableError, number, show
from ddlsim import FSDP, PerKernel, load_device, load_model, simulate
from ddlsim.workload.compute import Workload, make_workload
from ddlsim.workload.contention import IN_MACHINE
from ddlsim.workload.devices import AttentionRates, Device
from ddlsim.workload.precision import ELEMENT_NBYTES
from ddlsim.workload.roles import weight_units
from ddlsim.workload.stacks import Stack, load_stack
from ddlsim.workload.tensor_parallel import tensor_parallel

__all__ = ["Point", "Software", "alone", "catalogue", "fit", "left_out", "predict", "read", "remark", "rows", "table"]

DATA = Path(__file__).with_name("data") / "mosaic_fsdp.csv"
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
        whole = self.machine == "A100 40GB"  # PyTorch 1.13.1 (LLM Foundry at 300cc5c58)
        recompute = "none" if not self.checkpoints else "full" if whole else "early-stop"
        return FSDP(stage=3, prefetch=1, micro_batch=self.micro, recompute=recompute)

    def workload(self, device: Device, stack: Stack) -> Workload:
        """Return what a GPU computes of a micro-batch."""
        return make_workload(
            load_model(f"mpt-{self.model}+seq={self.seq}"), device, self.micro, compute=PerKernel(), stack=stack,
            precision="bf16", gradient_dtype=self.reduced, optimizer="adam",
        )  # fmt: skip


class Software(NamedTuple):
    """The four numbers that are fitted."""

    gemm: float
    elementwise: float
    h100: float  # rates of Triton's attention
    a100: float

    @property
    def stack(self) -> Stack:
        """LLM Foundry with these numbers."""
        return replace(load_stack("llm-foundry"), gemm=self.gemm, elementwise=self.elementwise)

    def device(self, machine: str) -> Device:
        """Return the device of a machine with these numbers."""
        device = load_device(MACHINES[machine][0])
        assert device.kernels is not None
        rate = self.h100 if device.name == "h100" else self.a100
        attention = {**device.kernels.attention, "triton": AttentionRates(rate, rate)}
        return replace(device, kernels=replace(device.kernels, attention=attention))


def catalogue() -> Software:
    """Return the numbers of the catalogue."""
    stack, kernels = load_stack("llm-foundry"), [load_device(name).kernels for name in ("h100", "a100-80g")]
    rates = [each.attention["triton"].forward for each in kernels if each is not None]
    return Software(stack.gemm, stack.elementwise, *rates)


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


def alone(point: Point, software: Software) -> float:
    """Return the tokens/s of one machine in closed form.

    All exchanges overlap with computing, and slow it down, but those of the first unit: its weights are gathered before
    anything is computed, and its gradients are scattered at the end.
    """
    device = software.device(point.machine)
    work = point.workload(device, software.stack)
    passes = tensor_parallel(work, 1, recompute=point.strategy.recompute).workload
    reduced = ELEMENT_NBYTES[point.reduced]
    seconds = (GPUS - 1) / GPUS / MACHINES[point.machine][2] / reduced  # per byte of gradients and byte of a parameter
    first, total = work.grad_nbytes[: weight_units(work.model.layers)[1]].sum(), work.gradient_nbytes
    exposed = seconds * first * (2.0 + reduced)
    exchanged = point.accumulation * seconds * total * (2.0 * 2.0 + reduced) - exposed
    slowed = exchanged * (1.0 - 1.0 / work.slowdown.beside(IN_MACHINE))
    copied = point.accumulation * total * (2.0 * 2.0 * work.sharding_copies[0] + work.sharding_copies[1])
    computed = point.accumulation * (passes.forward_time + passes.backward_time)
    step = computed + work.optimizer / GPUS + copied + exposed + slowed
    return float(point.batch * point.seq / step)


def fit(points: Sequence[Point]) -> Software:
    """Return the numbers that fit rows of one machine best."""
    from scipy.optimize import least_squares

    def residuals(numbers: np.ndarray) -> np.ndarray:
        software = Software(*numbers.tolist())
        return np.array([np.log(alone(point, software) / point.measured) for point in points])

    bounds = [0.3, 0.5, 0.05, 0.05], [1.0, 8.0, 1.0, 1.0]
    solution = least_squares(
        residuals, [0.8, 1.5, 0.2, 0.3], bounds=bounds, loss="soft_l1", f_scale=0.01, diff_step=1e-3
    )
    return Software(*solution.x.tolist())


def predict(point: Point) -> float:
    """Return the tokens/s of a row, simulated out of the box."""
    _, cluster, _ = MACHINES[point.machine]
    result = simulate(
        f"{cluster}+n_hosts={max(point.gpus // GPUS, 1)}", f"mpt-{point.model}+seq={point.seq}", point.strategy,
        workers=point.gpus, batch_size=point.batch, gradient_dtype=point.reduced, stack="llm-foundry",
        steps=2, warmup=1,
    )  # fmt: skip
    return result.throughput * point.seq


@functools.cache
def table(path: Path = DATA) -> Table:
    """Return the rows of a file: those of one machine were fitted."""
    found = Table()
    for point in read(path, found):
        what = f"{point.seq} tokens, {point.gpus} GPUs, micro-batches of {point.micro}"
        found.add(f"{point.machine}_{point.model}", what, functools.partial(_row, point, what))
    return found


def _row(point: Point, what: str) -> Row:
    fitted, tokens = point.gpus == GPUS, predict(point)
    return Row(f"{point.machine}_{point.model}", what, point.measured, tokens, "tokens/s", fitted, kind="run/fsdp/gpus")


def rows(path: Path = DATA) -> list[Row]:
    """Return all rows: those of one machine were fitted."""
    return table(path).rows


def left_out(path: Path = DATA) -> list[Omitted]:
    """Return the rows that are not predicted."""
    return table(path).omitted


def remark() -> str:
    """Return what was fitted, the error on the rows of one machine, and the rank correlation on the others."""
    from scipy.stats import spearmanr

    gemm, elementwise, h100, a100 = catalogue()
    judged = rows()
    of_one = [abs(row.error) for row in judged if row.fitted_on]
    several = [(row, int(row.what.split(", ")[1].split()[0])) for row in judged if not row.fitted_on]
    measured, predicted = ([getattr(row, name) / n for row, n in several] for name in ("measured", "predicted"))
    order = spearmanr(measured, predicted).statistic
    return (
        f"Matrix products run at {gemm:.3g} of the device's rate. Element-wise kernels move {elementwise:.3g} times as "
        f"many bytes as fused ones would. Triton's attention reaches {h100:.3g} (H100) and {a100:.3g} (A100) of the "
        f"peak. The {len(of_one)} rows to which these four numbers are fitted have a mean error of "
        f"{np.mean(of_one):.1%}. The rank correlation of predicted and measured tokens/s per GPU is {order:.3f}. "
        "The rows of A100 40GB were measured with PyTorch 1.13.1 (LLM Foundry at 300cc5c58), which recomputes whole "
        "blocks; recomputation stops early in the others, as since PyTorch 2.1."
    )


def main() -> None:
    points = [point for point in read() if point.gpus == GPUS]
    software = fit(points)
    errors = [abs(alone(point, software) / point.measured - 1.0) for point in points]
    print({name: f"{value:.3f}" for name, value in software._asdict().items()}, f"mean {np.mean(errors):.1%}")
    show(rows(), left_out())


if __name__ == "__main__":
    main()
