"""Gradient compressors: real payloads, error feedback, and how the payloads of many workers come together.

A compressor is a frozen dataclass (`contract.Compressor` says with which methods). `exchange` is the reference
for what all workers hold after one exchange; `sent_nbytes` counts what each of them put on the wire.
"""

from ddlsim.compression.choice import Compression
from ddlsim.compression.contract import Compressor, Payload, Traits, check_gradient
from ddlsim.compression.cost import CodecCost, measure_cost
from ddlsim.compression.dense import BF16, FP16, NoCompression
from ddlsim.compression.dgc import DGC
from ddlsim.compression.exchange import Exchanged, aggregate, average, exchange, sent_nbytes, settle
from ddlsim.compression.feedback import ErrorFeedback
from ddlsim.compression.hierarchy import HierarchicallyExchanged, hierarchical_exchange
from ddlsim.compression.low_rank import PowerSGD
from ddlsim.compression.quantised import QSGD, Natural, TernGrad
from ddlsim.compression.signs import OneBit, SignSGD
from ddlsim.compression.sketch import CountSketch
from ddlsim.compression.sparse import GTopK, MSTopK, RandomK, Threshold, TopK

__all__ = [
    "BF16",
    "DGC",
    "FP16",
    "QSGD",
    "CodecCost",
    "Compression",
    "Compressor",
    "CountSketch",
    "ErrorFeedback",
    "Exchanged",
    "GTopK",
    "HierarchicallyExchanged",
    "MSTopK",
    "Natural",
    "NoCompression",
    "OneBit",
    "Payload",
    "PowerSGD",
    "RandomK",
    "SignSGD",
    "TernGrad",
    "Threshold",
    "TopK",
    "Traits",
    "aggregate",
    "average",
    "check_gradient",
    "exchange",
    "hierarchical_exchange",
    "measure_cost",
    "sent_nbytes",
    "settle",
]
