"""Rules of thumb from the literature, as closed forms: what a plan shows beside its simulations.

Each is a pure function of plain numbers: seconds, bytes, bytes/s, counts. They leave out latency, contention,
stragglers and overlap except where they say otherwise; docs/planning.md derives each one and says where it holds.
All raise :class:`~ddlsim.errors.ConfigError` for arguments that make no sense.
"""

from __future__ import annotations

import math

from ddlsim.errors import ConfigError
from ddlsim.workload.devices import Device
from ddlsim.workload.memory import training_nbytes
from ddlsim.workload.model import Model

__all__ = [
    "byteps_time",
    "compute_to_traffic",
    "data_parallel_nbytes",
    "hybrid_groups",
    "hybrid_nbytes",
    "largest_batch",
    "largest_n_gpus",
    "largest_overhead_ratio",
    "local_sgd_speedup",
    "medium_speedup",
    "model_parallel_nbytes",
    "n_parameter_servers",
    "scaling_efficiency",
    "server_time",
    "traffic_share",
]


def _need(condition: bool, name: str, value: float, rule: str) -> None:
    if not condition:
        raise ConfigError(f"{name} = {value!r}: must be {rule}")


def _positive(**values: float) -> None:
    for name, value in values.items():
        _need(math.isfinite(value) and value > 0.0, name, value, "finite and above 0")


def _nonnegative(**values: float) -> None:
    for name, value in values.items():
        _need(math.isfinite(value) and value >= 0.0, name, value, "finite and not negative")


def _share(name: str, value: float) -> None:
    _need(0.0 < value <= 1.0, name, value, "above 0 and at most 1")


# ---------------------------------------------------------------- how many GPUs


def scaling_efficiency(overhead_ratio: float, n_gpus: int) -> float:
    """Return (1 + R) / (1 + G R): the speed-up over G of a fixed amount of work on G GPUs.

    The lemma on the number of GPUs of Zou et al. 2017 (arXiv:1709.06622): a step takes T_C/G + T_O, computing that
    is shared out and an overhead that is not; R = T_O/T_C, the `overhead_ratio`. Amdahl's law with the serial
    fraction R/(1 + R).
    """
    _nonnegative(overhead_ratio=overhead_ratio)
    _need(n_gpus >= 1, "n_gpus", n_gpus, "at least 1")
    return (1.0 + overhead_ratio) / (1.0 + n_gpus * overhead_ratio)


def largest_n_gpus(overhead_ratio: float, efficiency: float) -> float:
    """Return G = (1 + R - a) / (a R), up to which :func:`scaling_efficiency` is at least a; inf without overhead."""
    _nonnegative(overhead_ratio=overhead_ratio)
    _share("efficiency", efficiency)
    if overhead_ratio == 0.0:
        return math.inf
    return (1.0 + overhead_ratio - efficiency) / (efficiency * overhead_ratio)


def largest_overhead_ratio(n_gpus: int, efficiency: float) -> float:
    """Return R = (1 - a) / (a G - 1), up to which G GPUs reach the efficiency a; inf where any overhead will do.

    Zou et al. 2017, as above; four GPUs at 80 % may spend 0.0909 of the computing time on what is not shared out.
    """
    _share("efficiency", efficiency)
    _need(n_gpus >= 1, "n_gpus", n_gpus, "at least 1")
    room = efficiency * n_gpus - 1.0
    return (1.0 - efficiency) / room if room > 0.0 else math.inf


# ---------------------------------------------------------------- how many servers


def n_parameter_servers(
    nbytes: float, n_workers: int, bandwidth: float, compute_time: float, *, full_duplex: bool = False
) -> int:
    """Return ceil(2 S N / (B T_C)): the servers with which pushing and pulling hide behind a step of computing.

    nbytes        S, of the parameters
    n_workers     N
    bandwidth     B of one server, bytes/s, in each direction
    compute_time  T_C of a step, s
    full_duplex   pushes of some go on beside pulls of others: half as many

    The lemma on the number of parameter servers of Zou et al. 2017 (arXiv:1709.06622): each of k servers moves
    2 N S/k bytes a step.
    """
    _nonnegative(nbytes=nbytes)
    _positive(bandwidth=bandwidth, compute_time=compute_time)
    _need(n_workers >= 1, "n_workers", n_workers, "at least 1")
    directions = 1.0 if full_duplex else 2.0
    # what divides evenly in decimal may come out an ulp above the whole number
    return max(1, math.ceil(directions * nbytes * n_workers / (bandwidth * compute_time) * (1.0 - 1e-12)))


def server_time(nbytes: float, n_workers: int, n_servers: int, bandwidth: float) -> float:
    """Return max(S/B, N S/(k B)) s: N workers push S bytes to k servers on machines of their own.

    Or pull them; both at once where directions do not disturb each other (Jiang et al. 2020, OSDI, section 3).
    """
    _nonnegative(nbytes=nbytes)
    _positive(bandwidth=bandwidth, n_workers=n_workers, n_servers=n_servers)
    return max(1.0, n_workers / n_servers) * nbytes / bandwidth


def byteps_time(nbytes: float, n_machines: int, n_servers: int, bandwidth: float) -> float:
    """Return 2 n (n-1) M / ((n^2 + k n - 2 k) B) s, the least time of a gradient exchange with k machines' help.

    n machines of workers and k more with CPUs only, 0 <= k <= n, all with B bytes/s in each direction, sum up M
    bytes in shares that fit (BytePS, Jiang et al. 2020, OSDI). k = 0 is a ring's 2 (n-1)/n M/B, k = n is M/B.
    """
    _nonnegative(nbytes=nbytes)
    _positive(bandwidth=bandwidth)
    _need(n_machines >= 2, "n_machines", n_machines, "at least 2")
    _need(0 <= n_servers <= n_machines, "n_servers", n_servers, f"between 0 and the {n_machines} machines of workers")
    n, k = n_machines, n_servers
    return 2.0 * n * (n - 1) * nbytes / ((n * n + k * n - 2 * k) * bandwidth)


# ---------------------------------------------------------------- batch and memory


def largest_batch(model: Model, device: Device, precision: str = "fp32", n_workers: int = 1) -> int:
    """Return the largest mini-batch whose training step fits the device's memory; 0: not even one sample.

    Embedding tables are shared out over the workers.

    M_device >= parameters, gradients and momentum + batch * activations: the memory budget of Zou et al. 2017
    without workspaces (:func:`ddlsim.workload.memory.training_nbytes` says what is counted).
    """
    fixed = training_nbytes(model, 0, precision, n_workers)
    per_sample = training_nbytes(model, 1, precision, n_workers) - fixed
    left = device.memory_nbytes - fixed
    return max(0, math.floor(left / per_sample)) if per_sample > 0.0 else 0


# ---------------------------------------------------------------- where weights travel


def traffic_share(traffic_time: float, other_time: float) -> float:
    """Return f = T_weight / (T_data + T_compute + T_weight): the share of a step that weights travel.

    The breakdown of Wang et al. 2019 (Alibaba-PAI, arXiv:1910.05930): nothing overlaps. Times in s.
    """
    _nonnegative(traffic_time=traffic_time, other_time=other_time)
    _positive(total=traffic_time + other_time)
    return traffic_time / (traffic_time + other_time)


def medium_speedup(share: float, bandwidth: float, new_bandwidth: float) -> float:
    """Return 1 / ((1 - f) + f B1/B2): what moving the weights' traffic, a share f of the time, from B1 to B2 gains.

    Wang et al. 2019, as above: from Ethernet to NVLink, or from 25 to 100 Gbit/s. Latency does not count.
    """
    _need(0.0 <= share <= 1.0, "share", share, "between 0 and 1")
    _positive(bandwidth=bandwidth, new_bandwidth=new_bandwidth)
    return 1.0 / ((1.0 - share) + share * bandwidth / new_bandwidth)


# ---------------------------------------------------------------- data against model parallelism


def compute_to_traffic(positions: float, batch_size: float, *, overlap: bool = True, nbytes: int = 4) -> float:
    """Return the FLOPs per byte of a layer under data parallelism: 1.5 * out_w * out_h * MB in fp32.

    positions   out_w * out_h, over which a layer's weights are used again; 1 for a dense layer
    batch_size  MB, samples per worker
    overlap     sending and receiving at once; otherwise half
    nbytes      of a weight on the wire

    Das et al. 2016 (arXiv:1602.06709): 6 FLOPs per weight, position and sample (forward, backward, weight
    gradient), and `nbytes` bytes per weight and direction, whatever the kernel and the number of feature maps.
    """
    _positive(positions=positions, batch_size=batch_size, nbytes=nbytes)
    return 6.0 * positions * batch_size / (nbytes * (1.0 if overlap else 2.0))


def data_parallel_nbytes(n_weights: float, *, overlap: bool = True, nbytes: int = 4) -> float:
    """Return the bytes that a node moves for a layer under data parallelism (Das et al. 2016)."""
    return nbytes * n_weights * (1.0 if overlap else 2.0)


def model_parallel_nbytes(n_inputs: float, batch_size: float, *, nbytes: int = 4) -> float:
    """Return the bytes that a node moves for a layer that is shared out: all inputs, and their gradients.

    n_inputs    ifm * in_w * in_h of a sample
    batch_size  of all nodes together, mb

    Model parallelism moves less than data parallelism where ofm * k_w * k_h * (2 - overlap) / 2 > in_w * in_h * mb;
    for a dense layer, sending and receiving in turn, where it has more outputs than the batch has samples.
    """
    return 2.0 * nbytes * n_inputs * batch_size


def hybrid_nbytes(
    n_weights: float, n_inputs: float, batch_size: float, n_nodes: int, n_groups: float, *, overlap: bool = True
) -> float:
    """Return the bytes (fp32) that a node moves with model parallelism inside each of G groups, data parallelism
    across them: 2*4*inputs*mb/G + 4*weights*(2 - overlap)*G/N (Das et al. 2016).

    An interpolation: at G = 1 and G = N one of the two exchanges is not needed at all.
    """
    _positive(n_groups=n_groups, n_nodes=n_nodes)
    inside = model_parallel_nbytes(n_inputs, batch_size / n_groups)
    return inside + data_parallel_nbytes(n_weights, overlap=overlap) * n_groups / n_nodes


def hybrid_groups(
    n_weights: float, n_inputs: float, batch_size: float, n_nodes: int, *, overlap: bool = True
) -> float:
    """Return G* = sqrt(2 N mb in_w in_h / (ofm k_w k_h (2 - overlap))), at which :func:`hybrid_nbytes` is least.

    Between 1 (model parallelism alone) and N (data parallelism alone).
    """
    _positive(n_weights=n_weights, n_inputs=n_inputs, batch_size=batch_size, n_nodes=n_nodes)
    moved = data_parallel_nbytes(n_weights, overlap=overlap)
    best = math.sqrt(n_nodes * model_parallel_nbytes(n_inputs, batch_size) / moved)
    return min(max(best, 1.0), float(n_nodes))


# ---------------------------------------------------------------- talking less often


def local_sgd_speedup(ratio: float, period: int) -> float:
    """Return (1 + a) / (1 + a/tau): what averaging every `period` steps instead of each one gains.

    a = D/Y, the time of an exchange over that of computing a step, both constant (Wang and Joshi 2019,
    arXiv:1810.08313).
    """
    _nonnegative(ratio=ratio)
    _need(period >= 1, "period", period, "at least 1")
    return (1.0 + ratio) / (1.0 + ratio / period)
