"""Data sets by name: how many samples, and of how many bytes each is as it is stored."""

from __future__ import annotations

from typing import NamedTuple


class DataSize(NamedTuple):
    """Samples of a training set, bytes of one as stored (a mean), and who says so."""

    samples: int
    sample_nbytes: float
    source: str


DATASETS = {
    "imagenet": DataSize(
        1_281_167, 147_897_477_120 / 1_281_167,
        "ILSVRC 2012: ILSVRC2012_img_train.tar has 147,897,477,120 bytes, JPEG files and their tar headers",
    ),
    "cifar10": DataSize(
        50_000, 3073.0, "Krizhevsky 2009, binary version: 3,072 bytes of pixels and one of the label, not compressed"
    ),
    "coco2017": DataSize(118_287, 18e9 / 118_287, "cocodataset.org, 2017 train images: 118K images, 18 GB, JPEG files"),
}  # fmt: skip
