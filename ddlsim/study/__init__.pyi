"""The public names, and where they live: read by type checkers, and by the package when it is imported."""

from .designs import Range as Range
from .dispatch import Count as Count
from .dispatch import Point as Point
from .search import Search as Search
from .study import Study as Study, load_study as load_study
from .table import Table as Table, load_table as load_table
