"""The simulated executor: it prices a step and touches nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from windtunnel.sim.cost.fitted import FittedCost
from windtunnel.sim.cost.swap import SwapCost
from windtunnel.sim.engine.plan import StepPlan, StepResult, StepShape
from windtunnel.sim.engine.protocols import CostModel
from windtunnel.sim.noise import StepNoise
from windtunnel.sim.records import IntArray, StepTable
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
            step_ns = round(step_s * NS_PER_S)
            return tuple.__new__(StepResult, (step_ns if step_ns > 1 else 1, None, None, 0))
        if drafting.cost is not None:
            step_s += drafting.cost.time_s(plan.shape)
        return StepResult(max(1, round(step_s * NS_PER_S)), drafting.outcome(plan))

    def decode_times_ns(self, steps: StepTable, rows: IntArray) -> IntArray:
        """What these steps would take without their prompt chunks, in whole nanoseconds; noise left out."""
        decodes, nothing = steps.num_decode_seqs[rows], np.zeros(len(rows), np.int64)
        columns: Any = (decodes, steps.decode_context_tokens[rows], nothing, nothing, nothing, nothing, decodes)
        shape = StepShape(*columns)
        cost = self.cost
        if isinstance(cost, FittedCost) and cost.refuse_outside:
            cost = FittedCost(cost.parameters, cost.evidence)  # such a step was never run, so none is to be refused
        step_s = np.asarray(cost.step_time_s(shape), np.float64)
        num_swapped = steps.num_swapped_in_blocks[rows] + steps.num_swapped_out_blocks[rows]
        if self.swap is not None:
            step_s = step_s + num_swapped * self.swap.copy_time_s(1)
        times_ns: IntArray = np.rint(np.minimum(step_s * NS_PER_S, 2.0**62)).astype(np.int64)
        return times_ns

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


def with_decode_times(steps: StepTable, executor: object, latency_ns: IntArray | None = None) -> StepTable:
    """The same steps with their ``decode_only_ns``, priced by the simulated executor that ran them.

    What a step's chunks add is what it would have been shorter without them; copies of swapped blocks are not theirs.
    ``latency_ns`` is how long each step took through the stages of a pipeline, of which its own part of the time (the
    steps of a pipeline overlap) is divided alike.  Steps of speculative decoding, whose verifying requests are priced
    as chunks, and of other executors stay unpriced.
    """
    if not isinstance(executor, SimExecutor) or executor.drafting is not None:
        return steps
    lasted_ns = steps.end_ns - steps.start_ns
    decode_ns = np.where(steps.num_decode_seqs > 0, lasted_ns, 0)
    mixed = np.flatnonzero((steps.num_decode_seqs > 0) & (steps.num_prefill_seqs > 0))
    if len(mixed):
        alone_ns = executor.decode_times_ns(steps, mixed)
        if latency_ns is not None:
            alone_ns = np.rint(lasted_ns[mixed] * (alone_ns / latency_ns[mixed].clip(min=1))).astype(np.int64)
        decode_ns[mixed] = np.minimum(alone_ns, lasted_ns[mixed])
    return replace(steps, decode_only_ns=decode_ns)
