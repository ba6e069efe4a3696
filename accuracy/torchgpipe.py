"""torchgpipe on eight P40: pipelines with recomputation, from one row of each model.

Batch, micro-batches, modules of each stage and what is computed again are those of the benchmarks' code
(benchmarks/*-speed/main.py @ a471026 and fe52c4d): all micro-batches ("always") or all but the last ("except_last"). A
stage computes again when the gradient has arrived, as in GPipe: with "always" a step of equal stages takes
(m + p - 1)(2 f + g). A module is a cell of AmoebaNet-D, and a layer of U-Net and ResNet-101, in which places where a
tensor begins to skip count too.

One row gives the efficiency of convolutions: of AmoebaNet-D the one of two stages and one micro-batch, of the others
the one without a pipeline. Layers that only move bytes take what the memory's bandwidth says.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import yaml
from scipy.optimize import brentq

from accuracy.rows import Omitted, Row, Table, UnpredictableError, show
from ddlsim.plan import Chunk, Draft, Plan, chunks_at
from ddlsim.workload.compute import Roofline, make_workload
from ddlsim.workload.devices import load_device
from ddlsim.workload.model import load_model

__all__ = ["RUNS", "Run", "first_layers", "left_out", "plan_of", "remark", "rows", "samples_per_second", "table"]

DATA = Path(__file__).with_name("data") / "torchgpipe.yaml"


class Run(NamedTuple):
    """An experiment: `modules` of each stage, and which micro-batches are computed `again`."""

    model: str
    batch: int
    micro_batches: int
    modules: tuple[int, ...]
    again: str = "except_last"


RUNS = {
    ("amoebanet_d_18_256", "n2 m1"): Run("amoebanet-d", 96, 1, (7, 17), "always"),
    ("amoebanet_d_18_256", "n2 m4"): Run("amoebanet-d", 256, 4, (9, 15)),
    ("amoebanet_d_18_256", "n2 m32"): Run("amoebanet-d", 1280, 32, (9, 15)),
    ("amoebanet_d_18_256", "n4 m1"): Run("amoebanet-d", 160, 1, (3, 4, 5, 12), "always"),
    ("amoebanet_d_18_256", "n4 m4"): Run("amoebanet-d", 360, 4, (3, 6, 7, 8)),
    ("amoebanet_d_18_256", "n4 m32"): Run("amoebanet-d", 1152, 32, (3, 6, 7, 8)),
    ("amoebanet_d_18_256", "n8 m1"): Run("amoebanet-d", 196, 1, (2, 2, 2, 2, 2, 3, 4, 7), "always"),
    ("amoebanet_d_18_256", "n8 m4"): Run("amoebanet-d", 480, 4, (2, 2, 2, 3, 3, 4, 4, 4)),
    ("amoebanet_d_18_256", "n8 m32"): Run("amoebanet-d", 1280, 32, (2, 2, 2, 3, 3, 4, 4, 4)),
    ("unet_5_64", "baseline"): Run("unet", 40, 1, (241,), "never"),
    ("unet_5_64", "pipeline_1"): Run("unet", 80, 2, (241,)),
    ("unet_5_64", "pipeline_2"): Run("unet", 512, 32, (104, 137)),
    ("unet_5_64", "pipeline_4"): Run("unet", 512, 16, (30, 66, 84, 61)),
    ("unet_5_64", "pipeline_8"): Run("unet", 640, 40, (16, 27, 31, 44, 22, 57, 27, 17)),
    ("resnet101", "baseline"): Run("resnet101", 118, 1, (370,), "never"),
    ("resnet101", "pipeline_1"): Run("resnet101", 220, 2, (370,)),
    ("resnet101", "pipeline_2"): Run("resnet101", 25000, 1667, (135, 235)),
    ("resnet101", "pipeline_4"): Run("resnet101", 5632, 256, (44, 92, 124, 110)),
    ("resnet101", "pipeline_8"): Run("resnet101", 5400, 150, (26, 22, 33, 44, 44, 66, 66, 69)),
}
CALIBRATES = {"amoebanet-d": "n2 m1", "unet": "baseline", "resnet101": "baseline"}


@functools.cache
def first_layers(model: str) -> list[int]:
    """Return the layer with which each module of torchgpipe's model begins."""
    names = [layer.name for layer in load_model(model).layers]
    if model == "unet":  # behind the 20 layers of each of five encoders a module remembers what skips
        return [i - sum(at < i for at in range(20, 20 + 5 * 22, 22)) for i in range(len(names) + 5)]
    starts: list[int] = []
    before = ""
    for i, name in enumerate(names):
        parts = name.split(".")
        cell = ".".join(parts[: 3 if "normals" in parts else 2 if parts[0][:5] in ("stage", "layer") else 1])
        if model == "resnet101":
            block = cell if parts[0].startswith("layer") else ""
            starts += [i] if block and block != before else []  # a module remembers what skips
            before = block
            starts += [i] if "shortcut" not in parts else []  # the sum's module has the shortcut
        elif i == 0 or name == "slice1" or (len(parts) > 1 and cell != before):
            starts.append(i)
            before = cell
    return starts


@functools.cache
def chunks(model: str, samples: int, modules: tuple[int, ...], efficiency: float) -> tuple[Chunk, ...]:
    """Return the stages, for micro-batches of so many samples."""
    starts, at = first_layers(model), 0
    if sum(modules) != len(starts):
        raise ValueError(f"{model} has {len(starts)} modules, not {sum(modules)}")
    cuts = []
    for n in modules[:-1]:
        at += n
        cuts.append(starts[at])
    device = load_device("p40")
    return chunks_at(make_workload(load_model(model), device, samples, compute=Roofline(efficiency)), cuts)


def plan_of(run: Run, efficiency: float) -> Plan:
    """Return a step: all forward passes, then all backward passes, from the last micro-batch on."""
    m, draft = run.micro_batches, Draft()
    stages = chunks(run.model, max(round(run.batch / m), 1), run.modules, efficiency)
    n = len(stages)
    arrived: dict[tuple[str, int, int], int] = {}

    def send(kind: str, stage: int, to: int, micro: int, row: int) -> None:
        nbytes = stages[max(stage, to)].enters
        lanes = (f"{kind} to {to}", f"{kind} from {stage}")
        arrived[kind, to, micro] = draft.message(stage, to, nbytes, needs=[row], lanes=lanes)[1]

    for micro in range(m):
        for stage, chunk in enumerate(stages):
            needs = [arrived["forward", stage, micro]] if stage else []
            row = draft.work(stage, chunk.workload.forward_time, "forward", needs=needs)
            if stage < n - 1:
                send("forward", stage, stage + 1, micro, row)
    again = {"always": m, "except_last": m - 1, "never": 0}[run.again]
    for micro in reversed(range(m)):
        for stage in reversed(range(n)):
            work = stages[stage].workload
            needs = [arrived["backward", stage, micro]] if stage < n - 1 else []
            if micro < again:
                needs = [draft.work(stage, work.forward_time, "forward again", needs=needs)]
            row = draft.work(stage, work.backward_time, "backward", needs=needs)
            if stage:
                send("backward", stage, stage - 1, micro, row)
    for stage, chunk in enumerate(stages):
        draft.work(stage, chunk.workload.optimizer, "update")
    return draft.plan()


def samples_per_second(run: Run, efficiency: float) -> float:
    """Return the throughput of an experiment."""
    if run.micro_batches > 64:  # a longer step goes on as it does: the difference of two shorter ones
        at_once = run.batch / run.micro_batches
        few, more = (run._replace(batch=round(at_once * n), micro_batches=n) for n in (32, 64))
        short, long = (plan_of(each, efficiency).execute("p40-8").seconds for each in (few, more))
        return run.batch / (long + (run.micro_batches - 64) * (long - short) / 32)
    return run.batch / plan_of(run, efficiency).execute("p40-8").seconds


def read(path: Path = DATA, omitted: Table | None = None) -> dict[tuple[str, str], float]:
    """Return the measured samples/s of experiments that are described; what is none goes to `omitted`."""
    left, stated = omitted if omitted is not None else Table(), {}
    for case, series in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        if isinstance(series, list):
            stated |= {(case, f"n{row.get('n')} m{row.get('m')}"): row.get("throughput") for row in series}
        elif isinstance(series, dict):
            stated |= {(case, str(what)): value for what, value in series.items()}
    found = {}
    for key, value in stated.items():
        if key not in RUNS:
            left.omit(*key, "the benchmark's code has no experiment of this name")
        elif not isinstance(value, int | float):
            left.omit(*key, "no figure is stated")
        else:
            found[key] = float(value)
    return found


@functools.cache
def efficiency_of(case: str, path: Path = DATA) -> float:
    """Return the efficiency of convolutions with which the calibrating row is what was measured."""
    model = next(run.model for (name, _), run in RUNS.items() if name == case)
    key = case, CALIBRATES[model]
    measured = read(path).get(key)
    if measured is None:
        raise UnpredictableError(f"the row that calibrates, {key[1]}, is not in the file")
    value: float = brentq(lambda e: samples_per_second(RUNS[key], e) / measured - 1.0, 0.05, 1.0, xtol=1e-5)
    return value


@functools.cache
def table(path: Path = DATA) -> Table:
    """Return what becomes of the experiments of a file."""
    found = Table()
    for (case, what), measured in read(path, found).items():

        def make(case: str = case, what: str = what, measured: float = measured) -> Row:
            run, efficiency = RUNS[case, what], efficiency_of(case, path)
            return Row(case, what, measured, samples_per_second(run, efficiency), "samples/s",
                       what == CALIBRATES[run.model], f"efficiency of convolutions {efficiency:.3f}",
                       kind="run/parallel/gpus")  # fmt: skip

        found.add(case, what, make)
    return found


def rows(path: Path = DATA) -> list[Row]:
    """Return the experiments beside their predictions."""
    return table(path).rows


def left_out(path: Path = DATA) -> list[Omitted]:
    """Return the experiments that are not predicted."""
    return table(path).omitted


def remark() -> str:
    """Return the calibrated efficiencies, and how they depend on the time of recomputation."""
    calibrated = [case for case, what in read() if what == CALIBRATES[RUNS[case, what].model]]
    each = ", ".join(f"{case} {efficiency_of(case):.3f}" for case in calibrated)
    return (
        f"The calibrated efficiencies are {each}. That of AmoebaNet-D comes from a row with recomputation, and the "
        "others from rows without.\n\n"
        "torchgpipe intends to recompute before the gradient arrives (torchgpipe/checkpoint.py), but launches the "
        "recomputation only after all of the next stage. If it always finished in time, AmoebaNet-D's efficiency would "
        "be 0.352 and the mean error 7.2 %. Both figures were computed before the formula of GPipe was adopted."
    )


if __name__ == "__main__":
    show(rows(), left_out())
