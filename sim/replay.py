"""Recorded step durations fed back into a simulation, in order: what remains is the scheduler, with no noise at all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from windtunnel.sim.engine.plan import StepPlan, StepResult, StepShape


class RecordedStep(NamedTuple):
    """A step that was run: what it held and how long it took."""

    shape: StepShape
    step_ns: int


class ReplayDiverged(ValueError):
    """The simulation decided another step than the one that was recorded."""


class ReplayExecutor:
    """An ``Executor`` whose steps last as long as those of a recording, the first as the first, and so on.

    The same workload, scheduler config and recording give the records of the recorded run, each token's time to the
    nanosecond.  A plan of another shape than the recorded one ends the run; with ``lenient=True`` it is counted, and
    lasts as long as the recorded step all the same.  It serves one run, since it remembers where it is.

    Raises ValueError for a recorded duration below 1 ns, with which time would not move.
    """

    def __init__(self, steps: Iterable[RecordedStep], *, lenient: bool = False) -> None:
        self._steps = tuple(steps)
        self._lenient = lenient
        self.num_replayed = 0
        self.num_diverged = 0
        """Steps so far whose shape was another than the recorded one."""
        self.first_divergence: str | None = None
        """The first of them in words: its number and both shapes."""
        for number, step in enumerate(self._steps):
            if step.step_ns < 1:
                raise ValueError(f"step {number} of the recording took {step.step_ns} ns: it must be at least 1 ns")

    @property
    def num_left(self) -> int:
        """Recorded steps that have not been asked for; 0 at the end of a run that did all that was recorded."""
        return len(self._steps) - self.num_replayed

    def execute(self, plan: StepPlan) -> StepResult:
        """The duration of the next recorded step.

        Raises ReplayDiverged if the plan is another than the recorded one (unless lenient) or the recording is over.
        """
        number = self.num_replayed
        if number == len(self._steps):
            raise ReplayDiverged(
                f"the recording ends after {number} steps, but the run goes on with {plan.shape}: replay it with the "
                "workload, the scheduler config and the horizon that it was recorded with"
            )
        recorded = self._steps[number]
        if plan.shape != recorded.shape:
            self._diverge(number, plan.shape, recorded.shape)
        self.num_replayed += 1
        return StepResult(recorded.step_ns)

    def _diverge(self, number: int, decided: StepShape, recorded: StepShape) -> None:
        told = f"step {number} is {decided}, the recorded one was {recorded}"
        if not self._lenient:
            raise ReplayDiverged(
                f"{told}: replay it with the workload and the scheduler config that it was recorded with, or let it "
                "pass with lenient=True"
            )
        self.num_diverged += 1
        if self.first_divergence is None:
            self.first_divergence = told
