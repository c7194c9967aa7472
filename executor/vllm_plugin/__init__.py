"""Inside real vLLM 0.32: our scheduler in its engine, our simulated executor under it, a recorder of its steps.

    vllm serve MODEL --scheduler-cls windtunnel.executor.vllm_plugin.VllmScheduler
    vllm serve MODEL --distributed-executor-backend windtunnel.executor.vllm_plugin.VllmSimExecutor
    vllm serve MODEL --scheduler-cls windtunnel.executor.vllm_plugin.RecordingScheduler

vLLM is imported only when one of these classes is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "VllmScheduler": "scheduler",
    "VllmSchedulerChecked": "checked",
    "DecisionsDiffer": "checked",
    "VllmSimExecutor": "sim_executor",
    "VirtualClock": "clock",
    "RecordingScheduler": "recorder",
    "SnapshotScheduler": "fork",
    "VllmStepper": "stepper",
}

__all__ = [
    "DecisionsDiffer",
    "RecordingScheduler",
    "SnapshotScheduler",
    "VirtualClock",
    "VllmScheduler",
    "VllmSchedulerChecked",
    "VllmSimExecutor",
    "VllmStepper",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
