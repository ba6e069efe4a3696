"""Checks of custom layers, made before such a layer is trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ddlsim.errors import ConfigError
from ddlsim.nn.layers import asked_for

Array = npt.NDArray[Any]
#: step of central differences in float64, and their tolerated relative error
STEP, TOLERANCE = 1e-6, 2e-5


def need(holds: bool, owner: str, rule: str) -> None:
    """Raise ConfigError with the violated `rule` unless it `holds`."""
    if not holds:
        raise ConfigError(f"{owner}: {rule}")


def same(first: Iterable[Array], second: Iterable[Array]) -> bool:
    """Return whether arrays are equal, bit for bit."""
    return [array.tobytes() for array in first] == [array.tobytes() for array in second]


def held_to_rules(layer: object, in_shape: tuple[int, ...], n: int = 3) -> None:
    """Run the checks of :func:`ddlsim.testing.check_layer`; raise ConfigError for violations."""
    rule, owner, rng = cast(Any, layer), type(layer).__name__, np.random.default_rng(1)
    takes = asked_for(rule)
    cost = rule.cost(in_shape)
    start = rule.init(in_shape, np.random.default_rng(2)) if cost.tensors else {}
    sizes = {name: int(np.size(array)) for name, array in start.items()}
    need(sizes == dict(cost.tensors), owner, f"init returns {sizes} elements, but cost declares {dict(cost.tensors)}")
    buffers = dict(rule.buffers(in_shape)) if hasattr(rule, "buffers") else {}
    need(not buffers or {"train", "buffers"} <= takes, owner, "has buffers; its forward must take train and buffers")
    point = {"x": rng.normal(size=(n, *in_shape))}
    point |= {name: array + 0.1 * rng.normal(size=np.shape(array)) for name, array in start.items()}
    dy = rng.normal(size=(n, *cost.out_shape))

    def outputs(at: Mapping[str, Array], train: bool) -> tuple[Array, object]:
        draws = np.random.default_rng(3) if train else None  # the same for all
        available = {"train": train, "buffers": None if train else buffers, "rng": draws}
        options = {name: available[name] for name in takes}
        out, kept, *batch = rule.forward(at["x"], {name: at[name] for name in start}, **options)
        told = not (train and buffers) or (batch and batch[0].keys() == buffers.keys())
        need(bool(told), owner, f"while training, forward must return the batch's {sorted(buffers)} as a third value")
        return np.asarray(out), kept

    before = {name: array.copy() for name, array in point.items()}
    out, kept = outputs(point, True)
    need(out.shape == dy.shape, owner, f"for {n} samples, forward returns {out.shape}, but cost declares {dy.shape}")
    pure = "it changes its input or its tensors in place"
    need(same(before.values(), point.values()), owner, pure)
    again = same([out], [outputs(point, True)[0]]) and same([outputs(point, False)[0]], [outputs(point, False)[0]])
    need(again, owner, "its outputs differ from call to call; in training, draw from forward's parameter rng")
    for train in (False, *([] if buffers or "rng" in takes else [True])):
        alone = np.concatenate([outputs({**point, "x": point["x"][i : i + 1]}, train)[0] for i in range(n)])
        alike = bool(np.allclose(outputs(point, train)[0], alone, rtol=1e-9, atol=1e-12))
        remedy = "use buffers if train is False" if buffers else "add buffers for the statistics of a batch"
        need(alike, owner, f"the output for a sample depends on the other samples; {remedy}")
    dx, slopes = rule.backward(dy.copy(), kept, {name: point[name] for name in start})
    need(same(before.values(), point.values()), owner, pure)
    for name, gradient in {"x": dx, **slopes}.items():
        need(name in point, owner, f"backward returns a gradient of {name!r}, which is not a tensor of the layer")
        wanted, shape = point[name].shape, np.shape(gradient)
        need(shape == wanted, owner, f"the gradient of {name!r} has shape {shape}; expected {wanted}")
        direction = rng.normal(size=wanted) / np.sqrt(point[name].size)
        ahead, back = ({**point, name: point[name] + sign * STEP * direction} for sign in (1.0, -1.0))
        slope = float(np.sum(dy * (outputs(ahead, True)[0] - outputs(back, True)[0]))) / (2.0 * STEP)
        actual = float(np.sum(gradient * direction))
        wrong = f"the gradient of {name!r} is {actual:.6g} in a direction in which finite differences give {slope:.6g}"
        need(bool(np.isclose(actual, slope, rtol=TOLERANCE, atol=1e-7)), owner, wrong)
    need(set(slopes) == set(start), owner, f"backward returns gradients of {sorted(slopes)}, not of {sorted(start)}")
