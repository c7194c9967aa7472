"""One simulation as a job: a scenario with its settings and a seed in, a flat dict of numbers out."""

from __future__ import annotations

from windtunnel.trials.obstacle import Obstacle, resolved_or_obstacle
from windtunnel.trials.trial import Trial, make_trial, run_trial

__all__ = ["Obstacle", "Trial", "make_trial", "resolved_or_obstacle", "run_trial"]
