"""Training steps: ours in NumPy, and PyTorch's where it is installed."""

import re

import pytest

from ddlsim.errors import ConfigError
from ddlsim.measure.steps import numpy_model, torch_module


def test_a_step_of_our_own_trains(monkeypatch):
    """The action calls the network with the whole batch and updates its parameters."""
    from ddlsim.nn.network import Network

    calls, whole = [], Network.loss_and_gradient

    def watched(self, params, x, labels, rng, state):
        loss, gradient = whole(self, params, x, labels, rng, state)
        calls.append((params, len(x), abs(gradient).max()))
        return loss, gradient

    monkeypatch.setattr(Network, "loss_and_gradient", watched)
    model = numpy_model("digits-cnn")
    action = model.step(3)
    action()
    action()
    (before, n_before, slope), (after, n_after, _) = calls
    assert (model.label, model.backend, n_before, n_after) == ("digits-cnn", "numpy", 3, 3)
    assert slope > 0
    assert after is not before


def test_models_that_have_no_gradients_here_are_refused():
    with pytest.raises(ConfigError, match="cannot be trained"):
        numpy_model("dlrm")


@pytest.fixture
def torch(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(__file__).rsplit("/", 1)[0])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return torch


@pytest.mark.parametrize(("name", "shape"), [("linear", (4,)), ("embedding", ())])
def test_a_step_of_a_module(torch, monkeypatch, name, shape):
    """Inputs of the shape asked for, or those that the function brings; the update is made."""
    steps = []
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self: steps.append(self.param_groups[0]["params"][0].grad))
    model = torch_module(f"torch_example:{name}", shape, 0)
    action = model.step(5)
    action()
    assert (model.label, model.backend) == (f"torch_example:{name}", "torch cpu")
    assert float(steps[0].abs().max()) > 0


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("torch_example:none", (4,), "expected a name such as torchvision.models:resnet50"),
        ("torch_exampel:linear", (4,), "No module named 'torch_exampel'"),
        ("torch_example", (4,), "expected a name such as"),
        ("torch_example:NUMBER", (4,), "is a int; must be a function"),
        ("torch_example:linear", (), "--input-shape is missing"),
        ("torch_example:linear", (3,), "does --input-shape fit?"),
        ("torch_example:pair", (1, 4), "returns tuple, not a tensor"),
        ("torch_example:embedding", (4,), "leave --input-shape out"),
        ("builtins:dict", (4,), "returns no trainable torch.nn.Module"),
    ],
    ids=range(9),
)
def test_modules_that_cannot_be_timed(torch, name, shape, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        torch_module(name, shape, 0).step(2)()


def test_a_module_without_torch(monkeypatch):
    monkeypatch.setattr("ddlsim.measure.steps.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="PyTorch is not installed"):
        torch_module("torch_example:linear", (4,), 0)
