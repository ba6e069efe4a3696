"""The programs of builders, unrolled: plans of so many steps."""

from __future__ import annotations

import ddlsim.plan
from ddlsim.plan.experts import experts as experts_program
from ddlsim.plan.hybrid import hybrid as hybrid_program


def unrolled(build):
    def plan(*args, steps=1, **more):
        return build(*args, **more).unroll(steps)

    return plan


data_parallel, sharded, fully_sharded, pipeline, embeddings, experts, hybrid = (
    unrolled(build)
    for build in (
        ddlsim.plan.data_parallel, ddlsim.plan.sharded, ddlsim.plan.fully_sharded, ddlsim.plan.pipeline,
        ddlsim.plan.embeddings, experts_program, hybrid_program,
    )
)  # fmt: skip
