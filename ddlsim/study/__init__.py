"""What-if studies: many experiments, simulated once each, on all cores or a cluster, in a store that survives."""

from ddlsim.study.designs import Range
from ddlsim.study.dispatch import Count
from ddlsim.study.files import load_study
from ddlsim.study.study import Point, Study
from ddlsim.study.table import Table, load_table

__all__ = ["Count", "Point", "Range", "Study", "Table", "load_study", "load_table"]
