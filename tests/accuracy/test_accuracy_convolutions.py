"""Convolutional networks: the rates in the catalogue are the fitted ones, and steps that nothing was fitted to."""

import json
import sys

import pytest

from accuracy import convolutions
from accuracy.rows import bias, mean_error
from ddlsim import ConfigError

LINES = convolutions.read(convolutions.FILE)
DEVICE = convolutions.device_of(LINES)
KERNELS = convolutions.kernels(LINES)


def test_the_catalogue_has_the_fitted_rates():
    fitted = convolutions.values(convolutions.rates_of(convolutions.fit(KERNELS, DEVICE)))
    assert convolutions.values(convolutions.rates_of(DEVICE)) == pytest.approx(fitted, rel=0.01)


def test_h100_has_the_same_rates():
    assert convolutions.rates_of(convolutions.device_of([{"what": "device", "name": "NVIDIA H100 80GB HBM3"}])) == (
        convolutions.rates_of(DEVICE)
    )
    with pytest.raises(ConfigError, match="device 'Tesla V100'"):
        convolutions.device_of([{"what": "device", "name": "Tesla V100"}])


def test_steps_that_the_gpu_limits():
    counted = [row for row in convolutions.rows() if not row.note]
    assert len(counted) == 34
    assert mean_error(counted) < 0.09
    assert abs(bias(counted)) < 0.07
    assert mean_error([row for row in counted if "default" in row.case]) < 0.06


def test_a_file_of_other_measurements(tmp_path, monkeypatch, capsys):
    step = {"what": "step", "batch": 128, "seconds": 0.03, "alone": 0.03, "issue": 0.01}
    rows = [
        {"what": "device", "name": "NVIDIA H100 80GB HBM3"},
        *({**step, "model": model, "mode": mode} for model, mode in
          (("resnet50", "bf16-nhwc"), ("resnet50", "int8"), ("unheard_of", "default"), ("gpt2", "default"))),
    ]  # fmt: skip
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["convolutions", str(path)])
    convolutions.main()
    out, err = capsys.readouterr()
    assert "resnet50: bf16-nhwc" in out
    assert "limited by the GPU, all: 1 steps" in out
    assert "resnet50, int8: not predicted: mode 'int8'" in err
    assert "unheard_of, default: not predicted" in err
    assert "gpt2" not in out + err
