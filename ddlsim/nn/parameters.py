"""Tensors that are learned, and how they start."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ddlsim.nn.pass_state import Array, Slot
from ddlsim.streams import stream


@dataclass(frozen=True)
class Parameter:
    """A tensor to be learned, and how it starts: constant ``value``, or random from its fans and what follows.

    ``follows`` is the activation that the tensor's layer feeds ("" for none), ``momentum`` the weight of a new batch
    where the tensor is a running statistic; ``draw`` makes the tensor where its layer says itself how it starts.
    """

    slot: Slot
    value: float | None
    fan_in: int = 0
    fan_out: int = 0
    follows: str = ""
    momentum: float = 0.0
    draw: Callable[[np.random.Generator], Array] | None = None


def normal(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Draw an embedding: deviation 0.02 (Radford et al. 2018, GPT, section 4.1)."""
    return 0.02 * rng.standard_normal(shape)


def uniform(shape: tuple[int, int], rng: np.random.Generator) -> Array:
    """Draw an embedding table of a recommendation model: within +-1 / sqrt(rows)."""
    bound = 1.0 / math.sqrt(shape[0])
    return rng.uniform(-bound, bound, shape)


def kept_shares(state: Sequence[Parameter], dtype: np.dtype[np.floating]) -> Array:
    """Return how much of each running statistic a batch leaves, (n_state,), read-only."""
    flat = np.empty(state[-1].slot.stop if state else 0, dtype)
    for parameter in state:
        parameter.slot.flat(flat)[:] = 1.0 - parameter.momentum
    flat.setflags(write=False)
    return flat


def initial_values(parameters: Sequence[Parameter], seed: int, dtype: np.dtype[np.floating]) -> Array:
    """Return all tensors as they start, flat and read-only, each from a random stream of its own."""
    flat = np.empty(parameters[-1].slot.stop if parameters else 0, dtype)
    for parameter in parameters:
        into = parameter.slot.flat(flat)
        if parameter.value is not None:
            into[:] = parameter.value
            continue
        draws = stream(seed, 0, f"initial {parameter.slot.name}")
        if parameter.draw is not None:
            into[:] = np.ravel(parameter.draw(draws))
            continue
        if parameter.follows in ("relu", "gelu"):
            into[:] = draws.standard_normal(len(into)) * math.sqrt(2.0 / parameter.fan_in)
        else:
            bound = math.sqrt(6.0 / (parameter.fan_in + parameter.fan_out))
            into[:] = draws.uniform(-bound, bound, len(into))
    flat.setflags(write=False)
    return flat
