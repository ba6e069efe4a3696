"""Training of models in a run: gradients, parameters and losses as lazily computed values."""

from ddlsim.learning.learner import Learner as Learner
from ddlsim.learning.phases import Phase as Phase
from ddlsim.learning.training import Dirichlet as Dirichlet, Training as Training
from ddlsim.learning.values import (
    ABSENT as ABSENT,
    Array as Array,
    DataPlane as DataPlane,
    Value as Value,
    weighted_sum as weighted_sum,
)
