"""The public names, and where they live: read by type checkers, and by the package when it is imported."""

from .bounds import Cut as Cut, critical_path as critical_path, cut as cut, peak_memory as peak_memory
from .chakra import read_chakra as read_chakra
from .check import check as check
from .chunks import (
    Chunk as Chunk,
    balanced_chunks as balanced_chunks,
    between_blocks as between_blocks,
    chunks_at as chunks_at,
    crossing_nbytes as crossing_nbytes,
)
from .data_parallel import data_parallel as data_parallel, sharded as sharded
from .draft import Draft as Draft
from .embeddings import embeddings as embeddings
from .execute import Execution as Execution, execute as execute
from .fully_sharded import fully_sharded as fully_sharded
from .goal import read_goal as read_goal
from .mesh import Mesh as Mesh, make_mesh as make_mesh
from .pipeline import pipeline as pipeline
from .pipeline_orders import ORDERS as ORDERS
from .plan import KINDS as KINDS, Lane as Lane, Part as Part, Plan as Plan
from .program import StepProgram as StepProgram
from .queues import FusedQueue as FusedQueue, PriorityQueue as PriorityQueue
from .schedules import ALGORITHMS as ALGORITHMS
from .transforms import with_parameter_servers as with_parameter_servers
