"""The public names, and where they live: read by type checkers, and by the package when it is imported."""

from .experiment import Experiment as Experiment
from .result import Result as Result
from .simulate import run as run
