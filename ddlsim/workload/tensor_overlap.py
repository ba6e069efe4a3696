"""Overlap of a tensor group's collectives with matrix products, in chunks: `--tp-comm-overlap`.

Megatron-LM's option has Transformer Engine's userbuffers do it, by default (transformer_engine/pytorch/module/base.py,
initialize_ub) in one of three ways:

- "ring_exchange": what a product takes is gathered chunk by chunk round a ring of the t ranks, each chunk multiplied
  when it is there: the first products of attention and MLP, and in the backward pass the gradient of what the last
  ones make. Copy engines carry it.
- "pipeline": the last products of attention and MLP are made in four pieces, each of which is summed and scattered
  beside the next one.
- "bulk": in the backward pass all of the first products' input is gathered again beside the product for its gradient,
  and that gradient is summed and scattered beside the product for the weights' gradient.

The latter two take 16 multiprocessors from the products. Chunks run on three streams, so that the next one fills the
multiprocessors that the last wave of tiles leaves idle (comm_gemm_overlap.cpp, split_overlap_ag): n chunks take as long
as the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ddlsim.workload.compute import Workload
from ddlsim.workload.products import Floats, Product, layer_products, product_time

RING_EXCHANGE, PIPELINE, BULK = "ring_exchange", "pipeline", "bulk"
PIECES = 4  # num_splits
COMMUNICATING = 16  # num_sm: multiprocessors; a TPU's interconnect takes none


class Beside(NamedTuple):
    """A product that is made while a collective travels.

    method   how they go together, see above
    chunks   of both
    counted  seconds of the product, as its layer's time has it
    slowed   its seconds on the multiprocessors that the collective leaves it
    """

    method: str
    chunks: int
    counted: float
    slowed: float


class LayerOverlaps(NamedTuple):
    """What the exchanges of a layer travel beside.

    enters, again, enters_gradient  gathering what the layer takes, gathering it once more, summing its gradient
    leaves, leaves_gradient         summing what the layer makes, gathering its gradient
    """

    enters: Beside | None = None
    again: Beside | None = None
    enters_gradient: Beside | None = None
    leaves: Beside | None = None
    leaves_gradient: Beside | None = None


def layer_overlaps(workload: Workload, i: int, role: str, forward: Floats, tensor: int) -> LayerOverlaps:
    """Return what the exchanges of layer `i` travel beside.

    forward  seconds of each layer's forward pass on one of `tensor` ranks
    """
    products = layer_products(workload.model.layers[i], role, workload.batch_size, tensor)
    first, last = [each for each in products[:-1] if not each.core] or products, products[-1:]
    flops = sum(_flops(each) for each in products)

    def beside(method: str, chunks: int, chosen: Sequence[Product]) -> Beside:
        whole = float(forward[i]) * sum(_flops(each) for each in chosen) / flops
        left = 1.0
        if workload.by_kernel:
            seconds = _seconds(workload, chosen)
            left = _seconds(workload, chosen, COMMUNICATING) / seconds if method != RING_EXCHANGE else 1.0
            whole = seconds if workload.summed else whole
        return Beside(method, chunks, whole, whole * left)

    of_input, of_weights = [Product(m, k, n) for m, n, k, *_ in first], [Product(k, n, m) for m, n, k, *_ in first]
    return LayerOverlaps(
        enters=beside(RING_EXCHANGE, tensor, first),
        again=beside(BULK, 1, of_input),
        enters_gradient=beside(BULK, 1, of_weights),
        leaves=beside(PIPELINE, PIECES, last),
        leaves_gradient=beside(RING_EXCHANGE, tensor, [Product(m, k, n) for m, n, k, *_ in last]),
    )


def _flops(product: Product) -> float:
    return 2.0 * product.m * product.n * product.k * product.copies


def _seconds(workload: Workload, products: Sequence[Product], communicating: int = 0) -> float:
    """Return the seconds of products on a device with `communicating` multiprocessors occupied by communication."""
    assert workload.device is not None
    assert workload.device.kernels is not None
    units = workload.device.kernels.units
    units -= communicating if units > communicating else 0
    return (
        sum(product_time(each, workload.device, workload.precision, workload.stack.gemm, units) for each in products)
        / workload.speed
    )
