"""From an experiment to a result."""

from ddlsim.run.experiment import Experiment as Experiment
from ddlsim.run.result import Result as Result
from ddlsim.run.simulate import run as run
