"""What compressors keep between steps takes memory on every worker."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

import ddlsim
from ddlsim import DGC, FP16, ErrorFeedback, PowerSGD, RandomK, TopK
from ddlsim.compression.choice import kept_vectors


@pytest.mark.parametrize(
    ("compressor", "vectors"),
    [
        (TopK(0.01), 0),
        (RandomK(0.01), 0),
        (PowerSGD(2), 0),
        (ErrorFeedback(TopK(0.01)), 1),
        (ErrorFeedback(PowerSGD(2)), 1),
        (DGC(10), 2),
    ],
)
def test_residuals_take_four_bytes_per_exchanged_parameter(compressor: object, vectors: int) -> None:
    options = {"optimizer": "sgd", "steps": 1, "warmup": 1}

    def memory(**more: object) -> float:
        fullest = ddlsim.simulate("dgx1-v100", "bert-base", ddlsim.AllReduce(), 1, 2, **options, **more).memory  # type: ignore[arg-type]
        assert fullest is not None
        return fullest.needed

    n_params = ddlsim.load_model("bert-base").n_params
    assert kept_vectors(compressor) == vectors  # type: ignore[arg-type]
    assert memory(compression=compressor) - memory() == pytest.approx(4.0 * vectors * n_params)


def test_a_residual_can_exceed_the_memory_of_a_device() -> None:
    plain, compressed = (
        ddlsim.simulate("dgx1-v100", "bert-large", ddlsim.AllReduce(), 7, 2, steps=1, warmup=1, compression=each)
        for each in (TopK(0.01), ErrorFeedback(TopK(0.01)))
    )
    assert not any("but v100 has" in text for text in plain.warnings)
    assert any(
        "bert-large with batch size 7 in fp32 needs about 17.6 GB, but v100 has" in w for w in compressed.warnings
    )


class Slotted:
    __slots__ = ("itself", "residual")

    def __init__(self, n: int) -> None:
        self.itself, self.residual = self, np.zeros(n, np.float32)


@dataclasses.dataclass(frozen=True, slots=True)
class SlottedRecord:
    residual: np.ndarray
    step: int = 0


class Plain:
    def __init__(self, n: int) -> None:
        self.kept = {"residuals": [np.zeros((2, n), np.float32)], "table": np.zeros((5, 7), np.float32)}


def refusing(n: int, divisor: int) -> np.ndarray:
    if n % divisor:
        raise ValueError("the number of elements must be divisible")
    return np.zeros(n, np.float32)


@pytest.mark.parametrize(
    ("state", "vectors"),
    [
        (Slotted, 1),
        (lambda n: SlottedRecord(np.zeros(n, np.float32)), 1),
        (Plain, 2),
        (lambda n: {"residual": np.zeros(n, np.float32), "momentum": np.zeros(n, np.float32)}, 2),
        (lambda n: refusing(n, 1024), 1),
        (lambda n: refusing(n, 10**9 + 7), None),
    ],
)
def test_states_of_custom_compressors_are_counted_whatever_their_classes(
    state: Callable[[int], object], vectors: int | None
) -> None:
    @dataclasses.dataclass(frozen=True)
    class Custom(FP16):
        def init(self, n: int, seed: int = 0) -> object:  # type: ignore[override]
            return state(n)

    assert kept_vectors(Custom()) == vectors
    run = ddlsim.simulate("dgx1-v100", "resnet18-cifar", workers=2, steps=1, warmup=1, compression=Custom())
    assert run.memory is not None
    assert any("keeps between steps is not counted" in note for note in run.notes) == (vectors is None)
