"""The public names, and where they live: read by type checkers, and by the package when it is imported."""

from .table import (
    OPERATIONS as OPERATIONS,
    Measurement as Measurement,
    read_measurements as read_measurements,
    save_measurements as save_measurements,
)
