"""Parts of one kind that are not equally fast: devices, and links (docs/models/variability.md)."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated

from ddlsim.arguments import Count, Seed, checked, number
from ddlsim.streams import stream

#: from whisker to whisker of a box plot, the quartiles and 1.5 times their distance beyond: 5.396 standard deviations
WHISKERS = 8.0 * NormalDist().inv_cdf(0.75)
#: of the times of parts of one kind, from whisker to whisker
Variation = Annotated[float, number(0.0, 1.0)]


@checked
@dataclass(frozen=True)
class Spread:
    """Permanent speeds of devices of one kind, as far apart as those of real ones.

    variation  how far apart their compute times are, as a share of the median: from whisker to whisker of a box plot
               (Q1 - 1.5 IQR to Q3 + 1.5 IQR), outliers left out. 0.08 is the average over five large machines with GPUs
               of NVIDIA and AMD and their applications, 0.22 the largest (Sinha et al., Not All GPUs Are Created Equal,
               SC 2022, arXiv:2208.11035; ``percent_variability`` in plot_script/plot_aggregated.py of their artifact,
               github.com/hal-uw/gpu_variability_sc22_artifact): chips of one kind need different voltages, so their
               clocks differ at the same power

    The k-th fastest of n devices has the expected time of the k-th smallest of n Gaussian ones (Blom 1958), so that a
    run says what the average of many such clusters would; which device that is, is drawn from the run's seed. The
    ``spread`` of links (:func:`ddlsim.cluster.with_detail`) is the same of the times of a byte.
    """

    variation: Variation = 0.08

    @checked
    def relative_times(self, n: Count) -> list[float]:
        """Return the times of n parts relative to the median, (n,), ascending."""
        sd, normal = self.variation / WHISKERS, NormalDist()
        return [1.0 + sd * normal.inv_cdf((k - 0.375) / (n + 0.25)) for k in range(1, n + 1)]

    @checked
    def speeds(self, n: Count, seed: Seed = 0) -> tuple[float, ...]:
        """Return the speed factors of n devices, (n,)."""
        times = self.relative_times(n)
        return tuple(1.0 / times[k] for k in stream(seed, 0, "spread").permutation(n).tolist())
