"""Gradient compressors: real payloads, error feedback, and the exchange of payloads between workers.

A compressor is a frozen dataclass with the methods of `contract.Compressor`. `exchange` is the reference for the
values that all workers hold after an exchange; `sent_nbytes` counts the bytes that each of them sends.
"""

from ddlsim.compression.choice import Compression as Compression
from ddlsim.compression.contract import (
    Compressor as Compressor,
    Payload as Payload,
    Traits as Traits,
    check_gradient as check_gradient,
)
from ddlsim.compression.cost import CodecCost as CodecCost, measure_cost as measure_cost
from ddlsim.compression.sparse import DGC as DGC
from ddlsim.compression.exchange import (
    ExchangeResult as ExchangeResult,
    HierarchicalExchangeResult as HierarchicalExchangeResult,
    aggregate as aggregate,
    average as average,
    exchange as exchange,
    hierarchical_exchange as hierarchical_exchange,
    sent_nbytes as sent_nbytes,
    settle as settle,
)
from ddlsim.compression.feedback import ErrorFeedback as ErrorFeedback
from ddlsim.compression.low_rank import PowerSGD as PowerSGD
from ddlsim.compression.quantised import BF16 as BF16, FP16 as FP16, NoCompression as NoCompression
from ddlsim.compression.quantised import QSGD as QSGD, Natural as Natural, TernGrad as TernGrad
from ddlsim.compression.quantised import OneBit as OneBit, SignSGD as SignSGD
from ddlsim.compression.sketch import CountSketch as CountSketch
from ddlsim.compression.sparse import (
    GTopK as GTopK,
    MSTopK as MSTopK,
    RandomK as RandomK,
    Threshold as Threshold,
    TopK as TopK,
)
