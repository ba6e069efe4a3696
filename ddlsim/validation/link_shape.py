"""What links do besides carrying bytes at a rate, as far as one-way messages tell: frames and a token bucket.

A message of m bytes takes T(m) = latency + max(0, w(m) - burst) / rate, w(m) = m + header ceil(m / payload) in frames
(docs/models/tcp.md). The choices: with or without a burst, at a rate that is fitted, or at the rate of the links in the
cluster file in frames of one of the kinds below, whose numbers are those of the standards. It is the choice with the
least AICc = 2 k - 2 ln L + 2 k (k + 1) / (n - k - 1) (Hurvich and Tsai 1989, Biometrika 76(2)), k counting the two
parts of the scatter (:mod:`ddlsim.validation.noise`) too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ddlsim.validation.noise import Floats, fit_noise, minus_log_likelihood, weights_of

#: Ethernet 14, IPv4 20 and TCP 32 bytes with timestamps (RFC 894, 791, 7323), as a shaper counts them; on a cable also
#: preamble, checksum and gap, 24 (IEEE 802.3). 1,500 and 9,000 bytes are the usual and the jumbo size of a packet
FRAMES = {
    "TCP in Ethernet frames": (66.0, 1448.0),
    "TCP in Ethernet frames with preamble and gap": (90.0, 1448.0),
    "TCP in jumbo frames": (66.0, 8948.0),
    "TCP in jumbo frames with preamble and gap": (90.0, 8948.0),
}
#: an acknowledgement, a header without payload, for every second frame (RFC 1122, section 4.2.3.2)
ACKNOWLEDGED = 2.0
#: so many sizes at least before anything but latency and rate is looked for
LEAST_SIZES = 8


@dataclass(frozen=True)
class Shape:
    """Latency (s), rate (bytes/s, headers included), burst (bytes; 0: none), header and payload of frames (bytes; 0:
    none) of a route; `fitted_rate` is False where the rate is the file's."""

    latency: float
    rate: float
    burst: float = 0.0
    header: float = 0.0
    payload: float = 0.0
    fitted_rate: bool = True
    criterion: float = math.inf

    def wire(self, nbytes: Floats) -> Floats:
        """Return the bytes on the wire."""
        return nbytes + self.header * np.ceil(nbytes / self.payload) if self.payload else nbytes

    def seconds(self, nbytes: Floats) -> Floats:
        """Return the s of messages of these sizes."""
        return self.latency + np.maximum(0.0, self.wire(nbytes) - self.burst) / self.rate

    @property
    def payload_rate(self) -> float:
        """The bytes/s of a large message's own bytes."""
        return self.rate / (1.0 + self.header / self.payload) if self.payload else self.rate

    @property
    def details(self) -> dict[str, float]:
        """The details of links that are known without fitting, by parameter name."""
        if not self.payload:
            return {}
        acknowledgements = self.header / (ACKNOWLEDGED * (self.header + self.payload))
        return {
            "between.frame_header": self.header, "between.frame_payload": self.payload,
            "between.reverse_load": acknowledgements,
        }  # fmt: skip


def find_shape(nbytes: Floats, seconds: Floats, wire_rate: float) -> tuple[Shape, Shape]:
    """Return the shape that messages of these sizes tell, with the least criterion, and latency and rate alone.

    wire_rate   bytes/s of the route's tightest link in the file, headers included
    """
    order = np.argsort(nbytes, kind="stable")
    nbytes, seconds = nbytes[order], seconds[order]
    starts = _starts(nbytes, seconds, wire_rate)
    plain = next(starts)
    free = [_fitted(nbytes, seconds, plain, burst) for burst in (False, True)]
    best = min(free, key=lambda shape: shape.criterion)
    others = [_fitted(nbytes, seconds, replace(start, burst=best.burst), best.burst > 0.0) for start in starts]
    return min([best, *others], key=lambda shape: shape.criterion), free[0]


def _starts(nbytes: Floats, seconds: Floats, wire_rate: float) -> Iterator[Shape]:
    latency, large = float(np.median(seconds[: max(2, len(seconds) // 4)])), slice(-max(2, len(seconds) // 4), None)
    rate = float(np.median(nbytes[large] / np.maximum(seconds[large] - latency, 0.1 * seconds[large])))
    yield Shape(latency, rate)
    for header, payload in FRAMES.values():
        yield Shape(latency, wire_rate, 0.0, header, payload, fitted_rate=False)


def _fitted(nbytes: Floats, seconds: Floats, start: Shape, with_burst: bool) -> Shape:
    """Return the most likely shape of a kind, with its criterion."""
    from scipy.optimize import least_squares

    free = ["latency", *(["rate"] if start.fitted_rate else []), *(["burst"] if with_burst else [])]
    k, n = len(free) + 2, len(seconds)
    if n - k - 1 <= 0:
        return start

    def errors_at(point: Floats) -> Floats:
        shape = replace(start, **dict(zip(free, np.exp(point).tolist(), strict=True)))
        return np.asarray(np.log(shape.seconds(nbytes) / seconds))

    def descend(point: Floats) -> tuple[float, Floats]:
        """Return the least cost near a point, and where it is."""
        errors = errors_at(point)
        noise = fit_noise(errors, seconds)
        for _ in range(5):
            weights = weights_of(errors, seconds, *noise)
            point = least_squares(lambda x, w=weights: w * errors_at(x), point, bounds=(-40.0, 40.0), max_nfev=20).x
            errors = errors_at(point)
            noise = fit_noise(errors, seconds)
        return minus_log_likelihood(errors, seconds, *noise), point

    def cost(point: Floats) -> float:
        errors = errors_at(point)
        return minus_log_likelihood(errors, seconds, *fit_noise(errors, seconds))

    bursts = np.geomspace(256.0, max(float(nbytes.max()) / 8.0, 512.0), 12).tolist() if with_burst else [0.0]
    bursts += [start.burst * factor for factor in (0.95, 1.0, 1.05)] if start.burst else []
    firsts = [{"latency": start.latency, "rate": start.rate, "burst": burst} for burst in bursts]
    points = sorted((np.log([first[name] for name in free]) for first in firsts), key=cost)
    lost, point = min((descend(each) for each in points[:2]), key=lambda found: found[0])
    criterion = 2.0 * k + 2.0 * lost + 2.0 * k * (k + 1) / (n - k - 1)
    return replace(start, criterion=criterion, **dict(zip(free, np.exp(point).tolist(), strict=True)))
