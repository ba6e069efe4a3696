"""Training steps to time: forward pass, backward pass and momentum update on random data, without communication."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ddlsim.errors import ConfigError
from ddlsim.measure.transport import Action
from ddlsim.named_code import imported

if TYPE_CHECKING:
    import torch

#: small, so that parameters hardly change; the cost is the same as for any rate
RATE = 1e-9


@dataclass(frozen=True)
class Trained:
    """A trainable model: `step` creates the action for a batch size (samples)."""

    label: str
    backend: str
    step: Callable[[int], Action]


def numpy_model(name: str) -> Trained:
    """Return one of ddlsim's networks by name or file, in float32. Raises ConfigError if it cannot be trained."""
    import numpy as np

    from ddlsim.nn.network import build_network
    from ddlsim.optim import Momentum

    network, rule = build_network(name, seed=0), Momentum()

    def step(batch_size: int) -> Action:
        rng = np.random.default_rng(0)
        x, labels = network.random_batch(batch_size, rng)
        statistics = network.initial_state.copy()
        params = network.initial_params
        memory = rule.init(params)

        def train() -> None:
            nonlocal params, memory
            _, gradient = network.loss_and_gradient(params, x, labels, rng, statistics)
            params, memory = rule.update(params, gradient, memory, RATE)

        return train

    return Trained(network.model.name, "numpy", step)


def torch_module(name: str, input_shape: Sequence[int], gpu: int) -> Trained:
    """Return a PyTorch module by ``"package.module:callable"``; it runs on GPU number `gpu` if there are GPUs.

    input_shape  of one sample, float32; the loss is the mean square of the output, a tensor

    The callable has no parameters and returns the module, or it has a parameter `batch_size` and returns the module and
    its input, a tensor or tuple of tensors. Raises ConfigError for an invalid name, and if PyTorch is not installed.
    """
    if find_spec("torch") is None:
        raise ConfigError(f"--module {name}: PyTorch is not installed: pip install torch")
    make = imported(name, "--module", "callable")
    if not callable(make):
        what = f"is a {type(make).__name__}; must be a function or class that returns a module"
        raise ConfigError(f"--module {name}: {what}")
    asks = False
    with suppress(TypeError, ValueError):  # a class in C has no signature
        asks = "batch_size" in inspect.signature(make).parameters
    if not asks and not input_shape:
        raise ConfigError(f"--module {name}: --input-shape is missing; set the shape of one sample, such as 3,224,224")
    if asks and input_shape:
        raise ConfigError(
            f"--module {name}: creates its own inputs, because it takes batch_size; leave --input-shape out"
        )
    import torch

    device = torch.device("cuda", gpu % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")

    def step(batch_size: int) -> Action:
        result = make(batch_size=batch_size) if asks else (make(), torch.randn(batch_size, *input_shape))
        module, inputs = _checked(result, name)
        return _torch_step(module.to(device), tuple(tensor.to(device) for tensor in inputs), name)

    return Trained(name, f"torch {device.type}", step)


def _torch_step(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], name: str) -> Action:
    import torch

    module.train()
    rule = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9)

    def train() -> None:
        rule.zero_grad(set_to_none=True)
        try:
            output = module(*inputs)
        except Exception as error:  # custom code may raise anything
            reason = str(error).split("\n")[0]
            raise ConfigError(f"--module {name}: {type(error).__name__}: {reason}; does --input-shape fit?") from error
        if not isinstance(output, torch.Tensor):
            what = f"returns {type(output).__name__}, not a tensor; use a function that wraps it"
            raise ConfigError(f"--module {name}: {what}")
        output.square().mean().backward()
        rule.step()
        if inputs[0].device.type == "cuda":
            torch.cuda.synchronize(inputs[0].device)

    return train


def _checked(result: object, name: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    import torch

    module, inputs = result if isinstance(result, tuple) and len(result) == 2 else (None, None)
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    if isinstance(module, torch.nn.Module) and all(isinstance(tensor, torch.Tensor) for tensor in inputs):
        return module, inputs
    rule = "it must return a module or, if it has a parameter batch_size, a module and its inputs"
    raise ConfigError(f"--module {name}: returns no trainable torch.nn.Module; {rule}")
