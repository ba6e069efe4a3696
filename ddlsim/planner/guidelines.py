"""Rules of thumb from the literature, as closed forms that a recommendation shows next to its simulations.

Each is a pure function of plain numbers: seconds, bytes, bytes/s, counts. They ignore latency, contention, stragglers
and overlap unless noted otherwise. docs/planning.md derives each one and states where it holds. All raise
:class:`~ddlsim.errors.ConfigError` for invalid arguments.
"""

from __future__ import annotations

import math
from typing import Annotated

from ddlsim.arguments import Count, Density, Index, NotNegative, Positive, Share, checked, integer, one_of
from ddlsim.errors import ConfigError
from ddlsim.workload.devices import Device
from ddlsim.workload.memory import memory_of
from ddlsim.workload.model import Model
from ddlsim.workload.precision import ELEMENT_NBYTES


@checked
def scaling_efficiency(overhead_ratio: NotNegative, n_gpus: Count) -> float:
    """Return (1 + R) / (1 + G R): the speed-up over G of a fixed amount of work on G GPUs.

    The lemma on the number of GPUs of Zou et al. 2017 (arXiv:1709.06622): a step takes T_C/G + T_O, a parallel and a
    serial part; R = T_O/T_C, the `overhead_ratio`. Amdahl's law with the serial fraction R/(1 + R).
    """
    return (1.0 + overhead_ratio) / (1.0 + n_gpus * overhead_ratio)


@checked
def largest_n_gpus(overhead_ratio: NotNegative, efficiency: Density) -> float:
    """Return G = (1 + R - a) / (a R), up to which :func:`scaling_efficiency` is at least a; inf without overhead."""
    if overhead_ratio == 0.0:
        return math.inf
    return (1.0 + overhead_ratio - efficiency) / (efficiency * overhead_ratio)


@checked
def largest_overhead_ratio(n_gpus: Count, efficiency: Density) -> float:
    """Return R = (1 - a) / (a G - 1), up to which G GPUs reach the efficiency a; inf if every overhead is acceptable.

    Zou et al. 2017, as above; four GPUs at 80 % may spend 0.0909 of the computing time on the serial part.
    """
    room = efficiency * n_gpus - 1.0
    return (1.0 - efficiency) / room if room > 0.0 else math.inf


@checked
def n_parameter_servers(
    nbytes: NotNegative, n_workers: Count, bandwidth: Positive, compute_time: Positive, *, full_duplex: bool = False
) -> int:
    """Return ceil(2 S N / (B T_C)): the number of servers with which computing hides pushing and pulling.

    nbytes        S, size of the parameters
    n_workers     N
    bandwidth     B of one server, bytes/s, in each direction
    compute_time  T_C of a step, s
    full_duplex   pushes overlap with pulls of other workers, which halves the number of servers

    The lemma on the number of parameter servers of Zou et al. 2017 (arXiv:1709.06622): each of k servers moves 2 N S/k
    bytes per step.
    """
    directions = 1.0 if full_duplex else 2.0
    # a quotient that is an integer in decimal may be an ulp above it in binary
    return max(1, math.ceil(directions * nbytes * n_workers / (bandwidth * compute_time) * (1.0 - 1e-12)))


@checked
def byteps_time(
    nbytes: NotNegative, n_machines: Annotated[int, integer(2)], n_servers: Index, bandwidth: Positive
) -> float:
    """Return 2 n (n-1) M / ((n^2 + k n - 2 k) B) s, the minimum time of a gradient exchange with k helpers.

    n machines with workers and k more with CPUs only, 0 <= k <= n, all with B bytes/s in each direction, reduce M bytes
    in optimal shares (BytePS, Jiang et al. 2020, OSDI). k = 0 is a ring's 2 (n-1)/n M/B, k = n is M/B.
    """
    if n_servers > n_machines:
        raise ConfigError(
            f"byteps_time: n_servers = {n_servers}: must be from 0 to the number of machines with workers, {n_machines}"
        )
    n, k = n_machines, n_servers
    return 2.0 * n * (n - 1) * nbytes / ((n * n + k * n - 2 * k) * bandwidth)


@checked
def largest_batch(
    model: Model, device: Device, precision: Annotated[str, one_of(*ELEMENT_NBYTES)] = "fp32", n_workers: Count = 1
) -> int:
    """Return the largest mini-batch whose training step fits the device's memory; 0: none.

    Embedding tables are sharded over the workers.

    M_device >= parameters, gradients and momentum + batch * activations: the memory budget of Zou et al. 2017
    without workspaces (:class:`ddlsim.workload.memory.Memory` lists the parts).
    """
    fixed, one = (memory_of(model, n, precision, n_workers=n_workers).total for n in (0, 1))
    per_sample = one - fixed
    left = device.memory_nbytes - fixed
    return max(0, math.floor(left / per_sample)) if per_sample > 0.0 else 0


@checked
def traffic_share(traffic_time: NotNegative, other_time: NotNegative) -> float:
    """Return f = T_weight / (T_data + T_compute + T_weight): the share of a step spent on sending weights.

    The breakdown of Wang et al. 2019 (Alibaba-PAI, arXiv:1910.05930): nothing overlaps. Times in s.
    """
    if traffic_time + other_time == 0.0:
        raise ConfigError("traffic_share: traffic_time and other_time are both 0; at least one must be above 0")
    return traffic_time / (traffic_time + other_time)


@checked
def medium_speedup(share: Share, bandwidth: Positive, new_bandwidth: Positive) -> float:
    """Return 1 / ((1 - f) + f B1/B2): the speed-up of moving the weights' traffic, a share f, from B1 to B2.

    Wang et al. 2019, as above: from Ethernet to NVLink, or from 25 to 100 Gbit/s. Latency is ignored.
    """
    return 1.0 / ((1.0 - share) + share * bandwidth / new_bandwidth)


@checked
def data_parallel_nbytes(n_weights: Positive, *, overlap: bool = True, nbytes: Count = 4) -> float:
    """Return the bytes that a node moves for a layer under data parallelism (Das et al. 2016)."""
    return nbytes * n_weights * (1.0 if overlap else 2.0)


@checked
def model_parallel_nbytes(n_inputs: Positive, batch_size: Positive, *, nbytes: Count = 4) -> float:
    """Return the bytes that a node moves for a layer under model parallelism: all inputs and their gradients.

    n_inputs    ifm * in_w * in_h of a sample
    batch_size  mb, over all nodes

    Model parallelism moves less than data parallelism if ofm * k_w * k_h * (2 - overlap) / 2 > in_w * in_h * mb;
    for a dense layer without overlap, if it has more outputs than the batch has samples.
    """
    return 2.0 * nbytes * n_inputs * batch_size


@checked
def hybrid_groups(
    n_weights: Positive, n_inputs: Positive, batch_size: Positive, n_nodes: Count, *, overlap: bool = True
) -> float:
    """Return G* = sqrt(2 N mb in_w in_h / (ofm k_w k_h (2 - overlap))): the number of groups,
    with model parallelism inside each and data parallelism across them, with which a node moves the fewest bytes,
    2*4*inputs*mb/G + 4*weights*(2 - overlap)*G/N (Das et al. 2016).

    The result lies between 1 (pure model parallelism) and N (pure data parallelism).
    """
    moved = data_parallel_nbytes(n_weights, overlap=overlap)
    best = math.sqrt(n_nodes * model_parallel_nbytes(n_inputs, batch_size) / moved)
    return min(max(best, 1.0), float(n_nodes))


@checked
def local_sgd_speedup(ratio: NotNegative, period: Count) -> float:
    """Return (1 + a) / (1 + a/tau): the speed-up of averaging only every `period` steps.

    a = D/Y, the time of an exchange over that of computing a step, both constant (Wang and Joshi 2019,
    arXiv:1810.08313).
    """
    return (1.0 + ratio) / (1.0 + ratio / period)
