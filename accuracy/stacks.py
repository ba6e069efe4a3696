"""Published runs with their software: the rows of five files, out of the box (:mod:`accuracy.judge`).

`python -m accuracy.stacks` prints them; `python -m accuracy.stacks fit` fits the numbers of ``FITS`` to their rows, by
least squares of the logarithms of predicted over published. The catalogue has the results, rounded. Rows to which a
number was fitted are shown and do not count.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from accuracy import judge
from accuracy.judge import Judged, read
from accuracy.judge import Row as Published
from accuracy.rows import Omitted, Row, show
from ddlsim import Stack, load_device, load_stack, stack_names
from ddlsim.workload.devices import Kernels

__all__ = ["FILES", "FITS", "Fit", "catalogue", "errors", "fitted", "left_out", "rows"]

DATA = Path(__file__).with_name("data") / "published_stacks"
FILES = {
    "megatron_bridge": "megatron_bridge.csv", "torchtitan": "torchtitan.csv", "fms_fsdp": "fms_fsdp.csv",
    "maxtext": "maxtext_tpu.csv", "large_runs": "large_runs.yaml",
}  # fmt: skip


def _dense(row: Published) -> bool:
    return not row["routing"] and row["context"] in ("", 1)


def _of_device(name: str) -> dict[str, Callable[[Published], bool]]:
    return {"megatron_bridge": lambda row: _dense(row) and row["system"] == name}


def _of_slice(name: str) -> dict[str, Callable[[Published], bool]]:
    return {"maxtext": lambda row: row["system"] == name and row["slices"] == 1}


class Fit(NamedTuple):
    """Numbers that are fitted together: (stacks or devices, field) of each, and the rows, by file."""

    numbers: tuple[tuple[tuple[str, ...], str], ...]
    rows: Mapping[str, Callable[[Published], bool]]


FITS = {
    "megatron": Fit(
        ((("megatron",), "elementwise"), (("megatron",), "gemm")),
        _of_device("h100") | {"large_runs": lambda row: row["machine"] == "h100"},
    ),
    "torchtitan": Fit(
        ((("torchtitan",), "elementwise"), (("torchtitan-compile",), "elementwise"),
         (("torchtitan", "torchtitan-compile"), "gemm")),
        {"torchtitan": lambda row: row["tensor"] == 1 and row["context"] == 1 and row["sequence"] < 32768},
    ),
    "fms-fsdp": Fit(
        ((("fms-fsdp",), "gemm"),),
        {"fms_fsdp": lambda row: row["model"] == "llama-2-7b" and row["system"] == "a100-80g"},
    ),
    **{name: Fit((((name,), "gemm"),), _of_device(name)) for name in ("b200", "gb200", "gb300")},
    **{name: Fit((((name,), "gemm"),), _of_slice(name)) for name in ("tpu-v4", "tpu-v5e")},
}  # fmt: skip


def catalogue(fit: Fit) -> list[float]:
    """Return the catalogue's values of the numbers of a fit: of devices, the share in bf16."""
    return [
        float(getattr(load_stack(names[0]), field)) if names[0] in stack_names() else _kernels(names[0]).gemm["bf16"]
        for names, field in fit.numbers
    ]


def _kernels(device: str) -> Kernels:
    kernels = load_device(device).kernels
    assert kernels is not None
    return kernels


def errors(fit: Fit, numbers: Sequence[float]) -> np.ndarray:
    """Return ln(predicted / published) of the speed of each row, with other numbers than the catalogue's."""
    judge.REPLACED.clear()
    for (names, field), number in zip(fit.numbers, numbers, strict=True):
        for name in names:
            if name in stack_names():
                stack = judge.REPLACED.get(name, load_stack(name))
                assert isinstance(stack, Stack)
                judge.REPLACED[name] = replace(stack, **{field: number})  # type: ignore[arg-type]
            else:  # all types of operands in proportion
                kernels = _kernels(name)
                shares = {kind: share * number / kernels.gemm["bf16"] for kind, share in kernels.gemm.items()}
                judge.REPLACED[name] = replace(load_device(name), kernels=replace(kernels, gemm=shares))
    try:
        return np.array([
            np.log(family.predict(row)[0] / float(row[family.figure])) * (-1.0 if family.unit == "s" else 1.0)
            for file, picks in fit.rows.items()
            for family in (judge.FAMILIES[read(DATA / FILES[file])[0]],)
            for row in read(DATA / FILES[file])[1]
            if picks(row)
        ])  # fmt: skip
    finally:
        judge.REPLACED.clear()


def fitted(fit: Fit) -> tuple[list[float], float]:
    """Return the numbers that fit best, and their mean absolute error."""
    from scipy.optimize import least_squares

    start = catalogue(fit)
    upper = [1.0 if field == "gemm" else 10.0 for _, field in fit.numbers]
    found = least_squares(
        lambda numbers: errors(fit, numbers.tolist()),
        start,
        bounds=(0.1, upper),
        diff_step=0.02,
        xtol=1e-3,
        max_nfev=12,
    )
    return found.x.tolist(), float(np.abs(np.expm1(found.fun)).mean())


def _is_fitted(name: str, row: Published) -> bool:
    return any(fit.rows[name](row) for fit in FITS.values() if name in fit.rows)


@functools.cache
def _judged(name: str) -> tuple[tuple[Published, Judged], ...]:
    path = DATA / FILES[name]
    return tuple(zip(read(path)[1], judge.judge(path), strict=True))


def _what(name: str, row: Published) -> str:
    if name == "maxtext":
        return f"{row['slices']} slices of {row['chips_per_slice']} chips"
    keys = ("precision", "micro_batch", "local_batch", "sequence", "tensor", "pipeline", "recompute", "compile")
    sizes = ", ".join(f"{key.replace('_', ' ')} {row[key]}" for key in keys if row.get(key) not in (None, "", 1))
    return f"{row['gpus']} GPUs, {sizes}"


def _case(row: Published) -> str:
    """Return system, model and release."""
    parts = (row.get("system") or row.get("machine"), row["model"], row.get("release") or row.get("source"))
    return "_".join(str(part) for part in parts if part)


def rows(name: str) -> list[Row]:
    """Return the rows of a file that are predicted."""
    return [
        Row(_case(row), _what(name, row), each.published, each.predicted, each.unit, _is_fitted(name, row),
            kind="run/parallel/gpus")
        for row, each in _judged(name)
        if each.predicted is not None
    ]  # fmt: skip


def left_out(name: str) -> list[Omitted]:
    """Return the rows that are not predicted, with the reason."""
    return [Omitted(_case(row), _what(name, row), each.reason) for row, each in _judged(name) if each.predicted is None]


if __name__ == "__main__":
    if sys.argv[1:] == ["fit"]:
        for name, fit in FITS.items():
            numbers, error = fitted(fit)
            at = catalogue(fit)
            off = np.abs(np.expm1(errors(fit, at)))
            print(
                f"{name}: {len(off)} rows, {[f'{x:.3g}' for x in numbers]} {error:.2%}; catalogue {at} {off.mean():.2%}"
            )
    else:
        for name in FILES:
            print(name)
            show(rows(name), left_out(name))
