"""Time to encode and decode: set, from a published model, or measured on this computer."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ddlsim.arguments import Count, Index, NotNegative, checked
from ddlsim.compression.contract import Compressor, Payload, Traits, Vector, full
from ddlsim.compression.exchange import aggregate, average
from ddlsim.workload.precision import FP32_NBYTES

P = TypeVar("P", bound=Payload)
S = TypeVar("S")

#: passes of an exact selection on a device: a radix selection reads 32-bit keys 8 bits at a time, then collects
SELECT_PASSES = 5.0
#: kernels that collect the elements above a threshold: count, prefix sum, write; and kernels of the selection: for each
#: of four digits a histogram and a choice, then these
COLLECT_KERNELS = 3
SELECT_KERNELS = 8 + COLLECT_KERNELS

#: passes of sorting all elements with their indices: a radix sort of 4-byte keys and 8-byte indices has four digits;
#: for each, it reads the keys, then reads and writes both: 4 (4 + 12 + 12) bytes, in units of 4; and its kernels
SORT_PASSES = 28.0
SORT_KERNELS = 8


@checked
@dataclass(frozen=True)
class CodecCost:
    """Linear model of the time to encode and decode a gradient.

    encode       encoding time in seconds per element of the gradient
    decode       decoding time in seconds per payload and per element of the gradient
    encode_sort  additional encoding time for sorting: a gradient of n elements takes ``encode_sort * n * log2(n)``
                 seconds
    overhead     constant time in seconds that each encoding and each decoding takes, such as for kernel launches
    """

    encode: NotNegative = 0.0
    decode: NotNegative = 0.0
    encode_sort: NotNegative = 0.0
    overhead: NotNegative = 0.0

    def encode_seconds(self, n: int) -> float:
        """Return the seconds to encode n elements."""
        sort = self.encode_sort * n * math.log2(n) if n > 1 else 0.0
        return self.overhead + self.encode * n + sort

    def decode_seconds(self, n: int, n_payloads: int = 1) -> float:
        """Return the seconds to decode `n_payloads` payloads of n elements, as after an all-gather."""
        return n_payloads * (self.overhead + self.decode * n)


#: encoding and decoding take no time, for what-if studies
FREE = CodecCost()

#: ``s * n * log2(n)`` for top-k by sorting, from the source code of MG-WFBP (Shi et al. 2019, utils.py)
SORT_V100 = CodecCost(encode_sort=5.0e-10)

#: exact selection of the k largest elements: by radix selection, close to memory bandwidth, as in current libraries; or
#: by sorting all, as in the frameworks until 2021 (``SORT_V100`` for their top-k)
PROFILES = ("radix", "sort")


def sorting(traits: Traits, n: int) -> tuple[float, Traits]:
    """Return the seconds of a top-k of n elements in frameworks until 2021, if a compressor's code calls it, and the
    traits of the rest of the encoding, which includes other sorting."""
    if not traits.selection:
        return 0.0, traits
    by_top_k = traits.selection == "top_k"
    passes, kernels = (0.0, 0) if by_top_k else (SORT_PASSES, SORT_KERNELS)
    rest = dataclasses.replace(
        traits,
        encode_passes=traits.encode_passes - SELECT_PASSES + passes,
        encode_kernels=traits.encode_kernels - SELECT_KERNELS + kernels,
    )
    return SORT_V100.encode_seconds(n) if by_top_k else 0.0, rest


def encode_traffic(traits: Traits, n: int, nbytes: float) -> float:
    """Return the bytes that encoding n float32 elements to `nbytes` moves through memory: passes and payload."""
    return traits.encode_passes * FP32_NBYTES * n + nbytes if traits.encode_passes else 0.0


def decode_traffic(traits: Traits, n: int, nbytes: float, n_payloads: int = 1) -> float:
    """Return the bytes that decoding moves: `n_payloads` payloads of `nbytes` in all, to one mean of n float32."""
    if not traits.encode_passes:
        return 0.0
    return n_payloads * traits.decode_passes * FP32_NBYTES * n + nbytes + FP32_NBYTES * n


def encode_launches(traits: Traits) -> int:
    """Return the number of consecutive kernel launches for encoding."""
    return traits.encode_kernels if traits.encode_passes else 0


def decode_launches(traits: Traits, n_payloads: int = 1) -> int:
    """Return the number of consecutive kernel launches for decoding `n_payloads` payloads: one each."""
    return n_payloads if traits.encode_passes else 0


@checked
def measure_cost(compressor: Compressor[S, P], n: Count, n_repeats: Count = 5, seed: Index = 0) -> CodecCost:
    """Measure the encoding and decoding times of a compressor on this computer.

    compressor  compressor to measure
    n           number of elements in each gradient. The cost is assumed to be proportional to n, so choose the size of
                the gradients that you will compress
    n_repeats   number of exchanges to measure. The result contains the shortest encoding and decoding times, because
                other programs may slow down some exchanges
    seed        random seed for the gradients, whose elements are normally distributed

    If an exchange with this compressor has two rounds, the cost includes both.
    """
    rng = np.random.default_rng(seed)
    state = compressor.init(n, seed)
    encodes, decodes = [], []
    for _ in range(n_repeats):
        gradient = rng.standard_normal(n).astype(np.float32)
        begin = time.perf_counter()
        payload, state = _send(compressor, gradient, state, rng)
        middle = time.perf_counter()
        aggregate(compressor, [payload])
        encodes.append(middle - begin)
        decodes.append(time.perf_counter() - middle)
    return CodecCost(encode=min(encodes) / n, decode=min(decodes) / n)


def _send(compressor: Compressor[S, P], gradient: Vector, state: S, rng: np.random.Generator) -> tuple[P, S]:
    payload, state = compressor.encode(gradient, state, rng)
    if compressor.traits.n_rounds == 2:
        payload, state = full(compressor).follow_up(average(compressor, [payload]), state)
    return payload, state
