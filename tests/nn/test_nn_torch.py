"""The same numbers as PyTorch, where it is installed: loss, gradient and running statistics of whole models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ddlsim.nn.network import build_network
from ddlsim.workload import layers as specs
from ddlsim.workload.model import Leaf, Residual

torch = pytest.importorskip("torch")


def torch_layer(model, leaf: Leaf):
    """Return the torch.nn module that a leaf describes."""
    nn, spec, n = torch.nn, leaf.spec, model.layers[leaf.index].in_shape[0]
    if isinstance(spec, specs.Conv):
        return nn.Conv2d(n, spec.channels, spec.kernel, spec.stride, spec.padding, 1, spec.groups, spec.bias)
    if isinstance(spec, specs.Dense):
        return nn.Linear(n, spec.units, spec.bias)
    if isinstance(spec, specs.Pool):
        if spec.type == "max_pool":
            return nn.MaxPool2d(spec.kernel, spec.stride, spec.padding, ceil_mode=spec.ceil_mode)
        return nn.AvgPool2d(spec.kernel, spec.stride, spec.padding, spec.ceil_mode, spec.count_padding)
    if isinstance(spec, specs.AdaptiveAvgPool):
        return nn.AdaptiveAvgPool2d(spec.size)
    if isinstance(spec, specs.BatchNorm):
        return nn.BatchNorm2d(n, spec.eps, spec.momentum)
    if isinstance(spec, specs.Flatten):
        return nn.Flatten()
    return {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "gelu": nn.GELU}[spec.type]()


class TorchNodes(torch.nn.Module):
    """A list of nodes; parameters appear in the order of the model's layers."""

    def __init__(self, model, nodes) -> None:
        super().__init__()
        self.nodes = nodes
        self.parts = torch.nn.ModuleList()
        for node in nodes:
            if isinstance(node, Residual):
                pair = [TorchNodes(model, node.body), TorchNodes(model, node.shortcut)]
                self.parts.append(torch.nn.ModuleList(pair))
            else:
                self.parts.append(torch_layer(model, node))

    def forward(self, x):
        for part in self.parts:
            x = part[0](x) + part[1](x) if isinstance(part, torch.nn.ModuleList) else part(x)
        return x


TRICKY = """
title = "odd sizes"
trainable = true
input = [4, 13, 11]
layers = [
  { type = "conv", channels = 8, kernel = [3, 2], stride = 2, padding = [2, 1], groups = 2 },
  { type = "batch_norm" }, { type = "gelu" },
  { type = "max_pool", kernel = 3, stride = 2, padding = 1, ceil_mode = true },
  { type = "conv", channels = 12, kernel = 2, padding = 1 }, { type = "sigmoid" },
  { type = "avg_pool", kernel = 3, stride = 2, padding = 1, ceil_mode = true, count_padding = false },
  { type = "adaptive_avg_pool", size = [2, 2] },
  { type = "flatten" }, { type = "dense", units = 5 },
]
"""


@pytest.mark.parametrize("name", ["tricky", "lenet5", "digits-cnn", "cifar-cnn", "resnet18-cifar"])
def test_loss_gradient_and_statistics_equal_pytorch(name: str, tmp_path: Path):
    source: str | Path = name
    if name == "tricky":
        source = tmp_path / "tricky.toml"
        source.write_text(TRICKY)
    network = build_network(source, 3, np.float64)
    model = network.model
    reference = TorchNodes(model, model.structure).double()
    rng = np.random.default_rng(0)
    params = network.initial_params + 0.01 * rng.normal(size=network.n_params)
    with torch.no_grad():
        for tensor, view in zip(reference.parameters(), network.views(params).values(), strict=True):
            tensor.copy_(torch.from_numpy(view))
    n = 2 if name == "resnet18-cifar" else 19
    x, labels = rng.normal(size=(n, *model.input_shape)), rng.integers(0, network.n_outputs, n)
    state = network.initial_state.copy()
    loss, gradient = network.loss_and_gradient(params, x, labels, state=state)
    expected = torch.nn.functional.cross_entropy(reference(torch.from_numpy(x)), torch.from_numpy(labels))
    expected.backward()
    flat = np.concatenate([tensor.grad.numpy().ravel() for tensor in reference.parameters()])
    assert loss == pytest.approx(expected.item(), rel=1e-9)
    np.testing.assert_allclose(gradient, flat, rtol=1e-6, atol=1e-9 * np.abs(flat).max())
    names = [key for key in reference.state_dict() if key.endswith(("running_mean", "running_var"))]
    if names:
        running = np.concatenate([reference.state_dict()[key].numpy() for key in names])
        np.testing.assert_allclose(state, running, rtol=1e-9, atol=1e-12)
    reference.eval()
    with torch.no_grad():
        wanted = reference(torch.from_numpy(x)).numpy()
    got = network.predict(params, x, state if names else None)
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-8)
