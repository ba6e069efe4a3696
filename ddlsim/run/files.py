"""Experiments from TOML files."""

from __future__ import annotations

from pathlib import Path

from ddlsim.run.experiment import Experiment

__all__ = ["load_experiment"]


def load_experiment(source: str | Path) -> Experiment:
    raise NotImplementedError(source)
