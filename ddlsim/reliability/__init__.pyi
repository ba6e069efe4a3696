"""The public names, and where they live: read by type checkers, and by the package when it is imported."""

from .background import Background as Background
from .checkpoints import Checkpoints as Checkpoints
from .checkpoints import (
    daly_interval as daly_interval,
    daly_time as daly_time,
    young_interval as young_interval,
)
from .engine import (
    FailureFreeTimeline as FailureFreeTimeline,
    FailureTimeline as FailureTimeline,
    simulate_failures as simulate_failures,
)
from .failures import Elastic as Elastic, Failures as Failures
from .faults import (
    Effect as Effect,
    LinkFault as LinkFault,
    Pause as Pause,
    RandomFaults as RandomFaults,
    Slowdown as Slowdown,
    Stop as Stop,
)
