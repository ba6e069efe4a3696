"""Task graphs of training steps: read, check, bound and execute them.

:class:`Plan` is the task graph; :class:`Draft` builds one task by task, :func:`data_parallel` and :func:`sharded` build
those of data parallelism, :func:`pipeline` those of models split over a :class:`Mesh`.
:func:`check` checks a plan, :func:`critical_path`, :func:`cut` and :func:`peak_memory` bound it without a network,
:func:`execute` computes the start and end of every task on a cluster.
"""

from ddlsim.plan.bounds import Cut as Cut, critical_path as critical_path, cut as cut, peak_memory as peak_memory
from ddlsim.plan.chakra import read_chakra as read_chakra
from ddlsim.plan.check import check as check
from ddlsim.plan.chunks import (
    Chunk as Chunk,
    balanced_chunks as balanced_chunks,
    between_blocks as between_blocks,
    chunks_at as chunks_at,
    crossing_nbytes as crossing_nbytes,
)
from ddlsim.plan.data_parallel import data_parallel as data_parallel, sharded as sharded
from ddlsim.plan.draft import Draft as Draft
from ddlsim.plan.embeddings import embeddings as embeddings
from ddlsim.plan.execute import Execution as Execution, execute as execute
from ddlsim.plan.fully_sharded import fully_sharded as fully_sharded
from ddlsim.plan.goal import read_goal as read_goal
from ddlsim.plan.mesh import Mesh as Mesh, make_mesh as make_mesh
from ddlsim.plan.pipeline import pipeline as pipeline
from ddlsim.plan.pipeline_orders import ORDERS as ORDERS
from ddlsim.plan.plan import KINDS as KINDS, Lane as Lane, Part as Part, Plan as Plan
from ddlsim.plan.program import StepProgram as StepProgram
from ddlsim.plan.queues import FusedQueue as FusedQueue, PriorityQueue as PriorityQueue
from ddlsim.plan.schedules import ALGORITHMS as ALGORITHMS
from ddlsim.plan.servers import with_parameter_servers as with_parameter_servers
