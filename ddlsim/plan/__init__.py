"""The step of a training run as a table of tasks: read it, prove it, bound it, execute it.

:class:`Plan` is the table; :class:`Draft` writes one row by row, :func:`data_parallel` and :func:`sharded` those of
data parallelism, :func:`pipeline` those of models split over a :class:`Mesh`.
:func:`check` proves a plan, :func:`critical_path`, :func:`cut` and :func:`peak_memory` bound it without a network,
:func:`execute` gives every task its start and end on a cluster.
"""

from ddlsim.plan.bounds import Cut, critical_path, cut, peak_memory
from ddlsim.plan.chakra import read_chakra
from ddlsim.plan.check import check
from ddlsim.plan.chunks import Chunk, balanced, between_blocks, chunks_at, crossing_nbytes
from ddlsim.plan.data_parallel import data_parallel, sharded
from ddlsim.plan.draft import Draft
from ddlsim.plan.embeddings import embeddings
from ddlsim.plan.execute import Execution, execute
from ddlsim.plan.fully_sharded import fully_sharded
from ddlsim.plan.goal import read_goal
from ddlsim.plan.local_steps import local_steps
from ddlsim.plan.mesh import Mesh, mesh_of
from ddlsim.plan.pipeline import pipeline
from ddlsim.plan.pipeline_orders import ORDERS
from ddlsim.plan.plan import KINDS, Lane, Part, Plan
from ddlsim.plan.queues import FusedQueue, UrgentQueue
from ddlsim.plan.schedules import ALGORITHMS
from ddlsim.plan.servers import through_servers

__all__ = [
    "ALGORITHMS",
    "KINDS",
    "ORDERS",
    "Chunk",
    "Cut",
    "Draft",
    "Execution",
    "FusedQueue",
    "Lane",
    "Mesh",
    "Part",
    "Plan",
    "UrgentQueue",
    "balanced",
    "between_blocks",
    "check",
    "chunks_at",
    "critical_path",
    "crossing_nbytes",
    "cut",
    "data_parallel",
    "embeddings",
    "execute",
    "fully_sharded",
    "local_steps",
    "mesh_of",
    "peak_memory",
    "pipeline",
    "read_chakra",
    "read_goal",
    "sharded",
    "through_servers",
]
