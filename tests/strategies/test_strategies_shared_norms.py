"""Norms of layers that workers share out: T_norm becomes T_norm / N and an all-gather; the values stay."""

import numpy as np
import pytest
from draws import few
from strategy_plans import plan_of

import ddlsim
from ddlsim import AllReduce, Training
from ddlsim.plan.plan import KINDS
from ddlsim.plan.transforms import NORMS
from ddlsim.workload.compute import make_workload

CLUSTER, N = "office-1gbe", 8  # a star: all ranks end an all-reduce at the same time
LARS, LAMB = ddlsim.LARS(trust=0.01), ddlsim.LAMB()


def run(strategy, optimizer=LARS, **more):
    training = Training("digits", optimizer=optimizer, updates=6, evaluate_every=6)
    return ddlsim.simulate(
        CLUSTER, "digits-cnn", strategy, 4, training=training, time_model="resnet50", device="v100",
        **{"workers": N, **more},
    )  # fmt: skip


@pytest.mark.parametrize("compute", [None, ddlsim.Roofline(), ddlsim.Measured("20 ms", 32)])
def test_time_of_norms(compute):
    """sum over the tensors of 8 P / bandwidth + 2 launches; a measured step has it on top."""
    model, device = ddlsim.load_model("resnet50"), ddlsim.load_device("v100")
    tensors = [n for layer in model.layers for _, n in layer.tensors]
    each = sum(8.0 * n / (0.8 * device.memory_bandwidth) + 2.0 * device.launch_time for n in tensors)
    assert len(tensors) == 161
    for rule, bare in (("lars", "momentum"), ("lamb", "adam")):
        workload = make_workload(model, device, 32, compute=compute, optimizer=rule, speed=0.5)
        without = make_workload(model, device, 32, compute=compute, optimizer=bare, speed=0.5)
        assert workload.norms == pytest.approx(2.0 * each, rel=1e-12)
        assert workload.step_time - without.step_time == pytest.approx(2.0 * each, rel=1e-9)
        assert without.norms == 0.0
        assert ("norms of" in workload.basis) is (not isinstance(compute, ddlsim.Roofline))


@pytest.mark.parametrize("overlap", few(["none", "layer", "ddp"], 1, start=1))
@pytest.mark.parametrize("gather", ["bruck", "ring"])
def test_what_sharing_saves(overlap, gather):
    """T_norm (1 - 1/N) less the gather of 4 bytes per tensor, exactly; loss and parameters bit for bit."""
    own, shared = (run(AllReduce(overlap=overlap, shared_norms=each)) for each in (None, gather))
    norms = own.workloads[0].norms
    seconds = ddlsim.collective_time(CLUSTER, gather, 4.0 * 161, kind="all_gather", ranks=N)
    assert own.step_time - shared.step_time == pytest.approx(norms * (1 - 1 / N) - seconds, rel=1e-9)
    assert shared.params.tobytes() == own.params.tobytes()
    assert shared.history["loss"].equals(own.history["loss"])


def test_lamb_with_horovods_queue():
    """Whole cycles of 1 ms pass until the gradients are fused, so the saving is not exact."""
    own, shared = (run(AllReduce(overlap="horovod", shared_norms=each), LAMB) for each in (None, "bruck"))
    assert shared.params.tobytes() == own.params.tobytes()
    assert shared.step_time < own.step_time


def test_accounts_add_up_with_jitter_and_micro_steps():
    """Every run checks that itself; what the norms take is among the seconds of computing."""
    own, shared = (
        run(AllReduce(shared_norms=each), jitter=ddlsim.Lognormal(0.2), accumulation=2) for each in (None, "bruck")
    )
    assert shared.step_time < own.step_time
    assert shared.params.tobytes() == own.params.tobytes()


def test_one_worker_has_nothing_to_gather():
    own, shared = (run(AllReduce(shared_norms=each), workers=1) for each in (None, "ring"))
    assert shared.step_time == pytest.approx(own.step_time, rel=1e-12)


@pytest.mark.parametrize("overlap", ["none", "ddp", "horovod"])
def test_plans_are_proved(overlap):
    model, device = ddlsim.load_model("resnet50"), ddlsim.load_device("v100")
    workloads = [make_workload(model, device, 32, optimizer="lars")] * 4
    plain, shared = (plan_of(AllReduce(overlap=overlap, shared_norms=each), workloads, 3, 2) for each in (None, "ring"))
    shared.check()
    rows = np.flatnonzero(shared.name == shared.names.index(NORMS))
    assert len(rows) == 2 * 4 * 3
    assert len(shared) == len(plain) + len(rows)
    assert shared.seconds.sum() == pytest.approx(plain.seconds.sum() - 3 * (4 - 1) * workloads[0].norms, rel=1e-12)
    gathers = rows[shared.kind[rows] == KINDS.index("all_gather")]
    assert (shared.nbytes[gathers] == 4.0 * 161).all()
    assert len(np.unique(shared.key[gathers])) == 3


@pytest.mark.parametrize(("strategy", "more", "message"), [
    (AllReduce(shared_norms="ring"), {"optimizer": ddlsim.Momentum(0.9)}, "momentum has no norms of layers"),
    (AllReduce(overlap="priority", shared_norms="ring"), {}, "layers are updated one by one"),
    (AllReduce(shared_norms="ring"), {"compression": ddlsim.TopK(0.1)}, "shared_norms requires uncompressed gradients"),
    (AllReduce(shared_norms="ring", cost="nccl"), {}, "shared_norms requires uncompressed gradients"),
])  # fmt: skip
def test_where_norms_cannot_be_shared(strategy, more, message):
    with pytest.raises(ddlsim.ConfigError, match=message):
        run(strategy, **more)


def test_names_of_all_gathers():
    with pytest.raises(ddlsim.ConfigError, match="AllReduce"):
        AllReduce(shared_norms="rings")
    with pytest.raises(ddlsim.ConfigError, match="no optimizer is set"):
        ddlsim.simulate(CLUSTER, "resnet50", AllReduce(shared_norms="ring"))
    assert "shared norms" in AllReduce(shared_norms="bruck").label
