"""The value plane: real gradients, parameters and losses, computed when they are read."""

from ddlsim.learning.learner import Learner
from ddlsim.learning.phases import Phase
from ddlsim.learning.training import Dirichlet, Training
from ddlsim.learning.values import ABSENT, Array, Plane, Value, weighted_sum

__all__ = ["ABSENT", "Array", "Dirichlet", "Learner", "Phase", "Plane", "Training", "Value", "weighted_sum"]
