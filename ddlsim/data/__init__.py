"""Data sets to learn from, how workers share them, and the order in which they see samples.

>>> from ddlsim.data import load_digits, split
>>> train, held_out = split(load_digits(), held_out=0.2, seed=0)
>>> train.sample_shape, train.n_classes
((1, 8, 8), 10)
"""

from ddlsim.data.batches import BatchStream
from ddlsim.data.cifar import read_cifar
from ddlsim.data.dataset import DataSet, from_arrays, split, standardize
from ddlsim.data.digits import load_digits
from ddlsim.data.idx import read_idx
from ddlsim.data.image_folder import read_images
from ddlsim.data.named import DATA_NAMES, load_data
from ddlsim.data.npz import read_npz
from ddlsim.data.sharding import by_class, dirichlet, iid
from ddlsim.data.synthetic import shapes

__all__ = [
    "DATA_NAMES",
    "BatchStream",
    "DataSet",
    "by_class",
    "dirichlet",
    "from_arrays",
    "iid",
    "load_data",
    "load_digits",
    "read_cifar",
    "read_idx",
    "read_images",
    "read_npz",
    "shapes",
    "split",
    "standardize",
]
