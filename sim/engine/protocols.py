"""The two things that can be swapped: what prices a step and what runs it."""

from __future__ import annotations

from typing import Any, Protocol

from windtunnel.sim.engine.plan import StepPlan, StepResult, StepShape


class CostModel(Protocol):
    """Seconds for a step of a given shape.

    ``name`` says which model it is and ``calibrated`` whether it was fitted to measurements; every output that
    shows its results shows both.
    """

    name: str
    calibrated: bool

    def step_time_s(self, shape: StepShape) -> Any:
        """Seconds for one step (a float), or for each of many when the shape holds arrays (a float64 array).

        Monotone: more tokens, sequences or context never cost less.  Scalars and arrays give the same values.
        """

    def describe(self) -> dict[str, Any]:
        """Parameters, units, sources and stated error, as plain data for reports and ``profile.json``."""


class Executor(Protocol):
    """Runs a step, for real or not, and says how long it took."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the plan once."""
