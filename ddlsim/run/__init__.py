"""From an experiment to a result."""

from ddlsim.run.experiment import Experiment
from ddlsim.run.result import Result
from ddlsim.run.simulate import run

__all__ = ["Experiment", "Result", "run"]
