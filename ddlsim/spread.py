"""Permanent speed differences between devices, or links, of the same kind (docs/models/variability.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ddlsim.arguments import Count, Seed, checked, number
from ddlsim.streams import stream

#: distance of a box plot's whiskers (quartiles +- 1.5 times their distance) in standard deviations of a normal: 8 times
#: its upper quartile
WHISKERS = 8.0 * 0.6744897501960817
#: spread of the times of equal parts between whiskers
Variation = Annotated[float, number(0.0, 1.0)]


@checked
@dataclass(frozen=True)
class Spread:
    """Permanent speed differences between devices of the same kind, based on measurements.

    variation  width of the distribution of the devices' compute times, without outliers and as a fraction of the
               median. It is the distance between the whiskers of a box plot (Q1 - 1.5 IQR and Q3 + 1.5 IQR).
               Measurements on five clusters with NVIDIA and AMD GPUs give an average of 0.08 and a maximum of 0.22 over
               the applications (Sinha et al., Not All GPUs Are Created Equal, SC 2022, arXiv:2208.11035;
               ``percent_variability`` in plot_script/plot_aggregated.py of their artifact,
               github.com/hal-uw/gpu_variability_sc22_artifact). Chips of the same kind require different voltages, so
               their clock rates differ at the same power.

    The compute time of the k-th fastest of n devices is the expected value of the k-th smallest of n normal samples
    (Blom 1958), so a run represents the average of many such clusters. The run's seed determines which device has which
    speed. The ``spread`` of links (:func:`ddlsim.cluster.with_detail`) varies their time per byte in the same way.
    """

    variation: Variation = 0.08

    @checked
    def relative_times(self, n: Count) -> list[float]:
        """Return the compute times of n devices relative to the median, in ascending order."""
        from statistics import NormalDist  # slow to import

        sd, normal = self.variation / WHISKERS, NormalDist()
        return [1.0 + sd * normal.inv_cdf((k - 0.375) / (n + 0.25)) for k in range(1, n + 1)]

    @checked
    def speeds(self, n: Count, seed: Seed = 0) -> tuple[float, ...]:
        """Return the speed factors of n devices, in an order that depends on `seed`."""
        times = self.relative_times(n)
        return tuple(1.0 / times[k] for k in stream(seed, 0, "spread").permutation(n).tolist())
