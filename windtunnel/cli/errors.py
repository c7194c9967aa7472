"""Exit codes, and which of our exceptions each one stands for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_INTERNAL = 1
EXIT_USAGE = 2
EXIT_UNREADABLE = 3
EXIT_INFEASIBLE = 4
EXIT_SLO_BREACHED = 99
EXIT_INTERRUPTED = 130

_CODES = {
    ("windtunnel.scenarios.errors", "ScenarioUnreadable"): EXIT_UNREADABLE,
    ("windtunnel.scenarios.errors", "ScenarioError"): EXIT_USAGE,
    ("windtunnel.scenarios.workloads.errors", "TraceError"): EXIT_UNREADABLE,
    ("windtunnel.sim.cost.profile", "ProfileError"): EXIT_UNREADABLE,
    ("windtunnel.sim.cost.fitted", "OutsideDomain"): EXIT_USAGE,
    ("windtunnel.calibrate.step_tables", "StepTableError"): EXIT_UNREADABLE,
    ("windtunnel.calibrate.measurements", "MeasurementError"): EXIT_USAGE,
    ("windtunnel.sim.decisions", "CaseError"): EXIT_UNREADABLE,
    ("windtunnel.sim.engine.snapshot_json", "SnapshotError"): EXIT_UNREADABLE,
    ("windtunnel.sim.simulate", "RequestTooLarge"): EXIT_INFEASIBLE,
    ("windtunnel.sim.simulate", "TimeRunsOut"): EXIT_USAGE,
    ("windtunnel.sim.deployment.memory", "InfeasibleDeployment"): EXIT_INFEASIBLE,
    ("windtunnel.sim.deployment.model", "UnsupportedModel"): EXIT_USAGE,
    ("windtunnel.sim.deployment.refusal", "RefusedByVllm"): EXIT_INFEASIBLE,
    ("windtunnel.executor.model_files", "ModelFileError"): EXIT_UNREADABLE,
    ("windtunnel.memory_inputs", "MemoryInputUnreadable"): EXIT_UNREADABLE,
    ("windtunnel.rundir", "OutputError"): EXIT_USAGE,
    ("windtunnel.workers.errors", "WorkerDied"): EXIT_USAGE,
    ("windtunnel.workers.errors", "StoreError"): EXIT_USAGE,
    ("windtunnel.workers.errors", "BadRayAddress"): EXIT_USAGE,
    ("windtunnel.workers.errors", "RayMissing"): EXIT_USAGE,
    ("windtunnel.workers.errors", "RayUnreachable"): EXIT_UNREADABLE,
    ("windtunnel.optimizing.errors", "OptunaMissing"): EXIT_USAGE,
    ("windtunnel.validation_inputs", "ValidationInputUnreadable"): EXIT_UNREADABLE,
    ("windtunnel.validation_inputs", "ValidationError"): EXIT_USAGE,
    ("windtunnel.calibrate.live.client", "ServerUnreachable"): EXIT_UNREADABLE,
    ("windtunnel.calibrate.live.reading", "UnreadableResult"): EXIT_UNREADABLE,
    ("windtunnel.rundir", "RunUnreadable"): EXIT_UNREADABLE,
    ("windtunnel.ui.server", "AddressUnavailable"): EXIT_USAGE,
}


def exit_code(error: Exception) -> int:
    """The exit code of an exception; 1, a bug of ours, for everything that is no expected complaint.

    Only modules that are already loaded are asked: an exception cannot come from one that is not.
    """
    for (module, name), code in _CODES.items():
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(error, kind):
            return code
    return EXIT_INTERNAL


@contextmanager
def usage_errors() -> Iterator[None]:
    """Whatever ValueError has no exit code of its own is a complaint about what was asked for."""
    import typer

    try:
        yield
    except ValueError as error:
        raise error if exit_code(error) != EXIT_INTERNAL else typer.BadParameter(str(error)) from None
