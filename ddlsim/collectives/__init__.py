"""Collective operations as schedules of messages.

One module per kind of operation (`all_reduce`, `broadcast`, `reduce`, `reduce_scatter`, `all_gather`,
`all_to_all`, `gather`, `scatter`); each public function in it is an algorithm, ``n_ranks -> Schedule``. `gloo` contains
PyTorch's algorithms over TCP. `build` finds algorithms by name, `check` verifies that a schedule implements its kind,
`states` replays it round by round, `combine` composes schedules, and `cost` contains the closed forms.
"""

from ddlsim.collectives.build import build as build
from ddlsim.collectives.check import check as check
from ddlsim.collectives.combine import (
    on_ranks as on_ranks,
    parallel as parallel,
    reorder as reorder,
    sequence as sequence,
    split as split,
)
from ddlsim.collectives.lookup import algorithm_names as algorithm_names
from ddlsim.collectives.schedule import (
    KINDS as KINDS,
    Collective as Collective,
    Round as Round,
    Schedule as Schedule,
    messages as messages,
)
from ddlsim.collectives.states import State as State, states as states
