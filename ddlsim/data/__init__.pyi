"""The public names, and where they live: read by type checkers, and by the package when it is imported."""

from .batches import BatchStream as BatchStream, by_class as by_class, dirichlet as dirichlet, iid as iid
from .dataset import DataSet as DataSet, from_arrays as from_arrays, split as split, standardize as standardize
from .named import read_cifar as read_cifar, read_downloaded as read_downloaded, read_idx as read_idx
from .named import read_images as read_images
from .named import (
    DATA_NAMES as DATA_NAMES,
    clicks as clicks,
    load_data as load_data,
    load_digits as load_digits,
    read_npz as read_npz,
    sentences as sentences,
    shapes as shapes,
)
