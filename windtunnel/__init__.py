"""windtunnel: a wind tunnel for LLM serving.

>>> import windtunnel as wt
>>> run = wt.simulate("chat-8b-h100", seed=1)  # doctest: +SKIP
>>> run.requests.ttft_s.quantile(0.99)  # doctest: +SKIP

Names are imported when they are first used, so that ``import windtunnel`` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windtunnel.api import Run, load_run, profiles, simulate
    from windtunnel.capacity.max_rate import MaxRate, max_rate
    from windtunnel.comparison import Comparison, compare
    from windtunnel.memory import MemoryReport, MemorySweep, memory_plan, memory_sweep
    from windtunnel.memory_inputs import MemoryInputUnreadable
    from windtunnel.optimizing.optimize import Optimum, optimize
    from windtunnel.planning.plan import Plan, plan
    from windtunnel.rundir import OutputError, RunUnreadable
    from windtunnel.scenarios.errors import ScenarioError, ScenarioUnreadable
    from windtunnel.scenarios.workloads.errors import TraceError
    from windtunnel.sim.deployment.memory import InfeasibleDeployment
    from windtunnel.sim.deployment.model import UnsupportedModel
    from windtunnel.sim.deployment.refusal import RefusedByVllm
    from windtunnel.sim.simulate import RequestTooLarge
    from windtunnel.sweeping.sensitivity import Sensitivity, sensitivity
    from windtunnel.sweeping.sweep import Sweep, sweep
    from windtunnel.validation import Validation, validate

__version__ = "0.1.0"

__all__ = [
    "Comparison",
    "InfeasibleDeployment",
    "MaxRate",
    "MemoryInputUnreadable",
    "MemoryReport",
    "MemorySweep",
    "Optimum",
    "OutputError",
    "Plan",
    "RefusedByVllm",
    "RequestTooLarge",
    "Run",
    "RunUnreadable",
    "ScenarioError",
    "ScenarioUnreadable",
    "Sensitivity",
    "Sweep",
    "TraceError",
    "UnsupportedModel",
    "Validation",
    "compare",
    "load_run",
    "max_rate",
    "memory_plan",
    "memory_sweep",
    "optimize",
    "plan",
    "profiles",
    "sensitivity",
    "simulate",
    "sweep",
    "validate",
]

_HOMES = {
    "Comparison": "windtunnel.comparison",
    "InfeasibleDeployment": "windtunnel.sim.deployment.memory",
    "MaxRate": "windtunnel.capacity.max_rate",
    "MemoryInputUnreadable": "windtunnel.memory_inputs",
    "MemoryReport": "windtunnel.memory",
    "MemorySweep": "windtunnel.memory",
    "Optimum": "windtunnel.optimizing.optimize",
    "OutputError": "windtunnel.rundir",
    "Plan": "windtunnel.planning.plan",
    "RefusedByVllm": "windtunnel.sim.deployment.refusal",
    "RequestTooLarge": "windtunnel.sim.simulate",
    "Run": "windtunnel.api",
    "RunUnreadable": "windtunnel.rundir",
    "ScenarioError": "windtunnel.scenarios.errors",
    "ScenarioUnreadable": "windtunnel.scenarios.errors",
    "Sensitivity": "windtunnel.sweeping.sensitivity",
    "Sweep": "windtunnel.sweeping.sweep",
    "TraceError": "windtunnel.scenarios.workloads.errors",
    "UnsupportedModel": "windtunnel.sim.deployment.model",
    "Validation": "windtunnel.validation",
    "compare": "windtunnel.comparison",
    "load_run": "windtunnel.api",
    "max_rate": "windtunnel.capacity.max_rate",
    "memory_plan": "windtunnel.memory",
    "memory_sweep": "windtunnel.memory",
    "optimize": "windtunnel.optimizing.optimize",
    "plan": "windtunnel.planning.plan",
    "profiles": "windtunnel.api",
    "sensitivity": "windtunnel.sweeping.sensitivity",
    "simulate": "windtunnel.api",
    "sweep": "windtunnel.sweeping.sweep",
    "validate": "windtunnel.validation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'windtunnel' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
