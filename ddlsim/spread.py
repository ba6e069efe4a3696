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

    variation    width of the distribution of the devices' compute times, without outliers and as a fraction of the
                 median: the distance between the whiskers of a box plot (Q1 - 1.5 IQR and Q3 + 1.5 IQR). On five
                 clusters of GPUs, it is 0.08 on average and at most 0.22 over the applications (Sinha et al., Not All
                 GPUs Are Created Equal, SC 2022, arXiv:2208.11035; ``percent_variability`` in
                 plot_script/plot_aggregated.py of github.com/hal-uw/gpu_variability_sc22_artifact)
    measured_on  None: every device has its own speed. Otherwise, all devices are as slow as the slowest of them, as in
                 synchronous training, relative to steps that were measured on this number of devices. Such runs are
                 simulated as quickly as those of equal devices. Asynchronous strategies raise ConfigError. Too slow
                 for those that leave slow workers behind, such as BackupWorkers

    The compute time of the k-th fastest of n devices is the expected value of the k-th smallest of n normal samples
    (Blom 1958), so a run represents the average of many such clusters. The run's seed determines which device has which
    speed. The ``spread`` of links (:func:`ddlsim.cluster.with_detail`) varies their time per byte in the same way.
    """

    variation: Variation = 0.08
    measured_on: Count | None = None

    @checked
    def relative_times(self, n: Count) -> list[float]:
        """Return the compute times of n devices relative to the median, in ascending order; with `measured_on`,
        relative to those that were measured."""
        if self.measured_on is not None:
            of_n, measured = (Spread(self.variation).relative_times(k)[-1] for k in (n, min(n, self.measured_on)))
            return [of_n / measured] * n
        from statistics import NormalDist  # slow to import

        sd, normal = self.variation / WHISKERS, NormalDist()
        return [1.0 + sd * normal.inv_cdf((k - 0.375) / (n + 0.25)) for k in range(1, n + 1)]

    @checked
    def speeds(self, n: Count, seed: Seed = 0) -> tuple[float, ...]:
        """Return the speed factors of n devices, in an order that depends on `seed`."""
        times = self.relative_times(n)
        return tuple(1.0 / times[k] for k in stream(seed, 0, "spread").permutation(n).tolist())
