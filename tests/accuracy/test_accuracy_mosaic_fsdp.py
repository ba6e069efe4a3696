"""FSDP on several machines: the catalogue has what the procedure gives, and the rows of 16 GPUs are predicted."""

from __future__ import annotations

import pytest

from accuracy import mosaic_fsdp
from ddlsim import load_device


def test_the_catalogue_has_what_the_procedure_gives() -> None:
    fitted, catalogue = mosaic_fsdp.fitted("H100 80GB").kernels, load_device("h100").kernels
    assert fitted is not None
    assert catalogue is not None
    for name in mosaic_fsdp.FITTED:
        assert getattr(catalogue, name) == pytest.approx(getattr(fitted, name), rel=0.01)


def test_models_of_one_to_three_billion_on_two_machines() -> None:
    """The page has all rows: 4.2 % mean."""
    device = mosaic_fsdp.fitted("H100 80GB")
    points = [
        point for point in mosaic_fsdp.read()
        if point.machine == "H100 80GB" and point.gpus == 16 and point.model in ("760m", "1b", "3b")
    ]  # fmt: skip
    errors = [mosaic_fsdp.predict(point, device) / point.measured - 1.0 for point in points]
    assert len(errors) == 3
    assert max(map(abs, errors)) <= 0.03


def test_what_is_fitted_hides_its_exchanges() -> None:
    """The closed form that is fitted is the simulated step within 1 %."""
    device = load_device("a100-80g")
    same = ("A100 80GB", "1b", 512)
    (point,) = (each for each in mosaic_fsdp.read() if (each.machine, each.model, each.seq) == same)
    assert mosaic_fsdp.alone(point, device) == pytest.approx(mosaic_fsdp.predict(point, device), rel=0.01)
