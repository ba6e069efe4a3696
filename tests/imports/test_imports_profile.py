"""Layer times of a trace in a workload: matching by class and order, shared modules, models that do not fit."""

import numpy as np
import pytest

from ddlsim.errors import ConfigError
from ddlsim.imports import LayerTime, profile_workload
from ddlsim.workload.compute import make_workload
from ddlsim.workload.devices import load_device
from ddlsim.workload.model import load_model


@pytest.fixture(scope="module")
def workload():
    return make_workload(load_model("resnet18-cifar"), load_device("v100"), 32)


def traced(model, drop=""):
    """Modules as torch calls them: one ReLU per block, called twice, so fewer modules than layers."""
    classes = {"conv": "Conv2d", "batch_norm": "BatchNorm2d", "dense": "Linear"}
    found, numbers = [], {}
    for layer in model.layers:
        if layer.type in classes and layer.name != drop:
            kind = classes[layer.type]
            numbers[kind] = numbers.get(kind, -1) + 1
            found.append(LayerTime(f"{kind}_{numbers[kind]}", 1e-6 * (len(found) + 1), 2e-6 * (len(found) + 1), 1.0))
    return [*found, LayerTime("ReLU_0", 3e-6, 4e-6, 2.0), LayerTime("CrossEntropyLoss_0", 9.0, 9.0, 1.0)]


def test_times_are_matched_by_class_and_order(workload):
    layers = traced(workload.model)
    made = profile_workload(workload, layers)
    learned = [i for i, layer in enumerate(workload.model.layers) if layer.n_params]
    assert made.forward[learned].tolist() == [layer.forward_s for layer in layers[: len(learned)]]
    assert made.backward[learned].tolist() == [layer.backward_s for layer in layers[: len(learned)]]
    relu = np.flatnonzero([layer.type == "relu" for layer in workload.model.layers])
    assert made.forward[relu].sum() == pytest.approx(3e-6)
    assert made.backward[relu].sum() == pytest.approx(4e-6)
    share = workload.forward[relu] / workload.forward[relu].sum()
    assert made.forward[relu] == pytest.approx(3e-6 * share)
    others = np.flatnonzero([layer.type in ("add", "flatten") for layer in workload.model.layers])
    assert made.forward[others].tolist() == workload.forward[others].tolist()
    assert made.basis == f"profile of {len(learned) + 1} modules"


def test_another_model_is_refused(workload):
    first = next(layer.name for layer in workload.model.layers if layer.type == "conv")
    n_convs = sum(layer.type == "conv" for layer in workload.model.layers)
    message = f"the trace has {n_convs - 1} modules of type 'conv', but the model 'resnet18-cifar' has {n_convs}"
    with pytest.raises(ConfigError, match=message):
        profile_workload(workload, traced(workload.model, drop=first))


def test_unknown_modules_and_traces_without_layers_are_refused(workload):
    with pytest.raises(ConfigError, match="no layer type corresponds to the class of module 'MyLayer_3' in the trace"):
        profile_workload(workload, [*traced(workload.model), LayerTime("MyLayer_3", 1.0, 1.0, 1.0)])
    with pytest.raises(ConfigError, match="with_stack=True"):
        profile_workload(workload, [])
