"""The public names, and where they live: read by type checkers, and by the package when it is imported."""

from .cabling import plan as plan
from .laboratory import Comparison as Comparison, compare as compare, parse_operations as parse_operations
from .laboratory import check_computer as check_computer, clean as clean
from .rank import LabError as LabError
