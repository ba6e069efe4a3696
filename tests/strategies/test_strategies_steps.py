"""Step times of synchronous all-reduce equal the textbook's formulas on an idle, uniform network."""

from __future__ import annotations

import math

import numpy as np
import pytest
from draws import pairwise, rows
from strategies_reference import (
    Part,
    bucket_parts,
    horovod_ends,
    layer_parts,
    priority_ends,
    ring_time,
    uniform_star,
    wait_free_end,
)

from ddlsim import (
    AllReduce,
    DdpBuckets,
    HorovodFusion,
    Measured,
    NoOverlap,
    PerLayer,
    Priority,
    Result,
    Roofline,
    simulate,
)
from ddlsim.strategies.overlap import Overlap

EXACT = {"rel": 1e-9, "abs": 0.0}
MODELS = ("lenet5", "cifar-cnn", "alexnet", "resnet18", "vgg16", "googlenet")


def ring_run(
    n: int, model: str, overlap: Overlap | str, step: float = 0.1, steps: int = 2, accumulation: int = 1
) -> Result:
    return simulate(
        uniform_star(n), model, AllReduce("ring", overlap), 8, n, steps=steps, warmup=0,
        compute=Measured(step, 8), accumulation=accumulation,
    )  # fmt: skip


def update_times(result: Result) -> list[float]:
    return [time for time, _ in result.recorder.updates]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_without_overlap_compute_and_ring_add_up(n: int, model: str) -> None:
    """t = t_c + 2 (N-1) alpha + 2 (N-1)/N S/B."""
    result = ring_run(n, model, "none")
    nbytes = 4.0 * result.workloads[0].model.n_params
    assert result.step_times == pytest.approx([0.1 + ring_time(n)(nbytes)] * 2, **EXACT)


@pytest.mark.parametrize(("n", "model", "step"), pairwise([2, 4, 7, 8], list(MODELS), [0.002, 0.1, 2.0]))
def test_wait_free_backpropagation(n: int, model: str, step: float) -> None:
    """t = t_f + max(t_b, end_1) with start_l = max(r_l, end_(l+1)), end_l = start_l + c_l."""
    result = ring_run(n, model, PerLayer(), step)
    work = result.workloads[0]
    parts, exchange = layer_parts(work), ring_time(n)
    expected = work.forward_time + wait_free_end(parts, work.backward_time, exchange)
    assert result.step_times == pytest.approx([expected] * 2, **EXACT)
    # and so the bounds: nothing before the first gradient, nothing hidden
    communication = sum(exchange(p.nbytes) for p in parts)
    assert result.step_time >= max(step, work.forward_time + parts[0].ready + communication) * (1 - 1e-12)
    assert result.step_time <= (step + communication) * (1 + 1e-12)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("first", "cap"), [(2**20, 25 * 2**20), (4e5, 4e6), (1e9, 1e9)])
def test_bucket_schedule(model: str, first: float, cap: float) -> None:
    """The same recurrence over DistributedDataParallel's buckets."""
    result = ring_run(4, model, DdpBuckets(cap, first), 0.05)
    work = result.workloads[0]
    end = wait_free_end(bucket_parts(work, first, cap), work.backward_time, ring_time(4))
    assert result.step_times == pytest.approx([work.forward_time + end] * 2, **EXACT)


def test_merging_two_tensors_saves_their_latency() -> None:
    """With everything ready at once (no compute to speak of), k buckets instead of L layers save L - k times
    the ring's latency 2 (N-1) alpha, and no bandwidth."""
    n, alpha = 4, 2 * 20e-6
    times, counts = [], []
    for cap in (1.0, 2e5, 1e9):
        result = ring_run(n, "lenet5", DdpBuckets(cap, cap), 1e-12)
        counts.append(len(bucket_parts(result.workloads[0], cap, cap)))
        times.append(result.step_time)
    assert counts == [10, 2, 1]  # tensors (weights and biases of 5 layers), two buckets, one
    for i in (1, 2):
        saved = (counts[0] - counts[i]) * 2 * (n - 1) * alpha
        assert times[0] - times[i] == pytest.approx(saved, rel=1e-6)


@pytest.mark.parametrize("accumulation", [1, 2, 5])
@pytest.mark.parametrize("overlap", [NoOverlap(), PerLayer(), DdpBuckets(4e6, 4e5)], ids=lambda o: type(o).__name__)
def test_accumulation_exchanges_once(accumulation: int, overlap: Overlap) -> None:
    """t = a t_fb + exposed communication: only the last micro-step exchanges."""
    plain = ring_run(4, "alexnet", overlap)
    exposed = plain.step_time - 0.1
    assert exposed > 0.0
    result = ring_run(4, "alexnet", overlap, accumulation=accumulation)
    assert result.step_time == pytest.approx(accumulation * 0.1 + exposed, **EXACT)
    assert result.throughput == pytest.approx(4 * 8 * accumulation / result.step_time, **EXACT)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("threshold", "cycle"), rows([(128 * 2**20, 1e-3), (1e6, 5e-3), (1.0, 0.7e-3), (1e8, 0.043)], 2), ids=str
)
@pytest.mark.parametrize("step", [0.002, 0.1], ids=["network-bound", "mixed"])
def test_horovod_cycles_and_fusion(model: str, threshold: float, cycle: float, step: float) -> None:
    result = ring_run(4, model, HorovodFusion(threshold, cycle), step, steps=3)
    expected = horovod_ends(result.workloads[0], ring_time(4), threshold, cycle, 3)
    assert update_times(result) == pytest.approx(expected, **EXACT)


@pytest.mark.parametrize("step", [0.002, 0.1, 2.0])
@pytest.mark.parametrize("model", MODELS)
def test_priority_with_one_in_flight(model: str, step: float) -> None:
    """A queue with one server, priorities, no preemption; forward passes wait layer by layer."""
    result = ring_run(4, model, Priority(1e12, in_flight=1), step, steps=4)
    expected = priority_ends(result.workloads[0], ring_time(4), 4)
    assert update_times(result) == pytest.approx(expected, **EXACT)


@pytest.mark.parametrize("in_flight", [1, 4])
@pytest.mark.parametrize("step", [0.002, 0.1, 2.0])
def test_priority_is_bounded_by_compute_and_by_the_wire(step: float, in_flight: int) -> None:
    """Per step in the long run: at least max(t_c, wire time of all bytes); at most both in a row."""
    n, partition = 4, 4e6
    result = ring_run(n, "vgg16", Priority(partition, in_flight), step, steps=6)
    work = result.workloads[0]
    periods = np.diff(update_times(result))
    wire = 2 * (n - 1) / n * 4.0 * work.model.n_params / 1.25e9
    assert periods.min() >= max(step, wire) * (1 - 1e-9)
    sizes = [4.0 * size for layer in work.model.layers for _, size in layer.tensors]
    n_parts = sum(math.ceil(size / partition) for size in sizes)
    assert periods.max() <= step + wire + n_parts * 2 * (n - 1) * 40e-6


def test_a_wire_of_partitions() -> None:
    """Without compute all partitions are ready together, and the next step needs them all: one at a time they
    take k times the latency and the bandwidth time of the whole, whatever their order."""
    result = ring_run(2, "lenet5", Priority(5e4, in_flight=1), 1e-9, steps=3)
    model = result.workloads[0].model
    n_parts = sum(math.ceil(4.0 * size / 5e4) for layer in model.layers for _, size in layer.tensors)
    expected = n_parts * 2 * 40e-6 + 4.0 * model.n_params / 1.25e9
    assert np.diff(update_times(result)) == pytest.approx([expected] * 2, rel=1e-5)


def test_priority_hides_what_first_come_first_served_cannot() -> None:
    """VGG-16: first come first served, the first convolutions wait behind fc6; by priority they overtake, and
    the forward pass hides the rest."""
    fifo = np.diff(update_times(ring_run(8, "vgg16", PerLayer(), 1.0, steps=5))).mean() - 1.0
    urgent = np.diff(update_times(ring_run(8, "vgg16", Priority(16e6, 1), 1.0, steps=5))).mean() - 1.0
    assert 0.0 <= urgent < 0.2 * fifo


def test_optimizer_time_follows_the_exchange() -> None:
    """The roofline charges the optimizer: t = t_f + max(t_b, end_1) + t_o."""
    result = simulate(
        uniform_star(4), "alexnet", AllReduce("ring", "layer"), 8, 4, steps=1, warmup=0, compute=Roofline()
    )
    work = result.workloads[0]
    assert work.optimizer > 0.0
    end = wait_free_end(layer_parts(work), work.backward_time, ring_time(4))
    assert result.step_time == pytest.approx(work.forward_time + end + work.optimizer, **EXACT)


def test_reference_recurrence_by_hand() -> None:
    """Three layers ready at 1, 2, 3 s; 10, 1 and 1 bytes at 1 byte/s: ends 11, 12, 13."""
    parts = [Part(10.0, 1.0, 2), Part(1.0, 2.0, 1), Part(1.0, 3.0, 0)]
    assert wait_free_end(parts, 3.0, lambda nbytes: nbytes) == 13.0
