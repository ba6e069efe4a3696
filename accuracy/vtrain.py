"""vTrain's validation data: steps of Megatron-DeepSpeed on one machine of 8 A100, and on 8 to 64 of them.

The A100's matrix products and the times of the stack "megatron-2021" are fitted to the steps of one machine
(:mod:`accuracy.kernels`). One machine: rows with an even number are predicted by what the odd ones give, and the other
way round, so no row is judged by a fit that read it. Several machines: the catalogue, nothing fitted.

The framework, from its code of 2022 (github.com/microsoft/DeepSpeed): gradients are summed in fp16 when all passes are
done, beside nothing (runtime/pipe/schedule.py: ReduceGrads in the last step; runtime/pipe/engine.py:
``enable_backward_allreduce = False``), and stages wait in each send and receive, one after the other
(runtime/pipe/p2p.py; the order of TrainSchedule). Megatron-DeepSpeed gives every stage as many transformer layers
(megatron/model/gpt_model.py: partition_method "type:transformer").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from accuracy import kernels
from accuracy.rows import Row, show
from ddlsim import Parallel, simulate

__all__ = ["correlations", "multi_rows", "predicted", "remark", "single_rows"]

DATA = Path(__file__).with_name("data") / "transformers_512_a100.csv"


def predicted(row: kernels.Row, software: kernels.Software = kernels.CATALOGUE, algorithm: str = "ring") -> float:
    """Return the seconds of a row's step, simulated on as many machines as it has GPUs for."""
    strategy = Parallel(
        tensor=row.t, pipeline=row.p, data=row.d, micro_batch=row.micro, recompute="full", overlap="none",
        p2p="in turns", cut="layers", algorithm=algorithm,
    )  # fmt: skip
    return simulate(
        f"ib-800g-a100+n_hosts={-(-row.gpus // 8)}",
        f"megatron+dim={row.h}+layers={row.layers}+heads={row.a}+seq={row.seq}",
        strategy, batch_size=row.batch, workers=row.gpus, precision="fp16", optimizer="adam",
        device=software.device, stack=software.stack, steps=1, warmup=0,
    ).step_time  # fmt: skip


def _name(row: kernels.Row) -> str:
    return f"t={row.t}, d={row.d}, p={row.p}, micro-batch {row.micro}"


def single_rows(every: int = 1) -> list[Row]:
    """Return every so-manieth row of one machine."""
    measured = kernels.rows()
    halves = [kernels.fit(measured[other::2]) for other in (1, 0)]
    return [
        Row(
            f"GPT, h={row.h}, {row.layers} layers",
            _name(row),
            row.seconds,
            predicted(row, halves[i % 2]),
            "s",
            False,
            kind="run/parallel/one-machine",
        )
        for i, row in enumerate(measured)
        if i % every == 0
    ]


def measured_on_several() -> list[kernels.Row]:
    """Return the measured steps on several machines."""
    return kernels.rows(DATA)


def multi_rows(algorithm: str = "ring", most: int = 512) -> list[Row]:
    """Return the rows of up to so many GPUs."""
    return [
        Row(f"GPT {_billions(row)}, {row.gpus} GPUs", _name(row), row.seconds, predicted(row, algorithm=algorithm), "s",
            False, kind="run/parallel/gpus")
        for row in measured_on_several()
        if row.gpus <= most
    ]  # fmt: skip


def _billions(row: kernels.Row) -> str:
    """Return the parameters, as Narayanan et al. 2021, equation 2, have them."""
    v, h = kernels.VOCABULARY, row.h
    return f"{12e-9 * row.layers * h**2 * (1 + 13 / (12 * h) + (v + row.seq) / (12 * row.layers * h)):.1f}B"


def correlations(rows: Sequence[Row]) -> Iterator[tuple[str, float]]:
    """Return the rank correlation of predicted and measured layouts, model by model."""
    from scipy.stats import spearmanr

    for case in dict.fromkeys(row.case for row in rows):
        of_model = [row for row in rows if row.case == case]
        yield case, float(spearmanr([r.measured for r in of_model], [r.predicted for r in of_model]).statistic)


def remark() -> str:
    """Return the rank correlations, errors of other models, and the assumption about rings."""
    rows = multi_rows()
    *ranks, last = (f"{value:.2f} ({case})" for case, value in correlations(rows))
    errors = np.abs([row.error for row in rows])
    nccl = np.mean([abs(row.error) for row in multi_rows("default")])
    return (
        "For the layouts of each model, the rank correlation between predicted and measured step times is "
        f"{', '.join(ranks)} and {last}. The goal is 0.95. The median error is {np.median(errors):.1%}. For "
        "the same rows, vTrain's authors report a mean error of 14.7%, using kernels that they profiled individually. "
        "Two simpler models that were fitted for comparison have mean errors of 17.9% (a single efficiency for all "
        "GPUs) and 13.2% (three fitted terms).\n\n"
        "The predictions assume that replicas reduce gradients in rings that leave each machine through a single "
        "network adapter (algorithm `ring`). The sources do not state which rings were used. By default, ddlsim uses "
        "the channels that NCCL builds over all adapters. With this default, the mean error would be "
        f"{nccl:.1%}. If a replica has several GPUs in a machine, the measured reductions are slower than a single "
        "adapter can explain."
    )


if __name__ == "__main__":
    show(single_rows())
    show(multi_rows())
    print(*correlations(multi_rows()))
