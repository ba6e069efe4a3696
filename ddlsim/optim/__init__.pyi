"""The public names, and where they live: read by type checkers, and by the package when it is imported."""

from .schedules import GrowingBatch as GrowingBatch
from .rules import LAMB as LAMB, LARS as LARS
from .rules import (
    SGD as SGD,
    Adam as Adam,
    Momentum as Momentum,
    Optimizer as Optimizer,
    OptimizerState as OptimizerState,
)
from .schedules import (
    Constant as Constant,
    Cosine as Cosine,
    Polynomial as Polynomial,
    Schedule as Schedule,
    Steps as Steps,
    WarmUp as WarmUp,
    linear_scaling as linear_scaling,
    square_root_scaling as square_root_scaling,
)
