"""What the reader of a result should know about the model that is handed over."""

from __future__ import annotations

from ddlsim.learning.monitor import Monitor
from ddlsim.runtime.setting import Setting

__all__ = ["handed_over_notes"]


def handed_over_notes(setting: Setting, monitor: Monitor | None) -> list[str]:
    """Return what a training run's model mixes, where workers are at different steps, and what statistics cost."""
    task = setting.learner.task
    if monitor is None or task is None:
        return []
    notes, steps = [], monitor.evaluated_steps
    if steps and min(steps) < max(steps):
        notes.append(f"the model handed over is {setting.mixture} that are at their steps {min(steps)} to {max(steps)}")
    if task.network.state_slots:
        nbytes = task.network.initial_state.nbytes
        share = nbytes / task.network.initial_params.nbytes
        notes.append(
            f"running statistics of batch normalisation go where the parameters go; their {nbytes / 1e3:.4g} kB "
            f"({share:.2%} of the parameters) are not counted among the bytes sent"
        )
    return notes
