"""A result as plain values, for JSON and for whoever reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ddlsim
from ddlsim.run.costs import energy_assumptions

if TYPE_CHECKING:
    from ddlsim.run.result import Result


def plain_result(result: Result) -> dict[str, object]:
    """Return the numbers of a result and the manifest of its run; "bottleneck" is null if nobody has asked for it."""
    known = result.known_sensitivities
    return {
        "ddlsim": ddlsim.__version__,
        "experiment": result.experiment.manifest(),
        "workers": result.n_workers,
        "fits": result.fits,
        "memory": None if result.memory is None else result.memory._asdict(),
        "throughput": result.throughput,
        "tokens_per_second": result.tokens_per_second,
        "mfu": result.mfu,
        "step_time": result.step_time,
        "speedup": result.speedup,
        "efficiency": result.efficiency,
        "shares": result.shares,
        "mean_staleness": result.mean_staleness,
        "staleness": {str(k): v for k, v in result.staleness_histogram.items()},
        "step_times": result.step_times.tolist(),
        "interval": None if result.quick_interval is None else result.quick_interval.to_dict(),
        "stability": None if result.known_stability is None else result.known_stability.to_dict(),
        "simulated_time": result.simulated_time,
        "n_messages": result.n_messages,
        "compute": result.workloads[0].basis,
        "bottleneck": None if known is None else [s.to_dict() for s in known],
        "notes": list(result.notes),
        "warnings": list(result.warnings),
        "interrupted": result.interrupted,
        "nbytes_sent": result.nbytes_sent,
        "life": result.life.to_dict() if result.has_life else None,
        "goodput": result.goodput if result.has_life else None,
        "cost": result.known("cost"),
        "energy": result.known("energy"),
        "energy_assumptions": energy_assumptions(result),
        "stop_reason": result.stop_reason,
        "history": _history(result),
    }


def _history(result: Result) -> list[dict[str, float | None]]:
    """The history as plain values; what there is not (a loss before the first gradient) is None, not NaN."""
    rows = result.evaluations if result.monitor is not None else []
    return [{name: None if value != value else value for name, value in row._asdict().items()} for row in rows]
