"""FSDP on several machines: the catalogue has what the procedure gives, and the rows of 16 GPUs are predicted."""

from __future__ import annotations

import numpy as np
import pytest

from accuracy import mosaic_fsdp, own_runs
from accuracy.rows import covered, mean_error

POINTS = mosaic_fsdp.read()


def test_no_other_numbers_fit_better() -> None:
    """The catalogue's four numbers, rounded, are as good as those that fit best: 3.7 % mean."""
    fitted = [point for point in POINTS if point.gpus == mosaic_fsdp.GPUS]
    catalogue = mosaic_fsdp.catalogue()
    errors = [mosaic_fsdp.alone(point, catalogue) / point.measured - 1.0 for point in fitted]
    assert len(fitted) == 110
    assert np.mean(np.abs(errors)) <= 0.05
    assert abs(np.mean(errors)) <= 0.01


@pytest.mark.slow
def test_the_catalogue_has_what_the_procedure_gives() -> None:
    fitted = mosaic_fsdp.fit([point for point in POINTS if point.gpus == mosaic_fsdp.GPUS])
    assert fitted.gemm == pytest.approx(mosaic_fsdp.catalogue().gemm, rel=0.03)
    assert fitted[2:] == pytest.approx(mosaic_fsdp.catalogue()[2:], rel=0.03)


def test_models_of_one_to_three_billion_on_two_machines() -> None:
    """The page has all rows: 3.8 % mean."""
    points = [
        point for point in POINTS
        if point.machine == "H100 80GB" and point.gpus == 16 and point.model in ("760m", "1b", "3b")
    ]  # fmt: skip
    errors = [mosaic_fsdp.predict(point) / point.measured - 1.0 for point in points]
    assert len(errors) == 3
    assert max(map(abs, errors)) <= 0.03


def test_what_is_fitted_hides_its_exchanges() -> None:
    """The closed form that is fitted is the simulated step within 0.5 %."""
    same = ("A100 80GB", "1b", 512)
    (point,) = (each for each in POINTS if (each.machine, each.model, each.seq) == same)
    tokens = mosaic_fsdp.alone(point, mosaic_fsdp.catalogue())
    assert tokens == pytest.approx(mosaic_fsdp.predict(point), rel=0.005)


def test_larger_runs_from_a_few_of_one_machine() -> None:
    """Stacks fitted to three to five runs of 8 GPUs, and to one of 128: 5.0 % mean and 6.4 %; the page has all rows."""
    rows = own_runs.rows()
    judged = [row for row in rows if not row.fitted_on]
    assert len(judged) == 23
    assert mean_error(rows) <= 0.07
    for learned, least in ((True, 0.95), (False, 0.9)):
        share = covered(own_runs.mosaic_rows(learned) + own_runs.fms_rows(learned))
        assert share is not None
        assert share[0] >= least
