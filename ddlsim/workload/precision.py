"""Bytes of the numbers that models are made of."""

from __future__ import annotations

#: of an activation, a weight or a gradient, by precision (tf32 is kept in 32 bits)
ELEMENT_NBYTES = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0}
FP32_NBYTES = ELEMENT_NBYTES["fp32"]
#: what gradients can be on the wire
GRADIENT_TYPES = ("fp32", "fp16", "bf16")
