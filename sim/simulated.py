"""The simulated executor: it prices a step and touches nothing else."""

from __future__ import annotations

from windtunnel.sim.cost.swap import SwapCost
from windtunnel.sim.engine.plan import StepPlan, StepResult
from windtunnel.sim.engine.protocols import CostModel
from windtunnel.sim.noise import StepNoise
from windtunnel.sim.speculation import Drafting

NS_PER_S = 1_000_000_000


class SimExecutor:
    """Says how long a step would take, by a cost model; no step is shorter than 1 ns, so time always moves."""

    def __init__(self, cost: CostModel, swap: SwapCost | None = None, drafting: Drafting | None = None) -> None:
        """``swap`` prices the copies of schedulers that swap, ``drafting`` says how the drafts of speculative decoding
        fare; the others need none."""
        self.cost = cost
        self.swap = swap
        self.drafting = drafting

    def execute(self, plan: StepPlan) -> StepResult:
        """The step's duration in whole nanoseconds.

        Raises ValueError for a step that swaps blocks or verifies drafts when it was not said what comes of that.
        """
        step_s = self.cost.step_time_s(plan.shape)
        num_swapped = plan.num_swapped_in_blocks + plan.num_swapped_out_blocks
        if num_swapped:
            step_s += self._swap_time_s(num_swapped)
        drafting = self.drafting
        if drafting is None:
            if plan.num_drafts:
                raise ValueError("a step verifies drafts, but how they fare was not said: give a drafting")
            return StepResult(max(1, round(step_s * NS_PER_S)))
        if drafting.cost is not None:
            step_s += drafting.cost.time_s(plan.shape)
        return StepResult(max(1, round(step_s * NS_PER_S)), drafting.outcome(plan))

    def _swap_time_s(self, num_blocks: int) -> float:
        if self.swap is None:
            raise ValueError(
                f"a step swaps {num_blocks} KV blocks, but what that costs was not said: "
                "run with executor=SimExecutor(cost, SwapCost(block_bytes, bytes_per_s))"
            )
        return self.swap.copy_time_s(num_blocks)


class NoisySimExecutor(SimExecutor):
    """The same with steps that scatter by ``noise``; the times of swapping and drafting, added to them, do not."""

    def __init__(
        self, cost: CostModel, noise: StepNoise, swap: SwapCost | None = None, drafting: Drafting | None = None
    ) -> None:
        """``noise`` is that of the same cost model."""
        super().__init__(cost, swap, drafting)
        self.noise = noise

    def execute(self, plan: StepPlan) -> StepResult:
        """As ``SimExecutor.execute``, longer or shorter by what the step's number drew."""
        result = super().execute(plan)
        extra_ns = round(self.noise.extra_s(plan.shape, plan.number) * NS_PER_S)
        return result._replace(step_ns=max(1, result.step_ns + extra_ns))
