"""The UCI handwritten digits that come with ddlsim."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ddlsim.data.dataset import DataSet
from ddlsim.errors import ConfigError

_FILE = Path(__file__).parent / "files" / "digits.npz"
_SOURCE = (
    "E. Alpaydin and C. Kaynak (1998), Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, "
    "https://doi.org/10.24432/C50P49, CC BY 4.0"
)


def load_digits() -> DataSet:
    """Return 1,797 grey digits of 8 x 8 pixels, shape (1797, 1, 8, 8), values 0..1 in steps of 1/16.

    They are the test part (13 writers) of Alpaydin and Kaynak 1998; see ``files/README.md`` beside this module.
    """
    if not _FILE.is_file():
        raise ConfigError(f"{_FILE} is missing; reinstall ddlsim")
    with np.load(_FILE, allow_pickle=False) as file:
        images, labels = file["images"], file["labels"]
    x = images.astype(np.float32)[:, None] / np.float32(16.0)
    return DataSet("digits", x, labels.astype(np.int64), tuple("0123456789"), _SOURCE)
