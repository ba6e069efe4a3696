"""Task graphs of training steps: read, check, bound and execute them.

:class:`Plan` is the task graph; :class:`Draft` builds one task by task, :func:`data_parallel` and :func:`sharded` build
those of data parallelism, :func:`pipeline` those of models split over a :class:`Mesh`.
:func:`check` checks a plan, :func:`critical_path`, :func:`cut` and :func:`peak_memory` bound it without a network,
:func:`execute` computes the start and end of every task on a cluster.
Names are loaded when first used, except functions named like their modules.
"""

import lazy_loader

from ddlsim.plan.check import check as check
from ddlsim.plan.data_parallel import data_parallel as data_parallel
from ddlsim.plan.embeddings import embeddings as embeddings
from ddlsim.plan.execute import execute as execute
from ddlsim.plan.fully_sharded import fully_sharded as fully_sharded
from ddlsim.plan.pipeline import pipeline as pipeline

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
