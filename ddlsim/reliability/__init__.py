"""Faults, failures, checkpoints and restarts of a simulated run."""

from ddlsim.reliability.background import Background as Background
from ddlsim.reliability.checkpoints import Checkpoints as Checkpoints
from ddlsim.reliability.checkpoints import (
    daly_interval as daly_interval,
    daly_time as daly_time,
    young_interval as young_interval,
)
from ddlsim.reliability.engine import FailureTimeline as FailureTimeline, simulate_failures as simulate_failures
from ddlsim.reliability.failures import Elastic as Elastic, Failures as Failures
from ddlsim.reliability.faults import (
    Effect as Effect,
    LinkFault as LinkFault,
    Pause as Pause,
    RandomFaults as RandomFaults,
    Slowdown as Slowdown,
    Stop as Stop,
)
from ddlsim.reliability.timeline import FailureFreeTimeline as FailureFreeTimeline
