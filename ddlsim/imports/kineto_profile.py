"""From a trace's layer times to a workload: what each layer of a model costs, as measured."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ddlsim.arguments import checked
from ddlsim.errors import ConfigError, listed
from ddlsim.imports.kineto_layers import LayerTime
from ddlsim.workload.compute import Workload

#: torch.nn class, without its dimension -> layer type of a model file
_TYPES = {
    "Conv": "conv", "Linear": "dense", "BatchNorm": "batch_norm", "SyncBatchNorm": "batch_norm",
    "LayerNorm": "layer_norm", "Embedding": "embedding", "EmbeddingBag": "embedding_bag", "ReLU": "relu",
    "GELU": "gelu", "Tanh": "tanh", "Sigmoid": "sigmoid", "MaxPool": "max_pool", "AvgPool": "avg_pool",
    "AdaptiveAvgPool": "adaptive_avg_pool", "Dropout": "dropout", "Flatten": "flatten",
}  # fmt: skip
_LEARNED = ("conv", "dense", "batch_norm", "layer_norm", "embedding", "embedding_bag")


@checked
def profile_workload(workload: Workload, layers: Sequence[LayerTime]) -> Workload:
    """Return `workload` with the forward and backward times that a trace measured.

    layers   :attr:`~ddlsim.imports.KinetoTrace.layers` of a trace of the same model at the same batch size

    Modules are matched by class, in order of their calls. Layers with parameters must be as many in the trace as in the
    model; of the others a module that is called several times has its time shared out as the workload had it. Layers
    that are no modules in PyTorch (additions, concatenations, attention) keep the workload's times.

    Raises :class:`ConfigError` naming the class and both counts when model and trace do not fit.
    """
    if not layers:
        raise ConfigError("the trace has no layers; take it with torch.profiler.profile(with_stack=True)")
    found: dict[str, list[LayerTime]] = {}
    for layer in layers:
        kind = _type_of(layer)
        if kind is not None:
            found.setdefault(kind, []).append(layer)
    types = [layer.type for layer in workload.model.layers]
    for kind in _LEARNED:
        n_model, n_trace = types.count(kind), len(found.get(kind, []))
        if n_model != n_trace:
            raise ConfigError(
                f"the trace calls {n_trace} modules that are {kind!r}, the model {workload.model.name!r} has {n_model};"
                f" take the model that was traced"
            )
    forward, backward = workload.forward.copy(), workload.backward.copy()
    for kind, modules in found.items():
        places = np.flatnonzero([name == kind for name in types])
        for times, measured in (
            (forward, [module.forward_s for module in modules]), (backward, [module.backward_s for module in modules])
        ):  # fmt: skip
            if len(places) == len(modules):
                times[places] = measured
            elif len(places):
                old = times[places]
                share = old / old.sum() if old.sum() > 0 else np.full(len(places), 1 / len(places))
                times[places] = sum(measured) * share
    return replace(
        workload, forward=forward, backward=backward,
        basis=f"profile of {sum(len(modules) for modules in found.values())} modules",
    )  # fmt: skip


def _type_of(layer: LayerTime) -> str | None:
    """Return the layer type of a module; None for those without work of their own in the model."""
    name = re.sub(r"[123]d$", "", layer.kind)
    if name == "Identity" or name.endswith("Loss"):
        return None
    if name not in _TYPES:
        raise ConfigError(
            f"the trace has the module {layer.name!r}, of a class that no layer of a model file stands for; "
            f"leave its time out, or describe the model with known layers ({listed(sorted(_TYPES))})"
        )
    return _TYPES[name]
