"""From questions to a decision: rules of thumb, and the search for the configuration that meets a target."""

from ddlsim.planner.decide import recommend as recommend
from ddlsim.planner.decide import load_question as load_question
from ddlsim.planner.plan import Choice as Choice, Plan as Plan
from ddlsim.planner.target import Target as Target
