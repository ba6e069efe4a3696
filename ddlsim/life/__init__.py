"""Faults, failures, checkpoints and restarts of a simulated run."""

from ddlsim.life.background import Background as Background
from ddlsim.life.checkpoints import Checkpoints as Checkpoints
from ddlsim.life.checkpoints import (
    daly_interval as daly_interval,
    daly_time as daly_time,
    young_interval as young_interval,
)
from ddlsim.life.engine import Life as Life, live as live
from ddlsim.life.failures import Elastic as Elastic, Failures as Failures
from ddlsim.life.faults import (
    Effect as Effect,
    LinkFault as LinkFault,
    Pause as Pause,
    RandomFaults as RandomFaults,
    SlowDown as SlowDown,
    Stop as Stop,
)
from ddlsim.life.timeline import Timeline as Timeline
