"""Recorded step durations, fed back: the run comes out the same to the last nanosecond."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.sim.cost.constant import ConstantCost
from windtunnel.sim.engine.config import SchedulerConfig
from windtunnel.sim.engine.plan import StepPlan, StepResult
from windtunnel.sim.records import Records, table_columns
from windtunnel.sim.replay import RecordedStep, ReplayDiverged, ReplayExecutor
from windtunnel.sim.simulate import run
from windtunnel.sim.workload import Workload, workload

COST = ConstantCost(1.0)
SMALL_POOL = SchedulerConfig(
    max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, block_size=4, num_gpu_blocks=17
)


class Erratic:
    """Steps of random length, recorded."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.steps: list[RecordedStep] = []

    def execute(self, plan: StepPlan) -> StepResult:
        step_ns = int(self._rng.integers(1, 1_000_000_000))
        self.steps.append(RecordedStep(plan.shape, step_ns))
        return StepResult(step_ns)


def requests(prompts: Sequence[int], outputs: Sequence[int], gap_ns: int = 200_000_000) -> Workload:
    return workload(gap_ns * np.arange(len(prompts)), prompts, outputs)


def assert_equal(first: Records, second: Records) -> None:
    tables = [(first.requests, second.requests)]
    for one, other in zip(first.replicas, second.replicas, strict=True):
        tables += [(one.steps, other.steps), (one.spans, other.spans), (one.preemptions, other.preemptions)]
    for one, other in tables:
        for name, column in table_columns(one).items():
            assert column.tobytes() == table_columns(other)[name].tobytes(), name
    assert (first.end_ns, first.stalled) == (second.end_ns, second.stalled)


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=12),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_a_replayed_run_is_the_recorded_one(lengths: list[tuple[int, int]], seed: int, caching: bool) -> None:
    load = requests(*zip(*lengths, strict=True))
    config = replace(SMALL_POOL, enable_prefix_caching=caching)
    recording = Erratic(seed)
    recorded = run(load, config, COST, executor=recording)
    replay = ReplayExecutor(recording.steps)
    assert_equal(recorded, run(load, config, COST, executor=replay))
    assert (replay.num_replayed, replay.num_left, replay.num_diverged) == (len(recording.steps), 0, 0)


def test_a_replay_of_preemptions_preempts_alike() -> None:
    recording, load = Erratic(1), requests([20] * 6, [20] * 6)
    recorded = run(load, SMALL_POOL, COST, executor=recording)
    assert recorded.requests.num_preemptions.sum() > 0
    assert_equal(recorded, run(load, SMALL_POOL, COST, executor=ReplayExecutor(recording.steps)))


def test_another_workload_is_refused_at_the_first_step_that_differs() -> None:
    recording = Erratic(2)
    run(requests([8, 8, 8], [4, 4, 4]), SMALL_POOL, COST, executor=recording)
    replay = ReplayExecutor(recording.steps)
    with pytest.raises(ReplayDiverged) as raised:
        run(requests([8, 9, 8], [4, 4, 4]), SMALL_POOL, COST, executor=replay)
    number = replay.num_replayed
    assert str(raised.value).startswith(f"step {number} is StepShape(")
    assert f"the recorded one was {recording.steps[number].shape}" in str(raised.value)
    assert "prefill_tokens=17" in str(raised.value)


def test_a_lenient_replay_counts_the_steps_that_differ() -> None:
    recording = Erratic(3)
    run(requests([8], [4]), SMALL_POOL, COST, executor=recording)
    replay = ReplayExecutor(recording.steps, lenient=True)
    records = run(requests([9], [4]), SMALL_POOL, COST, executor=replay)
    assert replay.num_diverged == 4
    assert replay.first_divergence is not None
    assert replay.first_divergence.startswith("step 0 is ")
    assert records.end_ns == sum(step.step_ns for step in recording.steps)


def test_a_run_that_outlasts_its_recording_says_where() -> None:
    recording = Erratic(4)
    run(requests([8], [4]), SMALL_POOL, COST, executor=recording)
    with pytest.raises(ReplayDiverged, match="the recording ends after 4 steps"):
        run(requests([8], [5]), SMALL_POOL, COST, executor=ReplayExecutor(recording.steps))


def test_a_recorded_step_without_duration_is_refused() -> None:
    recording = Erratic(5)
    run(requests([8], [2]), SMALL_POOL, COST, executor=recording)
    steps = [recording.steps[0], recording.steps[1]._replace(step_ns=0)]
    with pytest.raises(ValueError, match="step 1 of the recording took 0 ns"):
        ReplayExecutor(steps)
