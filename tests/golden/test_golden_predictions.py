"""Predictions must not move unnoticed: throughputs of bundled clusters, as this program computed them.

These numbers are no measurements and prove nothing but sameness. When a model changes on purpose, say in the
change log by how much and why, and write them anew: ``python tests/golden/test_golden_predictions.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddlsim import (
    AllReduce,
    AsyncParameterServer,
    Experiment,
    HorovodFusion,
    Lognormal,
    ParameterServer,
    Priority,
)
from ddlsim.run import run

FILE = Path(__file__).with_name("predictions.json")

EXPERIMENTS = {
    "cloud, ResNet-50, ring, DDP": Experiment("cloud-25g-16x8-v100", "resnet50", AllReduce(), 64, 32),
    "cloud, ideal links, ResNet-50, ring, DDP": Experiment(
        "cloud-25g-16x8-v100+transport=ideal", "resnet50", AllReduce(), 64, 32
    ),
    "cloud, ResNet-50, hierarchical, Horovod": Experiment(
        "cloud-25g-16x8-v100", "resnet50", AllReduce("hierarchical", HorovodFusion()), 64, 64
    ),
    "cloud, VGG-16, double tree, priority": Experiment(
        "cloud-25g-16x8-v100", "vgg16", AllReduce("double_binary_tree", Priority()), 32, 16
    ),
    "cloud, ideal links, VGG-16, double tree, priority": Experiment(
        "cloud-25g-16x8-v100+transport=ideal", "vgg16", AllReduce("double_binary_tree", Priority()), 32, 16
    ),
    "DGX-1, BERT-large, ring": Experiment("dgx1-v100-16", "bert-large", AllReduce("ring"), 8, 32, precision="fp16"),
    "DGX-1, BERT-large, default": Experiment("dgx1-v100-16", "bert-large", AllReduce(), 8, 32, precision="fp16"),
    "A100 pod, BERT-large, hierarchical": Experiment(
        "dgx-a100-pod", "bert-large", AllReduce("hierarchical"), 16, 64, precision="bf16", gradient_dtype="bf16"
    ),
    "p2, AlexNet, servers": Experiment(
        "aws-p2-16xlarge-16", "alexnet", ParameterServer(4, "colocated", local_reduction=True), 512, 64
    ),
    "racks, ResNet-18, asynchronous": Experiment(
        "two-racks-oversubscribed", "resnet18", AsyncParameterServer(1, "colocated"), 32, 8, jitter=Lognormal(0.2)
    ),
    "fat tree, GoogLeNet, halving-doubling": Experiment(
        "fat-tree-k8-10g", "googlenet", AllReduce("halving_doubling", "layer"), 32, 32
    ),
    "torus, ResNet-50, torus": Experiment("torus-2d", "resnet50", AllReduce("torus_2d"), 32),
    "lab, AlexNet, stragglers": Experiment("lab-heterogeneous", "alexnet", AllReduce(), 32, jitter=Lognormal(0.3)),
}


def predict(name: str) -> float:
    return run(EXPERIMENTS[name].with_(steps=3, warmup=1)).throughput


def predictions() -> dict[str, float]:
    return {name: predict(name) for name in EXPERIMENTS}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_prediction_is_unchanged(name: str) -> None:
    golden = json.loads(FILE.read_text(encoding="utf-8"))
    assert set(golden) == set(EXPERIMENTS)
    assert predict(name) == pytest.approx(golden[name], rel=1e-6)


if __name__ == "__main__":
    FILE.write_text(json.dumps(predictions(), indent=2) + "\n", encoding="utf-8")
