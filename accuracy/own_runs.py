"""Runs of many GPUs from a few runs of few: a stack fitted to the smallest rows of a machine predicts the larger ones.

What a user does with :func:`ddlsim.validation.calibrate_stack`, or ``ddlsim calibrate runs.csv --stack fsdp-eager``.
The stack that the fit starts from, "fsdp-eager", is not fitted to any of these rows. Every prediction has the interval
that ``ddlsim run --stack my-stack.toml`` prints: both ends of the fit's spread, the number of GPUs beyond the fitted
ones, and the errors of earlier predictions of FSDP. `python -m accuracy.own_runs` prints how many intervals hold, with
the last part and without.

- MPT models (:mod:`accuracy.mosaic_fsdp`): the rows of 8 GPUs with 2,048 tokens of a machine, at most five; the rows of
  16 and 32 GPUs are predicted.
- fms-fsdp (``data/published_stacks/fms_fsdp.csv``): the row of Llama 2 7B on 128 A100; the other rows are predicted,
  that on H100 from the A100's.
"""

from __future__ import annotations

import functools
from pathlib import Path

from accuracy import judge, mosaic_fsdp
from accuracy.rows import Row, covered, show
from ddlsim import simulate
from ddlsim.cluster.calibrated import Beyond
from ddlsim.readable import count
from ddlsim.validation import MeasuredRun, StackFit, calibrate_stack
from ddlsim.validation.intervals import with_stack
from ddlsim.validation.stack_fit import experiment_of

__all__ = ["fitted_fms", "fitted_mosaic", "fms_rows", "mosaic_rows", "remark", "rows"]

FMS = Path(__file__).with_name("data") / "published_stacks" / "fms_fsdp.csv"
START = "fsdp-eager"
#: with rows of more than 8 GPUs
MACHINES = ("H100 80GB", "A100 40GB")
#: tokens of a sequence in the rows of more than 8 GPUs, and the rows of 8 GPUs that are fitted
SEQUENCE, MOST = 2048, 5


def _mosaic_run(point: mosaic_fsdp.Point) -> MeasuredRun:
    recompute = point.strategy.recompute
    return MeasuredRun(
        workers=point.gpus, batch_size=point.batch, throughput=point.measured / point.seq, shared_batch=True,
        model=f"mpt-{point.model}+seq={point.seq}", gradient_dtype=point.reduced,
        cluster=f"{mosaic_fsdp.MACHINES[point.machine][1]}+n_hosts={max(point.gpus // mosaic_fsdp.GPUS, 1)}",
        strategy=f"fsdp+prefetch=1+micro_batch={point.micro}+recompute={recompute}",
    )  # fmt: skip


@functools.cache
def fitted_mosaic(machine: str) -> StackFit:
    """Return the stack fitted to the rows of one machine."""
    runs = [
        _mosaic_run(point) for point in mosaic_fsdp.read()
        if (point.machine, point.gpus, point.seq) == (machine, mosaic_fsdp.GPUS, SEQUENCE)
    ]  # fmt: skip
    return calibrate_stack(runs[:MOST], START)


def _fms_runs() -> list[MeasuredRun]:
    return [
        MeasuredRun(
            workers=row["gpus"], batch_size=row["gpus"] * row["local_batch"], shared_batch=True,
            throughput=row["tokens_per_s_gpu"] * row["gpus"] / row["sequence"],
            model=f"{row['model']}+seq={row['sequence']}",
            cluster=f"roce-{row['system']}+n_hosts={-(-row['gpus'] // 8)}+n_nics=8"
            f"+bandwidth={row['nic_gbit_per_s'] / 8} Gbit/s",
            strategy="fsdp+micro_batch={}+recompute={}+recompute_share={}".format(
                row["local_batch"], *judge.BLOCKS[row["recompute"]]
            )
            + ("+shard=8" if row["sharding"] == "hsdp" else ""),
        )
        for row in judge.read(FMS)[1]
    ]  # fmt: skip


@functools.cache
def fitted_fms() -> StackFit:
    """Return the stack fitted to the first row."""
    return calibrate_stack(_fms_runs()[:1], "fms-fsdp")


def _row(case: str, run: MeasuredRun, fit: StackFit, fitted: bool, learned: bool = True) -> Row:
    experiment = experiment_of(run, fit.stack)
    result = simulate(experiment)
    interval = None
    if not fitted and learned:
        rates = result.interval().throughput
        interval = rates.low, rates.high
    elif not fitted:
        sure = with_stack(Beyond(), result, experiment).around(1.0)
        interval = result.throughput / sure[1], result.throughput / sure[0]
    what = f"{run.workers} GPUs, {run.model}"
    return Row(case, what, run.throughput, result.throughput, "samples/s", fitted, interval=interval)


def mosaic_rows(learned: bool = True) -> list[Row]:
    """Return the rows of machines with more than 8 GPUs, and those that are fitted.

    learned  whether intervals contain the errors of earlier predictions of FSDP
    """
    found = []
    for machine in MACHINES:
        fit = fitted_mosaic(machine)
        found += [_row(machine, run, fit, True, learned) for run in fit.runs]
        larger = [p for p in mosaic_fsdp.read() if p.machine == machine and p.gpus > mosaic_fsdp.GPUS]
        found += [_row(machine, _mosaic_run(point), fit, False, learned) for point in larger]
    return found


def fms_rows(learned: bool = True) -> list[Row]:
    """Return the rows of fms-fsdp; the first is fitted."""
    return [_row("fms-fsdp", run, fitted_fms(), i == 0, learned) for i, run in enumerate(_fms_runs())]


def rows() -> list[Row]:
    """Return all rows."""
    return mosaic_rows() + fms_rows()


def remark() -> str:
    """Return the fitted numbers, and the coverage of intervals without the errors of earlier predictions."""
    fits = {**{machine: fitted_mosaic(machine) for machine in MACHINES}, "fms-fsdp": fitted_fms()}
    numbers = "; ".join(
        f"{', '.join(f'{key} {value:.3g}' for key, value in fit.fit.values.items())} for {name} from "
        f"{count(len(fit.runs), 'run')}"
        for name, fit in fits.items()
    )
    share = covered(mosaic_rows(learned=False) + fms_rows(learned=False))
    assert share is not None
    return (
        f"The fitted numbers are: {numbers}.\n\n"
        "If intervals are not based on the errors of earlier predictions of FSDP, "
        f"{share[0]:.0%} of them contain the measured value, and their median half-width is {share[1]:.1%}."
    )


if __name__ == "__main__":
    for fit in (*(fitted_mosaic(machine) for machine in MACHINES), fitted_fms()):
        print(fit, end="\n\n")
    show(mosaic_rows())
    show(fms_rows())
    print(remark())
