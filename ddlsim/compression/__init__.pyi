"""The public names, and where they live: read by type checkers, and by the package when it is imported."""

from .choice import Compression as Compression
from .contract import (
    Compressor as Compressor,
    Payload as Payload,
    Traits as Traits,
    check_gradient as check_gradient,
)
from .cost import CodecCost as CodecCost, measure_cost as measure_cost
from .sparse import DGC as DGC
from .exchange import (
    ExchangeResult as ExchangeResult,
    HierarchicalExchangeResult as HierarchicalExchangeResult,
    aggregate as aggregate,
    average as average,
    exchange as exchange,
    hierarchical_exchange as hierarchical_exchange,
    sent_nbytes as sent_nbytes,
    settle as settle,
)
from .feedback import ErrorFeedback as ErrorFeedback
from .low_rank import PowerSGD as PowerSGD
from .quantised import BF16 as BF16, FP16 as FP16, NoCompression as NoCompression
from .quantised import QSGD as QSGD, Natural as Natural, TernGrad as TernGrad
from .quantised import OneBit as OneBit, SignSGD as SignSGD
from .sketch import CountSketch as CountSketch
from .sparse import (
    GTopK as GTopK,
    MSTopK as MSTopK,
    RandomK as RandomK,
    Threshold as Threshold,
    TopK as TopK,
)
