"""Racks: all their machines fail at once, whatever the training then does."""

import numpy as np
import pytest

import ddlsim
from ddlsim import Affine, Checkpoints, ConfigError, Elastic, Experiment, Failures, Measured
from ddlsim.cluster import MultiGpu, leaf_spine, racks, star, torus
from ddlsim.reliability.failures import units

CLUSTER = ddlsim.load_cluster(racks(3, 2, bandwidth="8 Gbit/s", latency=0.0))


def traced(tmp_path, *rows, **options):
    file = tmp_path / "failures.csv"
    file.write_text("time_s,unit,repair_s\n" + "".join(f"{t},{u},{r}\n" for t, u, r in rows), encoding="utf-8")
    return Failures(trace=file, per="rack", restart=0.0, **options)


def timed(failures, **changes):
    fields = {"workers": 6, "compute": Measured("100 ms", 32), "max_time": "1000 s", **changes}
    return ddlsim.simulate(Experiment(CLUSTER, "resnet50", failures=failures, **fields))


def taken(cluster, **options):
    cluster = ddlsim.load_cluster(cluster)
    return units(Failures("1 h", per="rack", **options), cluster, cluster.workers.tolist())


def test_a_rack_is_the_machines_on_the_same_first_switch():
    assert taken(CLUSTER) == [[0, 1], [2, 3], [4, 5]]
    gpus = MultiGpu(4, nvlink_bandwidth="100 GB/s", inside="nvlink_mesh", n_pcie_switches=4, n_nics=4)
    link = {"bandwidth": "100 Gbit/s", "latency": "1 us"}
    assert taken(leaf_spine(4, 2, 2, **link)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    spread = leaf_spine(8, 4, 2, **link, host=gpus, rail_optimised=True)
    assert taken(spread) == [[0, 1, 2, 3], [4, 5, 6, 7]]  # each with a link to four leaves
    assert taken(spread, machines_per_rack=3) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert taken(torus([4], **link), machines_per_rack=2) == [[0, 1], [2, 3]]


def test_only_racks_with_a_worker_can_fail():
    chosen = CLUSTER.workers[[5, 2, 4]].tolist()
    failures = Failures("1 h", per="rack")
    assert units(failures, CLUSTER, chosen) == [[0, 2], [1]]


def test_each_machine_of_a_rack_must_be_replaced(tmp_path):
    saved = {"checkpoints": Checkpoints("50 s", stall=0.0)}
    rows = [(100.0, 1, 30.0)]
    assert timed(traced(tmp_path, *rows), **saved).failure_timeline.repairing == 30.0
    assert timed(traced(tmp_path, *rows, spares=1), **saved).failure_timeline.repairing == 30.0
    timeline = timed(traced(tmp_path, *rows, spares=2), **saved).failure_timeline
    assert timeline.repairing == 0.0
    assert [(time, unit) for time, unit, _ in timeline.events] == [(100.0, 1)]
    # of three spares two are taken at 100 s; the next rack waits for one of its two until those are repaired
    late = timed(traced(tmp_path, *rows, (110.0, 0, 500.0), spares=3), **saved).failure_timeline
    assert late.repairing == 20.0


def test_racks_leave_an_elastic_group_together(tmp_path):
    failures = traced(tmp_path, (100.0, 1, 300.0), (150.0, 1, 5.0))
    timeline = timed(failures, elastic=Elastic(2, rejoin="10 s")).failure_timeline
    assert [workers for _, workers in timeline.groups] == [6, 4, 6]
    assert len(timeline.events) == 1  # what is out already cannot fail
    one = timed(traced(tmp_path, (100.0, 1, 300.0), spares=1), elastic=Elastic(2, rejoin="10 s")).failure_timeline
    assert [workers for _, workers in one.groups] == [6, 5, 6]


def test_asynchronous_workers_of_a_rack_are_gone_at_once(tmp_path):
    result = ddlsim.simulate(
        CLUSTER, "digits-cnn", ddlsim.AsyncParameterServer(placement="colocated"), 16, 6,
        compute=Affine("1 s", 0.0), steps=20, warmup=0, max_time="1000 h",
        failures=traced(tmp_path, (4.5, 2, 3.0), spares=1),
    )  # fmt: skip
    assert result.recorder.down == [[], [], [], [], [(4.5, 4.5)], [(4.5, 7.5)]]
    assert len(result.failure_timeline.events) == 2


@pytest.mark.slow
def test_a_month_of_failing_racks_has_the_availability_of_the_theory():
    """One rack of six machines, waited for: up 50 h, down 5 h, on average."""
    cluster = ddlsim.load_cluster(star(6, bandwidth="8 Gbit/s", latency=0.0))
    failures = Failures("50 h", per="rack", repair="5 h", restart=0.0)
    result = ddlsim.simulate(
        cluster, "resnet50", workers=6, compute=Measured("100 ms", 32), failures=failures, max_time="48000 h",
        checkpoints=Checkpoints("1 h", stall=0.0),
    )  # fmt: skip
    up = np.mean([timeline.availability for timeline in result.timelines(5)])
    # the clock of a part runs also while the job waits: a rack that fails meanwhile is waited for anew
    assert up == pytest.approx(np.exp(-5 / 50), abs=0.008)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Failures("5 h", per="host", machines_per_rack=4), "has no effect with per='host'"),
        (lambda: taken(torus([4], bandwidth="1 Gbit/s", latency=0.0)), "'h0' of cluster 'torus-4' is not connected to"),
        (lambda: Failures("5 h", per="rack", machines_per_rack=0), "machines_per_rack"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(make, says):
    with pytest.raises(ConfigError, match=says):
        make()
