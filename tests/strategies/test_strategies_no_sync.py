"""Gradients summed in every micro-step, as by DDP without ``no_sync``."""

import numpy as np
import pytest

from ddlsim import AllReduce, ConfigError, Measured, TopK, Training, simulate

CASE = {"batch_size": 32, "workers": 4, "accumulation": 3, "compute": Measured("0.4 s", 32)}


@pytest.mark.parametrize("overlap", ["none", "layer", "ddp"])
def test_every_micro_step_sends_the_gradients(overlap):
    once, always = (
        simulate("office-1gbe", "vgg16", AllReduce("ring", overlap, no_sync=no_sync), **CASE)
        for no_sync in (True, False)
    )
    assert always.nbytes_per_step == pytest.approx(3 * once.nbytes_per_step, rel=1e-12)
    assert always.step_time == pytest.approx(3 * (once.step_time - 0.8), rel=0.01)
    always.plan.check()


def test_without_overlap_each_micro_step_is_computing_then_the_all_reduce():
    one = simulate("office-1gbe", "vgg16", AllReduce("ring", "none"), **CASE | {"accumulation": 1})
    many = simulate("office-1gbe", "vgg16", AllReduce("ring", "none", no_sync=False), **CASE)
    assert many.step_time == pytest.approx(3 * one.step_time, rel=1e-6)


def test_values_are_the_same():
    training = Training("digits", rate=0.1, updates=10)
    once, always = (
        simulate("office-1gbe", "digits-cnn", strategy, 16, 4, accumulation=3, training=training)
        for strategy in (AllReduce("ring"), AllReduce("ring", no_sync=False))
    )
    assert np.array_equal(once.params, always.params)
    assert always.end_time > once.end_time


@pytest.mark.parametrize(
    ("strategy", "more", "text"),
    [
        (AllReduce("ring", "horovod", no_sync=False), {}, "use overlap='none', 'layer' or 'ddp'"),
        (AllReduce("ring", "priority", no_sync=False), {}, "use overlap='none', 'layer' or 'ddp'"),
        (AllReduce("ring", no_sync=False), {"compression": TopK(0.1)}, "every micro-step would compress its gradients"),
    ],
)
def test_what_it_does_not_go_with(strategy, more, text):
    with pytest.raises(ConfigError, match=text):
        simulate("office-1gbe", "vgg16", strategy, **CASE, **more)
