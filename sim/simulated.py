"""The simulated executor: it prices a step and touches nothing else."""

from __future__ import annotations

from windtunnel.sim.engine.plan import StepPlan, StepResult
from windtunnel.sim.engine.protocols import CostModel

NS_PER_S = 1_000_000_000


class SimExecutor:
    """Says how long a step would take, by a cost model; no step is shorter than 1 ns, so time always moves."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost

    def execute(self, plan: StepPlan) -> StepResult:
        """The step's duration in whole nanoseconds."""
        return StepResult(max(1, round(self.cost.step_time_s(plan.shape) * NS_PER_S)))
