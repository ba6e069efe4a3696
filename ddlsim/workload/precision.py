"""Number formats: bytes per element, and operand formats of matrix products.

In "fp8", "mxfp8" and "nvfp4" the matrix products of transformer layers take operands of 8 or 4 bits. Attention, the
output layer, normalisations, sums, gradients and the optimizer stay in bf16 and fp32 (NVIDIA Transformer Engine user
guide, "Using FP8 and FP4 with Transformer Engine"; torchao.float8).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class LowPrecision(NamedTuple):
    """Operands of fewer than 16 bits.

    peak       key of the device's ``peak_flops`` and of its kernels' ``gemm``
    operand    bytes per element, scales included
    quantise   bytes moved per element to quantise an operand for the products of both passes
    high       share of the products that stay in bf16
    transpose  bytes per element of a transposed copy, on devices whose products take operands in one layout only: those
               without 4-bit products (Hopper: NVIDIA, Transformer Engine, "FP8 GEMMs ... TN layout")
    """

    peak: str
    operand: float
    quantise: float
    transpose: float = 0.0
    high: float = 0.0


#: "fp8": one scale per tensor, from its current maximum, which is read first; "mxfp8": a one-byte scale per 32 elements
#: of a row, and again per column (OCP Microscaling Formats 1.0); "nvfp4": the same per 16 elements, after the tensor's
#: maximum; about 15 % of the layers stay in bf16 (NVIDIA 2025, Pretraining LLMs with NVFP4, arXiv:2509.25149)
LOW_PRECISIONS = {
    "fp8": LowPrecision("fp8", 1.0, 2.0 + 2.0 + 1.0, 1.0),
    "mxfp8": LowPrecision("fp8", 1.0 + 1 / 32, 2.0 * (2.0 + 1.0 + 1 / 32)),
    "nvfp4": LowPrecision("fp4", 0.5 + 1 / 16, 2.0 + 2.0 * (2.0 + 0.5 + 1 / 16), high=0.15),
}
#: bytes per element of an activation, a weight or a gradient, by precision (tf32 is stored in 32 bits)
ELEMENT_NBYTES = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0} | dict.fromkeys(LOW_PRECISIONS, 2.0)
FP32_NBYTES = ELEMENT_NBYTES["fp32"]
#: data types of gradients on the wire
GRADIENT_TYPES = ("fp32", "fp16", "bf16")


def base_precision(precision: str) -> str:
    """Return the precision of all computations except products of transformer layers."""
    return "bf16" if precision in LOW_PRECISIONS else precision


def product_type(precision: str) -> str:
    """Return the key of the peak rate of matrix products."""
    return LOW_PRECISIONS[precision].peak if precision in LOW_PRECISIONS else precision


def has_products(precision: str, peak_flops: Mapping[str, float]) -> bool:
    """Return whether a device with these peak rates supports products in a precision.

    Only devices with 4-bit products have block scales: on Hopper and CDNA 3, 8-bit products have a scale per tensor.
    """
    return product_type(precision) in peak_flops and (precision != "mxfp8" or "fp4" in peak_flops)
