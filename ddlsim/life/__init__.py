"""How long a training really takes: failures, checkpoints and restarts around the steps of a simulated run."""

from ddlsim.life.background import Background as Background
from ddlsim.life.checkpoints import Checkpoints as Checkpoints
from ddlsim.life.checkpoints import (
    daly_interval as daly_interval,
    daly_time as daly_time,
    young_interval as young_interval,
)
from ddlsim.life.elastic import Elastic as Elastic
from ddlsim.life.failures import Failures as Failures
from ddlsim.life.faults import LinkFault as LinkFault, Stop as Stop
from ddlsim.life.life import Life as Life, live as live
from ddlsim.life.random_faults import RandomFaults as RandomFaults
from ddlsim.life.timeline import Timeline as Timeline
