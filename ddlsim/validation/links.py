"""Fit of the latency, bandwidth and overhead of links to measured times.

One-way messages also determine some further properties of links: frames and a token bucket. A message of m bytes takes
T(m) = latency + max(0, w(m) - burst) / rate, with w(m) = m + header ceil(m / payload) bytes on the wire
(docs/models/tcp.md). The candidates have a burst or not, and either a fitted rate, or the rate in the cluster file with
one of the frame types below, whose sizes are those of the standards. The candidate with the smallest AICc = 2 k - 2 ln
L + 2 k (k + 1) / (n - k - 1) (Hurvich and Tsai 1989, Biometrika 76(2)) is chosen; k includes the two parts of the
scatter (:mod:`ddlsim.validation.log_fit`).

A window can explain the same times as frames or a low rate if the round trip is long: at most one window is sent per
round trip, with pauses while it opens (docs/models/transport.md). If rate x round trip is large enough and the file
sets no transport, the links are also fitted with TCP, with windows that open or are already open, and the window as a
parameter with Linux's as prior. Windows are chosen if -2 ln(likelihood x priors) is lower than without them, with or
without frames, by :data:`CLEARLY`. The likelihood is that above; with fewer than :data:`LEAST_SIZES` rows, it uses the
scatter expected a priori.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddlsim.cluster import Cluster
from ddlsim.cluster.calibrated import DEFAULT_TRANSPORT, current_parameters, reference_ends, with_parameters
from ddlsim.cluster.details import PROTOCOLS
from ddlsim.errors import ConfigError
from ddlsim.extras import needs
from ddlsim.measure import Measurement
from ddlsim.readable import size
from ddlsim.validation.cases import Case
from ddlsim.validation.log_fit import (
    NOISE,
    Floats,
    LogFit,
    Prior,
    fit_logs,
    fit_noise,
    minus_log_likelihood,
    weights_of,
)

#: bytes as counted by a shaper: Ethernet 14, IPv4 20 and TCP 32 with timestamps (RFC 894, 791, 7323); cables add
#: preamble, checksum and gap, 24 (IEEE 802.3). Packets have 1,500 bytes, or 9,000 (jumbo frames).
FRAMES = {
    "TCP in Ethernet frames": (66.0, 1448.0),
    "TCP in Ethernet frames with preamble and gap": (90.0, 1448.0),
    "TCP in jumbo frames": (66.0, 8948.0),
    "TCP in jumbo frames with preamble and gap": (90.0, 8948.0),
}
#: one acknowledgement (a header without payload) per two frames (RFC 1122, section 4.2.3.2)
ACKNOWLEDGED = 2.0
#: minimum number of sizes for fitting more than latency and rate
LEAST_SIZES = 8
#: minimum rate x round trip in bytes for considering windows, and the required difference of -2 ln posterior (a
#: likelihood ratio of 1.6 without priors on the kinds: positive evidence, Kass and Raftery 1995, JASA 90(430))
LEAST_PRODUCT, CLEARLY = 2.0**20, 1.0


@dataclass(frozen=True)
class Shape:
    """Latency (s), rate (bytes/s, including headers), burst (bytes; 0: none), frame header and payload (bytes; 0: none)
    of a route; `fitted_rate` is False if the rate is that of the file."""

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
        """Return the times of messages of these sizes, in s."""
        return self.latency + np.maximum(0.0, self.wire(nbytes) - self.burst) / self.rate

    @property
    def payload_rate(self) -> float:
        """Payload rate of a large message, in bytes/s."""
        return self.rate / (1.0 + self.header / self.payload) if self.payload else self.rate

    @property
    def details(self) -> dict[str, float]:
        """Details of links that follow from the shape, by parameter name."""
        if not self.payload:
            return {}
        acknowledgements = self.header / (ACKNOWLEDGED * (self.header + self.payload))
        return {
            "between.frame_header": self.header,
            "between.frame_payload": self.payload,
            "between.reverse_load": acknowledgements,
        }


def find_shape(nbytes: Floats, seconds: Floats, wire_rate: float) -> tuple[Shape, Shape]:
    """Return the best shape by AICc for messages of these sizes, and the best one with only latency and rate.

    wire_rate   rate of the route's slowest link in the file, in bytes/s, including headers
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
    """Return the most likely shape of one kind, with its AICc."""
    with needs("scipy"):
        from scipy.optimize import least_squares

    free = ["latency", *(["rate"] if start.fitted_rate else []), *(["burst"] if with_burst else [])]
    k, n = len(free) + 2, len(seconds)
    if n - k - 1 <= 0:
        return start

    def errors_at(point: Floats) -> Floats:
        shape = replace(start, **dict(zip(free, np.exp(point).tolist(), strict=True)))
        return np.asarray(np.log(shape.seconds(nbytes) / seconds))

    def descend(point: Floats) -> tuple[float, Floats]:
        """Return the minimum cost near a point, and its location."""
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
    lost, point = min((descend(begin) for begin in points[:2]), key=lambda descent: descent[0])
    criterion = 2.0 * k + 2.0 * lost + 2.0 * k * (k + 1) / (n - k - 1)
    return replace(start, criterion=criterion, **dict(zip(free, np.exp(point).tolist(), strict=True)))


#: prior uncertainty of the cluster file: within a factor of exp(sd) with probability 2/3
LATENCY_SD = 1.5
BANDWIDTH_SD = 0.7
#: prior latency of a message in s, if the file has none
TYPICAL_LATENCY = 10e-6
#: one size determines the bandwidth if the file's latency is below this share of the time
LATENCY_SHARE = 0.01
#: the search for a bandwidth starts slightly below the file's value, at which other links may be equally slow, so that
#: small increases have no effect
SLOWER = 0.97
#: minimum share of a Jacobian column that is linearly independent of the others
DISTINCT = 0.1


@dataclass(frozen=True)
class LinkRow:
    """A measurement and the simulated operation; `link_class` is "between" or "inside" (hosts)."""

    row: Measurement
    case: Case

    @property
    def link_class(self) -> str:
        return "inside" if self.row.n_hosts == 1 else "between"


def fit_links(
    cluster: Cluster, rows: Sequence[LinkRow], overhead: bool = True
) -> tuple[LogFit, dict[str, float], list[str]]:
    """Fit the parameters (:data:`ddlsim.cluster.calibrated.PARAMETERS`) that `rows` determine. Return the fit,
    parameters that follow from the kind of link (frames), and notes. Without `overhead`, the overhead is fixed.

    Raises ConfigError, with the measurements to add, if latency and bandwidth cannot be distinguished.
    """
    _check_sizes(cluster, rows)
    shape, notes = _shape(cluster, rows)
    fit, fixed, fit_notes = _fit(cluster, rows, overhead, shape, shape.details if shape is not None else {})
    result = fit, fixed, notes + fit_notes
    if not _may_have_windows(cluster, rows):
        return result
    without = min(_criterion(other, rows) for other in (fit, _fit(cluster, rows, overhead, None, {})[0]))
    best = without - CLEARLY
    for warm in ({}, {"between.warm": 1.0}):
        fit, fixed, fit_notes = _fit(cluster, rows, overhead, None, warm, PROTOCOLS[DEFAULT_TRANSPORT].window)
        if (criterion := _criterion(fit, rows)) < best:
            window = f"a window of {size(fit.values['between.window'])}{'' if warm else ' after slow start'}"
            note = (
                f"links between hosts: TCP, {window} (-2 ln posterior {criterion:.1f}; without windows {without:.1f})"
            )
            best, result = criterion, (fit, fixed, [note, *fit_notes])
    return result


def _may_have_windows(cluster: Cluster, rows: Sequence[LinkRow]) -> bool:
    """Return whether windows could limit one-way messages between two hosts, and the file sets no transport."""
    are_one_way = [r.row.operation == "one_way" and r.row.n_pairs == 1 and r.link_class == "between" for r in rows]
    named = cluster.details is not None and bool((cluster.details.transport != "").any())
    product = 2.0 * min(r.row.median_s for r in rows) * current_parameters(cluster).get("between.bandwidth", 0.0)
    return all(are_one_way) and not named and product > LEAST_PRODUCT


def _criterion(fit: LogFit, rows: Sequence[LinkRow]) -> float:
    """Return -2 ln of likelihood times priors, up to a constant."""
    seconds = np.array([r.row.median_s for r in rows])
    noise = fit_noise(fit.errors, seconds) if len(seconds) >= LEAST_SIZES else (NOISE, 0.0)
    off = [(log - math.log(prior.value)) / prior.sd for log, prior in zip(fit.logs, fit.priors, strict=True)]
    return 2.0 * minus_log_likelihood(fit.errors, seconds, *noise) + float(np.square(off).sum())


def _fit(
    cluster: Cluster,
    rows: Sequence[LinkRow],
    overhead: bool,
    shape: Shape | None,
    fixed: dict[str, float],
    window: float = 0.0,
) -> tuple[LogFit, dict[str, float], list[str]]:
    """Fit links of one kind, like :func:`fit_links`: with the details `fixed`, and TCP's `window` (bytes) as a
    parameter unless it is 0."""
    cluster = with_parameters(cluster, fixed | ({"between.window": window} if window else {}))
    notes, most = list[str](), dict[str, float]()
    current = current_parameters(cluster)
    names, start, priors = [], [], []
    for link_class in dict.fromkeys(row.link_class for row in rows):
        class_rows = sorted((r for r in rows if r.link_class == link_class), key=lambda r: r.row.nbytes)
        least, ratio = class_rows[0].row.median_s, class_rows[-1].case.seconds(cluster) / class_rows[-1].row.median_s
        for quantity, sd in (("latency", LATENCY_SD), ("bandwidth", BANDWIDTH_SD)):
            name = f"{link_class}.{quantity}"
            if name not in current:
                raise ConfigError(
                    f"there are measurements of links {link_class} hosts, but no two workers of cluster "
                    f"{cluster.name!r} communicate over such links; add the links, or leave the measurements out"
                )
            value = current[name] or TYPICAL_LATENCY
            names.append(name)
            priors.append(Prior(value, sd if current[name] else 2 * sd))
            # near the solution, as the parameter may have no effect elsewhere
            start.append(min(value, 0.5 * least) if quantity == "latency" else SLOWER * value * ratio)
        if shape is not None and link_class == "between":
            start[-2:] = [shape.latency, shape.payload_rate]
            if shape.payload:
                most["between.bandwidth"] = shape.payload_rate  # at most the wire rate
            if shape.burst:
                names.append("between.burst")
                start.append(shape.burst)
                priors.append(Prior(shape.burst, 2 * LATENCY_SD))
    if window:
        large = max((r.row for r in rows), key=lambda row: row.nbytes)
        start[1] = SLOWER * current["between.bandwidth"]  # start where the window is the bottleneck
        names.append("between.window")
        start.append(min(window, 2.0 * start[0] * large.nbytes / large.median_s))
        priors.append(Prior(window, BANDWIDTH_SD))
    measured = np.array([r.row.median_s for r in rows])
    latencies = [value for value, name in zip(start, names, strict=True) if name.endswith("latency")]
    seconds = current["overhead"] or 0.1 * min(latencies)
    if overhead and _tells_overhead(cluster, rows, names, start, seconds):
        names.append("overhead")
        start.append(seconds)
        priors.append(Prior(seconds, LATENCY_SD if current["overhead"] else 2 * LATENCY_SD))
    elif overhead:
        notes.append(
            f"the overhead per message was not fitted: it keeps the value in the file, {current['overhead'] * 1e6:.4g} "
            "us, and the rest of the measured time is attributed to latency. Only measurements with concurrent "
            "messages, such as an all-to-all whose algorithm is specified, can distinguish overhead from latency"
        )
    fit = fit_logs(lambda values: _times(cluster, rows, names, values), measured, names, start, priors, most)
    return fit, fixed, notes + _uninformed(fit, most)


def _shape(cluster: Cluster, rows: Sequence[LinkRow]) -> tuple[Shape | None, list[str]]:
    """Determine frames and bursts from one-way messages between two hosts, unless the file sets them."""
    single = [r for r in rows if (r.link_class, r.row.operation, r.row.n_pairs) == ("between", "one_way", 1)]
    ends = reference_ends(cluster, "between")
    is_set = cluster.details is not None and (cluster.details.frame_header + cluster.details.burst).any()
    if ends is None or is_set or len({r.row.nbytes for r in single}) < LEAST_SIZES:
        return None, []
    wire = float(cluster.link_bandwidth[cluster.routes([ends[0]], [ends[1]])[0]].min())
    nbytes, seconds = (np.array([getattr(r.row, name) for r in single], dtype=float) for name in ("nbytes", "median_s"))
    shape, plain = find_shape(nbytes, seconds, wire)
    if shape is plain:
        return None, []
    kind = next((name for name, frame in FRAMES.items() if frame == (shape.header, shape.payload)), "")
    parts = [kind, f"a burst of {shape.burst:.4g} B" if shape.burst else ""]
    return shape, [
        f"links between hosts: {' and '.join(part for part in parts if part)}, found in one-way messages (AICc "
        f"{shape.criterion:.1f}; with latency and bandwidth alone {plain.criterion:.1f})"
    ]


def _check_sizes(cluster: Cluster, rows: Sequence[LinkRow]) -> None:
    """Raise ConfigError if a class of links has a single size, unless it is so large that latency is negligible."""
    for link_class in dict.fromkeys(row.link_class for row in rows):
        cases = [row for row in rows if row.link_class == link_class]
        measured = [row.row for row in cases]
        if len({row.nbytes for row in measured}) < 2:
            parts = cases[0].case.parts(cluster)
            if parts.per_message < LATENCY_SHARE * min(row.median_s for row in measured):
                continue
            hosts = "between hosts" if link_class == "between" else "inside a host"
            raise ConfigError(
                f"calibration: links {hosts}: a single size ({measured[0].operation} of {measured[0].nbytes} bytes) "
                "cannot determine both bandwidth and latency; measure one_way at two or more sizes, such as 8 B and "
                "16 MiB"
            )


def _times(cluster: Cluster, rows: Sequence[LinkRow], names: Sequence[str], values: Floats) -> Floats:
    changed = with_parameters(cluster, dict(zip(names, values.tolist(), strict=True)))
    keys = [(row.case.algorithm, *row.row.key) for row in rows]
    cases = {key: row.case for key, row in zip(keys, rows, strict=True)}  # repeated measurements are simulated once
    seconds = {key: case.seconds(changed) for key, case in cases.items()}
    return np.array([seconds[key] for key in keys])


def _tells_overhead(
    cluster: Cluster, rows: Sequence[LinkRow], names: Sequence[str], start: Sequence[float], overhead: float
) -> bool:
    """Return whether the overhead affects the measurements differently from latency and bandwidth."""
    if len(rows) <= len(names):
        return False
    step = 1e-3
    everything = [*names, "overhead"]
    begin = np.log([*start, overhead])
    base = np.log(_times(cluster, rows, everything, np.exp(begin)))
    columns = []
    for i in range(len(begin)):
        moved = begin.copy()
        moved[i] += step
        columns.append((np.log(_times(cluster, rows, everything, np.exp(moved))) - base) / step)
    others, effect = np.stack(columns[:-1], axis=1), columns[-1]
    rest = effect - others @ np.linalg.lstsq(others, effect, rcond=None)[0]
    length = float(np.linalg.norm(effect))
    return length > 0.0 and float(np.linalg.norm(rest)) > DISTINCT * length


def _uninformed(fit: LogFit, most: Mapping[str, float]) -> list[str]:
    """Return a note for each parameter that depends more on the cluster file than on measurements."""
    remedies = {
        "latency": "measure small messages (8 B)",
        "bandwidth": "measure large messages (16 MiB)",
        "window": "measure messages larger than the window",
        "burst": "measure sizes between 1 KiB and 64 KiB",
    }
    notes = []
    for (name, value), ends in zip(fit.values.items(), fit.bounds, strict=True):
        if value < 1.01 * ends[0] or (value > 0.99 * ends[1] and name not in most):
            notes.append(
                f"{name} reached a limit of its search range: the values in the cluster file differ too much from "
                "the measurements"
            )
    for name, share in zip(fit.names, fit.informed.tolist(), strict=True):
        if share < 0.5:
            remedy = remedies.get(name.partition(".")[2], "measure several pairs at once")
            basis = "Linux's default" if name == "between.window" else "the cluster file"
            notes.append(f"{name} comes mainly from {basis}, because the measurements hardly determine it; {remedy}")
    return notes
