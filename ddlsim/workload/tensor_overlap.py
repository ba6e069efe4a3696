"""Overlap of a tensor group's collectives with matrix products, in chunks: `--tp-comm-overlap`.

Megatron-LM's option uses Transformer Engine's userbuffers, which by default (transformer_engine/pytorch/module/base.py,
initialize_ub) have three methods:

- "ring_exchange": a product's input is gathered in chunks around a ring of the t ranks, and each chunk is multiplied on
  arrival: for the first products of attention and MLP and, in the backward pass, the gradient of the last products'
  output. Copy engines transfer the chunks.
- "pipeline": the last products of attention and MLP are computed in four pieces; each is reduced and scattered during
  the next one.
- "bulk": in the backward pass, the first products' input is gathered again during the product for its gradient, and
  this gradient is reduced and scattered during the product for the weights' gradient.

The latter two occupy 16 multiprocessors. Chunks run on three streams, so that the next one uses the multiprocessors
left idle by the last wave of tiles (comm_gemm_overlap.cpp, split_overlap_ag): n chunks take as long as the whole
product.

PyTorch's async tensor parallelism ("symmetric memory"; torch/distributed/_symmetric_memory) has one method, a
"ring_exchange" by copy engines, also of the last products' output, whose parts each rank sums at the end. The compiler
uses it for products whose result is scattered as it is (torch/_inductor/fx_passes/micro_pipeline_tp.py,
``_find_producer_matmul``). The gradients of the inputs of attention and gated MLPs are sums of several products, so
their reduce-scatters do not overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ddlsim.workload.compute import Workload
from ddlsim.workload.products import Floats, Product, layer_products, product_time

RING_EXCHANGE, PIPELINE, BULK = "ring_exchange", "pipeline", "bulk"
PIECES = 4  # num_splits
COMMUNICATING = 16  # num_sm: multiprocessors; on TPUs, the interconnect occupies none


class OverlappedProduct(NamedTuple):
    """A product that is computed during a collective.

    method   method of overlap, see above
    chunks   number of chunks of both
    counted  time of the product in s, as included in its layer's time
    slowed   its time in s on the multiprocessors that the collective leaves free
    """

    method: str
    chunks: int
    counted: float
    slowed: float


class LayerOverlaps(NamedTuple):
    """Products that overlap with the exchanges of a layer.

    enters, again, enters_gradient  gathering the input, gathering it again, reducing its gradient
    leaves, leaves_gradient         reducing the output, gathering its gradient
    """

    enters: OverlappedProduct | None = None
    again: OverlappedProduct | None = None
    enters_gradient: OverlappedProduct | None = None
    leaves: OverlappedProduct | None = None
    leaves_gradient: OverlappedProduct | None = None


def layer_overlaps(workload: Workload, i: int, role: str, forward: Floats, tensor: int) -> LayerOverlaps:
    """Return the products that overlap with the exchanges of layer `i`.

    forward  time in s of each layer's forward pass on one of `tensor` ranks
    """
    products = layer_products(workload.model.layers[i], role, workload.batch_size, tensor)
    first, last = [product for product in products[:-1] if not product.core] or products, products[-1:]
    flops = sum(_flops(product) for product in products)

    def beside(method: str, chunks: int, chosen: Sequence[Product]) -> OverlappedProduct:
        total = float(forward[i]) * sum(_flops(product) for product in chosen) / flops
        left = 1.0
        if workload.by_kernel:
            seconds = _seconds(workload, chosen)
            left = _seconds(workload, chosen, COMMUNICATING) / seconds if method != RING_EXCHANGE else 1.0
            total = seconds if workload.summed else total
        return OverlappedProduct(method, chunks, total, total * left)

    of_input, of_weights = [Product(m, k, n) for m, n, k, *_ in first], [Product(k, n, m) for m, n, k, *_ in first]
    of_output = [Product(m, k, n) for m, n, k, *_ in last]
    if workload.stack.tensor_overlap == "symmetric memory" and workload.by_kernel:
        enters, leaves, again, gradient = (
            beside(RING_EXCHANGE, tensor, chosen) for chosen in (first, last, of_output, of_input)
        )
        sole = workload.model.layers[i].type == "dense"  # the only product of its input
        return LayerOverlaps(enters, None, gradient if sole else None, leaves, again)
    return LayerOverlaps(
        enters=beside(RING_EXCHANGE, tensor, first),
        again=beside(BULK, 1, of_input),
        enters_gradient=beside(BULK, 1, of_weights),
        leaves=beside(PIPELINE, PIECES, last),
        leaves_gradient=beside(RING_EXCHANGE, tensor, of_output),
    )


def _flops(product: Product) -> float:
    return 2.0 * product.m * product.n * product.k * product.copies


def _seconds(workload: Workload, products: Sequence[Product], communicating: int = 0) -> float:
    """Return the time of products in s while communication occupies `communicating` multiprocessors."""
    assert workload.device is not None
    assert workload.device.kernels is not None
    units = workload.device.kernels.units
    units -= communicating if units > communicating else 0
    return (
        sum(product_time(gemm, workload.device, workload.precision, workload.stack.gemm, units) for gemm in products)
        / workload.speed
    )
