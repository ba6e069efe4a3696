"""What devices wait for their samples, against timelines by hand; and devices that are not equally fast."""

from __future__ import annotations

import dataclasses
import math

import pytest

import ddlsim
from ddlsim import AllReduce, Copies, Measured, Spread
from ddlsim.cluster import MultiGpu, star, with_detail
from ddlsim.errors import ConfigError
from ddlsim.spread import WHISKERS
from ddlsim.workload import order_statistics
from ddlsim.workload.input import MXNET_INPUT

EXACT = {"rel": 1e-9, "abs": 0.0}
PCIE, COMPUTE, BATCH = 12e9, 0.05, 8
SAMPLE = 75e6  # bytes: a batch takes 50 ms on a link of its own
COPY = BATCH * SAMPLE / PCIE


def machine(n_gpus=4, machines=1):
    """Machines whose devices share one link to the memory."""
    host = MultiGpu(n_gpus=n_gpus, pcie_bandwidth=PCIE, pcie_latency=1e-6, n_pcie_switches=1)
    return star(machines, bandwidth="10 GB/s", latency="1 us", host=host)


RING = AllReduce("ring", "none")


def run(input=None, strategy=RING, cluster=None, **fields):
    fields = {"compute": Measured(COMPUTE, BATCH), "steps": 2, "warmup": 1, "device": "v100", **fields}
    return ddlsim.simulate(cluster or machine(), "cifar-cnn", strategy, BATCH, input=input, **fields)


def test_copies_of_one_machine_share_its_link():
    """Four batches take four times as long as the one that is in the measured step; nothing hides them."""
    plain, copied = run(), run(Copies("host", SAMPLE))
    assert copied.step_time - plain.step_time == pytest.approx(3 * COPY, **EXACT)
    assert any(note.startswith("input: devices wait up to 150 ms") for note in copied.notes)
    assert copied.single_throughput == pytest.approx(plain.single_throughput, **EXACT)  # it would not share


def test_machines_do_not_share_their_links():
    several = machine(2, 3)
    more = run(Copies("host", SAMPLE), cluster=several).step_time - run(cluster=several).step_time
    assert more == pytest.approx(COPY, **EXACT)


def test_copies_to_a_second_buffer_hide_behind_the_step():
    plain = run().step_times.tolist()
    assert run(Copies("device", SAMPLE / 5)).step_times.tolist() == plain  # 4 * 10 ms, bit for bit
    late = run(Copies("device", SAMPLE)).step_time - run().step_time
    assert late == pytest.approx(3 * COPY, **EXACT)  # alone it would be 2 us late, the latency of two links


def test_alone_in_its_machine_a_device_waits_for_nothing_that_was_not_measured():
    assert run(Copies("host", SAMPLE), workers=1).step_times.tolist() == run(workers=1).step_times.tolist()


def test_a_roofline_has_no_input_in_it():
    ways = (None, Copies("host", SAMPLE))
    by_roofline = [run(input, workers=1, compute=ddlsim.Roofline()).step_time for input in ways]
    assert by_roofline[1] - by_roofline[0] == pytest.approx(COPY + 2e-6, **EXACT)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("compute", [None, Measured(COMPUTE, 1)], ids=["kernels", "measured"])
def test_recomputation_waits_for_the_same_samples(compute, recompute):
    """Transformers that compute activations again read no sample again, and still wait for their first."""
    fields = {"workers": 4, "device": "a100-80g", "compute": compute, "steps": 2, "warmup": 1}

    def computing(strategy, input):
        slowdown = ddlsim.OverlapSlowdown(1, 1)
        result = ddlsim.simulate(machine(), "gpt2", strategy, 4, input=input, overlap_slowdown=slowdown, **fields)
        return result.shares["compute"] * result.step_time, result.workloads[0].wait

    for strategy in (ddlsim.FSDP(recompute=recompute), ddlsim.Parallel(data=4, recompute=recompute)):
        (late, wait), (plain, none) = (computing(strategy, each) for each in (Copies("host", SAMPLE), None))
        assert wait > none == 0.0
        assert late - plain == pytest.approx(wait, **EXACT)


@pytest.mark.parametrize(("threads", "late"), [(8, 0.0), (4, 30e-3), (2, 110e-3)])
def test_threads_prepare_samples_meanwhile(threads, late):
    """Four batches of 8 samples, 10 ms each, by so many threads; a device alone needs a quarter of that."""
    prepared = run(Copies("device", 4.0, prepare="10 ms", threads=threads)).step_time - run().step_time
    assert prepared == pytest.approx(late, **EXACT)


def test_one_thread_cuts_up_the_batch_of_a_machine_during_the_backward_pass():
    """Two passes at the rate of the link: over four batches, or over one. One copy follows, the backward pass hides."""
    cut = run(Copies("host", SAMPLE, cut=2.0, memory="12 GB/s")).step_time - run().step_time
    assert cut == pytest.approx((2 * 4 + 1) * COPY - (2 + 1) * COPY, **EXACT)


def test_what_the_wait_is():
    copies, passes = (0.1, 0.02, 8, 1e9), (0.3, 0.6)
    late = dataclasses.replace(MXNET_INPUT, memory="1 GB/s")
    assert late.wait(*copies, passes) == pytest.approx(3.0 - 0.6 + 0.02)  # the last part is copied by itself
    assert MXNET_INPUT.wait(*copies, passes) == pytest.approx(0.1)  # 0.3 s hide
    assert Copies("device", cut=6.0).wait(*copies, passes) == pytest.approx(0.6 + 0.02 - 0.6)
    assert Copies("device", cut=2.0).wait(0.8, 0.1, 8, 1e9, passes) == pytest.approx(0.8 - 0.6)
    assert Copies().sample_nbytes((3, 224, 224)) == 4 * 3 * 224 * 224


@pytest.mark.parametrize(
    "strategy",
    [ddlsim.AsyncParameterServer(placement="colocated"), ddlsim.LocalSGD(2), ddlsim.FSDP(), ddlsim.ADPSGD()],
    ids=lambda strategy: type(strategy).__name__,
)
def test_every_strategy_whose_workers_have_batches_of_their_own_waits(strategy):
    rates = [run(input, strategy, machine(2, 2), compute=None).throughput for input in (Copies("host", SAMPLE), None)]
    assert rates[0] < 0.9 * rates[1]


def test_workers_that_share_a_batch_are_refused():
    with pytest.raises(ConfigError, match="input: not supported with Parallel, in which workers share"):
        run(Copies(), ddlsim.Parallel(pipeline=2))


def test_in_files(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'cluster = "office-1gbe"\nmodel = "resnet18"\nspeed = { type = "spread", variation = 0.1 }\n'
        'input = { type = "copies", prepare = "5 ms" }\n'
    )
    loaded = ddlsim.load_experiment(path)
    assert (loaded.speed, loaded.input) == (Spread(0.1), Copies(prepare="5 ms"))


# ---------------------------------------------------------------- devices that are not equally fast


def test_a_step_takes_as_long_as_the_slowest_device():
    spread = Spread(0.2)
    times = [1.0 / speed for speed in spread.speeds(4)]
    # a little more than compute, since a device that waits exchanges at once with those that come
    assert run(speed=spread).step_time == pytest.approx(run().step_time + COMPUTE * (max(times) - 1.0), **EXACT)


@pytest.mark.parametrize("n", [2, 8, 64])
def test_times_are_those_expected_of_a_normal_distribution(n):
    times = sorted(1.0 / speed for speed in Spread().speeds(n))
    assert math.fsum(times) / n == pytest.approx(1.0, rel=1e-12)
    assert times[-1] - 1.0 == pytest.approx(order_statistics.normal(n, sd=0.08 / WHISKERS), rel=0.05)
    assert pytest.approx(5.396, abs=1e-3) == WHISKERS


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 4)])
def test_synchronous_training_has_the_pace_of_the_slowest_device(tensor, pipeline):
    """With a pipeline a little less: while it fills and drains, other stages than the slowest one count as well."""
    strategy = ddlsim.Parallel(tensor=tensor, pipeline=pipeline, data=16 // tensor // pipeline, overlap="none")
    model = "megatron+dim=1024+layers=8+heads=16"
    n = {"batch_size": 256, "workers": 16, "stack": "megatron-2021", "precision": "fp16", "steps": 1, "warmup": 0}
    equal, pace, each = (
        ddlsim.simulate("selene+n_leaves=8", model, strategy, speed=speed, **n).step_time
        for speed in (Spread(0), Spread(measured_on=1), Spread())
    )
    assert each <= pace * (1.0 + 1e-9)
    assert pace - each <= (0.1 if pipeline > 1 else 1e-3) * (pace - equal)


def test_pace_is_relative_to_the_devices_that_were_measured():
    slowest = {n: Spread().relative_times(n)[-1] for n in (8, 512)}
    assert Spread(measured_on=8).relative_times(512) == [slowest[512] / slowest[8]] * 512
    assert Spread(measured_on=8).speeds(4) == (1.0,) * 4  # as measured


@pytest.mark.parametrize(
    ("n", "settings", "pace"),
    [
        (16, {"stack": "megatron-2021"}, Spread(measured_on=8)),
        (8, {"stack": "megatron-2021"}, None),  # as many as were measured
        (16, {"stack": "megatron"}, None),  # fitted to runs of many sizes
        (16, {"stack": "megatron-2021", "speed": Spread(0)}, Spread(0)),
        (16, {"stack": "megatron-2021", "compute": ddlsim.Measured("1 s", 1)}, None),
        (16, {"stack": "megatron-2021", "strategy": ddlsim.AsyncParameterServer()}, None),
    ],
)
def test_stacks_measured_on_one_machine_have_the_pace_of_the_slowest_device(n, settings, pace):
    settings = {"strategy": ddlsim.Parallel(data=n), "batch_size": n, "steps": 1, "warmup": 0} | settings
    result = ddlsim.simulate("selene+n_leaves=8", "megatron+dim=1024+layers=2+heads=16", workers=n, **settings)
    assert result.experiment.speed == pace
    noted = any("16 devices is assumed to be 0.5 % slower than the slowest of the 8" in note for note in result.notes)
    assert noted == (pace == Spread(measured_on=8))


@pytest.mark.parametrize("strategy", [ddlsim.AsyncParameterServer(), ddlsim.ADPSGD()])
def test_workers_that_do_not_wait_have_no_common_pace(strategy):
    with pytest.raises(ConfigError, match=r"Spread\(measured_on=8\): .* do not wait for each other; use speed"):
        ddlsim.simulate("dgx1-v100", "resnet50", strategy, 32, workers=4, speed=Spread(measured_on=8))


def test_links_have_no_common_pace():
    with pytest.raises(ConfigError, match=r"Spread\(measured_on=8\): is for devices; leave measured_on out"):
        with_detail(ddlsim.load_cluster("office-1gbe"), spread=Spread(measured_on=8))


def test_no_variation_changes_nothing():
    assert run(speed=Spread(0.0)).step_times.tolist() == run().step_times.tolist()
    assert Spread().speeds(1) == (1.0,)


def test_which_device_is_slow_depends_on_the_seed_alone():
    assert Spread().speeds(8, 1) == Spread().speeds(8, 1) != Spread().speeds(8, 2)
    assert sorted(Spread().speeds(8, 1)) == sorted(Spread().speeds(8, 2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"speed": ()}, r"speed = \(\): must contain one factor above 0 per worker"),
        ({"speed": (1.0,)}, "speed has 1 factors for 4 workers; pass one per worker"),
        ({"speed": (1.0, -1.0, 1.0, 1.0)}, "speed"),
        ({"speed": "fast"}, "speed = 'fast'"),
        ({"input": "host"}, "input = 'host': must be an Input"),
    ],
)
def test_errors(fields, message):
    with pytest.raises(ConfigError, match=message):
        run(**fields)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Copies("disk"), "prefetch = 'disk'"),
        (lambda: Copies(threads=0), "threads = 0"),
        (lambda: Copies(prepare="-1 ms"), "prepare"),
        (lambda: Spread(2.0), "variation = 2.0"),
    ],
)
def test_values_that_make_no_sense(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
