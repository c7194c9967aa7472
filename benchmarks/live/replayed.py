"""A live run's step times and arrivals fed back into the simulator: what remains are the decisions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from windtunnel.calibrate.live_runs import LiveRun
from windtunnel.sim.cost.constant import ConstantCost
from windtunnel.sim.engine.per_request import make_scheduler
from windtunnel.sim.engine.plan import StepPlan, StepResult, StepShape
from windtunnel.sim.engine.protocols import SchedulerProtocol
from windtunnel.sim.replay import RecordedStep, ReplayDiverged, ReplayExecutor
from windtunnel.sim.simulate import run as simulate


class Decisions(NamedTuple):
    """Our scheduler's decisions beside those of the live run."""

    run: str
    num_steps: int
    num_preemptions: int
    num_same: int
    """Steps that give the same requests the same tokens in the same order."""
    first_difference: str | None
    """The first step that does not; None if all are the same."""


def replay(run: LiveRun) -> Decisions:
    """Each request comes when the engine queued it, each step lasts as it did; every step is compared."""
    scheduler = make_scheduler(run.config)
    beside = _Beside(run, scheduler)
    begin_ns = np.rint(run.begin_s * 1e9).astype(np.int64)
    seen_by = np.minimum(np.searchsorted(run.begin_s, run.engine_arrival_s), len(begin_ns) - 1)
    load = run.workload_at(begin_ns[seen_by] / 1e9)  # the decision that saw it, so that idle pauses end alike
    over: str | None = None
    try:
        records = simulate(load, run.config, ConstantCost(1.0), executor=beside, scheduler=scheduler)
    except ReplayDiverged as error:
        return Decisions(run.path.name, beside.num_steps, -1, beside.num_same, beside.first_difference or str(error))
    if beside.num_left:
        over = f"ours is done after {beside.num_steps} steps, {beside.num_left} fewer than recorded"
    num_preemptions = len(records.replicas[0].preemptions)
    told = beside.first_difference or over
    return Decisions(run.path.name, beside.num_steps, num_preemptions, beside.num_same, told)


class _Beside:
    """Replays the recorded steps, and looks at who is in each of ours."""

    def __init__(self, run: LiveRun, scheduler: SchedulerProtocol) -> None:
        self._scheduled = scheduler.scheduled_tokens  # type: ignore[attr-defined]
        self._recorded = run.num_scheduled_tokens
        self._replay = ReplayExecutor(_recorded_steps(run), lenient=True)
        self.num_same = 0
        self.first_difference: str | None = None

    @property
    def num_steps(self) -> int:
        return self._replay.num_replayed

    @property
    def num_left(self) -> int:
        return self._replay.num_left

    def execute(self, plan: StepPlan) -> StepResult:
        number, diverged = self._replay.num_replayed, self._replay.num_diverged
        result = self._replay.execute(plan)
        decided = tuple((int(request.request_id), tokens) for request, tokens in self._scheduled(plan).items())
        if decided != self._recorded[number]:
            self._differs(f"step {number}: (request, tokens) {decided}, recorded were {self._recorded[number]}")
        elif self._replay.num_diverged > diverged:
            self._differs(self._replay.first_divergence or f"step {number}")
        else:
            self.num_same += 1
        return result

    def _differs(self, told: str) -> None:
        self.first_difference = self.first_difference or told


def _recorded_steps(run: LiveRun) -> list[RecordedStep]:
    """From each decision to the next one, or to the step's own end if the engine then ran empty."""
    begin_ns, over_ns = (np.rint(times_s * 1e9).astype(np.int64) for times_s in (run.begin_s, run.over_s))
    step_ns = np.minimum(over_ns, np.append(begin_ns[1:], over_ns[-1])) - begin_ns
    columns = [run.steps.columns[name].tolist() for name in StepShape._fields]
    shapes = [StepShape(*row) for row in zip(*columns, strict=True)]
    return [RecordedStep(shape, ns) for shape, ns in zip(shapes, step_ns.tolist(), strict=True)]
