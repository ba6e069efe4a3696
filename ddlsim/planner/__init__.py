"""From questions to a decision: rules of thumb, and the search for the configuration that meets a target."""

from ddlsim.planner.decide import recommend
from ddlsim.planner.plan import Choice, Plan
from ddlsim.planner.target import Target

__all__ = ["Choice", "Plan", "Target", "recommend"]
