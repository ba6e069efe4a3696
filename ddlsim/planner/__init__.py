"""Recommendations: a search for the best configuration for a target, with rules of thumb for comparison."""

from ddlsim.planner.decide import recommend as recommend
from ddlsim.planner.decide import load_question as load_question
from ddlsim.planner.recommendation import Choice as Choice, Recommendation as Recommendation
from ddlsim.planner.target import Target as Target
